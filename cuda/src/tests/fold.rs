//! Chains that a device folds have the bytes of those that the processor folds.

use super::super::{Device, DeviceCheckpoint, Encode, Encoder, Rebuild};
use super::derived::{Owned, cast, memory, quantised};
use super::encode::compare;
use super::generated::{Random, lanes};
use super::stand_in;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;
use tpde::{
    Chain, Checkpoint, Codec, CodecChoice, EncodeOptions, FormatVersion, MemoryCheckpoint, Pair, PairPaths, SafetensorsCheckpoint,
    TensorInfo, Watch,
};
use tpde_core::derived::BaseForm;
use tpde_core::error::{Error, Result, Rule};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::Rectangle;

pub type InMemory = Pair<Vec<u8>>;

fn tensor(random: &mut Random, name: &str, dtype: Dtype, shape: &[u64]) -> Owned {
    let count = dtype.lanes(shape).unwrap() as usize;
    (TensorInfo { name: name.into(), dtype, shape: shape.into() }, lanes(random, dtype, count, 1 << 40).0)
}

/// Changes about one lane in `rarity`, by little.
fn change(random: &mut Random, (info, bytes): &mut Owned, rarity: u64) {
    for lane in bytes.chunks_mut(info.dtype.lane_bytes()) {
        if random.bits().is_multiple_of(rarity) {
            lane[0] = lane[0].wrapping_add(1 + (random.bits() % 3) as u8);
        }
    }
}

/// Encodes the step between two versions.
fn step(before: &[Owned], after: &[Owned], options: &EncodeOptions) -> InMemory {
    let (base, target) = (memory(before), memory(after));
    tpde::Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap().0
}

fn folded(chain: &Chain<'_, Vec<u8>>, base: &DeviceCheckpoint, options: &EncodeOptions) -> Result<InMemory> {
    let last = Rebuild::new(chain, base).run()?;
    Ok(Encode::fold(chain, base, &last).options(options.clone()).to_memory()?.0)
}

/// Folds on both sides, and compares the pairs. The last version must have the bytes of `after`.
fn check(base: &[Owned], after: &[Owned], pairs: &[InMemory], options: &EncodeOptions, what: &str) -> InMemory {
    let base = memory(base);
    let chain = Chain::new(&base, pairs).unwrap();
    let expected = tpde::Encode::fold(&chain).options(options.clone()).to_memory().unwrap_or_else(|e| panic!("{what}: {e}")).0;
    let on_device = DeviceCheckpoint::upload(super::device(), &base).unwrap();
    let last = Rebuild::new(&chain, &on_device).run().unwrap_or_else(|e| panic!("{what}: {e}"));
    let expected_tensors = memory(after);
    assert_eq!(last.tensors(), expected_tensors.tensors(), "{what}");
    for (i, (info, bytes)) in after.iter().enumerate().filter(|(i, (info, _))| last.held(*i) == [Rectangle::whole(&info.shape)]) {
        let mut found = vec![0; bytes.len()];
        last.read(i, 0, &mut found).unwrap();
        assert!(found == *bytes, "{what}: {} differs", info.name);
    }
    let found = Encode::fold(&chain, &on_device, &last).options(options.clone()).to_memory();
    let found = found.unwrap_or_else(|e| panic!("{what}: {e}")).0;
    compare(&expected, &found, what);
    found
}

#[test]
#[ignore = "needs a CUDA device"]
fn folds_have_the_bytes_of_the_processor() {
    let sizes: &[usize] = if stand_in::is_used() { &[0, 600, 9000] } else { &[0, 6, 600, 9000, 200_010] };
    let of_steps: [CodecChoice; 4] = [Codec::Raw.into(), CodecChoice::Auto, Codec::Zstd.into(), Codec::Conditioned.into()];
    for &dtype in Dtype::ALL {
        let random = &mut Random(u64::from(dtype.code()) + 40);
        let shape = |size: usize| vec![size as u64 / 6 * 6 * dtype.lane_bytes() as u64 * 8 / dtype.bits()];
        let mut versions: Vec<Vec<Owned>> =
            vec![sizes.iter().map(|&size| tensor(random, &format!("t{size:06}"), dtype, &shape(size))).collect()];
        let mut pairs = Vec::new();
        for n in 0..3 {
            let mut next = versions[n].clone();
            next.iter_mut().for_each(|tensor| change(random, tensor, [2, 30, 400][n]));
            // In some steps with grids that differ.
            let codec = of_steps[(n + dtype.code() as usize) % 4];
            let options = EncodeOptions::default().codec(codec).chunk_lanes([1 << 12, 1 << 13, 1 << 13][n]);
            pairs.push(step(&versions[n], &next, &options));
            versions.push(next);
        }
        // On the stand-in, each table set takes about a second.
        let is_coded = !stand_in::is_used() || [Dtype::Bf16, Dtype::F32].contains(&dtype);
        for codec in [Codec::Raw, Codec::Conditioned].into_iter().take(if is_coded { 2 } else { 1 }) {
            for count in [1, 3] {
                let options = EncodeOptions::default().codec(codec).chunk_lanes(1 << 13);
                let pair = check(&versions[0], &versions[count], &pairs[..count], &options, &format!("{dtype} {codec} {count}"));
                assert_eq!(pair.index().tensor_count(), sizes.len());
            }
        }
    }
}

/// Tensors of which each step adds, removes, renames, resizes or cuts some, and one of another dtype.
#[test]
#[ignore = "needs a CUDA device"]
fn tensors_that_only_some_steps_have() {
    let random = &mut Random(8);
    let raw = EncodeOptions::default().codec(Codec::Raw).chunk_lanes(1 << 12);
    let first = vec![
        tensor(random, "a", Dtype::Bf16, &[40, 192]),
        tensor(random, "gone", Dtype::F32, &[700]),
        tensor(random, "rows", Dtype::Bf16, &[30, 64]),
        tensor(random, "swapped", Dtype::U8, &[64, 16]),
        tensor(random, "twin", Dtype::Bf16, &[40, 192]),
    ];
    let mut versions = vec![first];
    let mut pairs = Vec::new();
    for n in 0..6 {
        let mut next = versions[n].clone();
        let mut options = raw.clone();
        next.iter_mut().for_each(|tensor| change(random, tensor, 50));
        match n {
            // Nothing but numbers: a step in place would follow, but the first one has the base.
            0 => options.chunk_lanes = 1 << 13,
            1 => {
                next.retain(|(info, _)| info.name != "gone");
                next.push(tensor(random, "zz", Dtype::F16, &[900]));
            }
            // Two names are exchanged, and one is new.
            2 => {
                for (info, _) in &mut next {
                    let name = match &*info.name {
                        "a" => "twin",
                        "twin" => "a",
                        "swapped" => "other",
                        name => name,
                    };
                    info.name = name.to_owned();
                }
                options = options.renamed([("a", "twin"), ("twin", "a"), ("other", "swapped")]);
            }
            // A tensor grows and one has another dtype.
            3 => {
                let rows = next.iter_mut().find(|(info, _)| info.name == "rows").unwrap();
                rows.0.shape[0] = 44;
                rows.1.resize(44 * 64 * 2, 0x3C);
                *next.iter_mut().find(|(info, _)| info.name == "zz").unwrap() = tensor(random, "zz", Dtype::F32, &[40]);
            }
            // Parts, then other parts: in place.
            4 => options = options.split("*a*=1:2,tw*=0:3".parse().unwrap()),
            _ => options = options.split("*a*=0:4".parse().unwrap()),
        }
        next.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        pairs.push(step(&versions[n], &next, &options));
        versions.push(next);
    }
    for (start, end) in [(0, 1), (0, 3), (0, 6), (1, 6), (4, 6)] {
        let codecs = [Codec::Raw.into(), CodecChoice::Device];
        for codec in codecs.into_iter().take(if end == 6 && start == 1 { 2 } else { 1 }) {
            let (base, last) = (&versions[start], &versions[end]);
            let options = EncodeOptions::default().codec(codec).chunk_lanes(1 << 12);
            check(base, last, &pairs[start..end], &options, &format!("{start}..{end} {codec:?}"));
            check(
                base,
                last,
                &pairs[start..end],
                &options.split("a=0:2".parse().unwrap()),
                &format!("{start}..{end} {codec:?}, cut"),
            );
        }
    }
    // The first version from nothing, in format 1.1; and no step.
    let options = raw.clone().format(FormatVersion::V1_1);
    let whole = step(&[], &versions[0], &options);
    check(&[], &versions[0], std::slice::from_ref(&whole), &options, "from nothing");
    check(&versions[0], &versions[0], &[], &options, "no step");

    // Of tensor a only parts, of which some are left out.
    let columns = [0, 48, 96, 144].map(|column| Rectangle::new([0, column], [40, 48]));
    let options = raw.clone().cuts([("a".to_owned(), vec![columns[0].clone(), columns[2].clone()])]);
    let parts = [step(&versions[0], &versions[1], &options), step(&versions[1], &versions[1], &options)];
    let pair = check(&versions[0], &versions[1], &parts, &raw, "some parts");
    assert_eq!(pair.index().entries("a").len(), 2);
}

/// Steps from quantised weights and other dtypes, and steps after these.
#[test]
#[ignore = "needs a CUDA device"]
fn derived_bases() {
    let random = &mut Random(21);
    let given = [
        quantised(random, BaseForm::Fp8Blocks, Dtype::Bf16, &[131, 24]),
        quantised(random, BaseForm::Mxfp4, Dtype::Bf16, &[3, 7, 96]),
        quantised(random, BaseForm::Mxfp4Transposed, Dtype::Bf16, &[1, 64, 7]),
        cast(random, Dtype::F32, Dtype::Bf16, &[2048]),
    ];
    let by_name = |a: &Owned, b: &Owned| a.0.name.cmp(&b.0.name);
    let mut versions = [Vec::new(), Vec::new()];
    for given in given {
        versions[0].extend(given.base);
        versions[1].push(given.formed);
    }
    versions.iter_mut().for_each(|version| version.sort_by(by_name));
    let [base, mut first] = versions;
    first.iter_mut().for_each(|tensor| change(random, tensor, 40));
    let mut second = first.clone();
    second.iter_mut().for_each(|tensor| change(random, tensor, 40));
    let options = EncodeOptions::default().codec(Codec::Raw).chunk_lanes(1 << 12);
    let pairs = [step(&base, &first, &options), step(&first, &second, &options)];
    assert!(pairs[0].index().tensors().all(|tensor| tensor.base_kind.is_derived()));
    let pair = check(&base, &second, &pairs, &options, "derived");
    assert!(pair.index().tensors().all(|tensor| tensor.base_kind.is_derived()));
    // The derived step is the second one.
    let mut before = base.clone();
    before.iter_mut().filter(|(info, _)| info.dtype == Dtype::F32).for_each(|tensor| change(random, tensor, 900));
    let pairs = [step(&before, &base, &options), step(&base, &first, &options)];
    check(&before, &first, &pairs, &options, "derived in the second step");
    check(&before, &first, &pairs, &options.derived(false), "without derived bases");
}

/// Versions of two tensors, their pairs, and the folder for what is folded.
pub struct Place {
    pub versions: Vec<Vec<Owned>>,
    pub pairs: Vec<InMemory>,
    pub folder: tempfile::TempDir,
}

impl Place {
    pub fn new(count: usize) -> Self {
        let random = &mut Random(77);
        let mut versions = vec![vec![tensor(random, "a", Dtype::Bf16, &[5000]), tensor(random, "b", Dtype::Bf16, &[300])]];
        let options = EncodeOptions::default().codec(Codec::Raw).chunk_lanes(1 << 12);
        let mut pairs = Vec::new();
        for n in 0..count {
            let mut next = versions[n].clone();
            next.iter_mut().for_each(|tensor| change(random, tensor, 20));
            pairs.push(step(&versions[n], &next, &options));
            versions.push(next);
        }
        Self { versions, pairs, folder: tempfile::tempdir().unwrap() }
    }

    pub fn published(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Both folds of a chain are refused. Returns both errors.
    fn refused(&self, base: &[Owned], pairs: &[InMemory]) -> [Error; 2] {
        let base = memory(base);
        let options = EncodeOptions::default().codec(Codec::Raw);
        let path = self.folder.path().join("folded");
        let errors = match Chain::new(&base, pairs) {
            Err(error) => [error, Chain::new(&base, pairs).err().unwrap()],
            Ok(chain) => {
                let on_device = DeviceCheckpoint::upload(super::device(), &base).unwrap();
                let fold = || {
                    Encode::fold(&chain, &on_device, &Rebuild::new(&chain, &on_device).run()?)
                        .options(options.clone())
                        .to_path(&path)
                };
                [tpde::Encode::fold(&chain).options(options.clone()).to_path(&path).unwrap_err(), fold().unwrap_err()]
            }
        };
        assert_eq!(self.published(), Vec::<PathBuf>::new());
        errors
    }
}

/// A chain that does not fit, or is damaged, has the error of the processor, and nothing is published.
#[test]
#[ignore = "needs a CUDA device"]
fn chains_that_do_not_fit() {
    let place = Place::new(4);
    let damaged = |number: usize, tensor: usize| {
        let mut pairs = Vec::new();
        for (n, pair) in place.pairs.iter().enumerate() {
            let mut blob = pair.blob().clone();
            if n == number {
                let record = &pair.index().records()[pair.index().tensor(tensor).first_chunk as usize];
                blob[record.blob_offset.get() as usize] ^= 1;
            }
            pairs.push(
                Pair::new(tpde::ValidatedIndex::parse(pair.index().as_bytes().to_vec(), &Default::default()).unwrap(), blob)
                    .unwrap(),
            );
        }
        pairs
    };
    for number in 0..4 {
        for tensor in 0..2 {
            let [expected, found] = place.refused(&place.versions[0], &damaged(number, tensor));
            let Error::Step { number: step, source, .. } = &found else { panic!("{found}") };
            assert_eq!((*step, source.rule()), (number + 1, Some(Rule::PayloadCrc32)), "{found}");
            assert_eq!(found.to_string(), expected.to_string());
        }
    }
    // Another base: the processor says which tensor of it differs.
    let mut other = place.versions[0].clone();
    other[0].1[9000] ^= 1;
    let [expected, found] = place.refused(&other, &place.pairs);
    assert!(matches!(&found, Error::Step { number: 1, source, .. } if matches!(**source, Error::WrongBase { .. })), "{found}");
    assert_eq!(found.to_string(), expected.to_string());
    // A step that is left out, or comes twice, is found in the indexes, or if the parts differ in the second step by its sums.
    let again = |n: usize, options: &EncodeOptions| step(&place.versions[n], &place.versions[n + 1], options);
    let raw = EncodeOptions::default().codec(Codec::Raw);
    for (steps, number) in [(vec![0, 2], 2), (vec![0, 1, 1], 3), (vec![1, 2], 1)] {
        for split in ["", "*=0:3"] {
            let options = raw.clone().split(split.parse().unwrap());
            let pairs: Vec<_> = steps.iter().zip(0..).map(|(&n, i)| again(n, if i % 2 == 1 { &options } else { &raw })).collect();
            let [expected, found] = place.refused(&place.versions[0], &pairs);
            assert!(matches!(&found, Error::Step { number: step, .. } if *step == number), "{found}");
            assert_eq!(found.to_string(), expected.to_string());
        }
    }
    // A base that lacks a tensor.
    let [expected, found] = place.refused(&place.versions[0][..1], &place.pairs);
    assert_eq!(found.to_string(), expected.to_string());
    // The base on the device lacks a tensor of the chain's base, or has another shape.
    let base = memory(&place.versions[0]);
    let chain = Chain::new(&base, &place.pairs).unwrap();
    let mut reshaped = place.versions[0].clone();
    reshaped[0].0.shape = vec![50, 100];
    for wrong in [&place.versions[0][..1], &reshaped] {
        let on_device = DeviceCheckpoint::upload(super::device(), &memory(wrong)).unwrap();
        let error = Rebuild::new(&chain, &on_device).run().unwrap_err();
        assert!(
            matches!(&error, Error::Step { number: 1, source, .. } if matches!(**source, Error::InvalidArgument(_))),
            "{error}"
        );
    }
    // A codec that a device does not encode.
    let on_device = DeviceCheckpoint::upload(super::device(), &base).unwrap();
    let error = folded(&chain, &on_device, &EncodeOptions::default().codec(Codec::Zstd)).unwrap_err();
    assert!(error.to_string().contains("expected codec device, conditioned or raw"), "{error}");
}

/// A part of a tensor whose rows are at two distances in the version before.
#[test]
#[ignore = "needs a CUDA device"]
fn parts_with_rows_at_two_distances() {
    let random = &mut Random(4);
    let base = vec![tensor(random, "a", Dtype::Bf16, &[4, 6, 10])];
    let mut last = base.clone();
    change(random, &mut last[0], 5);
    let inner = vec![Rectangle::new([0, 0, 0], [4, 3, 5]), Rectangle::new([0, 0, 5], [4, 3, 5])];
    let options = EncodeOptions::default().codec(Codec::Raw);
    let pairs = [step(&base, &last, &options), step(&last, &last, &options.clone().cuts([("a".to_owned(), inner)]))];
    let base = memory(&base);
    let chain = Chain::new(&base, &pairs).unwrap();
    let on_device = DeviceCheckpoint::upload(super::device(), &base).unwrap();
    let error = folded(&chain, &on_device, &options).unwrap_err();
    let Error::Step { number: 2, source, .. } = &error else { panic!("{error}") };
    assert!(matches!(**source, Error::InvalidArgument(_)) && error.to_string().contains("two distances"), "{error}");
}

pub struct Stop {
    pub after: u64,
    pub calls: AtomicU64,
}

impl Watch for Stop {
    fn done(&self, _: u64) -> Result<()> {
        if self.calls.fetch_add(1, Relaxed) >= self.after { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// Whichever call of the driver fails, and wherever the caller stops the fold: a typed error, and nothing is published. The device
/// folds afterwards.
#[test]
#[ignore = "needs a CUDA device"]
fn a_fold_that_ends_early_publishes_nothing() {
    let place = Place::new(3);
    let base = memory(&place.versions[0]);
    let chain = Chain::new(&base, &place.pairs).unwrap();
    let options = EncodeOptions::default().codec(Codec::Raw);
    let expected = tpde::Encode::fold(&chain).options(options.clone()).to_memory().unwrap().0;
    let path = place.folder.path().join("folded");
    let fold = |device: &Device, watch: &dyn Watch| {
        let on_device = DeviceCheckpoint::upload(device, &base)?;
        let last = Rebuild::new(&chain, &on_device).watch(watch).run()?;
        Encode::fold(&chain, &on_device, &last).options(options.clone()).watch(watch).to_path(&path)
    };
    let folds = |device: &Device| {
        let progress = AtomicU64::new(0);
        fold(device, &|bytes| _ = progress.fetch_add(bytes, Relaxed)).unwrap();
        let bytes = chain.tensors().iter().map(TensorInfo::bytes).sum::<u64>();
        assert_eq!(progress.into_inner(), 4 * bytes);
        let PairPaths { index, blob, .. } = PairPaths::new(&path);
        assert!(std::fs::read(&index).unwrap() == expected.index().as_bytes() && std::fs::read(&blob).unwrap() == *expected.blob());
        place.published().iter().for_each(|path| std::fs::remove_file(path).unwrap());
    };
    let device = Device::open(0).unwrap();
    for after in 0..4 {
        let error = fold(&device, &Stop { after, calls: AtomicU64::new(0) }).unwrap_err();
        assert!(matches!(error, Error::Cancelled), "{after}: {error}");
        assert_eq!(place.published(), Vec::<PathBuf>::new());
    }
    folds(&device);
    if !stand_in::is_used() {
        return println!("skipped in part: only the stand-in for the driver refuses calls");
    }
    stand_in::refuse(None);
    folds(&device);
    for (name, count) in stand_in::calls() {
        let device = Device::open(0).unwrap();
        folds(&device);
        for calls in [0, count / 2] {
            stand_in::refuse_named(&name, calls);
            let result = fold(&device, &|_| {});
            let is_refused = stand_in::refuse(None);
            match result {
                Ok(_) => place.published().iter().for_each(|path| std::fs::remove_file(path).unwrap()),
                Err(Error::Device { .. }) if is_refused => {
                    assert_eq!(place.published(), Vec::<PathBuf>::new(), "{calls} of {name}")
                }
                Err(error) => panic!("{calls} of {name}: {error}"),
            }
            folds(&device);
        }
    }
    for name in ["cuMemAllocFromPoolAsync", "cuLaunchKernel"] {
        assert!(stand_in::has_refused(name), "{name} was never refused");
    }
}

/// Files of checkpoints: they are described as by the processor, and never overwritten.
#[test]
#[ignore = "needs a CUDA device"]
fn files_of_the_last_version() {
    let place = Place::new(2);
    let path = |name: &str| place.folder.path().join(name);
    for (n, version) in place.versions.iter().enumerate() {
        let whole = step(&[], version, &EncodeOptions::default());
        tpde::Apply::new(&whole).to_path(path(&format!("{n}.safetensors"))).unwrap();
    }
    let open = |n: usize| SafetensorsCheckpoint::open(path(&format!("{n}.safetensors"))).unwrap();
    for n in 0..2 {
        tpde::Encode::new(&open(n + 1)).base(&open(n)).to_path(path(&format!("step{n}"))).unwrap();
    }
    let pairs = [0, 1].map(|n| Pair::open(path(&format!("step{n}"))).unwrap());
    let base = open(0);
    let chain = Chain::new(&base, &pairs).unwrap();
    let on_device = DeviceCheckpoint::upload(super::device(), &base).unwrap();
    let last = Rebuild::new(&chain, &on_device).run().unwrap();
    let options = EncodeOptions::default().codec(Codec::Raw);
    let fold = Encode::fold(&chain, &on_device, &last).options(options.clone());
    fold.to_path(path("cuda")).unwrap();
    tpde::Encode::fold(&chain).options(options.clone()).to_path(path("cpu")).unwrap();
    let read = |name: &str| std::fs::read(path(name)).unwrap();
    for ending in ["tpde-index", "tpde-blob"] {
        assert!(read(&format!("cuda.{ending}")) == read(&format!("cpu.{ending}")), "{ending}");
    }
    tpde::Apply::new(&Pair::open(path("cuda")).unwrap()).base(&base).to_path(path("rebuilt.safetensors")).unwrap();
    assert!(read("rebuilt.safetensors") == read("2.safetensors"));
    // A pair of the chain is not replaced, even if that is allowed.
    let before = read("step1.tpde-index");
    let error = fold.overwrite(true).to_path(path("step1")).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)) && read("step1.tpde-index") == before, "{error}");
}

/// Time of a fold beside one encoding of the same checkpoints, of the real checkpoints in `$TPDE_PAIRS` with every tensor
/// `$TPDE_TIMES` times (24). The ten steps lead from the base to rl23, back to rl20, and to rl23 again.
#[test]
#[ignore = "needs a CUDA device"]
fn folds_beside_one_encoding() {
    let Some(folder) = std::env::var_os("TPDE_PAIRS").map(PathBuf::from) else {
        return println!("skipped: TPDE_PAIRS names no folder of checkpoints");
    };
    let times = std::env::var("TPDE_TIMES").map_or(24, |times| times.parse().unwrap());
    let device = super::device();
    let files: BTreeMap<_, Vec<Owned>> = ["base", "rl20", "rl21", "rl22", "rl23"]
        .map(|name| {
            let file = SafetensorsCheckpoint::open(folder.join(format!("{name}.safetensors"))).unwrap();
            let read = |(i, info): (usize, &TensorInfo)| {
                let mut bytes = vec![0; info.bytes() as usize];
                file.read(i, 0, &mut bytes).unwrap();
                (info.clone(), bytes)
            };
            (name, file.tensors().iter().enumerate().map(read).collect())
        })
        .into();
    let repeated = |name: &str| {
        let of_round = |n: usize| {
            files[name]
                .iter()
                .map(move |(info, bytes)| (TensorInfo { name: format!("{n:03}.{}", info.name), ..info.clone() }, &bytes[..]))
        };
        MemoryCheckpoint::new((0..times).flat_map(of_round)).unwrap()
    };
    let route = ["base", "rl20", "rl21", "rl22", "rl23", "rl22", "rl21", "rl20", "rl21", "rl22", "rl23"];
    let on_device: BTreeMap<_, _> =
        files.keys().map(|name| (*name, DeviceCheckpoint::upload(device, &repeated(name)).unwrap())).collect();
    let encoder = Encoder::new();
    let options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(1 << 19);
    let encode = |base: &str, target: &str| {
        let encode = Encode::new(&on_device[target]).base(&on_device[base]).options(options.clone()).encoder(&encoder);
        encode.to_pinned().unwrap().0
    };
    let pairs: Vec<_> = route.windows(2).map(|step| encode(step[0], step[1])).collect();
    let base = repeated("base");
    let chain = Chain::new(&base, &pairs).unwrap();
    let median = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        1e3 * seconds[seconds.len() / 2]
    };
    let timed = |seconds: &mut Vec<f64>, begin: Instant| seconds.push(begin.elapsed().as_secs_f64());
    let bytes = base.tensors().iter().map(TensorInfo::bytes).sum::<u64>();
    for count in [1, 4, 10] {
        let chain = Chain::new(&base, &pairs[..count]).unwrap();
        let [mut direct, mut rebuilt, mut folded] = [(); 3].map(|()| Vec::new());
        for _ in 0..6 {
            let begin = Instant::now();
            let expected = encode("base", route[count]);
            timed(&mut direct, begin);
            let begin = Instant::now();
            let last = Rebuild::new(&chain, &on_device["base"]).run().unwrap();
            timed(&mut rebuilt, begin);
            let fold = Encode::fold(&chain, &on_device["base"], &last).options(options.clone()).encoder(&encoder);
            let found = fold.to_pinned().unwrap().0;
            timed(&mut folded, begin);
            assert!(found.index().as_bytes() == expected.index().as_bytes() && found.blob()[..] == expected.blob()[..]);
        }
        let [direct, rebuilt, folded] = [direct, rebuilt, folded].map(|seconds| median(seconds[1..].to_vec()));
        eprintln!(
            "{count} pairs, {:.2} GB: encode {direct:.2} ms, fold {folded:.2} ms, of which {rebuilt:.2} ms to rebuild: {:.2} of the speed",
            bytes as f64 / 1e9,
            direct / folded
        );
    }
    // The processor, once.
    let last = repeated("rl23");
    let begin = Instant::now();
    let expected = tpde::Encode::new(&last).base(&base).options(options.clone()).to_memory().unwrap().0;
    let direct = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    let found = tpde::Encode::fold(&chain).options(options.clone()).to_memory().unwrap().0;
    let folded = begin.elapsed().as_secs_f64();
    compare(&expected, &found, "on the processor");
    eprintln!("processor, 10 pairs: encode {direct:.2} s, fold {folded:.2} s: {:.2} of the speed", direct / folded);
}
