//! Multi-head latent attention, one span and one head at a time.

use super::{Matrix, dot, rms_norm, widen};
use crate::shape::MlaShape;
use crate::step::{MlaForm, Span};
use formats::config::{RopeConfig, RopePairing};

/// Rotates `q` and fills the cache for the rows of one span.
pub(super) fn store(
    shape: &MlaShape,
    kv: &[f32],
    kv_norm: &[f32],
    span: &Span<'_>,
    q: &mut [f32],
    cache: &mut [f32],
) {
    let (width, latent) = (shape.cache_width(), shape.kv_lora);
    for row in span.rows.clone() {
        let position = span.position(row);
        for head in 0..shape.heads {
            let start = row * shape.q_width() + head * (shape.nope + shape.rope) + shape.nope;
            rotate(&shape.rotary, position, &mut q[start..][..shape.rope]);
        }
        let kv = &kv[row * width..][..width];
        let slot = &mut cache[span.slot(position) * width..][..width];
        slot[..latent].copy_from_slice(&rms_norm(&kv[..latent], kv_norm, shape.eps));
        slot[latent..].copy_from_slice(&kv[latent..]);
        rotate(&shape.rotary, position, &mut slot[latent..]);
    }
}

/// The angle is an f32 product, as in HF transformers; beyond that all is f64.
fn rotate(rotary: &RopeConfig, position: usize, values: &mut [f32]) {
    let half = values.len() / 2;
    for (i, inv_freq) in rotary.inv_freq.iter().enumerate() {
        let (first, second) = match rotary.pairing {
            RopePairing::Interleaved => (2 * i, 2 * i + 1),
            RopePairing::Half => (i, half + i),
        };
        let (sin, cos) = f64::from(position as f32 * inv_freq).sin_cos();
        let scaling = f64::from(rotary.attention_scaling);
        let (a, b) = (f64::from(values[first]), f64::from(values[second]));
        values[first] = ((a * cos - b * sin) * scaling) as f32;
        values[second] = ((a * sin + b * cos) * scaling) as f32;
    }
}

/// Attention of one span's rows, in the form it asks for.
pub(super) fn attention(
    shape: &MlaShape,
    q: &[f32],
    kv_b: Matrix<'_>,
    cache: &[f32],
    span: &Span<'_>,
    out: &mut [f32],
) {
    if span.rows.is_empty() {
        return;
    }
    let context = Context::new(shape, cache, span);
    let (qk, v) = (shape.nope + shape.rope, shape.v);
    for head in 0..shape.heads {
        let first = head * (shape.nope + v);
        let key_rows = kv_b.slice(first..first + shape.nope);
        let value_rows = kv_b.slice(first + shape.nope..first + shape.nope + v);
        let rows: Vec<Row> = span
            .rows
            .clone()
            .map(|row| Row {
                q: widen(&q[row * shape.q_width() + head * qk..][..qk]),
                seen: span.position(row) + 1,
            })
            .collect();
        let attended = match span.form {
            MlaForm::Materialised => materialised(shape, &context, key_rows, value_rows, &rows),
            MlaForm::Absorbed => absorbed(shape, &context, key_rows, value_rows, &rows),
        };
        for (row, attended) in span.rows.clone().zip(attended) {
            let out = &mut out[row * shape.out_width() + head * v..][..v];
            for (out, value) in out.iter_mut().zip(attended) {
                *out = value as f32;
            }
        }
    }
}

/// What a span's rows attend to, in order of position.
struct Context {
    /// Positions.
    len: usize,
    /// `[len, kv_lora]`
    latents: Vec<f32>,
    /// `[len, rope]`
    rope_keys: Vec<f32>,
}

impl Context {
    fn new(shape: &MlaShape, cache: &[f32], span: &Span<'_>) -> Self {
        let width = shape.cache_width();
        let len = span.cached + span.rows.len();
        let (mut latents, mut rope_keys) = (Vec::new(), Vec::new());
        for position in 0..len {
            let (latent, rope_key) = cache[span.slot(position) * width..][..width].split_at(shape.kv_lora);
            latents.extend_from_slice(latent);
            rope_keys.extend_from_slice(rope_key);
        }
        Self { len, latents, rope_keys }
    }

    /// `[len, keys | rope keys]` for `keys` `[len, _]`.
    fn with_rope(&self, keys: &[f32]) -> Vec<f64> {
        let (width, rope) = (keys.len() / self.len, self.rope_keys.len() / self.len);
        let rows = (0..self.len).map(|s| (&keys[s * width..][..width], &self.rope_keys[s * rope..][..rope]));
        rows.flat_map(|(keys, rope_keys)| keys.iter().chain(rope_keys)).copied().map(f64::from).collect()
    }
}

/// One row's query, `[nope + rope]`, and how many positions it sees.
struct Row {
    q: Vec<f64>,
    seen: usize,
}

/// Keys and values of the head are made for every position.
fn materialised(
    shape: &MlaShape,
    context: &Context,
    key_rows: Matrix<'_>,
    value_rows: Matrix<'_>,
    rows: &[Row],
) -> Vec<Vec<f64>> {
    let keys = context.with_rope(&key_rows.product(&context.latents, context.len));
    let values = widen(&value_rows.product(&context.latents, context.len));
    rows.iter().map(|row| attend(&row.q, row.seen, &keys, &values, shape.v, shape.softmax_scale)).collect()
}

/// The query moves into the latent space, where latents are both keys and values.
fn absorbed(
    shape: &MlaShape,
    context: &Context,
    key_rows: Matrix<'_>,
    value_rows: Matrix<'_>,
    rows: &[Row],
) -> Vec<Vec<f64>> {
    let keys = context.with_rope(&context.latents);
    let latents = widen(&context.latents);
    let (key_rows, value_rows) = (widen(key_rows.values), widen(value_rows.values));
    let attend = |row: &Row| {
        let (nope, rope) = row.q.split_at(shape.nope);
        let mut q = weighted_sum(nope, &key_rows, shape.kv_lora);
        q.extend_from_slice(rope);
        let mean = attend(&q, row.seen, &keys, &latents, shape.kv_lora, shape.softmax_scale);
        value_rows.chunks_exact(shape.kv_lora).map(|row| dot(row, &mean)).collect()
    };
    rows.iter().map(attend).collect()
}

/// The mean of the first `seen` of `values` `[_, width]`, weighted with the softmax of `q` against `keys` `[_, q.len()]`.
fn attend(q: &[f64], seen: usize, keys: &[f64], values: &[f64], width: usize, scale: f32) -> Vec<f64> {
    let keys = keys.chunks_exact(q.len()).take(seen);
    let scores: Vec<f64> = keys.map(|key| dot(q, key) * f64::from(scale)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let total: f64 = exps.iter().sum();
    let weights: Vec<f64> = exps.iter().map(|exp| exp / total).collect();
    weighted_sum(&weights, values, width)
}

/// `sum over i of weights[i] * rows[i]`, rows of `width`.
fn weighted_sum(weights: &[f64], rows: &[f64], width: usize) -> Vec<f64> {
    let mut sum = vec![0.0; width];
    for (weight, row) in weights.iter().zip(rows.chunks_exact(width)) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += weight * value;
        }
    }
    sum
}
