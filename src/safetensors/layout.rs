//! The files of a target: what stands in each, and where each tensor goes.

use super::checkpoint::SafetensorsCheckpoint;
use super::header::{Header, Placed};
use crate::checkpoint::TensorInfo;
use crate::digest;
use crate::error::{Error, Escaped, Result, Rule, hex};
use crate::index::{TargetFile, Tensor, ValidatedIndex};
use std::collections::{BTreeMap, BTreeSet};

/// A file to be written: its content, then tensors.
pub(crate) struct Output {
    /// Its name; empty for a lone file.
    pub name: String,
    /// The bytes before its tensors.
    pub content: Vec<u8>,
    data_size: u64,
}

impl Output {
    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.data_size.saturating_add(self.content.len() as u64)
    }
}

/// File and first byte of each tensor of the pair; `None` for a tensor that is not selected.
pub(crate) type Places = Vec<Option<(usize, u64)>>;

/// Compares the files of a checkpoint with those of a pair's target: their names, the bytes before their data, and the shard index.
/// A pair without files names none to compare.
///
/// # Errors
/// [`Rule::FileContentDigest`] for the first file that is missing or differs, and for one that the pair does not have;
/// [`Error::Io`].
pub(crate) fn check_target_files(index: &ValidatedIndex, target: &SafetensorsCheckpoint) -> Result<()> {
    if index.files().len() == 0 {
        return Ok(());
    }
    let mut own = target.file_names().collect::<BTreeSet<_>>();
    for file in index.files() {
        content_of(Some(target), "target", Rule::FileContentDigest, &file)?;
        own.remove(file.name);
    }
    match own.first() {
        None => Ok(()),
        Some(name) => {
            let expected = format_args!("the {} files of the pair", index.files().len());
            Err(Rule::FileContentDigest.broken(expected, format_args!("{} too", shown(name))))
        }
    }
}

/// The `__metadata__` of a pair's target files, all in one; of two files with different values for a key, the first's.
///
/// # Errors
/// [`Rule::BaseFile`] if the base, or none, lacks a file whose header the target shares; [`Rule::FileTensors`] for a header
/// that is none.
pub(crate) fn target_metadata(index: &ValidatedIndex, base: Option<&SafetensorsCheckpoint>) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for file in index.files().filter(|file| file.kind.has_tensors()) {
        let of_base;
        let content = match file.content {
            Some(content) => content,
            None => {
                of_base = content_of(base, "base", Rule::BaseFile, &file)?;
                &of_base
            }
        };
        let header = Header::parse(content).map_err(|reason| Rule::FileTensors.broken("a safetensors header", reason))?;
        for (key, value) in header.metadata {
            all.entry(key).or_insert(value);
        }
    }
    Ok(all)
}

/// The files that the pair tells of, contents and places of tensors checked.
fn plan(index: &ValidatedIndex, base: Option<&SafetensorsCheckpoint>) -> Result<(Vec<Output>, Places)> {
    let mut places: Places = vec![None; index.tensor_count()];
    let mut outputs = Vec::new();
    for file in index.files() {
        let content = match file.content {
            Some(content) => content.to_vec(),
            None => content_of(base, "base", Rule::BaseFile, &file)?,
        };
        let mut data_size = 0;
        if file.kind.has_tensors() {
            let at = |found: &dyn std::fmt::Display| {
                Rule::FileTensors.broken(format_args!("file {:?} to hold tensors of the pair, each once", file.name), found)
            };
            let header = Header::parse(&content).map_err(|reason| at(&reason))?;
            data_size = header.data_size;
            for placed in header.tensors {
                let info = &placed.info;
                let name = Escaped(&info.name);
                let tensor = index.find(&info.name).ok_or_else(|| at(&format_args!("tensor {name}, which is not in it")))?;
                if tensor.dtype != info.dtype || tensor.shape != info.shape {
                    return Err(at(&format_args!("tensor {name} of {} {:?}", info.dtype, info.shape)));
                }
                if places[tensor.place].replace((outputs.len(), header.content_size + placed.offset)).is_some() {
                    return Err(at(&format_args!("tensor {name} twice")));
                }
            }
        }
        outputs.push(Output { name: file.name.to_owned(), content, data_size });
    }
    if let Some(place) = places.iter().position(Option::is_none) {
        let name = index.tensor(place).name;
        return Err(Rule::FileTensors.broken("every tensor in a file", "one that is in none").in_tensor(name));
    }
    Ok((outputs, places))
}

/// The name of a file of a pair, in words where it is empty.
fn shown(name: &str) -> &str {
    if name.is_empty() { "a lone safetensors file" } else { name }
}

/// The content of a checkpoint's file, compared with the one that a pair names; `rule` is broken if they differ.
fn content_of(checkpoint: Option<&SafetensorsCheckpoint>, whose: &str, rule: Rule, file: &TargetFile<'_>) -> Result<Vec<u8>> {
    let TargetFile { name, kind, content_size: size, content_digest: digest, .. } = file;
    let broken = |found: &dyn std::fmt::Display| {
        rule.broken(format_args!("{} of the {whose}, of which {size} bytes hash to {}", shown(name), hex(digest)), found)
    };
    let checkpoint = checkpoint.ok_or_else(|| broken(&format_args!("no {whose}")))?;
    let content = checkpoint.content(name, kind.has_tensors())?.ok_or_else(|| broken(&"no such file"))?;
    let found = digest::short(&digest::of(&content));
    if content.len() as u64 != *size || found != *digest {
        return Err(broken(&format_args!("{} that hash to {}", content.len(), hex(&found))));
    }
    Ok(content)
}

/// The files to be written: one that holds the chosen tensors, or those of the pair.
///
/// Readers of safetensors open every safetensors file among them. Shard indexes are verbatim files: the format allows any content,
/// so a reader may refuse the folder because of what they say.
///
/// # Errors
/// [`Rule::FileTensors`] if the pair's files and its tensors do not fit together; [`Rule::BaseFile`] if the base, or none, lacks a
/// file whose content the target shares; [`Error::NotWritable`] if no reader would take the one file to be composed: a tensor named
/// `__metadata__`, a header above 100,000,000 bytes.
pub(crate) fn outputs(
    index: &ValidatedIndex,
    base: Option<&SafetensorsCheckpoint>,
    chosen: Option<&[Tensor<'_>]>,
) -> Result<(Vec<Output>, Places)> {
    let info = |tensor: &Tensor<'_>| TensorInfo { name: tensor.name.to_owned(), dtype: tensor.dtype, shape: tensor.shape.to_vec() };
    let tensors = match chosen {
        Some(chosen) => chosen.iter().map(info).collect(),
        None if index.files().len() == 0 => index.tensors().map(|tensor| info(&tensor)).collect(),
        None => return plan(index, base),
    };
    let (output, placed) = compose(tensors)?;
    let mut places: Places = vec![None; index.tensor_count()];
    for placed in placed {
        let tensor = index.find(&placed.info.name).map(|tensor| tensor.place);
        if let Some(place) = tensor {
            places[place] = Some((0, output.content.len() as u64 + placed.offset));
        }
    }
    Ok((vec![output], places))
}

/// Checks that one file can hold these tensors.
///
/// # Errors
/// [`Error::NotWritable`], as [`outputs`].
pub(crate) fn check_composable(tensors: &[TensorInfo]) -> Result<()> {
    compose(tensors.to_vec()).map(|_| ())
}

/// One file that holds these tensors, whose names ascend.
fn compose(mut tensors: Vec<TensorInfo>) -> Result<(Output, Vec<Placed>)> {
    // Wide elements first, so that each tensor is aligned; the order of the safetensors crate.
    tensors.sort_by_key(|info| std::cmp::Reverse(info.dtype.bits()));
    let mut end = 0u64;
    let mut placed = Vec::with_capacity(tensors.len());
    for info in tensors {
        let offset = end;
        let too_large = || Error::NotWritable { reason: "its tensors have more than 2^64 bytes".into() };
        end = end.checked_add(info.bytes()).ok_or_else(too_large)?;
        placed.push(Placed { info, offset });
    }
    let content = Header::compose(&placed).map_err(|reason| Error::NotWritable { reason })?;
    Ok((Output { name: String::new(), content, data_size: end }, placed))
}
