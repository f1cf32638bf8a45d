//! GGUF's tokenizer metadata to HF's `tokenizer.json` and `tokenizer_config.json`: byte-level BPE.
//!
//! Keys: llama.cpp b11434, `src/llama-vocab.cpp`. What they say is checked here, so that no reader of the checkpoint has to.

mod hf;
mod pre;

use crate::Error;
use formats::gguf::{Array, GgufSet, Metadata, Value, ValueType};
use pre::PreTokenizer;
use std::collections::HashMap;
use std::path::Path;

/// The only tokenizer model here: llama.cpp's name for byte-level BPE.
const BYTE_LEVEL_BPE: &str = "gpt2";

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";

/// Ends of a turn that llama.cpp knows by their text, whatever the metadata say, of the models that are converted here.
const ENDS_OF_GENERATION: &[&str] = &[
    "<|endoftext|>",
    "<|user|>",
    "<|observation|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "[EOT]",
];

/// A model's tokenizer.
pub(crate) struct Tokenizer {
    tokens: Vec<String>,
    kinds: Vec<Kind>,
    /// Pairs of token ids, most urgent first.
    merges: Vec<(u32, u32)>,
    pre: &'static PreTokenizer,
    bos: Option<u32>,
    eos: Option<u32>,
    end_of_turn: Option<u32>,
    end_of_message: Option<u32>,
    pad: Option<u32>,
    unknown: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    max_length: u64,
}

/// GGUF's token types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Normal, unused or a byte: known to the BPE model alone.
    Vocabulary,
    /// Control or unknown: special.
    Control,
    /// Recognised in text, not special.
    UserDefined,
}

impl Tokenizer {
    /// Reads and checks everything.
    pub(crate) fn read(set: &GgufSet) -> Result<Self, Error> {
        let keys = Keys { metadata: set.metadata(), path: set.path() };
        let model = keys.required_str("tokenizer.ggml.model")?;
        if model != BYTE_LEVEL_BPE {
            let expected = format!("{BYTE_LEVEL_BPE} (byte-level BPE), the only tokenizer known here");
            return Err(keys.refuse("tokenizer.ggml.model", expected, model));
        }
        let pre = keys.pre_tokenizer()?;
        let tokens = keys.tokens()?;
        let ids = keys.index(&tokens)?;
        let kinds = keys.kinds(tokens.len())?;
        keys.check_scores(tokens.len())?;
        let merges = keys.merges(&ids)?;
        keys.check_bytes(&ids)?;
        keys.check_special_ids(tokens.len())?;
        let id = |name: &str| keys.id(&format!("tokenizer.ggml.{name}_token_id"), tokens.len());
        let bos = id("bos")?;
        let eos = id("eos")?;
        let flag = |key: &str| Ok::<_, Error>(keys.metadata.bool(key).map_err(|e| e.in_file(keys.path))?);
        let add_bos = flag("tokenizer.ggml.add_bos_token")?.unwrap_or(pre.adds_bos);
        let add_eos = flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
        for (adds, key, id) in [(add_bos, "bos", bos), (add_eos, "eos", eos)] {
            if adds && id.is_none() {
                let key = format!("tokenizer.ggml.{key}_token_id");
                return Err(keys.refuse(&key, "a token, because it is added to every text", "no such key"));
            }
        }
        Ok(Self {
            end_of_turn: id("eot")?,
            end_of_message: id("eom")?,
            pad: id("padding")?,
            unknown: id("unknown")?,
            max_length: keys.context_length()?,
            tokens,
            kinds,
            merges,
            pre,
            bos,
            eos,
            add_bos,
            add_eos,
        })
    }

    pub(crate) fn bos(&self) -> Option<u32> {
        self.bos
    }

    pub(crate) fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Tokens that end a generation: the metadata's eos first, then the others in order.
    pub(crate) fn ends_of_generation(&self) -> Vec<u32> {
        let by_text = (0..)
            .zip(&self.tokens)
            .filter(|(_, text)| ENDS_OF_GENERATION.contains(&text.as_str()))
            .map(|(id, _)| id);
        let mut others: Vec<u32> = by_text
            .chain(self.end_of_turn)
            .chain(self.end_of_message)
            .filter(|&id| Some(id) != self.eos)
            .collect();
        others.sort_unstable();
        others.dedup();
        self.eos.into_iter().chain(others).collect()
    }

    fn text(&self, id: u32) -> &str {
        &self.tokens[id as usize]
    }
}

/// The tokenizer's metadata keys.
struct Keys<'a> {
    metadata: &'a Metadata,
    path: &'a Path,
}

impl<'a> Keys<'a> {
    fn refuse(&self, key: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::key(self.path, key, expected, found)
    }

    fn missing(&self, key: &str) -> Error {
        self.refuse(key, "a value", "no such key; convert the original model again, with its tokenizer")
    }

    fn required_str(&self, key: &str) -> Result<&'a str, Error> {
        let value = self.metadata.str(key).map_err(|e| e.in_file(self.path))?;
        value.ok_or_else(|| self.missing(key))
    }

    fn required_array(&self, key: &str) -> Result<&'a Array, Error> {
        let value = self.metadata.array(key).map_err(|e| e.in_file(self.path))?;
        value.ok_or_else(|| self.missing(key))
    }

    fn strings(&self, key: &str) -> Result<Vec<&'a str>, Error> {
        let array = self.required_array(key)?;
        let Some(strings) = array.strings() else {
            let found = format!("an array of {:?}", array.element());
            return Err(self.refuse(key, "an array of strings", found));
        };
        strings
            .enumerate()
            .map(|(i, bytes)| {
                std::str::from_utf8(bytes)
                    .map_err(|_| self.refuse(key, "UTF-8 strings", format!("other bytes at index {i}")))
            })
            .collect()
    }

    fn pre_tokenizer(&self) -> Result<&'static PreTokenizer, Error> {
        const KEY: &str = "tokenizer.ggml.pre";
        let name = self.required_str(KEY)?;
        pre::TABLE.iter().find(|row| row.name == name).ok_or_else(|| {
            let known: Vec<&str> = pre::TABLE.iter().map(|row| row.name).collect();
            self.refuse(KEY, format!("one of {}", known.join(", ")), format!("{name:?}"))
        })
    }

    fn tokens(&self) -> Result<Vec<String>, Error> {
        let tokens: Vec<String> = self.strings(TOKENS)?.into_iter().map(str::to_owned).collect();
        if u32::try_from(tokens.len()).is_err() {
            return Err(self.refuse(TOKENS, "fewer than 2^32 tokens", tokens.len().to_string()));
        }
        Ok(tokens)
    }

    fn index<'t>(&self, tokens: &'t [String]) -> Result<HashMap<&'t str, u32>, Error> {
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in (0..).zip(tokens) {
            if let Some(first) = ids.insert(token.as_str(), id) {
                let found = format!("{token:?} as token {first} and as token {id}");
                return Err(self.refuse(TOKENS, "every token once", found));
            }
        }
        Ok(ids)
    }

    fn kinds(&self, tokens: usize) -> Result<Vec<Kind>, Error> {
        let array = self.required_array(TOKEN_TYPE)?;
        use ValueType::{I32, I64, U32, U64};
        let values = array.values().filter(|_| matches!(array.element(), I32 | U32 | I64 | U64));
        let Some(values) = values else {
            let found = format!("an array of {:?}", array.element());
            return Err(self.refuse(TOKEN_TYPE, "an array of 32-bit or 64-bit integers", found));
        };
        if array.len() != tokens {
            let expected = format!("one value for each of {tokens} tokens");
            return Err(self.refuse(TOKEN_TYPE, expected, format!("{} values", array.len())));
        }
        values
            .enumerate()
            .map(|(id, value)| match value.as_u64() {
                Some(1 | 5 | 6) => Ok(Kind::Vocabulary),
                Some(2 | 3) => Ok(Kind::Control),
                Some(4) => Ok(Kind::UserDefined),
                _ => Err(self.refuse(TOKEN_TYPE, "types from 1 to 6", format!("{value} for token {id}"))),
            })
            .collect()
    }

    /// Byte-level BPE has no use for scores, but a file whose own parts disagree is not to be trusted with the others.
    fn check_scores(&self, tokens: usize) -> Result<(), Error> {
        use ValueType::{F32, F64, I32, I64, U32, U64};
        let Some(array) = self.metadata.array(SCORES).map_err(|e| e.in_file(self.path))? else {
            return Ok(());
        };
        if !matches!(array.element(), F32 | F64 | I32 | I64 | U32 | U64) {
            let found = format!("an array of {:?}", array.element());
            return Err(self.refuse(SCORES, "an array of 32-bit or 64-bit numbers", found));
        }
        if array.len() != tokens {
            let expected = format!("one value for each of {tokens} tokens");
            return Err(self.refuse(SCORES, expected, format!("{} values", array.len())));
        }
        Ok(())
    }

    fn merges(&self, ids: &HashMap<&str, u32>) -> Result<Vec<(u32, u32)>, Error> {
        self.strings(MERGES)?
            .into_iter()
            .enumerate()
            .map(|(i, merge)| {
                let Some((left, right)) = merge.split_once(' ') else {
                    let found = format!("{merge:?} at index {i}");
                    return Err(self.refuse(MERGES, "two tokens with a space between them", found));
                };
                let known = |token: &str| {
                    let found = || format!("merge {i} of {merge:?}, and {token:?} is no token");
                    ids.get(token)
                        .copied()
                        .ok_or_else(|| self.refuse(MERGES, "merges of tokens into tokens", found()))
                };
                known(&format!("{left}{right}"))?;
                Ok((known(left)?, known(right)?))
            })
            .collect()
    }

    /// Text with a byte that has no token would lose it without a word.
    fn check_bytes(&self, ids: &HashMap<&str, u32>) -> Result<(), Error> {
        let in_utf8 = |byte: u8| !matches!(byte, 0xc0 | 0xc1 | 0xf5..);
        let missing = (0..=u8::MAX).filter(|&b| in_utf8(b)).find(|&b| {
            let mut buffer = [0; 4];
            !ids.contains_key(&*hf::byte_char(b).encode_utf8(&mut buffer))
        });
        match missing {
            None => Ok(()),
            Some(byte) => Err(self.refuse(
                TOKENS,
                "a token for every byte of UTF-8",
                format!("none for byte {byte:#04x}"),
            )),
        }
    }

    /// Every `tokenizer.ggml.*_token_id`, used here or not: a wrong one tells of a damaged vocabulary.
    fn check_special_ids(&self, tokens: usize) -> Result<(), Error> {
        for (key, _) in self.metadata.iter() {
            if key.starts_with("tokenizer.ggml.") && key.ends_with("_token_id") {
                self.id(key, tokens)?;
            }
        }
        Ok(())
    }

    fn id(&self, key: &str, tokens: usize) -> Result<Option<u32>, Error> {
        let Some(value) = self.metadata.value(key) else { return Ok(None) };
        match value.as_u64() {
            Some(id) if id < tokens as u64 => Ok(Some(id as u32)),
            _ => Err(self.refuse(
                key,
                format!("a token from 0 to {}", tokens.saturating_sub(1)),
                value.to_string(),
            )),
        }
    }

    fn context_length(&self) -> Result<u64, Error> {
        let architecture = self.required_str("general.architecture")?;
        let key = format!("{architecture}.context_length");
        let length = self.metadata.value(&key).and_then(Value::as_u64);
        length.ok_or_else(|| self.missing(&key))
    }
}
