//! What one step computes: tokens of several sequences, one after the other.

use std::ops::Range;

/// Tokens of one cache block. Blocks are the unit in which a sequence's cache is laid out.
pub const BLOCK_TOKENS: usize = 64;

/// From this many new tokens on, expanding keys and values per head costs less than moving every query into latent space.
pub const MATERIALISE_FROM: usize = 32;

/// The tokens of one step: made by a scheduler, read by every rank, and handed to a backend once, before its operations.
///
/// All lists are flat, so that a copy into another step of sufficient size allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct Step {
    tokens: Vec<u32>,
    spans: Vec<SpanEntry>,
    /// Cache blocks of all spans, one span after the other.
    blocks: Vec<u32>,
    logit_rows: Vec<usize>,
}

/// One sequence's part of a step: from where to where in the lists, as pairs because ranges cannot be copied.
#[derive(Clone, Copy, Debug)]
struct SpanEntry {
    rows: (usize, usize),
    cached: usize,
    blocks: (usize, usize),
    form: MlaForm,
}

/// Two forms of the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlaForm {
    /// Queries move into the latent space; nothing is expanded per head. For few new tokens.
    Absorbed,
    /// Keys and values are expanded per head. For many new tokens.
    Materialised,
}

/// Which rows of a span need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: the prompt goes on in a later step.
    None,
    /// The last row: the next token is sampled from it.
    Last,
    /// Every row.
    All,
}

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct Span<'a> {
    /// Its rows in the step, consecutive.
    pub rows: Range<usize>,
    /// Tokens of this sequence that are already in the cache: the position of its first row.
    pub cached: usize,
    /// Cache blocks in order: position `p` lives in `blocks[p / BLOCK_TOKENS]` at `p % BLOCK_TOKENS`. Long enough for all rows.
    pub blocks: &'a [u32],
    /// Which form attention takes, where a backend has both.
    pub form: MlaForm,
}

impl Span<'_> {
    /// Position of the step's row `row`, which must be one of this span's.
    pub fn position(&self, row: usize) -> usize {
        self.cached + (row - self.rows.start)
    }

    /// Cache slot of position `position`: block times [`BLOCK_TOKENS`] plus the place in it.
    pub fn slot(&self, position: usize) -> usize {
        self.blocks[position / BLOCK_TOKENS] as usize * BLOCK_TOKENS + position % BLOCK_TOKENS
    }
}

impl Step {
    /// Forgets everything, keeping the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.spans.clear();
        self.blocks.clear();
        self.logit_rows.clear();
    }

    /// Adds `tokens` of a sequence that has `cached` tokens in the cache `blocks`, which have room for all of them. The form of
    /// attention depends on the span alone, never on what else is in the step.
    pub fn push(&mut self, tokens: &[u32], cached: usize, blocks: &[u32], logits: LogitRows) {
        let form = if tokens.len() < MATERIALISE_FROM { MlaForm::Absorbed } else { MlaForm::Materialised };
        self.push_as(form, tokens, cached, blocks, logits);
    }

    /// The same with a form of attention of choice.
    pub fn push_as(
        &mut self,
        form: MlaForm,
        tokens: &[u32],
        cached: usize,
        blocks: &[u32],
        logits: LogitRows,
    ) {
        let rows = self.tokens.len()..self.tokens.len() + tokens.len();
        let first_block = self.blocks.len();
        self.tokens.extend_from_slice(tokens);
        self.blocks.extend_from_slice(blocks);
        self.spans.push(SpanEntry {
            rows: (rows.start, rows.end),
            cached,
            blocks: (first_block, self.blocks.len()),
            form,
        });
        match logits {
            LogitRows::None => {}
            LogitRows::Last => self.logit_rows.extend(rows.last()),
            LogitRows::All => self.logit_rows.extend(rows),
        }
    }

    /// Becomes a copy of `other` without new memory where there is enough.
    pub fn copy_from(&mut self, other: &Self) {
        self.tokens.clone_from(&other.tokens);
        self.spans.clone_from(&other.spans);
        self.blocks.clone_from(&other.blocks);
        self.logit_rows.clone_from(&other.logit_rows);
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of tokens.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Rows whose logits are computed, in order.
    pub fn logit_rows(&self) -> &[usize] {
        &self.logit_rows
    }

    /// Cache blocks of all spans, one span after the other.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// True without tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Number of parts.
    pub fn span_count(&self) -> usize {
        self.spans.len()
    }

    /// Part `i`.
    ///
    /// # Panics
    /// When there is none.
    pub fn span(&self, i: usize) -> Span<'_> {
        let SpanEntry { rows, cached, blocks, form } = self.spans[i];
        Span { rows: rows.0..rows.1, cached, blocks: &self.blocks[blocks.0..blocks.1], form }
    }

    /// The parts, in order.
    pub fn spans(&self) -> impl Iterator<Item = Span<'_>> {
        (0..self.spans.len()).map(|i| self.span(i))
    }
}
