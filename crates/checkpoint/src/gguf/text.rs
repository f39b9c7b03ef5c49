//! The text side of a GGUF file: tokenizer, chat template, sampling and stopping.

use crate::description::{GenerationDefaults, TokenizerSource};
use crate::error::Error;
use crate::text::TextSide;

use super::metadata::Metadata;
use super::tokenizer::{self, Kind, Vocabulary};

const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const TEMPLATE: &str = "tokenizer.chat_template";

/// Control tokens that end an answer in the models of the known families. GGUF has one end
/// token; chat models also stop at the end of a turn, which llama.cpp too knows by its text.
const ENDS: [&str; 9] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|endofturn|>",
    "<end_of_turn>",
    "</s>",
];

/// What the metadata say about text; the embedding has `rows` rows.
pub(super) fn read(meta: &Metadata, rows: usize) -> Result<TextSide, Error> {
    let vocabulary = Vocabulary::read(meta, rows)?;
    let tokenizer = tokenizer::tokenizer(meta, &vocabulary)?;
    let token = |key| match meta.token(key)? {
        None => Ok::<_, Error>(None),
        Some(id) => Ok(Some((id, vocabulary.text(meta, key, id)?.to_owned()))),
    };
    let (bos, eos) = (token(BOS)?, token(EOS)?);

    let mut ends: Vec<u32> = eos.iter().map(|&(id, _)| id).collect();
    for key in [EOT, EOM] {
        ends.extend(token(key)?.map(|(id, _)| id));
    }
    let special = vocabulary.tokens.iter().zip(&vocabulary.kinds).enumerate();
    ends.extend(
        special
            .filter(|(_, (text, kind))| **kind == Kind::Control && ENDS.contains(text))
            .map(|(id, _)| id as u32),
    );
    let mut seen = std::collections::HashSet::new();
    ends.retain(|&id| seen.insert(id));

    let first = meta.bool(ADD_BOS)?.unwrap_or(tokenizer.add_bos);
    if first && bos.is_none() {
        return Err(meta.wrong(
            ADD_BOS,
            format!("a begin token is wanted, but {BOS} is missing"),
        ));
    }
    let sampling = |name: &str| {
        let value = meta.float(&format!("general.sampling.{name}"))?;
        Ok::<_, Error>(
            value
                .filter(|&value| value >= 0.0)
                .map(|value| value as f32),
        )
    };
    let generation = GenerationDefaults {
        eos: ends,
        bos: bos.as_ref().filter(|_| first).map(|&(id, _)| id),
        temperature: sampling("temp")?,
        top_p: sampling("top_p")?,
        // 0 switches the limit off.
        top_k: meta.token("general.sampling.top_k")?.filter(|&k| k > 0),
        min_p: sampling("min_p")?,
        repetition_penalty: sampling("penalty_repeat")?.filter(|&penalty| penalty > 0.0),
    };
    Ok(TextSide {
        tokenizer: TokenizerSource::Gguf(tokenizer.json),
        chat_template: meta.text(TEMPLATE)?.map(str::to_owned),
        bos_token: bos.map(|(_, text)| text),
        eos_token: eos.map(|(_, text)| text),
        generation,
    })
}
