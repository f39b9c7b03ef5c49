//! Pages and drawings: their text, their files.

use crate::failure::Failure;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Writes to a temporary name beside the file, so that a page is whole or not there. What a link
/// leads to is replaced, not the link; a pipe or a device takes the page as it is, and `-` is
/// standard output.
pub fn write(path: &Path, page: &str) -> Result<(), Failure> {
    if path == Path::new("-") {
        let written = io::stdout().lock().write_all(page.as_bytes());
        return written.map_err(Failure::output);
    }
    let failed = |error: io::Error| {
        Failure::Failed(format!("{}: cannot be written: {error}", path.display()))
    };
    let place = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if fs::metadata(&place).is_ok_and(|kind| !kind.is_file()) {
        return fs::write(&place, page).map_err(failed);
    }
    let mut name = place.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = place.with_file_name(name);
    fs::write(&temporary, page)
        .and_then(|()| fs::rename(&temporary, &place))
        .map_err(|error| {
            let _ = fs::remove_file(&temporary);
            failed(error)
        })
}

/// Text that stands in a page as it is.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_link_stays_and_a_device_is_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let (page, link) = (folder.path().join("page"), folder.path().join("link"));
        fs::write(&page, "old").unwrap();
        std::os::unix::fs::symlink(&page, &link).unwrap();
        write(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&page).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        // A link to the device, so that a mistake costs the link only.
        let full = folder.path().join("full");
        std::os::unix::fs::symlink("/dev/full", &full).unwrap();
        assert!(write(&full, "page").is_err());
        assert!(!fs::metadata("/dev/full").unwrap().is_file());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
