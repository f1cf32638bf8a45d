//! Requests that belong to each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests that are answered by the same weights, whatever is loaded meanwhile: the choices of one answer. Clones belong
/// together.
#[derive(Clone, Debug, Default)]
pub struct Together(Arc<AtomicU64>);

impl Together {
    /// Which weights began one of them; 0 where none has begun.
    pub(super) fn generation(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn begin(&self, generation: u64) {
        self.0.store(generation, Ordering::Relaxed);
    }

    /// Whether there are others than this one.
    pub(super) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}
