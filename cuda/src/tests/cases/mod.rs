//! Valid and invalid chunks for kernels, and the verdict of the processor's decoder.

pub mod faults;
pub mod hostile;
pub mod shapes;
pub mod writer;

use tpde_core::codec::conditioned::{Sample, Trainer};
use tpde_core::codec::{ChunkDecoder, ChunkEncoder, Codec, Coding, DecodeCost, Encoded, EncodedChunk, TableSet};
use tpde_core::error::Rule;
use tpde_core::lane::{Dtype, Lane, lanes_of_mut, with_lane};
use tpde_core::sums::chunk_sum;

/// Deterministic pseudo-random numbers.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Returns true with probability 1 / `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A chunk, valid or invalid.
#[derive(Clone)]
pub struct Case {
    pub codec: Codec,
    pub dtype: Dtype,
    pub lanes: usize,
    pub set: Option<TableSet>,
    /// The base lanes. Missing lanes are zero.
    pub base: Vec<u8>,
    pub payload: Vec<u8>,
    /// Value of the padding bytes after the payload.
    pub padding: u8,
    pub uncompressed_size: u32,
    pub num_deltas: u32,
    pub crc32: u32,
    pub base_sum: u64,
    pub target_sum: u64,
}

impl Case {
    /// Returns a chunk of codec `conditioned` with correct record and sums.
    pub fn new(dtype: Dtype, set: Option<TableSet>, base: Vec<u8>, target: &[u8], payload: Vec<u8>) -> Self {
        let width = dtype.lane_bytes();
        let mut all_base = base.clone();
        all_base.resize(target.len(), 0);
        let mut case = Self {
            codec: Codec::Conditioned,
            dtype,
            lanes: target.len() / width,
            set,
            base,
            payload,
            padding: 0,
            uncompressed_size: target.len() as u32,
            num_deltas: all_base.chunks(width).zip(target.chunks(width)).filter(|(base, target)| base != target).count() as u32,
            crc32: 0,
            base_sum: chunk_sum(&all_base),
            target_sum: chunk_sum(target),
        };
        case.sign();
        case
    }

    /// Returns the chunk as the encoder stores it. For codec `conditioned` the tables are made for the chunk.
    pub fn encoded(codec: Codec, dtype: Dtype, low_bits: u32, base: Vec<u8>, target: &[u8]) -> Self {
        let mut trainer = Trainer::default();
        trainer.add(Sample::gather(dtype, low_bits, &base, target));
        let set = trainer.finish(8 * dtype.lane_bytes() as u32 - low_bits, low_bits != 0, true);
        let set = set.filter(|_| codec == Codec::Conditioned);
        let coding = match codec {
            Codec::Raw => Coding::Raw,
            Codec::Zstd => Coding::Zstd(None),
            Codec::Conditioned => Coding::Conditioned { tables: set.as_ref(), low_bits, decode_cost: DecodeCost::default() },
        };
        let mut payload = Vec::new();
        let encoded = ChunkEncoder::new().unwrap().encode(coding, dtype, &base, target, &mut payload).unwrap();
        let case = Self { codec, uncompressed_size: encoded.uncompressed_size, ..Self::new(dtype, set, base, target, payload) };
        assert_eq!(case.num_deltas, encoded.num_deltas);
        case
    }

    /// Sets the CRC in the record to the CRC of the payload.
    pub fn sign(&mut self) {
        self.crc32 = crc32fast::hash(&self.payload);
    }

    pub fn all_base_lanes(&self) -> Vec<u8> {
        let mut base = self.base.clone();
        base.resize(self.lanes * self.dtype.lane_bytes(), 0);
        base
    }

    /// The chunk with another base, in which no lane has another context. Its sums are those of the other lanes.
    #[must_use]
    pub fn rebased(mut self, base: Vec<u8>) -> Self {
        let was_right = self.decode().is_ok();
        self.base = base;
        self.base_sum = chunk_sum(&self.all_base_lanes());
        if let (true, Ok((_, sum))) = (was_right, self.decode_to_sum()) {
            self.target_sum = sum;
        }
        self
    }

    /// Decodes the chunk with the crate's decoder, in the order of section 13, steps 8 to 11.
    pub fn decode(&self) -> Result<Vec<u8>, Rule> {
        let (lanes, sum) = self.decode_to_sum()?;
        if sum == self.target_sum || self.num_deltas == 0 { Ok(lanes) } else { Err(Rule::ChunkTargetSum) }
    }

    /// [`Case::decode`] without the comparison of the target sum, which is returned.
    fn decode_to_sum(&self) -> Result<(Vec<u8>, u64), Rule> {
        let rule = |broken: bool, rule: Rule| if broken { Err(rule) } else { Ok(()) };
        let mut lanes = self.all_base_lanes();
        rule(chunk_sum(&lanes) != self.base_sum, Rule::ChunkBaseSum)?;
        if self.num_deltas == 0 {
            return Ok((lanes, self.base_sum));
        }
        rule(crc32fast::hash(&self.payload) != self.crc32, Rule::PayloadCrc32)?;
        rule(self.padding != 0 && !self.payload.len().is_multiple_of(16), Rule::PayloadPadding)?;
        let encoded = Encoded { uncompressed_size: self.uncompressed_size, num_deltas: self.num_deltas };
        let tables = self.set.as_ref();
        let (codec, dtype, payload, base_sum) = (self.codec, self.dtype, &self.payload[..], self.base_sum);
        let chunk = EncodedChunk { codec, dtype, tables, encoded, payload, base_sum };
        let mut decoder = ChunkDecoder::new();
        let sum = decoder.decode(&chunk, &mut lanes, &mut |_, _| Ok(())).map_err(|e| e.rule().expect("a rule is broken"))?;
        assert_eq!(sum, chunk_sum(&lanes));
        Ok((lanes, sum))
    }
}

/// Returns whether verdicts agree. A payload may violate several rules.
pub fn is_same_kind(expected: Option<Rule>, found: Option<Rule>) -> bool {
    // Kernels check the sizes of all segments first. The decoder of the processor may find a fault in an earlier segment before.
    let early = found == Some(Rule::PayloadSize) && expected.map(kind) == Some(kind(Rule::PayloadStream));
    early || expected.map(kind) == found.map(kind)
}

/// Returns the group of a rule. Rules of a group are checked together. A payload that violates several rules of a group may be
/// reported with any of these rules.
fn kind(rule: Rule) -> u8 {
    match rule {
        Rule::PayloadCrc32 => 0,
        Rule::PayloadPadding => 1,
        Rule::PayloadSize | Rule::PayloadHeader | Rule::PayloadClasses => 2,
        Rule::PayloadStream | Rule::PayloadPositions | Rule::PayloadDeltas | Rule::ChunkTargetSum => 3,
        Rule::ChunkBaseSum => 4,
        Rule::PayloadFrame | Rule::PayloadLayout => 5,
        Rule::PayloadDigest | Rule::HeaderPayloadRoot => 6,
        _ => panic!("no rule of a chunk: {rule:?}"),
    }
}

/// Returns base and target lanes. One lane in `rarity` changes, by a few units or arbitrarily.
pub fn random_lanes(random: &mut Random, dtype: Dtype, lanes: usize, rarity: usize) -> (Vec<u8>, Vec<u8>) {
    let width = dtype.lane_bytes();
    let bits = 8 * width as u32;
    let mut base = vec![0; lanes * width];
    // Lanes of all magnitudes, so that all contexts occur.
    base.chunks_mut(width).for_each(|lane| {
        let shift = if random.once_in(2) { random.below(bits as usize) as u32 } else { 0 };
        let value = (random.bits() >> (64 - bits) >> shift) ^ if random.once_in(2) { u64::MAX } else { 0 };
        lane.copy_from_slice(&value.to_le_bytes()[..width]);
    });
    let mut target = base.clone();
    with_lane!(width, L => for lane in lanes_of_mut::<L>(&mut target) {
        if random.once_in(rarity) {
            let delta = if random.once_in(8) { random.bits() } else { 1 + random.below(30) as u64 };
            *lane = L::apply(L::load(*lane), L::from_u64(delta), dtype.order()).store();
        }
    });
    (base, target)
}
