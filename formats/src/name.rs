//! names
/// x
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerIdx(pub usize);
/// x
pub enum TensorName {}
