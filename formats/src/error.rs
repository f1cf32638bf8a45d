//! The crate's one error type: each variant names the file, tensor, key or field, what was expected and what was found.

use crate::{Dtype, Shape};
use std::fmt::Write;
use std::path::PathBuf;

/// Text from a file or a request as a message repeats it: one line, however long and whatever is in it.
///
/// Line breaks and other control characters are escaped, and so are the marks that turn the direction of text around, which
/// could make a message say something else. Of long text the first and the last [`Shown::HALF`] characters are shown, because
/// advice comes last, and how many there are.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a>(pub &'a str);

impl Shown<'_> {
    /// Half of the characters that are shown of long text.
    pub const HALF: usize = 200;
}

impl std::fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = self.0;
        // Bytes are no fewer than characters, and counting those of a whole template takes time.
        let count = if text.len() <= 2 * Self::HALF { 0 } else { text.chars().count() };
        if count <= 2 * Self::HALF {
            return text.chars().try_for_each(|c| escaped(c, f));
        }
        text.chars().take(Self::HALF).try_for_each(|c| escaped(c, f))?;
        write!(f, " ... [{count} characters] ... ")?;
        text.chars().skip(count - Self::HALF).try_for_each(|c| escaped(c, f))
    }
}

fn escaped(c: char, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
    if is_plain(c) { f.write_char(c) } else { write!(f, "{}", c.escape_default()) }
}

/// Whether a character can be shown as it is: no control character, line or paragraph separator, or mark, embedding, override
/// or isolate of direction.
pub fn is_plain(c: char) -> bool {
    let turns =
        matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' | '\u{61c}');
    !c.is_control() && !turns
}

/// What can be wrong with bytes from outside.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{path}: {action}: {source}")]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
    /// A file that is not what it was when it was opened.
    #[error(
        "{path}: it was written to, or another file took its name, while it was read, so what was read does not belong together; run this again when it rests"
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A fault inside the named file.
    #[error("{path}: {source}")]
    In {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: Box<Error>,
    },
    /// No GGUF file at all.
    #[error("not a GGUF file: {}", Shown(.found))]
    NotGguf {
        /// What it looks like and what to do.
        found: String,
    },
    /// A GGUF version this program does not read.
    #[error("GGUF {}", Shown(.found))]
    Version {
        /// The version and what to do.
        found: String,
    },
    /// Bytes end before a field does.
    #[error(
        "{}, from byte {at}: the file ends at byte {len}, {missing} more bytes were expected; it is truncated, download it again",
        Shown(.what)
    )]
    Truncated {
        /// The field, key or tensor.
        what: String,
        /// Where it begins.
        at: u64,
        /// The file's size.
        len: u64,
        /// Bytes that are not there.
        missing: u64,
    },
    /// A count of things that the file has no room for.
    #[error(
        "{}, from byte {at}: {found} of at least {least} bytes each were expected, and the file ends at byte {len}; it is truncated or damaged, download it again",
        Shown(.what)
    )]
    Count {
        /// What is counted.
        what: String,
        /// How many are said to follow.
        found: u64,
        /// The fewest bytes of one.
        least: u64,
        /// Where they begin.
        at: u64,
        /// The file's size.
        len: u64,
    },
    /// A count or length beyond what is read here.
    #[error("{}: {found} is more than the {limit} that can be there", Shown(.what))]
    TooLarge {
        /// The field.
        what: String,
        /// The value read.
        found: u64,
        /// The largest value possible.
        limit: u64,
    },
    /// A metadata key with a wrong type or value, or none at all.
    #[error("{}: expected {}, found {}", Shown(.key), Shown(.expected), Shown(.found))]
    Key {
        /// The metadata key.
        key: String,
        /// What a right file has there.
        expected: String,
        /// What this one has.
        found: String,
    },
    /// A tensor entry that cannot be right.
    #[error("tensor {}: expected {}, found {}", Shown(.tensor), Shown(.expected), Shown(.found))]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What a right file has there.
        expected: String,
        /// What this one has.
        found: String,
    },
    /// Tensors of a type that is removed or was never known.
    #[error(
        "tensor {}: type {id} is {why} ({count} such tensors in the file{}); convert the model again with a type that ggml knows",
        Shown(.tensor), and_others(*.others)
    )]
    UnknownType {
        /// The first such tensor.
        tensor: String,
        /// The type id read.
        id: u32,
        /// Removed, foreign or unknown.
        why: &'static str,
        /// How many tensors have it.
        count: usize,
        /// How many more have other types that are not known.
        others: usize,
    },
    /// Parts of a split file that are not there.
    #[error("{count} of {total} parts are missing: {}; put them beside {}", Shown(.missing), Shown(.beside))]
    MissingParts {
        /// How many are missing.
        count: usize,
        /// How many there should be.
        total: usize,
        /// Their names.
        missing: String,
        /// The part that was given.
        beside: String,
    },
    /// A shape that is none.
    #[error("shape {found:?}: expected 1 to 4 dimensions whose product fits 64 bits")]
    Shape {
        /// The dimensions read.
        found: Vec<u64>,
    },
    /// A row that is no whole number of blocks.
    #[error("tensor {}: rows of {row_len} are no whole number of {dtype} blocks of {}", Shown(.tensor), dtype.block_len())]
    Block {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its row length.
        row_len: u64,
    },
    /// A tensor whose bytes do not match its shape.
    #[error("tensor {}: {dtype} {shape} takes {expected} bytes, found {found}", Shown(.tensor))]
    TensorBytes {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Shape,
        /// Bytes it takes.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// A type without a decoder.
    #[error("tensor type {dtype} cannot be decoded to numbers")]
    NoDecoder {
        /// The type.
        dtype: Dtype,
    },
    /// A field of [`crate::ModelConfig`] out of range.
    #[error("model config, {}: expected {}, found {}", Shown(.field), Shown(.expected), Shown(.found))]
    Config {
        /// The field.
        field: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A manifest that cannot be read or contradicts itself or its file.
    #[error("{}: expected {}, found {}", Shown(.field), Shown(.expected), Shown(.found))]
    Manifest {
        /// The field.
        field: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A directory that is no finished checkpoint.
    #[error("{path}: not a checkpoint: {why}")]
    NotACheckpoint {
        /// The directory.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// A layout of bytes this program does not know.
    #[error(
        "tensor {}: layout {} is not known here; convert again with this version of shardmill, or run the version that wrote it",
        Shown(.tensor), Shown(.layout)
    )]
    Layout {
        /// The tensor.
        tensor: String,
        /// The layout's name.
        layout: String,
    },
    /// A layout that is meant for another device.
    #[error(
        "tensor {}: layout {} is for GPUs with tensor cores, and rows of blocks are needed here; run `shardmill convert` again with --layout ggml, or use such a GPU",
        Shown(.tensor), Shown(.layout)
    )]
    OtherLayout {
        /// The tensor.
        tensor: String,
        /// The layout's name.
        layout: String,
    },
    /// A chunk of a rank file whose bytes changed.
    #[error(
        "{file}: rank {rank}, chunk {chunk} (bytes {start}..{end}) is damaged, in {}; copy or convert the file again",
        Shown(.tensors)
    )]
    Chunk {
        /// The rank file.
        file: String,
        /// Its rank.
        rank: usize,
        /// Index of the chunk.
        chunk: usize,
        /// First byte of the chunk.
        start: u64,
        /// Byte after the chunk.
        end: u64,
        /// The damaged tensors, as far as digests tell.
        tensors: String,
    },
    /// Bytes that do not have the digest the manifest gives.
    #[error(
        "{file}: digest is {found}, the manifest says {expected}; the file changed after it was written, copy or convert it again"
    )]
    Digest {
        /// The file.
        file: String,
        /// From the manifest.
        expected: String,
        /// Of the bytes.
        found: String,
    },
}

impl Error {
    /// The same error, said of a file.
    #[must_use]
    pub fn in_file(self, path: impl Into<PathBuf>) -> Self {
        match self {
            Self::In { .. } | Self::Io { .. } | Self::NotACheckpoint { .. } => self,
            other => Self::In { path: path.into(), source: Box::new(other) },
        }
    }

    pub(crate) fn io(path: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), action, source }
    }
}

fn and_others(others: usize) -> String {
    if others == 0 { String::new() } else { format!(", and {others} of other such types") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_files_is_one_short_line_whatever_it_is() {
        let shown = |text: &str| Shown(text).to_string();
        assert_eq!(shown("plain, ä, 中 and 😀"), "plain, ä, 中 and 😀");
        assert_eq!(shown("a\nb\r\t\u{1b}[31m"), "a\\nb\\r\\t\\u{1b}[31m");
        assert_eq!(shown("\u{202e}txt.exe\u{2028}"), "\\u{202e}txt.exe\\u{2028}");
        assert_eq!(shown(&"é".repeat(400)), "é".repeat(400));
        let long = shown(&("first".to_owned() + &"\n".repeat(10_000_000) + "; what to do"));
        assert!(long.starts_with("first\\n") && long.ends_with("; what to do"), "{long}");
        assert!(long.contains("[10000017 characters]") && long.len() < 1000, "{long}");
    }

    #[test]
    fn every_message_is_one_line() {
        let evil = || "x\ny".repeat(100_000);
        let errors = [
            Error::NotGguf { found: evil() },
            Error::Version { found: evil() },
            Error::Truncated { what: evil(), at: 1, len: 2, missing: 1 },
            Error::Count { what: evil(), found: 9, least: 1, at: 1, len: 2 },
            Error::TooLarge { what: evil(), found: 1, limit: 0 },
            Error::Key { key: evil(), expected: evil(), found: evil() },
            Error::Tensor { tensor: evil(), expected: evil(), found: evil() },
            Error::UnknownType { tensor: evil(), id: 1, why: "removed", count: 1, others: 1 },
            Error::Block { tensor: evil(), dtype: Dtype::Q4_K, row_len: 1 },
            Error::Config { field: evil(), expected: evil(), found: evil() },
            Error::Manifest { field: evil(), expected: evil(), found: evil() },
            Error::Layout { tensor: evil(), layout: evil() },
        ];
        for error in errors {
            let message = error.to_string();
            assert!(!message.contains('\n') && message.len() < 5000, "{}", message.len());
        }
    }
}
