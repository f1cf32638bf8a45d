//! The engine: requests in, a stream of tokens out for each.

use crate::sampler::SamplingParams;
use tokio::sync::mpsc;

/// How a checkpoint is run.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Worker threads over all ranks; `None`: one for each core.
    pub threads: Option<usize>,
    /// Longest prompt plus answer; `None`: what the model was trained for, or what the cache has room for.
    pub max_model_len: Option<usize>,
    /// Sequences that run at the same time.
    pub max_num_seqs: usize,
    /// Prompt tokens in one step; longer prompts go in chunks of this many.
    pub max_num_batched_tokens: usize,
    /// Requests that may wait for a place.
    pub max_waiting: usize,
    /// Which arithmetic runs.
    pub arithmetic: Arithmetic,
    /// Whether every byte is held against its digest before anything is loaded.
    pub verify: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            max_model_len: None,
            max_num_seqs: 16,
            max_num_batched_tokens: 512,
            max_waiting: 256,
            arithmetic: Arithmetic::Fast,
            verify: false,
        }
    }
}

/// Which arithmetic runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// The processor's best.
    Fast,
    /// The slow twin that everything is tested against (`--precise`).
    Reference,
}

/// One sequence to continue.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// Prompt ids, at least one.
    pub prompt: Vec<u32>,
    /// How the next token is chosen.
    pub sampling: SamplingParams,
    /// Most tokens to generate, at least one.
    pub max_tokens: usize,
    /// Tokens that end the sequence; they are not sent.
    pub stop_token_ids: Vec<u32>,
}

/// What a request's stream carries: any number of tokens, then exactly one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next token.
    Token(u32),
    /// The end.
    Finished(FinishReason),
    /// The engine could not go on with this request; what to tell the client.
    Failed(String),
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token, which is named.
    Stop(u32),
    /// `max_tokens`, or the context is full.
    Length,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Prompt and answer do not fit the context.
    #[error(
        "the prompt has {prompt} tokens and the context {max_model_len}; at least one must be left for the answer: shorten the prompt"
    )]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        max_model_len: usize,
    },
    /// A prompt id the vocabulary does not have.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    Vocabulary {
        /// The id.
        id: u32,
        /// Rows of the vocabulary.
        vocab_size: usize,
    },
    /// No prompt.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// Too many requests wait.
    #[error("{waiting} requests wait already: try again later")]
    QueueFull {
        /// How many wait.
        waiting: usize,
    },
    /// The engine has stopped.
    #[error("the engine has stopped: {cause}")]
    Stopped {
        /// Why.
        cause: String,
    },
}

/// The receiving side of one request. Dropping it cancels the request and frees its cache.
pub type EventStream = mpsc::UnboundedReceiver<Event>;
