//! How a checkpoint speaks: its tokenizer, its chat template and its generation defaults, opened together.

use crate::Error;
use crate::constraint::Grammars;
use crate::sampler::SamplingParams;
use crate::template::{ChatInput, ChatTemplate, RenderError};
use crate::text::{AnswerText, Opening, Reading, THINK_END, THINK_START, ToolFormat};
use crate::tokenizer::Tokenizer;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The file's name in a checkpoint.
const FILE: &str = "generation_config.json";

/// Everything between text and token ids.
#[derive(Debug)]
pub struct Dialect {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    defaults: GenerationDefaults,
    /// Whether the vocabulary has both reasoning markers.
    thinks: bool,
    tool_format: Option<ToolFormat>,
    grammars: OnceLock<Result<Grammars, String>>,
}

/// What a request that says nothing gets.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// The checkpoint's recommendation; no seed.
    pub sampling: SamplingParams,
    /// The tokens that end a turn, at least one.
    pub eos_token_ids: Vec<u32>,
}

impl Dialect {
    /// Opens `tokenizer.json`, `chat_template.jinja` (a base model has none) and `generation_config.json` in `dir`.
    ///
    /// # Errors
    /// One of them is missing or wrong.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let tokenizer = Tokenizer::open(dir)?;
        let path = dir.join(FILE);
        let config = GenerationConfig::open(&path)?;
        let mut template = ChatTemplate::open(dir)?;
        if let Some(template) = &mut template {
            for (name, id) in [("bos_token", config.bos_token_id), ("eos_token", config.eos_token_id.first())]
            {
                if let Some(id) = id {
                    template.define(name, &tokenizer.decode(&[id]));
                }
            }
        }
        let defaults = config.defaults(path, tokenizer.vocab_size())?;
        let thinks = [THINK_START, THINK_END].iter().all(|marker| tokenizer.token_id(marker).is_some());
        let tool_format = template.as_ref().and_then(|template| ToolFormat::of_template(template.source()));
        let grammars = OnceLock::new();
        Ok(Self { tokenizer: Arc::new(tokenizer), template, defaults, thinks, tool_format, grammars })
    }

    /// The vocabulary.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// What a request that says nothing gets.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// The prompt of a conversation, of at most `most` tokens; `None` where the checkpoint has no chat template.
    pub fn render(&self, input: &ChatInput, most: usize) -> Option<Result<Vec<u32>, RenderError>> {
        Some(self.template.as_ref()?.render_tokens(&self.tokenizer, input, most))
    }

    /// How the answer to a rendered conversation begins: inside the reasoning where the prompt ends with `<think>`.
    pub fn opening(&self, prompt: &[u32]) -> Opening {
        if !self.thinks {
            return Opening::Plain;
        }
        // White space may follow the marker; more than a few tokens of it do not.
        let end = self.tokenizer.decode(&prompt[prompt.len().saturating_sub(4)..]);
        let end = end.trim_end();
        if end.ends_with(THINK_START) {
            Opening::InReasoning
        } else if end.ends_with(THINK_END) {
            Opening::Plain
        } else {
            Opening::MayReason
        }
    }

    /// The text of an answer to come.
    pub fn answer(&self, reading: &Reading) -> AnswerText {
        AnswerText::new(Arc::clone(&self.tokenizer), reading)
    }

    /// How the model writes tool calls; `None` where its template teaches none that this program reads.
    pub fn tool_format(&self) -> Option<&ToolFormat> {
        self.tool_format.as_ref()
    }

    /// The chat template's text.
    pub fn template(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::source)
    }

    /// The tokens that begin and end the reasoning, where each is one token.
    pub fn think_tokens(&self) -> (Option<u32>, Option<u32>) {
        (self.tokenizer.token_id(THINK_START), self.tokenizer.token_id(THINK_END))
    }

    /// Compiles what answers must be. The first call takes a while.
    ///
    /// # Errors
    /// One line, when the vocabulary does not allow it.
    pub fn grammars(&self) -> Result<&Grammars, String> {
        let made = self.grammars.get_or_init(|| Grammars::new(&self.tokenizer, &self.defaults.eos_token_ids));
        made.as_ref().map_err(Clone::clone)
    }
}

#[derive(Deserialize)]
struct GenerationConfig {
    #[serde(default)]
    bos_token_id: Option<u32>,
    eos_token_id: TokenIds,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    top_k: Option<usize>,
    #[serde(default)]
    min_p: Option<f32>,
    #[serde(default)]
    repetition_penalty: Option<f32>,
}

/// HF writes one id or a list.
#[derive(Deserialize)]
#[serde(untagged, expecting = "eos_token_id: expected a token id or a list of them")]
enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    fn first(&self) -> Option<u32> {
        match self {
            Self::One(id) => Some(*id),
            Self::Many(ids) => ids.first().copied(),
        }
    }
}

impl GenerationConfig {
    fn open(path: &Path) -> Result<Self, Error> {
        let fault = |why: String| Error::File { path: path.to_owned(), why };
        let json = std::fs::read(path).map_err(|error| {
            fault(format!(
                "{error}; a checkpoint says there which tokens end an answer: convert the model again"
            ))
        })?;
        serde_json::from_slice(&json).map_err(|error| fault(error.to_string()))
    }

    fn defaults(self, path: PathBuf, vocab_size: usize) -> Result<GenerationDefaults, Error> {
        let eos_token_ids = match self.eos_token_id {
            TokenIds::One(id) => vec![id],
            TokenIds::Many(ids) => ids,
        };
        let model = SamplingParams::default();
        let sampling = SamplingParams {
            temperature: self.temperature.unwrap_or(model.temperature),
            top_p: self.top_p.unwrap_or(model.top_p),
            // HF writes 0 for "off".
            top_k: self.top_k.filter(|&top_k| top_k > 0),
            min_p: self.min_p.unwrap_or(model.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(model.repetition_penalty),
            ..model
        };
        if let Some(id) = eos_token_ids.iter().find(|&&id| id as usize >= vocab_size) {
            let why = format!(
                "eos_token_id: expected ids below {vocab_size}, the vocabulary, found {id}: convert the model again"
            );
            return Err(Error::File { path, why });
        }
        let fault = |why: &str| Err(Error::File { path, why: why.into() });
        if eos_token_ids.is_empty() {
            return fault("eos_token_id is empty: no token would end an answer");
        }
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            return fault("temperature: expected a number from 0 on");
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return fault("top_p: expected a number above 0, at most 1");
        }
        if !(0.0..=1.0).contains(&sampling.min_p) {
            return fault("min_p: expected a number from 0 to 1");
        }
        if !(sampling.repetition_penalty > 0.0 && sampling.repetition_penalty.is_finite()) {
            return fault("repetition_penalty: expected a number above 0");
        }
        Ok(GenerationDefaults { sampling, eos_token_ids })
    }
}
