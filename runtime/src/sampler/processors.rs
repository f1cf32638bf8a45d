//! What a request does to the logits before a token is drawn: biases, penalties, a least length.

use super::SamplingParams;
use kernels::candidates::{Edit, Selection};
use std::collections::BTreeMap;

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
    /// In order, each once.
    in_prompt: Vec<u32>,
    counts: BTreeMap<u32, u32>,
}

impl Processors {
    /// The processors of a new sequence with this prompt and these stop tokens.
    pub fn new(params: &SamplingParams, prompt: &[u32], stop_token_ids: &[u32]) -> Self {
        let mut in_prompt = if params.repetition_penalty != 1.0 { prompt.to_vec() } else { Vec::new() };
        in_prompt.sort_unstable();
        in_prompt.dedup();
        Self {
            bias: params.logit_bias.clone(),
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            min_tokens: params.min_tokens,
            stop_token_ids: stop_token_ids.to_vec(),
            generated: 0,
            in_prompt,
            counts: BTreeMap::new(),
        }
    }

    /// Adds what they change to what is asked of the next logits.
    pub fn ask(&self, selection: &mut Selection) {
        let repeated = |id: &u32| (*id, Edit { repetition: self.repetition, ..Edit::of(*id) });
        let mut edits: BTreeMap<u32, Edit> = self.in_prompt.iter().map(repeated).collect();
        for &(id, bias) in &self.bias {
            edit(&mut edits, id).bias += bias;
        }
        if self.repetition != 1.0 {
            for &id in self.counts.keys() {
                edit(&mut edits, id).repetition = self.repetition;
            }
        }
        if self.presence != 0.0 || self.frequency != 0.0 {
            for (&id, &count) in &self.counts {
                edit(&mut edits, id).minus = self.presence + self.frequency * count as f32;
            }
        }
        selection.edits = edits.into_values().collect();
        if self.generated < self.min_tokens {
            selection.forbid(&self.stop_token_ids);
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

fn edit(edits: &mut BTreeMap<u32, Edit>, id: u32) -> &mut Edit {
    edits.entry(id).or_insert_with(|| Edit::of(id))
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
        let (mut logits, mut selection) = (logits.to_vec(), Selection::default());
        processors.ask(&mut selection);
        selection.write(&mut logits);
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
