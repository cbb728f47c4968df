//! The files of the version that a chain gives.

use super::view::Chain;
use crate::checkpoint::CheckpointFiles;
use crate::safetensors::outputs;
use tpde_core::digest;
use tpde_core::error::{Error, Result, Rule, hex};
use tpde_core::format::DIGEST_SIZE;
use tpde_core::index::{TargetFile, ValidatedIndex};
use tpde_core::source::Source;

impl<B: Source> CheckpointFiles for Chain<'_, B> {
    fn names(&self) -> Vec<(String, bool)> {
        match self.steps().last() {
            Some(step) => step.pair.index().files().map(|file| (file.name.to_owned(), file.kind.has_tensors())).collect(),
            None => self.base().files().map_or_else(Vec::new, CheckpointFiles::names),
        }
    }

    fn digest(&self, name: &str, has_tensors: bool) -> Result<Option<(u64, [u8; DIGEST_SIZE])>> {
        let Some(step) = self.steps().last() else {
            return self.base().files().map_or(Ok(None), |files| files.digest(name, has_tensors));
        };
        if let Some(file) = find(step.pair.index(), name, has_tensors) {
            return Ok(Some((file.content_size, file.content_digest)));
        }
        let composed = composed(step.pair.index(), name, has_tensors);
        Ok(composed.map(|content| (content.len() as u64, digest::short(&digest::of(&content)))))
    }

    fn content(&self, name: &str, has_tensors: bool) -> Result<Option<Vec<u8>>> {
        // A file of the version before is followed down to the pair that stores its content, or to the base.
        let mut stated: Option<(usize, TargetFile<'_>)> = None;
        let mut content = None;
        for (number, step) in self.steps().iter().enumerate().rev() {
            let index = step.pair.index();
            let Some(file) = find(index, name, has_tensors) else {
                content = composed(index, name, has_tensors);
                break;
            };
            stated.get_or_insert((number, file));
            content = file.content.map(<[u8]>::to_vec);
            if content.is_some() {
                break;
            }
            if number == 0 {
                content = self.base().files().map_or(Ok(None), |files| files.content(name, has_tensors))?;
            }
        }
        if self.steps().is_empty() {
            content = self.base().files().map_or(Ok(None), |files| files.content(name, has_tensors))?;
        }
        let Some((number, file)) = stated else { return Ok(content) };
        let found = content.as_deref().map(|content| (content.len() as u64, digest::short(&digest::of(content))));
        if found == Some((file.content_size, file.content_digest)) {
            return Ok(content);
        }
        let expected = format_args!("file {name:?} of {} bytes that hash to {}", file.content_size, hex(&file.content_digest));
        let error: Error = match found {
            Some((size, digest)) => Rule::BaseFile.broken(expected, format_args!("{size} bytes that hash to {}", hex(&digest))),
            None => Rule::BaseFile.broken(expected, "no such file in the version before"),
        };
        Err(self.at_step(number, error))
    }
}

fn find<'a>(index: &'a ValidatedIndex, name: &str, has_tensors: bool) -> Option<TargetFile<'a>> {
    index.files().find(|file| file.name == name && file.kind.has_tensors() == has_tensors)
}

/// The content of the lone file that an application of a pair without files writes.
fn composed(index: &ValidatedIndex, name: &str, has_tensors: bool) -> Option<Vec<u8>> {
    let is_lone = index.files().len() == 0 && name.is_empty() && has_tensors;
    let (outputs, _) = is_lone.then(|| outputs(index, None, None).ok())??;
    outputs.into_iter().next().map(|output| output.content)
}
