//! What is converted: a model of any format, or a drafter's directory.

use std::path::Path;

use serde_json::{Map, Value};

use crate::Checkpoint;
use crate::config::config_json;
use crate::drafter::Drafter;
use crate::error::Error;
use crate::fields::read_object;
use crate::hugging_face::directory_name;
use crate::lalamo::speculator::SPECULATOR_KEY;
use crate::layout::{Role, Slot, layout, mtp_layout};
use crate::shards::Shards;
use crate::source::{CodeRows, TensorInfo};
use crate::text::text_files;

/// A source of tensors, opened and checked.
pub(crate) enum Input {
    Model(Box<Checkpoint>),
    Drafter {
        name: String,
        config: Map<String, Value>,
        shards: Shards,
    },
}

impl Input {
    pub fn open(path: &Path) -> Result<Input, Error> {
        let config = path.join("config.json");
        match Drafter::networks(path)?[..] {
            [] => {}
            [network] if read_object(&config)?.get(SPECULATOR_KEY).is_none() => {
                // Its settings and tensors are checked there; here they are only copied.
                Drafter::open(path, network)?;
                return Ok(Input::Drafter {
                    name: directory_name(path),
                    config: read_object(&config)?,
                    shards: Shards::open(path, false)?,
                });
            }
            _ => {
                let what = "a speculator of lalamo; quantise the networks that it was made from";
                return Err(Error::file(path, what));
            }
        }
        Ok(Input::Model(Box::new(Checkpoint::open(path)?)))
    }

    /// A name to remember the source by.
    pub fn name(&self) -> &str {
        match self {
            Input::Model(checkpoint) => &checkpoint.description().name,
            Input::Drafter { name, .. } => name,
        }
    }

    /// Every tensor to convert, with what is known of how it is stored.
    pub fn tensors(&self) -> Vec<(Slot, TensorInfo)> {
        match self {
            Input::Model(checkpoint) => {
                let config = &checkpoint.description().config;
                let slots = layout(config).into_iter().chain(mtp_layout(config));
                // `Checkpoint::open` made sure that none of the model's own is missing; a head that
                // predicts further tokens may be there or not.
                slots
                    .filter_map(|slot| Some((checkpoint.reads.get(&slot.name)?.clone(), slot)))
                    .map(|(info, slot)| (slot, info))
                    .collect()
            }
            Input::Drafter { shards, .. } => {
                let infos = shards.infos().filter(|info| !info.aside);
                infos.map(|info| (drafter_slot(&info), info)).collect()
            }
        }
    }

    /// Bytes that its tensors take there.
    pub fn bytes(&self) -> u64 {
        self.tensors().iter().map(|(_, info)| info.bytes).sum()
    }

    /// Config.json and the other files of text that the new directory gets.
    pub fn texts(&self) -> (Map<String, Value>, Vec<(&'static str, String)>) {
        match self {
            Input::Model(checkpoint) => {
                let description = checkpoint.description();
                (config_json(&description.config), text_files(description))
            }
            Input::Drafter { config, .. } => (config.clone(), Vec::new()),
        }
    }

    pub fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error> {
        match self {
            Input::Model(checkpoint) => checkpoint.source.rows(name, k, first, out),
            Input::Drafter { shards, .. } => shards.rows(name, k, first, out),
        }
    }

    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        match self {
            Input::Model(checkpoint) => checkpoint.source.vector(name, len),
            Input::Drafter { shards, .. } => shards.vector(name, len),
        }
    }

    /// See [`Source::codes`](crate::source::Source::codes).
    pub fn codes(&self, name: &str) -> Option<Box<dyn CodeRows + '_>> {
        match self {
            Input::Model(checkpoint) => checkpoint.source.codes(name),
            Input::Drafter { .. } => None,
        }
    }

    pub fn release(&self, name: &str) {
        match self {
            Input::Model(checkpoint) => checkpoint.source.release(name),
            Input::Drafter { shards, .. } => shards.release(name),
        }
    }
}

/// A drafter's projections are matrices called `weight`; its positions, norms and biases are not.
fn drafter_slot(info: &TensorInfo) -> Slot {
    let matrix = info.shape.len() == 2 && info.name.ends_with(".weight");
    Slot {
        name: info.name.clone(),
        role: if matrix { Role::Matrix } else { Role::Vector },
        shape: info.shape.clone(),
    }
}
