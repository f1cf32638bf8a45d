//! `mma16.v1`: weights in the order in which the lanes of a warp hold them for `mma.m16n8k16`.
//!
//! A tensor `[rows, K]` or `[experts, rows, K]` is experts x rows/16 x K/256 tiles in that order. A tile is 16 rows by 256
//! columns in as many bytes as their blocks take: planes of the unsigned quants' bits, and behind them the blocks' scales.
//!
//! In a plane, lane l = 4 g + t of step s = 0..16 has the rows g and g + 8 of the columns k = 16 s + 4 t + j, j = 0..4: the A
//! fragment with its contraction index permuted, so that a lane's part of B is four consecutive activations. Fields come in
//! pairs p = 0..4: row g (j 0 and 1), row g + 8 (j 0 and 1), row g (j 2 and 3), row g + 8 (j 2 and 3); the first of a pair is in
//! the low 16 bits of a 32-bit little-endian word, the second in the high ones.
//!
//! | plane | bytes | 16 bytes of a lane are 4 words q | field |
//! |---|---|---|---|
//! | nibbles | 2048 | i = 0..4; step 4 i + q | 4 bits at 4 p |
//! | two bits | 1024 | i = 0..2; steps 8 i + 2 q + e, e = 0, 1 | 2 bits at 8 e + \[0, 4, 2, 6\]\[p\] |
//! | one bit | 512 | steps 4 q + e, e = 0..4 | 1 bit at \[0, 2, 8, 10\]\[e\] + \[0, 4, 1, 5\]\[p\] |
//! | bytes | 4096 | i = 0..8; words 2 e and 2 e + 1 are step 2 i + e | row g, then row g + 8, bytes j 0..3 |

use crate::{Dtype, Shape};

/// Rows of a tile.
pub const ROWS: usize = 16;
/// Columns of a tile.
pub const COLUMNS: usize = 256;
/// Types that kernels multiply with in this layout; a converter leaves others in blocks.
pub const MULTIPLIED: [Dtype; 6] =
    [Dtype::Q4_0, Dtype::Q5_0, Dtype::Q8_0, Dtype::Q4_K, Dtype::Q5_K, Dtype::Q6_K];

/// Unsigned quants of a tile's rows.
type Quants = [[u8; COLUMNS]; ROWS];

/// Bits of the quants, in the order of a tile.
#[derive(Clone, Copy)]
enum Plane {
    /// The low four.
    Nibbles,
    /// Two from this bit on.
    TwoBits(u8),
    /// This bit.
    OneBit(u8),
    /// All eight.
    Bytes,
}

/// What lies behind the planes: of each row in turn some bytes of its blocks.
#[derive(Clone, Copy)]
enum Side {
    /// `len` bytes at `start`, of each of `count` blocks of `stride` bytes.
    Copy { start: usize, len: usize, stride: usize, count: usize },
    /// d and dmin as they are, then eight scales and eight minima of six bits, each in 48 bits, of Q4_K and Q5_K.
    Scales,
}

struct Kind {
    planes: &'static [Plane],
    sides: &'static [Side],
    unpack: fn(&[u8], &mut [u8; COLUMNS]),
    pack: fn(&[u8; COLUMNS], &mut [u8]),
}

/// A section of one piece of each row's only block.
const fn one(start: usize, len: usize) -> Side {
    Side::Copy { start, len, stride: 0, count: 1 }
}

/// A section of the first bytes of each of a row's eight blocks.
const fn eight(len: usize, stride: usize) -> Side {
    Side::Copy { start: 0, len, stride, count: 8 }
}

fn kind(dtype: Dtype) -> Option<&'static Kind> {
    macro_rules! kinds {
        ($($dtype:ident: $planes:expr, $sides:expr, $unpack:expr, $pack:expr;)*) => {
            match dtype {
                $(Dtype::$dtype => {
                    const KIND: Kind =
                        Kind { planes: &$planes, sides: &$sides, unpack: $unpack, pack: $pack };
                    Some(&KIND)
                })*
                _ => None,
            }
        };
    }
    use Plane::{Bytes, Nibbles, OneBit, TwoBits};
    kinds! {
        Q4_K: [Nibbles], [Side::Scales], |b, q| nibbles64(&b[16..], q), |q, b| pack_nibbles64(q, &mut b[16..]);
        Q5_K: [Nibbles, OneBit(4)], [Side::Scales], unpack_q5_k, pack_q5_k;
        Q6_K: [Nibbles, TwoBits(4)], [one(192, 16), one(208, 2)], unpack_q6_k, pack_q6_k;
        Q8_0: [Bytes], [eight(2, 34)], unpack_q8_0, pack_q8_0;
        Q4_0: [Nibbles], [eight(2, 18)], |b, q| nibbles32(b, 2, 18, q), |q, b| pack_nibbles32(q, 2, 18, b);
        IQ4_NL: [Nibbles], [eight(2, 18)], |b, q| nibbles32(b, 2, 18, q), |q, b| pack_nibbles32(q, 2, 18, b);
        Q5_0: [Nibbles, OneBit(4)], [eight(2, 22)], unpack_q5_0, pack_q5_0;
        IQ4_XS: [Nibbles], [one(0, 8)], |b, q| nibbles32(b, 8, 16, q), |q, b| pack_nibbles32(q, 8, 16, b);
        MXFP4: [Nibbles], [eight(1, 17)], |b, q| nibbles32(b, 1, 17, q), |q, b| pack_nibbles32(q, 1, 17, b);
        Q2_K: [TwoBits(0)], [one(0, 16), one(80, 4)], |b, q| two_bits(&b[16..80], q), |q, b| pack_two_bits(q, &mut b[16..80]);
        Q3_K: [TwoBits(0), OneBit(2)], [one(96, 12), one(108, 2)], unpack_q3_k, pack_q3_k;
    }
}

/// Whether a rank's part of this type and shape can be arranged so: whole tiles of a type that has a place here.
pub fn fits(dtype: Dtype, shape: &Shape) -> bool {
    let dims = shape.dims();
    kind(dtype).is_some()
        && matches!(dims.len(), 2 | 3)
        && dims[dims.len() - 2].is_multiple_of(ROWS as u64)
        && shape.row_len().is_multiple_of(COLUMNS as u64)
}

/// Bytes of [`COLUMNS`] consecutive elements of a row.
fn row_bytes(dtype: Dtype) -> usize {
    COLUMNS / dtype.block_len() * dtype.block_bytes()
}

/// Bytes of a tile; `None` for types without a place here.
pub fn tile_bytes(dtype: Dtype) -> Option<usize> {
    kind(dtype).map(|_| ROWS * row_bytes(dtype))
}

/// Makes a tile of the blocks of 16 rows, 256 columns each.
///
/// # Panics
/// For types without a place here, and when a length is wrong.
pub fn arrange(dtype: Dtype, rows: &[&[u8]; ROWS], tile: &mut [u8]) {
    let kind = kind(dtype).expect("a type with a place in this layout");
    assert_eq!(tile.len(), ROWS * row_bytes(dtype), "a tile of {dtype}");
    let mut quants: Quants = [[0; COLUMNS]; ROWS];
    for (row, quants) in rows.iter().zip(&mut quants) {
        assert_eq!(row.len(), row_bytes(dtype), "256 columns of {dtype}");
        (kind.unpack)(row, quants);
    }
    let mut rest = tile;
    for plane in kind.planes {
        let (out, later) = rest.split_at_mut(plane.bytes());
        match *plane {
            Plane::Nibbles => write_nibbles(&quants, out),
            Plane::TwoBits(shift) => write_two_bits(&quants, shift, out),
            Plane::OneBit(bit) => write_one_bit(&quants, bit, out),
            Plane::Bytes => write_bytes(&quants, out),
        }
        rest = later;
    }
    for side in kind.sides {
        for row in rows {
            let (out, later) = rest.split_at_mut(side.bytes());
            match *side {
                Side::Copy { start, len, stride, count } => {
                    for (i, out) in (0..count).zip(out.chunks_exact_mut(len)) {
                        let at = start + i * stride;
                        out.copy_from_slice(&row[at..at + len]);
                    }
                }
                Side::Scales => {
                    out[..4].copy_from_slice(&row[..4]);
                    let packed = row[4..16].try_into().expect("12 bytes of scales");
                    out[4..].copy_from_slice(&straight_scales(packed));
                }
            }
            rest = later;
        }
    }
    assert!(rest.is_empty(), "the planes and scales of {dtype} are its blocks' bytes");
}

/// The blocks of a tile: 16 rows of 256 columns, one row after the other, in `rows`.
///
/// # Panics
/// For types without a place here, and when a length is wrong.
pub fn restore(dtype: Dtype, tile: &[u8], rows: &mut [u8]) {
    let kind = kind(dtype).expect("a type with a place in this layout");
    assert_eq!((tile.len(), rows.len()), (ROWS * row_bytes(dtype), tile.len()), "a tile of {dtype}");
    let mut quants: Quants = [[0; COLUMNS]; ROWS];
    let mut rest = tile;
    for plane in kind.planes {
        let (bytes, later) = rest.split_at(plane.bytes());
        match *plane {
            Plane::Nibbles => read_nibbles(bytes, &mut quants),
            Plane::TwoBits(shift) => read_two_bits(bytes, shift, &mut quants),
            Plane::OneBit(bit) => read_one_bit(bytes, bit, &mut quants),
            Plane::Bytes => read_bytes(bytes, &mut quants),
        }
        rest = later;
    }
    for (row, quants) in rows.chunks_exact_mut(row_bytes(dtype)).zip(&quants) {
        (kind.pack)(quants, row);
    }
    for side in kind.sides {
        for row in rows.chunks_exact_mut(row_bytes(dtype)) {
            let (bytes, later) = rest.split_at(side.bytes());
            match *side {
                Side::Copy { start, len, stride, count } => {
                    for (i, bytes) in (0..count).zip(bytes.chunks_exact(len)) {
                        let at = start + i * stride;
                        row[at..at + len].copy_from_slice(bytes);
                    }
                }
                Side::Scales => {
                    row[..4].copy_from_slice(&bytes[..4]);
                    let straight = bytes[4..].try_into().expect("12 bytes of scales");
                    row[4..16].copy_from_slice(&ggml_scales(straight));
                }
            }
            rest = later;
        }
    }
}

/// The blocks of 16 whole rows of `columns` elements, one row after the other, from their tiles.
///
/// # Panics
/// As [`restore`], and when `columns` is no multiple of 256.
pub fn restore_strip(dtype: Dtype, columns: usize, strip: &[u8], rows: &mut Vec<u8>) {
    let (part, tiles) = (row_bytes(dtype), columns / COLUMNS);
    assert_eq!((columns % COLUMNS, strip.len()), (0, ROWS * tiles * part), "a strip of {dtype}");
    rows.resize(strip.len(), 0);
    let mut blocks = vec![0; ROWS * part];
    for (i, tile) in strip.chunks_exact(ROWS * part).enumerate() {
        restore(dtype, tile, &mut blocks);
        for (row, blocks) in rows.chunks_exact_mut(tiles * part).zip(blocks.chunks_exact(part)) {
            row[i * part..(i + 1) * part].copy_from_slice(blocks);
        }
    }
}

impl Plane {
    const fn bytes(self) -> usize {
        match self {
            Self::Nibbles => 2048,
            Self::TwoBits(_) => 1024,
            Self::OneBit(_) => 512,
            Self::Bytes => 4096,
        }
    }
}

impl Side {
    const fn bytes(self) -> usize {
        match self {
            Self::Copy { len, count, .. } => len * count,
            Self::Scales => 16,
        }
    }
}

/// Where the four columns that lane 4 g + t has of step s begin.
const fn column(step: usize, t: usize) -> usize {
    16 * step + 4 * t
}

fn write_nibbles(quants: &Quants, out: &mut [u8]) {
    for (g, (low, high)) in quants[..8].iter().zip(&quants[8..]).enumerate() {
        // Both rows of a lane in one byte each column.
        let mut both = [0; COLUMNS];
        for ((both, low), high) in both.iter_mut().zip(low).zip(high) {
            *both = low & 0x0f | high << 4;
        }
        for step in 0..16 {
            for t in 0..4 {
                let k = column(step, t);
                let at = step / 4 * 512 + (4 * g + t) * 16 + step % 4 * 4;
                out[at..at + 4].copy_from_slice(&[both[k], both[k + 2], both[k + 1], both[k + 3]]);
            }
        }
    }
}

fn read_nibbles(bytes: &[u8], quants: &mut Quants) {
    let (lows, highs) = quants.split_at_mut(8);
    for (g, (low, high)) in lows.iter_mut().zip(highs).enumerate() {
        for step in 0..16 {
            for t in 0..4 {
                let at = step / 4 * 512 + (4 * g + t) * 16 + step % 4 * 4;
                for (j, byte) in [0, 2, 1, 3].into_iter().zip(&bytes[at..at + 4]) {
                    low[column(step, t) + j] |= byte & 0x0f;
                    high[column(step, t) + j] |= byte >> 4;
                }
            }
        }
    }
}

fn write_two_bits(quants: &Quants, shift: u8, out: &mut [u8]) {
    for (g, (low, high)) in quants[..8].iter().zip(&quants[8..]).enumerate() {
        let mut both = [0; COLUMNS];
        for ((both, low), high) in both.iter_mut().zip(low).zip(high) {
            *both = low >> shift & 3 | (high >> shift & 3) << 4;
        }
        for step in 0..16 {
            for t in 0..4 {
                let k = column(step, t);
                // Word step % 8 / 2; its bytes are the first of the pairs of e = 0 and 1, then the second ones.
                let at = step / 8 * 512 + (4 * g + t) * 16 + step % 8 / 2 * 4 + step % 2;
                out[at] = both[k] | both[k + 2] << 2;
                out[at + 2] = both[k + 1] | both[k + 3] << 2;
            }
        }
    }
}

fn read_two_bits(bytes: &[u8], shift: u8, quants: &mut Quants) {
    let (lows, highs) = quants.split_at_mut(8);
    for (g, (low, high)) in lows.iter_mut().zip(highs).enumerate() {
        for step in 0..16 {
            for t in 0..4 {
                let at = step / 8 * 512 + (4 * g + t) * 16 + step % 8 / 2 * 4 + step % 2;
                let both = [bytes[at], bytes[at + 2], bytes[at] >> 2, bytes[at + 2] >> 2];
                for (k, both) in (column(step, t)..).zip(both) {
                    low[k] |= (both & 3) << shift;
                    high[k] |= (both >> 4 & 3) << shift;
                }
            }
        }
    }
}

fn write_one_bit(quants: &Quants, bit: u8, out: &mut [u8]) {
    for (g, (low, high)) in quants[..8].iter().zip(&quants[8..]).enumerate() {
        let mut both = [0; COLUMNS];
        for ((both, low), high) in both.iter_mut().zip(low).zip(high) {
            *both = low >> bit & 1 | (high >> bit & 1) << 4;
        }
        for t in 0..4 {
            for q in 0..4 {
                let (mut first, mut second) = (0u16, 0u16);
                for (e, at) in [0, 2, 8, 10].into_iter().enumerate() {
                    let k = column(4 * q + e, t);
                    first |= u16::from(both[k] | both[k + 2] << 1) << at;
                    second |= u16::from(both[k + 1] | both[k + 3] << 1) << at;
                }
                let at = (4 * g + t) * 16 + q * 4;
                let word = u32::from(first) | u32::from(second) << 16;
                out[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}

fn read_one_bit(bytes: &[u8], bit: u8, quants: &mut Quants) {
    let (lows, highs) = quants.split_at_mut(8);
    for (g, (low, high)) in lows.iter_mut().zip(highs).enumerate() {
        for step in 0..16 {
            for t in 0..4 {
                let at = (4 * g + t) * 16 + step / 4 * 4 + step % 4 / 2;
                let shift = step % 2 * 2;
                let (first, second) = (bytes[at] >> shift, bytes[at + 2] >> shift);
                for (k, both) in (column(step, t)..).zip([first, second, first >> 1, second >> 1]) {
                    low[k] |= (both & 1) << bit;
                    high[k] |= (both >> 4 & 1) << bit;
                }
            }
        }
    }
}

fn write_bytes(quants: &Quants, out: &mut [u8]) {
    for (g, (low, high)) in quants[..8].iter().zip(&quants[8..]).enumerate() {
        for step in 0..16 {
            for t in 0..4 {
                let k = column(step, t);
                let at = step / 2 * 512 + (4 * g + t) * 16 + step % 2 * 8;
                out[at..at + 4].copy_from_slice(&low[k..k + 4]);
                out[at + 4..at + 8].copy_from_slice(&high[k..k + 4]);
            }
        }
    }
}

fn read_bytes(bytes: &[u8], quants: &mut Quants) {
    let (lows, highs) = quants.split_at_mut(8);
    for (g, (low, high)) in lows.iter_mut().zip(highs).enumerate() {
        for step in 0..16 {
            for t in 0..4 {
                let k = column(step, t);
                let at = step / 2 * 512 + (4 * g + t) * 16 + step % 2 * 8;
                low[k..k + 4].copy_from_slice(&bytes[at..at + 4]);
                high[k..k + 4].copy_from_slice(&bytes[at + 4..at + 8]);
            }
        }
    }
}

// Sources of the blocks' own orders: `quant`, where each type is decoded.

/// 32 bytes hold 64 columns: the low nibbles the first 32, the high ones the others.
fn nibbles64(qs: &[u8], quants: &mut [u8; COLUMNS]) {
    for (qs, quants) in qs[..128].as_chunks::<32>().0.iter().zip(quants.as_chunks_mut::<64>().0) {
        let (low, high) = quants.split_at_mut(32);
        for ((low, high), q) in low.iter_mut().zip(high).zip(qs) {
            *low = q & 0x0f;
            *high = q >> 4;
        }
    }
}

fn pack_nibbles64(quants: &[u8; COLUMNS], qs: &mut [u8]) {
    for (qs, quants) in qs[..128].as_chunks_mut::<32>().0.iter_mut().zip(quants.as_chunks::<64>().0) {
        let (low, high) = quants.split_at(32);
        for (q, (low, high)) in qs.iter_mut().zip(low.iter().zip(high)) {
            *q = low & 0x0f | high << 4;
        }
    }
}

/// 16 bytes hold 32 columns; they begin at `start` and again every `stride` bytes.
fn nibbles32(blocks: &[u8], start: usize, stride: usize, quants: &mut [u8; COLUMNS]) {
    for (i, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (low, high) = quants.split_at_mut(16);
        for ((low, high), q) in low.iter_mut().zip(high).zip(&blocks[start + i * stride..][..16]) {
            *low = q & 0x0f;
            *high = q >> 4;
        }
    }
}

fn pack_nibbles32(quants: &[u8; COLUMNS], start: usize, stride: usize, blocks: &mut [u8]) {
    for (i, quants) in quants.as_chunks::<32>().0.iter().enumerate() {
        let (low, high) = quants.split_at(16);
        let qs = &mut blocks[start + i * stride..][..16];
        for (q, (low, high)) in qs.iter_mut().zip(low.iter().zip(high)) {
            *q = low & 0x0f | high << 4;
        }
    }
}

/// 32 bytes hold 128 columns, two bits for each 32.
fn two_bits(qs: &[u8], quants: &mut [u8; COLUMNS]) {
    for (i, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (quant, q) in quants.iter_mut().zip(&qs[i / 4 * 32..]) {
            *quant = q >> (i % 4 * 2) & 3;
        }
    }
}

fn pack_two_bits(quants: &[u8; COLUMNS], qs: &mut [u8]) {
    qs.fill(0);
    for (i, quants) in quants.as_chunks::<32>().0.iter().enumerate() {
        for (q, quant) in qs[i / 4 * 32..].iter_mut().zip(quants) {
            *q |= (quant & 3) << (i % 4 * 2);
        }
    }
}

/// Bit i of 32 bytes is of the i-th 32 columns; it becomes bit `bit`.
fn bits_by_group(bytes: &[u8], bit: u8, quants: &mut [u8; COLUMNS]) {
    for (i, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (quant, h) in quants.iter_mut().zip(&bytes[..32]) {
            *quant |= (h >> i & 1) << bit;
        }
    }
}

fn pack_bits_by_group(quants: &[u8; COLUMNS], bit: u8, bytes: &mut [u8]) {
    bytes[..32].fill(0);
    for (i, quants) in quants.as_chunks::<32>().0.iter().enumerate() {
        for (h, quant) in bytes.iter_mut().zip(quants) {
            *h |= (quant >> bit & 1) << i;
        }
    }
}

fn unpack_q5_k(block: &[u8], quants: &mut [u8; COLUMNS]) {
    nibbles64(&block[48..], quants);
    bits_by_group(&block[16..48], 4, quants);
}

fn pack_q5_k(quants: &[u8; COLUMNS], block: &mut [u8]) {
    pack_nibbles64(quants, &mut block[48..]);
    pack_bits_by_group(quants, 4, &mut block[16..48]);
}

fn unpack_q6_k(block: &[u8], quants: &mut [u8; COLUMNS]) {
    let (ql, qh) = (&block[..128], &block[128..192]);
    for (i, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, row) = (i / 4, i % 4);
        let low = &ql[half * 64 + row % 2 * 32..][..32];
        for (quant, (l, h)) in quants.iter_mut().zip(low.iter().zip(&qh[half * 32..])) {
            *quant = l >> (row / 2 * 4) & 0x0f | (h >> (row * 2) & 3) << 4;
        }
    }
}

fn pack_q6_k(quants: &[u8; COLUMNS], block: &mut [u8]) {
    block[..192].fill(0);
    let (ql, qh) = block[..192].split_at_mut(128);
    for (i, quants) in quants.as_chunks::<32>().0.iter().enumerate() {
        let (half, row) = (i / 4, i % 4);
        let low = &mut ql[half * 64 + row % 2 * 32..][..32];
        for (quant, (l, h)) in quants.iter().zip(low.iter_mut().zip(&mut qh[half * 32..])) {
            *l |= (quant & 0x0f) << (row / 2 * 4);
            *h |= (quant >> 4 & 3) << (row * 2);
        }
    }
}

fn unpack_q8_0(blocks: &[u8], quants: &mut [u8; COLUMNS]) {
    for (block, quants) in blocks.as_chunks::<34>().0.iter().zip(quants.as_chunks_mut::<32>().0) {
        for (quant, q) in quants.iter_mut().zip(&block[2..]) {
            *quant = q ^ 0x80;
        }
    }
}

fn pack_q8_0(quants: &[u8; COLUMNS], blocks: &mut [u8]) {
    for (block, quants) in blocks.as_chunks_mut::<34>().0.iter_mut().zip(quants.as_chunks::<32>().0) {
        for (quant, q) in quants.iter().zip(&mut block[2..]) {
            *q = quant ^ 0x80;
        }
    }
}

fn unpack_q5_0(blocks: &[u8], quants: &mut [u8; COLUMNS]) {
    nibbles32(blocks, 6, 22, quants);
    for (block, quants) in blocks.as_chunks::<22>().0.iter().zip(quants.as_chunks_mut::<32>().0) {
        for (i, quant) in quants.iter_mut().enumerate() {
            *quant |= (block[2 + i / 8] >> (i % 8) & 1) << 4;
        }
    }
}

fn pack_q5_0(quants: &[u8; COLUMNS], blocks: &mut [u8]) {
    pack_nibbles32(quants, 6, 22, blocks);
    for (block, quants) in blocks.as_chunks_mut::<22>().0.iter_mut().zip(quants.as_chunks::<32>().0) {
        block[2..6].fill(0);
        for (i, quant) in quants.iter().enumerate() {
            block[2 + i / 8] |= (quant >> 4 & 1) << (i % 8);
        }
    }
}

fn unpack_q3_k(block: &[u8], quants: &mut [u8; COLUMNS]) {
    two_bits(&block[32..96], quants);
    bits_by_group(&block[..32], 2, quants);
}

fn pack_q3_k(quants: &[u8; COLUMNS], block: &mut [u8]) {
    pack_two_bits(quants, &mut block[32..96]);
    pack_bits_by_group(quants, 2, &mut block[..32]);
}

/// Scale b at bit 6 b of the first 48 bits, minimum b likewise of the others.
fn straight_scales(packed: [u8; 12]) -> [u8; 12] {
    let mut numbers = [0u64; 2];
    for group in 0..8 {
        let i = group % 4;
        let (scale, min) = if group < 4 {
            (packed[i] & 0x3f, packed[i + 4] & 0x3f)
        } else {
            (packed[i + 8] & 0x0f | packed[i] >> 6 << 4, packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4)
        };
        numbers[0] |= u64::from(scale) << (6 * group);
        numbers[1] |= u64::from(min) << (6 * group);
    }
    let mut straight = [0; 12];
    straight[..6].copy_from_slice(&numbers[0].to_le_bytes()[..6]);
    straight[6..].copy_from_slice(&numbers[1].to_le_bytes()[..6]);
    straight
}

fn ggml_scales(straight: [u8; 12]) -> [u8; 12] {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
    let [scales, mins] = [number(&straight[..6]), number(&straight[6..])];
    let mut packed = [0; 12];
    for i in 0..4 {
        let of = |numbers: u64, group: usize| (numbers >> (6 * group) & 0x3f) as u8;
        packed[i] = of(scales, i) | of(scales, i + 4) >> 4 << 6;
        packed[i + 4] = of(mins, i) | of(mins, i + 4) >> 4 << 6;
        packed[i + 8] = of(scales, i + 4) & 0x0f | of(mins, i + 4) << 4;
    }
    packed
}
