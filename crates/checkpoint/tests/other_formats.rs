//! Directories that other programs quantised, written here by what their formats document: each
//! weight must be what the format says it is, and most must reach the kernels without loss.
#![allow(missing_docs)]

mod support;

use kozue_checkpoint::Checkpoint;
use kozue_kernels::Matrix;
use serde_json::{Value, json};
use support::{Dir, Model, Tensor, value};

/// A number below `limit` for a place of a tensor.
fn number(name: &str, at: usize, limit: u32) -> u32 {
    ((value(name, at) + 0.125) * 512.0) as u32 % limit
}

/// A matrix of codes that every format can be asked to hold.
struct Coded {
    name: String,
    n: usize,
    k: usize,
    bits: usize,
    group: usize,
}

impl Coded {
    fn code(&self, row: usize, column: usize) -> u32 {
        number(&self.name, row * self.k + column, 1 << self.bits.min(6))
    }

    fn groups(&self) -> usize {
        self.k / self.group
    }

    /// Exact in f16 and bf16.
    fn scale(&self, row: usize, group: usize) -> f32 {
        (1 + number(&self.name, 7 * row + group, 100)) as f32 / 4096.0
    }

    /// From 1 on, so that GPTQ's offset fits.
    fn zero(&self, row: usize, group: usize) -> u32 {
        1 + number(&self.name, 3 * row + group, 15)
    }

    fn weights(&self, zero: impl Fn(usize, usize) -> f32) -> Vec<f32> {
        let places = (0..self.n * self.k).map(|at| (at / self.k, at % self.k));
        let weight = |(row, column): (usize, usize)| {
            let group = column / self.group;
            self.scale(row, group) * (self.code(row, column) as f32 - zero(row, group))
        };
        places.map(weight).collect()
    }

    fn part(&self, part: &str) -> String {
        self.name.replace("weight", part)
    }

    fn scales(&self, part: &str, transposed: bool, dtype: &'static str) -> Tensor {
        let groups = self.groups();
        let shape = if transposed {
            [groups, self.n]
        } else {
            [self.n, groups]
        };
        let values: Vec<f32> = (0..self.n * groups)
            .map(|at| match transposed {
                true => self.scale(at % self.n, at / self.n),
                false => self.scale(at / groups, at % groups),
            })
            .collect();
        Tensor::of(&self.part(part), dtype, &shape, &values)
    }
}

/// A tensor of words into each of which `bits`-bit numbers are put, from the low bits on.
fn words(
    name: &str,
    dtype: &'static str,
    shape: [usize; 2],
    bits: usize,
    number: impl Fn(usize, usize, usize) -> u32,
) -> Tensor {
    let mut bytes = Vec::new();
    for row in 0..shape[0] {
        for column in 0..shape[1] {
            let word = (0..32 / bits).fold(0u32, |word, place| {
                word | number(row, column, place) << (bits * place)
            });
            bytes.extend(word.to_le_bytes());
        }
    }
    Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes,
    }
}

/// What a format makes of a matrix: its tensors, and the weights that they stand for.
type Encode = fn(&Coded) -> (Vec<Tensor>, Vec<f32>);

fn mlx(of: &Coded) -> (Vec<Tensor>, Vec<f32>) {
    let per = 32 / of.bits;
    let codes = words(
        &of.name,
        "U32",
        [of.n, of.k / per],
        of.bits,
        |row, word, place| of.code(row, word * per + place),
    );
    let min = |row: usize, group: usize| -of.scale(row, group) * of.zero(row, group) as f32;
    let minima: Vec<f32> = (0..of.n * of.groups())
        .map(|at| min(at / of.groups(), at % of.groups()))
        .collect();
    let minima = Tensor::of(&of.part("biases"), "F16", &[of.n, of.groups()], &minima);
    let weights = of.weights(|row, group| of.zero(row, group) as f32);
    (
        vec![codes, of.scales("scales", false, "F16"), minima],
        weights,
    )
}

fn gptq(of: &Coded) -> (Vec<Tensor>, Vec<f32>) {
    let per = 32 / of.bits;
    let codes = words(
        &of.part("qweight"),
        "I32",
        [of.k / per, of.n],
        of.bits,
        |word, row, place| of.code(row, word * per + place),
    );
    let zeros = words(
        &of.part("qzeros"),
        "I32",
        [of.groups(), of.n / per],
        of.bits,
        |group, word, place| of.zero(word * per + place, group) - 1,
    );
    let order: Vec<u8> = (0..of.k as u32)
        .flat_map(|at| (at / of.group as u32).to_le_bytes())
        .collect();
    let order = Tensor {
        name: of.part("g_idx"),
        dtype: "I32",
        shape: vec![of.k],
        bytes: order,
    };
    let weights = of.weights(|row, group| of.zero(row, group) as f32);
    (
        vec![codes, zeros, of.scales("scales", true, "F16"), order],
        weights,
    )
}

/// Inputs in the order in which activations are largest, so that groups are no runs of them.
fn gptq_by_activations(of: &Coded) -> (Vec<Tensor>, Vec<f32>) {
    let (mut tensors, _) = gptq(of);
    let group = |input: usize| (input * 5 % of.k) / of.group;
    let order = (0..of.k).flat_map(|input| (group(input) as u32).to_le_bytes());
    tensors[3].bytes = order.collect();
    let weight = |at: usize| {
        let (row, input) = (at / of.k, at % of.k);
        let group = group(input);
        of.scale(row, group) * (of.code(row, input) as f32 - of.zero(row, group) as f32)
    };
    (tensors, (0..of.n * of.k).map(weight).collect())
}

fn awq(of: &Coded) -> (Vec<Tensor>, Vec<f32>) {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let codes = words(
        &of.part("qweight"),
        "I32",
        [of.k, of.n / 8],
        4,
        |input, word, place| of.code(word * 8 + ORDER[place], input),
    );
    let zeros = words(
        &of.part("qzeros"),
        "I32",
        [of.groups(), of.n / 8],
        4,
        |group, word, place| of.zero(word * 8 + ORDER[place], group),
    );
    let weights = of.weights(|row, group| of.zero(row, group) as f32);
    (
        vec![codes, zeros, of.scales("scales", true, "F16")],
        weights,
    )
}

fn shape_of(of: &Coded) -> Tensor {
    Tensor::of(
        &of.part("weight_shape"),
        "I64",
        &[2],
        &[of.n as f32, of.k as f32],
    )
}

fn packed(of: &Coded) -> (Vec<Tensor>, Vec<f32>) {
    let per = 32 / of.bits;
    let codes = words(
        &of.part("weight_packed"),
        "I32",
        [of.n, of.k / per],
        of.bits,
        |row, word, place| of.code(row, word * per + place),
    );
    let middle = f32::from(1u8 << (of.bits - 1));
    let scales = of.scales("weight_scale", false, "BF16");
    (vec![codes, shape_of(of), scales], of.weights(|_, _| middle))
}

fn packed_with_zeros(of: &Coded) -> (Vec<Tensor>, Vec<f32>) {
    let (mut tensors, _) = packed(of);
    let per = 32 / of.bits;
    let shape = [of.n / per, of.groups()];
    tensors.push(words(
        &of.part("weight_zero_point"),
        "I32",
        shape,
        of.bits,
        |word, group, place| of.zero(word * per + place, group),
    ));
    (tensors, of.weights(|row, group| of.zero(row, group) as f32))
}

fn signed(of: &Coded) -> (Vec<Tensor>, Vec<f32>) {
    let places = (0..of.n * of.k).map(|at| (at / of.k, at % of.k));
    let codes = Tensor {
        name: of.name.clone(),
        dtype: "I8",
        shape: vec![of.n, of.k],
        bytes: places
            .map(|(row, column)| (of.code(row, column) as i8 - 32) as u8)
            .collect(),
    };
    let scales = of.scales("weight_scale", false, "BF16");
    (vec![codes, scales], of.weights(|_, _| 32.0))
}

/// Eight-bit floats from 1 to 1.875 with scales for blocks of 16 by 32.
fn float8(of: &Coded) -> (Vec<Tensor>, Vec<f32>) {
    let eighths = |at: usize| number(&of.name, at, 8);
    let blocks = [of.n.div_ceil(16), of.k.div_ceil(32)];
    let codes = Tensor {
        name: of.name.clone(),
        dtype: "F8_E4M3",
        shape: vec![of.n, of.k],
        bytes: (0..of.n * of.k)
            .map(|at| 0x38 | eighths(at) as u8)
            .collect(),
    };
    // Powers of two, so that the weights are exact in bf16.
    let scale = |block: usize| f32::powi(2.0, -(block as i32 % 5));
    let scales: Vec<f32> = (0..blocks[0] * blocks[1]).map(scale).collect();
    let scales = Tensor::of(&of.part("weight_scale_inv"), "F32", &blocks, &scales);
    let weight = |at: usize| {
        let (row, column) = (at / of.k, at % of.k);
        let scale = scale(row / 16 * blocks[1] + column / 32);
        scale * (8 + eighths(at)) as f32 / 8.0
    };
    (vec![codes, scales], (0..of.n * of.k).map(weight).collect())
}

/// Qwen3 with its projections in a format, and their weights.
fn model(
    settings: Value,
    bits: usize,
    group: usize,
    encode: Encode,
) -> (Dir, Vec<(Coded, Vec<f32>)>) {
    let mut model = Model::qwen3();
    model.config["quantization_config"] = settings;
    let names: Vec<String> = model
        .tensors
        .iter()
        .map(|tensor| tensor.name.clone())
        .filter(|name| name.ends_with("_proj.weight"))
        .collect();
    let mut all = Vec::new();
    for name in names {
        let plain = model.remove(&name);
        let [n, k] = plain.shape[..] else {
            panic!("{name} is a matrix")
        };
        let group = if group == 0 { k } else { group };
        let coded = Coded {
            name,
            n,
            k,
            bits,
            group,
        };
        let (tensors, weights) = encode(&coded);
        model.tensors.extend(tensors);
        all.push((coded, weights));
    }
    (model.write(), all)
}

/// Every weight as the format says, and as the kernels get it.
fn check(settings: Value, bits: usize, group: usize, encode: Encode, kept: &str) {
    let (dir, all) = model(settings, bits, group, encode);
    let checkpoint = Checkpoint::open(&dir.path).unwrap_or_else(|error| panic!("{error}"));
    for (coded, weights) in &all {
        let (n, k) = (coded.n, coded.k);
        let stored = checkpoint.vector(&coded.name, n * k).unwrap();
        assert_eq!(&stored, weights, "{}", coded.name);
        let rows: Vec<f32> = match checkpoint.matrix(&coded.name, n, k).unwrap() {
            Matrix::Packed(packed) => {
                let mut rows = vec![0.0; n * k];
                for (row, values) in rows.chunks_exact_mut(k).enumerate() {
                    packed.row_into(row, values);
                }
                rows
            }
            Matrix::Dense(dense) => {
                let mut rows = vec![0.0; n * k];
                for (row, values) in rows.chunks_exact_mut(k).enumerate() {
                    dense.row_into(row, values);
                }
                rows
            }
        };
        if kept.contains("again") {
            let squares =
                |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>();
            let lost = squares(&mut rows.iter().zip(weights).map(|(a, b)| a - b));
            let norm = squares(&mut weights.iter().copied());
            assert!(
                (1e-12..1e-4).contains(&(lost / norm)),
                "{}: {lost} of {norm}",
                coded.name
            );
        } else {
            assert_eq!(&rows, weights, "{}", coded.name);
        }
        let info = checkpoint
            .tensors()
            .into_iter()
            .find(|info| info.name == coded.name)
            .unwrap();
        assert_eq!(
            (&info.shape[..], info.memory.lossy),
            (&[n, k][..], kept.contains("again"))
        );
    }
    let notes: Vec<String> = checkpoint
        .source_notes()
        .iter()
        .map(|note| note.text.clone())
        .collect();
    assert!(
        !notes.is_empty() && notes.iter().all(|note| note.contains(kept)),
        "{notes:?}, not {kept}"
    );
    for info in checkpoint.tensors() {
        checkpoint
            .vector(&info.name, info.shape.iter().product())
            .unwrap();
    }
    checkpoint.finish().unwrap();
}

#[test]
fn mlx_is_read_without_loss() {
    check(
        json!({"group_size": 64, "bits": 4}),
        4,
        64,
        mlx,
        "as int4 group 64, without loss",
    );
    check(
        json!({"group_size": 32, "bits": 8}),
        8,
        32,
        mlx,
        "as int8 group 32, without loss",
    );
}

#[test]
fn gptq_is_read_without_loss_unless_its_groups_are_scattered() {
    let settings = |bits: usize, group: i64| json!({"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": false});
    check(
        settings(4, 32),
        4,
        32,
        gptq,
        "as int4 group 32, without loss",
    );
    check(
        settings(8, 64),
        8,
        64,
        gptq,
        "as int8 group 64, without loss",
    );
    check(settings(4, -1), 4, 0, gptq, ", without loss");
    check(
        settings(4, 32),
        4,
        32,
        gptq_by_activations,
        "quantised again, relative error",
    );
}

#[test]
fn awq_is_read_without_loss_unless_its_groups_are_small() {
    let settings = json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"});
    check(
        settings.clone(),
        4,
        64,
        awq,
        "as int4 group 64, without loss",
    );
    check(settings, 4, 16, awq, "quantised again, relative error");
}

#[test]
fn compressed_tensors_are_read_without_loss() {
    let settings = |format: &str| json!({"quant_method": "compressed-tensors", "format": format});
    let int4 = "as int4 group 32, without loss";
    check(settings("pack-quantized"), 4, 32, packed, int4);
    check(settings("pack-quantized"), 4, 32, packed_with_zeros, int4);
    check(
        settings("pack-quantized"),
        8,
        64,
        packed,
        "as int8 group 64, without loss",
    );
    check(settings("int-quantized"), 6, 0, signed, ", without loss");
}

#[test]
fn blocks_of_eight_bit_floats_become_bf16() {
    let settings = json!({"quant_method": "fp8", "weight_block_size": [16, 32]});
    check(settings, 8, 32, float8, "as BF16, without loss");
}

fn refused(dir: &Dir) -> String {
    let Err(error) = Checkpoint::open(&dir.path) else {
        panic!("a damaged directory was opened")
    };
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn damage_is_one_line() {
    let settings = json!({"quant_method": "gptq", "bits": 4, "group_size": 32});
    for (method, expected) in [
        (json!({"quant_method": "exl2"}), "\"exl2\" is not supported"),
        (
            json!({"quant_method": "gptq", "bits": 3, "group_size": 32}),
            "3 bits are not supported",
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 48}),
            "groups of 48",
        ),
        (
            json!({"quant_method": "awq", "bits": 4, "version": "gemv"}),
            "gemm",
        ),
        (
            json!({"quant_method": "gptq", "bits": 8, "group_size": 32}),
            "do not cover",
        ),
    ] {
        let (dir, _) = model(method, 4, 32, gptq);
        let text = refused(&dir);
        assert!(text.contains(expected), "{text}, not {expected}");
    }
    // A group that is not there.
    let (dir, _) = model(settings, 4, 32, |of| {
        let (mut tensors, weights) = gptq(of);
        tensors[3].bytes[0] = 200;
        (tensors, weights)
    });
    let text = refused(&dir);
    assert!(text.contains("there is no group 200"), "{text}");
    // Zero points of another shape, a matrix without its scales, scales of no matrix.
    type Damage = fn(Vec<Tensor>) -> Vec<Tensor>;
    let damages: [(Damage, &str); 3] = [
        (
            |mut all| {
                all[1].shape = vec![1, 1];
                all[1].bytes.truncate(4);
                all
            },
            "has shape [1, 1]",
        ),
        (
            |mut all| {
                all.remove(2);
                all
            },
            "scales is missing",
        ),
        (
            |mut all| {
                all.remove(0);
                all
            },
            "qzeros: is stored as I32",
        ),
    ];
    for (damage, expected) in damages {
        let mut model = Model::qwen3();
        model.config["quantization_config"] = json!({"quant_method": "awq", "bits": 4});
        let name = "model.layers.0.mlp.up_proj.weight";
        model.remove(name);
        let coded = Coded {
            name: name.to_owned(),
            n: 128,
            k: 64,
            bits: 4,
            group: 32,
        };
        model.tensors.extend(damage(awq(&coded).0));
        let text = refused(&model.write());
        assert!(text.contains(expected), "{text}, not {expected}");
    }
}

#[test]
fn what_mlx_does_to_the_norms_of_qwen35_is_undone() {
    let mut model = Model::qwen35();
    model.config["quantization"] = json!({"group_size": 64, "bits": 4});
    let norms: Vec<String> = model
        .tensors
        .iter()
        .map(|tensor| tensor.name.clone())
        .filter(|name| name.ends_with("norm.weight") && !name.contains("linear_attn"))
        .collect();
    for name in &norms {
        let tensor = model.tensor(name);
        let len = tensor.shape[0];
        let values: Vec<f32> = (0..len).map(|at| value(name, at) + 1.0).collect();
        *tensor = Tensor::of(name, "F32", &[len], &values);
    }
    for tensor in &mut model.tensors {
        if tensor.name.ends_with(".conv1d.weight") {
            tensor.shape = vec![128, 4, 1];
        }
    }
    let dir = model.write();
    let checkpoint = Checkpoint::open(&dir.path).unwrap_or_else(|error| panic!("{error}"));
    assert!(norms.len() == 11, "{norms:?}");
    for name in &norms {
        let len = if name.contains("self_attn") { 32 } else { 64 };
        let expected: Vec<f32> = (0..len).map(|at| value(name, at)).collect();
        assert_eq!(checkpoint.vector(name, len).unwrap(), expected, "{name}");
    }
    let own = "model.layers.0.linear_attn.norm.weight";
    let expected: Vec<f32> = (0..16).map(|at| value(own, at)).collect();
    assert_eq!(checkpoint.vector(own, 16).unwrap(), expected);
}
