//! Bytes of a matrix: a part of a shared owner (a file's mapping, say), or memory of our own.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use crate::error::Error;

/// A range of bytes that keeps its owner alive. Cloning it copies no bytes.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// The bytes `range` of `owner`.
    ///
    /// # Errors
    /// If the range does not lie within the owner.
    pub fn new(
        owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
        range: Range<usize>,
    ) -> Result<Self, Error> {
        let len = (*owner).as_ref().len();
        if range.start > range.end || range.end > len {
            return Err(Error::new(format!(
                "bytes {}..{} lie outside of a buffer of {len} bytes",
                range.start, range.end
            )));
        }
        Ok(Self { owner, range })
    }

    /// The bytes `range` of these, with the same owner.
    ///
    /// # Errors
    /// If the range does not lie within these bytes.
    pub fn part(&self, range: Range<usize>) -> Result<Self, Error> {
        if range.start > range.end || range.end > self.range.len() {
            return Err(Error::new(format!(
                "bytes {}..{} lie outside of a part of {} bytes",
                range.start,
                range.end,
                self.range.len()
            )));
        }
        let start = self.range.start;
        Self::new(self.owner.clone(), start + range.start..start + range.end)
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // The owner's length was checked when the range was set; should an owner shrink since, this
        // gives nothing rather than a panic.
        (*self.owner)
            .as_ref()
            .get(self.range.clone())
            .unwrap_or(&[])
    }
}

impl<T: AsRef<[u8]> + Send + Sync + 'static> From<T> for SharedBytes {
    fn from(owner: T) -> Self {
        let range = 0..owner.as_ref().len();
        Self {
            owner: Arc::new(owner),
            range,
        }
    }
}

/// Zeroed bytes of our own, aligned to a cache line; large buffers ask for huge pages, which spare
/// the kernels address translation.
pub struct AlignedBytes {
    ptr: *mut u8,
    len: usize,
    kind: Kind,
}

enum Kind {
    /// From the allocator.
    Heap,
    /// An anonymous mapping: its start and length.
    #[cfg(unix)]
    Mapping(*mut u8, usize),
}

const LINE: usize = 64;
#[cfg(unix)]
const HUGE_PAGE: usize = 2 << 20;

// SAFETY: the bytes are owned and have no interior mutability.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        #[cfg(unix)]
        if len >= 2 * HUGE_PAGE
            && let Some(bytes) = Self::mapped(len)
        {
            return bytes;
        }
        if len == 0 {
            return Self {
                ptr: LINE as *mut u8,
                len,
                kind: Kind::Heap,
            };
        }
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        if ptr.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Self {
            ptr,
            len,
            kind: Kind::Heap,
        }
    }

    fn layout(len: usize) -> std::alloc::Layout {
        match std::alloc::Layout::from_size_align(len, LINE) {
            Ok(layout) => layout,
            // As the standard collections do for a size beyond the address space.
            Err(_) => panic!("capacity overflow"),
        }
    }

    #[cfg(unix)]
    fn mapped(len: usize) -> Option<Self> {
        let size = len.checked_add(HUGE_PAGE)?;
        // SAFETY: a new anonymous mapping at an address of the system's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = base.cast::<u8>();
        // SAFETY: the offset is below one huge page, by which the mapping is longer than `len`.
        let ptr = unsafe { base.add(base.align_offset(HUGE_PAGE)) };
        // Whole huge pages only: the rest would hold memory that nobody uses.
        #[cfg(target_os = "linux")]
        // SAFETY: the range lies in the mapping just made; the call is a hint and may fail.
        unsafe {
            libc::madvise(ptr.cast(), len / HUGE_PAGE * HUGE_PAGE, libc::MADV_HUGEPAGE);
        }
        Some(Self {
            ptr,
            len,
            kind: Kind::Mapping(base, size),
        })
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        match self.kind {
            Kind::Heap if self.len == 0 => {}
            Kind::Heap => {
                // SAFETY: allocated in `zeroed` with this layout.
                unsafe { std::alloc::dealloc(self.ptr, Self::layout(self.len)) }
            }
            #[cfg(unix)]
            Kind::Mapping(base, size) => {
                // SAFETY: this mapping was made in `mapped` and nothing borrows it any more.
                unsafe { libc::munmap(base.cast(), size) };
            }
        }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes, and not null even if `len` is 0.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_bytes_are_zeroed_writable_and_aligned() {
        for len in [0, 1, 63, 4096, (4 << 20) + 5] {
            let mut bytes = AlignedBytes::zeroed(len);
            assert_eq!(bytes.len(), len);
            assert_eq!(bytes.as_ptr() as usize % 64, 0);
            assert!(bytes.iter().all(|&b| b == 0));
            bytes.fill(7);
            assert!(bytes.iter().all(|&b| b == 7));
        }
    }

    #[test]
    fn shared_bytes_check_their_range() {
        let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(vec![1u8, 2, 3, 4]);
        assert_eq!(&*SharedBytes::new(owner.clone(), 1..3).unwrap(), &[2, 3]);
        assert!(SharedBytes::new(owner.clone(), 1..5).is_err());
        #[expect(clippy::reversed_empty_ranges, reason = "this is the bad input")]
        let reversed = 3..2;
        assert!(SharedBytes::new(owner, reversed).is_err());
    }
}
