//! Answers of `/v1/chat/completions` and `/v1/completions`.

use super::answer::{Choice, Events, Protocol, Usage};
use super::api::{
    Head, TextLogprobs, call_id, calls, chat_logprobs, prompt_logprobs, stop_reason, usage_json,
};
use super::completions::Extras;
use super::error::ApiError;
use super::request::{Delivery, Job, Tokens};
use crate::dialect::Dialect;
use crate::generation::{Ending, Part};
use crate::logprobs::TokenLogprobs;
use crate::text::CallDelta;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What both kinds of answers need.
struct Base {
    head: Head,
    dialect: Arc<Dialect>,
    stop: Vec<String>,
    delivery: Delivery,
    logprobs: bool,
    prompt_logprobs: bool,
    tokens: Tokens,
    /// The prompts, where something of them is sent.
    prompts: Vec<Vec<u32>>,
}

impl Base {
    fn new(head: Head, dialect: Arc<Dialect>, job: &Job, echo: bool) -> Self {
        let prompts = if echo || job.tokens == Tokens::AsIdsToo { job.prompts.clone() } else { Vec::new() };
        Self {
            head,
            dialect,
            tokens: job.tokens,
            prompts,
            stop: job.reading.stop.clone(),
            delivery: job.delivery,
            logprobs: job.generation.logprobs.is_some(),
            prompt_logprobs: job.generation.prompt_logprobs.is_some(),
        }
    }

    fn answer(&self, choices: Vec<Value>) -> Map<String, Value> {
        let Ok(Value::Object(mut answer)) = serde_json::to_value(&self.head) else {
            unreachable!("a head is an object");
        };
        answer.insert("choices".into(), choices.into());
        answer
    }

    /// Puts vLLM's `token_ids` into a choice.
    fn ids(&self, choice: &mut Value, ids: &[u32]) {
        if self.tokens == Tokens::AsIdsToo {
            choice["token_ids"] = ids.into();
        }
    }

    fn whole(&self, choices: Vec<Value>, usage: Usage) -> Value {
        let mut answer = self.answer(choices);
        answer.insert("usage".into(), usage_json(usage));
        answer.into()
    }

    fn chunk(&self, choice: Value, more: Map<String, Value>, out: &mut Events) {
        let mut chunk = self.answer(vec![choice]);
        chunk.extend(more);
        if self.delivery == Delivery::StreamWithUsage {
            chunk.insert("usage".into(), Value::Null);
        }
        out.data(&chunk);
    }

    fn finish(&self, usage: Usage, out: &mut Events) {
        if self.delivery == Delivery::StreamWithUsage {
            out.data(&self.whole(Vec::new(), usage));
        }
        out.done();
    }
}

/// `/v1/chat/completions`.
pub(super) struct Chat {
    base: Base,
    choices: usize,
}

impl Chat {
    pub(super) fn new(head: Head, dialect: Arc<Dialect>, job: &Job) -> Self {
        Self { base: Base::new(head, dialect, job, false), choices: job.n }
    }

    fn delta(&self, choice: Value, out: &mut Events) {
        self.base.chunk(choice, Map::new(), out);
    }
}

impl Protocol for Chat {
    fn whole(&mut self, choices: Vec<Choice>, usage: Usage) -> Value {
        let base = &self.base;
        let tokenizer = base.dialect.tokenizer();
        let prompt = (base.prompt_logprobs && !choices.is_empty())
            .then(|| prompt_logprobs(tokenizer, &choices[0].prompt_logprobs));
        let choices = choices.into_iter().enumerate().map(|(index, choice)| {
            let Part { piece, logprobs, ids } = choice.part;
            let mut message = Map::new();
            message.insert("role".into(), "assistant".into());
            if !piece.reasoning.is_empty() {
                message.insert("reasoning_content".into(), piece.reasoning.into());
            }
            let calls = calls(piece.calls);
            let silent = piece.content.is_empty() && !calls.is_empty();
            message.insert("content".into(), if silent { Value::Null } else { piece.content.into() });
            if !calls.is_empty() {
                let calls = calls.into_iter().map(|call| {
                    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
                });
                message.insert("tool_calls".into(), calls.collect());
            }
            let logprobs = if base.logprobs { chat_logprobs(tokenizer, &logprobs) } else { Value::Null };
            let mut json =
                json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.ending.name()});
            stop_reason(&mut json, Some(choice.ending), &base.stop);
            base.ids(&mut json, &ids);
            json
        });
        let mut answer = base.whole(choices.collect(), usage);
        if let Some(prompt) = prompt {
            answer["prompt_logprobs"] = prompt;
        }
        if let Some(ids) = base.prompts.first() {
            answer["prompt_token_ids"] = ids.as_slice().into();
        }
        answer
    }

    fn begin(&mut self, out: &mut Events) {
        for index in 0..self.choices {
            let choice = delta(index, &json!({"role": "assistant", "content": ""}));
            // One prompt has all choices, so the first chunk has it for all.
            let ids = self.base.prompts.first().filter(|_| index == 0);
            let ids = ids.map(|ids| ("prompt_token_ids".to_owned(), ids.as_slice().into()));
            self.base.chunk(choice, ids.into_iter().collect(), out);
        }
    }

    fn part(&mut self, choice: usize, part: Part, out: &mut Events) {
        let Part { piece, logprobs, mut ids } = part;
        let mut logprobs = match logprobs.is_empty() {
            true => Value::Null,
            false => chat_logprobs(self.base.dialect.tokenizer(), &logprobs),
        };
        let mut deltas = Vec::new();
        if !piece.reasoning.is_empty() {
            deltas.push(json!({"reasoning_content": piece.reasoning}));
        }
        if !piece.content.is_empty() {
            deltas.push(json!({"content": piece.content}));
        }
        for call in piece.calls {
            let call = match call {
                CallDelta::Begin { index, id, name } => {
                    let id = call_id(id);
                    json!({"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}})
                }
                CallDelta::Arguments { index, json } => {
                    json!({"index": index, "function": {"arguments": json}})
                }
            };
            deltas.push(json!({"tool_calls": [call]}));
        }
        if deltas.is_empty() {
            deltas.push(json!({}));
        }
        for each in deltas {
            let mut choice = delta(choice, &each);
            choice["logprobs"] = logprobs.take();
            self.base.ids(&mut choice, &std::mem::take(&mut ids));
            self.delta(choice, out);
        }
    }

    fn end(&mut self, choice: usize, ending: Ending, out: &mut Events) {
        let mut choice = delta(choice, &json!({}));
        choice["finish_reason"] = ending.name().into();
        stop_reason(&mut choice, Some(ending), &self.base.stop);
        self.base.ids(&mut choice, &[]);
        self.delta(choice, out);
    }

    fn finish(&mut self, usage: Usage, out: &mut Events) {
        self.base.finish(usage, out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Events) {
        out.data(&error.json());
        out.done();
    }
}

/// A choice of a chunk.
fn delta(index: usize, delta: &Value) -> Value {
    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null})
}

/// `/v1/completions`.
pub(super) struct Text {
    base: Base,
    extras: Extras,
    n: usize,
    choices: Vec<TextChoice>,
}

/// A choice while it is streamed.
#[derive(Clone, Default)]
struct TextChoice {
    logprobs: TextLogprobs,
    /// Tokens of the prompt whose log-probabilities are still to come, before which nothing is sent.
    awaited: usize,
    begun: bool,
}

impl Text {
    pub(super) fn new(head: Head, dialect: Arc<Dialect>, job: &Job, extras: Extras) -> Self {
        let choices = vec![TextChoice::default(); job.n * job.prompts.len()];
        Self { base: Base::new(head, dialect, job, extras.echo), extras, n: job.n, choices }
    }

    /// The prompt before choice `index`; control tokens are in it as the client sent them.
    fn echoed(&self, index: usize) -> String {
        self.echo(index).map_or_else(String::new, |ids| self.base.dialect.tokenizer().decode(ids))
    }

    /// The ids of the prompt before choice `index`, where it is sent as text.
    fn echo(&self, index: usize) -> Option<&[u32]> {
        self.prompt_of(index).filter(|_| self.extras.echo)
    }

    fn prompt_of(&self, index: usize) -> Option<&[u32]> {
        self.base.prompts.get(index / self.n).map(Vec::as_slice)
    }

    fn chunk(&mut self, index: usize, text: &str, ids: &[u32], finish: Option<Ending>, out: &mut Events) {
        let logprobs = &mut self.choices[index].logprobs;
        let logprobs = if logprobs.is_empty() { Value::Null } else { logprobs.take() };
        let mut choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.map(Ending::name)});
        stop_reason(&mut choice, finish, &self.base.stop);
        self.base.ids(&mut choice, ids);
        if self.base.tokens == Tokens::AsIdsToo && !std::mem::replace(&mut self.choices[index].begun, true) {
            choice["prompt_token_ids"] = self.prompt_of(index).into();
        }
        self.base.chunk(choice, Map::new(), out);
    }
}

impl Protocol for Text {
    fn whole(&mut self, choices: Vec<Choice>, usage: Usage) -> Value {
        let tokenizer = self.base.dialect.tokenizer();
        let wanted = self.extras.logprobs.is_some();
        let choices = choices.into_iter().enumerate().map(|(index, choice)| {
            let mut logprobs = TextLogprobs::default();
            if let Some(prompt) = self.echo(index).filter(|_| wanted) {
                logprobs.push_unknown(tokenizer, prompt[0]);
                choice.prompt_logprobs.iter().for_each(|token| logprobs.push(tokenizer, token));
            }
            choice.part.logprobs.iter().for_each(|token| logprobs.push(tokenizer, token));
            let text = self.echoed(index) + &choice.part.piece.content;
            let mut json = json!({
                "index": index, "text": text, "logprobs": if wanted { logprobs.take() } else { Value::Null },
                "finish_reason": choice.ending.name(),
            });
            stop_reason(&mut json, Some(choice.ending), &self.base.stop);
            if self.base.prompt_logprobs && !(self.extras.echo && wanted) {
                json["prompt_logprobs"] = prompt_logprobs(tokenizer, &choice.prompt_logprobs);
            }
            self.base.ids(&mut json, &choice.part.ids);
            if self.base.tokens == Tokens::AsIdsToo {
                json["prompt_token_ids"] = self.prompt_of(index).into();
            }
            json
        });
        self.base.whole(choices.collect(), usage)
    }

    fn begin(&mut self, out: &mut Events) {
        for index in 0..self.choices.len() {
            let Some(prompt) = self.echo(index) else { return };
            let (first, rest) = (prompt[0], prompt.len() - 1);
            if self.extras.logprobs.is_some() {
                self.choices[index].logprobs.push_unknown(self.base.dialect.tokenizer(), first);
                self.choices[index].awaited = rest;
            }
            if self.choices[index].awaited == 0 {
                self.chunk(index, &self.echoed(index), &[], None, out);
            }
        }
    }

    fn prompt(&mut self, choice: usize, scores: &[TokenLogprobs], out: &mut Events) {
        let TextChoice { logprobs, awaited, .. } = &mut self.choices[choice];
        let tokenizer = self.base.dialect.tokenizer();
        scores.iter().for_each(|token| logprobs.push(tokenizer, token));
        *awaited = awaited.saturating_sub(scores.len());
        if *awaited == 0 {
            self.chunk(choice, &self.echoed(choice), &[], None, out);
        }
    }

    fn part(&mut self, choice: usize, part: Part, out: &mut Events) {
        let tokenizer = self.base.dialect.tokenizer();
        let logprobs = &mut self.choices[choice].logprobs;
        part.logprobs.iter().for_each(|token| logprobs.push(tokenizer, token));
        self.chunk(choice, &part.piece.content, &part.ids, None, out);
    }

    fn end(&mut self, choice: usize, ending: Ending, out: &mut Events) {
        self.chunk(choice, "", &[], Some(ending), out);
    }

    fn finish(&mut self, usage: Usage, out: &mut Events) {
        self.base.finish(usage, out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Events) {
        out.data(&error.json());
        out.done();
    }
}
