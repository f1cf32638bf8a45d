//! Sends an answer, whole or as it comes.

use super::api::{Answer, ChatChoice, ChatDelta, ChatText, Head, TextChoice, Usage};
use super::error::ApiError;
use super::request::Delivery;
use crate::generation::{Ending, Generation, Step};
use crate::text::Piece;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio_stream::Stream;

/// Which of the two kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
}

impl Kind {
    /// What ids of such answers begin with.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl",
            Self::Text => "cmpl",
        }
    }

    /// The field that its prompt comes from.
    pub(super) fn prompt_field(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Text => "prompt",
        }
    }

    pub(super) fn object(self, delivery: Delivery) -> &'static str {
        match (self, delivery) {
            (Self::Chat, Delivery::Whole) => "chat.completion",
            (Self::Chat, _) => "chat.completion.chunk",
            (Self::Text, _) => "text_completion",
        }
    }
}

/// Waits for the whole answer. Dropping the future, as a client that goes away does, cancels it.
pub(super) async fn whole(
    kind: Kind,
    head: &Head,
    prompt_tokens: usize,
    mut generation: Generation,
) -> Result<Response, ApiError> {
    let mut text = Piece::default();
    let ending = loop {
        match generation.next().await? {
            Step::Piece(piece) => text.append(&piece),
            Step::End(piece, ending) => {
                text.append(&piece);
                break ending;
            }
        }
    };
    let usage = Some(Some(Usage::new(prompt_tokens, generation.completion_tokens())));
    let finish_reason = Some(ending);
    match kind {
        Kind::Chat => {
            let message = ChatText {
                role: Some("assistant"),
                reasoning_content: Some(text.reasoning).filter(|reasoning| !reasoning.is_empty()),
                content: Some(text.content),
            };
            let choices = vec![ChatChoice { index: 0, message, logprobs: (), finish_reason }];
            Ok(axum::Json(Answer { head, choices, usage }).into_response())
        }
        Kind::Text => {
            let choices = vec![TextChoice { index: 0, text: text.content, logprobs: (), finish_reason }];
            Ok(axum::Json(Answer { head, choices, usage }).into_response())
        }
    }
}

/// Sends the answer as it comes, as server-sent events. `ping` is the longest silence.
pub(super) fn stream(
    kind: Kind,
    head: Head,
    prompt_tokens: usize,
    generation: Generation,
    delivery: Delivery,
    ping: Duration,
) -> Response {
    let usage = match delivery {
        Delivery::StreamWithUsage => UsageChunk::AtTheEnd,
        Delivery::Stream | Delivery::Whole => UsageChunk::Never,
    };
    let mut chunks =
        Chunks { kind, head, prompt_tokens, usage, generation: Some(generation), queue: VecDeque::new() };
    if kind == Kind::Chat {
        let role = ChatText { role: Some("assistant"), content: Some(String::new()), ..ChatText::default() };
        chunks.push_chat(role, None);
    }
    Sse::new(chunks).keep_alive(KeepAlive::new().interval(ping).text("ping")).into_response()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UsageChunk {
    Never,
    AtTheEnd,
}

/// The events of one answer. Dropping it, as a client that goes away does, cancels the answer.
struct Chunks {
    kind: Kind,
    head: Head,
    prompt_tokens: usize,
    usage: UsageChunk,
    /// `None` when it has ended and `queue` has the rest.
    generation: Option<Generation>,
    queue: VecDeque<Event>,
}

impl Stream for Chunks {
    type Item = Result<Event, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(event) = this.queue.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            let Some(generation) = &mut this.generation else {
                return Poll::Ready(None);
            };
            match ready!(generation.poll_next(context)) {
                Ok(Step::Piece(piece)) => this.push_piece(piece),
                Ok(Step::End(piece, ending)) => {
                    let tokens = generation.completion_tokens();
                    this.generation = None;
                    this.push_piece(piece);
                    this.push_end(ending, tokens);
                }
                Err(interrupted) => this.push_error(&interrupted.into()),
            }
        }
    }
}

impl Chunks {
    fn push_piece(&mut self, piece: Piece) {
        match self.kind {
            Kind::Chat => {
                if !piece.reasoning.is_empty() {
                    self.push_chat(
                        ChatText { reasoning_content: Some(piece.reasoning), ..ChatText::default() },
                        None,
                    );
                }
                if !piece.content.is_empty() {
                    self.push_chat(ChatText { content: Some(piece.content), ..ChatText::default() }, None);
                }
            }
            Kind::Text if piece.content.is_empty() => (),
            Kind::Text => self.push_text(piece.content, None),
        }
    }

    fn push_end(&mut self, ending: Ending, completion_tokens: usize) {
        match self.kind {
            Kind::Chat => self.push_chat(ChatText::default(), Some(ending)),
            Kind::Text => self.push_text(String::new(), Some(ending)),
        }
        if self.usage == UsageChunk::AtTheEnd {
            let usage = Some(Some(Usage::new(self.prompt_tokens, completion_tokens)));
            self.queue.push_back(event(&Answer::<()> { head: &self.head, choices: Vec::new(), usage }));
        }
        self.queue.push_back(done());
    }

    fn push_error(&mut self, error: &ApiError) {
        self.generation = None;
        self.queue.extend([event(&error.json()), done()]);
    }

    fn push_chat(&mut self, delta: ChatText, finish_reason: Option<Ending>) {
        let choices = vec![ChatDelta { index: 0, delta, logprobs: (), finish_reason }];
        let chunk = event(&Answer { head: &self.head, choices, usage: self.no_usage_yet() });
        self.queue.push_back(chunk);
    }

    fn push_text(&mut self, text: String, finish_reason: Option<Ending>) {
        let choices = vec![TextChoice { index: 0, text, logprobs: (), finish_reason }];
        let chunk = event(&Answer { head: &self.head, choices, usage: self.no_usage_yet() });
        self.queue.push_back(chunk);
    }

    fn no_usage_yet(&self) -> Option<Option<Usage>> {
        (self.usage == UsageChunk::AtTheEnd).then_some(None)
    }
}

fn event(chunk: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(chunk).expect("chunks are plain data"))
}

fn done() -> Event {
    Event::default().data("[DONE]")
}
