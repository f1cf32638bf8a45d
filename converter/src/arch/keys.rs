//! Typed access to an architecture's metadata keys; every fault names the file and the whole key.

use crate::Error;
use formats::gguf::{GgufSet, Metadata, Value};
use std::path::Path;

/// Sizes beyond this are no model of today.
const MAX_SIZE: u64 = 1 << 31;

pub(super) struct Keys<'a> {
    metadata: &'a Metadata,
    path: &'a Path,
    architecture: &'static str,
}

impl<'a> Keys<'a> {
    pub(super) fn new(set: &'a GgufSet, architecture: &'static str) -> Self {
        Self { metadata: set.metadata(), path: set.path(), architecture }
    }

    /// The error of a key whose value does not fit.
    pub(super) fn refuse(&self, key: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::key(self.path, &self.full(key), expected, found)
    }

    /// A size of at least 1.
    pub(super) fn required(&self, key: &str) -> Result<usize, Error> {
        match self.required_or_zero(key)? {
            0 => Err(self.refuse(key, "a number from 1 to 2^31", "0")),
            n => Ok(n),
        }
    }

    /// A size that may be 0, but has to be there.
    pub(super) fn required_or_zero(&self, key: &str) -> Result<usize, Error> {
        self.optional(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn optional(&self, key: &str) -> Result<Option<usize>, Error> {
        self.value(key).map(|value| self.size(key, value)).transpose()
    }

    pub(super) fn required_f32(&self, key: &str) -> Result<f32, Error> {
        self.optional_f32(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn optional_f32(&self, key: &str) -> Result<Option<f32>, Error> {
        let value = self.metadata.f32(&self.full(key)).map_err(|e| e.in_file(self.path))?;
        match value {
            Some(x) if !x.is_finite() => Err(self.refuse(key, "a finite number", x.to_string())),
            value => Ok(value),
        }
    }

    pub(super) fn optional_bool(&self, key: &str) -> Result<Option<bool>, Error> {
        Ok(self.metadata.bool(&self.full(key)).map_err(|e| e.in_file(self.path))?)
    }

    pub(super) fn optional_str(&self, key: &str) -> Result<Option<&'a str>, Error> {
        Ok(self.metadata.str(&self.full(key)).map_err(|e| e.in_file(self.path))?)
    }

    /// A size, or an array with one for each of `layers` layers.
    pub(super) fn per_layer(&self, key: &str, layers: usize) -> Result<Vec<usize>, Error> {
        match self.value(key) {
            None => Err(self.missing(key)),
            Some(Value::Array(_)) => {
                let sizes = self.sizes(key)?;
                if sizes.len() == layers {
                    return Ok(sizes);
                }
                Err(self.refuse(
                    key,
                    format!("one value for each of {layers} layers"),
                    format!("{} values", sizes.len()),
                ))
            }
            Some(_) => Ok(vec![self.required(key)?; layers]),
        }
    }

    /// A size, or an array that has the same one for every one of `block_count` layers.
    pub(super) fn uniform(&self, key: &str) -> Result<usize, Error> {
        if !matches!(self.value(key), Some(Value::Array(_))) {
            return self.required(key);
        }
        let (sizes, layers) = (self.sizes(key)?, self.required("block_count")?);
        match sizes.first() {
            _ if sizes.len() != layers => Err(self.refuse(
                key,
                format!("one value for each of {layers} layers"),
                format!("{} values", sizes.len()),
            )),
            Some(&first) if first > 0 && sizes.iter().all(|&n| n == first) => Ok(first),
            _ => Err(self.refuse(key, "the same number for every layer", format!("{sizes:?}"))),
        }
    }

    /// A bool or integer, or an array of them with one for each of `layers` layers.
    pub(super) fn flags(&self, key: &str, layers: usize) -> Result<Option<Vec<bool>>, Error> {
        let flag = |value: &Value| match value.as_bool() {
            Some(flag) => Ok(flag),
            None => match value.as_u64() {
                Some(n @ (0 | 1)) => Ok(n == 1),
                _ => Err(self.refuse(key, "bools, or integers 0 and 1", value.to_string())),
            },
        };
        let flags = match self.value(key) {
            None => return Ok(None),
            Some(value @ Value::Array(array)) => {
                let values = array
                    .values()
                    .ok_or_else(|| self.refuse(key, "an array of bools or integers", value.to_string()))?;
                values.map(|value| flag(&value)).collect::<Result<Vec<_>, _>>()?
            }
            Some(value) => vec![flag(value)?; layers],
        };
        if flags.len() != layers {
            let expected = format!("one value for each of the {layers} layers before the MTP layers");
            return Err(self.refuse(key, expected, format!("{} values", flags.len())));
        }
        Ok(Some(flags))
    }

    /// Number of tokens: what the vocabulary's size is taken from.
    pub(super) fn vocab_size(&self) -> Result<usize, Error> {
        const KEY: &str = "tokenizer.ggml.tokens";
        let tokens = self.metadata.array(KEY).map_err(|e| e.in_file(self.path))?;
        match tokens {
            Some(tokens) if !tokens.is_empty() => match self.optional("vocab_size")? {
                Some(said) if said != tokens.len() => {
                    let expected = format!("the {} tokens of {KEY}", tokens.len());
                    Err(self.refuse(
                        "vocab_size",
                        expected,
                        format!("{said}; convert the original model again"),
                    ))
                }
                _ => Ok(tokens.len()),
            },
            Some(_) => Err(Error::key(self.path, KEY, "the vocabulary", "an empty array")),
            None => Err(Error::key(
                self.path,
                KEY,
                "the vocabulary",
                "no such key; convert the original model again, with its tokenizer",
            )),
        }
    }

    fn missing(&self, key: &str) -> Error {
        self.refuse(key, "a value", "no such key; convert the original model again with a current llama.cpp")
    }

    fn sizes(&self, key: &str) -> Result<Vec<usize>, Error> {
        let array = self.metadata.array(&self.full(key)).map_err(|e| e.in_file(self.path))?;
        let values = array.and_then(|array| array.values());
        let values = values.ok_or_else(|| self.refuse(key, "an array of integers", "something else"))?;
        values.map(|value| self.size(key, &value)).collect()
    }

    fn size(&self, key: &str, value: &Value) -> Result<usize, Error> {
        match value.as_u64() {
            Some(n) if n <= MAX_SIZE => Ok(n as usize),
            _ => Err(self.refuse(key, "an integer from 0 to 2^31", value.to_string())),
        }
    }

    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.metadata.value(&self.full(key))
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }
}
