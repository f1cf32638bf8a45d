//! Every operation of every backend against its twin in `Reference`, at boundary sizes.
//!
//! Outputs are NaN before each run and no NaN passes; inputs end in NaN that no operation may read.
#![allow(clippy::unwrap_used, reason = "the helpers of these tests are tests too")]

mod support;

use formats::config::RopePairing;
use formats::{Dtype, TensorView};
use kernels::cpu::Cpu;
use kernels::reference::Reference;
use kernels::shape::{MlaShape, MoeShape};
use kernels::step::{BLOCK_TOKENS, LogitRows, MlaForm, Step};
use kernels::{Backend, Error, ExpertWeights, MlpWeights, MoeBuffers, MoeWeights};
use std::ops::Range;
use support::*;

/// What rounding to BF16 adds to a bound, in roundings of an f32: a weight whose type has no kernel.
const BF16_TERMS: usize = 1 << 15;

/// What it adds to a bound, in roundings of an f32, that a value on the way may be rounded to the integer beside its twin's.
const NEIGHBOUR_TERMS: usize = 1 << 14;

/// `[rows, out]`
fn matmul<B: Backend>(b: &mut B, w: &TensorView, x: &[f32], rows: usize) -> Vec<f32> {
    let out_len = w.shape().rows() as usize;
    let w = b.weight(w.clone()).unwrap();
    let (x, mut out) = (fenced(b, x), poisoned(b, rows * out_len));
    b.matmul(&w, &x, rows, &mut out);
    written(b, &out, rows * out_len)
}

/// A product of random blocks against its twin, with a bound from the magnitudes of the very terms.
fn check_matmul(random: &mut Random, dtype: Dtype, [rows, cols, tokens]: [usize; 3]) {
    let w = random.weight(dtype, &[rows, cols]);
    let x = random.values(tokens * cols);
    let mut values = vec![0.0; rows * cols];
    formats::quant::decode(dtype, w.bytes(), &mut values).unwrap();
    let magnitudes = |values: &[f32]| values.iter().map(|v| v.abs()).collect::<Vec<f32>>();
    let sums = f32_weight(&[rows, cols], &magnitudes(&values));
    let sums = matmul(&mut Reference::new(), &sums, &magnitudes(&x), tokens);
    each_backend!(|name, b| {
        let what = format!("{dtype} [{rows}, {cols}] x {tokens}, {name}");
        let expected = matmul(&mut twin(&name), &w, &x, tokens);
        let found = matmul(b, &w, &x, tokens);
        let mut terms = if b.keeps(dtype) { cols } else { cols + BF16_TERMS };
        let many = name == "cuda" && tokens >= MANY;
        if many {
            terms += HALF_TERMS;
        }
        close(&what, &found, &expected, terms, |i| sums[i]);
        for t in (0..tokens).filter(|_| !many) {
            let alone = matmul(b, &w, &x[t * cols..][..cols], 1);
            same_bits(&format!("{what}, row {t} alone"), &alone, &found[t * rows..][..rows]);
        }
    });
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
    let mut random = Random(22);
    for dtype in dtypes() {
        let cols = [dtype.block_len().max(8), 3 * dtype.block_len().max(8)];
        check_matmul(&mut random, dtype, [130, cols[0], 17]);
        check_matmul(&mut random, dtype, [257, cols[1], 129]);
    }
    check_matmul(&mut Random(3), Dtype::F32, [16, 22, 513]);
    check_matmul(&mut Random(3), Dtype::F32, [70, 36, 130]);
}

#[test]
fn matmul_of_nothing() {
    for (rows, cols, tokens) in [(0, 256, 3), (5, 0, 3), (5, 256, 0), (0, 0, 0)] {
        let w = Random(4).weight(Dtype::Q4_K, &[rows, cols]);
        let x = Random(5).values(tokens * cols);
        assert_eq!(matmul(&mut Reference::new(), &w, &x, tokens), vec![0.0; tokens * rows]);
        each_backend!(|name, b| {
            assert_eq!(matmul(b, &w, &x, tokens), vec![0.0; tokens * rows], "{name}");
        });
    }
}

#[test]
fn weights_without_a_product_are_refused() {
    fn check<B: Backend>(b: &B) {
        let refused = |view| b.weight(view).err().expect("a refusal");
        let q8_1 = view(Dtype::Q8_1, &[1, 32], vec![0; 36]);
        assert!(matches!(refused(q8_1), Error::UnsupportedType { dtype: Dtype::Q8_1 }));
        let four = f32_weight(&[1, 1, 1, 2], &[0.0; 2]);
        assert!(matches!(refused(four), Error::WeightShape { found, .. } if found == "[1, 1, 1, 2]"));
    }
    check(&Reference::new());
    each_backend!(|_name, b| {
        check(b);
    });
    assert!(matches!(Cpu::new(0), Err(Error::Threads { threads: 0, .. })));
}

#[test]
fn embed_decodes_its_rows_and_leaves_zeros_for_others() {
    fn embed<B: Backend>(b: &mut B, table: &TensorView, tokens: &[u32]) -> Vec<f32> {
        let mut step = Step::default();
        step.push(tokens, 0, &[0], LogitRows::None);
        b.begin_step(&step);
        let mut out = poisoned(b, tokens.len() * 256);
        b.embed(&b.weight(table.clone()).unwrap(), 100, &mut out);
        written(b, &out, tokens.len() * 256)
    }
    let none = Random(6).weight(Dtype::Q6_K, &[0, 256]);
    let tokens = [104, 99, 100, 105, 0, u32::MAX, 102];
    let rows = [Some(4), None, Some(0), None, None, None, Some(2)];
    for dtype in dtypes().into_iter().filter(|dtype| 256 % dtype.block_len() == 0) {
        let table = Random(6).weight(dtype, &[5, 256]);
        let mut values = vec![0.0; 5 * 256];
        formats::quant::decode(dtype, table.bytes(), &mut values).unwrap();
        let row = |row: Option<usize>| row.map_or(vec![0.0; 256], |row| values[row * 256..][..256].to_vec());
        let expected: Vec<f32> = rows.into_iter().flat_map(row).collect();
        same_bits("reference", &embed(&mut Reference::new(), &table, &tokens), &expected);
        each_backend!(|name, b| {
            let found = embed(b, &table, &tokens);
            if b.keeps(dtype) {
                same_bits(&format!("{name} {dtype}"), &found, &expected);
            } else {
                close(&format!("{name} {dtype}"), &found, &expected, BF16_TERMS, |i| expected[i].abs());
            }
        });
    }
    each_backend!(|name, b| {
        assert_eq!(embed(b, &none, &tokens), vec![0.0; tokens.len() * 256], "{name}");
    });
}

#[test]
fn rms_norm() {
    fn run<B: Backend>(b: &mut B, w: &TensorView, x: &[f32], rows: usize) -> Vec<f32> {
        let (len, x, mut out) = (x.len(), fenced(b, x), poisoned(b, x.len()));
        b.rms_norm(&x, rows, &b.weight(w.clone()).unwrap(), 1e-5, &mut out);
        written(b, &out, len)
    }
    let mut random = Random(7);
    for width in [1, 3, 22, 176, 256, 6144] {
        for rows in [0, 1, 5] {
            let w = random.weight(Dtype::F32, &[width]);
            let x = random.values(rows * width);
            let expected = run(&mut Reference::new(), &w, &x, rows);
            each_backend!(|name, b| {
                let found = run(b, &w, &x, rows);
                // Squares have one sign, so the value's own magnitude is the bound.
                close(&format!("{rows} x {width}, {name}"), &found, &expected, width, |i| expected[i].abs());
                for t in 0..rows {
                    let alone = run(b, &w, &x[t * width..][..width], 1);
                    same_bits(&format!("row {t}, {name}"), &alone, &found[t * width..][..width]);
                }
            });
        }
    }
    // mean(x^2) = 12.5: 3 / sqrt(12.5) * 2 and 4 / sqrt(12.5) * -1.
    let by_hand = run(&mut Reference::new(), &f32_weight(&[2], &[2.0, -1.0]), &[3.0, 4.0], 1);
    close("by hand", &by_hand, &[1.697_055_5, -1.131_370_2], 2, |_| 1.0);
}

#[test]
fn swiglu_add_and_gather() {
    fn run<B: Backend>(b: &mut B, x: &[f32], y: &[f32], rows: usize, width: usize) -> [Vec<f32>; 5] {
        let mut step = Step::default();
        // Of several rows the first is gathered.
        step.push(&[0], 0, &[0], LogitRows::Last);
        step.push(&vec![0; rows - 1], 0, &[1], LogitRows::None);
        b.begin_step(&step);
        let [mut gate, mut sum, mut sum_too, mut gathered] =
            [fenced(b, x), fenced(b, x), fenced(b, x), poisoned(b, width)];
        let (x_in, y, mut normed) = (fenced(b, x), fenced(b, y), poisoned(b, x.len()));
        let weight = b.weight(f32_weight(&[width], &vec![0.5; width])).unwrap();
        b.swiglu(&mut gate, &y, rows, width);
        b.add(&mut sum, &y, rows, width);
        b.gather_logit_rows(&x_in, width, &mut gathered);
        b.add_rms_norm(&mut sum_too, &y, rows, width, &weight, 1e-5, &mut normed);
        let all = rows * width;
        [(gate, all), (sum, all), (gathered, width), (sum_too, all), (normed, all)]
            .map(|(values, len)| written(b, &values, len))
    }
    let mut random = Random(8);
    for (rows, width) in [(1, 1), (2, 22), (3, 176), (5, 0), (3, 6144)] {
        let x: Vec<f32> = random.values(rows * width).iter().map(|v| v * 30.0).collect();
        let y = random.values(rows * width);
        let [gate, sum, gathered, _, normed] = run(&mut Reference::new(), &x, &y, rows, width);
        each_backend!(|name, b| {
            let found = run(b, &x, &y, rows, width);
            close(&format!("swiglu, {name}"), &found[0], &gate, 1, |i| gate[i].abs());
            same_bits(&format!("add, {name}"), &found[1], &sum);
            same_bits(&format!("gather, {name}"), &found[2], &gathered);
            same_bits(&format!("add with norm, {name}"), &found[3], &sum);
            close(&format!("norm of sum, {name}"), &found[4], &normed, width, |i| normed[i].abs());
        });
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        same_bits("sum", &sum, &expected);
        same_bits("gathered", &gathered, &x[..width]);
    }
}

#[test]
fn write_and_read_copy_ranges() {
    fn check<B: Backend>(b: &mut B) {
        let mut buffer = b.zeros(4).unwrap();
        b.write(&mut buffer, &[1.0, 2.0, 3.0]);
        let mut values = [f32::NAN; 2];
        b.read(&buffer, 2..4, &mut values);
        assert_eq!(values, [3.0, 0.0]);
        let mut cache = b.cache(2, 2).unwrap();
        b.write_cache(&mut cache, &[1.0, -2.5, 3.0]);
        let mut values = [f32::NAN; 4];
        b.read_cache(&cache, &mut values);
        assert_eq!(values, [1.0, -2.5, 3.0, 0.0]);
        b.finish().unwrap();
    }
    check(&mut Reference::new());
    each_backend!(|_name, b| {
        check(b);
    });
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
                let slot = &mut cache[sequence.slot(position) * width..][..width];
                // Exact in F16, which is what some backends keep.
                let exact = |value: f32| f32::from_bits(value.to_bits() & 0xffff_0000);
                slot.iter_mut().for_each(|value| *value = exact(random.value()));
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

    /// The step of all sequences, in the form that each is to take.
    fn step(&self, form: impl Fn(usize) -> MlaForm) -> Step {
        let mut step = Step::default();
        for (i, s) in self.sequences.iter().enumerate() {
            step.push_as(form(i), &vec![0; s.rows.len()], s.cached, &s.blocks, LogitRows::None);
        }
        step
    }

    /// Rotated queries and the cache.
    fn store<B: Backend>(&self, b: &mut B) -> [Vec<f32>; 2] {
        b.begin_step(&self.step(|_| MlaForm::Absorbed));
        let mut q = fenced(b, &self.q);
        let width = self.shape.cache_width();
        let mut cache = b.cache(self.cache.len() / width, width).unwrap();
        b.write_cache(&mut cache, &self.cache);
        let (kv, kv_norm) = (fenced(b, &self.kv), b.weight(self.kv_norm.clone()).unwrap());
        b.mla_store(&self.shape, &kv, &kv_norm, &mut q, &mut cache);
        let mut stored = vec![0.0; self.cache.len()];
        b.read_cache(&cache, &mut stored);
        [written(b, &q, self.q.len()), stored]
    }

    /// The output for rotated queries and a cache.
    fn attend<B: Backend>(
        &self,
        b: &mut B,
        [q, cache]: [&[f32]; 2],
        form: impl Fn(usize) -> MlaForm,
    ) -> Vec<f32> {
        self.attend_step(b, [q, cache], &self.step(form))
    }

    fn attend_step<B: Backend>(&self, b: &mut B, [q, values]: [&[f32]; 2], step: &Step) -> Vec<f32> {
        b.prepare_attention(&self.shape).unwrap();
        b.begin_step(step);
        let width = self.shape.cache_width();
        let mut cache = b.cache(values.len() / width, width).unwrap();
        b.write_cache(&mut cache, values);
        let kv_b = b.weight(self.kv_b.clone()).unwrap();
        let len = step.rows() * self.shape.out_width();
        let (q, mut out) = (fenced(b, q), poisoned(b, len));
        b.mla_attention(&self.shape, &q, &kv_b, &cache, &mut out);
        written(b, &out, len)
    }

    /// Longest chain of sums on the way to an output.
    fn terms(&self) -> usize {
        let context = self.sequences.iter().map(|s| s.cached + s.rows.len()).max().unwrap_or(0);
        self.shape.nope + self.shape.cache_width() + self.shape.v + context
    }
}

impl Sequence {
    /// Cache slot of a position.
    fn slot(&self, position: usize) -> usize {
        self.blocks[position / BLOCK_TOKENS] as usize * BLOCK_TOKENS + position % BLOCK_TOKENS
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
        // More than one pass takes of heads.
        (16, [8, 4, 1024, 16], vec![(0, 20), (70, 1)]),
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
fn close_caches(what: &str, found: &[f32], expected: &[f32], terms: usize) {
    let known = |values: &[f32]| values.iter().copied().filter(|v| !v.is_nan()).collect::<Vec<f32>>();
    let unknown = |values: &[f32]| values.iter().map(|v| v.is_nan()).collect::<Vec<bool>>();
    assert!(unknown(found) == unknown(expected), "{what}: other slots were written");
    let expected = known(expected);
    let largest = largest(&expected);
    close(what, &known(found), &expected, terms, |_| largest);
}

#[test]
fn attention_in_both_forms_and_mixed() {
    for case in mla_cases() {
        let [absorbed, materialised] = [MlaForm::Absorbed, MlaForm::Materialised];
        let alternate = |i: usize| if i.is_multiple_of(2) { absorbed } else { materialised };
        let reference = &mut Reference::new();
        let [q, cache] = case.store(reference);
        let out = case.attend(reference, [&q, &cache], |_| absorbed);
        let other_form = case.attend(reference, [&q, &cache], |_| materialised);
        let most = largest(&out);
        close("reference, forms", &other_form, &out, case.terms(), |_| most);
        each_backend!(|name, b| {
            let what = format!("{:?}, {name}", case.shape);
            let [q_found, cache_found] = case.store(b);
            close(&format!("queries, {what}"), &q_found, &q, 8, |_| 2.0);
            let rounding = if name == "cuda" { HALF_TERMS } else { 64 };
            close_caches(&format!("cache, {what}"), &cache_found, &cache, rounding);
            // From what this backend stored, so that its rounding is not counted twice.
            let inputs = [&q_found[..], &cache_found];
            let out = case.attend(&mut Reference::new(), inputs, |_| absorbed);
            let forms: [(&str, &dyn Fn(usize) -> MlaForm); 3] =
                [("absorbed", &|_| absorbed), ("materialised", &|_| materialised), ("mixed", &alternate)];
            let most = largest(&out);
            for (form_name, form) in forms {
                let found = case.attend(b, inputs, form);
                let what = format!("{form_name}, {what}");
                let rounding = if name == "cuda" { 2 * HALF_TERMS } else { 0 };
                close(&what, &found, &out, rounding + case.terms(), |_| most);
            }
        });
    }
}

#[test]
fn a_row_attends_the_same_alone_and_in_a_batch() {
    for case in mla_cases() {
        for form in [MlaForm::Absorbed, MlaForm::Materialised] {
            each_backend!(|name, b| {
                let [q, cache] = case.store(b);
                let out = case.attend(b, [&q, &cache], |_| form);
                for sequence in &case.sequences {
                    let many = name == "cuda" && sequence.rows.len() >= MANY;
                    for row in sequence.rows.clone().filter(|_| !many) {
                        let mut step = Step::default();
                        let cached = sequence.cached + (row - sequence.rows.start);
                        step.push_as(form, &[0], cached, &sequence.blocks, LogitRows::None);
                        let (q_width, width) = (case.shape.q_width(), case.shape.out_width());
                        let q = &q[row * q_width..][..q_width];
                        let alone = case.attend_step(b, [q, &cache], &step);
                        let what = format!("row {row}, {form:?}, {name}");
                        same_bits(&what, &alone, &out[row * width..][..width]);
                    }
                }
            });
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
        let check = |name: &str, [q, cache]: [Vec<f32>; 2], terms: usize| {
            assert_eq!(q[0], 7.0);
            close(&format!("{name} query {pairing:?}"), &q[1..], &expected, 4, |_| 4.0);
            close(&format!("{name} key {pairing:?}"), &cache[6 + 2..6 + 6], &expected, terms, |_| 4.0);
        };
        check("reference", case.store(&mut Reference::new()), 4);
        each_backend!(|name, b| {
            let terms = if name == "cuda" { HALF_TERMS } else { 4 };
            check(&name, case.store(b), terms);
        });
    }
}

fn run_experts<B: Backend>(
    b: &mut B,
    shape: &MoeShape,
    views: &ExpertWeights<TensorView>,
    x: &[f32],
    choice: &[f32],
    rows: usize,
) -> Vec<f32> {
    let [gate, up, down] = [&views.gate, &views.up, &views.down].map(|view| b.weight(view.clone()).unwrap());
    let (x, choice, mut out) = (fenced(b, x), fenced(b, choice), poisoned(b, rows * shape.hidden));
    b.experts(shape, &ExpertWeights { gate, up, down }, &x, &choice, rows, &mut out);
    written(b, &out, rows * shape.hidden)
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
    each_backend!(|name, b| {
        let expected = run_experts(&mut twin(&name), &shape, &views, &x, &choice, rows);
        let largest = largest(&expected);
        if intermediate == 0 || shape.local_experts.is_empty() {
            assert_eq!(largest, 0.0);
        }
        let what = format!("{types:?} {shape:?}, {rows} rows, {name}");
        let found = run_experts(b, &shape, &views, &x, &choice, rows);
        let many = name == "cuda" && rows >= MANY;
        let terms = match kernels::rounding::block_len(types[1]) {
            _ if many => 2 * HALF_TERMS,
            Some(_) if name != "cuda" => NEIGHBOUR_TERMS,
            _ => 0,
        };
        close(&what, &found, &expected, terms + hidden + intermediate, |_| largest);
        for t in (0..rows).filter(|_| !many) {
            let (x, choice) = (&x[t * hidden..][..hidden], &choice[t * 6..][..6]);
            let alone = run_experts(b, &shape, &views, x, choice, 1);
            same_bits(&format!("{what}, row {t}"), &alone, &found[t * hidden..][..hidden]);
        }
    });
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
    check_experts(&mut Random(13), [Dtype::F32, Dtype::F32], [9, 5], 0..7, 1400);
}

/// A whole MoE layer with and without a shared expert, against the operations it consists of.
#[test]
fn moe_is_router_choice_experts_and_shared_expert() {
    fn run<B: Backend>(
        b: &mut B,
        shape: &MoeShape,
        views: &MoeWeights<TensorView>,
        x: &[f32],
        rows: usize,
    ) -> Vec<f32> {
        let make = |view: &TensorView| b.weight(view.clone()).unwrap();
        let weights = MoeWeights {
            shape: shape.clone(),
            gate: make(&views.gate),
            e_score_correction_bias: views.e_score_correction_bias.as_ref().map(make),
            experts: ExpertWeights {
                gate: make(&views.experts.gate),
                up: make(&views.experts.up),
                down: make(&views.experts.down),
            },
            shared: views.shared.as_ref().map(|mlp| MlpWeights {
                width: mlp.width,
                gate_proj: make(&mlp.gate_proj),
                up_proj: make(&mlp.up_proj),
                down_proj: make(&mlp.down_proj),
            }),
        };
        let width = views.shared.as_ref().map_or(0, |mlp| mlp.width);
        let mut buffers = MoeBuffers {
            router_logits: poisoned(b, rows * shape.n_routed_experts),
            choice: poisoned(b, rows * 2 * shape.num_experts_per_tok),
            gate: poisoned(b, rows * width),
            up: poisoned(b, rows * width),
            shared: poisoned(b, rows * shape.hidden),
        };
        let (x, mut out) = (fenced(b, x), poisoned(b, rows * shape.hidden));
        b.moe(&weights, &x, rows, &mut buffers, &mut out);
        written(b, &out, rows * shape.hidden)
    }
    let mut random = Random(21);
    let (hidden, width) = (256, 512);
    for (types, shared) in [([Dtype::Q4_K, Dtype::Q6_K], true), ([Dtype::Q8_0, Dtype::Q5_K], false)] {
        for rows in [1, 3, 40] {
            let shape = moe_shape(hidden, width, [16, 3]);
            let views = MoeWeights {
                shape: shape.clone(),
                gate: random.weight(Dtype::F32, &[16, hidden]),
                e_score_correction_bias: shared.then(|| random.weight(Dtype::F32, &[16])),
                experts: expert_weights(&mut random, &shape, types),
                shared: shared.then(|| MlpWeights {
                    width,
                    gate_proj: random.weight(types[0], &[width, hidden]),
                    up_proj: random.weight(types[0], &[width, hidden]),
                    down_proj: random.weight(types[1], &[hidden, width]),
                }),
            };
            let x = random.values(rows * hidden);
            each_backend!(|name, b| {
                let expected = run(&mut twin(&name), &shape, &views, &x, rows);
                let found = run(b, &shape, &views, &x, rows);
                let what = format!("moe of {types:?}, {rows} rows, {name}");
                let terms = match name == "cuda" {
                    true if rows >= MANY => 2 * HALF_TERMS,
                    true => 0,
                    false => NEIGHBOUR_TERMS,
                };
                close(&what, &found, &expected, terms + hidden + width, |_| largest(&expected));
            });
        }
    }
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
            let [q, cache] = case.store(&mut one);
            let expected = case.attend(&mut one, [&q, &cache], |_| form);
            let found = case.attend(&mut three, [&q, &cache], |_| form);
            same_bits(&what(&format!("{form:?}")), &found, &expected);
        }
        let run = |cpu: &mut Cpu| run_experts(cpu, &shape, &views, &x, &choice, 9);
        same_bits(&what("experts"), &run(&mut three), &run(&mut one));
    }
}
