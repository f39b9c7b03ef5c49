//! DFlash drafters of every generation against their formulas in f64
//! (tests/reference/make_drafters.py), and what their bits may depend on.

mod drafted;
mod tiny;

use drafted::{Drafted, assert_close, bits, logits};
use kozue_kernels::{Cpu, Isa, KvType};
use kozue_model::{DFlash, DFlashState, Model, Outputs, Rows, Segment};

const NAMES: [&str; 3] = ["dflash-qwen3", "dflash-qwen3_5", "dflash-symmetric"];

/// A drafter, its target, and features of the tokens of all rounds.
struct Case {
    drafted: Drafted,
    target: Model,
    dflash: DFlash,
    features: Vec<f32>,
}

impl Case {
    fn open(name: &str, kv: KvType) -> Self {
        let drafted = Drafted::open(name);
        let target = drafted.target(kv);
        Self {
            dflash: DFlash::load(&drafted.drafter(), &target).unwrap(),
            features: drafted.tensor("features"),
            target,
            drafted,
        }
    }

    fn observe(&self, cpu: &Cpu, state: &mut DFlashState, rows: std::ops::Range<usize>) {
        let width = self.dflash.taps().len() * self.target.config().hidden_size;
        let part = &self.features[rows.start * width..rows.end * width];
        self.dflash.observe(cpu, state, part);
    }

    fn draft(&self, cpu: &Cpu, state: &mut DFlashState, token: u32) -> Vec<f32> {
        self.dflash
            .draft(cpu, &self.target, state, token, usize::MAX)
            .unwrap()
    }
}

#[test]
fn blocks_equal_the_formulas() {
    let cpu = Cpu::new(Some(2));
    for name in NAMES {
        let case = Case::open(name, KvType::F32);
        assert_eq!(case.dflash.block(), 8, "{name}");
        let newest: Vec<u32> = case.drafted.get("newest");
        let mut state = case.dflash.new_state();
        for (turn, rows) in case.drafted.rounds().into_iter().enumerate() {
            case.observe(&cpu, &mut state, rows.clone());
            assert_eq!(state.len(), rows.end);
            let rows = case.draft(&cpu, &mut state, newest[turn]);
            let what = format!("{name}, round {turn}");
            assert_close(
                &rows,
                &case.drafted.tensor(&format!("hidden.{turn}")),
                &what,
            );
            let logits = logits(&cpu, &case.target, &rows);
            assert_close(
                &logits,
                &case.drafted.tensor(&format!("logits.{turn}")),
                &what,
            );
        }
    }
}

/// The features that the reference has read are those that a pass gives for the drafter's taps.
#[test]
fn features_equal_transformers() {
    let cpu = Cpu::new(Some(2));
    for name in NAMES {
        let case = Case::open(name, KvType::F32);
        let tokens: Vec<u32> = case.drafted.get("tokens");
        let mut state = case.target.new_state();
        let segment = Segment {
            state: &mut state,
            rows: Rows::Chain(&tokens),
            logit_rows: 0,
            snapshots: &[],
        };
        let wanted = Outputs {
            taps: case.dflash.taps(),
            ..Outputs::default()
        };
        let output = case.target.pass(&cpu, &mut [segment], wanted).unwrap();
        assert_close(&output.features, &case.features, name);
    }
}

/// However features arrive, and whatever was drafted and rejected meanwhile, the same bits.
#[test]
fn drafts_do_not_depend_on_pieces_or_earlier_drafts() {
    for kv in [KvType::F32, KvType::F16] {
        for name in NAMES {
            let case = Case::open(name, kv);
            let cpu = Cpu::new(Some(2));
            let total = case.drafted.rounds().last().unwrap().end;
            let mut at_once = case.dflash.new_state();
            case.observe(&cpu, &mut at_once, 0..total);
            let expected = bits(&case.draft(&cpu, &mut at_once, 42));
            assert_eq!(
                bits(&case.draft(&cpu, &mut at_once, 42)),
                expected,
                "{name}: drafting twice"
            );
            for pieces in [vec![1; total], vec![20, 1, 5, 8], vec![total - 1, 1]] {
                let mut state = case.dflash.new_state();
                let mut start = 0;
                for (turn, more) in pieces.iter().enumerate() {
                    case.observe(&cpu, &mut state, start..start + more);
                    start += more;
                    case.draft(&cpu, &mut state, 100 + turn as u32);
                }
                let drafted = bits(&case.draft(&cpu, &mut state, 42));
                assert_eq!(drafted, expected, "{name}, {kv:?}, {pieces:?}");
                let bytes = state.footprint().bytes();
                assert_eq!(bytes, at_once.footprint().bytes());
            }
        }
    }
}

/// Far into a text a window still hides what lies before it, to the row.
#[test]
fn a_window_hides_what_lies_before_it() {
    let cpu = Cpu::new(Some(2));
    let case = Case::open("dflash-symmetric", KvType::F32);
    let (len, window) = (600, 5);
    let hidden = case.target.config().hidden_size;
    let width = case.dflash.taps().len() * hidden;
    let draft = |changed: std::ops::Range<usize>| {
        let mut features: Vec<f32> = (0..len * width)
            .map(|i| case.features[i % case.features.len()] + (i / 4096) as f32 * 0.01)
            .collect();
        features[changed.start * width..changed.end * width].fill(0.75);
        let mut state = case.dflash.new_state();
        case.dflash.observe(&cpu, &mut state, &features);
        case.draft(&cpu, &mut state, 42)
    };
    let expected = draft(0..0);
    // The first row returned stands at len + 1 and sees from len + 2 - window on.
    let edge = len + 2 - window;
    assert_eq!(bits(&draft(0..edge)), bits(&expected));
    let seen = draft(edge..edge + 1);
    assert_ne!(bits(&seen[..hidden]), bits(&expected[..hidden]));
    assert_eq!(bits(&seen[hidden..]), bits(&expected[hidden..]));
}

#[test]
fn drafts_do_not_depend_on_threads_or_instruction_set() {
    for name in NAMES {
        let case = Case::open(name, KvType::F16);
        let draft = |cpu: &Cpu| {
            let mut state = case.dflash.new_state();
            case.observe(cpu, &mut state, 0..34);
            bits(&case.draft(cpu, &mut state, 42))
        };
        let expected = draft(&Cpu::with_isa(Some(1), Isa::Portable));
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let cpu = Cpu::with_isa(Some(threads), isa);
                assert_eq!(draft(&cpu), expected, "{name}, {isa:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    let cpu = Cpu::new(Some(1));
    let case = Case::open("dflash-qwen3", KvType::F16);
    let mut state = case.dflash.new_state();
    let error = case
        .dflash
        .draft(&cpu, &case.target, &mut state, 320, usize::MAX)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "token 320 is outside the vocabulary of 320 tokens"
    );
}
