//! Which tokens go into the next step. No device and no clock in here.
//!
//! Sequences start in the order they came. A running sequence has blocks for its longest possible answer, so nothing ever
//! has to be thrown out again. Prompts go in whole chunks of `max_num_batched_tokens`, cut at the same places whatever else
//! runs, so that an answer does not depend on the load.

use crate::kv_cache::BlockPool;
use crate::sequence::{SeqId, Sequence};
use std::collections::VecDeque;

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerLimits {
    /// Sequences that run at the same time.
    pub max_num_seqs: usize,
    /// Prompt tokens of a step, and the length of a prompt's chunks.
    pub max_num_batched_tokens: usize,
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
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
}

impl Scheduler {
    /// No sequences yet. `pool` must have room for the longest sequence that will ever be added.
    pub fn new(limits: SchedulerLimits, pool: BlockPool) -> Self {
        Self { limits, pool, waiting: VecDeque::new(), running: Vec::new() }
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

    /// Takes a sequence out, wherever it is, and frees its blocks.
    pub fn remove(&mut self, id: SeqId) {
        self.waiting.retain(|sequence| sequence.id() != id);
        if let Some(i) = self.running.iter().position(|sequence| sequence.id() == id) {
            let mut sequence = self.running.remove(i);
            self.pool.give_back(sequence.release());
        }
    }

    /// The next step: a token of every sequence that generates, then chunks of prompts, oldest first. Empty when there is
    /// nothing to do.
    pub fn schedule(&mut self, step: &mut Vec<Scheduled>) {
        step.clear();
        self.admit();
        for sequence in self.running.iter().filter(|sequence| sequence.pending() == 1) {
            step.push(Scheduled { id: sequence.id(), tokens: 1, sample: true });
        }
        let mut room = self.limits.max_num_batched_tokens;
        for sequence in self.running.iter().filter(|sequence| sequence.pending() > 1) {
            let tokens = sequence.pending().min(self.limits.max_num_batched_tokens);
            if tokens > room {
                break;
            }
            room -= tokens;
            step.push(Scheduled { id: sequence.id(), tokens, sample: tokens == sequence.pending() });
        }
    }

    /// A running sequence.
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.running.iter().find(|sequence| sequence.id() == id)
    }

    /// Says that a scheduled part was computed, and which token was sampled after it, if one was.
    pub fn advance(&mut self, done: Scheduled, token: Option<u32>) {
        let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id() == done.id) else {
            return;
        };
        sequence.mark_cached(done.tokens);
        if let Some(token) = token {
            sequence.push(token);
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

    /// Blocks that no sequence has.
    pub fn free_blocks(&self) -> usize {
        self.pool.free()
    }

    fn admit(&mut self) {
        while self.running.len() < self.limits.max_num_seqs {
            let Some(first) = self.waiting.front() else { return };
            let Some(blocks) = self.pool.take(BlockPool::blocks_for(first.max_len())) else { return };
            let mut sequence = self.waiting.pop_front().expect("it has a front");
            sequence.admit(blocks);
            self.running.push(sequence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: SchedulerLimits = SchedulerLimits { max_num_seqs: 3, max_num_batched_tokens: 8 };

    fn sequence(id: u64, prompt: usize, max_len: usize) -> Sequence {
        Sequence::new(SeqId(id), vec![1; prompt], max_len)
    }

    fn step(scheduler: &mut Scheduler) -> Vec<(u64, usize, bool)> {
        let mut plan = Vec::new();
        scheduler.schedule(&mut plan);
        for &part in &plan {
            scheduler.advance(part, part.sample.then_some(7));
        }
        plan.iter().map(|part| (part.id.0, part.tokens, part.sample)).collect()
    }

    #[test]
    fn long_prompts_go_in_chunks_while_others_generate() {
        let mut scheduler = Scheduler::new(LIMITS, BlockPool::new(8));
        scheduler.add(sequence(0, 2, 64));
        assert_eq!(step(&mut scheduler), [(0, 2, true)]);
        scheduler.add(sequence(1, 19, 64));
        assert_eq!(step(&mut scheduler), [(0, 1, true), (1, 8, false)]);
        assert_eq!(step(&mut scheduler), [(0, 1, true), (1, 8, false)]);
        assert_eq!(step(&mut scheduler), [(0, 1, true), (1, 3, true)]);
        assert_eq!(step(&mut scheduler), [(0, 1, true), (1, 1, true)]);
    }

    #[test]
    fn chunks_do_not_depend_on_the_load() {
        let mut scheduler = Scheduler::new(LIMITS, BlockPool::new(8));
        scheduler.add(sequence(0, 5, 64));
        scheduler.add(sequence(1, 10, 64));
        assert_eq!(
            step(&mut scheduler),
            [(0, 5, true)],
            "the second prompt's chunk of 8 does not fit and is not cut"
        );
        assert_eq!(step(&mut scheduler), [(0, 1, true), (1, 8, false)]);
    }

    /// Random arrivals, cancels and lengths: every sequence comes to its end, in bounded time, and no block is lost.
    #[test]
    fn nobody_starves_and_no_block_leaks() {
        let mut random = 1u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for _ in 0..50 {
            let mut scheduler = Scheduler::new(LIMITS, BlockPool::new(4));
            let mut alive = Vec::new();
            let mut id = 0;
            for _ in 0..200 {
                if next(3) == 0 {
                    let prompt = 1 + next(100) as usize;
                    scheduler.add(sequence(id, prompt, prompt + 1 + next(100) as usize));
                    alive.push(SeqId(id));
                    id += 1;
                }
                if !alive.is_empty() && next(10) == 0 {
                    scheduler.remove(alive.swap_remove(next(alive.len() as u64) as usize));
                }
                run(&mut scheduler, &mut alive);
            }
            let mut steps = 0;
            while !alive.is_empty() {
                run(&mut scheduler, &mut alive);
                steps += 1;
                assert!(steps < 300 * 200, "a sequence never ends");
            }
            assert_eq!((scheduler.waiting(), scheduler.running(), scheduler.free_blocks()), (0, 0, 4));
        }

        fn run(scheduler: &mut Scheduler, alive: &mut Vec<SeqId>) {
            let mut plan = Vec::new();
            scheduler.schedule(&mut plan);
            assert!(plan.is_empty() == alive.is_empty(), "work waits and nothing runs");
            assert!(
                plan.iter().filter(|p| p.tokens > 1).map(|p| p.tokens).sum::<usize>()
                    <= LIMITS.max_num_batched_tokens
            );
            for part in plan {
                scheduler.advance(part, part.sample.then_some(7));
                if scheduler.sequence(part.id).is_some_and(Sequence::is_full) {
                    scheduler.remove(part.id);
                    alive.retain(|id| *id != part.id);
                }
            }
        }
    }
}
