//! Bytes of tokens to whole characters.

/// Turns a stream of bytes into text. A character whose last bytes are still to come is held back, at most three bytes;
/// bytes that cannot become a character are U+FFFD, as [`String::from_utf8_lossy`] of the whole has them.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    pending: Vec<u8>,
}

impl TextStream {
    /// Takes the next bytes and gives the characters that are complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            let chunk = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(chunk.valid_up_to());
            text.push_str(std::str::from_utf8(valid).expect("valid up to here, says the error"));
            let Some(bad) = chunk.error_len() else {
                rest = after;
                break;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &after[bad..];
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        text
    }

    /// The bytes that were held back; no more come, so they are no character.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<String>, String) {
        let mut stream = TextStream::default();
        let texts = pieces.into_iter().map(|piece| stream.push(piece)).collect();
        (texts, stream.finish())
    }

    #[test]
    fn a_character_is_whole_at_every_split() {
        let whole = "a😀é—\u{1F468}\u{200D}\u{1F469}中".as_bytes();
        for first in 0..=whole.len() {
            for second in first..=whole.len() {
                let (texts, rest) = in_pieces([&whole[..first], &whole[first..second], &whole[second..]]);
                assert!(!texts.concat().contains('\u{FFFD}'), "{first} {second}");
                assert_eq!(texts.concat().as_bytes(), whole);
                assert_eq!(rest, "");
            }
        }
    }

    #[test]
    fn byte_by_byte_each_character_comes_with_its_last_byte() {
        let (texts, rest) = in_pieces("é😀".as_bytes().chunks(1));
        assert_eq!(texts, ["", "é", "", "", "", "😀"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn broken_bytes_are_replaced_as_the_standard_library_does() {
        let cases: [&[u8]; 7] = [
            b"ab\xffcd",
            b"\xf0\x9f\x98",
            b"\xf0\x9fx",
            b"\xe2\x82\xe2\x82\xac",
            b"\x80\x80",
            b"\xed\xa0\x80",
            b"\xc0\xafok\xf4\x90\x80\x80",
        ];
        for whole in cases {
            for split in 0..=whole.len() {
                let (texts, rest) = in_pieces([&whole[..split], &whole[split..]]);
                assert_eq!(texts.concat() + &rest, String::from_utf8_lossy(whole), "{whole:?} at {split}");
            }
        }
    }
}
