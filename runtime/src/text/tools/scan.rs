//! Looks for markers in text that comes in pieces, reading each byte about once.

/// Text that is not used yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Scan {
    held: String,
    /// Nothing that was looked for begins before.
    from: usize,
}

impl Scan {
    pub(super) fn push(&mut self, text: &str) {
        self.held.push_str(text);
    }

    /// Puts text back before everything else.
    pub(super) fn put_back(&mut self, text: &str) {
        self.held.insert_str(0, text);
        self.from = 0;
    }

    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Everything, used up.
    pub(super) fn rest(&mut self) -> String {
        self.from = 0;
        std::mem::take(&mut self.held)
    }

    /// The text before the first of the markers, and which one it is; both are used up. `None` changes nothing.
    ///
    /// Between calls that find nothing the markers must be the same.
    pub(super) fn find(&mut self, markers: &[&str]) -> Option<(String, usize)> {
        let first = |which: usize| {
            let marker: &str = markers[which];
            self.held[self.from..].find(marker).map(|at| (self.from + at, which))
        };
        let Some((at, which)) = (0..markers.len()).filter_map(first).min() else {
            let longest = markers.iter().map(|marker| marker.len()).max().unwrap_or(0);
            self.from = self.held.floor_char_boundary(self.held.len().saturating_sub(longest));
            return None;
        };
        let rest = self.held.split_off(at + markers[which].len());
        let mut before = std::mem::replace(&mut self.held, rest);
        before.truncate(at);
        self.from = 0;
        Some((before, which))
    }

    /// The text that cannot be the beginning of a marker, used up.
    pub(super) fn safe(&mut self, markers: &[&str]) -> String {
        let longest = markers.iter().map(|marker| marker.len()).max().unwrap_or(0);
        let first = self.held.floor_char_boundary(self.held.len().saturating_sub(longest));
        let is_open = |at: &usize| {
            self.held.is_char_boundary(*at)
                && markers.iter().any(|marker| marker.starts_with(&self.held[*at..]))
        };
        let hold = (first..self.held.len()).find(is_open).unwrap_or(self.held.len());
        let rest = self.held.split_off(hold);
        self.from = 0;
        std::mem::replace(&mut self.held, rest)
    }
}
