//! Encodes tensors on CUDA devices.
//!
//! The encoder's memory is the driver's, not PyTorch's. Calls wait until the device has read the tensors, so their memory needs no
//! record of streams.

use crate::device::Device;
use crate::errors;
use crate::memory::{SliceMemory, Tensors};
use crate::pair::Pair;
use crate::paths::{Options, encode_report};
use crate::run::run;
use pyo3::prelude::*;
use std::path::PathBuf;
use tpde::Result;
use tpde_cuda::{DeviceCheckpoint, Encode};

/// Encodes tensors on a CUDA device. Keeps device memory and pinned memory from one pair to the next.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct Encoder {
    device: tpde_cuda::Device,
    memory: tpde_cuda::Encoder,
}

#[pymethods]
impl Encoder {
    #[new]
    fn new(device: &Device) -> Self {
        Self { device: device.0.clone(), memory: tpde_cuda::Encoder::new() }
    }

    /// Writes a pair. `base_pair` is the pair of which the base is the target: its target digests are not computed again. Work
    /// that is queued on `stream` completes before tensors are read.
    #[pyo3(signature = (target, path, *, base, base_pair, stream, options, replace, progress))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn encode(
        &self,
        py: Python<'_>,
        target: Tensors,
        path: PathBuf,
        base: Option<Tensors>,
        base_pair: Option<PyRef<'_, Pair>>,
        stream: usize,
        options: Options,
        replace: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let options = options.parse_for(&target).map_err(|e| errors::to_python(py, &e))?;
        // The caller holds the owners until this call returns.
        let (target, base) = (target.into_unowned(), base.map(Tensors::into_unowned));
        let base_pair = base_pair.map(|pair| pair.shared());
        let total = target.iter().map(SliceMemory::size).sum();
        run(py, progress, total, |steering| {
            let target = self.checkpoint(&target)?;
            let base = base.as_deref().map(|base| self.checkpoint(base)).transpose()?;
            // SAFETY: the handle is of a PyTorch stream of this device. PyTorch never destroys its streams.
            let stream = unsafe { self.device.borrow_stream(std::ptr::with_exposed_provenance_mut(stream)) };
            let mut encode = Encode::new(&target).options(options).after(&stream).encoder(&self.memory).overwrite(replace);
            if let Some(base) = &base {
                encode = encode.base(base);
            }
            if let Some(pair) = &base_pair {
                let whole = pair.index().tensors().filter(|tensor| tensor.part.is_none());
                encode = encode.base_digests(whole.map(|tensor| (tensor.name.to_owned(), *tensor.target_digest())));
            }
            Ok(encode_report(&encode.watch(steering).to_path(&path)?, &path, &[]))
        })
    }
}

impl Encoder {
    fn checkpoint(&self, slices: &[SliceMemory]) -> Result<DeviceCheckpoint> {
        let slices = slices.iter().map(|slice| {
            // SAFETY: `tpde/_memory/torch_tensors.py` has checked that these are PyTorch tensors on this device. The caller of the public
            // function holds them until the call returns, and the call waits for the device.
            Ok((slice.0.dtype()?, slice.0.shape().to_vec(), unsafe { slice.on_device() }))
        });
        DeviceCheckpoint::of_slices(&self.device, slices.collect::<Result<Vec<_>>>()?)
    }
}
