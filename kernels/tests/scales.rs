//! Weights that are multiplied by scales of their own against the same values multiplied beforehand.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use formats::{Dtype, TensorView, quant};
use kernels::cpu::Cpu;
use kernels::reference::Reference;
use kernels::step::{LogitRows, Step};
use kernels::{Backend, Error, ExpertWeights};
use support::*;

/// In roundings of an f32: what a weight in BF16 may differ by.
const BF16_TERMS: usize = 1 << 15;

/// The values times their matrix' scale.
fn multiplied(view: &TensorView, scales: &[f32]) -> TensorView {
    let mut values = vec![0.0; view.shape().elements() as usize];
    quant::decode(view.dtype(), view.bytes(), &mut values).unwrap();
    let matrix = values.len() / scales.len();
    for (matrix, scale) in values.chunks_exact_mut(matrix).zip(scales) {
        matrix.iter_mut().for_each(|value| *value *= scale);
    }
    let dims: Vec<usize> = view.shape().dims().iter().map(|&n| n as usize).collect();
    f32_weight(&dims, &values)
}

fn matmul<B: Backend>(b: &mut B, w: &B::Weight, x: &[f32], [rows, out]: [usize; 2]) -> Vec<f32> {
    let (x, mut y) = (fenced(b, x), poisoned(b, rows * out));
    b.matmul(w, &x, rows, &mut y);
    written(b, &y, rows * out)
}

#[test]
fn a_product_is_that_of_the_multiplied_values() {
    let mut random = Random(11);
    for dtype in [Dtype::NVFP4, Dtype::Q8_0, Dtype::F32] {
        for [out, cols, rows] in [[40, 64, 1], [40, 640, 5], [17, 64, 20]] {
            let w = random.weight(dtype, &[out, cols]);
            let scales = [0.37];
            let x = random.values(rows * cols);
            let mut reference = Reference::new();
            let plain = reference.weight(multiplied(&w, &scales)).unwrap();
            let expected = matmul(&mut reference, &plain, &x, [rows, out]);
            let scaled = reference.scaled_weight(w.clone(), &scales).unwrap();
            same_bits("reference", &matmul(&mut reference, &scaled, &x, [rows, out]), &expected);
            each_backend!(|name, b| {
                let mut twin = twin(&name);
                let in_twin = twin.scaled_weight(w.clone(), &scales).unwrap();
                let expected = matmul(&mut twin, &in_twin, &x, [rows, out]);
                let largest = largest(&expected);
                let scaled = b.scaled_weight(w.clone(), &scales).unwrap();
                let found = matmul(b, &scaled, &x, [rows, out]);
                let on_gpu = if name == "cuda" { BF16_TERMS + HALF_TERMS } else { 0 };
                close(
                    &format!("{dtype} {out} {cols} {rows} {name}"),
                    &found,
                    &expected,
                    cols + on_gpu,
                    |_| largest,
                );
            });
        }
    }
}

#[test]
fn every_expert_has_its_own() {
    let mut random = Random(12);
    let (hidden, width, rows) = (64, 128, 5);
    let shape = moe_shape(hidden, width, [4, 2]);
    let views = expert_weights(&mut random, &shape, [Dtype::NVFP4; 2]);
    let views = [views.gate, views.up, views.down];
    let scales = [[0.5, 1.0, 2.0, 0.25], [1.5, 0.1, 0.7, 3.0], [0.3, 0.6, 0.9, 1.2]];
    let x = random.values(rows * hidden);
    let choice: Vec<f32> =
        (0..rows).flat_map(|t| [(t % 4) as f32, ((t + 1) % 4) as f32, 0.75, 0.5]).collect();
    let mut reference = Reference::new();
    let mut plain = views.iter().zip(&scales).map(|(view, scales)| multiplied(view, scales));
    let [gate, up, down] = [(); 3].map(|()| reference.weight(plain.next().unwrap()).unwrap());
    let experts = ExpertWeights { gate, up, down };
    let expected = run(&mut reference, &shape, &experts, &x, &choice, rows);
    let largest = largest(&expected);
    each_backend!(|name, b| {
        let mut scaled = views.iter().zip(&scales);
        let [gate, up, down] = [(); 3].map(|()| {
            let (view, scales) = scaled.next().unwrap();
            b.scaled_weight(view.clone(), scales).unwrap()
        });
        let found = run(b, &shape, &ExpertWeights { gate, up, down }, &x, &choice, rows);
        let on_gpu = if name == "cuda" { 4 * BF16_TERMS } else { 0 };
        close(&name, &found, &expected, hidden + width + on_gpu, |_| largest);
    });
}

fn run<B: Backend>(
    b: &mut B,
    shape: &kernels::shape::MoeShape,
    experts: &ExpertWeights<B::Weight>,
    x: &[f32],
    choice: &[f32],
    rows: usize,
) -> Vec<f32> {
    let (x, choice, mut out) = (fenced(b, x), fenced(b, choice), poisoned(b, rows * shape.hidden));
    b.experts(shape, experts, &x, &choice, rows, &mut out);
    written(b, &out, rows * shape.hidden)
}

#[test]
fn rows_that_are_looked_up_are_multiplied_too() {
    let table = Random(13).weight(Dtype::NVFP4, &[5, 64]);
    let expected = multiplied(&table, &[3.0]);
    let mut step = Step::default();
    step.push(&[3, 0], 0, &[0], LogitRows::All);
    each_backend!(|name, b| {
        let weight = b.scaled_weight(table.clone(), &[3.0]).unwrap();
        let mut out = poisoned(b, 2 * 64);
        b.begin_step(&step);
        b.embed(&weight, 0, &mut out);
        let found = written(b, &out, 2 * 64);
        let value = |i: usize| f32::from_le_bytes(expected.bytes()[i * 4..][..4].try_into().unwrap());
        let rows: Vec<f32> = (3 * 64..4 * 64).chain(0..64).map(value).collect();
        let terms = if name == "cuda" { BF16_TERMS } else { 0 };
        close(&name, &found, &rows, terms, |i| rows[i].abs());
    });
}

#[test]
fn a_wrong_number_of_scales_is_refused() {
    let mut random = Random(14);
    let cpu = Cpu::new(1).unwrap();
    for (dims, scales) in [(&[4, 64][..], 2), (&[3, 4, 64], 1), (&[3, 4, 64], 4)] {
        let view = random.weight(Dtype::NVFP4, dims);
        let refused = cpu.scaled_weight(view, &vec![1.0; scales]).expect_err("a refusal");
        assert!(matches!(refused, Error::Scales { .. }), "{refused}");
    }
}
