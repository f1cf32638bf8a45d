//! Arrangements of a tensor's bytes in a rank file, by name.

pub mod mma16;

use crate::{Dtype, Shape};
use serde::{Deserialize, Serialize};

/// Arrangement of a tensor's bytes. None changes their number, and each can be undone byte for byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Layout {
    /// GGUF's own: rows of blocks.
    Ggml,
    /// Tiles of 16 rows and 256 columns for tensor cores: see [`mma16`].
    Mma16,
    /// A name that this version does not know.
    Unknown(String),
}

impl Layout {
    /// Its name in manifests.
    pub fn name(&self) -> &str {
        match self {
            Self::Ggml => "ggml",
            Self::Mma16 => "mma16.v1",
            Self::Unknown(name) => name,
        }
    }

    /// Whether a tensor of this type, of which a rank has this shape, can be arranged so.
    pub fn fits(&self, dtype: Dtype, shape: &Shape) -> bool {
        match self {
            Self::Ggml => true,
            Self::Mma16 => mma16::fits(dtype, shape),
            Self::Unknown(_) => false,
        }
    }
}

impl From<String> for Layout {
    fn from(name: String) -> Self {
        let known = [Self::Ggml, Self::Mma16].into_iter().find(|layout| layout.name() == name);
        known.unwrap_or(Self::Unknown(name))
    }
}

impl From<Layout> for String {
    fn from(layout: Layout) -> Self {
        layout.name().to_owned()
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
