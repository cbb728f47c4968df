//! Temporary folders.

use crate::errors;
use pyo3::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// A folder for files that are thrown away, in `parent` or in the system's folder for them. It is removed with this object, but not by
/// a fork of the process that has made it.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct TemporaryFolder {
    process: u32,
    folder: Mutex<Option<tpde::TemporaryFolder>>,
    #[pyo3(get)]
    path: PathBuf,
}

#[pymethods]
impl TemporaryFolder {
    #[new]
    fn create(py: Python<'_>, parent: Option<PathBuf>) -> PyResult<Self> {
        let folder = match parent {
            Some(parent) => tpde::TemporaryFolder::create_in(&parent),
            None => tpde::TemporaryFolder::create(),
        };
        let folder = folder.map_err(|error| errors::to_python(py, &error))?;
        let path = Path::to_path_buf(folder.path());
        Ok(Self { process: std::process::id(), folder: Mutex::new(Some(folder)), path })
    }

    /// Removes the folder.
    fn close(&self) {
        let folder = self.folder.lock().unwrap_or_else(PoisonError::into_inner).take();
        if std::process::id() != self.process {
            std::mem::forget(folder);
        }
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        self.close();
    }
}
