//! What one set of weights computes: plans steps, runs them, draws tokens, tells clients.

use super::{Event, FinishReason, GenerationRequest, Refusal, Together};
use crate::batch::Logits;
use crate::constraint::{Constraint, DeadEnd, Progress};
use crate::logprobs::{TokenLogprobs, candidate_logprobs, logprobs};
use crate::metrics::{Metrics, Moment};
use crate::rank::{Asked, How, RankGroup, RankStopped, Row};
use crate::sampler::{Processors, Sampler};
use crate::scheduler::{Scheduled, Scheduler};
use crate::sequence::{Prefix, SeqId, Sequence};
use crate::thinking::ThinkingBudget;
use kernels::candidates::{MOST_EDITS, Selection};
use std::collections::HashMap;
use std::ops::Range;
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

/// What a part of a step needs of its logits.
struct Question {
    /// Of the step's rows.
    rows: Range<usize>,
    /// How the next token is drawn.
    selection: Arc<Selection>,
}

/// A part's new token, if it was time for one.
type Taken = Result<Option<u32>, End>;

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
        let rows: Vec<Logits> = plan.iter().map(|part| rows_of(part, scheduler, clients)).collect();
        group.step(|batch| {
            for (part, &rows) in plan.iter().zip(&rows) {
                let sequence = scheduler.sequence(part.id).expect("only running sequences are scheduled");
                let cached = sequence.cached();
                batch.push(&sequence.tokens()[cached..cached + part.tokens], cached, sequence.blocks(), rows);
            }
        })?;
        // While the ranks compute.
        let mut asked = Vec::new();
        let mut row = 0;
        let mut questions = Vec::with_capacity(plan.len());
        for (part, &rows) in plan.iter().zip(&rows) {
            let client = clients.get_mut(&part.id).expect("every sequence has its client");
            let of_part = match rows {
                Logits::None => 0,
                Logits::Last => 1,
                Logits::All => part.tokens,
            };
            questions.push(client.ask(row..row + of_part, (rows, part.sample), &mut asked));
            row += of_part;
        }
        let mut taken = Vec::with_capacity(plan.len());
        let mut answers = group.read(asked)?.into_iter();
        for (&part, question) in plan.iter().zip(&questions) {
            let sequence = scheduler.sequence(part.id).expect("it was scheduled");
            let client = clients.get_mut(&part.id).expect("every sequence has its client");
            taken.push(match question {
                Ok(question) => {
                    let rows: Vec<Row<'_>> = answers.by_ref().take(question.rows.len()).collect();
                    client.take(sequence, part, question, rows, metrics)
                }
                Err(dead_end) => Some(Err(End::DeadEnd(dead_end.clone()))),
            });
        }
        drop(answers);
        // Where the drawn token is none of the likely ones.
        let unknown = || taken.iter().zip(&questions).filter(|(taken, _)| taken.is_none());
        let last = |question: &Question| question.rows.end - 1;
        let asked: Vec<Asked> = unknown()
            .filter_map(|(_, question)| question.as_ref().ok())
            .map(|question| Asked { row: last(question), how: How::Whole })
            .collect();
        if !asked.is_empty() {
            let mut answers = group.read(asked)?.into_iter();
            for ((taken, question), part) in taken.iter_mut().zip(&questions).zip(plan.iter()) {
                let (None, Ok(question)) = (&taken, question) else { continue };
                let client = clients.get_mut(&part.id).expect("every sequence has its client");
                *taken = answers.next().and_then(|row| client.draw(&question.selection, row, metrics));
            }
        }
        for (&part, taken) in plan.iter().zip(taken) {
            let end = match taken.expect("a whole row is enough") {
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

    /// Asks for `rows` of the step's logits, those of its part.
    ///
    /// # Errors
    /// The answer's grammar cannot go on.
    fn ask(
        &mut self,
        rows: Range<usize>,
        (wanted, draws): (Logits, bool),
        asked: &mut Vec<Asked>,
    ) -> Result<Question, DeadEnd> {
        let (temperature, logprobs) = (self.sampler.temperature(), self.logprobs.is_some());
        let mut selection = Selection { temperature, logprobs, ..Selection::default() };
        if draws && self.max_tokens > 0 {
            self.processors.ask(&mut selection);
            if let Some(constraint) = &mut self.constraint {
                constraint.ask(&mut selection)?;
            }
        }
        let selection = Arc::new(selection);
        let whole = wanted == Logits::All
            // Log-probabilities are of the unchanged logits.
            || (logprobs && !selection.is_plain())
            || selection.edits.len() > MOST_EDITS;
        let how = if whole { How::Whole } else { How::Chosen(Arc::clone(&selection)) };
        asked.extend(rows.clone().map(|row| Asked { row, how: how.clone() }));
        Ok(Question { rows, selection })
    }

    /// Uses the logits of a part: scores the prompt, draws the next token, if it is time for that. `None`: the whole last row is needed, to
    /// [`Client::draw`] from.
    fn take(
        &mut self,
        sequence: &Sequence,
        part: Scheduled,
        question: &Question,
        mut rows: Vec<Row<'_>>,
        metrics: &Metrics,
    ) -> Option<Taken> {
        let fault = rows.iter().find_map(|row| match row {
            Row::Whole(row) => not_numbers(row),
            Row::Chosen(candidates) => candidates.fault.map(not_a_number),
        });
        if let Some(fault) = fault {
            return Some(Err(End::Failed(fault)));
        }
        self.score_prompt(sequence, &rows);
        if !part.sample {
            return Some(Ok(None));
        }
        if sequence.tokens().len() == sequence.prompt() {
            metrics.prompt_done(sequence.prompt(), sequence.reused());
            // A client that went away is found before the next step.
            let _ = self.events.send(Event::Prompt { reused: sequence.reused() });
        }
        if self.max_tokens == 0 {
            return Some(Err(End::Finished(FinishReason::Length)));
        }
        let last = rows.pop().expect("a part that samples has a row");
        self.draw(&question.selection, last, metrics)
    }

    /// Draws the next token. `None`: it, or something that is to be said of it, is not among the candidates.
    fn draw(&mut self, selection: &Selection, row: Row<'_>, metrics: &Metrics) -> Option<Taken> {
        let forced = self.thinking.as_ref().and_then(ThinkingBudget::forced);
        let (token, logprobs) = match row {
            Row::Chosen(candidates) => {
                let fits = candidates.best.is_some_and(|(_, logit)| logit > f32::NEG_INFINITY);
                if let (Some(constraint), false) = (&self.constraint, fits) {
                    return Some(Err(End::DeadEnd(constraint.nothing_fits())));
                }
                let of = |token, top| candidate_logprobs(&candidates, token, top);
                if let (Some(top), Some((best, _))) = (self.logprobs, candidates.best) {
                    // Before anything is drawn.
                    of(forced.unwrap_or(best), top)?;
                }
                let token = forced.or_else(|| self.sampler.choose(&candidates))?;
                (token, self.logprobs.and_then(|top| of(token, top)))
            }
            Row::Whole(row) => {
                let raw = self.logprobs.map(|top| (row.to_vec(), top));
                selection.write(row);
                if let Some(constraint) = &self.constraint
                    && row.iter().all(|&logit| logit == f32::NEG_INFINITY)
                {
                    return Some(Err(End::DeadEnd(constraint.nothing_fits())));
                }
                let token = forced.unwrap_or_else(|| self.sampler.sample(row));
                (token, raw.map(|(row, top)| logprobs(&row, token, top)))
            }
        };
        Some(self.accept(token, logprobs, metrics).map(Some))
    }

    /// Takes note of a drawn token and sends it.
    fn accept(&mut self, token: u32, logprobs: Option<TokenLogprobs>, metrics: &Metrics) -> Result<u32, End> {
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
        // A client that went away is found before the next step.
        let _ = self.events.send(Event::Token { id: token, logprobs });
        match progress {
            Progress::Open => Ok(token),
            Progress::Complete => Err(End::Finished(FinishReason::Complete)),
        }
    }

    /// Sends the log-probabilities of the prompt's tokens that these rows are about: the one behind each.
    fn score_prompt(&mut self, sequence: &Sequence, rows: &[Row<'_>]) {
        let Some(top) = self.prompt_logprobs else { return };
        let first = sequence.cached() + 1;
        let prompt = &sequence.tokens()[..sequence.prompt()];
        let score = |(row, at): (&Row<'_>, usize)| match row {
            Row::Whole(row) if at >= self.prompt_scored && at < prompt.len() => {
                Some(logprobs(row, prompt[at], top))
            }
            _ => None,
        };
        let scores: Vec<TokenLogprobs> = rows.iter().zip(first..).filter_map(score).collect();
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
    Some(not_a_number((u32::try_from(at).unwrap_or(u32::MAX), logits[at])))
}

fn not_a_number((token, logit): (u32, f32)) -> String {
    format!(
        "the model's logits are no finite numbers (token {token}: {logit}), so the checkpoint's weights are damaged: `shardmill verify` it with its source"
    )
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
