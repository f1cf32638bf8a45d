//! Routed and shared experts of one layer.

use crate::load::MoeWeights;
use crate::model::{Buffers, swiglu};
use kernels::Backend;

/// From the normalised input `h` to this rank's partial sum `y`.
///
/// The router is replicated and its input is the same on every rank, so all ranks choose the same experts.
pub(crate) fn moe<B: Backend>(b: &mut B, w: &MoeWeights<B::Weight>, rows: usize, f: &mut Buffers<B::Buffer>) {
    b.matmul(&w.gate, &f.h, rows, &mut f.router_logits);
    b.route(&w.shape, &f.router_logits, w.e_score_correction_bias.as_ref(), rows, &mut f.choice);
    b.experts(&w.shape, &w.experts, &f.h, &f.choice, rows, &mut f.y);
    if let Some(shared) = &w.shared {
        swiglu(b, shared, &f.h, rows, [&mut f.gate, &mut f.up], &mut f.shared);
        b.add(&mut f.y, &f.shared, rows, w.shape.hidden);
    }
}
