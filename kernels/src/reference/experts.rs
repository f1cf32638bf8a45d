//! The router and the experts it chooses.

use super::Weight;
use crate::ExpertWeights;
use crate::shape::MoeShape;
use formats::config::{GroupScore, ScoringFunc};
use std::cmp::Ordering;

/// `[K ids | K weights]` of one token. A NaN counts as the lowest score.
pub(super) fn route(shape: &MoeShape, logits: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let router = &shape.router;
    let scores = scores(router.scoring_func, logits);
    let selection: Vec<f32> = match bias {
        Some(bias) => scores.iter().zip(bias).map(|(score, bias)| score + bias).collect(),
        None => scores.clone(),
    };

    let group_len = shape.n_routed_experts / router.n_group;
    let groups: Vec<f32> =
        selection.chunks(group_len).map(|group| group_score(router.group_score, group)).collect();
    let eligible = &descending(&groups)[..router.topk_group];
    let mut chosen = descending(&selection);
    chosen.retain(|expert| eligible.contains(&(expert / group_len)));
    chosen.truncate(shape.num_experts_per_tok);

    let sum: f32 = chosen.iter().map(|&expert| scores[expert]).sum();
    let divisor = router.norm_topk_floor.map_or(1.0, |floor| sum + floor);
    let ids = chosen.iter().map(|&expert| expert as f32);
    let weights = chosen.iter().map(|&expert| scores[expert] / divisor * router.routed_scaling_factor);
    ids.chain(weights).collect()
}

fn scores(scoring: ScoringFunc, logits: &[f32]) -> Vec<f32> {
    match scoring {
        ScoringFunc::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        ScoringFunc::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exps: Vec<f32> = logits.iter().map(|logit| (logit - max).exp()).collect();
            let sum: f32 = exps.iter().sum();
            exps.iter().map(|exp| exp / sum).collect()
        }
    }
}

fn group_score(how: GroupScore, group: &[f32]) -> f32 {
    let best = descending(group);
    let of_best = |n: usize| best.iter().take(n).map(|&i| lowest_if_nan(group[i])).sum();
    match how {
        GroupScore::TopTwoSum => of_best(2),
        GroupScore::Max => of_best(1),
    }
}

/// Indices by descending value; of equal values the smaller index first.
fn descending(values: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    let value = |i: &usize| lowest_if_nan(values[*i]);
    // A stable sort keeps equal values in the order of their indices.
    order.sort_by(|a, b| value(b).partial_cmp(&value(a)).unwrap_or(Ordering::Equal));
    order
}

fn lowest_if_nan(value: f32) -> f32 {
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}

/// The local experts' part of every token's output, `[rows, hidden]`.
pub(super) fn experts(
    shape: &MoeShape,
    experts: &ExpertWeights<Weight>,
    x: &[f32],
    choice: &[f32],
    rows: usize,
) -> Vec<f32> {
    let (hidden, k) = (shape.hidden, shape.num_experts_per_tok);
    let mut out = vec![0.0f64; rows * hidden];
    for (local, expert) in shape.local_experts.clone().enumerate() {
        let mut tokens = Vec::new();
        let mut weights = Vec::new();
        for t in 0..rows {
            let (ids, w) = choice[t * 2 * k..][..2 * k].split_at(k);
            if let Some(i) = ids.iter().position(|&id| id == expert as f32) {
                tokens.push(t);
                weights.push(f64::from(w[i]));
            }
        }
        let x: Vec<f32> = tokens.iter().flat_map(|t| &x[t * hidden..][..hidden]).copied().collect();
        let gate = experts.gate.matrix(local).product(&x, tokens.len());
        let up = experts.up.matrix(local).product(&x, tokens.len());
        let inner: Vec<f32> = gate.iter().zip(up).map(|(&gate, up)| silu(gate) * up).collect();
        let y = experts.down.matrix(local).product(&inner, tokens.len());
        for (i, (t, weight)) in tokens.iter().zip(weights).enumerate() {
            for (out, &y) in out[t * hidden..][..hidden].iter_mut().zip(&y[i * hidden..][..hidden]) {
                *out += weight * f64::from(y);
            }
        }
    }
    out.iter().map(|&value| value as f32).collect()
}

/// `x * sigmoid(x)`
pub(super) fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}
