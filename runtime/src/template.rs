//! Conversations to prompts, by the checkpoint's own chat template.
//!
//! Templates are Jinja as HF transformers runs it: Python's methods, `tojson` that prints as `json.dumps` does, blocks
//! trimmed. A control token that a user typed stays text: see `template/guard.rs`.

mod bounds;
mod guard;
mod json;
mod python;

use crate::Error;
use crate::tokenizer::{EncodeError, Part, Tokenizer};
use bounds::Bounded;
use formats::template::check_size;
use guard::Guard;
use minijinja::machinery::{eval, get_compiled_template, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};
use serde_json::{Map, json};
use std::path::Path;

/// The file's name in a checkpoint, and the template's in messages.
const FILE: &str = "chat_template.jinja";
/// Instructions of one rendering: a few hundred for each message, and an end to loops that a file only means to waste time with.
const FUEL: u64 = 1_000_000;
/// Stack of a thread that compiles a template or renders it. The engine walks expressions and values by recursion, and only
/// their length and the fuel bound their depth. What is not touched costs nothing.
const STACK: usize = 512 << 20;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    environment: Environment<'static>,
    arguments: Arguments,
}

/// How a template takes the arguments of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arguments {
    /// As objects, which is what most go through key by key.
    Objects,
    /// As JSON text that it puts between its own strings, as DeepSeek's do.
    Text,
}

/// What a template renders. Strings are as the client sent them.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    /// Objects with `role` and `content`; the `arguments` of tool calls are objects, not JSON text.
    pub messages: Vec<serde_json::Value>,
    /// Function descriptions in OpenAI's form; none where empty.
    pub tools: Vec<serde_json::Value>,
    /// Whether the prompt ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// More variables, such as `enable_thinking`.
    pub variables: Map<String, serde_json::Value>,
}

/// Why a conversation has no prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RenderError {
    /// The template itself refuses it (`raise_exception`).
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template does not get along with it.
    #[error("the chat template fails on this conversation: {0}")]
    Failed(String),
    /// It is more than a template may work on.
    #[error("the conversation takes the chat template more than {FUEL} steps: shorten it")]
    TooLong,
    /// The rendered text has no token ids.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl ChatTemplate {
    /// Compiles `dir/chat_template.jinja`; `None` where a checkpoint has none, as base models do.
    ///
    /// # Errors
    /// The file cannot be read, or is no template: nothing is rendered in its place.
    pub fn open(dir: &Path) -> Result<Option<Self>, Error> {
        let path = dir.join(FILE);
        let fault = |why: String| Error::File { path: path.clone(), why };
        match std::fs::read_to_string(&path) {
            Ok(source) => Self::parse(source).map(Some).map_err(fault),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(fault(error.to_string())),
        }
    }

    /// Compiles a template; an error is one line.
    fn parse(source: String) -> Result<Self, String> {
        check_size(&source)
            .map_err(|why| format!("expected a chat template that can be taken apart, found one {why}"))?;
        on_a_deep_stack(|| Self::compile(source)).unwrap_or_else(Err)
    }

    fn compile(source: String) -> Result<Self, String> {
        if source.contains(guard::MARK) {
            return Err(format!(
                "it has the character U+{:04X}, which stands for nothing",
                guard::MARK as u32
            ));
        }
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .keep_trailing_newline(false)
            .build()
            .map_err(|error| python::one_line(&error))?;
        bounds::check_constants(&source, syntax.clone()).map_err(|error| not_a_template(&error))?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(python::method);
        environment.add_filter("tojson", json::tojson);
        bounds::add_filters(&mut environment);
        environment.add_function("raise_exception", python::raise_exception);
        environment.add_function("strftime_now", python::strftime_now);
        environment.add_template_owned(FILE, source.clone()).map_err(|error| not_a_template(&error))?;
        let template = environment.get_template(FILE).map_err(|error| not_a_template(&error))?;
        Bounded::new(get_compiled_template(&template)).map_err(|error| not_a_template(&error))?;
        let mut template = Self { source, environment, arguments: Arguments::Objects };
        template.arguments = template.probe_arguments();
        Ok(template)
    }

    /// Which form of arguments the template does not fail on.
    fn probe_arguments(&self) -> Arguments {
        let call = json!({"id": "0", "type": "function", "function": {"name": "f", "arguments": {"k": "v"}}});
        let conversation = |arguments| {
            let input = ChatInput {
                messages: vec![
                    json!({"role": "user", "content": "x"}),
                    json!({"role": "assistant", "content": "", "tool_calls": [call]}),
                    json!({"role": "tool", "tool_call_id": "0", "content": "x"}),
                ],
                ..ChatInput::default()
            };
            self.run(&input, &Guard::none(), arguments)
        };
        match (conversation(Arguments::Objects), conversation(Arguments::Text)) {
            (Err(RenderError::Failed(_)), Ok(_)) => Arguments::Text,
            _ => Arguments::Objects,
        }
    }

    /// Its text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Defines a variable for every rendering, such as `bos_token`.
    pub fn define(&mut self, name: &'static str, value: &str) {
        self.environment.add_global(name, value);
    }

    /// The prompt as text. Text alone cannot tell a typed control token from a real one: to run a model take
    /// [`Self::render_tokens`].
    ///
    /// # Errors
    /// The template refuses the conversation or fails on it.
    pub fn render(&self, input: &ChatInput) -> Result<String, RenderError> {
        self.run(input, &Guard::none(), self.arguments)
    }

    /// The prompt as token ids. Control tokens come from the template only: those in messages, tools and variables are
    /// text. A prompt of more than `most` tokens is given up as soon as that is sure.
    ///
    /// # Errors
    /// As [`Self::render`], and [`RenderError::Encode`].
    pub fn render_tokens(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        most: usize,
    ) -> Result<Vec<u32>, RenderError> {
        let added = tokenizer.added();
        let prompt = self.run(input, &Guard::of(added), self.arguments)?;
        let mut ids = Vec::new();
        for part in added.split(&prompt) {
            match part {
                Part::Control(id) => ids.push(id),
                Part::Text(text) => tokenizer.append(&guard::remove(text), most, &mut ids)?,
            }
        }
        Ok(ids)
    }

    fn run(&self, input: &ChatInput, guard: &Guard<'_>, arguments: Arguments) -> Result<String, RenderError> {
        on_a_deep_stack(|| self.run_here(input, guard, arguments))
            .unwrap_or_else(|error| Err(RenderError::Failed(error)))
    }

    fn run_here(
        &self,
        input: &ChatInput,
        guard: &Guard<'_>,
        arguments: Arguments,
    ) -> Result<String, RenderError> {
        let list =
            |items: &[serde_json::Value]| -> Value { items.iter().map(|item| guard.value(item)).collect() };
        let messages = match arguments {
            Arguments::Objects => list(&input.messages),
            Arguments::Text => list(&with_arguments_as_text(&input.messages)?),
        };
        let tools = if input.tools.is_empty() { Value::from(()) } else { list(&input.tools) };
        let variables = input.variables.iter().map(|(name, value)| (name.as_str(), guard.value(value)));
        let own = [
            ("messages", messages),
            ("tools", tools),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(input.add_generation_prompt)),
        ];
        let context = Value::from_pairs(variables.chain(own));
        self.eval(context).map_err(|error| match python::raised(&error) {
            Some(message) => RenderError::Refused(message),
            None if error.kind() == minijinja::ErrorKind::OutOfFuel => RenderError::TooLong,
            None => RenderError::Failed(python::one_line(&error)),
        })
    }

    fn eval(&self, context: Value) -> Result<String, minijinja::Error> {
        let template = self.environment.get_template(FILE)?;
        let compiled = get_compiled_template(&template);
        let Bounded { instructions, blocks } = Bounded::new(compiled)?;
        let mut out = String::new();
        let escape = compiled.initial_auto_escape.clone();
        eval(&self.environment, &instructions, context, &blocks, &mut make_string_output(&mut out), escape)?;
        Ok(out)
    }
}

fn not_a_template(error: &minijinja::Error) -> String {
    format!("not a chat template this program can run: {}", python::one_line(error))
}

fn with_arguments_as_text(messages: &[serde_json::Value]) -> Result<Vec<serde_json::Value>, RenderError> {
    let mut messages = messages.to_vec();
    for message in &mut messages {
        let calls = message.get_mut("tool_calls").and_then(serde_json::Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments") {
                let text =
                    json::dumps(arguments).map_err(|error| RenderError::Failed(python::one_line(&error)))?;
                *arguments = text.into();
            }
        }
    }
    Ok(messages)
}

/// Runs `work` where recursion has room.
fn on_a_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK);
        let running = thread
            .spawn_scoped(scope, work)
            .map_err(|error| format!("no thread for the chat template: {error}"))?;
        running.join().map_err(|_| "a fault in the template engine".to_owned())
    })
}

/// A template's own errors carry no source line beyond this kind.
fn unsupported(message: impl Into<std::borrow::Cow<'static, str>>) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, message)
}
