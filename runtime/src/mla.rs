//! Multi-head latent attention of one layer.

use crate::load::{AttentionWeights, QueryWeights};
use crate::model::Buffers;
use kernels::Backend;
use kernels::shape::Span;

/// From the normalised input `h` to this rank's partial sum `y`; new latents go into `cache`.
pub(crate) fn attention<B: Backend>(
    b: &mut B,
    w: &AttentionWeights<B::Weight>,
    spans: &[Span<'_>],
    rows: usize,
    cache: &mut B::Buffer,
    f: &mut Buffers<B::Buffer>,
) {
    match &w.query {
        QueryWeights::Direct { q_proj } => b.matmul(q_proj, &f.h, rows, &mut f.q),
        QueryWeights::LowRank { q_a_proj, q_a_layernorm, q_b_proj } => {
            let [q_a, normed] = &mut f.q_a;
            b.matmul(q_a_proj, &f.h, rows, q_a);
            b.rms_norm(q_a, rows, q_a_layernorm, w.shape.eps, normed);
            b.matmul(q_b_proj, normed, rows, &mut f.q);
        }
    }
    b.matmul(&w.kv_a_proj_with_mqa, &f.h, rows, &mut f.kv);
    b.mla_store(&w.shape, &f.kv, &w.kv_a_layernorm, spans, &mut f.q, cache);
    b.mla_attention(&w.shape, &f.q, &w.kv_b_proj, cache, spans, &mut f.attended);
    b.matmul(&w.o_proj, &f.attended, rows, &mut f.y);
}
