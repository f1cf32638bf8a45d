//! The files beside the weights: tokenizer, chat template, generation config.

use crate::Error;
use crate::tokenizer::Tokenizer;
use formats::gguf::GgufSet;
use formats::template;
use minijinja::Environment;
use serde::Serialize;

/// A file beside the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideFileBytes {
    /// Its name.
    pub name: &'static str,
    /// What it holds.
    pub bytes: Vec<u8>,
}

/// `generation_config.json`, in HF's words.
#[derive(Serialize)]
struct GenerationConfig {
    eos_token_id: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bos_token_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pad_token_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    do_sample: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<u64>,
}

/// All files that the metadata gives.
///
/// # Errors
/// An error naming the file and the key.
pub fn side_files(set: &GgufSet) -> Result<Vec<SideFileBytes>, Error> {
    let tokenizer = Tokenizer::read(set)?;
    let mut files = vec![
        SideFileBytes { name: "tokenizer.json", bytes: tokenizer.tokenizer_json() },
        SideFileBytes { name: "tokenizer_config.json", bytes: tokenizer.config_json() },
        SideFileBytes { name: "generation_config.json", bytes: json(&generation_config(set, &tokenizer)?) },
    ];
    if let Some(template) = chat_template(set)? {
        files.push(SideFileBytes { name: "chat_template.jinja", bytes: template.as_bytes().to_vec() });
    }
    Ok(files)
}

/// The chat template, which must be one: whoever serves the checkpoint could not say what is wrong with the model.
fn chat_template(set: &GgufSet) -> Result<Option<&str>, Error> {
    const KEY: &str = "tokenizer.chat_template";
    const ADVICE: &str = "give the file another one (gguf-new-metadata --chat-template-file)";
    let Some(text) = set.metadata().str(KEY).map_err(|e| e.in_file(set.path()))? else { return Ok(None) };
    let refuse =
        |found: String| Error::key(set.path(), KEY, "a Jinja template", format!("{found}; {ADVICE}"));
    if text.trim().is_empty() {
        return Err(refuse("an empty one".to_owned()));
    }
    template::check_size(text).map_err(|why| refuse(format!("one {why}")))?;
    match on_a_deep_stack(text.len(), || Environment::empty().template_from_str(text).map(|_| ())) {
        Ok(Ok(())) => Ok(Some(text)),
        Ok(Err(e)) => Err(refuse(format!(
            "one that does not parse (line {}: {})",
            e.line().unwrap_or(0),
            e.detail().unwrap_or("it is no template")
        ))),
        Err(why) => Err(refuse(why)),
    }
}

/// The parser walks expressions by recursion, as deep as the template is long: on the main thread's stack, one of 20 kB is
/// the end of the program. This one is as large as a template of `len` bytes can need: under half a kilobyte for each was seen. What
/// is not touched of it costs nothing, but a program may be allowed little address space.
fn on_a_deep_stack<T: Send>(len: usize, parse: impl FnOnce() -> T + Send) -> Result<T, String> {
    const LEAST: usize = 2 << 20;
    const FOR_EACH_BYTE: usize = 8 << 10;
    let stack = LEAST + len * FOR_EACH_BYTE;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(stack);
        let parsing =
            thread.spawn_scoped(scope, parse).map_err(|e| format!("no thread to parse it on ({e})"))?;
        parsing.join().map_err(|_| "one that the parser fails on".to_owned())
    })
}

fn generation_config(set: &GgufSet, tokenizer: &Tokenizer) -> Result<GenerationConfig, Error> {
    let number = |key: &str| match set.metadata().f32(key).map_err(|e| e.in_file(set.path()))? {
        Some(x) if !x.is_finite() => Err(Error::key(set.path(), key, "a finite number", x.to_string())),
        number => Ok(number),
    };
    let temperature = number("general.sampling.temp")?;
    Ok(GenerationConfig {
        eos_token_id: tokenizer.ends_of_generation(),
        bos_token_id: tokenizer.bos(),
        pad_token_id: tokenizer.pad(),
        do_sample: temperature.map(|temperature| temperature > 0.0),
        temperature,
        top_p: number("general.sampling.top_p")?,
        top_k: set.metadata().u64("general.sampling.top_k").map_err(|e| e.in_file(set.path()))?,
    })
}

/// Indented JSON with a line break at the end.
pub(crate) fn json<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("names and numbers always become JSON");
    bytes.push(b'\n');
    bytes
}
