//! Multi-head latent attention of one layer.

use crate::load::{AttentionWeights, QueryWeights};
use crate::model::Buffers;
use kernels::Backend;

/// From the normalised input `h` to this rank's partial sum `y`; new latents go into `cache`.
pub(crate) fn attention<B: Backend>(
    b: &mut B,
    w: &AttentionWeights<B::Weight>,
    rows: usize,
    cache: &mut B::Cache,
    f: &mut Buffers<B::Buffer>,
) {
    match &w.query {
        QueryWeights::Direct { q_proj } => {
            b.matmul_pair([q_proj, &w.kv_a_proj_with_mqa], &f.h, rows, [&mut f.q, &mut f.kv]);
        }
        QueryWeights::LowRank { q_a_proj, q_a_layernorm, q_b_proj } => {
            let [q_a, normed] = &mut f.q_a;
            b.matmul_pair([q_a_proj, &w.kv_a_proj_with_mqa], &f.h, rows, [q_a, &mut f.kv]);
            b.rms_norm_matmul(q_a, rows, (q_a_layernorm, w.shape.eps), q_b_proj, normed, &mut f.q);
        }
    }
    b.mla_store(&w.shape, &f.kv, &w.kv_a_layernorm, &mut f.q, cache);
    b.mla_attention(&w.shape, &f.q, &w.kv_b_proj, cache, &mut f.attended);
    b.matmul(&w.o_proj, &f.attended, rows, &mut f.y);
}
