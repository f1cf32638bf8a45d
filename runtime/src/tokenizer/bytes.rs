//! What each token stands for, as bytes: byte-level BPE spells every byte as one printable character.

/// The bytes of every id, in one block of memory.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Where each id's bytes end; they begin where the one before ends.
    ends: Vec<usize>,
}

impl TokenBytes {
    /// Reads the vocabulary. An error is one line: a byte that no token spells would be dropped from every text.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Result<Self, String> {
        let alphabet = Alphabet::new();
        if let Some(byte) = utf8_bytes()
            .find(|&byte| tokenizer.token_to_id(&alphabet.chars[usize::from(byte)].to_string()).is_none())
        {
            return Err(format!(
                "no token stands for byte {byte:#04x}: text that has it could not be encoded"
            ));
        }
        let added = tokenizer.get_added_tokens_decoder();
        let vocab = tokenizer.get_vocab(true);
        let len = vocab.values().max().map_or(0, |&id| id as usize + 1);
        let mut spellings = vec![None; len];
        for (token, &id) in &vocab {
            spellings[id as usize] = Some(token.as_str());
        }
        let mut table = Self { bytes: Vec::new(), ends: Vec::with_capacity(len) };
        for (id, spelling) in (0u32..).zip(spellings) {
            match spelling {
                None => (),
                Some(spelling) if added.contains_key(&id) => {
                    table.bytes.extend_from_slice(spelling.as_bytes())
                }
                Some(spelling) => alphabet.append(spelling, &mut table.bytes),
            }
            table.ends.push(table.bytes.len());
        }
        Ok(table)
    }

    pub(super) fn of(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else {
            return &[];
        };
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }
}

/// GPT-2's spelling of bytes: printable Latin-1 characters are themselves, the others follow from U+0100 on.
struct Alphabet {
    chars: [char; 256],
    /// By character below U+0200.
    bytes: [Option<u8>; 512],
}

impl Alphabet {
    fn new() -> Self {
        let mut alphabet = Self { chars: ['\0'; 256], bytes: [None; 512] };
        let mut others = 0x100u16;
        for byte in 0..=u8::MAX {
            let code = if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
                u16::from(byte)
            } else {
                others += 1;
                others - 1
            };
            alphabet.chars[usize::from(byte)] =
                char::from_u32(code.into()).expect("codes below U+0200 are characters");
            alphabet.bytes[usize::from(code)] = Some(byte);
        }
        alphabet
    }

    /// Appends the bytes that a token's spelling stands for; a spelling outside the alphabet stands for itself.
    fn append(&self, spelling: &str, out: &mut Vec<u8>) {
        let start = out.len();
        for character in spelling.chars() {
            match self.bytes.get(character as usize).copied().flatten() {
                Some(byte) => out.push(byte),
                None => {
                    out.truncate(start);
                    out.extend_from_slice(spelling.as_bytes());
                    return;
                }
            }
        }
    }
}

/// The bytes that occur in UTF-8.
fn utf8_bytes() -> impl Iterator<Item = u8> {
    (0..=u8::MAX).filter(|byte| !matches!(byte, 0xc0 | 0xc1 | 0xf5..=0xff))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let alphabet = Alphabet::new();
        assert_eq!(alphabet.chars[usize::from(b' ')], 'Ġ');
        assert_eq!(alphabet.chars[usize::from(b'\n')], 'Ċ');
        assert_eq!(alphabet.chars[0xad], 'Ń');
        let all: String = alphabet.chars.iter().collect();
        let mut back = Vec::new();
        alphabet.append(&all, &mut back);
        assert_eq!(back, (0..=u8::MAX).collect::<Vec<_>>());
    }

    #[test]
    fn a_spelling_outside_the_alphabet_is_its_own_text() {
        let mut out = b"before".to_vec();
        Alphabet::new().append("Ġ｜", &mut out);
        assert_eq!(out, "beforeĠ｜".as_bytes());
    }
}
