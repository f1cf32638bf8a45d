//! Finds one string in a stream of bytes, byte by byte, knowing how much of it the stream ends with.

/// A string to look for and how much of it was just seen (Knuth, Morris, Pratt 1977).
#[derive(Clone, Debug)]
pub(super) struct Needle {
    bytes: Vec<u8>,
    /// By matched length less one: the longest shorter match that the same bytes end with.
    shorter: Vec<usize>,
    matched: usize,
}

impl Needle {
    /// # Panics
    /// On an empty string, which is everywhere.
    pub(super) fn new(text: &str) -> Self {
        assert!(!text.is_empty(), "an empty string cannot be looked for");
        let bytes = text.as_bytes().to_vec();
        let mut shorter = vec![0; bytes.len()];
        let mut length = 0;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = shorter[length - 1];
            }
            length += usize::from(bytes[at] == bytes[length]);
            shorter[at] = length;
        }
        Self { bytes, shorter, matched: 0 }
    }

    /// Takes a byte; true when the string is complete with it. Nothing may follow then.
    pub(super) fn push(&mut self, byte: u8) -> bool {
        while self.matched > 0 && byte != self.bytes[self.matched] {
            self.matched = self.shorter[self.matched - 1];
        }
        self.matched += usize::from(byte == self.bytes[self.matched]);
        self.matched == self.bytes.len()
    }

    /// How many of the last bytes are the beginning of the string.
    pub(super) fn matched(&self) -> usize {
        self.matched
    }
}
