//! Damaged GGUF files: each kind of damage is one clear line, never a panic, and no damage makes
//! the loader ask for more memory than a small multiple of the file.
#![allow(missing_docs)]

mod gguf_file;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf_file::{F16, F32, File, Meta, assert_says, error, llama, text, write};
use kozue_checkpoint::Checkpoint;
use proptest::prelude::*;

/// The system's allocator, noting the largest request.
struct Noting;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Noting = Noting;

#[track_caller]
fn says(damage: impl FnOnce(&mut File), expected: &str) {
    let mut file = llama();
    damage(&mut file);
    assert_says(&file, expected);
}

#[track_caller]
fn bytes_say(damage: impl FnOnce(&mut Vec<u8>), expected: &str) {
    let (mut bytes, _) = llama().bytes();
    damage(&mut bytes);
    let text = error(&write(&bytes).path);
    assert!(text.contains(expected), "expected {expected:?} in {text:?}");
}

fn set(at: usize, value: &[u8]) -> impl FnOnce(&mut Vec<u8>) {
    move |bytes| bytes[at..at + value.len()].copy_from_slice(value)
}

#[test]
fn the_whole_file_opens() {
    Checkpoint::open(&llama().write().path).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn headers() {
    bytes_say(|bytes| bytes.clear(), "the file ends inside a magic number");
    bytes_say(
        set(0, b"GGML"),
        "not a GGUF file: it does not begin with \"GGUF\"",
    );
    bytes_say(
        set(4, &2u32.to_le_bytes()),
        "GGUF version 2 is not supported, only 3",
    );
    bytes_say(set(4, &3u32.to_be_bytes()), "this GGUF file is big-endian");
    let huge = u64::MAX.to_le_bytes();
    bytes_say(
        set(8, &huge),
        "the header announces 18446744073709551615 tensors in",
    );
    bytes_say(
        set(16, &huge),
        "the header announces 18446744073709551615 metadata entries in",
    );
    bytes_say(
        set(8, &100_000u64.to_le_bytes()),
        "the header announces 100000 tensors in",
    );
    bytes_say(
        set(24, &huge),
        "metadata entry 0 at byte 24 has a key of 18446744073709551615 bytes",
    );
    bytes_say(
        set(24, &0u64.to_le_bytes()),
        "metadata entry 0 at byte 24 has a key of 0 bytes",
    );
    bytes_say(
        set(24, &65_000u64.to_le_bytes()),
        "metadata entry 0 at byte 24 is not UTF-8",
    );
}

#[test]
fn lengths() {
    let (whole, start) = llama().bytes();
    for length in [10, 30, 1000, start - 40] {
        bytes_say(|bytes| bytes.truncate(length), "cut short or damaged");
    }
    for length in [start, start + 100, whole.len() - 32] {
        let expected = "beyond the end of the file";
        bytes_say(|bytes| bytes.truncate(length), expected);
    }
    bytes_say(
        |bytes| bytes.extend([0; 33]),
        "the file has 33 bytes more than its header describes; it is damaged or two files joined",
    );
}

#[test]
fn metadata() {
    says(
        |f| {
            f.meta.push(f.meta[0].clone());
        },
        "metadata key general.architecture appears twice",
    );
    let nested = Meta::Raw(9, [9u32.to_le_bytes(), [0; 4]].concat());
    says(
        |f| {
            f.set("x", nested);
        },
        "x is an array of arrays, which is not supported",
    );
    says(
        |f| {
            f.set("x", Meta::Raw(13, vec![]));
        },
        "x has the unknown value type 13",
    );
    says(
        |f| {
            f.set("x", Meta::Raw(7, vec![2]));
        },
        "x is a truth value of 2; 0 or 1 is needed",
    );
    let many = [&5u32.to_le_bytes()[..], &(1u64 << 40).to_le_bytes()].concat();
    says(
        |f| {
            f.set("x", Meta::Raw(9, many));
        },
        "x announces 1099511627776 elements in",
    );
    let broken = [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat();
    says(
        |f| {
            f.set("x", Meta::Raw(8, broken));
        },
        "x is not UTF-8",
    );
    let align = |value| {
        move |f: &mut File| {
            f.set("general.alignment", value);
        }
    };
    says(
        align(Meta::U32(24)),
        "general.alignment is Uint(24); a power of two from 8 to 1048576",
    );
    says(align(Meta::U32(0)), "general.alignment is Uint(0)");
    says(align(text("32")), "general.alignment is Text(");
}

#[test]
fn tensor_table() {
    let change = |name: &'static str, change: fn(&mut gguf_file::Tensor)| {
        move |f: &mut File| change(f.tensor(name))
    };
    const NORM: &str = "output_norm.weight";
    says(
        change(NORM, |t| t.kind = 23),
        "output_norm.weight is of type IQ4_XS (23), which is not",
    );
    says(
        change(NORM, |t| t.kind = 77),
        "output_norm.weight is of type an unknown type (77)",
    );
    says(
        change(NORM, |t| t.shape = vec![0]),
        "output_norm.weight has a dimension of 0",
    );
    says(
        change(NORM, |t| t.shape = vec![1 << 40, 1 << 40]),
        "output_norm.weight has a dimension of 1099511627776; the file is damaged",
    );
    says(
        change(NORM, |t| t.shape = vec![1; 5]),
        "output_norm.weight has 5 dimensions; 1 to 4 are",
    );
    says(
        change(NORM, |t| t.shape = vec![]),
        "output_norm.weight has 0 dimensions",
    );
    says(
        change(NORM, |t| t.offset = Some(20)),
        "its data begin at 20, not a multiple of the file's",
    );
    says(
        change(NORM, |t| t.offset = Some(u64::MAX - 31)),
        "lies beyond the end of the file",
    );
    says(
        change(NORM, |t| t.offset = Some(0)),
        "token_embd.weight and output_norm.weight overlap",
    );
    says(
        change(NORM, |t| t.name = "token_embd.weight".into()),
        "token_embd.weight appears twice",
    );
    says(
        change(NORM, |t| t.name = "n".repeat(64)),
        "has a name of 64 bytes; the file is damaged",
    );
    says(change(NORM, |t| t.name = "a\nb".into()), "is not text");
    says(
        change("blk.0.attn_q.weight", |t| t.shape = vec![128, 31]),
        "blk.0.attn_q.weight has rows of 31 values, not a multiple of Q8_0's 32",
    );
}

#[test]
fn models() {
    let drop = |name: &'static str| move |f: &mut File| f.tensors.retain(|t| t.name != name);
    says(
        drop("blk.1.ffn_up.weight"),
        "tensor model.layers.1.mlp.up_proj.weight is missing",
    );
    says(
        drop("token_embd.weight"),
        "tensor token_embd.weight is missing",
    );
    says(
        |f| {
            f.f32("blk.0.extra.weight", &[4]);
        },
        "1 unexpected tensor, the first blk.0.extra",
    );
    says(
        |f| {
            f.f32("blk.0.ffn_down.weight", &[64, 128]);
        },
        "mlp.down_proj.weight has shape [64, 128]",
    );
    says(
        |f| {
            f.f32("blk.0.attn_q.weight", &[60, 64]);
        },
        "does not go with the metadata's heads",
    );
    let set = |key: &'static str, value| {
        move |f: &mut File| {
            f.set(key, value);
        }
    };
    says(
        set("general.architecture", text("gemma2")),
        "general.architecture: gemma2 is not supported",
    );
    says(
        set("general.architecture", Meta::U32(1)),
        "general.architecture: a text is needed",
    );
    says(
        |f| {
            f.unset("llama.block_count");
        },
        "llama.block_count: missing",
    );
    says(
        set("llama.block_count", Meta::U32(0)),
        "llama.block_count: 0 is too little",
    );
    says(
        set("llama.block_count", Meta::U32(5000)),
        "llama.block_count: 5000 blocks",
    );
    says(
        set("llama.embedding_length", Meta::U32(u32::MAX)),
        "4294967295 is absurd",
    );
    says(
        set("llama.embedding_length", Meta::I32(-1)),
        "embedding_length: a whole number is needed",
    );
    says(
        set("llama.attention.head_count_kv", Meta::U32(3)),
        "3 does not divide the 2 query heads",
    );
    says(
        set("llama.expert_count", Meta::U32(8)),
        "not supported with a mixture of experts",
    );
    says(
        set("llama.rope.scaling.type", text("yarn")),
        "llama.rope.scaling.type: yarn is not supported",
    );
    says(
        set("llama.rope.dimension_count", Meta::U32(33)),
        "33 of 32 values cannot be rotated",
    );
    says(
        set("llama.attention.causal", Meta::Bool(false)),
        "only causal attention is supported",
    );
    says(
        set("llama.attention.scale", Meta::F32(0.5)),
        "0.5 is not supported, only 1 / sqrt(32)",
    );
    says(
        set(
            "llama.attention.layer_norm_rms_epsilon",
            Meta::F32(f32::NAN),
        ),
        "a finite number",
    );
    says(
        set("llama.attention.head_count", Meta::I32s(vec![2, 4])),
        "layers of different shapes",
    );
    says(
        set("split.count", Meta::U32(2)),
        "join them with llama-gguf-split --merge",
    );
}

#[test]
fn tokenizers() {
    let set = |key: &'static str, value| {
        move |f: &mut File| {
            f.set(key, value);
        }
    };
    says(
        |f| {
            f.unset("tokenizer.ggml.tokens");
        },
        "tokenizer.ggml.tokens: missing",
    );
    says(
        set("tokenizer.ggml.model", text("t5")),
        "tokenizer.ggml.model: t5 is not supported",
    );
    says(
        set("tokenizer.ggml.pre", text("kimi-k2")),
        "the pre-tokenizer kimi-k2 is not supported",
    );
    says(
        set("tokenizer.ggml.tokens", Meta::U32(1)),
        "tokenizer.ggml.tokens: an array of texts",
    );
    let few = Meta::Texts(vec!["a".into()]);
    says(
        set("tokenizer.ggml.tokens", few),
        "1 tokens, but the embedding has 260 rows",
    );
    says(
        set("tokenizer.ggml.token_type", Meta::I32s(vec![1])),
        "1 types, 260 tokens",
    );
    let merge = |merge: &str| Meta::Texts(vec![merge.to_owned()]);
    says(
        set("tokenizer.ggml.merges", merge("he")),
        "\"he\" is no pair of tokens",
    );
    says(
        set("tokenizer.ggml.merges", merge("o o")),
        "\"o\" and \"o\" are joined, but \"oo\" is no token",
    );
    says(
        set("tokenizer.ggml.eos_token_id", Meta::U32(260)),
        "token 260 of a vocabulary of 260",
    );
    says(
        |f| {
            f.set("tokenizer.ggml.add_bos_token", Meta::Bool(true));
            f.unset("tokenizer.ggml.bos_token_id");
        },
        "a begin token is wanted, but tokenizer.ggml.bos_token_id is missing",
    );
    says(
        |f| {
            let Some((_, Meta::Texts(tokens))) = f
                .meta
                .iter_mut()
                .find(|(key, _)| key == "tokenizer.ggml.tokens")
            else {
                panic!("no tokens");
            };
            tokens[7] = tokens[8].clone();
        },
        "tokens 7 and 8 are both",
    );
}

#[test]
fn contents() {
    let mut file = llama();
    file.tensor("blk.1.attn_q.weight").bytes[34..36].copy_from_slice(&[0, 0x7c]);
    let infinite = f32::INFINITY.to_le_bytes();
    file.tensor("output_norm.weight").bytes[8..12].copy_from_slice(&infinite);
    let written = file.write();
    let checkpoint = Checkpoint::open(&written.path).unwrap();
    let name = "model.layers.1.self_attn.q_proj.weight";
    let text = checkpoint.matrix(name, 64, 64).err().unwrap().to_string();
    assert!(text.ends_with(
        "tensor model.layers.1.self_attn.q_proj.weight: a block's scale is not a finite number; \
         the file is damaged"
    ));
    let text = checkpoint
        .vector("model.norm.weight", 64)
        .err()
        .unwrap()
        .to_string();
    assert!(
        text.ends_with("model.norm.weight: value 2 is not a finite number; the file is damaged")
    );
    assert!(checkpoint.matrix(name, 64, 65).is_err());
    assert!(checkpoint.vector("model.norm.weight", 63).is_err());
    assert!(checkpoint.vector("blk.0.attn_norm.weight", 64).is_err());
}

/// Open a file and read all of it, right or wrong.
fn read_all(path: &Path) {
    let Ok(checkpoint) = Checkpoint::open(path) else {
        return;
    };
    for info in checkpoint.tensors() {
        let _ = match info.shape[..] {
            [n, k] => checkpoint.matrix(&info.name, n, k).map(drop),
            _ => checkpoint
                .vector(&info.name, info.shape.iter().product())
                .map(drop),
        };
    }
    let _ = checkpoint.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn flipped_bytes_never_panic(
        flips in proptest::collection::vec((0.0f64..1.0, any::<u8>(), any::<bool>()), 1..6),
        cut in proptest::option::weighted(0.2, 0.0f64..1.0),
    ) {
        let mut file = llama();
        file.put("blk.0.attn_k.weight", &[32, 64], F16, vec![0x11; 32 * 64 * 2]);
        file.put("blk.0.attn_v.weight", &[32, 64], F32, vec![0x11; 32 * 64 * 4]);
        let (mut bytes, start) = file.bytes();
        for (place, value, header) in flips {
            // Most of the file are values; the header is where damage is interesting.
            let within = if header { start } else { bytes.len() };
            bytes[(place * within as f64) as usize] ^= value;
        }
        if let Some(cut) = cut {
            bytes.truncate((cut * bytes.len() as f64) as usize);
        }
        let written = write(&bytes);
        LARGEST.store(0, Ordering::Relaxed);
        read_all(&written.path);
        let largest = LARGEST.load(Ordering::Relaxed);
        prop_assert!(largest <= 8 * bytes.len() + (1 << 20), "{largest} of {}", bytes.len());
    }
}
