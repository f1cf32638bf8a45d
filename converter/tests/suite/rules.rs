//! The rules of the architecture table and of the plan, each on a small model that breaks or bends one of them.

use crate::files::{control, convert, options};
use crate::made::{EXPERTS, F32, FE, Gguf, HEADS, HIDDEN, INDEX_DIM, KV_LORA, NOPE, Q8_0, V, Value};
use converter::Unfinished;
use converter::arch;
use converter::plan::{Options, Plan, UnknownTensors};
use converter::side_files::side_files;
use converter::verify::verify;
use formats::config::{IndexerRole, ScoringFunc};
use formats::gguf::GgufSet;
use formats::template::{MAX_BYTES, MAX_TAG_TOKENS, check_size};
use formats::{Dtype, ModelConfig};
use tempfile::TempDir;

fn plan_with(gguf: &Gguf, options: Options) -> Result<Plan, String> {
    let temp = TempDir::new().unwrap();
    let set = GgufSet::open(&gguf.write(temp.path())).unwrap();
    Plan::new(&set, options).map_err(|e| e.to_string())
}

fn config(gguf: &Gguf) -> ModelConfig {
    let temp = TempDir::new().unwrap();
    let set = GgufSet::open(&gguf.write(temp.path())).unwrap();
    arch::describe(&set).unwrap().config
}

/// The plan must be refused with a line that names each of `names`.
fn refused(gguf: &Gguf, names: &[&str]) {
    let error = plan_with(gguf, options(2)).unwrap_err();
    for name in names.iter().chain(&["made.gguf"]) {
        assert!(error.contains(name), "{error} should name {name}");
    }
}

fn changed(change: impl FnOnce(&mut Gguf)) -> Gguf {
    let mut gguf = Gguf::glm_dsa();
    change(&mut gguf);
    gguf
}

/// Converts and proves against the source.
fn converts(gguf: &Gguf) {
    for ranks in [1, 2, 3] {
        let temp = TempDir::new().unwrap();
        let path = gguf.write(temp.path());
        let out = temp.path().join("out");
        convert(&path, &out, ranks);
        let report = verify(&out, Some(&path), &control()).unwrap();
        assert!(report.ok, "{:?}", report.failures);
    }
}

/// Cases: G15.
#[test]
fn every_required_key_is_named_when_it_is_missing() {
    for key in [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "rope.dimension_count",
        "expert_used_count",
        "expert_shared_count",
        "expert_feed_forward_length",
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "attention.layer_norm_rms_epsilon",
        "attention.indexer.head_count",
        "attention.indexer.key_length",
        "attention.indexer.top_k",
        "expert_count",
    ] {
        let key = format!("glm-dsa.{key}");
        refused(&changed(|g| g.unset(&key)), &[&key, "no such key"]);
    }
    refused(&changed(|g| g.unset("general.architecture")), &["general.architecture"]);
    refused(&changed(|g| g.unset("tokenizer.ggml.tokens")), &["tokenizer.ggml.tokens"]);
}

#[test]
fn another_architecture_is_refused_with_the_list() {
    let gguf = changed(|g| g.set("general.architecture", Value::Str("llama".to_owned())));
    refused(&gguf, &["general.architecture", "llama", "glm-dsa", "deepseek2", "deepseek32", "GLM-5"]);
}

#[test]
fn defaults_are_llama_cpps() {
    let config = config(&changed(|g| {
        for key in ["expert_weights_norm", "expert_weights_scale"] {
            g.unset(&format!("glm-dsa.{key}"));
        }
    }));
    let router = config.moe.unwrap().router;
    assert_eq!(router.scoring_func, ScoringFunc::Sigmoid);
    assert_eq!((router.norm_topk_floor, router.routed_scaling_factor), (None, 1.0));
    assert_eq!((router.n_group, router.topk_group), (1, 1));
}

#[test]
fn what_has_no_safe_default_is_asked_for() {
    let without = |key: &str| changed(|g| g.unset(&format!("glm-dsa.{key}")));
    refused(&without("rope.freq_base"), &["glm-dsa.rope.freq_base", "no such key"]);
    let yarn = changed(|g| g.set("glm-dsa.rope.scaling.type", Value::Str("yarn".to_owned())));
    refused(&yarn, &["glm-dsa.rope.scaling.factor", "YaRN"]);
    let factor = changed(|g| g.set("glm-dsa.rope.scaling.factor", Value::F32(40.0)));
    refused(&factor, &["glm-dsa.rope.scaling.type", "rope.scaling.factor"]);
}

/// Cases: M47.
#[test]
fn the_router_follows_its_keys() {
    let router = config(&Gguf::glm_dsa()).moe.unwrap().router;
    assert_eq!((router.norm_topk_floor, router.routed_scaling_factor), (Some(1e-20), 2.5));
    let softmax = changed(|g| g.set("glm-dsa.expert_gating_func", Value::U32(1)));
    assert_eq!(config(&softmax).moe.unwrap().router.scoring_func, ScoringFunc::Softmax);
    let other = changed(|g| g.set("glm-dsa.expert_gating_func", Value::U32(4)));
    refused(&other, &["glm-dsa.expert_gating_func", "4", "softplus"]);
    let groups = changed(|g| g.set("glm-dsa.expert_group_count", Value::U32(2)));
    refused(&groups, &["glm-dsa.expert_group_used_count"]);
}

/// Values that llama.cpp takes without a word and that make no model.
#[test]
fn numbers_out_of_range_are_refused_with_their_key_and_value() {
    for (key, values) in [
        ("attention.layer_norm_rms_epsilon", &[0.0, -1e-5, 1.0, f32::NAN, f32::INFINITY][..]),
        ("expert_weights_scale", &[-2.5, f32::NAN, f32::NEG_INFINITY]),
    ] {
        let key = format!("glm-dsa.{key}");
        for &value in values {
            refused(&changed(|g| g.set(&key, Value::F32(value))), &[&key, &value.to_string()]);
        }
    }
}

#[test]
fn a_chat_template_is_one_or_is_not_there() {
    const KEY: &str = "tokenizer.chat_template";
    let made = |gguf: &Gguf| {
        let temp = TempDir::new().unwrap();
        let set = GgufSet::open(&gguf.write(temp.path())).unwrap();
        side_files(&set).map(|files| files.len()).map_err(|e| e.to_string())
    };
    assert_eq!(made(&Gguf::glm_dsa()), Ok(4));
    assert_eq!(made(&changed(|g| g.unset(KEY))), Ok(3));
    for (template, name) in
        [("", "empty"), (" \n", "empty"), ("{% if x %}\n{{ y", "line 2"), ("{% for %}", "line 1")]
    {
        let said = made(&changed(|g| g.set(KEY, Value::Str(template.to_owned())))).unwrap_err();
        for name in ["made.gguf", KEY, name, "gguf-new-metadata"] {
            assert!(said.contains(name) && !said.contains('\n'), "{said} should name {name}");
        }
    }
}

/// Every shape that nests as deep as it is long: as deep as is allowed it parses, beyond that it is refused before it is taken
/// apart, and none is the end of the program.
#[test]
fn a_chat_template_nests_as_deep_as_is_allowed() {
    const KEY: &str = "tokenizer.chat_template";
    let temp = TempDir::new().unwrap();
    let made = |template: String| {
        let gguf = changed(|g| g.set(KEY, Value::Str(template)));
        side_files(&GgufSet::open(&gguf.write(temp.path())).unwrap()).map_err(|e| e.to_string())
    };
    for (before, nested, after) in [
        ("{{", "-", "x}}"),
        ("{{", "not ", "x}}"),
        ("{{a", "+a", "}}"),
        ("{{a", "~a", "}}"),
        ("{{a", "**a", "}}"),
        ("{{a", ".a", "}}"),
        ("{{a", "|b", "}}"),
        ("{{a", " and a", "}}"),
        ("{{a", "()", "}}"),
        ("{{a", " if a else b", "}}"),
        ("{{a", " is b", "}}"),
        ("{{", "(", "}}"),
        ("{{", "[", "}}"),
        ("{% if a %}", "{% elif b %}", "{% endif %}"),
        ("", "{% if a %}", ""),
    ] {
        let template = |times: usize| format!("{before}{}{after}", nested.repeat(times));
        let tags = nested.starts_with("{%");
        let fits = |text: &String| text.len() <= MAX_BYTES && (tags || check_size(text).is_ok());
        let most = (1..).take_while(|&times| fits(&template(times))).last().unwrap();
        match made(template(most)) {
            Ok(files) => assert_eq!(files.len(), 4),
            Err(said) => assert!(said.contains(KEY) && !said.contains('\n'), "{nested}: {said}"),
        }
        let longest = (MAX_BYTES - template(0).len()) / nested.len();
        let said = made(template(longest)).map(|files| files.len());
        let refusal = format!("words and operators in line 1, more than {MAX_TAG_TOKENS}");
        assert!(tags || said.as_ref().is_err_and(|said| said.contains(&refusal)), "{nested}: {said:?}");
    }
    assert!(made("x".repeat(MAX_BYTES)).is_ok());
    let said = made("x".repeat(MAX_BYTES + 1)).unwrap_err();
    assert!(said.contains(KEY) && said.contains("65537 bytes"), "{said}");
}

/// A file that says a thing twice says it the same way twice.
#[test]
fn what_is_said_twice_agrees() {
    let vocab = Gguf::glm_dsa().vocab() as u32;
    converts(&changed(|g| g.set("glm-dsa.vocab_size", Value::U32(vocab))));
    let other = changed(|g| g.set("glm-dsa.vocab_size", Value::U32(vocab + 1)));
    refused(&other, &["glm-dsa.vocab_size", "the 263 tokens", "264"]);
    for (key, value) in [("attention.head_count", HEADS), ("expert_used_count", 2)] {
        let key = format!("glm-dsa.{key}");
        let layers = |n: usize| changed(|g| g.set(&key, Value::I32s(vec![value as i32; n])));
        converts(&layers(2));
        for n in [0, 1, 3] {
            refused(&layers(n), &[&key, "each of 2 layers", &format!("{n} values")]);
        }
    }
}

#[test]
fn a_group_whose_two_best_are_added_has_two() {
    let groups = |count| {
        changed(|g| {
            g.set("glm-dsa.expert_group_count", Value::U32(count));
            g.set("glm-dsa.expert_group_used_count", Value::U32(count));
            g.set("glm-dsa.expert_gating_func", Value::U32(2));
        })
    };
    converts(&groups(EXPERTS as u32 / 2));
    refused(&groups(EXPERTS as u32), &["glm-dsa.expert_group_count", "groups of at least two", "found 4"]);
}

/// One half from a tensor of its own and the other from the fused one: the fused one's other half would be lost.
#[test]
fn gate_and_up_come_from_one_place() {
    for (own, missing) in [("gate", "up"), ("up", "gate")] {
        let gguf = changed(|g| {
            g.remove(&format!("blk.1.ffn_{missing}_exps.weight"));
            g.put("blk.1.ffn_gate_up_exps.weight", &[HIDDEN, 2 * FE, EXPERTS], Q8_0);
        });
        let [own, missing] = [own, missing].map(|half| format!("tensor blk.1.ffn_{half}_exps.weight"));
        refused(&gguf, &[&own, "blk.1.ffn_gate_up_exps.weight", &missing["tensor ".len()..]]);
    }
}

/// GLM-4.7-Flash is known by its layers and vocabulary; every other `deepseek2` without the key is a softmax model.
///
/// Cases: M47.
#[test]
fn a_missing_gating_function_is_that_of_the_family() {
    for (blocks, vocabulary, expected) in [
        (47, 154_880, ScoringFunc::Sigmoid),
        (48, 154_880, ScoringFunc::Sigmoid),
        (46, 154_880, ScoringFunc::Softmax),
        (47, 154_881, ScoringFunc::Softmax),
    ] {
        let gguf = changed(|g| {
            let tokens = (0..vocabulary).map(|i| i.to_string()).collect();
            g.set("tokenizer.ggml.tokens", Value::Strs(tokens));
            g.set("general.architecture", Value::Str("deepseek2".to_owned()));
            g.set("glm-dsa.block_count", Value::U32(blocks));
            for (key, _) in &mut g.keys {
                *key = key.replace("glm-dsa.", "deepseek2.");
            }
        });
        if expected == ScoringFunc::Softmax {
            refused(&gguf, &["deepseek2.expert_gating_func", "exp_probs_b", "no such key"]);
        }
        let mut gguf = gguf;
        gguf.tensors
            .retain(|tensor| expected == ScoringFunc::Sigmoid || !tensor.name.contains("exp_probs_b"));
        let scoring = config(&gguf).moe.unwrap().router.scoring_func;
        assert_eq!(scoring, expected, "{blocks} blocks, {vocabulary} tokens");
    }
    let required = changed(|g| {
        g.set("general.architecture", Value::Str("deepseek32".to_owned()));
        for (key, _) in &mut g.keys {
            *key = key.replace("glm-dsa.", "deepseek32.");
        }
    });
    refused(&required, &["deepseek32.expert_gating_func", "none"]);
}

/// llama-quantize leaves routers alone; other programs do not.
///
/// Cases: M50.
#[test]
fn a_quantised_router_is_dequantised() {
    let mut gguf = Gguf::glm_dsa();
    gguf.remove("blk.1.ffn_gate_inp.weight");
    gguf.put("blk.1.ffn_gate_inp.weight", &[HIDDEN, EXPERTS], Q8_0);
    let plan = plan_with(&gguf, options(2)).unwrap();
    let gate = plan.tensors.iter().find(|t| t.name == "model.layers.1.mlp.gate.weight").unwrap();
    assert_eq!((gate.dtype(), gate.cut), (Dtype::F32, None));
    converts(&gguf);
}

/// An empty tensor is legal GGUF, and no weight of a model.
///
/// Cases: G12.
#[test]
fn an_empty_tensor_that_the_model_needs_is_refused() {
    let empty = changed(|g| {
        let tensor = g.tensor("blk.0.ffn_down.weight");
        tensor.ne = vec![0, HIDDEN];
        tensor.data = Vec::new();
    });
    refused(&empty, &["blk.0.ffn_down.weight", "[64, 0]", "[64, 64]"]);
}

/// Cases: M45.
#[test]
fn indexer_types_are_listed_or_follow_the_context_length() {
    let key = "glm-dsa.attention.indexer.types";
    let long = changed(|g| g.set("glm-dsa.context_length", Value::U32(1 << 20)));
    let roles =
        |config: ModelConfig| -> Vec<_> { config.layers.iter().map(|l| l.indexer.unwrap()).collect() };
    assert_eq!(roles(config(&long)), [IndexerRole::Full; 2]);
    let listed = changed(|g| g.set(key, Value::Bools(vec![true, false])));
    assert_eq!(roles(config(&listed)), [IndexerRole::Full, IndexerRole::Shared]);
    let numbers = changed(|g| g.set(key, Value::I32s(vec![1, 0])));
    assert_eq!(roles(config(&numbers)), [IndexerRole::Full, IndexerRole::Shared]);
    refused(&changed(|g| g.set(key, Value::Bools(vec![true]))), &[key, "2 layers"]);
    refused(&changed(|g| g.set(key, Value::Bools(vec![false, true]))), &[key, "full"]);
    refused(&changed(|g| g.set(key, Value::I32s(vec![1, 7]))), &[key, "7"]);
}

/// Cases: M43, M44, M49.
#[test]
fn shared_layers_need_no_indexer_and_full_ones_do() {
    let key = "glm-dsa.attention.indexer.types";
    let mut gguf = changed(|g| g.set(key, Value::Bools(vec![true, false])));
    let plan = plan_with(&gguf, options(2)).unwrap();
    assert_eq!(plan.skipped.len(), 5);
    assert!(
        plan.skipped.iter().all(|s| s.tensor.starts_with("blk.1.indexer.") && s.reason.contains("shares"))
    );
    for role in ["attn_k.weight", "attn_q_b.weight", "k_norm.weight", "k_norm.bias", "proj.weight"] {
        gguf.remove(&format!("blk.1.indexer.{role}"));
    }
    assert!(plan_with(&gguf, options(2)).unwrap().skipped.is_empty());
    converts(&gguf);
    gguf.unset(key);
    refused(&gguf, &["blk.1.indexer.attn_q_b.weight", "an indexer of its own"]);
}

/// Cases: M51.
#[test]
fn mtp_layers_are_kept_whole_or_not_at_all() {
    let whole = Gguf::with_mtp();
    let plan = plan_with(&whole, options(2)).unwrap();
    assert_eq!(plan.model.config.mtp_layers.len(), 1);
    assert!(plan.skipped.is_empty());
    converts(&whole);

    let mut partly = Gguf::with_mtp();
    partly.remove("blk.2.nextn.enorm.weight");
    let plan = plan_with(&partly, options(2)).unwrap();
    assert!(plan.model.config.mtp_layers.is_empty());
    let count = partly.tensors.iter().filter(|t| t.name.starts_with("blk.2.")).count();
    assert_eq!(plan.skipped.len(), count);
    assert!(plan.skipped[0].reason.contains("blk.2.nextn.enorm.weight"), "{:?}", plan.skipped[0]);
    converts(&partly);

    let mut absent = Gguf::with_mtp();
    absent.tensors.retain(|t| !t.name.starts_with("blk.2."));
    let plan = plan_with(&absent, options(2)).unwrap();
    assert!(plan.model.config.mtp_layers.is_empty());
    assert_eq!(plan.skipped.len(), 1);
    assert_eq!(plan.skipped[0].tensor, "blk.2.*");
    converts(&absent);

    let mut blind = Gguf::with_mtp();
    blind.remove("blk.2.indexer.proj.weight");
    let plan = plan_with(&blind, options(2)).unwrap();
    assert_eq!(plan.model.config.mtp_layers[0].indexer, None);
    assert_eq!(plan.skipped.len(), 4);
    converts(&blind);
    refused(
        &changed(|g| g.set("glm-dsa.nextn_predict_layers", Value::U32(2))),
        &["glm-dsa.nextn_predict_layers"],
    );
}

#[test]
fn embeddings_are_tied_only_without_an_output_tensor() {
    assert!(!config(&Gguf::glm_dsa()).tie_word_embeddings);
    let tied = changed(|g| g.remove("output.weight"));
    assert!(config(&tied).tie_word_embeddings);
    converts(&tied);
}

#[test]
fn shapes_and_types_are_held_against_the_metadata() {
    let wrong = changed(|g| g.set("glm-dsa.attention.kv_lora_rank", Value::U32(64)));
    refused(&wrong, &["blk.0.attn_kv_a_mqa.weight", "[80, 64]", "[48, 64]"]);
    // A width that cuts depend on too is told of where it is wrong, not where it is cut by.
    let narrow = changed(|g| g.set("glm-dsa.attention.value_length_mla", Value::U32(3)));
    refused(&narrow, &["blk.0.attn_v_b.weight", "[2, 3, 32]", "[2, 32, 32]"]);
    let vocabulary = changed(|g| {
        let Some(Value::Strs(mut tokens)) = g.value("tokenizer.ggml.tokens").cloned() else {
            panic!("strings")
        };
        tokens.push("more".to_owned());
        g.set("tokenizer.ggml.tokens", Value::Strs(tokens));
    });
    refused(&vocabulary, &["token_embd.weight", "[264, 64]", "[263, 64]"]);
    let heads = changed(|g| g.set("glm-dsa.attention.head_count", Value::I32s(vec![2, 4])));
    refused(&heads, &["glm-dsa.attention.head_count", "every layer"]);
    let activations = changed(|g| {
        let tensor = g.tensor("output.weight");
        tensor.id = 9;
        tensor.data.resize(tensor.data.len() / 34 * 36, 0);
    });
    refused(&activations, &["output.weight", "Q8_1"]);
}

#[test]
fn unknown_tensors_are_an_error_unless_allowed() {
    let mut gguf = Gguf::glm_dsa();
    gguf.put("blk.0.attn_sinks.weight", &[HEADS], F32);
    gguf.put("blk.7.attn_norm.weight", &[HIDDEN], F32);
    gguf.put("rope_freqs.weight", &[8], F32);
    refused(&gguf, &["blk.0.attn_sinks.weight", "2 such tensors", "--allow-unknown"]);
    let allowed = Options { unknown: UnknownTensors::Skip, ..options(2) };
    let plan = plan_with(&gguf, allowed).unwrap();
    let names: Vec<&str> = plan.skipped.iter().map(|s| s.tensor.as_str()).collect();
    assert_eq!(names, ["rope_freqs.weight", "blk.0.attn_sinks.weight", "blk.7.attn_norm.weight"]);
}

/// attn_kv_b as the halves make it, in F32: exactly what rounds to the same BF16.
fn joined(gguf: &Gguf) -> Vec<u8> {
    let value = |name: &str, index: u64| -> f32 {
        let tensor = gguf.tensors.iter().find(|t| t.name == name).unwrap();
        let block = &tensor.data[(index / 32 * 34) as usize..][..34];
        let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
        scale * f32::from(block[2 + (index % 32) as usize] as i8)
    };
    let mut bytes = Vec::new();
    for head in 0..HEADS {
        for row in 0..NOPE + V {
            for r in 0..KV_LORA {
                let x = if row < NOPE {
                    value("blk.0.attn_k_b.weight", (head * KV_LORA + r) * NOPE + row)
                } else {
                    value("blk.0.attn_v_b.weight", (head * V + row - NOPE) * KV_LORA + r)
                };
                bytes.extend(x.to_le_bytes());
            }
        }
    }
    bytes
}

#[test]
fn a_joined_kv_b_beside_its_halves_has_to_agree() {
    let mut gguf = Gguf::glm_dsa();
    let data = joined(&gguf);
    gguf.put("blk.0.attn_kv_b.weight", &[KV_LORA, HEADS * (NOPE + V)], F32);
    gguf.tensor("blk.0.attn_kv_b.weight").data = data;
    converts(&gguf);
    let temp = TempDir::new().unwrap();
    let bytes = &mut gguf.tensor("blk.0.attn_kv_b.weight").data;
    let row_70 = 70 * KV_LORA as usize * 4;
    bytes[row_70..row_70 + 4].copy_from_slice(&9f32.to_le_bytes());
    let set = GgufSet::open(&gguf.write(temp.path())).unwrap();
    let plan = Plan::new(&set, options(2)).unwrap();
    let out = temp.path().join("out");
    let error = converter::execute::convert(&set, &plan, &[], &out, Unfinished::Refuse, &control())
        .unwrap_err()
        .to_string();
    for name in ["made.gguf", "blk.0.attn_kv_b.weight", "blk.0.attn_k_b.weight", "row 70"] {
        assert!(error.contains(name), "{error}");
    }
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1, "nothing but the GGUF is left");
}

#[test]
fn a_joined_kv_b_alone_and_fused_experts_make_the_same_checkpoint() {
    let separate = Gguf::glm_dsa();
    let mut other = Gguf::glm_dsa();
    let data = joined(&other);
    other.remove("blk.0.attn_k_b.weight");
    other.remove("blk.0.attn_v_b.weight");
    other.put("blk.0.attn_kv_b.weight", &[KV_LORA, HEADS * (NOPE + V)], F32);
    other.tensor("blk.0.attn_kv_b.weight").data = data;
    let [gate, up] =
        ["gate", "up"].map(|half| other.tensor(&format!("blk.1.ffn_{half}_exps.weight")).data.clone());
    let expert = gate.len() / EXPERTS as usize;
    let fused = gate.chunks(expert).zip(up.chunks(expert)).flat_map(|(g, u)| [g, u].concat()).collect();
    other.remove("blk.1.ffn_gate_exps.weight");
    other.remove("blk.1.ffn_up_exps.weight");
    other.put("blk.1.ffn_gate_up_exps.weight", &[HIDDEN, 2 * FE, EXPERTS], Q8_0);
    other.tensor("blk.1.ffn_gate_up_exps.weight").data = fused;
    converts(&other);
    for ranks in [1, 2] {
        let temp = TempDir::new().unwrap();
        let [one, two] = [&separate, &other].map(|gguf| {
            let out = temp.path().join(format!("out-{}", gguf.tensors.len()));
            convert(&gguf.write(temp.path()), &out, ranks);
            out
        });
        for rank in 0..ranks {
            let file = format!("rank-{rank}-of-{ranks}.safetensors");
            assert_eq!(
                std::fs::read(one.join(&file)).unwrap(),
                std::fs::read(two.join(&file)).unwrap(),
                "{file}"
            );
        }
    }
}

#[test]
fn rope_scaling_is_resolved_or_refused() {
    let scaled = |kind: &'static str, extra: &[(&str, f32)]| {
        let mut gguf = Gguf::glm_dsa();
        gguf.set("glm-dsa.rope.scaling.type", Value::Str(kind.to_owned()));
        gguf.set("glm-dsa.rope.scaling.factor", Value::F32(4.0));
        gguf.set("glm-dsa.rope.scaling.original_context_length", Value::U32(128));
        for (key, value) in extra {
            gguf.set(&format!("glm-dsa.rope.scaling.{key}"), Value::F32(*value));
        }
        gguf
    };
    let plain = config(&Gguf::glm_dsa());
    let linear = config(&scaled("linear", &[]));
    assert_eq!(linear.rope.inv_freq[3], plain.rope.inv_freq[3] / 4.0);
    assert_eq!(linear.attention.softmax_scale, plain.attention.softmax_scale);
    // HF: without mscale_all_dim the factor is on cos and sin, with it squared on the scores.
    let yarn = config(&scaled("yarn", &[]));
    let mscale = 1.0 + 0.1 * 4f64.ln();
    assert!((f64::from(yarn.rope.attention_scaling) - mscale).abs() < 1e-7);
    assert_eq!(yarn.attention.softmax_scale, plain.attention.softmax_scale);
    let all_dim = config(&scaled("yarn", &[("yarn_log_multiplier", 0.1)]));
    assert_eq!(all_dim.rope.attention_scaling, 1.0);
    let ratio = f64::from(all_dim.attention.softmax_scale / plain.attention.softmax_scale);
    assert!((ratio - mscale * mscale).abs() < 1e-6, "{ratio}");
    assert_eq!(config(&scaled("none", &[])).rope, plain.rope);
    refused(&scaled("longrope", &[]), &["glm-dsa.rope.scaling.type", "longrope"]);
    refused(&scaled("yarn", &[("attn_factor", 0.5)]), &["glm-dsa.rope.scaling.attn_factor", "0.5"]);
}

/// Nothing is allocated for sizes that only a damaged file has.
#[test]
fn absurd_sizes_are_refused_at_once() {
    let start = std::time::Instant::now();
    for (key, value) in [
        ("block_count", 1 << 31),
        ("block_count", u32::MAX),
        ("rope.dimension_count", 1 << 30),
        ("expert_count", 1 << 31),
        ("attention.head_count", 1 << 31),
        ("expert_shared_count", 1 << 31),
        ("nextn_predict_layers", 1 << 31),
        ("attention.kv_lora_rank", 1 << 31),
    ] {
        let error = plan_with(&changed(|g| g.set(&format!("glm-dsa.{key}"), Value::U32(value))), options(2));
        assert!(error.unwrap_err().contains("made.gguf"), "{key}");
    }
    assert!(start.elapsed() < std::time::Duration::from_secs(1));
}

#[test]
fn a_dense_model_has_no_experts() {
    let mut gguf = Gguf::glm_dsa();
    gguf.tensors.retain(|t| {
        !(t.name.starts_with("blk.1.")
            && (t.name.contains("ffn_") && !t.name.contains("norm") || t.name.contains("exp_probs")))
    });
    for (role, ne) in [("gate", [HIDDEN, 64]), ("up", [HIDDEN, 64]), ("down", [64, HIDDEN])] {
        gguf.put(&format!("blk.1.ffn_{role}.weight"), &ne, Q8_0);
    }
    gguf.unset("glm-dsa.expert_count");
    assert!(config(&gguf).moe.is_none());
    converts(&gguf);
}

#[test]
fn an_indexer_narrower_than_its_rotary_part_is_refused() {
    assert_eq!(INDEX_DIM, 64);
    let key = "glm-dsa.attention.indexer.key_length";
    refused(&changed(|g| g.set(key, Value::U32(8))), &[key, "at least 16", "found 8"]);
}

/// What the check of the whole configuration finds is told of the key that it came from.
#[test]
fn contradictions_between_keys_name_the_key() {
    for (key, value, expected) in [
        ("expert_used_count", 5, "at most the 4 eligible experts"),
        ("expert_group_count", 3, "a divisor of 4 experts"),
        ("rope.dimension_count", 15, "an even number"),
    ] {
        let name = format!("glm-dsa.{key}");
        let gguf = changed(|g| {
            g.set(&name, Value::U32(value));
            g.set("glm-dsa.expert_group_used_count", Value::U32(1));
        });
        refused(&gguf, &[&name, expected, &format!("found {value}")]);
    }
    let groups = changed(|g| {
        g.set("glm-dsa.expert_group_count", Value::U32(2));
        g.set("glm-dsa.expert_group_used_count", Value::U32(3));
    });
    refused(&groups, &["glm-dsa.expert_group_used_count", "at most the 2 groups", "found 3"]);
    let scale = changed(|g| {
        g.set("glm-dsa.rope.scaling.type", Value::Str("yarn".to_owned()));
        g.set("glm-dsa.rope.scaling.factor", Value::F32(40.0));
        g.set("glm-dsa.rope.scaling.yarn_log_multiplier", Value::F32(3e38));
    });
    refused(&scale, &["glm-dsa.rope.scaling.yarn_log_multiplier", "a finite number", "found inf"]);
}

#[test]
fn a_type_that_no_weight_has_is_counted() {
    /// Blocks of 32 values in 36 bytes, for activations.
    const Q8_1: u32 = 9;
    let gguf = changed(|g| {
        for name in ["blk.0.ffn_up.weight", "blk.1.ffn_up_shexp.weight", "blk.0.ffn_gate.weight"] {
            let tensor = g.tensor(name);
            tensor.id = Q8_1;
            tensor.data.resize(tensor.data.len() / 34 * 36, 0);
        }
    });
    refused(
        &gguf,
        &["tensor blk.0.ffn_gate.weight", "Q8_1 (3 such tensors)", "convert the original model again"],
    );
}
