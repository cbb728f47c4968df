//! Consecutive launches: leftovers of an earlier launch, or of a later one that starts too early, must not affect a launch.

use super::super::{Application, ApplyPlan, Binding, DeviceIndex, DeviceSlice, Mode, Payloads, Pending};
use super::asynchronous::{Ending, spin, spinner};
use super::generated::Random;
use super::laid::{Route, payloads, prepare_in_slices};
use super::refused::{CHUNK_LANES, Sample};
use super::stand_in;
use super::vectors::MODES;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tpde::{Codec, InPlace};
use tpde_core::error::{Error, Result, Rule};
use tpde_core::source::Source;

const ROUTES: [Route; 3] = [Route::Host, Route::Pinned, Route::Device];
/// Small, so that each chunk is a slice.
const SLICE: u64 = 200;

/// Returns the violated rule of an outcome, also if some chunks were written.
fn rule_of(outcome: Result<()>) -> Option<Rule> {
    match outcome.unwrap_err() {
        Error::Poisoned { source, .. } => source.rule(),
        error => error.rule(),
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_launch_after_a_refused_one_starts_anew() {
    let device = super::device();
    for codec in [Codec::Conditioned, Codec::Raw] {
        let sample = Sample::new(codec);
        let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
        for mode in MODES {
            for route in ROUTES {
                let mut laid = sample.laid(device, mode);
                let stream = device.stream().unwrap();
                let payloads = payloads(device, &sample.pair, route);
                let application = prepare_in_slices(&index, &laid.bindings, mode, payloads, SLICE).unwrap();
                // The last chunk has a wrong base; the chunks before it are correct.
                laid.spoil(device, 0);
                let outcome = application.launch(&stream).unwrap().wait();
                assert_eq!(rule_of(outcome), Some(Rule::ChunkBaseSum), "{codec} {mode:?} {route:?}");
                laid.restore(device);
                application.launch(&stream).unwrap().wait().unwrap();
                sample.assert_done(device, &mut laid);
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn later_launches_take_the_payloads_from_where_they_were_put() {
    let device = super::device();
    for codec in [Codec::Conditioned, Codec::Zstd] {
        let sample = Sample::new(codec);
        let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
        let mut damaged = sample.pair.blob().clone();
        damaged[64] ^= 1;
        for mode in MODES {
            let mut laid = sample.laid(device, mode);
            let stream = device.stream().unwrap();
            let host = payloads(device, &sample.pair, Route::Host);
            let mut application = prepare_in_slices(&index, &laid.bindings, mode, host, SLICE).unwrap();
            application.read_payloads_from(Payloads::Host(&damaged)).unwrap();
            let outcome = application.launch(&stream).unwrap().wait();
            assert_eq!(rule_of(outcome), Some(Rule::PayloadCrc32), "{codec} {mode:?}");
            laid.restore(device);
            application.read_payloads_from(payloads(device, &sample.pair, Route::Pinned)).unwrap();
            application.launch(&stream).unwrap().wait().unwrap();
            sample.assert_done(device, &mut laid);
            // The copies must be on the host, and have the size of the blob.
            let short = &damaged[1..];
            let on_device = Payloads::Device(device.alloc(damaged.len() as u64).unwrap());
            for refused in [Payloads::Host(&short), on_device] {
                let refused = application.read_payloads_from(refused);
                assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
            }
        }
    }
    let sample = Sample::new(Codec::Raw);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    let laid = sample.laid(device, Mode::OutOfPlace);
    let on_device = payloads(device, &sample.pair, Route::Device);
    let mut application = prepare_in_slices(&index, &laid.bindings, Mode::OutOfPlace, on_device, SLICE).unwrap();
    let refused = application.read_payloads_from(payloads(device, &sample.pair, Route::Host));
    assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_launch_that_ends_early_names_the_chunks_that_it_did_not_come_to() {
    let device = super::device();
    let sample = Sample::new(Codec::Conditioned);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    let chunks = sample.base.chunks(2 * CHUNK_LANES).zip(sample.target.chunks(2 * CHUNK_LANES));
    for mode in MODES {
        let mut laid = sample.laid(device, mode);
        let stream = device.stream().unwrap();
        let source = Ending(sample.pair.blob(), u32::MAX.into());
        let application = prepare_in_slices(&index, &laid.bindings, mode, Payloads::Host(&source), SLICE).unwrap();
        application.launch(&stream).unwrap().wait().unwrap();
        laid.restore(device);
        source.1.store(3, Ordering::Relaxed);
        let pending = application.launch(&stream).unwrap();
        let bad = pending.bad_chunks().unwrap();
        // A slice has one or two chunks.
        assert!(bad.len() < chunks.len() && bad.len() + 6 >= chunks.len(), "{mode:?}: {bad:?}");
        assert!(bad.iter().all(|bad| bad.rule.is_none()), "{mode:?}: {bad:?}");
        let right: Vec<u32> = (0..chunks.len() as u32).filter(|chunk| bad.iter().all(|bad| bad.chunk != *chunk)).collect();
        let error = pending.wait().unwrap_err();
        match mode {
            Mode::OutOfPlace => assert!(matches!(error, Error::Io { .. }), "{error}"),
            Mode::InPlace(InPlace::AllChecked) => {
                assert!(matches!(error, Error::Io { .. }), "{error}");
                assert!(laid.is_untouched(device));
            }
            Mode::InPlace(_) => {
                let Error::Poisoned { written, total, .. } = error else { panic!("{error}") };
                assert_eq!((&written, total as usize), (&right, chunks.len()));
            }
        }
        let (_, found) = laid.outputs(device).remove(0);
        for (n, (found, (base, target))) in found.chunks(2 * CHUNK_LANES).zip(chunks.clone()).enumerate() {
            let is_written = right.contains(&(n as u32)) && mode != Mode::InPlace(InPlace::AllChecked);
            if is_written || mode != Mode::OutOfPlace {
                assert!(found == if is_written { target } else { base }, "{mode:?}, chunk {n}");
            }
        }
        // The application works again when the source can be read again.
        source.1.store(u32::MAX, Ordering::Relaxed);
        let outcome = application.launch(&stream).unwrap().wait();
        if mode == Mode::InPlace(InPlace::ChunkByChunk) {
            assert_eq!(rule_of(outcome), Some(Rule::ChunkBaseSum));
        } else {
            outcome.unwrap();
        }
        sample.assert_done(device, &mut laid);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn launches_of_an_application_follow_each_other_whatever_their_streams() {
    let device = super::device();
    let sample = Sample::new(Codec::Conditioned);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    let seeds = if stand_in::draws() { 6 } else { 1 };
    for seed in 1..=seeds {
        for mode in MODES {
            let route = ROUTES[seed as usize % 3];
            let mut laid = sample.laid(device, mode);
            let streams = [device.stream().unwrap(), device.stream().unwrap()];
            let payloads = payloads(device, &sample.pair, route);
            let application = prepare_in_slices(&index, &laid.bindings, mode, payloads, SLICE).unwrap();
            let drawing = (seeds > 1).then(|| stand_in::draw(seed));
            let [first, second] = streams.each_ref().map(|stream| application.launch(stream).unwrap());
            let outcome = second.wait();
            first.wait().unwrap();
            match mode {
                Mode::OutOfPlace => outcome.unwrap(),
                // The first launch has turned the base into the target.
                Mode::InPlace(_) => assert_eq!(rule_of(outcome), Some(Rule::ChunkBaseSum), "{mode:?}, seed {seed}"),
            }
            drop(drawing);
            sample.assert_done(device, &mut laid);
        }
    }
}

/// A source whose content changes.
struct Turning<'a>(&'a Vec<u8>, AtomicBool);

impl Source for Turning<'_> {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.0.read(offset, out)?;
        if self.1.load(Ordering::Relaxed) {
            out.iter_mut().for_each(|byte| *byte ^= 0x55);
        }
        Ok(())
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn payloads_are_not_overwritten_before_they_are_decoded() {
    let device = super::device();
    let spinning = spinner(device);
    let sample = Sample::new(Codec::Conditioned);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    let seeds = if stand_in::draws() { 8 } else { 1 };
    for seed in 1..=seeds {
        let mut laid = sample.laid(device, Mode::OutOfPlace);
        let source = Turning(sample.pair.blob(), AtomicBool::default());
        let drawing = (seeds > 1).then(|| stand_in::draw(seed));
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        let application = prepare_in_slices(&index, &laid.bindings, Mode::OutOfPlace, Payloads::Host(&source), SLICE).unwrap();
        spin(device, spinning, &streams[0]);
        let first = application.launch(&streams[0]).unwrap();
        source.1.store(true, Ordering::Relaxed);
        let second = application.launch(&streams[1]).unwrap();
        first.wait().unwrap();
        assert_eq!(rule_of(second.wait()), Some(Rule::PayloadCrc32));
        drop(drawing);
        // The staging memory is free again.
        source.1.store(false, Ordering::Relaxed);
        application.launch(&streams[0]).unwrap().wait().unwrap();
        sample.assert_done(device, &mut laid);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_given_for_payloads_is_not_filled_while_a_launch_reads_it() {
    let device = super::device();
    let spinning = spinner(device);
    let sample = Sample::new(Codec::Conditioned);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    let mut laid = sample.laid(device, Mode::OutOfPlace);
    let planned = ApplyPlan::new(&index, &laid.bindings, Mode::OutOfPlace, Payloads::Host(sample.pair.blob())).unwrap();
    let memory = device.alloc(planned.bytes()).unwrap();
    let application = Application::prepare_in(planned, memory).unwrap();
    let stream = device.stream().unwrap();
    spin(device, spinning, &stream);
    let pending = application.launch(&stream).unwrap();
    assert!(matches!(application.launch(&stream), Err(Error::InvalidArgument(_))));
    pending.wait().unwrap();
    application.launch(&stream).unwrap().wait().unwrap();
    sample.assert_done(device, &mut laid);
}

/// Work that is queued for a busy stream and its side streams does not block other streams. Each stream needs its own channel to
/// the device: `scripts/gpu-check` sets `CUDA_DEVICE_MAX_CONNECTIONS` to 32.
#[test]
#[ignore = "needs a CUDA device"]
fn applications_on_other_streams_do_not_wait_for_a_busy_one() {
    let device = super::device();
    let spinning = spinner(device);
    let sample = Sample::new(Codec::Conditioned);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    for mode in MODES {
        let mut both = [sample.laid(device, mode), sample.laid(device, mode)];
        let (busy, free) = (device.stream().unwrap(), device.stream().unwrap());
        let launch = |n: usize, stream| {
            let payloads = Payloads::Host(sample.pair.blob());
            prepare_in_slices(&index, &both[n].bindings, mode, payloads, SLICE).unwrap().launch(stream).unwrap()
        };
        // The first use pins memory, which waits for all work of the device.
        let before = [launch(0, &busy), launch(1, &free)];
        before.into_iter().for_each(|pending| pending.wait().unwrap());
        both.iter().for_each(|laid| laid.restore(device));
        spin(device, spinning, &busy);
        // The side streams of the dropped launch are returned to their pool while they wait.
        drop(launch(0, &busy));
        let end = busy.record().unwrap();
        launch(1, &free).wait().unwrap();
        assert!(!end.is_passed().unwrap(), "{mode:?}: waited for the busy stream");
        end.wait().unwrap();
        both.iter_mut().for_each(|laid| sample.assert_done(device, laid));
    }
}

/// A launch of a random program, and its expected outcome.
struct Job {
    told: String,
    pending: Pending,
    result: DeviceSlice,
    /// The base, if it differs from the base of the pair.
    spoiled: Option<Vec<u8>>,
    mode: Mode,
}

/// Random programs of several applications and copies on a few streams. All work is queued before any of it is waited for. All
/// owners are dropped at once.
#[test]
#[ignore = "needs a CUDA device"]
fn work_is_done_in_the_order_in_which_it_was_queued() {
    let device = super::device();
    let samples = [Codec::Conditioned, Codec::Raw, Codec::Zstd].map(Sample::new);
    let seeds = if stand_in::draws() { 40 } else { 2 };
    for seed in 1..=seeds {
        let random = &mut Random(seed);
        let mut below = |end: u64| random.bits() % end;
        let streams = [(); 3].map(|()| device.stream().unwrap());
        let drawing = stand_in::draws().then(|| stand_in::draw(seed));
        let mut jobs = Vec::new();
        for _ in 0..3 {
            let sample = &samples[below(3) as usize];
            let (mode, stream) = (MODES[below(3) as usize], &streams[below(3) as usize]);
            let route = match ROUTES[below(3) as usize] {
                Route::Device if std::ptr::eq(sample, &raw const samples[2]) => Route::Pinned,
                route => route,
            };
            let spoiled = below(3) == 0;
            let mut base = sample.base.clone();
            if spoiled {
                let at = below(base.len() as u64) as usize;
                base[at] ^= 1;
            }
            let bytes = base.len() as u64;
            let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
            let [kept, work, output, result] = [(); 4].map(|()| device.alloc(bytes).unwrap());
            let (binding, output) = match mode {
                Mode::OutOfPlace => (Binding::out_of_place(0, Some(work.clone()), output.clone()), output),
                Mode::InPlace(_) => (Binding::in_place(0, work.clone()), work.clone()),
            };
            let slice = [SLICE, 4000, 1 << 20][below(3) as usize];
            let payloads = payloads(device, &sample.pair, route);
            let mut pinned = device.pinned(base.len()).unwrap();
            pinned.copy_from_slice(&base);
            // An application that is never launched is freed at once.
            drop(DeviceIndex::upload(device, sample.pair.index()).unwrap());
            drop(prepare_in_slices(&index, std::slice::from_ref(&binding), mode, payloads.clone(), slice).unwrap());
            let application = prepare_in_slices(&index, &[binding], mode, payloads, slice).unwrap();
            if mode == Mode::OutOfPlace {
                stream.fill(&output, 0xA5).unwrap();
            }
            stream.copy_in(&kept, &Arc::new(pinned)).unwrap();
            // Memory that was freed too early would be reused here.
            device.pinned(base.len()).unwrap().fill(0xEE);
            stream.copy(&work, &kept).unwrap();
            drop((work, kept));
            // Out of place, a launch may follow another one.
            let is_twice = mode == Mode::OutOfPlace && below(2) == 0;
            _ = is_twice.then(|| application.launch(stream).unwrap());
            let pending = application.launch(stream).unwrap();
            drop(application);
            stream.copy(&result, &output).unwrap();
            drop(output);
            let taken = device.alloc(bytes).unwrap();
            stream.fill(&taken, 0xEE).unwrap();
            let mut pinned = device.pinned(base.len()).unwrap();
            pinned.fill(0xEE);
            stream.copy_in(&taken, &Arc::new(pinned)).unwrap();
            let told = format!("seed {seed}: {mode:?} {route:?}, slices of {slice} bytes");
            jobs.push(Job { told, pending, result, spoiled: spoiled.then_some(base), mode });
        }
        while !jobs.is_empty() {
            let Job { told, pending, result, spoiled, mode } = jobs.swap_remove(below(jobs.len() as u64) as usize);
            let outcome = pending.wait();
            streams.iter().for_each(|stream| stream.record().unwrap().wait().unwrap());
            let mut found = vec![0; result.bytes() as usize];
            device.read(&result, &mut found).unwrap();
            match (spoiled, mode) {
                (None, _) => {
                    outcome.unwrap_or_else(|e| panic!("{told}: {e}"));
                    assert!(samples.iter().any(|sample| found == sample.target), "{told}");
                }
                (Some(base), _) => {
                    assert_eq!(rule_of(outcome), Some(Rule::ChunkBaseSum), "{told}");
                    assert!(mode != Mode::InPlace(InPlace::AllChecked) || found == base, "{told}: written though refused");
                }
            }
        }
        drop(drawing);
    }
}

/// Each call takes the host about a microsecond, and a device may wait for it. Times on the stand-in mean nothing, so calls are
/// counted. In other orders than *early*, memory of the launch before is still in use.
#[test]
#[ignore = "needs a CUDA device"]
fn a_launch_takes_few_calls_of_the_driver() {
    if !stand_in::is_early() {
        return;
    }
    let device = super::device();
    let sample = Sample::new(Codec::Conditioned);
    let index = DeviceIndex::upload(device, sample.pair.index()).unwrap();
    let stream = device.stream().unwrap();
    for mode in MODES {
        let (most, most_per_slice) = match mode {
            Mode::OutOfPlace => (19, 11),
            Mode::InPlace(InPlace::AllChecked) => (24, 15),
            Mode::InPlace(_) => (15, 10),
        };
        for (route, slice) in [(Route::Device, u64::MAX), (Route::Pinned, u64::MAX), (Route::Pinned, SLICE)] {
            let laid = sample.laid(device, mode);
            let plan = ApplyPlan::in_slices(&index, &laid.bindings, mode, payloads(device, &sample.pair, route), slice).unwrap();
            let application = Application::prepare(plan.digests(false)).unwrap();
            // The first launch fills the pool of events.
            application.launch(&stream).unwrap().wait().unwrap();
            laid.restore(device);
            stand_in::refuse(None);
            let pending = application.launch(&stream).unwrap();
            let calls = stand_in::calls();
            pending.wait().unwrap();
            let slices = calls.get("cuMemcpyHtoDAsync_v2").copied().unwrap_or(1);
            let counted: u64 = calls.values().sum();
            eprintln!("{mode:?} {route:?}, {slices} slices: {counted} calls");
            assert!(counted <= most + most_per_slice * (slices - 1), "{mode:?} {route:?}, {slices} slices: {counted}, {calls:?}");
            assert!(calls["cuEventCreate"] <= 1, "{mode:?} {route:?}: {calls:?}");
            assert!(slice == u64::MAX || slices > 4, "{slices} slices");
        }
    }
}
