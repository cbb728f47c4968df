//! Writes a target as safetensors files.

use super::bands::{Bands, are_short};
use super::request::{ApplyReport, Request, Sink};
use crate::checkpoint::CheckpointFiles;
use crate::publish::{Publication, check_apart, reserve};
use crate::safetensors::{Location, Locations, Neighbours, Output, outputs};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tpde_core::error::{Error, Result};
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::layout::StridedLayout;
use tpde_core::source::Source;

struct Files<'a> {
    paths: Vec<PathBuf>,
    publication: &'a Publication,
    locations: Locations,
    /// For each part, its bytes within its tensor.
    runs: Vec<Option<StridedLayout>>,
    /// For each part that is gathered, the size of its tensor in bytes. All parts of a tensor are gathered or none.
    gathered: Vec<Option<u64>>,
    bands: Bands,
}

impl Sink for Files<'_> {
    fn write(&self, tensor_index: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let Some(location @ Location { file, start }) = self.locations[tensor_index] else { return Ok(()) };
        let open = self.publication.file(file)?;
        let written = match &self.runs[tensor_index] {
            None => open.write_all_at(bytes, start + offset),
            Some(runs) if let Some(size) = self.gathered[tensor_index] => {
                self.bands.put(location, size, runs, offset, bytes, |bytes, at| open.write_all_at(bytes, at))
            }
            Some(runs) => runs.try_each(offset, bytes.len(), |at, range| open.write_all_at(&bytes[range], start + at)),
        };
        written.map_err(|e| Error::io("write", &self.paths[file], e))
    }
}

/// Writes and publishes the files of the target. With `is_selection`, writes one safetensors file of the selected tensors
/// instead.
pub(super) fn write<B: Source>(
    request: &Request<'_, B>,
    base: Option<&dyn CheckpointFiles>,
    is_selection: bool,
    path: &Path,
    replace: bool,
) -> Result<ApplyReport> {
    let selected = is_selection.then(|| request.selected().collect::<Vec<_>>());
    let (outputs, locations) = outputs(request.pair.index(), base, selected.as_deref())?;
    let is_lone = matches!(&outputs[..], [lone] if lone.name.is_empty());
    let paths: Vec<_> = outputs.iter().map(|output| if is_lone { path.to_owned() } else { path.join(&output.name) }).collect();
    let inputs: Vec<_> = request.base.paths().into_iter().chain(request.pair.paths()).collect();
    let neighbours = match is_lone {
        true => Neighbours::of_file(path, replace),
        false => Neighbours::of_folder(path, outputs.iter().map(|output| output.name.clone()), replace),
    };
    check_apart(&[&[path.to_owned()], &paths[..], &neighbours.stale()?[..]].concat(), &inputs)?;
    let mut publication = neighbours.publication();
    let report = stage(request, &outputs, locations, &mut publication, paths)?;
    // Look again: other files may have appeared during the work.
    let removed = publication.commit_after(request.progress, &|| neighbours.stale())?;
    Ok(ApplyReport { removed, ..report })
}

/// Writes the outputs to files that get their names later, when they are published.
fn stage<B: Source>(
    request: &Request<'_, B>,
    outputs: &[Output],
    locations: Locations,
    publication: &mut Publication,
    paths: Vec<PathBuf>,
) -> Result<ApplyReport> {
    publication.check_space(outputs.iter().map(Output::size).fold(0, u64::saturating_add))?;
    for (output, path) in outputs.iter().zip(&paths) {
        let file = publication.add(path)?;
        reserve(&file, output.size())
            .and_then(|()| (&*file).write_all(&output.content))
            .map_err(|e| Error::io("write", path, e))?;
    }
    let runs: Vec<_> = request.pair.index().tensors().map(|tensor| tensor.layout()).collect();
    let gathered = gathered(request.pair.index(), &runs);
    request.to_sink(&Files { paths, publication, locations, runs, gathered, bands: Bands::default() })
}

/// For each entry, the size of its tensor if the tensor has a part of short runs.
fn gathered(index: &ValidatedIndex, runs: &[Option<StridedLayout>]) -> Vec<Option<u64>> {
    let entries: Vec<_> = index.tensors().collect();
    let tensors = entries.chunk_by(|a, b| a.name == b.name);
    let of_tensor = |parts: &[Tensor<'_>]| {
        let is_short = parts.iter().any(|part| runs[part.place].as_ref().is_some_and(are_short));
        let size = is_short.then(|| parts.iter().map(Tensor::bytes).sum());
        vec![size; parts.len()]
    };
    tensors.flat_map(of_tensor).collect()
}
