//! Reasoning and content: what lies between `<think>` and `</think>`, and what comes after.

use super::Piece;
use super::needle::Needle;

/// Opens reasoning. Usually the prompt ends with it.
pub const THINK_START: &str = "<think>";
/// Closes reasoning.
pub const THINK_END: &str = "</think>";

/// How an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// All of it is content, markers included.
    Plain,
    /// The prompt has opened the reasoning.
    InReasoning,
    /// It may open its reasoning itself, as its first word.
    MayReason,
}

/// Tells reasoning from content in a stream of text.
#[derive(Clone, Debug)]
pub struct Channels {
    state: State,
    /// What a tool call begins with: it ends reasoning that the model forgot to close.
    call: Option<&'static str>,
}

#[derive(Clone, Debug)]
enum State {
    /// What came so far is white space and the beginning of `<think>`.
    Opening(String),
    /// `held` ends with the beginning of `</think>` or of a tool call.
    Reasoning { held: String, end: Needle, call: Option<Needle> },
    /// To the end.
    Content,
}

impl State {
    fn reasoning(call: Option<&str>) -> Self {
        Self::Reasoning { held: String::new(), end: Needle::new(THINK_END), call: call.map(Needle::new) }
    }
}

impl Channels {
    /// An answer that begins as `opening` says and whose tool calls begin with `call`, if it may have any.
    pub fn new(opening: Opening, call: Option<&'static str>) -> Self {
        let state = match opening {
            Opening::Plain => State::Content,
            Opening::InReasoning => State::reasoning(call),
            Opening::MayReason => State::Opening(String::new()),
        };
        Self { state, call }
    }

    /// Whether what comes next is reasoning, as far as is known.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning { .. })
    }

    /// Takes the next text and gives what is surely reasoning or content. Markers are in neither.
    pub fn push(&mut self, text: &str) -> Piece {
        let mut piece = Piece::default();
        let mut text = text.to_owned();
        while !text.is_empty() {
            text = self.step(&text, &mut piece);
        }
        piece
    }

    /// What was held back; it is no marker after all.
    pub fn finish(&mut self) -> Piece {
        match &mut self.state {
            State::Opening(held) => Piece { content: std::mem::take(held), ..Piece::default() },
            State::Reasoning { held, .. } => Piece { reasoning: std::mem::take(held), ..Piece::default() },
            State::Content => Piece::default(),
        }
    }

    /// Takes text up to the next change of state and gives the rest.
    fn step(&mut self, text: &str, piece: &mut Piece) -> String {
        match &mut self.state {
            State::Content => {
                piece.content.push_str(text);
                String::new()
            }
            State::Opening(held) => {
                held.push_str(text);
                let word = held.trim_start();
                if let Some(rest) = word.strip_prefix(THINK_START) {
                    let rest = rest.to_owned();
                    self.state = State::reasoning(self.call);
                    return rest;
                }
                if THINK_START.starts_with(word) {
                    return String::new();
                }
                let held = std::mem::take(held);
                self.state = State::Content;
                held
            }
            State::Reasoning { held, end, call } => {
                let before = held.len();
                held.push_str(text);
                for (at, &byte) in text.as_bytes().iter().enumerate() {
                    if end.push(byte) {
                        let rest = held.split_off(before + at + 1);
                        held.truncate(held.len() - THINK_END.len());
                        piece.reasoning.push_str(held);
                        self.state = State::Content;
                        return rest;
                    }
                    if call.as_mut().is_some_and(|call| call.push(byte)) {
                        let marker = self.call.map_or(0, str::len);
                        let rest = held.split_off(before + at + 1 - marker);
                        piece.reasoning.push_str(held);
                        self.state = State::Content;
                        return rest;
                    }
                }
                let open = end.matched().max(call.as_ref().map_or(0, Needle::matched));
                let hold = held.split_off(held.len() - open);
                piece.reasoning.push_str(held);
                *held = hold;
                String::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a>(
        opening: Opening,
        call: Option<&'static str>,
        pieces: impl IntoIterator<Item = &'a str>,
    ) -> (String, String) {
        let mut channels = Channels::new(opening, call);
        let mut all = Piece::default();
        for piece in pieces {
            all.append(channels.push(piece));
        }
        all.append(channels.finish());
        (all.reasoning, all.content)
    }

    fn check(opening: Opening, answer: &str, reasoning: &str, content: &str) {
        check_with(opening, None, answer, reasoning, content);
    }

    /// The answer gives the same at every pair of splits.
    fn check_with(
        opening: Opening,
        call: Option<&'static str>,
        answer: &str,
        reasoning: &str,
        content: &str,
    ) {
        let borders: Vec<usize> = (0..=answer.len()).filter(|&at| answer.is_char_boundary(at)).collect();
        for &first in &borders {
            for &second in borders.iter().filter(|&&second| second >= first) {
                let read = read(opening, call, [&answer[..first], &answer[first..second], &answer[second..]]);
                assert_eq!(read, (reasoning.into(), content.into()), "{answer:?} at {first}, {second}");
            }
        }
    }

    #[test]
    fn the_marker_parts_reasoning_from_content_at_every_split() {
        check(Opening::InReasoning, "I know: é.</think>Hello 😀", "I know: é.", "Hello 😀");
        check(Opening::InReasoning, "</think>ok", "", "ok");
        check(Opening::InReasoning, "a<</think>b", "a<", "b");
        check(Opening::InReasoning, "x </thin y", "x </thin y", "");
        check(Opening::InReasoning, "never closed </thi", "never closed </thi", "");
        check(Opening::InReasoning, "a</think>b</think>c<think>d", "a", "b</think>c<think>d");
    }

    #[test]
    fn an_answer_may_open_its_reasoning_itself() {
        check(Opening::MayReason, "<think>why</think>because", "why", "because");
        check(Opening::MayReason, "\n <think>why</think>because", "why", "because");
        check(Opening::MayReason, "plain <think>x", "", "plain <think>x");
        check(Opening::MayReason, " <thin", "", " <thin");
        check(Opening::MayReason, "<<think>x", "", "<<think>x");
    }

    #[test]
    fn a_tool_call_ends_reasoning_that_was_never_closed() {
        let call = Some("<tool_call>");
        check_with(
            Opening::InReasoning,
            call,
            "I look<tool_call>f</tool_call>",
            "I look",
            "<tool_call>f</tool_call>",
        );
        check_with(Opening::InReasoning, call, "a</think>b<tool_call>f", "a", "b<tool_call>f");
        check_with(Opening::MayReason, call, "<think>a <tool_c</think>", "a <tool_c", "");
        check(Opening::InReasoning, "I look<tool_call>f", "I look<tool_call>f", "");
    }

    #[test]
    fn plain_text_keeps_its_markers() {
        check(Opening::Plain, "<think>a</think>b", "", "<think>a</think>b");
    }

    #[test]
    fn what_cannot_be_a_marker_is_not_held_back() {
        let mut channels = Channels::new(Opening::InReasoning, None);
        assert_eq!(channels.push("a < b").reasoning, "a < b");
        assert_eq!(channels.push("x<").reasoning, "x");
        assert_eq!(channels.push("y").reasoning, "<y");
    }
}
