//! A model with its text side, ready to answer.

use crate::chat::ChatTemplate;
use crate::error::Error;
use crate::memory::{Needs, check, release_unused};
use crate::session::Session;
use crate::speculation::{DraftKind, Speculation, SpeculationOptions, Speculator};
use crate::target::LanguageModel;
use crate::tokenizer::{Control, Tokenizer};
use kozue_checkpoint::description::TokenizerSource;
use kozue_checkpoint::{Checkpoint, Description, EMBED, Note, fingerprint};
use kozue_kernels::{Cpu, KvType};
use kozue_model::{Footprint, Model, Outputs, PassOutput, Segment, State};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::Builder;
use xxhash_rust::xxh3::xxh3_64;

/// Memory for snapshots of earlier turns in a session, besides the newest one.
const SNAPSHOT_BYTES: usize = 1 << 30;

/// Counts the changes of arithmetic that give the same tokens another state.
const ARITHMETIC: u32 = 1;

/// A model on this machine's processor.
pub struct CpuModel {
    cpu: Arc<Cpu>,
    model: Model,
}

impl CpuModel {
    /// The weights.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The processor.
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }
}

impl LanguageModel for CpuModel {
    type State = State;

    fn vocab_size(&self) -> usize {
        self.model.config().vocab_size
    }

    fn max_position(&self) -> usize {
        self.model.config().max_position
    }

    fn new_state(&self) -> State {
        self.model.new_state()
    }

    fn footprint(&self, state: &State) -> Footprint {
        state.footprint()
    }

    fn write_state(state: &State, to: &mut dyn Write) -> io::Result<()> {
        state.write_to(to)
    }

    fn read_state(&self, bytes: &[u8]) -> Result<State, Error> {
        let state = self.model.read_state(bytes);
        state.map_err(|error| Error::Model(error.to_string()))
    }

    fn pass(
        &self,
        segments: &mut [Segment<'_, State>],
        wanted: Outputs<'_>,
    ) -> Result<PassOutput<'_>, Error> {
        self.model
            .pass(&self.cpu, segments, wanted)
            .map_err(|error| Error::Model(error.to_string()))
    }

    fn commit(&self, state: &mut State, path: &[usize]) -> Result<(), Error> {
        state
            .commit(&self.cpu, path)
            .map_err(|error| Error::Model(error.to_string()))
    }
}

/// A checkpoint with all that answering needs.
pub struct Loaded {
    description: Description,
    notes: Vec<Note>,
    bytes_per_pass: u64,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The weights.
    pub model: CpuModel,
    kv: KvType,
    speculation: Option<Box<Speculation>>,
}

impl Loaded {
    /// Opens the model at `path`. Errors: whatever is wrong with its files.
    pub fn open(path: &Path, cpu: Cpu, kv: KvType) -> Result<Loaded, Error> {
        Loaded::open_on(path, Arc::new(cpu), kv)
    }

    /// Opens another model on the same processor.
    pub fn beside(&self, path: &Path, kv: KvType) -> Result<Loaded, Error> {
        Loaded::open_on(path, self.model.cpu.clone(), kv)
    }

    /// How keys and values are kept.
    pub fn kv(&self) -> KvType {
        self.kv
    }

    fn open_on(path: &Path, cpu: Arc<Cpu>, kv: KvType) -> Result<Loaded, Error> {
        let checkpoint = Checkpoint::open(path).map_err(|error| Error::Model(error.to_string()))?;
        check(
            own_bytes(&checkpoint),
            "the weights take",
            "quantise the model once (kozue quantize works tensor by tensor), or run a smaller one",
        )?;
        // A large vocabulary takes as long to read as packed weights.
        let (tokenizer, model) = std::thread::scope(|scope| {
            let read = || Tokenizer::new(&checkpoint.description().tokenizer);
            let tokenizer = Builder::new().spawn_scoped(scope, read);
            let model = Model::load(&checkpoint, kv);
            let tokenizer = match tokenizer {
                Ok(thread) => thread
                    .join()
                    .unwrap_or_else(|_| Err(Error::Tokenizer("its parser gave up".to_string()))),
                // The system has no more threads.
                Err(_) => read(),
            };
            (tokenizer, model)
        });
        let tokenizer = tokenizer?;
        let model = model.map_err(|error| Error::Model(error.to_string()))?;
        let mut description = checkpoint.description().clone();
        // Several megabytes that have been read.
        description.tokenizer = TokenizerSource::Json(String::new());
        let notes = checkpoint.source_notes();
        let bytes_per_pass = bytes_per_pass(&checkpoint);
        drop(checkpoint);
        release_unused();
        let model = CpuModel { cpu, model };
        Ok(Loaded {
            description,
            notes,
            bytes_per_pass,
            tokenizer,
            model,
            kv,
            speculation: None,
        })
    }

    /// An error unless tokens mean the same text as those of `other`; `path` is where this model
    /// was opened.
    pub fn check_vocabulary(&self, other: &Loaded, path: &Path) -> Result<(), Error> {
        let vocab_size = other.tokenizer.vocab_size();
        let differs = (0..vocab_size as u32)
            .find(|&token| self.tokenizer.piece(token) != other.tokenizer.piece(token));
        match differs {
            None => Ok(()),
            Some(token) => Err(Error::Draft(format!(
                "{} has another vocabulary than the model (they differ at token {token}): the two cannot be used together",
                path.display()
            ))),
        }
    }

    /// Loads what drafts; `path` is where this model was opened.
    ///
    /// Errors: no such drafter, a damaged one, or one that was made for another target.
    pub fn speculate(&mut self, path: &Path, options: &SpeculationOptions) -> Result<(), Error> {
        self.speculation = Some(Box::new(Speculation::open(options, path, self)?));
        Ok(())
    }

    /// What drafts.
    pub fn draft_kind(&self) -> DraftKind {
        self.speculation
            .as_ref()
            .map_or(DraftKind::None, |speculation| speculation.kind())
    }

    /// A drafter for a new sequence; `None` for plain decoding.
    pub fn speculator(&self) -> Option<Speculator<'_>> {
        self.speculation.as_ref()?.start(&self.model)
    }

    /// What the checkpoint says of itself, without the tokenizer's text.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// What was done to the weights at load.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// What a sequence of so many tokens takes, and what drafts for it.
    pub fn needs(&self, tokens: usize) -> Needs {
        let speculation = self.speculation.as_ref();
        let drafts = speculation.and_then(|speculation| speculation.shape(&self.model));
        let (config, threads) = (&self.description.config, self.model.cpu.threads());
        Needs::new(config, drafts.as_ref(), self.kv, threads, tokens)
    }

    /// What tells the states of this model, opened at `path`, from all that could be mistaken for
    /// them: its weights and configuration, how keys and values are kept, the arithmetic of this
    /// version. Reads the weights once.
    pub fn state_identity(&self, path: &Path) -> Result<u64, Error> {
        let model = fingerprint(path).map_err(|error| Error::Model(error.to_string()))?;
        let version = env!("CARGO_PKG_VERSION");
        let decides = format!("{model:016x} {:?} {version} {ARITHMETIC}", self.kv);
        Ok(xxh3_64(decides.as_bytes()))
    }

    /// An error if there is no memory for a sequence to grow from `held` to `tokens` tokens.
    pub fn check_context(&self, held: usize, tokens: usize) -> Result<(), Error> {
        let bytes = |tokens| self.needs(tokens).total();
        check(
            bytes(tokens).saturating_sub(if held > 0 { bytes(held) } else { 0 }),
            &format!("a context of {tokens} tokens takes"),
            "give a smaller --ctx or a shorter prompt",
        )
    }

    /// Bytes of the weights that a forward pass reads.
    pub fn bytes_per_pass(&self) -> u64 {
        self.bytes_per_pass
    }

    /// The chat template. Errors: there is none, or it does not parse.
    pub fn chat_template(&self) -> Result<ChatTemplate, Error> {
        ChatTemplate::new(&self.description, &self.tokenizer)
    }

    /// The tokens of text that is continued as it is: the model's first token before it, where
    /// the model wants one.
    pub fn raw_prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut tokens = self.tokenizer.encode(text, Control::Recognised)?;
        if let Some(bos) = self.description.generation.bos
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        Ok(tokens)
    }

    /// A session of `context` tokens, at most what the model was made for.
    pub fn session(&self, context: Option<usize>) -> Session<'_, CpuModel> {
        self.plain_session(context)
            .speculating(|| self.speculator())
    }

    /// As [`Loaded::session`], with another drafter.
    pub fn session_drafted<'a>(
        &'a self,
        context: Option<usize>,
        speculation: &'a Speculation,
    ) -> Session<'a, CpuModel> {
        self.plain_session(context)
            .speculating(|| speculation.start(&self.model))
    }

    fn plain_session(&self, context: Option<usize>) -> Session<'_, CpuModel> {
        let longest = self.model.max_position();
        let context = context.unwrap_or(longest).min(longest);
        Session::new(
            &self.model,
            &self.tokenizer,
            &self.description.generation.eos,
            context,
            SNAPSHOT_BYTES.saturating_add(self.needs(context).own() as usize),
        )
    }
}

/// Bytes that the weights take besides the file's own pages.
fn own_bytes(checkpoint: &Checkpoint) -> u64 {
    let tensors = checkpoint.tensors();
    let own = tensors.iter().filter(|t| !t.aside && !t.memory.mapped);
    own.map(|tensor| tensor.memory.bytes).sum()
}

/// What a token's pass reads: all tensors in use, of experts those that a token takes, but of an
/// embedding table that is not the head too only single rows.
fn bytes_per_pass(checkpoint: &Checkpoint) -> u64 {
    let config = &checkpoint.description().config;
    let read = |name: &str| config.tied || name != EMBED;
    let tensors = checkpoint.tensors();
    tensors
        .iter()
        .filter(|tensor| !tensor.aside && read(&tensor.name))
        .map(|tensor| config.read_by_a_token(&tensor.name, tensor.memory.bytes))
        .sum()
}
