//! Any stretch of any part, against what the indices say.

use super::*;
use bytes::Bytes;

fn source(name: &str, dtype: Dtype, dims: &[u64]) -> SourceTensor {
    SourceTensor { name: name.to_owned(), dtype, shape: Shape::new(dims).unwrap() }
}

fn view(source: &SourceTensor, bytes: Vec<u8>) -> TensorView {
    TensorView::new(&source.name, source.dtype, source.shape.clone(), Bytes::from(bytes)).unwrap()
}

/// Values that say where they come from.
fn counting(elements: u64) -> Vec<u8> {
    (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Fills a region in pieces of an odd size, so that every seam is crossed.
fn filled(transform: &Transform, views: &[TensorView], region: &Region, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut scratch = Scratch::default();
    for (i, piece) in bytes.chunks_mut(12).enumerate() {
        fill(transform, views, region, &Layout::Ggml, i as u64 * 12, piece, &mut scratch).unwrap();
    }
    bytes
}

#[test]
fn copies_are_the_indices_of_the_region() {
    let dims = [3u64, 4, 6];
    let tensor = source("t", Dtype::F32, &dims);
    let views = [view(&tensor, counting(72))];
    let transform = Transform::Copy(tensor);
    for axis in 0..3 {
        for start in 0..=dims[axis] {
            for end in start..=dims[axis] {
                let kept = |index: [u64; 3]| (start..end).contains(&index[axis]);
                let all = (0..3).flat_map(|a| (0..4).flat_map(move |b| (0..6).map(move |c| [a, b, c])));
                let expected: Vec<f32> =
                    all.filter(|&i| kept(i)).map(|[a, b, c]| ((a * 4 + b) * 6 + c) as f32).collect();
                let region = Region::Range { axis, indices: start..end };
                let found = filled(&transform, &views, &region, expected.len() * 4);
                assert_eq!(floats(&found), expected, "axis {axis}, {start}..{end}");
            }
        }
    }
    assert_eq!(filled(&transform, &views, &Region::Whole, 288), counting(72));
}

#[test]
fn halves_of_a_fused_tensor_are_cut_by_expert_and_by_row() {
    let fused = source("t", Dtype::F32, &[3, 4, 6]);
    let views = [view(&fused, counting(72))];
    for (half, skipped) in [(Half::First, 0), (Half::Second, 2)] {
        let transform = Transform::CopyHalf { source: fused.clone(), half };
        let regions = [
            (Region::Whole, 0..3, 0..2),
            (Region::Range { axis: 0, indices: 1..3 }, 1..3, 0..2),
            (Region::Range { axis: 0, indices: 2..2 }, 2..2, 0..2),
            (Region::Range { axis: 1, indices: 1..2 }, 0..3, 1..2),
        ];
        for (region, experts, rows) in regions {
            let rows = || rows.clone();
            let expected: Vec<f32> = experts
                .flat_map(|e: u64| {
                    rows()
                        .flat_map(move |r: u64| (0..6).map(move |c| (e * 24 + (r + skipped) * 6 + c) as f32))
                })
                .collect();
            assert_eq!(
                floats(&filled(&transform, &views, &region, expected.len() * 4)),
                expected,
                "{region:?}"
            );
        }
    }
}

#[test]
fn block_types_are_cut_between_blocks() {
    let tensor = source("t", Dtype::Q8_0, &[2, 96]);
    let bytes: Vec<u8> = (0..204).map(|i| i as u8).collect();
    let views = [view(&tensor, bytes.clone())];
    let region = Region::Range { axis: 1, indices: 32..96 };
    let found = filled(&Transform::Copy(tensor), &views, &region, 136);
    assert_eq!(found, [&bytes[34..102], &bytes[136..204]].concat());
}

#[test]
fn heads_are_nope_rows_transposed_back_and_then_v_rows() {
    let dims = HeadDims { nope: 3, v: 2, r: 4 };
    let k_b = source("k_b", Dtype::F32, &[2, 4, 3]);
    let v_b = source("v_b", Dtype::F32, &[2, 2, 4]);
    let views = [view(&k_b, counting(24)), view(&v_b, counting(16))];
    let transform = Transform::JoinKvB { from: KvB::Halves { k_b, v_b, joined: None }, heads: dims };
    let mut expected: Vec<f32> = Vec::new();
    for head in 0..2 {
        expected.extend((0..3).flat_map(|n| (0..4).map(move |r| ((head * 4 + r) * 3 + n) as f32)));
        expected.extend((0..2).flat_map(|v| (0..4).map(move |r| ((head * 2 + v) * 4 + r) as f32)));
    }
    let bf16 = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
    };
    assert_eq!(bf16(&filled(&transform, &views, &Region::Whole, 80)), expected);
    let second = Region::Range { axis: 0, indices: 5..10 };
    assert_eq!(bf16(&filled(&transform, &views, &second, 40)), expected[20..]);
}

#[test]
fn what_is_no_number_is_named() {
    let tensor = source("blk.0.attn_norm.weight", Dtype::F32, &[4]);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut bytes = counting(4);
        bytes[8..12].copy_from_slice(&bad.to_le_bytes());
        let views = [view(&tensor, bytes)];
        let transform = Transform::Dequantize(tensor.clone());
        let error =
            fill(&transform, &views, &Region::Whole, &Layout::Ggml, 0, &mut [0; 16], &mut Scratch::default())
                .unwrap_err();
        let said = error.to_string();
        assert!(said.contains("blk.0.attn_norm.weight") && said.contains(&bad.to_string()), "{said}");
        assert!(said.contains("element 2;"), "{said}");
    }
}

/// Wherever a piece or a part begins, a block is looked at once.
#[test]
fn a_scale_that_is_no_number_is_named_in_copies_too() {
    let tensor = source("blk.1.ffn_up_exps.weight", Dtype::Q8_0, &[2, 4, 96]);
    let good: Vec<u8> = (0..24 * 34u32).map(|i| if i % 34 == 1 { 0x20 } else { 1 }).collect();
    for block in 0..24 {
        let mut bytes = good.clone();
        bytes[block * 34..block * 34 + 2].copy_from_slice(&0x7c00u16.to_le_bytes());
        let views = [view(&tensor, bytes)];
        let transform = Transform::Copy(tensor.clone());
        let expert = block / 12;
        for (region, len) in [
            (Region::Whole, 24 * 34),
            (Region::Range { axis: 0, indices: 0..1 }, 12 * 34),
            (Region::Range { axis: 1, indices: 1..3 }, 12 * 34),
            (Region::Range { axis: 2, indices: 64..96 }, 8 * 34),
        ] {
            let inside = match &region {
                Region::Range { axis: 0, .. } => expert == 0,
                Region::Range { axis: 1, .. } => matches!(block / 3 % 4, 1 | 2),
                Region::Range { .. } => block % 3 == 2,
                Region::Whole => true,
            };
            let mut out = vec![0; len];
            let mut scratch = Scratch::default();
            let pieces = out.chunks_mut(50).enumerate();
            let found: Vec<String> = pieces
                .filter_map(|(i, piece)| {
                    fill(&transform, &views, &region, &Layout::Ggml, i as u64 * 50, piece, &mut scratch).err()
                })
                .map(|e| e.to_string())
                .collect();
            assert_eq!(found.len(), usize::from(inside), "{region:?}: {found:?}");
            let name =
                format!("blk.1.ffn_up_exps.weight: expected finite numbers, found inf in block {block} of");
            assert!(found.iter().all(|said| said.contains(&name)), "{found:?}");
        }
    }
}

#[test]
fn values_beyond_bf16_are_refused_and_the_largest_are_kept() {
    let tensor = source("kv_b", Dtype::F32, &[2, 2]);
    let heads = HeadDims { nope: 1, v: 1, r: 2 };
    let transform = Transform::JoinKvB { from: KvB::Joined(tensor.clone()), heads };
    let join = |x: f32| {
        let bytes = [1.0, x, 2.0, 3.0f32].iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut out = [0; 8];
        fill(
            &transform,
            &[view(&tensor, bytes)],
            &Region::Whole,
            &Layout::Ggml,
            0,
            &mut out,
            &mut Scratch::default(),
        )
        .map(|()| bf16::from_le_bytes([out[2], out[3]]))
    };
    assert!(join(f32::MAX).is_err());
    assert_eq!(join(-f32::from(bf16::MAX)).unwrap(), bf16::MIN);
    // Halves go to the even neighbour.
    assert_eq!(join(1.0 + 1.0 / 256.0).unwrap(), bf16::ONE);
    assert_eq!(join(1.0 + 3.0 / 256.0).unwrap().to_f32(), 1.0 + 4.0 / 256.0);
}
