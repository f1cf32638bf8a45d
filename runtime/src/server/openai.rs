//! Answers of `/v1/chat/completions` and `/v1/completions`.

use super::answer::{Choice, Events, Protocol, Usage};
use super::api::{
    Head, TextLogprobs, call_id, calls, chat_logprobs, prompt_logprobs, stop_reason, usage_json,
};
use super::completions::Extras;
use super::error::ApiError;
use super::request::{Delivery, Job};
use crate::dialect::Dialect;
use crate::generation::{Ending, Part};
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
}

impl Base {
    fn new(head: Head, dialect: Arc<Dialect>, job: &Job) -> Self {
        Self {
            head,
            dialect,
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

    fn whole(&self, choices: Vec<Value>, usage: Usage) -> Value {
        let mut answer = self.answer(choices);
        answer.insert("usage".into(), usage_json(usage));
        answer.into()
    }

    fn chunk(&self, choice: Value, out: &mut Events) {
        let mut chunk = self.answer(vec![choice]);
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
        Self { base: Base::new(head, dialect, job), choices: job.n }
    }

    fn delta(&self, index: usize, delta: &Value, logprobs: &Value, finish: Option<Ending>, out: &mut Events) {
        let mut choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish.map(Ending::name)});
        stop_reason(&mut choice, finish, &self.base.stop);
        self.base.chunk(choice, out);
    }
}

impl Protocol for Chat {
    fn whole(&mut self, choices: Vec<Choice>, usage: Usage) -> Value {
        let base = &self.base;
        let tokenizer = base.dialect.tokenizer();
        let prompt = (base.prompt_logprobs && !choices.is_empty())
            .then(|| prompt_logprobs(tokenizer, &choices[0].prompt_logprobs));
        let choices = choices.into_iter().enumerate().map(|(index, choice)| {
            let Part { piece, logprobs } = choice.part;
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
            json
        });
        let mut answer = base.whole(choices.collect(), usage);
        if let Some(prompt) = prompt {
            answer["prompt_logprobs"] = prompt;
        }
        answer
    }

    fn begin(&mut self, out: &mut Events) {
        for index in 0..self.choices {
            self.delta(index, &json!({"role": "assistant", "content": ""}), &Value::Null, None, out);
        }
    }

    fn part(&mut self, choice: usize, part: Part, out: &mut Events) {
        let Part { piece, logprobs } = part;
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
        for delta in deltas {
            self.delta(choice, &delta, &logprobs.take(), None, out);
        }
    }

    fn end(&mut self, choice: usize, ending: Ending, out: &mut Events) {
        self.delta(choice, &json!({}), &Value::Null, Some(ending), out);
    }

    fn finish(&mut self, usage: Usage, out: &mut Events) {
        self.base.finish(usage, out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Events) {
        out.data(&error.json());
        out.done();
    }
}

/// `/v1/completions`.
pub(super) struct Text {
    base: Base,
    extras: Extras,
    prompts: Vec<Vec<u32>>,
    n: usize,
    logprobs: Vec<TextLogprobs>,
}

impl Text {
    pub(super) fn new(head: Head, dialect: Arc<Dialect>, job: &Job, extras: Extras) -> Self {
        let logprobs = vec![TextLogprobs::default(); job.n * job.prompts.len()];
        let prompts = if extras.echo { job.prompts.clone() } else { Vec::new() };
        Self { base: Base::new(head, dialect, job), extras, prompts, n: job.n, logprobs }
    }

    /// The prompt before choice `index`; control tokens are in it as the client sent them.
    fn echoed(&self, index: usize) -> String {
        self.prompts
            .get(index / self.n)
            .map_or_else(String::new, |ids| self.base.dialect.tokenizer().decode(ids))
    }

    fn chunk(&self, index: usize, text: &str, logprobs: &Value, finish: Option<Ending>, out: &mut Events) {
        let mut choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.map(Ending::name)});
        stop_reason(&mut choice, finish, &self.base.stop);
        self.base.chunk(choice, out);
    }
}

impl Protocol for Text {
    fn whole(&mut self, choices: Vec<Choice>, usage: Usage) -> Value {
        let tokenizer = self.base.dialect.tokenizer();
        let wanted = self.extras.logprobs.is_some();
        let choices = choices.into_iter().enumerate().map(|(index, choice)| {
            let mut logprobs = TextLogprobs::default();
            if let Some(prompt) = self.prompts.get(index / self.n).filter(|_| wanted) {
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
            json
        });
        self.base.whole(choices.collect(), usage)
    }

    fn begin(&mut self, out: &mut Events) {
        if self.extras.echo {
            for index in 0..self.logprobs.len() {
                self.chunk(index, &self.echoed(index), &Value::Null, None, out);
            }
        }
    }

    fn part(&mut self, choice: usize, part: Part, out: &mut Events) {
        let tokenizer = self.base.dialect.tokenizer();
        let logprobs = &mut self.logprobs[choice];
        part.logprobs.iter().for_each(|token| logprobs.push(tokenizer, token));
        let logprobs = if part.logprobs.is_empty() { Value::Null } else { logprobs.take() };
        self.chunk(choice, &part.piece.content, &logprobs, None, out);
    }

    fn end(&mut self, choice: usize, ending: Ending, out: &mut Events) {
        self.chunk(choice, "", &Value::Null, Some(ending), out);
    }

    fn finish(&mut self, usage: Usage, out: &mut Events) {
        self.base.finish(usage, out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Events) {
        out.data(&error.json());
        out.done();
    }
}
