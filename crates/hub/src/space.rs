//! Room on a disk.

use std::path::Path;

/// Bytes that may still be written below `folder`; `None` where the system does not tell.
#[cfg(unix)]
pub(crate) fn free(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
pub(crate) fn free(_: &Path) -> Option<u64> {
    None
}
