//! `/tokenize`, `/detokenize`, `/tokenizer_info`, as vLLM has them.

use super::api::spelling;
use super::chat;
use super::error::ApiError;
use super::fields::{self, Fields};
use super::known;
use super::request::{Context, check_model, encode_error, token_ids};
use crate::tokenizer::Specials;
use serde_json::{Value, json};

/// Longest text in bytes that is turned into ids only to be counted, where the context is not longer.
const LEAST_TEXT_BYTES: usize = 1 << 20;
/// Bytes of text for each token of the context: no text that anybody writes has so many, so all that fits is counted.
const BYTES_A_TOKEN: usize = 8;
/// Most ids that are turned into text, where the context is not longer.
const LEAST_IDS: usize = 1 << 18;

/// `{prompt}` or `{messages, tools, ..}` to `{tokens, count, max_model_len}`.
pub(super) fn tokenize(body: &[u8], context: &Context<'_>) -> Result<Value, ApiError> {
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    check_model(&fields, context)?;
    known::TOKENIZE.check(&fields)?;
    let tokenizer = context.dialect.tokenizer();
    let add_special = fields.boolean("add_special_tokens")?;
    let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
    let tokens = match (fields.value("prompt"), fields.value("messages")) {
        (Some(_), Some(_)) => return Err(ApiError::field("messages", "not together with prompt: give one")),
        (None, Some(_)) => chat::conversation(&fields)?.prompt(context)?,
        _ => {
            let Some(prompt) = fields.string("prompt")? else {
                return Err(ApiError::field("prompt", "missing: expected a string, or messages"));
            };
            let most = LEAST_TEXT_BYTES.max(context.max_model_len.saturating_mul(BYTES_A_TOKEN));
            if prompt.len() > most {
                let message = format!(
                    "expected at most {most} bytes, found {}: count the tokens of its parts",
                    prompt.len()
                );
                return Err(ApiError::field("prompt", message));
            }
            let encoded = match add_special {
                Some(false) => tokenizer.encode(prompt, Specials::Recognised),
                _ => tokenizer.encode_prompt(prompt, usize::MAX),
            };
            encoded.map_err(|error| encode_error("prompt", &error, context))?
        }
    };
    let mut answer = json!({"count": tokens.len(), "max_model_len": context.max_model_len, "tokens": tokens});
    if strings {
        answer["token_strs"] = tokens.iter().map(|&id| spelling(tokenizer, id)).collect();
    }
    Ok(answer)
}

/// `{tokens}` to `{prompt}`.
pub(super) fn detokenize(body: &[u8], context: &Context<'_>) -> Result<Value, ApiError> {
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    check_model(&fields, context)?;
    let Some(tokens) = fields.array("tokens")? else {
        return Err(ApiError::field("tokens", "missing: expected a list of token ids"));
    };
    let most = LEAST_IDS.max(context.max_model_len);
    if tokens.len() > most {
        return Err(ApiError::field(
            "tokens",
            format!("expected at most {most} ids, found {}", tokens.len()),
        ));
    }
    let ids = token_ids("tokens", tokens)?;
    let tokenizer = context.dialect.tokenizer();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= tokenizer.vocab_size()) {
        let message = format!("expected ids below {}, the vocabulary, found {id}", tokenizer.vocab_size());
        return Err(ApiError::field("tokens", message));
    }
    Ok(json!({"prompt": tokenizer.decode(&ids)}))
}

/// What a client may know of the vocabulary.
pub(super) fn info(context: &Context<'_>) -> Value {
    let dialect = context.dialect;
    let (tokenizer, defaults) = (dialect.tokenizer(), dialect.defaults());
    let name = |id: u32| tokenizer.decode(&[id]);
    let added: serde_json::Map<String, Value> = (0..u32::try_from(tokenizer.vocab_size()).unwrap_or(0))
        .filter(|&id| tokenizer.is_added(id))
        .map(|id| (id.to_string(), json!({"content": name(id), "special": tokenizer.is_control(id)})))
        .collect();
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size(),
        "model_max_length": context.max_model_len,
        "eos_token_ids": defaults.eos_token_ids,
        "eos_token": defaults.eos_token_ids.first().map(|&id| name(id)),
        "added_tokens_decoder": added,
        "chat_template": dialect.template(),
    })
}
