use super::*;
use crate::apply::chunk::Chunks;
use crate::apply::kept::KEPT_PAYLOADS;
use crate::{Apply, Codec, Dtype, Encode, EncodeOptions, FormatVersion, Limits, MemoryCheckpoint, Rule, ValidatedIndex};
use std::collections::HashSet;
use tpde_core::digest;
use tpde_core::format::Form;
use tpde_core::sums::Q;
use tpde_core::writer::{PairBuilder, TensorSpec};

/// The response of a blob to the second read of a payload.
#[derive(Debug, Clone, Copy)]
enum Second {
    /// Returns another payload, with the same CRC and sums.
    Forged,
    Fails,
}

/// A blob whose second read of a range differs from the first.
struct Twofold {
    first: Vec<u8>,
    forged: Vec<u8>,
    second: Second,
    /// Reads below this offset always give the first bytes.
    from: u64,
    seen: Mutex<HashSet<u64>>,
    reads_again: Mutex<u32>,
}

impl Source for Twofold {
    fn size(&self) -> u64 {
        self.first.len() as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let range = offset as usize..offset as usize + out.len();
        let again = !self.seen.lock().unwrap().insert(offset);
        *self.reads_again.lock().unwrap() += u32::from(again);
        match self.second {
            Second::Forged if again && offset >= self.from => out.copy_from_slice(&self.forged[range]),
            Second::Fails if again && offset >= self.from => {
                return Err(Error::io("read", "blob".as_ref(), std::io::Error::from_raw_os_error(5)));
            }
            _ => out.copy_from_slice(&self.first[range]),
        }
        Ok(())
    }
}

const CHUNK_LANES: usize = 4096;
const CHUNKS: usize = 4;
/// Number of moves per chunk. A move changes two lanes and keeps the chunk sum. With more moves than the 32 bits of a CRC, some
/// combination of moves also keeps the CRC.
const MOVES: usize = 40;

fn info() -> TensorInfo {
    TensorInfo { name: "w".into(), dtype: Dtype::U32, shape: vec![(CHUNKS * CHUNK_LANES) as u64] }
}

fn base() -> Vec<u8> {
    let chunk = (0..CHUNK_LANES as u32).flat_map(|i| i.wrapping_mul(0x9E37_79B9).to_le_bytes());
    chunk.collect::<Vec<_>>().repeat(CHUNKS) // so that what keeps the CRC of one payload keeps that of all
}

/// A target in which the first lanes of each chunk change. Move `i` adds `Q[b]` to lane `a` and subtracts `Q[a]` from lane `b`, so
/// all targets have the same chunk sums.
fn target(moves: &[usize]) -> Vec<u8> {
    let mut target = base();
    for chunk in target.chunks_mut(4 * CHUNK_LANES) {
        for i in 0..MOVES {
            let (a, b) = (2 * i, 2 * i + 1);
            let on = u32::from(moves.contains(&i));
            chunk[4 * a..][..4].copy_from_slice(&(on * Q[b]).to_le_bytes());
            chunk[4 * b..][..4].copy_from_slice(&(u32::MAX - on * Q[a]).to_le_bytes());
        }
    }
    target
}

fn encode(target: &[u8]) -> Pair<Vec<u8>> {
    encode_as(target, FormatVersion::V1_1)
}

fn encode_as(target: &[u8], format: FormatVersion) -> Pair<Vec<u8>> {
    let base = base();
    let base = MemoryCheckpoint::new([(info(), &base[..])]).unwrap();
    let target = MemoryCheckpoint::new([(info(), target)]).unwrap();
    let options = EncodeOptions::default().codec(Codec::Raw).chunk_lanes(CHUNK_LANES as u64).format(format);
    Encode::new(&target).base(&base).options(options).to_memory().unwrap().0
}

/// A combination of moves that keeps the CRC of chunk 0's payload. CRC is linear, so Gaussian elimination of the differences that
/// single moves make finds one.
fn moves_that_keep_the_crc() -> Vec<usize> {
    let crc = |moves: &[usize]| encode(&target(moves)).index().records()[0].crc32.get();
    let none = crc(&[]);
    let mut reduced: Vec<(u32, u64)> = Vec::new();
    for i in 0..MOVES {
        let (mut difference, mut of) = (crc(&[i]) ^ none, 1 << i);
        for (other, moves) in &reduced {
            if difference ^ other < difference {
                (difference, of) = (difference ^ other, of ^ moves);
            }
        }
        if difference == 0 {
            return (0..MOVES).filter(|i| of >> i & 1 == 1).collect();
        }
        reduced.push((difference, of));
        reduced.sort_unstable_by_key(|(difference, _)| std::cmp::Reverse(*difference));
    }
    panic!("40 vectors of 32 bits are dependent")
}

/// A pair whose payloads from chunk `from_chunk` on respond to the second read as `second` says.
fn pair(second: Second, from_chunk: usize) -> Pair<Twofold> {
    pair_as(second, from_chunk, FormatVersion::V1_1)
}

fn pair_as(second: Second, from_chunk: usize, format: FormatVersion) -> Pair<Twofold> {
    let (first, forged) = (encode_as(&target(&[]), format), encode_as(&target(&moves_that_keep_the_crc()), format));
    for (first, forged) in first.index().records().iter().zip(forged.index().records()) {
        assert_eq!(first.crc32, forged.crc32);
    }
    let from = first.index().records()[from_chunk].blob_offset.get();
    let index = ValidatedIndex::parse(first.index().as_bytes().to_vec(), &Limits::default()).unwrap();
    let blob = Twofold {
        first: first.blob().clone(),
        forged: forged.blob().clone(),
        second,
        from,
        seen: Mutex::default(),
        reads_again: Mutex::default(),
    };
    Pair::new(index, blob).unwrap()
}

fn apply(pair: &Pair<Twofold>, limit: u64) -> (Result<ApplyReport>, Vec<u8>) {
    apply_as(pair, limit, InPlace::AllChecked)
}

fn apply_as(pair: &Pair<Twofold>, limit: u64, mode: InPlace) -> (Result<ApplyReport>, Vec<u8>) {
    let mut bytes = base();
    let tensors = vec![TensorMut { name: "w", bytes: &mut bytes }];
    let run = InPlaceRun { pair, mode, digests: true, max_kept_bytes: limit, progress: &|_| {} };
    let outcome = whole_tensors(run.pair.index(), tensors).and_then(|memories| run.slices(memories));
    (outcome, bytes)
}

#[test]
fn what_is_written_is_what_was_checked() {
    for second in [Second::Forged, Second::Fails] {
        let pair = pair(second, 0);
        let (outcome, bytes) = apply(&pair, KEPT_PAYLOADS);
        assert!(outcome.unwrap().digests_checked);
        assert!(bytes == target(&[]), "{second:?}");
        assert_eq!(*pair.blob().reads_again.lock().unwrap(), 0, "all payloads are kept");
    }
}

#[test]
fn above_the_limit_payloads_that_change_are_not_written() {
    let (outcome, bytes) = apply(&pair(Second::Forged, 0), 0);
    assert!(matches!(outcome, Err(Error::Changed { .. })), "{outcome:?}");
    assert!(bytes == base(), "nothing was written");

    let (outcome, bytes) = apply(&pair(Second::Forged, 2), 0);
    let Err(Error::Poisoned { written, total, source }) = outcome else { panic!("{outcome:?}") };
    assert_eq!((&written[..], total), (&[0, 1][..], 4));
    assert!(matches!(*source, Error::Changed { .. }), "{source}");
    let half = bytes.len() / 2;
    assert!(bytes[..half] == target(&[])[..half] && bytes[half..] == base()[half..]);
}

#[test]
fn above_the_limit_payloads_that_cannot_be_read_again_are_an_error_of_the_system() {
    let (outcome, bytes) = apply(&pair(Second::Fails, 0), 0);
    assert!(matches!(outcome, Err(Error::Io { .. })), "{outcome:?}");
    assert!(bytes == base(), "nothing was written");

    let (outcome, _) = apply(&pair(Second::Fails, 3), 0);
    let Err(Error::Poisoned { written, source, .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(written, [0, 1, 2]);
    assert!(matches!(*source, Error::Io { .. }), "{source}");
}

#[test]
fn payloads_are_kept_up_to_the_limit_in_all() {
    let size = |pair: &Pair<Twofold>| pair.index().records().iter().map(|record| u64::from(record.compressed_size.get())).sum();
    let kept = pair(Second::Forged, 0);
    apply(&kept, size(&kept)).0.unwrap();
    let read_again = pair(Second::Forged, 0);
    let (outcome, _) = apply(&read_again, size(&read_again) - 1);
    assert!(outcome.is_err(), "one of the payloads had to be read again");
    assert_eq!(*read_again.blob().reads_again.lock().unwrap(), 1);
}

#[test]
fn no_chunk_is_written_after_one_that_failed() {
    let pair = encode(&target(&[]));
    let index = ValidatedIndex::parse(pair.index().as_bytes().to_vec(), &Limits::default()).unwrap();
    let mut blob = pair.blob().clone();
    blob[index.records()[1].blob_offset.get() as usize] ^= 1;
    let pair = Pair::new(index, blob).unwrap();
    let mut bytes = base();
    let mode = InPlace::ChunkByChunk;
    let run = InPlaceRun { pair: &pair, mode, digests: true, max_kept_bytes: 0, progress: &|_| {} };
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let outcome =
        one_thread.install(|| run.slices(whole_tensors(run.pair.index(), vec![TensorMut { name: "w", bytes: &mut bytes }])?));
    let Err(Error::Poisoned { written, total, source }) = outcome else { panic!("{outcome:?}") };
    assert_eq!((&written[..], total, source.rule()), (&[0][..], 4, Some(Rule::PayloadCrc32)));
    let chunk = 4 * CHUNK_LANES;
    assert!(bytes[..chunk] == target(&[])[..chunk] && bytes[chunk..] == base()[chunk..]);
}

#[test]
fn the_digests_of_an_empty_tensor_are_compared() {
    let pair = |target: &[u8]| {
        let mut builder = PairBuilder::new(Vec::new(), "memory".into(), Form::default()).unwrap();
        builder.begin_tensor(&TensorSpec {
            name: "e".into(),
            base_name: None,
            dtype: Dtype::U8,
            shape: vec![0],
            part: None,
            base_kind: BaseKind::Same,
            base_param: 0,
            derived: None,
            codec: Codec::Raw,
            tables: None,
            chunk_lanes_log2: 12,
        });
        builder.end_tensor(Some(digest::of(&[])), digest::of(target));
        Pair::try_from(builder.finish().unwrap()).unwrap()
    };
    let apply = |pair: &Pair<Vec<u8>>| Apply::new(pair).in_place([TensorMut { name: "e", bytes: &mut [] }], InPlace::AllChecked);
    assert!(apply(&pair(&[])).unwrap().digests_checked);
    assert_eq!(apply(&pair(&[1])).unwrap_err().rule(), Some(Rule::TensorTargetDigest));
}

/// All payloads are hashed before the first write. Each is compared again when it is decoded, so a blob that changes in between
/// changes no tensor.
#[test]
fn with_a_payload_root_nothing_is_written_before_all_payloads_are_compared() {
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        // The first read of each payload is for the payload root.
        let (outcome, bytes) = apply_as(&pair_as(Second::Forged, 0, FormatVersion::V1_2), KEPT_PAYLOADS, mode);
        assert_eq!(outcome.unwrap_err().rule(), Some(Rule::PayloadDigest), "{mode:?}");
        assert!(bytes == base(), "{mode:?}");

        let (index, mut blob) = pair_as(Second::Forged, 0, FormatVersion::V1_2).into_parts();
        blob.first[64..].copy_from_slice(&blob.forged[64..]);
        let (outcome, bytes) = apply_as(&Pair::new(index, blob).unwrap(), KEPT_PAYLOADS, mode);
        assert_eq!(outcome.unwrap_err().rule(), Some(Rule::HeaderPayloadRoot), "{mode:?}");
        assert!(bytes == base(), "{mode:?}");
    }
}

#[test]
fn payloads_that_lie_in_memory_are_not_kept_again() {
    let pair = encode(&target(&[]));
    let kept = KeptPayloads::new(&pair, u64::MAX);
    for _ in 0..2 {
        let mut scratch = Vec::new();
        let payload = kept.payload(0, &mut scratch).unwrap();
        assert!(pair.blob().as_ptr_range().contains(&payload.as_ptr()));
    }
}
