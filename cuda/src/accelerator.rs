//! Decodes on a device instead of the processor: [`Apply::on`](tpde::Apply::on).

use super::application::Application;
use super::hashes::Hashes;
use super::index::{DeviceIndex, PayloadDigestSource};
#[cfg(feature = "nvcomp")]
use super::nvcomp::Nvcomp;
use super::plan::ApplyPlan;
use super::plan::binding::Binding;
use super::plan::payloads::{Mode, Payloads};
use super::rows::Rows;
use super::runtime::device::Device;
use super::runtime::memory::DeviceSlice;
use rayon::prelude::*;
use tpde::{Accelerator, PayloadDigests, TensorHashes, Work};
use tpde_core::error::Result;
use tpde_core::format::DIGEST_SIZE;
use tpde_core::index::Tensor;

/// Maximum size of the bases and outputs of a batch, in bytes. A larger tensor is a batch of its own.
const BATCH_BYTES: u64 = 2 << 30;
/// Size of a read from a checkpoint, in bytes.
const PIECE: usize = 1 << 20;
/// Alignment of tensors in device memory, in bytes.
const ALIGN: u64 = 256;

impl Accelerator for Device {
    /// Processes tensors in batches: reads the bases into pinned memory, copies them to the device, decodes out of place, and
    /// copies the outputs back. Device memory: bases and outputs of one batch (2 GiB, or one larger tensor), and the payloads of
    /// the batch.
    fn rebuild(&self, work: &Work<'_>, done: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<PayloadDigests> {
        rebuild_with(self, &DeviceIndex::upload(self, work.index)?, work, done)
    }
}

/// A device with nvCOMP. nvCOMP expands payloads of codec `zstd`. The writer of the pair must be trusted, see [`Nvcomp`].
#[cfg(feature = "nvcomp")]
#[derive(Debug)]
pub struct NvcompDevice {
    /// The device.
    pub device: Device,
    /// The library.
    pub nvcomp: Nvcomp,
}

#[cfg(feature = "nvcomp")]
impl Accelerator for NvcompDevice {
    fn rebuild(&self, work: &Work<'_>, done: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<PayloadDigests> {
        let index = DeviceIndex::upload(&self.device, work.index)?.trust(&self.nvcomp)?;
        rebuild_with(&self.device, &index, work, done)
    }
}

fn rebuild_with(
    device: &Device,
    index: &DeviceIndex,
    work: &Work<'_>,
    done: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
) -> Result<PayloadDigests> {
    let (mut compared, mut payloads) = (PayloadDigests::All, 0);
    let stream = device.stream()?;
    if index.uploaded.payload_digests == PayloadDigestSource::Root && index.uploaded.payload_count == 0 {
        // No payload reaches the device. The list has a zero digest per chunk.
        work.index.check_payload_list(&vec![[0; DIGEST_SIZE]; index.uploaded.records.len()])?;
    }
    let mut first = 0;
    while first < work.tensors.len() {
        let (end, [base_bytes, bytes]) = batch_after(work, first);
        let batch = &work.tensors[first..end];

        let (bases, outputs) = (device.alloc(base_bytes)?, device.alloc(bytes)?);
        let mut bindings = Vec::with_capacity(batch.len());
        let (mut base_at, mut at) = (0, 0);
        for entry @ &(tensor_index, base_index) in batch {
            let tensor = work.index.tensor(tensor_index);
            let base = bases.slice(base_at, tensor.base_bytes())?;
            if let Some(base_index) = base_index {
                load(device, work, &tensor, base_index, &base)?;
            }
            // `work.base` has converted lanes where the base is derived: their digest is compared too.
            bindings
                .push(Binding::out_of_place(tensor_index, base_index.map(|_| base), outputs.slice(at, tensor.bytes())?).formed());
            let [base, target] = padded_bytes(work, entry);
            (base_at, at) = (base_at + base, at + target);
        }
        let plan = ApplyPlan::new(index, &bindings, Mode::OutOfPlace, Payloads::Host(work.blob))?;
        payloads += plan.schedule.payload_count(index);
        if plan.compared() == PayloadDigests::NotCompared {
            compared = PayloadDigests::NotCompared;
        }
        // Outputs are hashed below, where bases are.
        Application::prepare(plan.digests(false))?.launch(&stream)?.wait()?;
        let mut hashes = match work.hashed {
            Some(_) => Hashes::queue(&stream, &hashed_memory(work, &bindings))?.wait()?.into_iter(),
            None => Vec::new().into_iter(),
        };
        for (i, binding) in bindings.iter().enumerate() {
            let mut target = device.pinned(binding.output.bytes() as usize)?;
            device.read(&binding.output, &mut target)?;
            if let (Some(hashed), Some(target)) = (work.hashed, hashes.next()) {
                let base = if has_hashed_base(work, binding) { hashes.next() } else { None };
                hashed(TensorHashes { base, target });
            }
            done(first + i, &target)?;
        }
        first = end;
    }
    Ok(match compared {
        PayloadDigests::All if payloads < index.uploaded.payload_count as usize => PayloadDigests::EachRead,
        _ if index.uploaded.payload_digests == PayloadDigestSource::None => PayloadDigests::NotCompared,
        _ => compared,
    })
}

/// Sizes of a tensor's base and target in device memory.
fn padded_bytes(work: &Work<'_>, &(tensor_index, _): &(usize, Option<usize>)) -> [u64; 2] {
    let tensor = work.index.tensor(tensor_index);
    [tensor.base_bytes(), tensor.bytes()].map(|bytes| bytes.next_multiple_of(ALIGN))
}

/// Returns the end of the batch that begins with tensor `first`, and the sizes of its bases and targets.
fn batch_after(work: &Work<'_>, first: usize) -> (usize, [u64; 2]) {
    let (mut sizes, mut end) = ([0, 0], first);
    for entry in &work.tensors[first..] {
        let [base, target] = padded_bytes(work, entry);
        if end > first && sizes[0] + base + sizes[1] + target > BATCH_BYTES {
            break;
        }
        (sizes, end) = ([sizes[0] + base, sizes[1] + target], end + 1);
    }
    (end, sizes)
}

/// Returns the memory to be hashed: for each tensor its target, then its base if that has a hash of its own.
fn hashed_memory(work: &Work<'_>, bindings: &[Binding]) -> Vec<(DeviceSlice, Option<Rows>)> {
    let of_binding = |binding: &Binding| {
        let base = binding.base.clone().filter(|_| has_hashed_base(work, binding));
        [Some(binding.output.clone()), base].into_iter().flatten().map(|memory| (memory, None))
    };
    bindings.iter().flat_map(of_binding).collect()
}

/// Bases of kind `prefix` are hashed by the CPU, once for all tensors that share one.
fn has_hashed_base(work: &Work<'_>, binding: &Binding) -> bool {
    binding.base.is_some() && work.index.tensor(binding.tensor).base_kind.has_all_lanes()
}

/// Copies a tensor of the base to the device.
fn load(device: &Device, work: &Work<'_>, tensor: &Tensor<'_>, tensor_index: usize, to: &DeviceSlice) -> Result<()> {
    let mut pinned = device.pinned(tensor.base_bytes() as usize)?;
    pinned.par_chunks_mut(PIECE).enumerate().try_for_each(|(i, piece)| work.base.read(tensor_index, (i * PIECE) as u64, piece))?;
    device.write(to, &pinned)
}
