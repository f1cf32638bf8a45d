//! Keeps control tokens that a user typed from becoming control tokens.
//!
//! Every string that comes from outside gets a mark behind the first character of each control token in it. The template
//! handles marked strings as any others (only their length differs, so it can still look for `</think>`), the rendered
//! prompt is cut at the control tokens that are whole in it, which are the template's own, and the marks are taken out
//! of the text between. The mark is a code point that Unicode reserves for such use and that text does not have; where
//! it does, it is doubled.

use crate::tokenizer::AddedTokens;
use minijinja::Value;

/// A noncharacter: "for internal use" (Unicode 16, section 23.7).
pub(super) const MARK: char = '\u{FDD0}';

/// Marks strings on their way into a template.
pub(super) struct Guard<'a>(Option<&'a AddedTokens>);

impl<'a> Guard<'a> {
    /// Leaves strings as they are.
    pub(super) fn none() -> Self {
        Self(None)
    }

    /// Marks the control tokens of a vocabulary.
    pub(super) fn of(added: &'a AddedTokens) -> Self {
        Self(Some(added))
    }

    /// A JSON value for a template: every string in it is marked, the keys of objects too; their order is kept.
    pub(super) fn value(&self, json: &serde_json::Value) -> Value {
        match json {
            serde_json::Value::Null => Value::from(()),
            serde_json::Value::Bool(bool) => Value::from(*bool),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(number), _) => Value::from(number),
                (None, Some(number)) => Value::from(number),
                (None, None) => number.as_f64().map_or(Value::from(()), Value::from),
            },
            serde_json::Value::String(text) => Value::from(self.text(text)),
            serde_json::Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            serde_json::Value::Object(map) => {
                Value::from_pairs(map.iter().map(|(key, value)| (self.text(key), self.value(value))))
            }
        }
    }

    fn text(&self, text: &str) -> String {
        let Some(added) = self.0 else {
            return text.to_owned();
        };
        let mut marks = added.control_starts(text);
        // What the template puts behind this text could complete a token; white space between it may trim.
        marks.extend(added.open_ends(text.trim_end()));
        if marks.is_empty() && !text.contains(MARK) {
            return text.to_owned();
        }
        marks.sort_unstable();
        let mut marks = marks.into_iter().peekable();
        let mut marked = String::with_capacity(text.len() + 8);
        for (at, character) in text.char_indices() {
            marked.push(character);
            if character == MARK {
                marked.push(MARK);
            }
            if marks.next_if_eq(&at).is_some() {
                marked.push(MARK);
                while marks.next_if_eq(&at).is_some() {}
            }
        }
        marked
    }
}

/// The text without marks.
pub(super) fn remove(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if character != MARK || characters.next_if_eq(&MARK).is_some() {
            plain.push(character);
        }
    }
    plain
}
