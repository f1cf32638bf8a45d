//! What one step computes: tokens of several sequences, one after the other.

use kernels::shape::{MlaForm, Span};
use std::ops::Range;

/// From this many new tokens on, expanding keys and values per head costs less than moving every query into latent space.
pub const MATERIALISE_FROM: usize = 32;

/// The tokens of one step. Built by the scheduler, read by every rank.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    tokens: Vec<u32>,
    spans: Vec<BatchSpan>,
    logit_rows: Vec<usize>,
}

/// One sequence's part of a step.
#[derive(Clone, Debug)]
struct BatchSpan {
    rows: Range<usize>,
    cached: usize,
    blocks: Vec<u32>,
}

/// Which rows of a span need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: the prompt goes on in a later step.
    None,
    /// The last row: the next token is sampled from it.
    Last,
    /// Every row.
    All,
}

impl Batch {
    /// Forgets everything, keeping the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.spans.clear();
        self.logit_rows.clear();
    }

    /// Adds `tokens` of a sequence that has `cached` tokens in the cache `blocks`, which have room for all of them.
    pub fn push(&mut self, tokens: &[u32], cached: usize, blocks: &[u32], logits: Logits) {
        let rows = self.tokens.len()..self.tokens.len() + tokens.len();
        self.tokens.extend_from_slice(tokens);
        match logits {
            Logits::None => {}
            Logits::Last => self.logit_rows.push(rows.end - 1),
            Logits::All => self.logit_rows.extend(rows.clone()),
        }
        self.spans.push(BatchSpan { rows, cached, blocks: blocks.to_vec() });
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

    /// True without tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The spans as the kernels take them. The form depends on the span alone, never on what else is in the batch.
    pub fn spans(&self) -> Vec<Span<'_>> {
        let form = |span: &BatchSpan| match span.rows.len() {
            n if n < MATERIALISE_FROM => MlaForm::Absorbed,
            _ => MlaForm::Materialised,
        };
        self.spans
            .iter()
            .map(|span| Span {
                rows: span.rows.clone(),
                cached: span.cached,
                blocks: &span.blocks,
                form: form(span),
            })
            .collect()
    }
}
