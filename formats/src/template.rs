//! What keeps a chat template from being taken apart at all. Writer and reader of a checkpoint hold to it alike.

/// Longest chat template, in bytes; real ones have up to 20 thousand.
pub const MAX_BYTES: usize = 64 << 10;
/// Most words, operators and brackets of one tag; real ones have up to some 100. Jinja's operators nest as deep as they are many,
/// and what takes them apart recurses as deep and, for each one, looks at all below it: 65 thousand of them take minutes.
pub const MAX_TAG_TOKENS: usize = 1000;

/// Whether a template is small enough to be taken apart, looked at as text alone.
///
/// # Errors
/// What it has more of than is allowed, in words that follow "one".
pub fn check_size(template: &str) -> Result<(), String> {
    if template.len() > MAX_BYTES {
        return Err(format!("of {} bytes, more than {MAX_BYTES}", template.len()));
    }
    let (tokens, at) = longest_tag(template.as_bytes());
    if tokens > MAX_TAG_TOKENS {
        let line = 1 + template.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count();
        return Err(format!(
            "with a tag of {tokens} words and operators in line {line}, more than {MAX_TAG_TOKENS}"
        ));
    }
    Ok(())
}

/// The most tokens of a tag, and where that one begins. Text that is no template may have any number of them.
fn longest_tag(text: &[u8]) -> (usize, usize) {
    let mut longest = (0, 0);
    let mut at = 0;
    while let Some(begin) = find(text, at, |pair| matches!(pair, b"{{" | b"{%" | b"{#")) {
        let (tokens, end) = match text[begin + 1] {
            b'#' => (0, find(text, begin + 2, |pair| pair == b"#}").map_or(text.len(), |end| end + 2)),
            b'%' => tokens(text, begin + 2, *b"%}"),
            _ => tokens(text, begin + 2, *b"}}"),
        };
        if tokens > longest.0 {
            longest = (tokens, begin);
        }
        at = end;
    }
    longest
}

/// Tokens of a tag whose inside begins at `at` and that ends with `close`, and where the text behind it begins.
fn tokens(text: &[u8], mut at: usize, close: [u8; 2]) -> (usize, usize) {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b >= 0x80;
    let (mut count, mut braces) = (0, 0_usize);
    while let Some(&byte) = text.get(at) {
        if braces == 0 && text[at..].starts_with(&close) {
            return (count, at + 2);
        }
        let start = at;
        at += 1;
        match byte {
            b'\'' | b'"' => {
                while let Some(&inside) = text.get(at) {
                    at += if inside == b'\\' { 2 } else { 1 };
                    if inside == byte {
                        break;
                    }
                }
            }
            b'{' => braces += 1,
            b'}' => braces = braces.saturating_sub(1),
            _ if is_word(byte) => at += text[at..].iter().take_while(|&&b| is_word(b)).count(),
            _ => {}
        }
        count += usize::from(!text[start].is_ascii_whitespace());
    }
    (count, text.len())
}

fn find(text: &[u8], from: usize, is_it: impl Fn(&[u8]) -> bool) -> Option<usize> {
    text.get(from..)?.windows(2).position(is_it).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_tag_is_found_wherever_it_is() {
        for (text, expected) in [
            ("", (0, 0)),
            ("{{ a }}", (1, 0)),
            ("{% if a.b == 'x }} %} y' %}{{ b }}", (7, 0)),
            ("{{ b }}{# - - - - }} #}{{- 'it\\'s' ~ c -}}", (5, 23)),
            ("{{ {'a': {'b': 1}} }}{{ c }}", (9, 0)),
            ("a { b {{ äöü", (1, 6)),
            ("{%", (0, 0)),
            ("{{ 'unclosed \\", (1, 0)),
        ] {
            assert_eq!(longest_tag(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn what_nests_deep_is_refused_by_its_line() {
        for nested in ["-", "not ", "+a", "~a", ".a", "|b", "()", "[", " if a else b"] {
            let said = check_size(&format!("a\n{{{{ {} x }}}}", nested.repeat(1000))).unwrap_err();
            assert!(said.contains("line 2") && said.contains("more than 1000"), "{nested}: {said}");
        }
        assert_eq!(check_size(&"{{ x }}\n".repeat(8000)), Ok(()));
        assert_eq!(check_size(&format!("{{{{ '{}' }}}}", "- ".repeat(9000))), Ok(()));
        assert!(check_size(&"x".repeat(MAX_BYTES + 1)).unwrap_err().contains("65537 bytes"));
    }
}
