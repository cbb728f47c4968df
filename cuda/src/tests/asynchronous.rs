//! Calls that return while the device is busy, graphs, contexts, and refused calls.

use super::super::runtime::calls;
use super::super::runtime::driver::{Kernel, check};
use super::super::{Binding, Device, DeviceCheckpoint, DeviceIndex, Mode, Payloads, Stream};
use super::generated::{Random, lanes};
use super::laid::{Laid, Route, payloads, prepare, prepare_in_slices};
use super::stand_in;
use super::vectors::MODES;
use cudarc::driver::sys;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tpde::{Codec, Encode, EncodeOptions, InPlace, MemoryCheckpoint, Pair, TensorInfo};
use tpde_core::error::{Error, Result};
use tpde_core::lane::Dtype;
use tpde_core::source::Source;

/// A kernel that spins for a number of nanoseconds. On the stand-in it spins until a call waits for it.
const SPIN: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 ns)
{
    .reg .u64 %rd<4>;
    .reg .pred %p;
    ld.param.u64 %rd0, [ns];
    mov.u64 %rd1, %globaltimer;
wait:
    mov.u64 %rd2, %globaltimer;
    sub.u64 %rd3, %rd2, %rd1;
    setp.lt.u64 %p, %rd3, %rd0;
    @%p bra wait;
    ret;
}
";
const LONG: Duration = Duration::from_millis(200);

pub fn spinner(device: &Device) -> Kernel {
    let cx = device.inner.context.enter().unwrap();
    // The module stays loaded until the tests end.
    Kernel::load(&cx, SPIN, "spin", 1, 0).unwrap().0
}

pub fn spin(device: &Device, kernel: Kernel, stream: &Stream) {
    let cx = device.inner.context.enter().unwrap();
    // SAFETY: the kernel takes a number and touches no memory.
    unsafe { kernel.launch(&cx, stream.raw(), 1, &(LONG.as_nanos() as u64)).unwrap() };
}

/// Two tensors of a few hundred chunks. On the stand-in they have a few chunks.
struct Sample {
    infos: Vec<TensorInfo>,
    base: Vec<Vec<u8>>,
    target: Vec<Vec<u8>>,
    pair: Pair<Vec<u8>>,
}

impl Sample {
    fn new(codec: Codec) -> Self {
        let random = &mut Random(5);
        let rows = if stand_in::is_used() { 60 } else { 1000 };
        let infos: Vec<_> =
            ["a", "b"].map(|name| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![rows, 777] }).into();
        let (base, target): (Vec<_>, Vec<_>) = infos.iter().map(|_| lanes(random, Dtype::Bf16, 777 * rows as usize, 20)).unzip();
        let options = EncodeOptions::default().codec(codec).chunk_lanes(4096);
        let checkpoint = |data: &[Vec<u8>]| -> Pair<Vec<u8>> {
            let target = MemoryCheckpoint::new(infos.iter().cloned().zip(target.iter().map(|t| &t[..]))).unwrap();
            let base = MemoryCheckpoint::new(infos.iter().cloned().zip(data.iter().map(|t| &t[..]))).unwrap();
            Encode::new(&target).base(&base).options(options).to_memory().unwrap().0
        };
        let pair = checkpoint(&base);
        Self { infos, base, target, pair }
    }

    fn laid(&self, device: &Device, mode: Mode) -> Laid {
        let data = self.base.iter().map(|b| &b[..]);
        let base = MemoryCheckpoint::new(self.infos.iter().cloned().zip(data)).unwrap();
        Laid::new(device, self.pair.index(), &base, mode != Mode::OutOfPlace, 1)
    }

    fn assert_done(&self, device: &Device, laid: &mut Laid) {
        for (place, bytes) in laid.outputs(device) {
            assert!(bytes == self.target[place]);
        }
    }
}

/// A source that fails after a number of reads.
pub struct Ending<'a>(pub &'a Vec<u8>, pub AtomicU32);

impl Source for Ending<'_> {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if self.1.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
            return Err(Error::io("read", "a blob".as_ref(), std::io::Error::other("no more of it")));
        }
        self.0.read(offset, out)
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_check_finds_what_a_launch_finds_and_writes_nothing() {
    let device = super::device();
    for codec in [Codec::Conditioned, Codec::Raw, Codec::Zstd] {
        let sample = Sample::new(codec);
        let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
        let stream = device.stream().unwrap();
        for mode in MODES {
            for wrong in [false, true] {
                let mut sample_base = sample.base.clone();
                if wrong {
                    sample_base[1][100] ^= 1;
                }
                let data = sample_base.iter().map(|b| &b[..]);
                let base = MemoryCheckpoint::new(sample.infos.iter().cloned().zip(data)).unwrap();
                let mut laid = Laid::new(device, sample.pair.index(), &base, mode != Mode::OutOfPlace, 1);
                let payloads = payloads(device, &sample.pair, Route::Pinned);
                let application = prepare_in_slices(&index, &laid.bindings, mode, payloads, 4000).unwrap();
                if mode != Mode::InPlace(InPlace::AllChecked) {
                    assert!(matches!(application.check(&stream), Err(Error::InvalidArgument(_))));
                    continue;
                }
                // A launch after two checks finds memory and flags as it needs them.
                let checks = [0; 2].map(|_| application.check(&stream).unwrap().wait());
                assert!(laid.is_untouched(device));
                let launched = application.launch(&stream).unwrap().wait();
                for checked in checks {
                    assert_eq!(checked.map_err(|e| e.to_string()), launched.as_ref().map(|_| ()).map_err(ToString::to_string));
                }
                assert_eq!(launched.is_err(), wrong);
                if wrong {
                    assert!(laid.is_untouched(device));
                } else {
                    sample.assert_done(device, &mut laid);
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn calls_return_while_the_stream_is_busy() {
    let device = super::device();
    let spinning = spinner(device);
    let slice = if stand_in::is_used() { 4000 } else { 100_000 };
    let mut longest = Duration::ZERO;
    for codec in [Codec::Conditioned, Codec::Raw, Codec::Zstd] {
        let sample = Sample::new(codec);
        let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
        for mode in MODES {
            for route in [Route::Host, Route::Pinned, Route::Device] {
                if codec == Codec::Zstd && route == Route::Device {
                    continue;
                }
                let payloads = payloads(device, &sample.pair, route);
                let stream = device.stream().unwrap();
                // A first run loads kernels, and allocates pinned memory and scratch memory; the second run counts.
                for turn in 0..2 {
                    let mut laid = sample.laid(device, mode);
                    spin(device, spinning, &stream);
                    let start = Instant::now();
                    let application = prepare_in_slices(&index, &laid.bindings, mode, payloads.clone(), slice).unwrap();
                    let pending = application.launch(&stream).unwrap();
                    let took = start.elapsed();
                    // The stand-in spins until a call waits for it. If the spin has ended here, a call has waited.
                    if turn == 1 && !stand_in::is_used() {
                        assert!(took < LONG / 2, "{codec} {mode:?} {route:?}: {took:?}");
                        longest = longest.max(took);
                    }
                    if turn == 1 || stand_in::is_used() {
                        assert!(!pending.is_done().unwrap(), "{codec} {mode:?} {route:?}: done after {took:?}");
                        assert!(laid.is_untouched(device));
                    }
                    drop(application);
                    pending.wait().unwrap();
                    sample.assert_done(device, &mut laid);
                }
            }
        }
    }
    eprintln!("calls returned after at most {longest:?} while their stream was busy for {LONG:?}");
}

/// Drops all owners while the device uses their memory, also after an error in the middle of a launch.
#[test]
#[ignore = "needs a CUDA device"]
fn memory_is_kept_until_the_stream_has_passed() {
    let device = super::device();
    let (spinning, sample) = (spinner(device), Sample::new(Codec::Conditioned));
    let slice = if stand_in::is_used() { 500 } else { 8_000 };
    for mode in MODES {
        let stream = device.stream().unwrap();
        let mut laid = sample.laid(device, mode);
        {
            let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
            spin(device, spinning, &stream);
            for route in [Route::Pinned, Route::Device, Route::Host] {
                // The first launch turns the base into the target. The other launches then find a wrong base.
                let payloads = payloads(device, &sample.pair, route);
                drop(prepare_in_slices(&index, &laid.bindings, mode, payloads, slice).unwrap().launch(&stream).unwrap());
            }
            let failing = Ending(sample.pair.blob(), 3.into());
            let pending =
                prepare_in_slices(&index, &laid.bindings, mode, Payloads::Host(&failing), slice).unwrap().launch(&stream).unwrap();
            drop(index);
            // Memory that was freed too early would be reused by these allocations, and overwritten.
            for _ in 0..20 {
                let slice = device.alloc(200_000).unwrap();
                device.write(&slice, &[0xEE; 200_000]).unwrap();
            }
            let error = pending.wait().unwrap_err();
            assert!(error.to_string().contains("no more of it") || error.rule().is_some(), "{error}");
        }
        sample.assert_done(device, &mut laid);
    }
    eprintln!("nothing was freed too early");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_replays_an_application() {
    let device = super::device();
    let sample = Sample::new(Codec::Conditioned);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    for mode in MODES {
        for route in [Route::Pinned, Route::Device] {
            let mut laid = sample.laid(device, mode);
            let stream = device.stream().unwrap();
            let application = prepare(&index, &laid.bindings, mode, payloads(device, &sample.pair, route)).unwrap();
            // SAFETY: for all calls below: handles are made here, used in the order that the driver asks for, and freed once.
            let (captured, graph, ready) = unsafe {
                let _cx = device.inner.context.enter().unwrap();
                let (mut graph, mut ready) = (ptr::null_mut(), ptr::null_mut());
                let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
                check(calls::cuStreamBeginCapture_v2(stream.raw(), global), "begin a capture").unwrap();
                assert!(matches!(application.launch(&stream), Err(Error::InvalidArgument(_))));
                let captured = application.capture(&stream).unwrap();
                captured.check().unwrap(); // the graph has not been launched, so no launch has failed
                check(calls::cuStreamEndCapture(stream.raw(), &mut graph), "end a capture").unwrap();
                check(calls::cuGraphInstantiateWithFlags(&mut ready, graph, 0), "make a graph").unwrap();
                (captured, graph, ready)
            };
            assert!(laid.is_untouched(device), "captured, not run");
            for turn in 0..2 {
                // SAFETY: as above.
                unsafe {
                    let _cx = device.inner.context.enter().unwrap();
                    check(calls::cuGraphLaunch(ready, stream.raw()), "launch a graph").unwrap();
                    check(calls::cuStreamSynchronize(stream.raw()), "wait").unwrap();
                }
                match (turn, mode) {
                    // In place, the second run finds the target instead of the base.
                    (1, Mode::InPlace(_)) => {
                        let error = captured.check().unwrap_err();
                        assert!(error.rule().is_some(), "{error}");
                    }
                    _ => captured.check().unwrap(),
                }
                sample.assert_done(device, &mut laid);
            }
            // A replay that found an error leaves nothing behind for a launch.
            laid.restore_from(device, &sample.laid(device, mode));
            application.launch(&stream).unwrap().wait().unwrap();
            sample.assert_done(device, &mut laid);
            // SAFETY: as above; the graph has passed.
            unsafe {
                let _cx = device.inner.context.enter().unwrap();
                calls::cuGraphExecDestroy(ready);
                calls::cuGraphDestroy(graph);
            }
        }
    }
    eprintln!("graphs replay every mode from device and pinned memory");
}

/// In the mode of PyTorch's captures, a call like an allocation is refused on every thread, and ends the capture.
#[test]
#[ignore = "needs a CUDA device"]
fn a_capture_elsewhere_forbids_nothing() {
    let device = super::device();
    let sample = Sample::new(Codec::Conditioned);
    let captured = device.stream().unwrap();
    // SAFETY: handles are made here, used in the order that the driver asks for, and freed once. The graph does not run.
    unsafe {
        let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        {
            let _cx = device.inner.context.enter().unwrap();
            check(calls::cuStreamBeginCapture_v2(captured.raw(), global), "begin a capture").unwrap();
        }
        let memory = device.alloc(5000).unwrap();
        // Of a size that the pool does not have.
        let mut pinned = device.pinned(3 << 20).unwrap();
        device.write(&memory, &[7; 5000]).unwrap();
        device.read(&memory, &mut pinned[..5000]).unwrap();
        assert!(pinned[..5000] == [7; 5000]);
        let data = sample.base.iter().map(|b| &b[..]);
        let base = MemoryCheckpoint::new(sample.infos.iter().cloned().zip(data)).unwrap();
        drop(DeviceCheckpoint::upload(device, &base).unwrap());
        let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
        for mode in MODES {
            let mut laid = sample.laid(device, mode);
            let stream = device.stream().unwrap();
            let application = prepare(&index, &laid.bindings, mode, payloads(device, &sample.pair, Route::Pinned)).unwrap();
            let pending = application.launch(&stream).unwrap();
            while !pending.is_done().unwrap() {}
            pending.wait().unwrap();
            sample.assert_done(device, &mut laid);
        }
        let _cx = device.inner.context.enter().unwrap();
        let mut graph = ptr::null_mut();
        check(calls::cuStreamEndCapture(captured.raw(), &mut graph), "end a capture").unwrap();
        calls::cuGraphDestroy(graph);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_capture_does_not_wait_for_an_earlier_launch() {
    let device = super::device();
    let (spinning, sample) = (spinner(device), Sample::new(Codec::Conditioned));
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    for mode in MODES {
        for route in [Route::Pinned, Route::Device] {
            let mut laid = sample.laid(device, mode);
            let [busy, captured] = [(); 2].map(|()| device.stream().unwrap());
            let application = prepare(&index, &laid.bindings, mode, payloads(device, &sample.pair, route)).unwrap();
            spin(device, spinning, &busy);
            let pending = application.launch(&busy).unwrap();
            // SAFETY: handles are made here, used in the order that the driver asks for, and freed once. The graph does not run.
            unsafe {
                let _cx = device.inner.context.enter().unwrap();
                let thread = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
                check(calls::cuStreamBeginCapture_v2(captured.raw(), thread), "begin a capture").unwrap();
                let in_graph = application.capture(&captured).unwrap();
                let mut graph = ptr::null_mut();
                check(calls::cuStreamEndCapture(captured.raw(), &mut graph), "end a capture").unwrap();
                assert!(!pending.is_done().unwrap(), "{mode:?} {route:?}: the capture has waited");
                calls::cuGraphDestroy(graph);
                drop(in_graph);
            }
            pending.wait().unwrap();
            sample.assert_done(device, &mut laid);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_is_known_by_its_capture_and_until_it_is_destroyed() {
    let device = super::device();
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    assert!(streams.iter().all(|stream| stream.capture_id().unwrap().is_none()));
    assert!(matches!(streams[0].captured_graph(), Err(Error::InvalidArgument(_))));
    let (mut graphs, mut ids) = (Vec::new(), Vec::new());
    // SAFETY: for all calls below: handles are made here, used in the order that the driver asks for, and freed once.
    unsafe {
        let _cx = device.inner.context.enter().unwrap();
        for instances in [0, 2, 1] {
            let stream = &streams[instances % 2];
            let thread = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            check(calls::cuStreamBeginCapture_v2(stream.raw(), thread), "begin a capture").unwrap();
            assert_eq!(stream.capture_id().unwrap(), stream.capture_id().unwrap());
            ids.push(stream.capture_id().unwrap().unwrap());
            let watched = stream.captured_graph().unwrap();
            let mut graph = ptr::null_mut();
            check(calls::cuStreamEndCapture(stream.raw(), &mut graph), "end a capture").unwrap();
            let instance = |_| {
                let mut ready = ptr::null_mut();
                check(calls::cuGraphInstantiateWithFlags(&mut ready, graph, 0), "make a graph").unwrap();
                ready
            };
            let ready: Vec<_> = (0..instances).map(instance).collect();
            assert!(!watched.is_destroyed());
            calls::cuGraphDestroy(graph);
            graphs.push((watched, ready));
        }
        for (watched, ready) in graphs {
            for instance in ready {
                assert!(!watched.is_destroyed());
                calls::cuGraphExecDestroy(instance);
            }
            // A thread of the driver may set the flag.
            let begin = std::time::Instant::now();
            while !watched.is_destroyed() && begin.elapsed().as_secs() < 10 {
                std::thread::yield_now();
            }
            assert!(watched.is_destroyed());
        }
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3);
    eprintln!("captures have ids, and graphs say when they are gone");
}

/// Calls do not change the current context of the caller. Streams of callers work, including the default stream.
#[test]
#[ignore = "needs a CUDA device"]
fn contexts_of_callers_stay_current() {
    let device = super::device();
    let sample = Sample::new(Codec::Conditioned);
    let current = || {
        let mut current = ptr::null_mut();
        // SAFETY: `current` is valid for a context.
        check(unsafe { calls::cuCtxGetCurrent(&mut current) }, "ask for the current context").unwrap();
        current
    };
    let everything = || {
        let before = current();
        let device = Device::open(0).unwrap();
        assert_eq!(current(), before);
        let index = DeviceIndex::upload(&device, sample.pair.index()).unwrap();
        for borrowed in [false, true] {
            let mut laid = sample.laid(&device, Mode::OutOfPlace);
            // SAFETY: the legacy default stream always exists.
            let stream = if borrowed { unsafe { device.borrow_stream(ptr::null_mut()) } } else { device.stream().unwrap() };
            let pending = prepare(&index, &laid.bindings, Mode::OutOfPlace, Payloads::Host(sample.pair.blob()))
                .unwrap()
                .launch(&stream)
                .unwrap();
            assert_eq!(current(), before);
            pending.wait().unwrap();
            sample.assert_done(&device, &mut laid);
        }
        assert!(prepare(&index, &[], Mode::OutOfPlace, Payloads::Host(&Vec::new())).is_err());
        drop(index);
        drop(device);
        assert_eq!(current(), before);
    };
    everything();
    let mut other = ptr::null_mut();
    // SAFETY: makes a context, current until it is destroyed below.
    check(unsafe { calls::cuCtxCreate_v2(&mut other, 0, device.inner.context.ordinal()) }, "make a context").unwrap();
    assert_eq!(current(), other);
    everything();
    assert_eq!(current(), other);
    // SAFETY: the context has no other users.
    check(unsafe { calls::cuCtxDestroy_v2(other) }, "destroy a context").unwrap();
    // Every other device, if the machine has several.
    for ordinal in 1..Device::count().unwrap() {
        let device = Device::open(ordinal).unwrap();
        let index = DeviceIndex::upload(&device, sample.pair.index()).unwrap();
        let mut laid = sample.laid(&device, Mode::OutOfPlace);
        let stream = device.stream().unwrap();
        prepare(&index, &laid.bindings, Mode::OutOfPlace, Payloads::Host(sample.pair.blob()))
            .unwrap()
            .launch(&stream)
            .unwrap()
            .wait()
            .unwrap();
        sample.assert_done(&device, &mut laid);
    }
    eprintln!("the current context stayed, with none and with another; devices: {}", Device::count().unwrap());
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_that_overlaps_is_refused_and_the_same_twice_is_decoded_once() {
    let device = super::device();
    let sample = Sample::new(Codec::Raw);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    let bytes = sample.base[0].len() as u64;
    let memory = device.alloc(4 * bytes).unwrap();
    let at = |offset: u64| memory.slice(offset, bytes).unwrap();
    let blob = || Payloads::Host(sample.pair.blob());
    let refused = |bindings: &[Binding], mode: Mode, why: &str| match prepare(&index, bindings, mode, blob()) {
        Err(Error::InvalidArgument(told)) => assert!(told.contains(why), "{told}"),
        other => panic!("expected an error with {why:?}, found {other:?}"),
    };
    let out = |tensor, base, output| Binding::out_of_place(tensor, Some(at(base)), at(output));
    refused(&[out(0, 0, 0)], Mode::OutOfPlace, "overlaps the base");
    refused(&[out(0, 0, bytes - 2)], Mode::OutOfPlace, "overlaps the base");
    refused(&[out(0, 0, bytes), out(1, 2 * bytes, bytes + 2)], Mode::OutOfPlace, "overlaps that for");
    refused(&[out(0, 0, bytes), out(1, bytes + 2, 3 * bytes)], Mode::OutOfPlace, "overlaps the base");
    refused(&[out(0, 0, bytes), out(0, 0, 2 * bytes)], Mode::OutOfPlace, "bound twice");
    refused(&[out(0, 0, bytes), out(1, 0, bytes)], Mode::OutOfPlace, "overlaps that for");
    refused(&[Binding::out_of_place(0, None, at(0))], Mode::OutOfPlace, "has no base");
    refused(&[Binding::in_place(9, at(0))], Mode::OutOfPlace, "tensor 9");
    let in_place = Mode::InPlace(InPlace::AllChecked);
    refused(&[Binding::in_place(0, at(0)), Binding::in_place(1, at(2))], in_place, "overlaps that for");
    refused(&[Binding::in_place(0, at(1))], in_place, "not aligned");
    refused(&[Binding::in_place(0, memory.slice(0, bytes - 2).unwrap())], in_place, "bytes, expected");
    refused(&[out(0, 0, bytes)], in_place, "cannot have a base");
    assert!(prepare(&index, &[], in_place, Payloads::Host(&&sample.pair.blob()[1..])).is_err());

    device.write(&at(0), &sample.base[0]).unwrap();
    let stream = device.stream().unwrap();
    let twice = [Binding::in_place(0, at(0)), Binding::in_place(0, at(0))];
    prepare(&index, &twice, Mode::InPlace(InPlace::ChunkByChunk), blob()).unwrap().launch(&stream).unwrap().wait().unwrap();
    let mut found = vec![0; bytes as usize];
    device.read(&at(0), &mut found).unwrap();
    assert!(found == sample.target[0]);
    // A second application finds that the base already is the target.
    let again = prepare(&index, &twice[..1], Mode::InPlace(InPlace::AllChecked), blob()).unwrap().launch(&stream).unwrap().wait();
    assert_eq!(again.unwrap_err().rule(), Some(tpde_core::error::Rule::ChunkBaseSum));
    eprintln!("overlaps are refused");
}
