//! Every operation of every backend against its twin in `Reference`, at boundary sizes.
//!
//! Outputs are NaN before each run and no NaN passes; inputs end in NaN that no operation may read.
#![allow(clippy::unwrap_used, reason = "the helpers of these tests are tests too")]

mod support;

use formats::config::RopePairing;
use formats::{Dtype, TensorView};
use kernels::cpu::Cpu;
use kernels::reference::Reference;
use kernels::shape::{BLOCK_TOKENS, MlaForm, MlaShape, MoeShape, Span};
use kernels::{Backend, Error, ExpertWeights, HostBuffer};
use std::ops::Range;
use support::*;

trait Host: Backend<Buffer = HostBuffer> {}
impl<B: Backend<Buffer = HostBuffer>> Host for B {}

/// `[rows, out]`
fn matmul<B: Host>(b: &mut B, w: &TensorView, x: &[f32], rows: usize) -> Vec<f32> {
    let out_len = w.shape().rows() as usize;
    let w = b.weight(w.clone()).unwrap();
    let mut out = poisoned(rows * out_len);
    b.matmul(&w, &fenced(x), rows, &mut out);
    written(&out)
}

/// A product of random blocks against its twin, with a bound from the magnitudes of the very terms.
fn check_matmul(random: &mut Random, dtype: Dtype, [rows, cols, tokens]: [usize; 3]) {
    let w = random.weight(dtype, &[rows, cols]);
    let x = random.values(tokens * cols);
    let expected = matmul(&mut Reference::new(), &w, &x, tokens);
    let mut values = vec![0.0; rows * cols];
    formats::quant::decode(dtype, w.bytes(), &mut values).unwrap();
    let magnitudes = |values: &[f32]| values.iter().map(|v| v.abs()).collect::<Vec<f32>>();
    let sums = f32_weight(&[rows, cols], &magnitudes(&values));
    let sums = matmul(&mut Reference::new(), &sums, &magnitudes(&x), tokens);
    for (isa, mut cpu) in cpus(1) {
        let what = format!("{dtype} [{rows}, {cols}] x {tokens}, {isa}");
        let found = matmul(&mut cpu, &w, &x, tokens);
        close(&what, &found, &expected, cols, |i| sums[i]);
        for t in 0..tokens {
            let alone = matmul(&mut cpu, &w, &x[t * cols..][..cols], 1);
            same_bits(&format!("{what}, row {t} alone"), &alone, &found[t * rows..][..rows]);
        }
    }
}

#[test]
fn matmul_of_every_type() {
    let mut random = Random(1);
    assert!(dtypes().len() > 20, "types with a decoder: {:?}", dtypes());
    for dtype in dtypes() {
        // One block, an odd number of blocks, and more columns than are decoded at a time.
        let cols = match dtype.block_len() {
            1 => vec![1, 22, 176, 529],
            32 => vec![32, 96, 544],
            len => vec![len, 3 * len],
        };
        for cols in cols {
            for rows in [1, 2, 3, 5, 17] {
                for tokens in [1, 2, 7] {
                    check_matmul(&mut random, dtype, [rows, cols, tokens]);
                }
            }
        }
    }
}

#[test]
fn matmul_of_more_rows_than_one_pass_takes() {
    check_matmul(&mut Random(2), Dtype::Q4_K, [33, 768, 259]);
    check_matmul(&mut Random(3), Dtype::F32, [16, 22, 513]);
}

#[test]
fn matmul_of_nothing() {
    for (rows, cols, tokens) in [(0, 256, 3), (5, 0, 3), (5, 256, 0), (0, 0, 0)] {
        let w = Random(4).weight(Dtype::Q4_K, &[rows, cols]);
        let x = Random(5).values(tokens * cols);
        assert_eq!(matmul(&mut Reference::new(), &w, &x, tokens), vec![0.0; tokens * rows]);
        for (isa, mut cpu) in cpus(1) {
            assert_eq!(matmul(&mut cpu, &w, &x, tokens), vec![0.0; tokens * rows], "{isa}");
        }
    }
}

#[test]
fn weights_without_a_product_are_refused() {
    fn check<B: Host>(b: &B) {
        let refused = |view| b.weight(view).err().expect("a refusal");
        let q8_1 = view(Dtype::Q8_1, &[1, 32], vec![0; 36]);
        assert!(matches!(refused(q8_1), Error::UnsupportedType { dtype: Dtype::Q8_1 }));
        let four = f32_weight(&[1, 1, 1, 2], &[0.0; 2]);
        assert!(matches!(refused(four), Error::WeightShape { found, .. } if found == "[1, 1, 1, 2]"));
    }
    check(&Reference::new());
    check(&Cpu::new(1).unwrap());
    assert!(matches!(Cpu::new(0), Err(Error::Threads { threads: 0, .. })));
}

#[test]
fn embed_decodes_its_rows_and_leaves_zeros_for_others() {
    fn embed<B: Host>(b: &mut B, table: &TensorView, tokens: &[u32]) -> Vec<f32> {
        let mut out = poisoned(tokens.len() * 256);
        b.embed(&b.weight(table.clone()).unwrap(), 100, tokens, &mut out);
        written(&out)
    }
    let table = Random(6).weight(Dtype::Q6_K, &[5, 256]);
    let none = Random(6).weight(Dtype::Q6_K, &[0, 256]);
    let mut values = vec![0.0; 5 * 256];
    formats::quant::decode(Dtype::Q6_K, table.bytes(), &mut values).unwrap();
    let tokens = [104, 99, 100, 105, 0, u32::MAX, 102];
    let rows = [Some(4), None, Some(0), None, None, None, Some(2)];
    let row = |row: Option<usize>| row.map_or(vec![0.0; 256], |row| values[row * 256..][..256].to_vec());
    let expected: Vec<f32> = rows.into_iter().flat_map(row).collect();
    same_bits("reference", &embed(&mut Reference::new(), &table, &tokens), &expected);
    for (isa, mut cpu) in cpus(1) {
        same_bits(&isa.to_string(), &embed(&mut cpu, &table, &tokens), &expected);
        assert_eq!(embed(&mut cpu, &none, &tokens), vec![0.0; tokens.len() * 256], "{isa}");
    }
}

#[test]
fn rms_norm() {
    fn run<B: Host>(b: &mut B, w: &TensorView, x: &[f32], rows: usize) -> Vec<f32> {
        let mut out = poisoned(x.len());
        b.rms_norm(&fenced(x), rows, &b.weight(w.clone()).unwrap(), 1e-5, &mut out);
        written(&out)
    }
    let mut random = Random(7);
    for width in [1, 3, 22, 176, 256] {
        for rows in [0, 1, 5] {
            let w = random.weight(Dtype::F32, &[width]);
            let x = random.values(rows * width);
            let expected = run(&mut Reference::new(), &w, &x, rows);
            for (isa, mut cpu) in cpus(1) {
                let found = run(&mut cpu, &w, &x, rows);
                // Squares have one sign, so the value's own magnitude is the bound.
                close(&format!("{rows} x {width}, {isa}"), &found, &expected, width, |i| expected[i].abs());
                for t in 0..rows {
                    let alone = run(&mut cpu, &w, &x[t * width..][..width], 1);
                    same_bits(&format!("row {t}, {isa}"), &alone, &found[t * width..][..width]);
                }
            }
        }
    }
    // mean(x^2) = 12.5: 3 / sqrt(12.5) * 2 and 4 / sqrt(12.5) * -1.
    let by_hand = run(&mut Reference::new(), &f32_weight(&[2], &[2.0, -1.0]), &[3.0, 4.0], 1);
    close("by hand", &by_hand, &[1.697_055_5, -1.131_370_2], 2, |_| 1.0);
}

#[test]
fn swiglu_add_and_gather() {
    fn run<B: Host>(b: &mut B, x: &[f32], y: &[f32], rows: usize, width: usize) -> [Vec<f32>; 3] {
        let [mut gate, mut sum, mut gathered] = [fenced(x), fenced(x), poisoned(2 * width)];
        b.swiglu(&mut gate, &fenced(y), rows, width);
        b.add(&mut sum, &fenced(y), rows, width);
        b.gather_rows(&fenced(x), &[rows - 1, 0], width, &mut gathered);
        [written(&gate), written(&sum), written(&gathered)]
    }
    let mut random = Random(8);
    for (rows, width) in [(1, 1), (2, 22), (3, 176), (5, 0)] {
        let x: Vec<f32> = random.values(rows * width).iter().map(|v| v * 30.0).collect();
        let y = random.values(rows * width);
        let [gate, sum, gathered] = run(&mut Reference::new(), &x, &y, rows, width);
        for (isa, mut cpu) in cpus(1) {
            let found = run(&mut cpu, &x, &y, rows, width);
            close(&format!("swiglu, {isa}"), &found[0], &gate, 1, |i| gate[i].abs());
            same_bits(&format!("add, {isa}"), &found[1], &sum);
            same_bits(&format!("gather, {isa}"), &found[2], &gathered);
        }
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        same_bits("sum", &sum, &expected);
        same_bits("gathered", &gathered, &[&x[(rows - 1) * width..], &x[..width]].concat());
    }
}

#[test]
fn write_and_read_copy_ranges() {
    fn check<B: Host>(b: &mut B) {
        let mut buffer = b.zeros(4).unwrap();
        b.write(&mut buffer, &[1.0, 2.0, 3.0]);
        let mut values = [f32::NAN; 2];
        b.read(&buffer, 2..4, &mut values);
        assert_eq!(values, [3.0, 0.0]);
    }
    check(&mut Reference::new());
    check(&mut Cpu::new(1).unwrap());
}

/// Sequences with something in the cache, and their new rows.
struct MlaCase {
    shape: MlaShape,
    sequences: Vec<Sequence>,
    q: Vec<f32>,
    kv: Vec<f32>,
    kv_norm: TensorView,
    kv_b: TensorView,
    /// `[slots, width]`: NaN but for the positions before the new rows.
    cache: Vec<f32>,
}

struct Sequence {
    rows: Range<usize>,
    cached: usize,
    blocks: Vec<u32>,
}

impl MlaCase {
    /// `sequences`: tokens in the cache and new ones. Blocks are dealt out backwards and in turn.
    fn new(random: &mut Random, shape: MlaShape, sequences: &[(usize, usize)]) -> Self {
        let needed = |&(cached, new): &(usize, usize)| (cached + new).div_ceil(BLOCK_TOKENS);
        let total: usize = sequences.iter().map(needed).sum();
        let mut free = 0..total as u32;
        let mut cases: Vec<Sequence> = Vec::new();
        for &(cached, new) in sequences {
            let start = cases.last().map_or(0, |s| s.rows.end);
            cases.push(Sequence { rows: start..start + new, cached, blocks: Vec::new() });
        }
        for round in 0..total {
            for (sequence, sizes) in cases.iter_mut().zip(sequences) {
                if round < needed(sizes) {
                    sequence.blocks.extend(free.next_back());
                }
            }
        }
        let rows = cases.last().map_or(0, |s| s.rows.end);
        let width = shape.cache_width();
        let mut cache = vec![f32::NAN; total * BLOCK_TOKENS * width];
        for sequence in &cases {
            for position in 0..sequence.cached {
                let slot = sequence.span(MlaForm::Absorbed).slot(position);
                cache[slot * width..][..width].copy_from_slice(&random.values(width));
            }
        }
        let scale = 3.0 / (shape.kv_lora as f32).sqrt();
        Self {
            q: random.values(rows * shape.q_width()),
            kv: random.values(rows * width),
            kv_norm: random.weight(Dtype::F32, &[shape.kv_lora]),
            kv_b: random.bf16(scale, &[shape.kv_b_rows(), shape.kv_lora]),
            sequences: cases,
            cache,
            shape,
        }
    }

    fn rows(&self) -> usize {
        self.sequences.last().map_or(0, |s| s.rows.end)
    }

    /// Rotated queries, the cache, and the output.
    fn run<B: Host>(&self, b: &mut B, form: impl Fn(usize) -> MlaForm) -> [Vec<f32>; 3] {
        let spans: Vec<Span<'_>> = self.sequences.iter().enumerate().map(|(i, s)| s.span(form(i))).collect();
        let (mut q, mut cache) = (fenced(&self.q), fenced(&self.cache));
        let kv_norm = b.weight(self.kv_norm.clone()).unwrap();
        b.mla_store(&self.shape, &fenced(&self.kv), &kv_norm, &spans, &mut q, &mut cache);
        let kv_b = b.weight(self.kv_b.clone()).unwrap();
        let mut out = poisoned(self.rows() * self.shape.out_width());
        b.mla_attention(&self.shape, &q, &kv_b, &cache, &spans, &mut out);
        [written(&q), cache.values()[..self.cache.len()].to_vec(), written(&out)]
    }

    /// Longest chain of sums on the way to an output.
    fn terms(&self) -> usize {
        let context = self.sequences.iter().map(|s| s.cached + s.rows.len()).max().unwrap_or(0);
        self.shape.nope + self.shape.cache_width() + self.shape.v + context
    }
}

impl Sequence {
    fn span(&self, form: MlaForm) -> Span<'_> {
        Span { rows: self.rows.clone(), cached: self.cached, blocks: &self.blocks, form }
    }
}

fn mla_cases() -> Vec<MlaCase> {
    let mut random = Random(9);
    let odd = [6, 4, 5, 22];
    let plain = [32, 16, 24, 64];
    [
        (1, odd, vec![(0, 1)]),
        (3, odd, vec![(0, 5), (63, 1), (64, 1), (130, 7)]),
        (5, plain, vec![(0, 70), (50, 20), (200, 1)]),
        (2, [192, 64, 256, 512], vec![(3, 66)]),
        (0, plain, vec![(2, 3)]),
        (4, plain, vec![]),
        (4, plain, vec![(5, 0), (0, 2)]),
    ]
    .into_iter()
    .flat_map(|(heads, sizes, sequences)| {
        [RopePairing::Interleaved, RopePairing::Half]
            .map(|pairing| MlaCase::new(&mut random, mla_shape(heads, sizes, pairing), &sequences))
    })
    .collect()
}

/// Equal where both are numbers, NaN in the same places.
#[track_caller]
fn close_caches(what: &str, found: &[f32], expected: &[f32]) {
    let known = |values: &[f32]| values.iter().copied().filter(|v| !v.is_nan()).collect::<Vec<f32>>();
    let unknown = |values: &[f32]| values.iter().map(|v| v.is_nan()).collect::<Vec<bool>>();
    assert!(unknown(found) == unknown(expected), "{what}: other slots were written");
    let expected = known(expected);
    let largest = largest(&expected);
    close(what, &known(found), &expected, 64, |_| largest);
}

#[test]
fn attention_in_both_forms_and_mixed() {
    for case in mla_cases() {
        let [absorbed, materialised] = [MlaForm::Absorbed, MlaForm::Materialised];
        let alternate = |i: usize| if i.is_multiple_of(2) { absorbed } else { materialised };
        let [q, cache, out] = case.run(&mut Reference::new(), |_| absorbed);
        let largest = largest(&out);
        let other_form = case.run(&mut Reference::new(), |_| materialised);
        close("reference, forms", &other_form[2], &out, case.terms(), |_| largest);
        for (isa, mut cpu) in cpus(1) {
            let forms: [(&str, &dyn Fn(usize) -> MlaForm); 3] =
                [("absorbed", &|_| absorbed), ("materialised", &|_| materialised), ("mixed", &alternate)];
            for (form_name, form) in forms {
                let what = format!("{:?} {form_name}, {isa}", case.shape);
                let found = case.run(&mut cpu, form);
                close(&format!("queries, {what}"), &found[0], &q, 8, |_| 2.0);
                close_caches(&format!("cache, {what}"), &found[1], &cache);
                close(&what, &found[2], &out, case.terms(), |_| largest);
            }
        }
    }
}

#[test]
fn a_row_attends_the_same_alone_and_in_a_batch() {
    for case in mla_cases() {
        for form in [MlaForm::Absorbed, MlaForm::Materialised] {
            for (isa, mut cpu) in cpus(1) {
                let [q, cache, out] = case.run(&mut cpu, |_| form);
                let kv_b = cpu.weight(case.kv_b.clone()).unwrap();
                for sequence in &case.sequences {
                    for row in sequence.rows.clone() {
                        let cached = sequence.span(form).position(row);
                        let span = Span { rows: 0..1, cached, blocks: &sequence.blocks, form };
                        let (q_width, width) = (case.shape.q_width(), case.shape.out_width());
                        let q = fenced(&q[row * q_width..][..q_width]);
                        let mut alone = poisoned(width);
                        cpu.mla_attention(&case.shape, &q, &kv_b, &fenced(&cache), &[span], &mut alone);
                        let what = format!("row {row}, {form:?}, {isa}");
                        same_bits(&what, &written(&alone), &out[row * width..][..width]);
                    }
                }
            }
        }
    }
}

#[test]
fn rotary_pairs_by_hand() {
    // Position 1, angles 1 and 0.01: cos 0.540302 and 0.99995, sin 0.841471 and 0.0099998; times 1.25.
    let [c0, s0, c1, s1] = [0.540_302_3, 0.841_471, 0.999_95, 0.009_999_833].map(|v: f32| v * 1.25);
    let [a, b, c, d] = [1.0, 2.0, 3.0, 4.0];
    let interleaved = [a * c0 - b * s0, a * s0 + b * c0, c * c1 - d * s1, c * s1 + d * c1];
    let half = [a * c0 - c * s0, b * c1 - d * s1, a * s0 + c * c0, b * s1 + d * c1];
    for (pairing, expected) in [(RopePairing::Interleaved, interleaved), (RopePairing::Half, half)] {
        let mut case = MlaCase::new(&mut Random(10), mla_shape(1, [1, 4, 1, 2], pairing), &[(1, 1)]);
        case.q = vec![7.0, a, b, c, d];
        case.kv = vec![1.0, 1.0, a, b, c, d];
        for (name, [q, cache, _]) in [
            ("reference", case.run(&mut Reference::new(), |_| MlaForm::Absorbed)),
            ("cpu", case.run(&mut Cpu::new(1).unwrap(), |_| MlaForm::Absorbed)),
        ] {
            assert_eq!(q[0], 7.0);
            close(&format!("{name} query {pairing:?}"), &q[1..], &expected, 4, |_| 4.0);
            close(&format!("{name} key {pairing:?}"), &cache[6 + 2..6 + 6], &expected, 4, |_| 4.0);
        }
    }
}

/// Three stacks of random blocks for the local experts.
fn expert_weights(
    random: &mut Random,
    shape: &MoeShape,
    [up, down]: [Dtype; 2],
) -> ExpertWeights<TensorView> {
    let (e, i, h) = (shape.local_experts.len(), shape.intermediate, shape.hidden);
    ExpertWeights {
        gate: random.weight(up, &[e, i, h]),
        up: random.weight(up, &[e, i, h]),
        down: random.weight(down, &[e, h, i]),
    }
}

fn run_experts<B: Host>(
    b: &mut B,
    shape: &MoeShape,
    views: &ExpertWeights<TensorView>,
    x: &[f32],
    choice: &[f32],
    rows: usize,
) -> Vec<f32> {
    let [gate, up, down] = [&views.gate, &views.up, &views.down].map(|view| b.weight(view.clone()).unwrap());
    let mut out = poisoned(rows * shape.hidden);
    b.experts(shape, &ExpertWeights { gate, up, down }, &fenced(x), &fenced(choice), rows, &mut out);
    written(&out)
}

/// Distinct random experts with random weights for every row.
fn random_choice(random: &mut Random, shape: &MoeShape, rows: usize) -> Vec<f32> {
    let (e, k) = (shape.n_routed_experts, shape.num_experts_per_tok);
    let mut choice = Vec::new();
    for _ in 0..rows {
        let first = random.bits() as usize % e;
        choice.extend((0..k).map(|i| ((first + i * i) % e) as f32));
        choice.extend(random.values(k));
    }
    choice
}

fn check_experts(
    random: &mut Random,
    types: [Dtype; 2],
    [hidden, intermediate]: [usize; 2],
    local: Range<usize>,
    rows: usize,
) {
    let shape = MoeShape { local_experts: local, ..moe_shape(hidden, intermediate, [7, 3]) };
    let views = expert_weights(random, &shape, types);
    let x = random.values(rows * hidden);
    let choice = random_choice(random, &shape, rows);
    let expected = run_experts(&mut Reference::new(), &shape, &views, &x, &choice, rows);
    let largest = largest(&expected);
    if intermediate == 0 || shape.local_experts.is_empty() {
        assert_eq!(largest, 0.0);
    }
    for (isa, mut cpu) in cpus(1) {
        let what = format!("{types:?} {shape:?}, {rows} rows, {isa}");
        let found = run_experts(&mut cpu, &shape, &views, &x, &choice, rows);
        close(&what, &found, &expected, hidden + intermediate, |_| largest);
        for t in 0..rows {
            let (x, choice) = (&x[t * hidden..][..hidden], &choice[t * 6..][..6]);
            let alone = run_experts(&mut cpu, &shape, &views, x, choice, 1);
            same_bits(&format!("{what}, row {t}"), &alone, &found[t * hidden..][..hidden]);
        }
    }
}

#[test]
fn experts_by_width_and_by_id() {
    let mut random = Random(11);
    for (types, sizes) in [
        ([Dtype::Q4_K, Dtype::Q6_K], [256, 256]),
        ([Dtype::Q4_K, Dtype::Q5_0], [768, 96]),
        ([Dtype::Q2_K, Dtype::F16], [256, 22]),
        ([Dtype::F32, Dtype::BF16], [40, 17]),
        ([Dtype::Q8_0, Dtype::Q8_0], [64, 0]),
    ] {
        for local in [0..7, 2..5, 7..7] {
            for rows in [0, 1, 3, 40] {
                check_experts(&mut random, types, sizes, local.clone(), rows);
            }
        }
    }
}

#[test]
fn experts_with_more_tokens_than_one_pass_takes() {
    check_experts(&mut Random(13), [Dtype::F32, Dtype::F32], [9, 5], 0..7, 700);
}

#[test]
fn threads_change_no_bit() {
    let mut random = Random(12);
    let w = random.weight(Dtype::Q4_K, &[300, 512]);
    let x = random.values(9 * 512);
    let case =
        MlaCase::new(&mut random, mla_shape(5, [32, 16, 24, 64], RopePairing::Half), &[(70, 90), (300, 1)]);
    let shape = moe_shape(256, 256, [7, 3]);
    let views = expert_weights(&mut random, &shape, [Dtype::Q4_K, Dtype::Q6_K]);
    let choice = random_choice(&mut random, &shape, 9);
    for ((isa, mut one), (_, mut three)) in cpus(1).into_iter().zip(cpus(3)) {
        let what = |operation: &str| format!("{operation}, {isa}");
        same_bits(&what("matmul"), &matmul(&mut three, &w, &x, 9), &matmul(&mut one, &w, &x, 9));
        same_bits(&what("matvec"), &matmul(&mut three, &w, &x, 1), &matmul(&mut one, &w, &x, 1));
        for form in [MlaForm::Absorbed, MlaForm::Materialised] {
            let [[.., found], [.., expected]] =
                [case.run(&mut three, |_| form), case.run(&mut one, |_| form)];
            same_bits(&what(&format!("{form:?}")), &found, &expected);
        }
        let run = |cpu: &mut Cpu| run_experts(cpu, &shape, &views, &x, &choice, 9);
        same_bits(&what("experts"), &run(&mut three), &run(&mut one));
    }
}
