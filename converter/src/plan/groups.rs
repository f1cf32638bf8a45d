//! The tensors of a plan in the few groups that a drawing can show.

use super::Plan;
use formats::name::{LayerRole, ModelRole};
use formats::{LayerIdx, TensorName};

/// What a stretch of a rank's file is for.
///
/// In the order of a drawing: the way of a token, then what dense decoding does not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    Embeddings,
    Attention,
    KvB,
    RouterAndNorms,
    DenseFfn,
    SharedExperts,
    RoutedExperts,
    LmHead,
    Indexer,
    Mtp,
    /// The file's own header.
    Header,
}

/// Bytes of each group, in the order of [`Group::ALL`].
pub(super) type GroupBytes = [u64; Group::ALL.len()];

impl Group {
    /// Every group; `ALL[group as usize]` is `group`.
    pub(super) const ALL: [Self; 11] = [
        Self::Embeddings,
        Self::Attention,
        Self::KvB,
        Self::RouterAndNorms,
        Self::DenseFfn,
        Self::SharedExperts,
        Self::RoutedExperts,
        Self::LmHead,
        Self::Indexer,
        Self::Mtp,
        Self::Header,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Embeddings => "embeddings",
            Self::Attention => "attention",
            Self::KvB => "kv_b",
            Self::RouterAndNorms => "router and norms",
            Self::DenseFfn => "dense FFN",
            Self::SharedExperts => "shared experts",
            Self::RoutedExperts => "routed experts",
            Self::LmHead => "lm_head",
            Self::Indexer => "indexer",
            Self::Mtp => "MTP",
            Self::Header => "header",
        }
    }

    /// What is in it, for a legend.
    pub(super) fn holds(self) -> &'static str {
        match self {
            Self::Embeddings => "rows of embed_tokens",
            Self::Attention => "query, latent and output projections",
            Self::KvB => "kv_b_proj, joined and in BF16",
            Self::RouterAndNorms => "router gates, their bias, every norm, in F32",
            Self::DenseFfn => "gate, up and down of dense layers",
            Self::SharedExperts => "gate, up and down of shared experts",
            Self::RoutedExperts => "gate, up and down of routed experts",
            Self::LmHead => "rows of lm_head",
            Self::Indexer => "sparse attention; carried, not read by dense decoding",
            Self::Mtp => "multi-token prediction; carried, not read by plain decoding",
            Self::Header => "safetensors header and padding",
        }
    }

    /// `trunk`: number of layers before those of multi-token prediction.
    fn of(name: TensorName, trunk: usize) -> Self {
        use LayerRole as R;
        match name.scaled().unwrap_or(name) {
            TensorName::Model(ModelRole::EmbedTokens) => Self::Embeddings,
            TensorName::Model(ModelRole::Norm) => Self::RouterAndNorms,
            TensorName::Model(ModelRole::LmHead) => Self::LmHead,
            TensorName::Layer(LayerIdx(layer), _) if layer >= trunk => Self::Mtp,
            TensorName::ModelScale(_) | TensorName::LayerScale(..) => {
                unreachable!("what is scaled is no scale")
            }
            TensorName::Layer(_, role) => match role {
                R::KvBProj | R::AttnKB | R::AttnVB => Self::KvB,
                R::QProj | R::QAProj | R::QBProj | R::KvAProjWithMqa | R::OProj => Self::Attention,
                R::GateProj | R::UpProj | R::DownProj => Self::DenseFfn,
                R::SharedExpertsGateProj | R::SharedExpertsUpProj | R::SharedExpertsDownProj => {
                    Self::SharedExperts
                }
                R::ExpertsGateProj | R::ExpertsUpProj | R::ExpertsGateUpProj | R::ExpertsDownProj => {
                    Self::RoutedExperts
                }
                _ if role.is_indexer() => Self::Indexer,
                _ if role.is_mtp() => Self::Mtp,
                _ => Self::RouterAndNorms,
            },
        }
    }
}

impl Plan {
    /// For each rank the bytes of each group; together they are the rank's file.
    pub(super) fn bytes_by_group(&self) -> Vec<GroupBytes> {
        let trunk = self.model.config.layers.len();
        let groups: Vec<Group> = self.tensors.iter().map(|tensor| Group::of(tensor.role, trunk)).collect();
        let of_rank = |layout: &super::RankLayout| {
            let mut bytes = GroupBytes::default();
            bytes[Group::Header as usize] = layout.data_start;
            for placed in layout.placed.iter() {
                bytes[groups[placed.tensor] as usize] += placed.bytes.end - placed.bytes.start;
            }
            bytes
        };
        self.layouts.iter().map(of_rank).collect()
    }
}
