//! Tokens of an answer to the text that its reader sees.

use crate::session::Event;
use crate::stop::StopStrings;
use crate::streaming::StreamDecoder;
use crate::tokenizer::Tokenizer;

/// Tokens to the text that the caller sees.
pub(crate) struct Writer<'a> {
    decoder: StreamDecoder<'a>,
    stop: StopStrings,
    text: String,
    decoded: String,
    shown: String,
}

impl<'a> Writer<'a> {
    pub fn new(tokenizer: &'a Tokenizer, stop: &[String]) -> Writer<'a> {
        Writer {
            decoder: tokenizer.stream(),
            stop: StopStrings::new(stop),
            text: String::new(),
            decoded: String::new(),
            shown: String::new(),
        }
    }

    /// Takes in the next token. Whether a stop string is complete.
    pub fn push(&mut self, token: u32, events: &mut dyn FnMut(Event)) -> bool {
        self.decoder.push(token, &mut self.decoded);
        let stopped = self.stop.push(&self.decoded, &mut self.shown);
        self.decoded.clear();
        self.show(events);
        stopped
    }

    fn show(&mut self, events: &mut dyn FnMut(Event)) {
        if !self.shown.is_empty() {
            events(Event::Text(&self.shown));
            self.text.push_str(&self.shown);
            self.shown.clear();
        }
    }

    /// Shows what was held back, and gives the whole text.
    pub fn finish(mut self, events: &mut dyn FnMut(Event)) -> String {
        self.decoder.finish(&mut self.decoded);
        self.stop.push(&self.decoded, &mut self.shown);
        self.stop.finish(&mut self.shown);
        self.show(events);
        self.text
    }
}
