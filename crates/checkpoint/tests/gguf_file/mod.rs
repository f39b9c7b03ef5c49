//! Small GGUF files made by hand, whole or damaged.
#![allow(dead_code, missing_docs)]

use std::path::{Path, PathBuf};

use half::f16;
use tempfile::TempDir;

/// A metadata value.
#[derive(Clone, Debug)]
pub enum Meta {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    /// Any type number and bytes.
    Raw(u32, Vec<u8>),
}

pub fn text(value: &str) -> Meta {
    Meta::Text(value.to_owned())
}

#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    /// Outermost first.
    pub shape: Vec<u64>,
    pub kind: u32,
    pub bytes: Vec<u8>,
    /// Instead of the next free place.
    pub offset: Option<u64>,
}

pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const Q8_0: u32 = 8;

/// A GGUF file to be written.
#[derive(Clone, Debug)]
pub struct File {
    pub meta: Vec<(String, Meta)>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
    pub version: u32,
}

impl File {
    pub fn set(&mut self, key: &str, value: Meta) -> &mut File {
        match self.meta.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.meta.push((key.to_owned(), value)),
        }
        self
    }

    pub fn unset(&mut self, key: &str) -> &mut File {
        self.meta.retain(|(name, _)| name != key);
        self
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors
            .iter_mut()
            .find(|tensor| tensor.name == name)
            .expect(name)
    }

    /// Add or replace a tensor of f32 that differ from tensor to tensor and place to place.
    pub fn f32(&mut self, name: &str, shape: &[u64]) -> &mut File {
        let count: u64 = shape.iter().product();
        let bytes = (0..count)
            .flat_map(|at| value(name, at as usize).to_le_bytes())
            .collect();
        self.put(name, shape, F32, bytes)
    }

    /// As [`File::f32`], in blocks of Q8_0.
    pub fn q8_0(&mut self, name: &str, shape: &[u64]) -> &mut File {
        let count: u64 = shape.iter().product();
        let mut bytes = Vec::new();
        for block in 0..count / 32 {
            bytes.extend(f16::from_f32(value(name, block as usize) / 64.0).to_le_bytes());
            bytes.extend((0..32).map(|i| (block * 57 + i * 31) as u8));
        }
        self.put(name, shape, Q8_0, bytes)
    }

    pub fn put(&mut self, name: &str, shape: &[u64], kind: u32, bytes: Vec<u8>) -> &mut File {
        self.tensors.retain(|tensor| tensor.name != name);
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.tensors.push(Tensor {
            name,
            shape,
            kind,
            bytes,
            offset: None,
        });
        self
    }

    /// The file's bytes and where its tensor data begin.
    pub fn bytes(&self) -> (Vec<u8>, usize) {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.meta.len() as u64).to_le_bytes());
        for (key, value) in &self.meta {
            string(&mut out, key);
            write_meta(&mut out, value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            string(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            for dimension in tensor.shape.iter().rev() {
                out.extend(dimension.to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend_from_slice(&tensor.bytes);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        let start = out.len();
        out.extend(data);
        (out, start)
    }

    pub fn write(&self) -> Written {
        write(&self.bytes().0)
    }
}

/// A file in a directory that is removed when dropped.
pub struct Written {
    pub path: PathBuf,
    dir: TempDir,
}

pub fn write(bytes: &[u8]) -> Written {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Written { path, dir }
}

/// A small number from a name and a place.
pub fn value(name: &str, at: usize) -> f32 {
    let hash = name
        .bytes()
        .fold(7u64, |hash, byte| hash.wrapping_mul(31) + u64::from(byte));
    let mixed = (hash ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 40) % 1021) as f32 / 1024.0 + 0.0625
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_meta(out: &mut Vec<u8>, value: &Meta) {
    let array = |out: &mut Vec<u8>, kind: u32, len: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    };
    let scalar = |out: &mut Vec<u8>, kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Meta::U32(value) => scalar(out, 4, &value.to_le_bytes()),
        Meta::I32(value) => scalar(out, 5, &value.to_le_bytes()),
        Meta::F32(value) => scalar(out, 6, &value.to_le_bytes()),
        Meta::Bool(value) => scalar(out, 7, &[u8::from(*value)]),
        Meta::Raw(kind, bytes) => scalar(out, *kind, bytes),
        Meta::Text(value) => {
            out.extend(8u32.to_le_bytes());
            string(out, value);
        }
        Meta::Texts(values) => {
            array(out, 8, values.len());
            values.iter().for_each(|value| string(out, value));
        }
        Meta::I32s(values) => {
            array(out, 5, values.len());
            values
                .iter()
                .for_each(|value| out.extend(value.to_le_bytes()));
        }
        Meta::F32s(values) => {
            array(out, 6, values.len());
            values
                .iter()
                .for_each(|value| out.extend(value.to_le_bytes()));
        }
        Meta::Bools(values) => {
            array(out, 7, values.len());
            values.iter().for_each(|value| out.push(u8::from(*value)));
        }
    }
}

/// Tokens: all bytes as GPT-2 writes them, a few merges, two control tokens.
pub fn gpt2_tokens(file: &mut File, merges: &[&str], special: &[&str]) {
    let mut tokens: Vec<String> = byte_letters().iter().map(|c| c.to_string()).collect();
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let plain = tokens.len();
    tokens.extend(special.iter().map(|token| token.to_string()));
    let kinds = (0..tokens.len())
        .map(|id| if id < plain { 1 } else { 3 })
        .collect();
    file.set("tokenizer.ggml.model", text("gpt2"));
    file.set("tokenizer.ggml.pre", text("smollm"));
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    let merges = merges.iter().map(|merge| merge.to_string()).collect();
    file.set("tokenizer.ggml.merges", Meta::Texts(merges));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(plain as u32));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(plain as u32 + 1));
}

/// GPT-2's printable letter for each byte.
pub fn byte_letters() -> Vec<char> {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut other = 0x100;
    (0..256)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                other += 1;
                other - 1
            };
            char::from_u32(code).unwrap()
        })
        .collect()
}

/// A llama of 2 layers, width 64, 2 heads on 1, tied; 260 tokens.
pub fn llama() -> File {
    let mut file = File {
        meta: Vec::new(),
        tensors: Vec::new(),
        alignment: 32,
        version: 3,
    };
    file.set("general.architecture", text("llama"));
    file.set("general.name", text("Tiny Llama"));
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 512),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("rope.dimension_count", 32),
    ] {
        file.set(&format!("llama.{key}"), Meta::U32(value));
    }
    file.set("llama.rope.freq_base", Meta::F32(500_000.0));
    file.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5));
    gpt2_tokens(&mut file, &["h e", "l l"], &["<s>", "</s>"]);
    file.f32("token_embd.weight", &[260, 64]);
    file.f32("output_norm.weight", &[64]);
    for layer in 0..2 {
        let at = format!("blk.{layer}");
        file.f32(&format!("{at}.attn_norm.weight"), &[64]);
        file.f32(&format!("{at}.ffn_norm.weight"), &[64]);
        file.q8_0(&format!("{at}.attn_q.weight"), &[64, 64]);
        file.f32(&format!("{at}.attn_k.weight"), &[32, 64]);
        file.f32(&format!("{at}.attn_v.weight"), &[32, 64]);
        file.f32(&format!("{at}.attn_output.weight"), &[64, 64]);
        file.q8_0(&format!("{at}.ffn_gate.weight"), &[96, 64]);
        file.q8_0(&format!("{at}.ffn_up.weight"), &[96, 64]);
        file.q8_0(&format!("{at}.ffn_down.weight"), &[64, 96]);
    }
    file
}

/// The error of opening a file, which must be one line that begins with the file's name.
#[track_caller]
pub fn error(path: &Path) -> String {
    let text = match kozue_checkpoint::Checkpoint::open(path) {
        Ok(_) => panic!("{} opened", path.display()),
        Err(error) => error.to_string(),
    };
    assert!(!text.contains('\n'), "more than one line: {text}");
    let name = path.display().to_string();
    assert!(text.starts_with(&name), "does not say where: {text}");
    text[name.len()..].to_owned()
}

#[track_caller]
pub fn assert_says(file: &File, expected: &str) {
    let written = file.write();
    let text = error(&written.path);
    assert!(text.contains(expected), "expected {expected:?} in {text:?}");
}
