//! CUDA devices, and the graphs into which their streams are captured.

use crate::errors;
use crate::run::run;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// A CUDA device. Each process opens a device once and shares the handle.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Device(pub tpde_cuda::Device);

#[pymethods]
impl Device {
    /// Opens the device with this ordinal. PyTorch and the driver use the same ordinals.
    #[new]
    fn open(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        static OPEN: Mutex<Vec<(u32, u32, tpde_cuda::Device)>> = Mutex::new(Vec::new());
        run(py, None, 0, |_| {
            let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
            let key = (std::process::id(), ordinal);
            if let Some((.., device)) = open.iter().find(|(process, ordinal, _)| (*process, *ordinal) == key) {
                return Ok(Self(device.clone()));
            }
            let device = tpde_cuda::Device::open(ordinal)?;
            open.push((key.0, key.1, device.clone()));
            Ok(Self(device))
        })
    }

    /// Calls `make` in a mode in which it may allocate while a stream is being captured. The memory does not belong to the graph.
    fn beside_captures(&self, py: Python<'_>, make: Py<PyAny>) -> PyResult<Py<PyAny>> {
        self.0.beside_captures(|| make.call0(py)).map_err(|e| errors::to_python(py, &e))?
    }

    /// Id of the stream's current capture, if any. Ids are unique in the process and not reused.
    fn capture_id(&self, py: Python<'_>, stream: usize) -> PyResult<Option<u64>> {
        // SAFETY: the handle is of a PyTorch stream of this device. PyTorch never destroys its streams.
        let stream = unsafe { self.0.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        stream.capture_id().map_err(|e| errors::to_python(py, &e))
    }

    /// The graph that the stream is being captured into.
    fn captured_graph(&self, py: Python<'_>, stream: usize) -> PyResult<Graph> {
        // SAFETY: as in `capture_id`.
        let stream = unsafe { self.0.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
        stream.captured_graph().map(Graph).map_err(|e| errors::to_python(py, &e))
    }

    /// Handle of the copy stream. Memory passed to this module must be free in the order of this stream.
    fn copy_stream(&self) -> usize {
        self.0.copy_stream().addr()
    }
}

/// A graph that a stream was captured into.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Graph(tpde_cuda::Graph);

#[pymethods]
impl Graph {
    /// Whether the graph is destroyed. The work captured into a destroyed graph cannot run again.
    fn is_destroyed(&self) -> bool {
        self.0.is_destroyed()
    }
}
