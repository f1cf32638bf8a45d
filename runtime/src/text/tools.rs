//! Tool calls in an answer's text: found, named, and their arguments turned into JSON, whatever the tokens are.
//!
//! The model's own text is never lost: what only looks like a call stays content.

mod arguments;
mod scan;

pub use arguments::is_bare_text;

use arguments::Kind;
use scan::Scan;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

/// A name longer than this, in bytes, is none.
pub const LONGEST_NAME: usize = 128;

/// How a model writes its calls, told by what its chat template teaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`; strings are bare, other values JSON.
    ArgTags,
    /// A section of calls, each a name and its arguments as JSON text between markers.
    Sections(SectionMarkers),
    /// `<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter></｜DSML｜invoke>`.
    Dsml,
}

/// Markers of [`ToolFormat::Sections`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectionMarkers {
    pub(crate) begin: &'static str,
    pub(crate) call: &'static str,
    pub(crate) arguments: &'static str,
    pub(crate) call_end: &'static str,
    pub(crate) end: &'static str,
}

const PIPES: SectionMarkers = SectionMarkers {
    begin: "<｜tool▁calls▁begin｜>",
    call: "<｜tool▁call▁begin｜>",
    arguments: "<｜tool▁sep｜>",
    call_end: "<｜tool▁call▁end｜>",
    end: "<｜tool▁calls▁end｜>",
};
const BARS: SectionMarkers = SectionMarkers {
    begin: "<|tool_calls_section_begin|>",
    call: "<|tool_call_begin|>",
    arguments: "<|tool_call_argument_begin|>",
    call_end: "<|tool_call_end|>",
    end: "<|tool_calls_section_end|>",
};
/// What a call in a fence has in place of its name, which comes first in the arguments then.
const FENCED: &str = "function";
const FENCE: &str = "```json\n";
const FENCE_END: &str = "\n```";

const TAG_CALL: &str = "<tool_call>";
const TAG_CALL_END: &str = "</tool_call>";
const TAG_KEY: &str = "<arg_key>";
const TAG_KEY_END: &str = "</arg_key>";
const TAG_VALUE: &str = "<arg_value>";
const TAG_VALUE_END: &str = "</arg_value>";

const DSML_BEGIN: &str = "<｜DSML｜function_calls>";
const DSML_END: &str = "</｜DSML｜function_calls>";
const DSML_CALL: &str = "<｜DSML｜invoke name=\"";
const DSML_CALL_END: &str = "</｜DSML｜invoke>";
const DSML_KEY: &str = "<｜DSML｜parameter name=\"";
const DSML_VALUE_END: &str = "</｜DSML｜parameter>";

impl ToolFormat {
    /// The format that a chat template shows the model; `None` where it knows of no calls.
    pub fn of_template(template: &str) -> Option<Self> {
        if template.contains("｜DSML｜") {
            Some(Self::Dsml)
        } else if template.contains(PIPES.begin) {
            Some(Self::Sections(PIPES))
        } else if template.contains(BARS.call) {
            Some(Self::Sections(BARS))
        } else if template.contains(TAG_CALL) && template.contains(TAG_KEY) {
            Some(Self::ArgTags)
        } else {
            None
        }
    }

    /// Every marker that a vocabulary may have as a token of its own.
    pub fn markers(&self) -> Vec<&'static str> {
        match self {
            Self::ArgTags => {
                vec![TAG_CALL, TAG_CALL_END, TAG_KEY, TAG_KEY_END, TAG_VALUE, TAG_VALUE_END]
            }
            Self::Sections(m) => vec![m.begin, m.call, m.arguments, m.call_end, m.end],
            Self::Dsml => vec!["｜DSML｜"],
        }
    }

    /// What the first call begins with.
    pub fn opening(&self) -> &'static str {
        match self {
            Self::ArgTags => TAG_CALL,
            Self::Sections(markers) => markers.begin,
            Self::Dsml => DSML_BEGIN,
        }
    }
}

/// The tools of a request, as far as their calls depend on them.
#[derive(Clone, Debug)]
pub struct Tools {
    format: ToolFormat,
    kinds: HashMap<String, HashMap<String, Kind>>,
    calls: Calls,
}

/// How many calls an answer may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// As many as the model makes.
    Any,
    /// The answer ends behind the first.
    One,
}

impl Tools {
    /// Tools in OpenAI's form: functions with a name and a JSON schema of their parameters.
    pub fn new(format: ToolFormat, tools: &[Value], calls: Calls) -> Self {
        let kinds = tools.iter().filter_map(|tool| {
            let function = &tool["function"];
            let properties = function["parameters"]["properties"].as_object();
            let kinds = properties
                .into_iter()
                .flatten()
                .map(|(name, schema)| (name.clone(), Kind::of_schema(schema)))
                .collect();
            Some((function["name"].as_str()?.to_owned(), kinds))
        });
        Self { format, kinds: kinds.collect(), calls }
    }

    /// How calls are written.
    pub fn format(&self) -> &ToolFormat {
        &self.format
    }

    fn kind(&self, tool: &str, key: &str) -> Kind {
        self.kinds.get(tool).and_then(|keys| keys.get(key)).copied().unwrap_or(Kind::ANY)
    }
}

/// A part of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallDelta {
    /// A call begins.
    Begin {
        /// From 0 on within the answer.
        index: usize,
        /// The model's own name for the call, where its format has one.
        id: Option<String>,
        /// The tool.
        name: String,
    },
    /// More of a call's arguments; put together they are a JSON object.
    Arguments {
        /// Of which call.
        index: usize,
        /// A piece of JSON text.
        json: String,
    },
}

/// Tells content from calls in a stream of text.
#[derive(Clone, Debug)]
pub struct ToolCalls {
    tools: Arc<Tools>,
    scan: Scan,
    state: State,
    /// The tool of the call at hand.
    tool: String,
    /// Its arguments so far, the one at hand included.
    keys: Vec<String>,
    /// Calls that have begun.
    begun: usize,
    /// Calls that are complete.
    complete: usize,
    /// Whether the content since the last call has more than white space.
    has_text: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Outside of calls.
    Text,
    /// Between the calls of a section.
    Section,
    /// Before the end of a call's name.
    Name,
    /// Before a key, or the end of the call.
    Key,
    /// Inside a key.
    KeyName,
    /// Before a value.
    BeforeValue,
    /// Inside a value.
    Value { kind: Kind, shown: Shown },
    /// Before a fenced call's name is complete.
    FencedName,
    /// Inside arguments that are JSON text already.
    Json { ends: &'static [&'static str] },
    /// Behind a fence, before the call's end.
    AfterFence,
}

/// How much of a value is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// Nothing yet.
    Nothing,
    /// Its first quote and more.
    Part,
    /// Nothing, and nothing will be: JSON has each key once, and the first one counts.
    Never,
}

/// What is found in a stretch of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// What is no call.
    pub content: String,
    /// What is.
    pub calls: Vec<CallDelta>,
}

impl ToolCalls {
    /// An answer that may call these tools.
    pub fn new(tools: Arc<Tools>) -> Self {
        let scan = Scan::default();
        Self {
            tools,
            scan,
            state: State::Text,
            tool: String::new(),
            keys: Vec::new(),
            begun: 0,
            complete: 0,
            has_text: false,
        }
    }

    /// Takes the next text and gives what is sure.
    pub fn push(&mut self, text: &str) -> Found {
        let mut found = Found::default();
        self.scan.push(text);
        while !self.is_done() && self.step(&mut found) {}
        found
    }

    /// Whether the answer has all the calls that it may have.
    pub fn is_done(&self) -> bool {
        self.tools.calls == Calls::One && self.complete > 0
    }

    /// Whether a call has begun.
    pub fn any(&self) -> bool {
        self.begun > 0
    }

    /// What was held back; nothing follows. A call that was cut off is closed as far as it is sure.
    pub fn finish(&mut self) -> Found {
        let mut found = Found::default();
        if self.is_done() {
            return found;
        }
        let rest = self.scan.rest();
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.text(&rest, &mut found),
            // It never had a name.
            State::Name => {
                let marker = match self.tools.format {
                    ToolFormat::ArgTags => TAG_CALL,
                    ToolFormat::Sections(markers) => markers.call,
                    ToolFormat::Dsml => DSML_CALL,
                };
                self.text(&format!("{marker}{rest}"), &mut found);
            }
            State::Section | State::FencedName | State::AfterFence => {}
            State::Json { .. } => self.arguments(&rest, &mut found),
            State::Key | State::KeyName => self.close(&mut found),
            State::BeforeValue => {
                self.keys.pop();
                self.close(&mut found);
            }
            State::Value { kind, shown } => {
                self.end_value(&rest, kind, shown, &mut found);
                self.close(&mut found);
            }
        }
        found
    }

    /// Goes on by one marker; false when more text is needed.
    fn step(&mut self, found: &mut Found) -> bool {
        match self.state {
            State::Text => self.step_text(found),
            State::Section => self.step_section(),
            State::Name => self.step_name(found),
            State::Key => self.step_key(found),
            State::KeyName => self.step_key_name(),
            State::BeforeValue => self.step_before_value(),
            State::Value { kind, shown } => self.step_value(kind, shown, found),
            State::FencedName => self.step_fenced_name(found),
            State::Json { ends } => self.step_json(ends, found),
            State::AfterFence => {
                let ToolFormat::Sections(markers) = self.tools.format else { return false };
                self.scan.find(&[markers.call_end]).is_some_and(|_| {
                    self.call_done(State::Section);
                    true
                })
            }
        }
    }

    fn step_text(&mut self, found: &mut Found) -> bool {
        let opening = self.tools.format.opening();
        if let Some((before, _)) = self.scan.find(&[opening]) {
            if self.has_text || !before.trim().is_empty() {
                self.text(&before, found);
            }
            self.has_text = false;
            self.state = match self.tools.format {
                ToolFormat::ArgTags => State::Name,
                ToolFormat::Sections(_) | ToolFormat::Dsml => State::Section,
            };
            return true;
        }
        let safe = self.scan.safe(&[opening]);
        if self.has_text || !safe.trim().is_empty() {
            self.text(&safe, found);
        } else {
            // White space may turn out to lie between two calls.
            self.scan.put_back(&safe);
        }
        false
    }

    fn step_section(&mut self) -> bool {
        let (call, end) = match self.tools.format {
            ToolFormat::Sections(markers) => (markers.call, markers.end),
            ToolFormat::Dsml => (DSML_CALL, DSML_END),
            ToolFormat::ArgTags => return false,
        };
        let Some((_, which)) = self.scan.find(&[call, end]) else { return false };
        self.state = if which == 0 { State::Name } else { State::Text };
        true
    }

    fn step_name(&mut self, found: &mut Found) -> bool {
        match self.tools.format {
            ToolFormat::ArgTags => {
                let Some((name, which)) = self.scan.find(&[TAG_KEY, TAG_CALL_END]) else {
                    return self.give_name_up(TAG_CALL, found);
                };
                let name = name.trim();
                if !is_tool_name(name) {
                    let marker = [TAG_KEY, TAG_CALL_END][which];
                    self.text(&format!("{TAG_CALL}{name}{marker}"), found);
                    self.state = State::Text;
                    return true;
                }
                self.begin(None, name, found);
                if which == 0 {
                    self.state = State::KeyName;
                } else {
                    self.close(found);
                    self.call_done(State::Text);
                }
                true
            }
            ToolFormat::Sections(markers) => {
                let Some((header, _)) = self.scan.find(&[markers.arguments]) else { return false };
                let header = header.trim();
                if header == FENCED {
                    self.state = State::FencedName;
                    return true;
                }
                // `functions.name:0`, where the whole is the call's id.
                let (name, id) =
                    match header.strip_prefix("functions.").and_then(|rest| rest.rsplit_once(':')) {
                        Some((name, _)) => (name, Some(header.to_owned())),
                        None => (header, None),
                    };
                self.begin(id, name, found);
                self.state = State::Json { ends: section_ends(&markers) };
                true
            }
            ToolFormat::Dsml => {
                let Some((name, _)) = self.scan.find(&["\">"]) else { return false };
                self.begin(None, &name, found);
                self.state = State::Key;
                true
            }
        }
    }

    /// A name that goes on for too long is text.
    fn give_name_up(&mut self, marker: &str, found: &mut Found) -> bool {
        if self.scan.len() <= LONGEST_NAME {
            return false;
        }
        let rest = self.scan.rest();
        self.state = State::Text;
        self.text(marker, found);
        self.scan.push(&rest);
        true
    }

    fn step_key(&mut self, found: &mut Found) -> bool {
        let (key, end, next) = match self.tools.format {
            ToolFormat::ArgTags => (TAG_KEY, TAG_CALL_END, State::Text),
            _ => (DSML_KEY, DSML_CALL_END, State::Section),
        };
        let Some((_, which)) = self.scan.find(&[key, end]) else { return false };
        if which == 0 {
            self.state = State::KeyName;
        } else {
            self.close(found);
            self.call_done(next);
        }
        true
    }

    fn step_key_name(&mut self) -> bool {
        if self.tools.format != ToolFormat::Dsml {
            let Some((key, _)) = self.scan.find(&[TAG_KEY_END]) else { return false };
            self.keys.push(key.trim().to_owned());
            self.state = State::BeforeValue;
            return true;
        }
        // name" string="true">
        let Some((header, _)) = self.scan.find(&[">"]) else { return false };
        let (key, attributes) = header.split_once('"').unwrap_or((&header, ""));
        self.keys.push(key.to_owned());
        self.begin_value(if attributes.contains("string=\"true\"") { Kind::Text } else { Kind::ANY });
        true
    }

    fn step_before_value(&mut self) -> bool {
        let Some(_) = self.scan.find(&[TAG_VALUE]) else { return false };
        let key = self.keys.last().expect("a value has a key");
        self.begin_value(self.tools.kind(&self.tool, key));
        true
    }

    fn begin_value(&mut self, kind: Kind) {
        let (key, before) = self.keys.split_last().expect("a value has a key");
        let shown = if before.contains(key) { Shown::Never } else { Shown::Nothing };
        self.state = State::Value { kind, shown };
    }

    fn step_value(&mut self, kind: Kind, shown: Shown, found: &mut Found) -> bool {
        let end = if self.tools.format == ToolFormat::Dsml { DSML_VALUE_END } else { TAG_VALUE_END };
        if let Some((value, _)) = self.scan.find(&[end]) {
            self.end_value(&value, kind, shown, found);
            self.state = State::Key;
            return true;
        }
        if kind == Kind::Text && shown != Shown::Never {
            let safe = self.scan.safe(&[end]);
            if !safe.is_empty() {
                let quote = if shown == Shown::Part { String::new() } else { self.opening_of_value() + "\"" };
                self.arguments(&(quote + &arguments::escape(&safe)), found);
                self.state = State::Value { kind, shown: Shown::Part };
            }
        }
        false
    }

    fn end_value(&mut self, value: &str, kind: Kind, shown: Shown, found: &mut Found) {
        let json = match shown {
            Shown::Never => return,
            Shown::Nothing => self.opening_of_value() + &kind.json(value),
            Shown::Part => arguments::escape(value) + "\"",
        };
        self.arguments(&json, found);
    }

    /// What comes before the value of the last key.
    fn opening_of_value(&self) -> String {
        let (key, before) = self.keys.split_last().expect("a value has a key");
        format!("{}\"{}\": ", if before.is_empty() { "{" } else { ", " }, arguments::escape(key))
    }

    fn step_fenced_name(&mut self, found: &mut Found) -> bool {
        let Some((name, _)) = self.scan.find(&[FENCE]) else { return false };
        self.begin(None, name.trim(), found);
        self.state = State::Json { ends: &[FENCE_END] };
        true
    }

    fn step_json(&mut self, ends: &'static [&'static str], found: &mut Found) -> bool {
        if let Some((json, _)) = self.scan.find(ends) {
            self.arguments(&json, found);
            if ends == [FENCE_END] {
                self.state = State::AfterFence;
            } else {
                self.call_done(State::Section);
            }
            return true;
        }
        let safe = self.scan.safe(ends);
        self.arguments(&safe, found);
        false
    }

    fn call_done(&mut self, next: State) {
        self.complete += 1;
        self.state = next;
    }

    fn text(&mut self, text: &str, found: &mut Found) {
        if !self.any() || self.has_text || !text.trim().is_empty() {
            self.has_text |= !text.trim().is_empty();
            found.content.push_str(text);
        }
    }

    fn begin(&mut self, id: Option<String>, name: &str, found: &mut Found) {
        found.calls.push(CallDelta::Begin { index: self.begun, id, name: name.to_owned() });
        self.begun += 1;
        name.clone_into(&mut self.tool);
        self.keys.clear();
    }

    fn arguments(&mut self, json: &str, found: &mut Found) {
        if !json.is_empty() {
            found.calls.push(CallDelta::Arguments { index: self.begun - 1, json: json.to_owned() });
        }
    }

    /// The end of the object.
    fn close(&mut self, found: &mut Found) {
        let end = if self.keys.is_empty() { "{}" } else { "}" };
        self.arguments(end, found);
    }
}

fn section_ends(markers: &SectionMarkers) -> &'static [&'static str] {
    if *markers == PIPES { &[PIPES.call_end] } else { &[BARS.call_end] }
}

/// Whether calls of a tool of this name can be told from text.
pub fn is_tool_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= LONGEST_NAME && name.trim() == name && !name.contains(['<', '"', '\n'])
}

#[cfg(test)]
mod tests;
