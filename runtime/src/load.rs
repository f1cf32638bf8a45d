//! A rank file becomes weights: the only place where tensors are looked up by name.
//!
//! Each look-up says which shape the model asks for and which axis may be cut; a checkpoint that differs is refused here,
//! in one line that names file and tensor, and never by a product later.

use crate::Error;
use formats::ModelConfig;
use formats::checkpoint::RankShard;
use formats::config::{FfnConfig, LayerConfig, MoeConfig};
use formats::manifest::{Shard, TensorEntry};
use formats::name::{LayerIdx, LayerRole, ModelRole, TensorName};
use formats::quant;
use kernels::shape::{MlaShape, MoeShape};
use kernels::{ExpertWeights, MlpWeights, MoeWeights};
use std::ops::Range;

/// All weights of one rank. W is the backend's weight.
#[derive(Debug)]
pub struct Weights<W> {
    /// `[local vocab, hidden]`
    pub embed_tokens: W,
    /// Vocabulary rows of `embed_tokens` on this rank.
    pub embed_rows: Range<usize>,
    /// The trunk.
    pub layers: Vec<LayerWeights<W>>,
    /// `[hidden]`
    pub norm: W,
    /// `[local vocab, hidden]`; `None`: `embed_tokens`.
    pub lm_head: Option<W>,
    /// Vocabulary rows of the logits on this rank.
    pub logit_rows: Range<usize>,
}

/// One decoder layer.
#[derive(Debug)]
pub struct LayerWeights<W> {
    /// `[hidden]`
    pub input_layernorm: W,
    /// Latent attention.
    pub attention: AttentionWeights<W>,
    /// `[hidden]`
    pub post_attention_layernorm: W,
    /// Feed-forward.
    pub ffn: FfnWeights<W>,
}

/// Latent attention, this rank's heads.
#[derive(Debug)]
pub struct AttentionWeights<W> {
    /// Sizes.
    pub shape: MlaShape,
    /// The way to the queries.
    pub query: QueryWeights<W>,
    /// `[R + rope, hidden]`
    pub kv_a_proj_with_mqa: W,
    /// `[R]`
    pub kv_a_layernorm: W,
    /// `[heads * (nope + v), R]`
    pub kv_b_proj: W,
    /// `[hidden, heads * v]`
    pub o_proj: W,
}

/// The way from the residual stream to the queries.
#[derive(Debug)]
pub enum QueryWeights<W> {
    /// One projection.
    Direct {
        /// `[heads * (nope + rope), hidden]`
        q_proj: W,
    },
    /// Through a bottleneck.
    LowRank {
        /// `[Q, hidden]`
        q_a_proj: W,
        /// `[Q]`
        q_a_layernorm: W,
        /// `[heads * (nope + rope), Q]`
        q_b_proj: W,
    },
}

/// Feed-forward.
#[derive(Debug)]
pub enum FfnWeights<W> {
    /// One SwiGLU.
    Dense(MlpWeights<W>),
    /// Routed and shared experts.
    Moe(Box<MoeWeights<W>>),
}

/// A tensor whose shape is right.
#[derive(Debug)]
pub struct Placing<'a> {
    /// Where it is: in one rank file, or cut over several, in the order of ranks.
    pub parts: Vec<(&'a RankShard, &'a TensorEntry)>,
    /// The dimension along which it is cut.
    pub axis: usize,
    /// What it is multiplied by besides; most tensors have none.
    pub scales: Vec<f32>,
}

/// Loads the trunk's shares of some ranks, which become one: a rank's own, or all of them. Indexer and MTP tensors stay in the
/// file: dense attention has no use for them.
///
/// `place` makes a weight of a tensor: it says where the bytes go and what the device refuses.
///
/// # Errors
/// [`Error`] naming the file and the tensor.
///
/// # Panics
/// When there is no rank.
pub fn load<W, P>(shards: &[RankShard], model: &ModelConfig, place: P) -> Result<Weights<W>, Error>
where
    P: Fn(&Placing<'_>) -> Result<W, Error>,
{
    let loader = Loader { place, shards, model };
    let (embed_tokens, embed_rows) =
        loader.cut(TensorName::Model(ModelRole::EmbedTokens), &loader.vocab_shape(), 0)?;
    let layers = model
        .layers
        .iter()
        .enumerate()
        .map(|(i, layer)| loader.layer(LayerIdx(i), layer))
        .collect::<Result<_, _>>()?;
    let norm = loader.whole(TensorName::Model(ModelRole::Norm), &[model.hidden_size])?;
    let (lm_head, logit_rows) = if model.tie_word_embeddings {
        (None, embed_rows.clone())
    } else {
        let (lm_head, rows) = loader.cut(TensorName::Model(ModelRole::LmHead), &loader.vocab_shape(), 0)?;
        (Some(lm_head), rows)
    };
    Ok(Weights { embed_tokens, embed_rows, layers, norm, lm_head, logit_rows })
}

/// Latent attention of `heads` of a model's heads.
pub fn mla_shape(model: &ModelConfig, heads: usize) -> MlaShape {
    let a = &model.attention;
    MlaShape {
        heads,
        nope: a.qk_nope_head_dim,
        rope: a.qk_rope_head_dim,
        v: a.v_head_dim,
        kv_lora: a.kv_lora_rank,
        softmax_scale: a.softmax_scale,
        eps: model.rms_norm_eps,
        rotary: model.rope.clone(),
    }
}

struct Loader<'a, P> {
    place: P,
    shards: &'a [RankShard],
    model: &'a ModelConfig,
}

impl<W, P: Fn(&Placing<'_>) -> Result<W, Error>> Loader<'_, P> {
    fn vocab_shape(&self) -> [usize; 2] {
        [self.model.vocab_size, self.model.hidden_size]
    }

    fn layer(&self, layer: LayerIdx, config: &LayerConfig) -> Result<LayerWeights<W>, Error> {
        let hidden = self.model.hidden_size;
        let name = |role| TensorName::Layer(layer, role);
        let ffn = match config.ffn {
            FfnConfig::Dense { intermediate_size } => FfnWeights::Dense(self.mlp(
                layer,
                [LayerRole::GateProj, LayerRole::UpProj, LayerRole::DownProj],
                intermediate_size,
            )?),
            FfnConfig::Moe { moe_intermediate_size, shared_intermediate_size } => {
                let moe =
                    self.model.moe.as_ref().expect("a validated config has a moe section for its MoE layers");
                let sizes = [moe_intermediate_size, shared_intermediate_size];
                FfnWeights::Moe(Box::new(self.moe(layer, moe, sizes)?))
            }
        };
        Ok(LayerWeights {
            input_layernorm: self.whole(name(LayerRole::InputLayernorm), &[hidden])?,
            attention: self.attention(layer)?,
            post_attention_layernorm: self.whole(name(LayerRole::PostAttentionLayernorm), &[hidden])?,
            ffn,
        })
    }

    fn attention(&self, layer: LayerIdx) -> Result<AttentionWeights<W>, Error> {
        let name = |role| TensorName::Layer(layer, role);
        let a = &self.model.attention;
        let hidden = self.model.hidden_size;
        let heads = a.num_attention_heads;
        let (kv_b_proj, kv_b_rows) = self.cut(
            name(LayerRole::KvBProj),
            &[heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank],
            0,
        )?;
        let (o_proj, o_columns) = self.cut(name(LayerRole::OProj), &[hidden, heads * a.v_head_dim], 1)?;
        let q_width = a.qk_nope_head_dim + a.qk_rope_head_dim;
        let (query, q_rows) = match a.q_lora_rank {
            None => {
                let (q_proj, rows) = self.cut(name(LayerRole::QProj), &[heads * q_width, hidden], 0)?;
                (QueryWeights::Direct { q_proj }, rows)
            }
            Some(rank) => {
                let (q_b_proj, rows) = self.cut(name(LayerRole::QBProj), &[heads * q_width, rank], 0)?;
                let q_a_proj = self.whole(name(LayerRole::QAProj), &[rank, hidden])?;
                let q_a_layernorm = self.whole(name(LayerRole::QALayernorm), &[rank])?;
                (QueryWeights::LowRank { q_a_proj, q_a_layernorm, q_b_proj }, rows)
            }
        };
        let local = self.heads(layer, LayerRole::KvBProj, &kv_b_rows, a.qk_nope_head_dim + a.v_head_dim)?;
        let query_role = if a.q_lora_rank.is_some() { LayerRole::QBProj } else { LayerRole::QProj };
        for (role, range, per_head) in
            [(query_role, q_rows, q_width), (LayerRole::OProj, o_columns, a.v_head_dim)]
        {
            let found = self.heads(layer, role, &range, per_head)?;
            if found != local {
                return Err(self.mismatch(
                    name(role),
                    &format!("heads {local:?}, as kv_b_proj"),
                    &format!("heads {found:?}"),
                ));
            }
        }
        let shape = mla_shape(self.model, local.len());
        Ok(AttentionWeights {
            query,
            kv_a_proj_with_mqa: self
                .whole(name(LayerRole::KvAProjWithMqa), &[a.kv_lora_rank + a.qk_rope_head_dim, hidden])?,
            kv_a_layernorm: self.whole(name(LayerRole::KvALayernorm), &[a.kv_lora_rank])?,
            kv_b_proj,
            o_proj,
            shape,
        })
    }

    fn mlp(&self, layer: LayerIdx, roles: [LayerRole; 3], width: usize) -> Result<MlpWeights<W>, Error> {
        let hidden = self.model.hidden_size;
        let [gate, up, down] = roles.map(|role| TensorName::Layer(layer, role));
        let (gate_proj, rows) = self.cut(gate, &[width, hidden], 0)?;
        let (up_proj, up_rows) = self.cut(up, &[width, hidden], 0)?;
        let (down_proj, columns) = self.cut(down, &[hidden, width], 1)?;
        self.same_cut(up, &up_rows, &rows)?;
        self.same_cut(down, &columns, &rows)?;
        Ok(MlpWeights { width: rows.len(), gate_proj, up_proj, down_proj })
    }

    fn moe(&self, layer: LayerIdx, moe: &MoeConfig, sizes: [usize; 2]) -> Result<MoeWeights<W>, Error> {
        let hidden = self.model.hidden_size;
        let experts = moe.n_routed_experts;
        let [width, shared_width] = sizes;
        let name = |role| TensorName::Layer(layer, role);
        let gate_name = name(LayerRole::ExpertsGateProj);
        // By width, or by expert: whichever axis the first stack is cut along, the others must follow.
        let by_expert = matches!(self.entry(gate_name)?.shard, Shard::Cut { axis: 0, .. });
        let (row_axis, column_axis) = if by_expert { (0, 0) } else { (1, 2) };
        let (gate, cut) = self.cut(gate_name, &[experts, width, hidden], row_axis)?;
        let (up, up_cut) = self.cut(name(LayerRole::ExpertsUpProj), &[experts, width, hidden], row_axis)?;
        let (down, down_cut) =
            self.cut(name(LayerRole::ExpertsDownProj), &[experts, hidden, width], column_axis)?;
        self.same_cut(name(LayerRole::ExpertsUpProj), &up_cut, &cut)?;
        self.same_cut(name(LayerRole::ExpertsDownProj), &down_cut, &cut)?;
        let (local_experts, intermediate) = if by_expert { (cut, width) } else { (0..experts, cut.len()) };
        let bias = name(LayerRole::EScoreCorrectionBias);
        let shared_roles = [
            LayerRole::SharedExpertsGateProj,
            LayerRole::SharedExpertsUpProj,
            LayerRole::SharedExpertsDownProj,
        ];
        Ok(MoeWeights {
            shape: MoeShape {
                hidden,
                n_routed_experts: experts,
                num_experts_per_tok: moe.num_experts_per_tok,
                local_experts,
                intermediate,
                router: moe.router.clone(),
            },
            gate: self.whole(name(LayerRole::Gate), &[experts, hidden])?,
            e_score_correction_bias: match self.entry(bias) {
                Ok(_) => Some(self.whole(bias, &[experts])?),
                Err(_) => None,
            },
            experts: ExpertWeights { gate, up, down },
            shared: if shared_width > 0 { Some(self.mlp(layer, shared_roles, shared_width)?) } else { None },
        })
    }

    /// Heads that a range of rows or columns stands for.
    fn heads(
        &self,
        layer: LayerIdx,
        role: LayerRole,
        range: &Range<usize>,
        per_head: usize,
    ) -> Result<Range<usize>, Error> {
        if range.start.is_multiple_of(per_head) && range.end.is_multiple_of(per_head) {
            return Ok(range.start / per_head..range.end / per_head);
        }
        let name = TensorName::Layer(layer, role);
        Err(self.mismatch(name, &format!("a cut between heads of {per_head}"), &format!("{range:?}")))
    }

    fn same_cut(&self, name: TensorName, found: &Range<usize>, expected: &Range<usize>) -> Result<(), Error> {
        if found == expected {
            return Ok(());
        }
        Err(self.mismatch(name, &format!("the cut of its layer's gate, {expected:?}"), &format!("{found:?}")))
    }

    /// A tensor that every rank has whole.
    fn whole(&self, name: TensorName, shape: &[usize]) -> Result<W, Error> {
        let shard = self.first();
        let entry = self.expect_shape(shard, name, shape)?;
        match entry.shard {
            Shard::Whole(_) => self.place(vec![(shard, entry)], 0),
            Shard::Cut { axis, .. } => {
                Err(self.mismatch(name, "a replicated tensor", &format!("a cut along axis {axis}")))
            }
        }
    }

    /// A tensor that may be cut along `axis`, and the range of that axis that is here.
    fn cut(&self, name: TensorName, shape: &[usize], axis: usize) -> Result<(W, Range<usize>), Error> {
        let mut parts = Vec::with_capacity(self.shards.len());
        let mut whole: Option<Range<usize>> = None;
        for shard in self.shards {
            let entry = self.expect_shape(shard, name, shape)?;
            let range = match entry.shard {
                Shard::Whole(_) if shard.manifest().ranks == 1 => 0..shape[axis],
                Shard::Cut { axis: found, start, len } if found == axis => {
                    start as usize..(start + len) as usize
                }
                other => {
                    let expected = format!("a cut along axis {axis}");
                    return Err(mismatch(shard, name, &expected, &format!("{other:?}")));
                }
            };
            match &mut whole {
                None => whole = Some(range),
                Some(whole) if whole.end == range.start => whole.end = range.end,
                Some(whole) => {
                    let expected = format!("a cut that begins at {}, where the last rank's ends", whole.end);
                    return Err(mismatch(shard, name, &expected, &format!("{range:?}")));
                }
            }
            parts.push((shard, entry));
        }
        Ok((self.place(parts, axis)?, whole.expect("at least one rank")))
    }

    fn place(&self, parts: Vec<(&RankShard, &TensorEntry)>, axis: usize) -> Result<W, Error> {
        let mut scales = Vec::new();
        for (shard, entry) in &parts {
            let Some(name) = &entry.scale else { continue };
            let scale = shard.entry(name).expect("a manifest that was checked has the scales that it names");
            let first = scales.len();
            scales.resize(first + scale.shape.elements() as usize, 0.0);
            quant::decode(scale.dtype, shard.view(scale)?.bytes(), &mut scales[first..])?;
            if let Shard::Whole(_) = scale.shard {
                break;
            }
        }
        (self.place)(&Placing { parts, axis, scales })
    }

    fn expect_shape<'a>(
        &self,
        shard: &'a RankShard,
        name: TensorName,
        shape: &[usize],
    ) -> Result<&'a TensorEntry, Error> {
        let entry = entry(shard, name)?;
        let dims: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        if entry.full_shape.dims() != dims {
            let expected = format!("shape {dims:?}, as the model config says");
            return Err(mismatch(shard, name, &expected, &entry.full_shape.to_string()));
        }
        Ok(entry)
    }

    fn entry(&self, name: TensorName) -> Result<&TensorEntry, Error> {
        entry(self.first(), name)
    }

    fn first(&self) -> &RankShard {
        self.shards.first().expect("at least one rank")
    }

    fn mismatch(&self, name: TensorName, expected: &str, found: &str) -> Error {
        mismatch(self.first(), name, expected, found)
    }
}

fn entry(shard: &RankShard, name: TensorName) -> Result<&TensorEntry, Error> {
    shard.entry(&native(name)).ok_or_else(|| mismatch(shard, name, "it in the checkpoint", "no such tensor"))
}

fn mismatch(shard: &RankShard, name: TensorName, expected: &str, found: &str) -> Error {
    let fault = formats::Error::Tensor {
        tensor: native(name),
        expected: expected.to_owned(),
        found: format!("{found}; convert the model again"),
    };
    fault.in_file(shard.path()).into()
}

fn native(name: TensorName) -> String {
    name.native().expect("the runtime asks only for tensors that a native checkpoint has")
}
