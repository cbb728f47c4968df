//! Any small checkpoint, divided among pairs in any way, by tensors and by parts: the pairs merge to the bytes of the pair of the
//! whole. If pairs are then changed, a merge refuses them with a typed error, or makes a pair that verifies.

#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use tpde::{
    Apply, CodecChoice, Dtype, Encode, EncodeOptions, Error, FormatVersion, MemoryCheckpoint, Merge, Pair, Rectangle, TensorInfo,
    ValidatedIndex,
};
use tpde_fuzz::{LIMITS, base_lanes, one_thread, repair_pair};

type InMemory = Pair<Vec<u8>>;

#[derive(Arbitrary, Debug)]
struct Input {
    tensors: Vec<Tensor>,
    codec: u8,
    payload_digests: bool,
    /// Format 1.1, if no tensor has parts.
    is_old: bool,
    /// The pair of each entry, in turn.
    owners: Vec<u8>,
    changes: Vec<Change>,
    /// The entries that are kept of changed pairs, in turn.
    kept: Vec<bool>,
}

#[derive(Arbitrary, Debug)]
struct Tensor {
    dtype: Dtype,
    rows: u8,
    columns: u8,
    has_base: bool,
    /// One byte in `rarity` changes.
    rarity: u8,
    /// Rows and columns at which the tensor is cut.
    cuts: [Vec<u8>; 2],
}

/// A change to the bytes of a pair.
#[derive(Arbitrary, Debug)]
struct Change {
    pair: u8,
    at: u16,
    flip: u8,
    in_blob: bool,
    is_repaired: bool,
}

/// Number of pairs.
const PAIRS: usize = 3;

fuzz_target!(init: one_thread(), |data: &[u8]| {
    if let Ok(mut input) = Input::arbitrary_take_rest(Unstructured::new(data)) {
        input.tensors.truncate(4);
        check(&input);
    }
});

/// The length of each piece of a dimension that is cut at some places. Cuts of packed dtypes are at whole bytes.
fn pieces(length: u64, cuts: &[u8], dtype: Dtype) -> Vec<(u64, u64)> {
    let unit = if dtype.bits() < 8 { 4 } else { 1 };
    let mut ends: Vec<u64> = cuts.iter().take(3).map(|&cut| u64::from(cut) % length / unit * unit).collect();
    ends.extend([0, length]);
    ends.sort_unstable();
    ends.dedup();
    ends.windows(2).map(|pair| (pair[0], pair[1] - pair[0])).collect()
}

impl Tensor {
    fn shape(&self) -> [u64; 2] {
        let columns = 4 * (1 + u64::from(self.columns) % 40);
        [1 + u64::from(self.rows) % 60, columns]
    }

    fn parts(&self) -> Vec<Rectangle> {
        let [rows, columns] = self.shape();
        let columns = pieces(columns, &self.cuts[1], self.dtype);
        // Rows of packed dtypes have whole bytes.
        let rows = pieces(rows, &self.cuts[0], Dtype::U8);
        let part = |(row, height): (u64, u64)| columns.iter().map(move |&(column, width)| ([row, column], [height, width]));
        rows.into_iter().flat_map(part).map(|(origin, extent)| Rectangle::new(origin, extent)).collect()
    }
}

/// The bytes of a pair.
fn bytes(pair: &InMemory) -> (&[u8], &[u8]) {
    (pair.index().as_bytes(), pair.blob())
}

fn check(input: &Input) {
    let (mut bases, mut targets, mut cuts) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (i, tensor) in input.tensors.iter().enumerate() {
        let info = TensorInfo { name: format!("t{i}"), dtype: tensor.dtype, shape: tensor.shape().to_vec() };
        let base = base_lanes(i as u8, info.bytes() as usize);
        let mut target = base.to_vec();
        target.iter_mut().step_by(1 + usize::from(tensor.rarity)).for_each(|byte| *byte ^= 1);
        let parts = tensor.parts();
        if parts.len() > 1 {
            cuts.insert(info.name.clone(), parts);
        }
        if tensor.has_base {
            bases.push((info.clone(), base));
        }
        targets.push((info, target));
    }
    let base = MemoryCheckpoint::new(bases).expect("sizes match");
    let target = MemoryCheckpoint::new(targets.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).expect("sizes match");
    let codec = CodecChoice::ALL[usize::from(input.codec) % CodecChoice::ALL.len()];
    let is_old = input.is_old && cuts.is_empty();
    let format = if is_old { FormatVersion::V1_1 } else { FormatVersion::V1_2 };
    let options = EncodeOptions::default().codec(codec).chunk_lanes(4096).cuts(cuts).format(format);
    let options = options.payload_digests(input.payload_digests && !is_old);
    let (encoded, _) = Encode::new(&target).base(&base).options(options).to_memory().expect("valid options");

    // A pair of format 1.1 becomes one of 1.2.
    let (whole, _) = Merge::new([&encoded]).to_memory().expect("one pair");
    assert!(is_old || bytes(&whole) == bytes(&encoded));
    let owner = |entry: usize| input.owners.get(entry % input.owners.len().max(1)).map_or(0, |&owner| usize::from(owner) % PAIRS);
    let shard = |number| Merge::new([&encoded]).entries(|entry| owner(entry.place) == number).to_memory().expect("a subset").0;
    let shards: Vec<InMemory> = (0..PAIRS).map(shard).collect();
    let (merged, _) = Merge::new(&shards).files(false).to_memory().expect("disjoint pairs");
    assert!(bytes(&merged) == bytes(&whole));
    let mut outputs: Vec<_> = merged.index().tensors().map(|tensor| vec![0xA5; tensor.bytes() as usize]).collect();
    let mut buffers: Vec<_> = outputs.iter_mut().map(|output| &mut output[..]).collect();
    Apply::new(&merged).base(&base).to_buffers(&mut buffers).expect("the base of the pairs");
    for ((info, bytes), entries) in targets.iter().map(|target| (target, merged.index().entries(&target.0.name))) {
        for entry in entries {
            let expected = tpde_fuzz::part_bytes(bytes, &entry);
            assert!(outputs[entry.place] == expected, "{info:?}");
        }
    }
    if !input.changes.is_empty() {
        check_changed(input, &shards);
    }
}

/// Changes the pairs and merges those that can be opened.
fn check_changed(input: &Input, shards: &[InMemory]) {
    let mut files: Vec<_> = shards.iter().map(|pair| (pair.index().as_bytes().to_vec(), pair.blob().clone())).collect();
    for change in input.changes.iter().take(8) {
        let (index, blob) = &mut files[usize::from(change.pair) % PAIRS];
        let changed = if change.in_blob { &mut *blob } else { &mut *index };
        let at = usize::from(change.at) % changed.len().max(1);
        changed.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= change.flip);
        if change.is_repaired {
            repair_pair(index, blob);
        }
    }
    let open = |(index, blob)| Pair::new(ValidatedIndex::parse(index, &LIMITS)?, blob);
    let is_typed = |error: &Error| assert!(matches!(error, Error::Invalid(_) | Error::Limit { .. }), "{error}");
    let opened: Vec<InMemory> = files.into_iter().filter_map(|files| open(files).inspect_err(is_typed).ok()).collect();
    for is_subset in [false, true] {
        let merge = Merge::new(&opened);
        let is_kept = |place: usize| input.kept.get(place % input.kept.len().max(1)).is_none_or(|kept| *kept);
        let merge = if is_subset { merge.entries(|entry| is_kept(entry.place)) } else { merge };
        match merge.to_memory() {
            Ok((merged, report)) => {
                let checked = merged.verify().expect("payloads that were checked");
                assert_eq!((checked.tensors, checked.chunks), (report.tensors, report.chunks));
            }
            Err(error) => check_error(&error),
        }
    }
}

/// Asserts that an error of a merge is about the pairs, and names them.
fn check_error(error: &Error) {
    match error {
        Error::NotMergeable(_) | Error::Limit { .. } => {}
        Error::Invalid(invalid) => assert!(invalid.at.pair.is_some(), "{error}"),
        _ => panic!("{error}"),
    }
}
