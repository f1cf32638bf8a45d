//! What one set of weights computes: plans steps, runs them, draws tokens, tells clients.

use super::{Event, FinishReason, GenerationRequest, Refusal, Together};
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
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// A request on its way to the engine.
#[derive(Debug)]
pub(super) struct Submission {
    pub(super) request: GenerationRequest,
    pub(super) events: UnboundedSender<Event>,
    pub(super) ticket: Ticket,
    pub(super) arrival: Instant,
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
pub(super) struct Client {
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
    together: Together,
}

/// Why a sequence ends in a step.
enum End {
    Finished(FinishReason),
    Failed(String),
    DeadEnd(DeadEnd),
}

/// One set of weights on all ranks, with the sequences that it computes and a cache of its own: what is in it was computed with
/// these weights alone.
pub(super) struct Worker {
    /// Which set of weights, counted from 1.
    generation: u64,
    group: RankGroup,
    scheduler: Scheduler,
    clients: HashMap<SeqId, Client>,
    max_model_len: usize,
    plan: Vec<Scheduled>,
    metrics: Arc<Metrics>,
    /// Of requests that these weights began, as long as others may come that belong to them.
    begun: Vec<Together>,
}

impl Worker {
    pub(super) fn new(
        generation: u64,
        group: RankGroup,
        scheduler: Scheduler,
        max_model_len: usize,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (clients, plan, begun) = (HashMap::new(), Vec::new(), Vec::new());
        Self { generation, group, scheduler, clients, max_model_len, plan, metrics, begun }
    }

    /// Takes a request as sequence `id`.
    pub(super) fn admit(&mut self, id: SeqId, submission: Submission) {
        let (sequence, client) = prepare(id, submission, self.max_model_len);
        self.adopt(sequence, client);
    }

    /// Takes a sequence that has not begun.
    pub(super) fn adopt(&mut self, sequence: Sequence, client: Client) {
        self.clients.insert(sequence.id(), client);
        self.scheduler.add(sequence);
    }

    /// Gives away what has not begun, but for what belongs to a request of which something has.
    pub(super) fn take_waiting(&mut self) -> Vec<(Sequence, Client)> {
        let Self { scheduler, clients, generation, .. } = self;
        let goes = |id: SeqId| {
            let client = clients.get(&id).expect("every sequence has its client");
            client.ticket.is_some() && client.together.generation() != *generation
        };
        let sequences = scheduler.take_waiting(goes);
        let with_client = |sequence: Sequence| {
            let client = clients.remove(&sequence.id()).expect("every sequence has its client");
            (sequence, client)
        };
        sequences.into_iter().map(with_client).collect()
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether nothing runs or waits.
    pub(super) fn is_idle(&self) -> bool {
        self.clients.is_empty()
    }

    /// Whether nothing runs or waits, and nothing more can come that belongs to what it began.
    pub(super) fn is_done(&mut self) -> bool {
        self.begun.retain(Together::is_shared);
        self.clients.is_empty() && self.begun.is_empty()
    }

    /// Chooses what the next step computes.
    pub(super) fn plan(&mut self) {
        self.drop_cancelled();
        self.scheduler.schedule(&mut self.plan);
        self.note_starts();
    }

    /// Tells all clients that there is nothing more to come.
    pub(super) fn fail(&mut self, cause: &str) {
        for (id, client) in self.clients.drain() {
            self.scheduler.remove(id);
            client.fail(cause, &self.metrics);
        }
    }

    fn drop_cancelled(&mut self) {
        let Self { scheduler, clients, metrics, .. } = self;
        clients.retain(|id, client| {
            let gone = client.is_gone();
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
                client.together.begin(self.generation);
                self.begun.retain(Together::is_shared);
                self.begun.push(client.together.clone());
            }
        }
    }

    pub(super) fn moment(&self) -> Moment {
        let pool = self.scheduler.pool();
        Moment {
            running: self.scheduler.running(),
            waiting: self.scheduler.waiting(),
            blocks_used: pool.total() - pool.available(),
            blocks: pool.total(),
            preemptions: self.scheduler.preemptions(),
        }
    }

    /// Computes what was planned, if anything was.
    pub(super) fn step(&mut self) -> Result<(), RankStopped> {
        if self.plan.is_empty() {
            return Ok(());
        }
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

/// A request as the sequence `id`, of at most `max_model_len` tokens, and what is kept of it beside that.
pub(super) fn prepare(id: SeqId, submission: Submission, max_model_len: usize) -> (Sequence, Client) {
    let Submission { request, events, ticket, arrival } = submission;
    let max_len = request.prompt.len().saturating_add(request.max_tokens).min(max_model_len);
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
        together: request.together,
    };
    let prefix = if client.prompt_logprobs.is_some() { Prefix::Compute } else { Prefix::Reuse };
    (Sequence::new(id, request.prompt, max_len, prefix).salted(request.cache_salt), client)
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
    pub(super) fn is_gone(&self) -> bool {
        self.events.is_closed()
    }

    pub(super) fn fail(self, cause: &str, metrics: &Metrics) {
        metrics.failed();
        // The client may have gone at the same moment.
        let _ = self.events.send(Event::Failed(cause.to_owned()));
    }

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
