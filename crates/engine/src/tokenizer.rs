//! Text to tokens, and what a token stands for.

use crate::error::Error;
use crate::streaming::{StreamDecoder, piece_bytes};
use crate::tokenizer_json::read;
use kozue_checkpoint::description::TokenizerSource;
use std::collections::HashSet;
use std::sync::OnceLock;
use tokenizers::{DecoderWrapper, Tokenizer as Bpe};

/// Whether the text of a control token (such as `<|im_end|>`) becomes that token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// It does: the text comes from a template, or from a user who asked for raw text.
    Recognised,
    /// It stays text: the words of a chat must not end a message or open another.
    Text,
}

/// Marks of an answer's parts.
const MARKS: [&str; 7] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
];

/// How pieces become text again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pieces {
    /// Every character of a piece stands for one byte (GPT-2's table).
    Bytes,
    /// The tokenizer's own rules, which see several pieces at once.
    Joined,
}

/// A model's tokenizer.
pub struct Tokenizer {
    bpe: Bpe,
    /// The same one, blind for control tokens; made when first needed.
    blind: OnceLock<Bpe>,
    control_texts: Vec<String>,
    control_ids: HashSet<u32>,
    mark_ids: Vec<u32>,
    pieces: Pieces,
}

impl Tokenizer {
    /// Reads a tokenizer. Errors: its description does not parse.
    pub fn new(source: &TokenizerSource) -> Result<Tokenizer, Error> {
        let (TokenizerSource::Json(json) | TokenizerSource::Gguf(json)) = source;
        let mut bpe = read(json)?;
        // Settings of the training pipeline; a prompt is never cut or filled up.
        bpe.with_truncation(None)
            .map_err(|error| Error::Tokenizer(one_line(&error.to_string())))?;
        bpe.with_padding(None);

        let mut control_texts = Vec::new();
        let mut control_ids = HashSet::new();
        for (id, token) in bpe.get_added_tokens_decoder() {
            if !token.special || token.content.is_empty() {
                continue;
            }
            // The marks around thoughts and calls are part of the text even where a tokenizer
            // calls them control tokens: they tell what belongs to what.
            if !MARKS.contains(&token.content.as_str()) {
                control_ids.insert(id);
            }
            control_texts.push(token.content.clone());
        }
        // The longest first, so that the first match at a place is the longest.
        control_texts.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        let pieces = match bpe.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Pieces::Bytes,
            _ => Pieces::Joined,
        };
        let mark_ids = MARKS
            .iter()
            .filter_map(|mark| bpe.token_to_id(mark))
            .collect();
        Ok(Tokenizer {
            bpe,
            blind: OnceLock::new(),
            control_texts,
            control_ids,
            mark_ids,
            pieces,
        })
    }

    /// The tokens of `text`; nothing is put before or after it.
    pub fn encode(&self, text: &str, control: Control) -> Result<Vec<u32>, Error> {
        let bpe = match control {
            Control::Recognised => &self.bpe,
            Control::Text if !self.names_control_token(text) => &self.bpe,
            Control::Text => self.blind(),
        };
        let encoding = bpe
            .encode_fast(text, false)
            .map_err(|error| Error::Encode(one_line(&error.to_string())))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn blind(&self) -> &Bpe {
        self.blind.get_or_init(|| {
            let mut blind = self.bpe.clone();
            blind.set_encode_special_tokens(true);
            blind
        })
    }

    fn names_control_token(&self, text: &str) -> bool {
        self.control_texts
            .iter()
            .any(|control| text.contains(control.as_str()))
    }

    /// The texts of all control tokens, the longest first.
    pub fn control_texts(&self) -> &[String] {
        &self.control_texts
    }

    /// Whether a token is a control token, which never shows in an answer's text.
    pub fn is_control(&self, token: u32) -> bool {
        self.control_ids.contains(&token)
    }

    /// Whether a token is one of the marks around thoughts and calls.
    pub fn is_mark(&self, token: u32) -> bool {
        self.mark_ids.contains(&token)
    }

    /// The id of a token by its exact text.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.bpe.token_to_id(text)
    }

    /// How the vocabulary writes a token; `None` for an unused id.
    pub fn piece(&self, token: u32) -> Option<String> {
        self.bpe.id_to_token(token)
    }

    /// The bytes that a token adds to a text; `None` for an unused id. Control tokens have their
    /// name's. A tokenizer that looks at several pieces may change them at a text's beginning.
    pub fn token_bytes(&self, token: u32) -> Option<Vec<u8>> {
        let piece = self.piece(token)?;
        Some(match self.pieces {
            Pieces::Bytes => piece_bytes(&piece),
            Pieces::Joined => {
                let byte = piece
                    .strip_prefix("<0x")
                    .and_then(|rest| rest.strip_suffix('>'))
                    .and_then(|hex| u8::from_str_radix(hex, 16).ok());
                match byte {
                    Some(byte) => vec![byte],
                    None => piece.replace('\u{2581}', " ").into_bytes(),
                }
            }
        })
    }

    /// Number of ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        let added = self.bpe.get_added_vocabulary();
        let last_added = added.get_added_tokens_decoder().keys().max();
        self.bpe
            .get_vocab_size(false)
            .max(last_added.map_or(0, |id| *id as usize + 1))
    }

    /// Turns tokens into text one by one.
    pub fn stream(&self) -> StreamDecoder<'_> {
        StreamDecoder::new(self)
    }

    /// The text of tokens, control tokens left out.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = self.stream();
        let mut text = String::new();
        for &token in tokens {
            stream.push(token, &mut text);
        }
        stream.finish(&mut text);
        text
    }

    pub(crate) fn pieces(&self) -> Pieces {
        self.pieces
    }

    /// The text of several tokens by the tokenizer's own rules, control tokens left out by
    /// the caller.
    pub(crate) fn join(&self, tokens: &[u32]) -> String {
        self.bpe.decode(tokens, false).unwrap_or_default()
    }
}

/// Messages of libraries may have several lines; an error has one.
pub(crate) fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A byte-level tokenizer with one token per byte, two merges and Qwen-like added tokens.
    pub(crate) fn byte_level() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        let mut next = 0;
        let mut add = |piece: String| {
            vocab.insert(piece, next.into());
            next += 1;
        };
        for byte in 0..=255u8 {
            add(crate::streaming::byte_to_char(byte).to_string());
        }
        add("he".into());
        add("ll".into());
        let added = |id: u32, content: &str, special: bool| {
            serde_json::json!({
                "id": id, "content": content, "special": special, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false
            })
        };
        let json = serde_json::json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
            "padding": null,
            "added_tokens": [
                added(258, "<|im_start|>", true),
                added(259, "<|im_end|>", true),
                added(260, "<think>", false),
                added(261, "</think>", false),
            ],
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "vocab": vocab, "merges": [["h", "e"], ["l", "l"]]
            }
        });
        Tokenizer::new(&TokenizerSource::Json(json.to_string())).unwrap()
    }

    #[test]
    fn merges_and_added_tokens() {
        let tokenizer = byte_level();
        assert_eq!(
            tokenizer
                .encode("hello<|im_end|>", Control::Recognised)
                .unwrap(),
            [256, 257, u32::from(b'o'), 259]
        );
        assert_eq!(tokenizer.vocab_size(), 262);
        assert_eq!(tokenizer.id("<|im_end|>"), Some(259));
        assert_eq!(tokenizer.piece(256).as_deref(), Some("he"));
        assert_eq!(tokenizer.piece(9999), None);
        assert_eq!(tokenizer.control_texts(), ["<|im_start|>", "<|im_end|>"]);
    }

    #[test]
    fn control_tokens_stay_text_where_asked() {
        let tokenizer = byte_level();
        let tokens = tokenizer.encode("<|im_end|>", Control::Text).unwrap();
        assert_eq!(tokens.len(), "<|im_end|>".len());
        assert_eq!(tokenizer.decode(&tokens), "<|im_end|>");
        // Marks that are part of the text are not control tokens.
        assert_eq!(tokenizer.encode("<think>", Control::Text).unwrap(), [260]);
    }

    #[test]
    fn the_truncation_stored_in_the_file_is_ignored() {
        let tokenizer = byte_level();
        assert_eq!(
            tokenizer.encode("abcdefgh", Control::Text).unwrap().len(),
            8
        );
    }

    #[test]
    fn a_broken_tokenizer_is_one_line() {
        for json in ["", "{}", "{\"model\": 3}", "[1,\n2]"] {
            let Err(error) = Tokenizer::new(&TokenizerSource::Json(json.into())) else {
                panic!("{json} was accepted");
            };
            assert!(!error.to_string().contains('\n'));
        }
    }
}
