//! A warp that decodes a stream: its threads are the states (`spec/codecs.md` section 4.5).

use super::memory::Payload;
use super::status::{PAYLOAD_DELTAS, PAYLOAD_STREAM};
use super::tables::{Lookup, SCALE_LOG2, SYMBOLS};
use super::warp::{PerLane, WARP, ballot, before, per_lane, shfl};
use super::{Counts, Status};

/// The part of a stream that has not been read yet.
///
/// Each thread holds two words of 16 bits in `current` and the two 32 threads further on in `next`: 128 words, of which a round
/// takes at most 32 from the first 64 + 31 on. `next` is loaded when it becomes known, some hundred cycles before it is needed:
/// shared memory and its waits would be no faster than the shuffles.
struct Words {
    /// Byte of the payload where `current` begins, a multiple of 4, and where the stream ends.
    at: usize,
    end: usize,
    current: PerLane<u32>,
    next: PerLane<u32>,
    /// Words of `current` that have been read, at most 63.
    read: usize,
    /// Words of the stream that have not.
    left: usize,
}

impl Words {
    /// The words in the bytes from `start` on, which is even.
    fn open(payload: &Payload<'_>, start: usize, end: usize) -> Self {
        let at = start / 4 * 4;
        let mut words = Self { at, end, current: [0; WARP], next: [0; WARP], read: (start - at) / 2, left: (end - start) / 2 };
        words.current = words.load(payload, at);
        words.next = words.load(payload, at + 4 * WARP);
        words
    }

    fn load(&self, payload: &Payload<'_>, at: usize) -> PerLane<u32> {
        per_lane(|lane| if at + 4 * lane < self.end { payload.word(at + 4 * lane) } else { 0 })
    }

    /// The next words, for those who need one in their order; `None` if there are not so many.
    fn take(&mut self, payload: &Payload<'_>, needy: &PerLane<bool>) -> Option<PerLane<u32>> {
        let mask = ballot(needy);
        let count = mask.count_ones() as usize;
        if count > self.left {
            return None;
        }
        let place = per_lane(|lane| self.read + (mask & before(lane)).count_ones() as usize);
        let owner = place.map(|place| place / 2);
        let (current, next) = (shfl(&self.current, &owner), shfl(&self.next, &owner));
        let words = per_lane(|lane| {
            assert!(place[lane] < 4 * WARP);
            let pair = if place[lane] < 2 * WARP { current[lane] } else { next[lane] };
            pair >> (16 * (place[lane] % 2)) & 0xFFFF
        });
        self.left -= count;
        self.read += count;
        if self.read >= 2 * WARP {
            self.read -= 2 * WARP;
            self.at += 4 * WARP;
            self.current = self.next;
            self.next = self.load(payload, self.at + 4 * WARP);
        }
        Some(words)
    }
}

/// Number of extra bits of a token.
fn extra_bits(token: u32) -> u32 {
    if token < 16 { 0 } else { token / 2 - 5 }
}

/// A stream that is being decoded; all of it is in registers.
pub struct Stream {
    words: Words,
    states: PerLane<u32>,
    /// Number of tokens whose values fit.
    tokens: u32,
}

impl Stream {
    /// Opens the stream in these bytes of the payload; they begin at an even one.
    pub fn open(payload: &Payload<'_>, start: usize, end: usize, count: usize, bits: u32) -> Result<Self, Status> {
        if end - start < 4 * count {
            return Err(PAYLOAD_STREAM);
        }
        // States begin at multiples of 2, so each is two loads.
        let states = per_lane(|lane| match lane < count {
            true => u32::from(payload.half(start + 4 * lane)) | u32::from(payload.half(start + 4 * lane + 2)) << 16,
            false => 1 << 16,
        });
        if ballot(&states.map(|state| state < 1 << 16)) != 0 {
            return Err(PAYLOAD_STREAM);
        }
        let tokens = if bits <= 4 { 1 << bits } else { 16 + 2 * (bits - 4) };
        Ok(Self { words: Words::open(payload, start + 4 * count, end), states, tokens })
    }

    /// Decodes a step: a value for each of the first `active` threads, whose coded lanes have these classes.
    pub fn step(
        &mut self,
        payload: &Payload<'_>,
        lookup: &Lookup,
        classes: &PerLane<u8>,
        active: usize,
        counts: &mut Counts,
    ) -> Result<PerLane<u64>, Status> {
        counts.steps += 1;
        let on = per_lane(|lane| lane < active);
        let slot = self.states.map(|state| state & 0xFFF);
        let row = per_lane(|lane| if on[lane] { usize::from(classes[lane]) - 1 } else { 0 });
        // Two look-ups that depend on each other, and rarely a third.
        let mut at = per_lane(|lane| match on[lane] {
            true => {
                let bucket = row[lane] << (SCALE_LOG2 - lookup.shift) | (slot[lane] >> lookup.shift) as usize;
                row[lane] * SYMBOLS + usize::from(lookup.buckets[bucket])
            }
            false => 0,
        });
        let symbol = loop {
            let symbol = per_lane(|lane| if on[lane] { lookup.symbols[at[lane]] } else { 0 });
            let past = per_lane(|lane| on[lane] && slot[lane] - (symbol[lane] & 0xFFF) > symbol[lane] >> 12 & 0xFFF);
            if ballot(&past) == 0 {
                break symbol;
            }
            at = per_lane(|lane| at[lane] + usize::from(past[lane]));
            counts.searches += 1;
        };
        let token = symbol.map(|symbol| symbol >> 24);
        if ballot(&token.map(|token| token >= self.tokens)) != 0 {
            return Err(PAYLOAD_DELTAS);
        }
        let next = per_lane(|lane| {
            let (start, frequency) = (symbol[lane] & 0xFFF, (symbol[lane] >> 12 & 0xFFF) + 1);
            if on[lane] { frequency * (self.states[lane] >> SCALE_LOG2) + slot[lane] - start } else { self.states[lane] }
        });
        self.renormalize(payload, next)?;

        let extra = token.map(extra_bits);
        let mut values = per_lane(|lane| match token[lane] {
            t @ 0..16 => u64::from(t),
            t => u64::from(2 + t % 2) << extra[lane],
        });
        let mut done = 0;
        while ballot(&extra.map(|extra| extra > done)) != 0 {
            let now = extra.map(|extra| extra.saturating_sub(done).min(16));
            values = per_lane(|lane| values[lane] | u64::from(self.states[lane] & ((1 << now[lane]) - 1)) << done);
            self.renormalize(payload, per_lane(|lane| self.states[lane] >> now[lane]))?;
            done += 16;
            counts.extra_rounds += 1;
        }
        Ok(values)
    }

    /// Makes `states` the states, after a word for each that needs one.
    fn renormalize(&mut self, payload: &Payload<'_>, states: PerLane<u32>) -> Result<(), Status> {
        let needy = states.map(|state| state < 1 << 16);
        let words = self.words.take(payload, &needy).ok_or(PAYLOAD_STREAM)?;
        self.states = per_lane(|lane| if needy[lane] { states[lane] << 16 | words[lane] } else { states[lane] });
        Ok(())
    }

    /// Checks that the stream has come to its end.
    pub fn finish(&self) -> Result<(), Status> {
        let wrong = self.states.map(|state| state != 1 << 16);
        if self.words.left != 0 || ballot(&wrong) != 0 { Err(PAYLOAD_STREAM) } else { Ok(()) }
    }
}
