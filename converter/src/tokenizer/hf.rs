//! The files as HF `tokenizers` 0.22 reads them.

use super::pre::Step;
use super::{Kind, Tokenizer};
use crate::side_files::json;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};

/// The character that stands for a byte in byte-level BPE (GPT-2's table): printable ones for themselves, the others from
/// U+0100 on.
pub(super) fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).expect("at most 68 bytes are not printable")
}

#[derive(Serialize)]
struct File<'a> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<AddedToken<'a>>,
    normalizer: Option<()>,
    pre_tokenizer: Component,
    post_processor: Option<Template<'a>>,
    decoder: Component,
    model: Bpe<'a>,
}

#[derive(Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "the fields of the file's format")]
struct AddedToken<'a> {
    id: u32,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Component {
    Sequence { pretokenizers: Vec<Component> },
    Split { pattern: Pattern, behavior: &'static str, invert: bool },
    Digits { individual_digits: bool },
    ByteLevel { add_prefix_space: bool, trim_offsets: bool, use_regex: bool },
}

#[derive(Serialize)]
struct Pattern {
    #[serde(rename = "Regex")]
    regex: String,
}

#[derive(Serialize)]
struct Bpe<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Option<()>,
    unk_token: Option<()>,
    continuing_subword_prefix: Option<()>,
    end_of_word_suffix: Option<()>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocab<'a>,
    merges: Vec<(&'a str, &'a str)>,
}

/// Tokens with their ids, in the order of the ids.
struct Vocab<'a>(Vec<(&'a str, u32)>);

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, id) in &self.0 {
            map.serialize_entry(token, id)?;
        }
        map.end()
    }
}

/// Adds bos and eos around every text.
#[derive(Serialize)]
struct Template<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    single: Vec<Piece<'a>>,
    pair: Vec<Piece<'a>>,
    special_tokens: BTreeMap<&'a str, SpecialToken<'a>>,
}

#[derive(Serialize)]
enum Piece<'a> {
    SpecialToken { id: &'a str, type_id: u32 },
    Sequence { id: &'static str, type_id: u32 },
}

#[derive(Serialize)]
struct SpecialToken<'a> {
    id: &'a str,
    ids: [u32; 1],
    tokens: [&'a str; 1],
}

#[derive(Serialize)]
struct Config<'a> {
    tokenizer_class: &'static str,
    add_bos_token: bool,
    add_eos_token: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    bos_token: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eos_token: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pad_token: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unk_token: Option<&'a str>,
    model_max_length: u64,
    clean_up_tokenization_spaces: bool,
}

impl Tokenizer {
    /// `tokenizer.json`
    pub(crate) fn tokenizer_json(&self) -> Vec<u8> {
        let ids = || (0..).zip(self.tokens.iter().zip(&self.kinds));
        let added_tokens = ids()
            .filter(|(_, (_, kind))| **kind != Kind::Vocabulary)
            .map(|(id, (content, kind))| AddedToken {
                id,
                content,
                single_word: false,
                lstrip: false,
                rstrip: false,
                normalized: false,
                special: *kind == Kind::Control,
            })
            .collect();
        let file = File {
            version: "1.0",
            truncation: None,
            padding: None,
            added_tokens,
            normalizer: None,
            pre_tokenizer: self.pre_tokenizer(),
            post_processor: self.template(),
            decoder: Component::ByteLevel { add_prefix_space: true, trim_offsets: true, use_regex: true },
            model: self.bpe(),
        };
        json(&file)
    }

    /// `tokenizer_config.json`; the chat template is a file of its own.
    pub(crate) fn config_json(&self) -> Vec<u8> {
        let text = |id: Option<u32>| id.map(|id| self.text(id));
        json(&Config {
            tokenizer_class: "PreTrainedTokenizerFast",
            add_bos_token: self.add_bos,
            add_eos_token: self.add_eos,
            bos_token: text(self.bos),
            eos_token: text(self.eos),
            pad_token: text(self.pad),
            unk_token: text(self.unknown),
            model_max_length: self.max_length,
            clean_up_tokenization_spaces: false,
        })
    }

    fn bpe(&self) -> Bpe<'_> {
        // A token that merges speak of has to be in the vocabulary, whatever its type.
        let joined: BTreeSet<String> =
            self.merges.iter().map(|&(a, b)| format!("{}{}", self.text(a), self.text(b))).collect();
        let parts: BTreeSet<u32> = self.merges.iter().flat_map(|&(a, b)| [a, b]).collect();
        let vocab = (0..)
            .zip(self.tokens.iter().zip(&self.kinds))
            .filter(|(id, (token, kind))| {
                **kind == Kind::Vocabulary || parts.contains(id) || joined.contains(*token)
            })
            .map(|(id, (token, _))| (token.as_str(), id))
            .collect();
        Bpe {
            kind: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: self.pre.ignore_merges,
            vocab: Vocab(vocab),
            merges: self.merges.iter().map(|&(a, b)| (self.text(a), self.text(b))).collect(),
        }
    }

    fn pre_tokenizer(&self) -> Component {
        let byte_level =
            |use_regex| Component::ByteLevel { add_prefix_space: false, trim_offsets: true, use_regex };
        let mut pretokenizers = Vec::new();
        for step in self.pre.steps {
            pretokenizers.push(match step {
                Step::Split(pattern) => Component::Split {
                    pattern: Pattern { regex: pattern.concat() },
                    behavior: "Isolated",
                    invert: false,
                },
                Step::Digits => Component::Digits { individual_digits: true },
                Step::Gpt2 => return byte_level(true),
            });
        }
        pretokenizers.push(byte_level(false));
        Component::Sequence { pretokenizers }
    }

    fn template(&self) -> Option<Template<'_>> {
        let bos = self.bos.filter(|_| self.add_bos);
        let eos = self.eos.filter(|_| self.add_eos);
        if bos.is_none() && eos.is_none() {
            return None;
        }
        let around = |sequence: &'static str, type_id: u32| {
            let special = |id: Option<u32>| id.map(|id| Piece::SpecialToken { id: self.text(id), type_id });
            special(bos).into_iter().chain([Piece::Sequence { id: sequence, type_id }]).chain(special(eos))
        };
        let special_tokens = bos
            .into_iter()
            .chain(eos)
            .map(|id| (self.text(id), SpecialToken { id: self.text(id), ids: [id], tokens: [self.text(id)] }))
            .collect();
        Some(Template {
            kind: "TemplateProcessing",
            single: around("A", 0).collect(),
            pair: around("A", 0).chain(around("B", 1)).collect(),
            special_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_256_characters_of_their_own() {
        let chars: BTreeSet<char> = (0..=u8::MAX).map(byte_char).collect();
        assert_eq!(chars.len(), 256);
        assert_eq!(byte_char(b' '), 'Ġ');
        assert_eq!(byte_char(b'\n'), 'Ċ');
        assert_eq!(byte_char(0xad), '\u{143}');
        assert_eq!(byte_char(b'a'), 'a');
    }
}
