//! From sources to machine code, by way of a cache on the disk.

use super::CudaError;
use super::nvrtc::{Nvrtc, Source};
use formats::layout::mma16::tile_bytes;
use formats::{Digest, Dtype};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

const PRELUDE: (&str, &str) = ("prelude.cuh", include_str!("../../cu/prelude.cuh"));
const BLOCKS: (&str, &str) = ("blocks.cuh", include_str!("../../cu/blocks.cuh"));
const ATTENTION: [(&str, &str); 3] = [
    ("attention.cuh", include_str!("../../cu/attention.cuh")),
    ("attention_decode.cuh", include_str!("../../cu/attention_decode.cuh")),
    ("attention_prefill.cuh", include_str!("../../cu/attention_prefill.cuh")),
];
const MMA16: (&str, &str) = ("mma16.cuh", include_str!("../../cu/mma16.cuh"));
const DECODE: [(&str, &str); 5] = [
    ("decode_tiles.cuh", include_str!("../../cu/decode_tiles.cuh")),
    ("decode_tokens.cuh", include_str!("../../cu/decode_tokens.cuh")),
    ("decode_products.cuh", include_str!("../../cu/decode_products.cuh")),
    ("decode_experts.cuh", include_str!("../../cu/decode_experts.cuh")),
    ("decode_one.cuh", include_str!("../../cu/decode_one.cuh")),
];

/// Weight types that products read in their own blocks.
pub const WEIGHT_TYPES: [Dtype; 14] = [
    Dtype::F32,
    Dtype::F16,
    Dtype::BF16,
    Dtype::Q4_0,
    Dtype::Q5_0,
    Dtype::Q8_0,
    Dtype::Q2_K,
    Dtype::Q3_K,
    Dtype::Q4_K,
    Dtype::Q5_K,
    Dtype::Q6_K,
    Dtype::IQ4_NL,
    Dtype::IQ4_XS,
    Dtype::MXFP4,
];

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Form {
    /// Element type, one of [`WEIGHT_TYPES`].
    pub dtype: Dtype,
    /// Order of its blocks.
    pub tiling: Tiling,
}

/// Order of a matrix' blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tiling {
    /// Layout `ggml`: rows of blocks.
    Rows,
    /// Layout `mma16.v1`: tiles for tensor cores.
    Tiles,
}

impl Form {
    /// Every form that products read.
    pub fn all() -> Vec<Self> {
        let rows = WEIGHT_TYPES.map(|dtype| Self { dtype, tiling: Tiling::Rows });
        let tiles = WEIGHT_TYPES.map(|dtype| Self { dtype, tiling: Tiling::Tiles });
        rows.into_iter().chain(tiles.into_iter().filter(|form| tile_bytes(form.dtype).is_some())).collect()
    }

    /// Its place in [`Form::all`]'s order, with room for every type in both tilings.
    pub(super) fn index(self) -> usize {
        let dtype = WEIGHT_TYPES.iter().position(|&known| known == self.dtype);
        let dtype = dtype.expect("weights are made in types with kernels");
        dtype + if self.tiling == Tiling::Tiles { WEIGHT_TYPES.len() } else { 0 }
    }

    fn defines(self) -> Vec<String> {
        let mut defines = vec![format!("-DTYPE={}", self.dtype.name())];
        if self.tiling == Tiling::Tiles {
            defines.push("-DMMA16".to_owned());
        }
        defines
    }
}

/// Shared memory that every supported GPU gives a block (compute capability 12.0; others give more).
pub const SHARED_BYTES: usize = 99 << 10;

/// One unit's machine code, once it is there.
type Slot = Mutex<Option<Arc<Vec<u8>>>>;

/// One source with what makes it whole: a unit of compilation.
#[derive(Clone, Debug)]
pub struct Unit {
    /// File name under `kernels/cu`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Macros, as the compiler takes them.
    pub defines: Vec<String>,
}

impl Unit {
    /// Operations without a weight matrix.
    pub fn ops() -> Self {
        Self { name: "ops.cu", text: include_str!("../../cu/ops.cu"), defines: Vec::new() }
    }

    /// Sums over GPUs.
    pub fn peer() -> Self {
        Self { name: "peer.cu", text: include_str!("../../cu/peer.cu"), defines: Vec::new() }
    }

    /// What is left of logits for a token to be drawn from.
    pub fn candidates() -> Self {
        Self { name: "candidates.cu", text: include_str!("../../cu/candidates.cu"), defines: Vec::new() }
    }

    /// Random weights.
    pub fn synthetic() -> Self {
        Self { name: "synthetic.cu", text: include_str!("../../cu/synthetic.cu"), defines: Vec::new() }
    }

    /// Products with one type of weights.
    pub fn linear(form: Form) -> Self {
        Self { name: "linear.cu", text: include_str!("../../cu/linear.cu"), defines: form.defines() }
    }

    /// Products of many tokens with one type of weights; F32 has none.
    pub fn gemm(form: Form) -> Self {
        Self { name: "gemm.cu", text: include_str!("../../cu/gemm.cu"), defines: form.defines() }
    }

    /// Products and experts of one to sixteen tokens, in tiles. Blocks that share a multiprocessor's memory with nobody else's
    /// are larger where there is more of it.
    pub fn decode(architecture: &str) -> Self {
        let sizes: &[&str] = if architecture.starts_with("sm_12") {
            &["-DDEPTH=2", "-DTEAMS=1", "-DUP_WARPS=8", "-DDOWN_TEAMS=1"]
        } else {
            &["-DDEPTH=2", "-DTEAMS=2", "-DUP_WARPS=16", "-DDOWN_TEAMS=2"]
        };
        let defines = sizes.iter().map(|&size| size.to_owned()).collect();
        Self { name: "decode.cu", text: include_str!("../../cu/decode.cu"), defines }
    }

    /// Latent attention for fixed widths.
    pub fn attention([nope, rope, v, latent]: [usize; 4]) -> Self {
        let defines = [("NOPE", nope), ("ROPE", rope), ("V", v), ("R", latent)];
        let defines = defines.map(|(name, width)| format!("-DATT_{name}={width}")).into();
        Self { name: "attention.cu", text: include_str!("../../cu/attention.cu"), defines }
    }

    /// What those need around them.
    pub fn rows() -> Self {
        Self { name: "rows.cu", text: include_str!("../../cu/rows.cu"), defines: Vec::new() }
    }

    /// Every unit that there is.
    pub fn all(architecture: &str) -> Vec<Self> {
        let of_types = Form::all().into_iter().flat_map(Self::of_weights);
        // GLM-5's and DeepSeek-V3's widths, and small ones.
        let attention = [[192, 64, 256, 512], [128, 64, 128, 512], [32, 16, 24, 64]].map(Self::attention);
        let others = [
            Self::ops(),
            Self::rows(),
            Self::peer(),
            Self::candidates(),
            Self::synthetic(),
            Self::decode(architecture),
        ];
        others.into_iter().chain(attention).chain(of_types).collect()
    }

    /// The units that weights of a type need.
    pub fn of_weights(form: Form) -> Vec<Self> {
        // The router is F32 and stays so: a rounded product could choose another expert.
        match form.dtype {
            Dtype::F32 => vec![Self::linear(form)],
            _ => vec![Self::linear(form), Self::gemm(form)],
        }
    }

    /// The most dynamic shared memory that a kernel of this unit is launched with; beyond 48 KiB it has to be asked for.
    pub fn dynamic_shared_bytes(kernel: &str) -> usize {
        match kernel {
            // As large as a model's sizes ask for. A little is theirs statically.
            "mla_store" | "attend" | "route" => SHARED_BYTES - 1024,
            "candidates" => super::candidates::SHARED_BYTES,
            // Two stages of two tiles of 128 x 64 f16.
            "gemm" | "gemm_experts" => 64 << 10,
            // Two stages of 64 + 128 lines of 36 f32.
            "f32_product" => 2 * (64 + 128) * 36 * 4,
            _ => 0,
        }
    }

    /// Bytes of registers that a kernel may spill; all others must not. Those of decode.cu do so outside of their loops over tiles.
    pub fn spill_allowance(&self, kernel: &str) -> u64 {
        match (self.name, kernel) {
            ("decode.cu", "add_norm_tokens") => 0,
            ("decode.cu", _) => 256,
            _ => 0,
        }
    }

    /// The source with its headers.
    pub fn source(&self) -> Source<'_> {
        let headers: &[_] = match self.name {
            "decode.cu" => &DECODE,
            "attention.cu" => &ATTENTION,
            _ => &[PRELUDE, BLOCKS, MMA16],
        };
        Source { name: self.name, text: self.text, headers }
    }

    /// The compiler's options for an architecture.
    pub fn options(&self, architecture: &str) -> Vec<String> {
        // Functions without a space are the device's.
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_owned(),
            "-default-device".to_owned(),
        ];
        options.extend(self.defines.iter().cloned());
        options
    }

    /// Machine code for an architecture: from the cache of this process, that of the disk, or the compiler.
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`] or [`CudaError::Compile`].
    pub fn code(&self, architecture: &str) -> Result<Arc<Vec<u8>>, CudaError> {
        static CODE: Mutex<BTreeMap<String, Arc<Slot>>> = Mutex::new(BTreeMap::new());
        let nvrtc = Nvrtc::load()?;
        let key = self.key(architecture, nvrtc.version()).to_string();
        let slot =
            Arc::clone(CODE.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()).or_default());
        // Held while compiling: ranks want the same units at the same time, and one of them is enough.
        let mut code = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = &*code {
            return Ok(Arc::clone(code));
        }
        let file = folder().map(|folder| folder.join(format!("{key}.cubin")));
        let made = match file.as_deref().and_then(read) {
            Some(code) => code,
            None => {
                let made = nvrtc.compile(self.source(), &self.options(architecture))?;
                if let Some(file) = &file {
                    // Without it the next start takes a second longer.
                    let _ = write(file, &made);
                }
                made
            }
        };
        Ok(Arc::clone(code.insert(Arc::new(made))))
    }

    /// Compiles several units at the same time, so that [`Unit::code`] finds them. What does not compile is said there.
    pub fn prepare(units: &[Self], architecture: &str) {
        std::thread::scope(|scope| {
            for unit in units {
                scope.spawn(|| unit.code(architecture).is_ok());
            }
        });
    }

    /// Everything that the machine code depends on.
    fn key(&self, architecture: &str, version: (i32, i32)) -> Digest {
        let source = self.source();
        let mut text = format!("{version:?}\n{}\n{}\n", self.options(architecture).join(" "), source.text);
        for (name, header) in source.headers {
            text.push_str(name);
            text.push_str(header);
        }
        Digest::of(text.as_bytes())
    }
}

/// The architecture of a GPU as the compiler names it: with its own features from Hopper on.
pub fn architecture((major, minor): (i32, i32)) -> String {
    let own = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}

/// The user's cache, by the rules of the XDG base directory specification.
fn folder() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("shardrun").join("kernels"))
}

/// A file that is its contents and their digest; anything else is as good as none.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let digest = bytes.split_off(bytes.len().checked_sub(Digest::of(&[]).as_bytes().len())?);
    (Digest::of(&bytes).as_bytes()[..] == digest[..]).then_some(bytes)
}

/// Under another name first, so that no reader sees a part.
fn write(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
    std::fs::create_dir_all(folder)?;
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = std::fs::write(&partial, [code, Digest::of(code).as_bytes()].concat());
    let renamed = written.and_then(|()| std::fs::rename(&partial, path));
    if renamed.is_err() {
        // What matters is the first fault.
        let _ = std::fs::remove_file(&partial);
    }
    renamed
}
