//! Weights that several ranks have parts of, joined, against the whole ones.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use formats::{Dtype, TensorView};
use kernels::cpu::{Cpu, Weight};
use kernels::{Backend, Error, ExpertWeights, rounding};
use std::ops::Range;
use support::*;

/// The part of a view whose dimension `axis` is `range`, which begins and ends at blocks.
fn part(whole: &TensorView, axis: usize, range: &Range<usize>) -> TensorView {
    let mut dims: Vec<usize> = whole.shape().dims().iter().map(|&n| n as usize).collect();
    let dtype = whole.dtype();
    let inner: usize = dims[axis + 1..].iter().product();
    let bytes_of = |elements: usize| elements / dtype.block_len() * dtype.block_bytes();
    let run = bytes_of(range.start * inner)..bytes_of(range.end * inner);
    let outer = whole.bytes().chunks_exact(bytes_of(dims[axis] * inner));
    let bytes = outer.flat_map(|run_of_all| run_of_all[run.clone()].to_vec()).collect();
    dims[axis] = range.len();
    view(dtype, &dims, bytes)
}

/// Uneven ones and one that is empty.
fn ranges(len: usize) -> [Range<usize>; 4] {
    let (a, b) = (len * 2 / 7, len * 3 / 7);
    [0..a, a..a, a..b, b..len]
}

fn parts(whole: &TensorView, axis: usize) -> Vec<TensorView> {
    let unit = if axis + 1 == whole.shape().dims().len() { whole.dtype().block_len() } else { 1 };
    let ranges = ranges(whole.shape().dims()[axis] as usize / unit);
    ranges.iter().map(|range| part(whole, axis, &(range.start * unit..range.end * unit))).collect()
}

fn matmul(cpu: &mut Cpu, w: &Weight, x: &[f32], [tokens, rows]: [usize; 2]) -> Vec<f32> {
    let (x, mut out) = (fenced(cpu, x), poisoned(cpu, tokens * rows));
    cpu.matmul(w, &x, tokens, &mut out);
    written(cpu, &out, tokens * rows)
}

#[test]
fn rows_are_those_of_the_whole_and_columns_add_up_in_the_order_of_parts() {
    let mut random = Random(1);
    for dtype in dtypes() {
        let (rows, cols) = (37, 7 * dtype.block_len().max(10));
        let w = random.weight(dtype, &[rows, cols]);
        for tokens in [1, 2, 5] {
            let x = random.values(tokens * cols);
            for (isa, mut cpu) in cpus(1) {
                let b = &mut cpu;
                let what = format!("{dtype}, {tokens} tokens, {isa}");
                let whole = b.weight(w.clone()).unwrap();
                let expected = matmul(b, &whole, &x, [tokens, rows]);
                let joined = b.joined_weight(parts(&w, 0), 0, &[]).unwrap();
                same_bits(&what, &matmul(b, &joined, &x, [tokens, rows]), &expected);

                let joined = b.joined_weight(parts(&w, 1), 1, &[]).unwrap();
                let found = matmul(b, &joined, &x, [tokens, rows]);
                if rounding::block_len(dtype).is_none() {
                    same_bits(&what, &found, &expected);
                    continue;
                }
                let mut sums = vec![0.0; tokens * rows];
                let mut first = 0;
                for part in parts(&w, 1) {
                    let len = part.shape().row_len() as usize;
                    let columns = |x: &[f32]| x[first..first + len].to_vec();
                    let x: Vec<f32> = x.chunks_exact(cols).flat_map(columns).collect();
                    let part = b.weight(part).unwrap();
                    for (sum, value) in sums.iter_mut().zip(matmul(b, &part, &x, [tokens, rows])) {
                        *sum += value;
                    }
                    first += len;
                }
                same_bits(&what, &found, &sums);
            }
        }
    }
}

#[test]
fn experts_may_be_cut_one_from_the_other_or_each_in_parts() {
    let mut random = Random(2);
    for [up, down] in [[Dtype::Q4_K, Dtype::Q5_0], [Dtype::Q5_0, Dtype::Q6_K], [Dtype::BF16; 2]] {
        let shape = moe_shape(256, 7 * 256, [7, 2]);
        let views = expert_weights(&mut random, &shape, [up, down]);
        for tokens in [1, 4] {
            let x = random.values(tokens * shape.hidden);
            let choice: Vec<f32> =
                (0..tokens).flat_map(|t| [(3 * t % 7) as f32, ((3 * t + 5) % 7) as f32, 0.75, 0.5]).collect();
            for (isa, mut cpu) in cpus(1) {
                let b = &mut cpu;
                let mut run = |weights: [Weight; 3]| {
                    let [gate, up, down] = weights;
                    let experts = ExpertWeights { gate, up, down };
                    let (x, choice) = (fenced(b, &x), fenced(b, &choice));
                    let mut out = poisoned(b, tokens * shape.hidden);
                    b.experts(&shape, &experts, &x, &choice, tokens, &mut out);
                    written(b, &out, tokens * shape.hidden)
                };
                let cpu = Cpu::new(1).unwrap();
                let joined =
                    |view: &TensorView, axis: usize| cpu.joined_weight(parts(view, axis), axis, &[]).unwrap();
                let whole = |view: &TensorView| cpu.weight(view.clone()).unwrap();
                let expected = run([whole(&views.gate), whole(&views.up), whole(&views.down)]);
                let by_expert = run([joined(&views.gate, 0), joined(&views.up, 0), joined(&views.down, 0)]);
                same_bits(&format!("{up} {down} by expert, {isa}"), &by_expert, &expected);
                let by_width = run([joined(&views.gate, 1), joined(&views.up, 1), joined(&views.down, 2)]);
                let largest = largest(&expected);
                close(&format!("{up} {down} by width, {isa}"), &by_width, &expected, 256, |_| largest);
            }
        }
    }
}

#[test]
fn scales_are_those_of_all_experts() {
    let mut random = Random(3);
    let mut cpu = Cpu::new(1).unwrap();
    let shape = moe_shape(64, 32, [3, 2]);
    let views = expert_weights(&mut random, &shape, [Dtype::Q8_0; 2]);
    let x = random.values(shape.hidden);
    let mut run = |weigh: &dyn Fn(&Cpu, &TensorView) -> Weight| {
        let [gate, up, down] = [&views.gate, &views.up, &views.down].map(|view| weigh(&cpu, view));
        let (x, choice) = (fenced(&mut cpu, &x), fenced(&mut cpu, &[2.0, 0.0, 0.75, 0.5]));
        let mut out = poisoned(&mut cpu, shape.hidden);
        cpu.experts(&shape, &ExpertWeights { gate, up, down }, &x, &choice, 1, &mut out);
        written(&mut cpu, &out, shape.hidden)
    };
    let scales = [0.5, 2.0, 0.25];
    let expected = run(&|cpu, view| cpu.scaled_weight(view.clone(), &scales).unwrap());
    let halves = |view: &TensorView| vec![part(view, 0, &(0..1)), part(view, 0, &(1..3))];
    let found = run(&|cpu, view| cpu.joined_weight(halves(view), 0, &scales).unwrap());
    same_bits("scaled", &found, &expected);
}

#[test]
fn what_is_no_part_of_the_same_weight_is_refused() {
    let mut random = Random(4);
    let cpu = Cpu::new(1).unwrap();
    let first = random.weight(Dtype::Q8_0, &[5, 64]);
    for other in [random.weight(Dtype::Q8_0, &[5, 32]), random.weight(Dtype::Q4_0, &[5, 64])] {
        let refused = cpu.joined_weight(vec![first.clone(), other], 0, &[]).err().unwrap();
        assert!(matches!(refused, Error::WeightShape { .. }), "{refused}");
    }
}
