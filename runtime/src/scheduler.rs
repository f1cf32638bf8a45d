//! Which tokens go into the next step. No device and no clock in here.
//!
//! - Sequences start in the order they came, as soon as there are blocks for their tokens and a little more. Running ones get
//!   a block whenever they need one; when none is left, the youngest gives all of its blocks up, waits at the head of the
//!   queue and is computed again. The oldest always goes on, so everything comes to its end.
//! - A step has a token of every sequence that generates, then chunks of prompts. Prompts take turns, so that a short one
//!   does not wait for the whole of a long one, and a long one holds a step up by one chunk at most.
//! - An answer depends neither on the load nor on what is in the prefix cache: prompts are cut at multiples of
//!   `max_num_batched_tokens` whatever else runs, a prefix is reused only where the rest of its chunk is computed in the same
//!   form as the whole, and generated tokens that are computed again are never computed as a prompt.

use crate::batch::MATERIALISE_FROM;
use crate::kv_cache::{BlockHash, BlockPool};
use crate::sequence::{Prefix, SeqId, Sequence};
use kernels::step::BLOCK_TOKENS;
use std::collections::{HashSet, VecDeque};

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerLimits {
    /// Sequences that run at the same time.
    pub max_num_seqs: usize,
    /// Prompt tokens of a step, and the length of a prompt's chunks; above a block's length, multiples of it count.
    pub max_num_batched_tokens: usize,
    /// Whether prompts may begin with blocks that others have computed.
    pub prefix_cache: PrefixCache,
}

/// Whether prompts may begin with blocks that others have computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixCache {
    /// They may.
    On,
    /// Every prompt is computed whole.
    Off,
}

/// One sequence's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: SeqId,
    /// Its next tokens, this many.
    pub tokens: usize,
    /// True when all its tokens are cached afterwards, so that the next one can be sampled.
    pub sample: bool,
}

/// Waiting and running sequences.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    pool: BlockPool,
    /// Oldest first.
    waiting: VecDeque<Sequence>,
    /// Oldest first, all older than those that wait.
    running: Vec<Sequence>,
    round: u64,
    preemptions: u64,
}

impl Scheduler {
    /// No sequences yet. `pool` must have room for the longest sequence that will ever be added.
    pub fn new(mut limits: SchedulerLimits, pool: BlockPool) -> Self {
        let chunk = limits.max_num_batched_tokens;
        if chunk >= BLOCK_TOKENS {
            limits.max_num_batched_tokens = chunk - chunk % BLOCK_TOKENS;
        } else if chunk >= MATERIALISE_FROM {
            // A full block could then have been computed in either form.
            limits.prefix_cache = PrefixCache::Off;
        }
        Self { limits, pool, waiting: VecDeque::new(), running: Vec::new(), round: 0, preemptions: 0 }
    }

    /// Puts a sequence at the end of the queue.
    ///
    /// # Panics
    /// When the pool can never hold it: whoever adds it has checked.
    pub fn add(&mut self, sequence: Sequence) {
        assert!(
            BlockPool::blocks_for(sequence.max_len()) <= self.pool.total(),
            "the cache has room for one sequence"
        );
        self.waiting.push_back(sequence);
    }

    /// Takes a sequence out, wherever it is, and frees its blocks. What they hold of its prompt can still be reused.
    pub fn remove(&mut self, id: SeqId) {
        self.waiting.retain(|sequence| sequence.id() != id);
        if let Some(at) = self.position(id) {
            let mut sequence = self.running.remove(at);
            self.pool.give_back(sequence.release());
        }
    }

    /// Takes those out of the queue that `goes` says of, oldest first.
    pub fn take_waiting(&mut self, mut goes: impl FnMut(SeqId) -> bool) -> Vec<Sequence> {
        let (gone, stay) = self.waiting.drain(..).partition(|sequence| goes(sequence.id()));
        self.waiting = stay;
        Vec::from(gone)
    }

    /// The next step. Empty only when there is nothing to do.
    pub fn schedule(&mut self, step: &mut Vec<Scheduled>) {
        step.clear();
        self.round += 1;
        self.admit();
        let generating = self.ids(|sequence| sequence.pending() == 1);
        for id in generating {
            // An older one may have taken its blocks.
            let Some(at) = self.position(id) else { continue };
            if self.make_room(at, 1, step) {
                step.push(Scheduled { id, tokens: 1, sample: true });
            }
        }
        self.schedule_chunks(step);
    }

    /// A running sequence.
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.position(id).map(|at| &self.running[at])
    }

    /// Says that a scheduled part was computed, and which token was sampled after it, if one was.
    pub fn advance(&mut self, done: Scheduled, token: Option<u32>) {
        let Some(at) = self.position(done.id) else {
            return;
        };
        let sequence = &mut self.running[at];
        sequence.mark_cached(done.tokens);
        if let Some(token) = token {
            sequence.push(token);
        }
        if self.limits.prefix_cache == PrefixCache::On {
            for (block, hash) in sequence.newly_full() {
                self.pool.publish(block, hash);
            }
        }
    }

    /// Sequences in the queue.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that have blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// The blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// How often a sequence had to give its blocks up so far.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    fn position(&self, id: SeqId) -> Option<usize> {
        self.running.iter().position(|sequence| sequence.id() == id)
    }

    fn ids(&self, which: impl Fn(&Sequence) -> bool) -> Vec<SeqId> {
        self.running.iter().filter(|sequence| which(sequence)).map(Sequence::id).collect()
    }

    /// Starts sequences for whose tokens there is room, and a block to spare for each that runs.
    fn admit(&mut self) {
        let needed = |sequence: &Sequence| BlockPool::blocks_for(sequence.tokens().len() + 1);
        let mut promised: usize = self
            .running
            .iter()
            .map(|sequence| needed(sequence).saturating_sub(sequence.blocks().len()))
            .sum();
        while self.running.len() < self.limits.max_num_seqs {
            let Some(first) = self.waiting.front() else { return };
            let wanted = promised + needed(first) + self.running.len();
            if wanted > self.pool.available() && !self.running.is_empty() {
                return;
            }
            promised += needed(first);
            let sequence = self.waiting.pop_front().expect("it has a front");
            self.running.push(sequence);
        }
    }

    /// Chunks of prompts, and of answers that are computed again: who waited longest comes first.
    fn schedule_chunks(&mut self, step: &mut Vec<Scheduled>) {
        let mut room = self.limits.max_num_batched_tokens;
        let mut turn: Vec<(u64, SeqId)> = self
            .running
            .iter()
            .filter(|sequence| sequence.pending() > 1)
            .map(|sequence| (sequence.served, sequence.id()))
            .collect();
        turn.sort_unstable();
        let mut coming: HashSet<BlockHash> = HashSet::new();
        for (_, id) in turn {
            let Some(at) = self.position(id) else { continue };
            self.reuse_prefix(at);
            let chunk = self.limits.max_num_batched_tokens;
            let sequence = &mut self.running[at];
            let tokens = next_part(sequence, chunk);
            if tokens > room {
                break;
            }
            // Another prompt of this step has the same next block: it can be taken over in the next step.
            let next_block = sequence.cached() / BLOCK_TOKENS;
            let is_full = (next_block + 1) * BLOCK_TOKENS < sequence.prompt();
            let reuses = self.limits.prefix_cache == PrefixCache::On && sequence.prefix() == Prefix::Reuse;
            let hash = (reuses && is_full).then(|| sequence.hash(next_block));
            if hash.is_some_and(|hash| coming.contains(&hash)) || !self.make_room(at, tokens, step) {
                continue;
            }
            coming.extend(hash);
            let at = self.position(id).expect("room is made at the cost of others");
            let sequence = &mut self.running[at];
            sequence.served = self.round;
            room -= tokens;
            step.push(Scheduled { id, tokens, sample: tokens == sequence.pending() });
        }
    }

    /// Lets a prompt go on behind what the pool knows of it.
    fn reuse_prefix(&mut self, at: usize) {
        let chunk = self.limits.max_num_batched_tokens;
        let sequence = &mut self.running[at];
        let cached = sequence.cached();
        let is_allowed = self.limits.prefix_cache == PrefixCache::On && sequence.prefix() == Prefix::Reuse;
        if !is_allowed || !cached.is_multiple_of(BLOCK_TOKENS) || cached >= sequence.prompt() {
            return;
        }
        let mut found = Vec::new();
        let first = cached / BLOCK_TOKENS;
        // Of a prompt that is all there is, the last token must be computed.
        let last = (sequence.prompt() - 1) / BLOCK_TOKENS;
        while first + found.len() < last {
            let hash = sequence.hash(first + found.len());
            let Some(block) = self.pool.find(&hash) else { break };
            found.push(block);
        }
        let is_right = |blocks: usize| keeps_form((first + blocks) * BLOCK_TOKENS, sequence.prompt(), chunk);
        let usable = (0..=found.len()).rev().find(|&blocks| blocks == 0 || is_right(blocks)).unwrap_or(0);
        self.pool.give_back(found.split_off(usable));
        sequence.reuse(found);
    }

    /// Gives a running sequence the blocks for its next `tokens`; younger ones give up theirs when none is left. False when
    /// it is the youngest itself and must wait.
    fn make_room(&mut self, at: usize, tokens: usize, step: &mut Vec<Scheduled>) -> bool {
        let sequence = &self.running[at];
        let needed =
            BlockPool::blocks_for(sequence.cached() + tokens).saturating_sub(sequence.blocks().len());
        loop {
            if let Some(blocks) = self.pool.take(needed) {
                self.running[at].append_blocks(blocks);
                return true;
            }
            if at + 1 == self.running.len() {
                return false;
            }
            let mut youngest = self.running.pop().expect("there is one behind this one");
            self.pool.give_back(youngest.release());
            step.retain(|part| part.id != youngest.id());
            self.waiting.push_front(youngest);
            self.preemptions += 1;
        }
    }
}

/// How many tokens a sequence with several pending ones computes next.
fn next_part(sequence: &Sequence, chunk: usize) -> usize {
    let cached = sequence.cached();
    if cached < sequence.prompt() {
        let end = sequence.prompt().min(cached - cached % chunk + chunk);
        return end - cached;
    }
    // Generated tokens came one by one, in the form of few.
    sequence.pending().min(MATERIALISE_FROM - 1).min(chunk)
}

/// Whether a prompt whose first `cached` tokens are known computes the rest of the chunk there in the form in which it would
/// compute the whole chunk.
fn keeps_form(cached: usize, prompt: usize, chunk: usize) -> bool {
    let start = cached - cached % chunk;
    let end = prompt.min(start + chunk);
    cached == start || end - start < MATERIALISE_FROM || end - cached >= MATERIALISE_FROM
}

#[cfg(test)]
mod tests;
