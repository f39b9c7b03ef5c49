//! Entry points for the fuzz targets in `fuzz/`: any bytes in, no panic and no broken promise.

use std::path::Path;

use crate::Checkpoint;
use crate::config::{ConfigFile, config_json};
use crate::fields::parse_object;
use crate::kozue::packed_tensors;
use crate::layout::layout;
use crate::safetensors::Header;
use crate::shards::Shards;

/// Bytes as a safetensors file: every tensor that is accepted lies inside them.
pub fn safetensors(data: &[u8]) {
    let Ok(header) = Header::parse(data) else {
        return;
    };
    for (name, entry) in &header.entries {
        let bytes = &data[entry.range.clone()];
        let values: usize = entry.shape.iter().product();
        assert_eq!(bytes.len(), values * entry.dtype.size(), "{name}");
    }
}

/// Bytes as a config.json: settings that are accepted survive being written and read again.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let path = Path::new("config.json");
    let read = parse_object(path, text).and_then(|map| ConfigFile::from_object(path, &map));
    let Ok(read) = read else { return };
    assert!(!layout(&read.model).is_empty());
    let again = ConfigFile::from_object(path, &config_json(&read.model));
    let again = again.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(again.model, read.model);
}

/// The directory's model.safetensors as Kozue's own format: every packed matrix that is accepted
/// can be read from its first row to its last. Gives how many there are.
pub fn packed(dir: &Path) -> usize {
    let Ok(shards) = Shards::open(dir, false) else {
        return 0;
    };
    let Ok(packed) = packed_tensors(&shards) else {
        return 0;
    };
    for matrix in packed.values() {
        let mut row = vec![0.0; matrix.k()];
        matrix.row_into(0, &mut row);
        matrix.row_into(matrix.n() - 1, &mut row);
    }
    packed.len()
}

/// Ask for every tensor in every way: what is given has the shape that was listed.
pub fn read_all(checkpoint: &Checkpoint) {
    for info in checkpoint.tensors() {
        let Some(len) = info
            .shape
            .iter()
            .try_fold(1, |len: usize, &n| len.checked_mul(n))
        else {
            continue;
        };
        if let Ok(values) = checkpoint.vector(&info.name, len) {
            assert_eq!(values.len(), len, "{}", info.name);
        }
        if let [n, k] = info.shape[..] {
            if let Ok(matrix) = checkpoint.matrix(&info.name, n, k) {
                assert_eq!((matrix.n(), matrix.k()), (n, k), "{}", info.name);
            }
            let mut row = vec![0.0; k.min(1 << 20)];
            for first in [0, n.saturating_sub(1), n, usize::MAX] {
                let read = checkpoint.source.rows(&info.name, k, first, &mut row);
                assert!(first < n || k == 0 || read.is_err(), "{}", info.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// Inputs to start from, and those that fuzzing once failed on.
    fn inputs(target: &str) -> Vec<PathBuf> {
        let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
        let folders = ["seeds", "found"].map(|kind| fuzz.join(kind).join(target));
        let files = folders
            .iter()
            .filter_map(|folder| fs::read_dir(folder).ok());
        let mut paths: Vec<PathBuf> = files.flatten().flatten().map(|file| file.path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "no inputs for {target}");
        paths
    }

    #[test]
    fn kept_safetensors_files() {
        for path in inputs("safetensors") {
            safetensors(&fs::read(path).expect("it was listed"));
        }
    }

    #[test]
    fn kept_packed_files() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for path in inputs("packed") {
            fs::copy(&path, dir.path().join("model.safetensors")).expect("it was listed");
            let seed = path.to_string_lossy().contains("seeds");
            assert!(packed(dir.path()) == 1 || !seed, "{}", path.display());
        }
    }

    #[test]
    fn kept_settings() {
        for path in inputs("config") {
            let text = fs::read(&path).expect("it was listed");
            config(&text);
        }
    }

    #[test]
    fn kept_gguf_files() {
        for path in inputs("gguf") {
            match Checkpoint::open(&path) {
                Ok(checkpoint) => read_all(&checkpoint),
                Err(error) => {
                    let seed = path.to_string_lossy().contains("seeds");
                    assert!(!seed, "{error}");
                }
            }
        }
    }
}
