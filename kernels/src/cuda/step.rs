//! What a step works on, at addresses that do not change, so that recorded work finds it there.

use super::driver::{Device, Memory, Staging, Stream};
use super::{Cache, CudaError};
use crate::step::{BLOCK_TOKENS, Step};
use crate::{StepLimits, StepRows};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Sizes of steps that are recorded: others are rounded up to the next where there is one.
pub(super) const BUCKETS: [usize; 5] = [1, 2, 4, 8, 16];

/// Lists of 32-bit numbers in one piece of memory: for each row its token, position, offset of its table in the blocks,
/// and cache slot; the logit rows; the blocks.
#[derive(Debug)]
pub(super) struct StepMemory {
    device: Arc<Device>,
    memory: Memory,
    staging: Staging,
    rows_capacity: usize,
    blocks_capacity: usize,
    /// The most rows that a step may be rounded up to.
    padded_rows: usize,
    /// A block that no sequence has.
    spare_block: Option<usize>,
    words: Vec<u32>,
    rows: StepRows,
    bucket: Option<usize>,
    /// One more than the largest slot that the step touches.
    slots_end: usize,
    /// Positions that all sequences have together.
    cached: usize,
}

/// The lists that have one number for each row.
const ROW_LISTS: usize = 5;

impl StepMemory {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let (rows, blocks) = (64, 1024);
        let bytes = Self::words(rows, blocks) * 4;
        Ok(Self {
            device: Arc::clone(device),
            memory: Memory::new(device, bytes, "the steps' tokens")?,
            staging: Staging::new(device, bytes)?,
            rows_capacity: rows,
            blocks_capacity: blocks,
            padded_rows: 0,
            spare_block: None,
            words: Vec::new(),
            rows: StepRows { rows: 0, logit_rows: 0 },
            bucket: None,
            slots_end: 0,
            cached: 0,
        })
    }

    fn words(rows: usize, blocks: usize) -> usize {
        ROW_LISTS * rows + blocks
    }

    /// Makes room. Work that was recorded before is of no use afterwards if it says so.
    pub(super) fn grow(&mut self, rows: usize, blocks: usize) -> Result<bool, CudaError> {
        if rows <= self.rows_capacity && blocks <= self.blocks_capacity {
            return Ok(false);
        }
        let rows = rows.max(self.rows_capacity).next_power_of_two();
        let blocks = blocks.max(self.blocks_capacity).next_power_of_two();
        let bytes = Self::words(rows, blocks) * 4;
        self.memory = Memory::new(&self.device, bytes, "the steps' tokens")?;
        self.staging = Staging::new(&self.device, bytes)?;
        (self.rows_capacity, self.blocks_capacity) = (rows, blocks);
        Ok(true)
    }

    /// Steps will keep to these limits, and may be rounded up within them.
    pub(super) fn limit(&mut self, limits: StepLimits) -> Result<bool, CudaError> {
        self.padded_rows = limits.max_rows.min(limits.max_logit_rows);
        self.grow(limits.max_rows.max(limits.max_logit_rows), limits.cache_blocks + 1)
    }

    /// Names a block that no sequence has: rows that round a step up write there.
    pub(super) fn spare(&mut self, block: usize) {
        self.spare_block = Some(block);
    }

    /// Hands a step to the device. True: what was recorded before is of no use any more.
    pub(super) fn begin(&mut self, step: &Step, stream: &Stream) -> Result<bool, CudaError> {
        let own = StepRows::of(step);
        let decodes =
            own.rows == own.logit_rows && (0..step.span_count()).all(|i| step.span(i).rows.len() == 1);
        let fits = |&bucket: &usize| bucket >= own.rows && bucket <= self.padded_rows;
        let bucket = self.spare_block.filter(|_| decodes).and_then(|_| BUCKETS.iter().position(fits));
        let rows = bucket.map_or(own.rows, |bucket| BUCKETS[bucket]);
        let logit_rows = if bucket.is_some() { rows } else { own.logit_rows };
        let grown = self.grow(rows.max(logit_rows), step.blocks().len() + 1)?;
        self.bucket = bucket;
        self.rows = StepRows { rows, logit_rows };
        self.pack(step);
        let bytes = self.words.len() * 4;
        self.staging.fill()?[..bytes].copy_from_slice(self.words.as_bytes());
        self.staging.send(0, bytes, stream, &self.memory, 0);
        Ok(grown)
    }

    fn pack(&mut self, step: &Step) {
        let capacity = self.rows_capacity;
        let word = |n: usize| u32::try_from(n).expect("positions and slots are below 2^31");
        self.words.clear();
        self.words.resize(ROW_LISTS * capacity, 0);
        self.words.extend_from_slice(step.blocks());
        let (mut first_block, mut largest) = (0, 0);
        for span in step.spans() {
            for row in span.rows.clone() {
                let position = span.position(row);
                let slot = span.slot(position);
                largest =
                    largest.max(span.blocks[..=position / BLOCK_TOKENS].iter().copied().max().unwrap_or(0));
                for (list, value) in [step.tokens()[row], word(position), word(first_block), word(slot)]
                    .into_iter()
                    .enumerate()
                {
                    self.words[list * capacity + row] = value;
                }
            }
            first_block += span.blocks.len();
        }
        let mut end = (largest as usize + 1) * BLOCK_TOKENS;
        for (i, &row) in step.logit_rows().iter().enumerate() {
            self.words[4 * capacity + i] = word(row);
        }
        if let (Some(_), Some(spare)) = (self.bucket, self.spare_block) {
            self.words.push(word(spare));
            for row in step.rows()..self.rows.rows {
                let values = [0, 0, word(step.blocks().len()), word(spare * BLOCK_TOKENS), word(row)];
                for (list, value) in values.into_iter().enumerate() {
                    self.words[list * capacity + row] = value;
                }
            }
            end = end.max((spare + 1) * BLOCK_TOKENS);
        }
        self.cached = step.spans().map(|span| span.cached + span.rows.len()).sum();
        self.slots_end = if self.rows.rows == 0 { 0 } else { end };
    }

    pub(super) fn rows(&self) -> StepRows {
        self.rows
    }

    /// Positions in the cache that the step attends to.
    pub(super) fn cached(&self) -> usize {
        self.cached
    }

    /// Which of [`BUCKETS`] the step is, if any.
    pub(super) fn bucket(&self) -> Option<usize> {
        self.bucket
    }

    /// # Panics
    /// When the step touches slots that `cache` does not have.
    pub(super) fn fits(&self, cache: &Cache) {
        assert!(self.slots_end <= cache.slots, "slots up to {} of {}", self.slots_end, cache.slots);
    }

    fn list(&self, i: usize) -> u64 {
        self.memory.address() + (i * self.rows_capacity * 4) as u64
    }

    pub(super) fn tokens(&self) -> u64 {
        self.list(0)
    }

    pub(super) fn positions(&self) -> u64 {
        self.list(1)
    }

    pub(super) fn tables(&self) -> u64 {
        self.list(2)
    }

    pub(super) fn slots(&self) -> u64 {
        self.list(3)
    }

    pub(super) fn logit_rows(&self) -> u64 {
        self.list(4)
    }

    pub(super) fn blocks(&self) -> u64 {
        self.list(ROW_LISTS)
    }
}
