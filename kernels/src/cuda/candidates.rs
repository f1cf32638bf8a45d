//! Candidates of rows of logits, chosen on the device: a few kilobytes a row cross the bus instead of a vocabulary.
#![expect(
    unsafe_code,
    reason = "launching a kernel is unsafe: nobody can check what it does with its pointers"
)]

use super::compile::Unit;
use super::driver::{Cost, Kernel, Launch, Memory, Module, Staging, Start, Stream};
use super::kernels::{grid, int, launch};
use super::{Buffer, CudaError};
use crate::candidates::{Candidates, MOST_CANDIDATES, MOST_EDITS, Selection, sort};
use std::ptr::from_mut;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// As in candidates.cu.
const THREADS: usize = 1024;
const NONE: u32 = u32::MAX;
const WANTS_LIST: u32 = 1;
const WANTS_RAW: u32 = 2;

const KERNEL: &str = "candidates";
const EDIT_BYTES: usize = 16;

/// Rows of one launch.
const ROWS: usize = 64;

/// The most dynamic shared memory; the kernel has some of its own.
pub(super) const SHARED_BYTES: usize = 64 << 10;
/// The widest row: a bit of each column is in shared memory.
pub(super) const MOST_WIDTH: usize = SHARED_BYTES * 8;

/// As in candidates.cu.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Asked {
    row: u32,
    first_edit: u32,
    edits: u32,
    first_word: u32,
    words: u32,
    wants: u32,
    divisor: f32,
    unused: u32,
}

/// As in candidates.cu.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Found {
    fault: u32,
    best: u32,
    listed: u32,
    faulty: f32,
    largest: f32,
    floor: f32,
    raw_largest: f32,
    unused: f32,
    rest: f64,
    raw_sum: f64,
    ids: [u32; MOST_CANDIDATES],
    logits: [f32; MOST_CANDIDATES],
}

/// The kernel, and what is asked and found in fixed memory.
#[derive(Debug)]
pub(super) struct Chooser {
    kernel: Kernel,
    /// Rows asked for, their edits, bits of tokens that may come.
    sheet: Memory,
    staging: Staging,
    found: Memory,
    answers: Vec<Found>,
    /// Words of one row's bits.
    words: usize,
}

impl Chooser {
    /// For masks of up to `words` words a row.
    pub(super) fn new(stream: &Stream, words: usize) -> Result<Self, CudaError> {
        let device = stream.device();
        let module = Module::of(device, &Unit::candidates())?;
        let bytes = Self::words_at() + ROWS * words * 4;
        Ok(Self {
            kernel: module.kernel(KERNEL, Unit::dynamic_shared_bytes(KERNEL))?,
            sheet: Memory::new(device, bytes, "the sampler")?,
            staging: Staging::new(device, bytes)?,
            found: Memory::new(device, ROWS * size_of::<Found>(), "the sampler")?,
            answers: vec![Found::new_zeroed(); ROWS],
            words,
        })
    }

    /// Words of one row's bits that there is room for.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    fn edits_at() -> usize {
        ROWS * size_of::<Asked>()
    }

    fn words_at() -> usize {
        Self::edits_at() + MOST_EDITS * EDIT_BYTES
    }

    /// Appends to `out` what each of the rows comes to, in their order.
    pub(super) fn choose(
        &mut self,
        stream: &Stream,
        logits: &Buffer,
        width: usize,
        first: u32,
        mut asked: &[(usize, &Selection)],
        out: &mut Vec<Candidates>,
    ) -> Result<(), CudaError> {
        while !asked.is_empty() {
            let mut edits = 0;
            let fits = |(_, selection): &&(usize, &Selection)| {
                edits += selection.edits.len();
                edits <= MOST_EDITS
            };
            let now = asked.iter().take(ROWS).take_while(fits).count();
            assert!(now > 0, "more edits of a row than there is room for");
            self.run(stream, logits, width, first, &asked[..now], out)?;
            asked = &asked[now..];
        }
        Ok(())
    }

    fn run(
        &mut self,
        stream: &Stream,
        logits: &Buffer,
        width: usize,
        first: u32,
        asked: &[(usize, &Selection)],
        out: &mut Vec<Candidates>,
    ) -> Result<(), CudaError> {
        let word = |n: usize| u32::try_from(n).expect("few rows, edits and words");
        let sheet = self.staging.fill()?;
        let (mut edits, mut masks) = (0, 0);
        for (at, &(row, selection)) in asked.iter().enumerate() {
            logits.holds((row + 1) * width);
            let mask = selection.allowed.as_deref();
            let mask_words = mask.map_or(0, |mask| mask.len().min(self.words));
            let of_row = Asked {
                row: word(row),
                first_edit: word(edits),
                edits: word(selection.edits.len()),
                first_word: word(masks),
                words: mask.map_or(NONE, |_| word(mask_words)),
                wants: u32::from(selection.wants_list()) * WANTS_LIST
                    + u32::from(selection.logprobs) * WANTS_RAW,
                divisor: selection.divisor(),
                unused: 0,
            };
            let to = at * size_of::<Asked>();
            sheet[to..to + size_of::<Asked>()].copy_from_slice(of_row.as_bytes());
            for edit in &selection.edits {
                let to = Self::edits_at() + edits * EDIT_BYTES;
                let values = [edit.id, edit.bias.to_bits(), edit.repetition.to_bits(), edit.minus.to_bits()];
                sheet[to..to + EDIT_BYTES].copy_from_slice(values.as_bytes());
                edits += 1;
            }
            let to = Self::words_at() + masks * 4;
            let bits = &mask.unwrap_or(&[])[..mask_words];
            sheet[to..to + mask_words * 4].copy_from_slice(bits.as_bytes());
            masks += mask_words;
        }
        self.staging.send(0, asked.len() * size_of::<Asked>(), stream, &self.sheet, 0);
        for (start, bytes) in [(Self::edits_at(), edits * EDIT_BYTES), (Self::words_at(), masks * 4)] {
            self.staging.send(start, bytes, stream, &self.sheet, start);
        }
        let at = |offset: usize| self.sheet.address() + offset as u64;
        // SAFETY: a block for each row that is asked for; rows of `width` lie in the logits, edits and words in the sheet: checked above.
        unsafe {
            launch!(stream, self.kernel, [asked.len(), 1, 1], THREADS, width.div_ceil(32) * 4;
                logits.address(), at(0), at(Self::edits_at()), at(Self::words_at()), self.found.address(), int(width), first);
        }
        let answers = &mut self.answers[..asked.len()];
        stream.read(&self.found, 0, answers.as_mut_bytes());
        stream.finish()?;
        out.extend(answers.iter().map(Found::candidates));
        Ok(())
    }
}

impl Found {
    fn candidates(&self) -> Candidates {
        let listed = (self.listed as usize).min(MOST_CANDIDATES);
        let list = self.ids.iter().copied().zip(self.logits.iter().copied()).take(listed);
        let mut list: Vec<(u32, f32)> = list.collect();
        sort(&mut list);
        Candidates {
            fault: (self.fault != NONE).then_some((self.fault, self.faulty)),
            best: (self.best != NONE).then_some((self.best, self.largest)),
            list,
            floor: self.floor,
            rest: self.rest,
            raw_largest: self.raw_largest,
            raw_sum: self.raw_sum,
        }
    }
}
