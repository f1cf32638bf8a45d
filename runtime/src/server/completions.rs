//! `/v1/completions`: from a body to a job.

use super::error::ApiError;
use super::fields::{self, Fields, wrong};
use super::known;
use super::request::{
    Common, Context, Job, MAX_CHOICES, MAX_LOGPROBS, encode_error, longest_answer, token_ids,
};
use crate::text::Opening;
use crate::tokenizer::Specials;
use serde_json::Value;

/// What is sent beside the answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extras {
    /// The prompt comes before each answer.
    pub(super) echo: bool,
    /// Log-probabilities of everything that is sent, and of how many likeliest tokens.
    pub(super) logprobs: Option<usize>,
}

/// Reads a body of `/v1/completions`.
pub(super) fn read(body: &[u8], context: &Context<'_>) -> Result<(Job, Extras), ApiError> {
    /// OpenAI's, and so vLLM's.
    const DEFAULT_MAX_TOKENS: usize = 16;
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    let common = Common::read(&fields, context)?;
    known::TEXT.check(&fields)?;
    let max_tokens = fields.integer("max_tokens", 0..=i64::MAX)?.map(|max_tokens| ("max_tokens", max_tokens));
    let logprobs = match fields.value("logprobs") {
        // Some clients send what the other interface has.
        Some(Value::Bool(false)) => None,
        _ => fields.integer("logprobs", 0..=MAX_LOGPROBS)?,
    };
    let extras = Extras {
        echo: fields.boolean("echo")?.unwrap_or(false),
        logprobs: logprobs.map(|top| usize::try_from(top).expect("checked not to be negative")),
    };
    fields.integer("top_logprobs", 0..=0)?;
    let specials = match fields.boolean("add_special_tokens")? {
        Some(false) => Beginning::AsItIs,
        _ => Beginning::Added,
    };
    let prompts = match fields.value("prompt") {
        Some(prompt) => prompts(prompt, specials, context)?,
        None => return Err(ApiError::field("prompt", "missing: expected a string or a list of token ids")),
    };
    let most = longest_answer(&prompts, "prompt", max_tokens, DEFAULT_MAX_TOKENS, context)?;
    let mut job = common.job(prompts, most, Opening::Plain);
    if job.prompts.len() * job.n > MAX_CHOICES {
        let message =
            format!("{} prompts with {} answers each are more than {MAX_CHOICES}", job.prompts.len(), job.n);
        return Err(ApiError::field("n", message));
    }
    job.generation.logprobs = extras.logprobs;
    if extras.echo && job.generation.prompt_logprobs.is_none() {
        job.generation.prompt_logprobs = extras.logprobs;
    }
    job.constrain(&fields, context)?;
    Ok((job, extras))
}

/// Whether a text gets the tokens that prompts of this model begin with.
#[derive(Clone, Copy, Debug)]
enum Beginning {
    Added,
    AsItIs,
}

/// The ids of prompts: a text, a list of ids, or a list of either.
fn prompts(prompt: &Value, beginning: Beginning, context: &Context<'_>) -> Result<Vec<Vec<u32>>, ApiError> {
    match prompt {
        Value::Array(items) if items.first().is_some_and(|first| first.is_string() || first.is_array()) => {
            if items.len() > MAX_CHOICES {
                return Err(ApiError::field("prompt", format!("more than {MAX_CHOICES} prompts")));
            }
            items.iter().map(|item| one(item, beginning, context)).collect()
        }
        one_prompt => Ok(vec![one(one_prompt, beginning, context)?]),
    }
}

fn one(prompt: &Value, beginning: Beginning, context: &Context<'_>) -> Result<Vec<u32>, ApiError> {
    match prompt {
        Value::String(text) => {
            let tokenizer = context.dialect.tokenizer();
            let encoded = match beginning {
                Beginning::Added => tokenizer.encode_prompt(text, context.max_model_len),
                Beginning::AsItIs => tokenizer.encode(text, Specials::Recognised),
            };
            encoded.map_err(|error| encode_error("prompt", &error, context))
        }
        Value::Array(ids) => token_ids("prompt", ids),
        other => Err(wrong("prompt", "a string, a list of token ids or a list of either", other)),
    }
}
