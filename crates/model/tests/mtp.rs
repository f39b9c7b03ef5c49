//! The multi-token prediction head against its formula in f64 (tests/reference/make_drafters.py),
//! and what its bits may depend on.

mod drafted;
mod tiny;

use std::ops::{ControlFlow, Range};
use std::path::Path;

use drafted::{Drafted, assert_close, bits, relative_error};
use kozue_checkpoint::{Checkpoint, Options, Size, quantize};
use kozue_kernels::{Cpu, Isa, KvType};
use kozue_model::{Model, Mtp, MtpState, Outputs, Rows, Segment};
use tiny::{argmax, folder, reference};

struct Case {
    drafted: Drafted,
    tokens: Vec<u32>,
    target: Model,
    mtp: Mtp,
}

impl Case {
    fn open(kv: KvType) -> Self {
        Self::at(&folder().join("qwen3_5-multimodal"), kv)
    }

    /// The same model in another format.
    fn at(path: &Path, kv: KvType) -> Self {
        let drafted = Drafted::open("mtp-qwen3_5");
        let checkpoint = Checkpoint::open(path).unwrap();
        let target = Model::load(&checkpoint, kv).unwrap();
        Self {
            tokens: drafted.get("tokens"),
            mtp: Mtp::load(&checkpoint, &target).unwrap().unwrap(),
            target,
            drafted,
        }
    }

    /// The residual stream that the head wants, for all tokens but the last.
    fn features(&self, cpu: &Cpu) -> Vec<f32> {
        let mut state = self.target.new_state();
        let segment = Segment {
            state: &mut state,
            rows: Rows::Chain(&self.tokens[..self.tokens.len() - 1]),
            logit_rows: 0,
            snapshots: &[],
        };
        let wanted = Outputs {
            taps: self.mtp.taps(),
            ..Outputs::default()
        };
        let output = self.target.pass(cpu, &mut [segment], wanted);
        output.unwrap().features.to_vec()
    }

    /// Takes in tokens `rows` of the text.
    fn observe(&self, cpu: &Cpu, state: &mut MtpState, features: &[f32], rows: Range<usize>) {
        let hidden = self.target.config().hidden_size;
        let part = &features[rows.start * hidden..rows.end * hidden];
        let after = &self.tokens[rows.start + 1..rows.end + 1];
        self.mtp
            .observe(cpu, &self.target, state, part, after)
            .unwrap();
    }

    /// A greedy chain of 4 tokens and the logits of each, after what the state has observed and
    /// one more token.
    fn draft(&self, cpu: &Cpu, state: &mut MtpState, features: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let hidden = self.target.config().hidden_size;
        let (mut chain, mut rows) = (Vec::new(), Vec::new());
        let newest = self.tokens[state.len() + 1];
        let last = &features[state.len() * hidden..][..hidden];
        self.mtp
            .draft(cpu, &self.target, state, (last, newest), |logits| {
                rows.extend_from_slice(logits);
                chain.push(argmax(logits));
                chain.last().copied().filter(|_| chain.len() < 4)
            })
            .unwrap();
        (chain, rows)
    }
}

#[test]
fn chains_equal_the_formula() {
    let cpu = Cpu::new(Some(2));
    let case = Case::open(KvType::F32);
    let features = case.features(&cpu);
    let chains: Vec<Vec<u32>> = case.drafted.get("drafts");
    let mut state = case.mtp.new_state();
    for (turn, rows) in case.drafted.rounds().into_iter().enumerate() {
        // The last token's feature goes to the draft with the newest token.
        let start = state.len();
        case.observe(&cpu, &mut state, &features, start..rows.end - 1);
        let (chain, logits) = case.draft(&cpu, &mut state, &features);
        let expected = case.drafted.tensor(&format!("logits.{turn}"));
        assert_close(&logits, &expected, &format!("round {turn}"));
        assert_eq!(chain, chains[turn], "round {turn}");
        assert_eq!(state.len(), rows.end - 1, "a draft takes nothing in");
    }
}

#[test]
fn chains_do_not_depend_on_pieces_earlier_drafts_threads_or_instruction_set() {
    let case = Case::open(KvType::F16);
    let features = case.features(&Cpu::new(Some(2)));
    let total = case.tokens.len() - 2;
    let draft = |cpu: &Cpu, pieces: &[usize]| {
        let mut state = case.mtp.new_state();
        let mut start = 0;
        for more in pieces {
            case.observe(cpu, &mut state, &features, start..start + more);
            start += more;
            case.draft(cpu, &mut state, &features);
        }
        bits(&case.draft(cpu, &mut state, &features).1)
    };
    let expected = draft(&Cpu::with_isa(Some(1), Isa::Portable), &[total]);
    for isa in Isa::available() {
        for threads in [1, 3] {
            let cpu = Cpu::with_isa(Some(threads), isa);
            for pieces in [&vec![1; total][..], &[20, 1, 5, total - 26], &[total]] {
                assert_eq!(
                    draft(&cpu, pieces),
                    expected,
                    "{isa:?}, {threads}, {pieces:?}"
                );
            }
        }
    }
}

/// Quantising keeps the head, and GGUF files have it as one more block.
#[test]
fn the_head_survives_other_formats() {
    let cpu = Cpu::new(Some(2));
    let parent = tempfile::tempdir().unwrap();
    let packed = parent.path().join("packed");
    let options = Options {
        size: Size::L,
        head: None,
        group: 64,
        force: false,
    };
    quantize(
        &cpu,
        &folder().join("qwen3_5-multimodal"),
        &packed,
        options,
        &mut |_| ControlFlow::Continue(()),
    )
    .unwrap();
    let checkpoint = Checkpoint::open(&packed).unwrap();
    let infos = checkpoint.tensors();
    let ahead: Vec<_> = infos
        .into_iter()
        .filter(|info| info.name.starts_with("mtp."))
        .collect();
    assert_eq!(ahead.len(), 15);
    assert_eq!(
        ahead
            .iter()
            .filter(|info| info.format == "int8 group 64")
            .count(),
        8
    );
    let gguf = reference().join("gguf/qwen3_5-mtp-f16.gguf");
    // 8 bits: five per cent a layer, as for whole models; f16: the rounding of weights.
    for (path, bound) in [(&packed, 0.25), (&gguf, 2e-3)] {
        let case = Case::at(path, KvType::F32);
        let features = case.features(&cpu);
        let mut state = case.mtp.new_state();
        case.observe(&cpu, &mut state, &features, 0..19);
        let (_, logits) = case.draft(&cpu, &mut state, &features);
        let vocab = case.target.config().vocab_size;
        let expected = case.drafted.tensor("logits.0");
        // Chains may part after the first token.
        let error = relative_error(&logits[..vocab], &expected[..vocab]);
        println!("{}: {error:.5}", path.display());
        assert!(error < bound, "{}: {error}", path.display());
    }
}

#[test]
fn a_checkpoint_without_the_head_has_none() {
    let checkpoint = Checkpoint::open(&folder().join("qwen3_5")).unwrap();
    let target = Model::load(&checkpoint, KvType::F16).unwrap();
    assert!(Mtp::load(&checkpoint, &target).unwrap().is_none());
}

/// A head that lacks a tensor is told of, and does not keep the model from loading.
#[test]
fn a_damaged_head() {
    let source = folder().join("qwen3_5-multimodal");
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    // Of the same length, so that the rest of the file stays where it is.
    let change = |file: &str| {
        let path = dir.path().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        let name = b"mtp.layers.0.mlp.up_proj.weight";
        let at = bytes.windows(name.len()).position(|part| part == name);
        let at = at.unwrap_or_else(|| panic!("{file} does not name it"));
        bytes[at + 13..at + 16].copy_from_slice(b"mpl");
        std::fs::write(path, bytes).unwrap();
    };
    change("model-00003-of-00003.safetensors");
    change("model.safetensors.index.json");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let target = Model::load(&checkpoint, KvType::F16).unwrap();
    let error = Mtp::load(&checkpoint, &target).err().unwrap().to_string();
    assert!(
        error.contains("tensor mtp.layers.0.mlp.up_proj.weight is missing"),
        "{error}"
    );
}

#[test]
fn the_context_ends_and_tokens_are_checked() {
    let cpu = Cpu::new(Some(1));
    let case = Case::open(KvType::F16);
    let hidden = case.target.config().hidden_size;
    let longest = case.target.config().max_position;
    let mut state = case.mtp.new_state();
    let features = vec![0.5; (longest - 2) * hidden];
    let tokens: Vec<u32> = (0..longest as u32 - 2).map(|i| i % 300).collect();
    let one = &features[..hidden];
    let observe = |state: &mut MtpState, features: &[f32], tokens: &[u32]| {
        let observed = case
            .mtp
            .observe(&cpu, &case.target, state, features, tokens);
        observed.err().map(|error| error.to_string())
    };
    let draft = |state: &mut MtpState, token: u32| {
        let mut count = 0;
        let drafted = case
            .mtp
            .draft(&cpu, &case.target, state, (one, token), |_| {
                count += 1;
                Some(7)
            });
        drafted.map(|()| count).map_err(|error| error.to_string())
    };
    let outside = "token 320 is outside the vocabulary of 320 tokens";
    assert_eq!(observe(&mut state, one, &[320]).unwrap(), outside);
    assert_eq!(draft(&mut state, 320).unwrap_err(), outside);
    assert_eq!(observe(&mut state, &features, &tokens), None);
    let full =
        |needed: usize| format!("{needed} tokens do not fit in the model's context of {longest}");
    let three = &features[..3 * hidden];
    assert_eq!(
        observe(&mut state, three, &[1, 2, 3]).unwrap(),
        full(longest + 1)
    );
    // Two positions are left, for the newest token and one that was drafted.
    assert_eq!(draft(&mut state, 5), Ok(2));
    assert_eq!(observe(&mut state, &three[hidden..], &[1, 2]), None);
    assert_eq!(draft(&mut state, 5), Err(full(longest + 1)));
}
