//! Multi-head latent attention.
//!
//! Both forms walk the context in the cache's own blocks with a running softmax, so a row's result depends on its position,
//! its query and the cache alone, not on the other rows of its span or batch. No score beyond a row's own position is used
//! and no value beyond it is touched.

use super::blend::Blend;
use super::dots::{Dots, Sums};
use super::elementwise::{Merge, Softmax, SoftmaxState};
use super::isa::Proven;
use super::rows::Rows;
use super::upper::{BlendUpper, DotsUpper};
use super::weight::Weight;
use super::workers::{Scratch, Workers, grown};
use crate::shape::MlaShape;
use crate::step::{BLOCK_TOKENS, MlaForm, Span, Step};
use std::ops::Range;

/// Rows that meet a block of keys together.
const TILE: usize = 4;
/// Positions of a part of a context, whole blocks.
const PART: usize = 2 * BLOCK_TOKENS;
/// From this many parts on further rows wait.
const MOST_PARTS: usize = 64;
/// Tasks that all threads end at about the same time with.
const ENOUGH_TASKS: usize = 8;
/// Heads that read the latent cache together at least.
const LEAST_HEADS: usize = 4;
/// Values that some heads leave, unless there are more threads: 1 MB.
const ATTENDED: usize = 1 << 18;
/// Rows of `kv_b` decoded at a time.
const WEIGHT_ROWS: usize = 16;

/// Everything the attention of a batch reads.
pub(super) struct Attention<'a> {
    pub shape: &'a MlaShape,
    /// `[T, heads * (nope + rope)]`
    pub q: &'a [f32],
    /// `[heads * (nope + v), kv_lora]`
    pub kv_b: &'a Weight,
    /// `[slots, kv_lora + rope]`
    pub cache: &'a [f32],
    pub step: &'a Step,
}

/// Intermediate results, as large as the largest batch so far.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Rows of the batch in one form, with the number of their span.
    rows: Vec<(usize, usize)>,
    /// The same rows without it.
    row_numbers: Vec<usize>,
    /// `[heads, rows, kv_lora + rope]`: queries in the latent space.
    queries: Vec<f32>,
    /// Row and positions of each part of a context.
    parts: Vec<(usize, Range<usize>)>,
    /// For each of them and each group of heads `[heads, kv_lora]` and `[heads, 2]`: what [`Attention::attend`] leaves.
    parted: Vec<f32>,
    /// `[rows, heads, kv_lora]`: attended latents.
    latents: Vec<f32>,
    /// `[heads, rows, v]`
    attended: Vec<f32>,
}

impl Attention<'_> {
    /// `out` `[T, heads * v]`
    pub(super) fn run(&self, isa: Proven, workers: &Workers, buffers: &mut Buffers, out: &mut [f32]) {
        if self.shape.heads == 0 {
            return;
        }
        let expected = [self.shape.kv_b_rows(), self.shape.kv_lora];
        assert_eq!([self.kv_b.rows, self.kv_b.cols], expected, "kv_b_proj's shape");
        for form in [MlaForm::Absorbed, MlaForm::Materialised] {
            buffers.rows.clear();
            for (i, span) in self.step.spans().enumerate().filter(|(_, span)| span.form == form) {
                buffers.rows.extend(span.rows.clone().map(|row| (row, i)));
            }
            if buffers.rows.is_empty() {
                continue;
            }
            match form {
                MlaForm::Absorbed => {
                    self.absorbed(isa, workers, buffers);
                    self.place(buffers, 0..self.shape.heads, out);
                }
                MlaForm::Materialised => self.materialised(isa, workers, buffers, out),
            }
        }
    }

    /// Three steps: queries into the latent space, by head; attention over latents, by row and part of its context, which is read
    /// once for all heads; and back, by head. Parts begin at fixed positions and are put together in their order.
    fn absorbed(&self, isa: Proven, workers: &Workers, buffers: &mut Buffers) {
        let shape = self.shape;
        let Buffers { rows, row_numbers, queries, parts, parted, latents, attended } = buffers;
        let (n, width, latent) = (rows.len(), shape.cache_width(), shape.kv_lora);
        row_numbers.clear();
        row_numbers.extend(rows.iter().map(|&(row, _)| row));

        let projections = n * shape.kv_b_rows() * latent;
        let queries = grown(queries, shape.heads * n * width);
        workers.chunks(queries, n * width, projections, |head, out, scratch| {
            self.absorb(isa, head, row_numbers, out, scratch);
        });

        let latents = grown(latents, n * shape.heads * latent);
        let mut first = 0;
        while first < n {
            parts.clear();
            let mut end = first;
            while end < n && (end == first || parts.len() < MOST_PARTS) {
                let (row, span) = rows[end];
                let seen = self.step.span(span).position(row) + 1;
                parts.extend((0..seen).step_by(PART).map(|start| (end, start..seen.min(start + PART))));
                end += 1;
            }
            // A short context is shared by groups of heads.
            let divides = |groups: &usize| shape.heads.is_multiple_of(*groups);
            let most = (shape.heads / LEAST_HEADS).max(1);
            let groups = (1..=most).filter(divides).find(|groups| parts.len() * groups >= ENOUGH_TASKS);
            let groups = groups.or_else(|| (1..=most).rev().find(divides)).unwrap_or(1);
            let heads = shape.heads / groups;
            let len = heads * (latent + 2);
            let work = parts.len() * PART * shape.heads * width * 2;
            let parted = grown(parted, parts.len() * groups * len);
            workers.chunks(parted, len, work, |i, out, scratch| {
                let (row, positions) = parts[i / groups].clone();
                let first_head = i % groups * heads;
                let queries = Rows::new(&queries[(first_head * n + row) * width..], n * width);
                self.attend(isa, (queries, heads), &self.step.span(rows[row].1), positions, out, scratch);
            });
            let out = &mut latents[first * shape.heads * latent..end * shape.heads * latent];
            workers.chunks(out, latent, parts.len() * shape.heads * latent, |i, out, _| {
                let (row, head) = (first + i / shape.heads, i % shape.heads);
                let own =
                    parts.partition_point(|part| part.0 < row)..parts.partition_point(|part| part.0 <= row);
                let parts = &parted[own.start * groups * len..own.end * groups * len];
                let parts = &parts[head / heads * len..];
                isa.run(Merge { parts, len, stride: groups * len, heads, head: head % heads }, out);
            });
            first = end;
        }

        let attended = grown(attended, shape.heads * n * shape.v);
        workers.chunks(attended, n * shape.v, projections, |head, out, scratch| {
            let latents = Rows::new(&latents[head * latent..], shape.heads * latent);
            self.project(isa, head, latents, n, out, scratch);
        });
    }

    /// What some heads of a row see in some positions of its span, the first of which begins a block: `out` is `[heads, kv_lora]`
    /// before the division by the softmax's total, then each head's maximum and total.
    fn attend(
        &self,
        isa: Proven,
        (queries, heads): (Rows<'_>, usize),
        span: &Span<'_>,
        positions: Range<usize>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let Self { shape, cache, .. } = *self;
        let (width, latent) = (shape.cache_width(), shape.kv_lora);
        let (out, states) = out.split_at_mut(heads * latent);
        let softmax = grown(&mut scratch.softmax, heads);
        softmax.fill(SoftmaxState::default());
        out.fill(0.0);
        for keys in blocks(span, positions) {
            let keys_len = keys.len();
            let keys = Rows::new(&cache[keys.start * width..], width);
            let scores = grown(&mut scratch.sums, heads * keys_len);
            let products =
                Dots { w: keys, w_rows: keys_len, x: queries, x_rows: heads, len: width, sums: Sums::Whole };
            isa.run(products, scores);
            let rows = scores.chunks_exact_mut(keys_len).zip(out.chunks_exact_mut(latent));
            for ((scores, sum), state) in rows.zip(&mut *softmax) {
                isa.run(Softmax { state, scale: shape.softmax_scale, sum }, scores);
            }
            let weights = Rows::new(scores, keys_len);
            let (len, stride) = (keys_len, latent);
            isa.run(Blend { weights, rows: keys, len, width: latent, stride, sums: heads }, out);
        }
        for (to, state) in states.as_chunks_mut().0.iter_mut().zip(softmax) {
            *to = state.parts();
        }
    }

    /// `out` `[rows, kv_lora + rope]`: the head's queries in the latent space, `q_nope . kv_b[nope rows]`, and their rope part.
    fn absorb(&self, isa: Proven, head: usize, rows: &[usize], out: &mut [f32], scratch: &mut Scratch) {
        let shape = self.shape;
        let (latent, stride) = (shape.kv_lora, shape.cache_width());
        let start = head * (shape.nope + shape.rope);
        let queries = Rows::new(self.q, shape.q_width()).listed(rows);
        out.fill(0.0);
        let first_row = head * (shape.nope + shape.v);
        let alone = self.kv_b.upper(first_row..first_row + shape.nope).filter(|_| rows.len() == 1);
        if let Some(weights) = alone {
            let query = &queries.from(0, start).row(0, shape.nope);
            isa.run(BlendUpper { weights: query, rows: weights, width: latent }, out);
        }
        for first in (0..shape.nope).step_by(WEIGHT_ROWS).filter(|_| alone.is_none()) {
            let len = WEIGHT_ROWS.min(shape.nope - first);
            let decoded = grown(&mut scratch.weights, len * latent);
            self.decode(isa, first_row + first, decoded);
            let weights = queries.from(0, start + first);
            let decoded = Rows::new(decoded, latent);
            isa.run(Blend { weights, rows: decoded, len, width: latent, stride, sums: rows.len() }, out);
        }
        for (i, out) in out.chunks_exact_mut(stride).enumerate() {
            let query = queries.from(0, start).row(i, shape.nope + shape.rope);
            out[latent..].copy_from_slice(&query[shape.nope..]);
        }
    }

    /// `out` `[n, v]` = `kv_b[v rows] . latents[n]` of the head.
    fn project(
        &self,
        isa: Proven,
        head: usize,
        latents: Rows<'_>,
        n: usize,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let shape = self.shape;
        let first_row = head * (shape.nope + shape.v) + shape.nope;
        if n == 1
            && let Some(rows) = self.kv_b.upper(first_row..first_row + shape.v)
        {
            return isa.run(DotsUpper { rows, x: latents.row(0, shape.kv_lora) }, &mut out[..shape.v]);
        }
        for first in (0..shape.v).step_by(WEIGHT_ROWS) {
            let len = WEIGHT_ROWS.min(shape.v - first);
            let decoded = grown(&mut scratch.weights, len * shape.kv_lora);
            self.decode(isa, first_row + first, decoded);
            let w = Rows::new(decoded, shape.kv_lora);
            let products =
                Dots { w, w_rows: len, x: latents, x_rows: n, len: shape.kv_lora, sums: Sums::Whole };
            let sums = grown(&mut scratch.sums, n * len);
            isa.run(products, sums);
            for (out, sums) in out.chunks_exact_mut(shape.v).zip(sums.chunks_exact(len)) {
                out[first..][..len].copy_from_slice(sums);
            }
        }
    }

    /// By head: keys and values of a block are made once and meet every row of the span that sees them. Some heads after the others,
    /// so that what they leave stays small.
    fn materialised(&self, isa: Proven, workers: &Workers, buffers: &mut Buffers, out: &mut [f32]) {
        let shape = self.shape;
        let n = buffers.rows.len();
        let spans = || self.step.spans().filter(|span| span.form == MlaForm::Materialised);
        let context: usize = spans().map(|span| span.cached + span.rows.len()).sum();
        let together = (ATTENDED / (n * shape.v).max(1)).max(2 * workers.threads());
        for first in (0..shape.heads).step_by(together) {
            let heads = first..shape.heads.min(first + together);
            let attended = grown(&mut buffers.attended, heads.len() * n * shape.v);
            let work = context * heads.len() * (shape.nope + shape.v) * shape.kv_lora;
            workers.chunks(attended, n * shape.v, work, |i, out, scratch| {
                let (head, head_rows) = (first + i, shape.nope + shape.v);
                let decoded = grown(&mut scratch.weights, head_rows * shape.kv_lora);
                self.decode(isa, head * head_rows, decoded);
                let mut out = out;
                for span in spans() {
                    let (rows, rest) = out.split_at_mut(span.rows.len() * shape.v);
                    self.materialised_span(isa, head, &span, rows, scratch);
                    out = rest;
                }
            });
            self.place(buffers, heads, out);
        }
    }

    /// `out` `[span rows, v]` of one head, whose decoded rows of `kv_b` are `scratch.weights`.
    fn materialised_span(
        &self,
        isa: Proven,
        head: usize,
        span: &Span<'_>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let shape = self.shape;
        let (qk, head_rows, v) = (shape.nope + shape.rope, shape.nope + shape.v, shape.v);
        let queries = &self.q[span.rows.start * shape.q_width() + head * qk..];
        let Scratch { weights, sums, keys, expanded, softmax, .. } = scratch;
        let kv_b = &weights[..head_rows * shape.kv_lora];
        let block = &mut HeadBlock {
            keys: grown(keys, qk * BLOCK_TOKENS),
            expanded: grown(expanded, BLOCK_TOKENS * head_rows),
        };
        let softmax = grown(softmax, span.rows.len());
        softmax.fill(SoftmaxState::default());
        out.fill(0.0);
        let context = span.cached + span.rows.len();
        for (i, slots) in blocks(span, 0..context).enumerate() {
            let start = i * BLOCK_TOKENS;
            self.expand(isa, slots, kv_b, sums, block);

            // Rows before this one see nothing of the block.
            let first = start.saturating_sub(span.cached);
            for row in (first..span.rows.len()).step_by(TILE) {
                let rows = TILE.min(span.rows.len() - row);
                let scores = grown(sums, TILE * BLOCK_TOKENS);
                scores.fill(0.0);
                let products = Blend {
                    weights: Rows::new(&queries[row * shape.q_width()..], shape.q_width()),
                    rows: Rows::new(block.keys, BLOCK_TOKENS),
                    len: qk,
                    width: BLOCK_TOKENS,
                    stride: BLOCK_TOKENS,
                    sums: rows,
                };
                isa.run(products, scores);
                let out = &mut out[row * v..][..rows * v];
                let seen = |i: usize| BLOCK_TOKENS.min(span.cached + row + i + 1 - start);
                for (i, (scores, sum)) in
                    scores.chunks_exact_mut(BLOCK_TOKENS).zip(out.chunks_exact_mut(v)).enumerate()
                {
                    let (state, scores) = (&mut softmax[row + i], &mut scores[..seen(i)]);
                    isa.run(Softmax { state, scale: shape.softmax_scale, sum }, scores);
                }
                let weights = Rows::new(scores, BLOCK_TOKENS);
                let values = Rows::new(&block.expanded[shape.nope..], head_rows);
                // What all rows see, together; what only the later ones see, alone.
                let shared = seen(0);
                isa.run(Blend { weights, rows: values, len: shared, width: v, stride: v, sums: rows }, out);
                for i in (1..rows).filter(|&i| seen(i) > shared) {
                    let (weights, values) = (weights.from(i, shared), values.from(shared, 0));
                    let alone =
                        Blend { weights, rows: values, len: seen(i) - shared, width: v, stride: v, sums: 1 };
                    isa.run(alone, &mut out[i * v..]);
                }
            }
        }
        normalise(out, v, softmax);
    }

    /// Makes the keys and values of one head, whose rows of `kv_b` are given, for the tokens in `slots`.
    fn expand(
        &self,
        isa: Proven,
        slots: Range<usize>,
        kv_b: &[f32],
        sums: &mut Vec<f32>,
        block: &mut HeadBlock<'_>,
    ) {
        let shape = self.shape;
        let (head_rows, width) = (shape.nope + shape.v, shape.cache_width());
        let tokens = slots.len();
        let cached = Rows::new(&self.cache[slots.start * width..], width);
        for first in (0..head_rows).step_by(WEIGHT_ROWS) {
            let len = WEIGHT_ROWS.min(head_rows - first);
            let w = Rows::new(&kv_b[first * shape.kv_lora..], shape.kv_lora);
            let products =
                Dots { w, w_rows: len, x: cached, x_rows: tokens, len: shape.kv_lora, sums: Sums::Whole };
            let sums = grown(sums, tokens * len);
            isa.run(products, sums);
            for (expanded, sums) in block.expanded.chunks_exact_mut(head_rows).zip(sums.chunks_exact(len)) {
                expanded[first..][..len].copy_from_slice(sums);
            }
        }
        for (token, expanded) in block.expanded.chunks_exact(head_rows).take(tokens).enumerate() {
            let rope_key = &cached.row(token, width)[shape.kv_lora..];
            let key = expanded[..shape.nope].iter().chain(rope_key);
            for (keys, value) in block.keys.chunks_exact_mut(BLOCK_TOKENS).zip(key) {
                keys[token] = *value;
            }
        }
    }

    /// Decodes whole rows of `kv_b` from `row` on.
    fn decode(&self, isa: Proven, row: usize, out: &mut [f32]) {
        let cols = self.kv_b.cols;
        for (row, out) in (row..).zip(out.chunks_exact_mut(cols)) {
            self.kv_b.decode(isa, row, 0..cols, out);
        }
    }

    /// From `[heads, rows, v]` of some heads to the rows of `out`.
    fn place(&self, buffers: &Buffers, heads: Range<usize>, out: &mut [f32]) {
        let (n, v) = (buffers.rows.len(), self.shape.v);
        for (i, &(row, _)) in buffers.rows.iter().enumerate() {
            let out = &mut out[row * self.shape.out_width()..][..self.shape.out_width()];
            for (head, out) in out[heads.start * v..heads.end * v].chunks_exact_mut(v).enumerate() {
                out.copy_from_slice(&buffers.attended[(head * n + i) * v..][..v]);
            }
        }
    }
}

/// Keys and values of one head for one block of the cache.
struct HeadBlock<'a> {
    /// `[nope + rope, BLOCK_TOKENS]`: scores are taken of whole blocks. Columns after the last token have no meaning.
    keys: &'a mut [f32],
    /// `[BLOCK_TOKENS, nope + v]`
    expanded: &'a mut [f32],
}

/// Cache slots of some positions, block by block, the first of which begins one; the last block may be a part.
fn blocks<'a>(span: &'a Span<'_>, positions: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<'a> {
    positions.clone().step_by(BLOCK_TOKENS).map(move |position| {
        let slot = span.slot(position);
        slot..slot + BLOCK_TOKENS.min(positions.end - position)
    })
}

/// Divides every row of `width` by its softmax's total.
fn normalise(out: &mut [f32], width: usize, softmax: &[SoftmaxState]) {
    for (row, state) in out.chunks_exact_mut(width).zip(softmax) {
        for value in row {
            *value *= state.normaliser();
        }
    }
}
