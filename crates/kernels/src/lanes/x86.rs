//! AVX-512 and AVX2.

use super::{Kernel, LANES, Simd, with_features};
use half::f16;
use std::arch::x86_64::*;

/// AVX-512 F. Made only by `run_avx512`, so that one exists only where the features do.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// AVX2, FMA and F16C. Made only by `run_avx2`.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

pub(super) fn avx512_detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && avx2_detected()
}

pub(super) fn avx2_detected() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
#[inline(never)]
pub(super) fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
pub(super) fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

impl Simd for Avx512 {
    type V = __m512;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token's existence proves the features.
        unsafe { run_avx512(kernel) }
    }

    with_features! {
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn load(x: &[f32; LANES]) -> __m512 { _mm512_loadu_ps(x.as_ptr()) }
        fn store(v: __m512, to: &mut [f32; LANES]) { _mm512_storeu_ps(to.as_mut_ptr(), v) }
        fn load_f16(x: &[f16; LANES]) -> __m512 {
            _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast()))
        }
        fn store_f16(v: __m512, to: &mut [f16; LANES]) {
            let h = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), h)
        }
        fn load_i8(x: &[i8; LANES]) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
        }
        fn store_i8(v: __m512, to: &mut [i8; LANES]) {
            // The conversion rounds half to even.
            let whole = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
            _mm_storeu_si128(to.as_mut_ptr().cast(), whole)
        }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn zero_below(x: __m512, bound: __m512, v: __m512) -> __m512 {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, bound);
            _mm512_mask_mov_ps(v, below, _mm512_setzero_ps())
        }
        fn choose_below(x: __m512, bound: __m512, a: __m512, b: __m512) -> __m512 {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, bound);
            _mm512_mask_mov_ps(b, below, a)
        }
        fn power_of_two(shifted: __m512) -> __m512 {
            let n = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
        }
    }
}

/// The same operation on both halves.
macro_rules! halves {
    ($f:ident($($x:ident),*)) => { [$f($($x[0]),*), $f($($x[1]),*)] };
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token's existence proves the features.
        unsafe { run_avx2(kernel) }
    }

    with_features! {
        fn splat(x: f32) -> [__m256; 2] { [_mm256_set1_ps(x); 2] }
        fn load(x: &[f32; LANES]) -> [__m256; 2] {
            [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))]
        }
        fn store(v: [__m256; 2], to: &mut [f32; LANES]) {
            _mm256_storeu_ps(to.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), v[1])
        }
        fn load_f16(x: &[f16; LANES]) -> [__m256; 2] {
            let x: *const __m128i = x.as_ptr().cast();
            [_mm256_cvtph_ps(_mm_loadu_si128(x)), _mm256_cvtph_ps(_mm_loadu_si128(x.add(1)))]
        }
        fn store_f16(v: [__m256; 2], to: &mut [f16; LANES]) {
            let to: *mut __m128i = to.as_mut_ptr().cast();
            _mm_storeu_si128(to, _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v[0]));
            _mm_storeu_si128(to.add(1), _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v[1]))
        }
        fn load_i8(x: &[i8; LANES]) -> [__m256; 2] {
            let x: *const i64 = x.as_ptr().cast();
            let wide = |x| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x)));
            [wide(x.cast()), wide(x.add(1).cast())]
        }
        fn store_i8(v: [__m256; 2], to: &mut [i8; LANES]) {
            // The conversion rounds half to even; packing takes halves of both in turns.
            let whole = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
            let whole = _mm256_permute4x64_epi64::<0b11_01_10_00>(whole);
            let (low, high) = (_mm256_castsi256_si128(whole), _mm256_extracti128_si256::<1>(whole));
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm_packs_epi16(low, high))
        }
        fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { halves!(_mm256_add_ps(a, b)) }
        fn sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { halves!(_mm256_sub_ps(a, b)) }
        fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { halves!(_mm256_mul_ps(a, b)) }
        fn div(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { halves!(_mm256_div_ps(a, b)) }
        fn mul_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            halves!(_mm256_fmadd_ps(a, b, c))
        }
        fn max(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { halves!(_mm256_max_ps(a, b)) }
        fn min(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { halves!(_mm256_min_ps(a, b)) }
        fn zero_below(x: [__m256; 2], bound: [__m256; 2], v: [__m256; 2]) -> [__m256; 2] {
            let below = halves!(less(x, bound));
            halves!(_mm256_andnot_ps(below, v))
        }
        fn choose_below(
            x: [__m256; 2], bound: [__m256; 2], a: [__m256; 2], b: [__m256; 2]
        ) -> [__m256; 2] {
            let below = halves!(less(x, bound));
            halves!(_mm256_blendv_ps(b, a, below))
        }
        fn power_of_two(shifted: [__m256; 2]) -> [__m256; 2] { halves!(exponent(shifted)) }
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn less(a: __m256, b: __m256) -> __m256 {
    _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)
}

#[target_feature(enable = "avx2")]
#[inline]
fn exponent(shifted: __m256) -> __m256 {
    let n = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
}
