//! The messages of a chat and the tokens that stand for them.

use crate::answer::{Answer, FinishReason};
use crate::chat::{ChatOptions, ChatTemplate, Message, Rendered};
use crate::error::Error;
use crate::thinking;
use crate::tokenizer::Tokenizer;

/// A chat in progress.
///
/// An answer's text may tokenize differently from how the model wrote it. So that the state of
/// earlier turns stays usable, the tokens that were really seen are kept and only the text after
/// them is tokenized, wherever the template renders the earlier turns as they were.
pub struct Conversation<'a> {
    template: &'a ChatTemplate,
    tokenizer: &'a Tokenizer,
    options: ChatOptions,
    messages: Vec<Message>,
    rendered: Option<Rendered>,
    seen: Option<Seen>,
}

struct Seen {
    text: String,
    tokens: Vec<u32>,
}

impl<'a> Conversation<'a> {
    /// An empty chat, or one that begins with a system message.
    pub fn new(
        template: &'a ChatTemplate,
        tokenizer: &'a Tokenizer,
        options: ChatOptions,
        system: Option<&str>,
    ) -> Conversation<'a> {
        Conversation {
            template,
            tokenizer,
            options,
            messages: system
                .map(|text| Message::new("system", text))
                .into_iter()
                .collect(),
            rendered: None,
            seen: None,
        }
    }

    /// All messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Adds a user's message and gives the tokens to answer. Where this fails, the message is
    /// not kept.
    pub fn ask(&mut self, text: &str) -> Result<Vec<u32>, Error> {
        self.messages.push(Message::new("user", text));
        let prompt = self.prompt();
        if prompt.is_err() {
            self.messages.pop();
        }
        prompt
    }

    /// Takes back the last question, which was not answered.
    pub fn retract(&mut self) {
        if self
            .messages
            .last()
            .is_some_and(|message| message.role == "user")
        {
            self.messages.pop();
        }
    }

    /// Makes room: forgets the oldest question and its answer, and gives the tokens of the prompt
    /// without them. `None` where the question to answer is the only one.
    pub fn forget_oldest(&mut self) -> Result<Option<Vec<u32>>, Error> {
        let is_question = |message: &Message| message.role == "user";
        let mut questions = (0..self.messages.len()).filter(|&i| is_question(&self.messages[i]));
        let (Some(first), Some(second)) = (questions.next(), questions.next()) else {
            return Ok(None);
        };
        self.messages.drain(first..second);
        self.prompt().map(Some)
    }

    /// The text that the model continues after [`Conversation::ask`].
    pub fn prompt_text(&self) -> String {
        self.rendered
            .as_ref()
            .map(Rendered::text)
            .unwrap_or_default()
    }

    /// Adds the answer to the last question.
    pub fn answered(&mut self, prompt: &[u32], answer: &Answer) {
        let (thought, text) = thinking::split(&self.prompt_text(), &answer.text);
        self.messages.push(Message {
            reasoning_content: Some(thought).filter(|thought| !thought.is_empty()),
            ..Message::new("assistant", text)
        });
        let Some(rendered) = &self.rendered else {
            return;
        };
        let mut seen = Seen {
            text: rendered.marked().to_string(),
            tokens: prompt.to_vec(),
        };
        // Only a whole answer: text cut off at a stop string is not the text of its tokens.
        if answer.finish_reason == FinishReason::Stop && answer.ended_by_token {
            seen.text.push_str(&answer.text);
            let whole = answer.token_ids.len().saturating_sub(1);
            seen.tokens.extend_from_slice(&answer.token_ids[..whole]);
        }
        self.seen = Some(seen);
    }

    fn prompt(&mut self) -> Result<Vec<u32>, Error> {
        let rendered = self.template.render(&self.messages, &self.options)?;
        let tokens = match &self.seen {
            Some(seen) if self.continues(seen, &rendered) => {
                let mut tokens = seen.tokens.clone();
                tokens.extend(rendered.tokens_from(seen.text.len(), self.tokenizer)?);
                tokens
            }
            _ => rendered.tokens(self.tokenizer)?,
        };
        self.rendered = Some(rendered);
        Ok(tokens)
    }

    /// Whether the new text goes on after the seen one at a control token, where no piece can
    /// reach across the border.
    fn continues(&self, seen: &Seen, rendered: &Rendered) -> bool {
        rendered
            .marked()
            .strip_prefix(seen.text.as_str())
            .is_some_and(|rest| {
                self.tokenizer
                    .control_texts()
                    .iter()
                    .any(|control| rest.starts_with(control.as_str()))
            })
    }
}
