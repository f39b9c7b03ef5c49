//! Where in a prompt snapshots are left, for later prompts that begin like it.

use crate::tokenizer::Tokenizer;

/// Tokens between the snapshots that a long prompt leaves in passing.
pub const STRIDE: usize = 512;

/// Fewer tokens than this are read again sooner than a snapshot is worth its memory.
const WORTH: usize = 16;

/// A place for a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// After how many tokens of the prompt.
    pub at: usize,
    /// Whether later prompts are likely to part here.
    pub lasting: bool,
}

/// Where a sequence that goes on after `read` tokens of its prompt leaves snapshots, ascending.
/// Earlier prompts share its first `shared` tokens, `eos` end the turns of a chat.
///
/// - Where the next turn's prompt parts from this one: the thought that the template opens, which
///   it drops or writes otherwise when the answer has become history; else before the last
///   token, so that the same prompt again costs one token.
/// - Before the last message, which others follow after the same system message, or which is
///   edited and sent again.
/// - Where this prompt parts from earlier ones: where two have parted, a third one may.
/// - At every [`STRIDE`]th token.
pub fn marks(
    prompt: &[u32],
    tokenizer: &Tokenizer,
    eos: &[u32],
    read: usize,
    shared: usize,
) -> Vec<Mark> {
    let end = prompt.len().saturating_sub(1);
    let mut lasting = vec![next_turn(prompt, tokenizer, eos)];
    let mut offer = |at: usize| {
        let near = |&mark: &usize| mark <= at && at - mark < WORTH;
        if at >= read + WORTH && !lasting.iter().any(near) {
            lasting.push(at);
        }
    };
    if let Some(at) = last_message(prompt, tokenizer, eos) {
        offer(at);
    }
    offer(shared.min(end));
    let passing = (read / STRIDE + 1..)
        .map(|n| n * STRIDE)
        .take_while(|&at| at <= end)
        .filter(|at| !lasting.contains(at))
        .map(|at| Mark { at, lasting: false });
    let mut marks: Vec<Mark> = passing.collect();
    let lasting = lasting.iter().map(|&at| Mark { at, lasting: true });
    marks.extend(lasting.filter(|mark| mark.at > read));
    marks.sort_by_key(|mark| mark.at);
    marks
}

fn next_turn(prompt: &[u32], tokenizer: &Tokenizer, eos: &[u32]) -> usize {
    let ended = prompt.iter().rposition(|token| eos.contains(token));
    let open = ended.map_or(0, |at| at + 1);
    let thought = prompt[open..]
        .iter()
        .position(|&token| tokenizer.is_mark(token));
    let last = prompt.len().saturating_sub(1);
    thought.map_or(last, |at| open + at).min(last)
}

/// The first control token after the last turn but one, where there are two.
fn last_message(prompt: &[u32], tokenizer: &Tokenizer, eos: &[u32]) -> Option<usize> {
    let mut ends = (0..prompt.len()).rev();
    let mut ends = ends.by_ref().filter(|&at| eos.contains(&prompt[at]));
    let (_, before) = (ends.next()?, ends.next()?);
    let opens = |&at: &usize| tokenizer.is_control(prompt[at]);
    (before + 1..prompt.len()).find(opens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Control;
    use kozue_checkpoint::description::TokenizerSource;

    fn tokenizer() -> Tokenizer {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/reference/tiny/qwen3_5/tokenizer.json"
        );
        Tokenizer::new(&TokenizerSource::Json(
            std::fs::read_to_string(path).unwrap(),
        ))
        .unwrap()
    }

    /// The texts before each lasting mark.
    fn before(text: &str, read: usize, shared: usize) -> Vec<String> {
        let tokenizer = tokenizer();
        let prompt = tokenizer.encode(text, Control::Recognised).unwrap();
        let eos = [tokenizer.id("<|im_end|>").unwrap()];
        let whole: Vec<usize> = marks(&prompt, &tokenizer, &eos, read, shared)
            .iter()
            .filter(|mark| mark.lasting)
            .map(|mark| mark.at)
            .collect();
        let piece = |token: &u32| tokenizer.piece(*token).unwrap();
        let shown = |at: &usize| prompt[..*at].iter().map(piece).collect::<String>();
        whole.iter().map(shown).collect()
    }

    const SYSTEM: &str = "<|im_start|>system\nBe brief, exact and of good cheer.<|im_end|>\n";

    #[test]
    fn turns_end_where_the_next_prompt_parts() {
        let user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
        let thought = format!("{SYSTEM}{user}<think>\n\n</think>\n\n");
        let places = before(&thought, 0, 0);
        assert_eq!(places.len(), 2);
        assert!(places[0].ends_with("<|im_end|>\u{10a}"), "{places:?}");
        assert!(places[1].ends_with("assistant\u{10a}"), "{places:?}");
        // No thought: the same prompt again costs its last token.
        let places = before(&format!("{SYSTEM}{user}"), 0, 0);
        assert!(places[1].ends_with("assistant"), "{places:?}");
        assert_eq!(before(user, 0, 0).len(), 1);
        // What was read is not read again.
        let tokenizer = tokenizer();
        let all = tokenizer.encode(&thought, Control::Recognised).unwrap();
        assert_eq!(before(&thought, all.len() - 9, 0).len(), 1);
        assert!(before(&thought, all.len() - 1, 0).is_empty());
    }

    #[test]
    fn strides_are_absolute_and_partings_are_not_repeated() {
        let tokenizer = tokenizer();
        let prompt = vec![5; 1600];
        let at = |read, shared| -> Vec<(usize, bool)> {
            let marks = marks(&prompt, &tokenizer, &[0], read, shared);
            marks.iter().map(|mark| (mark.at, mark.lasting)).collect()
        };
        let strides = [(512, false), (1024, false), (1536, false), (1599, true)];
        assert_eq!(at(0, 0), strides);
        assert_eq!(at(1000, 1015), strides[1..]);
        assert_eq!(at(1024, 1040), [(1040, true), (1536, false), (1599, true)]);
        // The same prompt again.
        assert_eq!(at(1536, 1600), strides[3..]);
        // A stride where prompts part lasts.
        assert_eq!(at(600, 1024)[0], (1024, true));
        assert!(marks(&[7], &tokenizer, &[0], 0, 0).is_empty());
    }
}
