//! Copies in the layout for tensor cores: tile by tile out of the mapped source, so that a stretch may begin and end anywhere.

use super::{Runs, SourceTensor, check_finite};
use crate::Error;
use formats::TensorView;
use formats::layout::mma16::{self, COLUMNS, ROWS};

/// As [`super::fill`], of a region whose rows have `columns` elements.
pub(super) fn copy(
    source: &SourceTensor,
    runs: &Runs,
    view: &TensorView,
    columns: u64,
    from: u64,
    out: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<(), Error> {
    let bytes = view.bytes();
    let tile_bytes = mma16::tile_bytes(source.dtype).expect("planned for types that have tiles");
    let part = tile_bytes / ROWS;
    let tiles = columns / COLUMNS as u64;
    let row_bytes = tiles as usize * part;
    // Where in the source the rows of the strip at hand begin.
    let mut starts = [0; ROWS];
    let mut strip_at_hand = None;
    let (mut at, mut rest) = (from, out);
    while !rest.is_empty() {
        let (index, within) = (at / tile_bytes as u64, (at % tile_bytes as u64) as usize);
        let (strip, column) = (index / tiles, (index % tiles) as usize * part);
        if strip_at_hand != Some(strip) {
            starts = std::array::from_fn(|i| runs.place((strip * ROWS as u64 + i as u64) * row_bytes as u64));
            strip_at_hand = Some(strip);
        }
        if column == 0 {
            starts.iter().try_for_each(|&start| check_finite(source, bytes, start..start + row_bytes))?;
        }
        let rows = starts.map(|start| &bytes[start + column..start + column + part]);
        let n = (tile_bytes - within).min(rest.len());
        let (now, later) = rest.split_at_mut(n);
        if n == tile_bytes {
            mma16::arrange(source.dtype, &rows, now);
        } else {
            scratch.resize(tile_bytes, 0);
            mma16::arrange(source.dtype, &rows, scratch);
            now.copy_from_slice(&scratch[within..within + n]);
        }
        at += n as u64;
        rest = later;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::transform::{Half, Region, Scratch, SourceTensor, Transform, fill};
    use bytes::Bytes;
    use formats::layout::{Layout, mma16};
    use formats::{Dtype, Shape, TensorView};

    /// Every part, in pieces that begin and end inside tiles, is what its own rows make, strip by strip.
    #[test]
    fn any_stretch_of_any_part_is_that_of_whole_tiles() {
        let dtype = Dtype::Q4_K;
        let dims = [3u64, 64, 1024];
        let shape = Shape::new(&dims).unwrap();
        let len = dtype.bytes_for(shape.elements()).unwrap() as usize;
        let bytes: Vec<u8> =
            (0..len).map(|i| if i % 144 < 4 { 0x11 } else { (i * 31 % 251) as u8 }).collect();
        let tensor = SourceTensor { name: "experts".to_owned(), dtype, shape: shape.clone() };
        let views = [TensorView::new("experts", dtype, shape, Bytes::from(bytes)).unwrap()];
        let copy = Transform::Copy(tensor.clone());
        let half = |half| Transform::CopyHalf { source: tensor.clone(), half };
        let regions = [
            (copy.clone(), Region::Whole, 192, 1024),
            (copy.clone(), Region::Range { axis: 0, indices: 1..3 }, 128, 1024),
            (copy.clone(), Region::Range { axis: 1, indices: 16..48 }, 96, 1024),
            (copy.clone(), Region::Range { axis: 2, indices: 256..768 }, 192, 512),
            (copy, Region::Range { axis: 2, indices: 512..512 }, 192, 0),
            (half(Half::First), Region::Whole, 96, 1024),
            (half(Half::Second), Region::Range { axis: 1, indices: 16..32 }, 48, 1024),
        ];
        for (transform, region, rows, columns) in regions {
            let row_bytes = columns as usize / 256 * 144;
            let made = |layout: &Layout, step: usize| {
                let mut out = vec![0; rows * row_bytes];
                let mut scratch = Scratch::default();
                for (i, piece) in out.chunks_mut(step).enumerate() {
                    fill(&transform, &views, &region, layout, (i * step) as u64, piece, &mut scratch)
                        .unwrap();
                }
                out
            };
            let blocks = made(&Layout::Ggml, 5000);
            for step in [1000, 2304, 12_345] {
                let mut restored = Vec::new();
                let mut strip = Vec::new();
                for tiles in made(&Layout::Mma16, step).chunks(16 * row_bytes.max(1)) {
                    mma16::restore_strip(dtype, columns as usize, tiles, &mut strip);
                    restored.extend_from_slice(&strip);
                }
                assert!(restored == blocks, "{region:?}, {step} bytes at a time");
            }
        }
    }

    #[test]
    fn a_scale_that_is_no_number_is_named_in_tiles_too() {
        let shape = Shape::new(&[32, 512]).unwrap();
        let tensor = SourceTensor { name: "q".to_owned(), dtype: Dtype::Q8_0, shape: shape.clone() };
        let mut bytes = vec![1; 32 * 16 * 34];
        bytes[300 * 34..300 * 34 + 2].copy_from_slice(&0xfc00u16.to_le_bytes());
        let views = [TensorView::new("q", Dtype::Q8_0, shape, Bytes::from(bytes)).unwrap()];
        let mut out = vec![0; 32 * 16 * 34];
        let transform = Transform::Copy(tensor);
        let said =
            fill(&transform, &views, &Region::Whole, &Layout::Mma16, 0, &mut out, &mut Scratch::default());
        assert!(said.unwrap_err().to_string().contains("-inf in block 300 of Q8_0"));
    }
}
