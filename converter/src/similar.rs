//! Names that look like a mistyped one.

use formats::TensorName;

/// How many names an error suggests.
const SUGGESTED: usize = 3;

/// Native names with the GGUF spelling of each beside it.
pub(crate) fn both_spellings(names: impl Iterator<Item = String>) -> impl Iterator<Item = String> {
    names.flat_map(|native| {
        let gguf = TensorName::from_native(&native).map(TensorName::gguf);
        [Some(native), gguf].into_iter().flatten()
    })
}

/// The closest of `names`, best first; none that have hardly anything in common with `name`.
pub(crate) fn closest(name: &str, names: impl Iterator<Item = String>) -> Vec<String> {
    let limit = name.chars().count() / 2 + 1;
    let mut scored: Vec<(usize, String)> = names.map(|other| (distance(name, &other), other)).collect();
    scored.retain(|(distance, _)| *distance <= limit);
    scored.sort();
    scored.dedup();
    scored.into_iter().take(SUGGESTED).map(|(_, name)| name).collect()
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_levenshtein() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("same", "same"), 0);
    }

    #[test]
    fn the_closest_name_comes_first_and_strangers_not_at_all() {
        let names = ["blk.0.attn_q_a.weight", "blk.0.attn_q_b.weight", "zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz"];
        let found = closest("blk.0.attn_q_c.weigt", names.iter().map(|s| (*s).to_owned()));
        assert_eq!(found, ["blk.0.attn_q_a.weight", "blk.0.attn_q_b.weight"]);
    }
}
