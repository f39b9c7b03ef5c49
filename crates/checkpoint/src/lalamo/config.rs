//! The settings of lalamo's config.json, as far as the known families use them.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::description::{
    AttentionConfig, DeltaConfig, Family, Mixer, ModelConfig, RopeConfig, RopeScaling,
};
use crate::error::Error;

/// More than any model has, of anything.
const MAX: usize = 1 << 24;

#[derive(Deserialize)]
pub(super) struct Settings {
    pub token_codec_config: Codec,
    pub generation_config: Generation,
    pub decoder_config: Decoder,
}

#[derive(Deserialize)]
pub(super) struct Codec {
    pub prompt_template: Option<String>,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct Generation {
    #[serde(default)]
    pub stop_token_ids: Vec<u32>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

#[derive(Deserialize)]
pub(super) struct Decoder {
    embedding_config: Embedding,
    pub transformer_config: Transformer,
    vocab_size: usize,
    ple_model_config: Option<Value>,
    embedding_norm_config: Option<Value>,
}

#[derive(Deserialize)]
struct Embedding {
    #[serde(rename = "type")]
    kind: String,
    input_scale: Option<f64>,
    logit_soft_cap: Option<f64>,
    logit_scale: Option<f64>,
}

#[derive(Deserialize)]
pub(super) struct Transformer {
    pub layer_configs: Vec<Layer>,
    pub output_norm_config: Norm,
    model_dim: usize,
    hidden_dim: usize,
}

#[derive(Deserialize)]
pub(super) struct Layer {
    pub pre_mixer_norm_config: Option<Norm>,
    pub mixer_config: MixerConfig,
    post_mixer_norm_config: Option<Value>,
    pub pre_mlp_norm_config: Norm,
    pub mlp_config: Mlp,
    post_mlp_norm_config: Option<Value>,
    hidden_dim: Option<usize>,
    ple_config: Option<Value>,
    #[serde(default)]
    has_post_layer_scalar: bool,
    kv_source_layer_index: Option<usize>,
    pub rope_config: Option<Rope>,
}

impl Layer {
    /// Whether it has the parts of Llama's layers and nothing else; its MLP has the width `hidden`.
    pub fn is_usual(&self, hidden: usize) -> bool {
        self.post_mixer_norm_config.is_none()
            && self.post_mlp_norm_config.is_none()
            && self.ple_config.is_none()
            && !self.has_post_layer_scalar
            && self.kv_source_layer_index.is_none()
            && self.hidden_dim.is_none_or(|width| width == hidden)
    }
}

#[derive(Clone, Deserialize)]
pub(super) struct Norm {
    pub epsilon: f32,
    pub scale_offset: Option<f32>,
    subtract_mean: bool,
    #[serde(default = "yes")]
    has_scale: bool,
    #[serde(default)]
    has_biases: bool,
}

impl Norm {
    /// Whether it is an RMS norm of this epsilon, with biases or not.
    pub fn is_rms(&self, epsilon: f32, biased: bool) -> bool {
        self.epsilon == epsilon
            && !self.subtract_mean
            && self.has_scale
            && self.has_biases == biased
    }

    /// As [`Norm::is_rms`], of scales that are stored as they are.
    pub fn is_plain(&self, epsilon: f32, biased: bool) -> bool {
        self.is_rms(epsilon, biased) && self.scale_offset.is_none_or(|offset| offset == 0.0)
    }
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(tag = "type")]
pub(super) enum MixerConfig {
    #[serde(rename = "AttentionConfig")]
    Attention(Attention),
    #[serde(rename = "DeltaNetConfig")]
    Delta(Delta),
}

#[derive(Deserialize)]
pub(super) struct Attention {
    /// There from 0.16 on.
    qkvg_projection_config: Option<Value>,
    pub query_norm_config: Option<Norm>,
    pub key_norm_config: Option<Norm>,
    num_heads: usize,
    num_groups: usize,
    head_dim: usize,
    pub is_causal: bool,
    scale: Option<f64>,
    pub sliding_window_size: Option<usize>,
    logit_soft_cap: Option<f64>,
    has_sinks: bool,
    #[serde(alias = "has_qkvg_biases")]
    has_qkv_biases: bool,
    has_out_biases: bool,
    #[serde(default)]
    has_gate: bool,
    gate_projection_config: Option<Value>,
    #[serde(default)]
    normalize_values: bool,
    #[serde(default)]
    is_kv_sharing: bool,
}

impl Attention {
    /// Whether queries, keys, values and gates are one matrix.
    pub fn fused(&self) -> bool {
        self.qkvg_projection_config.is_some()
    }

    /// Whether it scales, caps and normalises as Llama's and Qwen's does.
    pub fn is_usual(&self) -> bool {
        let scale = (self.head_dim as f64).powf(-0.5);
        self.scale
            .is_none_or(|own| (own / scale - 1.0).abs() <= 1e-6)
            && self.logit_soft_cap.is_none()
            && !self.has_sinks
            && !self.normalize_values
            && !self.is_kv_sharing
            && self.query_norm_config.is_some() == self.key_norm_config.is_some()
    }

    fn gated(&self) -> bool {
        self.has_gate || self.gate_projection_config.is_some()
    }
}

#[derive(Deserialize)]
pub(super) struct Delta {
    conv_config: Convolution,
    pub norm_config: Norm,
    num_heads: usize,
    num_groups: usize,
    head_dim: usize,
    value_head_dim: usize,
    kernel_size: usize,
}

#[derive(Deserialize)]
struct Convolution {
    has_biases: bool,
}

#[derive(Deserialize)]
pub(super) struct Mlp {
    #[serde(rename = "type")]
    kind: String,
    activation: Option<Value>,
    has_up_biases: Option<bool>,
    has_down_biases: Option<bool>,
    gate_clipping: Option<Value>,
    up_clipping: Option<Value>,
}

#[derive(Clone, PartialEq, Deserialize)]
pub(super) struct Rope {
    #[serde(rename = "type")]
    kind: String,
    pub base: f64,
    pub max_sequence_length: usize,
    head_dim: usize,
    scaling_factor: Option<f64>,
    original_context_length: Option<usize>,
    low_frequency_factor: Option<f64>,
    high_frequency_factor: Option<f64>,
}

impl Rope {
    /// Whether all of a head is rotated by plain frequencies.
    pub fn is_unscaled(&self, head_dim: usize) -> bool {
        self.kind == "UnscaledRoPEConfig"
            && self.head_dim == head_dim
            && self.base > 0.0
            && self.base.is_finite()
    }
}

impl Settings {
    pub fn read(path: &Path, map: &Map<String, Value>) -> Result<Settings, Error> {
        serde_json::from_value(Value::Object(map.clone())).map_err(|error| {
            Error::file(
                path,
                format!("not a config.json of lalamo that Kozue knows: {error}"),
            )
        })
    }

    /// The shape that the settings describe.
    pub fn model(&self, path: &Path) -> Result<ModelConfig, Error> {
        let refuse = |what: &str| {
            let what = format!("has {what}, which Kozue does not support");
            Err(Error::config(path, "decoder_config", what))
        };
        let decoder = &self.decoder_config;
        let transformer = &decoder.transformer_config;
        let embedding = &decoder.embedding_config;
        let tied = match embedding.kind.as_str() {
            "TiedEmbeddingConfig" => true,
            "UntiedEmbeddingConfig" => false,
            other => return refuse(&format!("an embedding of type {other:?}")),
        };
        let factors = [
            embedding.input_scale,
            embedding.logit_soft_cap,
            embedding.logit_scale,
        ];
        if factors.iter().any(Option::is_some)
            || decoder.ple_model_config.is_some()
            || decoder.embedding_norm_config.is_some()
        {
            return refuse("an embedding with scales, caps or norms of its own");
        }
        let eps = transformer.output_norm_config.epsilon;
        let (mut first, mut delta, mut rope, mut biased) = (None, None, None, None);
        let mut layers = Vec::new();
        for layer in &transformer.layer_configs {
            let Some(norm) = &layer.pre_mixer_norm_config else {
                return refuse("a layer without a norm before its mixer");
            };
            let mut norms = vec![
                norm,
                &layer.pre_mlp_norm_config,
                &transformer.output_norm_config,
            ];
            if !layer.is_usual(transformer.hidden_dim) {
                return refuse("a layer of another shape than Llama's or Qwen's");
            }
            let bias = mlp_bias(&layer.mlp_config);
            let Some(bias) = bias.filter(|bias| biased.is_none_or(|before| before == *bias)) else {
                return refuse("an MLP that is not SwiGLU throughout");
            };
            biased = Some(bias);
            match &layer.mixer_config {
                MixerConfig::Attention(attention) => {
                    norms.extend(&attention.query_norm_config);
                    norms.extend(&attention.key_norm_config);
                    let Some(turns) = &layer.rope_config else {
                        return refuse("attention without rotary positions");
                    };
                    if !attention.is_usual()
                        || !attention.is_causal
                        || attention.sliding_window_size.is_some()
                    {
                        return refuse("attention with windows, caps, sinks or scales of its own");
                    }
                    let shape = attention_shape(path, attention, turns)?;
                    if first.get_or_insert_with(|| shape.clone()) != &shape {
                        return refuse("attention layers that differ from each other");
                    }
                    rope = Some(turns);
                    layers.push(Mixer::Attention);
                }
                MixerConfig::Delta(config) => {
                    norms.push(&config.norm_config);
                    let shape = DeltaConfig {
                        key_heads: config.num_groups,
                        value_heads: config.num_heads,
                        key_dim: config.head_dim,
                        value_dim: config.value_head_dim,
                        conv_kernel: config.kernel_size,
                    };
                    let sizes = [
                        shape.key_heads,
                        shape.value_heads,
                        shape.key_dim,
                        shape.value_dim,
                    ];
                    if config.conv_config.has_biases
                        || config
                            .norm_config
                            .scale_offset
                            .is_some_and(|offset| offset != 0.0)
                        || !sizes
                            .iter()
                            .chain([&shape.conv_kernel])
                            .all(|size| (1..1 << 14).contains(size))
                        || !shape.value_heads.is_multiple_of(shape.key_heads)
                        || delta.get_or_insert_with(|| shape.clone()) != &shape
                    {
                        return refuse("a DeltaNet layer of an unknown shape");
                    }
                    layers.push(Mixer::Delta);
                }
            }
            if !norms.iter().all(|norm| norm.is_rms(eps, false)) {
                return refuse("norms that are not RMS norms of one epsilon");
            }
        }
        let (Some(attention), Some(rope)) = (first, rope) else {
            return refuse("no attention layer");
        };
        let sizes = [
            decoder.vocab_size,
            transformer.model_dim,
            transformer.hidden_dim,
        ];
        if !(sizes.iter().all(|size| (1..MAX).contains(size)) && eps > 0.0 && eps.is_finite()) {
            return refuse("an absurd size");
        }
        let family = match (delta.is_some() || attention.gated, &attention) {
            (true, _) => Family::Qwen35,
            (false, attention) if attention.qk_norm => Family::Qwen3,
            (false, attention) if attention.qkv_bias && !attention.output_bias => Family::Qwen2,
            _ => Family::Llama,
        };
        if family == Family::Qwen35 && !(attention.gated && attention.qk_norm) {
            return refuse("DeltaNet layers beside attention without gates or norms");
        }
        Ok(ModelConfig {
            family,
            vocab_size: decoder.vocab_size,
            hidden_size: transformer.model_dim,
            intermediate_size: transformer.hidden_dim,
            experts: None,
            layers,
            attention,
            delta,
            norm_eps: eps,
            norm_plus_one: family == Family::Qwen35,
            tied,
            max_position: rope.max_sequence_length,
            mlp_bias: biased.unwrap_or(false),
            gelu: false,
            sandwich_norms: false,
            scaled_embedding: false,
        })
    }
}

/// Whether a SwiGLU has biases; `None` for any other MLP.
pub(super) fn mlp_bias(mlp: &Mlp) -> Option<bool> {
    let silu = match &mlp.activation {
        Some(Value::Object(activation)) => {
            activation.get("type").and_then(Value::as_str) == Some("SiLU")
                && activation
                    .get("alpha")
                    .is_none_or(|alpha| alpha.as_f64() == Some(1.0))
        }
        _ => false,
    };
    let (up, down) = (mlp.has_up_biases?, mlp.has_down_biases?);
    let unclipped = mlp.gate_clipping.is_none() && mlp.up_clipping.is_none();
    (mlp.kind == "DenseMLPConfig" && silu && unclipped && up == down).then_some(up)
}

pub(super) fn attention_shape(
    path: &Path,
    attention: &Attention,
    rope: &Rope,
) -> Result<AttentionConfig, Error> {
    let wrong = |what: String| Err(Error::config(path, "decoder_config", what));
    let (heads, kv_heads, head_dim) = (
        attention.num_heads,
        attention.num_groups,
        attention.head_dim,
    );
    let usual = |size: usize| (1..1 << 14).contains(&size);
    if !usual(heads) || !usual(kv_heads) || !usual(head_dim) || !heads.is_multiple_of(kv_heads) {
        return wrong(format!(
            "{heads} heads and {kv_heads} groups of {head_dim} make no attention"
        ));
    }
    if rope.head_dim == 0
        || rope.head_dim > head_dim
        || !rope.head_dim.is_multiple_of(2)
        || !(rope.base > 0.0 && rope.base.is_finite())
        || rope.max_sequence_length == 0
    {
        return wrong(format!(
            "rope_config: {} of {head_dim} values cannot be rotated",
            rope.head_dim
        ));
    }
    let scaling = match (rope.kind.as_str(), rope.scaling_factor) {
        ("UnscaledRoPEConfig", _) => RopeScaling::None,
        ("LinearScalingRoPEConfig", Some(factor)) if factor > 0.0 => RopeScaling::Linear { factor },
        ("LlamaRoPEConfig", Some(factor)) if factor > 0.0 => {
            match (
                rope.low_frequency_factor,
                rope.high_frequency_factor,
                rope.original_context_length,
            ) {
                (Some(low), Some(high), Some(original)) if high > low => RopeScaling::Llama3 {
                    factor,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_max_position: original,
                },
                _ => return wrong("rope_config: its frequency factors are missing".to_owned()),
            }
        }
        (other, _) => {
            return wrong(format!(
                "rope_config: {other:?} is not supported, or lacks its factor"
            ));
        }
    };
    Ok(AttentionConfig {
        heads,
        kv_heads,
        head_dim,
        query_scalar: head_dim as f64,
        qkv_bias: attention.has_qkv_biases,
        output_bias: attention.has_out_biases,
        qk_norm: attention.query_norm_config.is_some(),
        gated: attention.gated(),
        rope: RopeConfig {
            theta: rope.base,
            rotary_dim: rope.head_dim,
            scaling,
        },
        sliding: None,
    })
}
