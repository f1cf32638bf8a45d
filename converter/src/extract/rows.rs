//! Rows of a tensor as f32, wherever they come from.

use crate::Error;
use crate::plan::Planned;
use crate::transform::{Region, Scratch, Transform, fill};
use formats::checkpoint::RankShard;
use formats::config::AttentionConfig;
use formats::gguf::GgufSet;
use formats::layout::{Layout, mma16};
use formats::manifest::{Shard, TensorEntry};
use formats::name::LayerRole;
use formats::{Dtype, LayerIdx, Shape, TensorName, TensorView, quant};
use std::ops::Range;

/// A tensor that can be decoded row by row.
pub(super) struct Rows<'a> {
    shape: Shape,
    /// The tensors that it is made from, with their types.
    pub(super) made_from: Vec<String>,
    source: Source<'a>,
    values: Vec<f32>,
}

enum Source<'a> {
    View(TensorView),
    /// A native tensor, made here and now.
    Made {
        transform: &'a Transform,
        views: Vec<TensorView>,
        bytes: Vec<u8>,
        scratch: Scratch,
    },
    Ranks(Parts),
    /// The key half of kv_b_proj, each head transposed back: `[H, R, nope]`.
    Keys {
        kv_b: Parts,
        nope: usize,
        v: usize,
    },
    /// The value half of kv_b_proj: `[H, v, R]`.
    Values {
        kv_b: Parts,
        nope: usize,
        v: usize,
    },
    /// Gate and up of each expert in one: `[E, 2 * Fe, hidden]`.
    Fused {
        gate: Parts,
        up: Parts,
    },
}

impl<'a> Rows<'a> {
    pub(super) fn view(view: TensorView, made_from: Vec<String>) -> Self {
        Self::new(view.shape().clone(), made_from, Source::View(view))
    }

    pub(super) fn planned(set: &GgufSet, tensor: &'a Planned) -> Result<Self, Error> {
        let sources = tensor.transform.sources();
        let made_from = sources.iter().map(|s| format!("{} ({})", s.name, s.dtype)).collect();
        let views =
            sources.iter().filter_map(|s| set.view(&s.name).transpose()).collect::<Result<Vec<_>, _>>()?;
        let source = Source::Made {
            transform: &tensor.transform,
            views,
            bytes: Vec::new(),
            scratch: Scratch::default(),
        };
        Ok(Self::new(tensor.shape.clone(), made_from, source))
    }

    fn new(shape: Shape, made_from: Vec<String>, source: Source<'a>) -> Self {
        Self { shape, made_from, source, values: Vec::new() }
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The values of some rows, one after the other.
    pub(super) fn decode(&mut self, rows: Range<u64>) -> Result<&[f32], Error> {
        let columns = self.shape.row_len() as usize;
        let count = (rows.end - rows.start) as usize;
        self.values.resize(count * columns, 0.0);
        match &mut self.source {
            Source::View(view) => decode_rows(view, rows, &mut self.values)?,
            Source::Made { transform, views, bytes, scratch } => {
                let dtype = transform.dtype();
                let row_bytes = dtype.bytes_for(columns as u64).expect("rows are whole blocks");
                bytes.resize(count * row_bytes as usize, 0);
                fill(
                    transform,
                    views,
                    &Region::Whole,
                    &Layout::Ggml,
                    rows.start * row_bytes,
                    bytes,
                    scratch,
                )?;
                quant::decode(dtype, bytes, &mut self.values)?;
            }
            other => {
                for (row, out) in rows.zip(self.values.chunks_exact_mut(columns.max(1))) {
                    other.row(row, out)?;
                }
            }
        }
        Ok(&self.values)
    }
}

impl Source<'_> {
    /// One row of a tensor that the ranks have in pieces.
    fn row(&mut self, row: u64, out: &mut [f32]) -> Result<(), Error> {
        match self {
            Self::View(_) | Self::Made { .. } => unreachable!("decoded many rows at a time"),
            Self::Ranks(parts) => parts.row(row, out),
            Self::Values { kv_b, nope, v } => {
                let (head, within) = (row / *v as u64, row % *v as u64);
                kv_b.row(head * (*nope + *v) as u64 + *nope as u64 + within, out)
            }
            Self::Keys { kv_b, nope, v } => {
                let rank = kv_b.shape.row_len();
                let (head, latent) = (row / rank, (row % rank) as usize);
                kv_b.load_head(head, *nope, *v)?;
                for (out, key) in out.iter_mut().zip(kv_b.head.chunks_exact(rank as usize)) {
                    *out = key[latent];
                }
                Ok(())
            }
            Self::Fused { gate, up } => {
                let width = gate.shape.dims()[1];
                let (expert, within) = (row / (2 * width), row % (2 * width));
                let (half, within) = if within < width { (gate, within) } else { (up, within - width) };
                half.row(expert * width + within, out)
            }
        }
    }
}

/// The ranks' parts of one native tensor.
struct Parts {
    shape: Shape,
    dtype: Dtype,
    parts: Vec<Part>,
    /// Key rows of the head at hand, for [`Source::Keys`].
    head: Vec<f32>,
    head_at_hand: Option<u64>,
}

/// What one rank has of it.
struct Part {
    shard: Shard,
    /// In the order of `layout`.
    view: TensorView,
    layout: Layout,
    /// Rows of blocks of the strip of tiles at hand, and which strip that is.
    strip: Vec<u8>,
    strip_at_hand: Option<u64>,
}

impl Part {
    fn decode_row(&mut self, row: u64, out: &mut [f32]) -> Result<(), Error> {
        if self.layout == Layout::Ggml {
            return decode_rows(&self.view, row..row + 1, out);
        }
        let (row_bytes, rows) = (self.view.row_bytes(), mma16::ROWS as u64);
        let (strip, within) = (row / rows, (row % rows) as usize);
        let (dtype, columns) = (self.view.dtype(), self.view.shape().row_len() as usize);
        if self.strip_at_hand != Some(strip) {
            let start = strip as usize * mma16::ROWS * row_bytes;
            let tiles = &self.view.bytes()[start..start + mma16::ROWS * row_bytes];
            mma16::restore_strip(dtype, columns, tiles, &mut self.strip);
            self.strip_at_hand = Some(strip);
        }
        Ok(quant::decode(dtype, &self.strip[within * row_bytes..(within + 1) * row_bytes], out)?)
    }
}

impl Parts {
    /// A row of the whole tensor: from the rank that has it, or pieced together from all ranks' columns.
    fn row(&mut self, row: u64, out: &mut [f32]) -> Result<(), Error> {
        let dims = self.shape.dims();
        let last = dims.len() - 1;
        for part in &mut self.parts {
            match part.shard {
                Shard::Whole(_) => return part.decode_row(row, out),
                Shard::Cut { axis, start, len } if axis == last => {
                    let columns = &mut out[start as usize..(start + len) as usize];
                    part.decode_row(row, columns)?;
                }
                Shard::Cut { axis, start, len } => {
                    // Rows inside one index of the axis, and the index itself.
                    let inside: u64 = dims[axis + 1..last].iter().product();
                    let index = row / inside % dims[axis];
                    if (start..start + len).contains(&index) {
                        let outer = row / inside / dims[axis];
                        let local = (outer * len + index - start) * inside + row % inside;
                        return part.decode_row(local, out);
                    }
                }
            }
        }
        Ok(())
    }

    fn load_head(&mut self, head: u64, nope: usize, v: usize) -> Result<(), Error> {
        if self.head_at_hand == Some(head) {
            return Ok(());
        }
        let rank = self.shape.row_len() as usize;
        let mut keys = std::mem::take(&mut self.head);
        keys.resize(nope * rank, 0.0);
        for (i, out) in (0..).zip(keys.chunks_exact_mut(rank)) {
            self.row(head * (nope + v) as u64 + i, out)?;
        }
        self.head = keys;
        self.head_at_hand = Some(head);
        Ok(())
    }
}

fn decode_rows(view: &TensorView, rows: Range<u64>, out: &mut [f32]) -> Result<(), Error> {
    let bytes = rows.start as usize * view.row_bytes()..rows.end as usize * view.row_bytes();
    Ok(quant::decode(view.dtype(), &view.bytes()[bytes], out)?)
}

/// Finds tensors in the rank files of a checkpoint.
pub(super) struct CheckpointRows<'a> {
    ranks: &'a [RankShard],
    attention: &'a AttentionConfig,
}

impl<'a> CheckpointRows<'a> {
    pub(super) fn new(ranks: &'a [RankShard], attention: &'a AttentionConfig) -> Self {
        Self { ranks, attention }
    }

    /// The tensor of this name; `None` when the checkpoint has no such tensor and none that it could be made from.
    pub(super) fn rows(&self, name: TensorName) -> Result<Option<Rows<'a>>, Error> {
        if let Some(native) = name.native() {
            let Some(parts) = self.parts(&native)? else { return Ok(None) };
            let made_from = vec![format!("{native} ({}) of {} ranks", parts.dtype, self.ranks.len())];
            return Ok(Some(Rows::new(parts.shape.clone(), made_from, Source::Ranks(parts))));
        }
        if let TensorName::LayerScale(layer, LayerRole::ExpertsGateUpProj) = name {
            return self.fused_scale(layer, &name.gguf());
        }
        let TensorName::Layer(layer, role) = name else { return Ok(None) };
        let sister = |role| TensorName::Layer(layer, role).native().unwrap_or_default();
        if role == LayerRole::ExpertsGateUpProj {
            return self.fused(&sister(LayerRole::ExpertsGateProj), &sister(LayerRole::ExpertsUpProj));
        }
        let native = sister(LayerRole::KvBProj);
        let Some(kv_b) = self.parts(&native)? else { return Ok(None) };
        let (nope, v) = (self.attention.qk_nope_head_dim, self.attention.v_head_dim);
        let heads = self.attention.num_attention_heads as u64;
        let rank = self.attention.kv_lora_rank as u64;
        let expected = [heads * (nope + v) as u64, rank];
        if kv_b.shape.dims() != expected {
            let found = kv_b.shape.to_string();
            return Err(Error::tensor(self.ranks[0].path(), &native, format!("shape {expected:?}"), found));
        }
        let made_from = vec![format!("{native} ({}) of {} ranks", kv_b.dtype, self.ranks.len())];
        let (shape, source) = if role == LayerRole::AttnKB {
            ([heads, rank, nope as u64], Source::Keys { kv_b, nope, v })
        } else {
            ([heads, v as u64, rank], Source::Values { kv_b, nope, v })
        };
        Ok(Some(Rows::new(Shape::new(&shape)?, made_from, source)))
    }

    /// The scale of a fused tensor, which both halves have; of two tensors that were never one there is none.
    fn fused_scale(&self, layer: LayerIdx, gguf: &str) -> Result<Option<Rows<'a>>, Error> {
        let scale = TensorName::LayerScale(layer, LayerRole::ExpertsGateProj);
        let native = scale.native().unwrap_or_default();
        let is_its = self.ranks[0].entry(&native).is_some_and(|entry| entry.source == [gguf]);
        if is_its { self.rows(scale) } else { Ok(None) }
    }

    fn fused(&self, gate_name: &str, up_name: &str) -> Result<Option<Rows<'a>>, Error> {
        let (Some(gate), Some(up)) = (self.parts(gate_name)?, self.parts(up_name)?) else { return Ok(None) };
        if gate.shape != up.shape || gate.shape.dims().len() != 3 {
            let found = format!("{} and {}", gate.shape, up.shape);
            return Err(Error::tensor(
                self.ranks[0].path(),
                up_name,
                "the shape of the gate projection",
                found,
            ));
        }
        let shape = gate.shape.with_dim(1, 2 * gate.shape.dims()[1]);
        let made_from = vec![format!("{gate_name} ({})", gate.dtype), format!("{up_name} ({})", up.dtype)];
        Ok(Some(Rows::new(shape, made_from, Source::Fused { gate, up })))
    }

    fn parts(&self, native: &str) -> Result<Option<Parts>, Error> {
        let entries: Vec<Option<&TensorEntry>> = self.ranks.iter().map(|rank| rank.entry(native)).collect();
        let Some(first) = entries[0] else { return Ok(None) };
        let mut parts = Vec::with_capacity(entries.len());
        let mut end = 0;
        for (rank, entry) in self.ranks.iter().zip(entries) {
            let damaged = || {
                let expected = "parts that make up the whole tensor; check it with `shardmill verify`";
                Error::tensor(rank.path(), native, expected, "others")
            };
            let entry = entry.filter(|e| (e.dtype, &e.full_shape) == (first.dtype, &first.full_shape));
            let entry = entry.ok_or_else(damaged)?;
            match (entry.shard, first.shard) {
                (Shard::Whole(_), Shard::Whole(_)) => {}
                (Shard::Cut { axis, start, len }, Shard::Cut { axis: same, .. })
                    if axis == same && start == end =>
                {
                    end += len;
                }
                _ => return Err(damaged()),
            }
            parts.push(Part {
                shard: entry.shard,
                view: rank.arranged(entry)?,
                layout: entry.layout.clone(),
                strip: Vec::new(),
                strip_at_hand: None,
            });
        }
        if let Shard::Cut { axis, .. } = first.shard
            && end != first.full_shape.dims()[axis]
        {
            let expected = format!("{} indices of axis {axis}", first.full_shape.dims()[axis]);
            return Err(Error::tensor(self.ranks[0].path(), native, expected, end.to_string()));
        }
        let shape = first.full_shape.clone();
        Ok(Some(Parts { shape, dtype: first.dtype, parts, head: Vec::new(), head_at_hand: None }))
    }
}
