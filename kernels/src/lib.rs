//! Arithmetic of latent-attention and mixture-of-experts models. No files and no tensor names: those end in `runtime`.
//!
//! [`Backend`] lists the operations; [`reference::Reference`] is the slow, obvious twin that every other backend is
//! tested against; [`cpu::Cpu`] is the fast one for processors.

mod backend;
pub mod cpu;
mod error;
pub mod reference;
pub mod shape;

pub use backend::{Backend, ExpertWeights, HostBuffer};
pub use error::Error;
