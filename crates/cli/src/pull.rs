//! `kozue pull`: the newest version of a model on the hub, with every byte checked.

use crate::cli::PullArgs;
use crate::failure::Failure;
use crate::hub;
use crate::panel::bytes;
use kozue_hub::Name;
use std::io::{self, Write};

/// Runs the command.
pub fn run(args: &PullArgs) -> Result<(), Failure> {
    let name = Name::parse(&args.name).map_err(|error| Failure::Usage(error.to_string()))?;
    let found = hub::pull(&hub::open()?, &name)?;
    let fetched = match found.fetched {
        0 => "nothing was missing".to_owned(),
        fetched => format!("{} fetched", bytes(fetched)),
    };
    let s = if found.files == 1 { "" } else { "s" };
    writeln!(
        io::stdout(),
        "{name}: whole and checked ({} file{s}, {fetched})\n{}",
        found.files,
        found.path.display()
    )
    .map_err(Failure::output)
}
