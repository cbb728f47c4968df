//! An open pair whose tensors are read from and written to memory.

use crate::errors;
use crate::memory::{self, ExpectedTensor, Memory, SliceMemory, Tensors};
use crate::outline::{Outline, base_tensors};
use crate::run::{Steering, run, run_here};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyByteArray;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tpde::{
    Apply, ApplyChain, BaseKind, Checkpoint, Dtype, Error, Escaped, FileSource, FusedSlices, InPlace, MemoryCheckpoint,
    OpenOptions, Rectangle, Result, SafetensorsCheckpoint, SliceMut, Tensor, TensorMut, Watch,
};
use tpde_core::layout::{first_shared, relation};

/// An open pair, with the files of its base if it was opened with them.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Pair {
    pair: Arc<tpde::Pair<FileSource>>,
    base: Option<SafetensorsCheckpoint>,
}

/// Name, dtype, dims, kind of base, name of the base tensor, whether any element changes, and the tensors of the base.
type EntryDescription = (String, &'static str, Vec<u64>, &'static str, String, bool, Vec<BaseTensor>);

/// Name, dtype and dims of a tensor of the base.
type BaseTensor = (String, &'static str, Vec<u64>);

#[pymethods]
impl Pair {
    /// Opens the pair at `path`, and the base at `base` if the base is in files.
    #[new]
    #[pyo3(signature = (path, base=None, expect=None))]
    fn open(py: Python<'_>, path: PathBuf, base: Option<PathBuf>, expect: Option<[u8; 32]>) -> PyResult<Self> {
        // If the call waits, a signal must be able to interrupt it.
        if base.is_none()
            && let Some(pair) = run_here(py, || open_at_once(&path, expect))?
        {
            return Ok(Self::without_base(Arc::new(pair)));
        }
        run(py, None, 0, |steering| {
            let pair = Arc::new(self::open(&path, expect, steering)?);
            Ok(Self { pair, base: base.as_deref().map(SafetensorsCheckpoint::open).transpose()? })
        })
    }

    /// The tensors, or those with these names; names ascending. Costs less than [`Pair::tensors`].
    #[pyo3(signature = (names=None))]
    fn outline(&self, names: Option<Vec<PyBackedStr>>) -> Outline {
        let index = self.pair.index();
        let entries: Vec<_> = match names {
            None => index.tensors().collect(),
            Some(mut names) => {
                names.sort_unstable();
                names.dedup();
                names.iter().flat_map(|name| index.entries(name)).collect()
            }
        };
        let is_written = |tensor: &Tensor<'_>| {
            tensor.base_kind == BaseKind::None || tensor.chunks().any(|chunk| index.chunk(chunk).num_deltas > 0)
        };
        let expected = |parts: &[Tensor<'_>]| ExpectedTensor {
            name: parts[0].name.to_owned(),
            dtype: parts[0].dtype,
            shape: Some(parts[0].whole_shape().to_vec()),
            is_written: parts.iter().any(is_written),
            entry: parts[0].part.is_none().then_some(parts[0].place),
        };
        Outline::new(&self.pair, entries.chunk_by(|a, b| a.name == b.name).map(expected).collect())
    }

    /// All tensors, names ascending. If the pair has parts of a tensor, the tensor has the kind of base of its parts, or `mixed`.
    fn tensors(&self) -> Vec<EntryDescription> {
        let index = self.pair.index();
        let describe = |parts: &[Tensor<'_>]| {
            let first = parts[0];
            let changes = |tensor: &Tensor<'_>| tensor.chunks().any(|chunk| index.chunk(chunk).num_deltas > 0);
            let is_mixed = parts.iter().any(|part| part.base_kind != first.base_kind);
            let kind = if is_mixed { "mixed" } else { first.base_kind.name() };
            let (name, base_name) = (first.name.to_owned(), first.base_name.to_owned());
            let bases = parts.iter().find_map(|part| Some(base_tensors(part, part.base_shape()?))).unwrap_or_default();
            let described = |(name, dtype, shape): (&str, Dtype, Vec<u64>)| (name.to_owned(), dtype.name(), shape);
            let bases = bases.into_iter().map(described).collect();
            (name, first.dtype.name(), first.whole_shape().to_vec(), kind, base_name, parts.iter().any(changes), bases)
        };
        let entries: Vec<_> = index.tensors().collect();
        entries.chunk_by(|a, b| a.name == b.name).map(describe).collect()
    }

    /// Size of the blob in bytes.
    fn blob_bytes(&self) -> u64 {
        self.pair.index().blob_size()
    }

    /// Total size of a tensor's payloads in bytes.
    fn payload_bytes(&self, py: Python<'_>, name: &str) -> PyResult<u64> {
        let index = self.pair.index();
        let entries = entries(&self.pair, name).map_err(|error| errors::to_python(py, &error))?;
        let chunks = entries.iter().flat_map(|entry| entry.chunks());
        Ok(chunks.map(|chunk| u64::from(index.chunk(chunk).compressed_size)).sum())
    }

    /// The pair digest.
    fn digest(&self) -> [u8; 32] {
        *self.pair.index().pair_digest()
    }

    /// Whether two names are of equal tensors: same dtype, shape, parts and kinds of base, and equal contents in base and target.
    fn is_same(&self, py: Python<'_>, a: &str, b: &str) -> PyResult<bool> {
        let find = |name| entries(&self.pair, name).map_err(|error| errors::to_python(py, &error));
        let (a, b) = (find(a)?, find(b)?);
        let is_same = |(a, b): (&Tensor<'_>, &Tensor<'_>)| {
            (a.dtype, a.base_kind, a.base_digest()) == (b.dtype, b.base_kind, b.base_digest()) && has_same_target(a, b)
        };
        Ok(a.len() == b.len() && a.iter().zip(&b).all(is_same))
    }

    /// Whether the pair describes files, not only tensors.
    fn has_files(&self) -> bool {
        self.pair.index().files().len() > 0
    }

    /// The `__metadata__` of the target's files.
    fn metadata(&self, py: Python<'_>) -> PyResult<BTreeMap<String, String>> {
        run(py, None, 0, |_| self.on_base(None, |base| Apply::new(&self.pair).base(base).metadata()))
    }

    /// Rebuilds tensors, each of which has its name in the pair, or slices of tensors.
    #[pyo3(signature = (outputs, *, base, digests, progress))]
    fn read(
        &self,
        py: Python<'_>,
        mut outputs: Tensors,
        base: Option<Tensors>,
        digests: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let (once, total) = self.each_once(py, &outputs)?;
        run(py, progress, total, |steering| {
            check_apart_from_base(&outputs.memories(), base.as_ref())?;
            self.on_base(base.as_ref(), |base| {
                let apply = Apply::new(&self.pair).base(base).digests(digests).watch(steering);
                let tensors = match &mut outputs {
                    // SAFETY: `check_apart_from_base` has checked that the base has none of this memory; `each_memory_once` that
                    // no tensors overlap.
                    Tensors::Whole(tensors) => unsafe { self.whole(tensors, &once) },
                    Tensors::Slices(slices) => {
                        // SAFETY: as above.
                        return apply.to_slices(unsafe { self::slices(&self.pair, slices)? }).map(|_| ());
                    }
                };
                let mut places = HashMap::new();
                for TensorMut { name, bytes } in tensors {
                    if places.insert(name, bytes).is_some() {
                        return Err(Error::InvalidArgument(format!("tensor {} has two outputs", Escaped(name))));
                    }
                }
                let apply = apply.tensors(|name| places.contains_key(name));
                if self.pair.index().has_parts() {
                    let slices = places.into_iter().filter_map(|(name, bytes)| {
                        let whole = Rectangle::whole(self.pair.index().find(name)?.whole_shape());
                        Some(SliceMut::new(name, whole, bytes))
                    });
                    return apply.to_slices(slices).map(|_| ());
                }
                let names: Vec<_> = apply.selected().map(|tensor| tensor.name).collect();
                let mut buffers: Vec<_> = names.iter().filter_map(|name| places.remove(*name)).collect();
                apply.to_buffers(&mut buffers).map(|_| ())
            })
        })
    }

    /// Positions and values of the elements of a tensor that change. Positions are little-endian, of 4 bytes if all fit in 31
    /// bits, otherwise of 8.
    fn changes<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        base: Option<Tensors>,
    ) -> PyResult<(Bound<'py, PyByteArray>, Bound<'py, PyByteArray>, usize)> {
        let (positions, values, size) = run(py, None, 0, |steering| {
            self.on_base(base.as_ref(), |base| {
                let entries = entries(&self.pair, name)?;
                let changes = Apply::new(&self.pair).base(base).watch(steering).changes(name)?;
                let lanes: u64 = entries.iter().map(|entry| entry.lanes).sum();
                let size = if lanes <= i32::MAX as u64 { 4 } else { 8 };
                let positions: Vec<u8> = changes.positions.iter().flat_map(|p| p.to_le_bytes().into_iter().take(size)).collect();
                Ok((positions, changes.values, size))
            })
        })?;
        Ok((PyByteArray::new(py, &positions), PyByteArray::new(py, &values), size))
    }

    /// Changes tensors or slices in place, by the pairs `before` and by this one, in one commit. Tensors that share memory are changed
    /// once. False if they already were the last target. Several pairs are always `checked` before the first write.
    #[pyo3(signature = (tensors, *, before, checked, digests, progress))]
    fn apply_in_place(
        &self,
        py: Python<'_>,
        mut tensors: Tensors,
        before: Vec<Py<Self>>,
        checked: bool,
        digests: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<bool> {
        let mut pairs: Vec<_> = before.iter().map(|pair| pair.get().shared()).collect();
        pairs.push(self.shared());
        let (once, total) = self.each_once(py, &tensors)?;
        run(py, progress, total, |steering| {
            let chain = ApplyChain::new(pairs.iter().map(|pair| &**pair)).digests(digests).watch(steering);
            let alone = Apply::new(&self.pair).digests(digests).watch(steering);
            let outcome = match &mut tensors {
                Tensors::Whole(tensors) => {
                    // SAFETY: there is no base, and the caller of the public function promises that nothing else uses the memory.
                    let given = unsafe { self.whole(tensors, &once) };
                    if checked { chain.in_place(given) } else { alone.in_place(given, InPlace::ChunkByChunk) }
                }
                Tensors::Slices(slices) => {
                    // SAFETY: as above.
                    let given = unsafe { self::slices(&self.pair, slices)? };
                    if checked { chain.in_place_slices(given) } else { alone.in_place_slices(given, InPlace::ChunkByChunk) }
                }
            };
            match outcome {
                Ok(_) => Ok(true),
                Err(Error::AlreadyApplied { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        })
    }
}

/// The entries of a tensor, at least one.
fn entries<'a>(pair: &'a tpde::Pair<FileSource>, name: &str) -> Result<Vec<Tensor<'a>>> {
    let entries: Vec<_> = pair.index().entries(name).collect();
    if entries.is_empty() { Err(unknown(name)) } else { Ok(entries) }
}

/// Whether two entries are the same rectangle, with the same content in the target.
fn has_same_target(a: &Tensor<'_>, b: &Tensor<'_>) -> bool {
    (a.whole_shape(), a.rectangle(), a.target_digest()) == (b.whole_shape(), b.rectangle(), b.target_digest())
}

/// Checks that outputs share no memory with the base, also not between rows: the library writes outputs while it reads the base.
fn check_apart_from_base(outputs: &[&Memory], base: Option<&Tensors>) -> Result<()> {
    let Some(base) = base else { return Ok(()) };
    let sources = base.memories();
    let of_outputs: Vec<_> = outputs.iter().map(|memory| memory.span()).collect();
    let of_sources: Vec<_> = sources.iter().map(|memory| memory.span()).collect();
    let Some([output, source]) = first_shared(&of_outputs, &of_sources) else { return Ok(()) };
    let (name, base) = (Escaped(outputs[output].name()), Escaped(sources[source].name()));
    Err(Error::InvalidArgument(format!(
        "tensor {name} shares memory with the base {base}, or has rows between its rows: copy the base"
    )))
}

/// Opens a pair, which must have the digest `expect` if there is one. If the pair is being published, the call waits; a signal
/// can interrupt the wait.
pub fn open(path: &Path, expect: Option<[u8; 32]>, steering: &Steering) -> Result<tpde::Pair<FileSource>> {
    tpde::Pair::open_with(path, &options(expect), steering)
}

/// [`open`], without waiting: `None` if the pair is being published.
pub fn open_at_once(path: &Path, expect: Option<[u8; 32]>) -> Result<Option<tpde::Pair<FileSource>>> {
    match tpde::Pair::open_with(path, &options(expect), &Impatient) {
        Err(Error::Cancelled) => Ok(None),
        opened => opened.map(Some),
    }
}

fn options(expect: Option<[u8; 32]>) -> OpenOptions {
    expect.map_or_else(OpenOptions::default, |digest| OpenOptions::default().expect(digest))
}

/// Ends each wait with [`Error::Cancelled`].
struct Impatient;

impl Watch for Impatient {
    fn done(&self, _: u64) -> Result<()> {
        Err(Error::Cancelled)
    }
}

pub fn unknown(name: &str) -> Error {
    Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(name)))
}

impl Pair {
    /// An open pair, without a base.
    pub fn without_base(pair: Arc<tpde::Pair<FileSource>>) -> Self {
        Self { pair, base: None }
    }

    /// The pair without its base, as a shared handle.
    pub fn shared(&self) -> Arc<tpde::Pair<FileSource>> {
        self.pair.clone()
    }

    /// The whole tensors that [`each_memory_once`] gives, and the size of all elements that a call changes, in bytes.
    fn each_once(&self, py: Python<'_>, tensors: &Tensors) -> PyResult<(HashSet<usize>, u64)> {
        let Tensors::Whole(whole) = tensors else { return Ok((HashSet::new(), tensors.size())) };
        let once = each_memory_once(&self.pair, whole).map_err(|error| errors::to_python(py, &error))?;
        let total = once.iter().map(|&i| whole[i].range().len() as u64).sum();
        Ok((once, total))
    }

    /// Tensors for writing: those that [`each_memory_once`] gave.
    ///
    /// # Safety
    /// No other slice of the memory may exist.
    unsafe fn whole<'a>(&'a self, tensors: &'a mut [Memory], once: &HashSet<usize>) -> Vec<TensorMut<'a>> {
        let given = (0..).zip(tensors).filter(|(i, _)| once.contains(i)).filter_map(|(_, tensor)| {
            let name = self.pair.index().find(tensor.name())?.name;
            // SAFETY: promised by the caller; `each_memory_once` has checked that these tensors do not overlap.
            Some(TensorMut { name, bytes: unsafe { tensor.bytes_mut() } })
        });
        given.collect()
    }

    fn on_base<R>(&self, base: Option<&Tensors>, work: impl FnOnce(&dyn Checkpoint) -> Result<R>) -> Result<R> {
        match (base, &self.base) {
            (Some(tensors), _) => work(&*tensors.checkpoint()?),
            (None, Some(files)) => work(files),
            (None, None) => work(&MemoryCheckpoint::default()),
        }
    }
}

/// Slices for writing. Dtypes and shapes must be those in the pair.
///
/// # Safety
/// As for [`memory::fused`].
pub unsafe fn slices<'a>(pair: &tpde::Pair<FileSource>, slices: &'a [SliceMemory]) -> Result<Vec<FusedSlices<'a>>> {
    for slice in slices {
        let name = slice.0.name();
        check_type(&slice.0, &pair.index().find(name).ok_or_else(|| unknown(name))?)?;
    }
    // SAFETY: promised by the caller.
    Ok(unsafe { memory::fused(slices) })
}

/// Checks that dtype and shape of a tensor are those in the pair.
pub fn check_type(given: &Memory, tensor: &Tensor<'_>) -> Result<()> {
    let (dtype, shape) = (given.dtype()?, given.shape());
    if tensor.dtype == dtype && tensor.whole_shape() == shape {
        return Ok(());
    }
    let (name, expected) = (Escaped(given.name()), format!("{} {:?}", tensor.dtype, tensor.whole_shape()));
    Err(Error::InvalidArgument(format!("tensor {name} is {dtype} {shape:?} here, and {expected} in the pair")))
}

/// Indices of the tensors to change so that each memory range is changed once. Tied weights are one range with several names;
/// their targets must be equal. Dtypes and shapes must be those in the pair.
pub fn each_memory_once<'a>(
    pair: &tpde::Pair<FileSource>,
    tensors: impl IntoIterator<Item = &'a Memory>,
) -> Result<HashSet<usize>> {
    let mut found = Vec::new();
    for (i, given) in tensors.into_iter().enumerate() {
        let mut entries = pair.index().entries(given.name());
        let first = entries.next().ok_or_else(|| unknown(given.name()))?;
        check_type(given, &first)?;
        let has_no_base = first.base_kind == BaseKind::None && entries.all(|entry| entry.base_kind == BaseKind::None);
        // The index has checked that the shape is valid.
        let expected = first.dtype.lanes(first.whole_shape()).unwrap_or(0) * first.dtype.lane_bytes() as u64;
        let found_bytes = given.range().len() as u64;
        if found_bytes != expected {
            let name = Escaped(given.name());
            return Err(Error::InvalidArgument(format!("tensor {name} has {found_bytes} bytes, expected {expected}")));
        }
        found.push((i, given.span(), first.name, has_no_base));
    }
    // Among tied tensors, one with a base comes first, because only its base can be checked.
    found.sort_by_key(|(.., has_no_base)| *has_no_base);
    let spans: Vec<_> = found.iter().map(|(_, span, ..)| span.clone()).collect();
    let refused = |[a, b]: [usize; 2], why| {
        let [a, b] = [a, b].map(|i| Escaped(found[i].2));
        Error::InvalidArgument(format!("tensors {a} and {b} share {why}"))
    };
    let first_of = relation(&spans).map_err(|both| refused(both, "a part of their memory"))?;
    for (i, &first) in first_of.iter().enumerate().filter(|(i, first)| i != *first) {
        let is_same = |(a, b): (Tensor<'_>, Tensor<'_>)| {
            (b.base_kind == BaseKind::None || a.base_digest() == b.base_digest()) && has_same_target(&a, &b)
        };
        let (ours, others) = (pair.index().entries(found[first].2), pair.index().entries(found[i].2));
        if ours.len() != others.len() || !ours.zip(others).all(is_same) {
            return Err(refused([first, i], "memory, but not their values in the pair"));
        }
    }
    Ok((0..).zip(&found).filter(|(i, _)| first_of[*i] == *i).map(|(_, (given, ..))| *given).collect())
}
