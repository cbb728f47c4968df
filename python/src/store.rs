//! Stores of versions. Each call runs on the threads of [`run`](crate::run), and can be interrupted while it waits for a request.

use crate::errors::{self, exception};
use crate::memory::{SliceMemory, Tensors};
use crate::pair;
use crate::paths::{Options, Parts, Source, bytes_of, encode_report};
use crate::run::{Failure, Steering, run_with};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tpde::{Apply, Checkpoint, Encode, Rectangle, SafetensorsCheckpoint, ValidatedIndex};
use tpde_store::{
    Anchor, Content, Error, FoldOptions, GetOptions, GetReport, Opened, PutOptions, Result, StoreOptions, StoredPair, Version,
};

impl Failure for Error {
    fn is_cancelled(&self) -> bool {
        matches!(self, Self::Tpde(tpde::Error::Cancelled))
    }

    fn to_python(&self, py: Python<'_>) -> PyErr {
        attributes(py, self).unwrap_or_else(|error| error)
    }
}

fn attributes(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let with = PyDict::new(py);
    let hint = match error {
        Error::NotAStore { .. } => Some("tpde.store.init makes a store: is this the right folder or URL?"),
        Error::External { .. } => {
            Some("have={version: path} passes it as a base; if it is this version that is wanted, use that checkpoint as it is")
        }
        error => error.hint(),
    };
    with.set_item(errors::HINT, hint)?;
    let code = match error {
        Error::Tpde(error) => return Ok(errors::with_hint(py, error, hint)),
        Error::Request { action, object, .. } => {
            with.set_item("action", action)?;
            with.set_item("object", object)?;
            "request"
        }
        Error::NotAStore { location } | Error::Replaced { location } => {
            with.set_item("location", location)?;
            "not_a_store"
        }
        Error::AlreadyAStore { location } => {
            with.set_item("location", location)?;
            "already_a_store"
        }
        Error::NoPutIfAbsent { location } => {
            with.set_item("location", location)?;
            "request"
        }
        Error::Schema { object, .. } | Error::Manifest { object, .. } => {
            with.set_item("object", object)?;
            "manifest"
        }
        Error::Damaged { object, expected, found } => {
            with.set_item("object", object)?;
            with.set_item("expected", expected)?;
            with.set_item("found", found)?;
            "damaged"
        }
        Error::NoVersion { version } => {
            with.set_item("version", version)?;
            "no_version"
        }
        Error::Pruned { version, kept } => {
            with.set_item("version", version)?;
            with.set_item("kept", kept)?;
            "pruned"
        }
        Error::Conflict { version } => {
            with.set_item("version", version)?;
            "conflict"
        }
        Error::Unreachable { version, .. } => {
            with.set_item("version", version)?;
            "unreachable"
        }
        Error::External { version, hint } => {
            with.set_item("version", version)?;
            with.set_item("hint", hint)?;
            "external"
        }
        Error::TooSlow { seconds, grace } => {
            with.set_item("seconds", seconds)?;
            with.set_item("grace", grace)?;
            "too_slow"
        }
        Error::InvalidArgument(_) => "invalid_argument",
        _ => "other",
    };
    Ok(exception(py, code, &error.to_string(), &with))
}

/// Versions that the caller has as checkpoints, and their paths.
type Have = Vec<(String, PathBuf)>;

/// Options of [`Store::put`].
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct PutArguments {
    branch: String,
    parent: Option<String>,
    whole: bool,
    external: Option<String>,
    have: Have,
    metadata: BTreeMap<String, String>,
}

impl PutArguments {
    fn options(self) -> PutOptions<'static> {
        let mut options = PutOptions::default().branch(self.branch).metadata(self.metadata).anchor(match self.external {
            Some(hint) => Anchor::External { hint },
            None if self.whole => Anchor::Whole,
            None => Anchor::ByRule,
        });
        options.parent = self.parent;
        options.have = self.have;
        options
    }
}

/// An opened store.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Store(tpde_store::Store);

impl Store {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        progress: Option<Py<PyAny>>,
        total: u64,
        work: impl FnOnce(&tpde_store::Store, &Steering) -> Result<T> + Send,
    ) -> PyResult<T> {
        run_with(py, progress, total, |steering| work(&self.0.watched(steering.clone()), steering))
    }
}

#[pymethods]
impl Store {
    #[staticmethod]
    fn init(py: Python<'_>, location: &str, grace: u64, anchor_every: u64, anchor_percent: u64) -> PyResult<Self> {
        let options = StoreOptions::default().grace(Duration::from_secs(grace));
        let options = options.anchor_every(anchor_every).anchor_percent(anchor_percent);
        run_with(py, None, 0, |steering: &Arc<Steering>| {
            tpde_store::Store::init_watched(location, &options, steering.clone()).map(Self)
        })
    }

    #[staticmethod]
    fn open(py: Python<'_>, location: &str, memory: Option<u64>) -> PyResult<Self> {
        let memory = memory.unwrap_or(tpde_store::MEMORY);
        run_with(py, None, 0, |steering: &Arc<Steering>| {
            tpde_store::Store::open_watched(location, steering.clone()).map(|store| Self(store.with_memory(memory)))
        })
    }

    /// Stores a checkpoint in files, or tensors in memory.
    #[pyo3(signature = (checkpoint, *, arguments, options, progress))]
    fn put(
        &self,
        py: Python<'_>,
        checkpoint: Source,
        arguments: PutArguments,
        options: Options,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let options = options.parse().map_err(|error| errors::to_python(py, &error))?;
        let put = arguments.options().encode(options);
        let total = match &checkpoint {
            Source::Memory(tensors) => tensors.size(),
            Source::Path(path) => {
                run_with(py, None, 0, |_| -> tpde::Result<_> { Ok(bytes_of(&SafetensorsCheckpoint::open(path)?)) })?
            }
        };
        self.call(py, progress, total, |store, steering| {
            let put = put.watch(steering);
            let version = match &checkpoint {
                Source::Memory(tensors) => store.put_tensors(&*tensors.checkpoint()?, &put)?,
                Source::Path(path) => store.put(path, &put)?,
            };
            Ok(described(&version))
        })
    }

    /// Stores a pair that was made elsewhere.
    #[pyo3(signature = (pair, *, arguments))]
    fn put_pair(&self, py: Python<'_>, pair: PathBuf, arguments: PutArguments) -> PyResult<String> {
        let put = arguments.options();
        self.call(py, None, 0, |store, steering| Ok(described(&store.put_pair(&pair, &put.watch(steering))?)))
    }

    /// Uploads a pair without a version. Returns what [`Store::download_pair`] takes.
    fn upload_pair(&self, py: Python<'_>, pair: PathBuf) -> PyResult<String> {
        self.call(py, None, 0, |store, _| Ok(json!(store.upload_pair(&pair)?).to_string()))
    }

    fn download_pair(&self, py: Python<'_>, stored: &str, folder: PathBuf) -> PyResult<PathBuf> {
        self.call(py, None, 0, |store, _| {
            let stored: StoredPair =
                serde_json::from_str(stored).map_err(|e| Error::InvalidArgument(format!("an uploaded pair: {e}")))?;
            store.download_pair(&stored, &folder)
        })
    }

    /// Rebuilds a version. `select` takes the shapes of all tensors by name, and returns first index and number of indexes in each
    /// dimension of the wanted ones.
    #[pyo3(signature = (version, path, *, select, have, cache, progress))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn get(
        &self,
        py: Python<'_>,
        version: &str,
        path: PathBuf,
        select: Option<Py<PyAny>>,
        have: Have,
        cache: Option<PathBuf>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let found = self.call(py, None, 0, |store, _| store.version(version))?;
        let calls = Calls::default();
        let selected = |index: &ValidatedIndex| calls.select(select.as_ref(), index);
        let outcome = self.call(py, progress, found.tensor_bytes, |store, steering| {
            let mut options = GetOptions::default().watch(steering);
            options.have = have;
            options.cache = cache;
            if select.is_some() {
                options = options.select(&selected);
            }
            Ok(rebuilt(&store.get(&found.name(), &path, &options)?))
        });
        calls.end(outcome)
    }

    /// Rebuilds tensors of a version in memory. `select` is as for [`Store::get`]. `allocate` takes name, dtype, shape, and first index and
    /// number of indexes in each dimension, of each wanted tensor, and returns new memory for these.
    #[pyo3(signature = (version, *, select, allocate, have, cache, progress))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn load(
        &self,
        py: Python<'_>,
        version: &str,
        select: Option<Py<PyAny>>,
        allocate: Py<PyAny>,
        have: Have,
        cache: Option<PathBuf>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let found = self.call(py, None, 0, |store, _| store.version(version))?;
        let calls = Calls::default();
        let selected = |index: &ValidatedIndex| calls.select(select.as_ref(), index);
        let outcome = self.call(py, progress, found.tensor_bytes, |store, steering| {
            let mut options = GetOptions::default().watch(steering);
            options.have = have;
            options.cache = cache;
            if select.is_some() {
                options = options.select(&selected);
            }
            let report = store.load(&found.name(), &options, &mut |last, base, wanted| {
                let slices = calls.allocate(&allocate, last.index(), wanted)?;
                // SAFETY: the memory is new, so nothing else uses it.
                let slices = unsafe { pair::slices(last, &slices)? };
                Ok(Apply::new(last).base(base).watch(steering).to_slices(slices).map(|_| ())?)
            })?;
            Ok(rebuilt(&report))
        });
        calls.end(outcome)
    }

    /// Whether the store's rules ask for a whole version behind this one.
    fn needs_anchor(&self, py: Python<'_>, version: &str) -> PyResult<bool> {
        self.call(py, None, 0, |store, _| store.needs_anchor(version))
    }

    fn version(&self, py: Python<'_>, version: &str) -> PyResult<String> {
        self.call(py, None, 0, |store, _| Ok(described(&store.version(version)?)))
    }

    /// The versions of a branch, newest first: all, or at most `limit`.
    #[pyo3(signature = (branch, *, limit))]
    fn log(&self, py: Python<'_>, branch: &str, limit: Option<usize>) -> PyResult<Vec<String>> {
        self.call(py, None, 0, |store, _| {
            let versions = limit.map_or_else(|| store.log(branch), |limit| store.newest(branch, limit))?;
            Ok(versions.iter().map(described).collect())
        })
    }

    /// The versions of a branch from a number on, in ascending order; none if there is no such branch.
    fn since(&self, py: Python<'_>, branch: &str, start: u64) -> PyResult<Vec<String>> {
        self.call(py, None, 0, |store, _| Ok(store.since(branch, start)?.iter().map(described).collect()))
    }

    fn branches(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.call(py, None, 0, |store, _| Ok(store.branches()?.iter().map(described).collect()))
    }

    fn create_branch(&self, py: Python<'_>, name: &str, start: &str) -> PyResult<String> {
        self.call(py, None, 0, |store, _| Ok(described(&store.create_branch(name, start)?)))
    }

    fn delete_branch(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        self.call(py, None, 0, |store, _| Ok(described(&store.delete_branch(name)?)))
    }

    /// Stores one pair past the versions between two.
    #[pyo3(signature = (from_, to, *, have, options, progress))]
    fn fold(
        &self,
        py: Python<'_>,
        from_: &str,
        to: &str,
        have: Have,
        options: Options,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let options = options.parse().map_err(|error| errors::to_python(py, &error))?;
        let total = self.call(py, None, 0, |store, _| Ok(store.version(to)?.tensor_bytes))?;
        self.call(py, progress, total, |store, steering| {
            let mut fold = FoldOptions::default().encode(options).watch(steering);
            fold.have = have;
            Ok(store.fold(from_, to, &fold)?.pair.bytes())
        })
    }

    #[pyo3(signature = (branch, keep_every, *, have, options))]
    fn prune(&self, py: Python<'_>, branch: &str, keep_every: u64, have: Have, options: Options) -> PyResult<String> {
        let options = options.parse().map_err(|error| errors::to_python(py, &error))?;
        self.call(py, None, 0, |store, steering| {
            let mut fold = FoldOptions::default().encode(options).watch(steering);
            fold.have = have;
            Ok(json!(store.prune(branch, keep_every, &fold)?).to_string())
        })
    }

    fn verify(&self, py: Python<'_>, branch: Option<&str>, rebuild: bool) -> PyResult<String> {
        self.call(py, None, 0, |store, _| Ok(json!(store.verify(branch, rebuild)?).to_string()))
    }

    fn gc(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, None, 0, |store, _| Ok(json!(store.gc()?).to_string()))
    }

    fn usage(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, None, 0, |store, _| Ok(json!(store.usage()?).to_string()))
    }

    /// Reads the pairs of a version into a folder. With `parts`, only the payloads of these parts of tensors.
    #[pyo3(signature = (version, *, parts, have, cache))]
    fn open_version(
        &self,
        py: Python<'_>,
        version: &str,
        parts: Option<Parts>,
        have: Have,
        cache: Option<PathBuf>,
    ) -> PyResult<OpenVersion> {
        let rectangle = |(origin, extent): (Vec<u64>, Vec<u64>)| Rectangle::new(origin, extent);
        let parts: Option<BTreeMap<_, Vec<_>>> =
            parts.map(|parts| parts.into_iter().map(|(name, parts)| (name, parts.into_iter().map(rectangle).collect())).collect());
        self.call(py, None, 0, |store, steering| {
            let mut options = GetOptions::default().watch(steering);
            options.have = have;
            options.cache = cache;
            store.open_version(version, parts.as_ref(), &options).map(OpenVersion)
        })
    }
}

/// A version whose pairs are in a local folder.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct OpenVersion(Opened);

#[pymethods]
impl OpenVersion {
    /// Name, dtype and shape of all tensors, names ascending.
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<(String, &'static str, Vec<u64>)>> {
        let chain = self.0.chain().map_err(|error| error.to_python(py))?;
        Ok(chain.tensors().iter().map(|one| (one.name.clone(), one.dtype.name(), one.shape.clone())).collect())
    }

    /// Rebuilds slices of tensors.
    #[pyo3(signature = (slices, *, progress))]
    fn read_slices(&self, py: Python<'_>, slices: Vec<SliceMemory>, progress: Option<Py<PyAny>>) -> PyResult<()> {
        let total = slices.iter().map(SliceMemory::size).sum();
        run_with(py, progress, total, |steering| -> Result<()> {
            let name = self.0.version().name();
            let last =
                self.0.last().ok_or_else(|| Error::InvalidArgument(format!("{name} is a checkpoint that the caller has")))?;
            let base = self.0.chain()?.without_last();
            // SAFETY: the base is in files, and the caller of the public function promises that nothing else uses the memory.
            let slices = unsafe { pair::slices(last, &slices)? };
            Ok(Apply::new(last).base(&base).watch(&**steering).to_slices(slices).map(|_| ())?)
        })
    }

    /// Encodes tensors or slices as a pair whose base is this version.
    #[pyo3(signature = (target, path, *, options, progress))]
    fn encode(
        &self,
        py: Python<'_>,
        target: Tensors,
        path: PathBuf,
        options: Options,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        run_with(py, progress, target.size(), |steering| -> Result<String> {
            let options = options.parse_for(&target)?;
            let (base, target) = (self.0.chain()?, target.checkpoint()?);
            let report = Encode::new(&*target).base(&base).options(options).watch(&**steering).to_path(&path)?;
            Ok(encode_report(&report, &path, &[]))
        })
    }
}

/// Calls of functions of the caller, from threads of the pool. An exception of one ends the work, and is raised in place of its error.
#[derive(Default)]
struct Calls {
    raised: Mutex<Option<PyErr>>,
}

impl Calls {
    fn call<T>(&self, call: impl FnOnce(Python<'_>) -> PyResult<T>) -> tpde::Result<T> {
        Python::attach(call).map_err(|error| {
            self.raised.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            tpde::Error::InvalidArgument("a function of the caller failed".into())
        })
    }

    /// The rectangles that `select` returns for the shapes of all tensors.
    fn select(&self, select: Option<&Py<PyAny>>, index: &ValidatedIndex) -> tpde::Result<BTreeMap<String, Rectangle>> {
        let Some(select) = select else { return Ok(BTreeMap::new()) };
        let shapes: BTreeMap<_, _> = index.tensors().map(|tensor| (tensor.name, tensor.whole_shape())).collect();
        let found: BTreeMap<String, (Vec<u64>, Vec<u64>)> = self.call(|py| select.call1(py, (shapes,))?.extract(py))?;
        Ok(found.into_iter().map(|(name, (origin, extent))| (name, Rectangle::new(origin, extent))).collect())
    }

    /// The memory that `allocate` returns for rectangles of tensors.
    fn allocate(
        &self,
        allocate: &Py<PyAny>,
        index: &ValidatedIndex,
        wanted: &BTreeMap<String, Rectangle>,
    ) -> tpde::Result<Vec<SliceMemory>> {
        let describe = |(name, one): (&String, &Rectangle)| {
            let tensor = index.find(name).ok_or_else(|| pair::unknown(name))?;
            Ok((name.clone(), tensor.dtype.name(), tensor.whole_shape().to_vec(), one.origin.clone(), one.extent.clone()))
        };
        let described = wanted.iter().map(describe).collect::<tpde::Result<Vec<_>>>()?;
        self.call(|py| allocate.call1(py, (described,))?.extract(py))
    }

    fn end<T>(self, outcome: PyResult<T>) -> PyResult<T> {
        match self.raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(raised) => Err(raised),
            None => outcome,
        }
    }
}

/// A version that was rebuilt.
fn rebuilt(report: &GetReport) -> String {
    let left_out: BTreeMap<_, _> = report.left_out.iter().map(|one| (&one.pair, &one.reason)).collect();
    let mut version = facts(&report.version);
    version["left_out"] = json!(left_out);
    version.to_string()
}

/// A version, without the list of its objects.
fn described(version: &Version) -> String {
    facts(version).to_string()
}

fn facts(version: &Version) -> serde_json::Value {
    let (content, hint) = match &version.content {
        Content::Whole(_) => ("whole", None),
        Content::Difference(_) => ("difference", None),
        Content::External { hint } => ("external", Some(hint)),
        Content::Same => ("same", None),
        _ => ("other", None),
    };
    let files: Vec<_> = version.files.iter().map(|file| &file.name).collect();
    json!({
        "name": version.name(),
        "branch": version.branch,
        "number": version.number,
        "parent": version.parent.as_ref().map(|parent| format!("{}@{}", parent.branch, parent.number)),
        "content": content,
        "hint": hint,
        "stored_bytes": version.pair().map_or(0, |pair| pair.bytes()),
        "tensor_bytes": version.tensor_bytes,
        "tensors": version.tensors,
        "files": files,
        "created": version.created,
        "state": version.state.to_string(),
        "metadata": version.metadata,
    })
}
