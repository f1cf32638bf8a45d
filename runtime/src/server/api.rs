//! Pieces of answers that OpenAI's interfaces share. Every chunk of a stream has the answer's id, model and time.

use super::answer::Usage;
use crate::generation::Ending;
use crate::logprobs::TokenLogprobs;
use crate::sampler::random_seed;
use crate::text::CallDelta;
use crate::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// An id that nobody has had before.
pub(super) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_seed(), random_seed())
}

/// What stays the same through one answer.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) object: &'static str,
    /// Unix time in seconds.
    pub(super) created: u64,
    pub(super) model: String,
}

/// `usage` of chat and text completions.
pub(super) fn usage_json(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    })
}

/// Puts vLLM's `stop_reason` into a choice: the stop string that ended it.
pub(super) fn stop_reason(choice: &mut Value, ending: Option<Ending>, stop: &[String]) {
    if let Some(Ending::StopString(which)) = ending {
        choice["stop_reason"] = stop[which].as_str().into();
    }
}

/// The id that a tool call is answered by: the model's own, or a new one.
pub(super) fn call_id(own: Option<String>) -> String {
    own.unwrap_or_else(|| fresh_id("call_"))
}

/// A complete call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) id: String,
    pub(super) name: String,
    /// JSON text.
    pub(super) arguments: String,
}

/// The calls that these parts make up.
pub(super) fn calls(deltas: Vec<CallDelta>) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    for delta in deltas {
        match delta {
            CallDelta::Begin { id, name, .. } => {
                calls.push(Call { id: call_id(id), name, arguments: String::new() });
            }
            CallDelta::Arguments { index, json } => calls[index].arguments.push_str(&json),
        }
    }
    calls
}

/// `logprobs` of a chat choice.
pub(super) fn chat_logprobs(tokenizer: &Tokenizer, tokens: &[TokenLogprobs]) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        json!({"token": String::from_utf8_lossy(bytes), "logprob": finite(logprob), "bytes": bytes})
    };
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut json = entry(token.token, token.logprob);
            let top: Vec<Value> = token.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
            json["top_logprobs"] = top.into();
            json
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// `logprobs` of a text choice, token by token.
#[derive(Clone, Debug, Default)]
pub(super) struct TextLogprobs {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
    offset: usize,
}

impl TextLogprobs {
    /// Tokens that nothing is known of, as the first of a prompt.
    pub(super) fn push_unknown(&mut self, tokenizer: &Tokenizer, id: u32) {
        self.push_token(tokenizer, id);
        self.token_logprobs.push(Value::Null);
        self.top_logprobs.push(Value::Null);
    }

    pub(super) fn push(&mut self, tokenizer: &Tokenizer, token: &TokenLogprobs) {
        self.push_token(tokenizer, token.token);
        self.token_logprobs.push(json!(finite(token.logprob)));
        let mut top = Map::new();
        for &(id, logprob) in &token.top {
            top.insert(spelling(tokenizer, id), json!(finite(logprob)));
        }
        // The token itself is always there.
        top.entry(spelling(tokenizer, token.token)).or_insert_with(|| json!(finite(token.logprob)));
        self.top_logprobs.push(top.into());
    }

    fn push_token(&mut self, tokenizer: &Tokenizer, id: u32) {
        self.tokens.push(spelling(tokenizer, id).into());
        self.text_offset.push(self.offset);
        self.offset += String::from_utf8_lossy(tokenizer.token_bytes(id)).chars().count();
    }

    /// Whether nothing was pushed since the last [`Self::take`].
    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// What was pushed since the last call.
    pub(super) fn take(&mut self) -> Value {
        json!({
            "tokens": std::mem::take(&mut self.tokens),
            "token_logprobs": std::mem::take(&mut self.token_logprobs),
            "top_logprobs": std::mem::take(&mut self.top_logprobs),
            "text_offset": std::mem::take(&mut self.text_offset),
        })
    }
}

/// vLLM's `prompt_logprobs`: by position, from token id to what is known of it; the first position has nothing before it.
pub(super) fn prompt_logprobs(tokenizer: &Tokenizer, tokens: &[TokenLogprobs]) -> Value {
    let entry = |id: u32, logprob: f32, rank: usize| {
        let entry =
            json!({"logprob": finite(logprob), "rank": rank, "decoded_token": spelling(tokenizer, id)});
        (id.to_string(), entry)
    };
    let positions = tokens.iter().map(|token| {
        let mut map: Map<String, Value> =
            token.top.iter().enumerate().map(|(at, &(id, logprob))| entry(id, logprob, at + 1)).collect();
        let (id, own) = entry(token.token, token.logprob, token.rank);
        map.entry(id).or_insert(own);
        Value::from(map)
    });
    std::iter::once(Value::Null).chain(positions).collect()
}

/// A token as text. One that is no text by itself is spelled as its bytes, as OpenAI does, so that two are never the same.
pub(super) fn spelling(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let hex: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{hex}")
        }
    }
}

/// JSON has no infinity; vLLM sends this for it.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
