//! Small GGUF files made field by field, so that a test can change any key or tensor.

use std::path::{Path, PathBuf};

/// A metadata value.
#[derive(Clone)]
pub(crate) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    I32s(Vec<i32>),
    U32s(Vec<u32>),
    I64s(Vec<i64>),
    U8s(Vec<u8>),
    Bools(Vec<bool>),
}

#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// GGUF's order: the contiguous dimension first.
    pub(crate) ne: Vec<u64>,
    pub(crate) id: u32,
    pub(crate) data: Vec<u8>,
}

#[derive(Clone)]
pub(crate) struct Gguf {
    pub(crate) keys: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
}

pub(crate) const F32: u32 = 0;
pub(crate) const Q8_0: u32 = 8;
pub(crate) const NVFP4: u32 = 40;

/// Dimensions of the models made here.
pub(crate) const HIDDEN: u64 = 64;
pub(crate) const HEADS: u64 = 2;
pub(crate) const NOPE: u64 = 32;
pub(crate) const ROPE: u64 = 16;
pub(crate) const V: u64 = 32;
pub(crate) const KV_LORA: u64 = 32;
pub(crate) const Q_LORA: u64 = 64;
pub(crate) const EXPERTS: u64 = 4;
pub(crate) const FE: u64 = 128;
pub(crate) const F: u64 = 64;
pub(crate) const INDEX_HEADS: u64 = 2;
pub(crate) const INDEX_DIM: u64 = 64;

impl Gguf {
    /// A complete glm-dsa model: one dense and one mixture-of-experts layer.
    pub(crate) fn glm_dsa() -> Self {
        let mut gguf = Self { keys: Vec::new(), tensors: Vec::new() };
        gguf.set("general.architecture", Value::Str("glm-dsa".to_owned()));
        for (key, value) in [
            ("context_length", 512),
            ("embedding_length", HIDDEN),
            ("block_count", 2),
            ("feed_forward_length", F),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", 1),
            ("rope.dimension_count", ROPE),
            ("expert_count", EXPERTS),
            ("expert_used_count", 2),
            ("expert_shared_count", 1),
            ("expert_feed_forward_length", FE),
            ("leading_dense_block_count", 1),
            ("attention.q_lora_rank", Q_LORA),
            ("attention.kv_lora_rank", KV_LORA),
            ("attention.key_length_mla", NOPE + ROPE),
            ("attention.value_length_mla", V),
            ("attention.indexer.head_count", INDEX_HEADS),
            ("attention.indexer.key_length", INDEX_DIM),
            ("attention.indexer.top_k", 8),
        ] {
            gguf.set(&format!("glm-dsa.{key}"), Value::U32(value as u32));
        }
        gguf.set("glm-dsa.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        gguf.set("glm-dsa.rope.freq_base", Value::F32(1e6));
        gguf.set("glm-dsa.expert_weights_norm", Value::Bool(true));
        gguf.set("glm-dsa.expert_weights_scale", Value::F32(2.5));
        gguf.tokenizer();
        let vocab = gguf.vocab();
        gguf.put("token_embd.weight", &[HIDDEN, vocab], Q8_0);
        gguf.put("output_norm.weight", &[HIDDEN], F32);
        gguf.put("output.weight", &[HIDDEN, vocab], Q8_0);
        gguf.block(0);
        gguf.block(1);
        gguf
    }

    /// The same with a multi-token-prediction layer.
    pub(crate) fn with_mtp() -> Self {
        let mut gguf = Self::glm_dsa();
        gguf.set("glm-dsa.block_count", Value::U32(3));
        gguf.set("glm-dsa.nextn_predict_layers", Value::U32(1));
        gguf.block(2);
        gguf.put("blk.2.nextn.eh_proj.weight", &[2 * HIDDEN, HIDDEN], Q8_0);
        gguf.put("blk.2.nextn.enorm.weight", &[HIDDEN], F32);
        gguf.put("blk.2.nextn.hnorm.weight", &[HIDDEN], F32);
        gguf
    }

    fn tokenizer(&mut self) {
        let printable = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
        let mut next = 256;
        let mut tokens: Vec<String> = (0..256)
            .map(|b| {
                let code = if printable(b) { b } else { next };
                next += u32::from(!printable(b));
                char::from_u32(code).unwrap().to_string()
            })
            .collect();
        tokens
            .extend(["he", "ll", "hell", "hello", "<|endoftext|>", "<|user|>", "<think>"].map(str::to_owned));
        let mut types = vec![1; tokens.len()];
        types[260] = 3;
        types[261] = 3;
        types[262] = 4;
        self.set("tokenizer.ggml.model", Value::Str("gpt2".to_owned()));
        self.set("tokenizer.ggml.pre", Value::Str("glm4".to_owned()));
        self.set("tokenizer.ggml.tokens", Value::Strs(tokens));
        self.set("tokenizer.ggml.token_type", Value::I32s(types));
        let merges = ["h e", "l l", "he ll", "hell o"].map(str::to_owned).to_vec();
        self.set("tokenizer.ggml.merges", Value::Strs(merges));
        self.set("tokenizer.ggml.eos_token_id", Value::U32(260));
        self.set("tokenizer.chat_template", Value::Str("{{ messages }}".to_owned()));
    }

    pub(crate) fn vocab(&self) -> u64 {
        match self.value("tokenizer.ggml.tokens") {
            Some(Value::Strs(tokens)) => tokens.len() as u64,
            _ => 0,
        }
    }

    fn block(&mut self, layer: u64) {
        let name = |role: &str| format!("blk.{layer}.{role}");
        for (role, ne) in [
            ("attn_norm.weight", vec![HIDDEN]),
            ("attn_q_a_norm.weight", vec![Q_LORA]),
            ("attn_kv_a_norm.weight", vec![KV_LORA]),
            ("ffn_norm.weight", vec![HIDDEN]),
            ("indexer.k_norm.weight", vec![INDEX_DIM]),
            ("indexer.k_norm.bias", vec![INDEX_DIM]),
        ] {
            self.put(&name(role), &ne, F32);
        }
        for (role, ne) in [
            ("attn_q_a.weight", vec![HIDDEN, Q_LORA]),
            ("attn_q_b.weight", vec![Q_LORA, HEADS * (NOPE + ROPE)]),
            ("attn_kv_a_mqa.weight", vec![HIDDEN, KV_LORA + ROPE]),
            ("attn_k_b.weight", vec![NOPE, KV_LORA, HEADS]),
            ("attn_v_b.weight", vec![KV_LORA, V, HEADS]),
            ("attn_output.weight", vec![HEADS * V, HIDDEN]),
            ("indexer.proj.weight", vec![HIDDEN, INDEX_HEADS]),
            ("indexer.attn_k.weight", vec![HIDDEN, INDEX_DIM]),
            ("indexer.attn_q_b.weight", vec![Q_LORA, INDEX_HEADS * INDEX_DIM]),
        ] {
            self.put(&name(role), &ne, Q8_0);
        }
        if layer == 0 {
            self.put(&name("ffn_gate.weight"), &[HIDDEN, F], Q8_0);
            self.put(&name("ffn_up.weight"), &[HIDDEN, F], Q8_0);
            self.put(&name("ffn_down.weight"), &[F, HIDDEN], Q8_0);
            return;
        }
        self.put(&name("ffn_gate_inp.weight"), &[HIDDEN, EXPERTS], F32);
        self.put(&name("exp_probs_b.bias"), &[EXPERTS], F32);
        for (kind, experts) in [("exps", vec![EXPERTS]), ("shexp", vec![])] {
            let ne = |matrix: [u64; 2]| [&matrix[..], &experts].concat();
            self.put(&name(&format!("ffn_gate_{kind}.weight")), &ne([HIDDEN, FE]), Q8_0);
            self.put(&name(&format!("ffn_up_{kind}.weight")), &ne([HIDDEN, FE]), Q8_0);
            self.put(&name(&format!("ffn_down_{kind}.weight")), &ne([FE, HIDDEN]), Q8_0);
        }
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.keys.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    /// Sets or replaces a key.
    pub(crate) fn set(&mut self, key: &str, value: Value) {
        match self.keys.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    pub(crate) fn unset(&mut self, key: &str) {
        self.keys.retain(|(k, _)| k != key);
    }

    /// Adds a tensor of numbers that its name decides.
    pub(crate) fn put(&mut self, name: &str, ne: &[u64], id: u32) {
        let mut state = name.bytes().fold(1u32, |state, b| state.wrapping_mul(31).wrapping_add(b.into()));
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let elements = ne.iter().product::<u64>() as usize;
        let data = match id {
            F32 => (0..elements).flat_map(|_| (f32::from(next()) / 256.0 - 0.5).to_le_bytes()).collect(),
            // Four scales as UE4M3, around 1/8, then 64 values.
            NVFP4 => (0..elements / 64)
                .flat_map(|_| {
                    let scales: Vec<u8> = (0..4).map(|_| 0x20 + next() % 16).collect();
                    scales
                        .into_iter()
                        .chain((0..32).map(|_| next()).collect::<Vec<u8>>())
                        .collect::<Vec<u8>>()
                })
                .collect(),
            // The scale as f16, then 32 values.
            _ => (0..elements / 32)
                .flat_map(|_| {
                    let mut block = vec![next(), 0x20];
                    block.extend((0..32).map(|_| next()));
                    block
                })
                .collect(),
        };
        self.tensors.push(Tensor { name: name.to_owned(), ne: ne.to_vec(), id, data });
    }

    pub(crate) fn remove(&mut self, name: &str) {
        let before = self.tensors.len();
        self.tensors.retain(|t| t.name != name);
        assert_ne!(self.tensors.len(), before, "{name} was there");
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }

    /// Makes a weight one of NVFP4 with scales beside it: one, or one for each expert.
    pub(crate) fn scale(&mut self, base: &str, scales: &[f32]) {
        let weight = format!("{base}.weight");
        let ne = self.tensor(&weight).ne.clone();
        self.remove(&weight);
        self.put(&weight, &ne, NVFP4);
        let (name, data) = (format!("{base}.scale"), scales.iter().flat_map(|x| x.to_le_bytes()).collect());
        self.tensors.push(Tensor { name, ne: vec![scales.len() as u64], id: F32, data });
    }

    pub(crate) fn write(&self, dir: &Path) -> PathBuf {
        let path = dir.join("made.gguf");
        std::fs::write(&path, self.bytes()).unwrap();
        path
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            bytes.extend(string(key));
            bytes.extend(value.bytes());
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            bytes.extend(string(&tensor.name));
            bytes.extend((tensor.ne.len() as u32).to_le_bytes());
            bytes.extend(tensor.ne.iter().flat_map(|n| n.to_le_bytes()));
            bytes.extend(tensor.id.to_le_bytes());
            bytes.extend((offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(32);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        for tensor in &self.tensors {
            bytes.extend(&tensor.data);
            bytes.resize(bytes.len().next_multiple_of(32), 0);
        }
        bytes
    }
}

impl Value {
    fn bytes(&self) -> Vec<u8> {
        let typed = |id: u32, rest: &[u8]| [&id.to_le_bytes()[..], rest].concat();
        let array = |element: u32, len: usize, rest: Vec<u8>| {
            let head = [&element.to_le_bytes()[..], &(len as u64).to_le_bytes(), &rest].concat();
            typed(9, &head)
        };
        match self {
            Self::U32(n) => typed(4, &n.to_le_bytes()),
            Self::F32(x) => typed(6, &x.to_le_bytes()),
            Self::Bool(b) => typed(7, &[u8::from(*b)]),
            Self::Str(s) => typed(8, &string(s)),
            Self::Strs(s) => array(8, s.len(), s.iter().flat_map(|s| string(s)).collect()),
            Self::I32s(n) => array(5, n.len(), n.iter().flat_map(|n| n.to_le_bytes()).collect()),
            Self::U32s(n) => array(4, n.len(), n.iter().flat_map(|n| n.to_le_bytes()).collect()),
            Self::I64s(n) => array(11, n.len(), n.iter().flat_map(|n| n.to_le_bytes()).collect()),
            Self::U8s(n) => array(0, n.len(), n.clone()),
            Self::Bools(b) => array(7, b.len(), b.iter().map(|&b| u8::from(b)).collect()),
        }
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
