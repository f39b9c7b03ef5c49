//! Keys and values of one attention layer, in pages that never move. Copies of a cache share its
//! pages until one of them writes.

use std::sync::Arc;

use half::f16;

use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::rows::{Heads, Shared, for_rows};
use crate::stored::Number;

/// Slots of a page, and positions of a chunk of the softmax.
pub(crate) const PAGE: usize = 256;

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// As computed.
    F32,
    /// Rounded to f16, ties to even; values beyond its range become its largest.
    F16,
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
    pub(crate) pages: Pages,
}

/// Numbers of a cache, page by page.
#[derive(Clone)]
pub(crate) enum Pages {
    F32(Vec<Arc<Vec<f32>>>),
    F16(Vec<Arc<Vec<f16>>>),
}

/// Layout of a page: for every kv head [keys | values]; keys are [16 blocks][head_dim][16 slots],
/// values [256 slots][head_dim padded to 16].
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

    /// Start of a kv head's keys in a page.
    pub(crate) fn keys(&self, head: usize) -> usize {
        head * self.head()
    }

    /// Start of a kv head's values in a page.
    pub(crate) fn values(&self, head: usize) -> usize {
        head * self.head() + PAGE * self.head_dim
    }
}

/// A stored number: f32 or f16.
pub(crate) trait Element: Number + Default + Send + Sync + 'static {
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::V;
    fn store<S: Simd>(s: S, v: S::V, to: &mut [Self; LANES]);
    /// The pages of a cache, if they hold this type.
    fn pages(cache: &KvCache) -> &[Arc<Vec<Self>>];
    /// Whether it is f32 already.
    const WIDE: bool;
}

impl Element for f32 {
    const WIDE: bool = true;

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[f32; LANES]) -> S::V {
        s.load(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::V, to: &mut [f32; LANES]) {
        s.store(v, to);
    }
    fn pages(cache: &KvCache) -> &[Arc<Vec<f32>>] {
        match &cache.pages {
            Pages::F32(pages) => pages,
            Pages::F16(_) => &[],
        }
    }
}

impl Element for f16 {
    const WIDE: bool = false;

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
    fn pages(cache: &KvCache) -> &[Arc<Vec<f16>>] {
        match &cache.pages {
            Pages::F32(_) => &[],
            Pages::F16(pages) => pages,
        }
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
            pages: match kind {
                KvType::F32 => Pages::F32(vec![]),
                KvType::F16 => Pages::F16(vec![]),
            },
        }
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
        }
    }

    /// Slots that have memory.
    pub fn slots(&self) -> usize {
        PAGE * match &self.pages {
            Pages::F32(pages) => pages.len(),
            Pages::F16(pages) => pages.len(),
        }
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        let size = match self.kind() {
            KvType::F32 => 4,
            KvType::F16 => 2,
        };
        self.slots() / PAGE * self.layout().page() * size
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout {
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// Gives every slot below `slots` memory.
    pub fn reserve(&mut self, slots: usize) {
        let size = self.layout().page();
        let pages = slots.div_ceil(PAGE);
        match &mut self.pages {
            Pages::F32(have) => grow(have, pages, size),
            Pages::F16(have) => grow(have, pages, size),
        }
    }

    /// Releases the memory of whole pages at and after `slots`.
    pub fn truncate(&mut self, slots: usize) {
        let pages = slots.div_ceil(PAGE);
        match &mut self.pages {
            Pages::F32(have) => have.truncate(pages),
            Pages::F16(have) => have.truncate(pages),
        }
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
        match &mut self.pages {
            Pages::F32(pages) => write_rows(cpu, pages, layout, first, (k, k_at), (v, v_at)),
            Pages::F16(pages) => write_rows(cpu, pages, layout, first, (k, k_at), (v, v_at)),
        }
    }

    /// Copies a slot's key and value to another slot.
    ///
    /// # Panics
    /// If a slot has no memory.
    pub fn copy_slot(&mut self, from: usize, to: usize) {
        let slots = self.slots();
        assert!(from < slots && to < slots, "slot {from} to {to} of {slots}");
        let layout = self.layout();
        match &mut self.pages {
            Pages::F32(pages) => copy_slot(pages, layout, from, to),
            Pages::F16(pages) => copy_slot(pages, layout, from, to),
        }
    }
}

fn grow<T: Element>(pages: &mut Vec<Arc<Vec<T>>>, count: usize, size: usize) {
    while pages.len() < count {
        pages.push(Arc::new(vec![T::default(); size]));
    }
}

/// Where entry `i` of a slot's key lies, from the start of its head's keys.
#[inline(always)]
fn key_index(layout: Layout, slot: usize, i: usize) -> usize {
    let slot = slot % PAGE;
    (slot / LANES * layout.head_dim + i) * LANES + slot % LANES
}

fn copy_slot<T: Element>(pages: &mut [Arc<Vec<T>>], layout: Layout, from: usize, to: usize) {
    if from == to {
        return;
    }
    let source = (from / PAGE != to / PAGE).then(|| pages[from / PAGE].clone());
    let target = Arc::make_mut(&mut pages[to / PAGE]);
    for head in 0..layout.kv_heads {
        for i in 0..layout.head_dim {
            let key = layout.keys(head);
            let values = layout.values(head) + i;
            for (from, to) in [
                (
                    key + key_index(layout, from, i),
                    key + key_index(layout, to, i),
                ),
                (
                    values + from % PAGE * layout.value_stride(),
                    values + to % PAGE * layout.value_stride(),
                ),
            ] {
                target[to] = match &source {
                    Some(source) => source[from],
                    None => target[from],
                };
            }
        }
    }
}

fn write_rows<T: Element>(
    cpu: &Cpu,
    pages: &mut [Arc<Vec<T>>],
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
    let pages: Vec<Shared<T>> = pages[first_page..(first + rows).div_ceil(PAGE)]
        .iter_mut()
        .map(|page| Shared::new(Arc::make_mut(page).as_mut_slice()))
        .collect();
    let work = 8 * LANES * layout.kv_heads * layout.head_dim;
    for_rows(cpu, blocks, work, &|range| {
        let slots = ((first_block + range.start) * LANES).max(first)
            ..((first_block + range.end) * LANES).min(first + rows);
        for slot in slots {
            let page = &pages[slot / PAGE - first_page];
            for head in 0..layout.kv_heads {
                let row = slot - first;
                let start = layout.keys(head) + key_index(layout, slot, 0) / LANES * LANES;
                // SAFETY: slots of distinct blocks lie apart, and blocks are disjoint.
                let keys = unsafe { page.part(start..start + layout.head_dim * LANES) };
                let start = layout.values(head) + slot % PAGE * layout.value_stride();
                // SAFETY: as above.
                let values = unsafe { page.part(start..start + layout.value_stride()) };
                dispatch(
                    cpu.isa(),
                    WriteSlot {
                        lane: slot % LANES,
                        k: &k[k_at.range(row, head)],
                        v: &v[v_at.range(row, head)],
                        keys,
                        values,
                    },
                );
            }
        }
    });
}

struct WriteSlot<'a, T> {
    lane: usize,
    k: &'a [f32],
    v: &'a [f32],
    keys: &'a mut [T],
    values: &'a mut [T],
}

impl<T: Element> Kernel for WriteSlot<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (key_blocks, _) = self.keys.as_chunks_mut::<LANES>();
        for (k, keys) in self.k.chunks(LANES).zip(key_blocks.chunks_mut(LANES)) {
            let mut stored = [T::default(); LANES];
            T::store(s, s.load_slice(k), &mut stored);
            for (key, stored) in keys.iter_mut().zip(stored) {
                key[self.lane] = stored;
            }
        }
        let (value_blocks, _) = self.values.as_chunks_mut::<LANES>();
        for (v, values) in self.v.chunks(LANES).zip(value_blocks) {
            T::store(s, s.load_slice(v), values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, heads_in, values};
    use proptest::prelude::*;

    /// The key and the value of a slot's head, read back.
    fn read(cache: &KvCache, slot: usize, head: usize) -> (Vec<f32>, Vec<f32>) {
        fn from<T: Element>(
            pages: &[Arc<Vec<T>>],
            l: Layout,
            slot: usize,
            head: usize,
        ) -> (Vec<T>, Vec<T>) {
            let page = &pages[slot / PAGE];
            let key = |i| page[l.keys(head) + key_index(l, slot, i)];
            let value = |i| page[l.values(head) + slot % PAGE * l.value_stride() + i];
            (
                (0..l.head_dim).map(key).collect(),
                (0..l.head_dim).map(value).collect(),
            )
        }
        let l = cache.layout();
        match &cache.pages {
            Pages::F32(pages) => from(pages, l, slot, head),
            Pages::F16(pages) => {
                let (k, v) = from(pages, l, slot, head);
                let wide = |x: Vec<f16>| x.into_iter().map(f16::to_f32).collect();
                (wide(k), wide(v))
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn what_is_written_is_read_back(
            rows in 1usize..40, first in 0usize..600, kv_heads in 1usize..4, dim in 1usize..40,
            half: bool, seed: u64,
        ) {
            let (k_at, v_at) = (heads_in(seed, kv_heads, dim), heads_in(seed ^ 1, kv_heads, dim));
            let k = values(seed ^ 2, rows * k_at.row, 3.0);
            let v = values(seed ^ 3, rows * v_at.row, 1e5);
            let kind = if half { KvType::F16 } else { KvType::F32 };
            let kept = |x: f32| if half { f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32() } else { x };
            for cpu in cpus() {
                let mut cache = KvCache::new(kv_heads, dim, kind);
                cache.write_rows(&cpu, first, (&k, k_at), (&v, v_at));
                prop_assert_eq!(cache.slots(), (first + rows).div_ceil(256) * 256);
                cache.reserve(first + rows + 1);
                cache.copy_slot(first, first + rows);
                for row in 0..=rows {
                    let source = if row == rows { 0 } else { row };
                    for head in 0..kv_heads {
                        let (key, value) = read(&cache, first + row, head);
                        let expected: Vec<f32> = k[k_at.range(source, head)].iter().map(|&x| kept(x)).collect();
                        prop_assert_eq!(key, expected);
                        let expected: Vec<f32> = v[v_at.range(source, head)].iter().map(|&x| kept(x)).collect();
                        prop_assert_eq!(value, expected);
                    }
                }
            }
        }
    }

    #[test]
    fn memory_grows_and_shrinks_by_pages() {
        let cpu = Cpu::new(Some(1));
        let mut cache = KvCache::new(2, 20, KvType::F16);
        assert_eq!((cache.slots(), cache.bytes()), (0, 0));
        cache.write(&cpu, 256, &[1.0; 40], &[2.0; 40]);
        assert_eq!(cache.slots(), 512);
        // Values are padded to 32.
        assert_eq!(cache.bytes(), 512 * 2 * (20 + 32) * 2);
        cache.truncate(256);
        assert_eq!(cache.slots(), 256);
    }

    #[test]
    fn copies_share_pages_until_one_writes() {
        let cpu = Cpu::new(Some(1));
        let mut one = KvCache::new(1, 16, KvType::F32);
        for slot in 0..300 {
            one.write(&cpu, slot, &[slot as f32; 16], &[-(slot as f32); 16]);
        }
        let mut other = one.clone();
        let shared = |a: &KvCache, b: &KvCache, page: usize| {
            Arc::ptr_eq(&f32::pages(a)[page], &f32::pages(b)[page])
        };
        assert!(shared(&one, &other, 0) && shared(&one, &other, 1));
        other.write(&cpu, 260, &[9.0; 16], &[9.0; 16]);
        other.copy_slot(260, 280);
        other.copy_slot(3, 281);
        assert!(shared(&one, &other, 0) && !shared(&one, &other, 1));
        assert_eq!(read(&one, 260, 0), (vec![260.0; 16], vec![-260.0; 16]));
        assert_eq!(read(&one, 280, 0).0, vec![280.0; 16]);
        assert_eq!(read(&other, 280, 0), (vec![9.0; 16], vec![9.0; 16]));
        assert_eq!(read(&other, 281, 0), (vec![3.0; 16], vec![-3.0; 16]));
        assert_eq!(read(&other, 299, 0).0, vec![299.0; 16]);
    }
}
