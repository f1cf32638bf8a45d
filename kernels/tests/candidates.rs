//! Candidates of rows of logits on every backend, against those that the processor reads off the same rows.
#![allow(clippy::unwrap_used, reason = "the helpers of these tests are tests too")]

mod support;

use kernels::Backend;
use kernels::candidates::{Candidates, Edit, MOST_EDITS, Selection};
use kernels::reference::Reference;
use support::*;

fn check<B: Backend>(
    name: &str,
    b: &mut B,
    rows: &[f32],
    ids: std::ops::Range<usize>,
    asked: &[(usize, &Selection)],
) {
    let mut buffer = b.zeros(rows.len()).unwrap();
    b.write(&mut buffer, rows);
    let mut found = Vec::new();
    // The second time with what the first has left behind.
    for _ in 0..2 {
        found.clear();
        b.candidates(&buffer, ids.clone(), asked, &mut found).unwrap();
    }
    assert_eq!(found.len(), asked.len(), "{name}");
    for (found, &(row, selection)) in found.iter().zip(asked) {
        let first = u32::try_from(ids.start).unwrap();
        let expected = Candidates::choose(&rows[row * ids.len()..][..ids.len()], first, selection);
        let what = format!("{name}, row {row} of {}, {:?}", ids.len(), selection.temperature);
        // NaN equals itself here.
        let fault = |c: &Candidates| c.fault.map(|(id, logit)| (id, logit.to_bits()));
        assert_eq!(fault(found), fault(&expected), "{what}");
        if expected.fault.is_some() {
            continue;
        }
        assert_eq!(
            (found.best, &found.list, found.floor),
            (expected.best, &expected.list, expected.floor),
            "{what}"
        );
        assert_eq!(found.raw_largest, expected.raw_largest, "{what}");
        for (found, expected) in [(found.rest, expected.rest), (found.raw_sum, expected.raw_sum)] {
            assert!((found - expected).abs() <= 1e-5 * expected, "{what}: {found} {expected}");
        }
    }
}

#[test]
fn candidates_are_those_of_the_twin() {
    let mut random = Random(31);
    // One token, less than a word of bits, beyond lists, thousands a thread; from anywhere.
    for (width, first) in
        [(1, 0), (31, 7), (33, 32), (1000, 31), (5003, 4000), (154_880, 0), (19_360, 19_360)]
    {
        let rows = 5;
        let mut logits = random.values(rows * width);
        let spread = [1.0, 12.0, 0.01, 300.0, 6.0];
        for (row, spread) in logits.chunks_mut(width).zip(spread) {
            row.iter_mut().for_each(|logit| *logit *= spread);
        }
        // Many equals, some forbidden from the beginning.
        for at in (0..width).step_by(3) {
            logits[at] = if at % 2 == 0 { 1.5 } else { f32::NEG_INFINITY };
        }
        let ids = first..first + width;
        let edits = |every: usize, bias: f32| -> Vec<Edit> {
            let near = first.saturating_sub(3)..first + width + 3;
            let ids = near.step_by(every).take(MOST_EDITS).map(|id| u32::try_from(id).unwrap());
            ids.map(|id| Edit { id, bias, repetition: 1.3, minus: 0.7 }).collect()
        };
        let words = ids.end.div_ceil(32);
        let bits: Vec<u32> = (0..words as u32).map(|word| word.wrapping_mul(2_654_435_761)).collect();
        let base = Selection::default();
        let selections = [
            base.clone(),
            Selection { temperature: 0.8, ..base.clone() },
            Selection { logprobs: true, ..base.clone() },
            Selection { temperature: 1.7, edits: edits(5, 0.5), ..base.clone() },
            Selection {
                temperature: 1.0,
                edits: edits(2, f32::NEG_INFINITY),
                allowed: Some(bits.clone()),
                ..base.clone()
            },
            Selection { temperature: 1e-30, allowed: Some(bits.clone()), ..base.clone() },
            // Shorter than the vocabulary: nothing beyond may come.
            Selection { temperature: 1.0, allowed: Some(bits[..words / 2].to_vec()), ..base.clone() },
            Selection { temperature: 1.0, allowed: Some(Vec::new()), logprobs: true, ..base },
        ];
        let asked: Vec<(usize, &Selection)> =
            [4, 0, 2, 1, 3].into_iter().flat_map(|row| selections.iter().map(move |s| (row, s))).collect();
        each_backend!(|name, b| {
            check(&name, b, &logits, ids.clone(), &asked);
        });
        check("reference", &mut Reference::new(), &logits, ids.clone(), &asked[..2]);
        // More rows than go at once.
        let many: Vec<(usize, &Selection)> = (0..150).map(|at| (at % rows, &selections[at % 2])).collect();
        if width < 2000 {
            each_backend!(|name, b| {
                check(&name, b, &logits, ids.clone(), &many);
            });
        }
    }
}

#[test]
fn what_is_no_number_is_found() {
    let base = Selection { temperature: 1.0, ..Selection::default() };
    for wrong in [f32::NAN, f32::INFINITY] {
        let mut logits = Random(32).values(2 * 3000);
        (logits[2999], logits[4500], logits[4501]) = (wrong, wrong, wrong);
        let asked = [(0, &base), (1, &base)];
        each_backend!(|name, b| {
            check(&name, b, &logits, 100..3100, &asked);
        });
    }
}
