//! One tensor, whole and as f32, from a GGUF file or a checkpoint, into a safetensors file.

mod rows;

use crate::Error;
use crate::plan::{Options, Plan, UnknownTensors, WeightLayout};
use crate::similar::{both_spellings, closest};
use crate::work::Control;
use crate::writer::{Existing, NewFile};
use formats::Shape;
use formats::checkpoint::{Checkpoint, RankShard};
use formats::gguf::GgufSet;
use formats::manifest::ExpertCut;
use formats::name::TensorName;
use rows::{CheckpointRows, Rows};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// What was written.
#[derive(Clone, Debug, Serialize)]
pub struct Extracted {
    /// The name that was asked for, and the key in the file.
    pub tensor: String,
    /// Its shape.
    pub shape: Shape,
    /// The tensors that it was made from, with their types.
    pub made_from: Vec<String>,
    /// The file.
    #[serde(serialize_with = "crate::lossy_path")]
    pub out: PathBuf,
    /// Its size.
    pub bytes: u64,
}

/// Writes tensor `name` of `input` as f32 to the safetensors file `out`.
///
/// `input` is a GGUF file of any architecture (any part of a split one) or a checkpoint's directory. A GGUF name means the
/// file's own tensor; a native name means what a checkpoint holds, kv_b_proj with its rounding to BF16 included.
///
/// # Errors
/// [`Error::NoSuchTensor`] with the closest names, [`Error::Interrupted`] with nothing left behind, or an error naming the file and what is wrong with it.
pub fn extract(
    input: &Path,
    name: &str,
    out: &Path,
    existing: Existing,
    control: &Control,
) -> Result<Extracted, Error> {
    if let (Ok(from), Ok(to)) = (input.canonicalize(), out.canonicalize())
        && from == to
    {
        return Err(Error::io(
            out,
            "cannot write",
            std::io::Error::other("it is the input; name another output"),
        ));
    }
    let to = Output { name, path: out, existing };
    if input.is_dir() {
        let checkpoint = Checkpoint::open(input)?;
        let ranks = (0..checkpoint.manifest().ranks)
            .map(|rank| checkpoint.rank(rank))
            .collect::<Result<Vec<_>, _>>()?;
        let model = &checkpoint.manifest().model;
        let reader = CheckpointRows::new(&ranks, &model.attention);
        let rows = match TensorName::parse(name) {
            Some(parsed) => reader.rows(parsed)?,
            None => None,
        };
        return match rows {
            Some(rows) => {
                let unchanged = || Ok(ranks.iter().try_for_each(RankShard::check_unchanged)?);
                to.write(rows, control, unchanged)
            }
            None => {
                let names = ranks[0].manifest().tensors.iter().map(|t| t.name.clone());
                Err(no_such_tensor(input, name, both_spellings(names)))
            }
        };
    }
    let set = GgufSet::open(input)?;
    let unchanged = || Ok(set.check_unchanged()?);
    if let Some(view) = set.view(name)? {
        let made_from = vec![format!("{name} ({})", view.dtype())];
        return to.write(Rows::view(view, made_from), control, unchanged);
    }
    let own_names = set.tensors().map(|(_, info)| info.name.clone());
    if TensorName::from_native(name).is_none() {
        return Err(no_such_tensor(input, name, own_names));
    }
    let options = Options {
        ranks: 1,
        experts: ExpertCut::Tensor,
        unknown: UnknownTensors::Skip,
        layout: WeightLayout::Ggml,
    };
    let plan = Plan::new(&set, options)?;
    match plan.tensors.iter().find(|tensor| tensor.name == name) {
        Some(tensor) => to.write(Rows::planned(&set, tensor)?, control, unchanged),
        None => {
            let natives = plan.tensors.iter().map(|tensor| tensor.name.clone());
            Err(no_such_tensor(input, name, own_names.chain(natives)))
        }
    }
}

fn no_such_tensor(path: &Path, name: &str, names: impl Iterator<Item = String>) -> Error {
    Error::NoSuchTensor { path: path.to_owned(), name: name.to_owned(), similar: closest(name, names) }
}

/// What is to be written.
struct Output<'a> {
    /// The tensor's name in the file.
    name: &'a str,
    path: &'a Path,
    existing: Existing,
}

impl Output<'_> {
    /// Streams the rows: a stacked expert tensor of a large model is larger than memory. `unchanged` says at the end whether what
    /// was read still is what it was.
    fn write(
        self,
        mut rows: Rows<'_>,
        control: &Control,
        unchanged: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Extracted, Error> {
        /// Values that are decoded at a time, about.
        const AT_ONCE: u64 = 1 << 21;
        let Self { name, path: out, existing } = self;
        let shape = rows.shape().clone();
        let values = shape.elements();
        let Some(data_bytes) = values.checked_mul(4) else {
            return Err(Error::tensor(out, name, "a size that fits 64 bits", shape.to_string()));
        };
        let header = header(name, &shape, data_bytes);
        let bytes = header.len() as u64 + data_bytes;
        let (file, handle) = NewFile::create(out, existing)?;
        file.require_space(bytes)?;
        let io = |e| Error::io(file.partial(), format!("cannot write {bytes} bytes"), e);
        let mut writer = BufWriter::with_capacity(1 << 20, &handle);
        writer.write_all(&header).map_err(io)?;
        let step = (AT_ONCE / shape.row_len().max(1)).max(1);
        let rows_with_values = if values == 0 { 0 } else { shape.rows() };
        let mut row = 0;
        while row < rows_with_values {
            control.check()?;
            let end = (row + step).min(rows_with_values);
            for value in rows.decode(row..end)? {
                writer.write_all(&value.to_le_bytes()).map_err(io)?;
            }
            row = end;
        }
        writer.flush().map_err(io)?;
        drop(writer);
        unchanged()?;
        file.commit(&handle)?;
        Ok(Extracted {
            tensor: name.to_owned(),
            shape,
            made_from: rows.made_from,
            out: out.to_owned(),
            bytes,
        })
    }
}

fn header(name: &str, shape: &Shape, data_bytes: u64) -> Vec<u8> {
    #[derive(Serialize)]
    struct Entry<'a> {
        dtype: &'static str,
        shape: &'a Shape,
        data_offsets: [u64; 2],
    }
    let entry = Entry { dtype: "F32", shape, data_offsets: [0, data_bytes] };
    let json =
        serde_json::to_vec(&BTreeMap::from([(name, entry)])).expect("names and numbers always become JSON");
    let padded = json.len().next_multiple_of(8);
    let mut bytes = (padded as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(&json);
    bytes.resize(8 + padded, b' ');
    bytes
}
