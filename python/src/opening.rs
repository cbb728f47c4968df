//! A pair that a thread of the pool opens and uploads while the interpreter describes tensors.

use crate::device::Device;
use crate::device_pair::{DeviceMemory, DevicePair};
use crate::errors;
use crate::later::Later;
use crate::pair::{self, Pair};
use crate::read_ahead::ReadAhead;
use crate::run::LOOK;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use tpde::{FileSource, Result};
use tpde_cuda::{DeviceIndex, DeviceSlice};

/// An opened pair, and its index on the device unless the memory for it was too small.
type OpenedPair = (Arc<tpde::Pair<FileSource>>, Option<DeviceIndex>, Option<ReadAhead>);

/// A pair that is being opened for one call.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Opening {
    opened: Arc<Later<Result<Option<OpenedPair>>>>,
    /// Owner of the memory for the index.
    _memory: Py<PyAny>,
}

#[pymethods]
impl Opening {
    /// Starts to open the pair at `path`, to read its payloads, and to upload its index to `memory`, which `owner` keeps. `None` if no
    /// thread can start.
    #[staticmethod]
    #[pyo3(signature = (device, path, expect, memory, owner))]
    fn start(device: &Device, path: PathBuf, expect: Option<[u8; 32]>, memory: DeviceMemory, owner: Py<PyAny>) -> Option<Self> {
        let device = device.0.clone();
        let opened = Later::start(move || {
            let Some(pair) = pair::open_at_once(&path, expect)? else { return Ok(None) };
            let pair = Arc::new(pair);
            if DeviceIndex::bytes_of(pair.index())? > memory.1 {
                return Ok(Some((pair, None, None)));
            }
            let read = ReadAhead::start(&device, &pair);
            // An error appears again when the index is uploaded to other memory.
            let index = upload(&device, &pair, memory).ok();
            Ok(Some((pair, index, read)))
        })?;
        Some(Self { opened, _memory: owner })
    }

    /// Waits until the pair is open, and looks for signals meanwhile. `None` if the pair is being published, which can take long. The
    /// second value is `None` if the upload of the index failed, or needs more memory.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<(Pair, Option<DevicePair>)>> {
        while !py.detach(|| self.opened.ends_within(LOOK)) {
            py.check_signals()?;
        }
        let opened = py.detach(|| self.opened.take()).unwrap_or(Ok(None)).map_err(|error| errors::to_python(py, &error))?;
        Ok(opened.map(|(pair, index, read)| {
            (Pair::without_base(pair.clone()), index.map(|index| DevicePair::for_one_call(pair, index, read)))
        }))
    }
}

impl Drop for Opening {
    /// The memory must not be reused while a thread may still upload to it.
    fn drop(&mut self) {
        // Without the interpreter's lock, because work on the pool may need it.
        let wait = || self.opened.abandon();
        Python::try_attach(|py| py.detach(wait)).unwrap_or_else(wait);
    }
}

fn upload(device: &tpde_cuda::Device, pair: &tpde::Pair<FileSource>, (address, bytes): DeviceMemory) -> Result<DeviceIndex> {
    // SAFETY: `Opening` holds the owner of the memory until the upload has been queued, and `tpde/_engine/device.py` holds it after that. The
    // tensor is recorded with the copy stream.
    let memory = unsafe { DeviceSlice::from_raw(address, bytes) };
    DeviceIndex::upload_to(device, pair.index(), memory)
}
