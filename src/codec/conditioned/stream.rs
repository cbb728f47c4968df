//! Streams, decoded and encoded (`spec/codecs.md` section 4.5).

use super::tables::{Lookup, SCALE, SCALE_LOG2, extra_bits, least_value, token_of, tokens_within};
use crate::codec::simd::{Backwards, Broken, Divisors, GROUP, Path, STEP, Words};
use crate::dispatch::vectorized;
use crate::error::{Error, Result, Rule};
use crate::lane::Lane;

/// Least state between symbols, and every state at the end of a stream.
pub(crate) const LEAST_STATE: u32 = 1 << 16;

/// Lanes that are decoded between two visits to the values, so that those are still in the nearest cache.
const BATCH: usize = 32 * STEP;

/// A stream that is decoded.
pub(super) struct Stream<'a> {
    words: Words<'a>,
    states: [u32; STEP],
    count: usize,
    /// Number of tokens whose values are allowed.
    tokens: usize,
}

impl<'a> Stream<'a> {
    /// Begins to decode `stream`, which has `count` states and values of at most `bits` bits.
    pub fn begin(stream: &'a [u8], count: usize, bits: u32) -> Result<Self> {
        let mut states = [0u32; STEP];
        let (initial, words) = stream.split_at_checked(4 * count).ok_or_else(|| broken("states", "too few bytes"))?;
        for (state, bytes) in states.iter_mut().zip(initial.as_chunks().0) {
            *state = u32::from_le_bytes(*bytes);
            Rule::PayloadStream.check(*state >= LEAST_STATE, "states of at least 2^16", *state)?;
        }
        Ok(Self { words: Words { words: words.as_chunks().0, read: 0 }, states, count, tokens: tokens_within(bits) })
    }

    /// Decodes a value for each of `classes`, which are whole steps, and a mask for each 16 of them of those that are not 0. A
    /// tile's last step is filled up with class 0, which gives 0 and leaves its states alone.
    ///
    /// `lookup` holds the classes 1 to K, and `classes` none above K.
    pub fn decode<L: Lane>(
        &mut self,
        path: Path,
        lookup: &Lookup,
        classes: &[u8],
        values: &mut [L::Le],
        changed: &mut [u16],
    ) -> Result<()> {
        let Self { words, states, count, tokens } = self;
        let count = *count;
        if count >= GROUP && L::BYTES <= 4 && path.has_steps() {
            let mut batch = [0; BATCH];
            let batches = classes.chunks(BATCH).zip(values.chunks_mut(BATCH)).zip(changed.chunks_mut(BATCH / GROUP));
            for ((classes, values), changed) in batches {
                let batch = &mut batch[..classes.len()];
                path.decode_steps(count, &lookup.entries, *tokens, words, states, classes, batch, changed).map_err(refused)?;
                narrow::<L>(batch, values);
            }
            return Ok(());
        }
        for (classes, values) in classes.chunks(count).zip(values.chunks_mut(count)) {
            step::<L>(lookup, *tokens, words, states, classes, values).map_err(refused)?;
        }
        for (values, changed) in values.chunks(GROUP).zip(changed) {
            let mask = |mask, value: &L::Le| mask << 1 | u16::from(L::load(*value) != L::default());
            *changed = values.iter().rev().fold(0, mask);
        }
        Ok(())
    }

    /// Checks that the last coded lane was the stream's last.
    pub fn end(self) -> Result<()> {
        let left = self.words.words.len() - self.words.read;
        Rule::PayloadStream.check(left == 0, "no words after the last coded lane", left)?;
        let wrong = self.states[..self.count].iter().find(|&&state| state != LEAST_STATE);
        Rule::PayloadStream.check(wrong.is_none(), "final states of 2^16", wrong.copied().unwrap_or_default())
    }
}

/// Values in lanes.
fn narrow<L: Lane>(found: &[u32], values: &mut [L::Le]) {
    vectorized(
        #[inline(always)]
        || values.iter_mut().zip(found).for_each(|(value, &found)| *value = L::from_u64(found.into()).store()),
    );
}

/// One step: the definition, lane by lane.
#[inline]
fn step<L: Lane>(
    lookup: &Lookup,
    tokens: usize,
    words: &mut Words<'_>,
    states: &mut [u32; STEP],
    classes: &[u8],
    values: &mut [L::Le],
) -> Result<(), Broken> {
    let mut found = [0u8; STEP];
    let mut most = 0;
    for ((state, class), found) in states.iter_mut().zip(classes).zip(&mut found) {
        let slot = *state % SCALE;
        let entry = lookup.entries[usize::from(*class) << SCALE_LOG2 | slot as usize];
        let (start, frequency, token) = (entry & 0xFFF, (entry >> 12 & 0xFFF) + 1, (entry >> 24) as u8);
        if usize::from(token) >= tokens {
            return Err(Broken::Value);
        }
        *state = words.renormalize(frequency * (*state >> SCALE_LOG2) + slot - start)?;
        *found = token;
        most = most.max(token);
    }
    let mut wide = [0u64; STEP];
    for round in 0..extra_bits(most).div_ceil(16) {
        for ((state, token), value) in states.iter_mut().zip(&found[..classes.len()]).zip(&mut wide) {
            let now = extra_bits(*token).saturating_sub(16 * round).min(16);
            *value |= u64::from(*state & ((1 << now) - 1)) << (16 * round);
            *state = words.renormalize(*state >> now)?;
        }
    }
    for ((value, token), wide) in values.iter_mut().zip(found).zip(wide) {
        *value = L::from_u64(least_value(token) | wide).store();
    }
    Ok(())
}

/// Appends the stream of a value for each of `classes`, which are whole steps of `count`, to `out`: coded back to front, because a
/// decoder undoes the last symbol first. Values whose tokens their classes lack become 0, whose token they have; returns which.
/// `words` is a buffer.
pub(super) fn encode<L: Lane>(
    path: Path,
    divisors: &Divisors,
    count: usize,
    classes: &[u8],
    values: &mut [L::Le],
    words: &mut Vec<u16>,
    out: &mut Vec<u8>,
) -> Vec<usize> {
    // A symbol gives at most a word, and each 16 extra bits another one.
    let room = classes.len() * (1 + L::BYTES.div_ceil(2)) + Backwards::SPARE;
    if words.len() <= room {
        words.resize(room + 1, 0);
    }
    let mut words = Backwards { words, next: room };
    let mut states = [LEAST_STATE; STEP];
    let mut missing = Vec::new();
    let mut left = classes.len();
    loop {
        left = path.encode_steps::<L>(count, divisors, &classes[..left], &values[..left], &mut states, &mut words);
        if left == 0 {
            break;
        }
        let now = left - count..left;
        for j in now.clone() {
            if !divisors.has(classes[j], token_of(L::load(values[j]).to_u64()).0) {
                values[j] = L::default().store();
                missing.push(j);
            }
        }
        encode_step::<L>(divisors, &classes[now.clone()], &values[now.clone()], &mut states, &mut words);
        left = now.start;
    }
    out.extend(states[..count].iter().flat_map(|state| state.to_le_bytes()));
    out.extend(words.words[words.next + 1..=room].iter().flat_map(|word| word.to_le_bytes()));
    missing
}

/// Undoes [`step`].
fn encode_step<L: Lane>(
    divisors: &Divisors,
    classes: &[u8],
    values: &[L::Le],
    states: &mut [u32; STEP],
    words: &mut Backwards<'_>,
) {
    let values = values.iter().map(|value| L::load(*value).to_u64());
    let most = values.clone().map(|value| token_of(value).1).max().unwrap_or(0);
    for round in (0..most.div_ceil(16)).rev() {
        for (state, value) in states.iter_mut().zip(values.clone()).rev() {
            let bits = token_of(value).1.saturating_sub(16 * round).min(16);
            let x = words.make_room(*state, 1 << (32 - bits));
            *state = x << bits | (value >> (16 * round)) as u32 & ((1 << bits) - 1);
        }
    }
    for ((state, value), class) in states.iter_mut().zip(values).zip(classes).rev() {
        *state = divisors.encode(*class, token_of(value).0, *state, words);
    }
}

#[cold]
fn broken(expected: &str, found: &str) -> Error {
    Rule::PayloadStream.broken(expected, found)
}

#[cold]
fn refused(why: Broken) -> Error {
    match why {
        Broken::Short => broken("a word for every state that needs one", "the end of the stream"),
        Broken::Value => Rule::PayloadDeltas.broken("values that fit", "a token of larger ones"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode_on_every_path<L: Lane>(divisors: &Divisors, count: usize, classes: &[u8], values: &[u64]) {
        let results = Path::available().into_iter().map(|path| {
            let mut values: Vec<L::Le> = values.iter().map(|value| L::from_u64(*value).store()).collect();
            let (mut words, mut out) = (Vec::new(), Vec::new());
            let mut missing = encode::<L>(path, divisors, count, classes, &mut values, &mut words, &mut out);
            missing.sort_unstable();
            (out, missing, values.into_iter().map(L::load).collect::<Vec<_>>())
        });
        let results: Vec<_> = results.collect();
        assert!(results.iter().all(|result| *result == results[0]));
    }

    proptest! {
        #[test]
        fn streams_are_the_same_on_every_path(
            lanes in proptest::collection::vec((0u8..4, any::<u64>(), 0u32..70), 0..300),
            states_log2 in 0u32..=5,
            gap in 0u8..130,
        ) {
            let mut divisors = Divisors::default();
            for class in 1..4 {
                // Every token has slots but one, which the other classes may have.
                for token in (0..180).filter(|token| *token == 0 || *token != gap + class) {
                    divisors.set(class, token, u32::from(token) * 20, 20 + u32::from(class));
                }
            }
            let whole = lanes.len() >> states_log2 << states_log2;
            let classes: Vec<u8> = lanes[..whole].iter().map(|lane| lane.0).collect();
            let value = |lane: &(u8, u64, u32)| if lane.0 == 0 { 0 } else { lane.1.checked_shr(lane.2).unwrap_or(0) };
            let values: Vec<u64> = lanes[..whole].iter().map(value).collect();
            encode_on_every_path::<u8>(&divisors, 1 << states_log2, &classes, &values);
            encode_on_every_path::<u16>(&divisors, 1 << states_log2, &classes, &values);
            encode_on_every_path::<u32>(&divisors, 1 << states_log2, &classes, &values);
            encode_on_every_path::<u64>(&divisors, 1 << states_log2, &classes, &values);
        }
    }
}
