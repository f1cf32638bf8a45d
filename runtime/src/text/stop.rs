//! Stop strings: the text ends before the first of them, wherever tokens begin and end.

use super::needle::Needle;

/// Cuts a stream of text before the first stop string. The one that is complete first wins; of two that are complete
/// at the same byte, the longer. How the text is cut into pieces changes nothing.
#[derive(Clone, Debug)]
pub struct StopStrings {
    needles: Vec<Needle>,
    /// The end of the text so far that may be the beginning of a stop string.
    held: String,
    /// Which one was found.
    found: Option<usize>,
}

impl StopStrings {
    /// # Panics
    /// On an empty stop string.
    pub fn new(stops: &[String]) -> Self {
        Self {
            needles: stops.iter().map(|stop| Needle::new(stop)).collect(),
            held: String::new(),
            found: None,
        }
    }

    /// Takes the next text and gives what is surely before every stop string.
    pub fn push(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        let before = self.held.len() - text.len();
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            let mut longest = None;
            for (which, needle) in self.needles.iter_mut().enumerate() {
                if needle.push(byte) {
                    longest = longest.max(Some((needle.matched(), which)));
                }
            }
            if let Some((length, which)) = longest {
                self.found = Some(which);
                self.held.truncate(before + at + 1 - length);
                return std::mem::take(&mut self.held);
            }
        }
        let hold = self.needles.iter().map(Needle::matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - hold);
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether a stop string was found.
    pub fn found(&self) -> bool {
        self.found.is_some()
    }

    /// Which of the stop strings it was.
    pub fn which(&self) -> Option<usize> {
        self.found
    }

    /// What was held back; it is no stop string after all.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut stream = StopStrings::new(&stops);
        let mut out: Vec<String> = pieces.iter().map(|piece| stream.push(piece)).collect();
        out.push(stream.finish());
        (out, stream.found())
    }

    fn text(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let (pieces, found) = run(stops, pieces);
        (pieces.concat(), found)
    }

    #[test]
    fn a_stop_string_over_several_tokens_is_cut_at_every_split() {
        let whole = "ABCDEFGHIJKLMN";
        for first in 0..=whole.len() {
            for second in first..=whole.len() {
                let pieces = [&whole[..first], &whole[first..second], &whole[second..]];
                assert_eq!(text(&["DEFGHIJ"], &pieces), ("ABC".into(), true), "{pieces:?}");
            }
        }
    }

    #[test]
    fn a_failed_beginning_is_flushed_at_once_and_an_open_one_at_the_end() {
        assert_eq!(run(&["DEFGHIJ"], &["ABC DEF", "GHX", " DEFG"]).0, ["ABC ", "DEFGHX", " ", "DEFG"]);
        assert_eq!(
            run(&["DEFGHIJ"], &["DEDE", "F"]),
            (vec!["DE".into(), String::new(), "DEF".into()], false)
        );
    }

    #[test]
    fn only_a_true_beginning_is_held_back() {
        assert_eq!(run(&["aab"], &["aaaa"]).0, ["aa", "aa"]);
        assert_eq!(text(&["aab"], &["a", "a", "a", "a", "b", "c"]), ("aa".into(), true));
        assert_eq!(run(&["\n\nUser:"], &["Hello.\n", "Next"]).0, ["Hello.", "\nNext", ""]);
    }

    #[test]
    fn the_first_complete_one_wins_and_of_two_the_longer() {
        assert_eq!(text(&["bcd", "abcde"], &["xabcdef"]), ("xa".into(), true));
        assert_eq!(text(&["d", "bcd"], &["ab", "cd"]), ("a".into(), true));
    }

    #[test]
    fn characters_of_several_bytes_stay_whole() {
        assert_eq!(text(&["é😀"], &["cafè é", "😁é", "😀!"]), ("cafè é😁".into(), true));
        assert_eq!(run(&["😀"], &["😁", "x"]).0, ["😁", "x", ""]);
    }

    #[test]
    fn no_stop_strings_hold_nothing() {
        assert_eq!(run(&[], &["a", "b"]).0, ["a", "b", ""]);
    }
}
