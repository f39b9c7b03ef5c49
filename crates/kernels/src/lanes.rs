//! Sixteen f32 lanes, the same operations in the same order on every instruction set.
//!
//! A kernel is written once, as a [`Kernel`] over a [`Simd`], and compiled for AVX-512, for AVX2,
//! for NEON and for plain Rust. Every operation here is one IEEE operation per lane, multiply-add is
//! always fused, and sums across lanes follow one fixed tree, so all of them give the same bits.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use half::f16;

use crate::isa::Isa;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// 1.5 * 2^23: adding it rounds to an integer.
const SHIFT: f32 = 12_582_912.0;

/// Sixteen f32 values and what can be done to them.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen lanes.
    type V: Copy;
    /// How many vectors fit in registers.
    const REGISTERS: usize;

    /// Runs a kernel as a function of its own, with the same instructions.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, x: &[f32; LANES]) -> Self::V;
    fn store(self, v: Self::V, to: &mut [f32; LANES]);
    fn load_f16(self, x: &[f16; LANES]) -> Self::V;
    /// Rounds to nearest, ties to even.
    fn store_f16(self, v: Self::V, to: &mut [f16; LANES]);
    fn load_i8(self, x: &[i8; LANES]) -> Self::V;
    /// Rounds to nearest, ties to even; what is beyond an i8 becomes some i8.
    fn store_i8(self, v: Self::V, to: &mut [i8; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`, so `b` where either is not a number.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`, so `b` where either is not a number.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x < bound ? 0 : v`.
    fn zero_below(self, x: Self::V, bound: Self::V, v: Self::V) -> Self::V;
    /// `x < bound ? a : b`.
    fn choose_below(self, x: Self::V, bound: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// 2^n of lanes that hold 1.5 * 2^23 + n, for n of -126..=127.
    fn power_of_two(self, shifted: Self::V) -> Self::V;

    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }

    /// Loads the first sixteen values of a slice.
    #[inline(always)]
    fn load_slice(self, x: &[f32]) -> Self::V {
        match x.first_chunk() {
            Some(x) => self.load(x),
            None => self.load_part(x),
        }
    }

    /// Loads up to sixteen values; the other lanes are zero.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::V {
        let mut lanes = [0.0; LANES];
        let n = x.len().min(LANES);
        lanes[..n].copy_from_slice(&x[..n]);
        self.load(&lanes)
    }

    /// Stores as many lanes as the slice takes, at most sixteen.
    #[inline(always)]
    fn store_slice(self, v: Self::V, to: &mut [f32]) {
        match to.first_chunk_mut() {
            Some(to) => self.store(v, to),
            None => {
                let mut lanes = [0.0; LANES];
                self.store(v, &mut lanes);
                let n = to.len();
                to.copy_from_slice(&lanes[..n]);
            }
        }
    }

    /// The sum of all lanes: lane i with i + 8, then i + 4, i + 2, i + 1.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                x[i] += x[i + width];
            }
            width /= 2;
        }
        x[0]
    }

    /// The largest lane.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                x[i] = if x[i + width] > x[i] {
                    x[i + width]
                } else {
                    x[i]
                };
            }
            width /= 2;
        }
        x[0]
    }

    /// e^x to about one unit in the last place; 0 below -87, at most e^88, and not a number where x
    /// is none.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        exp(self, x)
    }

    /// 1 / (1 + e^-x).
    #[inline(always)]
    fn sigmoid(self, x: Self::V) -> Self::V {
        let one = self.splat(1.0);
        let e = self.exp(self.sub(self.zero(), x));
        self.div(one, self.add(one, e))
    }

    /// x * sigmoid(x).
    #[inline(always)]
    fn silu(self, x: Self::V) -> Self::V {
        let e = self.exp(self.sub(self.zero(), x));
        self.div(x, self.add(self.splat(1.0), e))
    }

    /// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x * sigmoid(2 u).
    #[inline(always)]
    fn gelu(self, x: Self::V) -> Self::V {
        // -2 sqrt(2 / pi)
        const FACTOR: f32 = -1.595_769;
        let cubic = self.mul_add(self.mul(x, x), self.splat(0.044_715), self.splat(1.0));
        let e = self.exp(self.mul(self.mul(self.splat(FACTOR), x), cubic));
        self.div(x, self.add(self.splat(1.0), e))
    }

    /// ln(1 + e^x) = max(x, 0) + ln(1 + y) with y = e^-|x|, and ln(1 + y) = 2 atanh(y / (2 + y))
    /// by its series: the argument is at most 1/3, so eight terms leave less than 1e-8.
    #[inline(always)]
    fn softplus(self, x: Self::V) -> Self::V {
        let negated = self.sub(self.zero(), x);
        let y = self.exp(self.min(x, negated));
        let z = self.div(y, self.add(self.splat(2.0), y));
        let z2 = self.mul(z, z);
        let mut p = self.splat(1.0 / 15.0);
        for odd in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
            p = self.mul_add(p, z2, self.splat(1.0 / odd));
        }
        let z = self.add(z, z);
        self.mul_add(p, z, self.max(x, self.zero()))
    }

    /// Dot product of two slices of one length: lane i sums products i, i + 16, ... in order.
    #[inline(always)]
    fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        let mut sum = self.zero();
        let (a16, a_rest) = a.as_chunks();
        let (b16, b_rest) = b.as_chunks();
        for (a, b) in a16.iter().zip(b16) {
            sum = self.mul_add(self.load(a), self.load(b), sum);
        }
        if !a_rest.is_empty() {
            sum = self.mul_add(self.load_part(a_rest), self.load_part(b_rest), sum);
        }
        self.sum(sum)
    }
}

/// x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite); e^r by its Taylor
/// polynomial of degree 7, whose remainder is below 6e-9.
#[inline(always)]
fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let low = s.splat(-87.0);
    // This order of operands keeps what is not a number.
    let clamped = s.min(s.splat(88.0), s.max(low, x));
    let shifted = s.mul_add(clamped, s.splat(std::f32::consts::LOG2_E), s.splat(SHIFT));
    let n = s.sub(shifted, s.splat(SHIFT));
    let r = s.mul_add(n, s.splat(-LN2_HIGH), clamped);
    let r = s.mul_add(n, s.splat(-LN2_LOW), r);
    let mut p = s.splat(1.0 / 5040.0);
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = s.mul_add(p, r, s.splat(c));
    }
    let p = s.mul(p, s.power_of_two(shifted));
    s.zero_below(x, low, p)
}

/// A method whose body needs the features that its type proves.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! with_features {
    ($(fn $name:ident($($arg:ident: $t:ty),*) $(-> $r:ty)? $body:block)*) => { $(
        #[inline(always)]
        fn $name(self, $($arg: $t),*) $(-> $r)? {
            // SAFETY: the token's existence proves the features. Pointers come from references
            // to arrays as long as what is read or written, and the accesses are unaligned.
            unsafe { $body }
        }
    )* };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use with_features;

/// A computation to be compiled for every instruction set. `run` must be `#[inline(always)]`, as
/// must whatever it calls, or it is compiled without the instructions it is meant to use.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a kernel with the lanes of an instruction set.
#[inline]
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if isa >= Isa::Avx512Vnni && x86::avx512_detected() {
            // SAFETY: the processor has just been asked for these features.
            return unsafe { x86::run_avx512(kernel) };
        }
        if isa >= Isa::Avx2 && x86::avx2_detected() {
            // SAFETY: the processor has just been asked for these features.
            return unsafe { x86::run_avx2(kernel) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa >= Isa::Neon {
        return neon::run_neon(kernel);
    }
    let _ = isa;
    run_portable(kernel)
}

#[inline(never)]
fn run_portable<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Portable)
}

/// Plain Rust, for any processor.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

macro_rules! each {
    ($i:ident => $value:expr) => {{
        let mut out = [0.0f32; LANES];
        for $i in 0..LANES {
            out[$i] = $value;
        }
        out
    }};
}

impl Simd for Portable {
    type V = [f32; LANES];
    const REGISTERS: usize = 1;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        run_portable(kernel)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        *x
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16; LANES]) -> Self::V {
        each!(i => x[i].to_f32())
    }
    #[inline(always)]
    fn store_f16(self, v: Self::V, to: &mut [f16; LANES]) {
        for i in 0..LANES {
            to[i] = f16::from_f32(v[i]);
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::V {
        each!(i => f32::from(x[i]))
    }
    #[inline(always)]
    fn store_i8(self, v: Self::V, to: &mut [i8; LANES]) {
        for i in 0..LANES {
            to[i] = ((v[i] + SHIFT) - SHIFT) as i8;
        }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        each!(i => a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        each!(i => a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        each!(i => a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        each!(i => a[i] / b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each!(i => a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        each!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        each!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn zero_below(self, x: Self::V, bound: Self::V, v: Self::V) -> Self::V {
        each!(i => if x[i] < bound[i] { 0.0 } else { v[i] })
    }
    #[inline(always)]
    fn choose_below(self, x: Self::V, bound: Self::V, a: Self::V, b: Self::V) -> Self::V {
        each!(i => if x[i] < bound[i] { a[i] } else { b[i] })
    }
    /// Not inlined: sixteen lanes of scalar code are long.
    #[inline(never)]
    fn exp(self, x: Self::V) -> Self::V {
        exp(self, x)
    }
    #[inline(always)]
    fn power_of_two(self, shifted: Self::V) -> Self::V {
        each!(i => f32::from_bits(shifted[i].to_bits().wrapping_add(127) << 23))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Everything a vector can do, to compare between instruction sets.
    struct All([f32; LANES], [f32; LANES], [f32; LANES]);

    impl Kernel for All {
        type Output = Vec<u32>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<u32> {
            let (a, b, c) = (s.load(&self.0), s.load(&self.1), s.load(&self.2));
            let mut half = [f16::ZERO; LANES];
            s.store_f16(a, &mut half);
            let bounded = s.max(s.min(a, s.splat(127.0)), s.splat(-127.0));
            let mut whole = [0; LANES];
            s.store_i8(bounded, &mut whole);
            let values = [
                s.add(a, b),
                s.sub(a, b),
                s.mul(a, b),
                s.div(a, b),
                s.mul_add(a, b, c),
                s.max(a, b),
                s.min(a, b),
                s.zero_below(a, b, c),
                s.choose_below(a, b, c, a),
                s.load_f16(&half),
                s.load_i8(&whole),
                s.exp(a),
                s.sigmoid(a),
                s.silu(a),
                s.softplus(a),
            ];
            let mut bits = Vec::new();
            for v in values {
                let mut lanes = [0.0; LANES];
                s.store(v, &mut lanes);
                bits.extend(lanes.map(f32::to_bits));
            }
            bits.extend([
                s.sum(a).to_bits(),
                s.largest(a).to_bits(),
                s.dot(&self.0, &self.1).to_bits(),
            ]);
            bits
        }
    }

    struct Map<F>(F, f32);

    macro_rules! scalar {
        ($name:ident) => {{
            struct One(f32);
            impl Kernel for One {
                type Output = f32;
                #[inline(always)]
                fn run<S: Simd>(self, s: S) -> f32 {
                    let mut lanes = [0.0; LANES];
                    s.store(s.$name(s.splat(self.0)), &mut lanes);
                    lanes[3]
                }
            }
            |x: f32| dispatch(Isa::best(), One(x))
        }};
    }

    impl<F: Fn(f32) -> f32> Map<F> {
        /// Relative error against an f64 value.
        fn error(&self, exact: f64) -> f64 {
            ((self.0)(self.1) as f64 - exact).abs() / exact.abs().max(1e-37)
        }
    }

    fn lanes() -> impl Strategy<Value = [f32; LANES]> {
        prop_oneof![
            prop::array::uniform16(-100.0f32..100.0),
            prop::array::uniform16(-1e-3f32..1e-3),
            prop::array::uniform16(prop::num::f32::NORMAL | prop::num::f32::ZERO),
        ]
    }

    proptest! {
        #[test]
        fn every_instruction_set_gives_the_same_bits(a in lanes(), b in lanes(), c in lanes()) {
            let expected = dispatch(Isa::Portable, All(a, b, c));
            for isa in Isa::available() {
                let got = dispatch(isa, All(a, b, c));
                for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
                    // Which not-a-number comes out is the processor's choice.
                    let nan = f32::from_bits(*g).is_nan() && f32::from_bits(*e).is_nan();
                    prop_assert!(g == e || nan, "{} value {}", isa, i);
                }
            }
        }

        #[test]
        fn functions_are_accurate(x in -86.0f32..86.0) {
            let y = x as f64;
            prop_assert!(Map(scalar!(exp), x).error(y.exp()) < 2e-7);
            prop_assert!(Map(scalar!(sigmoid), x).error(1.0 / (1.0 + (-y).exp())) < 3e-7);
            prop_assert!(Map(scalar!(silu), x).error(y / (1.0 + (-y).exp())) < 3e-7);
            prop_assert!(Map(scalar!(softplus), x).error(y.max(0.0) + (-y.abs()).exp().ln_1p()) < 3e-7);
        }
    }

    #[test]
    fn functions_hold_at_the_ends() {
        let exp = scalar!(exp);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert!(exp(f32::MAX).is_finite() && exp(f32::MAX) > 1e38);
        assert!(exp(f32::NAN).is_nan());
        let sigmoid = scalar!(sigmoid);
        assert_eq!(sigmoid(1e9), 1.0);
        assert!(sigmoid(-1e9) >= 0.0 && sigmoid(-1e9) < 1e-37);
        let softplus = scalar!(softplus);
        assert_eq!(softplus(1e9), 1e9);
        assert!(softplus(-1e9).abs() < 1e-37);
        assert!(sigmoid(f32::NAN).is_nan() && softplus(f32::NAN).is_nan());
        let silu = scalar!(silu);
        assert_eq!(silu(1e9), 1e9);
        assert!(silu(-1e4).abs() < 1e-30);
    }
}
