//! One answer as it comes: the engine's events turned into text, counted, and ended.

use crate::constraint::DeadEnd;
use crate::engine::{Event, EventStream, FinishReason};
use crate::logprobs::TokenLogprobs;
use crate::text::{AnswerText, Piece};
use std::task::{Context, Poll, ready};

/// An answer that is being generated. Dropping it cancels it.
pub struct Generation {
    /// `None` when it has ended.
    events: Option<EventStream>,
    text: AnswerText,
    counts: Counts,
    ids: Ids,
}

/// Whether the ids of an answer's tokens are given with its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// They are.
    Kept,
    /// They are not, and a token that shows nothing yet makes no part.
    Dropped,
}

/// Tokens of an answer so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// That the model generated, the one that ended it included.
    pub completion: usize,
    /// Of them, those that are reasoning.
    pub reasoning: usize,
    /// Of the prompt, those that came from the prefix cache.
    pub cached: usize,
}

/// A part of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Part {
    /// What can be shown by now.
    pub piece: Piece,
    /// Of the tokens since the last part, where they are wanted.
    pub logprobs: Vec<TokenLogprobs>,
    /// The ids of these tokens, where they are kept; the one that ended the answer is among them.
    pub ids: Vec<u32>,
}

impl Part {
    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.piece.is_empty() && self.logprobs.is_empty() && self.ids.is_empty()
    }

    /// Puts another part behind this one.
    pub fn append(&mut self, other: Self) {
        self.piece.append(other.piece);
        self.logprobs.extend(other.logprobs);
        self.ids.extend(other.ids);
    }
}

/// What happens next to an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Log-probabilities of the prompt's next tokens, the first of all left out.
    Prompt(Vec<TokenLogprobs>),
    /// More of it, never nothing.
    Part(Part),
    /// The rest of it, which may be nothing, and why it ends.
    End(Part, Ending),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model ended it.
    Stop,
    /// A stop string did, the one of this number.
    StopString(usize),
    /// It calls tools.
    ToolCalls,
    /// It has as many tokens as it may.
    Length,
}

impl Ending {
    /// OpenAI's `finish_reason`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop | Self::StopString(_) => "stop",
            Self::ToolCalls => "tool_calls",
            Self::Length => "length",
        }
    }
}

/// Why an answer was given up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Interrupted {
    /// The engine could not go on; what it says about it.
    #[error("{0}")]
    Engine(String),
    /// The request asks for what cannot be.
    #[error("{0}")]
    Request(DeadEnd),
}

impl Generation {
    /// An answer from the engine's events.
    pub fn new(events: EventStream, text: AnswerText, ids: Ids) -> Self {
        Self { events: Some(events), text, counts: Counts::default(), ids }
    }

    /// Its tokens so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What happens next.
    ///
    /// # Errors
    /// The engine gives the answer up, or it has ended already.
    pub async fn next(&mut self) -> Result<Step, Interrupted> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Self::next`] for who polls.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<Step, Interrupted>> {
        loop {
            let Some(events) = &mut self.events else {
                return Poll::Ready(Err(Interrupted::Engine("the answer has ended".into())));
            };
            let event = ready!(events.poll_recv(context));
            let step = self.take(event);
            match &step {
                Ok(Step::Part(part)) if part.is_empty() => continue,
                Ok(Step::Part(_) | Step::Prompt(_)) => (),
                Ok(Step::End(..)) | Err(_) => self.events = None,
            }
            return Poll::Ready(step);
        }
    }

    fn take(&mut self, event: Option<Event>) -> Result<Step, Interrupted> {
        match event {
            Some(Event::PromptLogprobs(scores)) => Ok(Step::Prompt(scores)),
            Some(Event::Prompt { reused }) => {
                self.counts.cached = reused;
                Ok(Step::Part(Part::default()))
            }
            Some(Event::Token { id, logprobs }) => {
                self.counts.completion += 1;
                let piece = self.text.push(id);
                if self.text.is_reasoning() || !piece.reasoning.is_empty() {
                    self.counts.reasoning += 1;
                }
                let part = Part { piece, logprobs: logprobs.into_iter().collect(), ids: self.keep(id) };
                Ok(if self.text.stopped() { self.end(part, Ending::Stop) } else { Step::Part(part) })
            }
            Some(Event::Finished(FinishReason::Stop(id))) => {
                self.counts.completion += 1;
                let part = Part { ids: self.keep(id), ..Part::default() };
                Ok(self.end(part, Ending::Stop))
            }
            Some(Event::Finished(FinishReason::Complete)) => Ok(self.end(Part::default(), Ending::Stop)),
            Some(Event::Finished(FinishReason::Length)) => Ok(self.end(Part::default(), Ending::Length)),
            Some(Event::Failed(why)) => Err(Interrupted::Engine(why)),
            Some(Event::DeadEnd(dead_end)) => Err(Interrupted::Request(dead_end)),
            None => Err(Interrupted::Engine("the engine has stopped".into())),
        }
    }

    fn keep(&self, id: u32) -> Vec<u32> {
        match self.ids {
            Ids::Kept => vec![id],
            Ids::Dropped => Vec::new(),
        }
    }

    fn end(&mut self, mut part: Part, ending: Ending) -> Step {
        part.piece.append(self.text.finish());
        let ending = match (self.text.stop_string(), ending) {
            (Some(which), _) => Ending::StopString(which),
            (None, Ending::Stop) if self.text.has_calls() => Ending::ToolCalls,
            (None, ending) => ending,
        };
        Step::End(part, ending)
    }
}
