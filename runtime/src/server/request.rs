//! What a client asks for, read from its fields and from the checkpoint's defaults.

use super::error::ApiError;
use super::fields::{self, Fields, wrong};
use super::messages;
use crate::dialect::{Dialect, GenerationDefaults};
use crate::engine::{GenerationRequest, Refusal};
use crate::sampler::SamplingParams;
use crate::template::{ChatInput, RenderError};
use crate::text::Opening;
use crate::tokenizer::EncodeError;
use serde_json::Value;

/// Most stop strings of a request.
const MAX_STOPS: usize = 64;
/// Longest stop string, in bytes.
const MAX_STOP_BYTES: usize = 4096;
/// Most stop token ids of a request.
const MAX_STOP_TOKEN_IDS: usize = 1024;

/// A request that is ready to run.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// What the engine is given. `max_tokens` is 0 where nothing is to be generated.
    pub(super) generation: GenerationRequest,
    /// The answer ends before the first of these.
    pub(super) stop: Vec<String>,
    /// How the answer begins.
    pub(super) opening: Opening,
    /// How it is sent.
    pub(super) delivery: Delivery,
}

/// How an answer is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// In one piece.
    Whole,
    /// As it comes.
    Stream,
    /// As it comes, and the usage at the end.
    StreamWithUsage,
}

/// What requests are held against.
pub(super) struct Limits<'a> {
    pub(super) model: &'a str,
    pub(super) max_model_len: usize,
}

/// Reads a body of `/v1/chat/completions`.
pub(super) fn chat(body: &[u8], dialect: &Dialect, limits: &Limits<'_>) -> Result<Job, ApiError> {
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    let common = Common::read(&fields, dialect.defaults(), limits.model)?;
    let max_tokens = match fields.integer("max_completion_tokens", 1..=i64::MAX)? {
        Some(max_tokens) => Some(("max_completion_tokens", max_tokens)),
        None => fields.integer("max_tokens", 1..=i64::MAX)?.map(|max_tokens| ("max_tokens", max_tokens)),
    };
    let input = chat_input(&fields)?;
    let prompt = dialect
        .render(&input, limits.max_model_len)
        .ok_or_else(|| ApiError::bad_request("this model has no chat template: use /v1/completions"))?
        .map_err(|error| match error {
            RenderError::Encode(error) => encode_error("messages", &error, limits),
            error => ApiError::field("messages", error),
        })?;
    let opening = dialect.opening(&prompt);
    let room = limits.max_model_len.saturating_sub(prompt.len());
    common.job(prompt, opening, "messages", max_tokens, room, limits)
}

/// Reads a body of `/v1/completions`.
pub(super) fn completion(body: &[u8], dialect: &Dialect, limits: &Limits<'_>) -> Result<Job, ApiError> {
    /// OpenAI's, and so vLLM's.
    const DEFAULT_MAX_TOKENS: usize = 16;
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    let common = Common::read(&fields, dialect.defaults(), limits.model)?;
    let max_tokens = fields.integer("max_tokens", 0..=i64::MAX)?.map(|max_tokens| ("max_tokens", max_tokens));
    let prompt = match fields.value("prompt") {
        Some(prompt) => prompt_tokens(prompt, dialect, limits)?,
        None => return Err(ApiError::field("prompt", "missing: expected a string or a list of token ids")),
    };
    common.job(prompt, Opening::Plain, "prompt", max_tokens, DEFAULT_MAX_TOKENS, limits)
}

/// The fields that both kinds of requests have.
struct Common {
    sampling: SamplingParams,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    delivery: Delivery,
}

impl Common {
    fn read(fields: &Fields<'_>, defaults: &GenerationDefaults, model: &str) -> Result<Self, ApiError> {
        match fields.string("model")? {
            Some(asked) if asked != model => return Err(ApiError::unknown_model(asked, model)),
            _ => (),
        }
        fields::refuse_unsupported(fields)?;
        fields.string("user")?;
        let mut stop_token_ids = match fields.boolean("ignore_eos")? {
            Some(true) => Vec::new(),
            _ => defaults.eos_token_ids.clone(),
        };
        if let Some(ids) = fields.array("stop_token_ids")? {
            stop_token_ids.extend(token_ids("stop_token_ids", ids)?);
            if ids.len() > MAX_STOP_TOKEN_IDS {
                return Err(ApiError::field("stop_token_ids", format!("more than {MAX_STOP_TOKEN_IDS} ids")));
            }
        }
        Ok(Self {
            sampling: sampling(fields, &defaults.sampling)?,
            stop: stop(fields)?,
            stop_token_ids,
            delivery: delivery(fields)?,
        })
    }

    /// `max_tokens` is what the client set and the name it used; `default` holds otherwise.
    fn job(
        self,
        prompt: Vec<u32>,
        opening: Opening,
        prompt_field: &str,
        max_tokens: Option<(&str, i64)>,
        default: usize,
        limits: &Limits<'_>,
    ) -> Result<Job, ApiError> {
        if prompt.is_empty() {
            return Err(ApiError::refused(&Refusal::EmptyPrompt, prompt_field));
        }
        let max_model_len = limits.max_model_len;
        let Some(room) = max_model_len.checked_sub(prompt.len()) else {
            let refusal = Refusal::ContextLength { prompt: prompt.len(), max_model_len };
            return Err(ApiError::refused(&refusal, prompt_field));
        };
        let max_tokens = match max_tokens {
            None => default.min(room).max(1),
            Some((name, asked)) => {
                let asked = usize::try_from(asked).expect("checked not to be negative");
                if asked > room && room > 0 {
                    return Err(ApiError::context_length(
                        name,
                        format!(
                            "the prompt has {} tokens and the context {max_model_len}: at most {room} are left for the answer, found {asked}",
                            prompt.len(),
                        ),
                    ));
                }
                asked
            }
        };
        let generation = GenerationRequest {
            sampling: self.sampling,
            stop_token_ids: self.stop_token_ids,
            ..GenerationRequest::new(prompt, max_tokens)
        };
        Ok(Job { generation, stop: self.stop, opening, delivery: self.delivery })
    }
}

fn sampling(fields: &Fields<'_>, defaults: &SamplingParams) -> Result<SamplingParams, ApiError> {
    let unit = 0.0..=1.0;
    let top_p = fields.number("top_p", unit.clone())?;
    if top_p == Some(0.0) {
        return Err(ApiError::field("top_p", "expected a number above 0, at most 1, found 0"));
    }
    let seed = fields.read("seed", "a whole number of 64 bits", |value| {
        value.as_i64().map(i64::cast_unsigned).or_else(|| value.as_u64())
    })?;
    Ok(SamplingParams {
        temperature: fields
            .number("temperature", 0.0..=2.0)?
            .map_or(defaults.temperature, |number| number as f32),
        top_p: top_p.map_or(defaults.top_p, |number| number as f32),
        // 0 and -1 are how clients say "off".
        top_k: match fields.integer("top_k", -1..=i64::MAX)? {
            Some(top_k) => usize::try_from(top_k).ok().filter(|&top_k| top_k > 0),
            None => defaults.top_k,
        },
        min_p: fields.number("min_p", unit)?.map_or(defaults.min_p, |number| number as f32),
        seed,
        ..defaults.clone()
    })
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let stops: Vec<&str> = match fields.value("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops
            .iter()
            .map(|stop| stop.as_str().ok_or_else(|| wrong("stop", "a string or a list of strings", stop)))
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong("stop", "a string or a list of strings", other)),
    };
    if stops.iter().any(|stop| stop.is_empty()) {
        return Err(ApiError::field("stop", "an empty string would stop every answer before it begins"));
    }
    if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        let limit = format!("expected at most {MAX_STOPS} strings of at most {MAX_STOP_BYTES} bytes");
        return Err(ApiError::field("stop", limit));
    }
    Ok(stops.into_iter().map(str::to_owned).collect())
}

fn delivery(fields: &Fields<'_>) -> Result<Delivery, ApiError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(options) = fields.fields("stream_options")? else {
        return Ok(if stream { Delivery::Stream } else { Delivery::Whole });
    };
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    match (stream, include_usage) {
        (false, _) => Err(ApiError::field("stream_options", "only with stream set to true")),
        (true, false) => Ok(Delivery::Stream),
        (true, true) => Ok(Delivery::StreamWithUsage),
    }
}

fn chat_input(fields: &Fields<'_>) -> Result<ChatInput, ApiError> {
    let messages = match fields.array("messages")? {
        Some(messages) if !messages.is_empty() => messages::read(messages)?,
        _ => return Err(ApiError::field("messages", "expected a list with at least one message")),
    };
    let tools = match fields.array("tools")? {
        Some(tools) => messages::read_tools(tools)?,
        None => Vec::new(),
    };
    let tools = match fields.value("tool_choice") {
        None => tools,
        Some(choice) if choice == "auto" => tools,
        // What the prompt does not offer cannot be called.
        Some(choice) if choice == "none" => Vec::new(),
        Some(_) => {
            return Err(ApiError::unsupported("tool_choice", "only \"auto\" and \"none\" are supported"));
        }
    };
    let mut variables = serde_json::Map::new();
    if let Some(effort) = fields.string("reasoning_effort")? {
        variables.insert("reasoning_effort".into(), effort.into());
        variables.insert("enable_thinking".into(), (effort != "none").into());
    }
    if let Some(own) = fields.fields("chat_template_kwargs")? {
        own.boolean("enable_thinking")?;
        for (name, value) in own.map() {
            if matches!(name.as_str(), "messages" | "tools" | "documents" | "add_generation_prompt") {
                return Err(ApiError::field(own.path(name), "set by the request itself: leave it out"));
            }
            variables.insert(name.clone(), value.clone());
        }
    }
    Ok(ChatInput { messages, tools, add_generation_prompt: true, variables })
}

/// The ids of a prompt: a text, a list of ids, or a list with one of either.
fn prompt_tokens(prompt: &Value, dialect: &Dialect, limits: &Limits<'_>) -> Result<Vec<u32>, ApiError> {
    const EXPECTED: &str = "a string or a list of token ids";
    match prompt {
        Value::String(text) => dialect
            .tokenizer()
            .encode_prompt(text, limits.max_model_len)
            .map_err(|error| encode_error("prompt", &error, limits)),
        Value::Array(items) => match items.as_slice() {
            [one @ (Value::String(_) | Value::Array(_))] => prompt_tokens(one, dialect, limits),
            [Value::String(_) | Value::Array(_), ..] => Err(ApiError::unsupported(
                "prompt",
                "several prompts in one request are not supported: send one at a time",
            )),
            ids => token_ids("prompt", ids),
        },
        other => Err(wrong("prompt", EXPECTED, other)),
    }
}

fn token_ids(name: &str, ids: &[Value]) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|id| {
            id.as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| wrong(name, "a list of token ids", id))
        })
        .collect()
}

fn encode_error(field: &str, error: &EncodeError, limits: &Limits<'_>) -> ApiError {
    match error {
        EncodeError::TooLong { .. } => {
            let message = format!("{error} and the context has {}: shorten it", limits.max_model_len);
            ApiError::context_length(field, message)
        }
        error => ApiError::field(field, error),
    }
}
