//! From an answer's tokens to the text a client reads: characters are whole, stop strings cut, reasoning told apart.

mod channel;
mod needle;
mod stop;
mod tools;
mod utf8;

pub use channel::{Channels, Opening, THINK_END, THINK_START};
pub use stop::StopStrings;
pub use tools::{CallDelta, Calls, LONGEST_NAME, ToolCalls, ToolFormat, Tools, is_bare_text, is_tool_name};
pub use utf8::TextStream;

use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// A piece of an answer; any part may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// What the model thinks, without its markers. It comes before `content` where both are there.
    pub reasoning: String,
    /// What it says.
    pub content: String,
    /// What it calls.
    pub calls: Vec<CallDelta>,
}

impl Piece {
    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty() && self.calls.is_empty()
    }

    /// Puts another piece behind this one.
    pub fn append(&mut self, other: Self) {
        self.reasoning.push_str(&other.reasoning);
        self.content.push_str(&other.content);
        self.calls.extend(other.calls);
    }
}

/// How an answer is read.
#[derive(Clone, Debug)]
pub struct Reading {
    /// It ends before the first of these.
    pub stop: Vec<String>,
    /// How it begins.
    pub opening: Opening,
    /// What it may call; `None` leaves calls in the text.
    pub tools: Option<Arc<Tools>>,
}

impl Reading {
    /// Text in which nothing is told apart.
    pub fn plain() -> Self {
        Self { stop: Vec::new(), opening: Opening::Plain, tools: None }
    }
}

/// One answer on its way from tokens to text. Each token costs its own length, however long the answer is.
pub struct AnswerText {
    tokenizer: Arc<Tokenizer>,
    utf8: TextStream,
    stops: StopStrings,
    channels: Channels,
    calls: Option<ToolCalls>,
    /// Markers, which are text here even where the vocabulary calls them control tokens.
    markers: Vec<u32>,
}

impl AnswerText {
    /// An answer that is read like this.
    pub fn new(tokenizer: Arc<Tokenizer>, reading: &Reading) -> Self {
        let mut markers = Vec::new();
        if reading.opening != Opening::Plain {
            markers.extend([THINK_START, THINK_END]);
        }
        let format = reading.tools.as_ref().map(|tools| tools.format());
        markers.extend(format.into_iter().flat_map(ToolFormat::markers));
        Self {
            markers: markers.into_iter().filter_map(|marker| tokenizer.token_id(marker)).collect(),
            tokenizer,
            utf8: TextStream::default(),
            stops: StopStrings::new(&reading.stop),
            channels: Channels::new(reading.opening, format.map(ToolFormat::opening)),
            calls: reading.tools.clone().map(ToolCalls::new),
        }
    }

    /// Takes the next token and gives what can be shown by now. Control tokens are not shown.
    pub fn push(&mut self, token: u32) -> Piece {
        if self.tokenizer.is_control(token) && !self.markers.contains(&token) {
            return Piece::default();
        }
        let text = self.utf8.push(self.tokenizer.token_bytes(token));
        let text = self.stops.push(&text);
        let piece = self.channels.push(&text);
        self.find_calls(piece)
    }

    /// Whether nothing comes after what was given: a stop string was found, or the only call is complete.
    pub fn stopped(&self) -> bool {
        self.stops.found() || self.calls.as_ref().is_some_and(ToolCalls::is_done)
    }

    /// Which of the stop strings was found.
    pub fn stop_string(&self) -> Option<usize> {
        self.stops.which()
    }

    /// Whether it has called something.
    pub fn has_calls(&self) -> bool {
        self.calls.as_ref().is_some_and(ToolCalls::any)
    }

    /// Whether the next token is reasoning, as far as is known.
    pub fn is_reasoning(&self) -> bool {
        self.channels.is_reasoning()
    }

    /// What was held back until it was sure that no more tokens come.
    pub fn finish(&mut self) -> Piece {
        let text = self.utf8.finish();
        let mut text = self.stops.push(&text);
        text.push_str(&self.stops.finish());
        let piece = self.channels.push(&text);
        let mut piece = self.find_calls(piece);
        let held = self.channels.finish();
        piece.append(self.find_calls(held));
        if let Some(calls) = &mut self.calls {
            let found = calls.finish();
            piece.append(Piece { content: found.content, calls: found.calls, ..Piece::default() });
        }
        piece
    }

    fn find_calls(&mut self, mut piece: Piece) -> Piece {
        if let Some(calls) = &mut self.calls {
            let found = calls.push(&piece.content);
            piece.content = found.content;
            piece.calls = found.calls;
        }
        piece
    }
}
