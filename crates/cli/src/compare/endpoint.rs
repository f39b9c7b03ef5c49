//! One server: a question, and when its answer came.

use crate::failure::Failure;
use serde_json::{Value, json};
use std::fmt::{self, Display};
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::str::FromStr;
use std::time::{Duration, Instant};
use ureq::Agent;
use ureq::http::StatusCode;

/// Longest line of a stream, and most of a refusal that is read.
const LONGEST_LINE: u64 = 1 << 20;
/// Characters of a server's own message that are shown.
const SHOWN: usize = 200;

/// A server with OpenAI's API, and the model to ask there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// With the path before `/chat/completions`.
    pub url: String,
    /// The model's name.
    pub model: String,
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Endpoint, String> {
        let form = "must look like http://127.0.0.1:8000/v1,MODEL";
        let (url, model) = text.split_once(',').ok_or(form)?;
        let (url, model) = (url.trim().trim_end_matches('/'), model.trim());
        let rest = url
            .strip_prefix("http://")
            .or_else(|| url.strip_prefix("https://"))
            .ok_or(form)?;
        if rest.is_empty() || model.is_empty() {
            return Err(form.to_string());
        }
        let url = url.strip_suffix("/chat/completions").unwrap_or(url);
        // An address alone means the usual path.
        let path = if rest.contains('/') { "" } else { "/v1" };
        Ok(Endpoint {
            url: format!("{url}{path}"),
            model: model.to_string(),
        })
    }
}

impl Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let host = self.url.split('/').nth(2).unwrap_or(&self.url);
        write!(formatter, "{} at {host}", self.model)
    }
}

/// What is asked.
pub struct Asked<'a> {
    pub prompt: &'a str,
    pub max_tokens: usize,
    pub temperature: f32,
    pub seed: usize,
}

/// What came of one question.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Seconds from the question to the first text; `None` where the answer has no text.
    pub first_token_s: Option<f64>,
    /// Seconds from the first text to the last.
    pub decode_s: f64,
    /// Tokens of the answer, as the server counts them; chunks of text where it does not say.
    pub tokens: usize,
    /// Whether `tokens` is the server's own count.
    pub counted: bool,
    /// Forward passes after the prompt's, where the server says.
    pub passes: Option<usize>,
    /// Tokens of the prompt that the server had at hand, where it says.
    pub cached: Option<usize>,
}

impl Sample {
    /// Tokens a second after the first one; `None` where there are too few to say.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let more = self.tokens.checked_sub(1)?;
        (more > 0 && self.decode_s > 0.0).then(|| more as f64 / self.decode_s)
    }

    /// Tokens that a pass after the prompt's made.
    pub fn tokens_per_pass(&self) -> Option<f64> {
        let passes = self.passes.filter(|passes| *passes > 0)?;
        Some(self.tokens.checked_sub(1)? as f64 / passes as f64)
    }
}

/// What sends questions. `patience` is the longest time without a word.
pub fn agent(patience: Duration) -> Agent {
    Agent::config_builder()
        .http_status_as_error(false)
        // A detour would be measured too, and might take the key along.
        .max_redirects(0)
        .timeout_connect(Some(patience.min(Duration::from_secs(10))))
        .timeout_recv_response(Some(patience))
        .timeout_per_read(Some(patience))
        .user_agent(concat!("kozue/", env!("CARGO_PKG_VERSION")))
        .build()
        .into()
}

impl Endpoint {
    /// Asks, and reads the answer as it streams. Errors: anything that keeps the figures from
    /// meaning what they say.
    pub fn ask(&self, agent: &Agent, key: Option<&str>, asked: &Asked) -> Result<Sample, Failure> {
        let body = json!({
            "model": self.model,
            "messages": [{"role": "user", "content": asked.prompt}],
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "seed": asked.seed,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let mut request = agent
            .post(format!("{}/chat/completions", self.url))
            .content_type("application/json");
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let start = Instant::now();
        let mut response = request
            .send(body.to_string())
            .map_err(|error| self.failure(unreached(&error)))?;
        let status = response.status();
        let kind = response
            .headers()
            .get("content-type")
            .and_then(|kind| kind.to_str().ok())
            .unwrap_or("something without a type")
            .to_string();
        if status != StatusCode::OK || !kind.starts_with("text/event-stream") {
            let mut text = Vec::new();
            // What cannot be read is not shown.
            let _ = response
                .body_mut()
                .as_reader()
                .take(LONGEST_LINE)
                .read_to_end(&mut text);
            let said = said(&String::from_utf8_lossy(&text));
            return Err(self.failure(match status {
                StatusCode::OK => {
                    format!("it answers with {kind} where a stream of events was asked for{said}")
                }
                status => format!("{status}{}{said}", advice(status)),
            }));
        }
        let patience = agent.config().timeout_per_read();
        let lines = BufReader::new(response.into_body().into_reader());
        read(lines, start, patience).map_err(|problem| self.failure(problem))
    }

    fn failure(&self, problem: impl Display) -> Failure {
        Failure::Failed(format!("{} ({}): {problem}", self.url, self.model))
    }
}

/// Why no answer came at all.
fn unreached(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Timeout(_) => {
            "it does not answer in time: is it busy, or is --timeout too short?".to_string()
        }
        ureq::Error::HostNotFound => "there is no host of this name".to_string(),
        ureq::Error::ConnectionFailed => "no server listens there".to_string(),
        ureq::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
            "no server listens there".to_string()
        }
        error => one_line(&error.to_string()),
    }
}

fn advice(status: StatusCode) -> &'static str {
    match status.as_u16() {
        300..=399 => " (it leads to another address: give that one)",
        401 | 403 => " (give its key with --api-key)",
        404 => " (is the path before /chat/completions right, and the model's name?)",
        429 => " (it is too busy to be measured)",
        _ => "",
    }
}

/// The server's own message, where there is one.
fn said(text: &str) -> String {
    let message = serde_json::from_str::<Value>(text).ok().and_then(|value| {
        let error = value.get("error")?;
        let message = error.get("message").unwrap_or(error);
        message.as_str().map(str::to_string)
    });
    let line = one_line(message.as_deref().unwrap_or(text));
    match line.is_empty() {
        true => String::new(),
        false => format!(": {line}"),
    }
}

/// The beginning, on one line.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let line: String = words.join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}...", &line[..cut]),
        None => line,
    }
}

/// Reads a stream of chunks to its end.
fn read(
    mut lines: impl BufRead,
    start: Instant,
    patience: Option<Duration>,
) -> Result<Sample, String> {
    let mut sample = Sample::default();
    let (mut first, mut last, mut heard) = (None, start, Instant::now());
    let (mut chunks, mut finished) = (0, false);
    loop {
        let mut line = Vec::new();
        let read = lines
            .by_ref()
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut line);
        let now = Instant::now();
        let length = match read {
            Ok(length) => length,
            Err(error) if is_late(&error) => {
                return Err(format!(
                    "the answer stalls after {chunks} chunks of text: nothing comes any more"
                ));
            }
            Err(error) => {
                return Err(format!(
                    "the answer breaks off after {chunks} chunks of text: {}",
                    one_line(&error.to_string())
                ));
            }
        };
        if length == 0 {
            break;
        }
        if length as u64 == LONGEST_LINE && !line.ends_with(b"\n") {
            return Err("it sends a line of more than a megabyte".to_string());
        }
        let line = String::from_utf8_lossy(&line);
        let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim) else {
            // Comments keep a connection alive, also that of a model which says nothing.
            if patience.is_some_and(|patience| now - heard > patience) {
                return Err(format!(
                    "the answer stalls after {chunks} chunks of text: only comments come"
                ));
            }
            continue;
        };
        heard = now;
        if data == "[DONE]" {
            finished = true;
            break;
        }
        let chunk: Value = serde_json::from_str(data)
            .map_err(|_| format!("it sends an event that is no JSON: {}", one_line(data)))?;
        if chunk.get("error").is_some_and(|error| !error.is_null()) {
            return Err(format!(
                "it gives up in the midst of the answer{}",
                said(data)
            ));
        }
        let choice = &chunk["choices"][0];
        finished |= !choice["finish_reason"].is_null();
        let delta = &choice["delta"];
        let text = ["content", "reasoning_content", "reasoning"];
        let says = |field: &&str| delta[*field].as_str().is_some_and(|text| !text.is_empty());
        if text.iter().any(says) {
            first.get_or_insert(now);
            last = now;
            chunks += 1;
        }
        let number = |path: &str| chunk.pointer(path).and_then(Value::as_u64);
        if let Some(tokens) = number("/usage/completion_tokens") {
            sample.tokens = tokens as usize;
            sample.counted = true;
        }
        if let Some(passes) = number("/usage/spec_verify_ct") {
            sample.passes = Some(passes as usize);
        }
        if let Some(cached) = number("/usage/prompt_tokens_details/cached_tokens") {
            sample.cached = Some(cached as usize);
        }
    }
    if !finished {
        return Err(format!(
            "the answer breaks off after {chunks} chunks of text, without its end"
        ));
    }
    if !sample.counted {
        sample.tokens = chunks;
    }
    if let Some(first) = first {
        sample.first_token_s = Some((first - start).as_secs_f64());
        sample.decode_s = (last - first).as_secs_f64();
    }
    Ok(sample)
}

fn is_late(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(ureq::Error::Timeout(_)))
        || matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Sample, String> {
        read(text.as_bytes(), Instant::now(), None)
    }

    #[test]
    fn addresses() {
        for (text, url, model) in [
            ("http://h:1/v1,m", "http://h:1/v1", "m"),
            ("http://h:1,m", "http://h:1/v1", "m"),
            ("https://h/api/v1/ , org/m", "https://h/api/v1", "org/m"),
            ("http://h/v1/chat/completions,m,x", "http://h/v1", "m,x"),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!((&*endpoint.url, &*endpoint.model), (url, model), "{text}");
        }
        for text in [
            "http://h/v1",
            "h:1,m",
            "http://,m",
            "http://h, ",
            "ftp://h,m",
            "",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
        let endpoint: Endpoint = "http://h:1/v1,m".parse().unwrap();
        assert_eq!(endpoint.to_string(), "m at h:1");
    }

    #[test]
    fn a_stream_is_counted() {
        let text = ": hello\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n\
            data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"a\"}}]}\r\n\r\ndata:{\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n\
            data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
        let usage = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":9,\"spec_verify_ct\":4,\"prompt_tokens_details\":{\"cached_tokens\":3}}}\n\ndata: [DONE]\n\n";
        let sample = parse(text).unwrap();
        assert_eq!((sample.tokens, sample.counted), (2, false));
        assert!(sample.first_token_s.is_some());
        assert_eq!(sample.tokens_per_pass(), None);
        let sample = parse(&format!("{text}{usage}")).unwrap();
        assert_eq!((sample.tokens, sample.counted), (9, true));
        assert_eq!(sample.tokens_per_pass(), Some(2.0));
        assert_eq!(sample.cached, Some(3));
        let empty = parse("data: [DONE]\n\n").unwrap();
        assert_eq!((empty.first_token_s, empty.tokens_per_s()), (None, None));
    }

    #[test]
    fn streams_that_say_nothing_sound() {
        for (text, words) in [
            ("", "breaks off after 0"),
            (
                "data: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n",
                "breaks off after 1",
            ),
            ("data: {\n\n", "no JSON"),
            (
                "data: {\"error\":{\"message\":\"too\\nhot\"}}\n\n",
                "too hot",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{error}");
            assert!(!error.contains('\n'));
        }
        let endless = vec![b'x'; LONGEST_LINE as usize + 1];
        let error = read(&endless[..], Instant::now(), None).unwrap_err();
        assert!(error.contains("megabyte"), "{error}");
    }
}
