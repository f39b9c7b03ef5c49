//! `kozue inspect`: what a model is and what it needs.

use crate::cli::InspectArgs;
use crate::default_model::model_path;
use crate::failure::Failure;
use crate::panel::bytes;
use kozue_checkpoint::description::{
    ExpertsConfig, Family, Mixer, ModelConfig, RopeScaling, SlidingConfig,
};
use kozue_checkpoint::{Checkpoint, Description, Drafter, DrafterKind, InMemory, TensorInfo};
use kozue_engine::memory::{DraftShape, Needs};
use kozue_engine::speculation::drafter_folders;
use kozue_kernels::threads::physical_cores;
use kozue_model::Mtp;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;

/// Runs the command.
pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    let path = model_path(args.model.as_deref())?;
    let open = |folder: &Path, network| Drafter::open(folder, network).map_err(Failure::failed);
    let networks = Drafter::networks(&path).map_err(Failure::failed)?;
    let text = if !networks.is_empty() {
        let mut text = String::new();
        for network in networks {
            let drafter = open(&path, network)?;
            let _ = match args.json {
                true => writeln!(text, "{}", drafter_json(&drafter)),
                false => writeln!(text, "{:<20} {}", "drafter", drafter_text(&drafter)),
            };
        }
        text
    } else {
        let checkpoint = Checkpoint::open(&path).map_err(Failure::failed)?;
        let drafters = drafter_folders(&path)?
            .iter()
            .map(|(folder, network)| open(folder, *network))
            .collect::<Result<_, _>>()?;
        let view = View::new(&checkpoint, drafters, args);
        match args.json {
            true => format!("{}\n", view.json()),
            false => view.text(),
        }
    };
    io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(Failure::output)
}

fn drafter_text(drafter: &Drafter) -> String {
    let (name, layers, width, rest) = match drafter.kind() {
        DrafterKind::DFlash(config) => (
            "DFlash",
            config.shape.layers.len(),
            config.shape.hidden_size,
            format!(
                "blocks of {}, reads the target's layers {:?}",
                config.block, config.taps
            ),
        ),
        DrafterKind::Weaver(config) => (
            "Weaver",
            config.layers,
            config.rank,
            format!(
                "{} candidates at up to {} positions, for a target of width {}",
                config.candidates, config.depth, config.hidden_size
            ),
        ),
    };
    let s = if layers == 1 { "" } else { "s" };
    format!(
        "{name}, {layers} layer{s} of {width}, {}, {rest}",
        bytes(drafter.bytes())
    )
}

fn drafter_json(drafter: &Drafter) -> Value {
    let mut object = match drafter.kind() {
        DrafterKind::DFlash(config) => json!({
            "drafter": "dflash",
            "layers": config.shape.layers.len(),
            "hidden_size": config.shape.hidden_size,
            "block_size": config.block,
            "target_layer_ids": config.taps,
        }),
        DrafterKind::Weaver(config) => json!({
            "drafter": "weaver",
            "layers": config.layers,
            "hidden_size": config.hidden_size,
            "rank": config.rank,
            "candidates": config.candidates,
            "depth": config.depth,
        }),
    };
    object["weight_bytes"] = json!(drafter.bytes());
    object
}

struct View<'a> {
    description: &'a Description,
    drafters: Vec<Drafter>,
    tensors: Vec<&'a TensorInfo>,
    list_tensors: bool,
    /// (tokens, what a sequence of this length takes)
    contexts: Vec<(usize, Needs)>,
    weights: u64,
    /// Weights that one token's pass uses.
    active: u64,
    weight_bytes: u64,
    /// Bytes of the weights in a model that runs.
    memory_bytes: u64,
}

impl<'a> View<'a> {
    fn new(checkpoint: &'a Checkpoint, drafters: Vec<Drafter>, args: &InspectArgs) -> View<'a> {
        let description = checkpoint.description();
        let config = &description.config;
        let tensors = checkpoint.tensors();
        let used = || tensors.iter().filter(|tensor| !tensor.aside);
        let size = |t: &TensorInfo| t.shape.iter().map(|n| *n as u64).product::<u64>();
        let weights = used().map(|t| size(t)).sum();
        let active = used()
            .map(|t| config.read_by_a_token(&t.name, size(t)))
            .sum();
        let weight_bytes = used().map(|tensor| tensor.bytes).sum();
        let memory_bytes = used().map(|tensor| tensor.memory.bytes).sum();
        let mut lengths = args.ctx.clone();
        if lengths.is_empty() {
            lengths = [4096, 32768]
                .into_iter()
                .filter(|n| *n < config.max_position)
                .collect();
            lengths.push(config.max_position);
        }
        let dflash = drafters.iter().find_map(|drafter| match drafter.kind() {
            DrafterKind::DFlash(config) => Some(DraftShape::dflash(config)),
            DrafterKind::Weaver(_) => None,
        });
        let head = || Mtp::is_in(checkpoint).then(|| DraftShape::head(config));
        let drafts = dflash.or_else(head);
        View {
            description,
            drafters,
            list_tensors: args.tensors,
            contexts: lengths
                .iter()
                .map(|n| {
                    let (kv, threads) = (args.kv.into(), physical_cores());
                    (*n, Needs::new(config, drafts.as_ref(), kv, threads, *n))
                })
                .collect(),
            weights,
            active,
            weight_bytes,
            memory_bytes,
            tensors,
        }
    }

    fn bits_per_weight(&self) -> f64 {
        8.0 * self.weight_bytes as f64 / self.weights.max(1) as f64
    }

    /// What the drafters take, weights included.
    fn drafter_bytes(&self, needs: &Needs) -> u64 {
        let weights: u64 = self.drafters.iter().map(Drafter::bytes).sum();
        weights.saturating_add(needs.drafter)
    }

    /// All that an answer takes.
    fn total(&self, needs: &Needs) -> u64 {
        let sequence = needs.sequence.saturating_add(needs.pass);
        let drafter = self.drafter_bytes(needs);
        self.memory_bytes
            .saturating_add(sequence)
            .saturating_add(drafter)
    }

    fn text(&self) -> String {
        let config = &self.description.config;
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<20} {value}");
        };
        line("name", self.description.name.clone());
        line("architecture", family(config.family).into());
        line("layers", layers(config));
        line("hidden size", config.hidden_size.to_string());
        match &config.experts {
            None => line("mlp size", config.intermediate_size.to_string()),
            Some(shape) => line("experts", experts(shape, config.intermediate_size)),
        }
        line("attention", attention(config));
        if let Some(delta) = &config.delta {
            line(
                "gated deltanet",
                format!(
                    "{} key heads of {}, {} value heads of {}, convolution of {}",
                    delta.key_heads,
                    delta.key_dim,
                    delta.value_heads,
                    delta.value_dim,
                    delta.conv_kernel
                ),
            );
        }
        line(
            "vocabulary",
            format!(
                "{}, head {}",
                config.vocab_size,
                if config.tied {
                    "tied to the embedding"
                } else {
                    "of its own"
                }
            ),
        );
        line("context", format!("{} tokens", config.max_position));
        let template = if self.description.chat_template.is_some() {
            "yes"
        } else {
            "no"
        };
        line("chat template", template.into());
        line(
            "weights",
            format!(
                "{}{}, {}, {:.2} bits per weight",
                count(self.weights),
                match &config.experts {
                    None => String::new(),
                    Some(_) => format!(" ({} for a token)", count(self.active)),
                },
                bytes(self.weight_bytes),
                self.bits_per_weight()
            ),
        );
        for kind in self.kinds() {
            line("", kind.text());
        }
        if self.kinds().iter().any(|kind| kind.memory.lossy) {
            line(
                "",
                "converted at load: kozue run says how much is lost".into(),
            );
        }
        for drafter in &self.drafters {
            line("drafter", drafter_text(drafter));
        }
        for &(length, needs) in &self.contexts {
            let beyond = if length > config.max_position {
                ", which is more than the model was made for"
            } else {
                ""
            };
            line(
                "memory",
                format!(
                    "{} at {length} tokens of context ({} of it the sequence, {}{} a pass){beyond}",
                    bytes(self.total(&needs)),
                    bytes(needs.sequence),
                    match self.drafter_bytes(&needs) {
                        0 => String::new(),
                        drafter => format!("{} the drafter, ", bytes(drafter)),
                    },
                    bytes(needs.pass),
                ),
            );
        }
        if self.list_tensors {
            self.list(&mut text);
        }
        text
    }

    fn list(&self, text: &mut String) {
        let width = self.tensors.iter().map(|t| t.name.len()).max().unwrap_or(0);
        for tensor in &self.tensors {
            let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            let aside = if tensor.aside { "  (not used)" } else { "" };
            let _ = writeln!(
                text,
                "{:<width$}  {:<16} {:<24} {}{aside}",
                tensor.name,
                shape.join(" x "),
                tensor.format,
                bytes(tensor.bytes)
            );
        }
    }

    /// Tensors in use by how they are stored and kept, the largest first.
    fn kinds(&self) -> Vec<Kind<'a>> {
        let mut kinds: Vec<Kind> = Vec::new();
        for tensor in self.tensors.iter().filter(|tensor| !tensor.aside) {
            let known = kinds.iter_mut().find(|kind| {
                kind.format == tensor.format && kind.memory.format == tensor.memory.format
            });
            match known {
                Some(kind) => {
                    kind.count += 1;
                    kind.bytes += tensor.bytes;
                    kind.memory.bytes += tensor.memory.bytes;
                }
                None => kinds.push(Kind {
                    format: &tensor.format,
                    count: 1,
                    bytes: tensor.bytes,
                    memory: tensor.memory.clone(),
                }),
            }
        }
        kinds.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.format.cmp(b.format)));
        kinds
    }

    fn json(&self) -> Value {
        let config = &self.description.config;
        let mut object = json!({
            "name": self.description.name,
            "architecture": family(config.family),
            "layers": config.layers.len(),
            "attention_layers": config.count(Mixer::Attention),
            "sliding_layers": config.count(Mixer::Sliding),
            "delta_layers": config.count(Mixer::Delta),
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "tied": config.tied,
            "max_position": config.max_position,
            "chat_template": self.description.chat_template.is_some(),
            "experts": config.experts.as_ref().map(|experts| json!({
                "count": experts.count,
                "chosen": experts.chosen,
                "shared_size": experts.shared,
                "dense_layers": experts.dense.as_ref().map(|dense| &dense.layers),
            })),
            "weights": self.weights,
            "active_weights": self.active,
            "weight_bytes": self.weight_bytes,
            "weight_memory_bytes": self.memory_bytes,
            "bits_per_weight": self.bits_per_weight(),
            "drafters": self.drafters.iter().map(drafter_json).collect::<Vec<_>>(),
            "memory": self.contexts.iter().map(|(tokens, needs)| json!({
                "context": tokens,
                "sequence_bytes": needs.sequence,
                "drafter_bytes": self.drafter_bytes(needs),
                "pass_bytes": needs.pass,
                "total_bytes": self.total(needs),
            })).collect::<Vec<_>>(),
        });
        if self.list_tensors {
            object["tensors"] = self
                .tensors
                .iter()
                .map(|tensor| {
                    json!({
                        "name": tensor.name,
                        "shape": tensor.shape,
                        "format": tensor.format,
                        "bytes": tensor.bytes,
                        "memory_format": tensor.memory.format,
                        "memory_bytes": tensor.memory.bytes,
                        "lossy": tensor.memory.lossy,
                        "used": !tensor.aside,
                    })
                })
                .collect();
        }
        object
    }
}

/// Tensors that are stored and kept in the same way.
struct Kind<'a> {
    format: &'a str,
    count: usize,
    bytes: u64,
    memory: InMemory,
}

impl Kind<'_> {
    fn text(&self) -> String {
        let s = if self.count == 1 { "" } else { "s" };
        let mut text = format!(
            "{} tensor{s} {}, {}",
            self.count,
            self.format,
            bytes(self.bytes)
        );
        if self.memory.format != self.format {
            let (format, size) = (&self.memory.format, bytes(self.memory.bytes));
            let how = if self.memory.lossy { ", rounded" } else { "" };
            text.push_str(&format!(" (in memory {format}, {size}{how})"));
        }
        text
    }
}

fn family(family: Family) -> &'static str {
    match family {
        Family::Qwen35 => "Qwen3.5",
        Family::Qwen3 => "Qwen3",
        Family::Qwen2 => "Qwen2",
        Family::Llama => "Llama",
        Family::Mistral => "Mistral",
        Family::Gemma3 => "Gemma 3",
    }
}

fn layers(config: &ModelConfig) -> String {
    let all = config.layers.len();
    let of = |mixer| config.count(mixer);
    let attention = of(Mixer::Attention);
    match (of(Mixer::Delta), &config.attention.sliding) {
        (0, None) => all.to_string(),
        (0, Some(SlidingConfig { window, .. })) => format!(
            "{all} ({} see {window} tokens, {attention} see all)",
            of(Mixer::Sliding)
        ),
        (delta, _) => format!("{all} ({delta} gated deltanet, {attention} attention)"),
    }
}

fn experts(shape: &ExpertsConfig, inner: usize) -> String {
    let shared = match shape.shared {
        None => String::new(),
        Some(inner) => format!(", and one of size {inner} for every token"),
    };
    let dense = shape.dense.as_ref().map_or(String::new(), |dense| {
        format!(
            "; {} layers have one of size {} instead",
            dense.layers.len(),
            dense.intermediate_size
        )
    });
    format!(
        "{} a layer of mlp size {inner}, {} for a token{shared}{dense}",
        shape.count, shape.chosen
    )
}

fn attention(config: &ModelConfig) -> String {
    let attention = &config.attention;
    let scaling = match attention.rope.scaling {
        RopeScaling::None => "",
        RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => {
            ", rotary frequencies stretched"
        }
    };
    format!(
        "{} query and {} key-value heads of {}{scaling}",
        attention.heads, attention.kv_heads, attention.head_dim
    )
}

fn count(weights: u64) -> String {
    let value = weights as f64;
    match weights {
        0..1_000_000 => format!("{:.1} thousand", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} million", value / 1e6),
        _ => format!("{:.2} billion", value / 1e9),
    }
}
