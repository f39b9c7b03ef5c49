//! The numbers that a cache is made of.

use std::sync::Arc;

use half::f16;

use super::{KvCache, Pages, Slots};
use crate::lanes::{LANES, Simd};
use crate::stored::Number;

/// A stored number: f32, f16 or a code of eight bits.
pub(crate) trait Element: Number + Default + Send + Sync + 'static {
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::V;
    fn store<S: Simd>(s: S, v: S::V, to: &mut [Self; LANES]);
    /// The pages of a cache, if they hold this type.
    fn pages(cache: &KvCache) -> &[Arc<Slots<Self>>];
    /// Whether it is f32 already.
    const WIDE: bool;
    /// Whether heads are kept rotated and divided by a scale, see `super::rotation`.
    const SCALED: bool;
}

impl Element for f32 {
    const WIDE: bool = true;
    const SCALED: bool = false;

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[f32; LANES]) -> S::V {
        s.load(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::V, to: &mut [f32; LANES]) {
        s.store(v, to);
    }
    fn pages(cache: &KvCache) -> &[Arc<Slots<f32>>] {
        match &cache.pages {
            Pages::F32(pages) => pages,
            _ => &[],
        }
    }
}

impl Element for f16 {
    const WIDE: bool = false;
    const SCALED: bool = false;

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[f16; LANES]) -> S::V {
        s.load_f16(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::V, to: &mut [f16; LANES]) {
        let largest = s.splat(f16::MAX.to_f32());
        let smallest = s.splat(f16::MIN.to_f32());
        s.store_f16(s.max(s.min(v, largest), smallest), to);
    }
    fn pages(cache: &KvCache) -> &[Arc<Slots<f16>>] {
        match &cache.pages {
            Pages::F16(pages) => pages,
            _ => &[],
        }
    }
}

/// A whole number of -127..=127, of some scale.
impl Element for i8 {
    const WIDE: bool = false;
    const SCALED: bool = true;

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[i8; LANES]) -> S::V {
        s.load_i8(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::V, to: &mut [i8; LANES]) {
        s.store_i8(v, to);
    }
    fn pages(cache: &KvCache) -> &[Arc<Slots<i8>>] {
        match &cache.pages {
            Pages::Int8(pages) => pages,
            _ => &[],
        }
    }
}
