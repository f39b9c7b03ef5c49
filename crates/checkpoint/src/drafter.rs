//! Drafters: small networks that propose tokens for a target model, in directories of their own.
//!
//! A DFlash directory is what z-lab publishes: config.json (`DFlashDraftModel`) and safetensors
//! with names such as `fc.weight` and `layers.0.self_attn.q_proj.weight`; embedding and head are
//! the target's. A Weaver directory holds the `config` of its checkpoint as config.json and its
//! `state_dict` as safetensors. Either may be quantised like a model of Kozue's own format. A
//! speculator's directory, as lalamo writes it for Uzu, holds both in one.

use std::path::Path;

use kozue_kernels::Matrix;
use serde_json::{Map, Value};

use crate::config::draft_shape;
use crate::description::ModelConfig;
use crate::error::Error;
use crate::fields::{Fields, exists, read_object};
use crate::kozue::{SIGNS, find_packed, packed_tensors};
use crate::lalamo::speculator::{self, SPECULATOR_KEY};
use crate::placed::Placed;
use crate::reads::{Reads, Tensors};
use crate::resident::Resident;
use crate::shards::Shards;
use crate::source::TensorInfo;

/// Folder of a DFlash network inside a model's folder.
pub const DFLASH: &str = "dflash";
/// Folder of a Weaver inside a model's folder.
pub const WEAVER: &str = "weaver";
/// Folder of a DFlash network and a Weaver inside a model's folder, as lalamo writes it.
pub const SPECULATOR: &str = "speculator";

const MAX_BLOCK: usize = 1024;
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 256;

/// A drafter's directory.
pub struct Drafter {
    kind: DrafterKind,
    held: Held,
    reads: Reads,
}

/// Where a drafter's tensors are.
enum Held {
    /// In a directory of its own.
    Own { shards: Shards, packed: Resident },
    /// In a speculator's.
    Joined(Box<Placed>),
}

/// What a drafter's directory may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// See [`DrafterKind::DFlash`].
    DFlash,
    /// See [`DrafterKind::Weaver`].
    Weaver,
}

/// What a drafter is, with its settings.
#[derive(Clone, Debug, PartialEq)]
pub enum DrafterKind {
    /// Proposes a block of positions in one pass.
    DFlash(Box<DFlashConfig>),
    /// Makes the shortlists of a DFlash drafter agree.
    Weaver(WeaverConfig),
}

/// Settings of a DFlash drafter.
#[derive(Clone, Debug, PartialEq)]
pub struct DFlashConfig {
    /// Shapes of its layers; the vocabulary is the target's.
    pub shape: ModelConfig,
    /// What the rows of a block see, layer by layer.
    pub masks: Vec<DraftMask>,
    /// Rows of a block: the newest token and the positions drafted after it.
    pub block: usize,
    /// Token that stands for a position to be drafted.
    pub mask_token: u32,
    /// Layers of the target whose residual streams it reads, in this order.
    pub taps: Vec<usize>,
    /// Layers that the target has, where the settings say so.
    pub target_layers: Option<usize>,
}

/// What a row of a block sees in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftMask {
    /// How many positions back; all of them where `None`.
    pub window: Option<usize>,
    /// Whether rows after it in the block are hidden.
    pub causal: bool,
}

/// Settings of a Weaver.
#[derive(Clone, Debug, PartialEq)]
pub struct WeaverConfig {
    /// Width of the target's hidden states and embeddings.
    pub hidden_size: usize,
    /// Width inside.
    pub rank: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads; divides `rank`.
    pub heads: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Deepest edge of a tree.
    pub depth: usize,
    /// Tokens of each depth that it chooses among.
    pub candidates: usize,
    /// Base of rotary positions; learned positions where `None`.
    pub rope_base: Option<f64>,
    /// Whether the MLP is SwiGLU (`gate_up_proj`, `down_proj`) and not GELU (`fc1`, `fc2`).
    pub gated: bool,
    /// Whether queries, keys and values are one tensor (`qkv_proj`).
    pub fused: bool,
}

impl Drafter {
    /// The networks that a directory holds, by its config.json; none where it is no drafter's.
    ///
    /// # Errors
    /// If that cannot be told, for want of permission say, or its settings are damaged.
    pub fn networks(dir: &Path) -> Result<Vec<Network>, Error> {
        let path = dir.join("config.json");
        if !dir.is_dir() || !exists(&path)? {
            return Ok(Vec::new());
        }
        let map = read_object(&path)?;
        match marks(&map) {
            Some(Mark::Speculator) => speculator::networks(&path, &map),
            Some(Mark::Weaver) => Ok(vec![Network::Weaver]),
            Some(Mark::DFlash) => Ok(vec![Network::DFlash]),
            None => Ok(Vec::new()),
        }
    }

    /// Opens a directory that holds `network`; tensors are mapped, not read.
    ///
    /// # Errors
    /// If the directory holds no such network, or its settings or files are damaged.
    pub fn open(dir: &Path, network: Network) -> Result<Drafter, Error> {
        let path = dir.join("config.json");
        if !exists(&path)? {
            return Err(Error::NotAModel {
                path: dir.to_path_buf(),
                what: "there is no config.json; give a drafter's directory".to_owned(),
            });
        }
        let map = read_object(&path)?;
        let (kind, held, infos) = match (marks(&map), network) {
            (Some(Mark::Speculator), _) => {
                let (kind, placed) = speculator::open(dir, &path, &map, network)?;
                let infos = placed.tensors();
                (kind, Held::Joined(Box::new(placed)), infos)
            }
            (Some(Mark::DFlash), Network::Weaver) => {
                return Err(Error::file(dir, "is no Weaver"));
            }
            (Some(Mark::Weaver), Network::DFlash) => {
                return Err(Error::file(dir, "is no DFlash drafter"));
            }
            _ => own(dir, &path, &map)?,
        };
        Ok(Drafter {
            kind,
            held,
            reads: Reads::new(dir, infos),
        })
    }

    /// What it is, with its settings.
    pub fn kind(&self) -> &DrafterKind {
        &self.kind
    }

    /// Bytes of its tensors.
    pub fn bytes(&self) -> u64 {
        match &self.held {
            Held::Own { shards, .. } => shards.infos().map(|info| info.bytes).sum(),
            Held::Joined(placed) => placed.tensors().iter().map(|info| info.bytes).sum(),
        }
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        self.reads.path()
    }

    /// Check that every tensor was read.
    ///
    /// # Errors
    /// If one was not.
    pub fn finish(&self) -> Result<(), Error> {
        self.reads.finish()
    }
}

impl Tensors for Drafter {
    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        self.reads.mark(name)?;
        let (shards, packed) = match &self.held {
            Held::Own { shards, packed } => (shards, packed),
            Held::Joined(placed) => return placed.matrix(name, n, k),
        };
        match find_packed(packed.running(shards, name, None), shards, name, n, k)? {
            Some(matrix) => Ok(Matrix::Packed(matrix.clone())),
            None => shards.matrix(name, n, k),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        self.reads.mark(name)?;
        match &self.held {
            Held::Own { shards, .. } => shards.vector(name, len),
            Held::Joined(placed) => placed.vector(name, len),
        }
    }
}

/// What the settings of a drafter's directory are told by.
pub(crate) enum Mark {
    DFlash,
    Weaver,
    Speculator,
}

/// Whose settings these are, if they are a drafter's.
pub(crate) fn marks(map: &Map<String, Value>) -> Option<Mark> {
    let has = |name: &str| map.contains_key(name);
    if has(SPECULATOR_KEY) {
        Some(Mark::Speculator)
    } else if has("d_rank") {
        Some(Mark::Weaver)
    } else if has("dflash_config") {
        Some(Mark::DFlash)
    } else {
        None
    }
}

/// A network in a directory of its own.
fn own(
    dir: &Path,
    path: &Path,
    map: &Map<String, Value>,
) -> Result<(DrafterKind, Held, Vec<TensorInfo>), Error> {
    let shards = Shards::open(dir, false)?;
    let packed = packed_tensors(&shards)?;
    shards.check_floats(|name| packed.contains_key(name) || name.starts_with(SIGNS))?;
    // Signs are read through the matrices that they rotate.
    let infos = shards
        .infos()
        .filter(|info| !info.name.starts_with(SIGNS))
        .collect::<Vec<_>>();
    let has = |name: &str| infos.iter().any(|info| info.name == name);
    let kind = match marks(map) {
        Some(Mark::Weaver) => DrafterKind::Weaver(weaver(path, map, has)?),
        _ => DrafterKind::DFlash(Box::new(dflash(path, map)?)),
    };
    let packed = Resident::new(packed);
    Ok((kind, Held::Own { shards, packed }, infos))
}

fn dflash(path: &Path, map: &Map<String, Value>) -> Result<DFlashConfig, Error> {
    let top = Fields::new(path, map);
    let Some(inner) = top.object("dflash_config")? else {
        return Err(top.error(
            "dflash_config",
            "is missing; a drafter is a DFlash directory (dflash_config) or a Weaver (d_rank)",
        ));
    };
    let shape = draft_shape(&top)?;
    let block = match inner.size("block_size", MAX_BLOCK)? {
        Some(block) => block,
        None => top.required_size("block_size", MAX_BLOCK)?,
    };
    if block < 2 {
        return Err(top.error("block_size", "must be at least 2"));
    }
    let one = |name: &str| -> Result<u32, Error> {
        match inner.token_ids(name)?.as_deref() {
            Some([id]) => Ok(*id),
            _ => Err(inner.error(name, "must be one token id")),
        }
    };
    let taps: Vec<usize> = inner
        .token_ids("target_layer_ids")?
        .unwrap_or_default()
        .into_iter()
        .map(|id| id as usize)
        .collect();
    if taps.is_empty() || taps.len() > MAX_LAYERS {
        return Err(inner.error("target_layer_ids", "must name some of the target's layers"));
    }
    // The reference implementation: is_causal speaks for all layers; without it a sliding layer is
    // causal and a full one is not.
    let causal = match inner.flag("is_causal")? {
        Some(causal) => Some(causal),
        None => top.flag("is_causal")?,
    };
    let window = top.size("sliding_window", MAX_WIDTH)?;
    let masks = match top.list("layer_types")? {
        None => vec![
            DraftMask {
                window: None,
                causal: causal.unwrap_or(false)
            };
            shape.layers.len()
        ],
        Some(types) => types
            .iter()
            .map(|kind| match kind.as_str() {
                Some("full_attention") => Ok(DraftMask {
                    window: None,
                    causal: causal.unwrap_or(false),
                }),
                Some("sliding_attention") => match window {
                    Some(_) => Ok(DraftMask {
                        window,
                        causal: causal.unwrap_or(true),
                    }),
                    None => Err(top.error("sliding_window", "is missing")),
                },
                _ => Err(top.error("layer_types", format!("{kind} is not supported"))),
            })
            .collect::<Result<_, _>>()?,
    };
    if masks.len() != shape.layers.len() {
        return Err(top.error(
            "layer_types",
            format!(
                "names {} layers, not num_hidden_layers, {}",
                masks.len(),
                shape.layers.len()
            ),
        ));
    }
    Ok(DFlashConfig {
        shape,
        masks,
        block,
        mask_token: one("mask_token_id")?,
        taps,
        target_layers: top.size("num_target_layers", MAX_LAYERS)?,
    })
}

fn weaver(
    path: &Path,
    map: &Map<String, Value>,
    has: impl Fn(&str) -> bool,
) -> Result<WeaverConfig, Error> {
    let top = Fields::new(path, map);
    let size = |name: &str| top.required_size(name, MAX_WIDTH);
    // Of the two published generations the one with SwiGLU is the one with rotary positions.
    let gated = has("blocks.0.gate_up_proj.weight");
    let config = WeaverConfig {
        hidden_size: size("d_model")?,
        rank: size("d_rank")?,
        layers: top.required_size("num_layers", MAX_LAYERS)?,
        heads: size("num_heads")?,
        intermediate_size: size("mlp_dim")?,
        depth: top.required_size("K", MAX_BLOCK)?,
        candidates: size("candidate_pool_size")?,
        rope_base: if has("pos_emb") || !gated && !map.contains_key("rope_base") {
            None
        } else {
            Some(top.positive("rope_base")?.unwrap_or(10_000.0))
        },
        gated,
        fused: has("blocks.0.qkv_proj.weight"),
    };
    if size("d_embed")? != config.hidden_size {
        return Err(top.error("d_embed", "must equal d_model"));
    }
    if !config.rank.is_multiple_of(2 * config.heads) {
        return Err(top.error(
            "num_heads",
            format!(
                "{} heads of even width do not make up d_rank, {}",
                config.heads, config.rank
            ),
        ));
    }
    Ok(config)
}
