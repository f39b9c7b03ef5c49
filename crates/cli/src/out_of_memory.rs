//! The system's allocator, with one clear line and exit code 1 where it has no more memory.
//!
//! What can be foreseen is refused earlier, with better advice (`engine::memory`). For the rest,
//! Rust's own handler would abort, with a trace of the program's insides.

use std::alloc::{GlobalAlloc, Layout, System};

struct OrEnd;

#[global_allocator]
static ALLOCATOR: OrEnd = OrEnd;

// SAFETY: every call goes to the system's allocator as it came; what comes back goes back as it
// is, save that a null pointer ends the process instead. `end` allocates nothing and does not
// unwind.
unsafe impl GlobalAlloc for OrEnd {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps to the contract of `alloc`.
        or_end(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the contract of `dealloc`; `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps to the contract of `alloc_zeroed`.
        or_end(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps to the contract of `realloc`; `ptr` came from `System`.
        or_end(unsafe { System.realloc(ptr, layout, size) }, size)
    }
}

#[inline]
fn or_end(ptr: *mut u8, size: usize) -> *mut u8 {
    if ptr.is_null() {
        end(size);
    }
    ptr
}

#[cold]
fn end(size: usize) -> ! {
    let mut digits = [0; 20];
    let parts = [
        b"kozue: out of memory: ".as_slice(),
        decimal(size, &mut digits),
        b" more bytes cannot be had: give a smaller --ctx, or run a smaller model (kozue quantize makes one)\n",
    ];
    let mut line = [0; 256];
    let mut length = 0;
    for part in parts {
        line[length..length + part.len()].copy_from_slice(part);
        length += part.len();
    }
    write(&line[..length]);
    exit()
}

/// A number without any memory but the caller's.
fn decimal(mut number: usize, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}

#[cfg(unix)]
fn write(line: &[u8]) {
    // SAFETY: the pointer and the length are those of a slice. Where standard error is gone there
    // is nobody to tell.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

#[cfg(unix)]
fn exit() -> ! {
    // SAFETY: ends the process without running anything else of it, which might need memory.
    unsafe { libc::_exit(1) }
}

#[cfg(not(unix))]
fn write(line: &[u8]) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line);
}

#[cfg(not(unix))]
fn exit() -> ! {
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_decimal() {
        let mut digits = [0; 20];
        assert_eq!(decimal(0, &mut digits), b"0");
        assert_eq!(decimal(1_234_567_890, &mut digits), b"1234567890");
        assert_eq!(
            decimal(usize::MAX, &mut digits),
            usize::MAX.to_string().as_bytes()
        );
    }
}
