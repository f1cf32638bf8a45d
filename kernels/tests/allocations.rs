//! A step no larger than one before allocates nothing.
#![expect(unsafe_code, reason = "an allocator that counts is an unsafe trait")]

mod support;

use formats::Dtype;
use formats::config::RopePairing;
use kernels::cpu::Cpu;
use kernels::step::{BLOCK_TOKENS, LogitRows, MlaForm, Step};
use kernels::{Backend, ExpertWeights};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use support::*;

struct Counting;

thread_local! {
    /// Of this thread alone: what the test harness does meanwhile does not count.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of theirs and needs none.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises about `layout` are the ones that this call asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `System` by way of `alloc` with this layout, as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `step` once to let memory grow and once more to count.
#[track_caller]
fn allocates_nothing(what: &str, mut step: impl FnMut()) {
    step();
    let before = ALLOCATIONS.get();
    step();
    let count = ALLOCATIONS.get() - before;
    assert_eq!(count, 0, "allocations in the second {what}");
}

#[test]
fn a_second_step_allocates_nothing() {
    const ROWS: usize = 70;
    let mut random = Random(1);
    let mut cpu = Cpu::new(1).unwrap();
    let b = &mut cpu;

    let before = ALLOCATIONS.get();
    std::hint::black_box(vec![0u8; 100]);
    assert_eq!(ALLOCATIONS.get() - before, 1, "the counter counts");

    let w = b.weight(random.weight(Dtype::Q4_K, &[40, 768])).unwrap();
    let x = buffer(b, &random.values(ROWS * 768));
    let mut out = b.zeros(ROWS * 768).unwrap();
    let norm = b.weight(random.weight(Dtype::F32, &[768])).unwrap();
    allocates_nothing("matmul", || b.matmul(&w, &x, ROWS, &mut out));
    let mut step = Step::default();
    let tokens: Vec<u32> = (0..ROWS as u32).collect();
    step.push_as(MlaForm::Materialised, &tokens[..66], 10, &[2, 0], LogitRows::Last);
    step.push_as(MlaForm::Absorbed, &tokens[66..], 100, &[1, 3], LogitRows::All);
    allocates_nothing("begin_step", || {
        b.begin_step(&step);
    });
    allocates_nothing("embed", || b.embed(&w, 3, &mut out));
    allocates_nothing("rms_norm", || b.rms_norm(&x, ROWS, &norm, 1e-5, &mut out));
    allocates_nothing("swiglu", || b.swiglu(&mut out, &x, ROWS, 768));
    allocates_nothing("add", || b.add(&mut out, &x, ROWS, 768));
    allocates_nothing("gather_rows", || b.gather_logit_rows(&x, 768, &mut out));

    let shape = mla_shape(5, [32, 16, 24, 64], RopePairing::Interleaved);
    let mut q = buffer(b, &random.values(ROWS * shape.q_width()));
    let kv = buffer(b, &random.values(ROWS * shape.cache_width()));
    let mut cache = b.cache(4 * BLOCK_TOKENS, shape.cache_width()).unwrap();
    let kv_norm = b.weight(random.weight(Dtype::F32, &[shape.kv_lora])).unwrap();
    let kv_b = b.weight(random.bf16(0.2, &[shape.kv_b_rows(), shape.kv_lora])).unwrap();
    allocates_nothing("mla_store", || b.mla_store(&shape, &kv, &kv_norm, &mut q, &mut cache));
    allocates_nothing("mla_attention", || b.mla_attention(&shape, &q, &kv_b, &cache, &mut out));

    let shape = moe_shape(256, 256, [8, 3]);
    let logits = buffer(b, &random.values(ROWS * 8));
    let bias = b.weight(random.weight(Dtype::F32, &[8])).unwrap();
    let mut choice = b.zeros(ROWS * 6).unwrap();
    allocates_nothing("route", || b.route(&shape, &logits, Some(&bias), ROWS, &mut choice));
    let [gate, up, down] =
        [[8, 256, 256]; 3].map(|dims| b.weight(random.weight(Dtype::Q4_K, &dims)).unwrap());
    let experts = ExpertWeights { gate, up, down };
    allocates_nothing("experts", || b.experts(&shape, &experts, &x, &choice, ROWS, &mut out));
}
