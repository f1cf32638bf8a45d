//! Everything that is known of a conversion before anything is written.

use crate::Error;
use crate::plan::{Options, Plan};
use crate::side_files::{SideFileBytes, side_files};
use formats::gguf::GgufSet;
use std::path::Path;

/// A source that was found fit to be converted, as far as its headers tell.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// The source.
    pub set: GgufSet,
    /// What becomes of its tensors.
    pub plan: Plan,
    /// What becomes of its tokenizer and its other metadata.
    pub side_files: Vec<SideFileBytes>,
}

impl Conversion {
    /// Reads the headers of `input`, any part of a split model, and refuses whatever a conversion would refuse of them: one
    /// function, so that a plan that is printed is a plan that can be carried out.
    ///
    /// # Errors
    /// An error naming the file and the key or tensor.
    pub fn prepare(input: &Path, options: Options) -> Result<Self, Error> {
        let set = GgufSet::open(input)?;
        let plan = Plan::new(&set, options)?;
        let side_files = side_files(&set)?;
        Ok(Self { set, plan, side_files })
    }
}
