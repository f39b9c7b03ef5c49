//! Models by their names on the hub: which files of a repository make one, and what the user sees
//! while they come.

use crate::failure::Failure;
use crate::panel::bytes;
use indicatif::{ProgressBar, ProgressStyle};
use kozue_checkpoint::repository_files;
use kozue_hub::{Choice, Error, Event, Found, Hub, Name, Settings};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// The hub and the cache that the environment names.
pub fn open() -> Result<Hub, Failure> {
    Ok(Hub::new(Settings::from_env().map_err(Failure::failed)?))
}

/// The name that a path is, unless there is something at the path.
fn name(path: &Path) -> Option<Name> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Name::parse(path.to_str()?).ok(),
        _ => None,
    }
}

/// Where to open a model or a drafter: its path, or, where that does not exist and is a name on the
/// hub, its place in the cache.
pub fn place(path: &Path) -> Result<PathBuf, Failure> {
    match name(path) {
        None => Ok(path.to_path_buf()),
        Some(name) => find(&name),
    }
}

/// The place of a model in the cache; fetched first where it is not whole there.
fn find(name: &Name) -> Result<PathBuf, Failure> {
    let mut view = View::default();
    let found = open()?.find(name, &choose(name), &mut |event| view.show(event));
    view.end();
    match found {
        Ok(found) => Ok(found.path),
        // It may have been meant as a path.
        Err(
            error @ (Error::NotFound { .. }
            | Error::Unauthorized { .. }
            | Error::Unreachable { .. }
            | Error::Offline { .. }),
        ) => Err(Failure::Failed(format!(
            "there is no file or folder {name}, so it is a name on the hub: {error}"
        ))),
        Err(error) => Err(Failure::failed(error)),
    }
}

/// The newest version of a model, fetched and checked.
pub fn pull(hub: &Hub, name: &Name) -> Result<Found, Failure> {
    let mut view = View::default();
    let found = hub.pull(name, &choose(name), &mut |event| view.show(event));
    view.end();
    found.map_err(Failure::failed)
}

fn choose(name: &Name) -> impl Fn(&[&str]) -> Result<Choice, String> {
    let file = name.file.clone();
    move |names| {
        let chosen = repository_files(names, file.as_deref());
        let chosen = chosen.map_err(|error| error.to_string())?;
        Ok(Choice {
            files: chosen.files,
            open: chosen.open,
        })
    }
}

/// Shows how a download goes on: with a bar on a terminal, else in one line at its beginning.
#[derive(Default)]
struct View {
    bar: Option<ProgressBar>,
}

impl View {
    fn show(&mut self, event: Event) {
        match event {
            Event::Start {
                repo,
                files,
                bytes: size,
                folder,
            } => {
                self.end();
                let s = if files == 1 { "" } else { "s" };
                let size_text = bytes(size);
                say(&format!(
                    "fetching {repo}, {size_text} in {files} file{s}, into {}",
                    folder.display()
                ));
                if io::stderr().is_terminal() {
                    let bar = ProgressBar::new(size);
                    let style = ProgressStyle::with_template(
                        "{percent:>3}% {bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta}  {wide_msg}",
                    );
                    // A bar of the default style is still one.
                    self.bar = Some(match style {
                        Ok(style) => bar.with_style(style),
                        Err(_) => bar,
                    });
                }
            }
            Event::Bytes { file, done } => {
                if let Some(bar) = &self.bar {
                    if bar.message() != file {
                        bar.set_message(file.to_owned());
                    }
                    bar.set_position(done);
                }
            }
            Event::Waiting { file } => {
                self.message(format!("{file}: another process fetches it; waiting"));
            }
            Event::Again { wait, reason } => {
                self.message(format!("{reason}; again in {} s", wait.as_secs()));
            }
            Event::Checking { file } => self.message(format!("checking {file}")),
        }
    }

    /// Something that only somebody who looks on wants to know.
    fn message(&mut self, text: String) {
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None if io::stderr().is_terminal() => {
                let bar = ProgressBar::new_spinner().with_message(text);
                bar.tick();
                self.bar = Some(bar);
            }
            None => tracing::info!("{text}"),
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// One line on standard error.
fn say(text: &str) {
    // Nobody to tell is no reason to fail.
    let _ = writeln!(io::stderr(), "kozue: {text}");
}
