//! Which path does what.

use super::answer::{self, Kind};
use super::api::Head;
use super::error::ApiError;
use super::request::{self, Delivery, Job, Limits};
use super::{Ready, State, unix_time};
use crate::dialect::Dialect;
use crate::engine::{Event, EventStream, FinishReason};
use crate::generation::Generation;
use crate::sampler::random_seed;
use axum::body::Bytes;
use axum::extract::{self, DefaultBodyLimit, rejection::BytesRejection};
use axum::http::{Method, StatusCode, Uri};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::sync::Arc;

type Shared = extract::State<Arc<State>>;

/// Every route of the server.
pub(super) fn router(state: Arc<State>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/version", get(version))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .fallback(async |uri: Uri| ApiError::unknown_route(uri.path()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::wrong_method(method.as_str(), uri.path())
        })
        .layer(DefaultBodyLimit::max(state.options.max_body_bytes))
        .with_state(state)
}

async fn health(extract::State(state): Shared) -> (StatusCode, Json<Value>) {
    match state.ready.get() {
        Some(_) => (StatusCode::OK, Json(json!({"status": "ok"}))),
        None => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "loading"}))),
    }
}

async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn models(extract::State(state): Shared) -> Result<Json<Value>, ApiError> {
    let ready = ready(&state)?;
    Ok(Json(json!({
        "object": "list",
        "data": [{
            "id": &*ready.model,
            "object": "model",
            "created": state.started,
            "owned_by": "shardrun",
            "max_model_len": ready.backend.max_model_len(),
        }],
    })))
}

async fn chat_completions(
    extract::State(state): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    run(&state, body, Kind::Chat, request::chat).await
}

async fn completions(
    extract::State(state): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    run(&state, body, Kind::Text, request::completion).await
}

/// From a body to the answer. Whatever drops this future or the response's body drops the engine's stream with it.
async fn run(
    state: &Arc<State>,
    body: Result<Bytes, BytesRejection>,
    kind: Kind,
    read: fn(&[u8], &Dialect, &Limits<'_>) -> Result<Job, ApiError>,
) -> Result<Response, ApiError> {
    let ready = ready(state)?.clone();
    let body = body.map_err(|rejection| body_error(&rejection, state.options.max_body_bytes))?;
    let job = {
        let ready = ready.clone();
        // A long prompt takes a while to tokenise; other answers must go on meanwhile.
        let reading = tokio::task::spawn_blocking(move || {
            let limits = Limits { model: &ready.model, max_model_len: ready.backend.max_model_len() };
            read(&body, &ready.dialect, &limits)
        });
        reading
            .await
            .map_err(|error| ApiError::internal(format!("the request could not be read: {error}")))??
    };
    let Job { generation: request, stop, opening, delivery } = job;
    let prompt_tokens = request.prompt.len();
    let head = Head {
        id: format!("{}-{:016x}{:016x}", kind.prefix(), random_seed(), random_seed()),
        object: kind.object(delivery),
        created: unix_time(),
        model: ready.model.to_string(),
    };
    let events = match request.max_tokens {
        0 => nothing_to_generate(),
        _ => ready
            .backend
            .submit(request)
            .map_err(|refusal| ApiError::refused(&refusal, kind.prompt_field()))?,
    };
    let generation = Generation::new(events, ready.dialect.answer(&stop, opening));
    match delivery {
        Delivery::Whole => answer::whole(kind, &head, prompt_tokens, generation).await,
        Delivery::Stream | Delivery::StreamWithUsage => {
            Ok(answer::stream(kind, head, prompt_tokens, generation, delivery, state.options.ping))
        }
    }
}

/// The events of a request for no tokens.
fn nothing_to_generate() -> EventStream {
    let (events, stream) = tokio::sync::mpsc::unbounded_channel();
    events.send(Event::Finished(FinishReason::Length)).expect("its receiver is right here");
    stream
}

fn ready(state: &State) -> Result<&Ready, ApiError> {
    state.ready.get().ok_or_else(ApiError::loading)
}

fn body_error(rejection: &BytesRejection, limit: usize) -> ApiError {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::too_large(limit),
        _ => ApiError::bad_request(format!("the body could not be read: {rejection}")),
    }
}
