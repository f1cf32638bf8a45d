//! One sequence: its tokens, how far they are in the cache, and where it must end.

use crate::kv_cache::{BlockHash, BlockId};
use kernels::step::BLOCK_TOKENS;

/// A sequence's number, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// Whether a prompt's beginning may come from the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// What is cached need not be computed.
    Reuse,
    /// Every position is computed, since its logits are wanted.
    Compute,
}

/// A prompt and what was generated after it.
#[derive(Debug)]
pub struct Sequence {
    id: SeqId,
    tokens: Vec<u32>,
    prompt: usize,
    cached: usize,
    max_len: usize,
    prefix: Prefix,
    blocks: Vec<BlockId>,
    /// What the first block's hash begins with.
    salt: Option<BlockHash>,
    /// Of the prompt's full blocks, as far as they were needed.
    hashes: Vec<BlockHash>,
    /// How many leading blocks have told the pool what they hold, or came from it.
    known: usize,
    reused: usize,
    /// The most tokens that ever were in the cache.
    furthest: usize,
    /// The round in which its prompt last got a chunk.
    pub(crate) served: u64,
}

impl Sequence {
    /// A sequence of which nothing is cached. `max_len` bounds prompt and answer together.
    pub fn new(id: SeqId, prompt: Vec<u32>, max_len: usize, prefix: Prefix) -> Self {
        Self {
            id,
            prompt: prompt.len(),
            tokens: prompt,
            cached: 0,
            max_len,
            prefix,
            blocks: Vec::new(),
            salt: None,
            hashes: Vec::new(),
            known: 0,
            reused: 0,
            furthest: 0,
            served: 0,
        }
    }

    /// The same, but only prompts with the same salt share its blocks.
    pub fn salted(self, salt: Option<BlockHash>) -> Self {
        Self { salt, ..self }
    }

    /// Its number.
    pub fn id(&self) -> SeqId {
        self.id
    }

    /// Prompt and answer so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens of the prompt.
    pub fn prompt(&self) -> usize {
        self.prompt
    }

    /// Tokens that are in the cache.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Tokens of the prompt that came from the prefix cache when they were first needed.
    pub fn reused(&self) -> usize {
        self.reused
    }

    /// Tokens that are not in the cache yet: the rest of the prompt, or the last generated one.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// Its cache blocks, room for the cached tokens and those of the step at hand.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Most tokens that it will ever have.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Whether its prompt's beginning may come from the prefix cache.
    pub fn prefix(&self) -> Prefix {
        self.prefix
    }

    /// True when no further token fits.
    pub fn is_full(&self) -> bool {
        self.tokens.len() >= self.max_len
    }

    /// The hash of the prompt's block `at`, all of whose tokens are the prompt's.
    pub(crate) fn hash(&mut self, at: usize) -> BlockHash {
        debug_assert!((at + 1) * BLOCK_TOKENS <= self.prompt, "a full block of the prompt");
        while self.hashes.len() <= at {
            let start = self.hashes.len() * BLOCK_TOKENS;
            let block = &self.tokens[start..start + BLOCK_TOKENS];
            self.hashes.push(BlockHash::chain(self.hashes.last().copied().or(self.salt), block));
        }
        self.hashes[at]
    }

    pub(crate) fn append_blocks(&mut self, blocks: Vec<BlockId>) {
        self.blocks.extend(blocks);
    }

    /// Takes over blocks that hold the tokens behind those that are cached.
    pub(crate) fn reuse(&mut self, blocks: Vec<BlockId>) {
        let tokens = blocks.len() * BLOCK_TOKENS;
        self.blocks.extend(blocks);
        self.known = self.blocks.len();
        let before = self.cached.max(self.furthest);
        self.mark_cached(tokens);
        // What an interrupted sequence finds again was counted before.
        self.reused += self.cached.saturating_sub(before);
    }

    pub(crate) fn release(&mut self) -> Vec<BlockId> {
        self.cached = 0;
        self.known = 0;
        std::mem::take(&mut self.blocks)
    }

    pub(crate) fn mark_cached(&mut self, tokens: usize) {
        self.cached += tokens;
        self.furthest = self.furthest.max(self.cached);
    }

    /// The prompt's blocks that have become full since the last call, with their hashes.
    pub(crate) fn newly_full(&mut self) -> Vec<(BlockId, BlockHash)> {
        let full = self.cached.min(self.prompt) / BLOCK_TOKENS;
        let blocks = (self.known..full).map(|at| (self.blocks[at], self.hash(at))).collect();
        self.known = self.known.max(full);
        blocks
    }

    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }
}
