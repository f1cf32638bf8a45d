//! Answers that follow a grammar: which tokens may come next, so that nothing else ever does.
//!
//! Everything here fails closed: a grammar that cannot be compiled is refused before anything runs, and one that cannot go
//! on ends its answer with an error.

use crate::tokenizer::Tokenizer;
use kernels::candidates::Selection;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::sync::Arc;

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// Any JSON object.
    JsonObject,
    /// JSON that this schema allows.
    JsonSchema(Value),
    /// What a regular expression matches as a whole.
    Regex(String),
    /// What a grammar in Lark's notation derives.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Compiles shapes for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    eos_token_ids: Vec<u32>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammars(eos {:?})", self.eos_token_ids)
    }
}

impl Grammars {
    /// For a vocabulary whose answers end with any of `eos_token_ids`, at least one.
    ///
    /// # Errors
    /// One line, when the vocabulary cannot be made a trie.
    pub fn new(tokenizer: &Tokenizer, eos_token_ids: &[u32]) -> Result<Self, String> {
        let first = *eos_token_ids.first().ok_or("no token ends an answer")?;
        let size = u32::try_from(tokenizer.vocab_size()).map_err(|_| "the vocabulary is too large")?;
        let words: Vec<Vec<u8>> = (0..size)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                // Added tokens mean something by themselves and are no text of an answer.
                if tokenizer.is_added(id) {
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
                } else {
                    bytes.to_vec()
                }
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(size, first), &words).with_eos_tokens(eos_token_ids);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(one_line)?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            precompute_large_lexemes: false,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self { factory, eos_token_ids: eos_token_ids.to_vec() })
    }

    /// A constraint for one answer. It begins behind the token `after` where there is one, such as the end of the reasoning.
    ///
    /// # Errors
    /// What is wrong with the shape, in one line.
    pub fn compile(&self, shape: &Shape, after: Option<u32>) -> Result<Constraint, String> {
        let grammar = match shape {
            Shape::JsonObject => TopLevelGrammar::from_json_schema(compact(&json!({"type": "object"}))),
            Shape::JsonSchema(schema) => TopLevelGrammar::from_json_schema(compact(schema)),
            Shape::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Shape::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
            Shape::Choice(choices) => {
                let quoted: Vec<String> =
                    choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | ")))
            }
        };
        // The library promises errors, not that it never panics on a grammar that nobody thought of.
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Matcher::new(self.factory.create_parser(grammar))
        }));
        let mut matcher = made.map_err(|_| "the grammar could not be compiled".to_owned())?;
        if let Some(error) = matcher.get_error() {
            return Err(first_line(&error));
        }
        if let Some(warning) = matcher.grammar_warnings().first() {
            return Err(first_line(warning));
        }
        // Rules that only lead to each other allow nothing at all, which shows when the first token is asked for.
        let first = matcher.compute_mask_or_eos();
        if first.map_or(true, |mask| mask.is_zero()) {
            return Err("the grammar allows no answer".to_owned());
        }
        Ok(Constraint {
            matcher,
            after,
            eos_token_ids: self.eos_token_ids.clone(),
            field: "the grammar".to_owned(),
        })
    }
}

/// The schema with JSON as Python prints it: a model could fill any length with white space that a grammar allows.
fn compact(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(map) = schema.as_object_mut() {
        let layout = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        map.insert("x-guidance".to_owned(), layout);
    }
    schema
}

/// Where one answer is in its grammar.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    /// `None` once it holds.
    after: Option<u32>,
    eos_token_ids: Vec<u32>,
    /// What the client calls it.
    field: String,
}

/// A grammar led to where nothing may follow, which does not show before it is there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct DeadEnd {
    /// Where the client asked for it.
    pub field: String,
    /// In one line.
    pub why: String,
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Constraint(after {:?})", self.after)
    }
}

/// Whether an answer goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Something may follow.
    Open,
    /// It is complete, and nothing may.
    Complete,
}

impl Constraint {
    /// The same, asked for by this field of a request.
    #[must_use]
    pub fn of_field(self, field: &str) -> Self {
        Self { field: field.to_owned(), ..self }
    }

    fn dead_end(&self, why: impl std::fmt::Display) -> DeadEnd {
        DeadEnd { field: self.field.clone(), why: one_line(why) }
    }

    /// Makes every token impossible that must not come next.
    ///
    /// # Errors
    /// The grammar cannot go on.
    pub fn ask(&mut self, selection: &mut Selection) -> Result<(), DeadEnd> {
        if self.after.is_some() {
            // An answer that ends before the grammar begins would not follow it.
            selection.forbid(&self.eos_token_ids);
            return Ok(());
        }
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| self.dead_end(error))?;
        let mut allowed = mask.as_slice()[..mask.len().div_ceil(32)].to_vec();
        // Bits beyond the vocabulary have no meaning.
        if let Some(last) = allowed.last_mut().filter(|_| mask.len() % 32 > 0) {
            *last &= (1 << (mask.len() % 32)) - 1;
        }
        selection.allowed = Some(allowed);
        Ok(())
    }

    /// What to say where of all tokens that may come next the model gives none a chance.
    pub fn nothing_fits(&self) -> DeadEnd {
        self.dead_end("no token fits")
    }

    /// Takes note of a token that was drawn.
    ///
    /// # Errors
    /// The grammar cannot go on.
    pub fn accept(&mut self, token: u32) -> Result<Progress, DeadEnd> {
        if let Some(after) = self.after {
            if token == after {
                self.after = None;
            }
            return Ok(Progress::Open);
        }
        self.matcher.consume_token(token).map_err(|error| self.dead_end(error))?;
        Ok(if self.matcher.is_stopped() { Progress::Complete } else { Progress::Open })
    }
}

fn one_line(error: impl std::fmt::Display) -> String {
    first_line(&format!("{error:#}"))
}

/// The library adds pages about its state.
fn first_line(message: &str) -> String {
    const LONGEST: usize = 300;
    let mut line =
        message.lines().find(|line| !line.trim().is_empty()).unwrap_or("unknown").trim().to_owned();
    // Faults of regular expressions are drawn first and named last.
    let named = message.lines().find_map(|line| line.trim().strip_prefix("error: "));
    if let Some(named) = named.filter(|_| line.ends_with(':')) {
        line.truncate(line.floor_char_boundary(LONGEST));
        line = format!("{line} {named}");
    }
    line.truncate(line.floor_char_boundary(LONGEST));
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Specials;
    use std::path::Path;

    const EOS: [u32; 3] = [4076, 4083, 4085];

    fn tokenizer() -> Tokenizer {
        Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-glm5-hf")).unwrap()
    }

    fn grammars(tokenizer: &Tokenizer) -> Grammars {
        Grammars::new(tokenizer, &EOS).unwrap()
    }

    /// What may come next.
    fn allowed(constraint: &mut Constraint) -> Vec<u32> {
        // The model has more rows than the vocabulary.
        let (mut logits, mut selection) = (vec![0.0; 4200], Selection::default());
        constraint.ask(&mut selection).unwrap();
        selection.write(&mut logits);
        (0..).zip(logits).filter(|&(_, logit)| logit == 0.0).map(|(id, _)| id).collect()
    }

    /// Whether the grammar lets a text through, and whether it may end there.
    fn takes(tokenizer: &Tokenizer, constraint: &mut Constraint, text: &str) -> bool {
        for token in tokenizer.encode(text, Specials::AsText).unwrap() {
            if !allowed(constraint).contains(&token) {
                return false;
            }
            if constraint.accept(token).unwrap() == Progress::Complete {
                return true;
            }
        }
        EOS.iter().all(|id| allowed(constraint).contains(id))
    }

    #[test]
    fn schemas_let_through_what_they_allow_and_nothing_else() {
        let tokenizer = tokenizer();
        let grammars = grammars(&tokenizer);
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer", "minimum": 3}},
            "required": ["city"], "additionalProperties": false});
        for (shape, text, good) in [
            (Shape::JsonObject, r#"{"a": [1, true, null]}"#, true),
            (Shape::JsonObject, "[1]", false),
            (Shape::JsonObject, r#"{"a""#, false),
            (Shape::JsonSchema(schema.clone()), r#"{"city": "Zürich 😀", "n": 12}"#, true),
            (Shape::JsonSchema(schema.clone()), r#"{"city": "Oslo", "n": 2}"#, false),
            (Shape::JsonSchema(schema.clone()), r#"{"n": 12}"#, false),
            (Shape::JsonSchema(schema), r#"{"city": "Oslo", "x": 1}"#, false),
            (
                Shape::JsonSchema(json!({"$defs": {"a": {"enum": ["x", "y"]}}, "$ref": "#/$defs/a"})),
                "\"y\"",
                true,
            ),
            (Shape::JsonSchema(json!({"type": "string", "maxLength": 3})), "\"Zü\\n\"", true),
            (Shape::JsonSchema(json!({"type": "string", "maxLength": 3})), "\"Oslo\"", false),
            (Shape::JsonSchema(json!({"type": "string", "minLength": 2})), "\"a\"", false),
            (Shape::JsonSchema(json!({"type": "string", "pattern": "^[a-z]+$"})), "\"oslo\"", true),
            (Shape::JsonSchema(json!({"type": "string", "pattern": "^[a-z]+$"})), "\"Oslo\"", false),
            (Shape::JsonSchema(json!({"type": "string", "pattern": "l", "maxLength": 3})), "\"solo\"", false),
            (Shape::JsonSchema(json!({"pattern": "^a", "type": ["string", "null"]})), "\"b\"", false),
            (Shape::JsonSchema(json!({"type": "string", "format": "date"})), "\"today\"", false),
            (Shape::Regex("[a-c]{2,3}".into()), "abc", true),
            (Shape::Regex("[a-c]{2,3}".into()), "a", false),
            (Shape::Choice(vec!["yes".into(), "no \"way\"".into()]), "no \"way\"", true),
            (Shape::Choice(vec!["yes".into(), "no".into()]), "maybe", false),
        ] {
            let mut constraint = grammars.compile(&shape, None).unwrap();
            assert_eq!(takes(&tokenizer, &mut constraint, text), good, "{shape:?} {text}");
        }
    }

    #[test]
    fn what_cannot_be_compiled_is_refused_in_one_line() {
        let tokenizer = tokenizer();
        let grammars = grammars(&tokenizer);
        let mut deep = json!({"type": "string"});
        for _ in 0..100 {
            deep = json!({"type": "array", "items": deep});
        }
        for shape in [
            Shape::JsonSchema(json!(5)),
            Shape::JsonSchema(json!({"type": "nothing"})),
            Shape::JsonSchema(json!({"type": "string", "pattern": "("})),
            Shape::JsonSchema(json!({"$ref": "https://example.com/schema"})),
            Shape::JsonSchema(json!({"$ref": "#/$defs/nowhere"})),
            Shape::JsonSchema(json!({"type": "object", "minProperties": "x"})),
            Shape::JsonSchema(json!({"not": {"type": "string"}})),
            Shape::JsonSchema(json!({"allOf": [{"type": "string"}, {"type": "integer"}]})),
            Shape::Regex("(".into()),
            Shape::Lark("nothing".into()),
            Shape::Lark("start: x\nx: x".into()),
            Shape::JsonSchema(json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
            Shape::Lark(String::new()),
        ] {
            let error = grammars.compile(&shape, None).map(|_| ()).expect_err(&format!("{shape:?}"));
            assert!(!error.is_empty() && error.lines().count() == 1 && error.len() <= 300, "{error}");
        }
        // As client libraries write them: titles, defaults, formats, references.
        let written = json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Step", "type": "object", "description": "d",
            "$defs": {"Kind": {"title": "Kind", "enum": ["a", "b"], "type": "string"}},
            "properties": {"kind": {"$ref": "#/$defs/Kind"}, "when": {"title": "When", "type": "string", "format": "date-time", "default": "x"},
                "more": {"anyOf": [{"items": {"$ref": "#/$defs/Kind"}, "type": "array"}, {"type": "null"}], "default": null, "examples": [null]},
                "n": {"type": "number", "exclusiveMinimum": 0, "maximum": 9, "multipleOf": 0.5}},
            "required": ["kind", "when", "more", "n"], "additionalProperties": false});
        assert_eq!(grammars.compile(&Shape::JsonSchema(written), None).map(|_| ()), Ok(()));
        // Deep but right.
        assert!(grammars.compile(&Shape::JsonSchema(deep), None).is_ok());
        // A pattern that once stopped a server goes either way, and nothing stops.
        let _ = grammars.compile(&Shape::JsonSchema(json!({"type": "string", "pattern": "^+[a-z]$"})), None);
    }

    #[test]
    fn a_rule_without_an_end_is_told_by_the_field_that_has_it() {
        let tokenizer = tokenizer();
        let endless = Shape::Lark("start: \"a\" x\nx: x \"b\"".into());
        let mut constraint = grammars(&tokenizer).compile(&endless, None).unwrap().of_field("guided_grammar");
        let a = tokenizer.encode("a", Specials::AsText).unwrap()[0];
        assert_eq!(allowed(&mut constraint), [a]);
        let accepted = constraint.accept(a);
        let dead_end = accepted.and_then(|_| constraint.ask(&mut Selection::default())).unwrap_err();
        assert_eq!((&*dead_end.field, dead_end.why.lines().count()), ("guided_grammar", 1), "{dead_end}");
    }

    #[test]
    fn added_tokens_are_no_text_and_reasoning_comes_first() {
        let tokenizer = tokenizer();
        let mut constraint =
            grammars(&tokenizer).compile(&Shape::JsonObject, tokenizer.token_id("</think>")).unwrap();
        let free = allowed(&mut constraint);
        assert!(free.len() > 4000 && EOS.iter().all(|id| !free.contains(id)), "anything but an end");
        for token in tokenizer.encode("hm: [</think>", Specials::AsText).unwrap() {
            assert_eq!(constraint.accept(token), Ok(Progress::Open));
        }
        assert!(takes(&tokenizer, &mut constraint.clone(), r#"{"a": "b"}"#));
        for token in tokenizer.encode("{\"", Specials::AsText).unwrap() {
            constraint.accept(token).unwrap();
        }
        let inside = allowed(&mut constraint);
        assert!(inside.iter().all(|&id| !tokenizer.is_added(id)), "{inside:?}");
        assert!(constraint.accept(4083).is_err(), "and nothing else is taken");
    }
}
