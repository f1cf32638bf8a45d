//! Blocks of the latent cache: who has which.

use kernels::step::BLOCK_TOKENS;

/// A cache block: [`BLOCK_TOKENS`] consecutive positions of one sequence, in every layer and on every rank.
pub type BlockId = u32;

/// The free blocks. Layout and contents of the cache are the device's.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<BlockId>,
    total: usize,
}

impl BlockPool {
    /// A pool of `total` free blocks.
    pub fn new(total: usize) -> Self {
        let last = u32::try_from(total).expect("a cache of less than 2^32 blocks");
        Self { free: (0..last).rev().collect(), total }
    }

    /// Blocks that `tokens` positions take.
    pub fn blocks_for(tokens: usize) -> usize {
        tokens.div_ceil(BLOCK_TOKENS)
    }

    /// `count` blocks, or `None` and nothing taken when there are fewer.
    pub fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let rest = self.free.len().checked_sub(count)?;
        Some(self.free.split_off(rest))
    }

    /// Gives blocks back.
    pub fn give_back(&mut self, blocks: Vec<BlockId>) {
        self.free.extend(blocks);
        debug_assert!(self.free.len() <= self.total, "a block was given back twice");
    }

    /// Blocks that nobody has.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.total
    }
}
