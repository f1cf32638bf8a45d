//! Instruction sets, and the proof that this processor has one: the backend's only unsafe code.
//!
//! A [`Kernel`] is written once over a [`Vector`]. [`Proven::run`] inlines it into a function that is compiled for the
//! instruction set, with that set's vector. Arrays in place of vector registers would need no unsafe code in the vectors,
//! but the compiler keeps register tiles of them in memory as often as not, at a twentieth of the speed.
//!
//! AMX is left out: its tiles need the system's permission besides the processor's word, and nothing here was run where they are.
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "instructions that were detected at run time, and functions compiled for them"
    )
)]

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::Left;

use super::integers::Meeting;
use formats::Dtype;

/// What [`Proven::in_registers`] works with: nothing, where there is no such way.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Debug, Default)]
pub(super) struct Left;

/// An instruction set that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// What every processor of the target has.
    Portable,
    /// AVX2, FMA and F16C, which came together.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// The same with VNNI: products of bytes in one instruction.
    Avx512Vnni,
}

impl Isa {
    /// All of them, the slowest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni];

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Self::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Vnni => false,
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Portable => "portable",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
            Self::Avx512Vnni => "AVX-512 VNNI",
        })
    }
}

/// A hot loop and its inputs.
pub(super) trait Kernel {
    /// Runs with vectors of `L` lanes, a divisor of [`MAX_LANES`].
    ///
    /// `out` is an argument of its own, from here to the function that is compiled: an argument is how the compiler knows
    /// that writing it changes no input, and without that most decoders stay scalar.
    ///
    /// Implementations and all they call must be `#[inline(always)]`: only what is inlined is compiled for the
    /// instruction set.
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]);
}

/// A register of `L` f32 lanes.
///
/// Those that need an instruction set are private to this module, so that only [`Proven::run`] can bring them into use.
pub(super) trait Vector<const L: usize>: Copy {
    /// As many integers.
    type Integer: Integer<L>;

    /// Each integer rounded to the nearest f32, ties to even.
    fn from_integers(integers: Self::Integer) -> Self;

    /// `value` in all lanes.
    fn splat(value: f32) -> Self;

    /// The lanes from memory.
    fn load(lanes: &[f32; L]) -> Self;

    /// The lanes from the upper halves of f32 in memory, little-endian.
    fn load_upper(lanes: &[[u8; 2]; L]) -> Self;

    /// The lanes to memory.
    fn store(self, lanes: &mut [f32; L]);

    /// `self * b`
    fn mul(self, b: Self) -> Self;

    /// `self * b + c`, rounded once if the instruction set can.
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// Sum of the lanes, always in this order: halves onto each other until one is left.
    fn sum(self) -> f32;

    /// What [`Vector::mul_add`] does in each lane.
    fn lane_mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// A register of `L` i32 lanes, each of which can also be seen as four bytes or two halves. Sums wrap around.
pub(super) trait Integer<const L: usize>: Copy {
    /// `value` in all lanes.
    fn splat(value: i32) -> Self;

    /// The lanes from memory.
    fn load<T: Lane>(lanes: &[T; L]) -> Self;

    /// The lanes to memory.
    fn store(self, lanes: &mut [i32; L]);

    /// Sum of each lane.
    fn add(self, b: Self) -> Self;

    /// Product of each lane.
    fn mul(self, b: Self) -> Self;

    /// Adds to each lane the products of four unsigned bytes of `w` with four signed ones of `x`. Bytes of `w` above 127 need
    /// `WIDE`: without it, pairs of products may be added in 16 bits.
    fn dot4<const WIDE: bool>(self, w: Self, x: Self) -> Self;

    /// Adds to each lane the products of two signed halves.
    fn dot2(self, a: Self, b: Self) -> Self;

    /// `values[byte]` for each byte up to 15; of others something.
    fn look_up(self, values: &[u8; 16]) -> Self;

    /// Sum of the lanes.
    fn sum(self) -> i32;

    /// Lane l is `scales[(part * L + l) / PER]`, PER being 4 or 8.
    fn spread<const PER: usize>(scales: &[i32; 16], part: usize) -> Self;

    /// `columns[c][r] = rows[r][c]`
    fn transpose(rows: [&[[u8; 4]; L]; L], columns: &mut [[[u8; 4]; L]; L]);
}

/// Four bytes that are a lane of an [`Integer`].
pub(super) trait Lane: Copy {
    /// The lane.
    fn bits(self) -> i32;
}

impl Lane for i32 {
    #[inline(always)]
    fn bits(self) -> i32 {
        self
    }
}

impl Lane for [u8; 4] {
    #[inline(always)]
    fn bits(self) -> i32 {
        i32::from_ne_bytes(self)
    }
}

impl Lane for [i8; 4] {
    #[inline(always)]
    fn bits(self) -> i32 {
        let [a, b, c, d] = self;
        i32::from_ne_bytes([a as u8, b as u8, c as u8, d as u8])
    }
}

impl Lane for [i16; 2] {
    #[inline(always)]
    fn bits(self) -> i32 {
        let ([a, b], [c, d]) = (self[0].to_ne_bytes(), self[1].to_ne_bytes());
        i32::from_ne_bytes([a, b, c, d])
    }
}

/// Asks for bytes that are needed soon, as many as there are of them: a processor's own guesses end with each page of 4 KiB.
#[inline(always)]
pub(super) fn fetch(bytes: &[u8], range: std::ops::Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    for byte in range.step_by(LINE) {
        let line = bytes.as_ptr().wrapping_add(byte).cast();
        // SAFETY: every processor of the target has the instruction, which reads nothing and takes any address.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (bytes, range);
}

/// Bytes that come together.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// The widest vector in f32 lanes.
pub(super) const MAX_LANES: usize = 16;

/// An instruction set that this processor has. Only detection makes one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Proven(Isa);

impl Proven {
    /// `isa`, if this processor has it.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self(isa))
    }

    /// The fastest one.
    pub(super) fn best() -> Self {
        Isa::ALL.into_iter().rev().find_map(Self::new).unwrap_or(Self(Isa::Portable))
    }

    /// Runs `kernel` compiled for this instruction set.
    pub(super) fn run<K: Kernel>(self, kernel: K, out: &mut [f32]) {
        match self.0 {
            // SAFETY: a `Proven(Avx2)` exists only after `is_available` detected every feature of `avx2`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::avx2(kernel, out) },
            // SAFETY: a `Proven(Avx512)` exists only after `is_available` detected every feature of `avx512`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { x86::avx512(kernel, out) },
            // SAFETY: a `Proven(Avx512Vnni)` exists only after `is_available` detected every feature of `avx512_vnni`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => unsafe { x86::avx512_vnni(kernel, out) },
            _ => portable(kernel, out),
        }
    }
}

impl Proven {
    /// The products of a few activation rows with weights of a type by this instruction set's own way; `meeting` comes back where
    /// it has none.
    pub(super) fn in_registers<'a>(
        self,
        dtype: Dtype,
        meeting: Meeting<'a>,
        out: &mut [f32],
    ) -> Option<Meeting<'a>> {
        #[cfg(target_arch = "x86_64")]
        if let Some(few) = x86::in_registers(self.0, dtype) {
            // SAFETY: a `Proven` exists only after `is_available` detected every feature of its instruction set.
            unsafe { few(meeting, out) };
            return None;
        }
        let _ = (dtype, out);
        Some(meeting)
    }
}

/// Not inlined, so that `out` is an argument here too.
#[inline(never)]
fn portable<K: Kernel>(kernel: K, out: &mut [f32]) {
    kernel.run::<Portable, 4>(out);
}

/// Four lanes that every compiler knows how to keep in a register; multiply and add are two roundings, because `mul_add`
/// without the instruction is a call.
#[derive(Clone, Copy)]
struct Portable([f32; 4]);

impl Vector<4> for Portable {
    type Integer = PortableInteger;

    #[inline(always)]
    fn from_integers(integers: PortableInteger) -> Self {
        Self(integers.0.map(|lane| lane as f32))
    }

    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] * b.0[l]))
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 4])
    }

    #[inline(always)]
    fn load(lanes: &[f32; 4]) -> Self {
        Self(*lanes)
    }

    #[inline(always)]
    fn load_upper(lanes: &[[u8; 2]; 4]) -> Self {
        Self(lanes.map(|lane| f32::from_bits(u32::from(u16::from_le_bytes(lane)) << 16)))
    }

    #[inline(always)]
    fn store(self, lanes: &mut [f32; 4]) {
        *lanes = self.0;
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] * b.0[l] + c.0[l]))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let [a, b, c, d] = self.0;
        (a + c) + (b + d)
    }

    #[inline(always)]
    fn lane_mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// [`Portable`]'s integers.
#[derive(Clone, Copy)]
struct PortableInteger([i32; 4]);

impl Integer<4> for PortableInteger {
    #[inline(always)]
    fn splat(value: i32) -> Self {
        Self([value; 4])
    }

    #[inline(always)]
    fn load<T: Lane>(lanes: &[T; 4]) -> Self {
        Self(lanes.map(T::bits))
    }

    #[inline(always)]
    fn store(self, lanes: &mut [i32; 4]) {
        *lanes = self.0;
    }

    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l].wrapping_add(b.0[l])))
    }

    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l].wrapping_mul(b.0[l])))
    }

    #[inline(always)]
    fn dot4<const WIDE: bool>(self, w: Self, x: Self) -> Self {
        let dot = |w: i32, x: i32| {
            let products = w.to_ne_bytes().into_iter().zip(x.to_ne_bytes());
            products.map(|(w, x)| i32::from(w) * i32::from(x as i8)).sum::<i32>()
        };
        Self(std::array::from_fn(|l| self.0[l].wrapping_add(dot(w.0[l], x.0[l]))))
    }

    #[inline(always)]
    fn dot2(self, a: Self, b: Self) -> Self {
        // Of each half, whichever end of the lane it is at.
        let dot = |a: i32, b: i32| (a as i16 as i32) * (b as i16 as i32) + (a >> 16) * (b >> 16);
        Self(std::array::from_fn(|l| self.0[l].wrapping_add(dot(a.0[l], b.0[l]))))
    }

    #[inline(always)]
    fn look_up(self, values: &[u8; 16]) -> Self {
        let of = |byte: u8| values[usize::from(byte & 15)];
        Self(self.0.map(|lane| i32::from_ne_bytes(lane.to_ne_bytes().map(of))))
    }

    #[inline(always)]
    fn sum(self) -> i32 {
        self.0.into_iter().fold(0, i32::wrapping_add)
    }

    #[inline(always)]
    fn spread<const PER: usize>(scales: &[i32; 16], part: usize) -> Self {
        Self([scales[part * 4 / PER]; 4])
    }

    #[inline(always)]
    fn transpose(rows: [&[[u8; 4]; 4]; 4], columns: &mut [[[u8; 4]; 4]; 4]) {
        for (r, row) in rows.into_iter().enumerate() {
            for (column, lane) in columns.iter_mut().zip(row) {
                column[r] = *lane;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sum;

    impl Kernel for Sum {
        #[inline(always)]
        fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
            let mut lanes = [0.0; L];
            lanes.copy_from_slice(&out[..L]);
            (out[0], out[1]) = (V::load(&lanes).sum(), L as f32);
        }
    }

    #[test]
    fn sums_take_every_lane_once_in_the_documented_order() {
        // Of many sums of fractions some are rounded otherwise in any other order.
        for start in 0..100 {
            let values: [f32; MAX_LANES] = std::array::from_fn(|i| 1.0 / (1.5 + (start * 7 + i) as f32));
            for isa in Isa::ALL.into_iter().filter_map(Proven::new) {
                let mut out = values;
                isa.run(Sum, &mut out);
                let mut halves = values;
                let mut half = out[1] as usize / 2;
                while half > 0 {
                    for i in 0..half {
                        halves[i] += halves[half + i];
                    }
                    half /= 2;
                }
                assert_eq!(out[0], halves[0], "{isa:?}");
            }
        }
    }

    /// Every operation on integers, of each lane.
    struct Operations<'a> {
        w: &'a [[u8; 4]; MAX_LANES],
        x: &'a [[i8; 4]; MAX_LANES],
    }

    impl Kernel for Operations<'_> {
        #[inline(always)]
        fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
            let expect = |what: &str, found: V::Integer, lane: &dyn Fn(usize) -> i32| {
                let mut lanes = [0; L];
                found.store(&mut lanes);
                assert_eq!(lanes, std::array::from_fn(lane), "{what}, {L} lanes");
            };
            let (w, x) = (self.w.first_chunk().unwrap(), self.x.first_chunk().unwrap());
            let (w_lanes, x_lanes) = (V::Integer::load(w), V::Integer::load(x));
            let dot =
                |l: usize| w[l].iter().zip(x[l]).map(|(&w, x)| i32::from(w) * i32::from(x)).sum::<i32>();
            let base = V::Integer::splat(-7);
            expect("wide dot4", base.dot4::<true>(w_lanes, x_lanes), &|l| dot(l) - 7);
            let narrow = w.map(|w| w.map(|w| w & 0x7f));
            let dot =
                |l: usize| narrow[l].iter().zip(x[l]).map(|(&w, x)| i32::from(w) * i32::from(x)).sum::<i32>();
            expect("dot4", base.dot4::<false>(V::Integer::load(&narrow), x_lanes), &|l| dot(l) - 7);
            let halves: [[i16; 2]; L] =
                w.map(|[a, b, c, d]| [i16::from_ne_bytes([a, b]), i16::from_ne_bytes([c, d])]);
            let other: [[i16; 2]; L] = x.map(|[a, b, c, _]| [i16::from(a) * i16::from(b), i16::from(c)]);
            let dot = |l: usize| {
                let product = |i: usize| i32::from(halves[l][i]) * i32::from(other[l][i]);
                product(0) + product(1) - 7
            };
            expect("dot2", base.dot2(V::Integer::load(&halves), V::Integer::load(&other)), &dot);
            expect("add", w_lanes.add(x_lanes), &|l| w[l].bits().wrapping_add(x[l].bits()));
            expect("mul", w_lanes.mul(x_lanes), &|l| w[l].bits().wrapping_mul(x[l].bits()));
            let (nibbles, values) = (w.map(|w| w.map(|w| w & 15)), std::array::from_fn(|i| (i * 17) as u8));
            let looked_up = V::Integer::load(&nibbles).look_up(&values);
            expect("look-up", looked_up, &|l| nibbles[l].map(|w| w * 17).bits());
            assert_eq!(w_lanes.sum(), w.iter().fold(0, |sum: i32, w| sum.wrapping_add(w.bits())));
            let scales = std::array::from_fn(|i| 100 + i as i32);
            for part in 0..64 / L {
                let lane = |per: usize| move |l: usize| 100 + ((part * L + l) / per) as i32;
                expect("spread by 4", V::Integer::spread::<4>(&scales, part), &lane(4));
                expect("spread by 8", V::Integer::spread::<8>(&scales, part), &lane(8));
            }
            let rows: [[[u8; 4]; L]; L] =
                std::array::from_fn(|r| std::array::from_fn(|c| [r as u8, c as u8, 0, 9]));
            let mut columns = [[[1; 4]; L]; L];
            V::Integer::transpose(std::array::from_fn(|r| &rows[r]), &mut columns);
            assert_eq!(columns, std::array::from_fn(|c| std::array::from_fn(|r| [r as u8, c as u8, 0, 9])));
            V::from_integers(w_lanes).mul(V::splat(2.0)).store(out.first_chunk_mut().unwrap());
            assert_eq!(out[..L], w.map(|w| w.bits() as f32 * 2.0));
        }
    }

    #[test]
    fn integers_are_exact_at_their_ends() {
        for [w, x] in [[0u8, 0i8 as u8], [255, -128i8 as u8], [255, 127], [127, -127i8 as u8], [201, 77]] {
            for isa in Isa::ALL.into_iter().filter_map(Proven::new) {
                let bytes = |start: u8, step: u8| -> [[u8; 4]; MAX_LANES] {
                    let byte = |l: usize, i: usize| start.wrapping_sub(step.wrapping_mul((l * 4 + i) as u8));
                    std::array::from_fn(|l| std::array::from_fn(|i| byte(l, i)))
                };
                for step in [0, 3] {
                    let x = bytes(x, step).map(|lane| lane.map(|x| x as i8));
                    isa.run(Operations { w: &bytes(w, step), x: &x }, &mut [0.0; MAX_LANES]);
                }
            }
        }
    }
}
