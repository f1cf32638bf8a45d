//! Tensor names: a closed list of roles with their GGUF and native (HF) spelling in one table.

/// Index of a layer, counted over trunk and MTP layers together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerIdx(pub usize);

impl std::fmt::Display for LayerIdx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a tensor: what it is, and in which layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorName {
    /// One for the whole model.
    Model(ModelRole),
    /// One for each layer that has it.
    Layer(LayerIdx, LayerRole),
    /// What a weight of the whole model is multiplied by.
    ModelScale(ModelRole),
    /// What a weight of a layer is multiplied by: one number, or one for each expert of a stack.
    LayerScale(LayerIdx, LayerRole),
}

macro_rules! roles {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $role:ident $gguf:literal $native:expr;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$doc])* $role,)*
        }

        impl $name {
            /// Every role, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$role,)*];

            /// GGUF's spelling, without the layer.
            pub fn gguf(self) -> &'static str {
                match self { $(Self::$role => $gguf,)* }
            }

            /// HF's spelling, without the layer; `None` for tensors that a native checkpoint holds in another form.
            pub fn native(self) -> Option<&'static str> {
                match self { $(Self::$role => $native,)* }
            }
        }
    };
}

roles! {
    /// Tensors of the whole model.
    ModelRole {
        /// `[vocab, hidden]`
        EmbedTokens "token_embd.weight" Some("model.embed_tokens.weight");
        /// `[hidden]`
        Norm "output_norm.weight" Some("model.norm.weight");
        /// `[vocab, hidden]`
        LmHead "output.weight" Some("lm_head.weight");
    }
}

roles! {
    /// Tensors of a layer. H heads, R kv_lora_rank, Q q_lora_rank, E experts.
    LayerRole {
        /// `[hidden]`
        InputLayernorm "attn_norm.weight" Some("input_layernorm.weight");
        /// `[H * (nope + rope), hidden]`, without q_lora
        QProj "attn_q.weight" Some("self_attn.q_proj.weight");
        /// `[Q, hidden]`
        QAProj "attn_q_a.weight" Some("self_attn.q_a_proj.weight");
        /// `[Q]`
        QALayernorm "attn_q_a_norm.weight" Some("self_attn.q_a_layernorm.weight");
        /// `[H * (nope + rope), Q]`
        QBProj "attn_q_b.weight" Some("self_attn.q_b_proj.weight");
        /// `[R + rope, hidden]`
        KvAProjWithMqa "attn_kv_a_mqa.weight" Some("self_attn.kv_a_proj_with_mqa.weight");
        /// `[R]`
        KvALayernorm "attn_kv_a_norm.weight" Some("self_attn.kv_a_layernorm.weight");
        /// `[H * (nope + v), R]`, per head nope rows first
        KvBProj "attn_kv_b.weight" Some("self_attn.kv_b_proj.weight");
        /// `[H, R, nope]`: the key half of kv_b, each head transposed
        AttnKB "attn_k_b.weight" None;
        /// `[H, v, R]`: the value half of kv_b
        AttnVB "attn_v_b.weight" None;
        /// `[hidden, H * v]`
        OProj "attn_output.weight" Some("self_attn.o_proj.weight");
        /// `[hidden]`
        PostAttentionLayernorm "ffn_norm.weight" Some("post_attention_layernorm.weight");
        /// `[F, hidden]`
        GateProj "ffn_gate.weight" Some("mlp.gate_proj.weight");
        /// `[F, hidden]`
        UpProj "ffn_up.weight" Some("mlp.up_proj.weight");
        /// `[hidden, F]`
        DownProj "ffn_down.weight" Some("mlp.down_proj.weight");
        /// `[E, hidden]`: the router
        Gate "ffn_gate_inp.weight" Some("mlp.gate.weight");
        /// `[E]`
        EScoreCorrectionBias "exp_probs_b.bias" Some("mlp.gate.e_score_correction_bias");
        /// `[E, Fe, hidden]`
        ExpertsGateProj "ffn_gate_exps.weight" Some("mlp.experts.gate_proj.weight");
        /// `[E, Fe, hidden]`
        ExpertsUpProj "ffn_up_exps.weight" Some("mlp.experts.up_proj.weight");
        /// `[E, 2 * Fe, hidden]`: gate and up of each expert in one
        ExpertsGateUpProj "ffn_gate_up_exps.weight" None;
        /// `[E, hidden, Fe]`
        ExpertsDownProj "ffn_down_exps.weight" Some("mlp.experts.down_proj.weight");
        /// `[Fs, hidden]`
        SharedExpertsGateProj "ffn_gate_shexp.weight" Some("mlp.shared_experts.gate_proj.weight");
        /// `[Fs, hidden]`
        SharedExpertsUpProj "ffn_up_shexp.weight" Some("mlp.shared_experts.up_proj.weight");
        /// `[hidden, Fs]`
        SharedExpertsDownProj "ffn_down_shexp.weight" Some("mlp.shared_experts.down_proj.weight");
        /// `[ID]`
        IndexerKNormWeight "indexer.k_norm.weight" Some("self_attn.indexer.k_norm.weight");
        /// `[ID]`
        IndexerKNormBias "indexer.k_norm.bias" Some("self_attn.indexer.k_norm.bias");
        /// `[IH, hidden]`
        IndexerWeightsProj "indexer.proj.weight" Some("self_attn.indexer.weights_proj.weight");
        /// `[ID, hidden]`
        IndexerWk "indexer.attn_k.weight" Some("self_attn.indexer.wk.weight");
        /// `[IH * ID, Q]`
        IndexerWqB "indexer.attn_q_b.weight" Some("self_attn.indexer.wq_b.weight");
        /// `[hidden, 2 * hidden]`, embedding half first
        EhProj "nextn.eh_proj.weight" Some("eh_proj.weight");
        /// `[hidden]`
        ENorm "nextn.enorm.weight" Some("enorm.weight");
        /// `[hidden]`
        HNorm "nextn.hnorm.weight" Some("hnorm.weight");
        /// `[vocab, hidden]`, only where it differs from the model's
        MtpEmbedTokens "nextn.embed_tokens.weight" Some("embed_tokens.weight");
        /// `[hidden]`
        SharedHeadNorm "nextn.shared_head_norm.weight" Some("shared_head.norm.weight");
        /// `[vocab, hidden]`, only where it differs from the model's
        SharedHeadHead "nextn.shared_head_head.weight" Some("shared_head.head.weight");
    }
}

impl LayerRole {
    /// True for the tensors of the sparse-attention indexer.
    pub fn is_indexer(self) -> bool {
        self.gguf().starts_with("indexer.")
    }

    /// True for the tensors that only multi-token-prediction layers have.
    pub fn is_mtp(self) -> bool {
        self.gguf().starts_with("nextn.")
    }
}

/// What every weight's name ends with, in both spellings.
const WEIGHT: &str = ".weight";
/// In its place at the scale of a weight, as llama.cpp and as NVIDIA's ModelOpt (of HF checkpoints in NVFP4) name it.
const SCALE: [&str; 2] = [".scale", ".weight_scale_2"];

impl TensorName {
    /// The name of a GGUF tensor; `None` for names outside the table.
    pub fn from_gguf(name: &str) -> Option<Self> {
        if let Some(base) = name.strip_suffix(SCALE[0]) {
            return Self::from_gguf(&format!("{base}{WEIGHT}"))?.scale();
        }
        if let Some(rest) = name.strip_prefix("blk.") {
            let (layer, role) = split_layer(rest)?;
            return LayerRole::ALL.iter().find(|r| r.gguf() == role).map(|&r| Self::Layer(layer, r));
        }
        ModelRole::ALL.iter().find(|r| r.gguf() == name).map(|&r| Self::Model(r))
    }

    /// The name of a native tensor; `None` for names outside the table.
    pub fn from_native(name: &str) -> Option<Self> {
        if let Some(base) = name.strip_suffix(SCALE[1]) {
            return Self::from_native(&format!("{base}{WEIGHT}"))?.scale();
        }
        if let Some(rest) = name.strip_prefix("model.layers.") {
            let (layer, role) = split_layer(rest)?;
            return LayerRole::ALL.iter().find(|r| r.native() == Some(role)).map(|&r| Self::Layer(layer, r));
        }
        ModelRole::ALL.iter().find(|r| r.native() == Some(name)).map(|&r| Self::Model(r))
    }

    /// Either spelling.
    pub fn parse(name: &str) -> Option<Self> {
        Self::from_gguf(name).or_else(|| Self::from_native(name))
    }

    /// GGUF's spelling.
    pub fn gguf(self) -> String {
        match self {
            Self::Model(role) => role.gguf().to_owned(),
            Self::Layer(layer, role) => format!("blk.{layer}.{}", role.gguf()),
            Self::ModelScale(role) => scale_name(&Self::Model(role).gguf(), SCALE[0]),
            Self::LayerScale(layer, role) => scale_name(&Self::Layer(layer, role).gguf(), SCALE[0]),
        }
    }

    /// HF's spelling; `None` for tensors that a native checkpoint holds in another form.
    pub fn native(self) -> Option<String> {
        match self {
            Self::Model(role) => role.native().map(str::to_owned),
            Self::Layer(layer, role) => role.native().map(|n| format!("model.layers.{layer}.{n}")),
            Self::ModelScale(_) | Self::LayerScale(..) => {
                self.scaled()?.native().map(|weight| scale_name(&weight, SCALE[1]))
            }
        }
    }

    /// The name of what this weight is multiplied by, if it is; `None` for tensors that are no weights.
    pub fn scale(self) -> Option<Self> {
        match self {
            Self::Model(role) => role.gguf().ends_with(WEIGHT).then_some(Self::ModelScale(role)),
            Self::Layer(layer, role) => {
                role.gguf().ends_with(WEIGHT).then_some(Self::LayerScale(layer, role))
            }
            Self::ModelScale(_) | Self::LayerScale(..) => None,
        }
    }

    /// The weight that this is a scale of; `None` for tensors that are no scales.
    pub fn scaled(self) -> Option<Self> {
        match self {
            Self::ModelScale(role) => Some(Self::Model(role)),
            Self::LayerScale(layer, role) => Some(Self::Layer(layer, role)),
            Self::Model(_) | Self::Layer(..) => None,
        }
    }

    /// The layer that it belongs to.
    pub fn layer(self) -> Option<LayerIdx> {
        match self {
            Self::Layer(layer, _) | Self::LayerScale(layer, _) => Some(layer),
            Self::Model(_) | Self::ModelScale(_) => None,
        }
    }
}

fn scale_name(weight: &str, scale: &str) -> String {
    let base = weight.strip_suffix(WEIGHT).expect("only weights have scales");
    format!("{base}{scale}")
}

/// `12.ffn_up.weight` -> (12, `ffn_up.weight`). Leading zeros and signs are other names.
fn split_layer(rest: &str) -> Option<(LayerIdx, &str)> {
    let (number, role) = rest.split_once('.')?;
    let layer: usize = number.parse().ok()?;
    (layer.to_string() == number).then_some((LayerIdx(layer), role))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn both_spellings_round_trip_and_are_unique() {
        let names = ModelRole::ALL
            .iter()
            .map(|&r| TensorName::Model(r))
            .chain(LayerRole::ALL.iter().map(|&r| TensorName::Layer(LayerIdx(12), r)));
        let mut seen = HashSet::new();
        let names = names.flat_map(|name| [Some(name), name.scale()]).flatten();
        for name in names {
            assert_eq!(name.scale().and_then(TensorName::scaled), name.scale().map(|_| name));
            assert_eq!(TensorName::from_gguf(&name.gguf()), Some(name));
            assert!(seen.insert(name.gguf()));
            if let Some(native) = name.native() {
                assert_eq!(TensorName::parse(&native), Some(name));
                assert!(seen.insert(native));
            }
        }
    }

    #[test]
    fn foreign_names_are_unknown() {
        for name in [
            "blk.01.ffn_up.weight",
            "blk.-1.ffn_up.weight",
            "blk.3.ffn_up.bias",
            "blk.ffn_up.weight",
            "blk.3.exp_probs_b.scale",
            "blk.3.ffn_up.scale.scale",
            "model.layers.3.mlp.up_proj.scale",
            "",
            "blk.",
        ] {
            assert_eq!(TensorName::parse(name), None, "{name}");
        }
    }
}
