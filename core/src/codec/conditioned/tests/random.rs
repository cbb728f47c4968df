//! Pseudorandom lanes and table sets, the same in every run. Some resemble those of checkpoints, others do not.

use crate::codec::conditioned::TableSet;
use crate::codec::conditioned::tables::SCALE;
use crate::lane::{Dtype, Lane, lanes_of_mut, with_lane};
use crate::prelude::*;

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        random.next();
        random
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn any(&mut self) -> u64 {
        (self.next() << 32) ^ self.next()
    }

    /// Returns arbitrary bits, few bits, or the bits of a zero, infinity or NaN.
    fn lane(&mut self, dtype: Dtype) -> u64 {
        let bits = 8 * dtype.lane_bytes() as u32;
        let any = self.any();
        match self.below(4) {
            0 => any,
            1 => any % (1 << ((any >> 40) as u32 % bits.min(63))),
            2 => [0, u64::MAX, 1, 1 << (bits - 1), u64::MAX >> (65 - bits)][any as usize % 5],
            // An exponent of all ones or all zeros.
            _ => {
                let mantissa = dtype.mantissa_bits().unwrap_or(bits / 2);
                let top = [0, u64::MAX][(any >> 60) as usize % 2] << mantissa;
                (top ^ ((any & 1) << (bits - 1))) | [0, 1, 1 << (mantissa - 1)][(any >> 20) as usize % 3]
            }
        }
    }

    /// Returns lanes. Seven of eight are random integers whose upper bits are zero, the same number of bits for all lanes of a
    /// call, which is at most half of the lane. The others are as in `lane`.
    pub fn lanes(&mut self, dtype: Dtype, count: usize) -> Vec<u8> {
        let width = dtype.lane_bytes();
        let shift = self.below(8 * width as u64 / 2 + 1);
        let lane = |_| {
            let lane =
                if self.below(8) == 0 { self.lane(dtype) } else { (self.any() << (64 - 8 * width) >> (64 - 8 * width)) >> shift };
            lane.to_le_bytes()[..width].to_vec()
        };
        (0..count).flat_map(lane).collect()
    }

    /// Returns `base` with about `rate` of 1,024 lanes changed.
    pub fn changed(&mut self, dtype: Dtype, base: &[u8], rate: u64) -> Vec<u8> {
        let mut target = base.to_vec();
        let largest = self.below(4);
        with_lane!(dtype.lane_bytes(), L => {
            for lane in lanes_of_mut::<L>(&mut target) {
                if self.below(1024) < rate {
                    let delta = match (largest, self.below(16)) {
                        (0, _) => 1 + self.below(2),
                        (1, _) => 1 + self.below(40),
                        (_, 0) => self.any(),
                        _ => self.any() >> (20 + self.below(44)),
                    };
                    let value = if largest == 3 { L::from_u64(self.lane(dtype)) } else { L::apply(L::load(*lane), L::from_u64(delta), dtype.order()) };
                    *lane = value.store();
                }
            }
        });
        target
    }

    /// Returns a set of `classes` classes, with tokens up to `most`.
    pub fn set(&mut self, classes: usize, most: usize) -> TableSet {
        let class = |_| {
            let count = 1 + self.below(most as u64) as usize;
            let mut class = vec![0; count];
            class[count - 1] = 1;
            let mut left = SCALE as u16 - 1;
            while left > 0 {
                let part = 1 + self.below(u64::from(left)) as u16;
                // Every part of the frequencies goes to a random token. A part that is a multiple of 3 is cut to 40, so that
                // more tokens get one.
                let token = self.below(count as u64) * self.below(5) / 4;
                class[token as usize % count] += part.min(if part.is_multiple_of(3) { 40 } else { part });
                left = SCALE as u16 - class.iter().sum::<u16>();
            }
            class
        };
        TableSet::new(&(0..classes).map(class).collect::<Vec<_>>())
    }
}
