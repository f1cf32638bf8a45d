//! Text to token ids and back, as the checkpoint's `tokenizer.json` says (HF's format, byte-level BPE).

mod bytes;

use crate::Error;
use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use bytes::TokenBytes;
use std::collections::BTreeMap;
use std::path::Path;
use tokenizers::{DecoderWrapper, ModelWrapper};

/// The file's name in a checkpoint.
const FILE: &str = "tokenizer.json";

/// What a control token's spelling means inside a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// It is that token.
    Recognised,
    /// It is text like any other. Added tokens that are not control tokens, such as `<think>`, are still themselves.
    AsText,
}

/// Why a text has no token ids.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The tokenizer's own pattern fails on it.
    #[error("the text could not be turned into tokens: {0}")]
    Failed(String),
    /// It has more tokens than asked for; how many is not known, since nobody would want them.
    #[error("the text has at least {at_least} tokens")]
    TooLong {
        /// A lower bound.
        at_least: usize,
    },
}

/// Longest control token, in bytes; real ones have up to forty.
const LONGEST_CONTROL: usize = 1024;

/// Texts above this many bytes are encoded piece by piece: `tokenizers` takes 140 bytes of memory for each byte.
const BLOCK: usize = 1 << 20;

/// A checkpoint's vocabulary.
pub struct Tokenizer {
    /// Takes control tokens for text; [`Specials::Recognised`] cuts them out before.
    inner: tokenizers::Tokenizer,
    added: AddedTokens,
    bytes: TokenBytes,
    prefix: Vec<u32>,
}

/// Words whose tokens are remembered.
const CACHED_WORDS: usize = 1024;

/// The library remembers the tokens of the first ten thousand words that it sees, each of up to 256 bytes, and never forgets
/// one: memory that grows for as long as clients send new words.
fn bound_cache(inner: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(bpe) = inner.get_model() {
        let mut bpe = bpe.clone();
        bpe.resize_cache(CACHED_WORDS);
        inner.with_model(bpe);
    }
}

impl Tokenizer {
    /// Opens `dir/tokenizer.json`.
    ///
    /// # Errors
    /// The file is missing, is no tokenizer, or is one that is not byte-level BPE.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(FILE);
        let json = std::fs::read(&path).map_err(|error| Error::File {
            path: path.clone(),
            why: format!("{error}; a checkpoint has its tokenizer there: convert the model again"),
        })?;
        Self::parse(&json).map_err(|why| Error::File { path, why })
    }

    /// A tokenizer from the bytes of a `tokenizer.json`; an error is one line.
    fn parse(json: &[u8]) -> Result<Self, String> {
        let mut inner = tokenizers::Tokenizer::from_bytes(json)
            .map_err(|error| format!("not a tokenizer: {}; convert the model again", one_line(&*error)))?;
        if !matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err("the decoder is not ByteLevel; this program reads byte-level BPE only".into());
        }
        let added = AddedTokens::new(&inner)?;
        let bytes = TokenBytes::new(&inner)?;
        let prefix = match inner.encode_fast("", true) {
            Ok(encoding) => encoding.get_ids().to_vec(),
            Err(error) => return Err(format!("post_processor: {}", one_line(&*error))),
        };
        inner.set_encode_special_tokens(true);
        bound_cache(&mut inner);
        Ok(Self { inner, added, bytes, prefix })
    }

    /// The ids of a text, nothing added before or after.
    ///
    /// # Errors
    /// [`EncodeError::Failed`].
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, EncodeError> {
        self.encode_at_most(text, specials, usize::MAX)
    }

    /// The ids of a prompt that is no rendered template: what the file puts before every text (most files: nothing),
    /// then the text with control tokens recognised. A prompt of more than `most` tokens is given up as soon as that
    /// is sure.
    ///
    /// # Errors
    /// [`EncodeError`].
    pub fn encode_prompt(&self, text: &str, most: usize) -> Result<Vec<u32>, EncodeError> {
        let ids = self.encode_at_most(text, Specials::Recognised, most)?;
        if ids.starts_with(&self.prefix) {
            return Ok(ids);
        }
        Ok([self.prefix.as_slice(), &ids].concat())
    }

    fn encode_at_most(&self, text: &str, specials: Specials, most: usize) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::new();
        match specials {
            Specials::AsText => self.append(text, most, &mut ids)?,
            Specials::Recognised => {
                for part in self.added.split(text) {
                    match part {
                        Part::Control(id) => ids.push(id),
                        Part::Text(text) => self.append(text, most, &mut ids)?,
                    }
                }
            }
        }
        Ok(ids)
    }

    /// The text of some ids, control tokens spelled out; bytes that are no UTF-8 become U+FFFD, unknown ids nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes a token stands for; none for an id that is not in the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.of(id)
    }

    /// The id of a token by its exact spelling in the file.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether an id is a control token, which is not part of an answer's text.
    pub fn is_control(&self, id: u32) -> bool {
        self.added.control.contains_key(&id)
    }

    /// Whether an id is an added token: a control token, or one such as `<think>` that is found in a text before any other.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.ids.binary_search(&id).is_ok()
    }

    /// One more than the largest id. The model may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// The added tokens, for who must tell typed text from control tokens.
    pub(crate) fn added(&self) -> &AddedTokens {
        &self.added
    }

    /// Appends the ids of a text whose control tokens are text, unless there are more than `most` then.
    pub(crate) fn append(&self, text: &str, most: usize, ids: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.append_blocks(text, BLOCK, most, ids)
    }

    /// [`Self::append`], at most about `block` bytes at a time.
    ///
    /// Patterns of byte-level BPE read a text from left to right and look one character ahead, so cutting a text
    /// changes no words but the last before the cut. They are taken again with what follows, and so is all that may be
    /// the beginning of an added token.
    fn append_blocks(
        &self,
        mut text: &str,
        block: usize,
        most: usize,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        const WORDS_AGAIN: u32 = 2;
        let failed = |error: tokenizers::Error| EncodeError::Failed(one_line(&*error));
        let check = |ids: &[u32]| match ids.len() {
            at_least if at_least > most => Err(EncodeError::TooLong { at_least }),
            _ => Ok(()),
        };
        let mut size = block;
        while size < text.len() {
            let cut = text.floor_char_boundary(size);
            let encoding = self.inner.encode(&text[..cut], false).map_err(failed)?;
            let (words, offsets) = (encoding.get_word_ids(), encoding.get_offsets());
            let last = words.last().copied().flatten().unwrap_or(0);
            let sure = cut.saturating_sub(self.added.longest);
            let again = (0..words.len())
                .find(|&at| words[at].unwrap_or(0) + WORDS_AGAIN > last || offsets[at].1 > sure)
                .map_or(0, |at| words.partition_point(|&word| word < words[at]));
            if again == 0 {
                // One word is longer than the block.
                size *= 2;
                continue;
            }
            ids.extend_from_slice(&encoding.get_ids()[..again]);
            check(ids)?;
            text = &text[offsets[again].0..];
            size = block;
        }
        ids.extend_from_slice(self.inner.encode_fast(text, false).map_err(failed)?.get_ids());
        check(ids)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens, {} of them control)", self.vocab_size(), self.added.control.len())
    }
}

/// The tokens that are found in a text before BPE sees it.
pub(crate) struct AddedTokens {
    /// All of them, leftmost and longest first, as HF matches them.
    matcher: AhoCorasick,
    /// Id by pattern of `matcher`.
    ids: Vec<u32>,
    /// Bytes of the longest.
    longest: usize,
    /// The control tokens among them and their spelling.
    control: BTreeMap<u32, String>,
    /// The control tokens alone, every occurrence, overlapping ones too.
    control_matcher: AhoCorasick,
    /// Spellings of the control tokens, sorted, so that those with a given beginning stand together.
    control_sorted: Vec<String>,
    /// Bytes of the longest of them.
    longest_control: usize,
}

/// A piece of a text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// A control token.
    Control(u32),
    /// What lies between two of them.
    Text(&'a str),
}

impl AddedTokens {
    fn new(inner: &tokenizers::Tokenizer) -> Result<Self, String> {
        let tokens: BTreeMap<u32, _> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| !token.content.is_empty())
            .collect();
        if let Some((id, token)) = tokens
            .iter()
            .find(|(_, token)| token.special && (token.lstrip || token.rstrip || token.single_word))
        {
            return Err(format!(
                "added token {id} ({:?}): lstrip, rstrip and single_word are not supported for control tokens",
                token.content
            ));
        }
        let control: BTreeMap<u32, String> = tokens
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, token)| (id, token.content.clone()))
            .collect();
        if let Some((id, token)) = control.iter().find(|(_, token)| token.len() > LONGEST_CONTROL) {
            return Err(format!(
                "added token {id}: expected a control token of at most {LONGEST_CONTROL} bytes, found {}",
                token.len()
            ));
        }
        let mut control_sorted: Vec<String> = control.values().cloned().collect();
        control_sorted.sort_unstable();
        Ok(Self {
            longest_control: control_sorted.iter().map(String::len).max().unwrap_or(0),
            control_sorted,
            matcher: matcher(MatchKind::LeftmostLongest, tokens.values().map(|token| &token.content))?,
            control_matcher: matcher(MatchKind::Standard, control.values())?,
            longest: tokens.values().map(|token| token.content.len()).max().unwrap_or(0),
            ids: tokens.into_keys().collect(),
            control,
        })
    }

    /// Cuts a text at its control tokens; no part is an empty text.
    pub(crate) fn split<'a>(&self, text: &'a str) -> Vec<Part<'a>> {
        let mut parts = Vec::new();
        let mut from = 0;
        for found in self.matcher.find_iter(text) {
            let id = self.ids[found.pattern().as_usize()];
            if !self.control.contains_key(&id) {
                continue;
            }
            if from < found.start() {
                parts.push(Part::Text(&text[from..found.start()]));
            }
            parts.push(Part::Control(id));
            from = found.end();
        }
        if from < text.len() {
            parts.push(Part::Text(&text[from..]));
        }
        parts
    }

    /// Byte offsets at which a control token is spelled in the text, ascending, overlapping ones included.
    pub(crate) fn control_starts(&self, text: &str) -> Vec<usize> {
        let mut starts: Vec<usize> =
            self.control_matcher.find_overlapping_iter(text).map(|found| found.start()).collect();
        starts.sort_unstable();
        starts.dedup();
        starts
    }

    /// Byte offsets from which on the text is the beginning of a control token, and no more than that.
    pub(crate) fn open_ends(&self, text: &str) -> impl Iterator<Item = usize> {
        (text.len().saturating_sub(self.longest_control)..text.len())
            .filter(move |&start| text.is_char_boundary(start) && self.begins_control(&text[start..]))
    }

    /// Whether a text is the beginning of a control token, and no more than that.
    fn begins_control(&self, text: &str) -> bool {
        // The token that is the text itself comes first; the next one may go on behind it.
        let at = self.control_sorted.partition_point(|token| token.as_str() <= text);
        self.control_sorted.get(at).is_some_and(|token| token.starts_with(text))
    }
}

fn matcher<'a>(kind: MatchKind, tokens: impl Iterator<Item = &'a String>) -> Result<AhoCorasick, String> {
    AhoCorasick::builder()
        .match_kind(kind)
        .kind(Some(AhoCorasickKind::ContiguousNFA))
        .build(tokens)
        .map_err(|error| format!("added_tokens: {error}"))
}

fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_in_blocks_has_the_ids_of_the_whole() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-glm5-hf");
        let tokenizer = Tokenizer::open(&dir).unwrap();
        let text = "It's what they're saying:  isn't it?\n\n   \t x\r\n12345 67 <tool_response>\u{e9}\u{1f60a}\u{4e2d}\u{6587}</tool_response><|user|><think>\n  a    b!!!\n\n";
        let text = format!("{text}{}{text}{}", " ".repeat(90), "longwordwithoutanyspaces".repeat(9));
        let whole = tokenizer.encode(&text, Specials::AsText).unwrap();
        for block in 1..200 {
            let mut ids = Vec::new();
            tokenizer.append_blocks(&text, block, usize::MAX, &mut ids).unwrap();
            assert_eq!(ids, whole, "blocks of {block}");
        }
    }

    #[test]
    fn long_control_tokens_are_refused_at_once() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-glm5-hf/tokenizer.json");
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let with = |length: usize| {
            let mut json = json.clone();
            let mut token = json["added_tokens"][0].clone();
            token["id"] = 4096.into();
            token["content"] = format!("<{}>", "a".repeat(length - 2)).into();
            token["special"] = true.into();
            json["added_tokens"].as_array_mut().unwrap().push(token);
            let begin = std::time::Instant::now();
            let made = Tokenizer::parse(json.to_string().as_bytes());
            assert!(begin.elapsed() < std::time::Duration::from_secs(5));
            made
        };
        let error = with(1_000_000).unwrap_err();
        assert!(
            error.contains("added token 4096: expected a control token of at most 1024 bytes, found 1000000"),
            "{error}"
        );
        let tokenizer = with(1024).unwrap();
        let ends = |text: &str| tokenizer.added().open_ends(text).collect::<Vec<_>>();
        assert_eq!(ends("x <aaaa"), [2]);
        assert_eq!(ends("x <|us"), [2]);
        assert_eq!(ends("<|user|><"), [8]);
        assert_eq!(ends("<|user|>"), Vec::<usize>::new(), "a whole one is no beginning");
    }

    #[test]
    fn a_long_text_is_given_up_early() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-glm5-hf");
        let tokenizer = Tokenizer::open(&dir).unwrap();
        let text = "word ".repeat(1000);
        let mut ids = Vec::new();
        let error = tokenizer.append_blocks(&text, 100, 50, &mut ids).unwrap_err();
        assert!(matches!(error, EncodeError::TooLong { at_least: 51..100 }), "{error}");
        assert_eq!(tokenizer.encode_prompt("a b", 1), Err(EncodeError::TooLong { at_least: 2 }));
        assert!(tokenizer.encode_prompt("a b", 2).is_ok());
    }
}
