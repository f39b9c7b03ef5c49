//! `kozue run`: one prompt, one answer; or a chat.

use crate::chat;
use crate::cli::{RunArgs, SamplingArgs};
use crate::default_model::model_path;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::panel;
use crate::printer::Printer;
use crate::prompt::asked;
use kozue_engine::chat::ChatOptions;
use kozue_engine::conversation::Conversation;
use kozue_engine::memory::release_unused;
use kozue_engine::sampling::Sampling;
use kozue_engine::{Answer, Event, FinishReason, LanguageModel, Loaded, Request, thinking};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::sync::atomic::Ordering;

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    let asked = asked(args)?;
    if asked.prompt.is_none() && (args.raw || args.json) {
        let option = if args.raw { "--raw" } else { "--json" };
        return Err(Failure::Usage(format!(
            "{option} needs a prompt: a chat has none"
        )));
    }
    let path = model_path(asked.model.as_deref())?;
    let mut loaded = Loaded::open(&path, args.machine.cpu(), args.machine.kv.into())?;
    check_context(args, &loaded)?;
    args.draft.apply(&mut loaded, &path)?;
    show_notes(args, &loaded);
    let setup = Setup {
        args,
        loaded: &loaded,
        interrupt: Interrupt::on_ctrl_c()?,
    };
    match asked.prompt {
        None => chat::run(&setup),
        Some(prompt) if args.raw => setup.answer_raw(&prompt),
        Some(prompt) => setup.answer_once(&prompt),
    }
}

fn check_context(args: &RunArgs, loaded: &Loaded) -> Result<(), Failure> {
    let longest = loaded.model.max_position();
    match args.ctx {
        Some(ctx) if ctx > longest => Err(Failure::Usage(format!(
            "--ctx {ctx} is more than the {longest} tokens that the model was made for"
        ))),
        Some(ctx) => Ok(loaded.check_context(0, ctx)?),
        None => Ok(()),
    }
}

/// Tells what became of the weights at load: in one line, if that changed values.
fn show_notes(args: &RunArgs, loaded: &Loaded) {
    let (lossy, exact): (Vec<_>, Vec<_>) = loaded.notes().iter().partition(|note| note.lossy);
    for note in exact {
        tracing::info!("{}", note.text);
    }
    let lossy: Vec<&str> = lossy.iter().map(|note| note.text.as_str()).collect();
    if !args.quiet && !lossy.is_empty() {
        // Nobody to tell is no reason to fail.
        let _ = writeln!(
            io::stderr(),
            "kozue: weights converted at load: {}",
            lossy.join("; ")
        );
    }
}

/// What every answer of this run needs.
pub struct Setup<'a> {
    pub args: &'a RunArgs,
    pub loaded: &'a Loaded,
    pub interrupt: Interrupt,
}

impl Setup<'_> {
    fn answer_raw(&self, text: &str) -> Result<(), Failure> {
        let prompt = self.loaded.raw_prompt(text)?;
        self.answer_alone(prompt, None)
    }

    fn answer_once(&self, text: &str) -> Result<(), Failure> {
        let template = self.loaded.chat_template()?;
        let mut chat = Conversation::new(
            &template,
            &self.loaded.tokenizer,
            self.chat_options(),
            self.args.system.as_deref(),
        );
        let prompt = chat.ask(text)?;
        self.answer_alone(prompt, Some(&chat.prompt_text()))
    }

    /// One answer, and the end. `text` is what the template made of the prompt.
    fn answer_alone(&self, prompt: Vec<u32>, text: Option<&str>) -> Result<(), Failure> {
        let mut session = self.loaded.session(self.args.ctx).once();
        let request = self.request(prompt);
        // What it took to cut a long prompt into tokens.
        release_unused();
        self.check_memory(0, &request)?;
        let answer = if self.args.json {
            let answer = session.generate(&request, self.interrupt.flag(), &mut |_| ())?;
            print_json(&answer, text, request.sampling.seed)?;
            answer
        } else {
            let mut printer = Printer::new(text);
            let result = session.generate(&request, self.interrupt.flag(), &mut |event| {
                self.show_event(event, &mut printer);
            });
            printer.finish()?;
            let answer = result?;
            self.show_panel(&answer, &request);
            answer
        };
        match answer.finish_reason {
            FinishReason::Cancelled => Err(self.interrupt.failure()),
            FinishReason::Stop | FinishReason::Length => Ok(()),
        }
    }

    /// An error if there is no memory for a request's prompt and the answer it asks for, beside
    /// the `held` tokens that are there already.
    pub fn check_memory(&self, held: usize, request: &Request) -> Result<(), kozue_engine::Error> {
        let asked = request.prompt.len() + request.max_tokens.unwrap_or(1);
        self.loaded.check_context(held, asked.min(self.context()))
    }

    /// Tokens that prompt and answer may have together.
    pub fn context(&self) -> usize {
        let longest = self.loaded.model.max_position();
        self.args.ctx.map_or(longest, |ctx| ctx.min(longest))
    }

    /// Shows how an answer goes on; ends it where nobody reads it any more.
    pub fn show_event(&self, event: Event, printer: &mut Printer) {
        match event {
            Event::Prefill { done, total } => panel::prefill(done, total),
            Event::Token(_) | Event::Round(_) => {}
            Event::Text(text) => {
                if !printer.push(text) {
                    self.interrupt.flag().store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// The figures, unless they are not wanted. The seed is one of them where it matters.
    pub fn show_panel(&self, answer: &Answer, request: &Request) {
        if !self.args.quiet {
            let sampled = request.sampling.temperature > 0.0;
            panel::show(answer, sampled.then_some(request.sampling.seed));
        }
    }

    /// The template's options.
    pub fn chat_options(&self) -> ChatOptions {
        ChatOptions {
            enable_thinking: self.args.no_thinking.then_some(false),
            ..ChatOptions::default()
        }
    }

    /// A request with this run's options.
    pub fn request(&self, prompt: Vec<u32>) -> Request {
        Request {
            prompt,
            sampling: sampling(&self.args.sampling, self.loaded),
            max_tokens: self.args.max_tokens,
            stop: self.args.stop.clone(),
            grammar: None,
            logprobs: None,
            ignore_eos: self.args.ignore_eos,
            trace: false,
        }
    }
}

/// The model's recommendation, with the user's options in their place.
fn sampling(args: &SamplingArgs, loaded: &Loaded) -> Sampling {
    // The standard library's hasher is keyed by the system's random numbers.
    let seed = args
        .seed
        .unwrap_or_else(|| RandomState::new().hash_one(0) >> 32);
    let recommended = Sampling::recommended(&loaded.description().generation, seed);
    Sampling {
        temperature: args.temperature.unwrap_or(recommended.temperature),
        top_k: args
            .top_k
            .map_or(recommended.top_k, |k| Some(k).filter(|k| *k > 0)),
        top_p: args.top_p.unwrap_or(recommended.top_p),
        min_p: args.min_p.unwrap_or(recommended.min_p),
        repetition_penalty: args
            .repetition_penalty
            .unwrap_or(recommended.repetition_penalty),
        presence_penalty: args.presence_penalty.unwrap_or(0.0),
        frequency_penalty: args.frequency_penalty.unwrap_or(0.0),
        penalty_window: args.penalty_window,
        logit_bias: args.logit_bias.clone(),
        seed,
    }
}

/// One object; a thought is kept apart from the text.
fn print_json(answer: &Answer, prompt: Option<&str>, seed: u64) -> Result<(), Failure> {
    let mut object = serde_json::to_value(answer).map_err(Failure::failed)?;
    if let Some(prompt) = prompt {
        let (thought, text) = thinking::split(prompt, &answer.text);
        object["text"] = text.into();
        if !thought.is_empty() {
            object["thinking"] = thought.into();
        }
    }
    object["seed"] = seed.into();
    writeln!(io::stdout(), "{object}").map_err(Failure::output)
}
