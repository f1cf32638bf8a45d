//! The compiler: NVIDIA's NVRTC, loaded when it is needed.
#![expect(unsafe_code, reason = "loading a library and calling into it")]

use super::CudaError;
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names the library, where the loader does not find it by itself.
pub const LIBRARY_VARIABLE: &str = "SHARDRUN_NVRTC";

/// A loaded compiler.
#[derive(Debug)]
pub struct Nvrtc {
    library: Library,
    /// Its own second library, which it looks up by name alone: one that is loaded already is found wherever it lies.
    _builtins: Option<Library>,
    version: (i32, i32),
}

type Program = *mut c_void;

/// One source to compile.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// What messages call it.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
    /// What it may include: names and texts.
    pub headers: &'a [(&'a str, &'a str)],
}

impl Nvrtc {
    /// The compiler of this process.
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`] when no library is found.
    pub fn load() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<Option<Nvrtc>> = OnceLock::new();
        LOADED
            .get_or_init(|| candidates().into_iter().find_map(Self::open))
            .as_ref()
            .ok_or(CudaError::NoCompiler { variable: LIBRARY_VARIABLE })
    }

    /// The compiler in one library; `None` when that is none.
    pub fn open(path: PathBuf) -> Option<Self> {
        let builtins = builtins_beside(&path);
        // SAFETY: NVRTC's initialisers have no requirements.
        let library = unsafe { Library::new(path) }.ok()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the symbol has this type in every version of NVRTC.
        let version = unsafe {
            library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(b"nvrtcVersion\0")
        };
        // SAFETY: two pointers to integers.
        if unsafe { version.ok()?(&raw mut major, &raw mut minor) } != 0 {
            return None;
        }
        Some(Self { library, _builtins: builtins, version: (major, minor) })
    }

    /// Major and minor.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Machine code for one architecture, e.g. `sm_90a`.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's first complaint.
    pub fn compile(&self, source: Source<'_>, options: &[String]) -> Result<Vec<u8>, CudaError> {
        let refusal = |why: String| CudaError::Compile {
            file: source.name.to_owned(),
            options: options.join(" "),
            version: self.version,
            why,
        };
        self.compile_logged(source, options).map(|(code, _)| code).map_err(refusal)
    }

    /// Machine code and what the compiler says about it; or only the latter.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile_logged(
        &self,
        source: Source<'_>,
        options: &[String],
    ) -> Result<(Vec<u8>, String), String> {
        let text = |text: &str| CString::new(text).map_err(|_| format!("{text:?} has a zero byte in it"));
        let (name, code) = (text(source.name)?, text(source.text)?);
        let header_names =
            source.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let header_texts =
            source.headers.iter().map(|(_, code)| text(code)).collect::<Result<Vec<_>, _>>()?;
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (header_names, header_texts, options) =
            (pointers(&header_names), pointers(&header_texts), (pointers(&options), options));

        let mut program: Program = std::ptr::null_mut();
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        // SAFETY: zero-terminated texts and as many headers as it is told, all alive until it returns.
        let created = unsafe {
            self.symbol::<Create>(b"nvrtcCreateProgram\0")?(
                &raw mut program,
                code.as_ptr(),
                name.as_ptr(),
                c_int::try_from(header_names.len()).map_err(|_| "too many headers".to_owned())?,
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        self.check(created)?;
        let result = self.compile_program(program, &options.0);
        // SAFETY: created above and not used again.
        let destroyed = unsafe {
            self.symbol::<unsafe extern "C" fn(*mut Program) -> c_int>(b"nvrtcDestroyProgram\0")?(
                &raw mut program,
            )
        };
        self.check(destroyed)?;
        result
    }

    fn compile_program(
        &self,
        program: Program,
        options: &[*const c_char],
    ) -> Result<(Vec<u8>, String), String> {
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        let count = c_int::try_from(options.len()).map_err(|_| "too many options".to_owned())?;
        // SAFETY: a live program and as many zero-terminated options as it is told.
        let compiled =
            unsafe { self.symbol::<Compile>(b"nvrtcCompileProgram\0")?(program, count, options.as_ptr()) };
        let log = self.bytes(program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        if compiled != 0 {
            let why = self.check(compiled).err().unwrap_or_default();
            return Err(if log.is_empty() { why } else { log });
        }
        Ok((self.bytes(program, b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")?, log))
    }

    /// What a pair of functions for size and contents gives.
    fn bytes(&self, program: Program, size: &[u8], contents: &[u8]) -> Result<Vec<u8>, String> {
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Contents = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        let mut len = 0;
        // SAFETY: a live program and a pointer to a size.
        self.check(unsafe { self.symbol::<Size>(size)?(program, &raw mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: as many bytes as the library asked for.
        self.check(unsafe { self.symbol::<Contents>(contents)?(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn check(&self, result: c_int) -> Result<(), String> {
        if result == 0 {
            return Ok(());
        }
        type Text = unsafe extern "C" fn(c_int) -> *const c_char;
        // SAFETY: it takes any number and returns a static string.
        let text = unsafe { CStr::from_ptr(self.symbol::<Text>(b"nvrtcGetErrorString\0")?(result)) };
        Err(text.to_string_lossy().into_owned())
    }

    /// A function of the library.
    fn symbol<T>(&self, name: &[u8]) -> Result<libloading::Symbol<'_, T>, String> {
        // SAFETY: callers name a function of NVRTC with the type that its headers have had since version 11.
        unsafe { self.library.get(name) }.map_err(|error| error.to_string())
    }
}

fn builtins_beside(path: &Path) -> Option<Library> {
    let is_builtins = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so"))
    };
    let mut beside = std::fs::read_dir(path.parent()?).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    // SAFETY: NVRTC's own library has no initialisers with requirements.
    unsafe { Library::new(beside.find(is_builtins)?) }.ok()
}

/// Where the library may be: the variable, the loader's folders, toolkits in their usual places.
fn candidates() -> Vec<PathBuf> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE) {
        return vec![path.into()];
    }
    let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = toolkits.chain([PathBuf::from("/usr/local/cuda")]);
    let in_toolkits = toolkits.flat_map(|toolkit| names.map(|name| toolkit.join("lib64").join(name)));
    names.map(PathBuf::from).into_iter().chain(in_toolkits).collect()
}
