//! `kozue tune`: measures what rows cost on this machine and keeps the table for later runs.

use crate::cli::TuneArgs;
use crate::default_model::model_path;
use crate::failure::Failure;
use crate::panel::progress;
use kozue_engine::Loaded;
use kozue_engine::speculation::{RowCosts, table};
use std::io::{self, Write};

/// Every size of a pass is measured so often.
const ROUNDS: usize = 25;

/// Runs the command.
pub fn run(args: &TuneArgs) -> Result<(), Failure> {
    let path = model_path(args.model.as_deref())?;
    let folder = table::default_folder().ok_or_else(|| {
        Failure::Failed(
            "there is no place for the table: set HOME or XDG_CACHE_HOME to a folder".into(),
        )
    })?;
    let loaded = Loaded::open(&path, args.machine.cpu(), args.machine.kv.into())?;
    progress("measuring");
    let costs = RowCosts::measure(&loaded.model, ROUNDS)?;
    progress("");
    let stored = table::store(&folder, &loaded, &costs)?;
    let mut text = String::from("rows in a pass       ms   of one row\n");
    for rows in [1, 2, 4, 8, 12, 16, 24, 32] {
        let ms = costs.of(rows);
        text.push_str(&format!(
            "{rows:>14} {ms:>8.2} {:>11.2}x\n",
            ms / costs.of(1)
        ));
    }
    text.push_str(&format!("kept in {}\n", stored.display()));
    io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(Failure::output)
}
