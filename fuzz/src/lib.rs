//! What the fuzz targets share: repairs that carry a mutation past checksums, and base lanes to decode against.
//!
//! Nearly every mutated byte of a pair ends at a CRC or a digest, which says nothing of the code behind them. So targets put
//! those right first, as an attacker would.

pub mod application;
pub mod memory;
pub mod mutation;
pub mod parts;
pub mod seeds;
pub mod sign;

pub use sign::*;

use arbitrary::Unstructured;
use std::cell::RefCell;
use std::sync::{LazyLock, OnceLock};
use tpde::internals::fuzzing::model::{self, Shape};
use tpde::internals::fuzzing::{self, Decoders};
use tpde::internals::{ChunkDecoder, Encoded, EncodedChunk, TableSet, chunk_sum};
use tpde::{Codec, Dtype, Limits, Result, TensorInfo, ValidatedIndex};

/// Small, so that no input is slow.
pub const LIMITS: Limits = Limits::DEFAULT.index_size(1 << 16).section_size(1 << 16);

/// Makes one thread do all work of the pool, the one that calls: threads would only make inputs slower and less repeatable.
pub fn one_thread() {
    rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global().expect("nothing has used the pool yet");
}

/// Repairs, index and blob of an input of `apply_pair`.
pub fn split_pair(data: &[u8]) -> Option<(u8, Vec<u8>, Vec<u8>)> {
    let (&[repair, low, high], rest) = data.split_first_chunk()?;
    let (index, blob) = rest.split_at_checked(u16::from_le_bytes([low, high]).into())?;
    Some((repair, index.to_vec(), blob.to_vec()))
}

/// Bytes that look random: base lanes are taken from here.
static RANDOM: LazyLock<Vec<u8>> = LazyLock::new(|| {
    // As simple as can be, because `make_seeds.py` does the same.
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

/// The first seed that gives similar base lanes.
const FIRST_SIMILAR: u8 = 128;

/// Random bytes of which some bits are the same in all groups of 8 bytes, as the exponents of weights nearly are.
static SIMILAR: [OnceLock<Vec<u8>>; (u8::MAX - FIRST_SIMILAR) as usize] =
    [const { OnceLock::new() }; (u8::MAX - FIRST_SIMILAR) as usize];

fn similar(number: usize) -> Vec<u8> {
    let word = |i: usize| &RANDOM[64 * number + 8 * i..][..8];
    // A quarter of the bits vary. The others are the same in all groups.
    let vary = |i: usize| word(0)[i] & word(1)[i];
    RANDOM[..MOST_BYTES as usize].iter().enumerate().map(|(i, byte)| byte & vary(i % 8) ^ word(2)[i % 8]).collect()
}

/// Base lanes, chosen by `seed`: random, similar to each other, or zeros for the last seed, which stand for no base.
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

/// The base tensors that a pair asks for, the first of those that share a name.
pub fn base_tensors(index: &ValidatedIndex) -> Vec<(TensorInfo, &'static [u8])> {
    let mut tensors: Vec<(TensorInfo, &'static [u8])> = Vec::new();
    for tensor in index.tensors() {
        let Some(shape) = tensor.base_shape() else { continue };
        if tensors.iter().all(|(info, _)| info.name != tensor.base_name) {
            let info = TensorInfo { name: tensor.base_name.to_owned(), dtype: tensor.dtype, shape: shape.to_vec() };
            let lanes = base_lanes(tensors.len() as u8, info.bytes() as usize);
            tensors.push((info, lanes));
        }
    }
    tensors
}

/// One chunk for a decoder, as the bytes of an input say: a dtype, lanes, what its record would say, and the rest.
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
        // Mostly few, because inputs with few are fast.
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

/// Decodes a payload whose record has passed the checks of the index, and asserts what holds whatever it says.
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

/// A zstd frame of one block that is stored as it is: content at the price of a copy.
pub fn frame(content: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0xA0]; // one segment, a content size of 4 bytes
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

/// Lanes that differ.
pub fn count_changed(dtype: Dtype, base: &[u8], target: &[u8]) -> u32 {
    let width = dtype.lane_bytes();
    base.chunks(width).zip(target.chunks(width)).filter(|(base, target)| base != target).count() as u32
}

/// Bytes that are a table set, after all that makes them none is put right; those of a table set are left as they are.
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
        *frequencies.last_mut().expect("a class has tokens, and they have slots") += left;
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

/// A payload of codec `conditioned`, and all that its decoder is told.
pub struct Conditioned {
    dtype: Dtype,
    base: &'static [u8],
    tables: Option<TableSet>,
    num_deltas: u32,
    payload: Vec<u8>,
}

impl Conditioned {
    /// The bytes of a [`Chunk`], whose rest is a byte that says how many table sets there are (none or one), the set, and a
    /// payload: as it is, or made from what the rest says of its shape and of the lanes that change, and damaged as it says.
    pub fn new(chunk: &Chunk<'_>) -> arbitrary::Result<Self> {
        let mut u = Unstructured::new(chunk.rest);
        let tables = if u.arbitrary::<u8>()? % 8 == 0 { None } else { Some(tables(&mut u)?) };
        let tables = tables.map(|set| fuzzing::parse_tables(&set).expect("a set that was put right"));
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

    /// Decodes the payload as a reader does, and asserts what holds whatever it says.
    pub fn check(&self) {
        decode_with(Codec::Conditioned, self.tables.as_ref(), self.dtype, self.encoded(), &self.payload, self.base);
    }

    fn encoded(&self) -> Encoded {
        Encoded { uncompressed_size: self.base.len() as u32, num_deltas: self.num_deltas }
    }

    /// Decodes the payload with every kind of instructions and by the model, and asserts that all come to the same.
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
            assert_eq!(outcome.as_ref().err().and_then(|error| error.rule()), rule);
            assert!(expected.as_ref().is_none_or(|expected| *expected == lanes));
            check_outcome(self.dtype, self.base, self.num_deltas, outcome, &lanes);
        }
    }
}
