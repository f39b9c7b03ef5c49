//! States as bytes, to be kept in files, and what memory they hold.
//!
//! Numbers are little-endian, in the order in which they lie in memory. Reading checks lengths
//! only: what the bytes belong to is the caller's business.

use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use half::f16;

use crate::conv::ConvState;
use crate::delta::DeltaState;
use crate::kv_cache::{Element, KvCache, Layout, PAGE, Pages, Slots, each};

/// Numbers that are turned into bytes together.
const TOGETHER: usize = 8192;

/// Memory that copies of a [`KvCache`] share until one of them writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Page {
    /// The same for copies that share it, and for no other page as long as one of them lives.
    pub id: usize,
    /// Size in memory.
    pub bytes: usize,
}

/// A number of a state.
pub(crate) trait Number: Copy {
    /// Bytes of one.
    const BYTES: usize;
    fn put(self, to: &mut Vec<u8>);
    /// From [`Number::BYTES`] bytes.
    fn get(bytes: &[u8]) -> Self;
}

impl Number for f32 {
    const BYTES: usize = 4;
    fn put(self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.to_le_bytes());
    }
    fn get(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

impl Number for i8 {
    const BYTES: usize = 1;
    fn put(self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.to_le_bytes());
    }
    fn get(bytes: &[u8]) -> i8 {
        i8::from_le_bytes([bytes[0]])
    }
}

impl Number for f16 {
    const BYTES: usize = 2;
    fn put(self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.to_le_bytes());
    }
    fn get(bytes: &[u8]) -> f16 {
        f16::from_le_bytes([bytes[0], bytes[1]])
    }
}

/// Writes floats, for [`read_floats`].
///
/// # Errors
/// Those of `to`.
pub fn write_floats(floats: &[f32], to: &mut dyn Write) -> io::Result<()> {
    write(floats, to)
}

/// Takes as many floats as `out` holds off the front of `bytes`; `None` if there are fewer.
pub fn read_floats(bytes: &mut &[u8], out: &mut [f32]) -> Option<()> {
    read(bytes, out)
}

fn write<T: Number>(numbers: &[T], to: &mut dyn Write) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(TOGETHER * T::BYTES);
    for numbers in numbers.chunks(TOGETHER) {
        bytes.clear();
        numbers.iter().for_each(|number| number.put(&mut bytes));
        to.write_all(&bytes)?;
    }
    Ok(())
}

/// Takes the bytes of `out.len()` numbers off the front of `bytes`; `None` if there are fewer.
fn read<T: Number>(bytes: &mut &[u8], out: &mut [T]) -> Option<()> {
    let (taken, rest) = bytes.split_at_checked(out.len().checked_mul(T::BYTES)?)?;
    *bytes = rest;
    for (out, bytes) in out.iter_mut().zip(taken.chunks_exact(T::BYTES)) {
        *out = T::get(bytes);
    }
    Some(())
}

fn read_pages<T: Element>(
    bytes: &mut &[u8],
    which: Range<usize>,
    layout: Layout,
) -> Option<Vec<Arc<Slots<T>>>> {
    // No memory for numbers that are not there.
    let needed = which
        .len()
        .checked_mul(layout.page())?
        .checked_mul(T::BYTES)?;
    (bytes.len() >= needed).then_some(())?;
    let gone = Arc::new(Slots::gone());
    let mut pages = vec![gone; which.start];
    for _ in which {
        let mut page = Slots::new(layout);
        read(bytes, &mut page.numbers)?;
        read(bytes, &mut page.scales)?;
        pages.push(Arc::new(page));
    }
    Some(pages)
}

fn write_pages<T: Element>(pages: &[Arc<Slots<T>>], to: &mut dyn Write) -> io::Result<()> {
    pages.iter().try_for_each(|page| {
        write(&page.numbers, to)?;
        write(&page.scales, to)
    })
}

impl KvCache {
    /// The memory of its slots.
    pub fn held(&self) -> Vec<Page> {
        fn of<T: Number>(pages: &[Arc<Slots<T>>]) -> Vec<Page> {
            let page = |page: &Arc<Slots<T>>| Page {
                id: Arc::as_ptr(page) as usize,
                bytes: page.numbers.len() * T::BYTES + page.scales.len() * f32::BYTES,
            };
            let there = |page: &&Arc<Slots<T>>| !page.numbers.is_empty();
            pages.iter().filter(there).map(page).collect()
        }
        each!(&self.pages, pages => of(pages))
    }

    /// Writes the whole pages that hold the slots below `slots`, but for those behind the window of
    /// later ones.
    ///
    /// # Errors
    /// Those of `to`.
    ///
    /// # Panics
    /// If such a slot has no memory.
    pub fn write_to(&self, slots: usize, to: &mut dyn Write) -> io::Result<()> {
        let some = self.behind(slots)..slots.div_ceil(PAGE);
        each!(&self.pages, pages => write_pages(&pages[some], to))
    }

    /// A cache like this one, with what [`KvCache::write_to`] wrote for as many slots, taken off
    /// the front of `bytes`; `None` if there are too few.
    pub fn read_from(&self, slots: usize, bytes: &mut &[u8]) -> Option<KvCache> {
        let (behind, layout) = (self.behind(slots), self.layout());
        let count = slots.div_ceil(PAGE);
        let mut cache = self.clone();
        cache.pages = match self.pages {
            Pages::F32(_) => Pages::F32(read_pages(bytes, behind..count, layout)?),
            Pages::F16(_) => Pages::F16(read_pages(bytes, behind..count, layout)?),
            Pages::Int8(_) => Pages::Int8(read_pages(bytes, behind..count, layout)?),
        };
        Some(cache)
    }
}

impl ConvState {
    /// Writes the saved inputs. Errors: those of `to`.
    pub fn write_to(&self, to: &mut dyn Write) -> io::Result<()> {
        write(self.window(), to)
    }

    /// Takes what [`ConvState::write_to`] wrote off the front of `bytes`; `None` if there are too
    /// few.
    pub fn read_from(&mut self, bytes: &mut &[u8]) -> Option<()> {
        read(bytes, self.window_mut())
    }
}

impl DeltaState {
    /// Writes the matrices. Errors: those of `to`.
    pub fn write_to(&self, to: &mut dyn Write) -> io::Result<()> {
        write(self.data(), to)
    }

    /// Takes what [`DeltaState::write_to`] wrote off the front of `bytes`; `None` if there are too
    /// few.
    pub fn read_from(&mut self, bytes: &mut &[u8]) -> Option<()> {
        read(bytes, self.data_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cpu, KvType};

    #[test]
    fn a_cache_comes_back_as_it_was() {
        let cpu = Cpu::new(Some(1));
        for kind in [KvType::F16, KvType::F32, KvType::Int8] {
            let mut cache = KvCache::new(2, 5, kind);
            for slot in 0..300 {
                let key: Vec<f32> = (0..10).map(|i| (slot * 10 + i) as f32 * 0.37).collect();
                cache.write(&cpu, slot, &key, &key);
            }
            let mut bytes = Vec::new();
            cache.write_to(300, &mut bytes).unwrap();
            assert_eq!(bytes.len(), cache.bytes());
            let empty = KvCache::new(2, 5, kind);
            let again = empty.read_from(300, &mut &bytes[..]).unwrap();
            let mut second = Vec::new();
            again.write_to(300, &mut second).unwrap();
            assert!(bytes == second, "{kind:?}");
            // Only the first page, and nothing where a byte is missing.
            let mut rest = &bytes[..];
            empty.read_from(256, &mut rest).unwrap();
            assert_eq!(rest.len(), bytes.len() / 2);
            assert!(empty.read_from(300, &mut &bytes[1..]).is_none());
            assert!(empty.read_from(usize::MAX, &mut &bytes[..]).is_none());
        }
    }

    #[test]
    fn copies_hold_the_same_pages_until_one_writes() {
        let cpu = Cpu::new(Some(1));
        let mut one = KvCache::new(1, 16, KvType::F16);
        one.write(&cpu, 256, &[1.0; 16], &[1.0; 16]);
        let mut other = one.clone();
        assert_eq!(one.held(), other.held());
        let bytes: usize = one.held().iter().map(|page| page.bytes).sum();
        assert_eq!(bytes, one.bytes());
        other.write(&cpu, 257, &[1.0; 16], &[1.0; 16]);
        assert_eq!(one.held()[0], other.held()[0]);
        assert_ne!(one.held()[1].id, other.held()[1].id);
    }
}
