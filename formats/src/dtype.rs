//! Element types: one table of name, GGUF id, block length and block bytes.

use serde::{Deserialize, Serialize};

/// A ggml tensor type, by the name that llama.cpp and gguf-py give it.
///
/// Source of ids and sizes: ggml b11434 `ggml.h` and `ggml-common.h`; gguf-py's `GGML_QUANT_SIZES` agrees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(non_camel_case_types, reason = "the names users know from file names and llama-quantize")]
#[allow(missing_docs, reason = "each name is its own documentation; sizes are in TABLE")]
#[non_exhaustive]
pub enum Dtype {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
}

struct Row {
    dtype: Dtype,
    id: u32,
    name: &'static str,
    block_len: usize,
    block_bytes: usize,
}

macro_rules! table {
    ($($id:literal $name:ident $len:literal $bytes:literal;)*) => {
        const TABLE: &[Row] = &[
            $(Row { dtype: Dtype::$name, id: $id, name: stringify!($name), block_len: $len, block_bytes: $bytes },)*
        ];
    };
}

table! {
    0 F32 1 4;
    1 F16 1 2;
    2 Q4_0 32 18;
    3 Q4_1 32 20;
    6 Q5_0 32 22;
    7 Q5_1 32 24;
    8 Q8_0 32 34;
    9 Q8_1 32 36;
    10 Q2_K 256 84;
    11 Q3_K 256 110;
    12 Q4_K 256 144;
    13 Q5_K 256 176;
    14 Q6_K 256 210;
    15 Q8_K 256 292;
    16 IQ2_XXS 256 66;
    17 IQ2_XS 256 74;
    18 IQ3_XXS 256 98;
    19 IQ1_S 256 50;
    20 IQ4_NL 32 18;
    21 IQ3_S 256 110;
    22 IQ2_S 256 82;
    23 IQ4_XS 256 136;
    24 I8 1 1;
    25 I16 1 2;
    26 I32 1 4;
    27 I64 1 8;
    28 F64 1 8;
    29 IQ1_M 256 56;
    30 BF16 1 2;
    34 TQ1_0 256 54;
    35 TQ2_0 256 66;
    39 MXFP4 32 17;
    40 NVFP4 64 36;
    41 Q1_0 128 18;
    42 Q2_0 64 18;
}

/// The table is in declaration order, so a `Dtype` is its own index.
const _: () = {
    let mut i = 0;
    while i < TABLE.len() {
        assert!(TABLE[i].dtype as usize == i, "TABLE must follow the order of the enum");
        i += 1;
    }
};

impl Dtype {
    /// Every type, in the order of their GGUF ids.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.dtype)
    }

    /// The type with this GGUF id; `None` for ids that ggml removed or never had.
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.id == id).map(|row| row.dtype)
    }

    /// The id that GGUF files store.
    pub fn id(self) -> u32 {
        self.row().id
    }

    /// The name as llama.cpp prints it, e.g. `Q4_K`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Elements in one block; 1 for plain types.
    pub const fn block_len(self) -> usize {
        self.row().block_len
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.row().block_bytes
    }

    /// Bytes of `n` consecutive elements; `None` when `n` is no multiple of the block or the product overflows.
    pub fn bytes_for(self, n: u64) -> Option<u64> {
        let row = self.row();
        let len = row.block_len as u64;
        if !n.is_multiple_of(len) {
            return None;
        }
        (n / len).checked_mul(row.block_bytes as u64)
    }

    /// True for types whose elements stand alone (no shared scales).
    pub fn is_plain(self) -> bool {
        self.block_len() == 1
    }

    const fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_and_removed_ids_are_unknown() {
        for dtype in Dtype::all() {
            assert_eq!(Dtype::from_id(dtype.id()), Some(dtype));
            assert!(dtype.block_bytes() > 0);
        }
        for removed in [4, 5, 31, 32, 33, 36, 37, 38, 43, 99, u32::MAX] {
            assert_eq!(Dtype::from_id(removed), None, "{removed}");
        }
    }

    #[test]
    fn bytes_for_refuses_partial_blocks_and_overflow() {
        assert_eq!(Dtype::Q4_K.bytes_for(512), Some(288));
        assert_eq!(Dtype::Q4_K.bytes_for(128), None);
        assert_eq!(Dtype::F32.bytes_for(u64::MAX), None);
        assert_eq!(Dtype::NVFP4.bytes_for(128), Some(72));
    }
}
