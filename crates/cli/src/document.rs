//! Pages and drawings: their text, their files.

use crate::failure::Failure;
use std::path::Path;

/// Writes to a temporary name beside the file, so that a page is whole or not there.
pub fn write(path: &Path, page: &str) -> Result<(), Failure> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    std::fs::write(&temporary, page)
        .and_then(|()| std::fs::rename(&temporary, path))
        .map_err(|error| {
            let _ = std::fs::remove_file(&temporary);
            Failure::Failed(format!("{}: cannot be written: {error}", path.display()))
        })
}

/// Text that stands in a page as it is.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
