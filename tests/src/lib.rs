//! Fixtures that the end-to-end tests share.
