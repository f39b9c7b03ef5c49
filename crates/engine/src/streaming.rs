//! Tokens to text, one token at a time.
//!
//! A character may be spread over several tokens. Text is handed out as soon as its characters
//! are whole, so the pieces joined are always the text of all tokens at once, and no piece ever
//! holds half a character.

use crate::tokenizer::{Pieces, Tokenizer};
use std::sync::LazyLock;

/// Incremental decoder of one answer.
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Bytes of a character that is not whole yet.
    bytes: Vec<u8>,
    /// For tokenizers that look at several pieces: tokens kept as context, then tokens whose
    /// text is still open.
    tokens: Vec<u32>,
    context: usize,
}

impl<'a> StreamDecoder<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer) -> StreamDecoder<'a> {
        StreamDecoder {
            tokenizer,
            bytes: Vec::new(),
            tokens: Vec::new(),
            context: 0,
        }
    }

    /// Takes one token and appends to `out` the text that is certain now. Control tokens and
    /// unused ids have no text.
    pub fn push(&mut self, token: u32, out: &mut String) {
        if self.tokenizer.is_control(token) {
            return;
        }
        let Some(piece) = self.tokenizer.piece(token) else {
            return;
        };
        match self.tokenizer.pieces() {
            Pieces::Bytes => {
                append_bytes(&piece, &mut self.bytes);
                take_whole_characters(&mut self.bytes, out);
            }
            Pieces::Joined => self.push_joined(token, out),
        }
    }

    /// The answer has ended: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.bytes.is_empty() {
            out.push_str(&String::from_utf8_lossy(&self.bytes));
            self.bytes.clear();
        }
        if self.tokens.len() > self.context {
            let (before, all) = self.joined();
            out.push_str(all.strip_prefix(before.as_str()).unwrap_or(""));
        }
        self.tokens.clear();
        self.context = 0;
    }

    fn joined(&self) -> (String, String) {
        (
            self.tokenizer.join(&self.tokens[..self.context]),
            self.tokenizer.join(&self.tokens),
        )
    }

    /// The text that a token adds is the difference of two decodings with some tokens of
    /// context before them, because the first piece of a text may be treated differently.
    fn push_joined(&mut self, token: u32, out: &mut String) {
        self.tokens.push(token);
        let (before, all) = self.joined();
        // U+FFFD at the end: bytes of a character that the next tokens may complete. Four
        // bytes make any character, so a fifth token proves that this one never gets whole.
        let open = all.ends_with(char::REPLACEMENT_CHARACTER);
        if open && self.tokens.len() - self.context < 5 {
            return;
        }
        if let Some(new) = all.strip_prefix(before.as_str()) {
            if new.is_empty() {
                return;
            }
            out.push_str(new);
        }
        self.tokens.drain(..self.context);
        self.context = self.tokens.len();
    }
}

/// The bytes of a byte-level piece.
pub(crate) fn piece_bytes(piece: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    append_bytes(piece, &mut bytes);
    bytes
}

/// Appends the bytes of a byte-level piece. An added token is written plainly; where one of its
/// characters is outside the table, all of it is taken as it is.
fn append_bytes(piece: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for character in piece.chars() {
        match CHAR_TO_BYTE.get(character as usize).copied().flatten() {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(piece.as_bytes());
                return;
            }
        }
    }
}

/// Moves whole characters from `bytes` to `out`; what can never become a character turns into
/// U+FFFD, as in the text decoded at once.
fn take_whole_characters(bytes: &mut Vec<u8>, out: &mut String) {
    let mut done = 0;
    loop {
        match std::str::from_utf8(&bytes[done..]) {
            Ok(text) => {
                out.push_str(text);
                done = bytes.len();
                break;
            }
            Err(error) => {
                let valid = done + error.valid_up_to();
                out.push_str(&String::from_utf8_lossy(&bytes[done..valid]));
                done = valid;
                let Some(length) = error.error_len() else {
                    break;
                };
                out.push(char::REPLACEMENT_CHARACTER);
                done += length;
            }
        }
    }
    bytes.drain(..done);
}

/// GPT-2's printable stand-in for a byte: itself where it is printable, otherwise the next
/// free character from U+0100 on.
pub(crate) fn byte_to_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return byte as char;
    }
    let rank = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

static CHAR_TO_BYTE: LazyLock<[Option<u8>; 0x180]> = LazyLock::new(|| {
    let mut table = [None; 0x180];
    for byte in 0..=255u8 {
        table[byte_to_char(byte) as usize] = Some(byte);
    }
    table
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::byte_level;
    use kozue_checkpoint::description::TokenizerSource;
    use proptest::prelude::*;

    #[test]
    fn the_byte_table_is_gpt2s() {
        assert_eq!(byte_to_char(b' '), 'Ġ');
        assert_eq!(byte_to_char(b'\n'), 'Ċ');
        assert_eq!(byte_to_char(b'a'), 'a');
        assert_eq!(byte_to_char(0x7f), 'ġ');
        assert_eq!(byte_to_char(0xad), 'Ń');
        assert_eq!(CHAR_TO_BYTE.iter().flatten().count(), 256);
    }

    /// Every piece must be whole characters, and all pieces the whole text.
    fn pieces(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<String> {
        let mut stream = tokenizer.stream();
        let mut pieces = Vec::new();
        for &token in tokens {
            let mut piece = String::new();
            stream.push(token, &mut piece);
            pieces.push(piece);
        }
        let mut rest = String::new();
        stream.finish(&mut rest);
        pieces.push(rest);
        pieces
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        let tokenizer = byte_level();
        let tokens: Vec<u32> = "é日🎉".bytes().map(u32::from).collect();
        assert_eq!(
            pieces(&tokenizer, &tokens),
            ["", "é", "", "", "日", "", "", "", "🎉", ""]
        );
    }

    #[test]
    fn bytes_that_never_become_a_character_are_replaced_at_once() {
        let tokenizer = byte_level();
        // A lone continuation byte; a cut sequence followed by a letter; a cut end.
        let tokens = [
            0x80,
            u32::from(b'a'),
            0xe6,
            0x97,
            u32::from(b'b'),
            0xf0,
            0x9f,
        ];
        assert_eq!(
            pieces(&tokenizer, &tokens),
            ["\u{fffd}", "a", "", "", "\u{fffd}b", "", "", "\u{fffd}"]
        );
    }

    #[test]
    fn control_tokens_are_silent_and_others_are_not() {
        let tokenizer = byte_level();
        assert_eq!(
            tokenizer.decode(&[258, 256, 259, 260, 5000, 257]),
            "he<think>ll"
        );
    }

    #[test]
    fn a_control_token_inside_a_character_does_not_break_it() {
        let tokenizer = byte_level();
        assert_eq!(tokenizer.decode(&[0xc3, 259, 0xa9]), "é");
    }

    /// A tokenizer in SentencePiece's manner: a leading space is dropped from the first piece,
    /// unknown characters are spelled as byte pieces.
    fn sentence_pieces() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        vocab.insert("<unk>".into(), 0.into());
        for byte in 0..=255u32 {
            vocab.insert(format!("<0x{byte:02X}>"), (byte + 1).into());
        }
        for (n, piece) in ["▁", "a", "b", "▁a", "▁b"].iter().enumerate() {
            vocab.insert(piece.to_string(), (257 + n).into());
        }
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            ]},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": "<unk>",
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
                "byte_fallback": true, "vocab": vocab, "merges": [["▁", "a"], ["▁", "b"]]
            }
        });
        Tokenizer::new(&TokenizerSource::Json(json.to_string())).unwrap()
    }

    #[test]
    fn joined_pieces_keep_inner_spaces_and_whole_characters() {
        let tokenizer = sentence_pieces();
        assert_eq!(tokenizer.pieces(), Pieces::Joined);
        let byte = |b: u8| u32::from(b) + 1;
        let mut tokens = vec![260, 261];
        tokens.extend("日".bytes().map(byte));
        tokens.push(260);
        assert_eq!(pieces(&tokenizer, &tokens).concat(), "a b日 a");
        assert_eq!(
            pieces(&tokenizer, &tokens),
            ["a", " b", "", "", "日", " a", ""]
        );
        // A cut character at the end still shows that something was there.
        assert!(tokenizer.decode(&tokens[..4]).ends_with('\u{fffd}'));
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_text(text in "\\PC{0,40}") {
            let tokenizer = byte_level();
            let tokens = tokenizer.encode(&text, crate::tokenizer::Control::Text).unwrap();
            prop_assert_eq!(pieces(&tokenizer, &tokens).concat(), text);
        }

        #[test]
        fn any_bytes_give_what_decoding_at_once_gives(
            bytes in proptest::collection::vec(
                prop_oneof![any::<u8>(), Just(0xe3), Just(0x81), Just(0x82), Just(0xf0)],
                0..60,
            ),
        ) {
            let tokenizer = byte_level();
            let tokens: Vec<u32> = bytes.iter().map(|b| u32::from(*b)).collect();
            let joined = pieces(&tokenizer, &tokens).concat();
            prop_assert_eq!(joined, String::from_utf8_lossy(&bytes));
        }
    }
}
