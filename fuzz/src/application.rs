//! Applies an opened pair in every way, and asserts that the ways agree and that memory is bounded.

use crate::memory::within;
use crate::{LIMITS, MOST_BYTES, base_tensors, part_bytes, repair_sums};
use tpde::{
    Apply, BaseKind, Checkpoint, Error, Explain, InPlace, MemoryCheckpoint, Pair, Result, Source, Tensor, TensorInfo, TensorMut,
    ValidatedIndex,
};

/// Maximum bytes allocated to open an index within [`LIMITS`]: a small multiple of its expanded sections.
const OPENING: usize = 1 << 20;
/// Maximum bytes allocated by one application: the look-up table of a table set, and a few times the largest chunk and payload.
const APPLYING: usize = 8 * MOST_BYTES as usize + (1 << 20);
/// Maximum size in bytes of a target whose payloads are also encoded in every other way and compared.
const COMPARED: u64 = 1 << 12;

/// Opens a pair, or returns `None` if its tensors are too large. With `sums`, first corrects sums and digests for [`base_tensors`].
pub fn open(index: Vec<u8>, mut blob: Vec<u8>, sums: bool) -> Option<Pair<Vec<u8>>> {
    let index = within(OPENING, || ValidatedIndex::parse(index, &LIMITS));
    let index = index.inspect_err(|e| assert!(matches!(e, Error::Invalid(_) | Error::Limit { .. }), "{e}")).ok()?;
    let (base_bytes, target_bytes) = index.tensor_bytes();
    if base_bytes.max(target_bytes).max(index.blob_size()) > MOST_BYTES {
        return None;
    }
    // A small part may belong to a base tensor that fits in no memory.
    let is_small = |tensor: Tensor<'_>| {
        let whole = |shape| TensorInfo { name: String::new(), dtype: tensor.dtype, shape }.bytes();
        tensor.base_shape().is_none_or(|shape| whole(shape) <= MOST_BYTES)
    };
    if !index.tensors().all(is_small) {
        return None;
    }
    if !sums {
        return Pair::new(index, blob).inspect_err(|e| assert!(matches!(e, Error::Invalid(_)), "{e}")).ok();
    }
    blob.resize(index.blob_size() as usize, 0);
    let bytes = repair_sums(&index, &mut blob, &base_tensors(&index));
    let index = ValidatedIndex::parse(bytes, &LIMITS).expect("an index in which only sums and digests changed");
    Some(Pair::new(index, blob).expect("a blob with a repaired header"))
}

/// Applies the pair out of place, by ranges, and in both modes in place, with and without digests, and asserts that all ways agree.
/// A pair that verifies with its base can be applied and gives a target with the pair's digests.
pub fn check<B: Source>(pair: &Pair<B>) {
    let bases = base_tensors(pair.index());
    let base = MemoryCheckpoint::new(bases).expect("tensors as long as their shapes say");
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
            if tensor.part.is_some() {
                check_part(&apply, &tensor, bytes);
                continue;
            }
            // Eight elements fill whole bytes in every dtype.
            let elements = tensor.bytes() * 8 / tensor.dtype.bits();
            for (from, to) in [(0, elements), (elements / 3 / 8 * 8, elements / 2 / 8 * 8)] {
                let part = (from * tensor.dtype.bits() / 8) as usize..(to * tensor.dtype.bits() / 8) as usize;
                let range = within(APPLYING, || Apply::new(pair).base(&base).range(tensor.name, from..to));
                assert!(range.is_ok_and(|range| range == bytes[part]));
            }
        }
    }

    // `Explain` succeeds if all payloads decode, and its parts add up to the sizes of the files.
    let explained = within(APPLYING, || Explain::new(pair).run());
    check_error(&explained);
    assert!(explained.is_ok() || by_sums.is_err());
    if let Ok(explained) = &explained {
        assert_eq!(explained.index.total(), pair.index().size());
        assert_eq!(explained.blob_header + explained.payloads.total(), pair.blob().size());
    }
    if pair.index().tensor_bytes().1 <= COMPARED {
        let compared = Explain::new(pair).base(&base).run();
        check_error(&compared);
        assert!(compared.is_ok() || by_sums.is_err());
    }

    // The buffers are those of entries. In place, memory is that of whole tensors.
    if pair.index().has_parts() {
        return;
    }
    // In place, a tensor is its own base, so base names and base shapes are not used.
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

/// Rebuilds the whole tensor of a part, if the pair has all of it, and asserts that the part has these bytes.
fn check_part<B: Source>(apply: &Apply<'_, B>, part: &Tensor<'_>, bytes: &[u8]) {
    let whole = TensorInfo { name: part.name.to_owned(), dtype: part.dtype, shape: part.whole_shape().to_vec() };
    if whole.bytes() > MOST_BYTES {
        return;
    }
    match within(APPLYING, || apply.range(part.name, 0..whole.shape.iter().product())) {
        Ok(range) => assert!(part_bytes(&range, part) == bytes),
        Err(error) => assert!(matches!(error, Error::InvalidArgument(_)), "{error}"),
    }
}

/// Asserts that an error is about the pair or its base, not about the caller's arguments.
fn check_error<T>(outcome: &Result<T>) {
    if let Err(error) = outcome {
        let of_pair =
            matches!(error, Error::Invalid(_) | Error::WrongBase { .. } | Error::AlreadyApplied { .. } | Error::Poisoned { .. });
        assert!(of_pair, "{error}");
    }
}

fn slices(buffers: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    buffers.iter_mut().map(|buffer| &mut buffer[..]).collect()
}

/// The base lanes of each tensor. `None` if a tensor cannot be changed in place, or if its base does not fit.
fn tensors_in_place<B: Source>(pair: &Pair<B>, base: &MemoryCheckpoint<'_>) -> Option<Vec<Vec<u8>>> {
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
