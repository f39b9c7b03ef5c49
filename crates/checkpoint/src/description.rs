//! One description of a model, whatever format it came from.
//!
//! Loaders fill it in; the model crate reads nothing else about an architecture. Names and
//! meanings follow Hugging Face's config.json unless said otherwise.

use kozue_kernels::{KvCache, KvType};

use crate::layout::is_expert;

/// Which published architecture the weights belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Qwen3.5 and Qwen3.6, dense or with experts: Gated DeltaNet and gated attention, mixed.
    Qwen35,
    /// Qwen3, dense or with experts: attention with query and key norms.
    Qwen3,
    /// Qwen2 and Qwen2.5 dense: attention with query, key and value biases.
    Qwen2,
    /// Llama, and everything saved in its shape (SmolLM2).
    Llama,
    /// Mistral 7B and those of its shape: Llama whose layers may see a window only.
    Mistral,
    /// Gemma 3, its text side: norms before and after each part of a layer, most layers with a window.
    Gemma3,
}

/// What mixes tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    /// Softmax attention over the KV cache (`self_attn`).
    Attention,
    /// The same over the newest positions only ([`SlidingConfig`]).
    Sliding,
    /// Gated DeltaNet, a linear recurrence with a matrix state (`linear_attn`).
    Delta,
}

/// Shapes of the attention layers.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Scores are divided by the square root of this; the head's width in most families.
    pub query_scalar: f64,
    /// Whether q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Whether queries and keys are RMS-normalised per head before rotation.
    pub qk_norm: bool,
    /// Whether `q_proj` also makes a gate per head ([query | gate]), applied as a sigmoid to
    /// the attention output before the output projection.
    pub gated: bool,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// What is other in the layers that see a window only, where there are any.
    pub sliding: Option<SlidingConfig>,
}

/// Attention layers that see the newest positions only.
#[derive(Clone, Debug, PartialEq)]
pub struct SlidingConfig {
    /// How many positions a row sees, its own the last of them.
    pub window: usize,
    /// Rotary embedding of these layers.
    pub rope: RopeConfig,
}

/// Rotary position embedding, rotate-half form on the first `rotary_dim` values of a head.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// How many values of a head are rotated; even, at most the head's width.
    pub rotary_dim: usize,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Published ways of stretching rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as they are.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Llama 3's interpolation by wavelength.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are divided in full.
        low_freq_factor: f64,
        /// Wavelengths below `original / high` are left alone.
        high_freq_factor: f64,
        /// Context that the model was first trained on.
        original_max_position: usize,
    },
    /// One divisor per frequency (`rotary_dim / 2` of them), as GGUF's `rope_freqs` stores them.
    Factors(
        /// Divisors, lowest dimension first.
        Vec<f32>,
    ),
}

impl RopeConfig {
    /// Radians per position of every rotated pair, `rotary_dim / 2` of them: theta^(-2i / dim)
    /// (Su et al., arXiv 2104.09864), stretched as the configuration says.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        let plain = (0..self.rotary_dim / 2)
            .map(|i| self.theta.powf(-2.0 * i as f64 / self.rotary_dim as f64));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
            RopeScaling::Factors(factors) => plain
                .zip(factors)
                .map(|(f, &factor)| f / f64::from(factor))
                .collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => plain
                .map(|f| {
                    // How many turns the pair makes over the original context.
                    let turns = *original_max_position as f64 * f / std::f64::consts::TAU;
                    let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = kept.clamp(0.0, 1.0);
                    kept * f + (1.0 - kept) * f / factor
                })
                .collect(),
        }
    }
}

/// Shapes of the Gated DeltaNet layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaConfig {
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads; a multiple of `key_heads`. Value head h reads key head
    /// h / (value_heads / key_heads).
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

impl DeltaConfig {
    /// Width of all query heads together, and of all key heads.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all value heads together.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the causal convolution: queries, keys and values.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }
}

/// Shapes of a mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// Experts that a layer chooses among.
    pub count: usize,
    /// How many of them a token takes.
    pub chosen: usize,
    /// Whether the weights of the chosen ones are made to add up to 1.
    pub normalised: bool,
    /// Width inside the expert that every token takes besides, where there is one.
    pub shared: Option<usize>,
    /// Layers that have an MLP of their own instead, where there are any.
    pub dense: Option<DenseLayers>,
}

/// Layers without experts among others that have some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseLayers {
    /// Their indices, in order.
    pub layers: Vec<usize>,
    /// Width inside their MLPs.
    pub intermediate_size: usize,
}

/// The shape of a decoder-only language model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub family: Family,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the gated MLP, of each expert where there are experts.
    pub intermediate_size: usize,
    /// Mixture of experts in place of the MLP of layers.
    pub experts: Option<ExpertsConfig>,
    /// The mixer of every layer, first layer first.
    pub layers: Vec<Mixer>,
    /// Attention shapes.
    pub attention: AttentionConfig,
    /// Gated DeltaNet shapes, where a layer uses it.
    pub delta: Option<DeltaConfig>,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// Whether norms multiply by (1 + weight); the norm inside Gated DeltaNet never does.
    pub norm_plus_one: bool,
    /// Whether the output head is the embedding table.
    pub tied: bool,
    /// Longest context that the model was made for, in tokens.
    pub max_position: usize,
    /// Whether MLP projections have biases.
    pub mlp_bias: bool,
    /// Whether the MLP's gate goes through GELU (tanh form) in place of SiLU.
    pub gelu: bool,
    /// Whether what a mixer or MLP makes is normed before it is added (`post_attention_layernorm`,
    /// `post_feedforward_layernorm`); the norm before the MLP is then `pre_feedforward_layernorm`.
    pub sandwich_norms: bool,
    /// Whether embeddings are multiplied by the square root of the hidden size.
    pub scaled_embedding: bool,
}

impl ModelConfig {
    /// How many layers mix tokens this way.
    pub fn count(&self, mixer: Mixer) -> usize {
        self.layers.iter().filter(|layer| **layer == mixer).count()
    }

    /// The mixture of experts of a layer, or the width inside its MLP.
    pub fn feed_forward(&self, layer: usize) -> Result<&ExpertsConfig, usize> {
        let Some(experts) = &self.experts else {
            return Err(self.intermediate_size);
        };
        match &experts.dense {
            Some(dense) if dense.layers.contains(&layer) => Err(dense.intermediate_size),
            _ => Ok(experts),
        }
    }

    /// What one token's pass reads of the tensor `name`, of which there is `amount`: all of it, of an
    /// expert the share of the experts that a token takes.
    pub fn read_by_a_token(&self, name: &str, amount: u64) -> u64 {
        match &self.experts {
            Some(experts) if is_expert(name) => {
                amount * experts.chosen as u64 / experts.count as u64
            }
            _ => amount,
        }
    }

    /// Bytes that a sequence of `tokens` holds between passes: keys and values, recurrent states,
    /// windows of convolutions.
    pub fn sequence_bytes(&self, kv: KvType, tokens: usize) -> u64 {
        let attention = &self.attention;
        let cache = |window| {
            let (heads, width) = (attention.kv_heads, attention.head_dim);
            KvCache::bytes_of(heads, width, kv, tokens, window)
        };
        let all = cache(None).saturating_mul(self.count(Mixer::Attention) as u64);
        let window = attention.sliding.as_ref().map(|sliding| sliding.window);
        let within = cache(window).saturating_mul(self.count(Mixer::Sliding) as u64);
        let state = self.delta.as_ref().map_or(0, |delta| {
            let matrix = delta.value_heads * delta.key_dim * delta.value_dim;
            let window = delta.conv_channels() * delta.conv_kernel.saturating_sub(1);
            4 * (matrix + window)
        });
        let states = (self.count(Mixer::Delta) * state) as u64;
        all.saturating_add(within).saturating_add(states)
    }
}

/// Where the text side of a model is found.
#[derive(Clone, Debug)]
pub enum TokenizerSource {
    /// The text of a Hugging Face tokenizer.json.
    Json(String),
    /// Vocabulary and merges out of a GGUF file, already as tokenizer.json text.
    Gguf(String),
}

/// What generation_config.json or GGUF metadata say about sampling and stopping.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Token ids that end an answer.
    pub eos: Vec<u32>,
    /// Token put before raw text, where the model wants one.
    pub bos: Option<u32>,
    /// Temperature, if stated. `do_sample: false` reads as 0.
    pub temperature: Option<f32>,
    /// Nucleus mass, if stated.
    pub top_p: Option<f32>,
    /// Number of candidates, if stated.
    pub top_k: Option<u32>,
    /// Smallest share of the best candidate's probability, if stated.
    pub min_p: Option<f32>,
    /// Penalty on tokens seen before, if stated.
    pub repetition_penalty: Option<f32>,
}

/// All that is known of a model besides its tensors.
#[derive(Clone, Debug)]
pub struct Description {
    /// Name to show: the directory's or file's, or GGUF's `general.name`.
    pub name: String,
    /// Shape.
    pub config: ModelConfig,
    /// Tokenizer.
    pub tokenizer: TokenizerSource,
    /// Jinja chat template, if there is one.
    pub chat_template: Option<String>,
    /// Text of the tokens that the template may name (`bos_token`, `eos_token`).
    pub bos_token: Option<String>,
    /// See `bos_token`.
    pub eos_token: Option<String>,
    /// Sampling and stopping defaults.
    pub generation: GenerationDefaults,
}
