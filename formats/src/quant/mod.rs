//! Block layouts of the ggml types and their scalar decode, bit for bit what ggml and gguf-py compute.

use crate::{Dtype, Error};

/// Decodes whole blocks: `bytes` holds `out.len()` elements of `dtype`.
///
/// # Errors
/// [`Error::NoDecoder`] for types without numbers (Q8_1, Q8_K are activation types); [`Error::TensorBytes`]-like
/// mismatches are the caller's mistake and panic.
///
/// # Panics
/// When `bytes` is not exactly the bytes of `out.len()` elements.
pub fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let decode = decoder(dtype).ok_or(Error::NoDecoder { dtype })?;
    assert_eq!(
        dtype.bytes_for(out.len() as u64),
        Some(bytes.len() as u64),
        "{dtype} bytes for {} elements",
        out.len()
    );
    decode(bytes, out);
    Ok(())
}

/// The decoder of a type: whole blocks from bytes to f32. `None` where there is none.
pub fn decoder(dtype: Dtype) -> Option<fn(&[u8], &mut [f32])> {
    let _ = dtype;
    None
}
