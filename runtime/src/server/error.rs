//! What a client hears when something is wrong: OpenAI's error object.

use crate::constraint::DeadEnd;
use crate::engine::Refusal;
use crate::generation::Interrupted;
use crate::reload::{Obstacle, ReloadError};
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::time::Duration;

/// An answer that is an error: `{"error": {message, type, param, code}}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// The field that is wrong, with its path.
    pub(super) param: Option<String>,
    /// For programs.
    pub(super) code: Option<&'static str>,
    /// Seconds after which to try again.
    pub(super) retry_after: Option<u32>,
    /// Of a reload: the rank and the tensor that it was.
    pub(super) place: Option<Box<(Option<usize>, Option<String>)>>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None, place: None }
    }

    /// The request as a whole is wrong.
    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field is wrong: what was expected, or what to do.
    pub(super) fn field(param: impl Into<String>, message: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self { param: Some(param.clone()), ..Self::bad_request(format!("{param}: {message}")) }
    }

    /// A field asks for what this server does not do.
    pub(super) fn unsupported(param: impl Into<String>, message: impl std::fmt::Display) -> Self {
        Self { code: Some("unsupported"), ..Self::field(param, message) }
    }

    /// Prompt and answer are longer than the context.
    pub(super) fn context_length(param: &str, message: impl std::fmt::Display) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::field(param, message) }
    }

    pub(super) fn too_large(limit: usize) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {limit} bytes"))
    }

    /// The body is in a form that is not read here; `header` says which.
    pub(super) fn unsupported_body(header: &HeaderName, message: impl std::fmt::Display) -> Self {
        Self {
            code: Some("unsupported_media_type"),
            ..Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, format!("{header}: {message}"))
        }
    }

    /// More answers are asked for at once than may ever wait.
    pub(super) fn too_many(param: &str, answers: usize, most: usize) -> Self {
        let message = format!(
            "{answers} answers are asked for at once, and at most {most} may wait (--max-queued-requests): ask for fewer"
        );
        Self::field(param, message)
    }

    /// The client takes too long to send its request.
    pub(super) fn too_slow(limit: Duration) -> Self {
        let message = format!("the body did not come within {} seconds", limit.as_secs_f32());
        Self { code: Some("request_timeout"), ..Self::new(StatusCode::REQUEST_TIMEOUT, message) }
    }

    /// The answer takes longer than the server allows.
    pub(super) fn timeout(limit: Duration) -> Self {
        let message = format!(
            "the answer took longer than {} seconds, which is what this server allows: ask for fewer tokens",
            limit.as_secs_f32()
        );
        Self { code: Some("request_timeout"), ..Self::new(StatusCode::REQUEST_TIMEOUT, message) }
    }

    /// No key, or a wrong one.
    pub(super) fn unauthorized() -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(
                StatusCode::UNAUTHORIZED,
                "this server asks for an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            )
        }
    }

    /// Somebody who may not ask for this.
    pub(super) fn forbidden(message: impl Into<String>) -> Self {
        Self { code: Some("forbidden"), ..Self::new(StatusCode::FORBIDDEN, message) }
    }

    /// A reload that did not happen.
    pub(super) fn not_reloaded(error: ReloadError) -> Self {
        let message = error.to_string();
        let (status, param, code) = match error.obstacle {
            Obstacle::Conflict => (StatusCode::CONFLICT, None, "conflict"),
            Obstacle::Checkpoint => (StatusCode::UNPROCESSABLE_ENTITY, None, "checkpoint"),
            Obstacle::Request(field) => (StatusCode::BAD_REQUEST, Some(field.to_owned()), "out_of_range"),
            Obstacle::Stopped => (StatusCode::SERVICE_UNAVAILABLE, None, "stopped"),
        };
        let place = Some(Box::new((error.rank, error.tensor)));
        Self { param, code: Some(code), place, ..Self::new(status, message) }
    }

    pub(super) fn loading() -> Self {
        Self {
            code: Some("loading"),
            retry_after: Some(5),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the model is still loading: try again when /health says 200",
            )
        }
    }

    pub(super) fn unknown_model(asked: &str, served: &str) -> Self {
        Self {
            param: Some("model".into()),
            code: Some("model_not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                format!("model: {asked:?} is not served here; the model is {served:?}"),
            )
        }
    }

    pub(super) fn unknown_route(path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("there is nothing at {path}"))
    }

    pub(super) fn wrong_method(method: &str, path: &str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, format!("{path} does not take {method}"))
    }

    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The engine does not take a request; `prompt` is the field that its prompt came from.
    pub(super) fn refused(refusal: &Refusal, prompt: &str) -> Self {
        match refusal {
            Refusal::ContextLength { .. } => Self::context_length(prompt, refusal),
            Refusal::Vocabulary { .. } | Refusal::EmptyPrompt => Self::field(prompt, refusal),
            Refusal::QueueFull { .. } => Self {
                code: Some("queue_full"),
                retry_after: Some(1),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, refusal.to_string())
            },
            Refusal::Stopped { .. } => Self {
                code: Some("stopped"),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, refusal.to_string())
            },
        }
    }

    /// As it stands in a body or a stream of `/v1/messages`.
    pub(super) fn anthropic_json(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }

    /// The whole answer of `/v1/messages`.
    pub(super) fn anthropic_response(&self) -> Response {
        self.response(self.anthropic_json())
    }

    fn response(&self, body: Value) -> Response {
        let mut response = (self.status, axum::Json(body)).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }

    /// As it stands in a body or a stream.
    pub(super) fn json(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::CONFLICT => "conflict_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let mut error =
            json!({"message": self.message, "type": kind, "param": self.param, "code": self.code});
        if let Some(place) = &self.place {
            (error["rank"], error["tensor"]) = (json!(place.0), json!(place.1));
        }
        json!({"error": error})
    }
}

impl From<Interrupted> for ApiError {
    fn from(interrupted: Interrupted) -> Self {
        match interrupted {
            Interrupted::Engine(why) => Self::internal(why),
            Interrupted::Request(DeadEnd { field, why }) => Self::field(
                field,
                format!(
                    "nothing can follow what it led to ({why}): see to it that every rule can come to an end"
                ),
            ),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.response(self.json())
    }
}
