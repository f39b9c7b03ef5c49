//! What rows cost, kept from one start to the next.
//!
//! One small JSON file for each model, processor and number of threads. A table that was made by
//! another version, for another processor or another model is not used.

use super::cost::RowCosts;
use crate::error::Error;
use crate::loaded::Loaded;
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// Tables older than this are measured anew: drivers, firmware and memory change.
const OLDEST_S: u64 = 60 * 24 * 3600;

/// A stored table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// What it holds for.
    #[serde(flatten)]
    of: Subject,
    /// Seconds since 1970 when it was measured.
    measured_s: u64,
    /// `milliseconds[n - 1]` is the cost of a pass of n rows.
    milliseconds: Vec<f64>,
}

/// What a table holds for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Subject {
    version: String,
    processor: String,
    threads: usize,
    model: String,
}

/// Where the tables of this user lie; `None` where the system names no place.
pub fn default_folder() -> Option<PathBuf> {
    let named = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            // By the XDG base directory specification a relative path is to be ignored.
            .filter(|path| path.is_absolute())
    };
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    Some(cache.join("kozue").join("rows"))
}

/// The stored table of a model on this machine, or what it was not used for.
pub fn load(folder: &Path, target: &Loaded) -> Option<RowCosts> {
    let of = subject(target);
    let path = file(folder, &of);
    let text = std::fs::read_to_string(&path).ok()?;
    match read(&text, &of, now()) {
        Ok(costs) => Some(costs),
        Err(reason) => {
            tracing::info!("{}: {reason}; measuring anew", path.display());
            None
        }
    }
}

/// Stores a table; gives where.
///
/// Errors: the folder cannot be made or written to.
pub fn store(folder: &Path, target: &Loaded, costs: &RowCosts) -> Result<PathBuf, Error> {
    let of = subject(target);
    let path = file(folder, &of);
    let table = Table {
        of,
        measured_s: now(),
        milliseconds: costs.milliseconds().to_vec(),
    };
    let failed = |error: &dyn std::fmt::Display| {
        Error::Draft(format!("{}: cannot be written: {error}", path.display()))
    };
    let text = serde_json::to_string_pretty(&table).map_err(|e| failed(&e))?;
    std::fs::create_dir_all(folder).map_err(|e| failed(&e))?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&temporary, text + "\n")
        .and_then(|()| std::fs::rename(&temporary, &path))
        .map_err(|e| {
            let _ = std::fs::remove_file(&temporary);
            failed(&e)
        })?;
    Ok(path)
}

fn read(text: &str, of: &Subject, now_s: u64) -> Result<RowCosts, String> {
    let table: Table = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if table.of != *of {
        return Err("was measured by another version or for another machine or model".to_string());
    }
    if now_s.saturating_sub(table.measured_s) > OLDEST_S || table.measured_s > now_s {
        return Err("is old".to_string());
    }
    let points: Vec<(usize, f64)> = (1..).zip(table.milliseconds).collect();
    RowCosts::new(&points).ok_or_else(|| "holds no usable time".to_string())
}

fn subject(target: &Loaded) -> Subject {
    let config = target.model.model().config();
    let cpu = target.model.cpu();
    Subject {
        version: env!("CARGO_PKG_VERSION").to_string(),
        processor: format!("{} ({:?})", processor(), cpu.isa()),
        threads: cpu.threads(),
        model: format!(
            "{} layers of {}, vocabulary of {}, {} bytes, keys and values in {:?}",
            config.layers.len(),
            config.hidden_size,
            config.vocab_size,
            target.bytes_per_pass(),
            target.kv()
        ),
    }
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']).trim().to_string())
        .unwrap_or_else(|| std::env::consts::ARCH.to_string())
}

fn file(folder: &Path, of: &Subject) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (&of.processor, of.threads, &of.model).hash(&mut hasher);
    folder.join(format!("{:016x}.json", hasher.finish()))
}

fn now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kozue_kernels::{Cpu, KvType};

    #[test]
    fn a_table_comes_back_and_foreign_or_damaged_ones_do_not() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/reference/tiny/qwen3_5"
        );
        let open =
            |threads, kv| Loaded::open(Path::new(path), Cpu::new(Some(threads)), kv).unwrap();
        let target = open(1, KvType::F16);
        let folder = tempfile::tempdir().unwrap();
        assert!(load(folder.path(), &target).is_none());
        let costs = RowCosts::new(&[(1, 2.0), (8, 9.0)]).unwrap();
        let stored = store(folder.path(), &target, &costs).unwrap();
        let again = load(folder.path(), &target).unwrap();
        assert_eq!(again.milliseconds(), costs.milliseconds());
        assert!(load(folder.path(), &open(2, KvType::F16)).is_none());
        assert!(load(folder.path(), &open(1, KvType::Int8)).is_none());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

        let text = std::fs::read_to_string(&stored).unwrap();
        let of = subject(&target);
        assert!(read(&text, &of, now()).is_ok());
        assert_eq!(
            read(&text, &of, now() + OLDEST_S + 9).unwrap_err(),
            "is old"
        );
        assert_eq!(read(&text, &of, 5).unwrap_err(), "is old");
        let other = Subject {
            version: "0.0.1".to_string(),
            ..of.clone()
        };
        assert!(read(&text, &other, now()).unwrap_err().contains("version"));
        assert!(read(&text[..text.len() / 2], &of, now()).is_err());
        let emptied = text.replace("9.0", "null");
        assert!(read(&emptied, &of, now()).is_err());
    }
}
