//! The `tojson` filter, as transformers defines it: Python's `json.dumps` with `ensure_ascii=False` by default.

use super::guard::{Guard, MARK};
use super::unsupported;
use minijinja::Value;
use minijinja::value::{Kwargs, ValueKind};

type Result<T> = std::result::Result<T, minijinja::Error>;

/// Deepest nesting; Python gives up at about a thousand.
const DEEPEST: usize = 500;
/// Longest text, in bytes: more than any context holds.
const LONGEST: usize = 64 << 20;
/// Longest indentation of a level.
const WIDEST: usize = 64;

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
#[expect(clippy::needless_pass_by_value, reason = "the form that filters have")]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String> {
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;

    let indent = match indent.filter(|indent| !indent.is_none() && !indent.is_undefined()) {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_i64()) {
            (Some(text), _) if text.len() <= WIDEST => text.to_owned(),
            (Some(_), _) => return Err(unsupported("tojson: indent is too long")),
            (None, Some(spaces)) => " ".repeat(usize::try_from(spaces).unwrap_or(0).min(WIDEST)),
            (None, None) => return Err(unsupported("tojson: indent is neither a number nor a string")),
        }),
    };
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(unsupported("tojson: separators are two strings")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer {
        out: String::new(),
        ensure_ascii: ensure_ascii.unwrap_or(false),
        sort_keys: sort_keys.unwrap_or(false),
        indent,
        item,
        key,
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

/// A JSON value as `tojson` prints it when it is told nothing else.
pub(super) fn dumps(value: &serde_json::Value) -> Result<String> {
    tojson(&Guard::none().value(value), Kwargs::from_iter(Vec::<(String, Value)>::new()))
}

struct Writer {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    /// What one level is indented by; `None` keeps all on one line.
    indent: Option<String>,
    /// Between items.
    item: String,
    /// Between a key and its value.
    key: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<()> {
        if depth > DEEPEST {
            return Err(unsupported("tojson: the value is nested too deeply"));
        }
        if self.out.len() > LONGEST {
            return Err(unsupported("tojson: the value is too large"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(['[', ']'], &items, depth, |writer, item| writer.value(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list(['{', '}'], &entries, depth, |writer, (key, value)| {
                    writer.string(key);
                    writer.out.push_str(&writer.key.clone());
                    writer.value(value, depth + 1)
                })?;
            }
            kind => return Err(unsupported(format!("tojson: {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn list<T>(
        &mut self,
        [open, close]: [char; 2],
        items: &[T],
        depth: usize,
        write: impl Fn(&mut Self, &T) -> Result<()>,
    ) -> Result<()> {
        self.out.push(open);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.out.push_str(&self.item.clone());
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        let mut characters = text.chars().peekable();
        while let Some(character) = characters.next() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..='\u{1f}' => self.escape(character),
                // A mark stays a mark; only a doubled one is a character of the text.
                MARK if self.ensure_ascii && characters.next_if_eq(&MARK).is_none() => self.out.push(MARK),
                '\u{7f}'.. if self.ensure_ascii => self.escape(character),
                _ => self.out.push(character),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            self.out.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

fn key_text(key: &Value) -> Result<String> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number(key)),
        kind => Err(unsupported(format!("tojson: a {kind} cannot be a key"))),
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// A float as Python's `repr` prints it: the shortest digits that give it back, an exponent below 1e-4 and from 1e16.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` prints an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` prints a whole exponent");
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        for (value, python) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e16, "1.5e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(float(value), python);
        }
    }
}
