//! Directories in lalamo's form, written here by the layout that lalamo 0.15 and 0.17 have: joined
//! matrices, specs in the metadata, rotations of inputs and outputs.
#![allow(missing_docs)]

mod support;

use std::fs;

use kozue_checkpoint::Checkpoint;
use kozue_kernels::Matrix;
use serde_json::{Map, Value, json};
use support::{Dir, Model, Tensor, safetensors_with, value};

/// A directory in the making.
struct Lalamo {
    config: Value,
    tensors: Vec<Tensor>,
    metadata: Map<String, Value>,
}

fn norm(offset: Option<f32>) -> Value {
    json!({"epsilon": 1e-6, "scale_offset": offset, "upcast_mode": "only_normalization",
           "subtract_mean": false, "has_scale": true, "has_biases": false})
}

/// Names and rows of Hugging Face's matrices that make one of lalamo's.
type Rows = Vec<(String, std::ops::Range<usize>)>;

impl Lalamo {
    /// The model of [`Model::qwen35`], in the generation of 0.15 or the later one.
    fn qwen35(model: &Model, later: bool) -> Lalamo {
        let linear = json!({});
        let mut layers = Vec::new();
        for layer in 0..4 {
            let mixer = if layer < 3 {
                json!({"type": "DeltaNetConfig", "in_proj_config": linear,
                       "conv_config": {"has_biases": false}, "out_proj_config": linear,
                       "norm_config": norm(None), "num_heads": 4, "num_groups": 2,
                       "head_dim": 16, "value_head_dim": 16, "kernel_size": 4})
            } else {
                let mut mixer = json!({"type": "AttentionConfig", "out_projection_config": linear,
                    "query_norm_config": norm(Some(1.0)), "key_norm_config": norm(Some(1.0)),
                    "num_heads": 4, "num_groups": 2, "head_dim": 32, "is_causal": true,
                    "scale": null, "sliding_window_size": null, "logit_soft_cap": null,
                    "has_sinks": false, "has_out_biases": false});
                if later {
                    mixer["qkvg_projection_config"] = linear.clone();
                    mixer["has_qkvg_biases"] = json!(false);
                    mixer["has_gate"] = json!(true);
                } else {
                    mixer["qkv_projection_config"] = linear.clone();
                    mixer["has_qkv_biases"] = json!(false);
                    mixer["gate_projection_config"] = linear.clone();
                }
                mixer
            };
            let rope = json!({"type": "UnscaledRoPEConfig", "base": 1e7,
                              "max_sequence_length": 256, "head_dim": 8});
            layers.push(json!({"pre_mixer_norm_config": norm(Some(1.0)), "mixer_config": mixer,
                "post_mixer_norm_config": null, "pre_mlp_norm_config": norm(Some(1.0)),
                "mlp_config": {"type": "DenseMLPConfig", "linear_config": linear,
                    "activation": {"type": "SiLU", "alpha": 1.0}, "has_up_biases": false,
                    "has_down_biases": false, "gate_clipping": null, "up_clipping": null},
                "post_mlp_norm_config": null, "rope_config": if layer < 3 { Value::Null } else { rope }}));
        }
        let config = json!({"type": "LanguageModelConfig",
            "token_codec_config": {"type": "ChatCodecConfig", "prompt_template": "{{ messages }}",
                "output_parser_regex": null, "system_role_name": "system",
                "user_role_name": "user", "assistant_role_name": "assistant",
                "eos_token": "</s>", "bos_token": null, "end_of_thinking_tag": null},
            "decoder_config": {"embedding_config": {"type": "TiedEmbeddingConfig",
                    "input_scale": null, "logit_soft_cap": null, "logit_scale": null},
                "transformer_config": {"layer_configs": layers,
                    "output_norm_config": norm(Some(1.0)), "model_dim": 64, "hidden_dim": 128},
                "vocab_size": 96},
            "generation_config": {"stop_token_ids": [2, 5], "temperature": 0.5, "top_k": 20}});
        let mut made = Lalamo {
            config,
            tensors: Vec::new(),
            metadata: Map::new(),
        };
        let embedding = vec![("model.embed_tokens.weight".to_owned(), 0..96)];
        made.full(
            model,
            "decoder.embedding.embedding",
            "input_output",
            &embedding,
        );
        for layer in 0..4 {
            let (to, from) = (
                format!("decoder.transformer.layers.{layer}"),
                format!("model.layers.{layer}"),
            );
            let part = |name: &str, rows| (format!("{from}.{name}.weight"), rows);
            let norms = [
                ("pre_mixer_norm", "input_layernorm"),
                ("pre_mlp_norm", "post_attention_layernorm"),
            ];
            for (own, name) in norms {
                made.vector(
                    model,
                    &format!("{to}.{own}.scales"),
                    &format!("{from}.{name}.weight"),
                    &[64],
                );
            }
            let up = vec![part("mlp.up_proj", 0..128), part("mlp.gate_proj", 0..128)];
            made.full(
                model,
                &format!("{to}.mlp.up_projection.weights"),
                "output_input",
                &up,
            );
            let down = vec![part("mlp.down_proj", 0..64)];
            made.full(
                model,
                &format!("{to}.mlp.down_projection.weights"),
                "output_input",
                &down,
            );
            let mixer = format!("{to}.mixer");
            if layer < 3 {
                let at = |name: &str, count| part(&format!("linear_attn.{name}"), 0..count);
                let joined = vec![
                    at("in_proj_qkv", 128),
                    at("in_proj_z", 64),
                    at("in_proj_b", 4),
                    at("in_proj_a", 4),
                ];
                made.full(
                    model,
                    &format!("{mixer}.in_proj.weights"),
                    "output_input",
                    &joined,
                );
                let out = vec![at("out_proj", 64)];
                made.full(
                    model,
                    &format!("{mixer}.out_proj.weights"),
                    "output_input",
                    &out,
                );
                for (own, name, shape) in [
                    ("conv.weights", "conv1d.weight", vec![128, 4]),
                    ("a_log", "A_log", vec![4]),
                    ("dt_bias", "dt_bias", vec![4]),
                    ("norm.scales", "norm.weight", vec![16]),
                ] {
                    made.vector(
                        model,
                        &format!("{mixer}.{own}"),
                        &format!("{from}.linear_attn.{name}"),
                        &shape,
                    );
                }
                continue;
            }
            let at = |name: &str, rows| part(&format!("self_attn.{name}"), rows);
            // Queries and gates lie head by head in Hugging Face's.
            let of_heads = |first: usize| {
                (0..4).map(move |head| {
                    let start = 64 * head + first;
                    at("q_proj", start..start + 32)
                })
            };
            let mut joined: Rows = of_heads(0).collect();
            joined.extend([at("k_proj", 0..64), at("v_proj", 0..64)]);
            let gates: Rows = of_heads(32).collect();
            if later {
                joined.extend(gates);
                made.full(
                    model,
                    &format!("{mixer}.qkvg_projection.weights"),
                    "output_input",
                    &joined,
                );
            } else {
                made.full(
                    model,
                    &format!("{mixer}.qkv_projection.weights"),
                    "output_input",
                    &joined,
                );
                made.full(
                    model,
                    &format!("{mixer}.gate_projection.weights"),
                    "output_input",
                    &gates,
                );
            }
            let out = vec![at("o_proj", 0..64)];
            made.full(
                model,
                &format!("{mixer}.out_projection.weights"),
                "output_input",
                &out,
            );
            for (own, name) in [("query_norm", "q_norm"), ("key_norm", "k_norm")] {
                made.vector(
                    model,
                    &format!("{mixer}.{own}.scales"),
                    &format!("{from}.self_attn.{name}.weight"),
                    &[32],
                );
            }
        }
        made.vector(
            model,
            "decoder.transformer.output_norm.scales",
            "model.norm.weight",
            &[64],
        );
        made
    }

    fn vector(&mut self, model: &Model, to: &str, from: &str, shape: &[usize]) {
        let _ = model
            .tensors
            .iter()
            .find(|tensor| tensor.name == from)
            .expect(from);
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|at| value(from, at))
            .collect();
        self.tensors.push(Tensor::of(to, "F32", shape, &values));
    }

    /// Floats, joined from rows of other matrices.
    fn full(
        &mut self,
        model: &Model,
        to: &str,
        layout: &str,
        rows: &[(String, std::ops::Range<usize>)],
    ) {
        let (mut values, mut n, mut k) = (Vec::new(), 0, 0);
        for (name, rows) in rows {
            let tensor = model
                .tensors
                .iter()
                .find(|tensor| tensor.name == *name)
                .expect(name);
            k = tensor.shape[1];
            n += rows.len();
            values.extend((rows.start * k..rows.end * k).map(|at| value(name, at)));
        }
        self.tensors.push(Tensor::of(
            &format!("{to}.weights"),
            "BF16",
            &[n, k],
            &values,
        ));
        let spec = json!({"type": "FullPrecisionSpec", "layout": layout});
        self.metadata
            .insert(format!("{to}.spec"), json!(spec.to_string()));
    }

    /// Puts int4 codes in the place of a matrix of floats; returns the weights before rotations are
    /// undone, [n, k].
    fn int4(
        &mut self,
        to: &str,
        group: usize,
        by_group: bool,
        mode: Option<&str>,
    ) -> (Vec<f32>, usize, usize) {
        let at = self
            .tensors
            .iter()
            .position(|tensor| tensor.name == format!("{to}.weights"))
            .expect(to);
        let plain = self.tensors.remove(at);
        let [n, k] = plain.shape[..] else {
            panic!("{to} is a matrix")
        };
        let number = |salt: usize, at: usize, limit: u32| {
            ((value(to, salt + at) + 0.125) * 512.0) as u32 % limit
        };
        let code = |row: usize, column: usize| number(0, row * k + column, 16);
        let scale =
            |row: usize, group: usize| (1 + number(1000, row * 31 + group, 100)) as f32 / 4096.0;
        let zero = |row: usize, group: usize| number(2000, row * 17 + group, 16);
        let groups = k / group;
        let path = if mode.is_some() {
            format!("{to}.quantized")
        } else {
            to.to_owned()
        };
        let mut put = |name: &str, dtype, shape: [usize; 2], bytes: Vec<u8>| {
            self.tensors.push(Tensor {
                name: format!("{path}.{name}"),
                dtype,
                shape: shape.to_vec(),
                bytes,
            });
        };
        let pairs = |width: usize, get: &dyn Fn(usize) -> u32| -> Vec<u8> {
            (0..width.div_ceil(2))
                .map(|at| {
                    (get(2 * at)
                        | if 2 * at + 1 < width {
                            get(2 * at + 1) << 4
                        } else {
                            0
                        }) as u8
                })
                .collect()
        };
        put(
            "weights",
            "U8",
            [n, k / 2],
            (0..n)
                .flat_map(|row| pairs(k, &|column| code(row, column)))
                .collect(),
        );
        let half = |values: Vec<f32>| Tensor::of("", "BF16", &[values.len()], &values).bytes;
        if by_group {
            let padded = n.next_multiple_of(4);
            let of = |at: usize| {
                if at % padded < n {
                    scale(at % padded, at / padded)
                } else {
                    0.0
                }
            };
            put(
                "scales",
                "BF16",
                [groups, padded],
                half((0..groups * padded).map(of).collect()),
            );
            let zeros = |group| pairs(padded, &|row| if row < n { zero(row, group) } else { 0 });
            put(
                "zero_points",
                "U8",
                [groups, padded / 2],
                (0..groups).flat_map(zeros).collect(),
            );
        } else {
            put(
                "scales",
                "BF16",
                [n, groups],
                half(
                    (0..n * groups)
                        .map(|at| scale(at / groups, at % groups))
                        .collect(),
                ),
            );
            let zeros = |row| pairs(groups, &|group| zero(row, group));
            put(
                "zero_points",
                "U8",
                [n, groups.div_ceil(2)],
                (0..n).flat_map(zeros).collect(),
            );
        }
        let spec = self.metadata[&format!("{to}.spec")]
            .as_str()
            .unwrap()
            .to_owned();
        let layout = serde_json::from_str::<Value>(&spec).unwrap()["layout"].clone();
        let mut spec = json!({"type": "IntSpec", "bits": 4, "group_size": group, "is_symmetric": false, "layout": layout});
        if let Some(mode) = mode {
            spec = json!({"type": "HybridSpec", "quantization_spec": spec, "adapter_spec": null,
                          "incoherence_block_size": 32, "incoherence_processing_mode": mode});
            let embedding = layout == "input_output";
            for (side, len) in [
                ("input", if embedding { n } else { k }),
                ("output", if embedding { k } else { n }),
            ] {
                if mode.contains(side) {
                    let bytes = (0..len).flat_map(|at| sign(at).to_le_bytes()).collect();
                    let name = format!("{to}.incoherence_signs.{side}_signs");
                    self.tensors.push(Tensor {
                        name,
                        dtype: "I32",
                        shape: vec![len],
                        bytes,
                    });
                }
            }
        }
        self.metadata
            .insert(format!("{to}.spec"), json!(spec.to_string()));
        let weight = |at: usize| {
            let (row, column) = (at / k, at % k);
            let group = column / group;
            scale(row, group) * (code(row, column) as f32 - zero(row, group) as f32)
        };
        ((0..n * k).map(weight).collect(), n, k)
    }

    fn write(&self) -> Dir {
        let mut model = Model::qwen2();
        model.config = self.config.clone();
        let dir = model.write();
        let file = safetensors_with(&self.tensors, Value::Object(self.metadata.clone()));
        fs::write(dir.path.join("model.safetensors"), file).unwrap();
        dir
    }
}

fn sign(at: usize) -> i32 {
    if at * at % 7 < 4 { 1 } else { -1 }
}

/// signs * (H w) in blocks of 32, by the definition of H.
fn unrotated(values: &[f32]) -> Vec<f32> {
    let entry = |i: usize, j: usize| {
        if (i & j).count_ones().is_multiple_of(2) {
            1.0
        } else {
            -1.0
        }
    };
    let value = |at: usize| {
        let (block, i) = (at / 32 * 32, at % 32);
        let sum: f64 = (0..32)
            .map(|j| entry(i, j) * f64::from(values[block + j]))
            .sum();
        (sum / 32f64.sqrt() * f64::from(sign(at))) as f32
    };
    (0..values.len()).map(value).collect()
}

fn near(found: &[f32], expected: &[f32], relative: f64) {
    let square = |x: f64| x * x;
    let lost: f64 = found
        .iter()
        .zip(expected)
        .map(|(a, b)| square(f64::from(a - b)))
        .sum();
    let norm: f64 = expected.iter().map(|&x| square(f64::from(x))).sum();
    assert!(
        (lost / norm).sqrt() < relative,
        "{} of {}",
        lost.sqrt(),
        norm.sqrt()
    );
}

#[test]
fn both_generations_are_the_model_that_they_were_made_from() {
    let model = Model::qwen35();
    let plain = model.write();
    let plain = Checkpoint::open(&plain.path).unwrap();
    for later in [false, true] {
        let dir = Lalamo::qwen35(&model, later).write();
        let checkpoint = Checkpoint::open(&dir.path).unwrap_or_else(|error| panic!("{error}"));
        let description = checkpoint.description();
        assert_eq!(description.config, plain.description().config);
        assert_eq!(description.generation.eos, [2, 5]);
        assert_eq!(description.generation.temperature, Some(0.5));
        assert_eq!(description.chat_template.as_deref(), Some("{{ messages }}"));
        for info in plain.tensors() {
            let len = info.shape.iter().product();
            let expected = plain.vector(&info.name, len).unwrap();
            assert_eq!(
                checkpoint.vector(&info.name, len).unwrap(),
                expected,
                "{}",
                info.name
            );
        }
        checkpoint.finish().unwrap();
    }
}

#[test]
fn rotated_codes_are_used_as_they_are_where_only_inputs_are_rotated() {
    let model = Model::qwen35();
    for later in [false, true] {
        let mut made = Lalamo::qwen35(&model, later);
        let layer = "decoder.transformer.layers.3";
        let down = format!("{layer}.mlp.down_projection.weights");
        let (codes, n, k) = made.int4(&down, 64, later, Some("input"));
        let (table, vocab, hidden) =
            made.int4("decoder.embedding.embedding", 32, false, Some("output"));
        let both = format!("{layer}.mlp.up_projection.weights");
        let (turned, rows, columns) = made.int4(&both, 32, later, Some("input_output"));
        let dir = made.write();
        let checkpoint = Checkpoint::open(&dir.path).unwrap_or_else(|error| panic!("{error}"));
        for (name, values, n, k) in [
            ("model.layers.3.mlp.down_proj.weight", &codes, n, k),
            ("model.embed_tokens.weight", &table, vocab, hidden),
        ] {
            let Matrix::Packed(packed) = checkpoint.matrix(name, n, k).unwrap() else {
                panic!("{name} is packed")
            };
            assert_eq!(packed.spec().bits, 4);
            let mut row = vec![0.0; k];
            for (index, expected) in values.chunks_exact(k).enumerate() {
                packed.rotated_row_into(index, &mut row);
                assert_eq!(row, expected, "{name} {index}");
                packed.row_into(index, &mut row);
                near(&row, &unrotated(expected), 1e-6);
            }
        }
        // Both sides: columns first, then rows.
        let mut expected: Vec<f32> = turned.chunks_exact(columns).flat_map(unrotated).collect();
        for column in 0..columns {
            let values: Vec<f32> = (0..rows)
                .map(|row| expected[row * columns + column])
                .collect();
            for (row, value) in unrotated(&values).into_iter().enumerate() {
                expected[row * columns + column] = value;
            }
        }
        let (up, gate) = expected.split_at(128 * columns);
        for (name, expected) in [("up", up), ("gate", gate)] {
            let name = format!("model.layers.3.mlp.{name}_proj.weight");
            near(
                &checkpoint.vector(&name, 128 * columns).unwrap(),
                expected,
                1e-6,
            );
            let Matrix::Packed(packed) = checkpoint.matrix(&name, 128, columns).unwrap() else {
                panic!("{name} is packed")
            };
            let mut row = vec![0.0; columns];
            for (index, expected) in expected.chunks_exact(columns).enumerate() {
                packed.row_into(index, &mut row);
                near(&row, expected, 0.01);
            }
        }
        let lossy = checkpoint
            .source_notes()
            .iter()
            .filter(|note| note.lossy)
            .count();
        assert_eq!(lossy, 1, "{:?}", checkpoint.source_notes());
    }
}

#[test]
fn damage_is_one_line() {
    let model = Model::qwen35();
    let layer = "decoder.transformer.layers.3";
    let refused = |change: &dyn Fn(&mut Lalamo), expected: &str| {
        let mut made = Lalamo::qwen35(&model, false);
        made.int4(
            &format!("{layer}.mlp.down_projection.weights"),
            64,
            false,
            Some("input"),
        );
        change(&mut made);
        let Err(error) = Checkpoint::open(&made.write().path) else {
            panic!("a damaged directory was opened, not {expected}")
        };
        let text = error.to_string();
        assert!(
            text.contains(expected) && text.lines().count() == 1,
            "{text}, not {expected}"
        );
    };
    let spec = format!("{layer}.mlp.down_projection.weights.spec");
    refused(&|made| drop(made.metadata.remove(&spec)), "is missing");
    refused(
        &|made| drop(made.metadata.insert(spec.clone(), json!("{"))),
        "metadata are damaged",
    );
    refused(&|made| drop(made.tensors.pop()), "is missing");
    refused(
        &|made| {
            let signs = made
                .tensors
                .iter_mut()
                .find(|tensor| tensor.name.ends_with("_signs"))
                .unwrap();
            signs.bytes[0] = 3;
        },
        "is no sign",
    );
    refused(
        &|made| made.config["decoder_config"]["vocab_size"] = json!(95),
        "has shape",
    );
    refused(
        &|made| {
            made.config["decoder_config"]["transformer_config"]["layer_configs"][3]["mixer_config"]
                ["sliding_window_size"] = json!(8);
        },
        "windows",
    );
    refused(
        &|made| {
            drop(
                made.config["decoder_config"]
                    .as_object_mut()
                    .unwrap()
                    .remove("transformer_config"),
            )
        },
        "transformer_config",
    );
    refused(
        &|made| {
            made.tensors
                .push(Tensor::filled("decoder.other", "F32", &[4]))
        },
        "decoder.other",
    );
}
