//! Sends answers, whole or as they come, in the form of one of the interfaces.

use super::error::ApiError;
use crate::generation::{Counts, Ending, Generation, Interrupted, Part, Step};
use crate::logprobs::TokenLogprobs;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Sleep;
use tokio_stream::Stream;

/// One of the interfaces: how answers look in it.
pub(super) trait Protocol: Send + Unpin + 'static {
    /// A whole answer.
    fn whole(&mut self, choices: Vec<Choice>, usage: Usage) -> serde_json::Value;

    /// What a stream begins with.
    fn begin(&mut self, out: &mut Events);

    /// Log-probabilities of the next tokens of a choice's prompt.
    fn prompt(&mut self, _choice: usize, _scores: &[TokenLogprobs], _out: &mut Events) {}

    /// More of a choice.
    fn part(&mut self, choice: usize, part: Part, out: &mut Events);

    /// A choice has ended; its last part has been sent.
    fn end(&mut self, choice: usize, ending: Ending, out: &mut Events);

    /// All choices have ended.
    fn finish(&mut self, usage: Usage, out: &mut Events);

    /// It cannot go on.
    fn error(&mut self, error: &ApiError, out: &mut Events);
}

/// The events of a stream that wait to be sent.
#[derive(Default)]
pub(super) struct Events(VecDeque<Event>);

impl Events {
    /// An event without a name.
    pub(super) fn data(&mut self, data: &impl Serialize) {
        self.0.push_back(Event::default().data(json_text(data)));
    }

    /// An event with one.
    pub(super) fn named(&mut self, name: &str, data: &impl Serialize) {
        self.0.push_back(Event::default().event(name).data(json_text(data)));
    }

    /// OpenAI's last event.
    pub(super) fn done(&mut self) {
        self.0.push_back(Event::default().data("[DONE]"));
    }
}

fn json_text(data: &impl Serialize) -> String {
    serde_json::to_string(data).expect("events are plain data")
}

/// A whole choice.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub(super) part: Part,
    /// Of the prompt's tokens but the first, where they are wanted.
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    pub(super) ending: Ending,
}

/// Tokens of a request, all choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    pub(super) completion: usize,
    pub(super) reasoning: usize,
    pub(super) cached: usize,
}

/// The choices of a request while they are generated. Dropping them cancels them.
pub(super) struct Answers {
    /// `None` where one has ended.
    generations: Vec<Option<Generation>>,
    /// Answers to each prompt.
    n: usize,
    /// Who is asked first the next time.
    turn: usize,
    usage: Usage,
}

impl Answers {
    /// The choices, in order; `prompt` is the number of tokens of all prompts.
    pub(super) fn new(generations: Vec<Generation>, n: usize, prompt: usize) -> Self {
        let usage = Usage { prompt, ..Usage::default() };
        Self { generations: generations.into_iter().map(Some).collect(), n, turn: 0, usage }
    }

    /// The next step of any choice; `None` when all have ended.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Result<Step, Interrupted>)>> {
        let count = self.generations.len();
        let mut any = false;
        for offset in 0..count {
            let at = (self.turn + offset) % count;
            let Some(generation) = &mut self.generations[at] else { continue };
            any = true;
            let Poll::Ready(step) = generation.poll_next(context) else { continue };
            if let Ok(Step::End(..)) = step {
                let counts = generation.counts();
                self.count(at, counts);
                self.generations[at] = None;
            }
            self.turn = at + 1;
            return Poll::Ready(Some((at, step)));
        }
        if any { Poll::Pending } else { Poll::Ready(None) }
    }

    fn count(&mut self, choice: usize, counts: Counts) {
        self.usage.completion += counts.completion;
        self.usage.reasoning += counts.reasoning;
        // Further answers to a prompt find what the first one computed; the client has paid for it once.
        if choice.is_multiple_of(self.n) {
            self.usage.cached += counts.cached;
        }
    }

    async fn next(&mut self) -> Option<(usize, Result<Step, Interrupted>)> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }
}

/// How long answers may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// The longest silence of a stream.
    pub(super) ping: Duration,
    /// The longest time from request to end.
    pub(super) most: Option<Duration>,
}

/// Waits for whole answers. Dropping the future, as a client that goes away does, cancels them.
pub(super) async fn whole(
    mut protocol: impl Protocol,
    answers: Answers,
    times: Times,
) -> Result<Response, ApiError> {
    let gathered = gather(answers);
    let (choices, usage) = match times.most {
        Some(most) => tokio::time::timeout(most, gathered).await.map_err(|_| ApiError::timeout(most))??,
        None => gathered.await?,
    };
    Ok(axum::Json(protocol.whole(choices, usage)).into_response())
}

async fn gather(mut answers: Answers) -> Result<(Vec<Choice>, Usage), ApiError> {
    let empty = Choice { part: Part::default(), prompt_logprobs: Vec::new(), ending: Ending::Length };
    let mut choices = vec![empty; answers.generations.len()];
    while let Some((at, step)) = answers.next().await {
        let choice = &mut choices[at];
        match step? {
            Step::Prompt(scores) => choice.prompt_logprobs.extend(scores),
            Step::Part(part) => choice.part.append(part),
            Step::End(part, ending) => {
                choice.part.append(part);
                choice.ending = ending;
            }
        }
    }
    Ok((choices, answers.usage))
}

/// Sends answers as they come, as server-sent events.
pub(super) fn stream<P: Protocol>(mut protocol: P, answers: Answers, times: Times) -> Response {
    let mut events = Events::default();
    protocol.begin(&mut events);
    let deadline = times.most.map(|most| (Box::pin(tokio::time::sleep(most)), most));
    let chunks = Chunks { protocol, answers: Some(answers), deadline, events };
    Sse::new(chunks).keep_alive(KeepAlive::new().interval(times.ping).text("ping")).into_response()
}

/// The events of a request. Dropping it, as a client that goes away does, cancels its answers.
struct Chunks<P> {
    protocol: P,
    /// `None` when they have ended and `events` has the rest.
    answers: Option<Answers>,
    deadline: Option<(Pin<Box<Sleep>>, Duration)>,
    events: Events,
}

impl<P: Protocol> Stream for Chunks<P> {
    type Item = Result<Event, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { protocol, answers, deadline, events } = self.get_mut();
        loop {
            if let Some(event) = events.0.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            let Some(running) = answers else {
                return Poll::Ready(None);
            };
            if let Some((sleep, most)) = deadline
                && sleep.as_mut().poll(context).is_ready()
            {
                protocol.error(&ApiError::timeout(*most), events);
                *answers = None;
                continue;
            }
            match running.poll_next(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((at, Ok(Step::Prompt(scores))))) => protocol.prompt(at, &scores, events),
                Poll::Ready(Some((at, Ok(Step::Part(part))))) => protocol.part(at, part, events),
                Poll::Ready(Some((at, Ok(Step::End(part, ending))))) => {
                    if !part.is_empty() {
                        protocol.part(at, part, events);
                    }
                    protocol.end(at, ending, events);
                }
                Poll::Ready(Some((_, Err(interrupted)))) => {
                    protocol.error(&interrupted.into(), events);
                    *answers = None;
                }
                Poll::Ready(None) => {
                    protocol.finish(running.usage, events);
                    *answers = None;
                }
            }
        }
    }
}
