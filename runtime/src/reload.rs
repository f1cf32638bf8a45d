//! Other weights of the same model under a running engine: what is asked for, what came of it, and what keeps it from happening.

use crate::Error;
use crate::rank::LoadFault;
use formats::Shown;
use formats::manifest::{MANIFEST_FILE, Manifest};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What is to be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReloadRequest {
    /// The folder of the checkpoint; `None`: the one that is served.
    pub dir: Option<PathBuf>,
    /// These ranks, also where their digests are as before; no other may have changed then. `None`: those that have changed.
    pub ranks: Option<Vec<usize>>,
    /// Whether every byte is held against its digest.
    pub verify: bool,
    /// Whether the old weights go before the new ones come, also where there is room for both.
    pub in_place: bool,
}

impl Default for ReloadRequest {
    fn default() -> Self {
        Self { dir: None, ranks: None, verify: true, in_place: false }
    }
}

/// How new weights came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// No digest had changed.
    Nothing,
    /// Beside the old ones: requests that had begun end on those, and none waited.
    Beside,
    /// In their place: what had begun was let end first, and what came meanwhile waited.
    InPlace,
}

/// What a reload did.
#[derive(Clone, Debug, Serialize)]
pub struct ReloadReport {
    /// The folder that is served now.
    pub dir: PathBuf,
    /// Which set of weights is served now, counted from 1.
    pub generation: u64,
    /// How they came.
    pub how: How,
    /// Why they came in place, where nobody asked for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_in_place: Option<String>,
    /// From the request to the answer.
    pub seconds: f64,
    /// Of them, those in which requests waited; 0 but in place.
    pub seconds_without_weights: f64,
    /// All ranks.
    pub ranks: Vec<RankReport>,
}

/// What became of a rank.
#[derive(Clone, Debug, Serialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Whether it was loaded; otherwise it is as it was.
    pub loaded: bool,
    /// Bytes of its file.
    pub bytes: u64,
    /// Seconds that reading it took, or mapping it where it was not read.
    pub seconds: f64,
    /// Bytes read in a second, in GB; null where the file was mapped and not read.
    pub gb_per_s: Option<f64>,
    /// Whether its bytes were held against their digests.
    pub verified: bool,
    /// The file's digest before.
    pub old_digest: String,
    /// The file's digest now.
    pub new_digest: String,
}

/// Whose matter it is that a reload did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Another reload, or what was asked for contradicts what has changed: the server is not in a state for it.
    Conflict,
    /// The checkpoint: it cannot be served here.
    Checkpoint,
    /// A field of the request.
    Request(&'static str),
    /// The engine has stopped.
    Stopped,
}

/// Why a reload did not happen. The old weights go on, unless the engine has stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{cause}", rank_text(*.rank))]
pub struct ReloadError {
    /// Whose matter it is.
    pub obstacle: Obstacle,
    /// The rank that it was, where it was one.
    pub rank: Option<usize>,
    /// The tensor that it was, or several, where that is known.
    pub tensor: Option<String>,
    /// What was wrong.
    pub cause: String,
}

fn rank_text(rank: Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| format!("rank {rank}: "))
}

impl ReloadError {
    /// A fault of no rank in particular.
    pub fn new(obstacle: Obstacle, cause: impl Into<String>) -> Self {
        Self { obstacle, rank: None, tensor: None, cause: cause.into() }
    }

    /// The engine has stopped.
    pub(crate) fn stopped() -> Self {
        Self::new(Obstacle::Stopped, "the engine has stopped")
    }
}

impl From<LoadFault> for ReloadError {
    fn from(LoadFault { rank, error }: LoadFault) -> Self {
        let tensor = tensor_of(&error);
        Self { obstacle: Obstacle::Checkpoint, rank, tensor, cause: error.to_string() }
    }
}

impl From<Error> for ReloadError {
    fn from(error: Error) -> Self {
        LoadFault::from(error).into()
    }
}

impl From<formats::Error> for ReloadError {
    fn from(error: formats::Error) -> Self {
        Error::from(error).into()
    }
}

/// The tensor that an error is about.
fn tensor_of(error: &Error) -> Option<String> {
    fn of(error: &formats::Error) -> Option<&str> {
        use formats::Error as E;
        match error {
            E::In { source, .. } => of(source),
            E::Tensor { tensor, .. }
            | E::Block { tensor, .. }
            | E::TensorBytes { tensor, .. }
            | E::Layout { tensor, .. }
            | E::OtherLayout { tensor, .. }
            | E::Chunk { tensors: tensor, .. } => Some(tensor),
            _ => None,
        }
    }
    match error {
        Error::Format(error) => of(error).map(str::to_owned),
        Error::Weight { tensor, .. } => Some(tensor.clone()),
        _ => None,
    }
}

/// Whether a checkpoint is other weights of the same model, cut for as many ranks, with the same words around them.
///
/// # Errors
/// [`ReloadError`] naming the first field or file that differs.
pub fn check_same_model(served: &Manifest, new: &Manifest) -> Result<(), ReloadError> {
    let refused = |field: &str, expected: String, found: String| {
        let cause = format!(
            "{MANIFEST_FILE}: {field}: expected {}, as what is served, found {}; start another server for it",
            Shown(&expected),
            Shown(&found)
        );
        Err(ReloadError::new(Obstacle::Checkpoint, cause))
    };
    if served.ranks != new.ranks {
        return refused("ranks", served.ranks.to_string(), new.ranks.to_string());
    }
    if served.model != new.model {
        // By way of text, in which numbers of 32 bits are as short as they are in the file.
        let json = |manifest: &Manifest| -> Value {
            let text = serde_json::to_string(&manifest.model).unwrap_or_default();
            serde_json::from_str(&text).unwrap_or_default()
        };
        let (field, expected, found) = difference("model", &json(served), &json(new));
        return refused(&field, expected, found);
    }
    let files = |manifest: &Manifest| -> BTreeMap<String, String> {
        manifest.files.iter().map(|side| (side.file.clone(), side.blake3.to_string())).collect()
    };
    let (old, new) = (files(served), files(new));
    let names = old.keys().chain(new.keys());
    if let Some(name) = names.into_iter().find(|name| old.get(*name) != new.get(*name)) {
        let text = |files: &BTreeMap<String, String>| {
            files.get(name).map_or("no such file".to_owned(), |digest| format!("digest {digest}"))
        };
        return refused(&format!("files, {name}"), text(&old), text(&new));
    }
    Ok(())
}

/// The path of the first difference, and what is on either side of it.
fn difference(path: &str, old: &Value, new: &Value) -> (String, String, String) {
    let deeper = match (old, new) {
        (Value::Object(old), Value::Object(new)) => old.iter().find_map(|(name, value)| {
            let other = new.get(name).unwrap_or(&Value::Null);
            (value != other).then(|| difference(&format!("{path}.{name}"), value, other))
        }),
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => {
            let pair = old.iter().zip(new).enumerate().find(|(_, (old, new))| old != new);
            pair.map(|(at, (old, new))| difference(&format!("{path}[{at}]"), old, new))
        }
        (Value::Array(old), Value::Array(new)) => {
            Some((path.to_owned(), format!("{} of them", old.len()), new.len().to_string()))
        }
        _ => None,
    };
    deeper.unwrap_or_else(|| (path.to_owned(), old.to_string(), new.to_string()))
}

/// Which ranks are to be loaded when those of `changed` have other digests than before.
///
/// # Errors
/// [`ReloadError`] when ranks are named that there are not, or some that have changed are left out.
pub fn chosen(request: &ReloadRequest, changed: &[usize], ranks: usize) -> Result<Vec<usize>, ReloadError> {
    let Some(named) = &request.ranks else { return Ok(changed.to_vec()) };
    if let Some(rank) = named.iter().find(|&&rank| rank >= ranks) {
        let cause = format!("ranks: expected numbers below {ranks}, found {rank}");
        return Err(ReloadError::new(Obstacle::Request("ranks"), cause));
    }
    if let Some(&rank) = changed.iter().find(|rank| !named.contains(rank)) {
        let cause = "its digest has changed too, and it is not among those named: weights of two checkpoints do not belong together; name it as well, or none";
        return Err(ReloadError { rank: Some(rank), ..ReloadError::new(Obstacle::Conflict, cause) });
    }
    let mut named = named.clone();
    named.sort_unstable();
    named.dedup();
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ranks_that_changed_are_not_left_out() {
        let asked = |ranks: Option<Vec<usize>>| ReloadRequest { ranks, ..ReloadRequest::default() };
        assert_eq!(chosen(&asked(None), &[1, 3], 4), Ok(vec![1, 3]));
        assert_eq!(
            chosen(&asked(Some(vec![3, 0, 1, 3])), &[1, 3], 4),
            Ok(vec![0, 1, 3]),
            "0 again, though it is the same"
        );
        let error = chosen(&asked(Some(vec![1])), &[1, 3], 4).unwrap_err();
        assert_eq!((error.obstacle, error.rank), (Obstacle::Conflict, Some(3)));
        let error = chosen(&asked(Some(vec![4])), &[], 4).unwrap_err();
        assert_eq!(error.obstacle, Obstacle::Request("ranks"));
    }

    #[test]
    fn a_difference_has_a_path() {
        let old = json!({"a": [{"b": 1}, {"b": 2}], "c": null, "d": [1]});
        for (new, path) in [
            (json!({"a": [{"b": 1}, {"b": 3}], "c": null, "d": [1]}), "model.a[1].b"),
            (json!({"a": [{"b": 1}, {"b": 2}], "c": {"x": 1}, "d": [1]}), "model.c"),
            (json!({"a": [{"b": 1}, {"b": 2}], "c": null, "d": [1, 2]}), "model.d"),
        ] {
            assert_eq!(difference("model", &old, &new).0, path);
        }
    }
}
