//! Random weights made on the device, and how fast it copies: what measurements need.
#![expect(
    unsafe_code,
    reason = "launching a kernel is unsafe: nobody can check what it does with its pointers"
)]

use super::compile::{Form, Tiling, Unit};
use super::driver::{Cost, Event, Kernel, Launch, Memory, Module, Start};
use super::{Cuda, CudaError, Weight};
use crate::Error;
use formats::layout::mma16;
use formats::{Dtype, Shape, bytes_of};
use std::ffi::c_void;
use std::ptr::from_mut;
use std::sync::Arc;

/// Makes weights of random numbers.
#[derive(Debug)]
pub struct Synthesis {
    fill_blocks: Kernel,
    fill_values: Kernel,
    seed: u32,
}

/// What a weight's values are like.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// A matrix whose products keep about the size of their input.
    Matrix,
    /// A norm's: near 1.
    Norm,
    /// A router's bias: near 0.
    Bias,
}

/// Where the scales of a block or tile lie, and how large its numbers are for a scale of 1: in `start..end` every `stride` bytes
/// begin with a scale, whose product with `spread` is the numbers' deviation; a second one `second` bytes on, `offset` times the
/// first, makes their mean 0.
struct Scales {
    start: i32,
    end: i32,
    stride: i32,
    second: i32,
    spread: f32,
    offset: f32,
}

fn scales(form: Form) -> Option<Scales> {
    let (in_rows, in_tiles, stride, second, spread, offset) = match form.dtype {
        Dtype::Q4_K => ((0, 4), (2048, 2304), 16, 2, 200.0, 7.5),
        Dtype::Q5_K => ((0, 4), (2560, 2816), 16, 2, 400.0, 15.5),
        Dtype::Q6_K => ((208, 210), (3328, 3360), 2, -1, 1400.0, 0.0),
        Dtype::Q8_0 => ((0, 2), (4096, 4352), 2, -1, 74.0, 0.0),
        _ => return None,
    };
    let (start, end) = if form.tiling == Tiling::Tiles { in_tiles } else { in_rows };
    Some(Scales { start, end, stride, second, spread, offset })
}

impl Synthesis {
    /// Compiles what it needs for `cuda`'s device.
    ///
    /// # Errors
    /// The compiler's or the device's refusal.
    pub fn new(cuda: &Cuda) -> Result<Self, Error> {
        let device = cuda.device();
        let module = Module::of(device, &Unit::synthetic())?;
        let kernel = |name| module.kernel(name, 0);
        Ok(Self { fill_blocks: kernel("fill_blocks")?, fill_values: kernel("fill_values")?, seed: 0 })
    }

    /// A weight of `dims`, as a checkpoint would have it: in tiles where it has whole ones and `tiling` asks for them.
    ///
    /// # Errors
    /// [`Error::UnsupportedType`] for types other than F32, BF16, Q4_K, Q5_K, Q6_K and Q8_0; the device's refusal.
    pub fn weight(
        &mut self,
        cuda: &Cuda,
        dtype: Dtype,
        dims: &[usize],
        values: Values,
        tiling: Tiling,
    ) -> Result<Weight, Error> {
        self.seed += 1;
        let dims: Vec<u64> = dims.iter().map(|&d| d as u64).collect();
        let refusal = || Error::WeightShape { expected: "rows of whole blocks", found: format!("{dims:?}") };
        let shape = Shape::new(&dims).map_err(|_| refusal())?;
        let bytes = bytes_of(dtype, &shape).ok_or_else(refusal)?;
        let memory =
            Arc::new(Memory::new(cuda.device(), usize::try_from(bytes).unwrap_or(usize::MAX), "a weight")?);
        let deviation = 0.6 / (shape.row_len().max(1) as f32).sqrt();
        let tiling = if mma16::fits(dtype, &shape) { tiling } else { Tiling::Rows };
        let form = Form { dtype, tiling };
        let rows = if tiling == Tiling::Tiles { mma16::ROWS * mma16::COLUMNS / dtype.block_len() } else { 1 };
        let block_bytes = dtype.block_bytes() * rows;
        match scales(form) {
            Some(scales) => {
                let first = deviation / scales.spread;
                let bits = |value: f32| u32::from(half(value));
                let second = bits(first * scales.offset);
                let blocks = bytes / block_bytes as u64;
                self.run(
                    cuda,
                    &self.fill_blocks,
                    bytes / 2,
                    &mut [
                        from_mut(&mut { memory.address() }).cast(),
                        from_mut(&mut { blocks }).cast(),
                        from_mut(&mut { i32::try_from(block_bytes).unwrap_or(0) }).cast(),
                        from_mut(&mut { scales.start }).cast(),
                        from_mut(&mut { scales.end }).cast(),
                        from_mut(&mut { scales.stride }).cast(),
                        from_mut(&mut { bits(first) }).cast(),
                        from_mut(&mut { scales.second }).cast(),
                        from_mut(&mut { second }).cast(),
                        from_mut(&mut { self.seed }).cast(),
                    ],
                );
            }
            None if matches!(dtype, Dtype::F32 | Dtype::BF16) => {
                let (centre, spread) = match values {
                    Values::Matrix => (0.0, deviation * 1.7),
                    Values::Norm => (1.0, 0.1),
                    Values::Bias => (0.0, 0.01),
                };
                self.run(
                    cuda,
                    &self.fill_values,
                    shape.elements(),
                    &mut [
                        from_mut(&mut { memory.address() }).cast(),
                        from_mut(&mut { shape.elements() }).cast(),
                        from_mut(&mut { i32::from(dtype == Dtype::BF16) }).cast(),
                        from_mut(&mut { centre }).cast(),
                        from_mut(&mut { spread }).cast(),
                        from_mut(&mut { self.seed }).cast(),
                    ],
                );
            }
            None => return Err(Error::UnsupportedType { dtype }),
        }
        let largest = if dims.len() == 1 { 1.2 } else { 0.0 };
        let weight = Weight::made(form, &shape, largest, memory)?;
        cuda.prepare(form)?;
        Ok(weight)
    }

    fn run(&self, cuda: &Cuda, kernel: &Kernel, len: u64, arguments: &mut [*mut c_void]) {
        let blocks = u32::try_from(len.div_ceil(256).min(4096)).unwrap_or(4096);
        let shape = Launch {
            grid: [blocks, 1, 1],
            threads: 256,
            shared_bytes: 0,
            cost: Cost::default(),
            start: Start::InTurn,
        };
        // SAFETY: callers give the parameters of `kernel`, whose memory has the `len` halves or values that it fills.
        unsafe { cuda.stream().launch(kernel, shape, arguments) };
    }
}

/// The nearest f16 of a positive number below 65 504, subnormal or not, rounded down.
fn half(value: f32) -> u16 {
    let bits = value.to_bits();
    let exponent = (bits >> 23) as i32 - 127 + 15;
    if exponent <= 0 {
        return (value * (1 << 24) as f32) as u16;
    }
    (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16
}

/// How fast the device copies in its own memory: bytes read and written in a second, the best of several runs.
///
/// # Errors
/// The device's refusal.
pub fn copy_rate(cuda: &Cuda) -> Result<f64, CudaError> {
    const RUNS: usize = 8;
    let device = cuda.device();
    let (free, _) = device.memory()?;
    let bytes = (1usize << 30).min(free / 4) & !0xff;
    let [from, to] = [Memory::new(device, bytes, "a copy")?, Memory::new(device, bytes, "a copy")?];
    let stream = cuda.stream();
    stream.zero(&from);
    let mut best = f32::INFINITY;
    for _ in 0..RUNS {
        let [start, end] = [Event::new(device)?, Event::new(device)?];
        start.record(stream);
        stream.copy(&to, 0, &from, 0, bytes);
        end.record(stream);
        stream.finish()?;
        best = best.min(end.milliseconds_since(&start)?);
    }
    Ok(2.0 * bytes as f64 / f64::from(best) * 1e3)
}

#[cfg(test)]
mod tests {
    use super::half;

    #[test]
    fn halves_of_numbers_that_scales_are() {
        for (value, bits) in [(1.0, 0x3c00), (1.5, 0x3e00), (6.103_515_6e-5, 0x0400), (5.960_464_5e-8, 1)] {
            assert_eq!(half(value), bits, "{value}");
        }
    }
}
