//! The backend for processors.
