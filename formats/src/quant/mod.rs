//! Block layouts of the ggml types and their scalar decode, bit for bit what ggml and gguf-py compute.
//!
//! Each type is a struct laid out as its block is, with a [`Block`] impl beside it. A decode is one expression over
//! fixed-size arrays: no branches and no bounds checks in the inner loops, so that the compiler vectorises them for
//! whatever processor the caller is compiled for. Every product is exact in f32 (an f16 scale has 11 bits, the integers
//! beside it at most 13), so that fused multiply-add would not change a bit either.
//!
//! Source of all layouts: ggml b11434 `ggml-common.h` and `ggml-quants.c`, gguf-py 0.19 `quants.py`.

mod codebook;
mod integers;
mod iq;
mod iq_grids;
mod kquant;
mod legacy;
mod plain;
mod ternary;
#[cfg(test)]
mod tests;

pub use codebook::{IQ4_NL, IQ4_XS, MXFP4, NVFP4};
pub use integers::{
    ForIntegers, SMALL_BLOCK, SUPER_BLOCK, SmallBlock, SuperBlock, SuperIntegers, dispatch_integers,
};
pub use iq::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
pub use kquant::{Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
pub use legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub use plain::{BF16, F16, F32, F64, I8, I16, I32, I64};
pub use ternary::{Q1_0, Q2_0, TQ1_0, TQ2_0};

use crate::{Dtype, Error};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// A ggml type known at compile time: what generic code over blocks is written against.
///
/// [`dispatch`] leads from a [`Dtype`] to the implementor.
pub trait Block {
    /// The type.
    const DTYPE: Dtype;
    /// Elements in one block.
    const LEN: usize;
    /// Bytes of one block.
    const BYTES: usize;

    /// Decodes one block: [`Self::BYTES`] bytes to [`Self::LEN`] elements.
    ///
    /// Always inlined, so that a caller's `#[target_feature]` holds for it too.
    ///
    /// # Panics
    /// When a length is wrong.
    fn decode(bytes: &[u8], out: &mut [f32]);

    /// Whether all scales of one block, or the one element of a plain type, are numbers: neither infinite nor NaN.
    ///
    /// # Panics
    /// When the length is not [`Self::BYTES`].
    fn is_finite(bytes: &[u8]) -> bool;

    /// Decodes any number of whole blocks.
    ///
    /// # Panics
    /// When `bytes` is not exactly the bytes of `out.len()` elements.
    #[inline(always)]
    fn decode_run(bytes: &[u8], out: &mut [f32]) {
        check_lengths::<Self>(bytes.len(), out.len());
        for (bytes, out) in bytes.chunks_exact(Self::BYTES).zip(out.chunks_exact_mut(Self::LEN)) {
            Self::decode(bytes, out);
        }
    }
}

/// Something to do with a type once it is known at compile time; a closure that is generic over its [`Block`].
pub trait ForBlock {
    /// What it yields.
    type Output;

    /// Does it for `B`.
    fn call<B: Block>(self) -> Self::Output;
}

/// Calls `action` with the [`Block`] of `dtype`; `None` for the types without numbers of their own: Q8_1 and Q8_K only
/// ever hold activations inside ggml's products.
pub fn dispatch<A: ForBlock>(dtype: Dtype, action: A) -> Option<A::Output> {
    Some(match dtype {
        Dtype::F32 => action.call::<F32>(),
        Dtype::F16 => action.call::<F16>(),
        Dtype::BF16 => action.call::<BF16>(),
        Dtype::F64 => action.call::<F64>(),
        Dtype::I8 => action.call::<I8>(),
        Dtype::I16 => action.call::<I16>(),
        Dtype::I32 => action.call::<I32>(),
        Dtype::I64 => action.call::<I64>(),
        Dtype::Q4_0 => action.call::<Q4_0>(),
        Dtype::Q4_1 => action.call::<Q4_1>(),
        Dtype::Q5_0 => action.call::<Q5_0>(),
        Dtype::Q5_1 => action.call::<Q5_1>(),
        Dtype::Q8_0 => action.call::<Q8_0>(),
        Dtype::Q2_K => action.call::<Q2_K>(),
        Dtype::Q3_K => action.call::<Q3_K>(),
        Dtype::Q4_K => action.call::<Q4_K>(),
        Dtype::Q5_K => action.call::<Q5_K>(),
        Dtype::Q6_K => action.call::<Q6_K>(),
        Dtype::IQ2_XXS => action.call::<IQ2_XXS>(),
        Dtype::IQ2_XS => action.call::<IQ2_XS>(),
        Dtype::IQ2_S => action.call::<IQ2_S>(),
        Dtype::IQ3_XXS => action.call::<IQ3_XXS>(),
        Dtype::IQ3_S => action.call::<IQ3_S>(),
        Dtype::IQ1_S => action.call::<IQ1_S>(),
        Dtype::IQ1_M => action.call::<IQ1_M>(),
        Dtype::IQ4_NL => action.call::<IQ4_NL>(),
        Dtype::IQ4_XS => action.call::<IQ4_XS>(),
        Dtype::TQ1_0 => action.call::<TQ1_0>(),
        Dtype::TQ2_0 => action.call::<TQ2_0>(),
        Dtype::MXFP4 => action.call::<MXFP4>(),
        Dtype::NVFP4 => action.call::<NVFP4>(),
        Dtype::Q1_0 => action.call::<Q1_0>(),
        Dtype::Q2_0 => action.call::<Q2_0>(),
        Dtype::Q8_1 | Dtype::Q8_K => return None,
    })
}

/// Decodes whole blocks: `bytes` holds `out.len()` elements of `dtype`.
///
/// # Errors
/// [`Error::NoDecoder`] for types without numbers (Q8_1 and Q8_K are activation types).
///
/// # Panics
/// When `bytes` is not exactly the bytes of `out.len()` elements.
pub fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let decode = decoder(dtype).ok_or(Error::NoDecoder { dtype })?;
    decode(bytes, out);
    Ok(())
}

/// The decoder of a type, [`Block::decode_run`] with its panics. `None` where there is none.
#[expect(clippy::type_complexity, reason = "the signature says more than a name for it would")]
pub fn decoder(dtype: Dtype) -> Option<fn(&[u8], &mut [f32])> {
    struct DecodeRun;
    impl ForBlock for DecodeRun {
        type Output = fn(&[u8], &mut [f32]);
        fn call<B: Block>(self) -> Self::Output {
            B::decode_run
        }
    }
    dispatch(dtype, DecodeRun)
}

/// Index of the first block in `bytes`, any number of whole ones, that has a scale which is no finite number; of plain types
/// the first such element. `None` when there is none, and for types without numbers.
///
/// # Panics
/// When `bytes` ends inside a block.
pub fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<usize> {
    struct First<'a>(&'a [u8]);
    impl ForBlock for First<'_> {
        type Output = Option<usize>;
        fn call<B: Block>(self) -> Self::Output {
            /// Looked at without a branch.
            const RUN: usize = 64;
            assert!(self.0.len().is_multiple_of(B::BYTES), "{} bytes of {}", self.0.len(), B::DTYPE);
            let is_finite =
                |run: &[u8]| run.chunks_exact(B::BYTES).fold(true, |all, b| all & B::is_finite(b));
            let run = self.0.chunks(RUN * B::BYTES).position(|run| !is_finite(run))?;
            let within =
                self.0[run * RUN * B::BYTES..].chunks_exact(B::BYTES).position(|b| !B::is_finite(b))?;
            Some(run * RUN + within)
        }
    }
    dispatch(dtype, First(bytes)).flatten()
}

/// Holds a block struct with a `values(&self, &mut [f32; LEN])` of its own against its size and makes it a [`Block`]; the
/// closure says whether its scales are finite.
macro_rules! block {
    ($name:ident: $len:literal elements in $bytes:literal bytes, |$block:ident| $finite:expr) => {
        const _: () = assert!(size_of::<$name>() == $bytes && align_of::<$name>() == 1);
        const _: () =
            assert!($crate::Dtype::$name.block_len() == $len && $crate::Dtype::$name.block_bytes() == $bytes);

        impl $crate::quant::Block for $name {
            const DTYPE: $crate::Dtype = $crate::Dtype::$name;
            const LEN: usize = $len;
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn decode(bytes: &[u8], out: &mut [f32]) {
                let block: &Self = $crate::quant::block_of(bytes);
                block.values(out.try_into().expect("the elements of one block"));
            }

            #[inline(always)]
            fn is_finite(bytes: &[u8]) -> bool {
                let $block: &Self = $crate::quant::block_of(bytes);
                $finite
            }
        }
    };
}
use block;

/// The block that `bytes` are.
///
/// # Panics
/// When their number is wrong.
#[inline(always)]
fn block_of<B: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8]) -> &B {
    B::ref_from_bytes(bytes).expect("the bytes of one block")
}

fn check_lengths<B: Block + ?Sized>(bytes: usize, elements: usize) {
    let whole = elements.is_multiple_of(B::LEN) && Some(bytes) == (elements / B::LEN).checked_mul(B::BYTES);
    assert!(whole, "{bytes} bytes for {elements} elements of {}", B::DTYPE);
}

/// Whether a half-precision scale is a number.
#[inline(always)]
fn finite(half: U16) -> bool {
    half.get() & 0x7c00 != 0x7c00
}

/// A half-precision scale as f32.
///
/// Without branches, tables or a question to the processor (which `half` asks at each call), so that loops over it
/// vectorise anywhere.
#[inline(always)]
fn f16_to_f32(half: U16) -> f32 {
    const NORMAL_SCALE: f32 = 1.0 / (1u128 << 112) as f32;
    const SUBNORMAL_SCALE: f32 = 1.0 / (1 << 24) as f32;
    let half = u32::from(half.get());
    let magnitude = half & 0x7fff;
    // The exponent is raised by 224, so that infinity's 31 becomes f32's 255; the factor takes off what is too much.
    let normal = f32::from_bits((magnitude << 13) + (224 << 23)) * NORMAL_SCALE;
    let subnormal = magnitude as f32 * SUBNORMAL_SCALE;
    let value = if magnitude < 0x400 { subnormal } else { normal };
    f32::from_bits(value.to_bits() | (half & 0x8000) << 16)
}
