//! Partial results of the softmax and how they are put together.

use crate::kv_cache::rotate;
use crate::lanes::{LANES, Simd};

/// A partial result is a record of [a: width values, a multiple of 16 | m | l | 14 unused].
pub(super) fn record(width: usize) -> usize {
    width + LANES
}

/// Marks a record as one that has seen nothing yet.
pub(super) fn clear(record: &mut [f32]) {
    let width = record.len() - LANES;
    record[width] = f32::NEG_INFINITY;
    record[width + 1] = 0.0;
}

/// Turns scores into weights, in place: `scores[from..to]`, times `scale`, less the largest,
/// exponentiated. Returns the largest and the sum of the weights. Weights outside `from..to` up to
/// the next multiples of sixteen become 0.
#[inline(always)]
pub(super) fn softmax<S: Simd>(
    s: S,
    scores: &mut [f32],
    from: usize,
    to: usize,
    scale: f32,
) -> (f32, f32) {
    let start = from / LANES * LANES;
    let end = to.next_multiple_of(LANES);
    scores[start..from].fill(f32::NEG_INFINITY);
    scores[to..end].fill(f32::NEG_INFINITY);
    let (blocks, _) = scores[start..end].as_chunks_mut::<LANES>();
    let scale = s.splat(scale);
    let mut largest = s.splat(f32::NEG_INFINITY);
    for block in &mut *blocks {
        let scaled = s.mul(s.load(block), scale);
        largest = s.max(scaled, largest);
        s.store(scaled, block);
    }
    let m = s.largest(largest);
    let shift = s.splat(m);
    let mut sum = s.zero();
    for block in blocks {
        let weight = s.exp(s.sub(s.load(block), shift));
        sum = s.add(sum, weight);
        s.store(weight, block);
    }
    (m, s.sum(sum))
}

/// Adds a later part to a record. A part that has seen nothing changes nothing.
#[inline(always)]
pub(super) fn merge<S: Simd>(s: S, whole: &mut [f32], part: &[f32]) {
    let width = part.len() - LANES;
    let (m2, l2) = (part[width], part[width + 1]);
    let (m1, l1) = (whole[width], whole[width + 1]);
    if l2 == 0.0 {
        return;
    }
    if l1 == 0.0 {
        whole.copy_from_slice(part);
        return;
    }
    let m = if m2 > m1 { m2 } else { m1 };
    let f1 = s.exp(s.splat(m1 - m));
    let f2 = s.exp(s.splat(m2 - m));
    let l = s.mul_add(s.splat(l2), f2, s.mul(s.splat(l1), f1));
    whole[width] = m;
    s.store_slice(l, &mut whole[width + 1..width + 2]);
    let (a1, _) = whole[..width].as_chunks_mut::<LANES>();
    let (a2, _) = part[..width].as_chunks::<LANES>();
    for (a1, a2) in a1.iter_mut().zip(a2) {
        let a = s.mul_add(s.load(a2), f2, s.mul(s.load(a1), f1));
        s.store(a, a1);
    }
}

/// The result of a whole record: a / l, rotated back where the values were `rotated`.
#[inline(always)]
pub(super) fn finish<S: Simd>(s: S, whole: &[f32], rotated: bool, out: &mut [f32]) {
    let width = whole.len() - LANES;
    let l = s.splat(whole[width + 1]);
    for (a, out) in whole[..width].chunks(LANES).zip(out.chunks_mut(LANES)) {
        s.store_slice(s.div(s.load_slice(a), l), out);
    }
    if rotated {
        rotate(out);
    }
}
