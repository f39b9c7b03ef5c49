//! Telling a model's thoughts from its answer.
//!
//! Reasoning models write `<think>...</think>` before the answer; some templates open the
//! thought in the prompt already.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// What a piece of text belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Between the marks.
    Thought,
    /// Everything else.
    Answer,
}

/// Splits streamed text; what it hands out does not depend on how the text was cut.
#[derive(Clone, Debug)]
pub struct ThoughtSplitter {
    place: Place,
    /// Text that may be the beginning of a mark.
    held: String,
    /// Whether white space at the beginning of the current part is dropped.
    trimming: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before anything but white space: a thought may open.
    Start,
    Thought,
    Answer,
}

impl ThoughtSplitter {
    /// For the answer to `prompt`, as the chat template rendered it.
    pub fn after_prompt(prompt: &str) -> ThoughtSplitter {
        let opened = prompt.trim_end().ends_with(OPEN);
        ThoughtSplitter {
            place: if opened { Place::Thought } else { Place::Start },
            held: String::new(),
            trimming: opened,
        }
    }

    /// Whether a thought is open.
    pub fn in_thought(&self) -> bool {
        self.place == Place::Thought
    }

    /// Takes text and calls `emit` for every part that is certain.
    pub fn push(&mut self, text: &str, mut emit: impl FnMut(Part, &str)) {
        self.held.push_str(text);
        loop {
            match self.place {
                Place::Start => {
                    let rest = self.held.trim_start();
                    if let Some(inside) = rest.strip_prefix(OPEN) {
                        self.held = inside.to_string();
                        self.place = Place::Thought;
                        self.trimming = true;
                    } else if OPEN.starts_with(rest) {
                        return;
                    } else {
                        self.place = Place::Answer;
                    }
                }
                Place::Thought => {
                    if let Some(end) = self.held.find(CLOSE) {
                        let thought = self.held[..end].trim_end().to_string();
                        self.emit_trimmed(&thought, Part::Thought, &mut emit);
                        self.held.drain(..end + CLOSE.len());
                        self.place = Place::Answer;
                        self.trimming = true;
                    } else {
                        let kept = self.held.len() - held_back(&self.held);
                        let certain: String = self.held.drain(..kept).collect();
                        self.emit_trimmed(&certain, Part::Thought, &mut emit);
                        return;
                    }
                }
                Place::Answer => {
                    let text = std::mem::take(&mut self.held);
                    self.emit_trimmed(&text, Part::Answer, &mut emit);
                    return;
                }
            }
        }
    }

    /// The text has ended: hands out what was held back.
    pub fn finish(&mut self, mut emit: impl FnMut(Part, &str)) {
        let rest = std::mem::take(&mut self.held);
        let (part, rest) = match self.place {
            Place::Thought => (Part::Thought, rest.trim_end()),
            Place::Start | Place::Answer => (Part::Answer, rest.as_str()),
        };
        self.emit_trimmed(rest, part, &mut emit);
    }

    fn emit_trimmed(&mut self, text: &str, part: Part, emit: &mut impl FnMut(Part, &str)) {
        let text = if self.trimming {
            text.trim_start()
        } else {
            text
        };
        if !text.is_empty() {
            self.trimming = false;
            emit(part, text);
        }
    }
}

/// How many bytes at the end of a thought may still belong to its closing mark, with the white
/// space before it, which is dropped.
fn held_back(text: &str) -> usize {
    let mark = (1..CLOSE.len())
        .rev()
        .find(|&n| text.ends_with(&CLOSE[..n]))
        .unwrap_or(0);
    let before = &text[..text.len() - mark];
    text.len() - before.trim_end().len()
}

/// Splits a whole text: (thought, answer).
pub fn split(prompt: &str, text: &str) -> (String, String) {
    let mut splitter = ThoughtSplitter::after_prompt(prompt);
    let mut parts = (String::new(), String::new());
    let mut emit = |part: Part, text: &str| match part {
        Part::Thought => parts.0.push_str(text),
        Part::Answer => parts.1.push_str(text),
    };
    splitter.push(text, &mut emit);
    splitter.finish(&mut emit);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(prompt: &str, text: &[&str]) -> (String, String) {
        let mut splitter = ThoughtSplitter::after_prompt(prompt);
        let mut parts = (String::new(), String::new());
        let mut emit = |part: Part, text: &str| match part {
            Part::Thought => parts.0.push_str(text),
            Part::Answer => parts.1.push_str(text),
        };
        for piece in text {
            splitter.push(piece, &mut emit);
        }
        splitter.finish(&mut emit);
        parts
    }

    #[test]
    fn every_split_gives_the_same_parts() {
        for (prompt, text, thought, answer) in [
            ("", "plain answer", "", "plain answer"),
            ("", "  spaced\n", "", "  spaced\n"),
            (
                "",
                "<think>\na b\n\n</think>\n\nanswer\n",
                "a b",
                "answer\n",
            ),
            (
                "...<think>\n",
                "a </thin b\n</think>\n\nc",
                "a </thin b",
                "c",
            ),
            ("...<think>", "cut off", "cut off", ""),
            ("<think>\n\n</think>\n\n", "direct", "", "direct"),
            ("", "<think></think>x", "", "x"),
            (
                "",
                "not <think> at the start",
                "",
                "not <think> at the start",
            ),
            ("", "<thi", "", "<thi"),
            ("", "<think>日本</think>語", "日本", "語"),
        ] {
            let expected = (thought.to_string(), answer.to_string());
            assert_eq!(split(prompt, text), expected, "{text:?}");
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
            assert_eq!(pieces(prompt, &letters), expected, "{text:?} by letters");
            for (cut, _) in text.char_indices() {
                let (first, second) = text.split_at(cut);
                assert_eq!(
                    pieces(prompt, &[first, second]),
                    expected,
                    "{first:?} {second:?}"
                );
            }
        }
    }
}
