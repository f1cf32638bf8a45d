//! How fast products are on this machine, on one thread: `cargo run --release -p kernels --example speed [TYPE...]`.
//!
//! For each type and instruction set: weights read by a product with one row in GB/s, and products with 256 rows in
//! GFLOP/s, for a matrix of 2048 x 2048. The best of several runs, so that a busy machine spoils less.

use bytes::Bytes;
use formats::{Dtype, Shape, TensorView};
use kernels::cpu::{Cpu, Isa};
use kernels::{Backend, HostBuffer};
use std::time::{Duration, Instant};

const SIZE: usize = 2048;
const BATCH: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let named: Vec<String> = std::env::args().skip(1).collect();
    let usual = [Dtype::Q4_K, Dtype::Q6_K, Dtype::Q8_0, Dtype::BF16, Dtype::F32];
    let wanted = |dtype: &Dtype| {
        if named.is_empty() { usual.contains(dtype) } else { named.iter().any(|name| name == dtype.name()) }
    };
    for dtype in Dtype::all().filter(wanted) {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let mut cpu = Cpu::with_isa(isa, 1)?;
            let shape = Shape::new(&[SIZE as u64; 2])?;
            let bytes = formats::bytes_of(dtype, &shape).ok_or("rows of whole blocks")? as usize;
            // The values do not matter to the time.
            let view = TensorView::new("weight", dtype, shape, Bytes::from(vec![0; bytes]))?;
            let w = cpu.weight(view)?;
            let (x, mut out) = (HostBuffer::zeros(SIZE * BATCH), HostBuffer::zeros(SIZE * BATCH));
            let one = best(200, || cpu.matmul(&w, &x, 1, &mut out));
            let many = best(10, || cpu.matmul(&w, &x, BATCH, &mut out));
            let read = bytes as f64 / one.as_secs_f64() / 1e9;
            let computed = 2.0 * (SIZE * SIZE * BATCH) as f64 / many.as_secs_f64() / 1e9;
            println!("{dtype:8} {isa:9} 1 row: {read:6.2} GB/s   {BATCH} rows: {computed:6.1} GFLOP/s");
        }
    }
    Ok(())
}

fn best(runs: usize, mut run: impl FnMut()) -> Duration {
    let time = |_| {
        let start = Instant::now();
        run();
        start.elapsed()
    };
    (0..runs).map(time).min().unwrap_or_default()
}
