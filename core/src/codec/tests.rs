//! Tests of every codec and layout with arbitrary lanes and arbitrary bytes.

use super::*;
use crate::error::Error;
use crate::lane::{Lane, Order, lanes_of_mut};
use crate::sums::chunk_sum;
use core::cell::RefCell;
use proptest::prelude::*;

// All chunks of a test share these, with any codec, dtype and tables, so that a test fails if state of an earlier chunk remains.
std::thread_local! {
    static ENCODER: RefCell<ChunkEncoder> = RefCell::new(ChunkEncoder::new().unwrap());
    static DECODER: RefCell<ChunkDecoder> = RefCell::new(ChunkDecoder::new());
}

/// A way to encode a chunk.
#[derive(Debug, Clone, Copy)]
enum Way {
    Raw,
    /// In this layout, or in one that a rule selects.
    Zstd(Option<Layout>),
    /// With tables trained on the chunk itself, and this number of low bits per delta.
    Conditioned(u32),
    /// Without tables.
    Bare,
}

/// Returns every way to encode lanes of this dtype.
fn ways(dtype: Dtype) -> Vec<Way> {
    let zstd = Layout::ALL.iter().map(|&layout| Way::Zstd(Some(layout)));
    let low_bits = dtype.mantissa_bits().map(|bits| Way::Conditioned(bits + 1));
    [Way::Raw, Way::Zstd(None), Way::Conditioned(0), Way::Bare].into_iter().chain(zstd).chain(low_bits).collect()
}

/// Returns tables trained on a chunk, or `None` if no lane changes.
fn tables_of(dtype: Dtype, low_bits: u32, base: &[u8], target: &[u8]) -> Option<TableSet> {
    let mut trainer = conditioned::Trainer::default();
    trainer.add(conditioned::Sample::gather(dtype, low_bits, base, target));
    trainer.finish(8 * dtype.lane_bytes() as u32 - low_bits, low_bits != 0, true)
}

/// A payload, and the other inputs of a decoder.
struct Stored {
    codec: Codec,
    tables: Option<TableSet>,
    encoded: Encoded,
    payload: Vec<u8>,
}

fn encode(way: Way, dtype: Dtype, base: &[u8], target: &[u8]) -> Stored {
    let (codec, tables, low_bits) = match way {
        Way::Raw => (Codec::Raw, None, 0),
        Way::Zstd(_) => (Codec::Zstd, None, 0),
        Way::Conditioned(low_bits) => (Codec::Conditioned, tables_of(dtype, low_bits, base, target), low_bits),
        Way::Bare => (Codec::Conditioned, None, 0),
    };
    let coding = match way {
        Way::Raw => Coding::Raw,
        Way::Zstd(layout) => Coding::Zstd(layout),
        Way::Conditioned(_) | Way::Bare => {
            Coding::Conditioned { tables: tables.as_ref(), low_bits, decode_cost: DecodeCost::default() }
        }
    };
    let mut payload = Vec::new();
    let encoded = ENCODER.with_borrow_mut(|encoder| encoder.encode(coding, dtype, base, target, &mut payload).unwrap());
    Stored { codec, tables, encoded, payload }
}

fn assert_round_trip(way: Way, dtype: Dtype, base: &[u8], target: &[u8]) {
    let Stored { codec, tables, encoded, payload } = encode(way, dtype, base, target);
    let lane_bytes = dtype.lane_bytes();
    let changed = base.chunks(lane_bytes).zip(target.chunks(lane_bytes)).filter(|(b, t)| b != t).count();
    assert_eq!(encoded.num_deltas as usize, changed);
    assert_eq!(payload.is_empty(), changed == 0);
    if changed == 0 {
        assert_eq!(encoded, Encoded::default());
        return;
    }
    let lanes = (base.len() / lane_bytes) as u32;
    assert!(codec.check_sizes(payload.len() as u32, encoded.uncompressed_size, encoded.num_deltas, lanes, lane_bytes));
    let mut out = base.to_vec();
    let sum = DECODER.with_borrow_mut(|decoder| {
        let chunk = EncodedChunk { codec, dtype, tables: tables.as_ref(), encoded, payload: &payload, base_sum: chunk_sum(base) };
        decoder.decode(&chunk, &mut out, &mut |_, _| Ok(())).unwrap()
    });
    assert_eq!(sum, chunk_sum(target));
    assert!(out == target, "{way:?} {dtype} came back wrong");
}

/// Returns base and target lanes whose deltas and gaps are close to the limits of nibbles and escapes.
fn pattern(dtype: Dtype, lanes: usize, gaps: &[usize], deltas: &[u64]) -> (Vec<u8>, Vec<u8>) {
    let base: Vec<u8> = (0..lanes * dtype.lane_bytes()).map(|i| (i * 37 % 241) as u8).collect();
    let mut target = base.clone();
    with_lane!(dtype.lane_bytes(), L => {
        let out = lanes_of_mut::<L>(&mut target);
        let mut at = 0;
        for (gap, delta) in gaps.iter().cycle().zip(deltas.iter().cycle()) {
            at += gap;
            let Some(lane) = out.get_mut(at) else { break };
            *lane = L::apply(L::load(*lane), L::from_u64(*delta), dtype.order()).store();
            at += 1;
        }
    });
    (base, target)
}

#[test]
fn payloads_are_appended_to_what_is_there() {
    for dtype in [Dtype::I8, Dtype::Bf16, Dtype::F64] {
        let (base, target) = pattern(dtype, 500, &[3, 20], &[1, 17, 300]);
        for way in ways(dtype) {
            let Stored { tables, encoded, payload, .. } = encode(way, dtype, &base, &target);
            let coding = match way {
                Way::Raw => Coding::Raw,
                Way::Zstd(layout) => Coding::Zstd(layout),
                Way::Conditioned(low_bits) => {
                    Coding::Conditioned { tables: tables.as_ref(), low_bits, decode_cost: DecodeCost::default() }
                }
                Way::Bare => Coding::Conditioned { tables: None, low_bits: 0, decode_cost: DecodeCost::default() },
            };
            let mut both = vec![7; 33];
            let again = ENCODER.with_borrow_mut(|encoder| encoder.encode(coding, dtype, &base, &target, &mut both).unwrap());
            assert_eq!(again, encoded, "{way:?} {dtype}");
            assert!(both[..33] == [7; 33] && both[33..] == payload, "{way:?} {dtype}");
        }
    }
}

#[test]
fn boundaries_of_gaps_and_deltas() {
    let gaps = [0, 1, 14, 15, 16, 253, 254, 255, 256, 269, 270, 271, 509, 510, 511, 1000];
    let deltas = [1, 2, 14, 15, 16, 17, 255, 256, 269, 270, 271, 272, 0xFFFE, 0xFFFF, 0xFFFF_FFFF, u64::MAX];
    for dtype in [Dtype::I8, Dtype::F8E4m3, Dtype::Bf16, Dtype::U16, Dtype::F32, Dtype::U32, Dtype::F64, Dtype::I64, Dtype::F4] {
        for way in ways(dtype) {
            for lanes in [1, 31, 32, 33, 63, 64, 65, 4095, 4096, 4097] {
                let (base, target) = pattern(dtype, lanes, &gaps, &deltas);
                assert_round_trip(way, dtype, &base, &target);
                let (base, target) = pattern(dtype, lanes, &[0], &deltas);
                assert_round_trip(way, dtype, &base, &target);
                let (base, target) = pattern(dtype, lanes, &[0], &[u64::MAX]);
                assert_round_trip(way, dtype, &base, &target);
            }
        }
    }
}

#[test]
fn examples_of_the_spec() {
    let base = vec![0x80; 8192];
    let mut target = base.clone();
    for (lane, delta) in [(3, 2), (20, 1), (300, 400)] {
        let lane = &mut lanes_of_mut::<u16>(&mut target)[lane];
        *lane = u16::apply(u16::load(*lane), delta, Order::Ordered).store();
    }
    let Stored { encoded, payload, .. } = encode(Way::Raw, Dtype::Bf16, &base, &target);
    assert_eq!(payload, [3, 0, 0, 0, 20, 0, 0, 0, 0x2C, 1, 0, 0, 2, 0, 1, 0, 0x90, 1]);
    assert_eq!(encoded, Encoded { uncompressed_size: 18, num_deltas: 3 });
    for (layout, content) in [
        (Layout::Gaps, &[1, 2, 1, 0x90, 0, 0, 1, 3, 0x10, 0xFF, 0x18][..]),
        (Layout::EliasDelta, &[2, 2, 1, 0x90, 0, 0, 1, 0x61, 0x44, 0x48, 0xC0]),
        (Layout::NibbleGaps, &[3, 0x13, 0x0F, 0xFF, 0xFF, 0x81, 0, 1, 0xFF, 9]),
    ] {
        let Stored { encoded, payload, .. } = encode(Way::Zstd(Some(layout)), Dtype::Bf16, &base, &target);
        assert_eq!(zstd::expand_frame(&payload, encoded.uncompressed_size as usize, 27).unwrap(), content);
    }
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    proptest::sample::select(Dtype::ALL)
}

/// Base lanes, and target lanes in which about one of `rarity` lanes differs, by a small or an arbitrary delta.
fn lanes() -> impl Strategy<Value = (Dtype, Vec<u8>, Vec<u8>)> {
    (dtypes(), 1usize..3000, 1u32..200, any::<bool>(), any::<u64>()).prop_map(|(dtype, lanes, rarity, small, seed)| {
        let mut state = seed | 1;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 8
        };
        let base: Vec<u8> = (0..lanes * dtype.lane_bytes()).map(|_| random() as u8).collect();
        let mut target = base.clone();
        for lane in target.chunks_mut(dtype.lane_bytes()) {
            if random() % u64::from(rarity) == 0 {
                if small {
                    lane[0] = lane[0].wrapping_add(random() as u8 % 7);
                } else {
                    lane.iter_mut().for_each(|byte| *byte = random() as u8);
                }
            }
        }
        (dtype, base, target)
    })
}

proptest! {
    #[test]
    fn every_way_comes_back((dtype, base, target) in lanes()) {
        for way in ways(dtype) {
            assert_round_trip(way, dtype, &base, &target);
        }
    }

    /// A payload of codec `zstd` that is expanded for a device is, byte for byte, the payload of codec `raw`.
    #[test]
    fn expanded_payloads_are_those_of_codec_raw((dtype, base, target) in lanes()) {
        let raw = encode(Way::Raw, dtype, &base, &target);
        let mut transcoder = RawTranscoder::default();
        for way in ways(dtype) {
            let Stored { codec, encoded, payload, .. } = encode(way, dtype, &base, &target);
            if codec == Codec::Zstd && encoded.num_deltas > 0 {
                let lane_bytes = dtype.lane_bytes();
                prop_assert_eq!(transcoder.transcode(encoded, &payload, base.len() / lane_bytes, lane_bytes).unwrap(), &raw.payload[..]);
            }
        }
    }

    /// Arbitrary bytes as a payload give an error or lanes, never a panic, and never more changes than the record has.
    #[test]
    fn any_payload_ends(dtype in dtypes(), payload in proptest::collection::vec(any::<u8>(), 0..400), num_deltas in 1u32..64, uncompressed_size in 2u32..600) {
        let lanes = vec![7; 64 * dtype.lane_bytes()];
        for codec in Codec::ALL {
            let mut out = lanes.clone();
            let encoded = Encoded { uncompressed_size, num_deltas };
            let tables = TableSet::parse(&[2, 2, 0x80, 16, 0x80, 16, 1, 0x80, 32]).unwrap();
            let chunk = EncodedChunk { codec: *codec, dtype, tables: Some(&tables), encoded, payload: &payload, base_sum: 0 };
            match ChunkDecoder::new().decode(&chunk, &mut out, &mut |_, _| Ok(())) {
                Ok(_) => {
                    let changed = lanes.chunks(dtype.lane_bytes()).zip(out.chunks(dtype.lane_bytes())).filter(|(a, b)| a != b).count();
                    prop_assert_eq!(changed, num_deltas as usize);
                }
                Err(e) => prop_assert!(matches!(e, Error::Invalid(_)), "{e}"),
            }
        }
    }

    /// Arbitrary content in a valid frame passes zstd and reaches the layouts.
    #[test]
    fn any_content_ends(dtype in dtypes(), content in proptest::collection::vec(any::<u8>(), 1..400), layout in 0u8..6, num_deltas in 1u32..64) {
        let mut content = content;
        content[0] = layout;
        let payload = ::zstd::bulk::compress(&content, 1).unwrap();
        let lanes = vec![7; 64 * dtype.lane_bytes()];
        let mut out = lanes.clone();
        let encoded = Encoded { uncompressed_size: content.len() as u32, num_deltas };
        let chunk = EncodedChunk { codec: Codec::Zstd, dtype, tables: None, encoded, payload: &payload, base_sum: 0 };
        match ChunkDecoder::new().decode(&chunk, &mut out, &mut |_, _| Ok(())) {
            Ok(_) => {
                let changed = lanes.chunks(dtype.lane_bytes()).zip(out.chunks(dtype.lane_bytes())).filter(|(a, b)| a != b).count();
                prop_assert_eq!(changed, num_deltas as usize);
            }
            Err(e) => prop_assert!(matches!(e, Error::Invalid(_)), "{e}"),
        }
    }
}
