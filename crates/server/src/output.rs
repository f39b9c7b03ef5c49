//! An answer's text to its parts: thought, text, calls.

use crate::calls::{CallFormat, CallParser, Piece};
use crate::tools::Tool;
use kozue_engine::thinking::{Part, ThoughtSplitter};

/// Takes an answer apart as it comes.
#[derive(Debug)]
pub struct Output {
    thoughts: Option<ThoughtSplitter>,
    calls: Option<CallParser>,
}

impl Output {
    /// Text that is continued as it is.
    pub fn raw() -> Output {
        Output {
            thoughts: None,
            calls: None,
        }
    }

    /// The answer to a chat's prompt. Calls are looked for where there are tools.
    pub fn chat(prompt: &str, format: CallFormat, tools: &[Tool]) -> Output {
        Output {
            thoughts: Some(ThoughtSplitter::after_prompt(prompt)),
            calls: (!tools.is_empty()).then(|| CallParser::new(format, tools)),
        }
    }

    /// Whether a thought is open.
    pub fn in_thought(&self) -> bool {
        self.thoughts
            .as_ref()
            .is_some_and(ThoughtSplitter::in_thought)
    }

    /// Takes text; gives the pieces that are certain.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let mut out = Vec::new();
        let calls = &mut self.calls;
        match &mut self.thoughts {
            Some(thoughts) => thoughts.push(text, |part, text| sort(part, text, calls, &mut out)),
            None => sort(Part::Answer, text, calls, &mut out),
        }
        joined(out)
    }

    /// The answer has ended, or was `cut` short; gives the pieces that were held back.
    pub fn finish(&mut self, cut: bool) -> Vec<Piece> {
        let mut out = Vec::new();
        let calls = &mut self.calls;
        if let Some(thoughts) = &mut self.thoughts {
            thoughts.finish(|part, text| sort(part, text, calls, &mut out));
        }
        if let Some(calls) = calls {
            calls.finish(cut, &mut out);
        }
        joined(out)
    }
}

fn sort(part: Part, text: &str, calls: &mut Option<CallParser>, out: &mut Vec<Piece>) {
    match (part, calls) {
        (Part::Thought, _) => out.push(Piece::Reasoning(text.to_string())),
        (Part::Answer, Some(calls)) => calls.push(text, out),
        (Part::Answer, None) => out.push(Piece::Text(text.to_string())),
    }
}

/// Neighbours of a kind become one.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match (out.last_mut(), piece) {
            (Some(Piece::Text(text)), Piece::Text(more))
            | (Some(Piece::Reasoning(text)), Piece::Reasoning(more))
            | (Some(Piece::Arguments(text)), Piece::Arguments(more)) => text.push_str(&more),
            (_, piece) => out.push(piece),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks in a thought are no calls: noonghunna/club-3090#145.
    #[test]
    fn thought_text_and_call_are_told_apart() {
        let tool = Tool {
            name: "time".into(),
            description: None,
            parameters: serde_json::json!({}),
            strict: false,
        };
        let text =
            "I <tool_call> wonder.\n</think>\n\nLook:\n<tool_call>{\"name\": \"time\"}</tool_call>";
        let expected = [
            Piece::Reasoning("I <tool_call> wonder.".into()),
            Piece::Text("Look:".into()),
            Piece::Call {
                name: "time".into(),
            },
            Piece::Arguments("{}".into()),
            Piece::CallEnd,
        ];
        for size in 1..text.len() {
            let mut output = Output::chat(
                "...<think>\n",
                CallFormat::Json,
                std::slice::from_ref(&tool),
            );
            let mut pieces = Vec::new();
            for chunk in text.as_bytes().chunks(size) {
                pieces.extend(output.push(std::str::from_utf8(chunk).unwrap()));
            }
            pieces.extend(output.finish(false));
            assert_eq!(joined(pieces), expected, "by {size}");
        }
    }

    #[test]
    fn raw_text_is_left_alone() {
        let mut output = Output::raw();
        let text = "<think>a</think> <tool_call>{}";
        assert_eq!(output.push(text), [Piece::Text(text.into())]);
        assert!(output.finish(false).is_empty());
    }
}
