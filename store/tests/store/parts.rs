//! Parts of tensors: what is read of them, and what comes back.

use crate::*;
use std::collections::BTreeMap;
use tpde::{
    Apply, BaseKind, Checkpoint, Dtype, Encode, EncodeOptions, MemoryCheckpoint, Rectangle, SafetensorsCheckpoint, Slice,
    SliceCheckpoint, SliceMut, TensorInfo, ValidatedIndex,
};

/// Three versions of a tensor `w` of bytes that cannot be compressed, so that blobs are larger than the gaps that are read along. Each
/// version is encoded with its own options. Returns the last one too.
fn versions(shape: [u64; 2], options: [EncodeOptions; 3]) -> (Arc<InMemory>, Vec<u8>) {
    let memory = Arc::new(InMemory::new());
    let store = init(&memory, &never_whole());
    let mut random = Random(7);
    let mut bytes: Vec<u8> = (0..shape[0] * shape[1] / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    for (number, options) in options.into_iter().enumerate() {
        if number > 0 {
            bytes.iter_mut().step_by(3).for_each(|byte| *byte = byte.wrapping_add(1 + random.below(200) as u8));
        }
        let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: shape.to_vec() };
        let tensors = MemoryCheckpoint::new([(info, &bytes[..])]).unwrap();
        store.put_tensors(&tensors, &PutOptions::default().encode(options)).unwrap();
    }
    (memory, bytes)
}

/// The elements of a rectangle.
fn cut(bytes: &[u8], [_, columns]: [u64; 2], part: &Rectangle) -> Vec<u8> {
    let row = |row: u64| &bytes[(row * columns + part.origin[1]) as usize..][..part.extent[1] as usize];
    (part.origin[0]..part.origin[0] + part.extent[0]).map(row).collect::<Vec<_>>().concat()
}

#[test]
fn parts_of_tensors_are_read_and_no_more() {
    let plain = |lanes: u64| EncodeOptions::default().chunk_lanes(lanes);
    let split = |rules: &str| EncodeOptions::default().split(rules.parse().unwrap());
    // Rows, in parts and in chunks that are cut otherwise in each version; then columns of rows that have several chunks each.
    let cases = [
        ([4096, 2048], ([3000, 5], [40, 2000]), [split("*=0:8"), split("*=0:8"), split("*=0:8")]),
        ([4096, 2048], ([3000, 5], [40, 2000]), [plain(1 << 17), plain(1 << 16), split("*=1:2")]),
        ([3, 1 << 21], ([0, 100], [3, 1000]), [plain(1 << 16), split("*=0:3").chunk_lanes(1 << 16), plain(1 << 15)]),
    ];
    for (shape, (origin, extent), options) in cases {
        let (memory, bytes) = versions(shape, options);
        let part = Rectangle::new(origin, extent);
        let expected = cut(&bytes, shape, &part);
        let parts = BTreeMap::from([("w".to_owned(), vec![part.clone()])]);
        let read = [None, Some(&parts)].map(|parts| {
            let counted = Faulty::new(&memory, Fault::None);
            let store = internals::open(counted.clone(), SEGMENT).unwrap();
            let opened = store.open_version("main", parts, &GetOptions::default()).unwrap();
            assert_eq!((opened.version().name(), opened.chain().unwrap().tensors().len()), ("main@2".into(), 1));
            let base = opened.chain().unwrap().without_last();
            let mut found = vec![0; expected.len()];
            let apply = Apply::new(opened.last().unwrap()).base(&base);
            apply.to_slices([SliceMut::new("w", part.clone(), &mut found)]).unwrap();
            assert!(found == expected);
            if parts.is_some() {
                let mut other = vec![0; 1];
                let other = apply.to_slices([SliceMut::new("w", Rectangle::new([0, 2000], [1, 1]), &mut other)]);
                assert!(other.is_err() || shape[0] == 3, "the payloads of other parts are not there");
            }
            counted.bytes_read.load(SeqCst)
        });
        // A third, and the manifests.
        assert!(read[1] * 29 < read[0] * 10, "{read:?} bytes");

        // The same as a file, with as few bytes.
        let counted = Faulty::new(&memory, Fault::None);
        let select = |index: &ValidatedIndex| {
            assert_eq!(index.find("w").unwrap().whole_shape(), shape);
            Ok(BTreeMap::from([("w".to_owned(), part.clone())]))
        };
        let place = Place::new();
        let store = internals::open(counted.clone(), SEGMENT).unwrap();
        store.get("main", place.at("out"), &GetOptions::default().select(&select)).unwrap();
        let bytes_read = counted.bytes_read.load(SeqCst);
        assert!(bytes_read <= read[1], "{bytes_read} of {read:?} bytes");
        let file = SafetensorsCheckpoint::open(place.at("out")).unwrap();
        let mut found = vec![0; expected.len()];
        file.read(0, 0, &mut found).unwrap();
        assert!(file.tensors()[0].shape == part.extent && found == expected);
        assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), 1);
    }
}

#[test]
fn a_selection_adds_parts_to_tensors_and_is_refused_before_payloads_are_read() {
    let place = Place::new();
    let memory = Arc::new(InMemory::new());
    let weights = Weights::new(4);
    init(&memory, &never_whole()).put(place.file(&weights), &PutOptions::default()).unwrap();
    let get = |select: &SelectTensors<'_>| {
        let counted = Faulty::new(&memory, Fault::None);
        let store = internals::open(counted.clone(), 1 << 20).unwrap();
        let is_wanted = |name: &str| name != NAMES[0];
        let _ = fs::remove_file(place.at("out"));
        let outcome = store.get("main", place.at("out"), &GetOptions::default().tensors(&is_wanted).select(select)).map(|_| ());
        (outcome, counted.object_bytes.load(SeqCst))
    };
    let part = |name: &str, from: u64, size: u64| BTreeMap::from([(name.to_owned(), Rectangle::new([from], [size]))]);
    let (outcome, _) = get(&|_| Ok(part(NAMES[1], 3, 5)));
    outcome.unwrap();
    let file = SafetensorsCheckpoint::open(place.at("out")).unwrap();
    let found: Vec<_> = file.tensors().iter().map(|tensor| (&tensor.name[..], tensor.shape[0])).collect();
    assert_eq!(found, [(NAMES[1], 5), (NAMES[2], 128 * 128)]);
    let (whole, all) = get(&|_| Ok(part(NAMES[1], 0, 256)));
    whole.unwrap();
    let (refused, read) = get(&|_| Err(tpde::Error::InvalidArgument("as the caller says".into())));
    assert!(matches!(&refused, Err(Error::Tpde(tpde::Error::InvalidArgument(reason))) if reason.contains("caller")), "{refused:?}");
    assert!(read * 4 < all, "{read} of {all} bytes");
    for wrong in [part(NAMES[1], 250, 7), part("nothing", 0, 1)] {
        let (refused, _) = get(&|_| Ok(wrong.clone()));
        assert!(matches!(refused, Err(Error::Tpde(tpde::Error::InvalidArgument(_)))), "{refused:?}");
        assert!(!place.at("out").exists());
    }
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), 1, "only the input is left");
}

#[test]
fn a_tensor_that_is_dequantised_from_the_version_before_is_read_with_its_scales() {
    let memory = Arc::new(InMemory::new());
    let store = init(&memory, &never_whole());
    let shape = vec![256, 256];
    let info = |name: &str, dtype, shape: &[u64]| TensorInfo { name: name.into(), dtype, shape: shape.to_vec() };
    // 1, 2 and -1 as FP8, twice as large as BF16.
    let mut random = Random(3);
    let numbers: Vec<usize> = (0..256 * 256).map(|_| random.below(3) as usize).collect();
    let small: Vec<u8> = numbers.iter().map(|n| [0x38, 0x40, 0xb8][*n]).collect();
    let large: Vec<u8> = numbers.iter().flat_map(|n| [0x4000u16, 0x4080, 0xc000][*n].to_le_bytes()).collect();
    let scales: Vec<u8> = [2f32; 4].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let first = MemoryCheckpoint::new([
        (info("l.weight", Dtype::F8E4m3, &shape), &small[..]),
        (info("l.weight_scale_inv", Dtype::F32, &[2, 2]), &scales[..]),
    ]);
    store.put_tensors(&first.unwrap(), &PutOptions::default()).unwrap();
    let second = MemoryCheckpoint::new([(info("l.weight", Dtype::Bf16, &shape), &large[..])]).unwrap();
    store.put_tensors(&second, &PutOptions::default()).unwrap();
    let opened = store.open_version("main", None, &GetOptions::default()).unwrap();
    assert_eq!(opened.last().unwrap().index().find("l.weight").unwrap().base_kind, BaseKind::Dequantised);
    let place = Place::new();
    store.get("main", place.at("out"), &GetOptions::default().tensors(&|_| true)).unwrap();
    let mut found = vec![0; large.len()];
    SafetensorsCheckpoint::open(place.at("out")).unwrap().read(0, 0, &mut found).unwrap();
    assert!(found == large);
}

/// Encodes a changed part of the last version against what was read of it, applies the pair, and returns how many bytes were read.
fn encode_against(memory: &Arc<InMemory>, bytes: &[u8], shape: [u64; 2], part: &Rectangle, info: TensorInfo) -> u64 {
    let width = info.dtype.bits() as usize / 8;
    let wide = |byte| [vec![0; width - 1], vec![byte]].concat();
    let mut new: Vec<u8> = cut(bytes, shape, part).into_iter().flat_map(wide).collect();
    new.iter_mut().step_by(5 * width).for_each(|byte| *byte ^= 1);
    let parts = BTreeMap::from([("w".to_owned(), vec![part.clone()])]);
    let counted = Faulty::new(memory, Fault::None);
    let opened =
        internals::open(counted.clone(), SEGMENT).unwrap().open_version("main", Some(&parts), &GetOptions::default()).unwrap();
    let target = SliceCheckpoint::new([Slice::new(info, part.clone(), &new)]).unwrap();
    let base = opened.chain().unwrap();
    let options = EncodeOptions::default().chunk_lanes(4096).cuts([("w", vec![part.clone()])]);
    let (pair, report) = Encode::new(&target).base(&base).options(options).to_memory().unwrap();
    assert_ne!(report.tensors[0].base_kind, BaseKind::None);
    let mut found = vec![0; new.len()];
    Apply::new(&pair).base(&base).to_slices([SliceMut::new("w", part.clone(), &mut found)]).unwrap();
    assert!(found == new);
    counted.bytes_read.load(SeqCst)
}

#[test]
fn a_part_that_was_read_is_the_base_of_a_pair() {
    let plain = |lanes: u64| EncodeOptions::default().chunk_lanes(lanes);
    let split = |rules: &str| plain(4096).split(rules.parse().unwrap());
    let cases = [
        // Its last chunk is not the last one of the tensor.
        ([1, 1 << 22], ([0, 3_006_649], [1, 20_000]), [plain(4096), plain(1 << 14), plain(4096)]),
        // Columns whose rows are near each other, and in chunks of their own.
        ([4, 8192], ([0, 5000], [4, 1000]), [plain(4096), plain(4096), plain(4096)]),
        // A part that crosses parts of the version before, and one that has two completely.
        ([512, 1 << 14], ([100, 9000], [40, 3000]), [split("*=0:4"), split("*=1:3"), split("*=0:5")]),
        ([512, 1 << 14], ([128, 0], [64, 1 << 14]), [split("*=0:4"), split("*=0:4"), split("*=0:16")]),
    ];
    for (shape, (origin, extent), options) in cases {
        let (memory, bytes) = versions(shape, options);
        let (whole, part) = (Rectangle::whole(&shape), Rectangle::new(origin, extent));
        let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: shape.to_vec() };
        let read = encode_against(&memory, &bytes, shape, &part, info);
        let all: u64 = {
            let counted = Faulty::new(&memory, Fault::None);
            let parts = BTreeMap::from([("w".to_owned(), vec![whole])]);
            internals::open(counted.clone(), SEGMENT).unwrap().open_version("main", Some(&parts), &GetOptions::default()).unwrap();
            counted.bytes_read.load(SeqCst)
        };
        assert!(read * 2 < all || shape[1] == 8192, "{read} of {all} bytes");
    }
}

#[test]
fn a_part_that_was_read_is_cast_to_the_base_of_a_pair() {
    let memory = Arc::new(InMemory::new());
    let shape = [64, 4096];
    let mut random = Random(5);
    let bytes: Vec<u8> = (0..64 * 4096).map(|_| 0x38 + random.below(16) as u8).collect();
    let lanes: Vec<u8> = bytes.iter().flat_map(|byte| [0, *byte]).collect();
    let info = |dtype| TensorInfo { name: "w".into(), dtype, shape: shape.to_vec() };
    let store = init(&memory, &never_whole());
    store.put_tensors(&MemoryCheckpoint::new([(info(Dtype::Bf16), &lanes[..])]).unwrap(), &PutOptions::default()).unwrap();
    encode_against(&memory, &bytes, shape, &Rectangle::new([3, 700], [40, 1100]), info(Dtype::F32));
}
