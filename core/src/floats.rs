//! Arithmetic on lanes of floats, in integers (spec section 8.6).
//!
//! Base lanes that have another dtype than the target are formed by these functions. Functions of a single lane are inlined, so
//! that `vectorized` compiles loops over them for the processor.

#![forbid(unsafe_code)]

use crate::dispatch::vectorized;
use crate::lane::Dtype;

/// A format of floats: from its top bit down, a lane has a sign, an exponent and a mantissa.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    special: Special,
}

/// Lanes that are not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Special {
    /// The largest exponent has infinities and NaNs.
    Ieee,
    /// The lane of ones, with either sign, is NaN.
    OnesAreNan,
    /// None.
    Finite,
}

/// Nibbles of MXFP4.
const E2M1: Format = Format { exponent_bits: 2, mantissa_bits: 1, special: Special::Finite };
const E4M3: Format = Format { exponent_bits: 4, mantissa_bits: 3, special: Special::OnesAreNan };
const E5M2: Format = ieee(5, 2);
const F16: Format = ieee(5, 10);
const BF16: Format = ieee(8, 7);
const F32: Format = ieee(8, 23);

const fn ieee(exponent_bits: u32, mantissa_bits: u32) -> Format {
    Format { exponent_bits, mantissa_bits, special: Special::Ieee }
}

impl Format {
    const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// The largest exponent, as stored.
    const fn top(self) -> u32 {
        (1 << self.exponent_bits) - 1
    }

    /// The positive lane with the largest exponent and mantissa 0.
    const fn infinity(self) -> u32 {
        self.top() << self.mantissa_bits
    }

    const fn sign(self, lane: u32) -> u32 {
        lane >> (self.exponent_bits + self.mantissa_bits) & 1
    }

    /// The lane with this sign and this magnitude, which is a lane without sign.
    const fn signed(self, sign: u32, magnitude: u32) -> u32 {
        sign << (self.exponent_bits + self.mantissa_bits) | magnitude
    }

    const fn without_sign(self, lane: u32) -> u32 {
        lane & ((1 << (self.exponent_bits + self.mantissa_bits)) - 1)
    }

    const fn mantissa(self, lane: u32) -> u32 {
        lane & ((1 << self.mantissa_bits) - 1)
    }

    const fn is_nan(self, lane: u32) -> bool {
        match self.special {
            Special::Ieee => self.without_sign(lane) > self.infinity(),
            Special::OnesAreNan => self.without_sign(lane) == (1 << (self.exponent_bits + self.mantissa_bits)) - 1,
            Special::Finite => false,
        }
    }

    const fn is_infinite(self, lane: u32) -> bool {
        matches!(self.special, Special::Ieee) && self.without_sign(lane) == self.infinity()
    }

    /// Returns `(n, q)` of a finite lane, whose magnitude is n · 2^q.
    const fn finite(self, lane: u32) -> (u32, i32) {
        let exponent = self.without_sign(lane) >> self.mantissa_bits;
        let implicit = if exponent == 0 { 0 } else { 1 << self.mantissa_bits };
        let stored = if exponent == 0 { 1 } else { exponent as i32 };
        (self.mantissa(lane) | implicit, stored - self.bias() - self.mantissa_bits as i32)
    }
}

/// Returns the lane of an IEEE format nearest to n · 2^q, ties to even. `n` has at most 28 bits.
#[inline(always)]
const fn round(sign: u32, n: u32, q: i32, to: Format) -> u32 {
    if n == 0 {
        return to.signed(sign, 0);
    }
    let (bias, bits) = (to.bias(), (u32::BITS - n.leading_zeros()) as i32);
    let p = if bits - 1 + q > 1 - bias { bits - 1 + q } else { 1 - bias };
    // n · 2^k is the magnitude in units of the last place.
    let k = q - (p - to.mantissa_bits as i32);
    let r = if k >= 0 {
        n << k
    } else if k < -31 {
        0 // n is below half a unit
    } else {
        let (whole, rest, half) = (n >> -k, n & ((1 << -k) - 1), 1 << (-k - 1));
        whole + (rest > half || (rest == half && whole & 1 == 1)) as u32
    };
    // For a normal lane, r has the implicit bit, which adds 1 to the exponent. A carry out of r raises it too.
    let magnitude = (((p + bias - 1) as u32) << to.mantissa_bits) + r;
    to.signed(sign, if magnitude < to.infinity() { magnitude } else { to.infinity() })
}

/// Converts a lane to an IEEE format, to the nearest value, ties to even. A NaN keeps its sign and the upper bits of its payload,
/// and becomes quiet.
#[inline(always)]
const fn cast(lane: u32, from: Format, to: Format) -> u32 {
    let sign = from.sign(lane);
    if from.is_nan(lane) {
        let payload = from.mantissa(lane) << (23 - from.mantissa_bits) >> (23 - to.mantissa_bits);
        return to.signed(sign, to.infinity() | payload | 1 << (to.mantissa_bits - 1));
    }
    if from.is_infinite(lane) {
        return to.signed(sign, to.infinity());
    }
    let (n, q) = from.finite(lane);
    round(sign, n, q, to)
}

/// [`cast`] from F32 to BF16. It needs no shift by a computed distance, so loops over it are vectorized.
#[inline(always)]
const fn f32_to_bf16(lane: u32) -> u32 {
    // Adds half a unit in the last place, less one unless the unit is odd. A carry out of the mantissa raises the exponent.
    let rounded = lane.wrapping_add(0x7FFF + (lane >> 16 & 1)) >> 16;
    if F32.is_nan(lane) { lane >> 16 | 1 << (BF16.mantissa_bits - 1) } else { rounded }
}

/// [`cast`] from BF16 to F32, as [`f32_to_bf16`].
#[inline(always)]
const fn bf16_to_f32(lane: u32) -> u32 {
    lane << 16 | (BF16.is_nan(lane) as u32) << (F32.mantissa_bits - 1)
}

/// Multiplies a lane of F8_E4M3 by a lane of F32, rounded to F32 once. Every NaN is `7FC00000`.
#[inline(always)]
const fn product(lane: u8, scale: u32) -> u32 {
    let (lane, sign) = (lane as u32, lane as u32 >> 7 ^ scale >> 31);
    let (n, q) = E4M3.finite(lane);
    if E4M3.is_nan(lane) || F32.is_nan(scale) || (F32.is_infinite(scale) && n == 0) {
        return 0x7FC0_0000;
    }
    if F32.is_infinite(scale) {
        return F32.signed(sign, F32.infinity());
    }
    let (scale_n, scale_q) = F32.finite(scale);
    round(sign, n * scale_n, q + scale_q, F32)
}

/// Returns 2^(scale − 127) times a nibble of MXFP4, as BF16.
const fn microscaled(nibble: u8, scale: u8) -> u16 {
    let (n, q) = E2M1.finite(nibble as u32);
    round(E2M1.sign(nibble as u32), n, q + scale as i32 - 127, BF16) as u16
}

/// Applies `f` to each lane of `N` bytes, and stores the results in lanes of `M` bytes. Lanes without a counterpart are left out.
#[inline(always)]
fn each<const N: usize, const M: usize>(lanes: &[u8], out: &mut [u8], f: impl Fn([u8; N]) -> [u8; M]) {
    for (out, lane) in out.as_chunks_mut().0.iter_mut().zip(lanes.as_chunks().0) {
        *out = f(*lane);
    }
}

const fn low(lane: u32) -> [u8; 2] {
    (lane as u16).to_le_bytes()
}

/// Casts little-endian lanes from one dtype to another. Returns `false`, and stores nothing, if base kind `cast` does not
/// convert between them. `out` has as many lanes as `lanes`.
pub fn cast_lanes(from: Dtype, to: Dtype, lanes: &[u8], out: &mut [u8]) -> bool {
    match (from, to) {
        (Dtype::F32, Dtype::Bf16) => vectorized!(each(lanes, out, |u| low(f32_to_bf16(u32::from_le_bytes(u))))),
        (Dtype::F32, Dtype::F16) => vectorized!(each(lanes, out, |u| low(cast(u32::from_le_bytes(u), F32, F16)))),
        (Dtype::Bf16, Dtype::F32) => {
            vectorized!(each(lanes, out, |u| bf16_to_f32(u16::from_le_bytes(u).into()).to_le_bytes()));
        }
        (Dtype::F16, Dtype::F32) => {
            vectorized!(each(lanes, out, |u| cast(u16::from_le_bytes(u).into(), F16, F32).to_le_bytes()));
        }
        (Dtype::F8E4m3, Dtype::Bf16) => vectorized!(each(lanes, out, |[u]| low(cast(u.into(), E4M3, BF16)))),
        (Dtype::F8E4m3, Dtype::F16) => vectorized!(each(lanes, out, |[u]| low(cast(u.into(), E4M3, F16)))),
        (Dtype::F8E5m2, Dtype::Bf16) => vectorized!(each(lanes, out, |[u]| low(cast(u.into(), E5M2, BF16)))),
        (Dtype::F8E5m2, Dtype::F16) => vectorized!(each(lanes, out, |[u]| low(cast(u.into(), E5M2, F16)))),
        _ => return false,
    }
    true
}

/// Multiplies lanes of F8_E4M3 by one scale, the bits of an F32, and casts the products to `to`. Returns `false`, and
/// stores nothing, if `to` is not BF16, F16 or F32. `out` has as many lanes as `lanes`.
pub fn scale_lanes(lanes: &[u8], scale: u32, to: Dtype, out: &mut [u8]) -> bool {
    match to {
        Dtype::Bf16 => vectorized!(each(lanes, out, |[u]| low(f32_to_bf16(product(u, scale))))),
        Dtype::F16 => vectorized!(each(lanes, out, |[u]| low(cast(product(u, scale), F32, F16)))),
        Dtype::F32 => vectorized!(each(lanes, out, |[u]| product(u, scale).to_le_bytes())),
        _ => return false,
    }
    true
}

/// Forms the lanes of BF16 of one MXFP4 block, or of whole bytes of it: two lanes per byte, the low nibble first.
pub fn scale_nibbles(block: &[u8], scale: u8, out: &mut [u8]) {
    let values: [_; 16] = core::array::from_fn(|nibble| microscaled(nibble as u8, scale).to_le_bytes());
    each(block, out, |[byte]| {
        let ([a, b], [c, d]) = (values[usize::from(byte & 15)], values[usize::from(byte >> 4)]);
        [a, b, c, d]
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every upper half, with the lower halves at and next to a tie, and some others.
    #[test]
    fn casts_without_shifts_are_those_of_the_specification() {
        for upper in 0..=u16::MAX {
            let bf16 = u32::from(upper);
            assert_eq!(bf16_to_f32(bf16), cast(bf16, BF16, F32), "{bf16:04X}");
            for lower in [0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xEDCB, 0xFFFF] {
                let lane = bf16 << 16 | lower;
                assert_eq!(f32_to_bf16(lane), cast(lane, F32, BF16), "{lane:08X}");
            }
        }
    }
}
