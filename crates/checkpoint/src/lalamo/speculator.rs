//! lalamo's speculators: a DFlash network and, with it or not, a Weaver in one directory.
//!
//! Weavers come in two generations: learned positions with a two-matrix GELU MLP, and rotary ones with
//! SwiGLU, whose settings have a `rope_config`.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::config::{Layer, MixerConfig, Norm, Rope, attention_shape, mlp_bias};
use super::names::place;
use super::structure::{Plain, Run, Structure};
use crate::description::{Family, Mixer, ModelConfig};
use crate::drafter::{DFlashConfig, DraftMask, DrafterKind, Network, WeaverConfig};
use crate::error::Error;
use crate::placed::Placed;
use crate::shards::Shards;

/// The setting of config.json that marks such a directory.
pub(crate) const SPECULATOR_KEY: &str = "speculator_config";

const DRAFT: &str = "speculator.draft_model";
const WEAVER: &str = "speculator.weaver";

/// More than any network has, of anything.
const MAX: usize = 1 << 20;
/// Most rows of a block and edges of a path.
const MAX_BLOCK: usize = 1024;
/// The engine's Weaver has this epsilon.
const EPS: f32 = 1e-6;

#[derive(Deserialize)]
struct Settings {
    draft_config: DraftConfig,
    weaver_config: Option<Weaver>,
}

#[derive(Deserialize)]
struct DraftConfig {
    model_dim: usize,
    hidden_dim: usize,
    block_size: usize,
    mask_token_id: u32,
    target_layer_ids: Vec<usize>,
    num_target_layers: usize,
    vocab_size: usize,
    context_norm_config: Norm,
    layer_configs: Vec<Layer>,
    output_norm_config: Norm,
    grouped_convolution_config: Option<Value>,
}

#[derive(Deserialize)]
struct Weaver {
    model_dim: usize,
    target_model_dim: usize,
    target_embedding_dim: usize,
    num_layers: usize,
    num_heads: usize,
    hidden_dim: usize,
    max_depth: usize,
    candidate_pool_size: usize,
    norm_config: Norm,
    rope_config: Option<Rope>,
}

fn settings(path: &Path, map: &Map<String, Value>) -> Result<Settings, Error> {
    let inner = map.get(SPECULATOR_KEY).cloned().unwrap_or_default();
    serde_json::from_value(inner).map_err(|error| {
        let what = format!("not a speculator of lalamo that Kozue knows: {error}");
        Error::config(path, SPECULATOR_KEY, what)
    })
}

/// The networks of a directory whose config.json, at `path`, says `map`.
pub(crate) fn networks(path: &Path, map: &Map<String, Value>) -> Result<Vec<Network>, Error> {
    let mut all = vec![Network::DFlash];
    all.extend(settings(path, map)?.weaver_config.map(|_| Network::Weaver));
    Ok(all)
}

/// One of the networks of a directory.
pub(crate) fn open(
    dir: &Path,
    path: &Path,
    map: &Map<String, Value>,
    network: Network,
) -> Result<(DrafterKind, Placed), Error> {
    let settings = settings(path, map)?;
    let wrong = |what: String| Error::config(path, SPECULATOR_KEY, what);
    let shards = Shards::open(dir, false)?;
    let (kind, structure, others) = match (network, &settings.weaver_config) {
        (Network::DFlash, _) => {
            let config = settings.draft_config.read(path).map_err(wrong)?;
            let structure = draft_structure(&config, &settings.draft_config, &shards);
            // Keys and values of all layers once more, for one product.
            let derived = format!("{DRAFT}.state_kv_projection.");
            (
                DrafterKind::DFlash(Box::new(config)),
                structure,
                [derived, format!("{WEAVER}.")],
            )
        }
        (Network::Weaver, Some(weaver)) => {
            let config = weaver.read().map_err(wrong)?;
            let structure = weaver_structure(&config);
            let draft = format!("{DRAFT}.");
            (
                DrafterKind::Weaver(config),
                structure,
                [draft.clone(), draft],
            )
        }
        (Network::Weaver, None) => {
            return Err(Error::file(dir, "holds a DFlash network without a Weaver"));
        }
    };
    let mut found = place(&shards, &structure)?;
    for info in shards.infos() {
        if others.iter().any(|start| info.name.starts_with(start)) {
            found.used.insert(info.name);
        }
    }
    Ok((kind, Placed::new(shards, found)?))
}

impl DraftConfig {
    fn read(&self, path: &Path) -> Result<DFlashConfig, String> {
        let sizes = [self.model_dim, self.hidden_dim, self.vocab_size];
        if sizes.iter().any(|size| !(1..1 << 24).contains(size))
            || !(2..=MAX_BLOCK).contains(&self.block_size)
            || !(1..256).contains(&self.target_layer_ids.len())
        {
            return Err("draft_config has an absurd size".to_owned());
        }
        if self.grouped_convolution_config.is_some() {
            return Err("draft_config has convolutions, which Kozue does not support".to_owned());
        }
        let eps = self.output_norm_config.epsilon;
        let (mut shape, mut masks) = (None, Vec::new());
        for layer in &self.layer_configs {
            let (MixerConfig::Attention(attention), Some(rope), Some(norm)) = (
                &layer.mixer_config,
                &layer.rope_config,
                &layer.pre_mixer_norm_config,
            ) else {
                return Err("a layer of the drafter is no attention with positions".to_owned());
            };
            let norms = [norm, &layer.pre_mlp_norm_config];
            let heads = [&attention.query_norm_config, &attention.key_norm_config];
            let mut norms = norms.into_iter().chain(heads.into_iter().flatten());
            if !norms.all(|norm| norm.is_plain(eps, false))
                || heads.iter().any(|norm| norm.is_none())
                || !layer.is_usual(self.hidden_dim)
                || mlp_bias(&layer.mlp_config) != Some(false)
                || !attention.is_usual()
            {
                return Err("a layer of the drafter is not of Qwen3's shape".to_owned());
            }
            let own = attention_shape(path, attention, rope).map_err(|error| error.to_string())?;
            if own.gated || own.rope.rotary_dim != own.head_dim {
                return Err("attention of the drafter is not of Qwen3's shape".to_owned());
            }
            if shape
                .get_or_insert_with(|| (own.clone(), rope.max_sequence_length))
                .0
                != own
            {
                return Err("layers of the drafter differ from each other".to_owned());
            }
            masks.push(DraftMask {
                window: attention.sliding_window_size,
                causal: attention.is_causal,
            });
        }
        let norms = [&self.context_norm_config, &self.output_norm_config];
        if !norms.iter().all(|norm| norm.is_plain(eps, false)) {
            return Err("a norm of the drafter is no RMS norm".to_owned());
        }
        let Some((attention, max_position)) = shape else {
            return Err("the drafter has no layers".to_owned());
        };
        Ok(DFlashConfig {
            shape: ModelConfig {
                family: Family::Qwen3,
                vocab_size: self.vocab_size,
                hidden_size: self.model_dim,
                intermediate_size: self.hidden_dim,
                experts: None,
                layers: vec![Mixer::Attention; masks.len()],
                attention,
                delta: None,
                norm_eps: eps,
                norm_plus_one: false,
                tied: false,
                max_position,
                mlp_bias: false,
                gelu: false,
                sandwich_norms: false,
                scaled_embedding: false,
            },
            masks,
            block: self.block_size,
            mask_token: self.mask_token_id,
            taps: self.target_layer_ids.clone(),
            target_layers: Some(self.num_target_layers),
        })
    }
}

impl Weaver {
    fn read(&self) -> Result<WeaverConfig, String> {
        let sizes = [
            self.model_dim,
            self.target_model_dim,
            self.num_layers,
            self.num_heads,
            self.hidden_dim,
            self.candidate_pool_size,
        ];
        if sizes.iter().any(|size| !(1..MAX).contains(size))
            || !(1..=MAX_BLOCK).contains(&self.max_depth)
        {
            return Err("weaver_config has an absurd size".to_owned());
        }
        if self.target_embedding_dim != self.target_model_dim {
            return Err(
                "weaver_config: target_embedding_dim must equal target_model_dim".to_owned(),
            );
        }
        if !self.model_dim.is_multiple_of(2 * self.num_heads) {
            let (heads, width) = (self.num_heads, self.model_dim);
            return Err(format!(
                "weaver_config: {heads} heads of even width do not make up {width}"
            ));
        }
        if !self.norm_config.is_plain(EPS, true) {
            return Err("weaver_config: its norms are no RMS norms with biases".to_owned());
        }
        let head = self.model_dim / self.num_heads;
        if self
            .rope_config
            .as_ref()
            .is_some_and(|rope| !rope.is_unscaled(head))
        {
            return Err("weaver_config: rope_config is not supported".to_owned());
        }
        Ok(WeaverConfig {
            hidden_size: self.target_model_dim,
            rank: self.model_dim,
            layers: self.num_layers,
            heads: self.num_heads,
            intermediate_size: self.hidden_dim,
            depth: self.max_depth,
            candidates: self.candidate_pool_size,
            rope_base: self.rope_config.as_ref().map(|rope| rope.base),
            gated: self.rope_config.is_some(),
            fused: true,
        })
    }
}

fn draft_structure(config: &DFlashConfig, draft: &DraftConfig, shards: &Shards) -> Structure {
    let mut all = Structure::default();
    let hidden = config.shape.hidden_size;
    let features = draft.target_layer_ids.len() * hidden;
    all.whole(
        format!("{DRAFT}.context_projection"),
        "fc",
        [hidden, features],
        false,
    );
    all.norm(&format!("{DRAFT}.context_norm"), "hidden_norm", hidden);
    let fused = shards
        .infos()
        .any(|info| info.name.contains(".mixer.qkvg_projection."));
    for layer in 0..config.shape.layers.len() {
        let (path, name) = (format!("{DRAFT}.layers.{layer}"), format!("layers.{layer}"));
        all.layer(&path, &name, Mixer::Attention, &config.shape, fused);
    }
    all.norm(&format!("{DRAFT}.output_norm"), "norm", hidden);
    all
}

fn weaver_structure(config: &WeaverConfig) -> Structure {
    let mut all = Structure::default();
    let (hidden, width, inner) = (config.hidden_size, config.rank, config.intermediate_size);
    let own = |name: &str| format!("{WEAVER}.{name}");
    let mut norm = |path: String, name: &str, len: usize| {
        all.norm(&path, name, len);
        all.plain.push(Plain {
            path: format!("{path}.biases"),
            name: format!("{name}.bias"),
            shape: vec![len],
        });
    };
    norm(own("embedding_norm"), "embed_norm", hidden);
    norm(own("hidden_state_norm"), "output_norm", hidden);
    norm(own("output_norm"), "out_norm", width);
    for layer in 0..config.layers {
        let (path, name) = (own(&format!("blocks.{layer}")), format!("blocks.{layer}"));
        norm(
            format!("{path}.pre_attention_norm"),
            &format!("{name}.norm_attn"),
            width,
        );
        norm(
            format!("{path}.pre_mlp_norm"),
            &format!("{name}.norm_mlp"),
            width,
        );
    }
    all.whole(
        own("embedding_projection"),
        "token_in",
        [width, hidden],
        true,
    );
    all.whole(
        own("hidden_state_projection"),
        "proposal_in",
        [width, hidden],
        true,
    );
    all.whole(
        own("query_projection"),
        "lm_head_query_in",
        [hidden, width],
        false,
    );
    for layer in 0..config.layers {
        let path = |part: &str| own(&format!("blocks.{layer}.{part}"));
        let name = |part: &str| format!("blocks.{layer}.{part}");
        all.whole(
            path("qkv_projection"),
            &name("qkv_proj"),
            [3 * width, width],
            false,
        );
        all.whole(
            path("out_projection"),
            &name("o_proj"),
            [width, width],
            false,
        );
        let down = if config.gated {
            // Hugging Face has the gate first.
            let up = name("gate_up_proj");
            let part = |first| Run {
                name: up.clone(),
                first,
                count: inner,
            };
            let runs = vec![part(inner), part(0)];
            all.linear(path("up_projection"), width, runs, true);
            "down_proj"
        } else {
            all.whole(path("up_projection"), &name("fc1"), [inner, width], true);
            "fc2"
        };
        all.whole(path("down_projection"), &name(down), [width, inner], true);
    }
    if config.rope_base.is_none() {
        all.plain.push(Plain {
            path: own("position_embeddings"),
            name: "pos_emb".to_owned(),
            shape: vec![config.depth, width],
        });
    }
    all
}
