//! `/v1/chat/completions`: from a body to a job. The other conversations are read into the same [`Conversation`].

use super::error::ApiError;
use super::fields::{self, Fields};
use super::known;
use super::messages;
use super::request::{Common, Context, Delivery, Job, MAX_LOGPROBS, encode_error, longest_answer};
use super::tool_grammar;
use crate::template::{ChatInput, RenderError};
use crate::text::{Calls, Tools};
use serde_json::{Map, Value};
use std::sync::Arc;

/// What a client and the model have said, and what the model may do.
pub(super) struct Conversation {
    /// In the form that templates take.
    pub(super) messages: Vec<Value>,
    /// In OpenAI's form.
    pub(super) tools: Vec<Value>,
    pub(super) choice: ToolChoice,
    pub(super) calls: Calls,
    /// Variables of the template.
    pub(super) variables: Map<String, Value>,
    /// The field that messages come from.
    pub(super) field: &'static str,
}

/// Whether tools are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ToolChoice {
    /// The model decides.
    Auto,
    /// Not at all.
    None,
    /// At least one of them.
    Required,
    /// This one.
    Named(String),
}

impl Conversation {
    /// The prompt's ids.
    pub(super) fn prompt(&self, context: &Context<'_>) -> Result<Vec<u32>, ApiError> {
        let tools = match self.choice {
            // What the prompt does not offer cannot be called.
            ToolChoice::None => Vec::new(),
            _ => self.tools.clone(),
        };
        let input = ChatInput {
            messages: self.messages.clone(),
            tools,
            add_generation_prompt: true,
            variables: self.variables.clone(),
        };
        context
            .dialect
            .render(&input, context.max_model_len)
            .ok_or_else(|| ApiError::bad_request("this model has no chat template: use /v1/completions"))?
            .map_err(|error| match error {
                RenderError::Encode(error) => encode_error(self.field, &error, context),
                error => ApiError::field(self.field, error),
            })
    }

    /// Lets a job read tool calls, and hold the answer to them where they must come.
    pub(super) fn offer_tools(&self, job: &mut Job, context: &Context<'_>) -> Result<(), ApiError> {
        let must = matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_));
        if self.tools.is_empty() || self.choice == ToolChoice::None {
            return match must {
                true => Err(ApiError::field("tool_choice", "there are no tools to choose from")),
                false => Ok(()),
            };
        }
        let Some(format) = context.dialect.tool_format() else {
            return match must {
                true => {
                    Err(ApiError::unsupported("tool_choice", "this model's template teaches no tool calls"))
                }
                false => Ok(()),
            };
        };
        if must {
            let named = match &self.choice {
                ToolChoice::Named(name) => Some(name.as_str()),
                _ => None,
            };
            let offered: Vec<&Value> = self
                .tools
                .iter()
                .filter(|tool| named.is_none_or(|name| tool["function"]["name"] == name))
                .collect();
            if offered.is_empty() {
                let name = named.unwrap_or_default();
                return Err(ApiError::field("tool_choice", format!("{name:?} is none of the tools")));
            }
            let one = named.is_some() || self.calls == Calls::One;
            let shape = tool_grammar::shape(format, &offered, one, context.dialect.tokenizer())
                .map_err(|error| ApiError::unsupported("tool_choice", error))?;
            job.constrain_to("tool_choice", &shape, context).map_err(|error| ApiError {
                message: tool_grammar::with_names(&error.message, &shape, &offered),
                ..error
            })?;
        }
        job.reading.tools = Some(Arc::new(Tools::new(format.clone(), &self.tools, self.calls)));
        Ok(())
    }
}

/// Reads a body of `/v1/chat/completions`.
pub(super) fn read(body: &[u8], context: &Context<'_>) -> Result<Job, ApiError> {
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    let common = Common::read(&fields, context)?;
    known::CHAT.check(&fields)?;
    let max_tokens = match fields.integer("max_completion_tokens", 1..=i64::MAX)? {
        Some(max_tokens) => Some(("max_completion_tokens", max_tokens)),
        None => fields.integer("max_tokens", 1..=i64::MAX)?.map(|max_tokens| ("max_tokens", max_tokens)),
    };
    // -1 is how vLLM's clients say "as many as it likes".
    let budget = fields
        .integer("thinking_token_budget", -1..=i64::MAX)?
        .and_then(|budget| usize::try_from(budget).ok())
        .map(|budget| ("thinking_token_budget", budget));
    let logprobs = logprobs(&fields)?;
    let conversation = conversation(&fields)?;
    let prompts = vec![conversation.prompt(context)?];
    let most = longest_answer(&prompts, "messages", max_tokens, usize::MAX, context)?;
    let opening = context.dialect.opening(&prompts[0]);
    let mut job = common.job(prompts, most, opening);
    job.generation.logprobs = logprobs;
    job.bound_thinking(budget, context)?;
    job.constrain(&fields, context)?;
    if job.generation.constraint.is_some() {
        // Content that must be JSON is no call.
        if matches!(conversation.choice, ToolChoice::Required | ToolChoice::Named(_)) {
            return Err(ApiError::field("tool_choice", "not together with response_format: give one"));
        }
        return Ok(job);
    }
    conversation.offer_tools(&mut job, context)?;
    Ok(job)
}

/// `logprobs` and `top_logprobs`.
fn logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MAX_LOGPROBS)?.unwrap_or(0);
    match (logprobs, top) {
        (false, 1..) => Err(ApiError::field("top_logprobs", "only with logprobs set to true")),
        (false, _) => Ok(None),
        (true, top) => Ok(Some(usize::try_from(top).expect("checked not to be negative"))),
    }
}

pub(super) fn conversation(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let messages = match fields.array("messages")? {
        Some(messages) if !messages.is_empty() => messages::read(messages)?,
        _ => return Err(ApiError::field("messages", "expected a list with at least one message")),
    };
    let tools = match fields.array("tools")? {
        Some(tools) => messages::read_tools(tools)?,
        None => Vec::new(),
    };
    let mut variables = Map::new();
    think(&mut variables, fields, "reasoning_effort")?;
    if let Some(own) = fields.fields("chat_template_kwargs")? {
        own.boolean("enable_thinking")?;
        for (name, value) in own.map() {
            if matches!(name.as_str(), "messages" | "tools" | "documents" | "add_generation_prompt") {
                return Err(ApiError::field(own.path(name), "set by the request itself: leave it out"));
            }
            variables.insert(name.clone(), value.clone());
        }
    }
    let calls = match fields.boolean("parallel_tool_calls")? {
        Some(false) => Calls::One,
        _ => Calls::Any,
    };
    Ok(Conversation { messages, tools, choice: tool_choice(fields)?, calls, variables, field: "messages" })
}

/// How much a model may be asked to think.
pub(super) const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// What a template is told of how much to think, where a field says it.
pub(super) fn think(
    variables: &mut Map<String, Value>,
    fields: &Fields<'_>,
    name: &str,
) -> Result<(), ApiError> {
    match fields.string(name)? {
        None => Ok(()),
        Some(effort) if EFFORTS.contains(&effort) => {
            set_effort(variables, effort);
            Ok(())
        }
        Some(other) => {
            let expected = EFFORTS.map(|effort| format!("{effort:?}")).join(", ");
            Err(ApiError::field(fields.path(name), format!("expected one of {expected}, found {other:?}")))
        }
    }
}

/// `none` is not at all.
pub(super) fn set_effort(variables: &mut Map<String, Value>, effort: &str) {
    variables.insert("reasoning_effort".into(), effort.into());
    variables.insert("enable_thinking".into(), (effort != "none").into());
    // DeepSeek's name for it.
    variables.insert("thinking".into(), (effort != "none").into());
}

/// OpenAI's `tool_choice`: a word, or an object that names a function.
pub(super) fn tool_choice(fields: &Fields<'_>) -> Result<ToolChoice, ApiError> {
    const EXPECTED: &str =
        "expected \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ..}}";
    match fields.value("tool_choice") {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(ApiError::field("tool_choice", EXPECTED)),
        },
        Some(Value::Object(choice)) => {
            // Responses name it without the inner object.
            let name =
                choice.get("function").map_or_else(|| choice.get("name"), |function| function.get("name"));
            match (choice.get("type").and_then(Value::as_str), name.and_then(Value::as_str)) {
                (Some("function"), Some(name)) => Ok(ToolChoice::Named(name.to_owned())),
                _ => Err(ApiError::field("tool_choice", EXPECTED)),
            }
        }
        Some(_) => Err(ApiError::field("tool_choice", EXPECTED)),
    }
}

/// Whether an answer goes out as it comes.
pub(super) fn streamed(fields: &Fields<'_>) -> Result<Delivery, ApiError> {
    Ok(match fields.boolean("stream")? {
        Some(true) => Delivery::StreamWithUsage,
        _ => Delivery::Whole,
    })
}
