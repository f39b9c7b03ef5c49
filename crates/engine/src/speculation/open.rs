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
use crate::memory::DraftShape;
use kozue_checkpoint::{Checkpoint, DFLASH, Drafter as DrafterFiles, Network, SPECULATOR, WEAVER};
use kozue_model::{DFlash, Mtp, Weaver};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    networks: Arc<Networks>,
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
            networks: Arc::new(Networks::None),
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
        let networks = load(Found::of(options, model_path)?, model_path, target)?;
        // A tree of one node is plain decoding.
        if matches!(networks, Networks::None) || options.budget == Some(1) {
            return Ok(Speculation::none());
        }
        let costs = match options.budget {
            Some(_) => None,
            None => Some(costs(options.tables.as_deref(), target)?),
        };
        let speculation = Speculation {
            networks: Arc::new(networks),
            costs,
            ..Speculation::none()
        };
        Ok(speculation.sized(options.budget, options.width))
    }

    /// The same drafter for trees of another size (see [`SpeculationOptions`]); what pays best is known
    /// if it was opened for that.
    pub fn sized(&self, budget: Option<usize>, width: Option<usize>) -> Speculation {
        Speculation {
            networks: Arc::clone(&self.networks),
            costs: self.costs.clone().filter(|_| budget.is_none()),
            budget,
            width: width.unwrap_or(usize::MAX).max(1),
        }
    }

    /// What drafts.
    pub fn kind(&self) -> DraftKind {
        match *self.networks {
            Networks::None => DraftKind::None,
            Networks::Lookup => DraftKind::Lookup,
            Networks::Dflash(_) => DraftKind::Dflash,
            Networks::Weaver(..) => DraftKind::Weaver,
            Networks::Model(_) => DraftKind::Model,
            Networks::Mtp(_) => DraftKind::Mtp,
        }
    }

    /// What a drafter keeps of a sequence; `None` where that is nothing.
    pub fn shape(&self, target: &CpuModel) -> Option<DraftShape> {
        match &*self.networks {
            Networks::None | Networks::Lookup => None,
            Networks::Dflash(network) | Networks::Weaver(network, _) => {
                Some(DraftShape::dflash(network.config()))
            }
            Networks::Model(smaller) => Some(DraftShape::model(smaller.model.model().config())),
            Networks::Mtp(_) => Some(DraftShape::head(target.model().config())),
        }
    }

    /// A drafter for a new sequence of `target`; `None` for plain decoding.
    pub fn start<'a>(&'a self, target: &'a CpuModel) -> Option<Speculator<'a>> {
        let drafter: Box<dyn Drafter<'a> + 'a> = match &*self.networks {
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

/// What the options come down to, with the folders of its networks.
enum Found {
    None,
    Lookup,
    Dflash(PathBuf),
    Weaver { dflash: PathBuf, weaver: PathBuf },
    Model(PathBuf),
    Mtp,
}

impl Found {
    fn of(options: &SpeculationOptions, model_path: &Path) -> Result<Found, Error> {
        let named = options.path.as_deref();
        let folder = named.unwrap_or(model_path);
        let (mut dflash, mut weaver) = (None, None);
        for (place, network) in drafters(folder, named)? {
            let found = match network {
                Network::DFlash => &mut dflash,
                Network::Weaver => &mut weaver,
            };
            found.get_or_insert(place);
        }
        let missing = |what: &str, name: &str| {
            Error::Draft(format!(
                "there is no {what} in {}: give its folder with --draft-model",
                drafter_folder(folder, name).display()
            ))
        };
        if let (None, Some(weaver), Some(_)) = (&dflash, &weaver, named) {
            let path = weaver.display();
            return Err(Error::Draft(format!(
                "{path}: a Weaver goes with a DFlash drafter: give the folder that has both as {DFLASH} and {WEAVER}"
            )));
        }
        let Some(kind) = options.kind else {
            return Ok(match (dflash, weaver, named) {
                (Some(dflash), Some(weaver), _) => Found::Weaver { dflash, weaver },
                (Some(dflash), None, _) => Found::Dflash(dflash),
                (None, _, Some(path)) => Found::Model(path.to_path_buf()),
                (None, _, None) if Mtp::is_in(&open(model_path)?) => Found::Mtp,
                (None, _, None) => Found::Lookup,
            });
        };
        if let (DraftKind::None | DraftKind::Lookup | DraftKind::Mtp, Some(path)) = (kind, named) {
            return Err(Error::Draft(format!(
                "--draft {kind} uses no other model: leave --draft-model {} out, or choose another --draft",
                path.display()
            )));
        }
        Ok(match kind {
            DraftKind::None => Found::None,
            DraftKind::Lookup => Found::Lookup,
            DraftKind::Mtp => Found::Mtp,
            DraftKind::Dflash => {
                Found::Dflash(dflash.ok_or_else(|| missing("DFlash drafter", DFLASH))?)
            }
            DraftKind::Weaver => Found::Weaver {
                weaver: weaver.ok_or_else(|| missing("Weaver", WEAVER))?,
                dflash: dflash.ok_or_else(|| missing("DFlash drafter", DFLASH))?,
            },
            DraftKind::Model => Found::Model(
                named
                    .ok_or_else(|| {
                        Error::Draft(
                            "a smaller model drafts: give it with --draft-model".to_string(),
                        )
                    })?
                    .to_path_buf(),
            ),
        })
    }
}

fn open(path: &Path) -> Result<Checkpoint, Error> {
    Checkpoint::open(path).map_err(Error::draft)
}

fn load(found: Found, model_path: &Path, target: &Loaded) -> Result<Networks, Error> {
    let model = target.model.model();
    let files = |folder: &Path, network| DrafterFiles::open(folder, network).map_err(Error::draft);
    let dflash =
        |folder: &Path| DFlash::load(&files(folder, Network::DFlash)?, model).map_err(Error::draft);
    Ok(match found {
        Found::None => Networks::None,
        Found::Lookup => Networks::Lookup,
        Found::Dflash(folder) => Networks::Dflash(Box::new(dflash(&folder)?)),
        Found::Weaver {
            dflash: folder,
            weaver,
        } => {
            let weaver =
                Weaver::load(&files(&weaver, Network::Weaver)?, model).map_err(Error::draft)?;
            Networks::Weaver(Box::new(dflash(&folder)?), Box::new(weaver))
        }
        Found::Mtp => {
            let head = Mtp::load(&open(model_path)?, model).map_err(Error::draft)?;
            let none = || {
                let path = model_path.display();
                Error::Draft(format!("{path} has no multi-token prediction head"))
            };
            Networks::Mtp(Box::new(head.ok_or_else(none)?))
        }
        Found::Model(path) => {
            let smaller = target.beside(&path, target.kv())?;
            smaller.check_vocabulary(target, &path)?;
            Networks::Model(Box::new(smaller))
        }
    })
}

/// The networks that a model brings along, with their folders.
///
/// # Errors
/// If a folder that is there cannot be looked into.
pub fn drafter_folders(model: &Path) -> Result<Vec<(PathBuf, Network)>, Error> {
    drafters(model, None)
}

/// The networks in `folder`, and in the folder `named` if that is a drafter's own.
fn drafters(folder: &Path, named: Option<&Path>) -> Result<Vec<(PathBuf, Network)>, Error> {
    let mut all = Vec::new();
    for (name, network) in [(DFLASH, Network::DFlash), (WEAVER, Network::Weaver)] {
        let place = drafter_folder(folder, name);
        let config = place.join("config.json");
        let there = config
            .try_exists()
            .map_err(|error| Error::Draft(format!("{}: cannot open: {error}", config.display())))?;
        if there {
            all.push((place, network));
        }
    }
    let speculator = drafter_folder(folder, SPECULATOR);
    for place in [Some(speculator.as_path()), named].into_iter().flatten() {
        let networks = DrafterFiles::networks(place).map_err(Error::draft)?;
        all.extend(
            networks
                .into_iter()
                .map(|network| (place.to_path_buf(), network)),
        );
    }
    Ok(all)
}

/// A drafter's folder: inside a model's folder, or beside a model that is one file.
fn drafter_folder(model: &Path, name: &str) -> PathBuf {
    if model.is_file() {
        model.with_file_name(name)
    } else {
        model.join(name)
    }
}
