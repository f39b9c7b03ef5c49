//! A server in front of a script: what it says is known, so that tests can look at how it is told.
#![allow(dead_code)]

use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use kozue_engine::scheduler::{Finished, Listener, Load, Progress, Refused, Token};
use kozue_engine::{Error, FinishReason, Loaded};
use kozue_kernels::{Cpu, KvType};
use kozue_server::app::{App, router};
use kozue_server::guard::Guard;
use kozue_server::metrics::Metrics;
use kozue_server::preparing::Places;
use kozue_server::served::{Backend, Served};
use serde_json::{Value, json};
use std::any::Any;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use tower::ServiceExt;

pub static LOADED: LazyLock<Arc<Loaded>> = LazyLock::new(|| Arc::new(load("qwen3_5")));

pub fn load(name: &str) -> Loaded {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/reference/tiny")
        .join(name);
    open(&path)
}

pub fn open(path: &Path) -> Loaded {
    Loaded::open(path, Cpu::new(Some(1)), KvType::F32).unwrap()
}

/// What a scripted model does.
#[derive(Clone, Default)]
pub struct Script {
    /// Its answer, in pieces.
    pub pieces: Vec<String>,
    pub reason: Option<FinishReason>,
    pub by_token: bool,
    /// Refuse everything.
    pub full: bool,
    /// Fail before (0) or after this many pieces.
    pub fails: Option<usize>,
    /// Say nothing, ever.
    pub silent: bool,
}

impl Script {
    /// This text, cut into pieces of a few characters.
    pub fn saying(text: &str) -> Script {
        let letters: Vec<char> = text.chars().collect();
        Script {
            pieces: letters.chunks(3).map(|c| c.iter().collect()).collect(),
            by_token: true,
            ..Script::default()
        }
    }
}

/// Answers by a script, and remembers what it was asked.
pub struct Scripted {
    script: Script,
    pub asked: Mutex<Vec<kozue_engine::Request>>,
    pub given_up: Arc<AtomicBool>,
}

struct Guarded(Arc<AtomicBool>, #[allow(dead_code)] Option<Listener>);

impl Drop for Guarded {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Backend for Scripted {
    fn submit(
        &self,
        request: kozue_engine::Request,
        mut listener: Listener,
    ) -> Result<Box<dyn Any + Send>, Refused> {
        if self.script.full {
            return Err(Refused::Full { room: 64 });
        }
        let prompt_tokens = request.prompt.len();
        let alternatives = request.logprobs;
        self.asked.lock().unwrap().push(request);
        let script = &self.script;
        if script.silent {
            return Ok(Box::new(Guarded(
                Arc::clone(&self.given_up),
                Some(listener),
            )));
        }
        let failure = || Progress::Failed(Error::Model("the disk is on fire".into()));
        if script.fails == Some(0) {
            listener(failure());
            return Ok(Box::new(()));
        }
        let mut wanted = listener(Progress::Started { cached_tokens: 2 });
        let mut told = 0;
        for piece in &script.pieces {
            if script.fails == Some(told) {
                listener(failure());
                return Ok(Box::new(()));
            }
            if !wanted {
                break;
            }
            listener(Progress::Token(Token {
                token: 10 + told as u32,
                pass: told / 2,
                logprob: alternatives.map(|_| -0.5),
                top: (0..alternatives.unwrap_or(0))
                    .map(|n| (20 + n as u32, -0.25 - n as f32))
                    .collect(),
            }));
            wanted = listener(Progress::Text(piece.clone()));
            told += 1;
        }
        let reason = match wanted {
            true => script.reason.unwrap_or(FinishReason::Stop),
            false => FinishReason::Cancelled,
        };
        listener(Progress::Finished(Finished {
            reason,
            by_token: script.by_token,
            prompt_tokens,
            cached_tokens: 2,
            completion_tokens: told,
            forward_passes: told.saturating_sub(1),
            first_token_s: Some(0.1),
            duration_s: 0.2,
        }));
        Ok(Box::new(()))
    }

    fn load(&self) -> Load {
        Load {
            running: 1,
            waiting: 2,
            cache_bytes: 0,
        }
    }
}

/// A server in front of a script.
pub struct Server {
    pub app: Arc<App>,
    pub backend: Arc<Scripted>,
}

impl Server {
    pub fn new(script: Script) -> Server {
        Server::guarded(script, Guard::default())
    }

    /// Says this text, cut into pieces of a few characters.
    pub fn saying(text: &str) -> Server {
        Server::new(Script::saying(text))
    }

    pub fn guarded(script: Script, guard: Guard) -> Server {
        Server::of(Arc::clone(&LOADED), script, guard)
    }

    pub fn of(loaded: Arc<Loaded>, script: Script, guard: Guard) -> Server {
        let backend = Arc::new(Scripted {
            script,
            asked: Mutex::default(),
            given_up: Arc::default(),
        });
        let served = Served::new(
            loaded,
            vec!["other".into()],
            None,
            Arc::clone(&backend) as Arc<dyn Backend>,
        );
        let app = Arc::new(App {
            served: served.unwrap(),
            metrics: Metrics::default(),
            guard,
            places: Places::default(),
            body_limit: 1 << 20,
        });
        Server { app, backend }
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = router(Arc::clone(&self.app))
            .oneshot(request)
            .await
            .unwrap();
        let status = response.status();
        let headers = response.headers().clone();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        Answer {
            status,
            headers,
            text: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, body.to_string()).await
    }

    pub async fn post_text(&self, path: &str, body: String) -> Answer {
        let request = Request::post(path)
            .header("host", "localhost")
            .body(Body::from(body));
        self.send(request.unwrap()).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        let request = Request::get(path).header("host", "localhost");
        self.send(request.body(Body::empty()).unwrap()).await
    }

    /// A chat with one message and further fields.
    pub async fn chat(&self, fields: Value) -> Answer {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        self.post("/v1/chat/completions", &body).await
    }
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: axum::http::HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("{}", self.text))
    }

    /// A good answer.
    pub fn good(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }

    /// An error in OpenAI's shape: its type, field and code.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        let error = self.json()["error"].clone();
        assert!(!error["message"].as_str().unwrap().is_empty());
        assert!(!error["message"].as_str().unwrap().contains('\n'));
        error
    }

    /// The data of all events but `[DONE]`, which must come last where it comes.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        assert_eq!(self.headers["content-type"], "text/event-stream");
        let lines: Vec<&str> = self
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        let done = lines.iter().position(|line| *line == "[DONE]");
        assert!(done.is_none_or(|done| done == lines.len() - 1));
        lines
            .iter()
            .filter(|line| **line != "[DONE]")
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

/// A tool that looks a weather up.
pub fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "weather", "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }})
}

/// All deltas of an answer put together, as a client does it.
pub fn assembled(events: &[Value], index: usize) -> Value {
    let mut message = json!({"content": "", "reasoning_content": "", "tool_calls": []});
    for event in events {
        for choice in event["choices"].as_array().unwrap() {
            if choice["index"] != index {
                continue;
            }
            if !choice["finish_reason"].is_null() {
                assert!(message["finish_reason"].is_null(), "one end only");
                message["finish_reason"] = choice["finish_reason"].clone();
            }
            let delta = &choice["delta"];
            for field in ["content", "reasoning_content"] {
                if let Some(text) = delta[field].as_str() {
                    let so_far = message[field].as_str().unwrap();
                    message[field] = format!("{so_far}{text}").into();
                }
            }
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let place = call["index"].as_u64().unwrap() as usize;
                let calls = message["tool_calls"].as_array_mut().unwrap();
                if place == calls.len() {
                    assert!(call["id"].as_str().unwrap().starts_with("call_"));
                    assert_eq!(call["type"], "function");
                    calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
                }
                let so_far = calls[place]["arguments"].as_str().unwrap();
                let more = call["function"]["arguments"].as_str().unwrap();
                calls[place]["arguments"] = format!("{so_far}{more}").into();
            }
        }
    }
    message
}
