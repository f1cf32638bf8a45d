//! What an engine says of the weights that it serves.

use serde::Serialize;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// What is served now.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The checkpoint's folder, as it was named.
    pub dir: PathBuf,
    /// Which set of weights this is, counted from 1.
    pub generation: u64,
    /// Digest of the rank files' digests: equal for equal weights.
    pub digest: String,
    /// Whether a reload runs.
    pub reloading: bool,
    /// All ranks.
    pub ranks: Vec<RankStatus>,
}

/// A rank.
#[derive(Clone, Debug, Serialize)]
pub struct RankStatus {
    /// The rank.
    pub rank: usize,
    /// Its file.
    pub file: PathBuf,
    /// Bytes of the file.
    pub bytes: u64,
    /// The file's digest, from its manifest.
    pub digest: String,
    /// When it was loaded, in seconds since 1970.
    pub loaded: u64,
    /// Seconds that reading it took, or mapping it where it was not read.
    pub seconds: f64,
    /// Bytes read in a second, in GB; null where the file was mapped and not read.
    pub gb_per_s: Option<f64>,
    /// Whether its bytes were held against their digests: `when loaded`, `before` (there is a record of this very file) or `no`.
    pub verified: &'static str,
    /// What reading it again has shown last; null before the first time.
    pub scrubbed: Option<Scrubbed>,
}

/// What reading a rank's file again has shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Scrubbed {
    /// When that ended, in seconds since 1970.
    pub at: u64,
    /// What was wrong; null where nothing was.
    pub fault: Option<String>,
}

/// Seconds since 1970.
pub(crate) fn unix(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
