//! The layout for tensor cores against a decoder that follows its description word by word.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::layout::{Layout, mma16};
use formats::{Dtype, Shape, quant};

const TYPES: [Dtype; 11] = [
    Dtype::Q4_K,
    Dtype::Q5_K,
    Dtype::Q6_K,
    Dtype::Q8_0,
    Dtype::Q4_0,
    Dtype::Q5_0,
    Dtype::IQ4_NL,
    Dtype::IQ4_XS,
    Dtype::MXFP4,
    Dtype::Q2_K,
    Dtype::Q3_K,
];

/// SplitMix64.
fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

fn row_bytes(dtype: Dtype) -> usize {
    256 / dtype.block_len() * dtype.block_bytes()
}

fn arranged(dtype: Dtype, blocks: &[u8]) -> Vec<u8> {
    let rows: Vec<&[u8]> = blocks.chunks_exact(row_bytes(dtype)).collect();
    let mut tile = vec![0xaa; blocks.len()];
    mma16::arrange(dtype, &rows.try_into().unwrap(), &mut tile);
    tile
}

#[test]
fn every_tile_comes_back_byte_for_byte() {
    for dtype in TYPES {
        assert_eq!(mma16::tile_bytes(dtype), Some(16 * row_bytes(dtype)), "{dtype}");
        for seed in 0..50 {
            let blocks = random(seed, 16 * row_bytes(dtype));
            let tile = arranged(dtype, &blocks);
            assert!(tile != blocks, "{dtype}");
            let mut restored = vec![0x55; blocks.len()];
            mma16::restore(dtype, &tile, &mut restored);
            assert!(restored == blocks, "{dtype}, seed {seed}");
        }
    }
}

#[test]
fn a_strip_is_its_tiles_side_by_side() {
    let (dtype, tiles) = (Dtype::Q6_K, 3);
    let row = tiles * row_bytes(dtype);
    let blocks = random(7, 16 * row);
    let mut strip = Vec::new();
    for tile in 0..tiles {
        let part = |r: usize| &blocks[r * row + tile * row_bytes(dtype)..][..row_bytes(dtype)];
        let together: Vec<u8> = (0..16).flat_map(|r| part(r).to_vec()).collect();
        strip.extend(arranged(dtype, &together));
    }
    let mut restored = Vec::new();
    mma16::restore_strip(dtype, tiles * 256, &strip, &mut restored);
    assert!(restored == blocks);
}

/// Bits `at .. at + len` of a little-endian word of a tile.
fn bits(tile: &[u8], word: usize, at: usize, len: usize) -> u32 {
    let word = u32::from_le_bytes(tile[word * 4..word * 4 + 4].try_into().unwrap());
    word >> at & ((1 << len) - 1)
}

/// Lane, pair and half of a pair that hold a weight, with its step.
fn place(row: usize, k: usize) -> (usize, usize, usize, usize) {
    let (step, t, j) = (k / 16, k % 16 / 4, k % 4);
    let pair = usize::from(row >= 8) + 2 * usize::from(j >= 2);
    (step, 4 * (row % 8) + t, pair, j % 2)
}

/// A weight's bits in a plane that begins at word `plane` and has `width` bits for each.
fn field(tile: &[u8], plane: usize, width: usize, row: usize, k: usize) -> u32 {
    let (step, lane, pair, second) = place(row, k);
    match width {
        4 => {
            let word = plane + step / 4 * 128 + lane * 4 + step % 4;
            bits(tile, word, 4 * pair + 16 * second, 4)
        }
        2 => {
            let word = plane + step / 8 * 128 + lane * 4 + step % 8 / 2;
            bits(tile, word, 8 * (step % 2) + [0, 4, 2, 6][pair] + 16 * second, 2)
        }
        1 => {
            let word = plane + lane * 4 + step / 4;
            bits(tile, word, [0, 2, 8, 10][step % 4] + [0, 4, 1, 5][pair] + 16 * second, 1)
        }
        _ => {
            let word = plane + step / 2 * 128 + lane * 4 + 2 * (step % 2) + usize::from(row >= 8);
            bits(tile, word, 8 * (k % 4), 8)
        }
    }
}

/// The value of one weight, from the tile alone.
fn value(dtype: Dtype, tile: &[u8], row: usize, k: usize) -> f32 {
    let half = |at: usize| half::f16::from_le_bytes([tile[at], tile[at + 1]]).to_f32();
    let at = |plane: usize, width: usize| field(tile, plane / 4, width, row, k);
    let q4 = || at(0, 4);
    const NONLINEAR: [f32; 16] =
        [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];
    match dtype {
        Dtype::Q4_K | Dtype::Q5_K => {
            let (q, rows) = match dtype {
                Dtype::Q4_K => (q4(), 2048),
                _ => (q4() | at(2048, 1) << 4, 2560),
            };
            let side = rows + 16 * row;
            let six = |from: usize| {
                let number = tile[from..from + 6].iter().rev().fold(0u64, |n, &b| n << 8 | u64::from(b));
                (number >> (6 * (k / 32)) & 0x3f) as f32
            };
            half(side) * six(side + 4) * q as f32 - half(side + 2) * six(side + 10)
        }
        Dtype::Q6_K => {
            let q = q4() | at(2048, 2) << 4;
            let scale = f32::from(tile[3072 + 16 * row + k / 16] as i8);
            half(3072 + 256 + 2 * row) * scale * (q as f32 - 32.0)
        }
        Dtype::Q8_0 => half(4096 + 16 * row + 2 * (k / 32)) * (at(0, 8) as f32 - 128.0),
        Dtype::Q4_0 => half(2048 + 16 * row + 2 * (k / 32)) * (q4() as f32 - 8.0),
        Dtype::IQ4_NL => half(2048 + 16 * row + 2 * (k / 32)) * NONLINEAR[q4() as usize],
        Dtype::Q5_0 => half(2560 + 16 * row + 2 * (k / 32)) * ((q4() | at(2048, 1) << 4) as f32 - 16.0),
        Dtype::IQ4_XS => {
            let side = 2048 + 8 * row;
            let (group, high) = (k / 32, u16::from_le_bytes([tile[side + 2], tile[side + 3]]));
            let low = u16::from(tile[side + 4 + group / 2] >> (4 * (group % 2)) & 0x0f);
            let scale = low | (high >> (2 * group) & 3) << 4;
            half(side) * (f32::from(scale) - 32.0) * NONLINEAR[q4() as usize]
        }
        Dtype::MXFP4 => {
            const E2M1: [f32; 8] = [0., 0.5, 1., 1.5, 2., 3., 4., 6.];
            let q = q4() as usize;
            let sign = if q < 8 { 1.0 } else { -1.0 };
            let e = i32::from(tile[2048 + 8 * row + k / 32]);
            (2f64.powi(e - 127) * f64::from(E2M1[q % 8] * sign)) as f32
        }
        Dtype::Q2_K => {
            let scale = tile[1024 + 16 * row + k / 16];
            let side = 1024 + 256 + 4 * row;
            half(side) * f32::from(scale & 0x0f) * at(0, 2) as f32 - half(side + 2) * f32::from(scale >> 4)
        }
        Dtype::Q3_K => {
            let scales = &tile[1536 + 12 * row..][..12];
            let group = k / 16;
            let low = scales[group % 8] >> (4 * (group / 8)) & 0x0f;
            let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
            let scale = f32::from(low | high << 4) - 32.0;
            let q = at(0, 2) as f32 - if at(1024, 1) == 0 { 4.0 } else { 0.0 };
            half(1536 + 192 + 2 * row) * scale * q
        }
        other => panic!("{other} has no place in the layout"),
    }
}

#[test]
fn values_through_the_layout_are_those_of_the_blocks_bit_for_bit() {
    for dtype in TYPES {
        let mut compared = 0;
        for seed in 0..20 {
            let blocks = random(1000 + seed, 16 * row_bytes(dtype));
            let tile = arranged(dtype, &blocks);
            let mut expected = vec![0.0; 16 * 256];
            quant::decode(dtype, &blocks, &mut expected).unwrap();
            for (i, expected) in expected.into_iter().enumerate().filter(|(_, x)| x.is_finite()) {
                let found = value(dtype, &tile, i / 256, i % 256);
                // Zeros may differ in their sign.
                let same = found.to_bits() == expected.to_bits() || (found == 0.0 && expected == 0.0);
                assert!(
                    same,
                    "{dtype}, row {}, column {}: {found:e}, expected {expected:e}",
                    i / 256,
                    i % 256
                );
                compared += 1;
            }
        }
        assert!(compared > 20 * 16 * 256 / 2, "{dtype}: {compared}");
    }
}

#[test]
fn only_whole_tiles_of_known_types_fit() {
    let fits = |dtype, dims: &[u64]| Layout::Mma16.fits(dtype, &Shape::new(dims).unwrap());
    assert!(
        fits(Dtype::Q4_K, &[16, 256]) && fits(Dtype::Q8_0, &[3, 32, 512]) && fits(Dtype::Q6_K, &[0, 256])
    );
    assert!(!fits(Dtype::Q4_K, &[24, 256]) && !fits(Dtype::Q8_0, &[16, 288]) && !fits(Dtype::Q4_K, &[256]));
    assert!(!fits(Dtype::BF16, &[16, 256]) && !fits(Dtype::IQ2_XS, &[16, 256]));
    assert!(!fits(Dtype::Q4_K, &[2, 2, 16, 256]));
    for layout in [Layout::Ggml, Layout::Mma16] {
        assert_eq!(Layout::from(layout.name().to_owned()), layout);
    }
    assert_eq!(Layout::from("mma16.v2".to_owned()), Layout::Unknown("mma16.v2".to_owned()));
}
