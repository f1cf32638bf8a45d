//! Every kernel source compiled to machine code for every architecture that is promised, on any machine: NVIDIA's compiler
//! library needs no GPU. It comes from PyPI, in a version of its own.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kernels::cuda::compile::{SHARED_BYTES, Unit};
use kernels::cuda::nvrtc::{LIBRARY_VARIABLE, Nvrtc};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
const ARCHITECTURES: [&str; 3] = ["sm_90a", "sm_100a", "sm_120a"];

/// The library, from the variable that names one or from PyPI; or a line on stderr that says why not.
fn nvrtc() -> Option<&'static Nvrtc> {
    static LOADED: OnceLock<Option<Nvrtc>> = OnceLock::new();
    LOADED.get_or_init(open).as_ref()
}

fn open() -> Option<Nvrtc> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE) {
        return Some(Nvrtc::open(path.into()).expect("the variable names an NVRTC library"));
    }
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join(PACKAGE);
    let found = library(&venv).map_or_else(|| install(&venv), Ok);
    match found {
        Ok(path) => Some(Nvrtc::open(path).expect("a library from PyPI can be loaded")),
        Err(why) => {
            // Straight to the stream: the test harness hides what the print macros write.
            let line = format!("NOT RUN without {PACKAGE} from PyPI: compiling the kernels ({why})\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            None
        }
    }
}

/// Under another name first: what an interrupted run leaves is no library.
fn install(venv: &Path) -> Result<PathBuf, String> {
    let partial = venv.with_extension("partial");
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&partial))?;
    let pip = partial.join("bin/pip");
    run(Command::new(pip).args(["install", "--quiet", "--disable-pip-version-check", PACKAGE]))?;
    std::fs::rename(&partial, venv).map_err(|error| error.to_string())?;
    library(venv).ok_or_else(|| format!("{PACKAGE} has no libnvrtc.so"))
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(format!("{}: {}", output.status, stderr.lines().last().unwrap_or_default()))
}

fn library(venv: &Path) -> Option<PathBuf> {
    let inside = |path: PathBuf, name: &str| {
        let entries = std::fs::read_dir(path).ok()?;
        entries
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)))
    };
    let packages = inside(venv.join("lib"), "python3")?.join("site-packages/nvidia");
    inside(inside(packages, "cu")?.join("lib"), "libnvrtc.so")
}

/// What the compiler says of one kernel.
#[derive(Debug, Default)]
struct Facts {
    kernel: String,
    spilled: u64,
    static_shared: usize,
}

fn facts(log: &str) -> Vec<Facts> {
    let number_before = |line: &str, unit: &str| -> u64 {
        let number =
            line.split(unit).next().and_then(|before| before.split([' ', ',']).rfind(|w| !w.is_empty()));
        number.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no number before {unit:?}: {line}"))
    };
    let mut all: Vec<Facts> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap().to_owned();
            all.push(Facts { kernel, ..Facts::default() });
        }
        let Some(last) = all.last_mut() else { continue };
        if line.contains("bytes spill stores") {
            last.spilled +=
                number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
        }
        if line.contains(" bytes smem") {
            last.static_shared = usize::try_from(number_before(line, " bytes smem")).unwrap();
        }
    }
    all
}

#[test]
fn every_kernel_compiles_without_spills_and_fits_shared_memory() {
    let Some(nvrtc) = nvrtc() else { return };
    let units: Vec<(&str, Unit)> = ARCHITECTURES
        .into_iter()
        .flat_map(|architecture| Unit::all(architecture).into_iter().map(move |unit| (architecture, unit)))
        .collect();
    let next = AtomicUsize::new(0);
    let kernels = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((architecture, unit)) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                    kernels.fetch_add(check(nvrtc, architecture, unit), Ordering::Relaxed);
                }
            });
        }
    });
    eprintln!("{} kernels for {ARCHITECTURES:?}", kernels.into_inner());
}

/// Compiles a unit and counts its kernels.
fn check(nvrtc: &Nvrtc, architecture: &str, unit: &Unit) -> usize {
    let mut options = unit.options(architecture);
    options.push("--ptxas-options=-v".to_owned());
    let what = format!("{} {:?} for {architecture}", unit.name, unit.defines);
    let (code, log) =
        nvrtc.compile_logged(unit.source(), &options).unwrap_or_else(|log| panic!("{what}: {log}"));
    assert!(code.starts_with(b"\x7fELF"), "{what}: machine code");
    let facts = facts(&log);
    assert!(!facts.is_empty(), "{what}: the compiler says nothing of its kernels: {log}");
    for Facts { kernel, spilled, static_shared } in &facts {
        let allowed = unit.spill_allowance(kernel);
        assert!(
            *spilled <= allowed,
            "{what}: {kernel} spills {spilled} bytes of registers, {allowed} allowed"
        );
        let shared = static_shared + Unit::dynamic_shared_bytes(kernel);
        assert!(
            shared <= shared_bytes(architecture),
            "{what}: {kernel} takes {shared} bytes of shared memory"
        );
    }
    facts.len()
}

/// What a block may have there. Kernels for GPUs with more of it are compiled otherwise.
fn shared_bytes(architecture: &str) -> usize {
    if architecture == "sm_120a" { SHARED_BYTES } else { 227 << 10 }
}

#[test]
fn a_source_that_is_wrong_does_not_compile_and_spills_are_seen() {
    let Some(nvrtc) = nvrtc() else { return };
    let mut unit = Unit::ops();
    unit.text = "extern \"C\" __global__ void broken(float *x) { *x = y; }";
    let refused = nvrtc.compile_logged(unit.source(), &unit.options("sm_90a")).unwrap_err();
    assert!(refused.contains("identifier \"y\" is undefined"), "{refused}");
    // Many values that live at once in a kernel that may have few registers.
    unit.text = "extern \"C\" __global__ void __launch_bounds__(1024, 2) crowded(float *x) {
        float v[64];
        for (int i = 0; i < 64; i++) v[i] = x[i * 32 + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 64; i++) for (int j = 0; j < 64; j++) x[i * 64 + j] = v[i] * v[j] + v[(i + j) % 64];
    }";
    let mut options = unit.options("sm_90a");
    options.push("--ptxas-options=-v".to_owned());
    let (_, log) = nvrtc.compile_logged(unit.source(), &options).unwrap();
    let facts = facts(&log);
    assert!(facts.len() == 1 && facts[0].spilled > 0, "{facts:?}: {log}");
}
