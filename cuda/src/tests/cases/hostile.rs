//! Hostile chunks: payloads of every shape with arbitrary parts and correct CRCs.

use super::shapes::{Shape, case_of};
use super::{Case, Random, random_lanes};
use tpde_core::codec::Codec;
use tpde_core::error::Rule;

/// A chunk with an arbitrary payload, and the verdict of the processor.
pub struct Hostile {
    pub case: Case,
    /// The bytes in the blob, if they differ from the payload whose CRC is in the record.
    pub stored: Option<Vec<u8>>,
    pub expected: Result<Vec<u8>, Rule>,
}

/// Returns a chunk of codec `conditioned` with up to `most` lanes.
pub fn conditioned(random: &mut Random, most: usize) -> Hostile {
    let clash = random.once_in(12);
    let mut case = case_of(Shape { clash, ..Shape::any(random, most) });
    let mut stored = None;
    let size = case.payload.len();
    match random.below(20) {
        0 | 1 => {
            for _ in 0..1 + random.below(3) {
                // Half of the damage is in the first 64 bytes, where the small parts are.
                let end = if random.once_in(2) { size.min(64) } else { size };
                case.payload[random.below(end)] ^= 1 << random.below(8);
            }
        }
        2 => case.payload.truncate(1 + random.below(size)),
        3 => case.payload.resize(size + 1 + random.below(40), random.bits() as u8),
        4 | 5 => {
            let from = size - size / (1 + random.below(4));
            case.payload[from..].iter_mut().skip(22).for_each(|byte| *byte = random.bits() as u8);
        }
        6 => case.payload.iter_mut().for_each(|byte| *byte = random.bits() as u8),
        7 => case.payload.iter_mut().skip(16).for_each(|byte| *byte = random.bits() as u8),
        8 => {
            let byte = random.below(size.min(16));
            case.payload[byte] = random.bits() as u8;
        }
        9 if !case.base.is_empty() => {
            let at = random.below(case.base.len());
            case.base[at] ^= 1 << random.below(8);
        }
        10 => match random.below(3) {
            0 => case.target_sum ^= 1 << random.below(64),
            1 => case.num_deltas += 1,
            _ => case.num_deltas = (case.num_deltas - 1).max(1),
        },
        11 => {
            let mut damaged = case.payload.clone();
            damaged[random.below(size)] ^= 1 << random.below(8);
            stored = Some(damaged);
        }
        12..16 => damage_exceptions(random, &mut case),
        _ => {}
    }
    case.num_deltas = case.num_deltas.min(case.lanes as u32);
    let expanded = case.lanes * case.dtype.lane_bytes();
    if case.payload.len() > expanded + expanded / 64 + 64 {
        // Chunks that the index refuses never reach a kernel.
        return conditioned(random, most);
    }
    case.sign();
    let mut judged = case.clone();
    judged.payload = stored.clone().unwrap_or(judged.payload);
    Hostile { expected: judged.decode(), case, stored }
}

/// Damages the list of exceptions, if there is one.
fn damage_exceptions(random: &mut Random, case: &mut Case) {
    let Some(header) = case.payload.first_chunk::<16>() else { return };
    let count = u32::from_le_bytes(*header[8..].first_chunk().unwrap()) as usize;
    let (activity_bits, contexts) = (usize::from(header[3]), usize::from(header[6]));
    let positions = 16 + (contexts.div_ceil(2) << activity_bits) + (case.lanes.div_ceil(128) * activity_bits).div_ceil(8);
    let deltas = positions + 4 * count;
    let width = case.dtype.lane_bytes();
    if count == 0 || deltas + width * count > case.payload.len() {
        return;
    }
    let (a, b) = (positions + 4 * random.below(count), positions + 4 * random.below(count));
    match random.below(5) {
        0 => case.payload.copy_within(a..a + 4, b),
        1 => {
            let beyond = (case.lanes + random.below(5)) as u32;
            case.payload[a..a + 4].copy_from_slice(&beyond.to_le_bytes());
        }
        2 => (0..count).for_each(|i| case.payload.copy_within(a..a + 4, positions + 4 * i)),
        3 => (0..4).for_each(|byte| case.payload.swap(a + byte, b + byte)),
        _ => {
            let at = deltas + width * random.below(count);
            case.payload[at..at + width].fill(0);
        }
    }
}

/// Returns a chunk of codec `raw` with up to `most` lanes.
pub fn raw(random: &mut Random, most: usize) -> Hostile {
    let Shape { dtype, lanes, rarity, .. } = Shape::any(random, most);
    let width = dtype.lane_bytes();
    let (base, mut target) = random_lanes(random, dtype, lanes, rarity);
    if base == target {
        target[0] ^= 1;
    }
    let mut case = Case::encoded(Codec::Raw, dtype, 0, base, &target);
    let count = case.num_deltas as usize;
    let position = |random: &mut Random| 4 * random.below(count);
    let deltas = (4 * count).next_multiple_of(width);
    match random.below(9) {
        0 => {
            let at = random.below(case.payload.len());
            case.payload[at] ^= 1 << random.below(8);
        }
        1 => {
            let (a, b) = (position(random), position(random));
            case.payload.copy_within(a..a + 4, b);
        }
        2 => {
            let at = position(random);
            let beyond = (lanes + random.below(5)) as u32;
            case.payload[at..at + 4].copy_from_slice(&beyond.to_le_bytes());
        }
        3 => {
            let at = position(random);
            case.payload[at..at + 4].copy_from_slice(&(random.bits() as u32).to_le_bytes());
        }
        4 => {
            let at = deltas + width * random.below(count);
            case.payload[at..at + width].fill(0);
        }
        5 => case.payload.iter_mut().for_each(|byte| *byte = random.bits() as u8),
        6 => case.payload[4 * count..deltas].fill(1),
        7 => case.base[random.below(lanes * width)] ^= 1,
        _ => {}
    }
    case.sign();
    Hostile { expected: case.decode(), case, stored: None }
}
