//! Decoders against values that gguf-py and llama.cpp computed.

use super::*;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// Types without an oracle: `values_by_hand` has some of each.
const BY_HAND: &[Dtype] = &[Dtype::F64, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64];
const WITHOUT_DECODER: &[Dtype] = &[Dtype::Q8_1, Dtype::Q8_K];

fn decoded(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    decode(dtype, bytes, &mut out).unwrap();
    out
}

#[test]
fn every_type_has_a_decoder_and_an_oracle_or_is_named_here() {
    for dtype in Dtype::all() {
        assert_eq!(decoder(dtype).is_none(), WITHOUT_DECODER.contains(&dtype), "{dtype}");
        let by_oracle = !BY_HAND.contains(&dtype) && !WITHOUT_DECODER.contains(&dtype);
        assert_eq!(excerpt(dtype).exists(), by_oracle, "{dtype}: {}", excerpt(dtype).display());
    }
}

#[test]
fn every_type_equals_its_oracle_bit_for_bit() {
    for dtype in Dtype::all().filter(|&dtype| excerpt(dtype).exists()) {
        assert_equals_oracle(dtype, &excerpt(dtype));
        if whole_oracle(dtype).exists() {
            assert_equals_oracle(dtype, &whole_oracle(dtype));
        }
    }
}

fn assert_equals_oracle(dtype: Dtype, file: &Path) {
    let bytes = std::fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let blocks = tensors.tensor("blocks").unwrap();
    let expected = tensors.tensor("f32").unwrap();
    let rows = blocks.shape()[0];
    assert!(rows > 0, "{}", file.display());
    assert_eq!(blocks.shape(), [rows, dtype.block_bytes()], "{}", file.display());
    assert_eq!(expected.shape(), [rows, dtype.block_len()], "{}", file.display());

    let expected = expected.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
    for (i, (found, expected)) in decoded(dtype, blocks.data()).into_iter().zip(expected).enumerate() {
        assert!(
            found.to_bits() == expected.to_bits(),
            "{}: block {}, element {}: expected {expected:e}, found {found:e}",
            file.display(),
            i / dtype.block_len(),
            i % dtype.block_len(),
        );
    }
}

/// The committed blocks: the edge cases and some random ones.
fn excerpt(dtype: Dtype) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/data/dequant/{dtype}.safetensors"))
}

/// All blocks, where the shared folder lies beside the workspace.
fn whole_oracle(dtype: Dtype) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../shared/oracles/dequant/{dtype}.safetensors"))
}

#[test]
fn values_by_hand() {
    let f64s = [0.1, -1e300, f64::MIN_POSITIVE, 16_777_217.0].map(f64::to_le_bytes);
    assert_eq!(decoded(Dtype::F64, f64s.as_flattened()), [0.1, f32::NEG_INFINITY, 0.0, 16_777_216.0]);
    assert_eq!(decoded(Dtype::I8, &[0, 127, 128, 255]), [0.0, 127.0, -128.0, -1.0]);
    let i16s = [i16::MIN, -1, i16::MAX].map(i16::to_le_bytes);
    assert_eq!(decoded(Dtype::I16, i16s.as_flattened()), [-32_768.0, -1.0, 32_767.0]);
    let i32s = [i32::MIN, -1, 16_777_217, 16_777_219].map(i32::to_le_bytes);
    assert_eq!(
        decoded(Dtype::I32, i32s.as_flattened()),
        [-2_147_483_648.0, -1.0, 16_777_216.0, 16_777_220.0]
    );
    let i64s = [i64::MIN, -1, 1 << 40].map(i64::to_le_bytes);
    assert_eq!(
        decoded(Dtype::I64, i64s.as_flattened()),
        [-9_223_372_036_854_775_808.0, -1.0, 1_099_511_627_776.0]
    );
}

#[test]
fn block_sizes_are_those_of_the_table() {
    struct Sizes;
    impl ForBlock for Sizes {
        type Output = (Dtype, usize, usize);
        fn call<B: Block>(self) -> Self::Output {
            (B::DTYPE, B::LEN, B::BYTES)
        }
    }
    for dtype in Dtype::all() {
        let Some(sizes) = dispatch(dtype, Sizes) else {
            continue;
        };
        assert_eq!(sizes, (dtype, dtype.block_len(), dtype.block_bytes()));
    }
}

#[test]
fn half_scales_equal_the_half_crate() {
    for bits in 0..=u16::MAX {
        let (found, expected) = (f16_to_f32(U16::new(bits)), half::f16::from_bits(bits).to_f32());
        let equal = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        assert!(equal, "{bits:#06x}: expected {expected:e}, found {found:e}");
    }
}

#[test]
fn blocks_of_zero_bytes_are_zeros() {
    for dtype in Dtype::all().filter(|dtype| !WITHOUT_DECODER.contains(dtype)) {
        let values = decoded(dtype, &vec![0; dtype.block_bytes() * 3]);
        assert_eq!(values, vec![0.0; dtype.block_len() * 3], "{dtype}");
        assert!(decoded(dtype, &[]).is_empty(), "{dtype}");
    }
}

#[test]
fn blocks_decode_alone_as_they_do_in_a_run_and_at_any_address() {
    for dtype in Dtype::all().filter(|&dtype| excerpt(dtype).exists()) {
        let file = std::fs::read(excerpt(dtype)).unwrap();
        let blocks = SafeTensors::deserialize(&file).unwrap().tensor("blocks").unwrap().data().to_vec();
        let run = decoded(dtype, &blocks);
        let moved: Vec<u8> = std::iter::once(0).chain(blocks).collect();
        let alone = moved[1..].chunks(dtype.block_bytes()).flat_map(|block| decoded(dtype, block));
        assert!(run.iter().map(|value| value.to_bits()).eq(alone.map(f32::to_bits)), "{dtype}");
    }
}

#[test]
fn activation_types_are_refused_by_name() {
    for &dtype in WITHOUT_DECODER {
        let error = decode(dtype, &[], &mut []).unwrap_err();
        assert!(matches!(error, Error::NoDecoder { dtype: named } if named == dtype), "{error}");
    }
}

#[test]
#[should_panic(expected = "143 bytes for 256 elements of Q4_K")]
fn too_few_bytes_panic() {
    let _ = decode(Dtype::Q4_K, &[0; 143], &mut [0.0; 256]);
}

#[test]
#[should_panic(expected = "68 bytes for 33 elements of Q8_0")]
fn a_part_of_a_block_panics() {
    let _ = decode(Dtype::Q8_0, &[0; 68], &mut [0.0; 33]);
}

#[test]
#[should_panic(expected = "8 bytes for 1 elements of F32")]
fn too_many_bytes_panic() {
    let _ = decode(Dtype::F32, &[0; 8], &mut [0.0; 1]);
}

/// A block is finite exactly when all its values are, at every value that a pair of bytes of it can have. The exceptions are
/// scales that are NaN in their own format and that ggml computes numbers with, and finite scales whose products overflow.
#[test]
fn blocks_with_a_scale_that_is_no_number_are_found() {
    for dtype in Dtype::all().filter(|&dtype| decoder(dtype).is_some()) {
        let bytes = dtype.block_bytes();
        // Quants that are not 0, so that a scale shows in every value.
        let mut good: Vec<u8> = (0..bytes).map(|i| if i % 2 == 0 { 0x11 } else { 0x33 }).collect();
        if dtype == Dtype::IQ1_M {
            // The lower two bits of the exponent, far from the other three.
            good[53] = 0xc3;
        }
        assert_eq!(first_not_finite(dtype, &good.repeat(200)), None, "{dtype}");
        let mut found = 0;
        for at in 0..bytes {
            for pair in [0x7c00u16, 0xfc00, 0x7e01, 0x7f80, 0xffff, 0x7b00, 0x0001] {
                let mut block = good.clone();
                for (byte, value) in block[at..].iter_mut().zip(pair.to_le_bytes()) {
                    *byte = value;
                }
                let finite = decoded(dtype, &block).iter().all(|x| x.is_finite());
                let by_format = match dtype {
                    Dtype::MXFP4 => block[0] == 0xff,
                    Dtype::NVFP4 => block[..4].iter().any(|d| d & 0x7f == 0x7f),
                    _ => false,
                };
                if dtype == Dtype::MXFP4 && !finite && !by_format {
                    assert!(block[0] > 250, "only the largest scales overflow");
                    continue;
                }
                let expected = (!finite || by_format).then_some(133);
                let run = [good.repeat(133), block, good.repeat(66)].concat();
                assert_eq!(first_not_finite(dtype, &run), expected, "{dtype}: {pair:#06x} at {at}");
                found += usize::from(expected.is_some());
            }
        }
        let integer = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
        assert_eq!(found > 0, !integer, "{dtype}");
    }
}
