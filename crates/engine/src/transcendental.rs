//! `ln` and `exp` in plain IEEE double arithmetic.
//!
//! The library functions of a platform may use fused operations on one machine and not on
//! another, so that the last bit differs. A sampled token must not depend on that: these use
//! only additions, multiplications and divisions in one order, which every machine rounds the
//! same way. They are loops without branches, so the compiler may run several lanes at once.

/// ln(2), split so that an integer multiple of the high part is exact.
const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// Natural logarithm of a positive, normal, finite number; within 2 units in the last place.
///
/// x = 2^e * m with m in [sqrt(1/2), sqrt(2)]; ln m = 2 artanh(s), s = (m - 1) / (m + 1), by the
/// series s + s^3/3 + s^5/5 + ..., whose rest after 12 terms is below 2^-56 for |s| <= 0.1716.
#[inline(always)]
pub fn ln(x: f64) -> f64 {
    // The offset moves the border between two exponents from 1 to sqrt(1/2).
    const SQRT_HALF_BITS: u64 = 0x3FE6_A09E_667F_3BCD;
    const ONE_BITS: u64 = 0x3FF0_0000_0000_0000;
    let shifted = x.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let exponent = ((shifted as i64) >> 52) as f64;
    let mantissa_bits = (shifted & 0x000F_FFFF_FFFF_FFFF).wrapping_add(SQRT_HALF_BITS);
    debug_assert!(mantissa_bits < ONE_BITS + (1 << 52));
    let m = f64::from_bits(mantissa_bits);

    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut series = 1.0 / 23.0;
    for odd in [21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        series = series * z + 1.0 / odd;
    }
    let tail = 2.0 * s * (z * series) + exponent * LN2_LOW;
    exponent * LN2_HIGH + (2.0 * s + tail)
}

/// e^x for x <= 0; exactly 0 below -700; within 2 units in the last place.
///
/// x = k ln 2 + r with |r| <= 0.35, and the Taylor series of e^r up to r^13 / 13!.
#[inline(always)]
pub fn exp(x: f64) -> f64 {
    // Adding and subtracting 1.5 * 2^52 rounds to the nearest integer without a library call.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let clamped = if x < -700.0 { -700.0 } else { x };
    let k = (clamped * std::f64::consts::LOG2_E + ROUND) - ROUND;
    let r = (clamped - k * LN2_HIGH) - k * LN2_LOW;
    let mut series = 1.0 / 6_227_020_800.0;
    for factorial in [
        479_001_600.0,
        39_916_800.0,
        3_628_800.0,
        362_880.0,
        40_320.0,
        5_040.0,
        720.0,
        120.0,
        24.0,
        6.0,
        2.0,
        1.0,
        1.0,
    ] {
        series = series * r + 1.0 / factorial;
    }
    let power = f64::from_bits(((1023 + k as i64) as u64) << 52);
    if x < -700.0 { 0.0 } else { series * power }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exact_points() {
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-701.0), 0.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert!((ln(std::f64::consts::E) - 1.0).abs() < 3e-16);
    }

    #[test]
    fn ln_of_a_number_just_below_one_keeps_its_relative_precision() {
        let x = 1.0 - 2f64.powi(-33);
        let expected = -(2f64.powi(-33) + 2f64.powi(-67));
        assert!((ln(x) / expected - 1.0).abs() < 1e-15);
    }

    proptest! {
        #[test]
        fn ln_agrees_with_the_platform(x in prop_oneof![1e-300f64..1e300, 0.5f64..2.0, 1e-12f64..1.0]) {
            let expected = x.ln();
            prop_assert!((ln(x) - expected).abs() <= 1e-15 * expected.abs().max(1e-3), "{x}");
        }

        #[test]
        fn exp_agrees_with_the_platform(x in -690f64..0.0) {
            let expected = x.exp();
            prop_assert!((exp(x) - expected).abs() <= 1e-15 * expected, "{x}");
        }
    }
}
