//! A group's scales, zero points and codes, for sixteen rows at a time.
//!
//! Inputs lie along arrays, rows along lanes. What a choice costs is what the factor of a form says
//! of the group's errors; see `quadratic`.

use half::f16;

use super::ROUND;
use crate::lanes::{Kernel, LANES, Simd};
use crate::packed::ZeroKind;

/// The largest group.
const WIDEST: usize = 128;
/// How often a group's codes are gone through in a pass.
const SWEEPS: usize = 2;

/// Parts of a group's range that are tried first.
const PARTS_4: [f32; 10] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 0.64];
const PARTS_8: [f32; 3] = [1.0, 0.99, 0.98];
/// Scales and zero points around one, as factor and shift.
const NEAR: [(f32, f32); 6] = [
    (0.98, 0.0),
    (1.02, 0.0),
    (1.0, -1.0),
    (1.0, 1.0),
    (0.96, 0.0),
    (1.04, 0.0),
];

/// A group's part of a factor.
pub(super) struct Local<'a> {
    pub width: usize,
    pub stride: usize,
    pub upper: &'a [f32],
    pub pivots: &'a [f32],
    pub top: f32,
}

/// Sixteen rows of a group.
pub(super) struct Lanes<'a> {
    pub stride: usize,
    pub weights: &'a [f32],
    pub aims: &'a [f32],
    pub errors: &'a mut [f32],
    pub codes: &'a mut [f32],
    pub scales: &'a mut [f32],
    pub zeros: &'a mut [f32],
}

/// A value of each input for sixteen rows.
type Columns<S> = [<S as Simd>::V; WIDEST];

#[inline(always)]
fn load<S: Simd>(s: S, width: usize, from: &[f32], stride: usize) -> Columns<S> {
    let mut out = [s.zero(); WIDEST];
    for (j, out) in out.iter_mut().enumerate().take(width) {
        let mut lanes = [0.0; LANES];
        for (lane, value) in lanes.iter_mut().enumerate() {
            *value = from[lane * stride + j];
        }
        *out = s.load(&lanes);
    }
    out
}

#[inline(always)]
fn store<S: Simd>(s: S, width: usize, values: &Columns<S>, to: &mut [f32], stride: usize) {
    for (j, &value) in values.iter().enumerate().take(width) {
        let mut lanes = [0.0; LANES];
        s.store(value, &mut lanes);
        for (lane, value) in lanes.iter().enumerate() {
            to[lane * stride + j] = *value;
        }
    }
}

/// Scales and zero points of sixteen rows.
#[derive(Clone, Copy)]
struct Grid<V> {
    scale: V,
    inverse: V,
    zero: V,
    cost: V,
}

#[inline(always)]
fn rounded<S: Simd>(s: S, x: S::V) -> S::V {
    let round = s.splat(ROUND);
    s.sub(s.add(x, round), round)
}

#[inline(always)]
fn within<S: Simd>(s: S, x: S::V, top: f32) -> S::V {
    s.min(s.max(x, s.zero()), s.splat(top))
}

/// A grid of this scale, as an f16 holds it.
#[inline(always)]
fn grid<S: Simd>(s: S, scale: S::V, zero: S::V) -> Grid<S::V> {
    let mut half = [f16::ZERO; LANES];
    s.store_f16(scale, &mut half);
    let scale = s.load_f16(&half);
    // Half precision has nothing between 0 and 5.9e-8.
    let tiny = s.splat(1e-8);
    let inverse = s.zero_below(scale, tiny, s.div(s.splat(1.0), scale));
    Grid {
        scale,
        inverse,
        zero,
        cost: s.zero(),
    }
}

/// The grid of a part of the range from `low` to `high`.
#[inline(always)]
fn ranged<S: Simd>(s: S, kind: ZeroKind, top: f32, part: f32, low: S::V, high: S::V) -> Grid<S::V> {
    let part = s.splat(part);
    match kind {
        ZeroKind::Symmetric => {
            let half = (top - 1.0) / 2.0;
            let most = s.max(high, s.sub(s.zero(), low));
            let scale = s.div(s.mul(part, most), s.splat(half));
            grid(s, scale, s.splat(half + 1.0))
        }
        _ => {
            let scale = s.div(s.mul(part, s.sub(high, low)), s.splat(top));
            let found = grid(s, scale, s.zero());
            let below = s.mul(s.mul(part, s.sub(s.zero(), low)), found.inverse);
            let zero = within(s, rounded(s, s.min(below, s.splat(top))), top);
            Grid { zero, ..found }
        }
    }
}

/// A grid near another.
#[inline(always)]
fn near<S: Simd>(
    s: S,
    kind: ZeroKind,
    top: f32,
    of: &Grid<S::V>,
    (factor, shift): (f32, f32),
) -> Grid<S::V> {
    let zero = match kind {
        ZeroKind::Symmetric => of.zero,
        _ => within(s, s.add(of.zero, s.splat(shift)), top),
    };
    grid(s, s.mul(of.scale, s.splat(factor)), zero)
}

/// What rounding `aims` to the grid costs, weights before taken in. `weights` are what an error is
/// counted from; `put` gets each input's code and error.
#[inline(always)]
fn cost<S: Simd>(
    s: S,
    local: &Local<'_>,
    weights: &Columns<S>,
    aims: &Columns<S>,
    grid: &Grid<S::V>,
    mut put: impl FnMut(usize, S::V, S::V),
) -> S::V {
    let mut aims = *aims;
    let mut total = s.zero();
    for j in 0..local.width {
        let aim = aims[j];
        let code = rounded(
            s,
            within(s, s.mul_add(aim, grid.inverse, grid.zero), local.top),
        );
        let value = s.mul(s.sub(code, grid.zero), grid.scale);
        let off = s.sub(aim, value);
        total = s.mul_add(s.mul(off, off), s.splat(local.pivots[j]), total);
        let error = s.sub(weights[j], value);
        put(j, code, error);
        let row = &local.upper[j * local.stride..][j + 1..local.width];
        for (aim, m) in aims[j + 1..local.width].iter_mut().zip(row) {
            *aim = s.mul_add(error, s.splat(*m), *aim);
        }
    }
    total
}

/// Lane by lane the better of two grids.
#[inline(always)]
fn better<S: Simd>(s: S, a: &Grid<S::V>, b: &Grid<S::V>) -> Grid<S::V> {
    let choose = |x, y| s.choose_below(b.cost, a.cost, y, x);
    Grid {
        scale: choose(a.scale, b.scale),
        inverse: choose(a.inverse, b.inverse),
        zero: choose(a.zero, b.zero),
        cost: s.min(b.cost, a.cost),
    }
}

/// See [`Tile::first`].
pub(super) struct First<'a> {
    pub local: &'a Local<'a>,
    pub zero: ZeroKind,
    pub bits: u8,
    pub lanes: Lanes<'a>,
}

impl Kernel for First<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (local, lanes) = (self.local, self.lanes);
        let parts: &[f32] = if self.bits == 4 { &PARTS_4 } else { &PARTS_8 };
        let weights = load(s, local.width, lanes.weights, lanes.stride);
        let aims = load(s, local.width, lanes.aims, lanes.stride);
        let (mut low, mut high) = (s.zero(), s.zero());
        for &aim in &aims[..local.width] {
            (low, high) = (s.min(aim, low), s.max(aim, high));
        }
        let mut best = ranged(s, self.zero, local.top, 1.0, low, high);
        best.cost = cost(s, local, &weights, &aims, &best, |_, _, _| ());
        for i in 1..parts.len() + NEAR.len() {
            let mut other = match parts.get(i) {
                Some(&part) => ranged(s, self.zero, local.top, part, low, high),
                None => near(s, self.zero, local.top, &best, NEAR[i - parts.len()]),
            };
            other.cost = cost(s, local, &weights, &aims, &other, |_, _, _| ());
            best = better(s, &best, &other);
        }
        let mut codes = [s.zero(); WIDEST];
        let mut errors = [s.zero(); WIDEST];
        cost(s, local, &weights, &aims, &best, |j, code, error| {
            (codes[j], errors[j]) = (code, error);
        });
        store(s, local.width, &codes, lanes.codes, lanes.stride);
        store(s, local.width, &errors, lanes.errors, lanes.stride);
        s.store_slice(best.scale, lanes.scales);
        s.store_slice(best.zero, lanes.zeros);
    }
}

/// See [`Tile::again`].
pub(super) struct Again<'a> {
    pub local: &'a Local<'a>,
    pub zero: ZeroKind,
    /// The group's square of the form, rows of `lanes.stride` values.
    pub form: &'a [f32],
    pub lanes: Lanes<'a>,
}

impl Kernel for Again<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Again {
            local,
            zero,
            form,
            lanes,
        } = self;
        let width = local.width;
        let row = |j: usize| &form[j * lanes.stride..][..width];
        let mut gradient = load(s, width, lanes.aims, lanes.stride);
        let mut errors = load(s, width, lanes.errors, lanes.stride);
        let mut codes = load(s, width, lanes.codes, lanes.stride);
        let mut now = Grid {
            zero: s.load_slice(lanes.zeros),
            ..grid(s, s.load_slice(lanes.scales), s.zero())
        };
        // Where the gradient would vanish: the values that the group should have, as an aim.
        let away = solved(s, local, &gradient);
        let mut aims = [s.zero(); WIDEST];
        for j in 0..width {
            let value = s.mul(s.sub(codes[j], now.zero), now.scale);
            aims[j] = s.add(value, away[j]);
        }
        // The cost as it is: away H away^T = away . gradient.
        now.cost = s.zero();
        for j in 0..width {
            now.cost = s.mul_add(away[j], gradient[j], now.cost);
        }
        let mut best = now;
        for step in [(1.0, 0.0)].into_iter().chain(NEAR) {
            let mut other = near(s, zero, local.top, &now, step);
            other.cost = cost(s, local, &aims, &aims, &other, |_, _, _| ());
            best = better(s, &best, &other);
        }
        // Lanes that found something better take it.
        let mut fresh = [s.zero(); WIDEST];
        cost(s, local, &aims, &aims, &best, |j, code, _| fresh[j] = code);
        for j in 0..width {
            let code = s.choose_below(best.cost, now.cost, fresh[j], codes[j]);
            let before = s.mul(s.sub(codes[j], now.zero), now.scale);
            let after = s.mul(s.sub(code, best.zero), best.scale);
            codes[j] = code;
            step(
                s,
                &mut gradient,
                &mut errors,
                row(j),
                j,
                s.sub(after, before),
            );
        }
        for sweep in 0..SWEEPS {
            for j in 0..width {
                let ideal = s.mul(gradient[j], s.div(best.inverse, s.splat(row(j)[j])));
                let code = rounded(s, within(s, s.add(codes[j], ideal), local.top));
                let change = s.mul(s.sub(code, codes[j]), best.scale);
                codes[j] = code;
                step(s, &mut gradient, &mut errors, row(j), j, change);
            }
            if sweep + 1 < SWEEPS {
                best = rescaled(s, width, &row, &codes, best, &mut gradient, &mut errors);
            }
        }
        store(s, width, &codes, lanes.codes, lanes.stride);
        store(s, width, &errors, lanes.errors, lanes.stride);
        s.store_slice(best.scale, lanes.scales);
        s.store_slice(best.zero, lanes.zeros);
    }
}

/// Input j's value grows by `change`.
#[inline(always)]
fn step<S: Simd>(
    s: S,
    gradient: &mut Columns<S>,
    errors: &mut Columns<S>,
    row: &[f32],
    j: usize,
    change: S::V,
) {
    errors[j] = s.sub(errors[j], change);
    let change = s.sub(s.zero(), change);
    for (gradient, h) in gradient.iter_mut().zip(row) {
        *gradient = s.mul_add(change, s.splat(*h), *gradient);
    }
}

/// The best scale for the codes as they are, where an f16 makes it better than the one there is.
#[inline(always)]
fn rescaled<'a, S: Simd>(
    s: S,
    width: usize,
    row: &impl Fn(usize) -> &'a [f32],
    codes: &Columns<S>,
    grid_now: Grid<S::V>,
    gradient: &mut Columns<S>,
    errors: &mut Columns<S>,
) -> Grid<S::V> {
    let unit = |j: usize| s.sub(codes[j], grid_now.zero);
    let (mut along, mut square) = (s.zero(), s.zero());
    for (j, gradient) in gradient.iter().enumerate().take(width) {
        let mut sum = s.zero();
        for (l, h) in row(j).iter().enumerate() {
            sum = s.mul_add(unit(l), s.splat(*h), sum);
        }
        square = s.mul_add(sum, unit(j), square);
        along = s.mul_add(unit(j), *gradient, along);
    }
    let tiny = s.splat(1e-20);
    let ideal = s.zero_below(square, tiny, s.div(along, square));
    let other = grid(
        s,
        s.max(s.add(grid_now.scale, ideal), s.zero()),
        grid_now.zero,
    );
    let by = s.sub(other.scale, grid_now.scale);
    // by^2 square - 2 by along, which has to fall.
    let twice = s.add(along, along);
    let change = s.mul(by, s.sub(s.mul(by, square), twice));
    let choose = |a, b| s.choose_below(change, s.zero(), a, b);
    let by = choose(by, s.zero());
    for j in 0..width {
        step(s, gradient, errors, row(j), j, s.mul(by, unit(j)));
    }
    Grid {
        scale: choose(other.scale, grid_now.scale),
        inverse: choose(other.inverse, grid_now.inverse),
        ..grid_now
    }
}

/// x with (M D M^T) x = `right`, lane by lane.
#[inline(always)]
fn solved<S: Simd>(s: S, local: &Local<'_>, right: &Columns<S>) -> Columns<S> {
    let mut x = *right;
    let row = |j: usize| &local.upper[j * local.stride..][..local.width];
    // M y = right, from the last on.
    for j in (0..local.width).rev() {
        let mut sum = x[j];
        for (x, m) in x[j + 1..local.width].iter().zip(&row(j)[j + 1..]) {
            sum = s.mul_add(s.sub(s.zero(), *x), s.splat(*m), sum);
        }
        x[j] = sum;
    }
    for (x, pivot) in x.iter_mut().zip(local.pivots) {
        *x = s.div(*x, s.splat(*pivot));
    }
    // M^T x = y, from the first on.
    for j in 0..local.width {
        let value = s.sub(s.zero(), x[j]);
        for (x, m) in x[j + 1..local.width].iter_mut().zip(&row(j)[j + 1..]) {
            *x = s.mul_add(value, s.splat(*m), *x);
        }
    }
    x
}
