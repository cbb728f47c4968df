//! Shared by the fuzz targets: repairs that carry a mutation past checksums, and base lanes to decode against.
//!
//! Nearly every mutated byte of a pair fails a CRC or a digest, so the code after that check is not tested. The targets therefore
//! correct checksums first, as an attacker would.

pub mod application;
pub mod derived;
pub mod memory;
pub mod mutation;
pub mod parts;
pub mod seeds;
pub mod sign;

pub use sign::*;

use arbitrary::Unstructured;
use std::cell::RefCell;
use std::sync::{LazyLock, OnceLock};
use tpde::{Codec, Dtype, Limits, Result, Rule, TensorInfo, ValidatedIndex};
use tpde_core::codec::fuzzing::Decoders;
use tpde_core::codec::fuzzing::model::{self, Shape};
use tpde_core::codec::{ChunkDecoder, Encoded, EncodedChunk, TableSet};
use tpde_core::sums::chunk_sum;

/// Small limits, so that no input is slow.
pub const LIMITS: Limits = Limits::DEFAULT.index_size(1 << 16).section_size(1 << 16);

/// Limits the pool to the calling thread. More threads would make inputs slower and less repeatable.
pub fn one_thread() {
    rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global().expect("nothing has used the pool yet");
}

/// Splits an input of `apply_pair` into the repair byte, the index and the blob.
pub fn split_pair(data: &[u8]) -> Option<(u8, Vec<u8>, Vec<u8>)> {
    let (&[repair, low, high], rest) = data.split_first_chunk()?;
    let (index, blob) = rest.split_at_checked(u16::from_le_bytes([low, high]).into())?;
    Some((repair, index.to_vec(), blob.to_vec()))
}

/// Pseudo-random bytes. Base lanes are slices of them.
static RANDOM: LazyLock<Vec<u8>> = LazyLock::new(|| {
    // A simple generator, because `make_seeds.py` has to implement the same.
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..1 << 17).flat_map(next).collect()
});

static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// The first seed for which [`base_lanes`] gives similar lanes.
const FIRST_SIMILAR: u8 = 128;

/// Random bytes in which about three quarters of the bits are equal in every group of 8 bytes, much like the exponents of weights.
static SIMILAR: [OnceLock<Vec<u8>>; (u8::MAX - FIRST_SIMILAR) as usize] =
    [const { OnceLock::new() }; (u8::MAX - FIRST_SIMILAR) as usize];

fn similar(number: usize) -> Vec<u8> {
    let word = |i: usize| &RANDOM[64 * number + 8 * i..][..8];
    // About a quarter of the bits vary. The others are equal in all groups.
    let vary = |i: usize| word(0)[i] & word(1)[i];
    RANDOM[..MOST_BYTES as usize].iter().enumerate().map(|(i, byte)| byte & vary(i % 8) ^ word(2)[i % 8]).collect()
}

/// Base lanes for a seed: random, similar to each other, or, for the last seed, zeros, which stand for no base.
pub fn base_lanes(seed: u8, size: usize) -> &'static [u8] {
    match seed {
        u8::MAX => &ZEROS[..size],
        0..FIRST_SIMILAR => &RANDOM[usize::from(seed) * 64..][..size],
        _ => {
            let number = usize::from(seed - FIRST_SIMILAR);
            &SIMILAR[number].get_or_init(|| similar(number))[..size]
        }
    }
}

/// The base tensors that a pair needs. For a shared name, the first entry decides dtype and shape.
pub fn base_tensors(index: &ValidatedIndex) -> Vec<(TensorInfo, &'static [u8])> {
    let mut tensors: Vec<(TensorInfo, &'static [u8])> = Vec::new();
    for tensor in index.tensors() {
        let base = tensor.base_shape().map(|shape| (tensor.base_name, tensor.base_dtype(), shape));
        for (name, dtype, shape) in base.into_iter().chain(tensor.scales()) {
            if tensors.iter().all(|(info, _)| info.name != name) {
                let info = TensorInfo { name: name.to_owned(), dtype, shape };
                let lanes = base_lanes(tensors.len() as u8, info.bytes() as usize);
                tensors.push((info, lanes));
            }
        }
    }
    tensors
}

/// One chunk for a decoder, made from the bytes of an input: dtype, base lanes, the fields of its record, and the rest.
#[derive(Debug)]
pub struct Chunk<'a> {
    pub dtype: Dtype,
    pub base: &'static [u8],
    pub num_deltas: u32,
    pub wrapped: bool,
    pub rest: &'a [u8],
}

impl<'a> arbitrary::Arbitrary<'a> for Chunk<'a> {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let dtype = *u.choose(Dtype::ALL)?;
        // Mostly few lanes, because those inputs are fast.
        let lanes = match u.arbitrary::<u16>()? {
            lanes @ 0..4200 => 1 + lanes,
            lanes => 1 + lanes % 300,
        };
        let num_deltas = 1 + u.arbitrary::<u16>()? % lanes;
        let (seed, wrapped) = (u.arbitrary()?, u.arbitrary::<u8>()? % 4 != 0);
        let base = base_lanes(seed, usize::from(lanes) * dtype.lane_bytes());
        Ok(Self { dtype, base, num_deltas: num_deltas.into(), wrapped, rest: u.bytes(u.len())? })
    }
}

/// Decodes a payload whose record has passed the checks of the index, and asserts what must hold for every payload.
pub fn decode(chunk: &Chunk<'_>, codec: Codec, uncompressed_size: u32, payload: &[u8]) {
    let encoded = Encoded { uncompressed_size, num_deltas: chunk.num_deltas };
    decode_with(codec, None, chunk.dtype, encoded, payload, chunk.base);
}

fn decode_with(codec: Codec, tables: Option<&TableSet>, dtype: Dtype, encoded: Encoded, payload: &[u8], base: &[u8]) {
    thread_local!(static DECODER: RefCell<ChunkDecoder> = ChunkDecoder::new().into());
    let mut out = base.to_vec();
    let encoded_chunk = EncodedChunk { codec, dtype, tables, encoded, payload, base_sum: chunk_sum(base) };
    let outcome = DECODER.with_borrow_mut(|decoder| decoder.decode(&encoded_chunk, &mut out, &mut |_, _| Ok(())));
    check_outcome(dtype, base, encoded.num_deltas, outcome, &out);
}

/// A zstd frame with `content` in one raw block.
pub fn frame(content: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0xA0]; // single segment, content size in 4 bytes
    frame.extend((content.len() as u32).to_le_bytes());
    frame.extend(&((content.len() as u32) << 3 | 1).to_le_bytes()[..3]); // the last block, raw
    frame.extend(content);
    frame
}

fn check_outcome(dtype: Dtype, base: &[u8], num_deltas: u32, outcome: Result<u64>, out: &[u8]) {
    match outcome {
        Ok(sum) => {
            assert_eq!(sum, chunk_sum(out));
            assert_eq!(count_changed(dtype, base, out), num_deltas);
        }
        Err(error) => assert!(error.rule().is_some_and(|rule| rule.id().starts_with("payload.")), "{error}"),
    }
}

/// Number of lanes that differ.
pub fn count_changed(dtype: Dtype, base: &[u8], target: &[u8]) -> u32 {
    let width = dtype.lane_bytes();
    base.chunks(width).zip(target.chunks(width)).filter(|(base, target)| base != target).count() as u32
}

/// Reads a table set and repairs what is invalid in it. The bytes of a valid table set are left as they are.
pub fn tables(u: &mut Unstructured<'_>) -> Result<Vec<u8>, arbitrary::Error> {
    let classes = (u.arbitrary::<u8>()?.max(1) - 1) % 15 + 1;
    let mut set = vec![classes];
    for _ in 0..classes {
        let tokens = (u.arbitrary::<u8>()?.max(1) - 1) % 180 + 1;
        let mut left = 4096;
        let mut frequencies = Vec::new();
        for _ in 0..tokens {
            let low = u16::from(u.arbitrary::<u8>()?);
            let frequency = if low < 128 { low } else { low - 128 + (u.arbitrary::<u8>()? as u16) * 128 };
            frequencies.push(frequency.min(left));
            left -= frequency.min(left);
        }
        while left == 0 && frequencies.last() == Some(&0) {
            frequencies.pop();
        }
        *frequencies.last_mut().expect("at least one token, because a class has 4096 slots") += left;
        set.push(frequencies.len() as u8);
        for frequency in frequencies {
            match frequency {
                0..128 => set.push(frequency as u8),
                _ => set.extend([128 + (frequency % 128) as u8, (frequency / 128) as u8]),
            }
        }
    }
    Ok(set)
}

/// A payload of codec `conditioned`, and everything else that its decoder needs.
pub struct Conditioned {
    dtype: Dtype,
    base: &'static [u8],
    tables: Option<TableSet>,
    num_deltas: u32,
    payload: Vec<u8>,
}

impl Conditioned {
    /// Reads `chunk.rest`: a byte that selects none or one table set, the set, and the payload. If `chunk.wrapped`, the payload is
    /// encoded from a shape and changed lanes, and then damaged, as the rest describes; otherwise the rest is the payload.
    pub fn new(chunk: &Chunk<'_>) -> arbitrary::Result<Self> {
        let mut u = Unstructured::new(chunk.rest);
        let tables = if u.arbitrary::<u8>()? % 8 == 0 { None } else { Some(tables(&mut u)?) };
        let tables = tables.map(|set| TableSet::parse(&set).expect("a repaired set"));
        let mut conditioned =
            Self { dtype: chunk.dtype, base: chunk.base, tables, num_deltas: chunk.num_deltas, payload: Vec::new() };
        if chunk.wrapped {
            conditioned.make(&mut u)?;
        } else {
            conditioned.payload = u.bytes(u.len())?.to_vec();
        }
        Ok(conditioned)
    }

    fn make(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let width = self.dtype.lane_bytes();
        let lanes = self.base.len() / width;
        let list = |u: &mut Unstructured<'_>| -> arbitrary::Result<Vec<u8>> {
            let size = u.arbitrary::<u8>()?;
            (0..size).map(|_| u.arbitrary()).collect()
        };
        let shape = Shape {
            low_bits: u.arbitrary()?,
            states_log2: u.arbitrary()?,
            segments_log2: u.arbitrary()?,
            activity_bits: u.arbitrary()?,
            first_context: u.arbitrary()?,
            context_count: u.arbitrary()?,
            center: u.arbitrary()?,
            list_every: u.arbitrary()?,
            classes: list(u)?,
            activities: list(u)?,
        };
        let shape = shape.bounded(self.dtype, lanes, self.tables.as_ref().map_or(0, |tables| tables.classes().len()));
        let mut target = self.base.to_vec();
        for _ in 0..u.arbitrary::<u8>()? {
            let (first, count, step) = (u.arbitrary::<u16>()?, u.arbitrary::<u16>()?, u.arbitrary::<u16>()?);
            let places = (usize::from(first) % lanes..lanes).step_by(usize::from(step % 256) + 1).take(count.into());
            let change: u64 = u.arbitrary()?;
            for lane in places {
                let lane = &mut target[lane * width..(lane + 1) * width];
                lane.iter_mut().zip(change.to_le_bytes()).for_each(|(byte, change)| *byte = byte.wrapping_add(change));
            }
        }
        self.num_deltas = count_changed(self.dtype, self.base, &target);
        let payload = (self.num_deltas > 0).then(|| model::encode(self.dtype, self.tables.as_ref(), &shape, self.base, &target));
        self.payload = payload.flatten().ok_or(arbitrary::Error::IncorrectFormat)?;
        while !u.is_empty() {
            let (at, change) = (u.arbitrary::<u16>()?, u.arbitrary::<u8>()?);
            let at = usize::from(at) % self.payload.len().max(1);
            match change {
                0 => self.payload.truncate(at),
                1 => self.payload.push(at as u8),
                2 => self.num_deltas = self.num_deltas.wrapping_add(at as u32 % 5).clamp(1, lanes as u32),
                _ => self.payload.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= change),
            }
        }
        Ok(())
    }

    /// Decodes the payload as a reader does, and asserts what must hold for every payload.
    pub fn check(&self) {
        decode_with(Codec::Conditioned, self.tables.as_ref(), self.dtype, self.encoded(), &self.payload, self.base);
    }

    fn encoded(&self) -> Encoded {
        Encoded { uncompressed_size: self.base.len() as u32, num_deltas: self.num_deltas }
    }

    /// Decodes the payload with every instruction set and with the model, and asserts that the results are equal.
    pub fn check_paths(&self) {
        thread_local!(static DECODERS: RefCell<Decoders> = Decoders::default().into());
        let (tables, encoded, base_sum) = (self.tables.as_ref(), self.encoded(), chunk_sum(self.base));
        let codec = Codec::Conditioned;
        let chunk = EncodedChunk { codec, dtype: self.dtype, tables, encoded, payload: &self.payload, base_sum };
        let outcomes = DECODERS.with_borrow_mut(|decoders| decoders.decode(&chunk, self.base));
        let expected = model::decode(self.dtype, self.tables.as_ref(), self.num_deltas, &self.payload, self.base);
        let rule = outcomes[0].0.as_ref().err().and_then(|error| error.rule());
        for (outcome, lanes) in outcomes {
            assert_eq!(outcome.is_ok(), expected.is_some(), "{outcome:?}");
            let found = outcome.as_ref().err().and_then(|error| error.rule());
            // If a step of a stream has two errors, vector code can find the other error first.
            let of_step = |rule| matches!(rule, Some(Rule::PayloadStream | Rule::PayloadDeltas));
            assert!(found == rule || of_step(found) && of_step(rule), "{found:?}, {rule:?}");
            assert!(expected.as_ref().is_none_or(|expected| *expected == lanes));
            check_outcome(self.dtype, self.base, self.num_deltas, outcome, &lanes);
        }
    }
}
