//! How fast each ggml type decodes to f32, on one thread, next to copying as many bytes:
//!
//! ```text
//! cargo bench -p tests --bench quant [-- --json]
//! ```
//!
//! `plain` is [`formats::quant::decoder`] as the compiler makes it for any processor of the target; the other columns are the
//! same decoders in the CPU backend, compiled for an instruction set. GB/s count the f32 values written, medians of
//! [`ROUNDS`] rounds.
#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]

use formats::{Dtype, TensorView, quant};
use kernels::cpu::{Cpu, Isa};
use kernels::step::{LogitRows, Step};
use kernels::{Backend, HostBuffer};
use serde_json::json;
use std::hint::black_box;
use std::time::{Duration, Instant};
use tests::blocks::matrix;

/// A matrix whose values take 4 MiB: more than a core's own cache, less than what it shares.
const ROWS: usize = 256;
const COLS: usize = 4096;
const BYTES: usize = ROWS * COLS * 4;
const ROUNDS: usize = 5;
/// A round lasts at least this long.
const ROUND: Duration = Duration::from_millis(25);

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
    let source = vec![1.0f32; ROWS * COLS];
    let mut copied = vec![0.0f32; ROWS * COLS];
    let mut copy = || {
        gb_per_second(|| {
            black_box(&mut copied[..]).copy_from_slice(black_box(&source));
        })
    };
    let before = copy();
    let rows: Vec<(Dtype, f64, Vec<f64>)> = Dtype::all()
        .filter_map(|dtype| {
            let decode = quant::decoder(dtype)?;
            let view = matrix(dtype, [ROWS, COLS], 0);
            let mut out = vec![0.0f32; ROWS * COLS];
            let plain = gb_per_second(|| decode(black_box(view.bytes()), black_box(&mut out)));
            Some((dtype, plain, isas.iter().map(|&isa| in_backend(isa, &view)).collect()))
        })
        .collect();
    let after = copy();

    if json {
        let types: Vec<_> = rows
            .iter()
            .map(|(dtype, plain, by_isa)| {
                let by_isa: serde_json::Map<_, _> =
                    isas.iter().zip(by_isa).map(|(isa, speed)| (isa.to_string(), json!(speed))).collect();
                json!({ "type": dtype.name(), "plain": plain, "backend": by_isa })
            })
            .collect();
        println!("{:#}", json!({ "unit": "GB/s of f32", "copy": [before, after], "types": types }));
        return;
    }
    println!("GB/s of f32 on one thread; a copy of as many bytes: {before:.1} before, {after:.1} after");
    print!("{:<8} {:>9}", "type", "plain");
    isas.iter().for_each(|isa| print!(" {:>9}", isa.to_string()));
    println!(" {:>12}", "best / copy");
    for (dtype, plain, by_isa) in &rows {
        print!("{:<8} {plain:>9.2}", dtype.name());
        by_isa.iter().for_each(|speed| print!(" {speed:>9.2}"));
        let best = by_isa.iter().fold(*plain, |best, &speed| best.max(speed));
        println!(" {:>12.2}", best / before.max(after));
    }
}

/// Looking up every row of an embedding is decoding the matrix.
fn in_backend(isa: Isa, view: &TensorView) -> f64 {
    let mut cpu = Cpu::with_isa(isa, 1).unwrap();
    let weight = cpu.weight(view.clone()).unwrap();
    let tokens: Vec<u32> = (0..ROWS as u32).collect();
    let mut step = Step::default();
    step.push(&tokens, 0, &[], LogitRows::None);
    cpu.begin_step(&step);
    let mut out: HostBuffer = cpu.zeros(ROWS * COLS).unwrap();
    gb_per_second(|| cpu.embed(black_box(&weight), 0, black_box(&mut out)))
}

/// [`BYTES`] by the median time of `work`.
fn gb_per_second(mut work: impl FnMut()) -> f64 {
    work();
    let mut seconds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let (start, mut times) = (Instant::now(), 0);
            while start.elapsed() < ROUND {
                work();
                times += 1;
            }
            start.elapsed().as_secs_f64() / f64::from(times)
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    BYTES as f64 / 1e9 / seconds[ROUNDS / 2]
}
