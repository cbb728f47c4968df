//! Weights of layers that are rebuilt on a CUDA device again and again, in memory that PyTorch gives.

use crate::device::Device;
use crate::errors;
use crate::memory::Memory;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError, TryLockError};
use tpde::cuda::{self, Application, ApplyPlan, Pending};
use tpde::{Error, Result};

/// What has to stay while a rebuilding is used.
pub struct Owners(pub Vec<Memory>);

/// A rebuilding that lacks memory to work in.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Plan {
    pub planned: Mutex<Option<(ApplyPlan<'static>, Owners)>>,
}

#[pymethods]
impl Plan {
    /// Bytes of device memory that it needs.
    fn bytes(&self) -> u64 {
        let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        planned.as_ref().map_or(0, |(planned, _)| planned.bytes())
    }

    /// Makes it ready in `memory`, once.
    fn prepare(&self, py: Python<'_>, memory: Memory) -> PyResult<Rebuild> {
        let prepare = || {
            let taken = self.planned.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (planned, mut owners) = taken.ok_or_else(|| Error::InvalidArgument("a plan is prepared once".into()))?;
            // SAFETY: the owner is held with the application.
            let application = Application::prepare_in(planned, unsafe { memory.device_slice() })?;
            owners.0.push(memory);
            Ok(Rebuild { application, _owners: owners })
        };
        prepare().map_err(|e| errors::to_python(py, &e))
    }
}

/// A tensor's rebuilding out of place, ready to be launched again and again.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Rebuild {
    application: Application<'static>,
    _owners: Owners,
}

#[pymethods]
impl Rebuild {
    /// Queues it on a stream.
    fn launch(&self, py: Python<'_>, device: &Device, stream: usize) -> PyResult<Launched> {
        // SAFETY: PyTorch's stream of this device, which it never destroys.
        let stream = unsafe { device.0.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        let pending = py.detach(|| self.application.launch(&stream)).map_err(|e| errors::to_python(py, &e))?;
        Ok(Launched { state: Mutex::new(Launch::Pending(pending)) })
    }

    /// Queues it on a stream that is being captured. The caller keeps this object and the result while the graph may run.
    fn capture(&self, py: Python<'_>, device: &Device, stream: usize) -> PyResult<Captured> {
        // SAFETY: as in `launch`.
        let stream = unsafe { device.0.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        // SAFETY: the caller keeps what has to be kept, and replays follow each other on one stream.
        let captured = py.detach(|| unsafe { self.application.capture(&stream) });
        Ok(Captured(captured.map_err(|e| errors::to_python(py, &e))?))
    }
}

/// A rebuilding that is under way.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Launched {
    state: Mutex<Launch>,
}

enum Launch {
    Pending(Pending),
    Passed(Result<()>),
}

#[pymethods]
impl Launched {
    /// Whether it has passed.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false), // another thread waits for it
        };
        match &*state {
            Launch::Pending(pending) => pending.is_done().map_err(|e| errors::to_python(py, &e)),
            Launch::Passed(_) => Ok(true),
        }
    }

    /// Waits for it, and raises what was wrong, every time: a caller may be interrupted before it has noted that.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let lock = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        py.detach(|| {
            let mut state = lock();
            *state = match std::mem::replace(&mut *state, Launch::Passed(Ok(()))) {
                Launch::Pending(pending) => Launch::Passed(pending.wait()),
                passed @ Launch::Passed(_) => passed,
            };
        });
        match &*lock() {
            Launch::Passed(Err(error)) => Err(errors::to_python(py, error)),
            _ => Ok(()),
        }
    }
}

/// A rebuilding within a graph.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Captured(cuda::Captured);

#[pymethods]
impl Captured {
    /// Raises what was wrong with the last replay, which must have passed.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.0.check().map_err(|e| errors::to_python(py, &e))
    }
}
