//! What is written is what is kept of it, in every slot.

use super::*;
use crate::lanes::Portable;
use crate::testing::{cpus, heads_in, values};
use proptest::prelude::*;

/// The numbers of the key and the value of a slot's head, read back, and their scales.
fn read(cache: &KvCache, slot: usize, head: usize) -> [(Vec<f32>, f32); 2] {
    fn from<T: Element>(
        pages: &[Arc<Slots<T>>],
        l: Layout,
        slot: usize,
        head: usize,
    ) -> [(Vec<f32>, f32); 2] {
        let page = &pages[slot / PAGE];
        let key = |i| l.keys(head) + key_index(l, slot, i);
        let value = |i| l.values(head) + slot % PAGE * l.value_stride() + i;
        let wide = |at: usize| {
            let mut one = [T::default(); LANES];
            one[0] = page.numbers[at];
            let mut lanes = [0.0; LANES];
            Portable.store(T::load(Portable, &one), &mut lanes);
            lanes[0]
        };
        let scale = |at: usize| {
            page.scales
                .get(at + slot % PAGE)
                .map_or(1.0, |scale| *scale)
        };
        [
            (
                (0..l.head_dim).map(|i| wide(key(i))).collect(),
                scale(l.key_scales(head)),
            ),
            (
                (0..l.head_dim).map(|i| wide(value(i))).collect(),
                scale(l.value_scales(head)),
            ),
        ]
    }
    each!(&cache.pages, pages => from(pages, cache.layout(), slot, head))
}

/// What a cache keeps of a head, and its scale.
pub(crate) fn stored(kind: KvType, head: &[f32]) -> (Vec<f32>, f32) {
    match kind {
        KvType::F32 => (head.to_vec(), 1.0),
        KvType::F16 => {
            let half = |x: &f32| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32();
            (head.iter().map(half).collect(), 1.0)
        }
        KvType::Int8 => {
            let mut head = head.to_vec();
            rotate(&mut head);
            let most = head.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            if most == 0.0 {
                return (head, 0.0);
            }
            let code = |x: &f32| (x * (127.0 / most)).round_ties_even();
            (head.iter().map(code).collect(), most / 127.0)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn what_is_written_is_read_back(
        rows in 1usize..40, first in 0usize..600, kv_heads in 1usize..4, dim in 1usize..70,
        kind in prop_oneof![Just(KvType::F32), Just(KvType::F16), Just(KvType::Int8)], seed: u64,
    ) {
        let (k_at, v_at) = (heads_in(seed, kv_heads, dim), heads_in(seed ^ 1, kv_heads, dim));
        let k = values(seed ^ 2, rows * k_at.row, 3.0);
        let v = values(seed ^ 3, rows * v_at.row, 1e5);
        for cpu in cpus() {
            let mut cache = KvCache::new(kv_heads, dim, kind);
            cache.write_rows(&cpu, first, (&k, k_at), (&v, v_at));
            prop_assert_eq!(cache.slots(), (first + rows).div_ceil(256) * 256);
            cache.reserve(first + rows + 1);
            cache.copy_slot(first, first + rows);
            for row in 0..=rows {
                let source = if row == rows { 0 } else { row };
                for head in 0..kv_heads {
                    let [key, value] = read(&cache, first + row, head);
                    prop_assert_eq!(key, stored(kind, &k[k_at.range(source, head)]));
                    prop_assert_eq!(value, stored(kind, &v[v_at.range(source, head)]));
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
    assert_eq!(
        KvCache::bytes_of(2, 20, KvType::F16, 257, None),
        cache.bytes() as u64
    );
    cache.truncate(256);
    assert_eq!(cache.slots(), 256);
    let mut cache = KvCache::new(2, 20, KvType::Int8);
    cache.write(&cpu, 0, &[1.0; 40], &[2.0; 40]);
    // One scale for each key and value of a slot and head.
    assert_eq!(cache.bytes(), 256 * 2 * (20 + 32 + 8));
    assert_eq!(
        KvCache::bytes_of(2, 20, KvType::Int8, 1, None),
        cache.bytes() as u64
    );
}

#[test]
fn pages_behind_a_window_go() {
    let cpu = Cpu::new(Some(1));
    for window in [1, 2, 100, 256, 257, 258, 600, 5000] {
        let mut cache = KvCache::new(1, 16, KvType::F16).within(window);
        let page = KvCache::bytes_of(1, 16, KvType::F16, 1, None) as usize;
        for slot in 0..1500 {
            cache.write(&cpu, slot, &[slot as f32; 16], &[1.0; 16]);
            let len = slot + 1;
            cache.forget(len);
            // The next row is at `len` and sees `window` positions with its own.
            let first = (len + 1).saturating_sub(window).min(len);
            let seen = len.div_ceil(256) - first / 256;
            let pages = cache.held().len();
            // A page that is left full goes with the next row.
            assert!(
                pages == seen || (first == len && pages == 1),
                "{window}: {len}"
            );
            let told = KvCache::bytes_of(1, 16, KvType::F16, len, Some(window));
            assert!(cache.bytes() <= told as usize, "{window}: {len}");
            assert_eq!(cache.bytes(), pages * page);
        }
        // What is left is what was written.
        assert_eq!(cache.slots(), 1536);
        let mut bytes = Vec::new();
        cache.write_to(1500, &mut bytes).unwrap();
        assert_eq!(bytes.len(), cache.bytes());
        let empty = KvCache::new(1, 16, KvType::F16).within(window);
        let again = empty.read_from(1500, &mut &bytes[..]).unwrap();
        assert_eq!((again.bytes(), again.slots()), (cache.bytes(), 1536));
        assert_eq!(read(&again, 1499, 0), read(&cache, 1499, 0));
    }
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
    let read = |cache: &KvCache, slot| read(cache, slot, 0).map(|(numbers, _)| numbers);
    assert_eq!(read(&one, 260), [vec![260.0; 16], vec![-260.0; 16]]);
    assert_eq!(read(&one, 280)[0], vec![280.0; 16]);
    assert_eq!(read(&other, 280), [vec![9.0; 16], vec![9.0; 16]]);
    assert_eq!(read(&other, 281), [vec![3.0; 16], vec![-3.0; 16]]);
    assert_eq!(read(&other, 299)[0], vec![299.0; 16]);
}
