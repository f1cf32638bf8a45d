//! From an answer's tokens to the text a client reads: characters are whole, stop strings cut, reasoning told apart.

mod channel;
mod needle;
mod stop;
mod utf8;

pub use channel::{Channels, Opening, THINK_END, THINK_START};
pub use stop::StopStrings;
pub use utf8::TextStream;

use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// A piece of an answer; either part may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// What the model thinks, without its markers. It comes before `content` where both are there.
    pub reasoning: String,
    /// What it says.
    pub content: String,
}

impl Piece {
    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty()
    }

    /// Puts another piece behind this one.
    pub fn append(&mut self, other: &Self) {
        self.reasoning.push_str(&other.reasoning);
        self.content.push_str(&other.content);
    }
}

/// One answer on its way from tokens to text. Each token costs its own length, however long the answer is.
pub struct AnswerText {
    tokenizer: Arc<Tokenizer>,
    utf8: TextStream,
    stops: StopStrings,
    channels: Channels,
    /// The markers, which are text to `channels` even where the vocabulary calls them control tokens.
    markers: [Option<u32>; 2],
}

impl AnswerText {
    /// An answer that ends before the first of `stop` and begins as `opening` says.
    pub fn new(tokenizer: Arc<Tokenizer>, stop: &[String], opening: Opening) -> Self {
        let markers = match opening {
            Opening::Plain => [None, None],
            _ => [THINK_START, THINK_END].map(|marker| tokenizer.token_id(marker)),
        };
        Self {
            tokenizer,
            utf8: TextStream::default(),
            stops: StopStrings::new(stop),
            channels: Channels::new(opening),
            markers,
        }
    }

    /// Takes the next token and gives what can be shown by now. Control tokens are not shown.
    pub fn push(&mut self, token: u32) -> Piece {
        if self.tokenizer.is_control(token) && !self.markers.contains(&Some(token)) {
            return Piece::default();
        }
        let text = self.utf8.push(self.tokenizer.token_bytes(token));
        let text = self.stops.push(&text);
        self.channels.push(&text)
    }

    /// Whether a stop string was found; nothing comes after it.
    pub fn stopped(&self) -> bool {
        self.stops.found()
    }

    /// What was held back until it was sure that no more tokens come.
    pub fn finish(&mut self) -> Piece {
        let text = self.utf8.finish();
        let mut text = self.stops.push(&text);
        text.push_str(&self.stops.finish());
        let mut piece = self.channels.push(&text);
        piece.append(&self.channels.finish());
        piece
    }
}
