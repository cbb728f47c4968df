//! Tensors that a call takes.

use crate::memory::{ExpectedTensor, PlainTensors};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tpde::{BaseKind, Dtype, FileSource, Tensor};

/// Tensors that a call takes: all of the target, or the base tensors of some.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Outline {
    pair: Arc<tpde::Pair<FileSource>>,
    tensors: Arc<Vec<ExpectedTensor>>,
}

/// Tensors as [`Outline::plain`] takes them: names, dtypes, dims, addresses, offsets, sizes of storages, and owners.
type Columns<'py> = (Vec<Bound<'py, PyString>>, Bound<'py, PyList>, Bound<'py, PyList>, Vec<usize>, Vec<u64>, Vec<u64>, Py<PyAny>);

/// Dtype and dims of a tensor.
type Kind = (Py<PyString>, Option<Vec<u64>>);

#[pymethods]
impl Outline {
    fn names(&self, py: Python<'_>) -> Vec<Py<PyString>> {
        self.tensors.iter().map(|one| PyString::new(py, &one.name).unbind()).collect()
    }

    /// Dtypes and dims; no dims if the number of rows may be any.
    fn expected(&self, py: Python<'_>) -> Vec<Kind> {
        self.tensors.iter().map(|one| (PyString::intern(py, one.dtype.name()).unbind(), one.shape.clone())).collect()
    }

    /// Whether an application in place writes each tensor.
    fn is_written(&self) -> Vec<bool> {
        self.tensors.iter().map(|one| one.is_written).collect()
    }

    /// Those of the tensors that are `wanted`.
    fn select(&self, wanted: Vec<bool>) -> Self {
        let wanted = self.tensors.iter().zip(wanted).filter(|(_, wanted)| *wanted);
        Self::new(&self.pair, wanted.map(|(one, _)| one.clone()).collect())
    }

    /// The base tensors of these tensors, each once, with tensors of scales.
    fn bases(&self) -> Self {
        let index = self.pair.index();
        let mut known = HashSet::new();
        let mut bases = Vec::new();
        for one in &*self.tensors {
            let mut entries = match one.entry {
                Some(entry) => vec![index.tensor(entry)],
                None => index.entries(&one.name).collect(),
            };
            entries.retain(|entry| entry.base_kind != BaseKind::None);
            let Some((part, shape)) = entries.first().and_then(|part| Some((part, part.base_shape()?))) else { continue };
            let has_any_rows = part.base_kind == BaseKind::Prefix;
            for (name, dtype, shape) in base_tensors(part, shape) {
                if known.insert(name) {
                    let shape = (!has_any_rows).then_some(shape);
                    bases.push(ExpectedTensor { name: name.to_owned(), dtype, shape, is_written: false, entry: None });
                }
            }
        }
        Self::new(&self.pair, bases)
    }

    /// Finds the memory of these tensors in the columns: names, dtypes, dims, addresses, offsets in their storages in elements, sizes
    /// of the storages in bytes, and an object that keeps the storages in place. Tensors in the columns are contiguous. `None` if a
    /// tensor is missing, has another dtype or shape, has elements of less than a byte, or has a storage that is too small.
    fn plain(&self, columns: Columns<'_>) -> Option<PlainTensors> {
        let (names, dtypes, shapes, addresses, offsets, storages, owners) = columns;
        // No tensor of a pair has a name that is not Unicode.
        let named = names.iter().enumerate().filter_map(|(row, name)| Some((name.to_str().ok()?, row)));
        let rows: HashMap<&str, usize> = named.collect();
        let mut expected = self.tensors.clone();
        let mut places = Vec::with_capacity(expected.len());
        for (i, one) in self.tensors.iter().enumerate() {
            (one.dtype.bits() % 8 == 0).then_some(())?; // packed elements
            let row = *rows.get(one.name.as_str())?;
            let dtype = dtypes.get_item(row).ok()?;
            if dtype.cast::<PyString>().ok()?.to_str().ok()? != one.dtype.name() {
                return None;
            }
            let shape = shapes.get_item(row).ok()?;
            let shape = shape.cast::<PyTuple>().ok()?;
            match &one.shape {
                Some(expected) => {
                    let mut dims = shape.iter().zip(expected);
                    let is_alike =
                        shape.len() == expected.len() && dims.all(|(dim, expected)| dim.extract().ok() == Some(*expected));
                    is_alike.then_some(())?;
                }
                None => Arc::make_mut(&mut expected)[i].shape = Some(shape.extract().ok()?),
            }
            let element = one.dtype.bits() / 8;
            let size = expected[i].shape.iter().flatten().try_fold(element, |size, &dim| size.checked_mul(dim))?;
            let end = element.checked_mul(*offsets.get(row)?)?.checked_add(size)?;
            (size == 0 || end <= *storages.get(row)?).then_some(())?;
            places.push((*addresses.get(row)?, usize::try_from(size).ok()?));
        }
        Some(PlainTensors { expected, places, owners })
    }
}

impl Outline {
    pub fn new(pair: &Arc<tpde::Pair<FileSource>>, tensors: Vec<ExpectedTensor>) -> Self {
        Self { pair: pair.clone(), tensors: Arc::new(tensors) }
    }
}

/// The base tensor of an entry, and its tensor of scales if it has one.
pub fn base_tensors<'a>(entry: &Tensor<'a>, shape: Vec<u64>) -> Vec<(&'a str, Dtype, Vec<u64>)> {
    std::iter::once((entry.base_name, entry.base_dtype(), shape)).chain(entry.scales()).collect()
}
