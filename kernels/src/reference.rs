//! The slow, obvious twin of every operation.
//!
//! Weights are decoded to f32 when they are taken, sums are f64, results are rounded to f32 where an operation stores
//! them. Nothing here is clever; what another backend computes is right when it agrees with this.

mod attention;
mod experts;

use crate::backend::{StepLimits, StepRows};
use crate::rounding;
use crate::shape::{MlaShape, MoeShape, dims_of, scale_each};
use crate::step::Step;
use crate::{Backend, Error, ExpertWeights, HostBuffer};
use formats::{TensorView, quant};
use std::ops::Range;

/// The backend that others are compared with.
#[derive(Debug, Default)]
pub struct Reference {
    step: Step,
    activations: Activations,
}

/// What products do with activations.
#[derive(Clone, Copy, Debug, Default)]
enum Activations {
    #[default]
    Exact,
    Rounded,
}

impl Reference {
    /// The backend.
    pub fn new() -> Self {
        Self::default()
    }

    /// The one that rounds activations as [`rounding`] says before products.
    pub fn rounded() -> Self {
        Self { activations: Activations::Rounded, ..Self::default() }
    }
}

/// A weight decoded to f32: `[experts, rows, cols]`, the leading ones 1 where the tensor has fewer dimensions.
#[derive(Debug)]
pub struct Weight {
    dims: [usize; 3],
    values: Vec<f32>,
    /// Activations are rounded in blocks of this length.
    rounding: Option<usize>,
}

impl Weight {
    /// The rows of one expert, or of the only matrix as expert 0.
    fn matrix(&self, expert: usize) -> Matrix<'_> {
        let [_, rows, cols] = self.dims;
        let values = &self.values[expert * rows * cols..][..rows * cols];
        Matrix { rows, cols, values, rounding: self.rounding }
    }
}

/// `values` `[rows, cols]`
#[derive(Clone, Copy)]
struct Matrix<'a> {
    rows: usize,
    cols: usize,
    values: &'a [f32],
    rounding: Option<usize>,
}

impl<'a> Matrix<'a> {
    fn row(self, row: usize) -> &'a [f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    /// The matrix of these rows alone.
    fn slice(self, rows: Range<usize>) -> Self {
        let values = &self.values[rows.start * self.cols..rows.end * self.cols];
        Self { rows: rows.len(), values, ..self }
    }

    /// `[t][r] = self[r] . x[t]` for `x` `[tokens, cols]`.
    fn product(self, x: &[f32], tokens: usize) -> Vec<f32> {
        /// As many tokens as stay in the cache while every row passes by.
        const TOKENS: usize = 32;
        let mut out = vec![0.0; tokens * self.rows];
        if self.cols == 0 || self.rows == 0 {
            return out;
        }
        let x = &x[..tokens * self.cols];
        for (x, out) in x.chunks(TOKENS * self.cols).zip(out.chunks_mut(TOKENS * self.rows)) {
            let mut x = x.to_vec();
            if let Some(len) = self.rounding {
                x.chunks_mut(len).for_each(rounding::round);
            }
            let x = widen(&x);
            for r in 0..self.rows {
                let row = widen(self.row(r));
                for (x, out) in x.chunks_exact(self.cols).zip(out.chunks_exact_mut(self.rows)) {
                    out[r] = dot(&row, x) as f32;
                }
            }
        }
        out
    }
}

impl Backend for Reference {
    type Weight = Weight;
    type Buffer = HostBuffer;
    type Cache = HostBuffer;

    fn weight(&self, view: TensorView) -> Result<Weight, Error> {
        let dims = dims_of(&view)?;
        let decode = quant::decoder(view.dtype()).ok_or(Error::UnsupportedType { dtype: view.dtype() })?;
        let mut values = vec![0.0; dims.iter().product()];
        decode(view.bytes(), &mut values);
        let rounding = match self.activations {
            Activations::Exact => None,
            Activations::Rounded => rounding::block_len(view.dtype()),
        };
        Ok(Weight { dims, values, rounding })
    }

    fn scaled_weight(&self, view: TensorView, scales: &[f32]) -> Result<Weight, Error> {
        let scales = scale_each(view.shape(), scales)?;
        let mut weight = self.weight(view)?;
        let [_, rows, cols] = weight.dims;
        for (matrix, scale) in weight.values.chunks_exact_mut((rows * cols).max(1)).zip(scales) {
            matrix.iter_mut().for_each(|value| *value *= scale);
        }
        Ok(weight)
    }

    crate::backend::in_host_memory!();

    fn embed(&mut self, table: &Weight, first_row: usize, out: &mut HostBuffer) {
        let table = table.matrix(0);
        for (t, &token) in self.step.tokens().iter().enumerate() {
            let out = &mut out.values_mut()[t * table.cols..][..table.cols];
            match (token as usize).checked_sub(first_row) {
                Some(row) if row < table.rows => out.copy_from_slice(table.row(row)),
                _ => out.fill(0.0),
            }
        }
    }

    fn rms_norm(&mut self, x: &HostBuffer, rows: usize, weight: &Weight, eps: f32, out: &mut HostBuffer) {
        let width = weight.values.len();
        for t in 0..rows {
            let normed = rms_norm(&x.values()[t * width..][..width], &weight.values, eps);
            out.values_mut()[t * width..][..width].copy_from_slice(&normed);
        }
    }

    fn add(&mut self, x: &mut HostBuffer, y: &HostBuffer, rows: usize, width: usize) {
        let y = &y.values()[..rows * width];
        for (x, y) in x.values_mut()[..rows * width].iter_mut().zip(y) {
            *x += y;
        }
    }

    fn matmul(&mut self, w: &Weight, x: &HostBuffer, rows: usize, out: &mut HostBuffer) {
        let product = w.matrix(0).product(x.values(), rows);
        out.values_mut()[..product.len()].copy_from_slice(&product);
    }

    fn swiglu(&mut self, gate: &mut HostBuffer, up: &HostBuffer, rows: usize, width: usize) {
        let up = &up.values()[..rows * width];
        for (gate, up) in gate.values_mut()[..rows * width].iter_mut().zip(up) {
            *gate = experts::silu(*gate) * up;
        }
    }

    fn mla_store(
        &mut self,
        shape: &MlaShape,
        kv: &HostBuffer,
        kv_norm: &Weight,
        q: &mut HostBuffer,
        cache: &mut HostBuffer,
    ) {
        for span in self.step.spans() {
            attention::store(shape, kv.values(), &kv_norm.values, &span, q.values_mut(), cache.values_mut());
        }
    }

    fn mla_attention(
        &mut self,
        shape: &MlaShape,
        q: &HostBuffer,
        kv_b: &Weight,
        cache: &HostBuffer,
        out: &mut HostBuffer,
    ) {
        for span in self.step.spans() {
            attention::attention(shape, q.values(), kv_b.matrix(0), cache.values(), &span, out.values_mut());
        }
    }

    fn route(
        &mut self,
        shape: &MoeShape,
        logits: &HostBuffer,
        bias: Option<&Weight>,
        rows: usize,
        choice: &mut HostBuffer,
    ) {
        let (e, k) = (shape.n_routed_experts, shape.num_experts_per_tok);
        for t in 0..rows {
            let chosen = experts::route(shape, &logits.values()[t * e..][..e], bias.map(|b| &b.values[..]));
            choice.values_mut()[t * 2 * k..][..2 * k].copy_from_slice(&chosen);
        }
    }

    fn experts(
        &mut self,
        shape: &MoeShape,
        experts: &ExpertWeights<Weight>,
        x: &HostBuffer,
        choice: &HostBuffer,
        rows: usize,
        out: &mut HostBuffer,
    ) {
        let sum = experts::experts(shape, experts, x.values(), choice.values(), rows);
        out.values_mut()[..sum.len()].copy_from_slice(&sum);
    }

    fn gather_logit_rows(&mut self, x: &HostBuffer, width: usize, out: &mut HostBuffer) {
        for (i, &row) in self.step.logit_rows().iter().enumerate() {
            let from = &x.values()[row * width..][..width];
            out.values_mut()[i * width..][..width].copy_from_slice(from);
        }
    }
}

fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let x = widen(x);
    let scale = (dot(&x, &x) / x.len() as f64 + f64::from(eps)).sqrt().recip();
    x.iter().zip(weight).map(|(x, &w)| (x * scale * f64::from(w)) as f32).collect()
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Eight partial sums, so that the compiler can use vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}
