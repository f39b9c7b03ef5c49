//! Refusals, in the shape and with the status of the API that was asked.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use kozue_engine::Error;
use kozue_engine::scheduler::Refused;
use serde_json::{Value as Json, json};

/// Why a request gets no answer. The message is one line: what is wrong, where, what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// The message.
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
}

/// Whose shape errors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `{"error": {"message", "type", "param", "code"}}`
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`
    Anthropic,
}

impl Dialect {
    /// By the path that was asked.
    pub fn of_path(path: &str) -> Dialect {
        if path.starts_with("/v1/messages") {
            Dialect::Anthropic
        } else {
            Dialect::OpenAi
        }
    }
}

impl ApiError {
    /// With a status and a message.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError {
            status,
            message: message.into(),
            param: None,
            code: None,
        }
    }

    /// A field has a wrong value.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param.into()),
            ..ApiError::new(StatusCode::BAD_REQUEST, message)
        }
    }

    /// The same under the name that the field has in another API.
    pub fn renamed(self, from: &str, to: &str) -> ApiError {
        match self.param.as_deref() == Some(from) {
            true => ApiError {
                message: self.message.replacen(from, to, 1),
                param: Some(to.to_string()),
                ..self
            },
            false => self,
        }
    }

    /// With a word for programs.
    pub fn code(self, code: &'static str) -> ApiError {
        ApiError {
            code: Some(code),
            ..self
        }
    }

    /// The body in a dialect.
    pub fn body(&self, dialect: Dialect) -> Json {
        let kind = self.kind(dialect);
        match dialect {
            Dialect::OpenAi => json!({"error": {
                "message": self.message, "type": kind, "param": self.param, "code": self.code,
            }}),
            Dialect::Anthropic => json!({
                "type": "error", "error": {"type": kind, "message": self.message},
            }),
        }
    }

    fn kind(&self, dialect: Dialect) -> &'static str {
        match (dialect, self.status.as_u16()) {
            (Dialect::OpenAi, 429) => "rate_limit_error",
            (Dialect::OpenAi, 400..500) => "invalid_request_error",
            (Dialect::OpenAi, _) => "server_error",
            (Dialect::Anthropic, 401) => "authentication_error",
            (Dialect::Anthropic, 403) => "permission_error",
            (Dialect::Anthropic, 404) => "not_found_error",
            (Dialect::Anthropic, 413) => "request_too_large",
            (Dialect::Anthropic, 429) => "rate_limit_error",
            (Dialect::Anthropic, 400..500) => "invalid_request_error",
            (Dialect::Anthropic, 503) => "overloaded_error",
            (Dialect::Anthropic, _) => "api_error",
        }
    }

    /// The response in a dialect.
    pub fn response(&self, dialect: Dialect) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body(dialect).to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

/// Carries the error to [`crate::app`], which knows the dialect.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status;
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        let message = error.to_string();
        match error {
            Error::PromptTooLong { .. } => {
                ApiError::field("messages", message).code("context_length_exceeded")
            }
            Error::Sampling { option, .. } => {
                ApiError::field(option.replace([' ', '-'], "_"), message)
            }
            Error::NoChatTemplate => ApiError::field(
                "messages",
                "this model has no chat template: use /v1/completions to continue plain text",
            ),
            Error::ChatTemplate(_) => ApiError::field("messages", message),
            Error::EmptyPrompt => ApiError::field("prompt", message),
            Error::UnknownToken { .. } | Error::Encode(_) | Error::NothingAllowed { .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, message)
            }
            _ => {
                tracing::error!("a request failed: {message}");
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
            }
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> ApiError {
        let (status, code) = match refused {
            Refused::Full { .. } => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
            Refused::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
        };
        ApiError::new(status, refused.to_string()).code(code)
    }
}
