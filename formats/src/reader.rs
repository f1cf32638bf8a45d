//! A little-endian cursor over untrusted bytes: cap, check, then allocate.

use crate::Error;

/// GGUF's specification allows keys no more than this; names of tensors are far shorter.
const MAX_NAME_BYTES: usize = 65_535;

/// A cursor that names what it was reading when the bytes end.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    /// A cursor at the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Bytes read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes left.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next `n` bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`] naming `what` when fewer are left.
    pub fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], Error> {
        if n > self.remaining() {
            return Err(self.truncated(what, n as u64));
        }
        let taken = &self.bytes[self.position..self.position + n];
        self.position += n;
        Ok(taken)
    }

    /// The next `N` bytes.
    ///
    /// # Errors
    /// As [`Reader::take`].
    pub fn take_array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        Ok(self.take(N, what)?.try_into().expect("take returns as many bytes as asked for"))
    }

    /// The next u32.
    ///
    /// # Errors
    /// As [`Reader::take`].
    pub fn u32(&mut self, what: &str) -> Result<u32, Error> {
        self.take_array(what).map(u32::from_le_bytes)
    }

    /// The next u64.
    ///
    /// # Errors
    /// As [`Reader::take`].
    pub fn u64(&mut self, what: &str) -> Result<u64, Error> {
        self.take_array(what).map(u64::from_le_bytes)
    }

    /// A u64 that counts things of at least `least_bytes` each, so that it cannot exceed what is left of the bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`], or [`Error::Count`] naming `what`.
    pub fn count(&mut self, least_bytes: usize, what: &str) -> Result<usize, Error> {
        let found = self.u64(what)?;
        let least = least_bytes.max(1);
        if found > (self.remaining() / least) as u64 {
            let (at, len) = (self.position as u64, self.bytes.len() as u64);
            return Err(Error::Count { what: what.to_owned(), found, least: least as u64, at, len });
        }
        Ok(found as usize)
    }

    /// A u64 length and as many bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`] naming `what`.
    pub fn string(&mut self, what: &str) -> Result<&'a [u8], Error> {
        let len = self.u64(what)?;
        if len > self.remaining() as u64 {
            return Err(self.truncated(what, len));
        }
        self.take(len as usize, what)
    }

    fn truncated(&self, what: &str, expected: u64) -> Error {
        Error::Truncated {
            what: what.to_owned(),
            at: self.position as u64,
            len: self.bytes.len() as u64,
            missing: expected - self.remaining() as u64,
        }
    }

    /// A name: a u64 length and as many bytes of text, short and plain enough that an error can repeat it in one line.
    ///
    /// # Errors
    /// [`Error::Truncated`], or [`Error::Key`] naming `what`.
    pub fn name(&mut self, what: &str) -> Result<&'a str, Error> {
        let bytes = self.string(what)?;
        let refuse = |found: String| Error::Key {
            key: what.to_owned(),
            expected: format!("UTF-8 without control characters, at most {MAX_NAME_BYTES} bytes"),
            found,
        };
        if bytes.len() > MAX_NAME_BYTES {
            return Err(refuse(format!("{} bytes", bytes.len())));
        }
        let name = std::str::from_utf8(bytes).map_err(|_| refuse("other bytes".to_owned()))?;
        match name.chars().find(|c| c.is_control()) {
            Some(control) => Err(refuse(format!("{control:?} in it; the file is damaged, get it again"))),
            None => Ok(name),
        }
    }
}
