//! What a request does to the logits before a token is drawn: biases, penalties, a least length.

use super::SamplingParams;
use std::collections::{HashMap, HashSet};

/// Changes the logits of one sequence as its parameters say. Does nothing, and remembers nothing, where they say nothing.
#[derive(Clone, Debug)]
pub struct Processors {
    bias: Vec<(u32, f32)>,
    repetition: f32,
    presence: f32,
    frequency: f32,
    min_tokens: usize,
    stop_token_ids: Vec<u32>,
    generated: usize,
    in_prompt: HashSet<u32>,
    counts: HashMap<u32, u32>,
}

impl Processors {
    /// The processors of a new sequence with this prompt and these stop tokens.
    pub fn new(params: &SamplingParams, prompt: &[u32], stop_token_ids: &[u32]) -> Self {
        let repeats = params.repetition_penalty != 1.0;
        Self {
            bias: params.logit_bias.clone(),
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            min_tokens: params.min_tokens,
            stop_token_ids: stop_token_ids.to_vec(),
            generated: 0,
            in_prompt: if repeats { prompt.iter().copied().collect() } else { HashSet::new() },
            counts: HashMap::new(),
        }
    }

    /// Changes `logits` `[vocab_size]`. Ids without a logit are passed over.
    pub fn apply(&self, logits: &mut [f32]) {
        if self.generated < self.min_tokens {
            ban(logits, &self.stop_token_ids);
        }
        for &(id, bias) in &self.bias {
            change(logits, id, |logit| logit + bias);
        }
        if self.repetition != 1.0 {
            let penalty = self.repetition;
            let again = self.counts.keys().filter(|id| !self.in_prompt.contains(id));
            for &id in self.in_prompt.iter().chain(again) {
                change(logits, id, |logit| if logit > 0.0 { logit / penalty } else { logit * penalty });
            }
        }
        if self.presence != 0.0 || self.frequency != 0.0 {
            for (&id, &count) in &self.counts {
                change(logits, id, |logit| logit - self.presence - self.frequency * count as f32);
            }
        }
    }

    /// Takes note of a generated token.
    pub fn observe(&mut self, token: u32) {
        self.generated += 1;
        if self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0 {
            *self.counts.entry(token).or_default() += 1;
        }
    }
}

/// Makes tokens impossible.
pub(crate) fn ban(logits: &mut [f32], ids: &[u32]) {
    for &id in ids {
        change(logits, id, |_| f32::NEG_INFINITY);
    }
}

fn change(logits: &mut [f32], id: u32, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = to(*logit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
        let mut params = SamplingParams::default();
        change(&mut params);
        params
    }

    fn after(processors: &Processors, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        processors.apply(&mut logits);
        logits
    }

    #[test]
    fn nothing_asked_for_changes_nothing() {
        let mut processors = Processors::new(&SamplingParams::default(), &[0, 1], &[2]);
        processors.observe(1);
        assert_eq!(after(&processors, &[1.0, -2.0, 3.0]), [1.0, -2.0, 3.0]);
    }

    #[test]
    fn penalties_are_of_what_was_said() {
        let mut processors =
            Processors::new(&params(|p| (p.presence_penalty, p.frequency_penalty) = (0.5, 0.25)), &[0], &[]);
        assert_eq!(after(&processors, &[1.0, 1.0, 1.0]), [1.0, 1.0, 1.0], "the prompt does not count");
        processors.observe(1);
        processors.observe(1);
        processors.observe(2);
        assert_eq!(after(&processors, &[1.0, 1.0, 1.0]), [1.0, 0.0, 0.25]);

        let mut processors = Processors::new(&params(|p| p.repetition_penalty = 2.0), &[0], &[]);
        processors.observe(0);
        processors.observe(1);
        assert_eq!(after(&processors, &[4.0, -4.0, 4.0]), [2.0, -8.0, 4.0], "once, and away from likely");
    }

    #[test]
    fn biases_and_a_least_length() {
        let request = params(|p| {
            p.logit_bias = vec![(0, 2.0), (9, 1.0)];
            p.min_tokens = 1;
        });
        let mut processors = Processors::new(&request, &[], &[2, 7]);
        assert_eq!(after(&processors, &[1.0, 1.0, 1.0]), [3.0, 1.0, f32::NEG_INFINITY]);
        processors.observe(0);
        assert_eq!(after(&processors, &[1.0, 1.0, 1.0]), [3.0, 1.0, 1.0]);
    }
}
