//! What several tests of the engine need.
#![allow(dead_code)]

use kozue_checkpoint::description::TokenizerSource;
use kozue_engine::tokenizer::{Control, Tokenizer};
use kozue_engine::{Error, LanguageModel};
use std::cell::{Cell, RefCell};

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
    pub can_truncate: bool,
    /// Tokens and passes computed so far.
    pub computed: Cell<usize>,
    pub passes: RefCell<Vec<usize>>,
    /// The pass (counted from 0) that fails or gives logits that are no numbers.
    pub failing_pass: Option<usize>,
    pub bad_pass: Option<usize>,
}

impl Scripted {
    pub fn new(tokenizer: &Tokenizer) -> Scripted {
        Scripted {
            vocab_size: tokenizer.vocab_size(),
            max_position: 4096,
            script: RefCell::default(),
            can_truncate: false,
            computed: Cell::new(0),
            passes: RefCell::default(),
            failing_pass: None,
            bad_pass: None,
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

impl LanguageModel for Scripted {
    /// The tokens read, so that a test sees what a session really computed on.
    type State = Vec<u32>;

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_position(&self) -> usize {
        self.max_position
    }

    fn new_state(&self) -> Vec<u32> {
        Vec::new()
    }

    fn advance(
        &self,
        state: &mut Vec<u32>,
        tokens: &[u32],
        rows: usize,
    ) -> Result<Vec<f32>, Error> {
        let pass = self.passes.borrow().len();
        self.passes.borrow_mut().push(tokens.len());
        self.computed.set(self.computed.get() + tokens.len());
        if self.failing_pass == Some(pass) {
            state.push(9999);
            return Err(Error::Model("the disk is on fire".into()));
        }
        let mut logits = Vec::new();
        for (n, token) in tokens.iter().enumerate() {
            state.push(*token);
            if n + rows >= tokens.len() {
                let mut row = vec![0.0; self.vocab_size];
                let next = self.script.borrow().get(state.len()).copied().unwrap_or(0);
                row[next as usize] = if self.bad_pass == Some(pass) {
                    f32::NAN
                } else {
                    9.0
                };
                logits.extend(row);
            }
        }
        Ok(logits)
    }

    fn truncate(&self, state: &mut Vec<u32>, len: usize) -> bool {
        if self.can_truncate {
            state.truncate(len);
        }
        self.can_truncate
    }
}
