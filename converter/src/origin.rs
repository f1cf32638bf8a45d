//! What a rank file was made from and how, so that files of different conversions are never put together.

use crate::Error;
use crate::plan::{Plan, WeightLayout};
use formats::Digest;
use formats::gguf::GgufSet;
use formats::layout::Layout;
use formats::manifest::ExpertCut;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;

/// The program that writes.
pub(crate) const TOOL: &str = concat!("shardmill ", env!("CARGO_PKG_VERSION"));

/// Source, options and program of a conversion. Two that are equal make the same bytes, unless someone changed a source
/// behind its header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Origin {
    tool: String,
    ranks: usize,
    experts: ExpertCut,
    layout: Layout,
    sources: Vec<Source>,
    /// Of everything that the headers and options lead to.
    plan: Digest,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    name: String,
    bytes: u64,
    header: Digest,
}

/// An [`Origin`] on this machine: with the times at which the sources were last written, in seconds and nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stamp {
    pub(crate) origin: Origin,
    modified: Vec<(i64, i64)>,
}

impl Origin {
    /// # Errors
    /// [`Error::Io`] naming a source that cannot be read.
    pub(crate) fn new(set: &GgufSet, plan: &Plan) -> Result<Self, Error> {
        let sources = set.parts().iter().map(|part| {
            let mut header = vec![0; part.file.data_start.min(part.file.len()) as usize];
            let read = |bytes: &mut [u8]| fs::File::open(&part.path)?.read_exact_at(bytes, 0);
            read(&mut header).map_err(|e| Error::io(&part.path, "cannot read its header", e))?;
            let name = part.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok(Source { name, bytes: part.file.len(), header: Digest::of(&header) })
        });
        let mut hasher = blake3::Hasher::new();
        let layouts: Vec<(u64, u64)> = plan.layouts.iter().map(|l| (l.data_start, l.bytes)).collect();
        write!(
            hasher,
            "{:?}",
            (&plan.options, &plan.model.name, &plan.model.config, &plan.tensors, &plan.skipped, layouts)
        )
        .expect("a hasher takes every byte");
        Ok(Self {
            tool: TOOL.to_owned(),
            ranks: plan.options.ranks,
            experts: plan.options.experts,
            layout: match plan.options.layout {
                WeightLayout::Ggml => Layout::Ggml,
                WeightLayout::Mma16 => Layout::Mma16,
            },
            sources: sources.collect::<Result<_, Error>>()?,
            plan: hasher.finalize().into(),
        })
    }

    /// What is different in a conversion that was found, in words; `None` when nothing is.
    pub(crate) fn difference(&self, found: &Self) -> Option<String> {
        if self == found {
            return None;
        }
        if self.tool != found.tool {
            return Some(format!("expected one by {}, found one by {}", self.tool, found.tool));
        }
        if (self.ranks, self.experts, &self.layout) != (found.ranks, found.experts, &found.layout) {
            let options = |origin: &Self| {
                let experts = match origin.experts {
                    ExpertCut::Tensor => "tensor",
                    ExpertCut::Expert => "expert",
                };
                // The flag's word is the layout's name without its version.
                let layout = origin.layout.name().split('.').next().unwrap_or_default();
                format!("--ranks {} --experts {experts} --layout {layout}", origin.ranks)
            };
            return Some(format!("expected one with {}, found one with {}", options(self), options(found)));
        }
        let names = |origin: &Self| {
            origin
                .sources
                .iter()
                .map(|s| format!("{} ({} bytes)", s.name, s.bytes))
                .collect::<Vec<_>>()
                .join(", ")
        };
        if names(self) != names(found) {
            return Some(format!("expected one of {}, found one of {}", names(self), names(found)));
        }
        if self.sources != found.sources {
            return Some(format!("the header of {} is another one now", names(self)));
        }
        Some("it was made with other options".to_owned())
    }
}

impl Stamp {
    /// # Errors
    /// [`Error::Io`] naming a source that cannot be read.
    pub(crate) fn new(set: &GgufSet, plan: &Plan) -> Result<Self, Error> {
        let modified = set.parts().iter().map(|part| part.state.modified()).collect();
        Ok(Self { origin: Origin::new(set, plan)?, modified })
    }

    /// As [`Origin::difference`], and whether a source was written since.
    pub(crate) fn difference(&self, found: &Self) -> Option<String> {
        let changed = || (self != found).then(|| "the source was written to since".to_owned());
        self.origin.difference(&found.origin).or_else(changed)
    }
}
