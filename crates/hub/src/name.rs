//! Names of models: `org/name`, `org/name@revision`, `org/name:file.gguf`.

use std::fmt;

use crate::error::Error;
use crate::listing::is_safe_path;

/// Longest part of a repository's name.
const LONGEST: usize = 96;

/// The revision where none is named.
const MAIN: &str = "main";

/// A model on the hub, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// `org/name`.
    pub repo: String,
    /// A branch, tag or commit.
    pub revision: Option<String>,
    /// A file of the repository.
    pub file: Option<String>,
}

impl Name {
    /// Parse `org/name[@revision][:file]`.
    ///
    /// # Errors
    /// If the text has another form.
    pub fn parse(text: &str) -> Result<Name, Error> {
        let wrong = |what| Error::Name {
            name: text.to_owned(),
            what,
        };
        let (left, file) = match text.split_once(':') {
            Some((left, file)) => (left, Some(file)),
            None => (text, None),
        };
        let (repo, revision) = match left.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (left, None),
        };
        let form = "write org/name, org/name@revision or org/name:file.gguf";
        let (org, name) = repo.split_once('/').ok_or_else(|| wrong(form))?;
        // One without a letter is a fraction or a date.
        if !is_part(org) || !is_part(name) || !repo.contains(|c: char| c.is_ascii_alphabetic()) {
            return Err(wrong(form));
        }
        if revision.is_some_and(|revision| !is_revision(revision)) {
            return Err(wrong(
                "what follows @ is no name of a branch, tag or commit",
            ));
        }
        if file.is_some_and(|file| !is_safe_path(file)) {
            return Err(wrong("what follows : is no name of a file"));
        }
        Ok(Name {
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// The branch, tag or commit that is meant.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        Ok(())
    }
}

/// Whether a text may be one half of a repository's name. Two hyphens would be taken for the
/// slash in the cache's folder names.
fn is_part(part: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let outer = |c: char| c.is_ascii_alphanumeric() || c == '_';
    part.len() <= LONGEST
        && part.chars().all(inner)
        && part.starts_with(outer)
        && part.ends_with(outer)
        && !part.contains("..")
        && !part.contains("--")
}

/// Whether a text may name a revision: it becomes the name of a file below `refs`.
fn is_revision(text: &str) -> bool {
    is_safe_path(text)
        && !text.starts_with('-')
        && !text.contains(|c: char| c.is_whitespace() || "~^:?*[".contains(c))
}

/// Whether a text is the hash of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

/// Whether a text is a number of `len` digits of base 16, as checksums are written.
pub(crate) fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_their_parts() {
        let name = Name::parse("Org/name-1.5_x").unwrap();
        assert_eq!(
            (name.repo.as_str(), name.revision()),
            ("Org/name-1.5_x", "main")
        );
        let name = Name::parse("01-ai/Yi@refs/pr/1:a/b@c.gguf").unwrap();
        assert_eq!(name.repo, "01-ai/Yi");
        assert_eq!(name.revision(), "refs/pr/1");
        assert_eq!(name.file.as_deref(), Some("a/b@c.gguf"));
        assert_eq!(name.to_string(), "01-ai/Yi@refs/pr/1:a/b@c.gguf");
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "",
            "name",
            "/a/b",
            "./a",
            "../a",
            "a/b/c",
            "a/",
            "/b",
            "a b/c",
            "1/2",
            "a/..",
            "a/b..c",
            "a/b--c",
            "-a/b",
            "a/b-",
            "a/b@",
            "a/b@..",
            "a/b@x/../y",
            "a/b@-x",
            "a/b@/x",
            "a/b:",
            "a/b:../x.gguf",
            "a/b:/x.gguf",
            "a/b:x\\y.gguf",
            "C:\\models/a",
            "and/or?",
            "a/\u{e9}",
            "https://host/a/b",
        ] {
            assert!(Name::parse(text).is_err(), "{text}");
        }
    }
}
