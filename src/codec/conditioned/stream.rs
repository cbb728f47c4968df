//! Decoding of streams (`spec/codecs.md` section 4.5).

use super::tables::{Lookup, SCALE, SCALE_LOG2, extra_bits, least_value, tokens_within};
use crate::error::{Error, Result, Rule};
use crate::lane::Lane;
use crate::simd::{Broken, Path, STEP, Words};

/// Least state between symbols, and every state at the end of a stream.
pub(crate) const LEAST_STATE: u32 = 1 << 16;

/// Coded lanes that are decoded between two visits to the values, so that those are still in the nearest cache.
const TILE: usize = 32 * STEP;

/// Decodes the whole of `stream` into a value for each of `classes`, of at most `bits` bits.
///
/// `lookup` holds the classes 1 to K, and `classes` none above K.
pub(crate) fn decode<L: Lane>(
    path: Path,
    lookup: &Lookup,
    stream: &[u8],
    states_log2: u8,
    classes: &[u8],
    bits: u32,
    values: &mut [L::Le],
) -> Result<()> {
    let count = 1usize << states_log2;
    let mut states = [0u32; STEP];
    let (initial, words) = stream.split_at_checked(4 * count).ok_or_else(|| broken("states", "too few bytes"))?;
    for (state, bytes) in states.iter_mut().zip(initial.as_chunks().0) {
        *state = u32::from_le_bytes(*bytes);
        Rule::PayloadStream.check(*state >= LEAST_STATE, "states of at least 2^16", *state)?;
    }
    let mut words = Words { words: words.as_chunks().0, read: 0 };
    let tokens = tokens_within(bits);

    let mut rest = classes.iter().as_slice();
    let mut values = values;
    if count == STEP && L::BYTES <= 4 && path.has_steps() && !lookup.rows.is_empty() {
        let mut tile = [0; TILE];
        while rest.len() >= STEP {
            let size = rest.len().min(TILE) / STEP * STEP;
            let tile = &mut tile[..size];
            path.decode_steps(&lookup.rows, tokens, &mut words, &mut states, &rest[..size], tile).map_err(refused)?;
            let (now, later) = values.split_at_mut(size);
            for (value, &found) in now.iter_mut().zip(&*tile) {
                *value = L::truncate(found.into()).store();
            }
            (rest, values) = (&rest[size..], later);
        }
    }
    for (classes, values) in rest.chunks(count).zip(values.chunks_mut(count)) {
        step::<L>(lookup, tokens, &mut words, &mut states, classes, values).map_err(refused)?;
    }

    let left = words.words.len() - words.read;
    Rule::PayloadStream.check(left == 0, "no words after the last coded lane", left)?;
    let wrong = states[..count].iter().find(|&&state| state != LEAST_STATE);
    Rule::PayloadStream.check(wrong.is_none(), "final states of 2^16", wrong.copied().unwrap_or_default())
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
        let k = usize::from(*class) - 1;
        let slot = *state % SCALE;
        let token = lookup.tokens[k << SCALE_LOG2 | slot as usize];
        if usize::from(token) >= tokens {
            return Err(Broken::Value);
        }
        let slots = lookup.slots[k][usize::from(token)];
        *state = words.renormalize((slots >> 16) * (*state >> SCALE_LOG2) + slot - (slots & 0xFFFF))?;
        *found = token;
        most = most.max(token);
    }
    let mut done = 0;
    let rounds = extra_bits(most).div_ceil(16);
    let mut wide = [0u64; STEP];
    for _ in 0..rounds {
        for ((state, token), value) in states.iter_mut().zip(&found[..classes.len()]).zip(&mut wide) {
            let now = extra_bits(*token).saturating_sub(done).min(16);
            *value |= u64::from(*state & ((1 << now) - 1)) << done;
            *state = words.renormalize(*state >> now)?;
        }
        done += 16;
    }
    for ((value, token), wide) in values.iter_mut().zip(found).zip(wide) {
        *value = L::truncate(least_value(token) | wide).store();
    }
    Ok(())
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
