//! Types whose elements stand alone. A "block" is one element, little-endian.

use super::{Block, f16_to_f32, finite};
use crate::Dtype;
use zerocopy::little_endian::U16;

macro_rules! plain {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal bytes, |$element:ident| $value:expr, $finite:expr;)*) => {$(
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

            #[inline(always)]
            fn is_finite(bytes: &[u8]) -> bool {
                let bytes: [u8; $bytes] = bytes.try_into().expect("the bytes of one element");
                let is_finite: fn([u8; $bytes]) -> bool = $finite;
                is_finite(bytes)
            }
        }
    )*};
}

plain! {
    /// IEEE single precision.
    F32: 4 bytes, |element| f32::from_le_bytes(element), |bytes| u32::from_le_bytes(bytes) & 0x7f80_0000 != 0x7f80_0000;
    /// IEEE half precision.
    F16: 2 bytes, |element| f16_to_f32(U16::from_bytes(element)), |bytes| finite(U16::from_bytes(bytes));
    /// The upper half of an f32.
    BF16: 2 bytes, |element| f32::from_bits(u32::from(u16::from_le_bytes(element)) << 16), |bytes| u16::from_le_bytes(bytes) & 0x7f80 != 0x7f80;
    /// IEEE double precision, rounded to the nearest f32 (ties to even).
    F64: 8 bytes, |element| f64::from_le_bytes(element) as f32, |bytes| (f64::from_le_bytes(bytes) as f32).is_finite();
    /// Two's complement.
    I8: 1 bytes, |element| f32::from(i8::from_le_bytes(element)), |_| true;
    /// Two's complement.
    I16: 2 bytes, |element| f32::from(i16::from_le_bytes(element)), |_| true;
    /// Two's complement, rounded to the nearest f32 (ties to even) beyond 2^24.
    I32: 4 bytes, |element| i32::from_le_bytes(element) as f32, |_| true;
    /// Two's complement, rounded to the nearest f32 (ties to even) beyond 2^24.
    I64: 8 bytes, |element| i64::from_le_bytes(element) as f32, |_| true;
}
