//! Fields that clients of other servers send and this one does nothing for. One that would change the answer is refused by
//! name, since an answer that ignores it would be wrong without a word; one that would not is taken, for a written reason.

use super::error::ApiError;
use super::fields::{Fields, brief};
use serde_json::{Value, json};

/// What an interface knows of fields that it does nothing for.
pub(super) struct Known {
    /// With the values that ask for nothing; without any the field must be left out.
    pub(super) refused: &'static [(&'static str, &'static [Neutral])],
    /// With the reason why nothing comes of them.
    pub(super) without_effect: &'static [(&'static str, &'static str)],
}

/// A value that asks for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Neutral {
    Zero,
    One,
    False,
    True,
    /// An empty string, list or object.
    Empty,
    /// `["text"]`.
    TextOnly,
    /// This word.
    Word(&'static str),
}

use Neutral::{Empty, False, One, TextOnly, True, Word, Zero};

const SPEED: &str = "a hint that makes answers faster elsewhere, not different";
const ACCOUNT: &str = "for the accounts of a provider, and there are none here";
const STORED: &str = "nothing is kept after an answer, so there is nothing that it could be attached to";

/// Chat and text completions.
pub(super) const COMPLETIONS: Known = Known {
    refused: &[
        ("best_of", &[One]),
        ("use_beam_search", &[False]),
        ("length_penalty", &[One]),
        ("suffix", &[Empty]),
        ("bad_words", &[Empty]),
        ("allowed_token_ids", &[]),
        ("logits_processors", &[Empty]),
        ("logprob_token_ids", &[]),
        ("include_stop_str_in_output", &[False]),
        ("skip_special_tokens", &[True]),
        ("truncate_prompt_tokens", &[]),
        ("prompt_embeds", &[]),
        ("return_tokens_as_token_ids", &[False]),
        ("return_prompt_text", &[False]),
        ("repetition_detection", &[]),
        ("watermarking", &[False]),
        ("priority", &[Zero]),
        ("kv_transfer_params", &[]),
        ("ec_transfer_params", &[]),
        ("vllm_xargs", &[Empty]),
        ("guided_whitespace_pattern", &[]),
    ],
    without_effect: &[
        ("user", ACCOUNT),
        (
            "spaces_between_special_tokens",
            "tokens are put together as their bytes, and special ones are left out",
        ),
        ("guided_decoding_backend", "one library compiles every shape, and refuses what it cannot"),
        ("truncation_side", "prompts are not cut"),
        ("stream_interval", "every token is sent as it comes"),
        ("request_id", "answers have ids of their own"),
        ("session_id", STORED),
    ],
};

/// What only chat completions have.
pub(super) const CHAT: Known = Known {
    refused: &[
        ("functions", &[Empty]),
        ("function_call", &[]),
        ("modalities", &[TextOnly]),
        ("audio", &[]),
        ("web_search_options", &[]),
        ("echo", &[False]),
        ("chat_template", &[]),
        ("documents", &[Empty]),
        ("add_generation_prompt", &[True]),
        ("continue_final_message", &[False]),
        ("add_special_tokens", &[False]),
        ("include_reasoning", &[True]),
        ("mm_processor_kwargs", &[Empty]),
        ("media_io_kwargs", &[Empty]),
    ],
    without_effect: &[
        ("prediction", SPEED),
        ("verbosity", "a wish that models of other makers are trained on: say it in a message"),
        ("store", STORED),
        ("metadata", STORED),
        ("service_tier", ACCOUNT),
        ("safety_identifier", ACCOUNT),
        ("prompt_cache_key", SPEED),
        ("prompt_cache_retention", SPEED),
    ],
};

/// What only text completions have.
pub(super) const TEXT: Known =
    Known { refused: &[("thinking_token_budget", &[]), ("include_reasoning", &[True])], without_effect: &[] };

/// Of `stream_options`.
pub(super) const STREAM_OPTIONS: Known = Known {
    refused: &[("continuous_usage_stats", &[False])],
    without_effect: &[(
        "include_obfuscation",
        "chunks are as long as their text: use TLS and a batch of others",
    )],
};

/// Of `structured_outputs`.
pub(super) const STRUCTURED_OUTPUTS: Known = Known {
    refused: &[
        ("structural_tag", &[]),
        ("whitespace_pattern", &[]),
        ("disable_any_whitespace", &[False]),
        ("disable_additional_properties", &[False]),
    ],
    without_effect: &[("disable_fallback", "one library compiles every shape, and refuses what it cannot")],
};

/// Anthropic's messages.
pub(super) const MESSAGES: Known = Known {
    refused: &[
        ("mcp_servers", &[Empty]),
        ("container", &[]),
        ("context_management", &[]),
        ("output_format", &[]),
    ],
    without_effect: &[
        ("metadata", ACCOUNT),
        ("service_tier", ACCOUNT),
        ("inference_geo", ACCOUNT),
        ("speed", SPEED),
        ("cache_control", "prompts are cached by themselves"),
    ],
};

/// OpenAI's responses.
pub(super) const RESPONSES: Known = Known {
    refused: &[
        ("background", &[False]),
        ("truncation", &[Word("disabled")]),
        ("max_tool_calls", &[]),
        ("top_logprobs", &[Zero]),
        ("include", &[Empty]),
        ("context_management", &[]),
        ("stop", &[Empty]),
        ("seed", &[]),
        ("top_k", &[Zero]),
        ("min_p", &[Zero]),
        ("presence_penalty", &[Zero]),
        ("frequency_penalty", &[Zero]),
        ("repetition_penalty", &[One]),
        ("logit_bias", &[Empty]),
        ("ignore_eos", &[False]),
        ("structured_outputs", &[]),
        ("priority", &[Zero]),
        ("vllm_xargs", &[Empty]),
    ],
    without_effect: &[
        ("store", "nothing is kept after an answer"),
        ("user", ACCOUNT),
        ("service_tier", ACCOUNT),
        ("safety_identifier", ACCOUNT),
        ("prompt_cache_key", SPEED),
        ("prompt_cache_retention", SPEED),
        ("request_id", "answers have ids of their own"),
        ("stream_options", "the usage is always sent, and chunks are as long as their text"),
    ],
};

/// `/tokenize`.
pub(super) const TOKENIZE: Known = Known {
    refused: &[
        ("chat_template", &[]),
        ("add_generation_prompt", &[True]),
        ("continue_final_message", &[False]),
        ("mm_processor_kwargs", &[Empty]),
        ("media_io_kwargs", &[Empty]),
    ],
    without_effect: &[],
};

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::Zero => value.as_f64() == Some(0.0),
            Self::One => value.as_f64() == Some(1.0),
            Self::False => value.as_bool() == Some(false),
            Self::True => value.as_bool() == Some(true),
            Self::Empty => match value {
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            },
            Self::TextOnly => value.as_array().is_some_and(|items| items.len() == 1 && items[0] == "text"),
            Self::Word(word) => value == word,
        }
    }

    fn spelling(self) -> String {
        match self {
            Self::Empty => "empty".to_owned(),
            neutral => neutral.values()[0].to_string(),
        }
    }

    /// As JSON.
    fn values(self) -> Vec<Value> {
        match self {
            Self::Zero => vec![json!(0)],
            Self::One => vec![json!(1)],
            Self::False => vec![json!(false)],
            Self::True => vec![json!(true)],
            Self::Empty => vec![json!([]), json!({}), json!("")],
            Self::TextOnly => vec![json!(["text"])],
            Self::Word(word) => vec![json!(word)],
        }
    }
}

impl Known {
    /// Refuses what this server does not do.
    pub(super) fn check(&self, fields: &Fields<'_>) -> Result<(), ApiError> {
        for (name, neutral) in self.refused {
            let Some(value) = fields.value(name) else {
                continue;
            };
            if neutral.iter().any(|neutral| neutral.is(value)) {
                continue;
            }
            let message = match neutral {
                [] => "not supported: leave it out".to_owned(),
                [neutral, ..] => format!("only {} is supported, found {}", neutral.spelling(), brief(value)),
            };
            return Err(ApiError::unsupported(fields.path(name), message));
        }
        Ok(())
    }

    /// Its fields for the OpenAPI document.
    pub(super) fn properties(&self) -> impl Iterator<Item = (String, Value)> {
        let refused = self.refused.iter().map(|(name, neutral)| {
            let mut values: Vec<Value> = neutral.iter().flat_map(|neutral| neutral.values()).collect();
            values.push(Value::Null);
            ((*name).to_owned(), json!({"enum": values, "description": "Not done here"}))
        });
        let without_effect = self.without_effect.iter().map(|(name, why)| {
            ((*name).to_owned(), json!({"description": format!("Without effect: {why}")}))
        });
        refused.chain(without_effect)
    }
}
