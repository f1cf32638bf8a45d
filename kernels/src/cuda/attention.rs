//! Latent attention for widths that tensor cores like.
#![expect(
    unsafe_code,
    reason = "launching a kernel is unsafe: nobody can check what it does with its pointers"
)]

use super::compile::{Tiling, Unit};
use super::driver::{Cost, Device, Kernel, Launch, Module, Start, Stream};
use super::kernels::Store;
use super::{Buffer, Cache, CudaError, StepMemory, Weight};
use crate::shape::MlaShape;
use crate::step::Step;
use formats::Dtype;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::from_mut;

/// Pieces of a context that are attended to at the same time. The same for every step, so that a row's bits are too.
const SPLITS: usize = 32;
/// Tiles of 32 positions that a piece has at least.
const LEAST_TILES: usize = 1;
/// Positions whose keys and values are expanded at a time.
const CAPACITY: usize = 4096;
/// From this many rows of one sequence on they are.
const EXPAND_FROM: usize = 17;
/// Rows of one launch; those of one sequence are always together.
const FEW: usize = 64;

/// The kernels for one set of widths.
#[derive(Debug)]
pub(super) struct Attention {
    widths: [usize; 4],
    absorb: Kernel,
    attend: Kernel,
    project: Kernel,
    expand: Kernel,
    prefill: Kernel,
    rows: usize,
    threads: usize,
}

/// Working memory, whose sizes [`Attention::sizes`] gives.
#[derive(Debug)]
pub(super) struct Pieces {
    /// Queries in the latent space.
    pub absorbed: Buffer,
    /// `[T, heads, SPLITS, kv_lora]`
    pub part: Buffer,
    /// `[T, heads, SPLITS, 2]`
    pub softmax: Buffer,
    /// `[heads, CAPACITY, nope]` as F16
    pub keys: Buffer,
    /// `[heads, CAPACITY, v]` as F16
    pub values: Buffer,
    /// `[T, heads, 2]`
    pub state: Buffer,
}

/// What a launch works on.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// Rows of one or more sequences, few of each.
    Few(Range<usize>),
    /// Rows of one sequence, from a position on, whose table begins at a place in the blocks.
    Many { rows: Range<usize>, cached: usize, table: usize },
}

/// Widths that the kernels are compiled for: nope, rope, v, latent; `None` where they have none for this shape.
pub(super) fn widths(device: &Device, shape: &MlaShape) -> Option<[usize; 4]> {
    let MlaShape { nope, rope, v, kv_lora, .. } = *shape;
    let heads = [nope, rope, v].iter().all(|&width| width > 0 && width.is_multiple_of(8));
    let fits = heads
        && kv_lora > 0
        && kv_lora.is_multiple_of(16)
        && kv_lora <= 512
        && nope <= 256
        && v <= 256
        && rope <= 128;
    (fits && device.capability() >= (9, 0)).then_some([nope, rope, v, kv_lora])
}

impl Attention {
    pub(super) fn new(stream: &Stream, widths: [usize; 4]) -> Result<Self, CudaError> {
        let device = stream.device();
        let module = Module::of(device, &Unit::attention(widths))?;
        let [attend, project, expand, prefill, rows, threads] =
            module.integers("mla_launch")?.map(|n: i32| usize::try_from(n).unwrap_or(0));
        Ok(Self {
            widths,
            absorb: module.kernel("mla_absorb", 0)?,
            attend: module.kernel("mla_attend", attend)?,
            project: module.kernel("mla_project", project)?,
            expand: module.kernel("mla_expand", expand)?,
            prefill: module.kernel("mla_prefill", prefill)?,
            rows,
            threads,
        })
    }

    pub(super) fn widths(&self) -> [usize; 4] {
        self.widths
    }

    /// Whether a step's attention begins with a kernel that can store its latents and keys: one launch takes all of its rows.
    pub(super) fn stores(step: &Step, rows: usize, heads: usize) -> bool {
        heads > 0 && parts(step, rows) == [Part::Few(0..rows)]
    }

    /// Whether `kv_b` is as the kernels read it.
    pub(super) fn takes(kv_b: &Weight) -> bool {
        (kv_b.form.dtype, kv_b.form.tiling) == (Dtype::BF16, Tiling::Rows)
    }

    /// Values of each of [`Pieces`]' buffers that a step needs.
    pub(super) fn sizes(&self, heads: usize, step: &Step, rows: usize) -> [usize; 6] {
        let [nope, rope, v, latent] = self.widths;
        let parts = parts(step, rows);
        let most = |wanted: bool| {
            let len = |part: &Part| match part {
                Part::Few(rows) => (!wanted).then_some(rows.len()),
                Part::Many { rows, .. } => wanted.then_some(rows.len()),
            };
            parts.iter().filter_map(len).max().unwrap_or(0)
        };
        let (few, many) = (most(false), most(true));
        let capacity = if many > 0 { CAPACITY } else { 0 };
        [
            few * heads.div_ceil(8) * (latent + rope).div_ceil(16) * 128,
            few * heads * SPLITS * latent,
            few * heads * SPLITS * 2,
            heads * capacity * nope / 2,
            heads * capacity * v / 2,
            many * heads * 2,
        ]
    }

    /// `out` `[rows, heads * v]` for rotated queries `q`.
    #[expect(
        clippy::too_many_arguments,
        reason = "the operation's own, where the step lies, and working memory"
    )]
    pub(super) fn run(
        &self,
        stream: &Stream,
        shape: &MlaShape,
        step: &Step,
        memory: &StepMemory,
        q: &Buffer,
        kv_b: &Weight,
        cache: &Cache,
        pieces: &Pieces,
        store: &Store,
        out: &Buffer,
    ) {
        let rows = memory.rows().rows;
        q.holds(rows * shape.q_width());
        out.holds(rows * shape.out_width());
        assert_eq!(cache.width, shape.cache_width(), "width of the cache");
        memory.fits(cache);
        let sizes = self.sizes(shape.heads, step, rows);
        let Pieces { absorbed, part, softmax, keys, values, state } = pieces;
        for (buffer, size) in [absorbed, part, softmax, keys, values, state].into_iter().zip(sizes) {
            buffer.holds(size);
        }
        if shape.heads == 0 {
            return;
        }
        for part in parts(step, rows) {
            match part {
                Part::Few(rows) => {
                    self.few(stream, shape, memory, [q, out], kv_b, cache, pieces, store, &rows);
                }
                Part::Many { rows, cached, table } => {
                    self.many(stream, shape, memory, [q, out], kv_b, cache, pieces, &rows, [cached, table]);
                }
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a part of `run`")]
    fn few(
        &self,
        stream: &Stream,
        shape: &MlaShape,
        memory: &StepMemory,
        [q, out]: [&Buffer; 2],
        kv_b: &Weight,
        cache: &Cache,
        pieces: &Pieces,
        store: &Store,
        rows: &Range<usize>,
    ) {
        let (heads, tokens, latent) = (shape.heads, rows.len(), shape.kv_lora);
        let row = |list: u64| list + (rows.start * 4) as u64;
        let q = q.address() + (rows.start * shape.q_width() * 4) as u64;
        let out = out.address() + (rows.start * shape.out_width() * 4) as u64;
        let [absorbed, part, softmax] =
            [&pieces.absorbed, &pieces.part, &pieces.softmax].map(|buffer| buffer.address());
        let groups = heads.div_ceil(8);
        let grid = [latent.div_ceil(32) + 1 + usize::from(store.kv != 0), heads, tokens.div_ceil(16)];
        let cost = kv_b.cost(heads * shape.nope);
        // SAFETY: sizes as `run` checked them, for a part of the rows.
        unsafe {
            launch(
                stream,
                &self.absorb,
                grid,
                128,
                0,
                cost,
                &mut [
                    from_mut(&mut { q }).cast(),
                    from_mut(&mut { kv_b.address }).cast(),
                    from_mut(&mut { absorbed }).cast(),
                    from_mut(&mut { int(tokens) }).cast(),
                    from_mut(&mut { int(heads) }).cast(),
                    from_mut(&mut { shape.softmax_scale }).cast(),
                    from_mut(&mut { *store }).cast(),
                ],
            )
        };
        let cost = Cost { bytes: (memory.cached() * cache.width * 2) as u64, weight: None };
        let room = self.attend.room();
        // SAFETY: as above; the step's blocks are inside the cache.
        unsafe {
            launch(
                stream,
                &self.attend,
                [SPLITS, tokens, groups],
                256,
                room,
                cost,
                &mut [
                    from_mut(&mut { absorbed }).cast(),
                    from_mut(&mut { cache.address() }).cast(),
                    from_mut(&mut { row(memory.positions()) }).cast(),
                    from_mut(&mut { row(memory.tables()) }).cast(),
                    from_mut(&mut { memory.blocks() }).cast(),
                    from_mut(&mut { part }).cast(),
                    from_mut(&mut { softmax }).cast(),
                    from_mut(&mut { int(heads) }).cast(),
                    from_mut(&mut { int(SPLITS) }).cast(),
                    from_mut(&mut { int(LEAST_TILES) }).cast(),
                ],
            )
        };
        let (grid, cost) = ([8, heads, tokens.div_ceil(8)], kv_b.cost(heads * shape.v));
        // SAFETY: as above.
        unsafe {
            launch(
                stream,
                &self.project,
                grid,
                256,
                self.project.room(),
                cost,
                &mut [
                    from_mut(&mut { part }).cast(),
                    from_mut(&mut { softmax }).cast(),
                    from_mut(&mut { kv_b.address }).cast(),
                    from_mut(&mut { row(memory.positions()) }).cast(),
                    from_mut(&mut { out }).cast(),
                    from_mut(&mut { int(tokens) }).cast(),
                    from_mut(&mut { int(heads) }).cast(),
                    from_mut(&mut { int(SPLITS) }).cast(),
                    from_mut(&mut { int(LEAST_TILES) }).cast(),
                ],
            )
        };
    }

    #[expect(clippy::too_many_arguments, reason = "a part of `run`")]
    fn many(
        &self,
        stream: &Stream,
        shape: &MlaShape,
        memory: &StepMemory,
        [q, out]: [&Buffer; 2],
        kv_b: &Weight,
        cache: &Cache,
        pieces: &Pieces,
        rows: &Range<usize>,
        [cached, table]: [usize; 2],
    ) {
        let (heads, tokens) = (shape.heads, rows.len());
        let context = cached + tokens;
        let q = q.address() + (rows.start * shape.q_width() * 4) as u64;
        let out = out.address() + (rows.start * shape.out_width() * 4) as u64;
        let [keys, values, state] = [&pieces.keys, &pieces.values, &pieces.state].map(|b| b.address());
        for start in (0..context).step_by(CAPACITY) {
            let length = CAPACITY.min(context - start);
            let grid = [shape.kv_b_rows().div_ceil(128), length.div_ceil(128), 1];
            let cost = kv_b.cost(shape.kv_b_rows());
            // SAFETY: sizes as `run` checked them; the sequence's blocks reach to its context.
            unsafe {
                launch(
                    stream,
                    &self.expand,
                    grid,
                    256,
                    self.expand.room(),
                    cost,
                    &mut [
                        from_mut(&mut { cache.address() }).cast(),
                        from_mut(&mut { memory.blocks() }).cast(),
                        from_mut(&mut { kv_b.address }).cast(),
                        from_mut(&mut { keys }).cast(),
                        from_mut(&mut { values }).cast(),
                        from_mut(&mut { int(heads) }).cast(),
                        from_mut(&mut { int(table) }).cast(),
                        from_mut(&mut { int(start) }).cast(),
                        from_mut(&mut { int(length) }).cast(),
                        from_mut(&mut { int(CAPACITY) }).cast(),
                    ],
                )
            };
            let grid = [tokens.div_ceil(self.rows) * heads, 1, 1];
            let cost = Cost { bytes: (length * cache.width * 2) as u64, weight: None };
            // SAFETY: as above.
            unsafe {
                launch(
                    stream,
                    &self.prefill,
                    grid,
                    self.threads,
                    self.prefill.room(),
                    cost,
                    &mut [
                        from_mut(&mut { q }).cast(),
                        from_mut(&mut { keys }).cast(),
                        from_mut(&mut { values }).cast(),
                        from_mut(&mut { cache.address() }).cast(),
                        from_mut(&mut { memory.blocks() }).cast(),
                        from_mut(&mut { out }).cast(),
                        from_mut(&mut { state }).cast(),
                        from_mut(&mut { int(tokens) }).cast(),
                        from_mut(&mut { int(heads) }).cast(),
                        from_mut(&mut { int(cached) }).cast(),
                        from_mut(&mut { int(table) }).cast(),
                        from_mut(&mut { int(start) }).cast(),
                        from_mut(&mut { int(length) }).cast(),
                        from_mut(&mut { int(CAPACITY) }).cast(),
                        from_mut(&mut { i32::from(start > 0) }).cast(),
                        from_mut(&mut { i32::from(start + length < context) }).cast(),
                        from_mut(&mut { shape.softmax_scale }).cast(),
                    ],
                )
            };
        }
    }
}

/// How a step's rows are launched: `rows` may be more than the step's own, which it is rounded up to.
fn parts(step: &Step, rows: usize) -> Vec<Part> {
    let mut parts = Vec::new();
    let (mut few, mut table) = (0..0, 0);
    for span in step.spans() {
        let many = span.rows.len() >= EXPAND_FROM;
        if !few.is_empty() && (many || few.len() + span.rows.len() > FEW) {
            parts.push(Part::Few(few.clone()));
            few = span.rows.start..span.rows.start;
        }
        if many {
            parts.push(Part::Many { rows: span.rows.clone(), cached: span.cached, table });
            few = span.rows.end..span.rows.end;
        } else {
            few.end = span.rows.end;
        }
        table += span.blocks.len();
    }
    few.end = few.end.max(rows);
    if !few.is_empty() {
        parts.push(Part::Few(few));
    }
    parts
}

fn int(n: usize) -> i32 {
    i32::try_from(n).expect("a model's sizes are below 2^31")
}

/// Arguments are made inside the call: what they point to lives that long and no longer.
///
/// # Safety
/// As [`Stream::launch`].
unsafe fn launch(
    stream: &Stream,
    kernel: &Kernel,
    grid: [usize; 3],
    threads: usize,
    shared_bytes: usize,
    cost: Cost,
    arguments: &mut [*mut c_void],
) {
    let wide = |n: usize| u32::try_from(n).expect("a launch's sizes are small");
    let (grid, threads, shared_bytes) = (grid.map(wide), wide(threads), wide(shared_bytes));
    let shape = Launch { grid, threads, shared_bytes, cost, start: Start::Early };
    // SAFETY: the caller's promises; all of these kernels wait before they read what others wrote.
    unsafe { stream.launch(kernel, shape, arguments) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::LogitRows;

    #[test]
    fn rows_of_a_sequence_stay_together() {
        let mut step = Step::default();
        let mut push = |rows: usize, cached, blocks: &[u32]| {
            step.push(&vec![0; rows], cached, blocks, LogitRows::None);
        };
        push(1, 5, &[0]);
        push(40, 100, &[1, 2, 3]);
        push(16, 0, &[4]);
        (0..4).for_each(|_| push(15, 0, &[5]));
        let expected = [
            Part::Few(0..1),
            Part::Many { rows: 1..41, cached: 100, table: 1 },
            Part::Few(41..102),
            Part::Few(102..117),
        ];
        assert_eq!(parts(&step, 117), expected);
        let mut one = Step::default();
        one.push(&[0], 0, &[0], LogitRows::Last);
        assert_eq!(parts(&one, 2), [Part::Few(0..2)]);
    }
}
