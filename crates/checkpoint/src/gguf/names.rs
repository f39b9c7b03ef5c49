//! Hugging Face's tensors as llama.cpp's converter stores them: name, rows, order, values.

use crate::description::{ExpertsConfig, Family, Mixer, ModelConfig};
use crate::layout::MTP;

use super::order::Order;

/// What the converter did to the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Values {
    /// Nothing.
    Same,
    /// Added 1 (norms of Qwen3.5 and Gemma 3, which Hugging Face keeps around zero).
    PlusOne,
    /// a -> -exp(a) (the decay of Gated DeltaNet).
    MinusExp,
}

impl Values {
    /// Undo it.
    pub fn undo(self, value: f32) -> f32 {
        match self {
            Values::Same => value,
            Values::PlusOne => value - 1.0,
            Values::MinusExp => (-value).ln(),
        }
    }
}

/// Where a Hugging Face tensor comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Hugging Face's name.
    pub name: String,
    /// Name of the stored tensor.
    pub stored: String,
    /// Rows of the stored tensor that belong to it: first and count. None means all.
    pub part: Option<(usize, usize)>,
    /// Order of those rows.
    pub rows: Order,
    /// Order of the columns.
    pub columns: Order,
    /// Change of the values.
    pub values: Values,
    /// Whether a stored vector stands for a matrix of one row.
    pub matrix: bool,
}

/// Every tensor that a model of this shape may have, whether or not the file has it.
/// `fused(layer)` says whether q, k and v of an attention layer are stored as one tensor.
pub(super) fn places(config: &ModelConfig, fused: impl Fn(usize) -> bool) -> Vec<Place> {
    let mut all = Places {
        all: Vec::new(),
        hidden: config.hidden_size,
        norm: Values::Same,
    };
    if config.norm_plus_one {
        all.norm = Values::PlusOne;
    }
    all.matrix("model.embed_tokens", "token_embd");
    all.norm("model.norm", "output_norm");
    all.matrix("lm_head", "output");
    for (layer, mixer) in config.layers.iter().enumerate() {
        let (ours, theirs) = (format!("model.layers.{layer}"), format!("blk.{layer}"));
        all.layer(&ours, &theirs, *mixer, config, fused(layer));
    }
    if config.family == Family::Qwen35 {
        all.mtp(config.layers.len(), config, &fused);
    }
    all.all
}

struct Places {
    all: Vec<Place>,
    hidden: usize,
    norm: Values,
}

impl Places {
    fn add(&mut self, name: String, stored: String) -> &mut Place {
        self.all.push(Place {
            name,
            stored,
            part: None,
            rows: Order::Same,
            columns: Order::Same,
            values: Values::Same,
            matrix: false,
        });
        let last = self.all.len() - 1;
        &mut self.all[last]
    }

    /// A matrix and its bias, whose rows have the same order.
    fn rows(&mut self, name: &str, stored: &str, part: Option<(usize, usize)>, rows: Order) {
        let weight = self.add(format!("{name}.weight"), format!("{stored}.weight"));
        (weight.part, weight.rows, weight.matrix) = (part, rows, true);
        let bias = self.add(format!("{name}.bias"), format!("{stored}.bias"));
        (bias.part, bias.rows) = (part, rows);
    }

    fn matrix(&mut self, name: &str, stored: &str) {
        self.rows(name, stored, None, Order::Same);
    }

    fn norm(&mut self, name: &str, stored: &str) {
        let values = self.norm;
        self.add(format!("{name}.weight"), format!("{stored}.weight"))
            .values = values;
    }

    fn layer(&mut self, ours: &str, theirs: &str, mixer: Mixer, config: &ModelConfig, fused: bool) {
        self.norm(
            &format!("{ours}.input_layernorm"),
            &format!("{theirs}.attn_norm"),
        );
        let norms: &[_] = match config.family {
            Family::Qwen35 => &[("post_attention_layernorm", "post_attention_norm")],
            Family::Gemma3 => &[
                ("post_attention_layernorm", "post_attention_norm"),
                ("pre_feedforward_layernorm", "ffn_norm"),
                ("post_feedforward_layernorm", "post_ffw_norm"),
            ],
            _ => &[("post_attention_layernorm", "ffn_norm")],
        };
        for (name, stored) in norms {
            self.norm(&format!("{ours}.{name}"), &format!("{theirs}.{stored}"));
        }
        // No such file mixes layers with and without experts.
        match &config.experts {
            None => self.mlp(&format!("{ours}.mlp"), theirs, ""),
            Some(experts) => {
                let ours = format!("{ours}.mlp");
                self.experts(&ours, theirs, config.intermediate_size, experts);
            }
        }
        match mixer {
            Mixer::Attention | Mixer::Sliding => self.attention(ours, theirs, config, fused),
            Mixer::Delta => self.delta(ours, theirs, config),
        }
    }

    fn mlp(&mut self, ours: &str, theirs: &str, suffix: &str) {
        for part in ["gate", "up", "down"] {
            self.matrix(
                &format!("{ours}.{part}_proj"),
                &format!("{theirs}.ffn_{part}{suffix}"),
            );
        }
    }

    /// A mixture of experts: one tensor for all experts' gates, one for their ups, or one for both,
    /// and one for their downs.
    fn experts(&mut self, ours: &str, theirs: &str, inner: usize, shape: &ExpertsConfig) {
        self.matrix(&format!("{ours}.gate"), &format!("{theirs}.ffn_gate_inp"));
        let hidden = self.hidden;
        for expert in 0..shape.count {
            for (part, stored, first, rows) in [
                ("gate", "gate_exps", expert * inner, inner),
                ("up", "up_exps", expert * inner, inner),
                ("gate", "gate_up_exps", 2 * expert * inner, inner),
                ("up", "gate_up_exps", (2 * expert + 1) * inner, inner),
                ("down", "down_exps", expert * hidden, hidden),
            ] {
                self.rows(
                    &format!("{ours}.experts.{expert}.{part}_proj"),
                    &format!("{theirs}.ffn_{stored}"),
                    Some((first, rows)),
                    Order::Same,
                );
            }
        }
        if shape.shared.is_some() {
            self.matrix(
                &format!("{ours}.shared_expert_gate"),
                &format!("{theirs}.ffn_gate_inp_shexp"),
            );
            self.mlp(&format!("{ours}.shared_expert"), theirs, "_shexp");
        }
    }

    /// The multi-token prediction head: the first block behind the model's own.
    fn mtp(&mut self, block: usize, config: &ModelConfig, fused: &impl Fn(usize) -> bool) {
        let theirs = format!("blk.{block}");
        self.layer(
            &format!("{MTP}layers.0"),
            &theirs,
            Mixer::Attention,
            config,
            fused(block),
        );
        self.matrix(&format!("{MTP}fc"), &format!("{theirs}.nextn.eh_proj"));
        for (name, stored) in [
            ("pre_fc_norm_embedding", "enorm"),
            ("pre_fc_norm_hidden", "hnorm"),
            ("norm", "shared_head_norm"),
        ] {
            self.norm(&format!("{MTP}{name}"), &format!("{theirs}.nextn.{stored}"));
        }
    }

    fn attention(&mut self, ours: &str, theirs: &str, config: &ModelConfig, fused: bool) {
        let shape = &config.attention;
        let queries = shape.heads * shape.head_dim * if shape.gated { 2 } else { 1 };
        let keys = shape.kv_heads * shape.head_dim;
        // Only this family's rotation works on neighbouring values in ggml.
        let turned = match config.family {
            Family::Llama | Family::Mistral => Order::Pairs {
                width: shape.head_dim,
            },
            Family::Qwen2 | Family::Qwen3 | Family::Qwen35 | Family::Gemma3 => Order::Same,
        };
        let parts = [
            ("q", 0, queries, turned),
            ("k", queries, keys, turned),
            ("v", queries + keys, keys, Order::Same),
        ];
        for (part, first, count, order) in parts {
            let name = format!("{ours}.self_attn.{part}_proj");
            if fused {
                self.rows(
                    &name,
                    &format!("{theirs}.attn_qkv"),
                    Some((first, count)),
                    order,
                );
            } else {
                self.rows(&name, &format!("{theirs}.attn_{part}"), None, order);
            }
        }
        self.matrix(
            &format!("{ours}.self_attn.o_proj"),
            &format!("{theirs}.attn_output"),
        );
        if shape.qk_norm {
            self.norm(
                &format!("{ours}.self_attn.q_norm"),
                &format!("{theirs}.attn_q_norm"),
            );
            self.norm(
                &format!("{ours}.self_attn.k_norm"),
                &format!("{theirs}.attn_k_norm"),
            );
        }
    }

    fn delta(&mut self, ours: &str, theirs: &str, config: &ModelConfig) {
        let Some(shape) = &config.delta else { return };
        let ours = format!("{ours}.linear_attn");
        let heads = |first, width| match shape.value_heads / shape.key_heads {
            1 => Order::Same,
            per_key => Order::ValueHeads {
                first,
                key_heads: shape.key_heads,
                per_key,
                width,
            },
        };
        let mixed = heads(2 * shape.key_heads * shape.key_dim, shape.value_dim);
        let (each, wide) = (heads(0, 1), heads(0, shape.value_dim));
        self.rows(
            &format!("{ours}.in_proj_qkv"),
            &format!("{theirs}.attn_qkv"),
            None,
            mixed,
        );
        self.rows(
            &format!("{ours}.in_proj_z"),
            &format!("{theirs}.attn_gate"),
            None,
            wide,
        );
        self.rows(
            &format!("{ours}.in_proj_a"),
            &format!("{theirs}.ssm_alpha"),
            None,
            each,
        );
        self.rows(
            &format!("{ours}.in_proj_b"),
            &format!("{theirs}.ssm_beta"),
            None,
            each,
        );
        let conv = self.add(
            format!("{ours}.conv1d.weight"),
            format!("{theirs}.ssm_conv1d.weight"),
        );
        conv.rows = mixed;
        let decay = self.add(format!("{ours}.A_log"), format!("{theirs}.ssm_a"));
        (decay.rows, decay.values) = (each, Values::MinusExp);
        self.add(format!("{ours}.dt_bias"), format!("{theirs}.ssm_dt.bias"))
            .rows = each;
        self.add(
            format!("{ours}.norm.weight"),
            format!("{theirs}.ssm_norm.weight"),
        );
        let out = self.add(
            format!("{ours}.out_proj.weight"),
            format!("{theirs}.ssm_out.weight"),
        );
        (out.columns, out.matrix) = (wide, true);
    }
}
