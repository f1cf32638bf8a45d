//! The engine's thread: takes requests, runs steps, draws tokens, tells clients.

use super::{Event, FinishReason, GenerationRequest, Refusal};
use crate::batch::Logits;
use crate::constraint::{Constraint, DeadEnd, Progress};
use crate::logprobs::{TokenLogprobs, logprobs};
use crate::metrics::{Metrics, Moment};
use crate::rank::{RankGroup, RankStopped};
use crate::sampler::{Processors, Sampler};
use crate::scheduler::{Scheduled, Scheduler};
use crate::sequence::{Prefix, SeqId, Sequence};
use crate::thinking::ThinkingBudget;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

#[derive(Debug)]
pub(super) enum Command {
    Submit {
        request: Box<GenerationRequest>,
        events: UnboundedSender<Event>,
        ticket: Ticket,
        arrival: Instant,
    },
    Stop,
}

/// A place among the requests that wait; dropping it gives it back.
#[derive(Debug)]
pub(super) struct Ticket(Arc<AtomicUsize>);

impl Ticket {
    /// One of `most` places.
    pub(super) fn draw(waiting: &Arc<AtomicUsize>, most: usize) -> Result<Self, Refusal> {
        let one_more = |waiting: usize| (waiting < most).then_some(waiting + 1);
        match waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more) {
            Ok(_) => Ok(Self(Arc::clone(waiting))),
            Err(waiting) => Err(Refusal::QueueFull { waiting }),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the engine keeps of a request while its sequence lives.
#[derive(Debug)]
struct Client {
    sampler: Sampler,
    processors: Processors,
    constraint: Option<Constraint>,
    thinking: Option<ThinkingBudget>,
    stop_token_ids: Vec<u32>,
    max_tokens: usize,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    /// Tokens of the prompt whose log-probabilities are sent; the first has none.
    prompt_scored: usize,
    events: UnboundedSender<Event>,
    /// Until it first runs.
    ticket: Option<Ticket>,
    arrival: Instant,
    /// When the last token was sent.
    last_token: Option<Instant>,
}

/// Why a sequence ends in a step.
enum End {
    Finished(FinishReason),
    Failed(String),
    DeadEnd(DeadEnd),
}

/// The engine's thread.
pub(super) struct Worker {
    group: RankGroup,
    scheduler: Scheduler,
    clients: HashMap<SeqId, Client>,
    next_id: u64,
    max_model_len: usize,
    plan: Vec<Scheduled>,
    metrics: Arc<Metrics>,
}

impl Worker {
    pub(super) fn new(
        group: RankGroup,
        scheduler: Scheduler,
        max_model_len: usize,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            group,
            scheduler,
            clients: HashMap::new(),
            next_id: 0,
            max_model_len,
            plan: Vec::new(),
            metrics,
        }
    }

    /// Runs until it is told to stop or a rank fails; returns why.
    pub(super) fn run(mut self, inbox: &Receiver<Command>) -> String {
        let cause = loop {
            // With nothing to do, sleep until something comes.
            if self.clients.is_empty() {
                self.record();
                match inbox.recv() {
                    Ok(Command::Submit { request, events, ticket, arrival }) => {
                        self.admit(*request, events, ticket, arrival);
                    }
                    Ok(Command::Stop) | Err(_) => break "it was shut down".to_owned(),
                }
            }
            match self.drain(inbox) {
                ControlFlow::Continue(()) => {}
                ControlFlow::Break(()) => break "it was shut down".to_owned(),
            }
            self.drop_cancelled();
            self.scheduler.schedule(&mut self.plan);
            self.note_starts();
            self.record();
            if self.plan.is_empty() {
                continue;
            }
            if let Err(stopped) = self.step() {
                break stopped.to_string();
            }
        };
        for client in self.clients.into_values() {
            self.metrics.failed();
            // The client may have gone at the same moment.
            let _ = client.events.send(Event::Failed(cause.clone()));
        }
        cause
    }

    fn drain(&mut self, inbox: &Receiver<Command>) -> ControlFlow<()> {
        loop {
            match inbox.try_recv() {
                Ok(Command::Submit { request, events, ticket, arrival }) => {
                    self.admit(*request, events, ticket, arrival);
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return ControlFlow::Break(()),
                Err(TryRecvError::Empty) => return ControlFlow::Continue(()),
            }
        }
    }

    fn admit(
        &mut self,
        request: GenerationRequest,
        events: UnboundedSender<Event>,
        ticket: Ticket,
        arrival: Instant,
    ) {
        let id = SeqId(self.next_id);
        self.next_id += 1;
        let max_len = request.prompt.len().saturating_add(request.max_tokens).min(self.max_model_len);
        let client = Client {
            sampler: Sampler::new(&request.sampling),
            processors: Processors::new(&request.sampling, &request.prompt, &request.stop_token_ids),
            constraint: request.constraint,
            thinking: request.thinking,
            stop_token_ids: request.stop_token_ids,
            max_tokens: request.max_tokens,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            prompt_scored: 1,
            events,
            ticket: Some(ticket),
            arrival,
            last_token: None,
        };
        let prefix = if client.prompt_logprobs.is_some() { Prefix::Compute } else { Prefix::Reuse };
        self.scheduler.add(Sequence::new(id, request.prompt, max_len, prefix).salted(request.cache_salt));
        self.clients.insert(id, client);
    }

    fn drop_cancelled(&mut self) {
        let Self { scheduler, clients, metrics, .. } = self;
        clients.retain(|id, client| {
            let gone = client.events.is_closed();
            if gone {
                scheduler.remove(*id);
                metrics.aborted();
            }
            !gone
        });
    }

    /// Gives the tickets of sequences back that run now.
    fn note_starts(&mut self) {
        for part in &self.plan {
            let client = self.clients.get_mut(&part.id).expect("every sequence has its client");
            if client.ticket.take().is_some() {
                self.metrics.queue_time.observe(client.arrival.elapsed());
            }
        }
    }

    fn record(&self) {
        let pool = self.scheduler.pool();
        self.metrics.set(Moment {
            running: self.scheduler.running(),
            waiting: self.scheduler.waiting(),
            blocks_used: pool.total() - pool.available(),
            preemptions: self.scheduler.preemptions(),
        });
    }

    fn step(&mut self) -> Result<(), RankStopped> {
        let Self { group, scheduler, clients, plan, metrics, .. } = self;
        let vocab_size = group.vocab_size();
        let rows: Vec<Logits> = plan.iter().map(|part| rows_of(part, scheduler, clients)).collect();
        let logits = group.step(|batch| {
            for (part, &rows) in plan.iter().zip(&rows) {
                let sequence = scheduler.sequence(part.id).expect("only running sequences are scheduled");
                let cached = sequence.cached();
                batch.push(&sequence.tokens()[cached..cached + part.tokens], cached, sequence.blocks(), rows);
            }
        })?;
        let mut rest = logits;
        for (&part, &rows) in plan.iter().zip(&rows) {
            let count = match rows {
                Logits::None => 0,
                Logits::Last => 1,
                Logits::All => part.tokens,
            };
            let (own, behind) = rest.split_at_mut(count * vocab_size);
            rest = behind;
            let sequence = scheduler.sequence(part.id).expect("it was scheduled");
            let client = clients.get_mut(&part.id).expect("every sequence has its client");
            let drawn = match own.chunks_exact(vocab_size).find_map(not_numbers) {
                Some(fault) => Err(End::Failed(fault)),
                None => client.take(sequence, part, rows, own, vocab_size, metrics),
            };
            let end = match drawn {
                Err(End::Finished(reason)) => {
                    // What was computed of its prompt serves others.
                    scheduler.advance(part, None);
                    Some(End::Finished(reason))
                }
                Err(failed) => Some(failed),
                Ok(token) => {
                    scheduler.advance(part, token);
                    let full = token.is_some() && scheduler.sequence(part.id).is_some_and(Sequence::is_full);
                    full.then_some(End::Finished(FinishReason::Length))
                }
            };
            if let Some(end) = end {
                finish(scheduler, clients, metrics, part.id, end);
            }
        }
        Ok(())
    }
}

/// Which logits a part needs.
fn rows_of(part: &Scheduled, scheduler: &Scheduler, clients: &HashMap<SeqId, Client>) -> Logits {
    let sequence = scheduler.sequence(part.id).expect("only running sequences are scheduled");
    let client = clients.get(&part.id).expect("every sequence has its client");
    let end = sequence.cached() + part.tokens;
    let scores = client.prompt_logprobs.is_some() && client.prompt_scored < sequence.prompt();
    if scores && end >= client.prompt_scored && sequence.cached() < sequence.prompt() {
        Logits::All
    } else if part.sample && client.max_tokens > 0 {
        Logits::Last
    } else {
        Logits::None
    }
}

impl Client {
    /// Uses the logits of a part: scores the prompt, draws the next token. `None` when there is none to draw yet.
    fn take(
        &mut self,
        sequence: &Sequence,
        part: Scheduled,
        rows: Logits,
        logits: &mut [f32],
        vocab_size: usize,
        metrics: &Metrics,
    ) -> Result<Option<u32>, End> {
        if rows == Logits::All {
            self.score_prompt(sequence, logits, vocab_size);
        }
        if !part.sample {
            return Ok(None);
        }
        if sequence.tokens().len() == sequence.prompt() {
            metrics.prompt_done(sequence.prompt(), sequence.reused());
            // A client that went away is found before the next step.
            let _ = self.events.send(Event::Prompt { reused: sequence.reused() });
        }
        if self.max_tokens == 0 {
            return Err(End::Finished(FinishReason::Length));
        }
        let start = logits.len() - vocab_size;
        self.draw(&mut logits[start..], metrics).map(Some)
    }

    fn draw(&mut self, row: &mut [f32], metrics: &Metrics) -> Result<u32, End> {
        let raw = self.logprobs.map(|top| (row.to_vec(), top));
        self.processors.apply(row);
        if let Some(constraint) = &mut self.constraint {
            constraint.apply(row).map_err(End::DeadEnd)?;
        }
        let forced = self.thinking.as_ref().and_then(ThinkingBudget::forced);
        let token = forced.unwrap_or_else(|| self.sampler.sample(row));
        self.processors.observe(token);
        if let Some(thinking) = &mut self.thinking {
            thinking.observe(token);
        }
        metrics.generated();
        let now = Instant::now();
        match self.last_token.replace(now) {
            Some(last) => metrics.inter_token_latency.observe(now - last),
            None => metrics.time_to_first_token.observe(now - self.arrival),
        }
        if self.stop_token_ids.contains(&token) {
            return Err(End::Finished(FinishReason::Stop(token)));
        }
        let progress = match &mut self.constraint {
            Some(constraint) => constraint.accept(token).map_err(End::DeadEnd)?,
            None => Progress::Open,
        };
        let logprobs = raw.map(|(row, top)| logprobs(&row, token, top));
        // A client that went away is found before the next step.
        let _ = self.events.send(Event::Token { id: token, logprobs });
        match progress {
            Progress::Open => Ok(token),
            Progress::Complete => Err(End::Finished(FinishReason::Complete)),
        }
    }

    /// Sends the log-probabilities of the prompt's tokens that these rows are about: the one behind each.
    fn score_prompt(&mut self, sequence: &Sequence, logits: &[f32], vocab_size: usize) {
        let top = self.prompt_logprobs.unwrap_or(0);
        let first = sequence.cached() + 1;
        let prompt = &sequence.tokens()[..sequence.prompt()];
        let scores: Vec<TokenLogprobs> = logits
            .chunks_exact(vocab_size)
            .zip(first..)
            .filter(|&(_, at)| at >= self.prompt_scored && at < prompt.len())
            .map(|(row, at)| logprobs(row, prompt[at], top))
            .collect();
        self.prompt_scored += scores.len();
        if !scores.is_empty() {
            // A client that went away is found before the next step.
            let _ = self.events.send(Event::PromptLogprobs(scores));
        }
    }
}

/// What to say of logits that no token can be drawn from: weights that are no numbers make them, and a sampler would answer
/// with whatever token comes first.
pub fn not_numbers(logits: &[f32]) -> Option<String> {
    let at = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY)?;
    Some(format!(
        "the model's logits are no finite numbers (token {at}: {}), so the checkpoint's weights are damaged: `shardmill verify` it with its source",
        logits[at]
    ))
}

fn finish(
    scheduler: &mut Scheduler,
    clients: &mut HashMap<SeqId, Client>,
    metrics: &Metrics,
    id: SeqId,
    end: End,
) {
    scheduler.remove(id);
    let Some(client) = clients.remove(&id) else { return };
    let event = match end {
        End::Finished(reason) => {
            metrics.finished(reason);
            metrics.e2e_latency.observe(client.arrival.elapsed());
            Event::Finished(reason)
        }
        End::Failed(cause) => {
            metrics.failed();
            Event::Failed(cause)
        }
        End::DeadEnd(dead_end) => {
            metrics.failed();
            Event::DeadEnd(dead_end)
        }
    };
    // The client may have gone at the same moment.
    let _ = client.events.send(event);
}
