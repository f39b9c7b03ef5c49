//! A drafter and a Weaver in the form that lalamo gives them for Uzu draft what they draft in their own.

use kozue_engine::sampling::Sampling;
use kozue_engine::speculation::{DraftKind, SpeculationOptions};
use kozue_engine::{Answer, Loaded, Request};
use kozue_kernels::{Cpu, KvType};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

fn reference(parts: [&str; 2]) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference");
    root.join(parts[0]).join(parts[1])
}

/// Tensors by name: type, shape, bytes.
#[derive(Default)]
struct Tensors {
    all: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

impl Tensors {
    fn read(dir: &Path) -> Tensors {
        let bytes = fs::read(dir.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let parts = |view: TensorView| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        let all = file
            .iter()
            .map(|(name, view)| (name.to_owned(), parts(view)));
        Tensors {
            all: all.collect(),
            metadata: HashMap::new(),
        }
    }

    /// Tensors below each other.
    fn join(&mut self, from: &Tensors, to: &str, names: &[String]) {
        let mut parts = names.iter().map(|name| from.all[name].clone());
        let mut joined = parts.next().unwrap();
        for (_, shape, bytes) in parts {
            joined.1[0] += shape[0];
            joined.2.extend(bytes);
        }
        self.all.insert(to.to_owned(), joined);
    }

    /// A linear layer out of others below each other, with their biases where they have some.
    fn linear(&mut self, from: &Tensors, to: &str, names: &[String]) {
        let named = |end: &str| {
            names
                .iter()
                .map(|name| format!("{name}.{end}"))
                .collect::<Vec<_>>()
        };
        self.join(from, &format!("{to}.weights.weights"), &named("weight"));
        let spec = json!({"type": "FullPrecisionSpec", "layout": "output_input"});
        self.metadata
            .insert(format!("{to}.weights.spec"), spec.to_string());
        if from.all.contains_key(&named("bias")[0]) {
            self.join(from, &format!("{to}.biases"), &named("bias"));
        }
    }

    fn norm(&mut self, from: &Tensors, to: &str, name: &str) {
        self.join(from, &format!("{to}.scales"), &[format!("{name}.weight")]);
        if from.all.contains_key(&format!("{name}.bias")) {
            self.join(from, &format!("{to}.biases"), &[format!("{name}.bias")]);
        }
    }

    fn write(&self, dir: &Path) {
        let views = self.all.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let file = safetensors::serialize(views, Some(self.metadata.clone())).unwrap();
        fs::write(dir.join("model.safetensors"), file).unwrap();
    }
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap()
}

fn norm(biased: bool) -> Value {
    json!({"epsilon": 1e-6, "scale_offset": null, "upcast_mode": "only_normalization",
           "subtract_mean": false, "has_scale": true, "has_biases": biased})
}

/// Writes a drafter's folder and a Weaver's as one of lalamo's; `fused` as from 0.16 on.
fn convert(dflash: &Path, weaver: Option<&Path>, to: &Path, fused: bool) {
    let (own, from) = (config(dflash), Tensors::read(dflash));
    let mut made = Tensors::default();
    let inner = &own["dflash_config"];
    let theta = match &own["rope_theta"] {
        Value::Null => own["rope_parameters"]["rope_theta"].clone(),
        theta => theta.clone(),
    };
    let rope = json!({"type": "UnscaledRoPEConfig", "base": theta,
        "max_sequence_length": own["max_position_embeddings"], "head_dim": own["head_dim"]});
    let root = "speculator.draft_model";
    made.linear(
        &from,
        &format!("{root}.context_projection"),
        &["fc".to_owned()],
    );
    made.norm(&from, &format!("{root}.context_norm"), "hidden_norm");
    made.norm(&from, &format!("{root}.output_norm"), "norm");
    let mut layers = Vec::new();
    let mut context = Vec::new();
    for layer in 0..own["num_hidden_layers"].as_u64().unwrap() {
        let name = |part: &str| format!("layers.{layer}.{part}");
        let path = |part: &str| format!("{root}.layers.{layer}.{part}");
        made.norm(&from, &path("pre_mixer_norm"), &name("input_layernorm"));
        made.norm(
            &from,
            &path("pre_mlp_norm"),
            &name("post_attention_layernorm"),
        );
        made.norm(&from, &path("mixer.query_norm"), &name("self_attn.q_norm"));
        made.norm(&from, &path("mixer.key_norm"), &name("self_attn.k_norm"));
        let joined = if fused {
            "mixer.qkvg_projection"
        } else {
            "mixer.qkv_projection"
        };
        let parts = ["q_proj", "k_proj", "v_proj"].map(|part| name(&format!("self_attn.{part}")));
        made.linear(&from, &path(joined), &parts);
        context.extend(parts[1..].iter().map(|part| format!("{part}.weight")));
        made.linear(
            &from,
            &path("mixer.out_projection"),
            &[name("self_attn.o_proj")],
        );
        let up = [name("mlp.up_proj"), name("mlp.gate_proj")];
        made.linear(&from, &path("mlp.up_projection"), &up);
        made.linear(
            &from,
            &path("mlp.down_projection"),
            &[name("mlp.down_proj")],
        );
        let slides = own["layer_types"][layer as usize] == "sliding_attention";
        let head = own["head_dim"].as_f64().unwrap();
        let mut mixer = json!({"type": "AttentionConfig", "out_projection_config": {},
            "query_norm_config": norm(false), "key_norm_config": norm(false),
            "num_heads": own["num_attention_heads"], "num_groups": own["num_key_value_heads"],
            "head_dim": own["head_dim"], "is_causal": slides, "scale": head.powf(-0.5),
            "sliding_window_size": if slides { own["sliding_window"].clone() } else { Value::Null },
            "logit_soft_cap": null, "has_sinks": false, "has_out_biases": own["attention_bias"]});
        let (weights, biases) = match fused {
            true => ("qkvg_projection_config", "has_qkvg_biases"),
            false => ("qkv_projection_config", "has_qkv_biases"),
        };
        mixer[weights] = json!({});
        mixer[biases] = own["attention_bias"].clone();
        layers.push(
            json!({"pre_mixer_norm_config": norm(false), "mixer_config": mixer,
            "post_mixer_norm_config": null, "pre_mlp_norm_config": norm(false),
            "mlp_config": {"type": "DenseMLPConfig", "linear_config": {},
                "activation": {"type": "SiLU", "alpha": 1.0}, "has_up_biases": false,
                "has_down_biases": false, "gate_clipping": null, "up_clipping": null},
            "post_mlp_norm_config": null, "hidden_dim": null, "ple_config": null,
            "has_post_layer_scalar": false, "kv_source_layer_index": null, "rope_config": rope}),
        );
    }
    // Keys and values of all layers once more.
    made.join(
        &from,
        &format!("{root}.state_kv_projection.weights.weights"),
        &context,
    );
    let block = match &inner["block_size"] {
        Value::Null => own["block_size"].clone(),
        block => block.clone(),
    };
    let draft = json!({"model_dim": own["hidden_size"], "hidden_dim": own["intermediate_size"],
        "block_size": block, "mask_token_id": inner["mask_token_id"],
        "target_layer_ids": inner["target_layer_ids"], "num_target_layers": own["num_target_layers"],
        "vocab_size": own["vocab_size"], "context_projection_config": {},
        "context_norm_config": norm(false), "rope_config": rope, "layer_configs": layers,
        "output_norm_config": norm(false)});
    let weaver = weaver.map(|weaver| convert_weaver(weaver, &mut made));
    fs::create_dir(to).unwrap();
    let config = json!({"type": "SpeculatorModelConfig", "speculator_config": {
        "type": "DFlashSpeculatorConfig", "draft_config": draft, "weaver_config": weaver}});
    fs::write(to.join("config.json"), config.to_string()).unwrap();
    made.write(to);
}

fn convert_weaver(dir: &Path, made: &mut Tensors) -> Value {
    let (own, from) = (config(dir), Tensors::read(dir));
    let root = "speculator.weaver";
    for (name, part) in [
        ("embedding_norm", "embed_norm"),
        ("hidden_state_norm", "output_norm"),
        ("output_norm", "out_norm"),
    ] {
        made.norm(&from, &format!("{root}.{name}"), part);
    }
    for (name, part) in [
        ("embedding_projection", "token_in"),
        ("hidden_state_projection", "proposal_in"),
        ("query_projection", "lm_head_query_in"),
    ] {
        made.linear(&from, &format!("{root}.{name}"), &[part.to_owned()]);
    }
    let rotary = own.get("rope_base").is_some();
    for layer in 0..own["num_layers"].as_u64().unwrap() {
        let name = |part: &str| format!("blocks.{layer}.{part}");
        let path = |part: &str| format!("{root}.blocks.{layer}.{part}");
        made.norm(&from, &path("pre_attention_norm"), &name("norm_attn"));
        made.norm(&from, &path("pre_mlp_norm"), &name("norm_mlp"));
        made.linear(&from, &path("out_projection"), &[name("o_proj")]);
        if rotary {
            made.linear(&from, &path("qkv_projection"), &[name("qkv_proj")]);
            made.linear(&from, &path("up_projection"), &[name("gate_up_proj")]);
            // The gate comes second.
            for end in ["weights.weights", "biases"] {
                let (_, _, bytes) = made
                    .all
                    .get_mut(&path(&format!("up_projection.{end}")))
                    .unwrap();
                let half = bytes.len() / 2;
                bytes.rotate_left(half);
            }
            made.linear(&from, &path("down_projection"), &[name("down_proj")]);
        } else {
            let parts = ["q_proj", "k_proj", "v_proj"].map(name);
            made.linear(&from, &path("qkv_projection"), &parts);
            made.linear(&from, &path("up_projection"), &[name("fc1")]);
            made.linear(&from, &path("down_projection"), &[name("fc2")]);
        }
    }
    let mut config = json!({"model_dim": own["d_rank"], "target_model_dim": own["d_model"],
        "target_embedding_dim": own["d_embed"], "num_layers": own["num_layers"],
        "num_heads": own["num_heads"], "hidden_dim": own["mlp_dim"], "max_depth": own["K"],
        "candidate_pool_size": own["candidate_pool_size"], "linear_config": {},
        "norm_config": norm(true)});
    if rotary {
        let head = own["d_rank"].as_u64().unwrap() / own["num_heads"].as_u64().unwrap();
        config["rope_config"] = json!({"type": "UnscaledRoPEConfig", "base": own["rope_base"],
            "max_sequence_length": own["K"].as_u64().unwrap() + 1, "head_dim": head});
    } else {
        let table = format!("{root}.position_embeddings");
        made.join(&from, &table, &["pos_emb".to_owned()]);
    }
    config
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

fn answer(target: &Path, kind: Option<DraftKind>, folder: Option<&Path>) -> (DraftKind, Answer) {
    let mut loaded = Loaded::open(target, Cpu::new(Some(1)), KvType::F16).unwrap();
    let options = SpeculationOptions {
        kind,
        path: folder.map(Path::to_path_buf),
        budget: Some(8),
        width: None,
        tables: None,
    };
    loaded.speculate(target, &options).unwrap();
    let request = Request {
        prompt: vec![5, 9, 2, 77, 31, 4],
        sampling: Sampling::greedy(),
        max_tokens: Some(24),
        stop: Vec::new(),
        grammar: None,
        logprobs: None,
        ignore_eos: true,
        trace: true,
    };
    let cancel = AtomicBool::new(false);
    let answer = loaded
        .session(None)
        .generate(&request, &cancel, &mut |_| ())
        .unwrap();
    (loaded.draft_kind(), answer)
}

#[test]
fn speculators_of_lalamo_draft_as_the_networks_that_they_were_made_from() {
    for (target, dflash, weaver) in [
        ("qwen3_5", "dflash-qwen3_5", "weaver-rotary"),
        ("qwen3", "dflash-qwen3", "weaver-learned"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let (own, model) = (root.path().join("own"), root.path().join("model"));
        let target = reference(["tiny", target]);
        let (dflash, weaver) = (
            reference(["drafters", dflash]),
            reference(["drafters", weaver]),
        );
        fs::create_dir(&own).unwrap();
        copy(&dflash, &own.join("dflash"));
        copy(&weaver, &own.join("weaver"));
        // Inside the model's folder, where it is found without being named.
        copy(&target, &model);
        convert(&dflash, Some(&weaver), &model.join("speculator"), true);
        let (kind, expected) = answer(&target, None, Some(&own));
        assert_eq!(kind, DraftKind::Weaver);
        let trace = format!("{:?}", expected.trace);
        assert!(
            expected.trace.iter().any(|round| round.tokens.len() > 2),
            "{trace}"
        );
        let speculator = model.join("speculator");
        for (place, folder) in [
            (&model, None),
            (&target, Some(&*speculator)),
            (&target, Some(&model)),
        ] {
            let (kind, found) = answer(place, None, folder);
            assert_eq!(kind, DraftKind::Weaver);
            assert_eq!(format!("{:?}", found.trace), trace, "{folder:?}");
        }
        // The older generation, without a Weaver.
        let older = root.path().join("older");
        convert(&dflash, None, &older, false);
        let (_, expected) = answer(&target, Some(DraftKind::Dflash), Some(&own));
        let (kind, found) = answer(&target, None, Some(&older));
        assert_eq!(kind, DraftKind::Dflash);
        assert_eq!(
            format!("{:?}", found.trace),
            format!("{:?}", expected.trace)
        );
    }
}

#[test]
fn what_is_no_speculator_is_one_line() {
    let root = tempfile::tempdir().unwrap();
    let target = reference(["tiny", "qwen3"]);
    let (dflash, weaver) = (
        reference(["drafters", "dflash-qwen3"]),
        reference(["drafters", "weaver-learned"]),
    );
    let error = |folder: &Path| {
        let mut loaded = Loaded::open(&target, Cpu::new(Some(1)), KvType::F16).unwrap();
        let options = SpeculationOptions {
            path: Some(folder.to_path_buf()),
            ..SpeculationOptions::default()
        };
        let text = loaded
            .speculate(&target, &options)
            .expect_err("a drafter")
            .to_string();
        assert!(!text.contains('\n'), "{text}");
        text
    };
    let change = |name: &str, change: &dyn Fn(&mut Value)| {
        let dir = root.path().join(name);
        convert(&dflash, Some(&weaver), &dir, true);
        let mut settings = config(&dir);
        change(&mut settings["speculator_config"]);
        fs::write(dir.join("config.json"), settings.to_string()).unwrap();
        error(&dir)
    };
    let said = change("field", &|all| {
        drop(
            all["draft_config"]
                .as_object_mut()
                .unwrap()
                .remove("block_size"),
        )
    });
    assert!(said.contains("missing field `block_size`"), "{said}");
    let said = change("convolution", &|all| {
        all["draft_config"]["grouped_convolution_config"] = json!({})
    });
    assert!(said.contains("convolutions"), "{said}");
    let said = change("rope", &|all| {
        all["draft_config"]["layer_configs"][0]["rope_config"]["type"] = json!("YARNRoPEConfig");
    });
    assert!(said.contains("YARNRoPEConfig"), "{said}");
    let said = change("depth", &|all| all["weaver_config"]["max_depth"] = json!(6));
    assert!(said.contains("position_embeddings"), "{said}");
    let said = change("target", &|all| {
        all["draft_config"]["num_target_layers"] = json!(9)
    });
    assert!(said.contains("made for a target of 9 layers"), "{said}");
    // A Weaver alone, and a drafter in the place of a model.
    let said = error(&weaver);
    assert!(
        said.contains("a Weaver goes with a DFlash drafter"),
        "{said}"
    );
    let said = Loaded::open(&dflash, Cpu::new(Some(1)), KvType::F16)
        .err()
        .unwrap()
        .to_string();
    assert!(said.contains("with --draft-model"), "{said}");
}

#[cfg(unix)]
#[test]
fn a_folder_that_may_not_be_read_is_an_error() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("model");
    copy(&reference(["tiny", "qwen3"]), &model);
    let inner = model.join("dflash");
    copy(&reference(["drafters", "dflash-qwen3"]), &inner);
    fs::set_permissions(&inner, fs::Permissions::from_mode(0o000)).unwrap();
    // Whoever may do everything reads it all the same.
    let free = fs::read_dir(&inner).is_ok();
    let mut loaded = Loaded::open(&model, Cpu::new(Some(1)), KvType::F16).unwrap();
    let found = loaded.speculate(&model, &SpeculationOptions::default());
    fs::set_permissions(&inner, fs::Permissions::from_mode(0o755)).unwrap();
    match found {
        Ok(()) => assert!(free, "counted as absent"),
        Err(error) => assert!(
            error
                .to_string()
                .contains("dflash/config.json: cannot open"),
            "{error}"
        ),
    }
}
