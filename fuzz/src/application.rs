//! A pair that opens, applied in every way: the ways agree, and memory is bounded.

use crate::memory::within;
use crate::{LIMITS, MOST_BYTES, base_tensors, repair_sums};
use tpde::{Apply, BaseKind, Checkpoint, Error, Explain, InPlace, MemoryCheckpoint, Pair, Result, TensorMut, ValidatedIndex};

/// Most bytes that opening an index within [`LIMITS`] may allocate: some times what its sections expand to.
const OPENING: usize = 1 << 20;
/// Most bytes that an application may allocate: the look-up of a table set, and some times the largest chunk and payload.
const APPLYING: usize = 8 * MOST_BYTES as usize + (1 << 20);
/// Most bytes of the target of a pair whose encoding is compared with others.
const COMPARED: u64 = 1 << 12;

/// Opens a pair whose tensors are not too large; with `sums`, puts its sums and digests right for [`base_tensors`] first.
pub fn open(index: Vec<u8>, mut blob: Vec<u8>, sums: bool) -> Option<Pair<Vec<u8>>> {
    let index = within(OPENING, || ValidatedIndex::parse(index, &LIMITS));
    let index = index.inspect_err(|e| assert!(matches!(e, Error::Invalid(_) | Error::Limit { .. }), "{e}")).ok()?;
    let (base_bytes, target_bytes) = index.tensor_bytes();
    if base_bytes.max(target_bytes).max(index.blob_size()) > MOST_BYTES {
        return None;
    }
    if !sums {
        return Pair::new(index, blob).inspect_err(|e| assert!(matches!(e, Error::Invalid(_)), "{e}")).ok();
    }
    blob.resize(index.blob_size() as usize, 0);
    let bytes = repair_sums(&index, &mut blob, &base_tensors(&index));
    let index = ValidatedIndex::parse(bytes, &LIMITS).expect("an index that only got other sums and digests");
    Some(Pair::new(index, blob).expect("a blob whose header was put right"))
}

/// Applies the pair out of place, in both modes in place and by ranges, with digests and without, and asserts that what one way
/// says holds for the others: a pair that verifies with its base can be applied, and gives what its digests say.
pub fn check(pair: &Pair<Vec<u8>>) {
    let bases = base_tensors(pair.index());
    let base = MemoryCheckpoint::new(bases).expect("tensors of the lengths that their shapes say");
    let writable = within(OPENING, || Apply::new(pair).check_writable());
    assert!(matches!(writable, Ok(()) | Err(Error::Invalid(_) | Error::NotWritable { .. })), "{writable:?}");
    let apply = Apply::new(pair).base(&base);
    let buffers = || pair.index().tensors().map(|tensor| vec![0xA5; tensor.bytes() as usize]).collect::<Vec<_>>();

    let mut checked = buffers();
    let outcome = within(APPLYING, || apply.to_buffers(&mut slices(&mut checked)));
    check_error(&outcome);
    assert_eq!(within(APPLYING, || apply.verify()).is_ok(), outcome.is_ok());
    let mut unchecked = buffers();
    let by_sums = within(APPLYING, || Apply::new(pair).base(&base).digests(false).to_buffers(&mut slices(&mut unchecked)));
    check_error(&by_sums);
    if outcome.is_ok() {
        assert!(pair.verify().is_ok() && by_sums.is_ok() && checked == unchecked);
        for (tensor, bytes) in pair.index().tensors().zip(&checked) {
            assert_eq!(tensor.target_digest()[..], blake3::hash(bytes).as_bytes()[..16]);
        }
    }
    if by_sums.is_ok() {
        for (tensor, bytes) in pair.index().tensors().zip(&unchecked) {
            // Eight elements are whole bytes of every dtype.
            let elements = tensor.bytes() * 8 / tensor.dtype.bits();
            for (from, to) in [(0, elements), (elements / 3 / 8 * 8, elements / 2 / 8 * 8)] {
                let part = (from * tensor.dtype.bits() / 8) as usize..(to * tensor.dtype.bits() / 8) as usize;
                let range = within(APPLYING, || Apply::new(pair).base(&base).range(tensor.name, from..to));
                assert!(range.is_ok_and(|range| range == bytes[part]));
            }
        }
    }

    // Payloads that can be decoded can be taken apart, and the parts are the files.
    let explained = within(APPLYING, || Explain::new(pair).run());
    check_error(&explained);
    assert!(explained.is_ok() || by_sums.is_err());
    if let Ok(explained) = &explained {
        assert_eq!(explained.index.total(), pair.index().size());
        assert_eq!(explained.blob_header + explained.payloads.total(), pair.blob().len() as u64);
    }
    if pair.index().tensor_bytes().1 <= COMPARED {
        let compared = Explain::new(pair).base(&base).run();
        check_error(&compared);
        assert!(compared.is_ok() || by_sums.is_err());
    }

    // In place a tensor is its own base, so names and shapes of bases do not matter there.
    let Some(before) = tensors_in_place(pair, &base) else { return };
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let mut lanes = before.clone();
        let tensors: Vec<_> = pair.index().tensors().zip(&mut lanes).map(|(t, bytes)| TensorMut { name: t.name, bytes }).collect();
        let in_place = within(APPLYING, || Apply::new(pair).in_place(tensors, mode));
        check_error(&in_place);
        let (expected, bytes) = if mode == InPlace::AllChecked { (&outcome, &checked) } else { (&by_sums, &unchecked) };
        assert_eq!(in_place.is_ok(), expected.is_ok());
        match in_place {
            Ok(_) => assert!(lanes == *bytes),
            Err(Error::Poisoned { .. }) => assert_eq!(mode, InPlace::ChunkByChunk),
            Err(_) => assert!(lanes == before),
        }
    }
}

/// What a pair does wrong is its own or its base's fault, never the caller's.
fn check_error<T>(outcome: &Result<T>) {
    if let Err(error) = outcome {
        let of_pair = matches!(error, Error::Invalid(_) | Error::WrongBase { .. } | Error::AlreadyApplied | Error::Poisoned { .. });
        assert!(of_pair, "{error}");
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
        _ => None,
    });
    tensors.collect()
}
