//! Several steps in one application in place.

use super::super::{Application, ApplyChain, ApplyPlan, ChainStep, Device, DeviceIndex, DeviceSlice, Mode, Payloads, TensorSlice};
use super::generated::{Random, lanes};
use super::is_idle;
use super::laid::{Route, payloads, read, written};
use super::stand_in;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;
use tpde::{Codec, CodecChoice, Encode, EncodeOptions, InPlace, MemoryCheckpoint, Pair, TensorInfo};
use tpde_core::error::{Error, Result, Rule};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::Rectangle;
use tpde_core::source::Source;

const ROWS: u64 = 40;
const COLUMNS: u64 = 192;
/// Distance between the rows of half a matrix in device memory: its 192 bytes, and a gap.
const PITCH: u64 = 224;
const CANARY: u8 = 0xC5;

/// Versions of a model: two matrices, of which two slices hold the second one, and a vector that the first version lacks.
struct Versions {
    infos: [TensorInfo; 3],
    /// Bytes of the tensors, per version.
    bytes: Vec<[Vec<u8>; 3]>,
}

impl Versions {
    fn new(count: usize) -> Self {
        let random = &mut Random(5);
        let info = |name: &str, shape: &[u64]| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: shape.into() };
        let infos = [info("a", &[ROWS, COLUMNS]), info("b", &[ROWS, COLUMNS]), info("n", &[5000])];
        let first = infos.each_ref().map(|info| lanes(random, Dtype::Bf16, info.shape.iter().product::<u64>() as usize, 9).0);
        let mut bytes = vec![first];
        for _ in 1..count {
            let next = bytes.last().unwrap().each_ref().map(|tensor| {
                let mut tensor = tensor.clone();
                let changed = 1 + random.bits() as usize % 60;
                (0..changed).for_each(|_| tensor[random.bits() as usize % (ROWS * COLUMNS) as usize] ^= 1 << (random.bits() % 8));
                tensor
            });
            bytes.push(next);
        }
        Self { infos, bytes }
    }

    fn checkpoint(&self, version: usize) -> MemoryCheckpoint<'_> {
        let tensors = self.infos.iter().zip(&self.bytes[version]).take(if version == 0 { 2 } else { 3 });
        MemoryCheckpoint::new(tensors.map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
    }

    fn steps(&self, codec: CodecChoice) -> Vec<Pair<Vec<u8>>> {
        let halves = [0, COLUMNS / 2].map(|column| Rectangle::new([0, column], [ROWS, COLUMNS / 2]));
        let options =
            EncodeOptions::default().codec(codec).chunk_lanes(4096).payload_digests(true).cuts([("b".to_owned(), halves.to_vec())]);
        let step = |n: usize| {
            let (base, target) = (self.checkpoint(n), self.checkpoint(n + 1));
            Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap().0
        };
        (0..self.bytes.len() - 1).map(step).collect()
    }

    /// The memory of an engine that holds a version: the matrix a, the halves of b with gaps between rows, and n.
    fn image(&self, version: usize) -> Vec<u8> {
        let [a, b, n] = &self.bytes[version];
        let mut image = a.clone();
        for half in [0, COLUMNS as usize] {
            for row in b.chunks(2 * COLUMNS as usize) {
                image.extend_from_slice(&row[half..half + COLUMNS as usize]);
                image.resize(image.len() + (PITCH - COLUMNS) as usize, CANARY);
            }
        }
        // The first version lacks n, so it is not looked at.
        image.extend(if version == 0 { vec![CANARY; n.len()] } else { n.clone() });
        image
    }
}

fn slices(memory: &DeviceSlice) -> Vec<TensorSlice<'static>> {
    let (matrix, half) = (2 * ROWS * COLUMNS, ROWS * PITCH);
    let of_b = |n: u64| {
        let rectangle = Rectangle::new([0, n * COLUMNS / 2], [ROWS, COLUMNS / 2]);
        let memory = memory.slice(matrix + n * half, half - (PITCH - COLUMNS)).unwrap();
        TensorSlice::new("b", rectangle, memory).pitch(PITCH)
    };
    vec![
        of_b(1),
        TensorSlice::new("a", Rectangle::whole(&[ROWS, COLUMNS]), memory.slice(0, matrix).unwrap()),
        of_b(0),
        TensorSlice::new("n", Rectangle::whole(&[5000]), memory.slice(matrix + 2 * half, 10_000).unwrap()),
    ]
}

fn uploaded(device: &Device, pairs: &[Pair<Vec<u8>>]) -> Vec<DeviceIndex> {
    pairs.iter().map(|pair| DeviceIndex::upload(device, pair.index()).unwrap()).collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn all_steps_are_applied_in_one_commit() {
    let device = super::device();
    let versions = Versions::new(if stand_in::is_used() { 4 } else { 11 });
    let mut runs = 0;
    for codec in [Codec::Conditioned.into(), CodecChoice::Auto, Codec::Raw.into()] {
        let pairs = versions.steps(codec);
        for route in [Route::Host, Route::Pinned] {
            let steps: Vec<_> = pairs
                .iter()
                .map(|pair| ChainStep::new(&DeviceIndex::upload(device, pair.index()).unwrap(), payloads(device, pair, route)))
                .collect();
            // One group, and groups of one slice.
            for (first, count, scratch) in [(0, pairs.len(), 1 << 30), (0, pairs.len(), 1), (1, 2, 1), (2, 1, 1)] {
                let memory = written(device, &versions.image(first));
                let slices = slices(&memory);
                let chain = ApplyChain::new(&steps[first..first + count], &slices).scratch_bytes(scratch);
                let stream = device.stream().unwrap();
                // Memory of the caller for every other chain.
                let bytes = chain.bytes().unwrap();
                let given = (runs % 2 == 1).then(|| device.alloc(bytes).unwrap());
                if let Some(short) = given.as_ref().filter(|_| count > 1).map(|given| given.slice(0, bytes - 1).unwrap()) {
                    let refused = ApplyChain::new(&steps[first..first + count], &slices).scratch_bytes(scratch).scratch(short);
                    assert!(matches!(refused.run(&stream), Err(Error::InvalidArgument(_))));
                    assert!(read(device, &memory) == versions.image(first));
                }
                let chain = match given {
                    Some(given) => chain.scratch(given),
                    None => chain,
                };
                chain.run(&stream).unwrap();
                assert!(read(device, &memory) == versions.image(first + count), "{codec:?} {route:?} {first} {count} {scratch}");
                runs += 1;
            }
        }
    }
    eprintln!("{runs} chains right");
}

/// A fault of any step, in any group, leaves all slices as they were.
#[test]
#[ignore = "needs a CUDA device"]
fn a_fault_of_any_step_leaves_all_slices_untouched() {
    let device = super::device();
    let versions = Versions::new(4);
    let pairs = versions.steps(Codec::Conditioned.into());
    let indexes = uploaded(device, &pairs);
    let before = versions.image(0);
    let fails = |blobs: &[Vec<u8>], order: &[usize], image: &[u8], number: usize, rule: Rule| {
        let steps: Vec<_> = order.iter().map(|&n| ChainStep::new(&indexes[n], Payloads::Host(&blobs[n]))).collect();
        for scratch in [1 << 30, 1] {
            let (memory, stream) = (written(device, image), device.stream().unwrap());
            let error = ApplyChain::new(&steps, &slices(&memory)).scratch_bytes(scratch).run(&stream).unwrap_err();
            assert!(is_idle(&stream), "steps of later groups still run");
            let Error::Step { number: found, source, .. } = &error else { panic!("{error}") };
            assert_eq!((*found, source.rule()), (number, Some(rule)), "{error}");
            assert!(read(device, &memory) == image, "{error}");
        }
    };
    let sound: Vec<_> = pairs.iter().map(|pair| pair.blob().clone()).collect();
    for number in 1..=3 {
        for tensor in [0, indexes[0].tensor_count() - 1] {
            let mut blobs = sound.clone();
            let payload = indexes[number - 1].payloads_of(tensor).unwrap();
            blobs[number - 1][payload.start as usize + 3] ^= 1;
            fails(&blobs, &[0, 1, 2], &before, number, Rule::PayloadCrc32);
        }
    }
    fails(&sound, &[0, 2], &before, 2, Rule::ChunkBaseSum);
    fails(&sound, &[0, 1, 1, 2], &before, 3, Rule::ChunkBaseSum);
    fails(&sound, &[0, 1, 2], &versions.image(1), 1, Rule::ChunkBaseSum);
}

/// A blob whose bytes differ from some read on.
struct Changing<'a> {
    blob: &'a Vec<u8>,
    reads: AtomicU32,
    changed_from: u32,
    at: usize,
}

impl Source for Changing<'_> {
    fn size(&self) -> u64 {
        self.blob.len() as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let offset = offset as usize;
        out.copy_from_slice(&self.blob[offset..offset + out.len()]);
        if self.reads.fetch_add(1, Relaxed) >= self.changed_from && (offset..offset + out.len()).contains(&self.at) {
            out[self.at - offset] ^= 1;
        }
        Ok(())
    }
}

/// Payloads that change between the two passes are found before the lanes that they would give are kept in silence.
#[test]
#[ignore = "needs a CUDA device"]
fn payloads_that_change_between_the_passes_are_an_error() {
    let device = super::device();
    let versions = Versions::new(3);
    let pairs = versions.steps(Codec::Conditioned.into());
    let indexes = uploaded(device, &pairs);
    let (before, after) = (versions.image(0), versions.image(2));
    let at = indexes[1].payloads_of(0).unwrap().start as usize + 3;
    let (mut checked, mut poisoned) = (0, 0);
    for changed_from in 0.. {
        let source = Changing { blob: pairs[1].blob(), reads: AtomicU32::new(0), changed_from, at };
        let steps =
            [ChainStep::new(&indexes[0], Payloads::Host(pairs[0].blob())), ChainStep::new(&indexes[1], Payloads::Host(&source))];
        let memory = written(device, &before);
        match ApplyChain::new(&steps, &slices(&memory)).scratch_bytes(1).run(&device.stream().unwrap()) {
            Err(Error::Step { number: 2, .. }) => {
                assert!(read(device, &memory) == before);
                checked += 1;
            }
            Err(Error::Poisoned { written, total, source }) => {
                assert!(matches!(*source, Error::Step { number: 2, .. }), "{source}");
                assert!(!written.is_empty() && written.len() as u32 <= total && written.is_sorted());
                poisoned += 1;
            }
            Ok(()) => {
                assert!(read(device, &memory) == after);
                break;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(checked > 0 && poisoned > 0, "{checked} {poisoned}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn slices_that_do_not_fit_are_refused_before_any_work() {
    let device = super::device();
    let versions = Versions::new(3);
    let pairs = versions.steps(Codec::Raw.into());
    let index = |n: usize| DeviceIndex::upload(device, pairs[n].index()).unwrap();
    let steps = [0, 1].map(|n| ChainStep::new(&index(n), Payloads::Host(pairs[n].blob())));
    let memory = written(device, &versions.image(0));
    let stream = device.stream().unwrap();
    let refused = |steps: &[ChainStep<'_>], slices: &[TensorSlice<'_>], why: &str| {
        let error = ApplyChain::new(steps, slices).run(&stream).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert!(read(device, &memory) == versions.image(0));
    };
    let right = slices(&memory);
    refused(&[], &right, "no step is given");
    let mut unknown = right.clone();
    unknown[0].name = "c";
    refused(&steps, &unknown, "no tensor c");
    let mut overlapping = right.clone();
    overlapping[1].memory = memory.slice(256, overlapping[1].memory.bytes()).unwrap();
    refused(&steps, &overlapping, "overlap");
    let mut part = right.clone();
    part[1].rectangle.extent[0] -= 1;
    part[1].memory = memory.slice(0, part[1].memory.bytes() - 2 * COLUMNS).unwrap();
    refused(&steps, &part, "lacks some of");
    ApplyChain::new(&steps, &[]).run(&stream).unwrap();
}

/// Tied weights: two tensors in the same memory, in one group and in two.
#[test]
#[ignore = "needs a CUDA device"]
fn memory_of_two_tensors_is_changed_once() {
    let device = super::device();
    let random = &mut Random(11);
    let lanes_of_one = 3000;
    let infos = ["embed", "head", "other"].map(|name| TensorInfo {
        name: name.into(),
        dtype: Dtype::Bf16,
        shape: vec![lanes_of_one as u64],
    });
    let mut versions = vec![[(); 2].map(|()| lanes(random, Dtype::Bf16, lanes_of_one, 9).0)];
    for _ in 0..3 {
        let mut next = versions.last().unwrap().clone();
        next.iter_mut().for_each(|tensor| (0..40).for_each(|_| tensor[2 * (random.bits() as usize % lanes_of_one)] ^= 1));
        versions.push(next);
    }
    let options = EncodeOptions::default().codec(Codec::Conditioned);
    let pairs: Vec<_> = versions
        .windows(2)
        .map(|two| {
            let [base, target] = [&two[0], &two[1]].map(|[tied, other]| {
                let bytes = [&tied[..], &tied[..], &other[..]];
                MemoryCheckpoint::new(infos.iter().cloned().zip(bytes)).unwrap()
            });
            Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap().0
        })
        .collect();
    let steps: Vec<_> = uploaded(device, &pairs)
        .iter()
        .zip(&pairs)
        .map(|(index, pair)| ChainStep::new(index, payloads(device, pair, Route::Host)))
        .collect();
    for scratch in [1 << 30, 1] {
        let memory = versions[0].each_ref().map(|bytes| written(device, bytes));
        let whole = Rectangle::whole(&[lanes_of_one as u64]);
        let of = [("embed", 0), ("other", 1), ("head", 0)];
        let slices = of.map(|(name, n): (&str, usize)| TensorSlice::new(name, whole.clone(), memory[n].clone()));
        let stream = device.stream().unwrap();
        ApplyChain::new(&steps, &slices).scratch_bytes(scratch).run(&stream).unwrap();
        for (memory, expected) in memory.iter().zip(versions.last().unwrap()) {
            assert!(read(device, memory) == *expected, "scratch memory of {scratch} bytes");
        }
    }
}

/// Time of ten steps in one commit, beside ten applications, of 1 GB of which 1 % changes per step.
#[test]
#[ignore = "needs a CUDA device"]
fn steps_beside_single_applications() {
    let device = super::device();
    let (count, tensors, lanes_of_one) = if stand_in::is_used() { (3, 2, 8192) } else { (10, 64, 8 << 20) };
    let random = &mut Random(3);
    let infos: Vec<_> = (0..tensors)
        .map(|n| TensorInfo { name: format!("t{n:02}"), dtype: Dtype::Bf16, shape: vec![lanes_of_one as u64] })
        .collect();
    let mut versions = vec![lanes(random, Dtype::Bf16, lanes_of_one, 1 << 40).0];
    for _ in 0..count {
        let mut next = versions.last().unwrap().clone();
        (0..lanes_of_one / 100).for_each(|_| next[2 * (random.bits() as usize % lanes_of_one)] ^= 1);
        versions.push(next);
    }
    let checkpoint = |n: usize| MemoryCheckpoint::new(infos.iter().map(|info| (info.clone(), &versions[n][..]))).unwrap();
    let options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(1 << 19);
    let pairs: Vec<_> = (0..count)
        .map(|n| Encode::new(&checkpoint(n + 1)).base(&checkpoint(n)).options(options.clone()).to_memory().unwrap().0)
        .collect();
    let steps: Vec<_> = pairs
        .iter()
        .map(|pair| ChainStep::new(&DeviceIndex::upload(device, pair.index()).unwrap(), payloads(device, pair, Route::Pinned)))
        .collect();
    let stream = device.stream().unwrap();
    let memory = device.alloc((2 * lanes_of_one * tensors) as u64).unwrap();
    let restore = || device.write(&memory, &versions[0].repeat(tensors)).unwrap();
    let slice = |(n, info): (usize, &'_ TensorInfo)| {
        let bytes = 2 * lanes_of_one as u64;
        (info.name.clone(), memory.slice(n as u64 * bytes, bytes).unwrap())
    };
    let held: Vec<_> = infos.iter().enumerate().map(slice).collect();
    let slices: Vec<_> = held
        .iter()
        .map(|(name, memory)| TensorSlice::new(name, Rectangle::whole(&[lanes_of_one as u64]), memory.clone()))
        .collect();
    let after = versions[count].repeat(tensors);
    crate::plan::targets::BATCH_OF_TEST.set(128 << 20);
    for digests in [false, true] {
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..if stand_in::is_used() { 1 } else { 5 } {
            restore();
            let begin = Instant::now();
            for step in &steps {
                let tensors = TensorSlice::in_place(&step.index, &slices).unwrap();
                let mode = Mode::InPlace(InPlace::AllChecked);
                let plan = ApplyPlan::new(&step.index, &tensors, mode, step.payloads.clone()).unwrap().digests(digests);
                Application::prepare(plan).unwrap().launch(&stream).unwrap().wait().unwrap();
            }
            times[0].push(begin.elapsed().as_secs_f64());
            assert!(read(device, &memory) == after);
            restore();
            let begin = Instant::now();
            ApplyChain::new(&steps, &slices).digests(digests).run(&stream).unwrap();
            times[1].push(begin.elapsed().as_secs_f64());
            assert!(read(device, &memory) == after);
            restore();
            let begin = Instant::now();
            ApplyChain::new(&steps, &slices).digests(digests).scratch_bytes(memory.bytes()).run(&stream).unwrap();
            times[2].push(begin.elapsed().as_secs_f64());
            assert!(read(device, &memory) == after);
        }
        let [singles, chain, at_once] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            1e3 * times[times.len() / 2]
        });
        eprintln!(
            "digests {digests}: {count} applications {singles:.2} ms, one chain {chain:.2} ms, with scratch memory for all slices \
             {at_once:.2} ms: {:.2} and {:.2} of the applications",
            chain / singles,
            at_once / singles
        );
    }
}
