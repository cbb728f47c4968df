//! Encodings that run in threads of their own.

use super::super::encode::Limits;
use super::super::{DeviceCheckpoint, DeviceSlice, Encode, Encoder, Stream};
use super::asynchronous::{spin, spinner};
use super::cases::{Random, random_lanes};
use super::stand_in;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use tpde::{Codec, EncodeOptions, Error, MemoryCheckpoint, Pair, TensorInfo, Watch};
use tpde_core::lane::Dtype;

/// Base and target on the device, and their pair.
struct Sample {
    base: DeviceCheckpoint,
    target: DeviceCheckpoint,
    expected: Pair<Vec<u8>>,
}

fn options() -> EncodeOptions {
    EncodeOptions::default().codec(Codec::Raw).chunk_lanes(4096)
}

impl Sample {
    fn new() -> Self {
        let info = |name: &str| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![20_000] };
        let (base, target) = random_lanes(&mut Random(6), Dtype::Bf16, 20_000, 9);
        let [base, target] =
            [&base, &target].map(|bytes| MemoryCheckpoint::new(["a", "b"].map(|n| (info(n), &bytes[..]))).unwrap());
        let expected = tpde::Encode::new(&target).base(&base).options(options()).to_memory().unwrap().0;
        let [base, target] = [&base, &target].map(|c| DeviceCheckpoint::upload(super::device(), c).unwrap());
        Self { base, target, expected }
    }

    /// In several waves.
    fn encode(&self) -> Encode<'_> {
        let limits = Limits { lanes: 1 << 14, payloads: 1 << 12, ..Limits::default() };
        Encode::new(&self.target).base(&self.base).options(options()).limits(limits)
    }

    fn check(&self, found: &Pair<super::super::PinnedBuffer>) {
        assert!(found.index().as_bytes() == self.expected.index().as_bytes() && found.blob()[..] == self.expected.blob()[..]);
    }
}

/// Stops an encoding after some reports.
struct After(AtomicI64);

impl Watch for After {
    fn done(&self, _: u64) -> tpde::Result<()> {
        match self.0.fetch_sub(1, Ordering::Relaxed) {
            1.. => Ok(()),
            _ => Err(Error::InvalidArgument("enough".into())),
        }
    }
}

/// Makes an encoding wait at its first report.
struct Held<'a>(&'a AtomicBool);

impl Watch for Held<'_> {
    fn done(&self, _: u64) -> tpde::Result<()> {
        while self.0.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        Ok(())
    }
}

/// Work that is queued before the call is waited for, later work is not.
#[test]
#[ignore = "needs a CUDA device"]
fn later_work_of_the_stream_is_not_waited_for() {
    let (sample, device) = (Sample::new(), super::device());
    let spinner = spinner(device);
    let stream = device.stream().unwrap();
    // The target gets its content on the stream, before the encoding is started.
    let bytes = 40_000;
    let content = std::sync::Arc::new({
        let mut pinned = device.pinned(bytes).unwrap();
        tpde::Checkpoint::read(&sample.target, 0, 0, &mut pinned).unwrap();
        pinned
    });
    let info = |name: &str| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![20_000] };
    let memory = ["a", "b"].map(|name| (info(name), device.alloc(bytes as u64).unwrap()));
    let target = DeviceCheckpoint::new(device, memory.clone()).unwrap();
    for (_, memory) in &memory {
        stream.copy_in(memory, &content).unwrap();
    }
    thread::scope(|scope| {
        let encode = Encode::new(&target).base(&sample.base).options(options()).after(&stream);
        let encoding = encode.start(scope).unwrap();
        spin(device, spinner, &stream);
        let after = stream.record().unwrap();
        let (pair, report) = encoding.wait().unwrap();
        // A device may have been idle for long.
        assert!(!stand_in::is_used() || !after.is_passed().unwrap(), "the encoding waited for later work");
        sample.check(&pair);
        assert_eq!(report.tensors.len(), 2);
        after.wait().unwrap();
    });
}

/// Queues work on the stream of the caller at its first report.
struct Busy<'a>(&'a Stream, AtomicBool);

impl Watch for Busy<'_> {
    fn done(&self, _: u64) -> tpde::Result<()> {
        if !self.1.swap(true, Ordering::Relaxed) {
            spin(super::device(), spinner(super::device()), self.0);
        }
        Ok(())
    }
}

/// Threads that begin while tables are trained do not wait for what the caller has queued meanwhile.
#[test]
#[ignore = "needs a CUDA device"]
fn work_that_is_queued_during_a_call_is_not_waited_for() {
    let sample = Sample::new();
    let stream = super::device().stream().unwrap();
    let watch = Busy(&stream, AtomicBool::new(false));
    let options = options().codec(Codec::Conditioned);
    let (pair, _) = sample.encode().options(options).after(&stream).watch(&watch).to_pinned().unwrap();
    let after = stream.record().unwrap();
    assert!(watch.1.load(Ordering::Relaxed) && !pair.blob().is_empty());
    assert!(!stand_in::is_used() || !after.is_passed().unwrap(), "the encoding waited for later work");
    after.wait().unwrap();
}

/// Overwrites memory at its first report of payloads.
struct Overwriting<'a>(&'a DeviceSlice);

impl Watch for Overwriting<'_> {
    fn done(&self, bytes: u64) -> tpde::Result<()> {
        if bytes > 0 { super::device().write(self.0, &vec![0; self.0.bytes() as usize]) } else { Ok(()) }
    }
}

/// Payloads are copied while tensors are hashed: a target that changes after that has the digest of its later content.
#[test]
#[ignore = "needs a CUDA device"]
fn payloads_do_not_wait_for_digests() {
    if !stand_in::draws() {
        return println!("skipped: only the stand-in delays hashes, in the order late");
    }
    let (sample, device) = (Sample::new(), super::device());
    let bytes = 40_000;
    let mut content = vec![0; bytes];
    tpde::Checkpoint::read(&sample.target, 0, 0, &mut content).unwrap();
    let memory = device.alloc(bytes as u64).unwrap();
    device.write(&memory, &content).unwrap();
    let info = TensorInfo { name: "a".into(), dtype: Dtype::Bf16, shape: vec![20_000] };
    let target = DeviceCheckpoint::new(device, [(info, memory.clone())]).unwrap();
    let watch = Overwriting(&memory);
    let (pair, _) = Encode::new(&target).base(&sample.base).options(options()).watch(&watch).to_pinned().unwrap();
    let digest = |bytes: &[u8]| tpde_core::digest::short(&blake3::hash(bytes));
    let found = *pair.index().tensors().next().unwrap().target_digest();
    assert!(found != digest(&content), "the tensor was hashed before its payload was reported");
    assert_eq!(found, digest(&vec![0; bytes]));
}

/// Several encodings at once, with one encoder, of which some are cancelled or dropped: the others are complete, and no memory is
/// left behind.
#[test]
#[ignore = "needs a CUDA device"]
fn encodings_at_once_in_any_order() {
    let sample = Sample::new();
    let seeds = if stand_in::draws() { 8 } else { 1 };
    let mut before = None;
    for seed in 0..seeds {
        let drawing = stand_in::draw(seed);
        let encoder = Encoder::new();
        thread::scope(|scope| {
            let start = || sample.encode().encoder(&encoder).start(scope).unwrap();
            let (first, dropped, stopped, last) = (start(), start(), start(), start());
            drop(dropped);
            stopped.cancel();
            while seed % 2 == 1 && !last.is_done() {
                thread::yield_now();
            }
            sample.check(&last.wait().unwrap().0);
            // It may be complete before.
            match stopped.wait() {
                Ok((pair, _)) => sample.check(&pair),
                Err(e) => assert!(matches!(e, Error::Cancelled), "seed {seed}: {e}"),
            }
            sample.check(&first.wait().unwrap().0);
        });
        drop((encoder, drawing));
        if stand_in::is_used() {
            let (now, _) = stand_in::device_memory();
            assert_eq!(*before.get_or_insert(now), now, "seed {seed}: device memory in bytes");
        }
    }
    let held = AtomicBool::new(true);
    let watch = Held(&held);
    thread::scope(|scope| {
        let encoding = sample.encode().watch(&watch).start(scope).unwrap();
        encoding.cancel();
        held.store(false, Ordering::Relaxed);
        assert!(matches!(encoding.wait(), Err(Error::Cancelled)));
    });
}

/// An error of the watcher, or of the driver, is that of the handle. A handle may be dropped after it.
#[test]
#[ignore = "needs a CUDA device"]
fn errors_are_those_of_the_handle() {
    let sample = Sample::new();
    for reports in [0, 1, 3] {
        let watch = After(reports.into());
        thread::scope(|scope| {
            let error = sample.encode().watch(&watch).start(scope).unwrap().wait().unwrap_err();
            assert!(error.to_string().contains("enough"), "{error}");
            drop(sample.encode().watch(&watch).start(scope).unwrap());
        });
    }
    if stand_in::is_used() {
        stand_in::refuse_named("cuLaunchKernel", 2);
        let result = thread::scope(|scope| sample.encode().start(scope).unwrap().wait());
        assert!(stand_in::refuse(None) && matches!(result, Err(Error::Device { .. })), "{:?}", result.err());
    }
    thread::scope(|scope| sample.check(&sample.encode().start(scope).unwrap().wait().unwrap().0));
}
