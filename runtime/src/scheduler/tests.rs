use super::*;

const LIMITS: SchedulerLimits =
    SchedulerLimits { max_num_seqs: 3, max_num_batched_tokens: 8, prefix_cache: PrefixCache::On };

fn sequence(id: u64, prompt: usize, max_len: usize) -> Sequence {
    // Prompts have nothing in common.
    let tokens = (0..prompt as u32).map(|at| id as u32 * 1000 + at).collect();
    Sequence::new(SeqId(id), tokens, max_len, Prefix::Reuse)
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
    let first = step(&mut scheduler);
    assert_eq!(first, [(0, 5, true)], "the second prompt's chunk of 8 does not fit and is not cut");
    assert_eq!(step(&mut scheduler), [(0, 1, true), (1, 8, false)]);
}

#[test]
fn a_short_prompt_waits_for_one_chunk_of_a_long_one_only() {
    let mut scheduler = Scheduler::new(LIMITS, BlockPool::new(8));
    scheduler.add(sequence(0, 40, 64));
    assert_eq!(step(&mut scheduler), [(0, 8, false)]);
    scheduler.add(sequence(1, 3, 64));
    assert_eq!(step(&mut scheduler), [(1, 3, true)]);
    assert_eq!(step(&mut scheduler), [(1, 1, true), (0, 8, false)]);
}

#[test]
fn a_known_prefix_is_not_computed_again() {
    let limits = SchedulerLimits { max_num_batched_tokens: 256, ..LIMITS };
    let mut scheduler = Scheduler::new(limits, BlockPool::new(16));
    let prompt = |tail: u32| (0..200).chain([tail; 10]).collect::<Vec<u32>>();
    let with = |id, tail, prefix| Sequence::new(SeqId(id), prompt(tail), 300, prefix);
    scheduler.add(with(0, 1, Prefix::Reuse));
    scheduler.add(with(1, 2, Prefix::Reuse));
    // The second one waits for what the first one computes.
    assert_eq!(step(&mut scheduler), [(0, 210, true)]);
    assert_eq!(step(&mut scheduler), [(0, 1, true), (1, 82, true)]);
    assert_eq!(scheduler.sequence(SeqId(1)).unwrap().reused(), 128, "the last block would leave too few");
    scheduler.remove(SeqId(0));
    scheduler.remove(SeqId(1));
    assert_eq!(scheduler.pool().available(), 16);
    // It outlives who computed it.
    scheduler.add(with(2, 3, Prefix::Reuse));
    assert_eq!(step(&mut scheduler), [(2, 82, true)]);
    scheduler.add(with(3, 3, Prefix::Compute));
    assert_eq!(step(&mut scheduler), [(2, 1, true), (3, 210, true)]);

    // Nor does a prompt find what another salt's prompts have left.
    let mut scheduler = Scheduler::new(limits, BlockPool::new(16));
    let salted = |id, salt: &str| with(id, 1, Prefix::Reuse).salted(Some(BlockHash::salt(salt)));
    for (sequence, computed) in
        [(salted(0, "a"), 210), (salted(1, "b"), 210), (with(2, 1, Prefix::Reuse), 210), (salted(3, "a"), 82)]
    {
        let id = sequence.id();
        scheduler.add(sequence);
        assert_eq!(step(&mut scheduler), [(id.0, computed, true)]);
        scheduler.remove(id);
    }

    let limits = SchedulerLimits { prefix_cache: PrefixCache::Off, ..limits };
    let mut scheduler = Scheduler::new(limits, BlockPool::new(16));
    scheduler.add(with(0, 1, Prefix::Reuse));
    step(&mut scheduler);
    scheduler.add(with(1, 1, Prefix::Reuse));
    assert_eq!(step(&mut scheduler), [(0, 1, true), (1, 210, true)]);
}

#[test]
fn the_youngest_gives_way_and_comes_back() {
    let limits = SchedulerLimits { max_num_batched_tokens: 64, ..LIMITS };
    let mut scheduler = Scheduler::new(limits, BlockPool::new(3));
    scheduler.add(sequence(0, 60, 130));
    scheduler.add(sequence(1, 4, 70));
    assert_eq!(step(&mut scheduler), [(0, 60, true), (1, 4, true)]);
    let mut preempted = None;
    for round in 0..200 {
        let plan = step(&mut scheduler);
        assert!(plan.iter().any(|part| part.0 == 0), "the oldest always goes on");
        if scheduler.preemptions() == 1 && preempted.is_none() {
            preempted = Some(round);
        }
        if scheduler.sequence(SeqId(0)).is_some_and(Sequence::is_full) {
            break;
        }
    }
    assert!(preempted.is_some());
    scheduler.remove(SeqId(0));
    // The prompt as a prompt, then the answer in small parts.
    let generated = scheduler.waiting.front().unwrap().tokens().len() - 4;
    assert_eq!(step(&mut scheduler)[0], (1, 4, false));
    assert_eq!(step(&mut scheduler)[0], (1, 31, false));
    assert!(generated > 31);
}

/// A device that remembers what every slot of its cache was computed from and how.
#[derive(Default)]
struct Device(std::collections::HashMap<(u32, usize), (u64, bool)>);

fn digest(tokens: &[u32]) -> u64 {
    tokens.iter().fold(17, |sum, &token| (sum ^ u64::from(token)).wrapping_mul(0x100_0000_01b3))
}

impl Device {
    /// Computes a part; everything it builds on must be what the sequence alone would have.
    fn compute(&mut self, sequence: &Sequence, part: Scheduled, chunk: usize) {
        let (cached, blocks) = (sequence.cached(), sequence.blocks());
        let slot = |at: usize| (blocks[at / BLOCK_TOKENS], at % BLOCK_TOKENS);
        let alone = |at: usize| {
            let start = at - at % chunk;
            at < sequence.prompt() && sequence.prompt().min(start + chunk) - start >= MATERIALISE_FROM
        };
        for at in 0..cached {
            let expected = (digest(&sequence.tokens()[..=at]), alone(at));
            assert_eq!(self.0.get(&slot(at)), Some(&expected), "position {at} of {:?}", sequence.id());
        }
        for at in cached..cached + part.tokens {
            let form = part.tokens >= MATERIALISE_FROM;
            assert_eq!(form, alone(at), "position {at} of {:?}", sequence.id());
            self.0.insert(slot(at), (digest(&sequence.tokens()[..=at]), form));
        }
        assert_eq!(part.sample, cached + part.tokens == sequence.tokens().len());
    }
}

/// Random arrivals, cancels, lengths and common prefixes: every sequence comes to its end in bounded time, every position
/// that it builds on is its own, computed as it would be alone, and no block is lost.
#[test]
fn nobody_starves_no_block_leaks_and_no_answer_depends_on_others() {
    let mut random = 1u64;
    let mut next = move |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let (mut preemptions, mut reused) = (0, 0);
    for _ in 0..120 {
        let chunk = [1, 8, 20, 50, 64, 100, 128, 256][next(8) as usize];
        let limits = SchedulerLimits {
            max_num_seqs: 1 + next(5) as usize,
            max_num_batched_tokens: chunk,
            prefix_cache: if next(5) == 0 { PrefixCache::Off } else { PrefixCache::On },
        };
        let chunk = if chunk >= 64 { chunk - chunk % 64 } else { chunk };
        let total = 6 + next(8) as usize;
        let mut scheduler = Scheduler::new(limits, BlockPool::new(total));
        let mut device = Device::default();
        let mut alive: Vec<SeqId> = Vec::new();
        let mut id = 0;
        let mut steps = 0;
        loop {
            steps += 1;
            if steps < 150 && next(3) == 0 {
                let prompt = 1 + next(250) as usize;
                // Three families of prompts that part at some point.
                let (family, parts) = (next(3) as u32, next(200) as usize);
                let tokens =
                    (0..prompt).map(|at| if at < parts { family } else { 100 + id as u32 }).collect();
                let prefix = if next(6) == 0 { Prefix::Compute } else { Prefix::Reuse };
                let max_len = (prompt + next(120) as usize).min(total * 64);
                scheduler.add(Sequence::new(SeqId(id), tokens, max_len, prefix));
                alive.push(SeqId(id));
                id += 1;
            }
            if !alive.is_empty() && next(25) == 0 {
                scheduler.remove(alive.swap_remove(next(alive.len() as u64) as usize));
            }
            let mut plan = Vec::new();
            scheduler.schedule(&mut plan);
            assert_eq!(plan.is_empty(), alive.is_empty(), "work waits and nothing runs");
            let chunks = plan.iter().filter(|part| part.tokens > 1).map(|part| part.tokens);
            assert!(
                chunks.sum::<usize>() <= limits.max_num_batched_tokens && plan.len() <= limits.max_num_seqs
            );
            for &part in &plan {
                device.compute(scheduler.sequence(part.id).unwrap(), part, chunk);
            }
            for part in plan {
                let ends = scheduler.sequence(part.id).is_some_and(Sequence::is_full);
                scheduler.advance(part, (part.sample && !ends).then_some(7));
                let sequence = scheduler.sequence(part.id).unwrap();
                if part.sample && sequence.is_full() {
                    reused += sequence.reused();
                    scheduler.remove(part.id);
                    alive.retain(|id| *id != part.id);
                }
            }
            if steps >= 150 && alive.is_empty() {
                break;
            }
            assert!(steps < 40_000, "a sequence never ends");
        }
        let pool = scheduler.pool();
        assert_eq!((scheduler.waiting(), scheduler.running(), pool.available()), (0, 0, total));
        preemptions += scheduler.preemptions();
    }
    assert!(preemptions > 30 && reused > 10_000, "{preemptions} preemptions, {reused} tokens reused");
}
