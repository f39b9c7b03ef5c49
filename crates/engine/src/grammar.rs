//! Answers that follow a grammar.
//!
//! A [`Grammar`] is the state of a parser along one answer: it says which tokens may come next
//! and advances by the one that does. A clone is a state of its own, so that every node of a
//! draft tree has the mask of its own path. The parser is llguidance's; it works on bytes, so a
//! model may cut a text into tokens as it likes.
//!
//! A reasoning model thinks in free text first. The grammar then waits for the token that closes
//! the thought, and the answer cannot end before.

use crate::error::Error;
use crate::tokenizer::{Tokenizer, one_line};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value as Json, json};
use std::fmt;
use std::sync::Arc;

/// Between the parts of JSON: nothing, a space, or a new line and its indentation. Bounded,
/// because a model may like white space so much that it writes nothing else.
const JSON_SPACE: &str = r"( |\n {0,40})?";

/// A vocabulary, prepared for grammars. Takes a moment to make and is shared by all of them.
pub struct Vocabulary {
    factory: ParserFactory,
    /// All tokens but those that end an answer, one bit each.
    free: Vec<u32>,
    thought_opens: Option<u32>,
    thought_closes: Option<u32>,
}

/// What may come before the text that a grammar describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thought {
    /// Nothing.
    None,
    /// A thought, if the model opens one with its first token.
    Possible,
    /// The rest of a thought that the prompt has opened.
    Open,
}

impl Vocabulary {
    /// For a model with `vocab_size` logits, whose answers end with one of `eos`.
    ///
    /// Errors: no token ends an answer; a vocabulary that is too large.
    pub fn new(
        tokenizer: &Tokenizer,
        eos: &[u32],
        vocab_size: usize,
    ) -> Result<Arc<Vocabulary>, Error> {
        let fits = |token: &u32| (*token as usize) < vocab_size;
        let eos: Vec<u32> = eos.iter().copied().filter(fits).collect();
        let Some(&first) = eos.first() else {
            return Err(Error::Grammar(
                "the model names no token that ends an answer".to_string(),
            ));
        };
        let size = u32::try_from(vocab_size)
            .map_err(|_| Error::Grammar("the vocabulary is too large".to_string()))?;
        let words: Vec<Vec<u8>> = (0..size).map(|token| word(tokenizer, token)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(size, first), &words).with_eos_tokens(&eos);
        // Not canonical: the model itself decides how forced text is cut into tokens.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(failed)?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        let mut free = vec![0; vocab_size.div_ceil(32)];
        for token in (0..size).filter(|token| !eos.contains(token)) {
            free[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(Arc::new(Vocabulary {
            factory,
            free,
            thought_opens: tokenizer.id("<think>").filter(fits),
            thought_closes: tokenizer.id("</think>").filter(fits),
        }))
    }
}

/// A token's bytes as llguidance wants them: control tokens behind a byte that no text has.
fn word(tokenizer: &Tokenizer, token: u32) -> Vec<u8> {
    if tokenizer.is_control(token) {
        let name = tokenizer.piece(token).unwrap_or_default();
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend_from_slice(name.as_bytes());
        return word;
    }
    tokenizer.token_bytes(token).unwrap_or_default()
}

/// A parser's state along one answer.
#[derive(Clone)]
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    matcher: Matcher,
    thought: Thought,
    mask: Option<Vec<u32>>,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter
            .debug_struct("Grammar")
            .field("thought", &self.thought)
            .finish_non_exhaustive()
    }
}

impl Grammar {
    /// JSON that `schema` describes. Errors: a schema that says nothing, or uses what the parser
    /// does not know.
    pub fn json_schema(
        vocabulary: &Arc<Vocabulary>,
        schema: &Json,
        thought: Thought,
    ) -> Result<Grammar, Error> {
        if !schema.is_object() {
            return Err(Error::Grammar("a JSON schema is an object".to_string()));
        }
        let schema = bounded_space(schema);
        // Alone first: after an empty line nobody would see that no text satisfies it.
        let alone = TopLevelGrammar::from_json_schema(schema.clone());
        let alone = Grammar::new(vocabulary, alone, Thought::None)?;
        if thought == Thought::None {
            return Ok(alone);
        }
        // Models leave a line empty after a thought.
        let after = TopLevelGrammar::from_lark(format!(
            "start: LEAD? json\nLEAD: /\\n{{1,2}}/\njson: %json {schema}\n"
        ));
        Grammar::new(vocabulary, after, thought)
    }

    /// Any JSON object.
    pub fn json_object(vocabulary: &Arc<Vocabulary>, thought: Thought) -> Result<Grammar, Error> {
        Grammar::json_schema(vocabulary, &json!({"type": "object"}), thought)
    }

    /// Text that matches a regular expression as a whole.
    pub fn regex(
        vocabulary: &Arc<Vocabulary>,
        pattern: &str,
        thought: Thought,
    ) -> Result<Grammar, Error> {
        Grammar::new(vocabulary, TopLevelGrammar::from_regex(pattern), thought)
    }

    /// Text of a grammar in llguidance's variant of Lark.
    pub fn lark(
        vocabulary: &Arc<Vocabulary>,
        rules: &str,
        thought: Thought,
    ) -> Result<Grammar, Error> {
        let grammar = TopLevelGrammar::from_lark(rules.to_string());
        Grammar::new(vocabulary, grammar, thought)
    }

    fn new(
        vocabulary: &Arc<Vocabulary>,
        grammar: TopLevelGrammar,
        thought: Thought,
    ) -> Result<Grammar, Error> {
        let thought = match thought {
            Thought::Open if vocabulary.thought_closes.is_none() => {
                return Err(Error::Grammar(
                    "the model's vocabulary has no token that closes a thought: ask for an answer without one"
                        .to_string(),
                ));
            }
            Thought::Possible
                if vocabulary.thought_opens.is_none() || vocabulary.thought_closes.is_none() =>
            {
                Thought::None
            }
            thought => thought,
        };
        let parser = vocabulary.factory.create_parser(grammar).map_err(failed)?;
        let mut matcher = Matcher::new(Ok(parser));
        // That no text satisfies a grammar, as where a schema refers to nothing but itself, shows at
        // the first token.
        if matcher.get_error().is_none() && matcher.compute_mask().is_err() {
            return Err(Error::Grammar(
                "no text satisfies it: does a schema refer to nothing but itself?".to_string(),
            ));
        }
        match matcher.get_error() {
            Some(error) => Err(Error::Grammar(one_line(&error))),
            None => Ok(Grammar {
                vocabulary: Arc::clone(vocabulary),
                matcher,
                thought,
                mask: None,
            }),
        }
    }

    /// Which tokens may come next: bit `token % 32` of word `token / 32`. End tokens are among
    /// them where the text may end here, and alone where it must.
    ///
    /// Errors: the grammar is too complex here for the parser's bounds.
    pub fn mask(&mut self) -> Result<&[u32], Error> {
        if self.thought == Thought::Open {
            return Ok(&self.vocabulary.free);
        }
        let mask = match self.mask.take() {
            Some(mask) => mask,
            None => {
                let words = self.vocabulary.free.len();
                let computed = self.matcher.compute_mask_or_eos().map_err(failed)?;
                let mut mask = computed.as_slice().to_vec();
                mask.resize(words, 0);
                if self.thought == Thought::Possible
                    && let Some(open) = self.vocabulary.thought_opens
                {
                    mask[open as usize / 32] |= 1 << (open % 32);
                }
                mask
            }
        };
        Ok(self.mask.insert(mask))
    }

    /// Whether `token` may come next.
    pub fn allows(&mut self, token: u32) -> Result<bool, Error> {
        let mask = self.mask()?;
        let word = mask.get(token as usize / 32).copied().unwrap_or(0);
        Ok(word >> (token % 32) & 1 == 1)
    }

    /// Gives the logits of tokens that may not come next to minus infinity.
    pub fn rule_out(&mut self, logits: &mut [f32]) -> Result<(), Error> {
        for (logits, word) in logits.chunks_mut(32).zip(self.mask()?) {
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    /// How many of `tokens`, one after another, may come next.
    pub fn legal(&mut self, tokens: &[u32]) -> Result<usize, Error> {
        let mut state = self.clone();
        for (done, &token) in tokens.iter().enumerate() {
            // Within the grammar the parser walks by itself.
            if state.thought == Thought::None && !state.matcher.is_stopped() {
                let rest = &tokens[done..];
                let legal = state.matcher.validate_tokens(rest).map_err(failed)?;
                return Ok(done + legal);
            }
            if !state.accept(token)? {
                return Ok(done);
            }
        }
        Ok(tokens.len())
    }

    /// Advances by a token. `false`, with nothing changed, where it may not come.
    pub fn accept(&mut self, token: u32) -> Result<bool, Error> {
        if !self.allows(token)? {
            return Ok(false);
        }
        match self.thought {
            Thought::Open => {
                if self.vocabulary.thought_closes == Some(token) {
                    self.thought = Thought::None;
                }
            }
            Thought::Possible if self.vocabulary.thought_opens == Some(token) => {
                self.thought = Thought::Open;
                self.mask = None;
            }
            Thought::Possible | Thought::None => {
                self.thought = Thought::None;
                self.mask = None;
                // At its end the parser takes no more tokens, and only end tokens were allowed.
                if !self.matcher.is_stopped() {
                    self.matcher.consume_token(token).map_err(failed)?;
                }
            }
        }
        Ok(true)
    }

    /// Whether the text is whole, so that only an end token may come.
    pub fn finished(&self) -> bool {
        self.thought != Thought::Open && self.matcher.is_stopped()
    }

    /// Text that must come next, whatever the model wants; empty where it has a choice. Its
    /// tokens are drafts that cannot be wrong but in how the text is cut.
    pub fn forced_text(&mut self) -> String {
        if self.thought != Thought::None || self.matcher.is_stopped() {
            return String::new();
        }
        let mut bytes = self.matcher.compute_ff_bytes();
        // A character may be forced in part.
        if let Err(error) = std::str::from_utf8(&bytes) {
            bytes.truncate(error.valid_up_to());
        }
        String::from_utf8(bytes).unwrap_or_default()
    }
}

/// The schema with bounds on the white space between its parts.
pub fn bounded_space(schema: &Json) -> Json {
    let mut schema = schema.clone();
    if let Json::Object(fields) = &mut schema {
        let options = json!({"whitespace_pattern": JSON_SPACE});
        fields.insert("x-guidance".to_string(), options);
    }
    schema
}

fn failed(error: impl fmt::Display) -> Error {
    Error::Grammar(one_line(&error.to_string()))
}
