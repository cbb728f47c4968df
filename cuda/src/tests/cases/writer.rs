//! A writer of payloads of codec `conditioned`. The caller makes every choice that the format allows.

use super::Random;
use tpde_core::codec::TableSet;
use tpde_core::codec::conditioned::{token_of, tokens_within};
use tpde_core::format::ConditionedHeader;
use tpde_core::lane::{Context, Dtype, Lane, lanes_of, with_lane};
use zerocopy::IntoBytes;

/// Lanes per block, which share one activity.
pub const BLOCK: usize = 128;

/// Returns the number of lanes per tile.
pub fn tile(dtype: Dtype) -> usize {
    match dtype.lane_bytes() {
        1 | 2 => 8 * BLOCK,
        4 => 4 * BLOCK,
        _ => 2 * BLOCK,
    }
}

/// The choices of a payload.
#[derive(Debug, Clone)]
pub struct Plan {
    pub low_bits: u32,
    pub center: u32,
    pub states_log2: u8,
    pub segments_log2: u8,
    pub activity_bits: u8,
    pub first_context: u16,
    /// One map per activity, all of the same size.
    pub maps: Vec<Vec<u8>>,
    /// Activity of each block.
    pub activities: Vec<u8>,
    /// One in `listed` changes is an exception although it could be coded.
    pub listed: usize,
    /// A changed lane that also has an exception, which is invalid.
    pub clash: Option<usize>,
    /// A coded lane whose token has values that do not fit, which is invalid. The stream lacks the extra bits of this lane.
    pub too_large: Option<usize>,
}

/// Returns the class of each lane.
fn classes_of<L: Lane>(dtype: Dtype, plan: &Plan, base: &[L]) -> Vec<u8> {
    let count = |lane: u64| u64::from(64 - lane.leading_zeros());
    let top = 1u64 << (8 * L::BYTES - 1);
    let class = |(i, lane): (usize, &L)| {
        let context = match dtype.context() {
            Context::Exponent { shift, bits } => lane.to_u64() >> shift & ((1 << bits) - 1),
            Context::SignedBits if lane.to_u64() & top != 0 => count(!lane.to_u64() & (top - 1)),
            Context::SignedBits | Context::Bits => count(lane.to_u64()),
        };
        let index = context.saturating_sub(plan.first_context.into()) as usize;
        let activity = if plan.activity_bits == 0 { 0 } else { plan.activities[i / BLOCK] };
        plan.maps[usize::from(activity)].get(index).copied().unwrap_or(0)
    };
    base.iter().enumerate().map(class).collect()
}

fn put_bits(bits: impl Iterator<Item = (u64, u32)>, payload: &mut Vec<u8>) {
    let mut used = 0;
    for (number, count) in bits {
        for bit in 0..count {
            if used % 8 == 0 {
                payload.push(0);
            }
            *payload.last_mut().unwrap() |= ((number >> bit & 1) as u8) << (used % 8);
            used += 1;
        }
    }
}

/// Returns a payload that follows the plan. The tables must have the token of an unchanged lane in every class.
pub fn write(dtype: Dtype, plan: &Plan, set: &TableSet, base: &[u8], target: &[u8]) -> Vec<u8> {
    with_lane!(dtype.lane_bytes(), L => write_lanes::<L>(dtype, plan, set, base, target))
}

fn write_lanes<L: Lane>(dtype: Dtype, plan: &Plan, set: &TableSet, base: &[u8], target: &[u8]) -> Vec<u8> {
    let load = |bytes: &[u8]| -> Vec<L> { lanes_of::<L>(bytes).iter().map(|&lane| L::load(lane)).collect() };
    let (base, target) = (load(base), load(target));
    let bits = 8 * L::BYTES as u32;
    let low = plan.low_bits;
    let tables: Vec<&[u16]> = set.classes().collect();
    let mask = 1u64.checked_shl(bits - low).unwrap_or(0).wrapping_sub(1);
    let value =
        |delta: u64| if low == 0 { delta } else { u64::from(plan.center).wrapping_sub(delta.checked_shr(low).unwrap_or(0)) & mask };
    let has = |class: u8, value: u64| {
        tables[usize::from(class) - 1].get(usize::from(token_of(value).0)).is_some_and(|&frequency| frequency != 0)
    };

    let classes = classes_of(dtype, plan, &base);
    let mut deltas = Vec::new();
    let mut exceptions = Vec::new();
    for (i, ((&base, &target), &class)) in base.iter().zip(&target).zip(&classes).enumerate() {
        let delta = L::delta(base, target, dtype.order()).to_u64();
        let possible = match class {
            0 => delta.checked_shr(low).unwrap_or(0) == 0,
            class => has(class, value(delta)),
        };
        if delta != 0 && (!possible || exceptions.len() % 3 != 2 && (i + 1).is_multiple_of(plan.listed)) {
            assert!(class == 0 || has(class, value(0)), "no token for an unchanged lane");
            exceptions.push((i as u32, delta));
            deltas.push(0);
        } else {
            deltas.push(delta);
            if plan.clash == Some(i) {
                exceptions.push((i as u32, 1));
            }
        }
    }

    let header = ConditionedHeader {
        low_bits: low as u8,
        states_log2: plan.states_log2,
        segments_log2: plan.segments_log2,
        activity_bits: plan.activity_bits,
        first_context: plan.first_context.into(),
        context_count: plan.maps[0].len() as u8,
        reserved: 0,
        exception_count: (exceptions.len() as u32).into(),
        center: plan.center.into(),
    };
    let mut payload = header.as_bytes().to_vec();
    for map in &plan.maps {
        payload.extend(map.chunks(2).map(|pair| pair[0] | pair.get(1).copied().unwrap_or(0) << 4));
    }
    let blocks = base.len().div_ceil(BLOCK);
    if plan.activity_bits != 0 {
        put_bits(plan.activities[..blocks].iter().map(|&a| (a.into(), plan.activity_bits.into())), &mut payload);
    }
    payload.extend(exceptions.iter().flat_map(|(position, _)| position.to_le_bytes()));
    payload.extend(exceptions.iter().flat_map(|(_, delta)| delta.to_le_bytes().into_iter().take(L::BYTES)));
    put_bits(deltas.iter().map(|&delta| (delta, low)), &mut payload);

    let symbol = |i: usize| {
        let value = value(deltas[i]);
        let (token, extra) = token_of(value);
        let symbol = Symbol { class: classes[i], token, extra, value };
        if plan.too_large == Some(i) { Symbol { token: tokens_within(bits - low) as u8, extra: 0, ..symbol } } else { symbol }
    };
    let (segments, tile) = (1usize << plan.segments_log2, tile(dtype));
    let tiles = base.len().div_ceil(tile);
    let streams: Vec<Vec<u8>> = (0..segments)
        .map(|s| {
            let coded = |t: usize| {
                let lanes = t * tile..((t + 1) * tile).min(base.len());
                lanes.filter(|&i| classes[i] != 0).map(symbol).collect::<Vec<_>>()
            };
            let tiles = (s * tiles / segments..(s + 1) * tiles / segments).map(coded).collect::<Vec<_>>();
            stream(&tables, &tiles, 1 << plan.states_log2)
        })
        .collect();
    payload.extend(streams[..segments - 1].iter().flat_map(|stream| (stream.len() as u32 / 2).to_le_bytes()));
    payload.resize(payload.len().next_multiple_of(2), 0);
    payload.extend(streams.concat());
    payload
}

/// A coded lane.
struct Symbol {
    class: u8,
    token: u8,
    extra: u32,
    value: u64,
}

/// Encodes the stream of the coded lanes of some tiles. It inverts the decoder's steps, from the last to the first.
fn stream(tables: &[&[u16]], tiles: &[Vec<Symbol>], states: usize) -> Vec<u8> {
    let mut x = vec![1u32 << 16; states];
    let mut words = Vec::new();
    let mut put = |x: &mut u32, least: u64| {
        if u64::from(*x) >= least {
            words.push(*x as u16);
            *x >>= 16;
        }
    };
    for step in tiles.iter().flat_map(|coded| coded.chunks(states)).rev() {
        for round in (0..4).rev() {
            for (x, &Symbol { extra, value, .. }) in x.iter_mut().zip(step).rev() {
                let now = extra.saturating_sub(16 * round).min(16);
                if now != 0 {
                    put(x, 1 << (32 - now));
                    *x = *x << now | (value >> (16 * round)) as u32 & ((1 << now) - 1);
                }
            }
        }
        for (x, &Symbol { class, token, .. }) in x.iter_mut().zip(step).rev() {
            let (table, token) = (tables[usize::from(class) - 1], usize::from(token));
            let frequency = u32::from(table[token]);
            let start: u32 = table[..token].iter().map(|&f| u32::from(f)).sum();
            put(x, u64::from(frequency) << 20);
            *x = (*x / frequency) << 12 | (*x % frequency + start);
        }
    }
    x.iter().flat_map(|x| x.to_le_bytes()).chain(words.iter().rev().flat_map(|word| word.to_le_bytes())).collect()
}

/// Returns a set of `classes` classes for values of `bits` bits. With `all` no token is missing. Without it some tokens are
/// missing, but never the first.
pub fn random_set(random: &mut Random, classes: usize, bits: u32, all: bool) -> TableSet {
    let class = |random: &mut Random| {
        let most = tokens_within(bits);
        let count = if all { most } else { 1 + random.below(most) };
        let mut class: Vec<u16> = (0..count).map(|t| u16::from(all || t == 0 || t + 1 == count || random.once_in(2))).collect();
        let mut left = 4096 - class.iter().sum::<u16>();
        while left != 0 {
            // Some classes are skewed, some flat.
            let token = random.below(count) * random.below(2) * random.below(2);
            let part = 1 + random.below(left.into()) as u16;
            if class[token] != 0 {
                class[token] += part;
                left -= part;
            }
        }
        class
    };
    TableSet::new(&(0..classes).map(|_| class(random)).collect::<Vec<_>>())
}
