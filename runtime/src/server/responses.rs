//! `/v1/responses`: OpenAI's newer interface, without memory: every request carries its whole conversation.

use super::answer::{Choice, Events, Protocol, Usage};
use super::api::{Head, call_id, calls, fresh_id};
use super::chat::{Conversation, ToolChoice, streamed, think, tool_choice};
use super::error::ApiError;
use super::fields::{self, Fields, wrong};
use super::known;
use super::messages;
use super::request::{Context, Job, Tokens, cache_salt, check_model, longest_answer};
use super::shape;
use crate::engine::GenerationRequest;
use crate::generation::{Ending, Part};
use crate::sampler::SamplingParams;
use crate::text::{CallDelta, Calls, Reading};
use axum::http::StatusCode;
use serde_json::{Map, Value, json};

/// Reads a body of `/v1/responses`.
pub(super) fn read(body: &[u8], context: &Context<'_>) -> Result<(Job, Map<String, Value>), ApiError> {
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    check_model(&fields, context)?;
    for name in ["previous_response_id", "conversation", "prompt"] {
        if fields.value(name).is_some() {
            let message = "this server keeps nothing between requests: send the whole conversation as input";
            return Err(ApiError::unsupported(name, message));
        }
    }
    known::RESPONSES.check(&fields)?;
    fields.boolean("store")?;
    fields.fields("metadata")?;
    let conversation = conversation(&fields)?;
    let defaults = context.dialect.defaults();
    let top_p = fields.number("top_p", 0.0..=1.0)?;
    if top_p == Some(0.0) {
        return Err(ApiError::field("top_p", "expected a number above 0, at most 1, found 0"));
    }
    let temperature = fields.number("temperature", 0.0..=2.0)?;
    let sampling = SamplingParams {
        temperature: temperature.map_or(defaults.sampling.temperature, |number| number as f32),
        top_p: top_p.map_or(defaults.sampling.top_p, |number| number as f32),
        ..defaults.sampling.clone()
    };
    let most = fields.integer("max_output_tokens", 1..=i64::MAX)?.map(|most| ("max_output_tokens", most));
    let delivery = streamed(&fields)?;
    let prompts = vec![conversation.prompt(context)?];
    let most = longest_answer(&prompts, "input", most, usize::MAX, context)?;
    let opening = context.dialect.opening(&prompts[0]);
    let generation = GenerationRequest {
        sampling,
        stop_token_ids: defaults.eos_token_ids.clone(),
        cache_salt: cache_salt(&fields)?,
        ..GenerationRequest::new(Vec::new(), most)
    };
    let reading = Reading { stop: Vec::new(), opening, tools: None };
    let mut job = Job { prompts, n: 1, generation, reading, delivery, tokens: Tokens::AsText };
    let format = match fields.fields("text")? {
        Some(text) => text.fields("format")?,
        None => None,
    };
    let shape = match &format {
        Some(format) => shape::response_format(format)?,
        None => None,
    };
    match shape {
        Some(_) if matches!(conversation.choice, ToolChoice::Required | ToolChoice::Named(_)) => {
            return Err(ApiError::field("tool_choice", "not together with text.format: give one"));
        }
        Some(shape) => job.constrain_to("text.format", &shape, context)?,
        None => conversation.offer_tools(&mut job, context)?,
    }
    let mut echo = Map::new();
    for name in
        ["instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "metadata"]
    {
        echo.insert(name.to_owned(), map.get(name).cloned().unwrap_or(Value::Null));
    }
    let given = |name: &str, default: Value| {
        map.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(default)
    };
    echo.insert("tools".into(), given("tools", json!([])));
    echo.insert("tool_choice".into(), given("tool_choice", json!("auto")));
    echo.insert("parallel_tool_calls".into(), given("parallel_tool_calls", json!(true)));
    echo.insert("text".into(), given("text", json!({"format": {"type": "text"}})));
    Ok((job, echo))
}

fn conversation(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let mut all = Vec::new();
    if let Some(instructions) = fields.string("instructions")? {
        all.push(json!({"role": "system", "content": instructions}));
    }
    match fields.value("input") {
        Some(Value::String(text)) => all.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            let mut reasoning = String::new();
            for (at, item) in items.iter().enumerate() {
                read_item(&Fields::at(&format!("input[{at}]"), item)?, &mut all, &mut reasoning)?;
            }
        }
        Some(other) => return Err(wrong("input", "a string or a list of items that is not empty", other)),
        None => return Err(ApiError::field("input", "missing: expected a string or a list of items")),
    }
    let mut tools = Vec::new();
    for (at, tool) in fields.array("tools")?.unwrap_or_default().iter().enumerate() {
        tools.push(read_tool(&Fields::at(&format!("tools[{at}]"), tool)?)?);
    }
    let mut variables = Map::new();
    if let Some(reasoning) = fields.fields("reasoning")? {
        think(&mut variables, &reasoning, "effort")?;
    }
    let calls = match fields.boolean("parallel_tool_calls")? {
        Some(false) => Calls::One,
        _ => Calls::Any,
    };
    let choice = tool_choice(fields)?;
    Ok(Conversation { messages: all, tools, choice, calls, variables, field: "input" })
}

/// One item becomes a message or a part of one. `reasoning` is what was thought for the assistant's next message or call.
fn read_item(item: &Fields<'_>, all: &mut Vec<Value>, reasoning: &mut String) -> Result<(), ApiError> {
    let required = |name: &str| {
        item.string(name)?.ok_or_else(|| ApiError::field(item.path(name), "missing: expected a string"))
    };
    match item.string("type")? {
        None | Some("message") => {
            let mut message = messages::read_message_of(item)?;
            let thought = std::mem::take(reasoning);
            if message["role"] == "assistant" {
                think_of(&mut message, &thought);
            }
            all.push(message);
        }
        Some("reasoning") => {
            for (at, part) in item.array("content")?.unwrap_or_default().iter().enumerate() {
                let part = Fields::at(&format!("{}[{at}]", item.path("content")), part)?;
                reasoning.push_str(part.string("text")?.unwrap_or_default());
            }
        }
        Some("function_call") => {
            let call = json!({
                "id": required("call_id")?, "type": "function",
                "function": {"name": required("name")?, "arguments": messages::arguments(item)?},
            });
            // Several calls in a row are one turn of the assistant.
            match all.last_mut() {
                Some(last) if last["role"] == "assistant" => match last["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                },
                _ => all.push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
            }
            if let Some(turn) = all.last_mut() {
                think_of(turn, &std::mem::take(reasoning));
            }
        }
        Some("function_call_output") => {
            let output = messages::text(item, "output")?;
            all.push(json!({"role": "tool", "tool_call_id": required("call_id")?, "content": output}));
        }
        Some(other) => {
            let message = format!("{other:?} is not supported: this model reads text and calls functions");
            return Err(ApiError::unsupported(item.path("type"), message));
        }
    }
    Ok(())
}

/// Puts what the assistant thought into its turn, where templates look for it.
fn think_of(turn: &mut Value, thought: &str) {
    if !thought.is_empty() {
        let before = turn["reasoning_content"].as_str().unwrap_or_default();
        turn["reasoning_content"] = (before.to_owned() + thought).into();
    }
}

/// A tool in the form of chat completions.
fn read_tool(tool: &Fields<'_>) -> Result<Value, ApiError> {
    match tool.string("type")? {
        Some("function") => (),
        Some(other) => {
            let message = format!("{other:?} is not supported: only functions are");
            return Err(ApiError::unsupported(tool.path("type"), message));
        }
        None => return Err(ApiError::field(tool.path("type"), "missing: expected \"function\"")),
    }
    let name = messages::tool_name(tool)?;
    let mut function = json!({"name": name});
    if let Some(description) = tool.string("description")? {
        function["description"] = description.into();
    }
    if let Some(parameters) = tool.fields("parameters")? {
        function["parameters"] = parameters.map().clone().into();
    }
    Ok(json!({"type": "function", "function": function}))
}

/// Answers of `/v1/responses`.
pub(super) struct Responses {
    head: Head,
    /// What the answer repeats of the request.
    echo: Map<String, Value>,
    items: Vec<Value>,
    open: Option<Open>,
    sequence: usize,
    ending: Option<Ending>,
}

/// The item that is being written.
struct Open {
    kind: Kind,
    id: String,
    /// Text, or a call's arguments.
    text: String,
    /// Of a call: its id and its name.
    call: (String, String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call,
}

impl Open {
    fn item(&self, status: &str) -> Value {
        let begun = status == "in_progress";
        match self.kind {
            Kind::Reasoning => {
                let content =
                    if begun { json!([]) } else { json!([{"type": "reasoning_text", "text": self.text}]) };
                json!({"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status})
            }
            Kind::Message => {
                let content = if begun { json!([]) } else { json!([output_text(&self.text)]) };
                json!({"type": "message", "id": self.id, "role": "assistant", "status": status, "content": content})
            }
            Kind::Call => json!({
                "type": "function_call", "id": self.id, "call_id": self.call.0, "name": self.call.1,
                "arguments": self.text, "status": status,
            }),
        }
    }
}

fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

impl Responses {
    pub(super) fn new(head: Head, echo: Map<String, Value>) -> Self {
        Self { head, echo, items: Vec::new(), open: None, sequence: 0, ending: None }
    }

    fn response(&self, status: &str, output: &[Value], usage: Option<Usage>) -> Value {
        let mut response = json!({
            "id": self.head.id, "object": "response", "created_at": self.head.created, "status": status,
            "error": null, "incomplete_details": null, "model": self.head.model, "output": output,
            "previous_response_id": null, "store": false, "usage": usage.map(usage_json),
        });
        if status == "incomplete" {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        for (name, value) in &self.echo {
            response[name] = value.clone();
        }
        response
    }

    fn send(&mut self, kind: &str, mut event: Value, out: &mut Events) {
        event["type"] = kind.into();
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.named(kind, &event);
    }

    /// Makes sure that an item of this kind is open.
    fn open(&mut self, kind: Kind, call: (String, String), out: &mut Events) {
        let is_open = self.open.as_ref().is_some_and(|open| open.kind == kind && kind != Kind::Call);
        if is_open {
            return;
        }
        self.close("completed", out);
        let prefix = match kind {
            Kind::Reasoning => "rs_",
            Kind::Message => "msg_",
            Kind::Call => "fc_",
        };
        let open = Open { kind, id: fresh_id(prefix), text: String::new(), call };
        let (index, item, id) = (self.items.len(), open.item("in_progress"), open.id.clone());
        self.send("response.output_item.added", json!({"output_index": index, "item": item}), out);
        if kind == Kind::Message {
            let part =
                json!({"item_id": id, "output_index": index, "content_index": 0, "part": output_text("")});
            self.send("response.content_part.added", part, out);
        }
        self.open = Some(open);
    }

    fn append(&mut self, text: &str, out: &mut Events) {
        let index = self.items.len();
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let (kind, id) = (open.kind, open.id.clone());
        let event = json!({"item_id": id, "output_index": index, "content_index": 0, "delta": text});
        match kind {
            Kind::Reasoning => self.send("response.reasoning_text.delta", event, out),
            Kind::Message => {
                let mut event = event;
                event["logprobs"] = json!([]);
                self.send("response.output_text.delta", event, out);
            }
            Kind::Call => {
                let event = json!({"item_id": id, "output_index": index, "delta": text});
                self.send("response.function_call_arguments.delta", event, out);
            }
        }
    }

    fn close(&mut self, status: &str, out: &mut Events) {
        let Some(open) = self.open.take() else { return };
        let index = self.items.len();
        let base = json!({"item_id": open.id, "output_index": index});
        let with = |extra: Value| {
            let mut event = base.clone();
            for (name, value) in extra.as_object().into_iter().flatten() {
                event[name] = value.clone();
            }
            event
        };
        match open.kind {
            Kind::Reasoning => {
                let done = with(json!({"content_index": 0, "text": open.text}));
                self.send("response.reasoning_text.done", done, out);
            }
            Kind::Message => {
                let done = with(json!({"content_index": 0, "text": open.text, "logprobs": []}));
                self.send("response.output_text.done", done, out);
                let done = with(json!({"content_index": 0, "part": output_text(&open.text)}));
                self.send("response.content_part.done", done, out);
            }
            Kind::Call => {
                let done = with(json!({"name": open.call.1, "arguments": open.text}));
                self.send("response.function_call_arguments.done", done, out);
            }
        }
        let item = open.item(status);
        self.send("response.output_item.done", json!({"output_index": index, "item": item}), out);
        self.items.push(item);
    }

    fn status(ending: Option<Ending>) -> &'static str {
        if ending == Some(Ending::Length) { "incomplete" } else { "completed" }
    }
}

impl Protocol for Responses {
    fn whole(&mut self, mut choices: Vec<Choice>, usage: Usage) -> Value {
        let choice = choices.swap_remove(0);
        let piece = choice.part.piece;
        let item = |kind, prefix: &str, text: String, call| {
            Open { kind, id: fresh_id(prefix), text, call }.item("completed")
        };
        let mut output = Vec::new();
        if !piece.reasoning.is_empty() {
            output.push(item(Kind::Reasoning, "rs_", piece.reasoning, Default::default()));
        }
        if !piece.content.is_empty() {
            output.push(item(Kind::Message, "msg_", piece.content, Default::default()));
        }
        for call in calls(piece.calls) {
            output.push(item(Kind::Call, "fc_", call.arguments, (call.id, call.name)));
        }
        let status = Self::status(Some(choice.ending));
        if let Some(last) = output.last_mut() {
            last["status"] = status.into();
        }
        self.response(status, &output, Some(usage))
    }

    fn begin(&mut self, out: &mut Events) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", &[], None);
            self.send(kind, json!({"response": response}), out);
        }
    }

    fn part(&mut self, _: usize, part: Part, out: &mut Events) {
        let piece = part.piece;
        for (kind, text) in [(Kind::Reasoning, piece.reasoning), (Kind::Message, piece.content)] {
            if !text.is_empty() {
                self.open(kind, Default::default(), out);
                self.append(&text, out);
            }
        }
        for call in piece.calls {
            match call {
                CallDelta::Begin { id, name, .. } => {
                    let id = call_id(id);
                    self.open(Kind::Call, (id, name), out);
                }
                CallDelta::Arguments { json, .. } => self.append(&json, out),
            }
        }
    }

    fn end(&mut self, _: usize, ending: Ending, out: &mut Events) {
        // What was cut off is the last item.
        self.close(Self::status(Some(ending)), out);
        self.ending = Some(ending);
    }

    fn finish(&mut self, usage: Usage, out: &mut Events) {
        let status = Self::status(self.ending);
        let response = self.response(status, &self.items, Some(usage));
        self.send(&format!("response.{status}"), json!({"response": response}), out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Events) {
        let mut response = self.response("failed", &self.items, None);
        let code = if error.status == StatusCode::BAD_REQUEST { "invalid_prompt" } else { "server_error" };
        response["error"] = json!({"code": code, "message": error.message});
        self.send("response.failed", json!({"response": response}), out);
    }
}

fn usage_json(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_thought_reaches_the_turn_that_it_was_thought_for() {
        let thought = |text: &str| json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]});
        let call =
            |id: &str| json!({"type": "function_call", "call_id": id, "name": "now", "arguments": "{}"});
        let result = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "noon"});
        let user = json!({"role": "user", "content": "x"});
        let answer = json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Noon."}]});
        let items = json!([
            user,
            thought("a"),
            call("1"),
            result("1"),
            thought("b"),
            answer,
            thought("lost"),
            user,
            answer
        ]);
        let body = Map::from_iter([("input".to_owned(), items)]);
        let messages = conversation(&Fields::new(&body)).unwrap().messages;
        let turns: Vec<(&Value, &Value)> =
            messages.iter().map(|message| (&message["role"], &message["reasoning_content"])).collect();
        let none = Value::Null;
        assert_eq!(
            turns,
            [
                (&json!("user"), &none),
                (&json!("assistant"), &json!("a")),
                (&json!("tool"), &none),
                (&json!("assistant"), &json!("b")),
                (&json!("user"), &none),
                (&json!("assistant"), &none),
            ]
        );
    }
}
