//! `kozue rm`: removes a model from the cache.

use crate::cli::RmArgs;
use crate::failure::Failure;
use crate::hub;
use crate::panel::bytes;
use kozue_hub::Name;
use std::io::{self, IsTerminal, Write};

/// Runs the command.
pub fn run(args: &RmArgs) -> Result<(), Failure> {
    let name = Name::parse(&args.name).map_err(|error| Failure::Usage(error.to_string()))?;
    let hub = hub::open()?;
    let removal = hub.removal(&name).map_err(Failure::failed)?;
    let s = if removal.files == 1 { "" } else { "s" };
    let what = format!(
        "{name}, {} file{s}, {}, from {}",
        removal.files,
        bytes(removal.bytes),
        hub.cache().display()
    );
    if !args.yes && !agreed(&what)? {
        return Err(Failure::Failed("nothing was removed".into()));
    }
    hub.remove(&removal).map_err(Failure::failed)?;
    writeln!(io::stdout(), "removed {what}").map_err(Failure::output)
}

/// Asks the user.
fn agreed(what: &str) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::Usage(format!(
            "nobody is there to be asked; --yes removes {what}"
        )));
    }
    let mut stderr = io::stderr();
    // Where the question cannot be shown, the answer is none.
    write!(stderr, "Remove {what}? [y/N] ")
        .and_then(|()| stderr.flush())
        .map_err(Failure::failed)?;
    let mut answer = String::new();
    io::stdin()
        .read_line(&mut answer)
        .map_err(|error| Failure::Failed(format!("cannot read the answer: {error}")))?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}
