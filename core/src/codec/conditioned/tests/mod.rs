//! Tests that compare the codec with the model, on every platform: payloads of the library's encoder, payloads of every valid
//! shape, and damaged payloads.
//!
//! This file has the shared helpers: random lanes, tables and payloads, and comparisons of decoders.

mod contexts;
mod damaged;
mod maps;
mod random;
mod round_trips;
mod rules;
mod steps;

use self::random::Random;
use super::model::{self, Shape};
use super::tables::{MAX_TOKENS, SCALE};
use super::*;
use crate::codec::simd::Platform;
use crate::codec::{CopiedBase, Difference, Encoded};
use crate::error::Result;
use crate::lane::{Dtype, with_lane};
use crate::prelude::*;
use crate::sums::chunk_sum;
use proptest::prelude::*;

/// Size of a payload's header in bytes, and offsets of its fields.
const HEADER: usize = 16;
const LOW_BITS: usize = 0;
const STATES: usize = 1;
const SEGMENTS: usize = 2;
const ACTIVITY_BITS: usize = 3;
const CONTEXT_COUNT: usize = 6;
const RESERVED: usize = 7;
const EXCEPTIONS: usize = 8;
const CENTER: usize = 12;

fn count_changed(dtype: Dtype, base: &[u8], target: &[u8]) -> u32 {
    let width = dtype.lane_bytes();
    base.chunks(width).zip(target.chunks(width)).filter(|(base, target)| base != target).count() as u32
}

/// Returns tables trained on these lanes.
fn trained(dtype: Dtype, low_bits: u32, base: &[u8], target: &[u8]) -> Option<TableSet> {
    let mut trainer = Trainer::default();
    trainer.add(Sample::gather(dtype, low_bits, base, target));
    trainer.finish(8 * dtype.lane_bytes() as u32 - low_bits, low_bits != 0, true)
}

fn encode(encoder: &mut Encoder, dtype: Dtype, tables: Option<&TableSet>, low_bits: u32, base: &[u8], target: &[u8]) -> Vec<u8> {
    encode_at(DecodeCost::default(), encoder, dtype, tables, low_bits, base, target)
}

fn encode_at(
    decode_cost: DecodeCost,
    encoder: &mut Encoder,
    dtype: Dtype,
    tables: Option<&TableSet>,
    low_bits: u32,
    base: &[u8],
    target: &[u8],
) -> Vec<u8> {
    let mut payload = vec![0xEE; 3];
    let mut masks = Vec::new();
    let difference = Difference::find(dtype, base, target, &mut masks);
    let encoded = with_lane!(dtype.lane_bytes(), L => encoder.encode::<L>(difference, tables, low_bits, decode_cost, &mut payload));
    let changed = count_changed(dtype, base, target);
    let size = if changed == 0 { 0 } else { base.len() as u32 };
    assert_eq!(encoded, Encoded { uncompressed_size: size, num_deltas: changed });
    assert_eq!(payload[..3], [0xEE; 3]);
    payload.split_off(3)
}

/// Decodes a payload to the chunk sum and the lanes of the target.
fn decode(
    decoder: &mut Decoder,
    dtype: Dtype,
    tables: Option<&TableSet>,
    num_deltas: u32,
    payload: &[u8],
    base: &[u8],
) -> Result<(u64, Vec<u8>)> {
    let encoded = Encoded { uncompressed_size: base.len() as u32, num_deltas };
    let chunk = ConditionedChunk { dtype, tables, encoded, payload, base_sum: chunk_sum(base) };
    // Base lanes are supplied only when they are requested.
    let (mut lanes, mut filled) = (vec![0xA5; base.len()], 0);
    let mut fill = |lanes: &mut [u8], end: usize| {
        if end > filled {
            lanes[filled..end].copy_from_slice(&base[filled..end]);
            filled = end;
        }
        Ok(())
    };
    let (mut copied, mut copied_base) = (vec![0x5A; base.len()], CopiedBase::new(base));
    let (sum, copied_sum) = with_lane!(dtype.lane_bytes(), L => {
        let copied_sum = decoder.decode_copied::<L>(chunk, &mut copied, &mut copied_base);
        (decoder.decode::<L>(chunk, &mut lanes, &mut fill), copied_sum)
    });
    assert_eq!(copied_base.sum(), chunk_sum(base));
    assert_eq!(sum.as_ref().map_err(ToString::to_string), copied_sum.as_ref().map_err(ToString::to_string));
    let sum = sum?;
    fill(&mut lanes, base.len())?;
    assert!(copied == lanes);
    Ok((sum, lanes))
}

fn decoders() -> Vec<Decoder> {
    Platform::available().into_iter().map(Decoder::with_platform).collect()
}

/// Decodes a payload with each decoder and asserts that it gives `target`.
fn assert_decodes(decoders: &mut [Decoder], dtype: Dtype, tables: Option<&TableSet>, payload: &[u8], base: &[u8], target: &[u8]) {
    let changed = count_changed(dtype, base, target);
    for (platform, decoder) in Platform::available().into_iter().zip(decoders) {
        let (sum, lanes) = decode(decoder, dtype, tables, changed, payload, base).unwrap();
        assert!(lanes == target, "{dtype} on {platform:?}");
        assert_eq!(sum, chunk_sum(target), "{dtype} on {platform:?}");
    }
}

/// Decodes arbitrary bytes with each decoder. Asserts that all agree with the model, and that errors have rules of payloads.
fn assert_as_model(
    decoders: &mut [Decoder],
    dtype: Dtype,
    tables: Option<&TableSet>,
    num_deltas: u32,
    payload: &[u8],
    base: &[u8],
) -> Option<Vec<u8>> {
    let expected = model::decode(dtype, tables, num_deltas, payload, base);
    for (platform, decoder) in Platform::available().into_iter().zip(decoders) {
        match (decode(decoder, dtype, tables, num_deltas, payload, base), &expected) {
            (Ok((sum, lanes)), Some(expected)) => {
                assert!(lanes == *expected, "{dtype} on {platform:?}");
                assert_eq!(sum, chunk_sum(&lanes), "{dtype} on {platform:?}");
                assert_eq!(count_changed(dtype, base, &lanes), num_deltas);
            }
            (Err(error), None) => assert!(error.rule().is_some_and(|rule| rule.id().starts_with("payload.")), "{error}"),
            (found, expected) => panic!("{dtype} on {platform:?}: {:?}, the model {}", found.err(), expected.is_some()),
        }
    }
    expected
}

/// Returns frequencies with sum 4,096: `least` for each of `count` tokens, and the remainder for the first token.
fn flat(count: usize, least: u16) -> Vec<u16> {
    let mut class = vec![least; count];
    class[0] += SCALE as u16 - count as u16 * least;
    class
}

/// Returns unusual valid sets: with one token, without token 0 (so a coded lane cannot stay unchanged), with all tokens, and with
/// the largest token only.
fn handmade() -> Vec<TableSet> {
    let alone = |token: usize| [vec![0; token], vec![SCALE as u16]].concat();
    vec![
        one_token(0),
        one_token(3),
        TableSet::new(&[flat(2, 2048)]),
        TableSet::new(&[flat(MAX_TOKENS, 20), alone(MAX_TOKENS - 1), flat(2, 1)]),
        TableSet::new(&vec![flat(68, 50); 15]),
        TableSet::new(&[alone(0), alone(1), alone(63), alone(64), alone(65), flat(84, 1)]),
    ]
}

/// Returns a set of one class with one token.
fn one_token(token: usize) -> TableSet {
    TableSet::new(&[[vec![0; token], vec![SCALE as u16]].concat()])
}

/// A chunk: its lanes, tables and payload.
#[derive(Debug)]
struct Chunk {
    dtype: Dtype,
    tables: Option<TableSet>,
    base: Vec<u8>,
    target: Vec<u8>,
    payload: Vec<u8>,
}

impl Chunk {
    /// Returns a chunk of `lanes` random lanes with a payload of this shape, or `None` if the shape cannot code the lanes.
    fn new(random: &mut Random, dtype: Dtype, lanes: usize, shape: Shape) -> Option<Self> {
        let tables = match random.below(8) {
            0 => None,
            1 => handmade().into_iter().nth(random.below(6) as usize),
            _ => {
                let classes = 1 + random.below(15) as usize;
                let most = [2, 64, 65, 84, MAX_TOKENS][random.below(5) as usize];
                Some(random.set(classes, most))
            }
        };
        let shape = shape.bounded(dtype, lanes, tables.as_ref().map_or(0, |tables| tables.classes().len()));
        let base = random.lanes(dtype, lanes);
        let rate = [1, 20, 400, 1024][random.below(4) as usize];
        let mut target = random.changed(dtype, &base, rate);
        target[0] ^= u8::from(base == target);
        let payload = model::encode(dtype, tables.as_ref(), &shape, &base, &target)?;
        Some(Self { dtype, tables, base, target, payload })
    }

    fn changed(&self) -> u32 {
        count_changed(self.dtype, &self.base, &self.target)
    }

    fn assert_decodes(&self, decoders: &mut [Decoder]) {
        assert_decodes(decoders, self.dtype, self.tables.as_ref(), &self.payload, &self.base, &self.target);
    }

    /// Same as the function, for another payload of this chunk and `num_deltas` in the record.
    fn assert_as_model(&self, decoders: &mut [Decoder], num_deltas: u32, payload: &[u8]) -> Option<Vec<u8>> {
        assert_as_model(decoders, self.dtype, self.tables.as_ref(), num_deltas, payload, &self.base)
    }
}

/// Returns a shape with random classes and activities, and these other fields.
fn shape(random: &mut Random, states_log2: u8, segments_log2: u8, activity_bits: u8) -> Shape {
    let bytes = |random: &mut Random, most: u64| (0..random.below(most)).map(|_| random.next() as u8).collect::<Vec<_>>();
    let sparse = random.below(3);
    let mut classes = bytes(random, 150);
    classes.iter_mut().for_each(|class| *class *= u8::from(random.below(3) >= sparse));
    Shape {
        low_bits: if random.below(3) == 0 { random.next() as u8 } else { 0 },
        states_log2,
        segments_log2,
        activity_bits,
        first_context: [0, 1, 60, 120, 1000, 2040, u16::MAX][random.below(7) as usize],
        context_count: random.next() as u8,
        center: random.any() as u32 >> random.below(32),
        classes,
        activities: bytes(random, 40),
        list_every: [0, 0, 1, 2, 7][random.below(5) as usize],
    }
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    proptest::sample::select(Dtype::ALL)
}
