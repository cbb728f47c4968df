//! Tests of the maps that the encoder chooses. If the coded entries of a map come first, a decoder can find coded lanes with one
//! comparison of magnitudes.

use super::*;
use crate::codec::conditioned::payload::Payload;
use crate::prelude::*;

/// Returns two values per map of a BF16 payload: whether the map has a coded entry, and whether it has an uncoded entry below a
/// coded entry.
fn coded_and_holes(chunk: &Chunk) -> Vec<(bool, bool)> {
    let classes = chunk.tables.as_ref().map_or(0, |tables| tables.classes().len());
    let payload = Payload::parse(&chunk.payload, chunk.base.len() / 2, 2, chunk.changed(), classes).unwrap();
    let map = |map: &[u8; 64]| match map.iter().rposition(|&class| class != 0) {
        Some(last) => (true, map[..last].contains(&0)),
        None => (false, false),
    };
    payload.maps.classes[..1 << payload.activity_bits].iter().map(map).collect()
}

/// Returns base and target weights in rows of 384. A row is unchanged with probability 1/`resting`. The weights of the other rows
/// change by about `step`.
fn weights(random: &mut Random, rows: usize, resting: u64, step: f32) -> (Vec<u8>, Vec<u8>) {
    // Approximately normal, with a standard deviation of 1.
    let mut normal = || (0..12).map(|_| random.below(1 << 16) as f32 / 65536.0).sum::<f32>() - 6.0;
    let lanes: Vec<(f32, f32)> = (0..rows * 384).map(|_| (0.05 * normal(), step * normal())).collect();
    let rests: Vec<bool> = (0..rows).map(|_| random.below(resting) == 0).collect();
    let round = |x: f32| ((x.to_bits() + 0x7FFF + (x.to_bits() >> 16 & 1)) >> 16) as u16;
    let of = |lanes: &mut dyn Iterator<Item = u16>| lanes.flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let base = of(&mut lanes.iter().map(|&(weight, _)| round(weight)));
    let target = of(&mut lanes.iter().enumerate().map(|(i, &(weight, step))| {
        // The step is added to the rounded weight, which the base contains.
        let weight = f32::from_bits(u32::from(round(weight)) << 16);
        round(if rests[i / 384] { weight } else { weight + step })
    }));
    (base, target)
}

#[test]
fn maps_of_weights_have_no_holes() {
    let mut random = Random::new(20);
    let mut decoders = decoders();
    let (mut encoder, mut coded) = (Encoder::default(), 0);
    for rows in [20, 200, 1400] {
        for resting in [2, 1000] {
            for step in [1e-7, 1e-6, 1e-5, 1e-4, 1e-3] {
                let (base, target) = weights(&mut random, rows, resting, step);
                if base == target {
                    continue;
                }
                let tables = trained(Dtype::Bf16, 0, &base, &target);
                let payload = encode(&mut encoder, Dtype::Bf16, tables.as_ref(), 0, &base, &target);
                let chunk = Chunk { dtype: Dtype::Bf16, tables, base, target, payload };
                chunk.assert_decodes(&mut decoders);
                for (codes, holes) in coded_and_holes(&chunk) {
                    assert!(!holes, "{rows} rows, steps of {step}");
                    coded += usize::from(codes);
                }
            }
        }
    }
    assert!(coded > 30, "{coded} maps");
}

/// Contexts with changes, mixed with contexts that do not change or do not occur.
#[test]
fn few_lanes_that_do_not_change_make_no_holes() {
    let mut random = Random::new(21);
    let lane = |i: u64| {
        // Some exponents change in every third or fifth lane, some occur in few lanes, and some do not occur.
        let (exponent, changes) = match i % 1000 {
            0 => (101, false),
            1 => (103, false),
            odd if odd % 2 == 1 => (100, odd % 3 == 0),
            even => (104, even % 5 == 0),
        };
        let lane = exponent << 7 | random.below(127) as u16;
        (lane, lane + u16::from(changes))
    };
    let (base, target): (Vec<u16>, Vec<u16>) = (0..60_000).map(lane).unzip();
    let [base, target] = [base, target].map(|lanes| lanes.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>());
    let tables = trained(Dtype::Bf16, 0, &base, &target);
    let payload = encode(&mut Encoder::default(), Dtype::Bf16, tables.as_ref(), 0, &base, &target);
    let chunk = Chunk { dtype: Dtype::Bf16, tables, base, target, payload };
    let maps = coded_and_holes(&chunk);
    assert!(maps.iter().any(|map| map.0) && !maps.iter().any(|map| map.1), "{maps:?}");
    chunk.assert_decodes(&mut decoders());
}

/// If all lanes of a block are coded, including lanes that hardly ever change, rows of lanes are decoded without a list of coded
/// lanes.
#[test]
fn dense_blocks_are_coded_as_a_whole() {
    let (base, target) = weights(&mut Random::new(22), 400, 2, 1e-4);
    let tables = trained(Dtype::Bf16, 0, &base, &target);
    let payload = encode(&mut Encoder::default(), Dtype::Bf16, tables.as_ref(), 0, &base, &target);
    let chunk = Chunk { dtype: Dtype::Bf16, tables, base, target, payload };
    let classes = chunk.tables.as_ref().unwrap().classes().len();
    let payload = Payload::parse(&chunk.payload, chunk.base.len() / 2, 2, chunk.changed(), classes).unwrap();
    let maps = &payload.maps;
    let (mut rows, mut none) = (0, 0);
    for (block, lanes) in chunk.base.chunks(256).enumerate() {
        let map = &maps.classes[usize::from(payload.activity(block))];
        let context = |lane: &[u8]| u16::from_le_bytes([lane[0], lane[1]]) >> 7 & 0xFF;
        let entry = |lane| usize::from(context(lane).saturating_sub(maps.first));
        let coded = lanes.chunks(2).filter(|lane| map.get(entry(lane)).is_some_and(|&class| class != 0)).count();
        rows += usize::from(coded == 128);
        none += usize::from(coded == 0);
    }
    let blocks = chunk.base.len() / 256;
    assert!(rows > blocks / 3 && rows + none > blocks * 9 / 10, "{rows} and {none} of {blocks}");
    chunk.assert_decodes(&mut decoders());
}

/// A few large lanes among many small lanes that change. A map for all lanes would have too many contexts.
#[test]
fn lanes_may_have_more_contexts_than_a_map() {
    let exponent = |i: u16| if i.is_multiple_of(5000) { 230 } else { 100 + i % 3 };
    let base: Vec<u8> = (0..30_000).flat_map(|i| (exponent(i) * 0x80 + i % 97).to_le_bytes()).collect();
    let mut target = base.clone();
    target.chunks_mut(2).enumerate().filter(|(i, _)| i % 5000 != 0).for_each(|(_, lane)| lane[0] ^= 1);
    let tables = trained(Dtype::Bf16, 0, &base, &target);
    let payload = encode(&mut Encoder::default(), Dtype::Bf16, tables.as_ref(), 0, &base, &target);
    Chunk { dtype: Dtype::Bf16, tables, base, target, payload }.assert_decodes(&mut decoders());
}

/// If no class suits lanes that do not change, coding them costs too much.
#[test]
fn holes_that_are_worth_it_stay() {
    let base: Vec<u8> = (0..30_000u16).flat_map(|i| (0x3C00 + i % 3 * 0x80).to_le_bytes()).collect();
    let mut target = base.clone();
    // Half of the lanes of every exponent change, except for the middle exponent.
    target.chunks_mut(2).enumerate().filter(|(i, _)| i % 3 != 1 && i / 3 % 2 == 0).for_each(|(_, lane)| lane[0] ^= 1);
    let tables = Some(TableSet::new(&[flat(3, 1365)]));
    let payload = encode(&mut Encoder::default(), Dtype::Bf16, tables.as_ref(), 0, &base, &target);
    let chunk = Chunk { dtype: Dtype::Bf16, tables, base, target, payload };
    assert_eq!(coded_and_holes(&chunk), [(true, true)]);
    chunk.assert_decodes(&mut decoders());
}
