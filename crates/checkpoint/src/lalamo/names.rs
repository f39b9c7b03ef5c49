//! Where Hugging Face's tensors lie in lalamo's: which rows of which of its joined matrices.

use super::config::{MixerConfig, Norm, Settings};
use super::{Layout, matrix};
use crate::description::{AttentionConfig, DeltaConfig, ModelConfig};
use crate::error::Error;
use crate::shards::Shards;
use crate::stored::{Found, Place, VectorPlace, wrong};

/// Rows of a joined matrix: the matrix, its first row, their number.
type Part = (usize, usize, usize);

/// Where everything lies.
pub(super) fn find(
    shards: &Shards,
    settings: &Settings,
    config: &ModelConfig,
) -> Result<Found, Error> {
    let mut names = Names {
        shards,
        found: Found::new("lalamo"),
        plus_one: if config.norm_plus_one { 1.0 } else { 0.0 },
    };
    let hidden = config.hidden_size;
    if config.tied {
        names.embedding("embedding", "model.embed_tokens.weight")?;
    } else {
        names.embedding("input_embedding", "model.embed_tokens.weight")?;
        let head = names.stored(
            "decoder.embedding.output_embedding",
            config.vocab_size,
            hidden,
        )?;
        names.place("lm_head.weight", hidden, vec![(head, 0, config.vocab_size)]);
    }
    let transformer = &settings.decoder_config.transformer_config;
    for (index, layer) in transformer.layer_configs.iter().enumerate() {
        let from = format!("decoder.transformer.layers.{index}");
        let to = format!("model.layers.{index}");
        if let Some(norm) = &layer.pre_mixer_norm_config {
            names.norm(
                &format!("{from}.pre_mixer_norm"),
                &format!("{to}.input_layernorm"),
                norm,
                hidden,
            );
        }
        let after = format!("{to}.post_attention_layernorm");
        names.norm(
            &format!("{from}.pre_mlp_norm"),
            &after,
            &layer.pre_mlp_norm_config,
            hidden,
        );
        match (&layer.mixer_config, &config.delta) {
            (MixerConfig::Attention(attention), _) => {
                let (from, to) = (format!("{from}.mixer"), format!("{to}.self_attn"));
                names.attention(&from, &to, &config.attention, hidden, attention.fused())?;
                let norms = [
                    ("query_norm", "q_norm", &attention.query_norm_config),
                    ("key_norm", "k_norm", &attention.key_norm_config),
                ];
                for (own, name, norm) in norms {
                    if let Some(norm) = norm {
                        let (from, to) = (format!("{from}.{own}"), format!("{to}.{name}"));
                        names.norm(&from, &to, norm, config.attention.head_dim);
                    }
                }
            }
            (MixerConfig::Delta(_), Some(delta)) => {
                names.delta(
                    &format!("{from}.mixer"),
                    &format!("{to}.linear_attn"),
                    delta,
                    hidden,
                )?;
            }
            (MixerConfig::Delta(_), None) => {}
        }
        names.mlp(&format!("{from}.mlp"), &format!("{to}.mlp"), config)?;
    }
    let norm = &transformer.output_norm_config;
    names.norm(
        "decoder.transformer.output_norm",
        "model.norm",
        norm,
        hidden,
    );
    Ok(names.found)
}

struct Names<'a> {
    shards: &'a Shards,
    found: Found,
    plus_one: f32,
}

impl Names<'_> {
    /// A stored matrix of `n` outputs and `k` inputs.
    fn stored(&mut self, path: &str, n: usize, k: usize) -> Result<usize, Error> {
        let (stored, shape) = matrix(self.shards, &mut self.found, path, Layout::OutputInput)?;
        if shape != [n, k] {
            return Err(Error::shape(self.shards.dir(), path, &shape, &[n, k]));
        }
        self.found.stored.push(stored);
        Ok(self.found.stored.len() - 1)
    }

    fn place(&mut self, name: &str, k: usize, parts: Vec<Part>) {
        let n = parts.iter().map(|part| part.2).sum();
        self.found
            .matrices
            .insert(name.to_owned(), Place { n, k, parts });
    }

    fn embedding(&mut self, from: &str, to: &str) -> Result<(), Error> {
        let path = format!("decoder.embedding.{from}");
        let (stored, shape) = matrix(self.shards, &mut self.found, &path, Layout::InputOutput)?;
        self.found.add(to.to_owned(), stored, shape);
        Ok(())
    }

    fn vector(
        &mut self,
        name: String,
        shape: Vec<usize>,
        parts: Vec<(String, usize, usize)>,
        add: f32,
    ) {
        for (stored, ..) in &parts {
            self.found.uses([stored.as_str()]);
        }
        self.found
            .vectors
            .insert(name, VectorPlace { shape, parts, add });
    }

    fn norm(&mut self, from: &str, to: &str, norm: &Norm, len: usize) {
        let add = norm.scale_offset.unwrap_or(0.0) - self.plus_one;
        let parts = vec![(format!("{from}.scales"), 0, len)];
        self.vector(format!("{to}.weight"), vec![len], parts, add);
    }

    /// Rows of a matrix, and of its biases if it has some.
    fn rows(
        &mut self,
        from: &str,
        stored: usize,
        to: &str,
        k: usize,
        bias: bool,
        runs: &[(usize, usize)],
    ) {
        let parts = runs
            .iter()
            .map(|&(first, count)| (stored, first, count))
            .collect();
        self.place(&format!("{to}.weight"), k, parts);
        if bias {
            let name = format!("{from}.biases");
            let parts: Vec<_> = runs
                .iter()
                .map(|&(first, count)| (name.clone(), first, count))
                .collect();
            let len = runs.iter().map(|run| run.1).sum();
            self.vector(format!("{to}.bias"), vec![len], parts, 0.0);
        }
    }

    fn attention(
        &mut self,
        from: &str,
        to: &str,
        config: &AttentionConfig,
        hidden: usize,
        fused: bool,
    ) -> Result<(), Error> {
        let queries = config.heads * config.head_dim;
        let keys = config.kv_heads * config.head_dim;
        let gates = if config.gated { queries } else { 0 };
        let joined = queries + 2 * keys;
        let (path, rows) = if fused {
            (format!("{from}.qkvg_projection"), joined + gates)
        } else {
            (format!("{from}.qkv_projection"), joined)
        };
        let qkv = self.stored(&format!("{path}.weights"), rows, hidden)?;
        let bias = config.qkv_bias;
        if config.gated {
            if bias {
                let what = "biases of gated attention are not supported";
                return Err(wrong(self.shards, &format!("{path}.biases"), what));
            }
            let (gate, first) = if fused {
                (qkv, joined)
            } else {
                let path = format!("{from}.gate_projection.weights");
                (self.stored(&path, queries, hidden)?, 0)
            };
            // Hugging Face has a head's queries and its gates in turn.
            let head = |head: usize| {
                let at = head * config.head_dim;
                [
                    (qkv, at, config.head_dim),
                    (gate, first + at, config.head_dim),
                ]
            };
            let parts = (0..config.heads).flat_map(head).collect();
            self.place(&format!("{to}.q_proj.weight"), hidden, parts);
        } else {
            self.rows(
                &path,
                qkv,
                &format!("{to}.q_proj"),
                hidden,
                bias,
                &[(0, queries)],
            );
        }
        self.rows(
            &path,
            qkv,
            &format!("{to}.k_proj"),
            hidden,
            bias,
            &[(queries, keys)],
        );
        self.rows(
            &path,
            qkv,
            &format!("{to}.v_proj"),
            hidden,
            bias,
            &[(queries + keys, keys)],
        );
        let path = format!("{from}.out_projection");
        let out = self.stored(&format!("{path}.weights"), hidden, queries)?;
        self.rows(
            &path,
            out,
            &format!("{to}.o_proj"),
            queries,
            config.output_bias,
            &[(0, hidden)],
        );
        Ok(())
    }

    fn delta(
        &mut self,
        from: &str,
        to: &str,
        config: &DeltaConfig,
        hidden: usize,
    ) -> Result<(), Error> {
        let (mixed, values, heads) = (
            config.conv_channels(),
            config.value_width(),
            config.value_heads,
        );
        let path = format!("{from}.in_proj");
        let joined = self.stored(
            &format!("{path}.weights"),
            mixed + values + 2 * heads,
            hidden,
        )?;
        let runs = [
            ("in_proj_qkv", 0, mixed),
            ("in_proj_z", mixed, values),
            ("in_proj_b", mixed + values, heads),
            ("in_proj_a", mixed + values + heads, heads),
        ];
        for (name, first, count) in runs {
            self.rows(
                &path,
                joined,
                &format!("{to}.{name}"),
                hidden,
                false,
                &[(first, count)],
            );
        }
        let path = format!("{from}.out_proj");
        let out = self.stored(&format!("{path}.weights"), hidden, values)?;
        self.rows(
            &path,
            out,
            &format!("{to}.out_proj"),
            values,
            false,
            &[(0, hidden)],
        );
        let taps = config.conv_kernel;
        let vectors = [
            ("conv.weights", "conv1d.weight", vec![mixed, 1, taps]),
            ("a_log", "A_log", vec![heads]),
            ("dt_bias", "dt_bias", vec![heads]),
            ("norm.scales", "norm.weight", vec![config.value_dim]),
        ];
        for (own, name, shape) in vectors {
            let parts = vec![(format!("{from}.{own}"), 0, shape.iter().product())];
            self.vector(format!("{to}.{name}"), shape, parts, 0.0);
        }
        Ok(())
    }

    fn mlp(&mut self, from: &str, to: &str, config: &ModelConfig) -> Result<(), Error> {
        let (inner, hidden, bias) = (
            config.intermediate_size,
            config.hidden_size,
            config.mlp_bias,
        );
        let path = format!("{from}.up_projection");
        let joined = self.stored(&format!("{path}.weights"), 2 * inner, hidden)?;
        self.rows(
            &path,
            joined,
            &format!("{to}.up_proj"),
            hidden,
            bias,
            &[(0, inner)],
        );
        self.rows(
            &path,
            joined,
            &format!("{to}.gate_proj"),
            hidden,
            bias,
            &[(inner, inner)],
        );
        let path = format!("{from}.down_projection");
        let down = self.stored(&format!("{path}.weights"), hidden, inner)?;
        self.rows(
            &path,
            down,
            &format!("{to}.down_proj"),
            inner,
            bias,
            &[(0, hidden)],
        );
        Ok(())
    }
}
