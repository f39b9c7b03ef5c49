//! Entry points for the fuzz targets in `fuzz/`: any bytes in, no panic and no broken promise.

use std::path::Path;

use crate::Checkpoint;
use crate::config::{ConfigFile, config_json};
use crate::fields::parse_object;
use crate::layout::layout;
use crate::safetensors::Header;

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
