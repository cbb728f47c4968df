//! An encoding in progress: its stream, its memory, and what it queues.

use super::convert::{ConversionRanges, FormLaunch};
use super::limits::Limits;
use crate::abi;
use crate::checkpoint::DeviceCheckpoint;
use crate::hashes::{HashLaunch, HashPlan};
use crate::runtime::copies::{self, CopyRows};
use crate::runtime::driver::{self, EnterGuard, Kernel, OwnStream, RawEvent, RawStream};
use crate::runtime::inner::Inner;
use crate::runtime::kernels::EncodeKernels;
use crate::runtime::memory::{Allocation, DeviceSlice, PinnedBuffer};
use crate::runtime::stream::Stream;
use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex, PoisonError};
use tpde_core::error::{Error, Result};
use zerocopy::{Immutable, IntoBytes};

/// A stream of the encoder. The host waits for its work before memory is freed or returned to the caller, also after an error.
pub(super) struct Session<'a> {
    pub device: &'a Arc<Inner>,
    cx: &'a EnterGuard<'a>,
    pub kernels: EncodeKernels,
    stream: Option<OwnStream>,
    after: Option<&'a RawEvent>,
    limits: Cell<Limits>,
    memory: RefCell<Memory>,
}

/// Device memory that is used again and again. All of its users queue their work on one stream.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Allocations. Those without another reference are free.
    kept: Vec<DeviceSlice>,
    /// Allocations for payloads. Each was made for other payloads than the rest, so together they are as large as the compressed
    /// bytes at most.
    payloads: Vec<DeviceSlice>,
    scratch: Option<Scratch>,
    /// Size of the blob of the last encoding in pinned memory. The next one is expected to be about as large.
    pub blob_bytes: usize,
}

/// Sizes of allocations are multiples of this, in bytes.
pub(crate) const STEP: u64 = 1 << 12;

/// Size of the pieces of a copy to the host, in bytes. A piece takes 40 µs at 55 GB/s.
const PIECE: usize = 2 << 20;

/// Scratch memory of the blocks of a kernel, in slots. The counts are zeros between launches.
#[derive(Debug, Clone)]
pub(super) struct Scratch {
    pub memory: DeviceSlice,
    pub slots: u32,
    pub slot_bytes: u32,
}

/// Memory of an encoder, which encodings use one after the other.
///
/// Without it, each encoding allocates device memory and clears it. Pass it with [`Encode::encoder`](super::Encode::encoder).
/// Encodings at the same time do not share memory. It keeps the memory that [`Encode`](super::Encode) describes.
#[derive(Debug, Default)]
pub struct Encoder(Mutex<Vec<(Arc<Inner>, Memory)>>);

impl Encoder {
    /// Creates an encoder without memory.
    pub fn new() -> Self {
        Self::default()
    }

    pub(super) fn take(&self, device: &Arc<Inner>) -> Memory {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(of, _)| Arc::ptr_eq(of, device));
        at.map_or_else(Memory::default, |at| kept.swap_remove(at).1)
    }

    /// Keeps memory that no work uses any more.
    pub(super) fn give_back(&self, device: &Arc<Inner>, memory: Memory) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((device.clone(), memory));
    }
}

impl<'a> Session<'a> {
    /// Begins after the work that `after` was recorded behind.
    pub fn new(
        target: &'a DeviceCheckpoint,
        cx: &'a EnterGuard<'a>,
        after: Option<&'a RawEvent>,
        limits: Limits,
        memory: Memory,
    ) -> Result<Self> {
        let device = &target.device().inner;
        let kernels = device.kernels.encoder(&device.context)?;
        let (limits, memory) = (Cell::new(limits), RefCell::new(memory));
        // Its kernels start before those that hash tensors, which otherwise fill the device while the host waits for small results.
        let stream = Some(device.pools.urgent_stream(cx)?);
        let session = Self { device, cx, kernels, stream, after, limits, memory };
        session.wait_for_caller(session.raw())?;
        Ok(session)
    }

    /// Makes a stream wait for the work of the caller.
    fn wait_for_caller(&self, stream: RawStream) -> Result<()> {
        self.after.map_or(Ok(()), |after| after.hold(self.cx, stream))
    }

    /// Returns a second stream, of lower priority, which also waits for the work of the caller.
    pub fn second_stream(&self) -> Result<SecondStream<'_>> {
        let own = self.device.pools.stream(self.cx)?;
        let stream = SecondStream { session: self, stream: Stream::new(self.device, own.raw(), false), own: Some(own) };
        self.wait_for_caller(stream.stream.raw())?;
        Ok(stream)
    }

    fn raw(&self) -> RawStream {
        self.stream.as_ref().map_or(std::ptr::null_mut(), OwnStream::raw)
    }

    /// Waits for all queued work, and returns the memory.
    pub fn take_memory(&self) -> Result<Memory> {
        self.wait()?;
        Ok(self.memory.take())
    }

    /// Adds memory that no work uses, and sets limits.
    pub fn extend(&self, memory: Memory, limits: Limits) {
        let mut own = self.memory.borrow_mut();
        own.kept.extend(memory.kept);
        own.payloads.extend(memory.payloads);
        own.scratch = memory.scratch.or(own.scratch.take());
        self.limits.set(limits);
    }

    /// Returns device memory. Its content is undefined. When it is dropped, later work of the session can use it.
    pub fn alloc(&self, bytes: u64) -> Result<DeviceSlice> {
        let mut memory = self.memory.borrow_mut();
        // A small request does not take large memory.
        let fits = |slice: &&DeviceSlice| is_free(slice, bytes) && slice.bytes() / 4 <= bytes.max(STEP);
        if let Some(slice) = memory.kept.iter().filter(fits).min_by_key(|slice| slice.bytes()) {
            return slice.slice(0, bytes);
        }
        self.reserve(&mut memory, capacity(bytes))?;
        self.allocate(&mut memory.kept, bytes)
    }

    /// Returns device memory that is not used again by later work of the session, for work on other streams.
    pub fn alloc_separate(&self, bytes: u64) -> Result<DeviceSlice> {
        Ok(DeviceSlice::owned(Allocation::new(self.device, self.cx, bytes)?, bytes))
    }

    /// Returns device memory for payloads. Its content is undefined.
    pub fn alloc_payloads(&self, bytes: u64) -> Result<DeviceSlice> {
        let payloads = &mut self.memory.borrow_mut().payloads;
        if let Some(slice) = payloads.iter().filter(|slice| is_free(slice, bytes)).min_by_key(|slice| slice.bytes()) {
            return slice.slice(0, bytes);
        }
        if payloads.iter().any(|slice| !slice.is_shared()) {
            self.wait()?;
            payloads.retain(DeviceSlice::is_shared);
        }
        self.allocate(payloads, bytes)
    }

    fn allocate(&self, to: &mut Vec<DeviceSlice>, bytes: u64) -> Result<DeviceSlice> {
        let capacity = capacity(bytes);
        let slice = DeviceSlice::owned(Allocation::new(self.device, self.cx, capacity)?, capacity);
        to.push(slice.clone());
        slice.slice(0, bytes)
    }

    /// Frees memory that is not in use, the largest first and the scratch memory last, until `bytes` more bytes are within the
    /// limit.
    fn reserve(&self, memory: &mut Memory, bytes: u64) -> Result<()> {
        let mut has_waited = false;
        while memory.bytes() + bytes > self.limits.get().memory {
            let free = memory.kept.iter().enumerate().filter(|(_, slice)| !slice.is_shared());
            let largest = free.max_by_key(|(_, slice)| slice.bytes()).map(|(at, _)| at);
            let has_scratch = memory.scratch.as_ref().is_some_and(|scratch| !scratch.memory.is_shared());
            if largest.is_none() && !has_scratch {
                break;
            }
            // Queued work may use memory that is not referred to any more.
            if !std::mem::replace(&mut has_waited, true) {
                self.wait()?;
            }
            match largest {
                Some(at) => drop(memory.kept.swap_remove(at)),
                None => memory.scratch = None,
            }
        }
        Ok(())
    }

    /// Returns scratch memory for a kernel that has at most `blocks` blocks and counts up to `tokens` tokens.
    pub fn scratch(&self, blocks: u32, tokens: u32) -> Result<Scratch> {
        let slot_bytes = abi::ENCODE_CHOOSE_SCRATCH + 4 * abi::ENCODE_ROWS * tokens;
        let most = (self.limits.get().scratch / u64::from(slot_bytes)).max(1) as u32;
        let slots = blocks.min(4 * self.device.multiprocessors).min(most);
        let mut memory = self.memory.borrow_mut();
        match &memory.scratch {
            Some(scratch) if scratch.slots >= slots && scratch.slot_bytes >= slot_bytes => {
                return Ok(Scratch { slots, ..scratch.clone() });
            }
            _ => memory.scratch = None,
        }
        let bytes = u64::from(slots) * u64::from(slot_bytes);
        self.reserve(&mut memory, bytes)?;
        let slice = DeviceSlice::owned(Allocation::new(self.device, self.cx, bytes)?, bytes);
        self.clear(&slice)?;
        Ok(memory.scratch.insert(Scratch { memory: slice, slots, slot_bytes }).clone())
    }

    /// Allocates pinned memory.
    pub fn pinned(&self, bytes: u64) -> Result<PinnedBuffer> {
        PinnedBuffer::new(self.device, self.cx, bytes as usize)
    }

    /// Allocates memory with a copy of `content`.
    pub fn upload<T: Immutable + IntoBytes>(&self, content: &[T]) -> Result<DeviceSlice> {
        let memory = self.alloc(size_of_val(content) as u64)?;
        self.write(&memory, content)?;
        Ok(memory)
    }

    /// Queues a copy to the beginning of device memory.
    pub fn write<T: Immutable + IntoBytes>(&self, to: &DeviceSlice, content: &[T]) -> Result<()> {
        let bytes = content.as_bytes();
        let to = to.slice(0, bytes.len() as u64)?;
        // SAFETY: the memory has room for the bytes. The driver copies pageable memory before it returns.
        unsafe { copies::copy_in(self.cx, to.address(), bytes.as_ptr(), bytes.len(), self.raw()) }
    }

    /// Queues a copy of rows to memory of the session.
    pub fn copy_rows(&self, to: u64, rows: CopyRows) -> Result<()> {
        // SAFETY: the rows are the caller's memory, checked with the checkpoint; `to` is ours until the session has waited for the
        // stream, and as large.
        unsafe { copies::copy_rows(self.cx, to, rows, self.raw()) }
    }

    /// Queues a fill with zeros. The size is a multiple of four.
    pub fn clear(&self, memory: &DeviceSlice) -> Result<()> {
        // SAFETY: the memory is ours until the session has waited for the stream.
        unsafe { copies::fill(self.cx, memory.address(), 0, memory.bytes() as usize / 4, self.raw()) }
    }

    /// Copies whole memories, waits for all queued work, and returns the copies.
    pub fn read<const N: usize>(&self, from: [&DeviceSlice; N]) -> Result<[PinnedBuffer; N]> {
        let mut copies = Vec::with_capacity(N);
        for from in from {
            copies.push(self.pinned(from.bytes())?);
        }
        let queued = from.into_iter().zip(&mut copies).try_for_each(|(from, to)| self.queue_read(from, to));
        self.wait().and(queued)?;
        copies.try_into().map_err(|_| Error::InvalidArgument("copies without memory".into()))
    }

    /// Copies from the beginning of device memory, and waits for all queued work. At most two pieces are queued at a time, because
    /// small copies of other streams wait for them.
    pub fn read_into(&self, from: &DeviceSlice, to: &mut [u8]) -> Result<()> {
        let (mut at, end, mut last) = (0, to.len() as u64, None::<RawEvent>);
        let queued = to.chunks_mut(PIECE).try_for_each(|to| {
            self.queue_read(&from.slice(at, to.len() as u64)?, to)?;
            at += to.len() as u64;
            if at == end {
                return Ok(());
            }
            let done = RawEvent::new(self.cx, false)?;
            done.record(self.cx, self.raw())?;
            last.replace(done).map_or(Ok(()), |before| before.wait(self.cx))
        });
        self.wait().and(queued)
    }

    /// Queues a copy from the beginning of device memory. The caller waits for it, also after an error.
    fn queue_read(&self, from: &DeviceSlice, to: &mut [u8]) -> Result<()> {
        let from = from.slice(0, to.len() as u64)?;
        // SAFETY: both have this size, and nobody uses the pinned memory before the wait, also after an error.
        unsafe { copies::copy_out(self.cx, to.as_mut_ptr(), from.address(), to.len(), self.raw()) }
    }

    /// Waits for all queued work.
    pub fn wait(&self) -> Result<()> {
        self.device.wait_for(self.cx, self.raw())
    }

    /// Queues the hashes of a plan, whose parts, nodes and hashes `launch` has.
    pub fn hash(&self, plan: &HashPlan, launch: &HashLaunch) -> Result<()> {
        let kernel = self.device.kernels.hash(&self.device.context)?;
        // SAFETY: as for launches of the encoder's kernels. The nodes are zeros, and the stream orders the launches that use them.
        unsafe { plan.slice_after(None).queue(self.cx, kernel, self.raw(), launch) }
    }

    /// Queues the conversion of lanes.
    pub fn convert(&self, ranges: &ConversionRanges) -> Result<()> {
        let kernel = self.device.kernels.form(&self.device.context)?;
        let uploaded = self.upload(&ranges.ranges)?;
        let launch = FormLaunch { ranges: uploaded.address(), count: ranges.ranges.len() as u32, parts: ranges.parts };
        // SAFETY: as for launches of the encoder's kernels. Later work of the session is queued after this.
        unsafe { kernel.launch(self.cx, self.raw(), launch.parts, &launch) }
    }

    /// Queues a launch, unless there is no work.
    pub fn launch(&self, kernel: Kernel, blocks: u32, parameter: &abi::Encode) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        // SAFETY: the parameter is that of the encoder's kernels. The memory that it refers to is ours or the caller's, as large as
        // the kernels expect, and neither is freed before the session has waited for the stream.
        unsafe { kernel.launch(self.cx, self.raw(), blocks, parameter) }
    }
}

/// Whether memory has no user, and has room for `bytes` bytes.
fn is_free(slice: &DeviceSlice, bytes: u64) -> bool {
    slice.bytes() >= bytes && !slice.is_shared()
}

/// Size of an allocation for `bytes` bytes. It is rounded up, so that memory is used again for about the same size.
fn capacity(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of((bytes.next_power_of_two() / 16).clamp(STEP, 1 << 20))
}

impl Memory {
    /// Frees memory that is not in use, the largest first, until it has at most `bytes` bytes. No work uses it any more.
    pub fn shrink(&mut self, bytes: u64) {
        self.kept.sort_by_key(|slice| (slice.is_shared(), slice.bytes()));
        let free = self.kept.partition_point(|slice| !slice.is_shared());
        let mut free = self.kept.drain(..free).collect::<Vec<_>>();
        while self.bytes() + free.iter().map(DeviceSlice::bytes).sum::<u64>() > bytes && free.pop().is_some() {}
        self.kept.extend(free);
    }

    /// Size in bytes without that of payloads.
    pub fn bytes(&self) -> u64 {
        let kept = self.kept.iter().map(DeviceSlice::bytes).sum::<u64>();
        kept + self.scratch.as_ref().map_or(0, |scratch| scratch.memory.bytes())
    }
}

/// Waits for the work of a session when it is dropped. Declare it after the memory that the work uses.
pub(super) struct SessionGuard<'a>(pub &'a Session<'a>);

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        if !self.0.stream.as_ref().is_none_or(|stream| stream.is_idle(self.0.cx)) {
            driver::drain(self.0.cx, self.0.raw());
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.device.pools.take_back_urgent(self.cx, stream);
        }
    }
}

/// Another stream of a session. The host waits for its work when it is dropped.
pub(super) struct SecondStream<'a> {
    session: &'a Session<'a>,
    pub stream: Stream,
    own: Option<OwnStream>,
}

impl Drop for SecondStream<'_> {
    fn drop(&mut self) {
        let Session { device, cx, .. } = self.session;
        if let Some(own) = self.own.take() {
            if !own.is_idle(cx) {
                driver::drain(cx, own.raw());
            }
            device.pools.take_back(cx, own);
        }
    }
}
