//! What several tests of the engine need.
#![allow(dead_code)]

use kozue_checkpoint::description::TokenizerSource;
use kozue_engine::tokenizer::{Control, Tokenizer};
use kozue_engine::{Error, LanguageModel, Session};
use kozue_kernels::Cpu;
use kozue_model::{Footprint, Outputs, PassOutput, Rows, Segment, Tree};
use std::cell::{Cell, RefCell};
use std::io::{self, Write};

/// The tokenizer of a tiny checkpoint: byte-level BPE with Qwen's control tokens.
pub fn tokenizer() -> Tokenizer {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/reference/tiny/qwen3_5/tokenizer.json"
    );
    let json = std::fs::read_to_string(path).expect("the tiny checkpoints are in the repository");
    Tokenizer::new(&TokenizerSource::Json(json)).unwrap()
}

pub fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, Control::Recognised).unwrap()
}

/// A model that wants to write one text, whatever it reads: after `n` tokens it prefers the
/// token of the script at `n`.
pub struct Scripted {
    pub vocab_size: usize,
    pub max_position: usize,
    /// The preferred token by absolute position; outside, token 0.
    pub script: RefCell<Vec<u32>>,
    /// Tokens and passes computed so far.
    pub computed: Cell<usize>,
    pub passes: RefCell<Vec<usize>>,
    /// The pass (counted from 0) that fails or gives logits that are no numbers.
    pub failing_pass: Option<usize>,
    pub bad_pass: Option<usize>,
    /// Memory to give logits in.
    pub cpu: Cpu,
}

impl Scripted {
    pub fn new(tokenizer: &Tokenizer) -> Scripted {
        Scripted {
            vocab_size: tokenizer.vocab_size(),
            max_position: 4096,
            script: RefCell::default(),
            computed: Cell::new(0),
            passes: RefCell::default(),
            failing_pass: None,
            bad_pass: None,
            cpu: Cpu::new(Some(1)),
        }
    }

    /// Makes the model answer a prompt of `position` tokens with `tokens`.
    pub fn answer_at(&self, position: usize, tokens: &[u32]) {
        let mut script = self.script.borrow_mut();
        let len = script.len().max(position);
        script.resize(len, 0);
        script.truncate(position);
        script.extend_from_slice(tokens);
    }
}

/// The tokens read, so that a test sees what a session really computed on, and a tree that waits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScriptState {
    pub tokens: Vec<u32>,
    tree: Option<Tree>,
}

impl Scripted {
    /// The logits after `len` tokens.
    fn row(&self, len: usize, pass: usize) -> Vec<f32> {
        let mut row = vec![0.0; self.vocab_size];
        let next = self.script.borrow().get(len).copied().unwrap_or(0);
        row[next as usize] = if self.bad_pass == Some(pass) {
            f32::NAN
        } else {
            9.0
        };
        row
    }
}

impl LanguageModel for Scripted {
    type State = ScriptState;

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_position(&self) -> usize {
        self.max_position
    }

    fn new_state(&self) -> ScriptState {
        ScriptState::default()
    }

    fn footprint(&self, state: &ScriptState) -> Footprint {
        Footprint {
            own: state.tokens.len(),
            pages: Vec::new(),
        }
    }

    fn write_state(state: &ScriptState, to: &mut dyn Write) -> io::Result<()> {
        let mut tokens = state.tokens.iter();
        tokens.try_for_each(|token| to.write_all(&token.to_le_bytes()))
    }

    fn read_state(&self, bytes: &[u8]) -> Result<ScriptState, Error> {
        let (tokens, _) = bytes.as_chunks();
        Ok(ScriptState {
            tokens: tokens.iter().map(|&t| u32::from_le_bytes(t)).collect(),
            tree: None,
        })
    }

    fn pass(
        &self,
        segments: &mut [Segment<'_, ScriptState>],
        _: Outputs<'_>,
    ) -> Result<PassOutput<'_, ScriptState>, Error> {
        let pass = self.passes.borrow().len();
        let rows = segments.iter().map(|s| s.rows.tokens().len()).sum();
        self.passes.borrow_mut().push(rows);
        self.computed.set(self.computed.get() + rows);
        let (mut logits, mut snapshots) = (Vec::new(), Vec::new());
        for segment in segments {
            let len = segment.state.tokens.len();
            match segment.rows {
                Rows::Chain(tokens) => {
                    segment.state.tokens.extend(tokens);
                    let taken = segment.snapshots.iter().map(|rows| ScriptState {
                        tokens: segment.state.tokens[..len + rows].to_vec(),
                        tree: None,
                    });
                    snapshots.push(taken.collect());
                    let first = tokens.len() - segment.logit_rows;
                    (first..tokens.len()).for_each(|n| logits.extend(self.row(len + n + 1, pass)));
                }
                Rows::Tree(tree) => {
                    segment.state.tree = Some(tree.clone());
                    snapshots.push(Vec::new());
                    for &depth in tree.depths() {
                        logits.extend(self.row(len + depth as usize + 1, pass));
                    }
                }
            }
            if self.failing_pass == Some(pass) {
                segment.state.tokens.push(9999);
                return Err(Error::Model("the disk is on fire".into()));
            }
        }
        let mut given = self.cpu.scratch(logits.len());
        given.copy_from_slice(&logits);
        Ok(PassOutput {
            logits: given,
            features: self.cpu.scratch(0),
            hidden: self.cpu.scratch(0),
            snapshots,
        })
    }

    fn commit(&self, state: &mut ScriptState, path: &[usize]) -> Result<(), Error> {
        let tree = state.tree.take().expect("a tree was verified");
        state
            .tokens
            .extend(path.iter().map(|&node| tree.tokens()[node]));
        Ok(())
    }
}

/// The tokens that a session's state has read.
pub fn read(session: &Session<Scripted>) -> Vec<u32> {
    let (tokens, state) = session.state().expect("there was an answer");
    assert_eq!(tokens, state.tokens);
    tokens
}
