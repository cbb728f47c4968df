//! Decoding and encoding of streams (`spec/codecs.md` section 4.5).

use super::tables::{Lookup, SCALE, SCALE_LOG2, base_value, extra_bits, token_of, tokens_within};
use crate::codec::simd::{DecodeTable, EncodeTable, Fault, GROUP, Platform, Prefetch, ReverseWriter, STEP, StreamSteps, Words};
use crate::error::{Error, Result, Rule};
use crate::lane::Lane;
use crate::prelude::*;

/// Lower bound of a state between symbols. Also the value of every state at the end of a stream.
pub const RANS_LOWER_BOUND: u32 = 1 << 16;

/// Whole steps of coded lanes. The last step of a tile is padded with class 0, which gives 0 and leaves its state unchanged.
pub(super) struct CodedSteps<'a, T> {
    pub classes: &'a [u8],
    /// Receives one value per class.
    pub values: &'a mut [T],
    /// Receives masks of nonzero values, one per 16 values.
    pub changed: &'a mut [u16],
}

impl<T> CodedSteps<'_, T> {
    /// Splits off the first `count` lanes, which are whole steps of at least 16 lanes.
    fn split(&mut self, count: usize) -> (CodedSteps<'_, T>, CodedSteps<'_, T>) {
        let (classes, rest_of_classes) = self.classes.split_at(count);
        let (values, rest_of_values) = self.values.split_at_mut(count);
        let (changed, rest_of_changed) = self.changed.split_at_mut(count / GROUP);
        let rest = CodedSteps { classes: rest_of_classes, values: rest_of_values, changed: rest_of_changed };
        (CodedSteps { classes, values, changed }, rest)
    }
}

/// State of the decoding of a stream.
pub(super) struct Stream<'a> {
    words: Words<'a>,
    states: [u32; STEP],
    count: usize,
    /// Number of tokens whose values are allowed.
    tokens: usize,
}

impl<'a> Stream<'a> {
    /// Starts to decode `stream`, with `count` states and values of at most `bits` bits.
    pub fn begin(stream: &'a [u8], count: usize, bits: u32) -> Result<Self> {
        let mut states = [0u32; STEP];
        let (initial, words) =
            stream.split_at_checked(4 * count).ok_or_else(|| Rule::PayloadStream.broken("states", "too few bytes"))?;
        for (state, bytes) in states.iter_mut().zip(initial.as_chunks().0) {
            *state = u32::from_le_bytes(*bytes);
            Rule::PayloadStream.check(*state >= RANS_LOWER_BOUND, "states of at least 2^16", *state)?;
        }
        Ok(Self { words: Words { words: words.as_chunks().0, read: 0 }, states, count, tokens: tokens_within(bits) })
    }

    /// Decodes the next steps. If `lookup` has K classes, no class exceeds K. Lines of `prefetch` may be requested meanwhile.
    pub fn decode<L: Lane>(
        &mut self,
        platform: Platform,
        lookup: &Lookup,
        steps: CodedSteps<'_, L::Le>,
        prefetch: Option<Prefetch<'_>>,
    ) -> Result<()> {
        let (count, tokens) = (self.count, self.tokens);
        // Without tables, the look-up table is empty and no lane is coded.
        if self.has_vector_code::<L>(platform) && !steps.classes.is_empty() {
            let table = DecodeTable { entries: &lookup.entries, tokens };
            return platform.decode_steps::<L, 1>(count, table, [self.steps(steps)], prefetch).map_err(to_error);
        }
        let CodedSteps { classes, values, changed } = steps;
        for (classes, values) in classes.chunks(count).zip(values.chunks_mut(count)) {
            step::<L>(lookup, tokens, &mut self.words, &mut self.states, classes, values).map_err(to_error)?;
        }
        for (values, changed) in values.chunks(GROUP).zip(changed) {
            let mask = |mask, value: &L::Le| mask << 1 | u16::from(L::load(*value) != L::default());
            *changed = values.iter().rev().fold(0, mask);
        }
        Ok(())
    }

    /// [`decode`](Self::decode) for two streams that began with the same arguments, with `steps` of each.
    pub fn decode_two<L: Lane>(
        [first, second]: [&mut Self; 2],
        platform: Platform,
        lookup: &Lookup,
        [mut steps, mut other_steps]: [CodedSteps<'_, L::Le>; 2],
        prefetch: Option<Prefetch<'_>>,
    ) -> Result<()> {
        let common = steps.classes.len().min(other_steps.classes.len());
        if !first.has_vector_code::<L>(platform) || common == 0 {
            first.decode::<L>(platform, lookup, steps, None)?;
            return second.decode::<L>(platform, lookup, other_steps, None);
        }
        let (steps, rest) = steps.split(common);
        let (other_steps, other_rest) = other_steps.split(common);
        let (count, table) = (first.count, DecodeTable { entries: &lookup.entries, tokens: first.tokens });
        let streams = [first.steps(steps), second.steps(other_steps)];
        platform.decode_steps::<L, 2>(count, table, streams, prefetch).map_err(to_error)?;
        first.decode::<L>(platform, lookup, rest, None)?;
        second.decode::<L>(platform, lookup, other_rest, None)
    }

    fn has_vector_code<L: Lane>(&self, platform: Platform) -> bool {
        self.count >= GROUP && L::BYTES <= 4 && platform.has_steps()
    }

    fn steps<'s, T>(&'s mut self, steps: CodedSteps<'s, T>) -> StreamSteps<'s, 'a, T> {
        let CodedSteps { classes, values, changed } = steps;
        StreamSteps { words: &mut self.words, states: &mut self.states, classes, values, changed }
    }

    /// Checks that the whole stream was read, and that every state has its final value.
    pub fn end(self) -> Result<()> {
        let left = self.words.words.len() - self.words.read;
        Rule::PayloadStream.check(left == 0, "no words after the last coded lane", left)?;
        let wrong = self.states[..self.count].iter().find(|&&state| state != RANS_LOWER_BOUND);
        Rule::PayloadStream.check(wrong.is_none(), "final states of 2^16", wrong.copied().unwrap_or_default())
    }
}

/// Decodes one step, lane by lane, as the spec defines it.
#[inline]
fn step<L: Lane>(
    lookup: &Lookup,
    tokens: usize,
    words: &mut Words<'_>,
    states: &mut [u32; STEP],
    classes: &[u8],
    values: &mut [L::Le],
) -> Result<(), Fault> {
    let mut found_tokens = [0u8; STEP];
    let mut largest = 0;
    for ((state, class), found) in states.iter_mut().zip(classes).zip(&mut found_tokens) {
        let slot = *state % SCALE;
        let entry = lookup.entries[usize::from(*class) << SCALE_LOG2 | slot as usize];
        let (start, frequency, token) = (entry & 0xFFF, (entry >> 12 & 0xFFF) + 1, (entry >> 24) as u8);
        if usize::from(token) >= tokens {
            return Err(Fault::Value);
        }
        *state = words.renormalize(frequency * (*state >> SCALE_LOG2) + slot - start)?;
        *found = token;
        largest = largest.max(token);
    }
    let mut wide = [0u64; STEP];
    for round in 0..extra_bits(largest).div_ceil(16) {
        for ((state, token), value) in states.iter_mut().zip(&found_tokens[..classes.len()]).zip(&mut wide) {
            let bits = extra_bits(*token).saturating_sub(16 * round).min(16);
            *value |= u64::from(*state & ((1 << bits) - 1)) << (16 * round);
            *state = words.renormalize(*state >> bits)?;
        }
    }
    for ((value, token), wide) in values.iter_mut().zip(found_tokens).zip(wide) {
        *value = L::from_u64(base_value(token) | wide).store();
    }
    Ok(())
}

/// Encodes one value per element of `classes`, which consists of whole steps of `count` lanes, and appends the stream to `out`.
/// Encodes from the last value to the first, because rANS decodes in reverse order. If a class lacks the token of its value, the
/// value becomes 0, whose token every class has. Returns the indexes of these values. `words` is a reused buffer.
pub(super) fn encode<L: Lane>(
    platform: Platform,
    table: &EncodeTable,
    count: usize,
    classes: &[u8],
    values: &mut [L::Le],
    words: &mut Vec<u16>,
    out: &mut Vec<u8>,
) -> Vec<usize> {
    // A symbol emits at most one word. Each 16 extra bits emit at most one more.
    let capacity = classes.len() * (1 + L::BYTES.div_ceil(2)) + ReverseWriter::SPARE;
    if words.len() <= capacity {
        words.resize(capacity + 1, 0);
    }
    let mut words = ReverseWriter { words, next: capacity };
    let mut states = [RANS_LOWER_BOUND; STEP];
    let mut missing = Vec::new();
    let mut left = classes.len();
    loop {
        left = platform.encode_steps::<L>(count, table, &classes[..left], &values[..left], &mut states, &mut words);
        if left == 0 {
            break;
        }
        let range = left - count..left;
        for j in range.clone() {
            if !table.has(classes[j], token_of(L::load(values[j]).to_u64()).0) {
                values[j] = L::default().store();
                missing.push(j);
            }
        }
        encode_step::<L>(table, &classes[range.clone()], &values[range.clone()], &mut states, &mut words);
        left = range.start;
    }
    out.extend(states[..count].iter().flat_map(|state| state.to_le_bytes()));
    out.extend(words.words[words.next + 1..=capacity].iter().flat_map(|word| word.to_le_bytes()));
    missing
}

/// Encodes one step: the inverse of [`step`].
fn encode_step<L: Lane>(
    table: &EncodeTable,
    classes: &[u8],
    values: &[L::Le],
    states: &mut [u32; STEP],
    words: &mut ReverseWriter<'_>,
) {
    let values = values.iter().map(|value| L::load(*value).to_u64());
    let most_bits = values.clone().map(|value| token_of(value).1).max().unwrap_or(0);
    for round in (0..most_bits.div_ceil(16)).rev() {
        for (state, value) in states.iter_mut().zip(values.clone()).rev() {
            let bits = token_of(value).1.saturating_sub(16 * round).min(16);
            let x = words.renormalize(*state, 1 << (32 - bits));
            *state = x << bits | (value >> (16 * round)) as u32 & ((1 << bits) - 1);
        }
    }
    for ((state, value), class) in states.iter_mut().zip(values).zip(classes).rev() {
        *state = table.encode(*class, token_of(value).0, *state, words);
    }
}

#[cold]
fn to_error(why: Fault) -> Error {
    match why {
        Fault::Short => Rule::PayloadStream.broken("a word for every state that needs one", "the end of the stream"),
        Fault::Value => Rule::PayloadDeltas.broken("values that fit", "a token of larger values"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode_on_every_platform<L: Lane>(table: &EncodeTable, count: usize, classes: &[u8], values: &[u64]) {
        let results = Platform::available().into_iter().map(|platform| {
            let mut values: Vec<L::Le> = values.iter().map(|value| L::from_u64(*value).store()).collect();
            let (mut words, mut out) = (Vec::new(), Vec::new());
            let mut missing = encode::<L>(platform, table, count, classes, &mut values, &mut words, &mut out);
            missing.sort_unstable();
            (out, missing, values.into_iter().map(L::load).collect::<Vec<_>>())
        });
        let results: Vec<_> = results.collect();
        assert!(results.iter().all(|result| *result == results[0]));
    }

    proptest! {
        #[test]
        fn streams_are_the_same_on_every_platform(
            lanes in proptest::collection::vec((0u8..4, any::<u64>(), 0u32..70), 0..300),
            states_log2 in 0u32..=5,
            gap in 0u8..130,
        ) {
            let mut table = EncodeTable::default();
            for class in 1..4 {
                // Each class lacks one token, which the other classes may have.
                for token in (0..180).filter(|token| *token == 0 || *token != gap + class) {
                    table.set(class, token, u32::from(token) * 20, 20 + u32::from(class));
                }
            }
            let whole = lanes.len() >> states_log2 << states_log2;
            let classes: Vec<u8> = lanes[..whole].iter().map(|lane| lane.0).collect();
            let value = |lane: &(u8, u64, u32)| if lane.0 == 0 { 0 } else { lane.1.checked_shr(lane.2).unwrap_or(0) };
            let values: Vec<u64> = lanes[..whole].iter().map(value).collect();
            encode_on_every_platform::<u8>(&table, 1 << states_log2, &classes, &values);
            encode_on_every_platform::<u16>(&table, 1 << states_log2, &classes, &values);
            encode_on_every_platform::<u32>(&table, 1 << states_log2, &classes, &values);
            encode_on_every_platform::<u64>(&table, 1 << states_log2, &classes, &values);
        }
    }
}
