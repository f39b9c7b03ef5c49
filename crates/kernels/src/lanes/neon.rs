//! NEON, which every 64-bit ARM processor has: a vector is four registers.

use super::{Kernel, LANES, Simd, with_features};
use half::f16;
use std::arch::aarch64::*;

/// NEON. Made only here, on processors that have it.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

#[inline(never)]
pub(super) fn run_neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

type V = [float32x4_t; 4];

/// The same on every quarter.
#[inline(always)]
fn quarters(f: impl Fn(usize) -> float32x4_t) -> V {
    [f(0), f(1), f(2), f(3)]
}

impl Simd for Neon {
    type V = V;
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        run_neon(kernel)
    }
    with_features! {
        fn splat(x: f32) -> V {
            [vdupq_n_f32(x); 4]
        }
        fn load(x: &[f32; LANES]) -> V {
            quarters(|i| vld1q_f32(x.as_ptr().add(4 * i)))
        }
        fn store(v: V, to: &mut [f32; LANES]) {
            for (i, v) in v.into_iter().enumerate() {
                vst1q_f32(to.as_mut_ptr().add(4 * i), v)
            }
        }
        fn load_f16(x: &[f16; LANES]) -> V {
            let x: *const u16 = x.as_ptr().cast();
            quarters(|i| {
                let half = vld1_u16(x.add(4 * i));
                vcvt_f32_f16(vreinterpret_f16_u16(half))
            })
        }
        fn store_f16(v: V, to: &mut [f16; LANES]) {
            let to: *mut u16 = to.as_mut_ptr().cast();
            for (i, v) in v.into_iter().enumerate() {
                let half = vreinterpret_u16_f16(vcvt_f16_f32(v));
                vst1_u16(to.add(4 * i), half)
            }
        }
        fn load_i8(x: &[i8; LANES]) -> V {
            let x = vld1q_s8(x.as_ptr());
            let (low, high) = (vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        }
        fn store_i8(v: V, to: &mut [i8; LANES]) {
            let [a, b, c, d] = v.map(|v| vmovn_s32(vcvtnq_s32_f32(v)));
            let (low, high) = (vmovn_s16(vcombine_s16(a, b)), vmovn_s16(vcombine_s16(c, d)));
            vst1q_s8(to.as_mut_ptr(), vcombine_s8(low, high))
        }
        fn add(a: V, b: V) -> V {
            quarters(|i| vaddq_f32(a[i], b[i]))
        }
        fn sub(a: V, b: V) -> V {
            quarters(|i| vsubq_f32(a[i], b[i]))
        }
        fn mul(a: V, b: V) -> V {
            quarters(|i| vmulq_f32(a[i], b[i]))
        }
        fn div(a: V, b: V) -> V {
            quarters(|i| vdivq_f32(a[i], b[i]))
        }
        fn mul_add(a: V, b: V, c: V) -> V {
            quarters(|i| vfmaq_f32(c[i], a[i], b[i]))
        }
        // The instructions for the largest and the smallest give what is not a number, whichever side
        // it is on.
        fn max(a: V, b: V) -> V {
            quarters(|i| vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]))
        }
        fn min(a: V, b: V) -> V {
            quarters(|i| vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]))
        }
        fn zero_below(x: V, bound: V, v: V) -> V {
            quarters(|i| {
                let kept = vbicq_u32(vreinterpretq_u32_f32(v[i]), vcltq_f32(x[i], bound[i]));
                vreinterpretq_f32_u32(kept)
            })
        }
        fn choose_below(x: V, bound: V, a: V, b: V) -> V {
            quarters(|i| vbslq_f32(vcltq_f32(x[i], bound[i]), a[i], b[i]))
        }
        fn power_of_two(shifted: V) -> V {
            quarters(|i| {
                let n = vaddq_s32(vreinterpretq_s32_f32(shifted[i]), vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(n))
            })
        }
    }
}
