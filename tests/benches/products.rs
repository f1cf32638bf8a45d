//! How fast the CPU backend multiplies with each ggml type, on one thread, by instruction set:
//!
//! ```text
//! cargo bench -p tests --bench products [-- --json]
//! ```
//!
//! One token is given in GB of weights a second, more tokens in billions of multiply-adds; the weights fit a core's own cache, so
//! that the figures are the processor's and not the memory's. They are the fastest of many runs: other work on the machine only
//! ever slows some of them down.
#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]

use formats::{Dtype, TensorView, quant};
use kernels::cpu::{Cpu, Isa};
use kernels::{Backend, HostBuffer};
use serde_json::json;
use std::time::{Duration, Instant};
use tests::blocks::matrix;

const ROWS: usize = 256;
const COLS: usize = 2048;
const TOKENS: [usize; 3] = [1, 4, 64];
/// How long each figure is looked for, but at least for [`RUNS`] runs.
const TIME: Duration = Duration::from_millis(100);
const RUNS: usize = 5;

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
    let mut report = Vec::new();
    if !json {
        print!("{:8} {:>6}", "type", "tokens");
        isas.iter().for_each(|isa| print!(" {:>12}", isa.to_string()));
        println!("   GB/s for one token, G multiply-adds/s for more");
    }
    for dtype in Dtype::all().filter(|&dtype| quant::decoder(dtype).is_some()) {
        // No product is subnormal then, which would be slow.
        let view = matrix(dtype, [ROWS, COLS], 0x30);
        for tokens in TOKENS {
            let amount = if tokens == 1 { view.bytes().len() } else { ROWS * COLS * tokens };
            let rates: Vec<f64> =
                isas.iter().map(|&isa| amount as f64 / 1e9 / fastest(isa, &view, tokens)).collect();
            if json {
                let rates: serde_json::Map<_, _> =
                    isas.iter().zip(&rates).map(|(isa, rate)| (isa.to_string(), json!(rate))).collect();
                report.push(json!({ "type": dtype.name(), "tokens": tokens, "rates": rates }));
                continue;
            }
            print!("{:8} {tokens:>6}", dtype.name());
            rates.iter().for_each(|rate| print!(" {rate:>12.2}"));
            println!();
        }
    }
    if json {
        println!(
            "{:#}",
            json!({ "unit": "1e9/s: bytes of one token, multiply-adds of more", "types": report })
        );
    }
}

/// Seconds of a product.
fn fastest(isa: Isa, view: &TensorView, tokens: usize) -> f64 {
    let mut cpu = Cpu::with_isa(isa, 1).unwrap();
    let weight = cpu.weight(view.clone()).unwrap();
    let mut x: HostBuffer = cpu.zeros(tokens * COLS).unwrap();
    let values: Vec<f32> = (0..tokens * COLS).map(|i| (i % 17) as f32 - 8.0).collect();
    cpu.write(&mut x, &values);
    let mut out = cpu.zeros(tokens * ROWS).unwrap();
    let (begin, mut runs, mut fastest) = (Instant::now(), 0, f64::INFINITY);
    while runs < RUNS || begin.elapsed() < TIME {
        let start = Instant::now();
        cpu.matmul(&weight, &x, tokens, &mut out);
        fastest = fastest.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    fastest
}
