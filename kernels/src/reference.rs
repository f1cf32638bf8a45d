//! The slow, obvious twin of every operation.
