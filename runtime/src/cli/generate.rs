//! `shardrun generate`.

use super::{CheckpointArgs, EngineArgs, Error, INTERRUPTED, at_least_one, print, start_engine};
use clap::Args;
use runtime::dialect::Dialect;
use runtime::engine::GenerationRequest;
use runtime::generation::{Ending, Generation, Ids, Step};
use runtime::sampler::SamplingParams;
use runtime::template::ChatInput;
use runtime::text::{Opening, Piece, Reading};
use serde_json::{Map, json};
use std::io::{Read, Write};
use std::process::ExitCode;

/// Answers one prompt, on the terminal
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shardrun generate ./glm-5 --prompt 'What is 2+2?'
  shardrun generate ./glm-5 --prompt 'What is 37+48?' --thinking --temperature 0
  shardrun generate ./glm-5 --raw --prompt '[gMASK]<sop>Once upon a time' --max-tokens 40
  shardrun generate ./glm-5 --prompt - --json < question.txt

The answer goes to stdout as it comes, the reasoning to stderr.")]
pub(super) struct Generate {
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// What the user says; - reads it from stdin
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// What the system says
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Let the model reason before it answers
    #[arg(long, conflicts_with = "raw")]
    thinking: bool,
    /// Continue the prompt as it is, without the chat template; control tokens in it are control tokens
    #[arg(long)]
    raw: bool,
    /// Print one JSON object when the answer is complete
    #[arg(long)]
    json: bool,
    /// Most tokens of the answer [default: what the context has room for]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_tokens: Option<usize>,
    /// End the answer before this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = not_empty)]
    stop: Vec<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// How tokens are chosen; the defaults are the checkpoint's.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling (defaults: the checkpoint's)")]
struct SamplingArgs {
    /// 0 takes the likeliest token every time
    #[arg(long, value_name = "0..2", value_parser = |text: &str| within(text, 0.0, 2.0))]
    temperature: Option<f32>,
    /// Share of the probability that the likeliest tokens must have together; 1 is off
    #[arg(long, value_name = "0..1", value_parser = |text: &str| within(text, f32::MIN_POSITIVE, 1.0))]
    top_p: Option<f32>,
    /// How many of the likeliest tokens are in; 0 is off
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Share of the likeliest token's probability that others must have; 0 is off
    #[arg(long, value_name = "0..1", value_parser = |text: &str| within(text, 0.0, 1.0))]
    min_p: Option<f32>,
    /// The same seed gives the same answer
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    fn params(&self, defaults: &SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: match self.top_k {
                Some(top_k) => Some(top_k).filter(|&top_k| top_k > 0),
                None => defaults.top_k,
            },
            min_p: self.min_p.unwrap_or(defaults.min_p),
            seed: self.seed,
            ..defaults.clone()
        }
    }
}

impl Generate {
    pub(super) fn run(self) -> Result<ExitCode, Error> {
        // What is wrong with the folder itself comes before what its files lack.
        formats::checkpoint::Checkpoint::open(&self.checkpoint.dir).map_err(runtime::Error::from)?;
        let dialect = Dialect::open(&self.checkpoint.dir)?;
        let (prompt, opening) = self.prompt_tokens(&dialect)?;
        let engine = start_engine(&self.checkpoint.dir, &self.engine.options(1))?;
        let defaults = dialect.defaults();
        let request = GenerationRequest {
            sampling: self.sampling.params(&defaults.sampling),
            max_tokens: self.max_tokens.unwrap_or(usize::MAX),
            stop_token_ids: defaults.eos_token_ids.clone(),
            ..GenerationRequest::new(prompt, usize::MAX)
        };
        let prompt_tokens = request.prompt.len();
        if let Some(warning) = engine.handle().model().dense_warning(prompt_tokens) {
            tracing::warn!("{warning}");
        }
        let events = engine.handle().submit(request).map_err(|refusal| Error::Usage(refusal.to_string()))?;
        let generation = Generation::new(
            events,
            dialect.answer(&Reading { stop: self.stop.clone(), opening, tools: None }),
            Ids::Dropped,
        );
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Error::io("cannot start threads"))?;
        runtime.block_on(async {
            tokio::select! {
                answered = self.answer(generation, prompt_tokens) => answered,
                _ = tokio::signal::ctrl_c() => Ok(ExitCode::from(INTERRUPTED)),
            }
        })
    }

    fn prompt_tokens(&self, dialect: &Dialect) -> Result<(Vec<u32>, Opening), Error> {
        let mut text = self.prompt.clone();
        if text == "-" {
            text.clear();
            std::io::stdin().read_to_string(&mut text).map_err(Error::io("stdin"))?;
        }
        if self.raw {
            let prompt = dialect.tokenizer().encode_prompt(&text, usize::MAX);
            return Ok((prompt.map_err(|error| Error::Usage(error.to_string()))?, Opening::Plain));
        }
        let system = self.system.iter().map(|system| json!({"role": "system", "content": system}));
        let user = json!({"role": "user", "content": text});
        let input = ChatInput {
            messages: system.chain([user]).collect(),
            tools: Vec::new(),
            add_generation_prompt: true,
            variables: Map::from_iter([("enable_thinking".to_owned(), json!(self.thinking))]),
        };
        let prompt = dialect
            .render(&input, usize::MAX)
            .ok_or_else(|| Error::Usage("this checkpoint has no chat template: use --raw".into()))?
            .map_err(|error| Error::Usage(error.to_string()))?;
        let opening = dialect.opening(&prompt);
        Ok((prompt, opening))
    }

    async fn answer(&self, mut generation: Generation, prompt_tokens: usize) -> Result<ExitCode, Error> {
        let mut whole = Piece::default();
        let ending = loop {
            let step = generation.next().await.map_err(|error| Error::Failed(error.to_string()))?;
            let (piece, ending) = match step {
                Step::Prompt(_) => continue,
                Step::Part(part) => (part.piece, None),
                Step::End(part, ending) => (part.piece, Some(ending)),
            };
            if self.json {
                whole.append(piece);
            } else if !show(&piece, ending)? {
                return Ok(ExitCode::SUCCESS);
            }
            if let Some(ending) = ending {
                break ending;
            }
        };
        if self.json {
            let answer = json!({
                "text": whole.content,
                "reasoning": whole.reasoning,
                "finish_reason": ending.name(),
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generation.counts().completion,
            });
            print(&format!("{answer}\n"))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Shows what came; `false` when nobody reads it any more.
fn show(piece: &Piece, ending: Option<Ending>) -> Result<bool, Error> {
    if !piece.reasoning.is_empty() {
        let mut stderr = std::io::stderr().lock();
        // The answer is on stdout; a closed stderr loses the reasoning only.
        let _ = write!(stderr, "{}", piece.reasoning).and_then(|()| stderr.flush());
    }
    let end = if ending.is_some() { "\n" } else { "" };
    print(&format!("{}{end}", piece.content))
}

fn within(text: &str, least: f32, most: f32) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ if least > 0.0 => Err(format!("expected a number above 0, at most {most}")),
        _ => Err(format!("expected a number from {least} to {most}")),
    }
}

fn not_empty(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("an empty text would stop every answer before it begins".into());
    }
    Ok(text.to_owned())
}
