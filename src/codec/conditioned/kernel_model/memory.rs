//! Memory of the device: accesses out of bounds, misaligned, of what was never written, or racing with another warp panic.

use super::Mode;
use crate::lane::{Lane, lanes_of, lanes_of_mut};
use zerocopy::IntoBytes;

/// Lanes that a thread has of a tile.
pub const LANES: usize = 8;

/// Who touches memory: a warp of a group of warps, and the number of barriers that the group has passed.
#[derive(Debug, Clone, Copy)]
pub struct Who {
    pub group: usize,
    pub phase: u32,
    pub warp: usize,
}

/// Who touched a place since the last barrier that matters to it.
#[derive(Debug, Clone, Copy, Default)]
struct Touched {
    /// Whoever touched it last, and when; phases count from 1.
    group: usize,
    phase: u32,
    /// Warps that read and wrote it then.
    readers: u32,
    writers: u32,
}

impl Touched {
    fn note(&mut self, who: Who, write: bool) {
        if (self.group, self.phase) != (who.group, who.phase) {
            // Groups wait for each other only at the ends of a pass, where all is forgotten.
            let other_group = self.phase != 0 && self.group != who.group;
            assert!(!(other_group && (write || self.writers != 0)), "a race of two groups: {self:?} and {who:?}");
            *self = Self { group: who.group, phase: who.phase, ..Self::default() };
        }
        let others = !(1u32 << who.warp);
        let clash = if write { (self.readers | self.writers) & others } else { self.writers & others };
        assert!(clash == 0, "a race: {self:?} and {who:?}, writing: {write}");
        if write {
            self.writers |= 1 << who.warp;
        } else {
            self.readers |= 1 << who.warp;
        }
    }
}

/// An array in shared memory.
pub struct Shared<T>(Vec<(Option<T>, Touched)>);

impl<T: Copy> Shared<T> {
    pub fn new(size: usize) -> Self {
        Self(vec![(None, Touched::default()); size])
    }

    pub fn get(&mut self, who: Who, at: usize) -> T {
        let (value, touched) = &mut self.0[at];
        touched.note(who, false);
        value.expect("read before it is written")
    }

    pub fn set(&mut self, who: Who, at: usize, new: T) {
        let (value, touched) = &mut self.0[at];
        touched.note(who, true);
        *value = Some(new);
    }
}

/// A payload in global memory. Payloads begin at multiples of 16 bytes and have padding up to the next one.
pub struct Payload<'a> {
    bytes: &'a [u8],
    /// Bytes without the padding.
    pub size: usize,
}

impl<'a> Payload<'a> {
    pub fn new(bytes: &'a [u8], size: usize) -> Self {
        assert_eq!(bytes.len(), size.next_multiple_of(16));
        Self { bytes, size }
    }

    pub fn byte(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    /// Two bytes at an even place.
    pub fn half(&self, at: usize) -> u16 {
        assert!(at.is_multiple_of(2));
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Four bytes at a multiple of four.
    pub fn word(&self, at: usize) -> u32 {
        assert!(at.is_multiple_of(4));
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    /// `size` bytes at any place, at most 8: rare, so a byte at a time.
    pub fn unaligned(&self, at: usize, size: usize) -> u64 {
        (0..size).fold(0, |value, i| value | u64::from(self.byte(at + i)) << (8 * i))
    }

    /// `count` bits from bit `at` on, at most 64: words, and a shift of each pair of them.
    pub fn bits(&self, at: usize, count: u32) -> u64 {
        let (word, shift) = (at / 32, at as u32 % 32);
        let needed = (shift + count).div_ceil(32);
        let bits = (0..needed).fold(0, |bits, i| bits | u128::from(self.word(4 * (word + i as usize))) << (32 * i));
        (bits >> shift & ((1 << count) - 1)) as u64
    }
}

/// The chunk's lanes in global memory.
struct Global {
    bytes: Vec<u8>,
    /// Address of the first byte: all that matters of it is how far it is aligned.
    address: usize,
    touched: Vec<Touched>,
}

impl Global {
    /// Bytes that can be read or written at once: as many as the address is aligned to, at most 16.
    fn width(&self) -> usize {
        1 << (self.address | 16).trailing_zeros()
    }

    fn check(&mut self, who: Who, at: usize, width: usize, write: bool, lane: usize) {
        assert!((self.address + at).is_multiple_of(width), "misaligned");
        for lane in at / lane..(at + width) / lane {
            self.touched[lane].note(who, write);
        }
    }
}

/// Base and output of a chunk, which are one where it is applied in place.
pub struct Memory {
    pub mode: Mode,
    base: Global,
    output: Global,
    /// Lanes that the base has; those past them are zero (base kinds `none` and `prefix`).
    present: usize,
    lane: usize,
    /// Accesses of more than one lane, and of one.
    pub wide: usize,
    pub narrow: usize,
}

impl Memory {
    /// Lanes of a base, placed at an address that is no more aligned than `base_at`; likewise the output.
    pub fn new<L: Lane>(mode: Mode, base: &[u8], lanes: usize, base_at: usize, output_at: usize) -> Self {
        let global = |bytes: Vec<u8>, at: usize| {
            assert!(at.is_multiple_of(L::BYTES), "tensors are aligned to their lanes");
            Global { touched: vec![Touched::default(); bytes.len() / L::BYTES], bytes, address: 256 + at }
        };
        let size = lanes * L::BYTES;
        let output = match mode {
            Mode::InPlace => {
                assert_eq!(base.len(), size, "in place, the base has every lane");
                base.to_vec()
            }
            // What an output holds before must not matter.
            Mode::OutOfPlace => vec![0xA5; size],
            Mode::Dry => Vec::new(),
        };
        let base = if mode == Mode::InPlace { &[] } else { &base[..base.len().min(size)] };
        let present = if mode == Mode::InPlace { lanes } else { base.len() / L::BYTES };
        let (base, output) = (global(base.to_vec(), base_at), global(output, output_at));
        Self { mode, base, output, present, lane: L::BYTES, wide: 0, narrow: 0 }
    }

    /// What lies in the output.
    pub fn output(&self) -> &[u8] {
        &self.output.bytes
    }

    /// All warps of the block have come here, and go on together.
    pub fn block_barrier(&mut self) {
        self.base.touched.fill(Touched::default());
        self.output.touched.fill(Touched::default());
    }

    fn base(&mut self) -> &mut Global {
        if self.mode == Mode::InPlace { &mut self.output } else { &mut self.base }
    }

    pub fn load_lane<L: Lane>(&mut self, who: Who, at: usize) -> L {
        if at >= self.present {
            return L::default();
        }
        self.narrow += 1;
        let lane = self.lane;
        let base = self.base();
        base.check(who, at * lane, lane, false, lane);
        L::load(lanes_of::<L>(&base.bytes)[at])
    }

    pub fn store_lane<L: Lane>(&mut self, who: Who, at: usize, value: L) {
        self.narrow += 1;
        let lane = self.lane;
        self.output.check(who, at * lane, lane, true, lane);
        lanes_of_mut::<L>(&mut self.output.bytes)[at] = value.store();
    }

    /// The `count` lanes from lane `at` on, at most 8, and zeros.
    pub fn load<L: Lane>(&mut self, who: Who, at: usize, count: usize) -> [L; LANES] {
        if count < LANES || at + LANES > self.present {
            return std::array::from_fn(|k| if k < count { self.load_lane(who, at + k) } else { L::default() });
        }
        let lane = self.lane;
        let base = self.base();
        let (start, size) = (at * lane, LANES * lane);
        let width = base.width().min(size);
        for piece in 0..size / width {
            base.check(who, start + piece * width, width, false, lane);
        }
        let bytes = &base.bytes[start..start + size];
        let lanes = std::array::from_fn(|k| L::load(lanes_of::<L>(bytes)[k]));
        self.wide += size / width;
        lanes
    }

    /// Writes the first `count` of `values` to lane `at` and the ones after it.
    pub fn store<L: Lane>(&mut self, who: Who, at: usize, count: usize, values: &[L; LANES]) {
        if count < LANES {
            (0..count).for_each(|k| self.store_lane(who, at + k, values[k]));
            return;
        }
        let lane = self.lane;
        let (start, size) = (at * lane, LANES * lane);
        let width = self.output.width().min(size);
        for piece in 0..size / width {
            self.output.check(who, start + piece * width, width, true, lane);
        }
        let values = values.map(Lane::store);
        self.output.bytes[start..start + size].copy_from_slice(values.as_bytes());
        self.wide += size / width;
    }
}
