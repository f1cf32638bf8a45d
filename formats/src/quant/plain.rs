//! Types whose elements stand alone. A "block" is one element, little-endian.

use super::{Block, f16_to_f32};
use crate::Dtype;
use zerocopy::little_endian::U16;

macro_rules! plain {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal bytes, |$element:ident| $value:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl Block for $name {
            const DTYPE: Dtype = Dtype::$name;
            const LEN: usize = 1;
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn decode(bytes: &[u8], out: &mut [f32]) {
                let $element: [u8; $bytes] = bytes.try_into().expect("the bytes of one element");
                let [out]: &mut [f32; 1] = out.try_into().expect("one element");
                *out = $value;
            }
        }
    )*};
}

plain! {
    /// IEEE single precision.
    F32: 4 bytes, |element| f32::from_le_bytes(element);
    /// IEEE half precision.
    F16: 2 bytes, |element| f16_to_f32(U16::from_bytes(element));
    /// The upper half of an f32.
    BF16: 2 bytes, |element| f32::from_bits(u32::from(u16::from_le_bytes(element)) << 16);
    /// IEEE double precision, rounded to the nearest f32 (ties to even).
    F64: 8 bytes, |element| f64::from_le_bytes(element) as f32;
    /// Two's complement.
    I8: 1 bytes, |element| f32::from(i8::from_le_bytes(element));
    /// Two's complement.
    I16: 2 bytes, |element| f32::from(i16::from_le_bytes(element));
    /// Two's complement, rounded to the nearest f32 (ties to even) beyond 2^24.
    I32: 4 bytes, |element| i32::from_le_bytes(element) as f32;
    /// Two's complement, rounded to the nearest f32 (ties to even) beyond 2^24.
    I64: 8 bytes, |element| i64::from_le_bytes(element) as f32;
}
