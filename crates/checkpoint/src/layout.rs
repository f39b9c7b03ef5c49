//! The tensors that a model of a given shape consists of.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use crate::description::{Mixer, ModelConfig};
use crate::error::Error;
use crate::source::TensorInfo;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A matrix that makes most of a model's bytes: projections, embedding, head.
    Matrix,
    /// A matrix of few rows, one a head or an expert; quantising it saves nothing and costs quality.
    FloatMatrix,
    /// Norms, biases, convolution taps, decay parameters.
    Vector,
}

/// One tensor that a model must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub name: String,
    pub role: Role,
    /// Hugging Face's shape, outputs first.
    pub shape: Vec<usize>,
}

/// Whether this is the name of a [`Role::FloatMatrix`].
pub(crate) fn stays_float(name: &str) -> bool {
    let in_delta = ["in_proj_a", "in_proj_b"]
        .iter()
        .any(|part| name.ends_with(&format!(".linear_attn.{part}.weight")));
    in_delta || is_router(name)
}

/// Whether this is the name of a matrix that says how much of which expert a token takes.
pub(crate) fn is_router(name: &str) -> bool {
    name.ends_with(".mlp.gate.weight") || name.ends_with(".mlp.shared_expert_gate.weight")
}

/// What the names of all experts' tensors have after their layer's.
const EXPERTS: &str = ".mlp.experts.";

/// Whether this is the name of a tensor of one of the experts that a token chooses among.
pub(crate) fn is_expert(name: &str) -> bool {
    name.contains(EXPERTS)
}

/// The embedding table, which is the head too where they are tied.
pub const EMBED: &str = "model.embed_tokens.weight";
/// The head, where it is a matrix of its own.
pub const HEAD: &str = "lm_head.weight";

/// Start of the names of a multi-token prediction head, which only drafting uses.
pub(crate) const MTP: &str = "mtp.";

/// Every tensor of a model with this configuration, in the order of a forward pass.
pub(crate) fn layout(config: &ModelConfig) -> Vec<Slot> {
    let mut slots = Slots(Vec::new());
    let hidden = config.hidden_size;
    slots.matrix("model.embed_tokens", config.vocab_size, hidden, false);
    for (index, mixer) in config.layers.iter().enumerate() {
        slots.layer(&format!("model.layers.{index}"), index, *mixer, config);
    }
    slots.vector("model.norm.weight".to_owned(), &[hidden]);
    if !config.tied {
        slots.matrix("lm_head", config.vocab_size, hidden, false);
    }
    slots.0
}

/// Every tensor of a multi-token prediction head of one layer, as Qwen3.5 has it.
pub(crate) fn mtp_layout(config: &ModelConfig) -> Vec<Slot> {
    let mut slots = Slots(Vec::new());
    let hidden = config.hidden_size;
    for norm in ["pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
        slots.vector(format!("{MTP}{norm}.weight"), &[hidden]);
    }
    slots.matrix(&format!("{MTP}fc"), hidden, 2 * hidden, false);
    // Behind the model's own layers.
    let index = config.layers.len();
    slots.layer(&format!("{MTP}layers.0"), index, Mixer::Attention, config);
    slots.vector(format!("{MTP}norm.weight"), &[hidden]);
    slots.0
}

struct Slots(Vec<Slot>);

impl Slots {
    fn matrix(&mut self, name: &str, n: usize, k: usize, bias: bool) {
        self.0.push(Slot {
            name: format!("{name}.weight"),
            role: Role::Matrix,
            shape: vec![n, k],
        });
        if bias {
            self.vector(format!("{name}.bias"), &[n]);
        }
    }

    fn float_matrix(&mut self, name: &str, n: usize, k: usize) {
        let name = format!("{name}.weight");
        self.0.push(Slot {
            name,
            role: Role::FloatMatrix,
            shape: vec![n, k],
        });
    }

    fn vector(&mut self, name: String, shape: &[usize]) {
        self.0.push(Slot {
            name,
            role: Role::Vector,
            shape: shape.to_vec(),
        });
    }

    fn layer(&mut self, at: &str, index: usize, mixer: Mixer, config: &ModelConfig) {
        let hidden = config.hidden_size;
        self.vector(format!("{at}.input_layernorm.weight"), &[hidden]);
        match mixer {
            Mixer::Attention | Mixer::Sliding => self.attention(&format!("{at}.self_attn"), config),
            Mixer::Delta => self.delta(&format!("{at}.linear_attn"), config),
        }
        self.vector(format!("{at}.post_attention_layernorm.weight"), &[hidden]);
        if config.sandwich_norms {
            for norm in ["pre_feedforward_layernorm", "post_feedforward_layernorm"] {
                self.vector(format!("{at}.{norm}.weight"), &[hidden]);
            }
        }
        let experts = match config.feed_forward(index) {
            Ok(experts) => experts,
            Err(inner) => return self.mlp(&format!("{at}.mlp"), inner, config),
        };
        let inner = config.intermediate_size;
        self.float_matrix(&format!("{at}.mlp.gate"), experts.count, hidden);
        for expert in 0..experts.count {
            self.mlp(&format!("{at}{EXPERTS}{expert}"), inner, config);
        }
        if let Some(inner) = experts.shared {
            self.float_matrix(&format!("{at}.mlp.shared_expert_gate"), 1, hidden);
            self.mlp(&format!("{at}.mlp.shared_expert"), inner, config);
        }
    }

    fn mlp(&mut self, at: &str, inner: usize, config: &ModelConfig) {
        let (hidden, bias) = (config.hidden_size, config.mlp_bias);
        self.matrix(&format!("{at}.gate_proj"), inner, hidden, bias);
        self.matrix(&format!("{at}.up_proj"), inner, hidden, bias);
        self.matrix(&format!("{at}.down_proj"), hidden, inner, bias);
    }

    fn attention(&mut self, at: &str, config: &ModelConfig) {
        let attention = &config.attention;
        let hidden = config.hidden_size;
        let queries = attention.heads * attention.head_dim;
        let keys = attention.kv_heads * attention.head_dim;
        let gates = if attention.gated { queries } else { 0 };
        self.matrix(
            &format!("{at}.q_proj"),
            queries + gates,
            hidden,
            attention.qkv_bias,
        );
        self.matrix(&format!("{at}.k_proj"), keys, hidden, attention.qkv_bias);
        self.matrix(&format!("{at}.v_proj"), keys, hidden, attention.qkv_bias);
        self.matrix(
            &format!("{at}.o_proj"),
            hidden,
            queries,
            attention.output_bias,
        );
        if attention.qk_norm {
            self.vector(format!("{at}.q_norm.weight"), &[attention.head_dim]);
            self.vector(format!("{at}.k_norm.weight"), &[attention.head_dim]);
        }
    }

    fn delta(&mut self, at: &str, config: &ModelConfig) {
        let Some(delta) = &config.delta else { return };
        let hidden = config.hidden_size;
        let values = delta.value_heads * delta.value_dim;
        let mixed = 2 * delta.key_heads * delta.key_dim + values;
        self.matrix(&format!("{at}.in_proj_qkv"), mixed, hidden, false);
        self.matrix(&format!("{at}.in_proj_z"), values, hidden, false);
        self.float_matrix(&format!("{at}.in_proj_a"), delta.value_heads, hidden);
        self.float_matrix(&format!("{at}.in_proj_b"), delta.value_heads, hidden);
        self.vector(
            format!("{at}.conv1d.weight"),
            &[mixed, 1, delta.conv_kernel],
        );
        self.vector(format!("{at}.A_log"), &[delta.value_heads]);
        self.vector(format!("{at}.dt_bias"), &[delta.value_heads]);
        self.vector(format!("{at}.norm.weight"), &[delta.value_dim]);
        self.matrix(&format!("{at}.out_proj"), hidden, values, false);
    }
}

/// Compare what a checkpoint holds with what its configuration asks for.
pub(crate) fn check(path: &Path, config: &ModelConfig, found: &[TensorInfo]) -> Result<(), Error> {
    let slots = layout(config);
    let held: HashMap<&str, &TensorInfo> = found
        .iter()
        .map(|info| (info.name.as_str(), info))
        .collect();
    for slot in &slots {
        let info = held.get(slot.name.as_str()).filter(|info| !info.aside);
        let info = info.ok_or_else(|| Error::missing(path, &slot.name))?;
        let same = match slot.role {
            Role::Matrix | Role::FloatMatrix => info.shape == slot.shape,
            // Formats differ in whether they keep the middle 1 of a depthwise convolution.
            Role::Vector => squeezed(&info.shape).eq(squeezed(&slot.shape)),
        };
        if !same {
            return Err(Error::shape(path, &slot.name, &info.shape, &slot.shape));
        }
    }
    let expected: HashSet<&str> = slots.iter().map(|slot| slot.name.as_str()).collect();
    let mut extra: Vec<&str> = found
        .iter()
        .filter(|info| !info.aside && !expected.contains(info.name.as_str()))
        .map(|info| info.name.as_str())
        .collect();
    extra.sort_unstable();
    match extra.first() {
        None => Ok(()),
        Some(first) => Err(Error::Unexpected {
            path: path.to_path_buf(),
            count: extra.len(),
            first: (*first).to_owned(),
        }),
    }
}

fn squeezed(shape: &[usize]) -> impl Iterator<Item = &usize> {
    shape.iter().filter(|&&dimension| dimension != 1)
}
