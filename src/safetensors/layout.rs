//! The layout of a target's files: the content of each, and the location of each tensor.

use super::checkpoint::SafetensorsCheckpoint;
use super::header::{FileTensor, Header};
use crate::checkpoint::TensorInfo;
use crate::digest;
use crate::error::{Error, Escaped, Result, Rule, hex};
use crate::index::{TargetFile, Tensor, ValidatedIndex};
use std::collections::{BTreeMap, BTreeSet};

/// A file to be written: its content, followed by tensors.
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

/// First byte of a tensor in an output.
#[derive(Clone, Copy)]
pub(crate) struct Location {
    /// Number of the output.
    pub file: usize,
    pub start: u64,
}

/// The location of each tensor of the pair; `None` for a tensor that is not selected.
pub(crate) type Locations = Vec<Option<Location>>;

/// Compares the files of a checkpoint with those of a pair's target: names, the bytes before the data, and the shard index. If
/// the pair has no files, there is nothing to compare.
///
/// # Errors
/// [`Rule::FileContentDigest`] for the first file that is missing or differs, and for one that the pair does not have;
/// [`Error::Io`].
pub(crate) fn check_target_files(index: &ValidatedIndex, target: &SafetensorsCheckpoint) -> Result<()> {
    if index.files().len() == 0 {
        return Ok(());
    }
    let mut unmatched = target.file_names().collect::<BTreeSet<_>>();
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

/// The `__metadata__` of a pair's target files, merged. If two files have different values for a key, the first file's counts.
///
/// # Errors
/// [`Rule::BaseFile`] if a header is that of the base and the base is missing or lacks the file; [`Rule::FileTensors`] for a
/// malformed header.
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

/// The files of the pair, after checking that their headers and the pair's tensors agree.
fn plan(index: &ValidatedIndex, base: Option<&SafetensorsCheckpoint>) -> Result<(Vec<Output>, Locations)> {
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
                if tensor.dtype != info.dtype || tensor.shape != info.shape {
                    return Err(at(&format_args!("tensor {name} of {} {:?}", info.dtype, info.shape)));
                }
                if locations[tensor.place].replace(Location { file: outputs.len(), start: header.content_size + offset }).is_some()
                {
                    return Err(at(&format_args!("tensor {name} twice")));
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

/// The name of a file in messages.
fn display_name(name: &str) -> &str {
    if name.is_empty() { "a lone safetensors file" } else { name }
}

/// The content of a checkpoint's file, after comparing it with the pair's entry; breaks `rule` if they differ.
fn content_of(checkpoint: Option<&SafetensorsCheckpoint>, whose: &str, rule: Rule, file: &TargetFile<'_>) -> Result<Vec<u8>> {
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

/// The files to be written: those of the pair; or one file with the selected tensors, or with all if the pair has no files.
///
/// Every safetensors file among them can be opened by readers of that format. The content of a shard index is not checked, so
/// readers may refuse the folder because of it.
///
/// # Errors
/// [`Rule::FileTensors`] if the pair's files and tensors disagree; [`Rule::BaseFile`] if a file's content is that of the base and
/// the base is missing or lacks the file; [`Error::NotWritable`] if readers would reject the composed file: a tensor named
/// `__metadata__`, or a header above 100,000,000 bytes.
pub(crate) fn outputs(
    index: &ValidatedIndex,
    base: Option<&SafetensorsCheckpoint>,
    selected: Option<&[Tensor<'_>]>,
) -> Result<(Vec<Output>, Locations)> {
    let info = |tensor: &Tensor<'_>| TensorInfo { name: tensor.name.to_owned(), dtype: tensor.dtype, shape: tensor.shape.to_vec() };
    let tensors = match selected {
        Some(selected) => selected.iter().map(info).collect(),
        None if index.files().len() == 0 => index.tensors().map(|tensor| info(&tensor)).collect(),
        None => return plan(index, base),
    };
    let (output, tensors) = compose(tensors)?;
    let mut locations: Locations = vec![None; index.tensor_count()];
    for FileTensor { info, offset } in tensors {
        if let Some(tensor) = index.find(&info.name) {
            locations[tensor.place] = Some(Location { file: 0, start: output.content.len() as u64 + offset });
        }
    }
    Ok((vec![output], locations))
}

/// Checks that one file can hold these tensors.
///
/// # Errors
/// [`Error::NotWritable`], as [`outputs`].
pub(crate) fn check_composable(tensors: &[TensorInfo]) -> Result<()> {
    compose(tensors.to_vec()).map(|_| ())
}

/// One file with these tensors, whose names ascend.
fn compose(mut tensors: Vec<TensorInfo>) -> Result<(Output, Vec<FileTensor>)> {
    // Wide elements first, so that every tensor is aligned; the same order as in the safetensors crate.
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
