//! The converter on real files: the bundled model, what lies in `../shared`, and small models made here byte by byte.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod archs;
mod cli;
mod convert;
mod extract;
mod faults;
mod files;
mod hostile;
mod made;
mod page;
mod reference;
mod resume;
mod rules;
mod scales;
mod tokenizer;
mod verify;
