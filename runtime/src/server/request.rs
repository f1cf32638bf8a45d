//! What the requests of every interface come to: prompts, how tokens are drawn, how the answer is read and sent.

use super::error::ApiError;
use super::fields::{Fields, whole, wrong};
use super::known;
use super::shape;
use crate::dialect::Dialect;
use crate::engine::{GenerationRequest, Refusal};
use crate::kv_cache::BlockHash;
use crate::sampler::SamplingParams;
use crate::text::{Opening, Reading};
use crate::thinking::ThinkingBudget;
use crate::tokenizer::EncodeError;
use serde_json::Value;

/// Most stop strings of a request.
const MAX_STOPS: usize = 64;
/// Longest stop string, in bytes.
const MAX_STOP_BYTES: usize = 4096;
/// Most stop token ids of a request.
const MAX_STOP_TOKEN_IDS: usize = 1024;
/// Longest salt of the prefix cache, in bytes.
const MAX_SALT_BYTES: usize = 1024;
/// Most choices of a request, over all of its prompts.
pub(super) const MAX_CHOICES: usize = 128;
/// Most likeliest tokens whose log-probabilities are sent beside each token.
pub(super) const MAX_LOGPROBS: i64 = 20;

/// A request that is ready to run.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// One or more prompts.
    pub(super) prompts: Vec<Vec<u32>>,
    /// Answers to each.
    pub(super) n: usize,
    /// What the engine is given with each prompt. `max_tokens` is 0 where nothing is to be generated.
    pub(super) generation: GenerationRequest,
    /// How the answers are read.
    pub(super) reading: Reading,
    /// How they are sent.
    pub(super) delivery: Delivery,
    /// What is sent beside the text.
    pub(super) tokens: Tokens,
}

/// Whether the ids of prompt and answer are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tokens {
    AsText,
    AsIdsToo,
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
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) dialect: &'a Dialect,
    pub(super) model: &'a str,
    pub(super) max_model_len: usize,
}

/// The fields of vLLM's that chat and text completions have in common.
pub(super) struct Common {
    sampling: SamplingParams,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    n: usize,
    prompt_logprobs: Option<usize>,
    cache_salt: Option<BlockHash>,
    delivery: Delivery,
    tokens: Tokens,
}

impl Common {
    pub(super) fn read(fields: &Fields<'_>, context: &Context<'_>) -> Result<Self, ApiError> {
        check_model(fields, context)?;
        known::COMPLETIONS.check(fields)?;
        fields.string("user")?;
        let defaults = context.dialect.defaults();
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
        let n = fields.integer("n", 1..=MAX_CHOICES as i64)?.unwrap_or(1);
        let prompt_logprobs = fields.integer("prompt_logprobs", 0..=MAX_LOGPROBS)?;
        let delivery = delivery(fields)?;
        if prompt_logprobs.is_some() && delivery != Delivery::Whole {
            return Err(ApiError::field("prompt_logprobs", "not with stream set to true"));
        }
        Ok(Self {
            sampling: sampling(fields, context)?,
            stop: stop(fields, "stop")?,
            stop_token_ids,
            n: usize::try_from(n).expect("checked to be positive"),
            prompt_logprobs: prompt_logprobs.map(|top| usize::try_from(top).expect("checked")),
            cache_salt: cache_salt(fields)?,
            delivery,
            tokens: match fields.boolean("return_token_ids")? {
                Some(true) => Tokens::AsIdsToo,
                _ => Tokens::AsText,
            },
        })
    }

    /// A job of prompts that are checked against the context. `most` is the longest answer.
    pub(super) fn job(self, prompts: Vec<Vec<u32>>, most: usize, opening: Opening) -> Job {
        let generation = GenerationRequest {
            sampling: self.sampling,
            stop_token_ids: self.stop_token_ids,
            prompt_logprobs: self.prompt_logprobs,
            cache_salt: self.cache_salt,
            ..GenerationRequest::new(Vec::new(), most)
        };
        let reading = Reading { stop: self.stop, opening, tools: None };
        Job { prompts, n: self.n, generation, reading, delivery: self.delivery, tokens: self.tokens }
    }
}

impl Job {
    /// Bounds the reasoning of the answer, where a number of tokens is given by a field.
    pub(super) fn bound_thinking(
        &mut self,
        budget: Option<(&str, usize)>,
        context: &Context<'_>,
    ) -> Result<(), ApiError> {
        let Some((field, budget)) = budget.filter(|_| self.reading.opening != Opening::Plain) else {
            return Ok(());
        };
        let (start, end) = context.dialect.think_tokens();
        let end = end.ok_or_else(|| {
            ApiError::unsupported(field, "the end of thinking is no single token of this model")
        })?;
        self.generation.thinking = Some(ThinkingBudget::new(budget, self.reading.opening, start, end));
        Ok(())
    }

    /// Holds the answer to what it must be, which the fields say.
    pub(super) fn constrain(&mut self, fields: &Fields<'_>, context: &Context<'_>) -> Result<(), ApiError> {
        let Some((field, shape)) = shape::read(fields)? else {
            return Ok(());
        };
        self.constrain_to(&field, &shape, context)
    }

    pub(super) fn constrain_to(
        &mut self,
        field: &str,
        shape: &crate::constraint::Shape,
        context: &Context<'_>,
    ) -> Result<(), ApiError> {
        if self.generation.sampling.min_tokens > 0 {
            return Err(ApiError::field(
                "min_tokens",
                format!("not together with {field}, which says when the answer ends"),
            ));
        }
        let grammars = context.dialect.grammars().map_err(|error| ApiError::unsupported(field, error))?;
        let after = match self.reading.opening {
            Opening::InReasoning => Some(context.dialect.think_tokens().1.ok_or_else(|| {
                ApiError::unsupported(field, "not while thinking, whose end is no single token of this model")
            })?),
            Opening::Plain | Opening::MayReason => None,
        };
        if after.is_none() {
            // The grammar begins at once, so nothing else does.
            self.reading.opening = Opening::Plain;
        }
        let constraint = grammars.compile(shape, after).map_err(|error| ApiError::field(field, error))?;
        self.generation.constraint = Some(constraint.of_field(field));
        Ok(())
    }
}

/// Refuses another model than the one that is served.
pub(super) fn check_model(fields: &Fields<'_>, context: &Context<'_>) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(asked) if asked != context.model => Err(ApiError::unknown_model(asked, context.model)),
        _ => Ok(()),
    }
}

/// The longest answer to prompts of these lengths: what the client asked for, by the field's name, or `default`.
pub(super) fn longest_answer(
    prompts: &[Vec<u32>],
    prompt_field: &str,
    asked: Option<(&str, i64)>,
    default: usize,
    context: &Context<'_>,
) -> Result<usize, ApiError> {
    let max_model_len = context.max_model_len;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::refused(&Refusal::EmptyPrompt, prompt_field));
    }
    let Some(room) = max_model_len.checked_sub(longest) else {
        let refusal = Refusal::ContextLength { prompt: longest, max_model_len };
        return Err(ApiError::refused(&refusal, prompt_field));
    };
    let Some((name, asked)) = asked else {
        return Ok(default.min(room).max(1));
    };
    let asked = usize::try_from(asked).expect("checked not to be negative");
    if asked > room && room > 0 {
        return Err(ApiError::context_length(
            name,
            format!(
                "the prompt has {longest} tokens and the context {max_model_len}: at most {room} are left for the answer, found {asked}"
            ),
        ));
    }
    Ok(asked)
}

fn sampling(fields: &Fields<'_>, context: &Context<'_>) -> Result<SamplingParams, ApiError> {
    let defaults = &context.dialect.defaults().sampling;
    let float = |name, range, default: f32| -> Result<f32, ApiError> {
        Ok(fields.number(name, range)?.map_or(default, |number| number as f32))
    };
    let top_p = fields.number("top_p", 0.0..=1.0)?;
    if top_p == Some(0.0) {
        return Err(ApiError::field("top_p", "expected a number above 0, at most 1, found 0"));
    }
    let seed = fields.read("seed", "a whole number of 64 bits", |value| {
        value.as_u64().or_else(|| whole(value).map(i64::cast_unsigned))
    })?;
    let repetition_penalty = float("repetition_penalty", 0.0..=100.0, defaults.repetition_penalty)?;
    if repetition_penalty <= 0.0 {
        return Err(ApiError::field("repetition_penalty", "expected a number above 0, at most 100, found 0"));
    }
    let min_tokens = fields.integer("min_tokens", 0..=i64::from(u32::MAX))?.unwrap_or(0);
    Ok(SamplingParams {
        temperature: float("temperature", 0.0..=2.0, defaults.temperature)?,
        top_p: top_p.map_or(defaults.top_p, |number| number as f32),
        top_k: top_k(fields, defaults.top_k)?,
        min_p: float("min_p", 0.0..=1.0, defaults.min_p)?,
        seed,
        repetition_penalty,
        presence_penalty: float("presence_penalty", -2.0..=2.0, defaults.presence_penalty)?,
        frequency_penalty: float("frequency_penalty", -2.0..=2.0, defaults.frequency_penalty)?,
        logit_bias: logit_bias(fields, context)?,
        min_tokens: usize::try_from(min_tokens).expect("checked not to be negative"),
    })
}

/// 0 and -1 are how clients say "off".
pub(super) fn top_k(fields: &Fields<'_>, default: Option<usize>) -> Result<Option<usize>, ApiError> {
    Ok(match fields.integer("top_k", -1..=i64::MAX)? {
        Some(top_k) => usize::try_from(top_k).ok().filter(|&top_k| top_k > 0),
        None => default,
    })
}

fn logit_bias(fields: &Fields<'_>, context: &Context<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    const MOST: usize = 1024;
    let Some(map) = fields.fields("logit_bias")? else { return Ok(Vec::new()) };
    if map.map().len() > MOST {
        return Err(ApiError::field("logit_bias", format!("more than {MOST} entries")));
    }
    let vocab_size = context.dialect.tokenizer().vocab_size();
    let mut biases = Vec::new();
    for key in map.map().keys() {
        let id: Option<u32> = key.parse().ok().filter(|&id| (id as usize) < vocab_size);
        let Some(id) = id else {
            let message = format!("expected token ids below {vocab_size} as keys, found {key:?}");
            return Err(ApiError::field("logit_bias", message));
        };
        let bias = map.number(key, -100.0..=100.0)?;
        biases.push((id, bias.unwrap_or(0.0) as f32));
    }
    Ok(biases)
}

pub(super) fn stop(fields: &Fields<'_>, name: &str) -> Result<Vec<String>, ApiError> {
    const EXPECTED: &str = "a string or a list of strings";
    let stops: Vec<&str> = match fields.value(name) {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops
            .iter()
            .map(|stop| stop.as_str().ok_or_else(|| wrong(name, EXPECTED, stop)))
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong(name, EXPECTED, other)),
    };
    if stops.iter().any(|stop| stop.is_empty()) {
        return Err(ApiError::field(name, "an empty string would stop every answer before it begins"));
    }
    if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        let limit = format!("expected at most {MAX_STOPS} strings of at most {MAX_STOP_BYTES} bytes");
        return Err(ApiError::field(name, limit));
    }
    Ok(stops.into_iter().map(str::to_owned).collect())
}

/// What keeps a client's prompts apart from others' in the prefix cache.
pub(super) fn cache_salt(fields: &Fields<'_>) -> Result<Option<BlockHash>, ApiError> {
    match fields.string("cache_salt")? {
        Some(salt) if salt.is_empty() || salt.len() > MAX_SALT_BYTES => {
            Err(ApiError::field("cache_salt", format!("expected a string of 1 to {MAX_SALT_BYTES} bytes")))
        }
        salt => Ok(salt.map(BlockHash::salt)),
    }
}

fn delivery(fields: &Fields<'_>) -> Result<Delivery, ApiError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(options) = fields.fields("stream_options")? else {
        return Ok(if stream { Delivery::Stream } else { Delivery::Whole });
    };
    known::STREAM_OPTIONS.check(&options)?;
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    match (stream, include_usage) {
        (false, _) => Err(ApiError::field("stream_options", "only with stream set to true")),
        (true, false) => Ok(Delivery::Stream),
        (true, true) => Ok(Delivery::StreamWithUsage),
    }
}

pub(super) fn token_ids(name: &str, ids: &[Value]) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|id| {
            whole(id)
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| wrong(name, "a list of token ids", id))
        })
        .collect()
}

pub(super) fn encode_error(field: &str, error: &EncodeError, context: &Context<'_>) -> ApiError {
    match error {
        EncodeError::TooLong { .. } => {
            let message = format!("{error} and the context has {}: shorten it", context.max_model_len);
            ApiError::context_length(field, message)
        }
        error => ApiError::field(field, error),
    }
}
