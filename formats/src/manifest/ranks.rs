//! Whether the manifests of all ranks fit together and fit the model: the one walk over them, for a runtime that stops at the
//! first fault and for a verifier that lists them all.

use super::{Layout, Manifest, RankManifest, Shard, TensorEntry};
use crate::{Error, LayerIdx, TensorName};
use std::collections::{HashMap, HashSet};

impl Manifest {
    /// Holds the manifests of all ranks, rank 0 first, against each other and the model: the same tensors on every rank, of one
    /// type and origin, whose parts make up the whole in the order of ranks, in a known layout, and none that the model has no
    /// layer for.
    ///
    /// # Errors
    /// The first of [`Manifest::rank_faults`].
    ///
    /// # Panics
    /// When there is not one manifest for each rank.
    pub fn check_ranks(&self, manifests: &[RankManifest]) -> Result<(), Error> {
        let manifests: Vec<&RankManifest> = manifests.iter().collect();
        self.rank_faults(&manifests).into_iter().next().map_or(Ok(()), Err)
    }

    /// Everything that [`Manifest::check_ranks`] refuses: [`Error::Manifest`] naming rank and tensor, or [`Error::Layout`].
    ///
    /// # Panics
    /// When there is not one manifest for each rank.
    pub fn rank_faults(&self, manifests: &[&RankManifest]) -> Vec<Error> {
        assert_eq!(manifests.len(), self.ranks, "one manifest for each rank");
        let (first, others) = manifests.split_first().expect("there is at least one rank");
        let mut faults = Vec::new();
        let layers = self.model.all_layers().count();
        for entry in &first.tensors {
            if let Some(LayerIdx(layer)) = TensorName::from_native(&entry.name).and_then(TensorName::layer)
                && layer >= layers
            {
                let what = format!("tensor {}", entry.name);
                faults.push(fault(what, format!("a layer below {layers}"), layer.to_string()));
            }
        }
        let head = first.tensor("lm_head.weight").is_some();
        if head == self.model.tie_word_embeddings {
            let expected = "true without lm_head and false with it".to_owned();
            faults.push(fault("tie_word_embeddings".to_owned(), expected, head.to_string()));
        }
        let by_name: Vec<HashMap<&str, &TensorEntry>> =
            others.iter().map(|m| m.tensors.iter().map(|t| (t.name.as_str(), t)).collect()).collect();
        let mut names = HashSet::new();
        for entry in &first.tensors {
            names.insert(entry.name.as_str());
            let parts = by_name.iter().map(|tensors| tensors.get(entry.name.as_str()).copied());
            faults.extend(entry.fault_over_ranks(parts));
        }
        for (rank, manifest) in (1..).zip(others) {
            let extra = manifest.tensors.iter().filter(|entry| !names.contains(entry.name.as_str()));
            faults.extend(extra.map(|entry| {
                let what = format!("tensor {} of rank {rank}", entry.name);
                fault(what, "none of this name, as on rank 0".to_owned(), "one".to_owned())
            }));
        }
        faults
    }
}

impl TensorEntry {
    /// Why rank 0's part of a tensor and those of ranks 1, 2, ... are not the tensor, each index once.
    fn fault_over_ranks<'a>(&'a self, others: impl Iterator<Item = Option<&'a Self>>) -> Option<Error> {
        if let Layout::Unknown(layout) = &self.layout {
            return Some(Error::Layout { tensor: self.name.clone(), layout: layout.clone() });
        }
        let of_rank = |rank: usize| format!("tensor {} of rank {rank}", self.name);
        let mut end = 0;
        for (rank, part) in std::iter::once(Some(self)).chain(others).enumerate() {
            let Some(part) = part else {
                let expected = "it there, as on rank 0".to_owned();
                return Some(fault(of_rank(rank), expected, "no such tensor".to_owned()));
            };
            let made = |entry: &Self| {
                let layout = String::from(entry.layout.clone());
                let Self { dtype, full_shape, transform, source, scale, .. } = entry;
                let times = scale.as_ref().map_or_else(String::new, |scale| format!(" times {scale}"));
                format!(
                    "{dtype} {full_shape} in layout {layout}, {transform:?} of {}{times}",
                    source.join(" and ")
                )
            };
            let told = |entry: &'a Self| {
                let Self { full_shape, transform, source, layout, scale, .. } = entry;
                (entry.dtype, full_shape, *transform, source, layout, scale)
            };
            let same = told(part) == told(self);
            if !same {
                return Some(fault(of_rank(rank), format!("{}, as on rank 0", made(self)), made(part)));
            }
            match (self.shard, part.shard) {
                (Shard::Whole(_), Shard::Whole(_)) => {
                    if self.blake3.zip(part.blake3).is_some_and(|(a, b)| a != b) {
                        let expected = "the bytes of rank 0's, because it is replicated".to_owned();
                        return Some(fault(of_rank(rank), expected, "others".to_owned()));
                    }
                }
                (Shard::Cut { axis, .. }, Shard::Cut { axis: same, start, len }) if axis == same => {
                    if start != end {
                        let expected =
                            format!("a part from {end} of axis {axis}, where the rank before ends");
                        return Some(fault(of_rank(rank), expected, format!("one from {start}")));
                    }
                    end = start.saturating_add(len);
                }
                (expected, found) => {
                    return Some(fault(of_rank(rank), expected.to_string(), found.to_string()));
                }
            }
        }
        let Shard::Cut { axis, .. } = self.shard else { return None };
        let dim = self.full_shape.dims()[axis];
        (end != dim).then(|| {
            let what = format!("tensor {}", self.name);
            fault(what, format!("parts of all {dim} indices of axis {axis}"), format!("parts of {end}"))
        })
    }
}

fn fault(field: String, expected: String, found: String) -> Error {
    Error::Manifest { field, expected, found }
}
