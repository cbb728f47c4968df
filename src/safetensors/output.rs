//! Rebuilding the target's files.

use super::checkpoint::{SAFETENSORS, SHARD_INDEX, SafetensorsCheckpoint};
use super::header::{Header, Placed};
use crate::checkpoint::{Checkpoint, MemoryCheckpoint, TensorInfo};
use crate::delta::{Accelerator, Apply, ApplyReport, Progress, Sink};
use crate::digest;
use crate::error::{Error, Escaped, Result, Rule, hex};
use crate::format::BaseKind;
use crate::index::{TargetFile, Tensor, ValidatedIndex};
use crate::publish::{Barrier, Publication, check_apart};
use crate::reader::Pair;
use crate::source::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

/// How [`apply_to_path`] works.
#[derive(Default)]
pub struct ApplyOptions<'a> {
    /// Only these tensors, into one safetensors file with a header of its own.
    pub wanted: Option<&'a dyn Fn(&str) -> bool>,
    /// Whether existing files are replaced.
    pub replace: bool,
    /// A device that decodes in place of the processor.
    pub accelerator: Option<&'a dyn Accelerator>,
}

/// A file to be written: its content, then tensors.
pub(super) struct Output {
    name: String,
    content: Vec<u8>,
    data_size: u64,
}

/// Where each tensor of the pair goes: file and first byte; `None` for one that is not wanted.
type Places = Vec<Option<(usize, u64)>>;

struct Files<'a> {
    paths: Vec<PathBuf>,
    publication: &'a Publication,
    places: Places,
}

impl Sink for Files<'_> {
    fn write(&self, place: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let Some((file, start)) = self.places[place] else { return Ok(()) };
        let open = self.publication.file(file)?;
        open.write_all_at(bytes, start + offset).map_err(|e| Error::io("write", &self.paths[file], e))
    }
}

/// Rebuilds the target files of a pair at `path`: a file if the pair holds a lone one, else a folder.
///
/// Nothing appears at `path` before all of it is written, compared with the digests and synced. A new folder appears as a
/// whole. In an existing one the files are replaced one by one; meanwhile a shard index that no reader accepts stands in the
/// folder, and the shard index of the pair comes last. A pair without files, and a choice of tensors, give one safetensors file.
///
/// A replaced file keeps its permission bits. If `path` is a link to a file, the link is replaced, and the file behind it is not
/// touched.
///
/// # Errors
/// As [`check_writable`], before anything is written, and as [`Apply::to_sink`]; [`Error::Misuse`] if the output is, contains, or
/// is inside a file or folder of the base or the pair; [`Error::BadCheckpoint`] if an existing folder has other files that
/// readers would mix with those of the pair; [`Error::Io`] if `path` exists and may not be replaced, or is neither a regular file
/// nor a folder, or if another process holds a lock on the folder for 30 seconds.
pub fn apply_to_path<B: Source>(
    pair: &Pair<B>,
    base: Option<&SafetensorsCheckpoint>,
    path: &Path,
    options: &ApplyOptions<'_>,
    progress: Progress<'_>,
) -> Result<ApplyReport> {
    let nothing = MemoryCheckpoint::default();
    let base_tensors: &dyn Checkpoint = base.map_or(&nothing, |base| base);
    let mut apply = Apply::new(pair, base_tensors).progress(progress);
    if let Some(wanted) = options.wanted {
        apply = apply.tensors(wanted);
    }
    if let Some(accelerator) = options.accelerator {
        apply = apply.on(accelerator);
    }
    let chosen = options.wanted.is_some().then(|| apply.selected().collect::<Vec<_>>());
    let (outputs, places) = outputs(pair.index(), base, chosen.as_deref())?;
    let is_lone = matches!(&outputs[..], [lone] if lone.name.is_empty());
    let paths: Vec<_> = outputs.iter().map(|output| if is_lone { path.to_owned() } else { path.join(&output.name) }).collect();
    let inputs: Vec<_> = base.iter().flat_map(|base| base.paths()).chain(pair.paths()).collect();
    check_apart(&[&[path.to_owned()], &paths[..]].concat(), &inputs)?;
    let mut publication = if is_lone {
        Publication::files(path, options.replace)
    } else {
        Publication::folder(path, barrier(path, &outputs)?, options.replace)
    };
    let report = write(&apply, &outputs, places, &mut publication, paths)?;
    // Other files may have appeared in the folder during the work.
    let check = || if is_lone { Ok(()) } else { barrier(path, &outputs).map(drop) };
    publication.commit_after(progress, &check)?;
    Ok(report)
}

/// Shard index of a folder whose files are being replaced. No reader opens the folder, because the one shard does not exist.
const UNFINISHED: &[u8] =
    br#"{"metadata": {}, "weight_map": {"unfinished": "publication-of-this-folder-is-unfinished.safetensors"}}"#;

/// Whether this is the shard index of an interrupted publication.
fn is_unfinished(path: &Path) -> bool {
    // Only a regular file of the right size is read: it could be a pipe, or larger than memory.
    let fits = path.symlink_metadata().is_ok_and(|found| found.is_file() && found.len() == UNFINISHED.len() as u64);
    fits && std::fs::read(path).is_ok_and(|content| content == UNFINISHED)
}

/// The barrier for an existing folder at `path`, in which `outputs` are to be published.
///
/// # Errors
/// [`Error::BadCheckpoint`] if the folder has files that would make a mixture with the outputs: another shard index, or for
/// outputs without one another safetensors file.
fn barrier(path: &Path, outputs: &[Output]) -> Result<Barrier> {
    let own = outputs.iter().map(|output| output.name.as_str()).find(|name| name.ends_with(SHARD_INDEX));
    let name = own.unwrap_or("model.safetensors.index.json");
    let entries = match path.read_dir() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        outcome => Some(outcome.map_err(|e| Error::io("list", path, e))?),
    };
    for entry in entries.into_iter().flatten() {
        let found = entry.map_err(|e| Error::io("list", path, e))?.file_name().to_string_lossy().into_owned();
        let is_read = !found.starts_with('.') && (found.ends_with(SHARD_INDEX) || own.is_none() && found.ends_with(SAFETENSORS));
        let is_output = outputs.binary_search_by(|output| output.name.as_str().cmp(&found)).is_ok(); // names of a pair's files ascend
        let is_barrier = || is_unfinished(&path.join(&found));
        if is_read && !is_output && !(found == name && is_barrier()) {
            let found = Escaped(&found);
            return Err(Error::bad_checkpoint(
                path,
                format_args!("{found} is not a file of the pair, but would be read with them"),
            ));
        }
    }
    Ok(Barrier { name: name.to_owned(), content: UNFINISHED })
}

/// Checks that [`apply_to_path`] can write the target of a pair. Nothing is written. Where this and [`Apply::verify`] succeed with
/// a base, [`apply_to_path`] does, unless the file system refuses. [`verify_files`](super::verify_files) does both.
///
/// Readers of safetensors open every safetensors file that it writes. Shard indexes are verbatim files, which are written as they
/// are stored: the format allows any content, so a reader may refuse the folder because of what they say.
///
/// Cost: the headers of all files are read, or one is composed, and held.
///
/// # Errors
/// [`Rule::FileTensors`] if the pair's files and its tensors do not fit together; [`Rule::BaseFile`] if the base, or none, lacks a
/// file whose content the target shares; [`Error::NotWritable`] for a pair without files of which no reader would take the one
/// to be composed: a tensor named `__metadata__`, a header above 100,000,000 bytes.
pub fn check_writable(index: &ValidatedIndex, base: Option<&SafetensorsCheckpoint>) -> Result<()> {
    outputs(index, base, None).map(|_| ())
}

/// Refuses a pair that needs a base: for one of the tensors that `wanted` holds for, or without `wanted` for any tensor or file.
///
/// # Errors
/// [`Error::Misuse`] with the name of the first such tensor.
pub fn check_needs_no_base(index: &ValidatedIndex, wanted: Option<&dyn Fn(&str) -> bool>) -> Result<()> {
    let is_wanted = |name: &str| wanted.is_none_or(|wanted| wanted(name));
    let needing = index.tensors().find(|tensor| tensor.base_kind != BaseKind::None && is_wanted(tensor.name));
    if let Some(tensor) = needing {
        return Err(Error::Misuse(format!("the pair needs a base, for tensor {}", Escaped(tensor.name))));
    }
    if wanted.is_none() && index.files().any(|file| !file.kind.is_stored()) {
        return Err(Error::Misuse("the pair needs a base, for the header of a file".into()));
    }
    Ok(())
}

/// Compares the files of a checkpoint with those of a pair's target: their names, the bytes before their data, and the shard index.
/// Together with [`check_target`](crate::delta::check_target), which compares the tensors, every byte is compared. A pair without files
/// names none to compare.
///
/// Cost: one read and one hash of all headers.
///
/// # Errors
/// [`Rule::FileContentDigest`] for the first file that is missing or differs, and for one that the pair has not; [`Error::Io`].
pub fn check_target_files(index: &ValidatedIndex, target: &SafetensorsCheckpoint) -> Result<()> {
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
pub fn target_metadata(index: &ValidatedIndex, base: Option<&SafetensorsCheckpoint>) -> Result<BTreeMap<String, String>> {
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

/// The files to be written: one that holds the chosen tensors, or those that the pair tells of.
fn outputs(
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

/// One file that holds these tensors, whose names ascend.
pub(super) fn compose(mut tensors: Vec<TensorInfo>) -> Result<(Output, Vec<Placed>)> {
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

/// Writes the outputs under temporary names of a publication.
fn write<B: Source>(
    apply: &Apply<'_, B>,
    outputs: &[Output],
    places: Places,
    publication: &mut Publication,
    paths: Vec<PathBuf>,
) -> Result<ApplyReport> {
    let size = |output: &Output| output.data_size.saturating_add(output.content.len() as u64);
    publication.check_room(outputs.iter().map(size).fold(0, u64::saturating_add))?;
    for (output, path) in outputs.iter().zip(&paths) {
        let file = publication.add(path)?;
        file.set_len(size(output)).and_then(|()| (&*file).write_all(&output.content)).map_err(|e| Error::io("write", path, e))?;
    }
    apply.to_sink(&Files { paths, publication, places })
}
