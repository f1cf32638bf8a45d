//! Any bytes as blocks of any type: a type's blocks decode, whatever is in them.
#![no_main]

use formats::{Dtype, quant};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&choice, rest)) = data.split_first() else { return };
    let dtypes: Vec<Dtype> = Dtype::all().collect();
    let dtype = dtypes[usize::from(choice) % dtypes.len()];
    let blocks = rest.len() / dtype.block_bytes();
    let bytes = &rest[..blocks * dtype.block_bytes()];
    let mut values = vec![f32::NAN; blocks * dtype.block_len()];
    assert_eq!(dtype.bytes_for(values.len() as u64), Some(bytes.len() as u64), "{dtype}");
    assert_eq!(quant::decode(dtype, bytes, &mut values).is_ok(), quant::decoder(dtype).is_some(), "{dtype}");
});
