//! Shapes and views: the one place where a shape, a type and a run of bytes are checked against each other.

use crate::{Dtype, Error};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Dimensions of a tensor, row-major: the last one is contiguous. At most [`Shape::MAX_DIMS`].
///
/// GGUF's `ne` is the same list in reverse.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u64>", into = "Vec<u64>")]
pub struct Shape(Vec<u64>);

impl Shape {
    /// GGUF's limit, which every model here keeps.
    pub const MAX_DIMS: usize = 4;

    /// A shape of 1 to 4 dimensions whose product fits a u64.
    ///
    /// # Errors
    /// [`Error::Shape`] when there are none, too many, or the product overflows.
    pub fn new(dims: &[u64]) -> Result<Self, Error> {
        let fits = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).is_some();
        if dims.is_empty() || dims.len() > Self::MAX_DIMS || !fits {
            return Err(Error::Shape { found: dims.to_vec() });
        }
        Ok(Self(dims.to_vec()))
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[u64] {
        &self.0
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.0.iter().product()
    }

    /// Length of the contiguous dimension.
    pub fn row_len(&self) -> u64 {
        self.0[self.0.len() - 1]
    }

    /// Number of rows: the product of all dimensions but the last.
    pub fn rows(&self) -> u64 {
        self.0[..self.0.len() - 1].iter().product()
    }

    /// The same shape with dimension `axis` set to `len`.
    ///
    /// # Panics
    /// When `axis` is not a dimension of this shape.
    #[must_use]
    pub fn with_dim(&self, axis: usize, len: u64) -> Self {
        let mut dims = self.0.clone();
        dims[axis] = len;
        Self(dims)
    }
}

impl TryFrom<Vec<u64>> for Shape {
    type Error = Error;
    fn try_from(dims: Vec<u64>) -> Result<Self, Error> {
        Self::new(&dims)
    }
}

impl From<Shape> for Vec<u64> {
    fn from(shape: Shape) -> Self {
        shape.0
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dims: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.pad(&format!("[{}]", dims.join(", ")))
    }
}

/// One tensor: type, shape and exactly the bytes they ask for. Cloning shares the bytes.
#[derive(Clone, Debug)]
pub struct TensorView {
    dtype: Dtype,
    shape: Shape,
    bytes: Bytes,
}

impl TensorView {
    /// The only constructor: rows are whole blocks and the byte count is exact.
    ///
    /// # Errors
    /// [`Error::TensorBytes`] naming `name`, what was expected and what was found.
    pub fn new(name: &str, dtype: Dtype, shape: Shape, bytes: Bytes) -> Result<Self, Error> {
        let expected = bytes_of(dtype, &shape).ok_or_else(|| Error::Block {
            tensor: name.to_owned(),
            dtype,
            row_len: shape.row_len(),
        })?;
        if bytes.len() as u64 != expected {
            return Err(Error::TensorBytes {
                tensor: name.to_owned(),
                dtype,
                shape,
                expected,
                found: bytes.len() as u64,
            });
        }
        Ok(Self { dtype, shape, bytes })
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Row-major shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The bytes, in the order of the file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        let blocks = self.shape.row_len() as usize / self.dtype.block_len();
        blocks * self.dtype.block_bytes()
    }
}

/// Bytes of a tensor of this type and shape; `None` when a row is no whole number of blocks or the product overflows.
pub fn bytes_of(dtype: Dtype, shape: &Shape) -> Option<u64> {
    dtype.bytes_for(shape.row_len())?.checked_mul(shape.rows())
}
