//! Which path does what.

use super::admin::{self, Peer};
use super::answer::{self, Answers, Protocol, Times};
use super::api::{Head, fresh_id};
use super::error::ApiError;
use super::request::{Context, Delivery, Job, Tokens};
use super::{
    Ready, State, anthropic, chat, completions, form, log, openai, openapi, responses, tokens, unix_time,
};
use crate::engine::{Event, EventStream, FinishReason, GenerationRequest};
use crate::generation::{Generation, Ids};
use axum::body::{Body, Bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{self, Request};
use axum::http::header::{
    CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tower_http::cors::{AllowOrigin, CorsLayer};

type Shared = extract::State<Arc<State>>;

/// Every route of the server.
pub(super) fn router(state: Arc<State>) -> Router {
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(text_completions))
        .route("/v1/messages", post(anthropic_messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/responses", post(openai_responses))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/metrics", get(metrics))
        .route_layer(middleware::from_fn(check_form))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&state), check_key));
    let admin = Router::new()
        .route("/admin/reload", post(reload))
        .route("/admin/ranks", get(ranks))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&state), check_admin));
    let cors = cors(&state);
    let router = Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/health/ready", get(health))
        .route("/health/live", get(async || Json(json!({"status": "ok"}))))
        .route("/version", get(version))
        .route("/openapi.json", get(async || Json(openapi::document())))
        .merge(guarded)
        .merge(admin)
        .fallback(async |uri: Uri| ApiError::unknown_route(uri.path()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::wrong_method(method.as_str(), uri.path())
        })
        .with_state(state);
    let router = match cors {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router.layer(middleware::from_fn(log::request))
}

/// What browsers are told of the pages that may ask.
fn cors(state: &State) -> Option<CorsLayer> {
    let origins = &state.options.allowed_origins;
    let origin = match origins.as_slice() {
        [] => return None,
        all if all.iter().any(|origin| origin == "*") => AllowOrigin::any(),
        some => AllowOrigin::list(some.iter().cloned()),
    };
    let headers = ["authorization", "content-type", "x-api-key", "anthropic-version", "anthropic-beta"];
    Some(
        CorsLayer::new()
            .allow_origin(origin)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(headers.map(HeaderName::from_static)),
    )
}

async fn check_key(extract::State(state): Shared, request: Request, next: Next) -> Response {
    match state.options.api_keys.check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => early_error(error, request.uri().path()),
    }
}

async fn check_form(request: Request, next: Next) -> Response {
    match form::check(request.method(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => early_error(error, request.uri().path()),
    }
}

/// An error in the form of the interface at `path`, whose handler does not see the request.
fn early_error(error: ApiError, path: &str) -> Response {
    match path.starts_with("/v1/messages") {
        true => error.anthropic_response(),
        false => error.into_response(),
    }
}

async fn check_admin(extract::State(state): Shared, request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>();
    match admin::check(&state.options.api_keys, peer, request.headers(), request.uri()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Whether requests should come here.
async fn health(extract::State(state): Shared) -> (StatusCode, Json<Value>) {
    let status = match state.ready.get() {
        None => json!({"status": "loading"}),
        Some(ready) => match ready.backend.trouble() {
            None => return (StatusCode::OK, Json(json!({"status": "ok"}))),
            Some(cause) => json!({"status": "unavailable", "cause": cause}),
        },
    };
    (StatusCode::SERVICE_UNAVAILABLE, Json(status))
}

async fn reload(extract::State(state): Shared, body: Body) -> Result<Json<Value>, ApiError> {
    let (ready, request) = read(&state, body, admin::read).await?;
    // Also where the client goes away: half of a reload is none.
    let reloading = tokio::task::spawn_blocking(move || ready.backend.reload(&request));
    let report = reloading.await.map_err(|error| ApiError::internal(format!("reload: {error}")))?;
    let report = report.map_err(ApiError::not_reloaded)?;
    Ok(Json(serde_json::to_value(report).expect("a report is plain data")))
}

async fn ranks(extract::State(state): Shared) -> Result<Json<Value>, ApiError> {
    let status = ready(&state)?.backend.status();
    Ok(Json(serde_json::to_value(status).expect("a status is plain data")))
}

/// The chat page. It fetches nothing from elsewhere, and what a model says is never run.
async fn page() -> Response {
    let nonce = fresh_id("");
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (CONTENT_SECURITY_POLICY, policy),
        (X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (REFERRER_POLICY, "no-referrer".to_owned()),
    ];
    (headers, include_str!("page.html").replace("NONCE", &nonce)).into_response()
}

async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn models(extract::State(state): Shared) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({"object": "list", "data": [model_json(&state, ready(&state)?)]})))
}

async fn model(
    extract::State(state): Shared,
    asked: Result<extract::Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let extract::Path(asked) = asked.map_err(|error| ApiError::bad_request(error.body_text()))?;
    let ready = ready(&state)?;
    if asked != *ready.model {
        return Err(ApiError::unknown_model(&asked, &ready.model));
    }
    Ok(Json(model_json(&state, ready)))
}

fn model_json(state: &State, ready: &Ready) -> Value {
    let info = ready.backend.model();
    let mut model = json!({
        "id": &*ready.model,
        "object": "model",
        "created": state.started,
        "owned_by": "shardrun",
        "max_model_len": info.max_model_len,
        "ranks": info.ranks,
    });
    if let Some(topk) = info.index_topk {
        // Beyond it this program is not what the model was trained as.
        model["dense_attention_exact_up_to"] = topk.into();
    }
    model
}

async fn metrics(extract::State(state): Shared) -> Result<Response, ApiError> {
    let ready = ready(&state)?;
    let page = ready.backend.metrics(&ready.model);
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response())
}

async fn chat_completions(extract::State(state): Shared, body: Body) -> Result<Response, ApiError> {
    let (ready, job) = read(&state, body, chat::read).await?;
    let protocol =
        openai::Chat::new(head("chatcmpl-", object_of(&job), &ready), Arc::clone(&ready.dialect), &job);
    run(&state, &ready, job, "messages", protocol).await
}

fn object_of(job: &Job) -> &'static str {
    if job.delivery == Delivery::Whole { "chat.completion" } else { "chat.completion.chunk" }
}

async fn text_completions(extract::State(state): Shared, body: Body) -> Result<Response, ApiError> {
    let (ready, (job, extras)) = read(&state, body, completions::read).await?;
    let protocol =
        openai::Text::new(head("cmpl-", "text_completion", &ready), Arc::clone(&ready.dialect), &job, extras);
    run(&state, &ready, job, "prompt", protocol).await
}

async fn anthropic_messages(extract::State(state): Shared, body: Body) -> Response {
    let answer = async {
        let (ready, job) = read(&state, body, anthropic::read).await?;
        let protocol = anthropic::Messages::new(head("msg_", "message", &ready), &job);
        run(&state, &ready, job, "messages", protocol).await
    };
    answer.await.unwrap_or_else(|error: ApiError| error.anthropic_response())
}

async fn count_tokens(extract::State(state): Shared, body: Body) -> Response {
    match read(&state, body, anthropic::count).await {
        Ok((_, count)) => Json(json!({"input_tokens": count})).into_response(),
        Err(error) => error.anthropic_response(),
    }
}

async fn openai_responses(extract::State(state): Shared, body: Body) -> Result<Response, ApiError> {
    let (ready, (job, echo)) = read(&state, body, responses::read).await?;
    let protocol = responses::Responses::new(head("resp_", "response", &ready), echo);
    run(&state, &ready, job, "input", protocol).await
}

async fn tokenize(extract::State(state): Shared, body: Body) -> Result<Json<Value>, ApiError> {
    Ok(Json(read(&state, body, tokens::tokenize).await?.1))
}

async fn detokenize(extract::State(state): Shared, body: Body) -> Result<Json<Value>, ApiError> {
    Ok(Json(read(&state, body, tokens::detokenize).await?.1))
}

async fn tokenizer_info(extract::State(state): Shared) -> Result<Json<Value>, ApiError> {
    let ready = ready(&state)?;
    Ok(Json(tokens::info(&context(ready))))
}

fn head(prefix: &str, object: &'static str, ready: &Ready) -> Head {
    Head { id: fresh_id(prefix), object, created: unix_time(), model: ready.model.to_string() }
}

fn context(ready: &Ready) -> Context<'_> {
    Context {
        dialect: &ready.dialect,
        model: &ready.model,
        max_model_len: ready.backend.model().max_model_len,
    }
}

/// Takes a body in and reads it with `read`.
async fn read<T: Send + 'static>(
    state: &State,
    body: Body,
    read: fn(&[u8], &Context<'_>) -> Result<T, ApiError>,
) -> Result<(Ready, T), ApiError> {
    let ready = ready(state)?.clone();
    let body = take(state, body).await?;
    let reading = {
        let ready = ready.clone();
        // A long prompt takes a while to tokenise; other answers must go on meanwhile.
        tokio::task::spawn_blocking(move || read(&body, &context(&ready)))
    };
    let value = reading
        .await
        .map_err(|error| ApiError::internal(format!("the request could not be read: {error}")))??;
    Ok((ready, value))
}

async fn take(state: &State, body: Body) -> Result<Bytes, ApiError> {
    let (limit, timeout) = (state.options.max_body_bytes, state.options.read_timeout);
    let taken = tokio::time::timeout(timeout, axum::body::to_bytes(body, limit)).await;
    taken.map_err(|_| ApiError::too_slow(timeout))?.map_err(|error| {
        let source = std::error::Error::source(&error);
        match source.is_some_and(|source| source.is::<http_body_util::LengthLimitError>()) {
            true => ApiError::too_large(limit),
            false => ApiError::bad_request(format!("the body could not be read: {error}")),
        }
    })
}

/// From a job to the answer. Whatever drops this future or the response's body drops the engine's streams with it.
async fn run(
    state: &State,
    ready: &Ready,
    job: Job,
    field: &'static str,
    protocol: impl Protocol,
) -> Result<Response, ApiError> {
    let Job { prompts, n, generation, reading, delivery, tokens } = job;
    let ids = match tokens {
        Tokens::AsText => Ids::Dropped,
        Tokens::AsIdsToo => Ids::Kept,
    };
    // Later would be no better than now, which "too many wait" promises.
    let (answers, most) = (prompts.len() * n, ready.backend.model().max_waiting);
    let is_free = generation.max_tokens == 0 && generation.prompt_logprobs.is_none();
    if answers > most && !is_free {
        return Err(ApiError::too_many(if n > 1 { "n" } else { field }, answers, most));
    }
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    note_dense(state, ready, prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0));
    let mut generations = Vec::with_capacity(prompts.len() * n);
    for prompt in prompts {
        for choice in 0..n {
            let mut request = GenerationRequest { prompt: prompt.clone(), ..generation.clone() };
            // Answers to one prompt differ, and the same seed gives the same ones again.
            request.sampling.seed = request.sampling.seed.map(|seed| seed.wrapping_add(choice as u64));
            let events = match (request.max_tokens, request.prompt_logprobs) {
                (0, None) => nothing_to_generate(),
                _ => ready.backend.submit(request).map_err(|refusal| ApiError::refused(&refusal, field))?,
            };
            generations.push(Generation::new(events, ready.dialect.answer(&reading), ids));
        }
    }
    let answers = Answers::new(generations, n, prompt_tokens);
    let times = Times { ping: state.options.ping, most: state.options.request_timeout };
    match delivery {
        Delivery::Whole => answer::whole(protocol, answers, times).await,
        Delivery::Stream | Delivery::StreamWithUsage => Ok(answer::stream(protocol, answers, times)),
    }
}

/// Says once that a prompt is longer than what the model attends to.
fn note_dense(state: &State, ready: &Ready, prompt: usize) {
    if let Some(warning) = ready.backend.model().dense_warning(prompt)
        && !state.said_dense.swap(true, Ordering::Relaxed)
    {
        tracing::warn!("{warning} (said once)");
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
