//! Generates checkpoints of many kinds with integer arithmetic: the bytes are the same on every machine.

use super::Xorshift;
use tpde::{Dtype, MemoryCheckpoint, TensorInfo};

/// A tensor with its bytes.
pub type Held = (TensorInfo, Vec<u8>);

/// A base and a target of one kind.
pub struct Input {
    pub name: &'static str,
    pub base: Vec<Held>,
    pub target: Vec<Held>,
}

impl Input {
    pub fn base(&self) -> MemoryCheckpoint<'_> {
        checkpoint(&self.base)
    }

    pub fn target(&self) -> MemoryCheckpoint<'_> {
        checkpoint(&self.target)
    }
}

fn checkpoint(held: &[Held]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(held.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

/// How a lane changes.
#[derive(Clone, Copy)]
enum Change {
    /// By a small number that is added to its bits, or subtracted from them, as an integer: 1 in half of the cases, 2 in a
    /// quarter, and so on.
    Step,
    /// To random bits.
    Any,
    /// By a flipped sign.
    Sign,
}

struct Maker {
    random: Xorshift,
    base: Vec<Held>,
    target: Vec<Held>,
}

impl Maker {
    fn new(name: &str) -> Self {
        let seed =
            name.bytes().fold(0x9E37_79B9_7F4A_7C15, |seed: u64, byte| (seed ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
        Self { random: Xorshift(seed | 1), base: Vec::new(), target: Vec::new() }
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.random.next() >> 24) % n
    }

    /// A nearly normal value of 18 bits. Its spread depends on the row.
    fn weight(&mut self, row: u64) -> f32 {
        let sum: i64 = (0..4).map(|_| self.below(1 << 16) as i64 - (1 << 15)).sum();
        sum as f32 / (1u64 << (20 + row % 4)) as f32
    }

    /// A matrix of weights, encoded in `dtype`.
    fn weights(&mut self, dtype: Dtype, rows: u64, columns: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        for lane in 0..rows * columns {
            let weight = self.weight(lane / columns);
            match dtype {
                Dtype::F32 => bytes.extend(weight.to_le_bytes()),
                Dtype::F64 => bytes.extend((f64::from(weight) + self.below(1 << 20) as f64 / (1u64 << 60) as f64).to_le_bytes()),
                Dtype::Bf16 => bytes.extend(((weight.to_bits() >> 16) as u16).to_le_bytes()),
                // Cuts the weight to F16 without rounding. A weight below 2^-14 becomes another value, which no test depends on.
                Dtype::F16 => {
                    let bits = weight.to_bits();
                    let exponent = (bits >> 23 & 0xFF).saturating_sub(112).min(30);
                    bytes.extend(((bits >> 31 << 15 | exponent << 10 | bits >> 13 & 0x3FF) as u16).to_le_bytes());
                }
                Dtype::F8E4m3 => bytes.push((weight.to_bits() >> 24 & 0x80) as u8 | (weight.to_bits() >> 20 & 0x7F) as u8),
                Dtype::I64 => bytes.extend((lane as i64 * 7).to_le_bytes()),
                Dtype::Bool => bytes.push(u8::from(weight > 0.0)),
                _ => {
                    let value = (weight * 64.0) as i64;
                    bytes.extend(&value.to_le_bytes()[..dtype.lane_bytes()]);
                }
            }
        }
        bytes
    }

    /// Changes one lane.
    fn change(&mut self, dtype: Dtype, lane: &mut [u8], how: Change) {
        let width = lane.len();
        let mut word = [0; 8];
        word[..width].copy_from_slice(lane);
        let value = u64::from_le_bytes(word);
        let new = match how {
            Change::Any => self.random.next(),
            Change::Sign => value ^ 1 << (8 * width - 1),
            Change::Step => {
                let size = 1 + u64::from(self.random.next().trailing_zeros());
                let up = self.below(2) == 0;
                if up { value.wrapping_add(size) } else { value.wrapping_sub(size) }
            }
        };
        let new = if dtype == Dtype::Bool { 1 - value } else { new };
        lane.copy_from_slice(&new.to_le_bytes()[..width]);
    }

    /// Adds a tensor to base and target. `changes` decides for each row and column whether that lane changes.
    fn tensor(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: [u64; 2],
        how: Change,
        mut changes: impl FnMut(&mut Self, u64, u64) -> bool,
    ) {
        let base = self.weights(dtype, shape[0], shape[1]);
        let mut target = base.clone();
        for (lane, bytes) in (0..).zip(target.chunks_mut(dtype.lane_bytes())) {
            if changes(self, lane / shape[1], lane % shape[1]) {
                self.change(dtype, bytes, how);
            }
        }
        self.both(name, dtype, &shape, base, target);
    }

    /// Adds a tensor to base and target. A lane changes with probability `of_a_million` / 2^20, or four times that if its
    /// magnitude is small.
    fn trained(&mut self, name: &str, dtype: Dtype, shape: [u64; 2], of_a_million: u64) {
        let base = self.weights(dtype, shape[0], shape[1]);
        let mut target = base.clone();
        for bytes in target.chunks_mut(dtype.lane_bytes()) {
            let weight = bytes.last().map_or(0, |top| u64::from(top & 0x7F));
            let share = of_a_million * if weight < 0x3B { 4 } else { 1 };
            if self.below(1 << 20) < share {
                self.change(dtype, bytes, Change::Step);
            }
        }
        self.both(name, dtype, &shape, base, target);
    }

    fn both(&mut self, name: &str, dtype: Dtype, shape: &[u64], base: Vec<u8>, target: Vec<u8>) {
        self.in_base(name, dtype, shape, base);
        self.in_target(name, dtype, shape, target);
    }

    fn in_base(&mut self, name: &str, dtype: Dtype, shape: &[u64], bytes: Vec<u8>) {
        self.base.push((TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }, bytes));
    }

    fn in_target(&mut self, name: &str, dtype: Dtype, shape: &[u64], bytes: Vec<u8>) {
        self.target.push((TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }, bytes));
    }

    fn finish(mut self, name: &'static str) -> Input {
        self.base.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        self.target.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        Input { name, base: self.base, target: self.target }
    }
}

/// Name of a kind, and the function that makes it.
type Kind = (&'static str, fn(&mut Maker, u64));

/// All inputs, with matrices of `side` rows. Most matrices are square.
pub fn inputs(side: u64) -> impl Iterator<Item = Input> {
    KINDS.iter().map(move |(name, make)| {
        let mut maker = Maker::new(name);
        make(&mut maker, side);
        maker.finish(name)
    })
}

const KINDS: &[Kind] = &[
    ("one training step, BF16", |m, n| {
        m.trained("down", Dtype::Bf16, [n, n], 3000);
        m.trained("norm", Dtype::Bf16, [1, n], 3000);
        m.trained("up", Dtype::Bf16, [n, n], 6000);
    }),
    ("fine-tuned, BF16", |m, n| {
        m.trained("down", Dtype::Bf16, [n, n], 200_000);
        m.trained("up", Dtype::Bf16, [n, n], 400_000);
    }),
    ("one training step, F32", |m, n| m.trained("weight", Dtype::F32, [n, n], 600_000)),
    ("one training step, F16", |m, n| m.trained("weight", Dtype::F16, [n, n], 20_000)),
    ("one training step, F64", |m, n| m.trained("weight", Dtype::F64, [n, n], 900_000)),
    ("F32 that is BF16 upcast", |m, n| {
        let base = m.weights(Dtype::Bf16, n, n);
        let mut target = base.clone();
        for lane in target.chunks_mut(2) {
            if m.below(100) == 0 {
                m.change(Dtype::Bf16, lane, Change::Step);
            }
        }
        let upcast = |lanes: Vec<u8>| lanes.chunks(2).flat_map(|lane| [0, 0, lane[0], lane[1]]).collect::<Vec<u8>>();
        m.both("weight", Dtype::F32, &[n, n], upcast(base), upcast(target));
    }),
    ("quantised, I8", |m, n| m.trained("weight", Dtype::I8, [n, n], 30_000)),
    ("quantised, F8_E4M3", |m, n| m.trained("weight", Dtype::F8E4m3, [n, n], 30_000)),
    ("packed, F4", |m, n| {
        let base = m.weights(Dtype::U8, n, n / 2);
        let mut target = base.clone();
        for byte in &mut target {
            if m.below(50) == 0 {
                *byte ^= 0x10 << m.below(2);
            }
        }
        m.both("weight", Dtype::F4, &[n, n], base, target);
    }),
    ("packed, I32", |m, n| m.tensor("qweight", Dtype::I32, [n, n / 8], Change::Any, |m, _, _| m.below(30) == 0)),
    ("counters plus one, I64", |m, n| {
        let base = m.weights(Dtype::I64, n, 16);
        let target = base.chunks(8).flat_map(|lane| (u64::from_le_bytes(lane.try_into().unwrap()) + 1).to_le_bytes()).collect();
        m.both("steps", Dtype::I64, &[n, 16], base, target);
    }),
    ("indices plus five but for some runs, I32", |m, n| {
        let base = m.weights(Dtype::I32, n, n);
        let mut target = base.clone();
        let mut left = 0;
        for lane in target.chunks_mut(4) {
            left = if left > 0 {
                left - 1
            } else if m.below(9000) == 0 {
                700
            } else {
                0
            };
            if left == 0 {
                let moved = u32::from_le_bytes(lane.try_into().unwrap()).wrapping_add(5);
                lane.copy_from_slice(&moved.to_le_bytes());
            }
        }
        m.both("indices", Dtype::I32, &[n, n], base, target);
    }),
    ("mask, BOOL", |m, n| m.tensor("mask", Dtype::Bool, [n, n], Change::Any, |m, _, _| m.below(200) == 0)),
    ("one lane changed", |m, n| {
        m.tensor("weight", Dtype::Bf16, [n, n], Change::Step, move |_, row, column| (row, column) == (n / 3, 5))
    }),
    ("one row replaced", |m, n| m.tensor("weight", Dtype::Bf16, [n, n], Change::Any, move |_, row, _| row == n / 3)),
    ("five rows of an embedding", |m, n| {
        m.tensor("embedding", Dtype::Bf16, [16 * n, n / 4], Change::Step, move |_, row, _| row % (3 * n) == n)
    }),
    ("a vocabulary and one row", |m, n| {
        let base = m.weights(Dtype::Bf16, 4 * n, n / 2);
        let row = m.weights(Dtype::Bf16, 1, n / 2);
        m.in_base("embedding", Dtype::Bf16, &[4 * n, n / 2], base.clone());
        m.in_target("embedding", Dtype::Bf16, &[4 * n + 1, n / 2], [base, row].concat());
    }),
    ("target all zero", |m, n| {
        let base = m.weights(Dtype::Bf16, n, n);
        let zeros = vec![0; base.len()];
        m.both("weight", Dtype::Bf16, &[n, n], base, zeros);
    }),
    ("half pruned", |m, n| {
        let base = m.weights(Dtype::Bf16, n, n);
        let mut target = base.clone();
        for lane in target.chunks_mut(2) {
            if lane[1] & 0x7F < 0x3C {
                lane.fill(0);
            }
        }
        m.both("weight", Dtype::Bf16, &[n, n], base, target);
    }),
    ("unrelated to the base", |m, n| {
        let (base, target) = (m.weights(Dtype::Bf16, n, n), m.weights(Dtype::Bf16, n, n));
        m.both("weight", Dtype::Bf16, &[n, n], base, target);
    }),
    ("any bits", |m, n| m.tensor("weight", Dtype::U16, [n, n], Change::Any, |_, _, _| true)),
    ("no base, BF16", |m, n| {
        let weights = m.weights(Dtype::Bf16, n, n);
        m.in_target("weight", Dtype::Bf16, &[n, n], weights);
    }),
    ("no base, F32", |m, n| {
        let weights = m.weights(Dtype::F32, n, n);
        m.in_target("weight", Dtype::F32, &[n, n], weights);
    }),
    ("no base, outliers", |m, n| {
        for (dtype, name) in [(Dtype::Bf16, "half"), (Dtype::F32, "single")] {
            let mut weights = m.weights(dtype, n, n);
            let rare = 500 + 700 * dtype.lane_bytes() as u64 / 2;
            for lane in weights.chunks_mut(dtype.lane_bytes()) {
                if m.below(rare) == 0 {
                    *lane.last_mut().unwrap() += 1 + m.below(3) as u8;
                }
            }
            m.in_target(name, dtype, &[n, n], weights);
        }
    }),
    ("no base, I8 and zeros", |m, n| {
        let weights = m.weights(Dtype::I8, n, n);
        m.in_target("weight", Dtype::I8, &[n, n], weights);
        m.in_target("zeros", Dtype::F32, &[n, n], vec![0; (4 * n * n) as usize]);
    }),
    ("uniform steps of one lane in a hundred", |m, n| {
        m.tensor("weight", Dtype::Bf16, [n, n], Change::Step, |m, _, _| m.below(100) == 0);
    }),
    ("sign flips", |m, n| m.tensor("weight", Dtype::Bf16, [n, n], Change::Sign, |m, _, _| m.below(50) == 0)),
    ("every 97th lane", |m, n| {
        m.tensor("weight", Dtype::Bf16, [n, n], Change::Step, move |_, row, column| (row * n + column) % 97 == 0)
    }),
    ("one column", |m, n| m.tensor("weight", Dtype::Bf16, [n, n], Change::Step, |_, _, column| column == 7)),
    ("blocks of 16 by 16", |m, n| {
        m.tensor("weight", Dtype::Bf16, [n, n], Change::Step, |_, row, column| (row / 16 + column / 16).is_multiple_of(23));
    }),
    ("clusters", |m, n| {
        let mut left = 0;
        m.tensor("weight", Dtype::Bf16, [n, n], Change::Step, move |m, _, _| {
            if left == 0 && m.below(4000) == 0 {
                left = 40;
            }
            left -= u64::from(left > 0);
            left > 0
        });
    }),
    ("two biases of many tensors", |m, n| {
        for i in 0..24 {
            m.tensor(&format!("layer.{i}.bias"), Dtype::Bf16, [1, n], Change::Step, move |m, _, _| i < 2 && m.below(3) > 0);
            m.tensor(&format!("layer.{i}.weight"), Dtype::Bf16, [n / 8, n / 8], Change::Step, |_, _, _| false);
        }
    }),
    ("many small tensors", |m, n| {
        for i in 0..n / 2 {
            m.trained(&format!("layer.{i:04}.lora_a"), Dtype::Bf16, [4, 24 + i % 40], 200_000);
            m.trained(&format!("layer.{i:04}.scale"), Dtype::F32, [1, 1 + i % 5], 1 << 18);
        }
    }),
    ("moments of an optimizer", |m, n| {
        let base = m.weights(Dtype::F32, n, n);
        let decayed = |lane: &[u8]| f32::from_le_bytes(lane.try_into().unwrap()) * 0.875;
        let target = base.chunks(4).flat_map(|lane| decayed(lane).to_le_bytes()).collect();
        m.both("exp_avg", Dtype::F32, &[n, n], base, target);
    }),
    ("filled with NaN", |m, n| {
        let base = m.weights(Dtype::Bf16, n, n);
        let target = base.chunks(2).flat_map(|_| 0x7FC0u16.to_le_bytes()).collect();
        m.both("weight", Dtype::Bf16, &[n, n], base, target);
    }),
    ("filled with one value, most of it before", |m, n| {
        let base: Vec<u8> = [0x80, 0x3F].repeat((3 * n * n) as usize);
        let rest = m.weights(Dtype::Bf16, n, n);
        let target = [0x80, 0x3F].repeat((4 * n * n) as usize);
        m.both("weight", Dtype::Bf16, &[4 * n, n], [base, rest].concat(), target);
    }),
    ("subnormal", |m, n| {
        let base: Vec<u8> = (0..n * n).flat_map(|_| (m.below(0x80) as u16 | (m.below(2) << 15) as u16).to_le_bytes()).collect();
        let target = base.chunks(2).flat_map(|lane| [lane[0] ^ u8::from(m.below(20) == 0), lane[1]]).collect();
        m.both("weight", Dtype::Bf16, &[n, n], base, target);
    }),
    ("empty tensors and scalars", |m, _| {
        m.both("empty", Dtype::F32, &[0, 7], Vec::new(), Vec::new());
        for (i, dtype) in [Dtype::F32, Dtype::Bf16, Dtype::I64].into_iter().enumerate() {
            let (base, target) = (m.weights(dtype, 1, 1), m.weights(dtype, 1, 2));
            m.both(&format!("scalar.{i}"), dtype, &[], base, target[dtype.lane_bytes()..].to_vec());
        }
    }),
    ("several dtypes", |m, n| {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::I8, Dtype::U16] {
            m.trained(&format!("weight.{}", dtype.name()), dtype, [n / 2, n / 2], 20_000);
        }
        let weights = m.weights(Dtype::Bf16, n / 2, n / 2);
        m.in_target("weight.new", Dtype::Bf16, &[n / 2, n / 2], weights);
    }),
    ("unchanged but for a quarter", |m, n| {
        m.tensor("weight", Dtype::Bf16, [n, n], Change::Step, move |m, row, _| row < n / 4 && m.below(8) == 0);
    }),
    ("every tenth piece", |m, n| {
        m.tensor("weight", Dtype::Bf16, [n, n], Change::Step, move |m, row, column| {
            ((row * n + column) >> 14) % 10 == 5 && m.below(40) == 0
        });
    }),
    ("a new head", |m, n| {
        m.trained("body", Dtype::Bf16, [n, n], 3000);
        let (base, target) = (m.weights(Dtype::Bf16, n / 8, n), m.weights(Dtype::Bf16, n / 8, n));
        m.both("head", Dtype::Bf16, &[n / 8, n], base, target);
    }),
    ("one head of sixteen", |m, n| {
        m.tensor("projection", Dtype::Bf16, [n, 2048], Change::Step, |m, _, column| column / 128 == 3 && m.below(2) == 0);
    }),
    ("every third lane", |m, n| {
        m.tensor("weight", Dtype::Bf16, [n, n], Change::Any, move |_, row, column| (row * n + column) % 3 == 0);
    }),
    ("zeros but for the beginning, U32", |m, n| {
        let base: Vec<u8> = (0..4 * n * n / 4).map(|_| m.below(256) as u8).collect();
        let mut target = base.clone();
        target[(n * n / 64) as usize..].fill(0);
        m.both("packed", Dtype::U32, &[n, n / 4], base, target);
    }),
    ("mostly zeros", |m, n| {
        let sparse = |m: &mut Maker| -> Vec<u8> {
            let kept = m.weights(Dtype::Bf16, n - 1, n - 1);
            kept.chunks(2).flat_map(|lane| if m.below(5) == 0 { [lane[0], lane[1]] } else { [0; 2] }).collect()
        };
        let target = sparse(m);
        let mut base = target.clone();
        for (lane, other) in base.chunks_mut(2).zip(sparse(m).chunks(2)) {
            if m.below(5) == 0 {
                lane.copy_from_slice(other);
            }
        }
        m.both("weight", Dtype::Bf16, &[n - 1, n - 1], base, target);
    }),
    ("half of it unrelated", |m, n| {
        let (mut base, target) = (m.weights(Dtype::Bf16, 2 * n, n), m.weights(Dtype::Bf16, 2 * n, n));
        let half = target.len() / 2;
        for (lane, other) in base[..half].chunks_mut(2).zip(target.chunks(2)) {
            let near = u16::from_le_bytes([other[0], other[1]]).wrapping_add(m.below(180) as u16);
            lane.copy_from_slice(&near.to_le_bytes());
        }
        m.both("weight", Dtype::Bf16, &[2 * n, n], base, target);
    }),
];
