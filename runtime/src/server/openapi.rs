//! What the server takes, as an OpenAPI document.
//!
//! It is not derived from request types, since there are none: readers ask for fields by name, each with its range, so that
//! every fault names its field. A test here holds its fields against those that the readers ask for, in both directions, and
//! runtime/tests/malformed.rs sends what each schema allows and what it does not.

use super::admin;
use super::chat::EFFORTS;
use super::known::{self, Known};
use super::request::{MAX_CHOICES, MAX_LOGPROBS};
use crate::text::LONGEST_NAME;
use formats::manifest::MAX_RANKS;
use serde_json::{Map, Value, json};

/// The document of `/openapi.json`.
pub(super) fn document() -> Value {
    let mut paths = Map::new();
    let mut post = |path: &str, summary: &str, schema: Value, stream: bool| {
        paths.insert(
            path.to_owned(),
            json!({"post": {
                "summary": summary,
                "operationId": operation_id(path),
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
    post("/admin/reload", "Loads other weights of the same model while it is served", reload(), false);
    for (path, summary, kind, is_guarded) in [
        ("/", "The chat page", "text/html", false),
        (
            "/health",
            "200 while requests should come here: the model is loaded and works",
            "application/json",
            false,
        ),
        ("/health/ready", "The same", "application/json", false),
        ("/health/live", "200 while the process answers, also while it loads", "application/json", false),
        ("/admin/ranks", "What is loaded, rank by rank", "application/json", true),
        ("/version", "The program's version", "application/json", false),
        ("/openapi.json", "This document", "application/json", false),
        ("/v1/models", "The model, as the only one of a list", "application/json", true),
        ("/v1/models/{model}", "The model", "application/json", true),
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
        let get = json!({"summary": summary, "operationId": operation_id(path), "security": security, "responses": answers});
        paths.insert(path.to_owned(), json!({"get": get}));
    }
    paths["/v1/models/{model}"]["get"]["parameters"] = json!([{"name": "model", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}]);
    paths["/v1/models/{model}"]["get"]["responses"]["404"] =
        error("Another model than the one that is served");
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

/// A name for what a path does.
fn operation_id(path: &str) -> String {
    match path.trim_matches('/').replace(['/', '.'], "_").replace(['{', '}'], "") {
        id if id.is_empty() => "page".to_owned(),
        id => id,
    }
}

fn error(description: &str) -> Value {
    json!({"description": description, "content": {"application/json": {}}})
}

fn responses(path: &str, stream: bool) -> Value {
    let mut responses = usual_responses(path, stream);
    if path.starts_with("/admin/") {
        let error = |description: &str| responses_error("Error", description);
        responses["403"] =
            error("The server has no keys, and the request does not come from its own machine");
        responses["409"] = error("Another reload runs, or ranks that were not named have changed too");
        responses["422"] = error("The checkpoint cannot be served here: `rank` and `tensor` name the place");
    }
    responses
}

fn responses_error(schema: &str, description: &str) -> Value {
    let reference = json!({"$ref": format!("#/components/schemas/{schema}")});
    json!({"description": description, "content": {"application/json": {"schema": reference}}})
}

fn usual_responses(path: &str, stream: bool) -> Value {
    let name = if path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
    let error = |description: &str| responses_error(name, description);
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
        "415": error("The body is compressed, or is said to be no JSON"),
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

fn word(words: &[&str]) -> Value {
    let words: Vec<Value> = words.iter().map(|&word| word.into()).chain([Value::Null]).collect();
    json!({"enum": words})
}

/// These fields, and those that nothing is done for.
fn with(mut fields: Map<String, Value>, known: &[&Known]) -> Map<String, Value> {
    fields.extend(known.iter().flat_map(|known| known.properties()));
    fields
}

/// The same for chat and text completions, which look at the type of one of them.
fn with_user(fields: Map<String, Value>, known: &Known) -> Map<String, Value> {
    let mut fields = with(fields, &[&known::COMPLETIONS, known]);
    fields["user"]["type"] = json!(["string", "null"]);
    fields
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

fn choice() -> Value {
    or_null(json!({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}))
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
        "stream_options": or_null(object(&with(map(json!({"include_usage": of("boolean")})), &[&known::STREAM_OPTIONS]), &[])),
        "cache_salt": or_null(json!({"type": "string", "minLength": 1, "maxLength": 1024})),
        "return_token_ids": of("boolean"),
        "response_format": or_null(json!({"type": "object", "required": ["type"], "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"name": of("string"), "strict": of("boolean"), "schema": {"type": "object"}}},
        }})),
        "structured_outputs": or_null(object(&with(map(json!({
            "json": {"type": ["object", "string", "null"]}, "json_object": of("boolean"), "regex": of("string"), "grammar": of("string"), "choice": choice(),
        })), &[&known::STRUCTURED_OUTPUTS]), &[])),
        "guided_json": {"type": ["object", "string", "null"]},
        "guided_regex": of("string"),
        "guided_grammar": of("string"),
        "guided_choice": choice(),
    }))
}

/// What `text::is_tool_name` takes, but that it counts bytes.
fn tool_name() -> Value {
    json!({"type": "string", "minLength": 1, "maxLength": LONGEST_NAME, "pattern": r#"^[^<"\s]([^<"\n]*[^<"\s])?$"#})
}

fn tools() -> Value {
    or_null(
        json!({"type": "array", "items": {"type": "object", "required": ["type", "function"], "properties": {
            "type": {"const": "function"},
            "function": {"type": "object", "required": ["name"], "properties": {
                "name": tool_name(), "description": of("string"), "parameters": of("object"),
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
        "name": of("string"), "tool_call_id": of("string"), "reasoning_content": of("string"), "reasoning": of("string"),
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
        "reasoning_effort": word(&EFFORTS),
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
        "thinking_token_budget": integer(-1, None),
    })));
    object(&with_user(fields, &known::CHAT), &["messages"])
}

fn completions() -> Value {
    let id = json!({"type": "integer", "minimum": 0});
    let mut fields = common();
    fields.extend(map(json!({
        "prompt": {"type": ["string", "array"], "minLength": 1, "minItems": 1, "items": {"anyOf": [id, {"type": "string"}, {"type": "array", "items": id}]}},
        "max_tokens": integer(0, None),
        "logprobs": integer(0, Some(MAX_LOGPROBS)),
        "top_logprobs": integer(0, Some(0)),
        "echo": of("boolean"),
        "add_special_tokens": of("boolean"),
    })));
    object(&with_user(fields, &known::TEXT), &["prompt"])
}

fn messages(whole: bool) -> Value {
    let content = json!({"type": ["string", "array"], "items": {"type": "object", "required": ["type"]}});
    let message = json!({"type": "object", "required": ["role", "content"], "properties": {"role": {"enum": ["user", "assistant"]}, "content": content}});
    let tool = json!({"type": "object", "required": ["name", "input_schema"], "properties": {
        "name": tool_name(), "description": of("string"), "input_schema": {"type": "object"}}});
    let mut fields = map(json!({
        "model": of("string"),
        "messages": {"type": "array", "minItems": 1, "items": message},
        "system": or_null(json!({"type": ["string", "array"], "items": {"type": "object", "required": ["type", "text"]}})),
        "tools": or_null(json!({"type": "array", "items": tool})),
        "tool_choice": or_null(json!({"type": "object", "required": ["type"], "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}}})),
        "thinking": or_null(json!({"type": "object", "required": ["type"], "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}, "budget_tokens": integer(0, None)}})),
        "output_config": or_null(json!({"type": "object", "properties": {"effort": word(&EFFORTS)}})),
    }));
    fields = with(fields, &[&known::MESSAGES]);
    fields["metadata"]["type"] = json!(["object", "null"]);
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
    fields["output_config"]["properties"]["format"] =
        or_null(json!({"type": "object", "required": ["type"]}));
    object(&fields, &["messages", "max_tokens"])
}

fn responses_body() -> Value {
    let tool = json!({"type": "object", "required": ["type", "name"], "properties": {
        "type": {"const": "function"}, "name": tool_name(), "description": of("string"), "parameters": of("object")}});
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
        "reasoning": or_null(json!({"type": "object", "properties": {"effort": word(&EFFORTS)}})),
        "cache_salt": or_null(json!({"type": "string", "minLength": 1, "maxLength": 1024})),
        "previous_response_id": {"type": "null"}, "conversation": {"type": "null"}, "prompt": {"type": "null"},
        "text": or_null(json!({"type": "object", "properties": {"format": or_null(json!({"type": "object", "required": ["type"]}))}})),
        "stream": of("boolean"),
        "metadata": of("object"),
    }));
    let mut fields = with(fields, &[&known::RESPONSES]);
    fields["store"]["type"] = json!(["boolean", "null"]);
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
    object(&with(fields, &[&known::TOKENIZE]), &[])
}

fn detokenize() -> Value {
    let id = json!({"type": "integer", "minimum": 0});
    let fields = map(json!({"model": of("string"), "tokens": {"type": "array", "items": id}}));
    object(&fields, &["tokens"])
}

fn reload() -> Value {
    let rank = json!({"type": "integer", "minimum": 0, "maximum": MAX_RANKS - 1});
    let fields = map(json!({
        "dir": or_null(json!({"type": "string", "minLength": 1, "maxLength": admin::MAX_DIR_BYTES,
            "description": "Folder of the checkpoint on the server's machine; without it, the one that is served"})),
        "ranks": or_null(json!({"type": "array", "minItems": 1, "maxItems": MAX_RANKS, "items": rank,
            "description": "Load these, also where they are as before; without it, those that have changed"})),
        "verify": or_null(json!({"type": "boolean", "default": true,
            "description": "Hold every byte against its digest"})),
        "in_place": or_null(json!({"type": "boolean", "default": false,
            "description": "Take the old weights out of memory first; requests wait meanwhile"})),
    }));
    object(&fields, &[])
}

#[cfg(test)]
mod tests {
    use super::super::fields::asked;
    use super::super::request::Context;
    use super::super::{admin, anthropic, chat, completions, responses, tokens};
    use super::*;
    use crate::dialect::Dialect;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// Every path of a schema: `a`, `a.b`, `a[].b`.
    fn paths(schema: &Value, within: &str, out: &mut BTreeSet<String>) {
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{within}{name}");
            paths(property, &format!("{path}."), out);
            paths(&property["items"], &format!("{path}[]."), out);
            out.insert(path);
        }
    }

    /// A path without the numbers of its list items.
    fn plain(path: &str) -> String {
        path.split('[')
            .map(|part| part.split_once(']').map_or(part, |(_, rest)| rest))
            .collect::<Vec<_>>()
            .join("[]")
    }

    #[test]
    fn the_document_has_the_fields_that_readers_ask_for_and_no_others() {
        let dialect =
            Dialect::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-glm5-hf")).unwrap();
        let context = Context { dialect: &dialect, model: "m", max_model_len: 4096 };
        let messages = json!([
            {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]);
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let shape = json!({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}});
        // Nested fields are asked for where they can be.
        let common = json!({
            "stream": true, "stream_options": {}, "structured_outputs": {}, "response_format": shape,
            "tools": tools, "chat_template_kwargs": {},
        });
        let with = |more: Value| {
            let mut body = common.clone();
            body.as_object_mut().unwrap().extend(map(more));
            body
        };
        let anthropic = json!({
            "max_tokens": 5, "thinking": {"type": "enabled"}, "output_config": {"format": {"type": "text"}},
            "system": [{"type": "text", "text": "x"}], "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "auto"}, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        });
        let responses = json!({
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "text": {"format": {"type": "text"}},
            "tools": [{"type": "function", "name": "f"}], "reasoning": {},
        });
        type Read = fn(&[u8], &Context<'_>) -> Result<(), String>;
        let readers: [(&str, Value, Read); 9] = [
            ("/v1/chat/completions", with(json!({"messages": messages})), |body, context| {
                chat::read(body, context).map(|_| ()).map_err(|error| error.message)
            }),
            ("/v1/completions", with(json!({"prompt": "x"})), |body, context| {
                completions::read(body, context).map(|_| ()).map_err(|error| error.message)
            }),
            ("/v1/messages", anthropic.clone(), |body, context| {
                anthropic::read(body, context).map(|_| ()).map_err(|error| error.message)
            }),
            ("/v1/messages/count_tokens", anthropic, |body, context| {
                anthropic::count(body, context).map(|_| ()).map_err(|error| error.message)
            }),
            ("/v1/responses", responses, |body, context| {
                responses::read(body, context).map(|_| ()).map_err(|error| error.message)
            }),
            ("/tokenize", json!({"prompt": "x"}), |body, context| {
                tokens::tokenize(body, context).map(|_| ()).map_err(|error| error.message)
            }),
            (
                "/tokenize",
                json!({"messages": messages, "tools": tools, "chat_template_kwargs": {}}),
                |body, context| tokens::tokenize(body, context).map(|_| ()).map_err(|error| error.message),
            ),
            ("/admin/reload", json!({"ranks": [0]}), |body, context| {
                admin::read(body, context).map(|_| ()).map_err(|error| error.message)
            }),
            ("/detokenize", json!({"tokens": [5]}), |body, context| {
                tokens::detokenize(body, context).map(|_| ()).map_err(|error| error.message)
            }),
        ];
        let document = document();
        let mut asked_at: std::collections::BTreeMap<&str, BTreeSet<String>> = Default::default();
        for (path, body, read) in readers {
            asked::take();
            assert_eq!(read(body.to_string().as_bytes(), &context), Ok(()), "{path}");
            asked_at.entry(path).or_default().extend(asked::take().iter().map(|path| plain(path)));
        }
        let bodies = document["paths"]
            .as_object()
            .unwrap()
            .iter()
            .filter(|(_, methods)| methods.get("post").is_some());
        assert_eq!(bodies.count(), asked_at.len(), "every body has its reader here");
        for (path, asked) in asked_at {
            let schema =
                &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
            let mut documented = BTreeSet::new();
            paths(schema, "", &mut documented);
            let without_effect: BTreeSet<String> = documented
                .iter()
                .filter(|name| {
                    let property = name.split('.').fold(schema, |schema, name| &schema["properties"][name]);
                    property["description"].as_str().is_some_and(|text| text.starts_with("Without effect"))
                })
                .cloned()
                .collect();
            let promised: Vec<_> =
                documented.difference(&asked).filter(|name| !without_effect.contains(*name)).collect();
            assert!(promised.is_empty(), "{path}: in the document, but nobody reads them: {promised:?}");
            let hidden: Vec<_> = asked.difference(&documented).filter(|name| !name.contains('.')).collect();
            assert!(hidden.is_empty(), "{path}: read, but not in the document: {hidden:?}");
        }
    }

    #[test]
    fn what_is_taken_without_effect_is_told_to_users() {
        let page = include_str!("../../../SERVER.md");
        for known in [
            &known::COMPLETIONS,
            &known::CHAT,
            &known::TEXT,
            &known::MESSAGES,
            &known::RESPONSES,
            &known::STREAM_OPTIONS,
            &known::STRUCTURED_OUTPUTS,
        ] {
            for (name, _) in known.without_effect {
                assert!(page.contains(&format!("`{name}`")), "SERVER.md says nothing of {name}");
            }
        }
    }
}
