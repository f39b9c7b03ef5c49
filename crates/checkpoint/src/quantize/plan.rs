//! What a conversion will do with each tensor, known before the first weight is read.

use std::collections::BTreeMap;
use std::path::Path;

use kozue_kernels::hadamard::BLOCK as ROTATED;
use kozue_kernels::{PackedSpec, Quantizer, Rotation};
use serde_json::json;

use super::input::Input;
use super::{Options, Size};
use crate::error::Error;
use crate::kozue::{PackedEntry, SIGNS};
use crate::layout::{EMBED, HEAD, Role};
use crate::safetensors::Dtype;
use crate::writer::Planned;

/// Seed of the signs; the signs themselves are stored, so it may change at any time.
const SEED: u64 = 0x6b6f_7a75_6500_0001;

/// What is done with one tensor.
pub(super) struct Step {
    pub name: String,
    pub shape: Vec<usize>,
    pub from: String,
    pub action: Action,
    pub note: Option<String>,
}

pub(super) enum Action {
    /// Packed, rotated by the signs of this name.
    Pack(String),
    /// Codes of this very kind, moved as they are; rotated by signs, if they are.
    Move(Option<String>),
    /// Kept as floats of this type.
    Keep(Dtype),
}

/// Everything that is known before the first weight is read.
pub(super) struct Plan {
    quantizer: Quantizer,
    /// That of the embedding table and the head.
    head: Quantizer,
    pub steps: Vec<Step>,
    pub rotations: BTreeMap<String, Rotation>,
    pub weights: u64,
}

impl Plan {
    /// `path` is the source's, for errors.
    pub fn new(path: &Path, input: &Input, options: Options) -> Result<Plan, Error> {
        let wrong = |error: kozue_kernels::Error| Error::file(path, error.to_string());
        let quantizer = |size| {
            let quantizer = match size {
                Size::M => Quantizer::int4(options.group),
                Size::L => Quantizer::int8(options.group),
            };
            quantizer.map_err(wrong)
        };
        let mut plan = Plan {
            quantizer: quantizer(options.size)?,
            head: quantizer(options.head.unwrap_or(options.size))?,
            steps: Vec::new(),
            rotations: BTreeMap::new(),
            weights: 0,
        };
        for (slot, info) in input.tensors() {
            plan.weights += slot.shape.iter().product::<usize>() as u64;
            let stored = match info.format.as_str() {
                "BF16" => Dtype::Bf16,
                "F16" => Dtype::F16,
                // Quantised by another program: its values as they are.
                _ => Dtype::F32,
            };
            if let (Role::Matrix, &[n, k]) = (slot.role, &slot.shape[..])
                && let Some(codes) = input.codes(&slot.name)
                && codes.spec() == plan.quantizer(&slot.name).spec(n, k)
                && let Some(signs) = plan.signs_of(codes.rotation())
            {
                plan.steps.push(Step {
                    name: slot.name,
                    shape: slot.shape,
                    from: info.format,
                    action: Action::Move(signs),
                    note: None,
                });
                continue;
            }
            let (action, note) = match (slot.role, &slot.shape[..]) {
                (Role::Matrix, &[_, k]) if k.is_multiple_of(ROTATED) => {
                    let signs = format!("{SIGNS}{k}");
                    if !plan.rotations.contains_key(&signs) {
                        let rotation = Rotation::from_seed(k, SEED).map_err(wrong)?;
                        plan.rotations.insert(signs.clone(), rotation);
                    }
                    (Action::Pack(signs), None)
                }
                (Role::Matrix, &[_, k]) => {
                    let kept = if stored == Dtype::F32 {
                        Dtype::Bf16
                    } else {
                        stored
                    };
                    let note = format!("kept dense: {k} inputs are no multiple of {ROTATED}");
                    (Action::Keep(kept), Some(note))
                }
                _ => (Action::Keep(stored), None),
            };
            plan.steps.push(Step {
                name: slot.name,
                shape: slot.shape,
                from: info.format,
                action,
                note,
            });
        }
        // Packed tensors take whole cache lines and come first; then wider values before
        // narrower ones, so that every tensor is aligned without padding between them.
        plan.steps.sort_by_key(|step| match step.action {
            Action::Pack(_) | Action::Move(_) => 0,
            Action::Keep(dtype) => 8 - dtype.size(),
        });
        Ok(plan)
    }

    /// How a matrix is quantised.
    pub fn quantizer(&self, name: &str) -> &Quantizer {
        match name {
            EMBED | HEAD => &self.head,
            _ => &self.quantizer,
        }
    }

    /// How a packed matrix is stored.
    pub fn spec(&self, step: &Step) -> PackedSpec {
        self.quantizer(&step.name)
            .spec(step.shape[0], step.shape[1])
    }

    /// The name of a rotation's signs, noted if they are the first of their width; `None` where other
    /// signs of this width have that name.
    fn signs_of(&mut self, rotation: Option<Rotation>) -> Option<Option<String>> {
        let Some(rotation) = rotation else {
            return Some(None);
        };
        let name = format!("{SIGNS}{}", rotation.k());
        let known = self
            .rotations
            .entry(name.clone())
            .or_insert(rotation.clone());
        (*known == rotation).then_some(Some(name))
    }

    /// What the header lists, in order.
    pub fn tensors(&self) -> Vec<Planned> {
        let steps = self.steps.iter().map(|step| {
            let name = step.name.clone();
            match step.action {
                Action::Pack(_) | Action::Move(_) => {
                    let bytes = self.spec(step).bytes();
                    Planned {
                        name,
                        dtype: Dtype::U8,
                        shape: vec![bytes],
                    }
                }
                Action::Keep(dtype) => Planned {
                    name,
                    dtype,
                    shape: step.shape.clone(),
                },
            }
        });
        let signs = self.rotations.iter().map(|(name, rotation)| Planned {
            name: name.clone(),
            dtype: Dtype::I8,
            shape: vec![rotation.k()],
        });
        steps.chain(signs).collect()
    }

    pub fn metadata(&self) -> BTreeMap<String, String> {
        let mut metadata = BTreeMap::from([("format".to_owned(), "kozue".to_owned())]);
        for step in &self.steps {
            let signs = match &step.action {
                Action::Pack(signs) => Some(signs.clone()),
                Action::Move(signs) => signs.clone(),
                Action::Keep(_) => continue,
            };
            let entry = PackedEntry::new(&self.spec(step), signs);
            metadata.insert(step.name.clone(), json!(entry).to_string());
        }
        metadata
    }
}
