//! The tensors of a native checkpoint, in the order of execution: what each one's shape is, how it is stored and where it
//! is cut. One table for all models, because [`ModelConfig`] says everything that differs.

use formats::config::{FfnConfig, IndexerRole, LayerConfig};
use formats::manifest::ExpertCut;
use formats::name::{LayerRole, ModelRole};
use formats::{Error, LayerIdx, ModelConfig, Shape, TensorName};

/// A tensor that a checkpoint of a model has.
#[derive(Clone, Debug)]
pub(crate) struct NativeTensor {
    pub(crate) name: TensorName,
    /// Over all ranks.
    pub(crate) shape: Shape,
    pub(crate) stored: Stored,
    pub(crate) cut: Cut,
    pub(crate) need: Need,
    pub(crate) part: Part,
}

/// The form that a tensor has in the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// The GGUF's own blocks.
    AsIs,
    /// Dequantised; never cut.
    F32,
    /// kv_b_proj in BF16, from its halves or from a joined tensor.
    KvB,
}

/// Which axis is cut over the ranks, and by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Replicated,
    /// `per_head` indices for each head; a unit is whole blocks of the layer's o_proj.
    Heads {
        axis: usize,
        per_head: u64,
    },
    /// A unit is one block of the named down projection.
    Width {
        axis: usize,
        down: LayerRole,
    },
    /// Rows of the vocabulary, axis 0.
    Vocabulary,
    /// Whole experts, axis 0.
    Experts,
}

/// What its absence means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Required,
    Optional,
}

/// Parts of a rank file, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Trunk,
    Indexer,
    Mtp,
}

/// All tensors of a model, part by part in the order of execution.
///
/// # Errors
/// [`Error::Tensor`] for a shape that does not fit 64 bits.
pub(crate) fn tensors(config: &ModelConfig, experts: ExpertCut) -> Result<Vec<NativeTensor>, Error> {
    let mut list = List { config, experts, tensors: Vec::new() };
    list.trunk()?;
    for (layer, layer_config) in config.layers.iter().enumerate() {
        list.indexer(LayerIdx(layer), layer_config, Part::Indexer)?;
    }
    for (layer, layer_config) in config.mtp_layers.iter().enumerate() {
        list.mtp(LayerIdx(config.layers.len() + layer), layer_config)?;
    }
    Ok(list.tensors)
}

/// GGUF name of the tensor that native tensor `name` would be made from and that is not there; `None` when there is one.
pub(crate) fn missing_source(name: TensorName, there: impl Fn(&str) -> bool) -> Option<String> {
    let of = |role| match name {
        TensorName::Layer(layer, _) => TensorName::Layer(layer, role).gguf(),
        _ => name.gguf(),
    };
    if name.scaled().is_some() {
        let source = scale_source(name, &there);
        return (!there(&source)).then_some(source);
    }
    let own = name.gguf();
    if there(&own) {
        return None;
    }
    match name {
        TensorName::Layer(_, LayerRole::KvBProj) => {
            [LayerRole::AttnKB, LayerRole::AttnVB].map(of).into_iter().find(|half| !there(half))
        }
        TensorName::Layer(_, LayerRole::ExpertsGateProj | LayerRole::ExpertsUpProj) => {
            (!there(&of(LayerRole::ExpertsGateUpProj))).then_some(own)
        }
        _ => Some(own),
    }
}

/// GGUF name of the scale of the tensor that a weight is made from: its own, or that of the fused gate and up projection.
pub(crate) fn scale_source(scale: TensorName, there: impl Fn(&str) -> bool) -> String {
    match scale {
        TensorName::LayerScale(layer, role @ (LayerRole::ExpertsGateProj | LayerRole::ExpertsUpProj))
            if !there(&TensorName::Layer(layer, role).gguf()) =>
        {
            TensorName::LayerScale(layer, LayerRole::ExpertsGateUpProj).gguf()
        }
        _ => scale.gguf(),
    }
}

struct List<'a> {
    config: &'a ModelConfig,
    experts: ExpertCut,
    tensors: Vec<NativeTensor>,
}

impl List<'_> {
    fn trunk(&mut self) -> Result<(), Error> {
        let (vocab, hidden) = (self.config.vocab_size as u64, self.config.hidden_size as u64);
        let table = &[vocab, hidden];
        self.model(ModelRole::EmbedTokens, table, Stored::AsIs, Cut::Vocabulary)?;
        for (layer, layer_config) in self.config.layers.iter().enumerate() {
            self.block(LayerIdx(layer), layer_config, Part::Trunk)?;
        }
        self.model(ModelRole::Norm, &[hidden], Stored::F32, Cut::Replicated)?;
        if !self.config.tie_word_embeddings {
            self.model(ModelRole::LmHead, table, Stored::AsIs, Cut::Vocabulary)?;
        }
        Ok(())
    }

    /// A decoder layer without its indexer.
    fn block(&mut self, layer: LayerIdx, layer_config: &LayerConfig, part: Part) -> Result<(), Error> {
        use LayerRole as R;
        let a = &self.config.attention;
        let [heads, r, nope, rope, v] =
            [a.num_attention_heads, a.kv_lora_rank, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim]
                .map(|n| n as u64);
        let hidden = self.config.hidden_size as u64;
        let mut put = |role, shape: &[u64], stored, cut| self.layer(layer, role, shape, stored, cut, part);
        put(R::InputLayernorm, &[hidden], Stored::F32, Cut::Replicated)?;
        let q_rows = Cut::Heads { axis: 0, per_head: nope + rope };
        match a.q_lora_rank {
            Some(q) => {
                let q = q as u64;
                put(R::QAProj, &[q, hidden], Stored::AsIs, Cut::Replicated)?;
                put(R::QALayernorm, &[q], Stored::F32, Cut::Replicated)?;
                put(R::QBProj, &[heads * (nope + rope), q], Stored::AsIs, q_rows)?;
            }
            None => put(R::QProj, &[heads * (nope + rope), hidden], Stored::AsIs, q_rows)?,
        }
        put(R::KvAProjWithMqa, &[r + rope, hidden], Stored::AsIs, Cut::Replicated)?;
        put(R::KvALayernorm, &[r], Stored::F32, Cut::Replicated)?;
        let kv_rows = Cut::Heads { axis: 0, per_head: nope + v };
        put(R::KvBProj, &[heads * (nope + v), r], Stored::KvB, kv_rows)?;
        put(R::OProj, &[hidden, heads * v], Stored::AsIs, Cut::Heads { axis: 1, per_head: v })?;
        put(R::PostAttentionLayernorm, &[hidden], Stored::F32, Cut::Replicated)?;
        self.ffn(layer, layer_config.ffn, part)
    }

    fn ffn(&mut self, layer: LayerIdx, ffn: FfnConfig, part: Part) -> Result<(), Error> {
        use LayerRole as R;
        let hidden = self.config.hidden_size as u64;
        let (fe, shared) = match ffn {
            FfnConfig::Dense { intermediate_size } => {
                let roles = [R::GateProj, R::UpProj, R::DownProj];
                return self.swiglu(layer, roles, intermediate_size as u64, part);
            }
            FfnConfig::Moe { moe_intermediate_size, shared_intermediate_size } => {
                (moe_intermediate_size as u64, shared_intermediate_size as u64)
            }
        };
        let e = self.config.moe.as_ref().map_or(0, |moe| moe.n_routed_experts as u64);
        let (rows, columns) = match self.experts {
            ExpertCut::Tensor => (
                Cut::Width { axis: 1, down: R::ExpertsDownProj },
                Cut::Width { axis: 2, down: R::ExpertsDownProj },
            ),
            ExpertCut::Expert => (Cut::Experts, Cut::Experts),
        };
        let mut put = |role, shape: &[u64], stored, cut| self.layer(layer, role, shape, stored, cut, part);
        put(R::Gate, &[e, hidden], Stored::F32, Cut::Replicated)?;
        put(R::EScoreCorrectionBias, &[e], Stored::F32, Cut::Replicated)?;
        put(R::ExpertsGateProj, &[e, fe, hidden], Stored::AsIs, rows)?;
        put(R::ExpertsUpProj, &[e, fe, hidden], Stored::AsIs, rows)?;
        put(R::ExpertsDownProj, &[e, hidden, fe], Stored::AsIs, columns)?;
        if shared == 0 {
            return Ok(());
        }
        let roles = [R::SharedExpertsGateProj, R::SharedExpertsUpProj, R::SharedExpertsDownProj];
        self.swiglu(layer, roles, shared, part)
    }

    fn swiglu(
        &mut self,
        layer: LayerIdx,
        roles: [LayerRole; 3],
        width: u64,
        part: Part,
    ) -> Result<(), Error> {
        let hidden = self.config.hidden_size as u64;
        let [gate, up, down] = roles;
        for role in [gate, up] {
            self.layer(layer, role, &[width, hidden], Stored::AsIs, Cut::Width { axis: 0, down }, part)?;
        }
        self.layer(layer, down, &[hidden, width], Stored::AsIs, Cut::Width { axis: 1, down }, part)
    }

    fn indexer(&mut self, layer: LayerIdx, layer_config: &LayerConfig, part: Part) -> Result<(), Error> {
        use LayerRole as R;
        let (Some(indexer), Some(IndexerRole::Full)) = (&self.config.indexer, layer_config.indexer) else {
            return Ok(());
        };
        let (ih, id) = (indexer.index_n_heads as u64, indexer.index_head_dim as u64);
        let hidden = self.config.hidden_size as u64;
        let queries_from = self.config.attention.q_lora_rank.map_or(hidden, |q| q as u64);
        let mut put =
            |role, shape: &[u64], stored| self.layer(layer, role, shape, stored, Cut::Replicated, part);
        put(R::IndexerWqB, &[ih * id, queries_from], Stored::AsIs)?;
        put(R::IndexerWk, &[id, hidden], Stored::AsIs)?;
        put(R::IndexerKNormWeight, &[id], Stored::F32)?;
        put(R::IndexerKNormBias, &[id], Stored::F32)?;
        put(R::IndexerWeightsProj, &[ih, hidden], Stored::F32)
    }

    fn mtp(&mut self, layer: LayerIdx, layer_config: &LayerConfig) -> Result<(), Error> {
        use LayerRole as R;
        let (vocab, hidden) = (self.config.vocab_size as u64, self.config.hidden_size as u64);
        let part = Part::Mtp;
        self.layer(layer, R::MtpEmbedTokens, &[vocab, hidden], Stored::AsIs, Cut::Vocabulary, part)?;
        self.layer(layer, R::ENorm, &[hidden], Stored::F32, Cut::Replicated, part)?;
        self.layer(layer, R::HNorm, &[hidden], Stored::F32, Cut::Replicated, part)?;
        self.layer(layer, R::EhProj, &[hidden, 2 * hidden], Stored::AsIs, Cut::Replicated, part)?;
        self.block(layer, layer_config, part)?;
        self.indexer(layer, layer_config, part)?;
        self.layer(layer, R::SharedHeadNorm, &[hidden], Stored::F32, Cut::Replicated, part)?;
        self.layer(layer, R::SharedHeadHead, &[vocab, hidden], Stored::AsIs, Cut::Vocabulary, part)
    }

    fn model(&mut self, role: ModelRole, shape: &[u64], stored: Stored, cut: Cut) -> Result<(), Error> {
        self.put(TensorName::Model(role), shape, stored, cut, Need::Required, Part::Trunk)
    }

    fn layer(
        &mut self,
        layer: LayerIdx,
        role: LayerRole,
        shape: &[u64],
        stored: Stored,
        cut: Cut,
        part: Part,
    ) -> Result<(), Error> {
        use LayerRole as R;
        let need = match role {
            // Softmax routers have no bias; MTP layers have their own table, norm and head only where they differ.
            R::EScoreCorrectionBias | R::MtpEmbedTokens | R::SharedHeadNorm | R::SharedHeadHead => {
                Need::Optional
            }
            _ => Need::Required,
        };
        self.put(TensorName::Layer(layer, role), shape, stored, cut, need, part)
    }

    fn put(
        &mut self,
        name: TensorName,
        shape: &[u64],
        stored: Stored,
        cut: Cut,
        need: Need,
        part: Part,
    ) -> Result<(), Error> {
        let shape = Shape::new(shape).map_err(|_| Error::Tensor {
            tensor: name.gguf(),
            expected: "dimensions whose product fits 64 bits".to_owned(),
            found: format!("{shape:?} from the metadata"),
        })?;
        let scale = name.scale().filter(|_| stored == Stored::AsIs);
        let experts = if let [experts, _, _] = shape.dims() { *experts } else { 1 };
        self.tensors.push(NativeTensor { name, shape, stored, cut, need, part });
        if let Some(name) = scale {
            let shape = Shape::new(&[experts]).expect("one dimension of another shape");
            // Each rank has those of its experts.
            let cut = if cut == Cut::Experts { cut } else { Cut::Replicated };
            self.tensors.push(NativeTensor { name, shape, stored, cut, need: Need::Optional, part });
        }
        Ok(())
    }
}
