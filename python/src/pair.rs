//! An open pair whose tensors are read from and written to memory.

use crate::errors;
use crate::memory::{self, Memory};
use crate::run::{Steering, run};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tpde::{
    Apply, BaseKind, Checkpoint, Error, Escaped, FileSource, InPlace, MemoryCheckpoint, OpenOptions, Result, SafetensorsCheckpoint,
    Tensor, TensorMut,
};

/// An open pair, with the files of its base if it was opened with them.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Pair {
    pair: Arc<tpde::Pair<FileSource>>,
    base: Option<SafetensorsCheckpoint>,
}

/// Name, dtype, dims, kind of base, name of the base tensor, and whether any element changes.
type Described = (String, &'static str, Vec<u64>, &'static str, String, bool);

#[pymethods]
impl Pair {
    /// Opens the pair at `path`, and the base at `base` if the base is in files.
    #[new]
    #[pyo3(signature = (path, base=None, expect=None))]
    fn open(py: Python<'_>, path: PathBuf, base: Option<PathBuf>, expect: Option<[u8; 32]>) -> PyResult<Self> {
        run(py, None, 0, |steering| {
            let pair = Arc::new(self::open(&path, expect, steering)?);
            if pair.index().has_parts() {
                let reason = "the pair describes tensors in parts: tpde.apply rebuilds its files, and tpde.verify checks it";
                return Err(Error::InvalidArgument(reason.into()));
            }
            Ok(Self { pair, base: base.as_deref().map(SafetensorsCheckpoint::open).transpose()? })
        })
    }

    /// All tensors, names ascending.
    fn tensors(&self) -> Vec<Described> {
        let index = self.pair.index();
        let describe = |tensor: Tensor<'_>| {
            let changes = tensor.chunks().any(|chunk| index.chunk(chunk).num_deltas > 0);
            let name = tensor.name.to_owned();
            (name, tensor.dtype.name(), tensor.shape.to_vec(), tensor.base_kind.name(), tensor.base_name.to_owned(), changes)
        };
        index.tensors().map(describe).collect()
    }

    /// Size of the blob in bytes.
    fn blob_bytes(&self) -> u64 {
        self.pair.index().blob_size()
    }

    /// Total size of a tensor's payloads in bytes.
    fn payload_bytes(&self, py: Python<'_>, name: &str) -> PyResult<u64> {
        let index = self.pair.index();
        let tensor = index.find(name).ok_or_else(|| errors::to_python(py, &unknown(name)))?;
        Ok(tensor.chunks().map(|chunk| u64::from(index.chunk(chunk).compressed_size)).sum())
    }

    /// The pair digest.
    fn digest(&self) -> [u8; 32] {
        *self.pair.index().pair_digest()
    }

    /// Whether two names are of equal tensors: same dtype, shape and kind of base, and equal contents in base and target.
    fn is_same(&self, py: Python<'_>, a: &str, b: &str) -> PyResult<bool> {
        let find = |name| self.pair.index().find(name).ok_or_else(|| errors::to_python(py, &unknown(name)));
        let (a, b) = (find(a)?, find(b)?);
        Ok((a.base_digest(), a.target_digest()) == (b.base_digest(), b.target_digest())
            && a.base_kind == b.base_kind
            && a.dtype == b.dtype
            && a.shape == b.shape)
    }

    /// Whether the pair describes files, not only tensors.
    fn has_files(&self) -> bool {
        self.pair.index().files().len() > 0
    }

    /// The `__metadata__` of the target's files.
    fn metadata(&self, py: Python<'_>) -> PyResult<BTreeMap<String, String>> {
        run(py, None, 0, |_| self.on_base(None, |base| Apply::new(&self.pair).base(base).metadata()))
    }

    /// Rebuilds tensors into `outputs`. Each output has the name of its tensor.
    #[pyo3(signature = (outputs, *, base, digests, progress))]
    fn read(
        &self,
        py: Python<'_>,
        mut outputs: Vec<Memory>,
        base: Option<Vec<Memory>>,
        digests: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let once = each_memory_once(&self.pair, &outputs).map_err(|error| errors::to_python(py, &error))?;
        let total = once.iter().map(|&i| outputs[i].range().len() as u64).sum();
        run(py, progress, total, |steering| {
            for base in base.iter().flatten() {
                let of_base = base.range();
                let meets = |o: &&Memory| o.range().start < of_base.end && of_base.start < o.range().end && !of_base.is_empty();
                if let Some(output) = outputs.iter().find(meets) {
                    let (name, base) = (Escaped(output.name()), Escaped(base.name()));
                    return Err(Error::InvalidArgument(format!("tensor {name} shares memory with the base {base}")));
                }
            }
            self.on_base(base.as_deref(), |base| {
                let mut places = HashMap::new();
                for (_, output) in outputs.iter_mut().enumerate().filter(|(i, _)| once.contains(i)) {
                    let name = output.name().to_owned();
                    // SAFETY: `each_memory_once` has checked that outputs do not overlap. The loop above: none overlaps a base.
                    if places.insert(name.clone(), unsafe { output.bytes_mut() }).is_some() {
                        return Err(Error::InvalidArgument(format!("tensor {} has two outputs", Escaped(&name))));
                    }
                }
                let apply =
                    Apply::new(&self.pair).base(base).tensors(|name| places.contains_key(name)).digests(digests).watch(steering);
                let names: Vec<_> = apply.selected().map(|tensor| tensor.name).collect();
                let mut buffers: Vec<_> = names.iter().filter_map(|name| places.remove(*name)).collect();
                if let Some(name) = places.keys().next() {
                    return Err(unknown(name));
                }
                apply.to_buffers(&mut buffers).map(|_| ())
            })
        })
    }

    /// Rebuilds the elements `start..stop` of the tensor with the output's name into `output`.
    fn read_range(&self, py: Python<'_>, mut output: Memory, start: u64, stop: u64, base: Option<Vec<Memory>>) -> PyResult<()> {
        run(py, None, 0, |steering| {
            self.on_base(base.as_deref(), |base| {
                let bytes = Apply::new(&self.pair).base(base).watch(steering).range(output.name(), start..stop)?;
                let name = output.name().to_owned();
                // SAFETY: the output is a new tensor: nothing else has its address.
                let out = unsafe { output.bytes_mut() };
                if out.len() != bytes.len() {
                    return Err(Error::InvalidArgument(format!(
                        "the buffer for tensor {} has {} bytes, expected {}",
                        Escaped(&name),
                        out.len(),
                        bytes.len()
                    )));
                }
                out.copy_from_slice(&bytes);
                Ok(())
            })
        })
    }

    /// Positions and values of the elements of a tensor that change. Positions are little-endian, of 4 bytes if all fit in 31
    /// bits, otherwise of 8.
    fn changes<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        base: Option<Vec<Memory>>,
    ) -> PyResult<(Bound<'py, PyByteArray>, Bound<'py, PyByteArray>, usize)> {
        let (positions, values, size) = run(py, None, 0, |steering| {
            self.on_base(base.as_deref(), |base| {
                let tensor = self.pair.index().find(name).ok_or_else(|| unknown(name))?;
                let changes = Apply::new(&self.pair).base(base).watch(steering).changes(name)?;
                let size = if tensor.lanes <= i32::MAX as u64 { 4 } else { 8 };
                let positions: Vec<u8> = changes.positions.iter().flat_map(|p| p.to_le_bytes().into_iter().take(size)).collect();
                Ok((positions, changes.values, size))
            })
        })?;
        Ok((PyByteArray::new(py, &positions), PyByteArray::new(py, &values), size))
    }

    /// Changes tensors in place. Tensors that share memory are changed once. False if they already were the target.
    #[pyo3(signature = (tensors, *, checked, progress))]
    fn apply_in_place(
        &self,
        py: Python<'_>,
        mut tensors: Vec<Memory>,
        checked: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<bool> {
        let once = each_memory_once(&self.pair, &tensors).map_err(|error| errors::to_python(py, &error))?;
        let total = once.iter().map(|&i| tensors[i].range().len() as u64).sum();
        let mode = if checked { InPlace::AllChecked } else { InPlace::ChunkByChunk };
        run(py, progress, total, |steering| {
            let mut given = Vec::new();
            for (i, tensor) in tensors.iter_mut().enumerate() {
                let Some(found) = self.pair.index().find(tensor.name()).filter(|_| once.contains(&i)) else { continue };
                // SAFETY: `each_memory_once` has checked that these tensors do not overlap.
                given.push(TensorMut { name: found.name, bytes: unsafe { tensor.bytes_mut() } });
            }
            match Apply::new(&self.pair).watch(steering).in_place(given, mode) {
                Ok(_) => Ok(true),
                Err(Error::AlreadyApplied) => Ok(false),
                Err(error) => Err(error),
            }
        })
    }
}

/// Opens a pair, which must have the digest `expect` if there is one. If the pair is being published, the call waits; a signal
/// can interrupt the wait.
pub fn open(path: &Path, expect: Option<[u8; 32]>, steering: &Steering) -> Result<tpde::Pair<FileSource>> {
    let options = expect.map_or_else(OpenOptions::default, |digest| OpenOptions::default().expect(digest));
    tpde::Pair::open_with(path, &options, steering)
}

pub fn unknown(name: &str) -> Error {
    Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(name)))
}

impl Pair {
    /// The pair without its base, as a shared handle.
    pub fn shared(&self) -> Arc<tpde::Pair<FileSource>> {
        self.pair.clone()
    }

    fn on_base<R>(&self, base: Option<&[Memory]>, work: impl FnOnce(&dyn Checkpoint) -> Result<R>) -> Result<R> {
        match (base, &self.base) {
            (Some(tensors), _) => work(&memory::checkpoint(tensors)?),
            (None, Some(files)) => work(files),
            (None, None) => work(&MemoryCheckpoint::default()),
        }
    }
}

/// Indices of the tensors to change so that each memory range is changed once. Tied weights are one range with several names;
/// their targets must be equal. Dtypes and shapes must be those in the pair.
pub fn each_memory_once(pair: &tpde::Pair<FileSource>, tensors: &[Memory]) -> Result<HashSet<usize>> {
    let mut found = Vec::new();
    for (i, given) in tensors.iter().enumerate() {
        let name = Escaped(given.name());
        let tensor = pair.index().find(given.name()).ok_or_else(|| unknown(given.name()))?;
        if tensor.dtype != given.dtype()? || tensor.shape != given.shape() {
            let (dtype, shape) = (given.dtype()?, given.shape());
            let expected = format!("{} {:?}", tensor.dtype, tensor.shape);
            return Err(Error::InvalidArgument(format!("tensor {name} is {dtype} {shape:?} here, and {expected} in the pair")));
        }
        if tensor.bytes() != given.range().len() as u64 {
            let (found, expected) = (given.range().len(), tensor.bytes());
            return Err(Error::InvalidArgument(format!("tensor {name} has {found} bytes, expected {expected}")));
        }
        found.push((i, given.range(), tensor));
    }
    // Among tied tensors, one with a base comes first, because only its base can be checked.
    found.sort_by_key(|(_, range, tensor)| (range.start, range.end, tensor.base_kind == BaseKind::None));
    let mut once = HashSet::new();
    let mut before: Option<&(usize, std::ops::Range<usize>, Tensor<'_>)> = None;
    for entry in &found {
        let (i, range, tensor) = entry;
        if range.is_empty() {
            once.insert(*i);
            continue;
        }
        match before.filter(|(_, other, _)| range.start < other.end) {
            Some((_, other, first)) if other == range => {
                let same_base = tensor.base_kind == BaseKind::None || tensor.base_digest() == first.base_digest();
                if !same_base || tensor.target_digest() != first.target_digest() {
                    let (a, b) = (Escaped(first.name), Escaped(tensor.name));
                    return Err(Error::InvalidArgument(format!(
                        "tensors {a} and {b} share memory, but not their values in the pair"
                    )));
                }
                continue;
            }
            Some((_, _, first)) => {
                let (a, b) = (Escaped(first.name), Escaped(tensor.name));
                return Err(Error::InvalidArgument(format!("tensors {a} and {b} share a part of their memory")));
            }
            None => {}
        }
        once.insert(*i);
        before = Some(entry);
    }
    Ok(once)
}
