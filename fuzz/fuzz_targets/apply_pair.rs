//! A pair that a stranger made, with every checksum in order: all ways of applying it agree, and none leaves a trace of failure.
//!
//! The input is a byte of repairs, the length of the index as a u16, the index, and the blob.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tpde::format::BaseKind;
use tpde::{Apply, Checkpoint, Error, InPlace, MemoryCheckpoint, Pair, TensorMut, ValidatedIndex};
use tpde_fuzz::{LIMITS, MOST_BYTES, base_tensors, one_thread, repair_pair, repair_sums};

fuzz_target!(init: one_thread(), |data: &[u8]| {
    if let Some(pair) = open(data) {
        check(&pair);
    }
});

fn open(data: &[u8]) -> Option<Pair<Vec<u8>>> {
    let (&[repair, low, high], rest) = data.split_first_chunk()?;
    let (index, blob) = rest.split_at_checked(u16::from_le_bytes([low, high]).into())?;
    let (mut index, mut blob) = (index.to_vec(), blob.to_vec());
    if repair % 16 != 15 {
        repair_pair(&mut index, &mut blob);
    }
    let index = ValidatedIndex::parse(index, &LIMITS).ok()?;
    let (base_bytes, target_bytes) = index.tensor_bytes();
    if base_bytes.max(target_bytes).max(index.header().blob_size) > MOST_BYTES {
        return None;
    }
    if repair % 4 == 3 {
        return Pair::new(index, blob).ok();
    }
    blob.resize(index.header().blob_size as usize, 0);
    let bytes = repair_sums(&index, &mut blob);
    let index = ValidatedIndex::parse(bytes, &LIMITS).expect("an index that only got other sums and digests");
    Some(Pair::new(index, blob).expect("a blob whose header was put right"))
}

fn check(pair: &Pair<Vec<u8>>) {
    let bases = base_tensors(pair.index());
    let base = MemoryCheckpoint::new(bases).expect("tensors of the lengths that their shapes say");
    let apply = Apply::new(pair, &base);
    let buffers = || pair.index().tensors().map(|tensor| vec![0xA5; tensor.bytes() as usize]).collect::<Vec<_>>();

    let mut checked = buffers();
    let outcome = apply.to_buffers(&mut slices(&mut checked));
    assert_eq!(apply.verify().is_ok(), outcome.is_ok());
    let mut unchecked = buffers();
    let by_sums = Apply::new(pair, &base).digests(false).to_buffers(&mut slices(&mut unchecked));
    if outcome.is_ok() {
        assert!(pair.verify().is_ok() && by_sums.is_ok() && checked == unchecked);
        for (tensor, bytes) in pair.index().tensors().zip(&checked) {
            let elements = tensor.bytes() * 8 / tensor.dtype.bits();
            assert!(Apply::new(pair, &base).range(tensor.name, 0..elements).is_ok_and(|range| range == *bytes));
        }
    }

    // In place a tensor is its own base, so names and shapes of bases do not matter there.
    let Some(before) = tensors_in_place(pair, &base) else { return };
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let mut lanes = before.clone();
        let mut tensors: Vec<_> =
            pair.index().tensors().zip(&mut lanes).map(|(t, bytes)| TensorMut { name: t.name, bytes }).collect();
        let in_place = pair.apply_in_place(&mut tensors, mode);
        let (expected, bytes) = if mode == InPlace::AllChecked { (&outcome, &checked) } else { (&by_sums, &unchecked) };
        assert_eq!(in_place.is_ok(), expected.is_ok());
        match in_place {
            Ok(_) => assert!(lanes == *bytes),
            Err(Error::Poisoned { .. }) => assert_eq!(mode, InPlace::ChunkByChunk),
            Err(_) => assert!(lanes == before),
        }
    }
}

fn slices(buffers: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    buffers.iter_mut().map(|buffer| &mut buffer[..]).collect()
}

/// The base lanes of each tensor; `None` where one cannot be changed in place or has no such base.
fn tensors_in_place(pair: &Pair<Vec<u8>>, base: &MemoryCheckpoint<'_>) -> Option<Vec<Vec<u8>>> {
    let tensors = pair.index().tensors().map(|tensor| match tensor.base_kind {
        BaseKind::None => Some(vec![0x5A; tensor.bytes() as usize]),
        BaseKind::Same => {
            let place = base.find(tensor.base_name)?;
            let info = &base.tensors()[place];
            let fits = info.dtype == tensor.dtype && info.shape == tensor.shape;
            base.in_place(place, 0, info.bytes() as usize).filter(|_| fits).map(<[u8]>::to_vec)
        }
        BaseKind::Prefix => None,
    });
    tensors.collect()
}
