//! The choice of experts: small cases by hand on every backend, and random ones against the twin.
#![allow(clippy::unwrap_used, reason = "the helpers of these tests are tests too")]

mod support;

use formats::config::{GroupScore, RouterConfig, ScoringFunc};
use kernels::Backend;
use kernels::reference::Reference;
use kernels::shape::MoeShape;
use support::*;

fn run<B: Backend>(b: &mut B, shape: &MoeShape, logits: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let rows = logits.len() / shape.n_routed_experts;
    let bias = bias.map(|bias| b.weight(f32_weight(&[bias.len()], bias)).unwrap());
    let mut found = vec![f32::INFINITY; rows * 2 * shape.num_experts_per_tok];
    let (logits, mut choice) = (fenced(b, logits), fenced(b, &found));
    b.route(shape, &logits, bias.as_ref(), rows, &mut choice);
    b.read(&choice, 0..found.len(), &mut found);
    b.finish().unwrap();
    found
}

/// Checks one token on both backends: ids exactly, weights to the last few bits.
#[track_caller]
fn by_hand(shape: &MoeShape, logits: &[f32], bias: Option<&[f32]>, ids: &[f32], weights: &[f32]) {
    let check = |name: &str, found: Vec<f32>| {
        let (found_ids, found_weights) = found.split_at(ids.len());
        assert_eq!(found_ids, ids, "{name}");
        close(name, found_weights, weights, 1, |i| weights[i]);
    };
    check("reference", run(&mut Reference::new(), shape, logits, bias));
    each_backend!(|name, b| {
        check(&name, run(b, shape, logits, bias));
    });
}

/// No normalisation and no scale, so that weights are scores.
fn plain(experts: usize, per_token: usize) -> MoeShape {
    let shape = moe_shape(1, 1, [experts, per_token]);
    let router = RouterConfig { norm_topk_floor: None, routed_scaling_factor: 1.0, ..shape.router };
    MoeShape { router, ..shape }
}

/// A logit whose sigmoid is `score`.
fn logit(score: f64) -> f32 {
    (score / (1.0 - score)).ln() as f32
}

#[test]
fn sigmoid_scores_in_descending_order_and_ties_to_the_smaller_id() {
    let logits = [0.25, 0.75, 0.5, 0.75].map(logit);
    by_hand(&plain(4, 3), &logits, None, &[1.0, 3.0, 2.0], &[0.75, 0.75, 0.5]);
}

#[test]
fn softmax_is_over_all_experts() {
    let mut shape = plain(4, 2);
    shape.router.scoring_func = ScoringFunc::Softmax;
    // Exponentials 1, 2, 4, 1 over 8, shifted beyond what exp can hold.
    let logits = [1.0f32, 2.0, 4.0, 1.0].map(|v| v.ln() + 90.0);
    let check = |name: &str, found: Vec<f32>| {
        assert_eq!(found[..2], [2.0, 1.0], "{name}");
        // The shift costs seven bits of the logits.
        close(name, &found[2..], &[0.5, 0.25], 120, |_| 1.0);
    };
    check("reference", run(&mut Reference::new(), &shape, &logits, None));
    each_backend!(|name, b| {
        check(&name, run(b, &shape, &logits, None));
    });
}

#[test]
fn bias_decides_the_choice_and_leaves_the_weights() {
    let logits = [0.9, 0.5, 0.4, 0.1].map(logit);
    by_hand(&plain(4, 2), &logits, Some(&[0.0, 0.0, 0.2, 0.0]), &[0.0, 2.0], &[0.9, 0.4]);
    by_hand(&plain(4, 2), &logits, Some(&[-1.0, 0.0, 0.2, 0.5]), &[2.0, 3.0], &[0.4, 0.1]);
    // All below zero: a chosen expert has a score, however small; a dropped one has none.
    by_hand(&plain(4, 2), &logits, Some(&[-3.0, -2.0, -2.0, -2.0]), &[1.0, 2.0], &[0.5, 0.4]);
}

#[test]
fn weights_are_divided_by_sum_and_floor_then_scaled() {
    let mut shape = plain(3, 2);
    let logits = [0.5, 0.25, 0.75].map(logit);
    shape.router.norm_topk_floor = Some(0.0);
    by_hand(&shape, &logits, None, &[2.0, 0.0], &[0.6, 0.4]);
    shape.router.norm_topk_floor = Some(0.75);
    by_hand(&shape, &logits, None, &[2.0, 0.0], &[0.375, 0.25]);
    shape.router.routed_scaling_factor = 2.0;
    by_hand(&shape, &logits, None, &[2.0, 0.0], &[0.75, 0.5]);
    shape.router.norm_topk_floor = None;
    by_hand(&shape, &logits, None, &[2.0, 0.0], &[1.5, 1.0]);
}

#[test]
fn only_the_best_groups_stay() {
    let mut shape = plain(6, 2);
    (shape.router.n_group, shape.router.topk_group) = (3, 1);
    // Groups (0.9, 0.1), (0.6, 0.5), (0.4, 0.3): by the best of each the first, by the sum of two the second.
    let logits = [0.9, 0.1, 0.6, 0.5, 0.4, 0.3].map(logit);
    by_hand(&shape, &logits, None, &[2.0, 3.0], &[0.6, 0.5]);
    shape.router.group_score = GroupScore::Max;
    by_hand(&shape, &logits, None, &[0.0, 1.0], &[0.9, 0.1]);
    shape.router.topk_group = 2;
    by_hand(&shape, &logits, None, &[0.0, 2.0], &[0.9, 0.6]);
    // The bias counts for groups too.
    shape.router.topk_group = 1;
    by_hand(&shape, &logits, Some(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.7]), &[5.0, 4.0], &[0.3, 0.4]);
    // Equal groups: the first.
    by_hand(&shape, &[0.5; 6].map(logit), None, &[0.0, 1.0], &[0.5, 0.5]);
}

#[test]
fn groups_of_one_expert() {
    let mut shape = plain(3, 2);
    (shape.router.n_group, shape.router.topk_group) = (3, 2);
    by_hand(&shape, &[0.2, 0.3, 0.1].map(logit), None, &[1.0, 0.0], &[0.3, 0.2]);
}

#[test]
fn nan_logits_choose_distinct_experts_and_stay_visible() {
    for scoring_func in [ScoringFunc::Sigmoid, ScoringFunc::Softmax] {
        for group_score in [GroupScore::TopTwoSum, GroupScore::Max] {
            let mut shape = plain(6, 3);
            let r = &mut shape.router;
            (r.n_group, r.topk_group, r.scoring_func, r.group_score) = (3, 2, scoring_func, group_score);
            let nan = f32::NAN;
            for logits in [[nan; 6], [0.0, nan, nan, nan, 1.0, nan], [nan, nan, f32::INFINITY, nan, nan, nan]]
            {
                let reference = run(&mut Reference::new(), &shape, &logits, None);
                each_backend!(|name, b| {
                    let found = run(b, &shape, &logits, None);
                    assert_eq!(found[..3], reference[..3], "{name}: {logits:?}");
                    let mut ids = found[..3].to_vec();
                    ids.sort_by(f32::total_cmp);
                    ids.dedup();
                    assert!(ids.len() == 3 && ids.iter().all(|id| (0.0..6.0).contains(id)), "{ids:?}");
                    assert!(found[3..].iter().any(|weight| weight.is_nan()), "{name}: {logits:?}: {found:?}");
                });
            }
        }
    }
}

#[test]
fn random_logits_agree_with_the_twin() {
    let mut random = Random(1);
    for (experts, per_token, n_group, topk_group) in
        [(1, 1, 1, 1), (8, 2, 1, 1), (12, 4, 4, 2), (256, 8, 8, 4)]
    {
        for scoring_func in [ScoringFunc::Sigmoid, ScoringFunc::Softmax] {
            for group_score in [GroupScore::TopTwoSum, GroupScore::Max] {
                let mut shape = moe_shape(1, 1, [experts, per_token]);
                let r = &mut shape.router;
                (r.n_group, r.topk_group, r.scoring_func, r.group_score) =
                    (n_group, topk_group, scoring_func, group_score);
                let logits: Vec<f32> = random.values(9 * experts).iter().map(|v| v * 4.0).collect();
                let bias = random.values(experts);
                for bias in [None, Some(&bias[..])] {
                    let expected = run(&mut Reference::new(), &shape, &logits, bias);
                    each_backend!(|name, b| {
                        let found = run(b, &shape, &logits, bias);
                        let what = format!("{shape:?}, {name}");
                        close(&what, &found, &expected, per_token, |i| expected[i].abs());
                        let ids = |choice: &[f32]| -> Vec<f32> {
                            choice.chunks(2 * per_token).flat_map(|c| &c[..per_token]).copied().collect()
                        };
                        same_bits(&what, &ids(&found), &ids(&expected));
                    });
                }
            }
        }
    }
}
