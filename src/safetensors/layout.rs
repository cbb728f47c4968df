//! The layout of a target's files: the content of each file, and the location of each tensor.

use super::header::{FileTensor, Header};
use crate::checkpoint::{CheckpointFiles, TensorInfo};
use std::collections::{BTreeMap, BTreeSet};
use tpde_core::digest;
use tpde_core::error::{Error, Escaped, Result, Rule, hex};
use tpde_core::index::{TargetFile, Tensor, ValidatedIndex};

/// A file to be written: its content, followed by tensors.
pub(crate) struct Output {
    /// Name of the file. Empty if the target is a single file.
    pub name: String,
    /// The bytes before the tensors.
    pub content: Vec<u8>,
    data_size: u64,
}

impl Output {
    /// Size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.data_size.saturating_add(self.content.len() as u64)
    }
}

/// Location of a tensor in files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    /// Index of the file.
    pub file: usize,
    /// Offset of the tensor in the file, in bytes.
    pub start: u64,
}

/// For each tensor of the pair, its location in the outputs; `None` if it is not selected.
pub(crate) type Locations = Vec<Option<Location>>;

/// Compares the files of a checkpoint with the target files of a pair: names, the bytes before the data, and the shard index. If
/// the pair has no files, nothing is compared.
///
/// # Errors
/// [`Rule::FileContentDigest`] for the first file that is missing or differs, or for a file that the pair lacks; [`Error::Io`].
pub(crate) fn check_target_files(index: &ValidatedIndex, target: &dyn CheckpointFiles) -> Result<()> {
    if index.files().len() == 0 {
        return Ok(());
    }
    let mut unmatched: BTreeSet<_> = target.names().into_iter().map(|(name, _)| name).collect();
    for file in index.files() {
        content_of(Some(target), "target", Rule::FileContentDigest, &file)?;
        unmatched.remove(file.name);
    }
    match unmatched.first() {
        None => Ok(()),
        Some(name) => {
            let expected = format_args!("the {} files of the pair", index.files().len());
            Err(Rule::FileContentDigest.broken(expected, format_args!("{} too", display_name(name))))
        }
    }
}

/// The `__metadata__` of a pair's target files, merged. If files have different values for a key, the first file's is used.
///
/// # Errors
/// [`Rule::BaseFile`] if the pair takes a header from the base and there is no base or it lacks the file; [`Rule::FileTensors`]
/// for a malformed header.
pub(crate) fn target_metadata(index: &ValidatedIndex, base: Option<&dyn CheckpointFiles>) -> Result<BTreeMap<String, String>> {
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

/// The files of the pair and the locations of its tensors, after checking that file headers and tensors agree.
fn plan(index: &ValidatedIndex, base: Option<&dyn CheckpointFiles>) -> Result<(Vec<Output>, Locations)> {
    let mut locations: Locations = vec![None; index.tensor_count()];
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
            for FileTensor { info, offset } in &header.tensors {
                let name = Escaped(&info.name);
                let tensor = index.find(&info.name).ok_or_else(|| at(&format_args!("tensor {name}, which is not in it")))?;
                if tensor.dtype != info.dtype || tensor.whole_shape() != info.shape {
                    return Err(at(&format_args!("tensor {name} of {} {:?}", info.dtype, info.shape)).in_tensor(&info.name));
                }
                if !index.is_tiled(&info.name) {
                    return Err(at(&format_args!("tensor {name}, of which the pair has only some parts")).in_tensor(&info.name));
                }
                let location = Location { file: outputs.len(), start: header.content_size + offset };
                for entry in index.entries(&info.name) {
                    if locations[entry.place].replace(location).is_some() {
                        return Err(at(&format_args!("tensor {name} twice")));
                    }
                }
            }
        }
        outputs.push(Output { name: file.name.to_owned(), content, data_size });
    }
    if let Some(tensor_index) = locations.iter().position(Option::is_none) {
        let name = index.tensor(tensor_index).name;
        return Err(Rule::FileTensors.broken("every tensor in a file", "one that is in none").in_tensor(name));
    }
    Ok((outputs, locations))
}

/// The name of a file for messages.
pub(crate) fn display_name(name: &str) -> &str {
    if name.is_empty() { "a lone safetensors file" } else { name }
}

/// The content of a checkpoint's file, after comparing it with the pair's entry. A difference is a violation of `rule`.
fn content_of(checkpoint: Option<&dyn CheckpointFiles>, whose: &str, rule: Rule, file: &TargetFile<'_>) -> Result<Vec<u8>> {
    let TargetFile { name, kind, content_size: size, content_digest: digest, .. } = file;
    let broken = |found: &dyn std::fmt::Display| {
        rule.broken(format_args!("{} of the {whose}, of which {size} bytes hash to {}", display_name(name), hex(digest)), found)
    };
    let checkpoint = checkpoint.ok_or_else(|| broken(&format_args!("no {whose}")))?;
    let content = checkpoint.content(name, kind.has_tensors())?.ok_or_else(|| broken(&"no such file"))?;
    let found = digest::short(&digest::of(&content));
    if content.len() as u64 != *size || found != *digest {
        return Err(broken(&format_args!("{} that hash to {}", content.len(), hex(&found))));
    }
    Ok(content)
}

/// The files to be written. If tensors are selected, one file with these tensors. Otherwise the files of the pair or, if it has
/// none, one file with all tensors.
///
/// Safetensors readers can open every safetensors file among them. The content of a shard index is not checked, so readers may
/// refuse the folder because of it.
///
/// # Errors
/// - [`Rule::FileTensors`] if the pair's files and tensors disagree.
/// - [`Rule::BaseFile`] if the pair takes a file's content from the base and there is no base or it lacks the file.
/// - [`Error::NotWritable`] if a file with a new header is needed and readers would reject it: because a tensor is named
///   `__metadata__`, because the header is larger than 100,000,000 bytes, or because the tensors have more than 2^64 bytes.
pub(crate) fn outputs(
    index: &ValidatedIndex,
    base: Option<&dyn CheckpointFiles>,
    selected: Option<&[Tensor<'_>]>,
) -> Result<(Vec<Output>, Locations)> {
    let info = |tensor: &Tensor<'_>| TensorInfo {
        name: tensor.name.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.whole_shape().to_vec(),
    };
    let mut tensors: Vec<_> = match selected {
        Some(selected) => selected.iter().map(info).collect(),
        None if index.files().len() == 0 => index.tensors().map(|tensor| info(&tensor)).collect(),
        None => return plan(index, base),
    };
    // All parts of a tensor are selected or none.
    tensors.dedup_by(|a, b| a.name == b.name);
    if let Some(info) = tensors.iter().find(|info| !index.is_tiled(&info.name)) {
        let reason = format!("the pair has only some parts of tensor {}", Escaped(&info.name));
        return Err(Error::NotWritable { reason });
    }
    let (output, tensors) = compose(tensors)?;
    let mut locations: Locations = vec![None; index.tensor_count()];
    for FileTensor { info, offset } in tensors {
        for entry in index.entries(&info.name) {
            locations[entry.place] = Some(Location { file: 0, start: output.content.len() as u64 + offset });
        }
    }
    Ok((vec![output], locations))
}

/// Checks that these tensors can be written as one safetensors file.
///
/// # Errors
/// [`Error::NotWritable`], as for `outputs`.
pub fn check_composable(tensors: &[TensorInfo]) -> Result<()> {
    compose(tensors.to_vec()).map(|_| ())
}

/// One file with these tensors, which are in ascending order of name, and their locations.
///
/// # Errors
/// [`Error::NotWritable`], as for [`outputs`].
pub(crate) fn compose(mut tensors: Vec<TensorInfo>) -> Result<(Output, Vec<FileTensor>)> {
    // Put wide elements first, so that every tensor is aligned. The safetensors crate uses the same order.
    tensors.sort_by_key(|info| std::cmp::Reverse(info.dtype.bits()));
    let mut end = 0u64;
    let mut file_tensors = Vec::with_capacity(tensors.len());
    for info in tensors {
        let offset = end;
        let too_large = || Error::NotWritable { reason: "its tensors have more than 2^64 bytes".into() };
        end = end.checked_add(info.bytes()).ok_or_else(too_large)?;
        file_tensors.push(FileTensor { info, offset });
    }
    let content = Header::compose(&file_tensors).map_err(|reason| Error::NotWritable { reason })?;
    Ok((Output { name: String::new(), content, data_size: end }, file_tensors))
}
