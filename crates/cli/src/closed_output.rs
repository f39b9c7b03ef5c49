//! Whether the program was started without a standard output (`kozue ... >&-`).
//!
//! Rust's runtime opens /dev/null in its place before `main`, so that all writing would succeed
//! and nothing arrive; the only time to look is before that.

use std::sync::atomic::{AtomicBool, Ordering};

static CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether there was no standard output at the start; `false` where the system cannot tell.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

#[cfg(any(target_os = "linux", target_os = "macos"))]
extern "C" fn look() {
    // SAFETY: asking for the flags of a descriptor takes no pointer and changes nothing.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    CLOSED.store(flags == -1, Ordering::Relaxed);
}

// SAFETY: the loader calls what is listed in this section once, before `main` and on the only
// thread, with the C calling convention. `look` needs nothing of Rust's runtime.
#[cfg(any(target_os = "linux", target_os = "macos"))]
#[used]
#[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
#[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
static LOOK: extern "C" fn() = look;
