//! Small checkpoints made by hand, whole or damaged.
#![allow(dead_code, missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// One tensor to be written.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// Values that differ from tensor to tensor and from place to place, all exact in bf16.
    pub fn filled(name: &str, dtype: &'static str, shape: &[usize]) -> Tensor {
        let count: usize = shape.iter().product();
        let hash = hash(name);
        let values: Vec<f32> = (0..count).map(|at| spread(hash, at)).collect();
        Tensor::of(name, dtype, shape, &values)
    }

    pub fn of(name: &str, dtype: &'static str, shape: &[usize], values: &[f32]) -> Tensor {
        let bytes = match dtype {
            "F32" => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            "F16" => values
                .iter()
                .flat_map(|x| f16::from_f32(*x).to_le_bytes())
                .collect(),
            "BF16" => values
                .iter()
                .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
                .collect(),
            "I64" => values
                .iter()
                .flat_map(|x| (*x as i64).to_le_bytes())
                .collect(),
            other => panic!("no test writes {other}"),
        };
        Tensor {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            bytes,
        }
    }
}

/// The value of a test tensor at a flat index: a small number from a hash.
pub fn value(name: &str, at: usize) -> f32 {
    spread(hash(name), at)
}

fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn spread(hash: u64, at: usize) -> f32 {
    let mixed = (hash ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 40) % 127) as f32 / 512.0 - 0.125
}

/// The bytes of a safetensors file.
pub fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    safetensors_with(tensors, json!({"format": "pt"}))
}

/// The bytes of a safetensors file with these metadata.
pub fn safetensors_with(tensors: &[Tensor], metadata: Value) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), metadata);
    let mut data = Vec::new();
    for tensor in tensors {
        let begin = data.len();
        data.extend_from_slice(&tensor.bytes);
        let entry = json!({
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()],
        });
        header.insert(tensor.name.clone(), entry);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with this header text, right or wrong.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A model to be written to a directory.
#[derive(Clone, Debug)]
pub struct Model {
    pub config: Value,
    pub tensors: Vec<Tensor>,
}

impl Model {
    fn new(config: Value) -> Model {
        Model {
            config,
            tensors: Vec::new(),
        }
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        self.tensors.push(Tensor::filled(name, "BF16", shape));
    }

    fn mlp(&mut self, layer: usize, hidden: usize, inner: usize) {
        let at = format!("model.layers.{layer}");
        self.add(&format!("{at}.input_layernorm.weight"), &[hidden]);
        self.add(&format!("{at}.post_attention_layernorm.weight"), &[hidden]);
        self.add(&format!("{at}.mlp.gate_proj.weight"), &[inner, hidden]);
        self.add(&format!("{at}.mlp.up_proj.weight"), &[inner, hidden]);
        self.add(&format!("{at}.mlp.down_proj.weight"), &[hidden, inner]);
    }

    fn attention(&mut self, layer: usize, hidden: usize, q: usize, kv: usize, head: usize) {
        let at = format!("model.layers.{layer}.self_attn");
        self.add(&format!("{at}.q_proj.weight"), &[q, hidden]);
        self.add(&format!("{at}.k_proj.weight"), &[kv, hidden]);
        self.add(&format!("{at}.v_proj.weight"), &[kv, hidden]);
        if head > 0 {
            self.add(&format!("{at}.q_norm.weight"), &[head]);
            self.add(&format!("{at}.k_norm.weight"), &[head]);
        }
    }

    /// Llama in the old style of config.json: 2 layers, hidden 64, 4 heads on 2, untied.
    pub fn llama() -> Model {
        let mut model = Model::new(json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "tie_word_embeddings": false, "eos_token_id": 2, "bos_token_id": 1,
        }));
        model.add("model.embed_tokens.weight", &[96, 64]);
        for layer in 0..2 {
            model.mlp(layer, 64, 160);
            model.attention(layer, 64, 64, 32, 0);
            model.add(
                &format!("model.layers.{layer}.self_attn.o_proj.weight"),
                &[64, 64],
            );
        }
        model.add("model.norm.weight", &[64]);
        model.add("lm_head.weight", &[96, 64]);
        model
    }

    /// Qwen2: 1 layer, hidden 64, biases on q, k and v, tied.
    pub fn qwen2() -> Model {
        let mut model = Model::new(json!({
            "model_type": "qwen2", "vocab_size": 96, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256, "rope_theta": 1000000.0, "rope_scaling": null,
            "use_sliding_window": false, "tie_word_embeddings": true, "eos_token_id": [2, 3],
        }));
        model.add("model.embed_tokens.weight", &[96, 64]);
        model.mlp(0, 64, 128);
        model.attention(0, 64, 64, 32, 0);
        for (name, width) in [("q", 64), ("k", 32), ("v", 32)] {
            model.add(
                &format!("model.layers.0.self_attn.{name}_proj.bias"),
                &[width],
            );
        }
        model.add("model.layers.0.self_attn.o_proj.weight", &[64, 64]);
        model.add("model.norm.weight", &[64]);
        model
    }

    /// Qwen3: 1 layer, hidden 64, heads of 32 (wider together than hidden), untied.
    pub fn qwen3() -> Model {
        let mut model = Model::new(json!({
            "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "attention_bias": false,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "layer_types": ["full_attention"], "tie_word_embeddings": false,
        }));
        model.add("model.embed_tokens.weight", &[96, 64]);
        model.mlp(0, 64, 128);
        model.attention(0, 64, 128, 64, 32);
        model.add("model.layers.0.self_attn.o_proj.weight", &[64, 128]);
        model.add("model.norm.weight", &[64]);
        model.add("lm_head.weight", &[96, 64]);
        model
    }

    /// Qwen3.5 as text alone: 4 layers, 3 of them Gated DeltaNet with 2 key and 4 value heads.
    pub fn qwen35() -> Model {
        let mut model = Model::new(json!({
            "model_type": "qwen3_5_text", "vocab_size": 96, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "attention_bias": false,
            "attn_output_gate": true, "full_attention_interval": 4,
            "layer_types": [
                "linear_attention", "linear_attention", "linear_attention", "full_attention",
            ],
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default",
                "mrope_section": [2, 1, 1], "mrope_interleaved": true,
            },
            "tie_word_embeddings": true, "eos_token_id": 2,
        }));
        model.add("model.embed_tokens.weight", &[96, 64]);
        for layer in 0..4 {
            model.mlp(layer, 64, 128);
        }
        for layer in 0..3 {
            let at = format!("model.layers.{layer}.linear_attn");
            model.add(&format!("{at}.in_proj_qkv.weight"), &[128, 64]);
            model.add(&format!("{at}.in_proj_z.weight"), &[64, 64]);
            model.add(&format!("{at}.in_proj_a.weight"), &[4, 64]);
            model.add(&format!("{at}.in_proj_b.weight"), &[4, 64]);
            model.add(&format!("{at}.conv1d.weight"), &[128, 1, 4]);
            model
                .tensors
                .push(Tensor::filled(&format!("{at}.A_log"), "F32", &[4]));
            model.add(&format!("{at}.dt_bias"), &[4]);
            model
                .tensors
                .push(Tensor::filled(&format!("{at}.norm.weight"), "F32", &[16]));
            model.add(&format!("{at}.out_proj.weight"), &[64, 64]);
        }
        model.attention(3, 64, 256, 64, 32);
        model.add("model.layers.3.self_attn.o_proj.weight", &[64, 128]);
        model.add("model.norm.weight", &[64]);
        model
    }

    /// The same Qwen3.5 inside a multimodal model, with vision and MTP tensors beside it.
    pub fn qwen35_multimodal() -> Model {
        let mut model = Model::qwen35();
        model.config["model_type"] = json!("qwen3_5_text");
        model.config = json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "text_config": model.config, "vision_config": {"hidden_size": 32},
            "tie_word_embeddings": true,
        });
        for tensor in &mut model.tensors {
            tensor.name = tensor.name.replacen("model.", "model.language_model.", 1);
        }
        model.add("model.visual.patch_embed.proj.weight", &[8, 3, 2, 2]);
        model.add("mtp.fc.weight", &[64, 128]);
        model
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors
            .iter_mut()
            .find(|tensor| tensor.name == name)
            .expect(name)
    }

    pub fn remove(&mut self, name: &str) -> Tensor {
        let at = self
            .tensors
            .iter()
            .position(|tensor| tensor.name == name)
            .expect(name);
        self.tensors.remove(at)
    }

    /// Write as a single file into a new directory.
    pub fn write(&self) -> Dir {
        let dir = self.write_config();
        fs::write(
            dir.path.join("model.safetensors"),
            safetensors(&self.tensors),
        )
        .unwrap();
        dir
    }

    /// Write as two shards and an index into a new directory.
    pub fn write_sharded(&self) -> Dir {
        let dir = self.write_config();
        let (first, second) = self.tensors.split_at(self.tensors.len() / 2);
        let mut weights = Map::new();
        for (number, part) in [(1, first), (2, second)] {
            let file = format!("model-0000{number}-of-00002.safetensors");
            for tensor in part {
                weights.insert(tensor.name.clone(), json!(file));
            }
            fs::write(dir.path.join(&file), safetensors(part)).unwrap();
        }
        let index = json!({"metadata": {"total_size": 0}, "weight_map": weights});
        dir.put("model.safetensors.index.json", &index.to_string());
        dir
    }

    fn write_config(&self) -> Dir {
        let root = TempDir::new().unwrap();
        let path = root.path().join("tiny");
        fs::create_dir(&path).unwrap();
        let dir = Dir { path, root };
        dir.put("config.json", &self.config.to_string());
        dir.put("tokenizer.json", TOKENIZER);
        dir
    }
}

/// A model's directory, removed when dropped.
pub struct Dir {
    pub path: PathBuf,
    pub root: TempDir,
}

impl Dir {
    pub fn put(&self, name: &str, text: &str) {
        fs::write(self.path.join(name), text).unwrap();
    }

    /// The names in a directory, sorted.
    pub fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// The parts of a tokenizer.json that this crate reads, and an empty vocabulary.
pub const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[
    {"id":1,"content":"<s>","special":true},{"id":2,"content":"</s>","special":true},
    {"id":5,"content":"<|im_end|>","special":true}],
    "post_processor":null,"model":{"type":"BPE","vocab":{},"merges":[]}}"#;
