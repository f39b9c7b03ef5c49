//! Keys and values of one attention layer, in pages that never move. Copies of a cache share its
//! pages until one of them writes. A layer that sees the newest positions only lets pages go that
//! lie behind its window; their slots stay counted and have no memory.

mod element;
mod rotation;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use half::f16;

use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::rows::{Heads, Shared, for_rows};

pub(crate) use element::Element;
pub(crate) use rotation::rotate;
use rotation::rotate_and_scale;

/// Slots of a page, and positions of a chunk of the softmax.
pub(crate) const PAGE: usize = 256;

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// As computed.
    F32,
    /// Rounded to f16, ties to even; values beyond its range become its largest.
    F16,
    /// Rotated within a head, then rounded to whole numbers of -127..=127 with a scale in f32 for
    /// each key and value of a slot and head.
    Int8,
}

impl KvType {
    /// Bytes of a number.
    fn width(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
            KvType::Int8 => 1,
        }
    }
}

/// A growing cache of keys and values, addressed by slot.
///
/// A slot holds one token's key and value for every kv head. Which position a slot stands for is
/// the caller's business; [`crate::attention`] takes slots 0.. as positions 0.. and, for the nodes
/// of a tree, a list of further slots.
#[derive(Clone)]
pub struct KvCache {
    kv_heads: usize,
    head_dim: usize,
    /// How many positions a row sees at most, its own the last of them.
    window: Option<usize>,
    pub(crate) pages: Pages,
}

/// The pages of a cache, by what they are made of.
#[derive(Clone)]
pub(crate) enum Pages {
    F32(Vec<Arc<Slots<f32>>>),
    F16(Vec<Arc<Slots<f16>>>),
    Int8(Vec<Arc<Slots<i8>>>),
}

/// The slots of a page, see [`Layout`].
#[derive(Clone)]
pub(crate) struct Slots<T> {
    pub(crate) numbers: Vec<T>,
    /// Scales of keys and values; none where the numbers are the values themselves.
    pub(crate) scales: Vec<f32>,
}

/// What is the same for pages of every type.
macro_rules! each {
    ($pages:expr, $these:ident => $value:expr) => {
        match $pages {
            Pages::F32($these) => $value,
            Pages::F16($these) => $value,
            Pages::Int8($these) => $value,
        }
    };
}
pub(crate) use each;

/// Layout of a page: for every kv head [keys | values]; keys are [16 blocks][head_dim][16 slots],
/// values [256 slots][head_dim padded to 16]. Scales: for every kv head [256 keys | 256 values].
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Layout {
    pub(crate) fn value_stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    fn head(&self) -> usize {
        PAGE * (self.head_dim + self.value_stride())
    }

    /// Numbers of a page.
    pub(crate) fn page(&self) -> usize {
        self.kv_heads * self.head()
    }

    /// Scales of a page, where there are any.
    pub(crate) fn scales(&self) -> usize {
        self.kv_heads * 2 * PAGE
    }

    /// Bytes of a page.
    fn bytes(&self, kind: KvType) -> usize {
        let scales = match kind {
            KvType::F32 | KvType::F16 => 0,
            KvType::Int8 => self.scales(),
        };
        self.page() * kind.width() + scales * size_of::<f32>()
    }

    /// Start of a kv head's keys in a page.
    pub(crate) fn keys(&self, head: usize) -> usize {
        head * self.head()
    }

    /// Start of a kv head's values in a page.
    pub(crate) fn values(&self, head: usize) -> usize {
        head * self.head() + PAGE * self.head_dim
    }

    /// Start of the scales of a kv head's keys.
    pub(crate) fn key_scales(&self, head: usize) -> usize {
        head * 2 * PAGE
    }

    /// Start of the scales of a kv head's values.
    pub(crate) fn value_scales(&self, head: usize) -> usize {
        head * 2 * PAGE + PAGE
    }
}

impl KvCache {
    /// An empty cache.
    ///
    /// # Panics
    /// If a size is zero.
    pub fn new(kv_heads: usize, head_dim: usize, kind: KvType) -> Self {
        assert!(kv_heads > 0 && head_dim > 0, "a cache of nothing");
        Self {
            kv_heads,
            head_dim,
            window: None,
            pages: match kind {
                KvType::F32 => Pages::F32(vec![]),
                KvType::F16 => Pages::F16(vec![]),
                KvType::Int8 => Pages::Int8(vec![]),
            },
        }
    }

    /// The same for rows that see so many positions at most, their own the last of them.
    pub fn within(self, window: usize) -> Self {
        Self {
            window: Some(window),
            ..self
        }
    }

    /// How many positions a row sees at most.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// How keys and values are kept.
    pub fn kind(&self) -> KvType {
        match self.pages {
            Pages::F32(_) => KvType::F32,
            Pages::F16(_) => KvType::F16,
            Pages::Int8(_) => KvType::Int8,
        }
    }

    /// Slots that have memory or had it before they fell behind the window.
    pub fn slots(&self) -> usize {
        PAGE * each!(&self.pages, pages => pages.len())
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        self.held().iter().map(|page| page.bytes).sum()
    }

    /// Size in memory of a cache with so many slots, of which rows see a `window` of the newest.
    pub fn bytes_of(
        kv_heads: usize,
        head_dim: usize,
        kind: KvType,
        slots: usize,
        window: Option<usize>,
    ) -> u64 {
        let layout = Layout { kv_heads, head_dim };
        let all = slots.div_ceil(PAGE);
        // The slots before the next row that it sees, wherever in a page they begin.
        let seen = |window: usize| (window - window.min(1)).div_ceil(PAGE).saturating_add(1);
        let pages = window.map_or(all, |window| all.min(seen(window)));
        (pages as u64).saturating_mul(layout.bytes(kind) as u64)
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout {
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// Gives every slot below `slots` memory.
    pub fn reserve(&mut self, slots: usize) {
        let (layout, pages) = (self.layout(), slots.div_ceil(PAGE));
        each!(&mut self.pages, have => grow(have, pages, layout));
    }

    /// Releases the memory of whole pages at and after `slots`.
    pub fn truncate(&mut self, slots: usize) {
        let pages = slots.div_ceil(PAGE);
        each!(&mut self.pages, have => have.truncate(pages));
    }

    /// Lets the pages go that no position from `len` on sees.
    pub fn forget(&mut self, len: usize) {
        let behind = self.behind(len);
        each!(&mut self.pages, have => forget(have, behind));
    }

    /// How many pages lie behind the window of every position from `len` on.
    pub(crate) fn behind(&self, len: usize) -> usize {
        let first = |window: usize| len.saturating_add(1).saturating_sub(window) / PAGE;
        self.window.map_or(0, first)
    }

    /// Writes one token's key and value, each `kv_heads * head_dim` values, to a slot.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn write(&mut self, cpu: &Cpu, slot: usize, k: &[f32], v: &[f32]) {
        let at = Heads::packed(self.kv_heads, self.head_dim);
        assert_eq!((k.len(), v.len()), (at.row, at.row), "key and value");
        self.write_rows(cpu, slot, (k, at), (v, at));
    }

    /// Writes m rows of keys and values, which lie where their `Heads` say, to the slots from
    /// `first` on, growing as needed.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn write_rows(
        &mut self,
        cpu: &Cpu,
        first: usize,
        (k, k_at): (&[f32], Heads),
        (v, v_at): (&[f32], Heads),
    ) {
        let rows = k_at.rows(k.len());
        assert_eq!(v_at.rows(v.len()), rows, "rows of keys and values");
        for at in [k_at, v_at] {
            let shape = (self.kv_heads, self.head_dim);
            assert_eq!((at.count, at.dim), shape, "heads of keys and values");
        }
        self.reserve(first + rows);
        let layout = self.layout();
        each!(&mut self.pages, pages => write_rows(cpu, pages, layout, first, (k, k_at), (v, v_at)));
    }

    /// Copies a slot's key and value to another slot.
    ///
    /// # Panics
    /// If a slot has no memory.
    pub fn copy_slot(&mut self, from: usize, to: usize) {
        let slots = self.slots();
        assert!(from < slots && to < slots, "slot {from} to {to} of {slots}");
        let layout = self.layout();
        each!(&mut self.pages, pages => copy_slot(pages, layout, from, to));
    }
}

impl<T: Element> Slots<T> {
    /// None, in place of slots that nobody sees any more.
    pub(crate) fn gone() -> Self {
        Self {
            numbers: Vec::new(),
            scales: Vec::new(),
        }
    }

    /// Slots of zeros.
    pub(crate) fn new(layout: Layout) -> Self {
        Self {
            numbers: vec![T::default(); layout.page()],
            scales: vec![0.0; if T::SCALED { layout.scales() } else { 0 }],
        }
    }
}

fn grow<T: Element>(pages: &mut Vec<Arc<Slots<T>>>, count: usize, layout: Layout) {
    while pages.len() < count {
        pages.push(Arc::new(Slots::new(layout)));
    }
}

/// Takes the first pages' memory away.
fn forget<T: Element>(pages: &mut [Arc<Slots<T>>], count: usize) {
    let gone = Arc::new(Slots::gone());
    let behind = pages.iter_mut().take(count).rev();
    // Where one has none, those before it went with it.
    for page in behind.take_while(|page| !page.numbers.is_empty()) {
        *page = gone.clone();
    }
}

/// Where entry `i` of a slot's key lies, from the start of its head's keys.
#[inline(always)]
fn key_index(layout: Layout, slot: usize, i: usize) -> usize {
    let slot = slot % PAGE;
    (slot / LANES * layout.head_dim + i) * LANES + slot % LANES
}

fn copy_slot<T: Element>(pages: &mut [Arc<Slots<T>>], layout: Layout, from: usize, to: usize) {
    fn copy<N: Copy>(to: &mut [N], source: Option<&[N]>, (from, at): (usize, usize)) {
        to[at] = source.map_or(to[from], |source| source[from]);
    }
    if from == to {
        return;
    }
    let source = (from / PAGE != to / PAGE).then(|| pages[from / PAGE].clone());
    let numbers = source.as_deref().map(|page| &page.numbers[..]);
    let scales = source.as_deref().map(|page| &page.scales[..]);
    let target = Arc::make_mut(&mut pages[to / PAGE]);
    let (from, to) = (from % PAGE, to % PAGE);
    for head in 0..layout.kv_heads {
        for i in 0..layout.head_dim {
            let key = |slot| layout.keys(head) + key_index(layout, slot, i);
            let value = |slot| layout.values(head) + i + slot * layout.value_stride();
            copy(&mut target.numbers, numbers, (key(from), key(to)));
            copy(&mut target.numbers, numbers, (value(from), value(to)));
        }
        if T::SCALED {
            for first in [layout.key_scales(head), layout.value_scales(head)] {
                copy(&mut target.scales, scales, (first + from, first + to));
            }
        }
    }
}

fn write_rows<T: Element>(
    cpu: &Cpu,
    pages: &mut [Arc<Slots<T>>],
    layout: Layout,
    first: usize,
    (k, k_at): (&[f32], Heads),
    (v, v_at): (&[f32], Heads),
) {
    let rows = k_at.rows(k.len());
    if rows == 0 {
        return;
    }
    // A task writes whole blocks of slots, so that tasks share no cache line.
    let first_block = first / LANES;
    let blocks = (first + rows).div_ceil(LANES) - first_block;
    let first_page = first / PAGE;
    let pages: Vec<(Shared<T>, Shared<f32>)> = pages[first_page..(first + rows).div_ceil(PAGE)]
        .iter_mut()
        .map(|page| {
            let page = Arc::make_mut(page);
            (
                Shared::new(&mut page.numbers),
                Shared::new(&mut page.scales),
            )
        })
        .collect();
    let work = 8 * LANES * layout.kv_heads * layout.head_dim;
    for_rows(cpu, blocks, work, &|range| {
        let slots = ((first_block + range.start) * LANES).max(first)
            ..((first_block + range.end) * LANES).min(first + rows);
        let mut rotated = cpu.scratch::<f32>(if T::SCALED { layout.head_dim } else { 0 });
        for slot in slots {
            let (numbers, scales) = &pages[slot / PAGE - first_page];
            for head in 0..layout.kv_heads {
                let row = slot - first;
                let start = layout.keys(head) + key_index(layout, slot, 0) / LANES * LANES;
                // SAFETY: slots of distinct blocks lie apart, and blocks are disjoint.
                let keys = unsafe { numbers.part(start..start + layout.head_dim * LANES) };
                let start = layout.values(head) + slot % PAGE * layout.value_stride();
                // SAFETY: as above.
                let values = unsafe { numbers.part(start..start + layout.value_stride()) };
                let (key_scale, value_scale) = dispatch(
                    cpu.isa(),
                    WriteSlot {
                        lane: slot % LANES,
                        k: &k[k_at.range(row, head)],
                        v: &v[v_at.range(row, head)],
                        rotated: &mut rotated,
                        keys,
                        values,
                    },
                );
                if T::SCALED {
                    let at = [layout.key_scales(head), layout.value_scales(head)];
                    for (at, scale) in at.into_iter().zip([key_scale, value_scale]) {
                        let at = at + slot % PAGE;
                        // SAFETY: as above.
                        let place = unsafe { scales.part(at..at + 1) };
                        place[0] = scale;
                    }
                }
            }
        }
    });
}

/// Stores the key and the value of a slot and head; gives their scales.
struct WriteSlot<'a, T> {
    lane: usize,
    k: &'a [f32],
    v: &'a [f32],
    /// Room for a head, where heads are scaled.
    rotated: &'a mut [f32],
    keys: &'a mut [T],
    values: &'a mut [T],
}

impl<T: Element> Kernel for WriteSlot<'_, T> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let (k, key_scale) = kept::<T>(self.k, self.rotated);
        let (key_blocks, _) = self.keys.as_chunks_mut::<LANES>();
        for (k, keys) in k.chunks(LANES).zip(key_blocks.chunks_mut(LANES)) {
            let mut stored = [T::default(); LANES];
            T::store(s, s.load_slice(k), &mut stored);
            for (key, stored) in keys.iter_mut().zip(stored) {
                key[self.lane] = stored;
            }
        }
        let (v, value_scale) = kept::<T>(self.v, self.rotated);
        let (value_blocks, _) = self.values.as_chunks_mut::<LANES>();
        for (v, values) in v.chunks(LANES).zip(value_blocks) {
            T::store(s, s.load_slice(v), values);
        }
        (key_scale, value_scale)
    }
}

/// A head as it is stored, but for rounding, and its scale.
#[inline(always)]
fn kept<'a, T: Element>(head: &'a [f32], rotated: &'a mut [f32]) -> (&'a [f32], f32) {
    if !T::SCALED {
        return (head, 1.0);
    }
    rotated.copy_from_slice(head);
    let scale = rotate_and_scale(rotated);
    (rotated, scale)
}
