//! One answer as it comes: the engine's events turned into text, counted, and ended.

use crate::engine::{Event, EventStream, FinishReason};
use crate::text::{AnswerText, Piece};
use std::task::{Context, Poll, ready};

/// An answer that is being generated. Dropping it cancels it.
pub struct Generation {
    /// `None` when it has ended.
    events: Option<EventStream>,
    text: AnswerText,
    completion_tokens: usize,
}

/// What happens next to an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// More of it, never nothing.
    Piece(Piece),
    /// The rest of it, which may be nothing, and why it ends.
    End(Piece, Ending),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model ended it, or a stop string did.
    Stop,
    /// It has as many tokens as it may.
    Length,
}

impl Ending {
    /// OpenAI's `finish_reason`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// The engine gave an answer up; what it says about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Interrupted(String);

impl Generation {
    /// An answer from the engine's events.
    pub fn new(events: EventStream, text: AnswerText) -> Self {
        Self { events: Some(events), text, completion_tokens: 0 }
    }

    /// Tokens that the model generated so far, the one that ended it included.
    pub fn completion_tokens(&self) -> usize {
        self.completion_tokens
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
                return Poll::Ready(Err(Interrupted("the answer has ended".into())));
            };
            let event = ready!(events.poll_recv(context));
            let step = self.take(event);
            match step {
                Ok(Step::Piece(piece)) if piece.is_empty() => continue,
                Ok(Step::Piece(_)) => (),
                Ok(Step::End(..)) | Err(_) => self.events = None,
            }
            return Poll::Ready(step);
        }
    }

    fn take(&mut self, event: Option<Event>) -> Result<Step, Interrupted> {
        match event {
            Some(Event::Token { id: token, .. }) => {
                self.completion_tokens += 1;
                let piece = self.text.push(token);
                Ok(if self.text.stopped() { self.end(piece, Ending::Stop) } else { Step::Piece(piece) })
            }
            Some(Event::PromptLogprobs(_) | Event::Prompt { .. }) => Ok(Step::Piece(Piece::default())),
            Some(Event::Finished(FinishReason::Complete)) => Ok(self.end(Piece::default(), Ending::Stop)),
            Some(Event::Finished(FinishReason::Stop(_))) => {
                self.completion_tokens += 1;
                Ok(self.end(Piece::default(), Ending::Stop))
            }
            Some(Event::Finished(FinishReason::Length)) => Ok(self.end(Piece::default(), Ending::Length)),
            Some(Event::Failed(why)) => Err(Interrupted(why)),
            None => Err(Interrupted("the engine has stopped".into())),
        }
    }

    fn end(&mut self, mut piece: Piece, ending: Ending) -> Step {
        piece.append(&self.text.finish());
        Step::End(piece, if self.text.stopped() { Ending::Stop } else { ending })
    }
}
