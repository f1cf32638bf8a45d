//! Logits to the next token: greedy, or a draw from a seeded stream of the sequence's own.

mod processors;

pub use processors::Processors;

use kernels::candidates::{Candidates, NEGLIGIBLE};
use rand_chacha::ChaCha12Rng;
use rand_core::{Rng, SeedableRng};
use std::hash::BuildHasher;

/// How the next token of a sequence is chosen. The server's fields of the same names are checked against the ranges here.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// What logits are divided by, from 0 on; 0 is greedy.
    pub temperature: f32,
    /// Draw from the fewest likeliest tokens that have this much probability together, above 0; 1 is off.
    pub top_p: f32,
    /// Draw from this many likeliest tokens; `None` is off.
    pub top_k: Option<usize>,
    /// Draw from tokens that have this share of the likeliest one's probability, 0 to 1; 0 is off.
    pub min_p: f32,
    /// Of the draws; `None` takes one from the operating system.
    pub seed: Option<u64>,
    /// Divides the positive logits and multiplies the negative ones of every token that was in prompt or answer; 1 is off.
    pub repetition_penalty: f32,
    /// Taken from the logit of every token that was in the answer; 0 is off.
    pub presence_penalty: f32,
    /// Taken from the logit of a token for each time that it was in the answer; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of some tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens before which no stop token is drawn.
    pub min_tokens: usize,
}

impl Default for SamplingParams {
    /// The model's own distribution.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            seed: None,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            min_tokens: 0,
        }
    }
}

impl SamplingParams {
    /// The likeliest token every time.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

/// Chooses the tokens of one sequence. The choices depend on the parameters, the seed and the logits, and on nothing
/// else that runs.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    draws: ChaCha12Rng,
    /// Scratch: the tokens that are still in, likeliest first where an order was needed.
    kept: Vec<u32>,
}

/// How many of the likeliest tokens are put in order at first; real nuclei are smaller.
const FIRST_SORTED: usize = 256;

impl Sampler {
    /// The sampler of a new sequence.
    pub fn new(params: &SamplingParams) -> Self {
        let seed = params.seed.unwrap_or_else(random_seed);
        Self { params: params.clone(), draws: ChaCha12Rng::seed_from_u64(seed), kept: Vec::new() }
    }

    /// What logits are divided by.
    pub fn temperature(&self) -> f32 {
        self.params.temperature
    }

    /// The next token, given the logits `[vocab_size]` of every token; they are used up. NaN is never chosen as long as
    /// there is a number.
    ///
    /// Filters apply in this order, each to what the one before left: temperature, top_k, top_p, min_p. Ties go to the
    /// smaller id.
    ///
    /// # Panics
    /// On no logits at all.
    pub fn sample(&mut self, logits: &mut [f32]) -> u32 {
        let best = argmax(logits);
        let largest = logits[best as usize];
        if self.params.temperature <= 0.0 || !largest.is_finite() {
            return best;
        }
        self.kept.clear();
        self.kept.reserve(logits.len());
        for (id, logit) in (0..).zip(logits.iter_mut()) {
            let exponent = (*logit - largest) / self.params.temperature;
            // False for NaN.
            if exponent > NEGLIGIBLE {
                *logit = exponent.exp();
                self.kept.push(id);
            }
        }
        let weights = &*logits;
        self.keep(weights);
        self.draw(weights)
    }

    /// The token that [`Sampler::sample`] would choose, where that is one of the candidates; `None`, and nothing drawn, where the whole row
    /// is needed to know.
    pub fn choose(&mut self, candidates: &Candidates) -> Option<u32> {
        let (best, largest) = candidates.best?;
        if self.params.temperature <= 0.0 || !largest.is_finite() {
            return Some(best);
        }
        let SamplingParams { temperature, top_p, top_k, min_p, .. } = self.params;
        let exponent = |logit: f32| (logit - largest) / temperature;
        let weights = candidates.list.iter().map(|&(_, logit)| exponent(logit));
        let mut weights: Vec<f32> = weights.take_while(|&e| e > NEGLIGIBLE).map(f32::exp).collect();
        let sum = |weights: &[f32]| weights.iter().map(|&weight| f64::from(weight)).sum::<f64>();
        // What else may be drawn.
        let mut rest = candidates.rest;
        if let Some(top_k) = top_k {
            if top_k <= weights.len() {
                weights.truncate(top_k);
                rest = 0.0;
            } else if rest > 0.0 {
                return None;
            }
        }
        if top_p < 1.0 {
            let enough = f64::from(top_p) * (sum(&weights) + rest);
            let mut so_far = 0.0;
            let last = weights.iter().position(|&weight| {
                so_far += f64::from(weight);
                so_far >= enough
            });
            match last {
                Some(last) => {
                    weights.truncate(last + 1);
                    rest = 0.0;
                }
                None if rest > 0.0 => return None,
                None => {}
            }
        }
        if min_p > 0.0 {
            weights.retain(|&weight| weight >= min_p);
            if rest > 0.0 && exponent(candidates.floor).exp() >= min_p {
                return None;
            }
            rest = 0.0;
        }
        let mut draws = self.draws.clone();
        let mut left = unit(&mut draws) * (sum(&weights) + rest);
        let mut drawn = None;
        for (&(id, _), &weight) in candidates.list.iter().zip(&weights) {
            drawn = Some(id);
            if left < f64::from(weight) {
                self.draws = draws;
                return drawn;
            }
            left -= f64::from(weight);
        }
        // Rounding may leave a little.
        let drawn = drawn.filter(|_| rest == 0.0)?;
        self.draws = draws;
        Some(drawn)
    }

    /// Leaves in `kept` what passes the filters. The largest weight is 1.
    fn keep(&mut self, weights: &[f32]) {
        let SamplingParams { top_p, top_k, min_p, .. } = self.params;
        let top_k = top_k.filter(|&top_k| top_k < self.kept.len());
        if let Some(top_k) = top_k {
            self.sort_to(top_k, weights);
            self.kept.truncate(top_k);
        }
        if top_p < 1.0 {
            self.keep_nucleus(f64::from(top_p), weights);
        } else if top_k.is_none() {
            // The likeliest first, so that few need to be known for most draws.
            let sorted = FIRST_SORTED.min(self.kept.len());
            self.sort_to(sorted, weights);
            self.kept[sorted..].sort_unstable();
        }
        if min_p > 0.0 {
            self.kept.retain(|&id| weights[id as usize] >= min_p);
        }
    }

    /// Keeps the fewest likeliest tokens that reach `top_p` of the probability of all that passed so far.
    fn keep_nucleus(&mut self, top_p: f64, weights: &[f32]) {
        let all = total(weights, &self.kept);
        // Tokens below this weight have less than 1 - top_p of the probability together: none is in the nucleus.
        let floor = ((1.0 - top_p) * all / self.kept.len() as f64) as f32;
        self.kept.retain(|&id| weights[id as usize] >= floor);
        let enough = top_p * all;
        let mut sorted = 0;
        let mut sum = 0.0;
        while sorted < self.kept.len() {
            let to = (sorted * 8).max(FIRST_SORTED).min(self.kept.len());
            self.sort_to(to, weights);
            for at in sorted..to {
                sum += f64::from(weights[self.kept[at] as usize]);
                if sum >= enough {
                    self.kept.truncate(at + 1);
                    return;
                }
            }
            sorted = to;
        }
    }

    /// Brings the `count` likeliest of `kept` to the front, likeliest first.
    fn sort_to(&mut self, count: usize, weights: &[f32]) {
        let likelier =
            |a: &u32, b: &u32| weights[*b as usize].total_cmp(&weights[*a as usize]).then_with(|| a.cmp(b));
        if count < self.kept.len() {
            self.kept.select_nth_unstable_by(count, likelier);
        }
        self.kept[..count].sort_unstable_by(likelier);
    }

    /// One of `kept`, each as likely as its weight says.
    fn draw(&mut self, weights: &[f32]) -> u32 {
        let mut left = unit(&mut self.draws) * total(weights, &self.kept);
        for &id in &self.kept {
            let weight = f64::from(weights[id as usize]);
            if left < weight {
                return id;
            }
            left -= weight;
        }
        // Rounding may leave a little.
        *self.kept.last().expect("the likeliest token passes every filter")
    }
}

/// Uniform in [0, 1).
fn unit(draws: &mut ChaCha12Rng) -> f64 {
    const STEP: f64 = 1.0 / (1u64 << 53) as f64;
    (draws.next_u64() >> 11) as f64 * STEP
}

/// A number that nobody can foresee: the standard library's hash keys come from the operating system.
pub fn random_seed() -> u64 {
    let keys = std::collections::hash_map::RandomState::new();
    keys.hash_one("seed")
}

fn total(weights: &[f32], ids: &[u32]) -> f64 {
    ids.iter().map(|&id| f64::from(weights[id as usize])).sum()
}

/// The largest number's place, the first of equal ones; 0 where there is no number.
fn argmax(logits: &[f32]) -> u32 {
    const LANES: usize = 16;
    assert!(!logits.is_empty(), "a vocabulary has tokens");
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, logit);
        }
    }
    let largest = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger);
    let best = logits.iter().position(|&logit| logit == largest).unwrap_or(0);
    u32::try_from(best).expect("token ids are 32 bits wide")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::candidates::Selection;

    fn params(temperature: f32) -> SamplingParams {
        SamplingParams { temperature, seed: Some(7), ..SamplingParams::default() }
    }

    /// How often each token comes in `draws` draws from the logits.
    fn counts(params: &SamplingParams, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(params);
        let mut counts = vec![0; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(&mut logits.to_vec()) as usize] += 1;
        }
        counts
    }

    /// Which tokens ever come.
    fn support(params: &SamplingParams, logits: &[f32]) -> Vec<usize> {
        let counts = counts(params, logits, 4000);
        (0..logits.len()).filter(|&id| counts[id] > 0).collect()
    }

    #[test]
    fn greedy_takes_the_smallest_id_of_the_largest_and_never_nan() {
        let mut sampler = Sampler::new(&SamplingParams::greedy());
        let nan = f32::NAN;
        for (logits, best) in [
            (vec![1.0, 3.0, 3.0, 2.0], 1),
            (vec![nan, nan, -5.0, nan], 2),
            (vec![nan, f32::NEG_INFINITY], 1),
            (vec![f32::NEG_INFINITY, f32::INFINITY, f32::INFINITY], 1),
            (vec![nan, nan], 0),
        ] {
            assert_eq!(sampler.sample(&mut logits.clone()), best, "{logits:?}");
        }
    }

    #[test]
    fn what_is_no_number_is_never_drawn() {
        let nan = f32::NAN;
        assert_eq!(support(&params(1.0), &[nan, 0.0, f32::NEG_INFINITY, 0.0, nan]), [1, 3]);
        assert_eq!(support(&params(0.5), &[nan, f32::INFINITY, 1.0]), [1]);
        assert_eq!(support(&params(0.5), &[nan, nan]), [0]);
        assert_eq!(support(&params(1e-30), &[1.0, 1.5, -1e30]), [1]);
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0, 1.0, 2.0, -1.0];
        for temperature in [0.5, 1.0, 2.0] {
            let draws = 100_000;
            let counts = counts(&params(temperature), &logits, draws);
            let weights = logits.map(|logit: f32| f64::from(logit / temperature).exp());
            let total: f64 = weights.iter().sum();
            for (count, weight) in counts.iter().zip(weights) {
                let expected = weight / total;
                let sigma = (expected * (1.0 - expected) / draws as f64).sqrt();
                let seen = *count as f64 / draws as f64;
                assert!((seen - expected).abs() < 5.0 * sigma, "{seen} {expected} at {temperature}");
            }
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        // Probabilities 0.4, 0.1, 0.3, 0.2.
        let logits = [0.4f32, 0.1, 0.3, 0.2].map(f32::ln);
        let base = params(1.0);
        let with = |change: fn(&mut SamplingParams)| {
            let mut params = base.clone();
            change(&mut params);
            support(&params, &logits)
        };
        assert_eq!(with(|_| ()), [0, 1, 2, 3]);
        assert_eq!(with(|p| p.top_k = Some(2)), [0, 2]);
        assert_eq!(with(|p| p.top_k = Some(9)), [0, 1, 2, 3]);
        assert_eq!(with(|p| p.top_p = 0.69), [0, 2]);
        assert_eq!(with(|p| p.top_p = 0.71), [0, 2, 3]);
        assert_eq!(with(|p| p.top_p = 0.01), [0]);
        assert_eq!(with(|p| p.min_p = 0.49), [0, 2, 3]);
        assert_eq!(with(|p| p.min_p = 1.0), [0]);
        // top_p is of what top_k left: 0.4 of 0.7 is 0.57.
        assert_eq!(with(|p| (p.top_k, p.top_p) = (Some(2), 0.5)), [0]);
        assert_eq!(with(|p| (p.top_k, p.top_p) = (Some(2), 0.6)), [0, 2]);
    }

    #[test]
    fn a_tie_at_the_border_goes_to_the_smaller_id() {
        let logits = [0.0; 8];
        assert_eq!(support(&SamplingParams { top_k: Some(3), ..params(1.0) }, &logits), [0, 1, 2]);
        assert_eq!(support(&SamplingParams { top_p: 0.49, ..params(1.0) }, &logits), [0, 1, 2, 3]);
    }

    #[test]
    fn a_flat_vocabulary_has_a_nucleus_of_its_share() {
        let logits = vec![0.0; 10_000];
        let mut sampler = Sampler::new(&SamplingParams { top_p: 0.5, ..params(1.0) });
        sampler.sample(&mut logits.clone());
        assert_eq!(sampler.kept.len(), 5000);
        assert_eq!(sampler.kept, (0..5000).collect::<Vec<_>>());
    }

    #[test]
    fn the_nucleus_is_that_of_a_full_sort() {
        let mut draws = ChaCha12Rng::seed_from_u64(1);
        for round in 0..40 {
            let spread = [0.1, 1.0, 4.0, 12.0][round % 4];
            let logits: Vec<f32> =
                (0..5000).map(|_| spread * (draws.next_u32() as f32 / u32::MAX as f32)).collect();
            for top_p in [0.05, 0.5, 0.95, 0.999] {
                let mut sampler = Sampler::new(&SamplingParams { top_p, ..params(1.0) });
                let mut weights = logits.clone();
                sampler.sample(&mut weights);
                let mut order: Vec<u32> = (0..5000).collect();
                order.sort_by(|&a, &b| weights[b as usize].total_cmp(&weights[a as usize]));
                let enough = f64::from(top_p) * total(&weights, &order);
                let mut sum = 0.0;
                let count = order.iter().position(|&id| {
                    sum += f64::from(weights[id as usize]);
                    sum >= enough
                });
                assert_eq!(sampler.kept, order[..=count.unwrap()], "{spread} {top_p}");
            }
        }
    }

    #[test]
    fn a_seed_gives_the_same_tokens_again_and_another_seed_others() {
        let draw = |seed, tokens: usize| {
            let mut sampler = Sampler::new(&SamplingParams { seed, ..params(1.0) });
            (0..tokens).map(|_| sampler.sample(&mut [0.0; 1000])).collect::<Vec<_>>()
        };
        assert_eq!(draw(Some(1), 20), draw(Some(1), 20));
        assert_eq!(draw(Some(1), 20)[..5], draw(Some(1), 5));
        assert_ne!(draw(Some(1), 20), draw(Some(2), 20));
        assert_ne!(draw(None, 20), draw(None, 20));
        // The stream is fixed for all time: a change here changes every seeded answer.
        assert_eq!(draw(Some(1), 4), FIRST_DRAWS);
    }
    const FIRST_DRAWS: [u32; 4] = [974, 691, 427, 175];

    #[test]
    fn candidates_give_the_token_of_the_whole_row() {
        let mut random = ChaCha12Rng::seed_from_u64(3);
        let (mut chosen, mut unknown) = (0, 0);
        for round in 0..400 {
            let spread = [0.3, 4.0, 15.0, 60.0][round % 4];
            let row: Vec<f32> =
                (0..3000).map(|_| spread * (random.next_u32() as f32 / u32::MAX as f32)).collect();
            let params = SamplingParams {
                temperature: [0.0, 0.6, 1.0, 1.9][round / 4 % 4],
                top_p: [1.0, 0.9, 0.3][round % 3],
                top_k: [None, Some(1), Some(40), Some(2000)][round / 2 % 4],
                min_p: [0.0, 0.05][round / 3 % 2],
                ..params(1.0)
            };
            let selection = Selection { temperature: params.temperature, ..Selection::default() };
            let candidates = Candidates::choose(&row, 0, &selection);
            let mut whole = Sampler::new(&params);
            let mut few = whole.clone();
            for draw in 0..20 {
                let expected = whole.sample(&mut row.clone());
                match few.choose(&candidates) {
                    Some(token) => {
                        assert_eq!(token, expected, "round {round}, draw {draw}, {params:?}");
                        chosen += 1;
                    }
                    None => {
                        // Nothing was drawn.
                        assert_eq!(few.sample(&mut row.clone()), expected);
                        unknown += 1;
                    }
                }
            }
        }
        assert!(chosen > 3000 && unknown > 100, "{chosen} {unknown}");
        let nothing = Selection { allowed: Some(vec![]), temperature: 1.0, ..Selection::default() };
        assert_eq!(Sampler::new(&params(1.0)).choose(&Candidates::choose(&[1.0; 9], 0, &nothing)), None);
    }

    #[test]
    fn scratch_is_allocated_once() {
        let mut sampler = Sampler::new(&SamplingParams { top_p: 0.9, ..params(1.0) });
        sampler.sample(&mut [0.0; 4096]);
        let (at, capacity) = (sampler.kept.as_ptr(), sampler.kept.capacity());
        for spread in 0..20 {
            let mut logits: Vec<f32> = (0..4096).map(|id| (id * spread) as f32 / 4096.0).collect();
            sampler.sample(&mut logits);
        }
        assert_eq!((at, capacity), (sampler.kept.as_ptr(), sampler.kept.capacity()));
    }
}
