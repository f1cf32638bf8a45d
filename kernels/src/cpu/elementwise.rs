//! Operations on one row at a time.

use super::isa::{Kernel, Vector};
use super::lanes::{exp, max, padded};

/// `out = x / sqrt(mean(x^2) + eps) * weight`
pub(super) struct RmsNorm<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub eps: f32,
}

impl Kernel for RmsNorm<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let mut squares = V::splat(0.0);
        let (whole, rest) = self.x.as_chunks::<L>();
        for x in whole {
            let x = V::load(x);
            squares = x.mul_add(x, squares);
        }
        let rest = V::load(&padded(rest));
        let mean = rest.mul_add(rest, squares).sum() / self.x.len() as f32;
        let scale = 1.0 / (mean + self.eps).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(self.x).zip(self.weight) {
            *out = x * scale * weight;
        }
    }
}

/// `out = silu(out) * up`
pub(super) struct SwiGlu<'a> {
    pub up: &'a [f32],
}

impl Kernel for SwiGlu<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        for (gate, up) in out.iter_mut().zip(self.up) {
            *gate = *gate / (1.0 + exp::<V, L>(-*gate)) * up;
        }
    }
}

/// A softmax that has seen a part of its scores.
#[derive(Clone, Copy, Debug)]
pub(super) struct SoftmaxState {
    /// Largest score so far.
    max: f32,
    /// Sum of e^(score - max) so far.
    total: f32,
}

impl Default for SoftmaxState {
    fn default() -> Self {
        Self { max: f32::NEG_INFINITY, total: 0.0 }
    }
}

impl SoftmaxState {
    /// The largest score, and the sum of e^(score - largest).
    pub(super) fn parts(self) -> [f32; 2] {
        [self.max, self.total]
    }

    /// What a weighted sum is multiplied by in the end.
    pub(super) fn normaliser(self) -> f32 {
        1.0 / self.total
    }
}

/// Turns the next scores of a row, before scaling, into weights and brings the row's weighted sum so far to the new maximum.
pub(super) struct Softmax<'a> {
    pub state: &'a mut SoftmaxState,
    pub scale: f32,
    pub sum: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let mut largest = [self.state.max; L];
        let (whole, rest) = out.as_chunks_mut::<L>();
        for scores in whole.iter_mut() {
            for l in 0..L {
                scores[l] *= self.scale;
                largest[l] = max(largest[l], scores[l]);
            }
        }
        let mut new_max = largest.into_iter().fold(self.state.max, max);
        for score in rest.iter_mut() {
            *score *= self.scale;
            new_max = max(new_max, *score);
        }

        let mut totals = [0.0; L];
        for scores in whole {
            for l in 0..L {
                scores[l] = exp::<V, L>(scores[l] - new_max);
                totals[l] += scores[l];
            }
        }
        for (total, score) in totals.iter_mut().zip(rest) {
            *score = exp::<V, L>(*score - new_max);
            *total += *score;
        }
        let shrink = exp::<V, L>(self.state.max - new_max);
        for value in self.sum {
            *value *= shrink;
        }
        *self.state = SoftmaxState {
            max: new_max,
            total: V::lane_mul_add(self.state.total, shrink, V::load(&totals).sum()),
        };
    }
}

/// One head's weighted sum over all parts of a context, divided by the total of its softmax.
pub(super) struct Merge<'a> {
    /// Parts of `len` values, in order: weighted sums `[heads, width]` of the parts' own softmaxes, then each head's
    /// [`SoftmaxState::parts`].
    pub parts: &'a [f32],
    pub len: usize,
    /// From where one begins to where the next one does.
    pub stride: usize,
    pub heads: usize,
    pub head: usize,
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let width = out.len();
        let state = |part: &[f32]| part[self.heads * width..].as_chunks::<2>().0[self.head];
        let parts = || self.parts.chunks(self.stride).map(|part| &part[..self.len]);
        let largest = parts().fold(f32::NEG_INFINITY, |largest, part| max(largest, state(part)[0]));
        out.fill(0.0);
        let mut all = 0.0;
        for part in parts() {
            let [max, total] = state(part);
            let weight = exp::<V, L>(max - largest);
            all = V::lane_mul_add(total, weight, all);
            for (out, value) in out.iter_mut().zip(&part[self.head * width..]) {
                *out = V::lane_mul_add(*value, weight, *out);
            }
        }
        let normaliser = 1.0 / all;
        for out in out {
            *out *= normaliser;
        }
    }
}
