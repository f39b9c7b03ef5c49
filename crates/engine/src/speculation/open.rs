//! Finding and loading what drafts.

use super::cost::{QUICK, RowCosts};
use super::dflash::Marginals;
use super::drafter::Drafter;
use super::kind::DraftKind;
use super::lookup::Lookup;
use super::mtp::Predicting;
use super::pace::Pace;
use super::smaller::Smaller;
use super::table;
use super::weaver::Weaving;
use crate::error::Error;
use crate::loaded::{CpuModel, Loaded};
use kozue_checkpoint::{Checkpoint, Drafter as DrafterFiles, DrafterKind};
use kozue_model::{DFlash, Mtp, Weaver};
use std::path::{Path, PathBuf};

/// Folder of a DFlash network inside a model's folder, and that of its Weaver.
const DFLASH: &str = "dflash";
const WEAVER: &str = "weaver";

/// What the user asks for.
#[derive(Clone, Debug, Default)]
pub struct SpeculationOptions {
    /// What drafts; `None` = the best that there is.
    pub kind: Option<DraftKind>,
    /// Folder of the drafter, or the smaller model; `None` = folders inside the model's own.
    pub path: Option<PathBuf>,
    /// Nodes of every tree; `None` = what pays best on this machine.
    pub budget: Option<usize>,
    /// Most children of a node; `None` = any.
    pub width: Option<usize>,
    /// Folder of the tables of what rows cost; `None` = measured anew.
    pub tables: Option<PathBuf>,
}

/// A loaded drafter and what it needs to know of this machine.
pub struct Speculation {
    networks: Networks,
    costs: Option<RowCosts>,
    budget: Option<usize>,
    width: usize,
}

enum Networks {
    None,
    Lookup,
    Dflash(Box<DFlash>),
    Weaver(Box<DFlash>, Box<Weaver>),
    Model(Box<Loaded>),
    Mtp(Box<Mtp>),
}

/// A drafter at work on one sequence.
pub struct Speculator<'a> {
    /// Proposes trees.
    pub drafter: Box<dyn Drafter<'a> + 'a>,
    /// Sizes them.
    pub pace: Pace,
    /// Most children of a node.
    pub width: usize,
}

impl Speculation {
    /// Plain decoding.
    pub fn none() -> Speculation {
        Speculation {
            networks: Networks::None,
            costs: None,
            budget: None,
            width: usize::MAX,
        }
    }

    /// Loads what `options` ask for; `model_path` is the target's own folder or file.
    ///
    /// Errors: no such drafter, a damaged one, or one that was made for another target.
    pub fn open(
        options: &SpeculationOptions,
        model_path: &Path,
        target: &Loaded,
    ) -> Result<Speculation, Error> {
        let networks = networks(options, model_path, target)?;
        // A tree of one node is plain decoding.
        if matches!(networks, Networks::None) || options.budget == Some(1) {
            return Ok(Speculation::none());
        }
        let costs = match options.budget {
            Some(_) => None,
            None => Some(costs(options.tables.as_deref(), target)?),
        };
        Ok(Speculation {
            networks,
            costs,
            budget: options.budget,
            width: options.width.unwrap_or(usize::MAX).max(1),
        })
    }

    /// The best drafter that is there, in the folder given or in the model's own.
    pub fn available(path: Option<&Path>, model_path: &Path) -> DraftKind {
        let folder = path.unwrap_or(model_path);
        let has = |name| drafter_folder(folder, name).join("config.json").exists();
        match (has(DFLASH), has(WEAVER), path) {
            (true, true, _) => DraftKind::Weaver,
            (true, false, _) => DraftKind::Dflash,
            (false, _, Some(path)) if is_dflash(path) => DraftKind::Dflash,
            (false, _, Some(_)) => DraftKind::Model,
            (false, _, None) => DraftKind::Lookup,
        }
    }

    /// What drafts.
    pub fn kind(&self) -> DraftKind {
        match self.networks {
            Networks::None => DraftKind::None,
            Networks::Lookup => DraftKind::Lookup,
            Networks::Dflash(_) => DraftKind::Dflash,
            Networks::Weaver(..) => DraftKind::Weaver,
            Networks::Model(_) => DraftKind::Model,
            Networks::Mtp(_) => DraftKind::Mtp,
        }
    }

    /// A drafter for a new sequence of `target`; `None` for plain decoding.
    pub fn start<'a>(&'a self, target: &'a CpuModel) -> Option<Speculator<'a>> {
        let drafter: Box<dyn Drafter<'a> + 'a> = match &self.networks {
            Networks::None => return None,
            Networks::Lookup => Box::new(Lookup::default()),
            Networks::Dflash(network) => Box::new(Marginals::new(target, network)),
            Networks::Weaver(network, weaver) => Box::new(Weaving::new(target, network, weaver)),
            Networks::Model(smaller) => Box::new(Smaller::new(&smaller.model)),
            Networks::Mtp(head) => Box::new(Predicting::new(target, head)),
        };
        let costs = self.costs.clone().unwrap_or_else(RowCosts::unknown);
        Some(Speculator {
            drafter,
            pace: Pace::new(costs, self.budget),
            width: self.width,
        })
    }
}

/// What rows cost: as stored, or measured and, where that works, stored.
fn costs(tables: Option<&Path>, target: &Loaded) -> Result<RowCosts, Error> {
    if let Some(costs) = tables.and_then(|folder| table::load(folder, target)) {
        return Ok(costs);
    }
    let costs = RowCosts::measure(&target.model, QUICK)?;
    if let Some(Err(error)) = tables.map(|folder| table::store(folder, target, &costs)) {
        tracing::info!("{error}");
    }
    Ok(costs)
}

fn networks(
    options: &SpeculationOptions,
    model_path: &Path,
    target: &Loaded,
) -> Result<Networks, Error> {
    let folder = options.path.as_deref().unwrap_or(model_path);
    let dflash = drafter_folder(folder, DFLASH);
    let weaver = drafter_folder(folder, WEAVER);
    let has_dflash = dflash.join("config.json").exists();
    let has_weaver = weaver.join("config.json").exists();
    let kind = options
        .kind
        .unwrap_or_else(|| Speculation::available(options.path.as_deref(), model_path));
    let missing = |what: &str, folder: &Path| {
        Error::Draft(format!(
            "there is no {what} in {}: give its folder with --draft-model",
            folder.display()
        ))
    };
    let load_dflash = || -> Result<Box<DFlash>, Error> {
        let folder = match (&options.path, has_dflash) {
            (Some(path), false) => path.as_path(),
            (None, false) => return Err(missing("DFlash drafter", &dflash)),
            _ => dflash.as_path(),
        };
        let files = DrafterFiles::open(folder).map_err(Error::draft)?;
        let network = DFlash::load(&files, target.model.model()).map_err(Error::draft)?;
        Ok(Box::new(network))
    };
    Ok(match kind {
        DraftKind::None => Networks::None,
        DraftKind::Lookup => Networks::Lookup,
        DraftKind::Dflash => Networks::Dflash(load_dflash()?),
        DraftKind::Weaver => {
            if !has_weaver {
                return Err(missing("Weaver", &weaver));
            }
            let files = DrafterFiles::open(&weaver).map_err(Error::draft)?;
            let weaver = Weaver::load(&files, target.model.model()).map_err(Error::draft)?;
            Networks::Weaver(load_dflash()?, Box::new(weaver))
        }
        DraftKind::Mtp => {
            let files = Checkpoint::open(model_path).map_err(Error::draft)?;
            let head = Mtp::load(&files, target.model.model()).map_err(Error::draft)?;
            let none = || {
                let path = model_path.display();
                Error::Draft(format!("{path} has no multi-token prediction head"))
            };
            Networks::Mtp(Box::new(head.ok_or_else(none)?))
        }
        DraftKind::Model => {
            let Some(path) = &options.path else {
                return Err(Error::Draft(
                    "a smaller model drafts: give it with --draft-model".to_string(),
                ));
            };
            let smaller = target.beside(path)?;
            check_vocabulary(&smaller, target, path)?;
            Networks::Model(Box::new(smaller))
        }
    })
}

/// A drafter's folder: inside a model's folder, or beside a model that is one file.
fn drafter_folder(model: &Path, name: &str) -> PathBuf {
    if model.is_file() {
        model.with_file_name(name)
    } else {
        model.join(name)
    }
}

fn is_dflash(path: &Path) -> bool {
    DrafterFiles::open(path).is_ok_and(|files| matches!(files.kind(), DrafterKind::DFlash(_)))
}

/// A smaller model must mean the same text by the same token.
fn check_vocabulary(smaller: &Loaded, target: &Loaded, path: &Path) -> Result<(), Error> {
    let vocab_size = target.tokenizer.vocab_size();
    let differs = (0..vocab_size as u32)
        .find(|&token| smaller.tokenizer.piece(token) != target.tokenizer.piece(token));
    match differs {
        None => Ok(()),
        Some(token) => Err(Error::Draft(format!(
            "{} has another vocabulary than the model (they differ at token {token}): it cannot draft for it",
            path.display()
        ))),
    }
}
