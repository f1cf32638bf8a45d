//! `/v1/messages`: Anthropic's interface.

use super::answer::{Choice, Events, Protocol, Usage};
use super::api::{Head, call_id, calls};
use super::chat::{Conversation, ToolChoice, set_effort, streamed, think};
use super::error::ApiError;
use super::fields::{self, Fields, wrong};
use super::known;
use super::messages::tool_name;
use super::request::{Context, Job, Tokens, check_model, longest_answer, stop, top_k};
use super::shape;
use crate::engine::GenerationRequest;
use crate::generation::{Ending, Part};
use crate::sampler::SamplingParams;
use crate::text::{CallDelta, Calls, Reading};
use serde_json::{Map, Value, json};

/// Reads a body of `/v1/messages`.
pub(super) fn read(body: &[u8], context: &Context<'_>) -> Result<Job, ApiError> {
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    let conversation = conversation(&fields, context)?;
    if let Some(turns) = fields.array("messages")?
        && turns.last().is_some_and(|turn| turn["role"] == "assistant")
    {
        let message = "the last message must be the user's: an answer that the client began is not continued";
        return Err(ApiError::unsupported(format!("messages[{}].role", turns.len() - 1), message));
    }
    let Some(max_tokens) = fields.integer("max_tokens", 1..=i64::MAX)? else {
        return Err(ApiError::field("max_tokens", "missing: expected a whole number from 1 on"));
    };
    let defaults = context.dialect.defaults();
    let top_p = fields.number("top_p", 0.0..=1.0)?;
    if top_p == Some(0.0) {
        return Err(ApiError::field("top_p", "expected a number above 0, at most 1, found 0"));
    }
    let temperature = fields.number("temperature", 0.0..=1.0)?;
    let sampling = SamplingParams {
        temperature: temperature.map_or(defaults.sampling.temperature, |number| number as f32),
        top_p: top_p.map_or(defaults.sampling.top_p, |number| number as f32),
        top_k: top_k(&fields, defaults.sampling.top_k)?,
        ..defaults.sampling.clone()
    };
    let stops = stop(&fields, "stop_sequences")?;
    let delivery = streamed(&fields)?;
    let prompts = vec![conversation.prompt(context)?];
    let most = longest_answer(&prompts, "messages", Some(("max_tokens", max_tokens)), 0, context)?;
    let opening = context.dialect.opening(&prompts[0]);
    let generation = GenerationRequest {
        sampling,
        stop_token_ids: defaults.eos_token_ids.clone(),
        ..GenerationRequest::new(Vec::new(), most)
    };
    let reading = Reading { stop: stops, opening, tools: None };
    let mut job = Job { prompts, n: 1, generation, reading, delivery, tokens: Tokens::AsText };
    job.bound_thinking(budget(&fields)?, context)?;
    let format = match fields.fields("output_config")? {
        Some(config) => config.fields("format")?,
        None => None,
    };
    match format.as_ref().map(shape::response_format).transpose()?.flatten() {
        Some(_) if matches!(conversation.choice, ToolChoice::Required | ToolChoice::Named(_)) => {
            return Err(ApiError::field("tool_choice", "not together with output_config.format: give one"));
        }
        Some(shape) => job.constrain_to("output_config.format", &shape, context)?,
        None => conversation.offer_tools(&mut job, context)?,
    }
    Ok(job)
}

/// Reads a body of `/v1/messages/count_tokens`: the number of tokens that a request would have.
pub(super) fn count(body: &[u8], context: &Context<'_>) -> Result<usize, ApiError> {
    let map = fields::object(body)?;
    Ok(conversation(&Fields::new(&map), context)?.prompt(context)?.len())
}

/// Most tokens of thinking.
fn budget(fields: &Fields<'_>) -> Result<Option<(&'static str, usize)>, ApiError> {
    let Some(thinking) = fields.fields("thinking")? else { return Ok(None) };
    let budget = thinking.integer("budget_tokens", 0..=i64::MAX)?;
    Ok(budget
        .and_then(|budget| usize::try_from(budget).ok())
        .map(|budget| ("thinking.budget_tokens", budget)))
}

fn conversation(fields: &Fields<'_>, context: &Context<'_>) -> Result<Conversation, ApiError> {
    check_model(fields, context)?;
    known::MESSAGES.check(fields)?;
    fields.fields("metadata")?;
    let mut messages = Vec::new();
    if fields.value("system").is_some() {
        let text = text_of(fields, "system")?;
        messages.push(json!({"role": "system", "content": text}));
    }
    let turns = match fields.array("messages")? {
        Some(turns) if !turns.is_empty() => turns,
        _ => return Err(ApiError::field("messages", "expected a list with at least one message")),
    };
    for (at, turn) in turns.iter().enumerate() {
        read_turn(&Fields::at(&format!("messages[{at}]"), turn)?, &mut messages)?;
    }
    let mut tools = Vec::new();
    for (at, tool) in fields.array("tools")?.unwrap_or_default().iter().enumerate() {
        tools.push(read_tool(&Fields::at(&format!("tools[{at}]"), tool)?)?);
    }
    let (choice, calls) = tool_choice(fields)?;
    let mut variables = Map::new();
    if let Some(thinking) = fields.fields("thinking")? {
        budget(fields)?;
        match thinking.string("type")? {
            Some("enabled" | "adaptive") => set_effort(&mut variables, "high"),
            Some("disabled") => set_effort(&mut variables, "none"),
            _ => return Err(ApiError::field("thinking.type", "expected \"enabled\" or \"disabled\"")),
        }
    }
    if let Some(config) = fields.fields("output_config")?
        && fields.value("thinking").is_none_or(|thinking| thinking["type"] != "disabled")
    {
        think(&mut variables, &config, "effort")?;
    }
    Ok(Conversation { messages, tools, choice, calls, variables, field: "messages" })
}

/// One message becomes one or more: results of tools are messages of their own in templates.
fn read_turn(turn: &Fields<'_>, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = match turn.string("role")? {
        Some(role @ ("user" | "assistant")) => role,
        _ => return Err(ApiError::field(turn.path("role"), "expected \"user\" or \"assistant\"")),
    };
    let blocks = match turn.value("content") {
        Some(Value::String(text)) => {
            messages.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        Some(other) => return Err(wrong(&turn.path("content"), "a string or a list of blocks", other)),
        None => {
            return Err(ApiError::field(
                turn.path("content"),
                "missing: expected a string or a list of blocks",
            ));
        }
    };
    let mut text = String::new();
    let mut reasoning = String::new();
    let mut calls = Vec::new();
    for (at, block) in blocks.iter().enumerate() {
        let block = Fields::at(&format!("{}[{at}]", turn.path("content")), block)?;
        match (role, block.string("type")?) {
            (_, Some("text")) => text.push_str(required(&block, "text")?),
            ("assistant", Some("thinking")) => reasoning.push_str(required(&block, "thinking")?),
            ("assistant", Some("redacted_thinking")) => (),
            ("assistant", Some("tool_use")) => {
                let input = match block.value("input") {
                    Some(Value::Object(input)) => input.clone(),
                    None => Map::new(),
                    Some(other) => return Err(wrong(&block.path("input"), "an object", other)),
                };
                calls.push(json!({
                    "id": required(&block, "id")?, "type": "function",
                    "function": {"name": required(&block, "name")?, "arguments": input},
                }));
            }
            ("user", Some("tool_result")) => {
                // What the user says comes after the results, whatever the order of the blocks.
                let id = required(&block, "tool_use_id")?;
                let content = if block.value("content").is_some() {
                    text_of(&block, "content")?
                } else {
                    String::new()
                };
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
            (_, Some(other)) => {
                let message =
                    format!("{other:?} is not supported in a message of the {role}: this model reads text");
                return Err(ApiError::unsupported(block.path("type"), message));
            }
            (_, None) => return Err(ApiError::field(block.path("type"), "missing: expected a string")),
        }
    }
    let only_results =
        role == "user" && text.is_empty() && blocks.iter().any(|block| block["type"] == "tool_result");
    if only_results {
        return Ok(());
    }
    let mut message = json!({"role": role, "content": text});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

fn required<'a>(fields: &Fields<'a>, name: &str) -> Result<&'a str, ApiError> {
    fields.string(name)?.ok_or_else(|| ApiError::field(fields.path(name), "missing: expected a string"))
}

/// A text, or text blocks joined.
fn text_of(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    match fields.value(name) {
        Some(Value::Array(blocks)) => {
            let each = blocks.iter().enumerate().map(|(at, block)| {
                let block = Fields::at(&format!("{}[{at}]", fields.path(name)), block)?;
                match block.string("type")? {
                    Some("text") => Ok(required(&block, "text")?),
                    _ => Err(ApiError::unsupported(block.path("type"), "only \"text\" is supported")),
                }
            });
            each.collect()
        }
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(wrong(&fields.path(name), "a string or a list of text blocks", other)),
        None => Ok(String::new()),
    }
}

/// A tool in OpenAI's form.
fn read_tool(tool: &Fields<'_>) -> Result<Value, ApiError> {
    if let Some(kind) = tool.string("type")?
        && kind != "custom"
    {
        let message = format!("{kind:?} is not supported: only tools of the client are");
        return Err(ApiError::unsupported(tool.path("type"), message));
    }
    let name = tool_name(tool)?;
    let mut function = json!({"name": name});
    if let Some(description) = tool.string("description")? {
        function["description"] = description.into();
    }
    let Some(schema) = tool.fields("input_schema")? else {
        return Err(ApiError::field(tool.path("input_schema"), "missing: expected a JSON schema"));
    };
    function["parameters"] = schema.map().clone().into();
    Ok(json!({"type": "function", "function": function}))
}

fn tool_choice(fields: &Fields<'_>) -> Result<(ToolChoice, Calls), ApiError> {
    let Some(choice) = fields.fields("tool_choice")? else {
        return Ok((ToolChoice::Auto, Calls::Any));
    };
    let calls = match choice.boolean("disable_parallel_tool_use")? {
        Some(true) => Calls::One,
        _ => Calls::Any,
    };
    let choice = match choice.string("type")? {
        Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => ToolChoice::Named(required(&choice, "name")?.to_owned()),
        _ => {
            let expected = "expected \"auto\", \"any\", \"tool\" or \"none\"";
            return Err(ApiError::field(choice.path("type"), expected));
        }
    };
    Ok((choice, calls))
}

/// Answers of `/v1/messages`.
pub(super) struct Messages {
    head: Head,
    stop: Vec<String>,
    prompt: usize,
    /// The content block that is open, and its number.
    open: Option<Block>,
    blocks: usize,
    ending: Option<Ending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    ToolUse,
}

impl Messages {
    pub(super) fn new(head: Head, job: &Job) -> Self {
        Self {
            head,
            stop: job.reading.stop.clone(),
            prompt: job.prompts[0].len(),
            open: None,
            blocks: 0,
            ending: None,
        }
    }

    fn message(&self, content: &[Value], ending: Option<Ending>, usage: Usage) -> Value {
        let (reason, sequence) = self.reason(ending);
        json!({
            "id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model, "content": content,
            "stop_reason": reason, "stop_sequence": sequence, "usage": usage_json(usage),
        })
    }

    fn reason(&self, ending: Option<Ending>) -> (Value, Value) {
        match ending {
            None => (Value::Null, Value::Null),
            Some(Ending::Stop) => ("end_turn".into(), Value::Null),
            Some(Ending::StopString(which)) => ("stop_sequence".into(), self.stop[which].as_str().into()),
            Some(Ending::ToolCalls) => ("tool_use".into(), Value::Null),
            Some(Ending::Length) => ("max_tokens".into(), Value::Null),
        }
    }

    fn open(&mut self, block: Block, content: &Value, out: &mut Events) {
        self.close(out);
        let event = json!({"type": "content_block_start", "index": self.blocks, "content_block": content});
        out.named("content_block_start", &event);
        self.open = Some(block);
    }

    fn close(&mut self, out: &mut Events) {
        match self.open.take() {
            None => return,
            // Clients hold thinking without a signature for broken off.
            Some(Block::Thinking) => self.delta(&json!({"type": "signature_delta", "signature": ""}), out),
            Some(Block::Text | Block::ToolUse) => (),
        }
        out.named("content_block_stop", &json!({"type": "content_block_stop", "index": self.blocks}));
        self.blocks += 1;
    }

    fn delta(&self, delta: &Value, out: &mut Events) {
        let event = json!({"type": "content_block_delta", "index": self.blocks, "delta": delta});
        out.named("content_block_delta", &event);
    }
}

impl Protocol for Messages {
    fn whole(&mut self, mut choices: Vec<Choice>, usage: Usage) -> Value {
        let choice = choices.swap_remove(0);
        let piece = choice.part.piece;
        let mut content = Vec::new();
        if !piece.reasoning.is_empty() {
            content.push(json!({"type": "thinking", "thinking": piece.reasoning, "signature": ""}));
        }
        if !piece.content.is_empty() {
            content.push(json!({"type": "text", "text": piece.content}));
        }
        for call in calls(piece.calls) {
            // What was cut off may be no JSON.
            let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
            content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}));
        }
        self.message(&content, Some(choice.ending), usage)
    }

    fn begin(&mut self, out: &mut Events) {
        let usage = Usage { prompt: self.prompt, ..Usage::default() };
        let message = self.message(&[], None, usage);
        out.named("message_start", &json!({"type": "message_start", "message": message}));
    }

    fn part(&mut self, _: usize, part: Part, out: &mut Events) {
        let piece = part.piece;
        if !piece.reasoning.is_empty() {
            if self.open != Some(Block::Thinking) {
                self.open(
                    Block::Thinking,
                    &json!({"type": "thinking", "thinking": "", "signature": ""}),
                    out,
                );
            }
            self.delta(&json!({"type": "thinking_delta", "thinking": piece.reasoning}), out);
        }
        if !piece.content.is_empty() {
            if self.open != Some(Block::Text) {
                self.open(Block::Text, &json!({"type": "text", "text": ""}), out);
            }
            self.delta(&json!({"type": "text_delta", "text": piece.content}), out);
        }
        for call in piece.calls {
            match call {
                CallDelta::Begin { id, name, .. } => {
                    let id = call_id(id);
                    let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.open(Block::ToolUse, &block, out);
                }
                CallDelta::Arguments { json, .. } => {
                    self.delta(&json!({"type": "input_json_delta", "partial_json": json}), out);
                }
            }
        }
    }

    fn end(&mut self, _: usize, ending: Ending, out: &mut Events) {
        self.close(out);
        self.ending = Some(ending);
    }

    fn finish(&mut self, usage: Usage, out: &mut Events) {
        let (reason, sequence) = self.reason(self.ending);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        out.named(
            "message_delta",
            &json!({"type": "message_delta", "delta": delta, "usage": usage_json(usage)}),
        );
        out.named("message_stop", &json!({"type": "message_stop"}));
    }

    fn error(&mut self, error: &ApiError, out: &mut Events) {
        out.named("error", &error.anthropic_json());
    }
}

/// Anthropic counts what came from a cache apart.
fn usage_json(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    })
}
