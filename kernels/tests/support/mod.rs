//! Inputs, poisoned outputs and comparisons that the tests of this folder share.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a helper of tests")]

use bytes::Bytes;
use formats::config::{GroupScore, RopeConfig, RopePairing, RouterConfig, ScoringFunc};
use formats::{Dtype, Shape, TensorView, quant};
use kernels::cpu::{Cpu, Isa};
use kernels::cuda::Cuda;
use kernels::cuda::driver::Device;
use kernels::reference::Reference;
use kernels::shape::{MlaShape, MoeShape};
use kernels::{Backend, ExpertWeights};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, LazyLock};

/// SplitMix64 (Steele, Lea and Flood, 2014): the same stream everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in [-1, 1).
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }

    /// A weight of random whole blocks.
    pub fn weight(&mut self, dtype: Dtype, dims: &[usize]) -> TensorView {
        let elements: usize = dims.iter().product();
        let bytes = (0..elements / dtype.block_len()).flat_map(|_| self.block(dtype)).collect();
        view(dtype, dims, bytes)
    }

    /// A BF16 weight of values in [-scale, scale).
    pub fn bf16(&mut self, scale: f32, dims: &[usize]) -> TensorView {
        let values = self.values(dims.iter().product());
        let bytes = values
            .iter()
            .flat_map(|v| [(v * scale).to_bits().to_le_bytes()[2], (v * scale).to_bits().to_le_bytes()[3]]);
        view(Dtype::BF16, dims, bytes.collect())
    }

    /// Random bytes, drawn again until they mean numbers of a weight's size, largest magnitude 2^-8 to 4: a random f16
    /// scale is rarely sensible, and this needs no knowledge of where a type keeps it.
    fn block(&mut self, dtype: Dtype) -> Vec<u8> {
        let small = self.bits() as i8 % 5;
        match dtype {
            Dtype::I8 => return small.to_le_bytes().into(),
            Dtype::I16 => return i16::from(small).to_le_bytes().into(),
            Dtype::I32 => return i32::from(small).to_le_bytes().into(),
            Dtype::I64 => return i64::from(small).to_le_bytes().into(),
            Dtype::F64 => return f64::from(self.value()).to_le_bytes().into(),
            _ => {}
        }
        let decode = quant::decoder(dtype).expect("a type with a decoder");
        let mut values = vec![0.0; dtype.block_len()];
        loop {
            let bytes: Vec<u8> = (0..dtype.block_bytes()).map(|_| self.bits() as u8).collect();
            decode(&bytes, &mut values);
            let largest = values
                .iter()
                .fold(0.0, |largest: f32, v| if v.is_nan() { f32::NAN } else { largest.max(v.abs()) });
            if values.iter().all(|v| v.is_finite()) && (1.0 / 256.0..4.0).contains(&largest) {
                return bytes;
            }
        }
    }
}

pub fn view(dtype: Dtype, dims: &[usize], bytes: Vec<u8>) -> TensorView {
    let dims: Vec<u64> = dims.iter().map(|&d| d as u64).collect();
    TensorView::new("weight", dtype, Shape::new(&dims).unwrap(), Bytes::from(bytes)).unwrap()
}

pub fn f32_weight(dims: &[usize], values: &[f32]) -> TensorView {
    view(Dtype::F32, dims, values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

/// Types that have numbers.
pub fn dtypes() -> Vec<Dtype> {
    Dtype::all().filter(|&dtype| quant::decoder(dtype).is_some()).collect()
}

/// The backend under test with every instruction set of this machine, portable included.
pub fn cpus(threads: usize) -> Vec<(Isa, Cpu)> {
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available.map(|isa| (isa, Cpu::with_isa(isa, threads).unwrap())).collect()
}

/// The GPU of a thread, which it gets back when the test is done with it: to open one and load its kernels takes a second.
pub struct Gpu(Option<Cuda>);

thread_local! {
    static IDLE: RefCell<Option<Cuda>> = const { RefCell::new(None) };
}

impl Deref for Gpu {
    type Target = Cuda;

    fn deref(&self) -> &Cuda {
        self.0.as_ref().unwrap()
    }
}

impl DerefMut for Gpu {
    fn deref_mut(&mut self) -> &mut Cuda {
        self.0.as_mut().unwrap()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        IDLE.set(self.0.take());
    }
}

/// The GPU, where `SHARDRUN_TEST_DEVICE=cuda` asks for it; otherwise a line on stderr says that nothing ran there.
pub fn cuda() -> Option<Gpu> {
    const VARIABLE: &str = "SHARDRUN_TEST_DEVICE";
    match std::env::var(VARIABLE).as_deref() {
        Ok("cuda") => {
            static DEVICE: LazyLock<Arc<Device>> = LazyLock::new(|| Device::open(0).unwrap());
            let idle = IDLE.take();
            Some(Gpu(Some(idle.unwrap_or_else(|| Cuda::new(&DEVICE).unwrap()))))
        }
        Ok(other) => panic!("{VARIABLE}: expected cuda, found {other}"),
        Err(_) => {
            static SAID: std::sync::Once = std::sync::Once::new();
            SAID.call_once(|| {
                // Straight to the stream: the test harness hides what the print macros write.
                let line = format!("NOT RUN on a GPU without {VARIABLE}=cuda\n");
                std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
            });
            None
        }
    }
}

/// Runs a block for every backend under test: `name` is a `String`, `b` a `&mut` of it.
#[macro_export]
macro_rules! each_backend {
    (|$name:ident, $b:ident| $body:block) => {
        for (isa, mut cpu) in cpus(1) {
            let ($name, $b) = (isa.to_string(), &mut cpu);
            $body
        }
        if let Some(mut gpu) = cuda() {
            let ($name, $b) = ("cuda".to_owned(), &mut *gpu);
            $body
        }
    };
}

/// A backend's twin: on a processor activations are rounded before most products.
pub fn twin(name: &str) -> Reference {
    if name == "cuda" { Reference::new() } else { Reference::rounded() }
}

pub fn buffer<B: Backend>(b: &mut B, values: &[f32]) -> B::Buffer {
    let mut buffer = b.zeros(values.len()).unwrap();
    b.write(&mut buffer, values);
    buffer
}

/// `values`, then NaN where no operation may read.
pub fn fenced<B: Backend>(b: &mut B, values: &[f32]) -> B::Buffer {
    buffer(b, &[values, &[f32::NAN; FENCE]].concat())
}

/// An output of `len` values, all NaN, and NaN after it.
pub fn poisoned<B: Backend>(b: &mut B, len: usize) -> B::Buffer {
    buffer(b, &vec![f32::NAN; len + FENCE])
}

/// The output of `len` values, if all of it was written and nothing after it.
#[track_caller]
pub fn written<B: Backend>(b: &mut B, out: &B::Buffer, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len + FENCE];
    b.read(out, 0..len + FENCE, &mut values);
    b.finish().unwrap();
    let fence = values.split_off(len);
    assert!(fence.iter().all(|v| v.is_nan()), "values were written beyond the output");
    if let Some(i) = values.iter().position(|v| v.is_nan()) {
        panic!("value {i} of {} is NaN", values.len());
    }
    values
}

const FENCE: usize = 37;

/// Compares with what rounding may do. A sum of n terms in f32 errs by at most n * EPSILON of the sum of their magnitudes,
/// in practice by its square root; `terms` is the length of the longest chain of sums, and `magnitude(i)` bounds the
/// magnitudes that value i was summed from.
#[track_caller]
pub fn close(what: &str, found: &[f32], expected: &[f32], terms: usize, magnitude: impl Fn(usize) -> f32) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let tolerance = (terms + 8) as f32 * f32::EPSILON * magnitude(i);
        assert!((f - e).abs() <= tolerance, "{what}: value {i} is {f}, expected {e} within {tolerance:e}");
    }
}

/// The largest magnitude: what random terms of either sign sum up to, for want of the terms themselves.
pub fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, v| largest.max(v.abs()))
}

#[track_caller]
pub fn same_bits(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    let differs = found.iter().zip(expected).position(|(f, e)| f.to_bits() != e.to_bits());
    if let Some(i) = differs {
        panic!("{what}: value {i} is {:e}, expected {:e} bit for bit", found[i], expected[i]);
    }
}

pub fn mla_shape(heads: usize, [nope, rope, v, kv_lora]: [usize; 4], pairing: RopePairing) -> MlaShape {
    let inv_freq = (0..rope / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / rope as f32)).collect();
    MlaShape {
        heads,
        nope,
        rope,
        v,
        kv_lora,
        softmax_scale: 3.0 / ((nope + rope) as f32).sqrt(),
        eps: 1e-5,
        rotary: RopeConfig { inv_freq, pairing, attention_scaling: 1.25 },
    }
}

pub fn moe_shape(hidden: usize, intermediate: usize, [experts, per_token]: [usize; 2]) -> MoeShape {
    MoeShape {
        hidden,
        n_routed_experts: experts,
        num_experts_per_tok: per_token,
        local_experts: 0..experts,
        intermediate,
        router: RouterConfig {
            scoring_func: ScoringFunc::Sigmoid,
            n_group: 1,
            topk_group: 1,
            group_score: GroupScore::TopTwoSum,
            norm_topk_floor: Some(1e-20),
            routed_scaling_factor: 2.5,
        },
    }
}

/// Tokens from which on a GPU rounds the factors of products to f16, and what that adds to a bound: 2^-11 of each factor.
pub const MANY: usize = 17;
pub const HALF_TERMS: usize = 1 << 13;

/// Three stacks of random blocks for the local experts.
pub fn expert_weights(
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
