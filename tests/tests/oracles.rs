//! The road's numbers against values that other people's code computed: kv_b digests, logits, greedy answers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::checkpoint::Checkpoint;
use runtime::device::DeviceOptions;
use runtime::engine::{
    Arithmetic, Engine, EngineOptions, Event, EventStream, FinishReason, GenerationRequest,
};
use runtime::logits::{LogitsOptions, LogitsRunner};
use runtime::sampler::SamplingParams;
use runtime::verify::Verify;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;
use tempfile::TempDir;
use tests::{
    Chat, Fixture, OracleLogits, fixtures, gpu, kl_divergence, max_abs_difference, read_json, shared,
};

const RANKS: [usize; 7] = [1, 2, 3, 4, 5, 7, 8];
/// What README promises of the reference path; the oracles allow 1e-3.
const REFERENCE: f32 = 1e-4;

fn runner(dir: &Path, arithmetic: Arithmetic) -> LogitsRunner {
    // A chunk that long prompts do not divide by, so that chunks are part of what is tested.
    on(DeviceOptions::default(), dir, arithmetic)
}

fn on(device: DeviceOptions, dir: &Path, arithmetic: Arithmetic) -> LogitsRunner {
    LogitsRunner::open(dir, &LogitsOptions { arithmetic, threads: None, chunk: 100, device }).unwrap()
}

/// The logits of `oracle`'s positions.
fn rows(runner: &mut LogitsRunner, oracle: &OracleLogits) -> Vec<Vec<f32>> {
    let logits = runner.run(&oracle.tokens, None).unwrap();
    oracle
        .positions
        .iter()
        .map(|p| logits.values[p * logits.vocab_size..][..logits.vocab_size].to_vec())
        .collect()
}

fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().zip(b).map(|(a, b)| max_abs_difference(a, b)).fold(0.0, f32::max)
}

/// The engine's greedy answer to every prompt, all at the same time, held against the oracle's token for token.
fn expect_greedy_answers(dir: &Path, arithmetic: Arithmetic, chats: &[Chat]) {
    let options = EngineOptions { arithmetic, ..EngineOptions::default() };
    expect_greedy_answers_with(dir, &options, chats);
}

fn expect_greedy_answers_with(dir: &Path, options: &EngineOptions, chats: &[Chat]) {
    let engine = Engine::start(dir, options).unwrap();
    let submit = |chat: &Chat| {
        let sampling = SamplingParams::greedy();
        let stop_token_ids = vec![chat.stop];
        let request = GenerationRequest {
            sampling,
            stop_token_ids,
            ..GenerationRequest::new(chat.tokens.clone(), 100)
        };
        engine.handle().submit(request).unwrap()
    };
    let streams: Vec<EventStream> = chats.iter().map(submit).collect();
    for (i, (chat, mut stream)) in chats.iter().zip(streams).enumerate() {
        let mut tokens = Vec::new();
        let end = loop {
            match stream.blocking_recv().unwrap() {
                Event::Token { id, .. } => tokens.push(id),
                Event::Prompt { .. } | Event::PromptLogprobs(_) => (),
                end => break end,
            }
        };
        assert_eq!(
            tokens,
            chat.greedy,
            "{} chat {i}, {:?} {:?}",
            dir.display(),
            options.arithmetic,
            options.device
        );
        assert_eq!(end, Event::Finished(FinishReason::Stop(chat.stop)));
    }
}

#[derive(Deserialize)]
struct KvB {
    shape: [usize; 2],
    sha256: String,
    shards: Vec<KvBShard>,
}

#[derive(Deserialize)]
struct KvBShard {
    rows: [usize; 2],
    sha256: String,
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn kv_b_has_the_oracles_digests_whole_and_in_eight_shards() {
    for fixture in fixtures() {
        let temp = TempDir::new().unwrap();
        let dir = fixture.convert(temp.path(), 8);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let shards: Vec<_> = (0..8).map(|rank| checkpoint.rank(rank).unwrap()).collect();
        let oracle: BTreeMap<usize, KvB> = read_json(&fixture.oracles.join("kv_b.json"));
        assert!(!oracle.is_empty());
        for (layer, expected) in &oracle {
            let name = format!("model.layers.{layer}.self_attn.kv_b_proj.weight");
            let mut whole = Vec::new();
            for (rank, (shard, part)) in shards.iter().zip(&expected.shards).enumerate() {
                let view = shard.view(shard.entry(&name).unwrap()).unwrap();
                assert_eq!(view.shape().dims(), part.rows.map(|n| n as u64), "{name} rank {rank}");
                assert_eq!(sha256(view.bytes()), part.sha256, "{name} rank {rank}");
                whole.extend_from_slice(view.bytes());
            }
            assert_eq!(whole.len(), expected.shape[0] * expected.shape[1] * 2);
            assert_eq!(sha256(&whole), expected.sha256, "{name}");
        }
    }
}

#[test]
fn reference_logits_equal_the_oracles_at_every_position_on_any_number_of_ranks() {
    for fixture in fixtures() {
        let oracles: Vec<OracleLogits> = (0..fixture.chats().len()).map(|i| fixture.chat_logits(i)).collect();
        let mut first: Option<Vec<Vec<Vec<f32>>>> = None;
        for ranks in RANKS {
            let temp = TempDir::new().unwrap();
            let mut runner = runner(&fixture.convert(temp.path(), ranks), Arithmetic::Reference);
            let found: Vec<_> = oracles.iter().map(|oracle| rows(&mut runner, oracle)).collect();
            for (i, (found, oracle)) in found.iter().zip(&oracles).enumerate() {
                let difference = largest_difference(found, &oracle.rows);
                eprintln!(
                    "{} chat {i}, {ranks} ranks, reference: max difference {difference:.2e}",
                    fixture.name
                );
                assert!(difference <= REFERENCE, "{} chat {i} at {ranks} ranks: {difference}", fixture.name);
            }
            let first = first.get_or_insert_with(|| found.clone());
            for (a, b) in first.iter().zip(&found) {
                let difference = largest_difference(a, b);
                assert!(difference <= 1e-3, "{} at {ranks} ranks against 1: {difference}", fixture.name);
            }
        }
    }
}

#[test]
fn fast_logits_are_close_and_greedy_answers_equal_on_any_number_of_ranks() {
    for fixture in fixtures() {
        let chats = fixture.chats();
        let oracles: Vec<OracleLogits> = (0..chats.len()).map(|i| fixture.chat_logits(i)).collect();
        let mut first: Option<Vec<Vec<Vec<f32>>>> = None;
        for ranks in RANKS {
            let temp = TempDir::new().unwrap();
            let dir = fixture.convert(temp.path(), ranks);
            let mut runner = runner(&dir, Arithmetic::Fast);
            let found: Vec<_> = oracles.iter().map(|oracle| rows(&mut runner, oracle)).collect();
            let divergences: Vec<f64> = found
                .iter()
                .zip(&oracles)
                .flat_map(|(found, oracle)| oracle.rows.iter().zip(found).map(|(p, q)| kl_divergence(p, q)))
                .collect();
            let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
            eprintln!("{} at {ranks} ranks, fast: mean KL {mean:.2e}", fixture.name);
            assert!(mean <= 1e-3, "{} at {ranks} ranks: mean KL {mean}", fixture.name);
            // Sums over ranks differ in their last bits, and activations beside a tie round the other way.
            let first = first.get_or_insert_with(|| found.clone());
            let pairs = first.iter().zip(&found).flat_map(|(a, b)| a.iter().zip(b));
            let between: Vec<f64> = pairs.map(|(p, q)| kl_divergence(p, q)).collect();
            let mean = between.iter().sum::<f64>() / between.len() as f64;
            assert!(mean <= 1e-3, "{} at {ranks} ranks against 1: mean KL {mean}", fixture.name);
            drop(runner);
            expect_greedy_answers(&dir, Arithmetic::Fast, &chats);
        }
    }
}

#[test]
fn reference_greedy_answers_equal() {
    for fixture in fixtures() {
        let temp = TempDir::new().unwrap();
        expect_greedy_answers(&fixture.convert(temp.path(), 3), Arithmetic::Reference, &fixture.chats());
    }
}

#[test]
fn a_long_prompt_gives_the_dense_oracle_on_both_paths() {
    let Some(shared) = shared("the 899-token prompt") else { return };
    let oracle = OracleLogits::read(&shared.join("oracles/tiny-glm5/long.dense.safetensors"));
    let fixture = Fixture {
        name: "tiny-glm5-Q4_K_M",
        gguf: shared.join("models/tiny-glm5-Q4_K_M.gguf"),
        oracles: shared.join("oracles/tiny-glm5"),
    };
    let temp = TempDir::new().unwrap();
    let dir = fixture.convert(temp.path(), 2);
    let reference = rows(&mut runner(&dir, Arithmetic::Reference), &oracle);
    let difference = largest_difference(&reference, &oracle.rows);
    assert!(difference <= 1e-3, "reference: {difference}");
    let fast = rows(&mut runner(&dir, Arithmetic::Fast), &oracle);
    let mean =
        oracle.rows.iter().zip(&fast).map(|(p, q)| kl_divergence(p, q)).sum::<f64>() / fast.len() as f64;
    assert!(mean <= 1e-3, "fast: mean KL {mean}");
}

/// On a GPU, all ranks on the first one: distributions close to the oracles', greedy answers equal, and the same numbers as on
/// the processor up to the cache's BF16.
#[test]
fn a_gpu_gives_the_oracles_answers_on_any_number_of_ranks() {
    let Some(device) = gpu("logits and greedy answers of the bundled models") else { return };
    for fixture in fixtures() {
        let chats = fixture.chats();
        let oracles: Vec<OracleLogits> = (0..chats.len()).map(|i| fixture.chat_logits(i)).collect();
        for (ranks, layout) in
            [1, 3, 8].into_iter().flat_map(|ranks| ["ggml", "mma16"].map(|layout| (ranks, layout)))
        {
            let temp = TempDir::new().unwrap();
            let dir = fixture.convert_as(layout, temp.path(), ranks);
            let mut runner = on(device.clone(), &dir, Arithmetic::Fast);
            let found: Vec<_> = oracles.iter().map(|oracle| rows(&mut runner, oracle)).collect();
            drop(runner);
            let divergences: Vec<f64> = found
                .iter()
                .zip(&oracles)
                .flat_map(|(found, oracle)| oracle.rows.iter().zip(found).map(|(p, q)| kl_divergence(p, q)))
                .collect();
            let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
            let difference = found
                .iter()
                .zip(&oracles)
                .map(|(found, oracle)| largest_difference(found, &oracle.rows))
                .fold(0.0, f32::max);
            eprintln!(
                "{} at {ranks} ranks, {layout}, cuda: mean KL {mean:.2e}, max difference {difference:.2e}",
                fixture.name
            );
            assert!(mean <= 2e-3, "{} at {ranks} ranks, {layout}: mean KL {mean}", fixture.name);
            let options =
                EngineOptions { device: device.clone(), verify: Verify::Always, ..EngineOptions::default() };
            expect_greedy_answers_with(&dir, &options, &chats);
        }
    }
}
