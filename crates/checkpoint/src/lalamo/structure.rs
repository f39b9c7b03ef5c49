//! Which rows of Hugging Face's matrices lalamo's joined ones consist of, for reading and writing.

use crate::description::{AttentionConfig, DeltaConfig, Mixer, ModelConfig};

use super::Layout;

/// One of lalamo's matrices.
pub(crate) struct Joined {
    /// Its name, to which `.weights` and the like are added.
    pub path: String,
    pub layout: Layout,
    /// Inputs, or values of a row.
    pub k: usize,
    /// What lies below each other in it.
    pub runs: Vec<Run>,
    /// Name of the biases that go with the rows, if there are some.
    pub biases: Option<String>,
}

/// Rows of one of Hugging Face's matrices.
pub(crate) struct Run {
    /// The matrix, without `.weight` and `.bias`.
    pub name: String,
    pub first: usize,
    pub count: usize,
}

/// A tensor that both have.
pub(crate) struct Plain {
    pub path: String,
    pub name: String,
    /// Hugging Face's.
    pub shape: Vec<usize>,
}

/// All tensors of a model.
#[derive(Default)]
pub(crate) struct Structure {
    pub joined: Vec<Joined>,
    pub plain: Vec<Plain>,
}

impl Joined {
    /// Rows.
    pub fn n(&self) -> usize {
        self.runs.iter().map(|run| run.count).sum()
    }
}

/// Every tensor of a model; `fused` says that queries, keys, values and gates are one matrix, as from
/// 0.16 on.
pub(crate) fn structure(config: &ModelConfig, fused: bool) -> Structure {
    let mut all = Structure::default();
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let tables: &[_] = if config.tied {
        &[("embedding", "model.embed_tokens", Layout::InputOutput)]
    } else {
        &[
            ("input_embedding", "model.embed_tokens", Layout::InputOutput),
            ("output_embedding", "lm_head", Layout::OutputInput),
        ]
    };
    for &(own, name, layout) in tables {
        all.joined.push(Joined {
            path: format!("decoder.embedding.{own}"),
            layout,
            k: hidden,
            runs: vec![run(name, 0, vocab)],
            biases: None,
        });
    }
    for (index, mixer) in config.layers.iter().enumerate() {
        let (path, name) = (
            format!("decoder.transformer.layers.{index}"),
            format!("model.layers.{index}"),
        );
        all.layer(&path, &name, *mixer, config, fused);
    }
    all.norm("decoder.transformer.output_norm", "model.norm", hidden);
    all
}

fn run(name: &str, first: usize, count: usize) -> Run {
    Run {
        name: name.to_owned(),
        first,
        count,
    }
}

impl Structure {
    fn plain(&mut self, path: String, name: String, shape: &[usize]) {
        self.plain.push(Plain {
            path,
            name,
            shape: shape.to_vec(),
        });
    }

    pub fn norm(&mut self, path: &str, name: &str, len: usize) {
        self.plain(format!("{path}.scales"), format!("{name}.weight"), &[len]);
    }

    /// A linear layer.
    pub fn linear(&mut self, path: String, k: usize, runs: Vec<Run>, biased: bool) {
        self.joined.push(Joined {
            biases: biased.then(|| format!("{path}.biases")),
            path: format!("{path}.weights"),
            layout: Layout::OutputInput,
            k,
            runs,
        });
    }

    /// As [`Structure::linear`], of a whole matrix `name` with `n` outputs.
    pub fn whole(&mut self, path: String, name: &str, [n, k]: [usize; 2], biased: bool) {
        self.linear(path, k, vec![run(name, 0, n)], biased);
    }

    /// A layer of a transformer.
    pub fn layer(
        &mut self,
        path: &str,
        name: &str,
        mixer: Mixer,
        config: &ModelConfig,
        fused: bool,
    ) {
        let (inner, hidden) = (config.intermediate_size, config.hidden_size);
        let norms = [
            ("pre_mixer_norm", "input_layernorm"),
            ("pre_mlp_norm", "post_attention_layernorm"),
        ];
        for (own, norm) in norms {
            self.norm(&format!("{path}.{own}"), &format!("{name}.{norm}"), hidden);
        }
        let own = format!("{path}.mixer");
        match (mixer, &config.delta) {
            (Mixer::Attention | Mixer::Sliding, _) => self.attention(
                &own,
                &format!("{name}.self_attn"),
                &config.attention,
                hidden,
                fused,
            ),
            (Mixer::Delta, Some(delta)) => {
                self.delta(&own, &format!("{name}.linear_attn"), delta, hidden);
            }
            (Mixer::Delta, None) => {}
        }
        let own = format!("{path}.mlp");
        let name = format!("{name}.mlp");
        let runs = ["up_proj", "gate_proj"].map(|part| run(&format!("{name}.{part}"), 0, inner));
        self.linear(
            format!("{own}.up_projection"),
            hidden,
            runs.into(),
            config.mlp_bias,
        );
        self.whole(
            format!("{own}.down_projection"),
            &format!("{name}.down_proj"),
            [hidden, inner],
            config.mlp_bias,
        );
    }

    fn attention(
        &mut self,
        path: &str,
        name: &str,
        config: &AttentionConfig,
        hidden: usize,
        fused: bool,
    ) {
        let dim = config.head_dim;
        let (queries, keys) = (config.heads * dim, config.kv_heads * dim);
        let q = format!("{name}.q_proj");
        // Hugging Face has a head's queries and its gates in turn.
        let of_heads = |part: usize| {
            (0..config.heads)
                .map(|head| run(&q, (2 * head + part) * dim, dim))
                .collect::<Vec<_>>()
        };
        let mut runs = if config.gated {
            of_heads(0)
        } else {
            vec![run(&q, 0, queries)]
        };
        runs.push(run(&format!("{name}.k_proj"), 0, keys));
        runs.push(run(&format!("{name}.v_proj"), 0, keys));
        let own = if fused {
            "qkvg_projection"
        } else {
            "qkv_projection"
        };
        if config.gated {
            let gates = of_heads(1);
            if fused {
                runs.extend(gates);
            } else {
                let path = format!("{path}.gate_projection");
                self.linear(path, hidden, gates, config.qkv_bias);
            }
        }
        self.linear(format!("{path}.{own}"), hidden, runs, config.qkv_bias);
        self.whole(
            format!("{path}.out_projection"),
            &format!("{name}.o_proj"),
            [hidden, queries],
            config.output_bias,
        );
        if config.qk_norm {
            for (own, norm) in [("query_norm", "q_norm"), ("key_norm", "k_norm")] {
                self.norm(&format!("{path}.{own}"), &format!("{name}.{norm}"), dim);
            }
        }
    }

    fn delta(&mut self, path: &str, name: &str, config: &DeltaConfig, hidden: usize) {
        let (mixed, values, heads) = (
            config.conv_channels(),
            config.value_width(),
            config.value_heads,
        );
        let runs = [
            ("in_proj_qkv", mixed),
            ("in_proj_z", values),
            ("in_proj_b", heads),
            ("in_proj_a", heads),
        ];
        let runs = runs.map(|(part, count)| run(&format!("{name}.{part}"), 0, count));
        self.linear(format!("{path}.in_proj"), hidden, runs.into(), false);
        self.whole(
            format!("{path}.out_proj"),
            &format!("{name}.out_proj"),
            [hidden, values],
            false,
        );
        let vectors = [
            (
                "conv.weights",
                "conv1d.weight",
                vec![mixed, 1, config.conv_kernel],
            ),
            ("a_log", "A_log", vec![heads]),
            ("dt_bias", "dt_bias", vec![heads]),
            ("norm.scales", "norm.weight", vec![config.value_dim]),
        ];
        for (own, part, shape) in vectors {
            self.plain(format!("{path}.{own}"), format!("{name}.{part}"), &shape);
        }
    }
}
