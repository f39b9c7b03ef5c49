//! A call as a JSON object: `{"name": ..., "arguments": {...}}`, read as it arrives.

use super::Piece;

/// Where a call's object is read.
#[derive(Debug)]
pub(super) struct JsonCall {
    /// Text before the arguments.
    raw: String,
    /// Whether the object is a call only if it has arguments.
    bare: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Name and beginning of the arguments are not both known.
    Header,
    /// Inside an object or a list of arguments, which is handed out as it comes.
    Arguments(Nesting),
    /// After the arguments, inside the call's object.
    Rest(Nesting),
}

/// What came of a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// All of it was taken, and more is needed.
    More,
    /// The object has ended after this many bytes of the piece.
    Ended(usize),
    /// This is no call: all its text so far.
    NoCall(String),
}

impl JsonCall {
    /// Between marks.
    pub fn marked() -> JsonCall {
        JsonCall {
            raw: String::new(),
            bare: false,
            stage: Stage::Header,
        }
    }

    /// With nothing around it, so that it may be something else.
    pub fn bare() -> JsonCall {
        JsonCall {
            raw: String::new(),
            bare: true,
            stage: Stage::Header,
        }
    }

    /// Whether there are no marks around it.
    pub fn is_bare(&self) -> bool {
        self.bare
    }

    /// Whether the call's name has been handed out.
    pub fn begun(&self) -> bool {
        !matches!(self.stage, Stage::Header)
    }

    /// Whether what was read of a call that has not begun looks like one of a tool with one of
    /// these names: like `{"name": "`, the name and what follows it, as far as it goes.
    pub fn resembles<S: AsRef<str>>(&self, names: &[S]) -> bool {
        let written: String = self.raw.chars().filter(|c| !c.is_whitespace()).collect();
        names.iter().any(|name| {
            let call = format!("{{\"name\":\"{}\"", name.as_ref());
            written.starts_with(&call) || call.starts_with(&written)
        })
    }

    /// What was read of a call that has not begun.
    pub fn take_raw(&mut self) -> String {
        std::mem::take(&mut self.raw)
    }

    /// Takes text. `known` says whether a tool has this name.
    pub fn push(&mut self, text: &str, known: &dyn Fn(&str) -> bool, out: &mut Vec<Piece>) -> Step {
        let before = self.raw.len();
        let mut start = 0;
        if let Stage::Header = self.stage {
            self.raw.push_str(text);
            let header = header(&self.raw);
            let (name, arguments) = match header {
                Header::More => return Step::More,
                Header::Broken => return Step::NoCall(self.take_raw()),
                Header::Ready { name, arguments } => (name, arguments),
            };
            let without = matches!(arguments, Arguments::None { .. });
            if !known(&name) || (self.bare && without) {
                return Step::NoCall(self.take_raw());
            }
            out.push(Piece::Call { name });
            match arguments {
                Arguments::None { end } => {
                    out.push(Piece::Arguments("{}".to_string()));
                    out.push(Piece::CallEnd);
                    self.stage = Stage::Rest(Nesting::inside());
                    start = end - before;
                }
                Arguments::Whole { text, end } => {
                    out.push(Piece::Arguments(text));
                    out.push(Piece::CallEnd);
                    self.stage = Stage::Rest(Nesting::inside());
                    start = end - before;
                }
                Arguments::From(place) => {
                    self.stage = Stage::Arguments(Nesting::default());
                    // What decides is in this piece, or an earlier one had decided.
                    start = place - before;
                }
            }
        }
        if let Stage::Arguments(_) = self.stage {
            match self.stream(&text[start..], out) {
                Some(taken) => start += taken,
                None => return Step::More,
            }
        }
        if let Stage::Rest(nesting) = &mut self.stage
            && let Some(taken) = nesting.end(&text[start..])
        {
            return Step::Ended(start + taken);
        }
        Step::More
    }

    /// Hands out arguments; the number of bytes where they end in `text`.
    fn stream(&mut self, text: &str, out: &mut Vec<Piece>) -> Option<usize> {
        let Stage::Arguments(nesting) = &mut self.stage else {
            return None;
        };
        let end = nesting.end(text);
        let piece = &text[..end.unwrap_or(text.len())];
        if !piece.is_empty() {
            out.push(Piece::Arguments(piece.to_string()));
        }
        if end.is_some() {
            out.push(Piece::CallEnd);
            self.stage = Stage::Rest(Nesting::inside());
        }
        end
    }
}

/// Depth of brackets in JSON text, strings minded.
#[derive(Debug, Default)]
pub(super) struct Nesting {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Nesting {
    /// After the opening bracket of an object.
    fn inside() -> Nesting {
        Nesting {
            depth: 1,
            ..Nesting::default()
        }
    }

    /// Reads on; the number of bytes up to and with the bracket that closes the first one.
    pub fn end(&mut self, text: &str) -> Option<usize> {
        for (place, byte) in text.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(place + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[derive(Debug, PartialEq)]
enum Header {
    More,
    Broken,
    Ready { name: String, arguments: Arguments },
}

#[derive(Debug, PartialEq)]
enum Arguments {
    /// An object or a list that begins at this byte.
    From(usize),
    /// There are none, and where reading goes on inside the call's object.
    None { end: usize },
    /// All of them, and where reading goes on inside the call's object.
    Whole { text: String, end: usize },
}

/// Reads the beginning of a call. The outcome depends on the beginning that decides it alone,
/// however much text follows.
fn header(text: &str) -> Header {
    let mut reader = Reader { text, place: 0 };
    let mut name = None;
    let mut arguments: Option<String> = None;
    macro_rules! need {
        ($step:expr) => {
            match $step {
                Read::Got(value) => value,
                Read::More => return Header::More,
                Read::Wrong => return Header::Broken,
            }
        };
    }
    need!(reader.expect(b'{'));
    loop {
        let next = need!(reader.peek());
        if next == b'}' {
            let Some(name) = name else {
                return Header::Broken;
            };
            let end = reader.place;
            let arguments = match arguments {
                Some(text) => Arguments::Whole { text, end },
                None => Arguments::None { end },
            };
            return Header::Ready { name, arguments };
        }
        let key = need!(reader.string());
        need!(reader.expect(b':'));
        let first = need!(reader.peek());
        let is_arguments = key == "arguments" || key == "parameters";
        if is_arguments && matches!(first, b'{' | b'[') && name.is_some() {
            return Header::Ready {
                name: name.unwrap_or_default(),
                arguments: Arguments::From(reader.place),
            };
        }
        let value = need!(reader.value());
        if key == "name" {
            match serde_json::from_str(value) {
                Ok(serde_json::Value::String(text)) if !text.is_empty() => name = Some(text),
                _ => return Header::Broken,
            }
        } else if is_arguments {
            arguments = Some(match serde_json::from_str(value) {
                Ok(serde_json::Value::Null) => "{}".to_string(),
                // Arguments as a string that holds JSON.
                Ok(serde_json::Value::String(text)) => text,
                _ => value.to_string(),
            });
        }
        match need!(reader.peek()) {
            b',' => reader.place += 1,
            b'}' => {}
            _ => return Header::Broken,
        }
    }
}

enum Read<T> {
    Got(T),
    More,
    Wrong,
}

struct Reader<'a> {
    text: &'a str,
    place: usize,
}

impl<'a> Reader<'a> {
    /// The next byte that is no white space.
    fn peek(&mut self) -> Read<u8> {
        let rest = &self.text[self.place..];
        self.place += rest.len() - rest.trim_start().len();
        match self.text.as_bytes().get(self.place) {
            Some(byte) => Read::Got(*byte),
            None => Read::More,
        }
    }

    fn expect(&mut self, wanted: u8) -> Read<()> {
        match self.peek() {
            Read::Got(byte) if byte == wanted => {
                self.place += 1;
                Read::Got(())
            }
            Read::More => Read::More,
            Read::Got(_) | Read::Wrong => Read::Wrong,
        }
    }

    /// A string's value.
    fn string(&mut self) -> Read<String> {
        match self.peek() {
            Read::Got(b'"') => {}
            Read::More => return Read::More,
            Read::Got(_) | Read::Wrong => return Read::Wrong,
        }
        match self.value() {
            Read::Got(text) => match serde_json::from_str(text) {
                Ok(value) => Read::Got(value),
                Err(_) => Read::Wrong,
            },
            Read::More => Read::More,
            Read::Wrong => Read::Wrong,
        }
    }

    /// The text of a value.
    fn value(&mut self) -> Read<&'a str> {
        let first = match self.peek() {
            Read::Got(byte) => byte,
            Read::More => return Read::More,
            Read::Wrong => return Read::Wrong,
        };
        let rest = &self.text[self.place..];
        let length = match first {
            b'"' => {
                let mut escaped = false;
                rest.bytes().enumerate().skip(1).find_map(|(place, byte)| {
                    let ends = byte == b'"' && !escaped;
                    escaped = byte == b'\\' && !escaped;
                    ends.then_some(place + 1)
                })
            }
            b'{' | b'[' => Nesting::default().end(rest),
            _ => rest.find(|c: char| matches!(c, ',' | '}' | ']') || c.is_whitespace()),
        };
        match length {
            Some(0) => Read::Wrong,
            Some(length) => {
                self.place += length;
                Read::Got(&rest[..length])
            }
            None => Read::More,
        }
    }
}
