//! Which files of a published repository make a model: what has to be fetched to open it.

use crate::drafter::{DFLASH, SPECULATOR, WEAVER};
use crate::error::Error;
use crate::shards::{INDEX, SINGLE};

/// What a directory is opened by.
const CONFIG: &str = "config.json";

/// What `TextSide` reads; all but the first may be missing.
const TEXT: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];

/// Which of several GGUF files is meant where none is named: the first kind in this list that
/// there is. About 4 bits are what a person's machine runs well; then what loses less; what has
/// fewer bits is never taken for granted.
const KINDS: [&str; 13] = [
    "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q8_0", "BF16",
    "F16", "F32",
];

/// Names shown in a message.
const SHOWN: usize = 12;

/// The files of a model within its repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryFiles {
    /// Their names. With the last one in place [`Checkpoint::open`](crate::Checkpoint::open) takes
    /// them for a model.
    pub files: Vec<String>,
    /// The GGUF file to open; the directory where `None`.
    pub open: Option<String>,
}

/// Choose among the `names` of a repository's files (with `/` between folders): the GGUF file
/// `file`; else a directory's safetensors and what belongs to them; else a GGUF file by its name
/// (the first kind of Q4_K_M, Q4_K_S, Q4_1, Q4_0, Q5_K_M, ... that there is). Folders with drafters
/// come along.
///
/// # Errors
/// If there is no such model, or several that might be meant.
pub fn repository_files(names: &[&str], file: Option<&str>) -> Result<RepositoryFiles, Error> {
    let has = |name: &str| names.contains(&name);
    if let Some(file) = file {
        return named(names, file);
    }
    let weights = weights(names, "");
    if has(CONFIG) && !weights.is_empty() {
        let mut files = drafters(names, "");
        files.extend(weights);
        files.extend(TEXT.iter().filter(|name| has(name)).map(|n| n.to_string()));
        files.push(CONFIG.to_owned());
        return Ok(RepositoryFiles { files, open: None });
    }
    let ggufs = ggufs(names);
    match ggufs[..] {
        [] => Err(Error::Repository {
            what: without_model(names),
        }),
        [only] => Ok(gguf(names, only)),
        _ => by_kind(names, &ggufs),
    }
}

fn named(names: &[&str], file: &str) -> Result<RepositoryFiles, Error> {
    let wrong = |what: &str| Error::Repository {
        what: format!("{file}: {what}{}", there_are(&ggufs(names))),
    };
    if !names.contains(&file) {
        return Err(wrong("there is no such file"));
    }
    if !file.ends_with(".gguf") {
        return Err(wrong("only GGUF files can be named"));
    }
    if is_split(file) {
        return Err(wrong("a model in several GGUF files is not read here"));
    }
    Ok(gguf(names, file))
}

fn by_kind(names: &[&str], ggufs: &[&str]) -> Result<RepositoryFiles, Error> {
    for kind in KINDS {
        let of_kind: Vec<&str> = ggufs
            .iter()
            .copied()
            .filter(|name| is_of_kind(name, kind))
            .collect();
        match of_kind[..] {
            [] => {}
            [only] => return Ok(gguf(names, only)),
            _ => {
                let what = format!("several files may be meant{}", there_are(&of_kind));
                return Err(Error::Repository { what });
            }
        }
    }
    let what = format!("which file is meant{}", there_are(ggufs));
    Err(Error::Repository { what })
}

fn gguf(names: &[&str], file: &str) -> RepositoryFiles {
    let folder = file.rfind('/').map_or("", |end| &file[..=end]);
    let mut files = drafters(names, folder);
    files.push(file.to_owned());
    RepositoryFiles {
        files,
        open: Some(file.to_owned()),
    }
}

/// Files of the drafters in `folder`.
fn drafters(names: &[&str], folder: &str) -> Vec<String> {
    let mut files = Vec::new();
    for drafter in [DFLASH, WEAVER, SPECULATOR] {
        let inner = format!("{folder}{drafter}/");
        let config = format!("{inner}{CONFIG}");
        let weights = weights(names, &inner);
        if names.contains(&config.as_str()) && !weights.is_empty() {
            files.extend(weights);
            files.push(config);
        }
    }
    files
}

/// Files with the weights of a directory, as `Shards` opens them.
fn weights(names: &[&str], folder: &str) -> Vec<String> {
    let single = format!("{folder}{SINGLE}");
    let index = format!("{folder}{INDEX}");
    if names.contains(&single.as_str()) {
        return vec![single];
    }
    if !names.contains(&index.as_str()) {
        return Vec::new();
    }
    let shards = names
        .iter()
        .filter(|name| name.strip_prefix(folder).is_some_and(is_shard));
    shards
        .map(|name| name.to_string())
        .chain([index.clone()])
        .collect()
}

/// Whether a file is one of `NAME-00001-of-00002.safetensors`. Those called consolidated hold the
/// same weights for another program.
fn is_shard(name: &str) -> bool {
    let number = name
        .strip_suffix(".safetensors")
        .and_then(|stem| stem.rsplit_once("-of-"));
    !name.contains('/')
        && !name.starts_with("consolidated")
        && number.is_some_and(|(_, count)| is_number(count))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The GGUF files that may be models of their own.
fn ggufs<'a>(names: &[&'a str]) -> Vec<&'a str> {
    let of_model = |name: &&str| {
        let file = name.rsplit('/').next().unwrap_or(name);
        // A vision tower, and the statistics that quantising used.
        let aside = file.starts_with("mmproj") || file.contains("imatrix");
        name.ends_with(".gguf") && !aside && !is_split(name)
    };
    names.iter().copied().filter(of_model).collect()
}

/// Whether a file is a part of a model, `NAME-00001-of-00002.gguf`.
fn is_split(name: &str) -> bool {
    let stem = name.strip_suffix(".gguf");
    let parts = stem.and_then(|stem| stem.rsplit_once("-of-"));
    parts.is_some_and(|(_, count)| is_number(count))
}

/// Whether a file's name ends with a kind, as in `Model-1B.Q4_K_M.gguf` or `model-1b-q4_k_m.gguf`.
fn is_of_kind(name: &str, kind: &str) -> bool {
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    let stem = stem.to_ascii_uppercase();
    let before = stem.strip_suffix(kind);
    before.is_some_and(|before| !before.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
}

fn there_are(ggufs: &[&str]) -> String {
    match ggufs {
        [] => String::new(),
        _ => {
            let more = if ggufs.len() > SHOWN { ", ..." } else { "" };
            let shown = &ggufs[..ggufs.len().min(SHOWN)];
            format!("; name one as org/name:FILE: {}{more}", shown.join(", "))
        }
    }
}

fn without_model(names: &[&str]) -> String {
    let any = |end: &str| names.iter().any(|name| name.ends_with(end));
    if names.iter().any(|name| is_split(name)) {
        "its model is in several GGUF files, which is not read here; take another one".to_owned()
    } else if any(".safetensors") && names.contains(&CONFIG) {
        format!("it has safetensors files, but neither {SINGLE} nor {INDEX}")
    } else if any(".bin") || any(".pth") || any(".pt") {
        "its weights are PyTorch pickles, which are not read here; take one with safetensors"
            .to_owned()
    } else {
        format!("it has no model that is read here ({SINGLE} with {CONFIG}, or a GGUF file)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<String> {
        let chosen = repository_files(names, None).unwrap();
        assert_eq!(chosen.open, None);
        chosen.files
    }

    fn error(names: &[&str], file: Option<&str>) -> String {
        repository_files(names, file).unwrap_err().to_string()
    }

    #[test]
    fn a_directory_is_what_its_loader_reads_and_its_config_comes_last() {
        let names = [
            ".gitattributes",
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "model.fp16.safetensors",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.json",
            "x.Q4_K_M.gguf",
        ];
        assert_eq!(
            files(&names),
            [
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json",
                "generation_config.json",
                "config.json"
            ]
        );
    }

    #[test]
    fn shards_come_with_their_index() {
        let names = [
            "config.json",
            "consolidated-00001-of-00002.safetensors",
            "tokenizer.json",
            "model.safetensors-00001-of-00002.safetensors",
            "model.safetensors-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/model-00001-of-00002.safetensors",
        ];
        assert_eq!(
            files(&names),
            [
                "model.safetensors-00001-of-00002.safetensors",
                "model.safetensors-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
                "config.json"
            ]
        );
        assert!(error(&names[..5], None).contains("neither model.safetensors nor"));
    }

    #[test]
    fn drafters_come_along_where_they_are_whole() {
        let names = [
            "config.json",
            "model.safetensors",
            "dflash/config.json",
            "dflash/model.safetensors",
            "weaver/config.json",
            "dflash/optimizer.pt",
        ];
        assert_eq!(
            files(&names),
            [
                "dflash/model.safetensors",
                "dflash/config.json",
                "model.safetensors",
                "config.json"
            ]
        );
        let beside = [
            "q/a.gguf",
            "q/dflash/config.json",
            "q/dflash/model.safetensors",
        ];
        let chosen = repository_files(&beside, Some("q/a.gguf")).unwrap();
        assert_eq!(chosen.open.as_deref(), Some("q/a.gguf"));
        assert_eq!(
            chosen.files,
            [
                "q/dflash/model.safetensors",
                "q/dflash/config.json",
                "q/a.gguf"
            ]
        );
    }

    #[test]
    fn of_several_gguf_files_the_first_kind_is_taken() {
        for (names, expected) in [
            (&["a-Q2_K.gguf"][..], "a-Q2_K.gguf"),
            (
                &["a.Q8_0.gguf", "a.Q4_0.gguf", "a.Q4_K_M.gguf"],
                "a.Q4_K_M.gguf",
            ),
            (
                &["a-q8_0.gguf", "a-q4_0.gguf", "a-iq4_xs.gguf"],
                "a-q4_0.gguf",
            ),
            (
                &["a-f16.gguf", "a-bf16.gguf", "mmproj-Q4_K_M.gguf"],
                "a-bf16.gguf",
            ),
            (
                &["Q8_0/a-Q8_0.gguf", "a-Q2_K.gguf", "a-UD-Q4_K_XL.gguf"],
                "Q8_0/a-Q8_0.gguf",
            ),
            (
                &["a-Q8_0.gguf", "a-Q4_K_M-00001-of-00002.gguf"],
                "a-Q8_0.gguf",
            ),
        ] {
            let chosen = repository_files(names, None).unwrap();
            assert_eq!(chosen.open.as_deref(), Some(expected), "{names:?}");
            assert_eq!(chosen.files, [expected]);
        }
        let text = error(&["a-Q4_0.gguf", "b-Q4_0.gguf", "a-Q8_0.gguf"], None);
        assert!(text.ends_with("a-Q4_0.gguf, b-Q4_0.gguf"), "{text}");
        let text = error(&["a-IQ2_M.gguf", "a-Q2_K.gguf"], None);
        assert!(text.contains("a-IQ2_M.gguf, a-Q2_K.gguf"), "{text}");
    }

    #[test]
    fn what_is_no_model_says_why() {
        let text = error(&["a.gguf", "b.gguf"], Some("c.gguf"));
        assert!(
            text.contains("no such file") && text.contains("a.gguf, b.gguf"),
            "{text}"
        );
        assert!(error(&["README.md", "a.gguf"], Some("README.md")).contains("only GGUF"));
        let split = "a-Q8_0-00001-of-00002.gguf";
        assert!(error(&[split], Some(split)).contains("several GGUF files"));
        assert!(error(&[split], None).contains("several GGUF files"));
        assert!(error(&["config.json", "pytorch_model.bin"], None).contains("pickles"));
        assert!(error(&["README.md"], None).contains("no model"));
    }
}
