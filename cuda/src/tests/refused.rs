//! Failing driver calls, panicking sources and refused calls. Work that was queued before must not access freed memory. Later
//! work must be correct.

use super::super::runtime::calls;
use super::super::runtime::driver::check;
use super::super::{Device, DeviceIndex, Mode, Payloads, Stream};
use super::generated::{Random, lanes};
use super::laid::{Laid, Route, payloads, prepare_in_slices};
use super::stand_in::{self, Refusal};
use super::vectors::MODES;
use cudarc::driver::sys;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use tpde::{Codec, Encode, EncodeOptions, InPlace, MemoryCheckpoint, Pair, TensorInfo};
use tpde_core::error::{Error, Result};
use tpde_core::lane::Dtype;
use tpde_core::source::Source;

/// A tensor of several chunks.
pub struct Sample {
    pub base: Vec<u8>,
    pub target: Vec<u8>,
    pub pair: Pair<Vec<u8>>,
}

impl Sample {
    pub fn new(codec: Codec) -> Self {
        Self::with_lanes(codec, 30_000)
    }

    fn with_lanes(codec: Codec, count: usize) -> Self {
        let (base, target) = lanes(&mut Random(3), Dtype::Bf16, count, 20);
        let options = EncodeOptions::default().codec(codec).chunk_lanes(CHUNK_LANES as u64).payload_digests(true);
        let pair = Encode::new(&checkpoint(&target)).base(&checkpoint(&base)).options(options).to_memory().unwrap().0;
        Self { base, target, pair }
    }

    pub fn laid(&self, device: &Device, mode: Mode) -> Laid {
        Laid::new(device, self.pair.index(), &checkpoint(&self.base), mode != Mode::OutOfPlace, 0)
    }

    pub fn assert_done(&self, device: &Device, laid: &mut Laid) {
        for (_, found) in laid.outputs(device) {
            assert!(found == self.target);
        }
    }
}

/// Lanes of a chunk of a [`Sample`].
pub const CHUNK_LANES: usize = 4096;

fn checkpoint(lanes: &[u8]) -> MemoryCheckpoint<'_> {
    let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![lanes.len() as u64 / 2] };
    MemoryCheckpoint::new([(info, lanes)]).unwrap()
}

/// Lets queued work run, after memory has been freed. The stand-in ends the process if that work uses freed memory. On a device
/// the allocations here reuse and overwrite the memory.
fn take_memory(device: &Device, stream: &Stream) {
    {
        let cx = device.inner.context.enter().unwrap();
        device.inner.wait_for(&cx, device.inner.pools.reaper.raw()).unwrap();
        device.inner.wait_for(&cx, device.inner.copy.raw()).unwrap();
    }
    stream.record().unwrap().wait().unwrap();
    for _ in 0..8 {
        let slice = device.alloc(70_000).unwrap();
        device.write(&slice, &[0xEE; 70_000]).unwrap();
    }
}

/// A source that panics once, on its second read.
struct Panicking<'a> {
    blob: &'a Vec<u8>,
    was_read: AtomicBool,
    has_panicked: AtomicBool,
}

impl Source for Panicking<'_> {
    fn size(&self) -> u64 {
        self.blob.size()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if self.was_read.swap(true, Ordering::Relaxed) && !self.has_panicked.swap(true, Ordering::Relaxed) {
            panic!("a panic for the tests");
        }
        self.blob.read(offset, out)
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_source_that_panics_leaves_the_application_usable() {
    let device = super::device();
    let sample = Sample::new(Codec::Conditioned);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    for mode in MODES {
        let mut laid = sample.laid(device, mode);
        let source = Panicking { blob: sample.pair.blob(), was_read: AtomicBool::default(), has_panicked: AtomicBool::default() };
        let stream = device.stream().unwrap();
        let application = prepare_in_slices(&index, &laid.bindings, mode, Payloads::Host(&source), 200).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| application.launch(&stream)));
        assert!(panicked.is_err(), "{mode:?}");
        take_memory(device, &stream);
        if mode == Mode::InPlace(InPlace::ChunkByChunk) {
            continue; // some chunks are the target now
        }
        application.launch(&stream).unwrap().wait().unwrap();
        sample.assert_done(device, &mut laid);
    }
}

/// Each call of the driver fails once, after any amount of queued work.
#[test]
#[ignore = "needs a CUDA device"]
fn whatever_call_the_driver_refuses_no_memory_is_freed_too_early() {
    if !stand_in::is_used() {
        eprintln!("a device refuses nothing when it is asked to: this is tested on the stand-in");
        return;
    }
    let device = super::device();
    // Each call is refused in a run of its own, so the sample is small.
    let sample = Sample::with_lanes(Codec::Conditioned, 20_000);
    let ways = [(Route::Host, 200), (Route::Pinned, 200), (Route::Pinned, u64::MAX), (Route::Device, u64::MAX)];
    for (mode, (route, slice)) in MODES.into_iter().flat_map(|mode| ways.map(|way| (mode, way))) {
        let mut refused = 0;
        for calls in 0.. {
            let mut laid = sample.laid(device, mode);
            let stream = device.stream().unwrap();
            let payloads = payloads(device, &sample.pair, route);
            stand_in::refuse(Some((Refusal::Queueing, calls)));
            let outcome = work(device, &sample, &laid, mode, payloads, slice, &stream);
            if !stand_in::refuse(None) {
                outcome.unwrap();
                sample.assert_done(device, &mut laid);
                break;
            }
            refused += 1;
            // Errors of some calls are ignored, for example of freeing memory.
            assert!(matches!(outcome, Ok(()) | Err(Error::Device { .. })), "{outcome:?}");
            take_memory(device, &stream);
        }
        assert!(refused > if slice == u64::MAX { 20 } else { 40 }, "{mode:?} {route:?}: {refused}");
    }
}

fn work(
    device: &Device,
    sample: &Sample,
    laid: &Laid,
    mode: Mode,
    payloads: Payloads<'_>,
    slice: u64,
    stream: &Stream,
) -> Result<()> {
    let index = DeviceIndex::upload(device, sample.pair.index())?;
    let pending = prepare_in_slices(&index, &laid.bindings, mode, payloads, slice)?.launch(stream)?;
    drop(index);
    pending.wait()?;
    let [from, to] = [device.alloc(5000)?, device.alloc(5000)?];
    stream.fill(&from, 7)?;
    stream.copy(&to, &from)?;
    drop(from);
    let mut pinned = device.pinned(5000)?;
    stream.record()?.wait()?;
    device.read(&to, &mut pinned)?;
    assert!(pinned.iter().all(|byte| *byte == 7));
    Ok(())
}

#[test]
#[ignore = "needs a CUDA device"]
fn copies_that_overlap_or_are_captured_are_refused() {
    let device = super::device();
    let memory = device.alloc(1000).unwrap();
    let at = |offset, bytes| memory.slice(offset, bytes).unwrap();
    let stream = device.stream().unwrap();
    assert!(matches!(stream.copy(&at(0, 100), &at(99, 100)), Err(Error::InvalidArgument(_))));
    stream.fill(&at(100, 100), 5).unwrap();
    stream.copy(&at(0, 100), &at(100, 100)).unwrap();
    stream.record().unwrap().wait().unwrap();
    let mut found = [0; 100];
    device.read(&at(0, 100), &mut found).unwrap();
    assert_eq!(found, [5; 100]);
    // SAFETY: handles are made here, used in the order that the driver asks for, and freed once.
    unsafe {
        let _cx = device.inner.context.enter().unwrap();
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        check(calls::cuStreamBeginCapture_v2(stream.raw(), relaxed), "begin a capture").unwrap();
        assert!(matches!(stream.copy(&at(0, 100), &at(100, 100)), Err(Error::InvalidArgument(_))));
        assert!(matches!(stream.fill(&at(0, 100), 1), Err(Error::InvalidArgument(_))));
        let mut graph = ptr::null_mut();
        check(calls::cuStreamEndCapture(stream.raw(), &mut graph), "end a capture").unwrap();
        calls::cuGraphDestroy(graph);
    }
    // A reopened device frees memory in an order that does not include this stream.
    let other = Device::open(0).unwrap().alloc(100).unwrap();
    assert!(matches!(stream.copy(&at(0, 100), &other), Err(Error::InvalidArgument(_))));
    assert!(matches!(stream.fill(&other, 1), Err(Error::InvalidArgument(_))));
}
