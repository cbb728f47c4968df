//! Derived bases: base tensors of another dtype, converted or dequantised (spec sections 8.5 and 8.6). The formed lanes of each case
//! are computed element by element from the formulas of the spec, with the arithmetic that `floats.rs` compares with vectors.

use proptest::prelude::*;
use proptest::test_runner::Config;
use tpde::{
    Apply, BaseForm, BaseKind, Chain, Checkpoint, Codec, Dtype, Encode, EncodeOptions, Error, FormatVersion, InPlace,
    MemoryCheckpoint, Merge, Rectangle, Result, Rule, SliceMut, TensorInfo, TensorMut, UnusedCause,
};
use tpde_core::floats::{cast_lanes, scale_lanes, scale_nibbles};

/// A tensor with its bytes.
type Owned = (TensorInfo, Vec<u8>);

/// A checkpoint whose bytes can only be copied, like a file's.
struct OnDisk<'a>(MemoryCheckpoint<'a>);

impl Checkpoint for OnDisk<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        self.0.tensors()
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.0.read(tensor_index, offset, out)
    }
}

fn info(name: &str, dtype: Dtype, shape: &[u64]) -> TensorInfo {
    TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }
}

fn memory(tensors: &[Owned]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(tensors.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

/// Pseudo-random bytes.
fn noise(seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2) | 1;
    let mut next = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 56) as u8
    };
    (0..size).map(|_| next()).collect()
}

fn random(name: &str, dtype: Dtype, shape: &[u64], seed: u64) -> Owned {
    let info = info(name, dtype, shape);
    let bytes = noise(seed, info.bytes() as usize);
    (info, bytes)
}

/// A target tensor: its base tensors, the lanes that they give, and the expected kind.
#[derive(Debug, Clone)]
pub struct Case {
    pub base: Vec<Owned>,
    pub formed: Owned,
    kind: BaseKind,
    form: Option<BaseForm>,
}

pub fn cast(from: Dtype, to: Dtype, shape: &[u64], seed: u64) -> Case {
    let base = random("t", from, shape, seed);
    let mut formed = vec![0; info("t", to, shape).bytes() as usize];
    assert!(cast_lanes(from, to, &base.1, &mut formed));
    Case { base: vec![base], formed: (info("t", to, shape), formed), kind: BaseKind::Cast, form: None }
}

pub fn fp8(to: Dtype, [rows, columns]: [u64; 2], seed: u64) -> Case {
    let across = columns.div_ceil(128);
    let base = random("t", Dtype::F8E4m3, &[rows, columns], seed);
    let mut scales = random("t_scale_inv", Dtype::F32, &[rows.div_ceil(128), across], seed + 1);
    // Scales near 1, so that products do not all overflow.
    scales.1.chunks_mut(4).for_each(|scale| scale[3] = 0x3F);
    let width = to.lane_bytes();
    let mut formed = vec![0; (rows * columns) as usize * width];
    for (i, lane) in formed.chunks_mut(width).enumerate() {
        let (row, column) = (i as u64 / columns, i as u64 % columns);
        let scale = scales.1.as_chunks::<4>().0[(row / 128 * across + column / 128) as usize];
        assert!(scale_lanes(&base.1[i..=i], u32::from_le_bytes(scale), to, lane));
    }
    let formed = (info("t", to, &[rows, columns]), formed);
    Case { base: vec![base, scales], formed, kind: BaseKind::Dequantised, form: Some(BaseForm::Fp8Blocks) }
}

pub fn mxfp4(form: BaseForm, [x, k, n]: [u64; 3], seed: u64) -> Case {
    let (name, [blocks, scales]) = match form {
        BaseForm::Mxfp4 => ("t", ["t.blocks", "t.scales"]),
        _ => ("t", ["t_blocks", "t_scales"]),
    };
    let base = random(blocks, Dtype::U8, &[x, n, k / 32, 16], seed);
    let mut scales = random(scales, Dtype::U8, &[x, n, k / 32], seed + 1);
    scales.1.iter_mut().for_each(|scale| *scale = 100 + *scale % 50);
    let mut rows = vec![0; (x * k * n * 2) as usize];
    for ((block, scale), out) in base.1.chunks(16).zip(&scales.1).zip(rows.chunks_mut(64)) {
        scale_nibbles(block, *scale, out);
    }
    if form == BaseForm::Mxfp4 {
        let formed = (info(name, Dtype::Bf16, &[x, n, k]), rows);
        return Case { base: vec![base, scales], formed, kind: BaseKind::Dequantised, form: Some(form) };
    }
    let lane = |e: u64| {
        let (x, k_, n_) = (e / (k * n), e / n % k, e % n);
        let at = 2 * ((x * n + n_) * k + k_) as usize;
        [rows[at], rows[at + 1]]
    };
    let formed = (info(name, Dtype::Bf16, &[x, k, n]), (0..x * k * n).flat_map(lane).collect());
    Case { base: vec![base, scales], formed, kind: BaseKind::Dequantised, form: Some(form) }
}

/// The formed tensor with every `step`-th lane changed.
fn changed(case: &Case, step: usize) -> Owned {
    let (info, mut bytes) = case.formed.clone();
    bytes.chunks_mut(info.dtype.lane_bytes()).step_by(step).for_each(|lane| lane[0] ^= 1);
    (info, bytes)
}

const CASTS: [(Dtype, Dtype); 8] = [
    (Dtype::F32, Dtype::Bf16),
    (Dtype::F32, Dtype::F16),
    (Dtype::Bf16, Dtype::F32),
    (Dtype::F16, Dtype::F32),
    (Dtype::F8E4m3, Dtype::Bf16),
    (Dtype::F8E4m3, Dtype::F16),
    (Dtype::F8E5m2, Dtype::Bf16),
    (Dtype::F8E5m2, Dtype::F16),
];

fn cases() -> Vec<Case> {
    let mut cases: Vec<_> = CASTS.iter().map(|&(from, to)| cast(from, to, &[37, 331], 1)).collect();
    cases.extend([Dtype::Bf16, Dtype::F16, Dtype::F32].map(|to| fp8(to, [131, 257], 2)));
    cases.push(fp8(Dtype::Bf16, [1, 40_000], 3));
    cases.push(mxfp4(BaseForm::Mxfp4, [3, 96, 70], 4));
    cases.push(mxfp4(BaseForm::Mxfp4Transposed, [3, 96, 70], 5));
    cases.push(mxfp4(BaseForm::Mxfp4Transposed, [1, 32, 5000], 6));
    cases.push(mxfp4(BaseForm::Mxfp4Transposed, [2, 64, 64], 7));
    cases
}

fn options() -> EncodeOptions {
    EncodeOptions::default().chunk_lanes(4096)
}

/// Applies a pair in every way that reads base lanes, from bases in memory and on disk.
fn check_applied(pair: &tpde::Pair<Vec<u8>>, case: &Case, target: &Owned) {
    let (base, disk) = (memory(&case.base), OnDisk(memory(&case.base)));
    let (info, bytes) = target;
    let width = info.dtype.lane_bytes();
    // Changes of a part without a base tensor are those from zero.
    let mut before = case.formed.1.clone();
    for entry in pair.index().tensors().filter(|entry| entry.base_kind == BaseKind::None) {
        place(&mut before, info, &entry.rectangle(), &vec![0; entry.bytes() as usize]);
    }
    for base in [&base as &dyn Checkpoint, &disk] {
        let apply = Apply::new(pair).base(base);
        let mut whole = vec![0xA5; bytes.len()];
        for (entry, (_, part)) in pair.index().tensors().zip(apply.to_memory().unwrap()) {
            place(&mut whole, info, &entry.rectangle(), &part);
        }
        assert!(whole == *bytes, "{case:?}");
        apply.verify().unwrap();
        let lanes = bytes.len() / width;
        for range in [0..lanes, 1..2, 4095..4097, lanes / 3..lanes / 2, lanes - 1..lanes] {
            let range = range.start.min(lanes)..range.end.min(lanes);
            let found = apply.range("t", range.start as u64..range.end as u64).unwrap();
            assert!(found == bytes[range.start * width..range.end * width], "{range:?}");
        }
        let changes = apply.changes("t").unwrap();
        let differ = |i: &usize| before[i * width..][..width] != bytes[i * width..][..width];
        assert!(changes.positions.iter().map(|&i| i as usize).eq((0..lanes).filter(differ)));
    }
    let mut rectangle = Rectangle::whole(&info.shape);
    rectangle.origin[0] = rectangle.extent[0] / 2;
    rectangle.extent[0] -= rectangle.origin[0];
    let row = bytes.len() / info.shape[0] as usize;
    let mut slice = vec![0; rectangle.extent[0] as usize * row];
    let first = rectangle.origin[0] as usize * row;
    Apply::new(pair).base(&base).to_slices([SliceMut::new("t", rectangle, &mut slice)]).unwrap();
    assert!(slice == bytes[first..]);
    let mut in_place = bytes.clone();
    let refused = Apply::new(pair).in_place([TensorMut { name: "t", bytes: &mut in_place }], InPlace::AllChecked);
    assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    assert!(in_place == *bytes);
}

/// Copies the bytes of a part into those of its tensor.
fn place(whole: &mut [u8], info: &TensorInfo, part: &Rectangle, bytes: &[u8]) {
    let width = info.dtype.lane_bytes();
    for (e, lane) in bytes.chunks(width).enumerate() {
        let (mut rest, mut number, mut stride) = (e as u64, 0, 1);
        for dim in (0..info.shape.len()).rev() {
            number += (part.origin[dim] + rest % part.extent[dim]) * stride;
            rest /= part.extent[dim];
            stride *= info.shape[dim];
        }
        whole[number as usize * width..][..width].copy_from_slice(lane);
    }
}

#[test]
fn each_kind_of_base_gives_its_target_back() {
    for case in cases() {
        let target = [changed(&case, 50)];
        for codec in [tpde::CodecChoice::Auto, Codec::Conditioned.into(), Codec::Raw.into()] {
            let base = memory(&case.base);
            let (pair, report) = Encode::new(&memory(&target)).base(&base).options(options().codec(codec)).to_memory().unwrap();
            assert_eq!(pair.index().version(), (1, 3));
            let [tensor] = &report.tensors[..] else { panic!() };
            assert_eq!((tensor.base_kind, tensor.base_form), (case.kind, case.form));
            assert_eq!(tensor.base_dtype, Some(case.base[0].0.dtype));
            assert_eq!(tensor.changed, (case.formed.1.len() / target[0].0.dtype.lane_bytes()).div_ceil(50) as u64);
            assert!(report.removed.is_empty(), "{:?}", report.removed);
            check_applied(&pair, &case, &target[0]);
        }
    }
}

#[test]
fn an_exact_image_has_no_payload_and_an_unrelated_base_is_not_used() {
    for case in cases() {
        let base = memory(&case.base);
        let (pair, report) = Encode::new(&memory(std::slice::from_ref(&case.formed))).base(&base).to_memory().unwrap();
        assert_eq!((report.tensors[0].base_kind, report.tensors[0].payload_bytes), (case.kind, 0));
        check_applied(&pair, &case, &case.formed);
        let other = [(case.formed.0.clone(), vec![0; case.formed.1.len()])];
        let (pair, report) = Encode::new(&memory(&other)).base(&base).to_memory().unwrap();
        assert_eq!((pair.index().version(), report.tensors[0].base_kind), ((1, 2), BaseKind::None));
    }
}

#[test]
fn earlier_versions_have_no_derived_bases() {
    let case = cast(Dtype::F32, Dtype::Bf16, &[100], 1);
    let (base, target) = (memory(&case.base), memory(std::slice::from_ref(&case.formed)));
    for version in [FormatVersion::V1_1, FormatVersion::V1_2] {
        for derived in [true, false] {
            let options = options().format(version).derived(derived);
            let (pair, report) = Encode::new(&target).base(&base).options(options).to_memory().unwrap();
            assert_eq!((pair.index().version() < (1, 3), report.tensors[0].base_kind), (true, BaseKind::None));
            assert_eq!((&report.removed[..], &report.added[..]), (&["t".to_owned()][..], &[][..]));
            assert_eq!((report.unused.len(), report.unused[0].cause), (1, UnusedCause::Dtype));
        }
    }
}

#[test]
fn parts_of_whole_blocks_have_derived_bases() {
    let split = |rules: &str| options().split(rules.parse().unwrap());
    for (case, rules) in [
        (cast(Dtype::F32, Dtype::Bf16, &[37, 331], 1), "t=1:4"),
        (fp8(Dtype::Bf16, [300, 512], 2), "t=1:4"),
        (fp8(Dtype::Bf16, [384, 200], 2), "t=0:3"),
        (mxfp4(BaseForm::Mxfp4, [3, 128, 70], 4), "t=2:2"),
        (mxfp4(BaseForm::Mxfp4Transposed, [3, 128, 70], 5), "t=1:2"),
        (mxfp4(BaseForm::Mxfp4Transposed, [3, 96, 71], 5), "t=2:3"),
    ] {
        let target = [changed(&case, 40)];
        let base = memory(&case.base);
        let (pair, report) = Encode::new(&memory(&target)).base(&base).options(split(rules)).to_memory().unwrap();
        assert!(report.tensors.len() > 1 && report.tensors.iter().all(|part| part.base_kind == case.kind), "{rules}");
        check_applied(&pair, &case, &target[0]);
        // A subset and its rest are merged to the same pair.
        let first = pair.index().tensor(0).rectangle();
        let rest: Vec<_> = pair.index().tensors().skip(1).map(|part| part.rectangle()).collect();
        let subset = |parts: Vec<Rectangle>| Merge::new([&pair]).parts([("t".to_owned(), parts)]).unwrap().to_memory().unwrap().0;
        let halves = [subset(vec![first]), subset(rest)];
        assert_eq!(halves[1].index().version(), (1, 3));
        let merged = Merge::new(&halves).to_memory().unwrap().0;
        assert!(merged.index().as_bytes() == pair.index().as_bytes() && merged.blob() == pair.blob());
    }
    // Parts of blocks have no derived base.
    let case = fp8(Dtype::Bf16, [300, 512], 2);
    let (base, target) = (memory(&case.base), [changed(&case, 40)]);
    let (pair, report) = Encode::new(&memory(&target)).base(&base).options(split("t=0:3")).to_memory().unwrap();
    assert!(report.tensors.iter().all(|part| part.base_kind == BaseKind::None));
    assert_eq!(report.unused.iter().map(|unused| unused.cause).collect::<Vec<_>>(), [UnusedCause::Blocks]);
    Apply::new(&pair).base(&base).verify().unwrap();
}

#[test]
fn scales_that_are_missing_or_do_not_fit_are_refused_by_readers_and_not_used_by_the_encoder() {
    let check = |case: &Case, scales: Option<TensorInfo>, shown: &str| {
        let target = [case.formed.clone()];
        let pair = Encode::new(&memory(&target)).base(&memory(&case.base)).to_memory().unwrap().0;
        let mut base = case.base[..1].to_vec();
        base.extend(scales.map(|info| (info.clone(), vec![0; info.bytes() as usize])));
        let base = memory(&base);
        let applied = Apply::new(&pair).base(&base).verify().unwrap_err();
        assert_eq!(applied.rule(), Some(Rule::BaseTensor), "{applied}");
        let (pair, report) = Encode::new(&memory(&target)).base(&base).to_memory().unwrap();
        assert_ne!(report.tensors[0].base_kind, BaseKind::Dequantised);
        let [unused] = &report.unused[..] else { panic!("{:?}", report.unused) };
        assert_eq!((&unused.tensor[..], &unused.base, unused.cause), ("t", &case.base[0].0.name, UnusedCause::Scales));
        assert!(unused.reason.contains(shown), "{}", unused.reason);
        assert!(Apply::new(&pair).base(&base).to_memory().unwrap()[0].1 == target[0].1);
    };
    for case in [fp8(Dtype::Bf16, [131, 257], 2), mxfp4(BaseForm::Mxfp4, [2, 64, 5], 1)] {
        let right = &case.base[1].0;
        for (dtype, shape) in [
            (Dtype::I8, right.shape.clone()),
            (Dtype::Bf16, right.shape.clone()),
            (Dtype::F8E8m0, right.shape.clone()),
            (right.dtype, vec![right.shape.iter().product()]),
            (right.dtype, [&right.shape[..], &[1]].concat()),
            (right.dtype, vec![]),
            (right.dtype, vec![0]),
        ] {
            let wrong = info(&right.name, dtype, &shape);
            check(&case, Some(wrong), &format!("found {} with {dtype} {shape:?}", right.name));
        }
    }
    check(&mxfp4(BaseForm::Mxfp4, [2, 64, 5], 1), None, "found none");
}

#[test]
fn a_second_tensor_of_scales_is_tried() {
    let case = fp8(Dtype::Bf16, [131, 257], 2);
    let mut base = case.base.clone();
    base[1].0.name = "t_scale".into();
    base.push(random("t_scale_inv", Dtype::F32, &[], 3));
    let target = [case.formed.clone()];
    let (_, report) = Encode::new(&memory(&target)).base(&memory(&base)).to_memory().unwrap();
    assert_eq!((report.tensors[0].base_kind, report.tensors[0].payload_bytes), (BaseKind::Dequantised, 0));
}

#[test]
fn guessed_names_are_those_that_a_pair_can_hold() {
    for length in [4087, 4096] {
        let name = "n".repeat(length);
        for case in [fp8(Dtype::Bf16, [131, 257], 2), mxfp4(BaseForm::Mxfp4, [2, 64, 5], 1)] {
            let named = |info: &TensorInfo| TensorInfo { name: info.name.replacen('t', &name, 1), ..info.clone() };
            let base: Vec<_> = case.base.iter().map(|(info, bytes)| (named(info), bytes.clone())).collect();
            let target = [(named(&case.formed.0), case.formed.1.clone())];
            let (pair, _) = Encode::new(&memory(&target)).base(&memory(&base)).to_memory().unwrap();
            assert!(Apply::new(&pair).base(&memory(&base)).to_memory().unwrap()[0].1 == target[0].1);
        }
    }
}

#[test]
fn renamed_tensors_find_their_scales() {
    for case in [fp8(Dtype::Bf16, [131, 257], 2), mxfp4(BaseForm::Mxfp4, [2, 64, 5], 1), cast(Dtype::Bf16, Dtype::F32, &[9], 1)] {
        let target = [(TensorInfo { name: "renamed".into(), ..case.formed.0.clone() }, case.formed.1.clone())];
        let (base, names) = (memory(&case.base), [("renamed", "t")]);
        let (pair, report) = Encode::new(&memory(&target)).base(&base).options(options().renamed(names)).to_memory().unwrap();
        assert_eq!((report.tensors[0].base_kind, report.tensors[0].payload_bytes), (case.kind, 0));
        Apply::new(&pair).base(&base).verify().unwrap();
    }
}

#[test]
fn a_wrong_base_is_refused_and_a_nan_with_another_payload_is_not() {
    for case in cases() {
        let target = [changed(&case, 50)];
        let pair = Encode::new(&memory(&target)).base(&memory(&case.base)).options(options()).to_memory().unwrap().0;
        for tensor in 0..case.base.len() {
            let mut base = case.base.clone();
            let last = base[tensor].1.len() - 1;
            base[tensor].1[last] ^= 0x44;
            let error = Apply::new(&pair).base(&memory(&base)).verify().unwrap_err();
            assert!(matches!(error, Error::WrongBase { .. }), "{error}");
        }
    }
    let base = |lane: u32| [(info("t", Dtype::F32, &[1]), lane.to_le_bytes().to_vec())];
    let target = [(info("t", Dtype::Bf16, &[1]), vec![0xC0, 0x7F])];
    let pair = Encode::new(&memory(&target)).base(&memory(&base(0x7F80_0001))).to_memory().unwrap().0;
    assert_eq!(pair.index().tensor(0).base_kind, BaseKind::Cast);
    Apply::new(&pair).base(&memory(&base(0x7FC0_1234))).verify().unwrap();
}

#[test]
fn chains_form_lanes_from_the_version_before() {
    let master = random("t", Dtype::F32, &[37, 331], 1);
    let master = [(master.0, master.1.chunks(4).flat_map(|lane| [lane[0], lane[1], lane[2], 0x3E]).collect())];
    let export = cast_of(&master[0], Dtype::Bf16);
    let mut tuned = [export.clone()];
    tuned[0].1.chunks_mut(2).step_by(30).for_each(|lane| lane[0] ^= 1);
    let upcast = [cast_of(&tuned[0], Dtype::F32)];
    let export = [export];
    let versions = [&master[..], &export[..], &tuned[..], &upcast[..]].map(memory);
    let step = |i: usize| Encode::new(&versions[i + 1]).base(&versions[i]).options(options()).to_memory().unwrap().0;
    let pairs = [step(0), step(1), step(2)];
    let kinds = pairs.each_ref().map(|pair| pair.index().tensor(0).base_kind);
    assert_eq!(kinds, [BaseKind::Cast, BaseKind::Same, BaseKind::Cast]);
    let chain = Chain::new(&versions[0], &pairs).unwrap();
    let mut bytes = vec![0; upcast[0].1.len()];
    chain.read(0, 0, &mut bytes).unwrap();
    assert!(bytes == upcast[0].1);
    let folded = Encode::fold(&chain).options(options()).to_memory().unwrap().0;
    let direct = Encode::new(&versions[3]).base(&versions[0]).options(options()).to_memory().unwrap().0;
    assert!(folded.blob() == direct.blob());
    // Back from BF16 to F32: the base lanes are formed from the chain.
    let two = Chain::new(&versions[0], &pairs[..2]).unwrap();
    let back = Encode::revert(&two).options(options()).to_memory().unwrap().0;
    assert_eq!(back.index().tensor(0).base_kind, BaseKind::Cast);
    assert!(Apply::new(&back).base(&versions[2]).to_memory().unwrap()[0].1 == master[0].1);
    let wrong = Chain::new(&versions[2], &pairs[..1]).err().unwrap();
    assert_eq!(wrong.rule(), Some(Rule::BaseTensor));
}

fn cast_of((from, bytes): &Owned, to: Dtype) -> Owned {
    let info = info(&from.name, to, &from.shape);
    let mut lanes = vec![0; info.bytes() as usize];
    assert!(cast_lanes(from.dtype, to, bytes, &mut lanes));
    (info, lanes)
}

fn any_case() -> impl Strategy<Value = Case> {
    let casts = (0..CASTS.len(), 1..90u64, 1..120u64, any::<u64>());
    let casts = casts.prop_map(|(i, rows, columns, seed)| cast(CASTS[i].0, CASTS[i].1, &[rows, columns], seed / 2));
    let fp8s = (0..3usize, 1..300u64, 1..300u64, any::<u64>());
    let fp8s = fp8s.prop_map(|(to, m, n, seed)| fp8([Dtype::Bf16, Dtype::F16, Dtype::F32][to], [m, n], seed / 2));
    let nibbles = (any::<bool>(), 1..4u64, 1..5u64, 1..80u64, any::<u64>());
    let nibbles = nibbles.prop_map(|(transposed, x, blocks, n, seed)| {
        let form = if transposed { BaseForm::Mxfp4Transposed } else { BaseForm::Mxfp4 };
        mxfp4(form, [x, 32 * blocks, n], seed / 2)
    });
    prop_oneof![casts, fp8s, nibbles]
}

proptest! {
    #![proptest_config(Config { cases: 40, failure_persistence: None, ..Config::default() })]

    #[test]
    fn any_derived_base_gives_its_target_back(case in any_case(), step in 1..2000usize, dim in 0..3usize, parts in 1..4u64) {
        let target = [changed(&case, step)];
        let dim = dim % target[0].0.shape.len();
        let split = options().split(format!("t={dim}:{parts}").parse().unwrap());
        let base = memory(&case.base);
        let (pair, report) = Encode::new(&memory(&target)).base(&base).options(split).to_memory().unwrap();
        let kinds: Vec<_> = report.tensors.iter().map(|part| part.base_kind).collect();
        prop_assert!(kinds.iter().all(|&kind| kind == BaseKind::None || kind == case.kind));
        if kinds.contains(&case.kind) {
            check_applied(&pair, &case, &target[0]);
        } else {
            Apply::new(&pair).base(&base).verify().unwrap();
        }
    }
}

#[test]
fn pairs_that_need_two_types_of_one_base_tensor_are_not_merged() {
    let case = fp8(Dtype::Bf16, [131, 257], 2);
    let first = Encode::new(&memory(std::slice::from_ref(&case.formed))).base(&memory(&case.base)).to_memory().unwrap().0;
    let scales = [random("t_scale_inv", Dtype::Bf16, &[64], 3)];
    let second = Encode::new(&memory(&scales)).base(&memory(&scales)).to_memory().unwrap().0;
    assert_eq!(second.index().tensor(0).base_kind, BaseKind::Same);
    for pairs in [[&first, &second], [&second, &first]] {
        let Err(Error::NotMergeable(refused)) = Merge::new(pairs).to_memory() else { panic!() };
        assert_eq!((refused.conflict, &refused.name[..]), (tpde::Conflict::Base, "t_scale_inv"));
    }
}

/// A tensor of any dtype and a small shape, which may have no dims or no elements.
fn any_tensor() -> impl Strategy<Value = (Dtype, Vec<u64>)> {
    let dim = prop_oneof![Just(0u64), Just(1), Just(2), Just(3), Just(16), Just(32), Just(64), Just(128), Just(130)];
    let dtypes =
        [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::F8E4m3, Dtype::F8E5m2, Dtype::U8, Dtype::F8E8m0, Dtype::I8, Dtype::F64];
    (0..dtypes.len(), proptest::collection::vec(dim, 0..4)).prop_map(move |(dtype, mut shape)| {
        while shape.iter().product::<u64>() > 1 << 16 {
            shape.pop();
        }
        (dtypes[dtype], shape)
    })
}

/// A base of tensors that look like a quantised base of a target tensor, and may be none.
fn any_base() -> impl Strategy<Value = (Owned, Vec<Owned>, EncodeOptions)> {
    let names = ["t", "t_blocks", "t.blocks", "t_scale_inv", "t_scale", "t_scales", "t.scales"];
    let fitting = prop_oneof![Just(0u8), Just(1), Just(2), Just(3), Just(4)];
    let others = proptest::collection::vec((0..names.len(), any_tensor(), fitting), 0..5);
    let choices = (0..tpde::CodecChoice::ALL.len(), 0..3usize, any::<bool>(), 0..3u64);
    (any_tensor(), others, choices, any::<u64>()).prop_map(
        move |((dtype, shape), others, (codec, format, derived, split), seed)| {
            let target = random("t", dtype, &shape, seed);
            let mut base = std::collections::BTreeMap::new();
            for (name, (dtype, other), fitting) in others {
                let mut shape = if fitting == 0 { other } else { shape.clone() };
                let mut dtype = dtype;
                let is_scales = name >= 3;
                match (is_scales, fitting) {
                    (false, 2) => dtype = Dtype::F8E4m3,
                    (true, 2) => (dtype, shape) = (Dtype::F32, shape.iter().map(|dim| dim.div_ceil(128)).collect()),
                    (_, 3 | 4) if shape.last().is_some_and(|last| last % 32 == 0) => {
                        *shape.last_mut().unwrap() /= 32;
                        shape.extend((!is_scales).then_some(16));
                        dtype = if is_scales && fitting == 4 { Dtype::F8E8m0 } else { Dtype::U8 };
                    }
                    _ => {}
                }
                base.insert(names[name], random(names[name], dtype, &shape, seed ^ name as u64));
            }
            let format = [FormatVersion::V1_1, FormatVersion::V1_2, FormatVersion::V1_3][format];
            let options = options().codec(tpde::CodecChoice::ALL[codec]).derived(derived).format(format);
            let is_cut = split > 0 && !target.0.shape.is_empty() && format > FormatVersion::V1_1;
            let options = if is_cut { options.split(format!("t=0:{}", split + 1).parse().unwrap()) } else { options };
            (target, base.into_values().collect(), options)
        },
    )
}

proptest! {
    #![proptest_config(Config { cases: 400, failure_persistence: None, ..Config::default() })]

    #[test]
    fn a_base_that_does_not_fit_is_never_an_error((target, base, options) in any_base()) {
        let target = [target];
        let base = memory(&base);
        let is_whole = options.split.is_empty();
        let (pair, report) = Encode::new(&memory(&target)).base(&base).options(options).to_memory().unwrap();
        let entries = Apply::new(&pair).base(&base).to_memory().unwrap();
        let mut found = vec![0; target[0].1.len()];
        for (entry, (_, bytes)) in pair.index().tensors().zip(&entries) {
            place(&mut found, &target[0].0, &entry.rectangle(), bytes);
        }
        prop_assert!(found == target[0].1);
        Apply::new(&pair).base(&base).verify().unwrap();
        let has_base = base.tensors().iter().any(|info| ["t", "t_blocks", "t.blocks"].contains(&&info.name[..]));
        prop_assert_eq!(report.added.is_empty(), has_base);
        // A base that is not used has a reason, unless nothing is stored.
        let is_none = report.tensors[0].base_kind == BaseKind::None && report.tensors[0].payload_bytes > 0;
        if is_whole && has_base && is_none && base.find("t").is_some() {
            prop_assert_eq!(report.unused.len(), 1);
        }
    }
}
