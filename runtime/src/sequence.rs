//! One sequence: its tokens, how far they are in the cache, and where it must end.

use crate::kv_cache::BlockId;

/// A sequence's number, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// A prompt and what was generated after it.
#[derive(Debug)]
pub struct Sequence {
    id: SeqId,
    tokens: Vec<u32>,
    cached: usize,
    max_len: usize,
    blocks: Vec<BlockId>,
}

impl Sequence {
    /// A sequence of which nothing is cached. `max_len` bounds prompt and answer together.
    pub fn new(id: SeqId, prompt: Vec<u32>, max_len: usize) -> Self {
        Self { id, tokens: prompt, cached: 0, max_len, blocks: Vec::new() }
    }

    /// Its number.
    pub fn id(&self) -> SeqId {
        self.id
    }

    /// Prompt and answer so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that are in the cache.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Tokens that are not in the cache yet: the rest of the prompt, or the last generated one.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// Its cache blocks, room for `max_len` tokens once it runs.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Most tokens that it will ever have.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// True when no further token fits.
    pub fn is_full(&self) -> bool {
        self.tokens.len() >= self.max_len
    }

    pub(crate) fn admit(&mut self, blocks: Vec<BlockId>) {
        self.blocks = blocks;
    }

    pub(crate) fn release(&mut self) -> Vec<BlockId> {
        self.cached = 0;
        std::mem::take(&mut self.blocks)
    }

    pub(crate) fn mark_cached(&mut self, tokens: usize) {
        self.cached += tokens;
    }

    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }
}
