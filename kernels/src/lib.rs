//! Arithmetic of latent-attention and mixture-of-experts models. No files and no tensor names: those end in `runtime`.
//!
//! [`Backend`] lists the operations; [`reference::Reference`] is the slow, obvious twin that every other backend is
//! tested against; [`cpu::Cpu`] is the fast one for processors, [`cuda::Cuda`] the one for NVIDIA's GPUs.

mod backend;
pub mod candidates;
pub mod cpu;
pub mod cuda;
mod error;
pub mod reference;
pub mod rounding;
pub mod shape;
pub mod step;

pub use backend::{
    Backend, ExpertWeights, HostBuffer, MlpWeights, MoeBuffers, MoeWeights, Pass, StepLimits, StepRows,
};
pub use error::Error;
