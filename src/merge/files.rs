//! The files of a merged pair (spec sections 10.1 and 12.2).

use super::input::{Input, conflict};
use crate::safetensors::{TargetContent, base_fault, tensor_names};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use tpde_core::error::{Conflict, Result, hex};
use tpde_core::format::FileKind;
use tpde_core::index::{FileNames, TargetFile, ValidatedIndex};
use tpde_core::source::Source;
use tpde_core::writer::FileSpec;

/// Returns the files of the merged pair, in ascending order of name.
///
/// A file that is equal in several inputs is kept once. If the kept tensors of an input are not exactly the tensors of some of its
/// files, the result has no files.
///
/// # Errors
/// [`Error::NotMergeable`](crate::Error::NotMergeable) if inputs have different files of one name, if an input has no files for
/// its tensors while another has files, if one of several files has no name, or if the files of several inputs together cannot be
/// those of a base. [`Error::Invalid`](crate::Error::Invalid) if a
/// pair cannot have these names together.
pub(super) fn merged<B: Source>(inputs: &[Input<'_, B>], is_selection: bool) -> Result<Vec<FileSpec>> {
    let files: Vec<_> =
        inputs.iter().map(|input| if input.is_whole() { input.index().files().collect() } else { of_part(input) }).collect();
    let without = inputs.iter().zip(&files).find(|(input, files)| files.is_empty() && !input.kept.is_empty());
    let with = inputs.iter().zip(&files).find(|(_, files)| !files.is_empty());
    let (Some((with, with_files)), without) = (with, without) else { return Ok(Vec::new()) };
    if let Some((without, _)) = without {
        if is_selection {
            return Ok(Vec::new());
        }
        let found = [described(&with_files[0]), "no files".to_owned()];
        return Err(conflict(Conflict::File, "", [with, without], found));
    }
    let mut merged: BTreeMap<&str, (&Input<'_, B>, TargetFile<'_>)> = BTreeMap::new();
    for (input, file) in inputs.iter().zip(&files).flat_map(|(input, files)| files.iter().map(move |file| (input, *file))) {
        match merged.entry(file.name) {
            Entry::Vacant(entry) => _ = entry.insert((input, file)),
            Entry::Occupied(entry) => {
                let (other, known) = entry.get();
                if identity(known) != identity(&file) {
                    let found = [described(known), described(&file)];
                    return Err(conflict(Conflict::File, file.name, [other, input], found));
                }
            }
        }
    }
    if let (Some((_, (lone_input, lone))), Some((_, (other, file)))) = (merged.first_key_value(), merged.iter().nth(1))
        && lone.name.is_empty()
    {
        return Err(conflict(Conflict::File, "", [lone_input, other], [described(lone), described(file)]));
    }
    let mut names = FileNames::default();
    for (input, file) in merged.values() {
        names.add(file.name.as_bytes(), file.kind, merged.len()).map_err(|e| e.in_pair(&input.label))?;
    }
    check_base(&merged)?;
    Ok(merged.values().map(|(_, file)| spec(file)).collect())
}

/// Checks that files of several inputs can be those of a base, perhaps with files of further pairs. Those of one input are kept as
/// they are.
fn check_base<B: Source>(merged: &BTreeMap<&str, (&Input<'_, B>, TargetFile<'_>)>) -> Result<()> {
    let (Some((_, (first, one))), Some((_, (last, other)))) = (merged.first_key_value(), merged.last_key_value()) else {
        return Ok(());
    };
    if merged.values().all(|(input, _)| std::ptr::eq(*input, *first)) {
        return Ok(());
    }
    let mut files = Vec::new();
    for (_, file) in merged.values() {
        files.push(TargetContent { name: file.name, has_tensors: file.kind.has_tensors(), content: file.content });
    }
    match base_fault(&files, true) {
        Some(fault) => {
            Err(conflict(Conflict::File, "", [first, last], [format!("{} ({fault})", described(one)), described(other)]))
        }
        None => Ok(()),
    }
}

/// Returns the files of which all tensors are kept, if every kept tensor is in exactly one of them; otherwise nothing.
///
/// Headers that the pair takes from its base are unknown here. The shard index of a part is dropped, because it names files that
/// the part lacks.
fn of_part<'a, B: Source>(input: &Input<'a, B>) -> Vec<TargetFile<'a>> {
    let index = input.index();
    let mut covered = vec![0u8; index.tensor_count()];
    let mut is_kept = vec![false; index.tensor_count()];
    input.kept.iter().for_each(|&i| is_kept[i as usize] = true);
    let mut files = Vec::new();
    for file in index.files().filter(|file| file.kind == FileKind::Safetensors) {
        let Some(tensors) = file.content.and_then(|content| tensors_of(index, content)) else { continue };
        if tensors.iter().all(|&i| is_kept[i]) {
            tensors.iter().for_each(|&i| covered[i] = covered[i].saturating_add(1));
            files.push(file);
        }
    }
    let is_cover = input.kept.iter().all(|&i| covered[i as usize] == 1);
    if is_cover { files } else { Vec::new() }
}

/// Returns the indexes of the entries of the tensors that a header lists; `None` if it is malformed or lists a tensor that the pair
/// lacks.
fn tensors_of(index: &ValidatedIndex, content: &[u8]) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for name in tensor_names(content).ok()? {
        let before = all.len();
        all.extend(index.entries(&name).map(|tensor| tensor.place));
        if all.len() == before {
            return None;
        }
    }
    Some(all)
}

/// Returns the properties in which two entries of the same file must agree.
fn identity(file: &TargetFile<'_>) -> (FileKind, u64, [u8; 16]) {
    (file.kind, file.content_size, file.content_digest)
}

fn described(file: &TargetFile<'_>) -> String {
    let name = if file.name.is_empty() { "a lone safetensors file".to_owned() } else { file.name.to_owned() };
    format!("{name} of kind {}, {} bytes with digest {}", file.kind, file.content_size, hex(&file.content_digest))
}

fn spec(file: &TargetFile<'_>) -> FileSpec {
    FileSpec {
        name: file.name.to_owned(),
        kind: file.kind,
        content_size: file.content_size,
        content_digest: file.content_digest,
        content: file.content.unwrap_or_default().to_vec(),
    }
}
