//! Rotary embedding and the latent cache.

use super::elementwise::RmsNorm;
use super::isa::Proven;
use crate::shape::MlaShape;
use crate::step::Span;
use formats::config::{RopeConfig, RopePairing};

/// Cos and sin of every pair at one position, scaled.
#[derive(Debug, Default)]
pub(super) struct Angles(Vec<(f32, f32)>);

impl Angles {
    /// The angle is an f32 product, as in HF transformers.
    fn at(&mut self, rotary: &RopeConfig, position: usize) {
        let scaling = rotary.attention_scaling;
        self.0.clear();
        self.0.extend(rotary.inv_freq.iter().map(|inv_freq| {
            let (sin, cos) = (position as f32 * inv_freq).sin_cos();
            (cos * scaling, sin * scaling)
        }));
    }

    fn rotate(&self, pairing: RopePairing, values: &mut [f32]) {
        let turn = |a: &mut f32, b: &mut f32, (cos, sin): (f32, f32)| {
            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        };
        match pairing {
            RopePairing::Interleaved => {
                for ([a, b], &angle) in values.as_chunks_mut::<2>().0.iter_mut().zip(&self.0) {
                    turn(a, b, angle);
                }
            }
            RopePairing::Half => {
                let (first, second) = values.split_at_mut(values.len() / 2);
                for ((a, b), &angle) in first.iter_mut().zip(second).zip(&self.0) {
                    turn(a, b, angle);
                }
            }
        }
    }
}

/// Rotates `q` and fills the cache for the rows of one span; arguments as in [`crate::Backend::mla_store`].
#[expect(clippy::too_many_arguments, reason = "the operation's own arguments and what it works with")]
pub(super) fn store(
    isa: Proven,
    shape: &MlaShape,
    kv: &[f32],
    kv_norm: &[f32],
    span: &Span<'_>,
    angles: &mut Angles,
    q: &mut [f32],
    cache: &mut [f32],
) {
    let width = shape.cache_width();
    let pairing = shape.rotary.pairing;
    for row in span.rows.clone() {
        let position = span.position(row);
        angles.at(&shape.rotary, position);
        for head in q[row * shape.q_width()..][..shape.q_width()].chunks_exact_mut(shape.nope + shape.rope) {
            angles.rotate(pairing, &mut head[shape.nope..]);
        }
        let (x, rope_key) = kv[row * width..][..width].split_at(shape.kv_lora);
        let slot = &mut cache[span.slot(position) * width..][..width];
        let (latent, rope_slot) = slot.split_at_mut(shape.kv_lora);
        isa.run(RmsNorm { x, weight: kv_norm, eps: shape.eps }, latent);
        rope_slot.copy_from_slice(rope_key);
        angles.rotate(pairing, rope_slot);
    }
}
