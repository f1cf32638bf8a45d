//! Blocks of the latent cache: who has which, and which hold the beginning of a prompt that may come again.

use kernels::step::BLOCK_TOKENS;
use std::collections::{BTreeMap, HashMap};

/// A cache block: [`BLOCK_TOKENS`] consecutive positions of one sequence, in every layer and on every rank.
pub type BlockId = u32;

/// What a full block of a prompt holds: the digest of all tokens up to its end. Equal hashes are equal prefixes, as far as
/// BLAKE3 is collision-free, so that one client's prefix never stands for another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// The hash of a block of tokens behind the block `before`, or at the beginning.
    pub fn chain(before: Option<Self>, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&before.map_or([0; 32], |hash| hash.0));
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// What the first block of a prompt comes behind, so that it is found only by prompts with the same salt.
    pub fn salt(salt: &str) -> Self {
        Self(blake3::derive_key("shardmill prefix cache salt", salt.as_bytes()))
    }
}

/// All blocks. A block is in use by any number of sequences, or kept because of what it holds, or free. Layout and contents
/// of the cache are the device's.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<BlockId>,
    blocks: Vec<Block>,
    by_hash: HashMap<BlockHash, BlockId>,
    /// Blocks that nobody uses and whose contents are known, by when they were given back.
    kept: BTreeMap<u64, BlockId>,
    next_tick: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    users: u32,
    hash: Option<BlockHash>,
    /// Its key in `kept` while it is there.
    tick: u64,
}

impl BlockPool {
    /// A pool of `total` free blocks.
    pub fn new(total: usize) -> Self {
        let last = u32::try_from(total).expect("a cache of less than 2^32 blocks");
        Self {
            free: (0..last).rev().collect(),
            blocks: vec![Block::default(); total],
            by_hash: HashMap::new(),
            kept: BTreeMap::new(),
            next_tick: 0,
        }
    }

    /// Blocks that `tokens` positions take.
    pub fn blocks_for(tokens: usize) -> usize {
        tokens.div_ceil(BLOCK_TOKENS)
    }

    /// `count` blocks of unknown contents, or `None` and nothing taken when there are fewer. Kept blocks go when no free one
    /// is left, the longest unused first.
    pub fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.available() {
            return None;
        }
        Some((0..count).map(|_| self.take_one()).collect())
    }

    /// The block that holds what `hash` stands for, with one more user.
    pub fn find(&mut self, hash: &BlockHash) -> Option<BlockId> {
        let id = *self.by_hash.get(hash)?;
        let block = &mut self.blocks[id as usize];
        if block.users == 0 {
            self.kept.remove(&block.tick);
        }
        block.users += 1;
        Some(id)
    }

    /// Says what a block holds from now on, so that [`Self::find`] can find it. Where another block holds the same, that one
    /// stays the one that is found.
    pub fn publish(&mut self, id: BlockId, hash: BlockHash) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.users > 0, "a block is published by who computed it");
        if block.hash.is_none() && !self.by_hash.contains_key(&hash) {
            block.hash = Some(hash);
            self.by_hash.insert(hash, id);
        }
    }

    /// Gives a sequence's blocks back, in their order. Those with known contents are kept as long as nobody needs the room;
    /// of one sequence's blocks the last go first, since nothing can be found behind a hole.
    pub fn give_back(&mut self, blocks: Vec<BlockId>) {
        for id in blocks.into_iter().rev() {
            let block = &mut self.blocks[id as usize];
            assert!(block.users > 0, "block {id} was given back twice");
            block.users -= 1;
            if block.users > 0 {
                continue;
            }
            if block.hash.is_some() {
                block.tick = self.next_tick;
                self.kept.insert(self.next_tick, id);
                self.next_tick += 1;
            } else {
                self.free.push(id);
            }
        }
    }

    /// Blocks that nobody uses.
    pub fn available(&self) -> usize {
        self.free.len() + self.kept.len()
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    fn take_one(&mut self) -> BlockId {
        let id = self.free.pop().unwrap_or_else(|| {
            let (_, id) = self.kept.pop_first().expect("the caller has counted");
            let hash = self.blocks[id as usize].hash.take().expect("kept blocks have a hash");
            self.by_hash.remove(&hash);
            id
        });
        self.blocks[id as usize].users = 1;
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(token: u32) -> BlockHash {
        BlockHash::chain(None, &[token])
    }

    #[test]
    fn a_hash_is_of_all_that_came_before() {
        let (a, b) = (BlockHash::chain(None, &[1, 2]), BlockHash::chain(None, &[2, 1]));
        assert_ne!(a, b);
        assert_ne!(BlockHash::chain(Some(a), &[3]), BlockHash::chain(Some(b), &[3]));
        assert_ne!(BlockHash::chain(Some(a), &[3]), BlockHash::chain(None, &[3]));
        assert_eq!(BlockHash::chain(Some(a), &[3]), BlockHash::chain(Some(a), &[3]));
    }

    #[test]
    fn known_blocks_are_found_until_their_room_is_needed() {
        let mut pool = BlockPool::new(3);
        let mine = pool.take(2).unwrap();
        pool.publish(mine[0], hash(0));
        pool.publish(mine[1], hash(1));
        assert_eq!(pool.find(&hash(0)), Some(mine[0]), "in use, by two now");
        pool.give_back(vec![mine[0]]);
        pool.give_back(mine.clone());
        assert_eq!(pool.available(), 3);
        let other = pool.take(2).unwrap();
        assert!(!other.contains(&mine[0]), "the free block and the last of the sequence go first");
        assert_eq!((pool.find(&hash(1)), pool.find(&hash(0))), (None, Some(mine[0])));
        assert_eq!((pool.available(), pool.take(1)), (0, None));
        pool.give_back(vec![mine[0]]);
        pool.give_back(other);
        assert_eq!(pool.available(), 3);
    }

    #[test]
    fn of_two_equal_blocks_one_is_found() {
        let mut pool = BlockPool::new(2);
        let (a, b) = (pool.take(1).unwrap(), pool.take(1).unwrap());
        pool.publish(a[0], hash(7));
        pool.publish(b[0], hash(7));
        assert_eq!(pool.find(&hash(7)), Some(a[0]));
        pool.give_back(vec![a[0]]);
        pool.give_back(a);
        pool.give_back(b);
        assert_eq!(pool.take(2).map(|all| all.len()), Some(2));
        assert_eq!(pool.find(&hash(7)), None);
    }
}
