//! Choice of experts.

use super::workers::grown;
use crate::shape::MoeShape;
use formats::config::{GroupScore, ScoringFunc};

/// Working memory of [`route`].
#[derive(Debug, Default)]
pub(super) struct Scratch {
    scores: Vec<f32>,
    /// Scores that decide, with no NaN.
    selection: Vec<f32>,
    /// Scores of the groups, with no NaN.
    groups: Vec<f32>,
    /// Groups, then experts that can still be chosen, ascending.
    candidates: Vec<usize>,
    /// Groups that stay.
    kept: Vec<usize>,
}

/// Fills `choice` `[K ids | K weights]` of one token. A NaN counts as the lowest score.
///
/// # Panics
/// When fewer than K experts are eligible, which a valid configuration excludes.
pub(super) fn route(
    shape: &MoeShape,
    logits: &[f32],
    bias: Option<&[f32]>,
    scratch: &mut Scratch,
    choice: &mut [f32],
) {
    let router = &shape.router;
    let scores = grown(&mut scratch.scores, logits.len());
    score(router.scoring_func, logits, scores);
    let selection = grown(&mut scratch.selection, logits.len());
    selection.copy_from_slice(scores);
    for (selection, bias) in selection.iter_mut().zip(bias.into_iter().flatten()) {
        *selection += bias;
    }
    lowest_if_nan(selection);

    let group_len = logits.len() / router.n_group;
    let groups = grown(&mut scratch.groups, router.n_group);
    for (group, members) in groups.iter_mut().zip(selection.chunks_exact(group_len)) {
        *group = group_score(router.group_score, members);
    }
    lowest_if_nan(groups);
    let (candidates, kept) = (&mut scratch.candidates, &mut scratch.kept);
    candidates.clear();
    candidates.extend(0..router.n_group);
    kept.clear();
    kept.extend((0..router.topk_group).map(|_| take_best(candidates, groups)));
    kept.sort_unstable();

    candidates.clear();
    candidates.extend(kept.iter().flat_map(|group| group * group_len..(group + 1) * group_len));
    let (ids, weights) = choice.split_at_mut(shape.num_experts_per_tok);
    let mut sum = 0.0;
    for (id, weight) in ids.iter_mut().zip(&mut *weights) {
        let expert = take_best(candidates, selection);
        *id = expert as f32;
        *weight = scores[expert];
        sum += scores[expert];
    }
    let divisor = router.norm_topk_floor.map_or(1.0, |floor| sum + floor);
    for weight in weights {
        *weight = *weight / divisor * router.routed_scaling_factor;
    }
}

fn score(scoring: ScoringFunc, logits: &[f32], scores: &mut [f32]) {
    match scoring {
        ScoringFunc::Sigmoid => {
            for (score, logit) in scores.iter_mut().zip(logits) {
                *score = 1.0 / (1.0 + (-logit).exp());
            }
        }
        ScoringFunc::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for (score, logit) in scores.iter_mut().zip(logits) {
                *score = (logit - max).exp();
                sum += *score;
            }
            for score in scores {
                *score /= sum;
            }
        }
    }
}

fn group_score(how: GroupScore, members: &[f32]) -> f32 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &score in members {
        if score > best {
            (best, second) = (score, best);
        } else if score > second {
            second = score;
        }
    }
    match how {
        GroupScore::TopTwoSum if members.len() > 1 => best + second,
        GroupScore::TopTwoSum | GroupScore::Max => best,
    }
}

fn lowest_if_nan(values: &mut [f32]) {
    for value in values.iter_mut().filter(|value| value.is_nan()) {
        *value = f32::NEG_INFINITY;
    }
}

/// Removes and returns the candidate with the largest value; of equal ones the first.
fn take_best(candidates: &mut Vec<usize>, values: &[f32]) -> usize {
    let better = |best, i| if values[candidates[i]] > values[candidates[best]] { i } else { best };
    let best = (1..candidates.len()).fold(0, better);
    candidates.remove(best)
}
