//! What the server takes, as an OpenAPI document. Tests hold it against the server field by field.

use super::request::{MAX_CHOICES, MAX_LOGPROBS};
use serde_json::{Map, Value, json};

/// The document of `/openapi.json`.
pub(super) fn document() -> Value {
    let mut paths = Map::new();
    let mut post = |path: &str, summary: &str, schema: Value, stream: bool| {
        paths.insert(
            path.to_owned(),
            json!({"post": {
                "summary": summary,
                "operationId": path.trim_matches('/').replace(['/', '.'], "_"),
                "security": [{"key": []}],
                "requestBody": {"required": true, "content": {"application/json": {"schema": schema}}},
                "responses": responses(path, stream),
            }}),
        );
    };
    post("/v1/chat/completions", "Continues a conversation, as OpenAI's chat completions", chat(), true);
    post("/v1/completions", "Continues prompts, as OpenAI's completions", completions(), true);
    post("/v1/messages", "Continues a conversation, as Anthropic's messages", messages(true), true);
    post("/v1/messages/count_tokens", "Counts the tokens of a conversation", messages(false), false);
    post(
        "/v1/responses",
        "Continues a conversation, as OpenAI's responses, without memory",
        responses_body(),
        true,
    );
    post("/tokenize", "Text or a conversation to token ids", tokenize(), false);
    post("/detokenize", "Token ids to text", detokenize(), false);
    for (path, summary, kind, is_guarded) in [
        ("/health", "200 once the model is loaded", "application/json", false),
        ("/version", "The program's version", "application/json", false),
        ("/openapi.json", "This document", "application/json", false),
        ("/v1/models", "The model", "application/json", true),
        ("/tokenizer_info", "The vocabulary", "application/json", true),
        ("/metrics", "Counters for Prometheus", "text/plain", true),
    ] {
        let mut answers = json!({
            "200": {"description": summary, "content": {kind: {}}},
            "503": error("The model is still loading"),
        });
        if is_guarded {
            answers["401"] = error("No key, or a wrong one");
        }
        let security = if is_guarded { json!([{"key": []}]) } else { json!([]) };
        let id = path.trim_matches('/').replace(['/', '.'], "_");
        let get = json!({"summary": summary, "operationId": id, "security": security, "responses": answers});
        paths.insert(path.to_owned(), json!({"get": get}));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "shardrun", "version": env!("CARGO_PKG_VERSION"),
            "description": "Unknown fields are ignored; null is the same as leaving a field out. A field of a wrong type or out of range is a 400 whose `param` names it.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Only where the server was given keys"}},
            "schemas": {
                "Error": {
                    "type": "object", "required": ["error"],
                    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"], "properties": {
                        "message": {"type": "string"}, "type": {"type": "string"},
                        "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
                    }}},
                },
                "AnthropicError": {
                    "type": "object", "required": ["type", "error"],
                    "properties": {"type": {"const": "error"}, "error": {"type": "object", "required": ["type", "message"], "properties": {
                        "type": {"type": "string"}, "message": {"type": "string"},
                    }}},
                },
            },
        },
    })
}

fn error(description: &str) -> Value {
    json!({"description": description, "content": {"application/json": {}}})
}

fn responses(path: &str, stream: bool) -> Value {
    let name = if path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
    let reference = json!({"$ref": format!("#/components/schemas/{name}")});
    let error = |description: &str| json!({"description": description, "content": {"application/json": {"schema": reference}}});
    let mut content = json!({"application/json": {}});
    if stream {
        content["text/event-stream"] = json!({});
    }
    json!({
        "200": {"description": "The answer; server-sent events where `stream` is true", "content": content},
        "400": error("Not JSON, or a field is wrong: `param` names it"),
        "401": error("No key, or a wrong one"),
        "404": error("Another model than the one that is served"),
        "408": error("The body did not come in time, or the answer took too long"),
        "413": error("The body is too large"),
        "429": error("Too many requests wait: try again after `retry-after` seconds"),
        "503": error("The model is still loading, or has stopped"),
    })
}

/// A schema that null is allowed for too: it is the same as nothing.
fn or_null(mut schema: Value) -> Value {
    match &mut schema["type"] {
        Value::String(kind) => schema["type"] = json!([kind, "null"]),
        Value::Array(kinds) => kinds.push("null".into()),
        _ => {}
    }
    schema
}

fn number(least: f64, most: f64) -> Value {
    or_null(json!({"type": "number", "minimum": least, "maximum": most}))
}

fn above_zero(most: f64) -> Value {
    or_null(json!({"type": "number", "exclusiveMinimum": 0.0, "maximum": most}))
}

fn integer(least: i64, most: Option<i64>) -> Value {
    let mut schema = json!({"type": "integer", "minimum": least});
    if let Some(most) = most {
        schema["maximum"] = most.into();
    }
    or_null(schema)
}

fn of(kind: &str) -> Value {
    or_null(json!({"type": kind}))
}

fn texts() -> Value {
    let text = json!({"type": "string", "minLength": 1, "maxLength": 1024});
    or_null(
        json!({"type": ["string", "array"], "minLength": 1, "maxLength": 1024, "items": text, "maxItems": 64}),
    )
}

fn object(properties: &Map<String, Value>, required: &[&str]) -> Value {
    json!({"type": "object", "properties": properties, "required": required})
}

fn map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// What chat and text completions have in common.
fn common() -> Map<String, Value> {
    let choices = Some(MAX_CHOICES as i64);
    map(json!({
        "model": of("string"),
        "temperature": number(0.0, 2.0),
        "top_p": above_zero(1.0),
        "top_k": integer(-1, None),
        "min_p": number(0.0, 1.0),
        "seed": of("integer"),
        "stop": texts(),
        "stop_token_ids": or_null(json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": u32::MAX}, "maxItems": 1024})),
        "ignore_eos": of("boolean"),
        "min_tokens": integer(0, Some(i64::from(u32::MAX))),
        "n": integer(1, choices),
        "prompt_logprobs": integer(0, Some(MAX_LOGPROBS)),
        "logit_bias": or_null(json!({"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}})),
        "presence_penalty": number(-2.0, 2.0),
        "frequency_penalty": number(-2.0, 2.0),
        "repetition_penalty": above_zero(100.0),
        "stream": of("boolean"),
        "stream_options": or_null(json!({"type": "object", "properties": {"include_usage": of("boolean")}})),
        "response_format": or_null(json!({"type": "object", "required": ["type"], "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"name": of("string"), "strict": of("boolean"), "schema": {"type": "object"}}},
        }})),
        "structured_outputs": of("object"),
        "guided_regex": of("string"),
        "guided_grammar": of("string"),
        "guided_choice": or_null(json!({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1})),
        "user": of("string"),
    }))
}

fn tools() -> Value {
    or_null(
        json!({"type": "array", "items": {"type": "object", "required": ["type", "function"], "properties": {
            "type": {"const": "function"},
            "function": {"type": "object", "required": ["name"], "properties": {
                "name": {"type": "string", "minLength": 1}, "description": of("string"), "parameters": of("object"),
            }},
        }}}),
    )
}

/// Fields that say what a conversation is.
fn conversation() -> Map<String, Value> {
    let text = json!({"type": ["object", "string"], "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}});
    let message = json!({"type": "object", "required": ["role"], "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": or_null(json!({"type": ["string", "array"], "items": text})),
        "name": of("string"), "tool_call_id": of("string"), "reasoning_content": of("string"),
        "tool_calls": or_null(json!({"type": "array", "items": {"type": "object", "required": ["function"], "properties": {
            "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "arguments": of("object")}},
        }}})),
    }});
    map(json!({
        "messages": {"type": "array", "minItems": 1, "items": message},
        "tools": tools(),
        "tool_choice": or_null(json!({"type": ["string", "object"]})),
        "parallel_tool_calls": of("boolean"),
        "chat_template_kwargs": or_null(json!({"type": "object", "properties": {"enable_thinking": of("boolean")}})),
        "reasoning_effort": of("string"),
    }))
}

fn chat() -> Value {
    let mut fields = common();
    fields.extend(conversation());
    fields.extend(map(json!({
        "max_tokens": integer(1, None),
        "max_completion_tokens": integer(1, None),
        "logprobs": of("boolean"),
        "top_logprobs": integer(0, Some(MAX_LOGPROBS)),
    })));
    object(&fields, &["messages"])
}

fn completions() -> Value {
    let id = json!({"type": "integer", "minimum": 0});
    let mut fields = common();
    fields.extend(map(json!({
        "prompt": {"type": ["string", "array"], "minLength": 1, "minItems": 1, "items": {"anyOf": [id, {"type": "string"}, {"type": "array", "items": id}]}},
        "max_tokens": integer(0, None),
        "logprobs": integer(0, Some(MAX_LOGPROBS)),
        "echo": of("boolean"),
    })));
    object(&fields, &["prompt"])
}

fn messages(whole: bool) -> Value {
    let content = json!({"type": ["string", "array"], "items": {"type": "object", "required": ["type"]}});
    let message = json!({"type": "object", "required": ["role", "content"], "properties": {"role": {"enum": ["user", "assistant"]}, "content": content}});
    let tool = json!({"type": "object", "required": ["name", "input_schema"], "properties": {
        "name": {"type": "string", "minLength": 1}, "description": of("string"), "input_schema": {"type": "object"}}});
    let mut fields = map(json!({
        "model": of("string"),
        "messages": {"type": "array", "minItems": 1, "items": message},
        "system": or_null(json!({"type": ["string", "array"], "items": {"type": "object", "required": ["type", "text"]}})),
        "tools": or_null(json!({"type": "array", "items": tool})),
        "tool_choice": or_null(json!({"type": "object", "required": ["type"], "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}}})),
        "thinking": or_null(json!({"type": "object", "required": ["type"], "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}}})),
        "metadata": of("object"),
    }));
    if !whole {
        return object(&fields, &["messages"]);
    }
    fields.extend(map(json!({
        "max_tokens": {"type": "integer", "minimum": 1},
        "temperature": number(0.0, 1.0),
        "top_p": above_zero(1.0),
        "top_k": integer(-1, None),
        "stop_sequences": texts(),
        "stream": of("boolean"),
    })));
    object(&fields, &["messages", "max_tokens"])
}

fn responses_body() -> Value {
    let tool = json!({"type": "object", "required": ["type", "name"], "properties": {
        "type": {"const": "function"}, "name": {"type": "string", "minLength": 1}, "description": of("string"), "parameters": of("object")}});
    let fields = map(json!({
        "model": of("string"),
        "input": {"type": ["string", "array"], "minItems": 1, "items": {"type": "object"}},
        "instructions": of("string"),
        "max_output_tokens": integer(1, None),
        "temperature": number(0.0, 2.0),
        "top_p": above_zero(1.0),
        "tools": or_null(json!({"type": "array", "items": tool})),
        "tool_choice": or_null(json!({"type": ["string", "object"]})),
        "parallel_tool_calls": of("boolean"),
        "reasoning": or_null(json!({"type": "object", "properties": {"effort": of("string")}})),
        "text": or_null(json!({"type": "object", "properties": {"format": or_null(json!({"type": "object", "required": ["type"]}))}})),
        "store": of("boolean"),
        "stream": of("boolean"),
    }));
    object(&fields, &["input"])
}

fn tokenize() -> Value {
    let mut fields = conversation();
    fields.extend(map(json!({
        "model": of("string"),
        "prompt": of("string"),
        "add_special_tokens": of("boolean"),
        "return_token_strs": of("boolean"),
    })));
    object(&fields, &[])
}

fn detokenize() -> Value {
    let id = json!({"type": "integer", "minimum": 0});
    let fields = map(json!({"model": of("string"), "tokens": {"type": "array", "items": id}}));
    object(&fields, &["tokens"])
}
