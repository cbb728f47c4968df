//! Any bytes as an index, or a valid pair whose decoded fields are changed: the index is refused, or everything that it reports is
//! consistent.

#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use tpde::{BaseKind, Codec, Tensor, TensorReport, ValidatedIndex};
use tpde_fuzz::mutation::Program;
use tpde_fuzz::{LIMITS, repair_digests, repair_layout};

/// First byte of inputs that change the fields of a seed.
const FIELDS: u8 = 0xFF;

fuzz_target!(|data: &[u8]| {
    let Some((&repair, bytes)) = data.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if repair == FIELDS {
        let Ok(program) = Program::arbitrary(&mut Unstructured::new(&bytes)) else { return };
        bytes = program.run().0;
    } else {
        if repair % 4 != 3 {
            repair_layout(&mut bytes);
        }
        if repair % 16 != 15 {
            repair_digests(&mut bytes);
        }
    }
    if let Ok(index) = ValidatedIndex::parse(bytes, &LIMITS) {
        check(&index);
    }
});

/// Checks that a part lies within its tensor and shares no element with an earlier part.
fn check_part(index: &ValidatedIndex, tensor: &Tensor<'_>) {
    let Some(part) = tensor.part else { return };
    assert!(part.origin.len() == part.whole.len() && tensor.shape.len() == part.whole.len());
    let ends = |part: &tpde::Part<'_>, shape: &[u64]| part.origin.iter().zip(shape).map(|(a, b)| a + b).collect::<Vec<_>>();
    let end = ends(&part, tensor.shape);
    assert!(end.iter().zip(part.whole).all(|(end, whole)| end <= whole));
    for other in index.entries(tensor.name).take_while(|other| other.place < tensor.place) {
        let before = other.part.expect("entries of one name are parts");
        assert!(before.whole == part.whole && before.origin < part.origin && other.dtype == tensor.dtype);
        let other_end = ends(&before, other.shape);
        assert!((0..end.len()).any(|i| other_end[i] <= part.origin[i] || end[i] <= before.origin[i]));
    }
}

fn check(index: &ValidatedIndex) {
    let (records, header) = (index.records(), index.header());
    assert_eq!((records.len(), index.sums().len()), (header.chunk_count as usize, header.chunk_count as usize));
    assert_eq!(index.tensor_count(), header.tensor_count as usize);
    let mut before: Option<&str> = None;
    let (mut next_chunk, mut next_byte) = (0, 64);
    for tensor in index.tensors() {
        assert!(before.is_none_or(|before| before < tensor.name || (tensor.part.is_some() && before == tensor.name)));
        before = Some(tensor.name);
        let mut entries = index.entries(tensor.name);
        assert!(entries.len() == 1 || tensor.part.is_some());
        assert!(entries.any(|entry| entry.place == tensor.place));
        check_part(index, &tensor);
        assert!(!tensor.name.is_empty() && !tensor.base_name.is_empty());
        assert_eq!(tensor.lanes, tensor.dtype.lanes(tensor.shape).expect("a shape that fits"));
        assert!(tensor.bytes() < 1 << 60 && tensor.base_bytes() < 1 << 60);
        assert_eq!(tensor.base_shape().is_none(), tensor.base_kind == BaseKind::None);
        assert!(tensor.tables.is_none_or(|tables| tensor.codec == Codec::Conditioned && index.table_sets().contains(tables)));

        assert_eq!(tensor.chunks().start, next_chunk);
        let mut next_lane = 0;
        for chunk in tensor.chunks() {
            let (range, record) = (tensor.chunk_range(chunk), &records[chunk as usize]);
            assert!(range.start == next_lane && range.end > range.start && range.end - range.start <= tensor.chunk_lanes);
            next_lane = range.end;
            assert!(u64::from(record.num_deltas.get()) <= range.end - range.start);
            assert_eq!((record.output_offset.get(), record.blob_offset.get()), (range.start, next_byte));
            next_byte = (next_byte + u64::from(record.compressed_size.get())).next_multiple_of(16);
        }
        assert_eq!(next_lane, tensor.lanes);
        next_chunk = tensor.chunks().end;

        let elements = (u128::from(tensor.lanes) * 8 * tensor.lane_bytes() as u128 / u128::from(tensor.dtype.bits())) as u64;
        assert_eq!(tensor.locate(0..elements).expect("the range of all elements").0, 0..tensor.lanes);
        let (from, to) = (elements / 3 / 8 * 8, elements / 2 / 8 * 8);
        let (lanes, chunks) = tensor.locate(from..to).expect("a range within the tensor, at whole bytes");
        for lane in [lanes.start, lanes.end.saturating_sub(1)].into_iter().filter(|_| !lanes.is_empty()) {
            assert!(chunks.clone().any(|chunk| tensor.chunk_range(chunk).contains(&lane)));
        }
        assert!(tensor.locate(0..elements + 1).is_err() && tensor.locate(elements..u64::MAX).is_err());
        assert!(TensorReport::new(index, &tensor).changed <= tensor.lanes);
    }
    assert_eq!((next_chunk, next_byte), (header.chunk_count, header.blob_size));
    let _ = index.tensor_bytes();
    assert!(index.table_sets().len() <= index.tensor_count());
    for class in index.table_sets().iter().flat_map(|set| set.classes()) {
        assert_eq!(class.iter().map(|&frequency| u32::from(frequency)).sum::<u32>(), 4096);
    }

    let mut before: Option<&str> = None;
    for file in index.files() {
        assert!(before.is_none_or(|before| before < file.name));
        before = Some(file.name);
        assert!(!file.name.starts_with('.') && !file.name.contains(['/', '\\', '\0']));
        assert!(file.content.is_none_or(|content| content.len() as u64 == file.content_size));
    }
}
