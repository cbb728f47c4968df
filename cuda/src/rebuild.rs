//! The last version of a chain of pairs, rebuilt on a device beside its base.

use super::application::Application;
use super::application::outcome::Pending;
use super::checkpoint::DeviceCheckpoint;
use super::index::DeviceIndex;
use super::plan::ApplyPlan;
use super::plan::payloads::{Mode, Payloads};
use super::runtime::device::Device;
use super::runtime::driver;
use super::runtime::stream::Stream;
use super::slices::TensorSlice;
use std::collections::VecDeque;
use tpde::internals::{Watcher, progress_methods};
use tpde::{Chain, Checkpoint, InPlace, Pair, TensorInfo, Watch};
use tpde_core::error::{Error, Result};
use tpde_core::format::BaseKind;
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::rectangle::Rectangle;
use tpde_core::source::Source;

/// Alignment of tensors in device memory, in bytes.
const ALIGN: u64 = 256;

/// Maximum number of steps that are queued. Payloads of more steps would be in device memory at the same time.
const STEPS_IN_FLIGHT: usize = 2;

/// Rebuilds the last version of a chain in device memory, beside the base. [`Encode::fold`](super::Encode::fold) makes one pair of
/// the two checkpoints.
///
/// Tensors may be renamed, added, removed, resized or of another dtype in each step. Each part that a pair describes must be in one
/// tensor or part of the version before, with rows at one distance, as [`TensorSlice`] explains.
///
/// Every step compares the CRCs of payloads, the base sums and the target sums, and digests of payloads where the index has one per
/// payload or the payload root covers all. The last step compares the digests of its tensors, which cover those of the steps before.
///
/// Device memory: the last version, and the payloads of two steps. If a step does not keep names, dtypes, shapes and parts, also the
/// version before that step.
///
/// ```no_run
/// use tpde_cuda::{Device, DeviceCheckpoint, Encode, Rebuild};
/// use tpde::{Chain, Codec, EncodeOptions, Pair, SafetensorsCheckpoint};
///
/// # fn main() -> tpde::Result<()> {
/// let device = Device::open(0)?;
/// let base = SafetensorsCheckpoint::open("base.safetensors")?;
/// let pairs = [Pair::open("step-1")?, Pair::open("step-2")?];
/// let chain = Chain::new(&base, &pairs)?;
/// let base = DeviceCheckpoint::upload(&device, &base)?;
/// let last = Rebuild::new(&chain, &base).run()?;
/// let options = EncodeOptions::default().codec(Codec::Conditioned);
/// Encode::fold(&chain, &base, &last).options(options).to_path("both")?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is rebuilt before `run` is called"]
pub struct Rebuild<'a, B> {
    chain: &'a Chain<'a, B>,
    base: &'a DeviceCheckpoint,
    watcher: Watcher<'a>,
}

/// A step that is queued: its index in the chain, its size, and its outcome.
type InFlightStep = (usize, u64, Pending);

impl<'a, B: Source> Rebuild<'a, B> {
    /// Takes a chain, and the tensors of its base on a device. All work on these tensors must have completed.
    pub fn new(chain: &'a Chain<'a, B>, base: &'a DeviceCheckpoint) -> Self {
        Self { chain, base, watcher: Watcher::Nobody }
    }

    progress_methods!("the size of the target tensors of all pairs");

    /// Rebuilds the last version, and waits for the outcome. Without steps, it is the base, in the same memory.
    ///
    /// # Errors
    /// - [`Error::Step`] with the number of the pair whose check failed. Its source is what [`Apply`](tpde::Apply) finds on the
    ///   processor, as [`Error::WrongBase`], if the base of the chain can be read and has the same fault.
    /// - [`Error::Step`] with [`Error::NotHeld`] or [`Error::InvalidArgument`] if parts of a step do not fit into those of the
    ///   version before, or have rows at two distances; with [`Error::InvalidArgument`] if the base lacks a tensor.
    /// - [`Error::Device`] if the driver fails, or if there is too little memory.
    /// - Any error of the watcher.
    pub fn run(&self) -> Result<DeviceCheckpoint> {
        self.run_on(&self.base.device().stream()?)
    }

    /// [`Rebuild::run`] on a stream. No work of the stream is still running when this returns or panics.
    pub(super) fn run_on(&self, stream: &Stream) -> Result<DeviceCheckpoint> {
        let _drained = StreamGuard(stream);
        let mut in_flight = VecDeque::new();
        let rebuilt = self.rebuild(stream, &mut in_flight);
        // A step that was queued before the one with an error may have caused it.
        self.wait(&mut in_flight, 0).and(rebuilt)
    }

    fn rebuild(&self, stream: &Stream, in_flight: &mut VecDeque<InFlightStep>) -> Result<DeviceCheckpoint> {
        let mut version: Option<DeviceCheckpoint> = None;
        let count = self.chain.pairs().len();
        for (step, pair) in self.chain.pairs().enumerate() {
            let is_kept = version.as_ref().is_some_and(|version| keeps_memory(version, pair.index()));
            // Otherwise memory is allocated, and no work needs the version before the last one any more.
            let still_queued = if is_kept { STEPS_IN_FLIGHT - 1 } else { 0 };
            self.wait(in_flight, still_queued)?;
            let before = version.as_ref().unwrap_or(self.base);
            let (after, pending) = queue(pair, before, is_kept, step + 1 == count, stream).map_err(|e| self.fault(step, e))?;
            in_flight.push_back((step, pair.index().tensor_bytes().1, pending));
            version = Some(after);
        }
        version.map_or_else(|| DeviceCheckpoint::of_slices(self.base.device(), self.base.slices()), Ok)
    }

    /// Waits for steps until no more than `left` are queued, and reports them. After an error none is queued, because it is the cause
    /// of those of later steps.
    fn wait(&self, in_flight: &mut VecDeque<InFlightStep>, left: usize) -> Result<()> {
        let mut outcome = Ok(());
        while in_flight.len() > if outcome.is_ok() { left } else { 0 } {
            let Some((step, bytes, pending)) = in_flight.pop_front() else { break };
            let waited = pending.wait();
            if outcome.is_ok() {
                outcome = waited.map_err(|error| self.explain(step, error)).and_then(|()| self.watcher.done(bytes));
            }
        }
        outcome
    }

    /// The error of a step that failed. A chunk at fault is read again on the processor, which finds the same fault, and whether
    /// the base is another one.
    fn explain(&self, step: usize, error: Error) -> Error {
        // Only memory of this call is a mixture.
        let error = if let Error::Poisoned { source, .. } = error { *source } else { error };
        let chunk = if let Error::Invalid(invalid) = &error { invalid.at.chunk } else { None };
        match chunk.map(|chunk| self.chain.check_chunk(step, chunk)) {
            Some(Err(found @ Error::Step { .. })) => found,
            _ => self.fault(step, error),
        }
    }

    /// Adds the step to an error about its pair.
    fn fault(&self, step: usize, error: Error) -> Error {
        match error {
            Error::Invalid(_) | Error::InvalidArgument(_) | Error::NotHeld { .. } | Error::Incomplete { .. } => {
                self.chain.at_step(step, error)
            }
            _ => error,
        }
    }
}

/// Guard while steps are queued: waits on the host for all work of the stream. The base may be memory of the caller, who may free it
/// after a panic of the watcher.
struct StreamGuard<'a>(&'a Stream);

impl Drop for StreamGuard<'_> {
    fn drop(&mut self) {
        if let Ok(cx) = self.0.device().context.enter() {
            driver::drain(&cx, self.0.raw());
        }
    }
}

/// Queues a step: in the memory of the version before, or in new memory. Returns the new version.
fn queue<B: Source>(
    pair: &Pair<B>,
    before: &DeviceCheckpoint,
    is_kept: bool,
    is_last: bool,
    stream: &Stream,
) -> Result<(DeviceCheckpoint, Pending)> {
    let device = before.device();
    let index = DeviceIndex::upload(device, pair.index())?;
    let (after, bindings, mode) = if is_kept {
        let in_pair = |(.., slice): &(_, _, TensorSlice<'_>)| !index.entries(slice.name).is_empty();
        let after = DeviceCheckpoint::of_slices(device, before.slices().filter(in_pair))?;
        let slices: Vec<_> = after.slices().map(|(.., slice)| slice).collect();
        let bindings = TensorSlice::in_place(&index, &slices)?;
        (after, bindings, Mode::InPlace(InPlace::ChunkByChunk))
    } else {
        let after = allocate(device, pair.index())?;
        let [slices, bases] = [&after, before].map(|version| version.slices().map(|(.., slice)| slice).collect::<Vec<_>>());
        let bindings = TensorSlice::out_of_place(&index, &slices, &bases)?;
        (after, bindings, Mode::OutOfPlace)
    };
    let plan = ApplyPlan::new(&index, &bindings, mode, Payloads::Host(pair.blob()))?.digests(is_last);
    Ok((after, Application::prepare(plan)?.launch(stream)?))
}

/// Whether a step can change the memory of a version in place: each tensor derives from the tensor of the same name, dtype and
/// shape, or from none, and is held in the same rectangles.
fn keeps_memory(version: &DeviceCheckpoint, index: &ValidatedIndex) -> bool {
    let is_own = |tensor: Tensor<'_>| match tensor.base_kind {
        BaseKind::None => true,
        BaseKind::Same => tensor.base_name == tensor.name,
        _ => false,
    };
    index.tensors().all(is_own)
        && held(index).into_iter().all(|(info, rectangles)| {
            let found = version.find(&info.name).filter(|&i| version.tensors()[i] == info);
            found.is_some_and(|i| version.held(i) == rectangles)
        })
}

/// The tensors of a pair, each with the rectangles to hold: all of the tensor, or the parts of one that is not covered.
fn held(index: &ValidatedIndex) -> Vec<(TensorInfo, Vec<Rectangle>)> {
    let mut all = Vec::<(TensorInfo, Vec<Rectangle>)>::new();
    for tensor in index.tensors() {
        let is_tiled = index.is_tiled(tensor.name);
        match all.last_mut().filter(|(info, _)| info.name == tensor.name) {
            Some(_) if is_tiled => {}
            Some((_, rectangles)) => rectangles.push(tensor.rectangle()),
            None => {
                let shape = tensor.whole_shape().to_vec();
                let rectangle = if is_tiled { Rectangle::whole(&shape) } else { tensor.rectangle() };
                all.push((TensorInfo { name: tensor.name.to_owned(), dtype: tensor.dtype, shape }, vec![rectangle]));
            }
        }
    }
    all
}

/// Memory for the tensors of a pair.
fn allocate(device: &Device, index: &ValidatedIndex) -> Result<DeviceCheckpoint> {
    let tensors = held(index);
    let size = |info: &TensorInfo, rectangle: &Rectangle| {
        TensorInfo { name: String::new(), dtype: info.dtype, shape: rectangle.extent.clone() }.bytes()
    };
    let sizes = tensors.iter().flat_map(|(info, rectangles)| rectangles.iter().map(|one| size(info, one)));
    let memory =
        device.alloc(sizes.fold(0, |sum: u64, bytes| sum.saturating_add(bytes).saturating_add(ALIGN - 1) / ALIGN * ALIGN))?;
    let (mut at, mut slices) = (0, Vec::new());
    for (info, rectangles) in &tensors {
        for rectangle in rectangles {
            let bytes = size(info, rectangle);
            let slice = TensorSlice::new(&info.name, rectangle.clone(), memory.slice(at, bytes)?);
            slices.push((info.dtype, info.shape.clone(), slice));
            at += bytes.next_multiple_of(ALIGN);
        }
    }
    DeviceCheckpoint::of_slices(device, slices)
}
