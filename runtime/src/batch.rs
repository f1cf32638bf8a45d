//! What one step computes, under the names that the scheduler's side uses.

pub use kernels::step::{LogitRows as Logits, MATERIALISE_FROM, Step as Batch};
