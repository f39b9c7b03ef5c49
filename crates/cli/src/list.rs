//! `kozue list`: the models on this machine, in the hub's cache and in `models`.

use crate::cli::ListArgs;
use crate::failure::Failure;
use crate::hub;
use crate::panel::bytes;
use kozue_checkpoint::{Checkpoint, repository_files};
use kozue_hub::{Cached, CachedFile, Name};
use serde_json::json;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The folder of models beside the work at hand.
const FOLDER: &str = "models";

/// A model, and what a user wants to know before choosing.
struct Row {
    /// What commands take.
    name: String,
    path: PathBuf,
    size: u64,
    used: Option<SystemTime>,
}

/// Runs the command.
pub fn run(args: &ListArgs) -> Result<(), Failure> {
    let hub = hub::open()?;
    let mut rows: Vec<Row> = local(Path::new(FOLDER));
    let cached = hub.cached().map_err(Failure::failed)?;
    rows.extend(cached.iter().flat_map(of_commit));
    let text = if args.json {
        format!("{}\n", as_json(&rows))
    } else if rows.is_empty() {
        format!(
            "no models in {} or ./{FOLDER}; kozue pull org/name fetches one\n",
            hub.cache().display()
        )
    } else {
        table(&rows)
    };
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(Failure::output)
}

/// The models of a commit: a directory, and each GGUF file.
fn of_commit(cached: &Cached) -> Vec<Row> {
    let main = cached.revisions.iter().any(|revision| revision == "main");
    let name = |file: Option<String>| Name {
        repo: cached.repo.clone(),
        // The commit is a name of it too.
        revision: match (main, cached.revisions.first()) {
            (true, _) => None,
            (false, Some(revision)) => Some(revision.clone()),
            (false, None) => Some(cached.commit.clone()),
        },
        file,
    };
    let mut rows = Vec::new();
    let names: Vec<&str> = cached.files.iter().map(|file| file.name.as_str()).collect();
    let whole = repository_files(&names, None).is_ok_and(|chosen| chosen.open.is_none());
    let is_gguf = |file: &&CachedFile| file.name.ends_with(".gguf");
    if whole || !cached.files.iter().any(|file| is_gguf(&file)) {
        rows.push(Row {
            name: name(None).to_string(),
            path: cached.path.clone(),
            size: cached.files.iter().map(|file| file.size).sum(),
            used: cached.files.iter().filter_map(|file| file.used).max(),
        });
    }
    rows.extend(cached.files.iter().filter(is_gguf).map(|file| Row {
        name: name(Some(file.name.clone())).to_string(),
        path: cached.path.join(&file.name),
        size: file.size,
        used: file.used,
    }));
    rows
}

/// The models in a folder: directories with a config.json, and GGUF files.
fn local(folder: &Path) -> Vec<Row> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.join("config.json").exists() || path.extension().is_some_and(|e| e == "gguf")
        })
        .collect();
    paths.sort();
    let row = |path: PathBuf| {
        let (size, used) = measure(&path);
        Row {
            name: path.display().to_string(),
            path,
            size,
            used,
        }
    };
    paths.into_iter().map(row).collect()
}

/// Bytes of a file or folder, and when it was last read.
fn measure(path: &Path) -> (u64, Option<SystemTime>) {
    match fs::metadata(path) {
        Ok(kind) if kind.is_dir() => {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            entries.fold((0, None), |(size, used), entry| {
                let (more, later) = measure(&entry.path());
                (size + more, used.max(later))
            })
        }
        Ok(kind) => (kind.len(), kind.accessed().ok()),
        Err(_) => (0, None),
    }
}

/// Bits per weight; `None` where it is no model that runs here.
fn bits(path: &Path) -> Option<f64> {
    let checkpoint = Checkpoint::open(path).ok()?;
    let tensors = checkpoint.tensors();
    let used = || tensors.iter().filter(|tensor| !tensor.aside);
    let weights: f64 = used()
        .map(|tensor| tensor.shape.iter().map(|n| *n as f64).product::<f64>())
        .sum();
    let bytes: u64 = used().map(|tensor| tensor.bytes).sum();
    Some(8.0 * bytes as f64 / weights.max(1.0))
}

/// The size class: M for about 4 bits a weight, L for about 8, as `kozue quantize` makes them.
fn class(bits: f64) -> &'static str {
    match bits {
        ..3.5 => "less than M",
        3.5..5.5 => "M",
        5.5..7.5 => "between M and L",
        7.5..9.5 => "L",
        _ => "not quantised",
    }
}

fn table(rows: &[Row]) -> String {
    let now = SystemTime::now();
    let cells = rows.iter().map(|row| {
        let size_class = match bits(&row.path) {
            Some(bits) => format!("{} ({bits:.1} bits)", class(bits)),
            None => "does not run here".into(),
        };
        let used = row.used.and_then(|used| now.duration_since(used).ok());
        let used = match used.map(|age| age.as_secs() / 86_400) {
            Some(0) => "today".into(),
            Some(1) => "yesterday".into(),
            Some(days) => format!("{days} days ago"),
            None => "-".to_owned(),
        };
        [row.name.clone(), bytes(row.size), size_class, used]
    });
    let head = ["name", "size", "size class", "last used"].map(str::to_owned);
    let cells: Vec<[String; 4]> = std::iter::once(head).chain(cells).collect();
    let width = |column: usize| cells.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let (name, size, class) = (width(0), width(1), width(2));
    let line = |row: &[String; 4]| {
        format!(
            "{:<name$}  {:>size$}  {:<class$}  {}\n",
            row[0], row[1], row[2], row[3]
        )
    };
    cells.iter().map(line).collect()
}

fn as_json(rows: &[Row]) -> serde_json::Value {
    let row = |row: &Row| {
        let bits = bits(&row.path);
        let used = row
            .used
            .and_then(|used| used.duration_since(UNIX_EPOCH).ok());
        json!({
            "name": row.name,
            "path": row.path.display().to_string(),
            "bytes": row.size,
            "bits_per_weight": bits,
            "size_class": bits.map(class),
            "last_used": used.map(|used| used.as_secs()),
        })
    };
    rows.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_those_of_quantising() {
        // M with a group of 64 has 4.39 bits, Q4_K_M 4.9, L 8.5, Q8_0 8.5.
        assert_eq!(
            [4.39, 4.9, 8.5, 16.0, 6.6].map(class),
            ["M", "M", "L", "not quantised", "between M and L"]
        );
    }
}
