//! Answers as OpenAI's clients read them. Every chunk of a stream has the answer's id, model and time.

use crate::generation::Ending;
use serde::Serialize;

/// What stays the same through one answer.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) object: &'static str,
    /// Unix time in seconds.
    pub(super) created: u64,
    pub(super) model: String,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
}

impl Usage {
    pub(super) fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

/// An answer, or a chunk of one.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Answer<'a, C> {
    #[serde(flatten)]
    pub(super) head: &'a Head,
    /// One, or none in the chunk that has the usage.
    pub(super) choices: Vec<C>,
    /// Absent where it was not asked for; null in a stream until its last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
}

/// The choice of a whole chat answer.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ChatChoice {
    pub(super) index: usize,
    pub(super) message: ChatText,
    pub(super) logprobs: (),
    #[serde(serialize_with = "finish_reason")]
    pub(super) finish_reason: Option<Ending>,
}

/// The choice of a chat chunk.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ChatDelta {
    pub(super) index: usize,
    pub(super) delta: ChatText,
    pub(super) logprobs: (),
    #[serde(serialize_with = "finish_reason")]
    pub(super) finish_reason: Option<Ending>,
}

/// What is said, or a part of it.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct ChatText {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
}

/// The choice of a text completion or of its chunk.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TextChoice {
    pub(super) index: usize,
    pub(super) text: String,
    pub(super) logprobs: (),
    #[serde(serialize_with = "finish_reason")]
    pub(super) finish_reason: Option<Ending>,
}

fn finish_reason<S: serde::Serializer>(ending: &Option<Ending>, serializer: S) -> Result<S::Ok, S::Error> {
    ending.map(Ending::name).serialize(serializer)
}
