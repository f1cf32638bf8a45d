//! The crate's error type, and the exit code that each kind of error means.

use formats::Shown;
use std::path::{Path, PathBuf};

/// What keeps a command from doing its work. Every message is one line that says what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A fault of a file, named by the formats crate.
    #[error(transparent)]
    Formats(#[from] formats::Error),
    /// A fault inside the named file.
    #[error("{path}: {source}")]
    In {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: Box<Error>,
    },
    /// A model of an architecture that is not in the table.
    #[error("{path}: general.architecture: {} is not supported; supported are {supported}", Shown(.found))]
    Architecture {
        /// The GGUF file.
        path: PathBuf,
        /// Its architecture.
        found: String,
        /// The table's names with their models.
        supported: String,
    },
    /// Tensors whose names nothing here knows.
    #[error(
        "{path}: tensor {}: not known for this model ({count} such tensors); check that the file is a {architecture} model, or leave them out with --allow-unknown",
        Shown(.tensor)
    )]
    UnknownTensor {
        /// The GGUF file.
        path: PathBuf,
        /// The first such tensor.
        tensor: String,
        /// How many there are.
        count: usize,
        /// What the file says it is.
        architecture: String,
    },
    /// A scale of a block, or a value, that is no finite number.
    #[error(
        "tensor {}: expected finite numbers, found {value} in {place}; the file is damaged or was quantised from a damaged model, get it again",
        Shown(.tensor)
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// NaN, inf or -inf.
        value: String,
        /// Its block, or, in types without blocks, its element.
        place: String,
    },
    /// A joined tensor that is not what its parts say.
    #[error(
        "tensor {joined}: expected the values of {parts}, found others from row {row} on; the file contradicts itself, convert the original model again"
    )]
    JoinedDiffers {
        /// The joined tensor.
        joined: String,
        /// The tensors that it should be made of.
        parts: String,
        /// The first row that differs.
        row: u64,
    },
    /// The output is there already.
    #[error(
        "{path}: there is already a {kind} of this name; nothing was touched; name another output or remove it"
    )]
    OutputExists {
        /// The output.
        path: PathBuf,
        /// File or directory.
        kind: &'static str,
    },
    /// An unfinished output file of the same name.
    #[error(
        "{path}: an earlier run was interrupted here, or one is going on now; remove this file if none is"
    )]
    PartialFile {
        /// The unfinished output.
        path: PathBuf,
    },
    /// An unfinished conversion of the same name.
    #[error(
        "{path}: an earlier run was interrupted here; run the same command with --resume to go on, or remove this directory"
    )]
    Unfinished {
        /// The unfinished directory.
        path: PathBuf,
    },
    /// Another run holds the lock.
    #[error("{path}: another run is at work here; wait for it, or name another output")]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// What lies there was made from something else or in another way.
    #[error(
        "{path}: is of another conversion: {}; run what began it, or remove it to start from the beginning",
        Shown(.difference)
    )]
    OtherConversion {
        /// File or directory.
        path: PathBuf,
        /// What was expected and found.
        difference: String,
    },
    /// An error after which the work can go on.
    #[error("{}; what is done is kept in {path}: run the same command with --resume to go on, or remove it",
        .source.without_leftovers())]
    Kept {
        /// The unfinished directory.
        path: PathBuf,
        /// What happened.
        source: Box<Error>,
    },
    /// `--rank` beyond `--ranks`.
    #[error("--rank {rank}: ranks are counted from 0 to {} (--ranks {ranks})", .ranks - 1)]
    NoSuchRank {
        /// What was asked for.
        rank: usize,
        /// How many there are.
        ranks: usize,
    },
    /// A rank that was made before.
    #[error("{path}: rank {rank} is there already; leave it out, keep it with --resume, or remove its files")]
    RankExists {
        /// Its record.
        path: PathBuf,
        /// The rank.
        rank: usize,
    },
    /// Ranks that `finish` does not find.
    #[error("{path}: not there yet: {ranks}; make or copy them here first (shardmill convert --rank R)")]
    MissingRanks {
        /// The directory.
        path: PathBuf,
        /// Which ones.
        ranks: String,
    },
    /// A rank file that is not what was written.
    #[error(
        "{path}: rank {rank}: the file is not what its manifest says; copy it again, or remove {origin} and make it again with --rank {rank}"
    )]
    RankDiffers {
        /// The directory.
        path: PathBuf,
        /// The rank.
        rank: usize,
        /// Its record.
        origin: String,
    },
    /// The folder for the output is not there.
    #[error("{path}: there is no such directory to write {name} into; create it first")]
    NoParent {
        /// The folder.
        path: PathBuf,
        /// The output's own name.
        name: String,
    },
    /// An output name that is none.
    #[error("{path}: not a name for an output; name a new file or directory")]
    OutputName {
        /// What was given.
        path: PathBuf,
    },
    /// Too little space on the disk.
    #[error(
        "{path}: {needed} bytes are needed ({}) and {free} are free ({}); free some space or write elsewhere",
        human_bytes(*.needed), human_bytes(*.free)
    )]
    NoSpace {
        /// Where it should go.
        path: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The operating system refused.
    #[error("{path}: {action}: {source}")]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried, with the number of bytes where there is one.
        action: String,
        /// Its answer.
        source: std::io::Error,
    },
    /// A tensor name that is not in the file.
    #[error("{path}: no tensor is called {}{}", Shown(.name), closest(.similar))]
    NoSuchTensor {
        /// File or directory.
        path: PathBuf,
        /// What was asked for.
        name: String,
        /// Names that look like it.
        similar: Vec<String>,
    },
    /// A file that is no GGUF file, rank file or checkpoint.
    #[error("{path}: {}", Shown(.what))]
    Input {
        /// The file.
        path: PathBuf,
        /// What it is and what to do.
        what: String,
    },
    /// Ctrl-C or SIGTERM.
    #[error("interrupted; nothing unfinished is left")]
    Interrupted,
}

impl Error {
    pub(crate) fn io(path: &Path, action: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), action: action.into(), source }
    }

    /// The same error, said of a file.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        Self::In { path: path.to_owned(), source: Box::new(self) }
    }

    /// A metadata key of a file that is missing or wrong.
    pub(crate) fn key(path: &Path, key: &str, expected: impl Into<String>, found: impl Into<String>) -> Self {
        let error =
            formats::Error::Key { key: key.to_owned(), expected: expected.into(), found: found.into() };
        Self::Formats(error.in_file(path))
    }

    /// A tensor of a file that is missing or wrong.
    pub(crate) fn tensor(
        path: &Path,
        tensor: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        let error = formats::Error::Tensor {
            tensor: tensor.to_owned(),
            expected: expected.into(),
            found: found.into(),
        };
        Self::Formats(error.in_file(path))
    }

    /// The exit code of a program that ends with this error: 130 for an interruption, otherwise 2.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted => 130,
            Self::Kept { source, .. } => source.exit_code(),
            _ => 2,
        }
    }

    /// Whether the same input gives the same error again, so that nothing of it is worth keeping.
    pub(crate) fn is_of_the_input(&self) -> bool {
        !matches!(
            self,
            Self::Io { .. }
                | Self::Interrupted
                | Self::NoSpace { .. }
                | Self::OutputExists { .. }
                | Self::Busy { .. }
        )
    }

    fn without_leftovers(&self) -> String {
        match self {
            Self::Interrupted => "interrupted".to_owned(),
            error => error.to_string(),
        }
    }
}

/// `1.50 GB`, `72.3 MB`, `512 B`.
pub(crate) fn human_bytes(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

fn closest(similar: &[String]) -> String {
    match similar {
        [] => "; `shardmill inspect` lists what there is".to_owned(),
        names => format!("; the closest names are {}", Shown(&names.join(", "))),
    }
}
