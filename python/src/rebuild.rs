//! Layer weights that are rebuilt repeatedly on a CUDA device, in memory allocated by PyTorch.

use crate::device::Device;
use crate::errors;
use crate::memory::Memory;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError, TryLockError};
use tpde::{Error, Result};
use tpde_cuda::{Application, ApplyPlan, Pending};

/// Owners of the memory that a rebuild uses. Held as long as the rebuild.
pub struct Owners(pub Vec<Memory>);

/// A planned rebuild, which still needs working memory.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Plan {
    pub planned: Mutex<Option<(ApplyPlan<'static>, Owners)>>,
}

#[pymethods]
impl Plan {
    /// Size in bytes of the device memory that the rebuild needs.
    fn bytes(&self) -> u64 {
        let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        planned.as_ref().map_or(0, |(planned, _)| planned.bytes())
    }

    /// Makes the rebuild ready to run, with `memory` as working memory. A plan can be prepared once.
    fn prepare(&self, py: Python<'_>, memory: Memory) -> PyResult<Rebuild> {
        let prepare = || {
            let taken = self.planned.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (planned, mut owners) = taken.ok_or_else(|| Error::InvalidArgument("the plan has already been prepared".into()))?;
            // SAFETY: `owners` is stored beside the application, so the memory stays allocated as long as the application.
            let application = Application::prepare_in(planned, unsafe { memory.device_slice() })?;
            owners.0.push(memory);
            Ok(Rebuild { application, _owners: owners })
        };
        prepare().map_err(|e| errors::to_python(py, &e))
    }
}

/// A prepared out-of-place rebuild of tensors. It can be launched any number of times.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Rebuild {
    application: Application<'static>,
    _owners: Owners,
}

#[pymethods]
impl Rebuild {
    /// Queues the rebuild on a stream.
    fn launch(&self, py: Python<'_>, device: &Device, stream: usize) -> PyResult<Launched> {
        // SAFETY: the handle is of a PyTorch stream of this device. PyTorch never destroys its streams.
        let stream = unsafe { device.0.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        let pending = py.detach(|| self.application.launch(&stream)).map_err(|e| errors::to_python(py, &e))?;
        Ok(Launched { state: Mutex::new(Launch::Pending(pending)) })
    }

    /// Queues the rebuild on a stream that is being captured. The caller keeps this object and the result while the graph may run.
    fn capture(&self, py: Python<'_>, device: &Device, stream: usize) -> PyResult<Captured> {
        // SAFETY: as in `launch`.
        let stream = unsafe { device.0.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        // SAFETY: the caller keeps this object and the result while the graph may run, and runs all replays on one stream.
        let captured = py.detach(|| unsafe { self.application.capture(&stream) });
        Ok(Captured(captured.map_err(|e| errors::to_python(py, &e))?))
    }
}

/// A launched rebuild.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Launched {
    state: Mutex<Launch>,
}

enum Launch {
    Pending(Pending),
    Passed(Result<()>),
}

impl Launch {
    fn finish(&mut self) {
        *self = match std::mem::replace(self, Self::Passed(Ok(()))) {
            Self::Pending(pending) => Self::Passed(pending.wait()),
            passed @ Self::Passed(_) => passed,
        };
    }

    /// Waits for the outcome, and raises an error.
    fn pass(&mut self, py: Python<'_>) -> PyResult<()> {
        self.finish();
        match self {
            Self::Passed(Err(error)) => Err(errors::to_python(py, error)),
            _ => Ok(()),
        }
    }
}

#[pymethods]
impl Launched {
    /// Whether the rebuild has finished. Raises its error on every call, because a caller may be interrupted before it has recorded
    /// the error that the first call raised.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false), // another thread is in `wait`
        };
        if let Launch::Pending(pending) = &*state
            && !pending.is_done().map_err(|e| errors::to_python(py, &e))?
        {
            return Ok(false);
        }
        state.pass(py).map(|()| true)
    }

    /// Waits until the rebuild has finished. Raises its error as [`Self::is_done`].
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let lock = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        py.detach(|| lock().finish());
        lock().pass(py)
    }
}

/// A rebuild that was captured into a graph.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Captured(tpde_cuda::Captured);

#[pymethods]
impl Captured {
    /// Raises the error of the last replay, if any. That replay must have finished.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.0.check().map_err(|e| errors::to_python(py, &e))
    }
}
