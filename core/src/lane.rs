//! Dtypes, and lossless arithmetic on bit patterns (spec sections 8.1 and 9).

#![forbid(unsafe_code)]

use crate::format::registry;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

registry! {
    /// Element types, named as in safetensors.
    Dtype: u16 as "dtype" {
        /// Boolean, one byte.
        Bool = 0 => "BOOL",
        /// Unsigned, 8 bits.
        U8 = 1 => "U8",
        /// Signed, 8 bits.
        I8 = 2 => "I8",
        /// Unsigned, 16 bits.
        U16 = 3 => "U16",
        /// Signed, 16 bits.
        I16 = 4 => "I16",
        /// Unsigned, 32 bits.
        U32 = 5 => "U32",
        /// Signed, 32 bits.
        I32 = 6 => "I32",
        /// Unsigned, 64 bits.
        U64 = 7 => "U64",
        /// Signed, 64 bits.
        I64 = 8 => "I64",
        /// IEEE half.
        F16 = 16 => "F16",
        /// bfloat16.
        Bf16 = 17 => "BF16",
        /// IEEE single.
        F32 = 18 => "F32",
        /// IEEE double.
        F64 = 19 => "F64",
        /// Complex of two singles.
        C64 = 20 => "C64",
        /// 8 bits, 4 of exponent.
        F8E4m3 = 32 => "F8_E4M3",
        /// 8 bits, 5 of exponent.
        F8E5m2 = 33 => "F8_E5M2",
        /// 8 bits, 4 of exponent, no negative zero.
        F8E4m3Fnuz = 34 => "F8_E4M3FNUZ",
        /// 8 bits, 5 of exponent, no negative zero.
        F8E5m2Fnuz = 35 => "F8_E5M2FNUZ",
        /// 8 bits of exponent, unsigned.
        F8E8m0 = 36 => "F8_E8M0",
        /// 4 bits, packed.
        F4 = 48 => "F4",
        /// 6 bits, packed.
        F6E2m3 = 49 => "F6_E2M3",
        /// 6 bits, packed.
        F6E3m2 = 50 => "F6_E3M2",
    }
}

impl Dtype {
    /// Returns the number of bits per element.
    pub const fn bits(self) -> u64 {
        use Dtype::*;
        match self {
            Bool | U8 | I8 | F8E4m3 | F8E5m2 | F8E4m3Fnuz | F8E5m2Fnuz | F8E8m0 => 8,
            U16 | I16 | F16 | Bf16 => 16,
            U32 | I32 | F32 => 32,
            U64 | I64 | F64 | C64 => 64,
            F4 => 4,
            F6E2m3 | F6E3m2 => 6,
        }
    }

    /// Returns the number of bytes per lane: 1, 2, 4 or 8.
    pub const fn lane_bytes(self) -> usize {
        match self {
            Dtype::C64 => 4,
            Dtype::F4 | Dtype::F6E2m3 | Dtype::F6E3m2 => 1,
            _ => self.bits() as usize / 8,
        }
    }

    /// Returns the map that is applied to lanes before subtraction.
    pub const fn order(self) -> Order {
        use Dtype::*;
        match self {
            F16 | Bf16 | F32 | F64 | C64 | F8E4m3 | F8E5m2 | F8E4m3Fnuz | F8E5m2Fnuz => Order::Ordered,
            _ => Order::Plain,
        }
    }

    /// Returns the number of mantissa bits per lane, or `None` if lanes are not signed floats.
    pub const fn mantissa_bits(self) -> Option<u32> {
        match self.context() {
            Context::Exponent { shift, .. } => Some(shift),
            _ => None,
        }
    }

    /// Returns the definition of a lane's context, which is a measure of its magnitude (`spec/codecs.md` section 4.1).
    pub const fn context(self) -> Context {
        use Dtype::*;
        match self {
            F16 => Context::Exponent { shift: 10, bits: 5 },
            Bf16 => Context::Exponent { shift: 7, bits: 8 },
            F32 | C64 => Context::Exponent { shift: 23, bits: 8 },
            F64 => Context::Exponent { shift: 52, bits: 11 },
            F8E4m3 | F8E4m3Fnuz => Context::Exponent { shift: 3, bits: 4 },
            F8E5m2 | F8E5m2Fnuz => Context::Exponent { shift: 2, bits: 5 },
            I8 | I16 | I32 | I64 => Context::SignedBits,
            Bool | U8 | U16 | U32 | U64 | F8E8m0 | F4 | F6E2m3 | F6E3m2 => Context::Bits,
        }
    }

    /// Returns the number of lanes of a tensor with this shape. Returns `None` if the tensor has 2^63 bits or more, or a partial
    /// byte.
    pub fn lanes(self, shape: &[u64]) -> Option<u64> {
        // A zero dimension makes the product zero, even if a partial product of the others overflows.
        let elements = if shape.contains(&0) { 0 } else { shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))? };
        let bits = elements.checked_mul(self.bits()).filter(|&b| b < 1 << 63)?;
        (bits % 8 == 0).then_some(bits / 8 / self.lane_bytes() as u64)
    }
}

/// Map from bit patterns to integers, applied before subtraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// `ordered(u) = u`.
    Plain,
    /// Negative values are mirrored, so that adjacent floats become adjacent integers.
    Ordered,
}

/// Evaluates `$body` with `$ORDER` bound to a constant: one copy of its loops per order, so that they have no branch on it.
macro_rules! with_order {
    ($order:expr, $ORDER:ident => $body:expr) => {
        match $order {
            $crate::lane::Order::Plain => {
                const $ORDER: $crate::lane::Order = $crate::lane::Order::Plain;
                $body
            }
            $crate::lane::Order::Ordered => {
                const $ORDER: $crate::lane::Order = $crate::lane::Order::Ordered;
                $body
            }
        }
    };
}
pub(crate) use with_order;

/// Definition of the context of a base lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// The `bits` bits from bit `shift` on.
    Exponent {
        /// Number of bits below.
        shift: u32,
        /// Number of bits.
        bits: u32,
    },
    /// Bit length of the lane, or of its complement if the top bit is set.
    SignedBits,
    /// Bit length of the lane.
    Bits,
}

/// An unsigned integer with the width of a lane.
pub trait Lane: Copy + Eq + Ord + Default + Send + Sync + 'static + core::fmt::Debug {
    /// The lane in memory: little-endian, any alignment.
    type Le: Copy + FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned;
    /// Bytes per lane.
    const BYTES: usize;
    /// Converts a lane from its form in memory.
    fn load(le: Self::Le) -> Self;
    /// Converts the lane to its form in memory.
    fn store(self) -> Self::Le;
    /// Returns the low bits of `x`.
    fn from_u64(x: u64) -> Self;
    /// Returns the value as 64 bits.
    fn to_u64(self) -> u64;
    /// Applies the map of section 9 for `order`.
    fn ordered(self, order: Order) -> Self;
    /// Applies the inverse of [`Lane::ordered`].
    fn unordered(self, order: Order) -> Self;
    /// Returns `zigzag(ordered(target) − ordered(base))`. It is zero if and only if base and target are equal.
    fn delta(base: Self, target: Self, order: Order) -> Self;
    /// Returns the target lane, from base and delta: the inverse of [`Lane::delta`].
    fn apply(base: Self, delta: Self, order: Order) -> Self;
    /// The `bits` bits from bit `shift` on.
    fn exponent(self, shift: u32, bits: u32) -> Self;
    /// Returns the lane's context.
    fn context(self, of: Context) -> Self;
    /// Returns the bit length.
    fn bit_count(self) -> Self;
    /// Returns the lane, or its complement if the top bit is set.
    fn magnitude(self) -> Self;
    /// Returns min(max(self, `first`) − `first`, 255).
    fn index_from(self, first: Self) -> u8;
    /// Returns `x`, or the largest lane value if it is smaller than `x`.
    fn saturate(x: u16) -> Self;
}

macro_rules! lane {
    ($unsigned:ty, $signed:ty, $le:ty, $load:expr, $store:expr) => {
        impl Lane for $unsigned {
            type Le = $le;
            const BYTES: usize = size_of::<$unsigned>();
            #[inline(always)]
            fn load(le: $le) -> Self {
                $load(le)
            }
            #[inline(always)]
            fn store(self) -> $le {
                $store(self)
            }
            #[inline(always)]
            fn from_u64(x: u64) -> Self {
                x as $unsigned
            }
            #[inline(always)]
            fn to_u64(self) -> u64 {
                u64::from(self)
            }
            #[inline(always)]
            fn ordered(self, order: Order) -> Self {
                const TOP: $unsigned = 1 << (<$unsigned>::BITS - 1);
                match order {
                    Order::Plain => self,
                    // Negative: flip all bits, which is MAX − u. Positive: flip the top bit.
                    Order::Ordered => self ^ (((self as $signed) >> (<$unsigned>::BITS - 1)) as $unsigned | TOP),
                }
            }
            #[inline(always)]
            fn unordered(self, order: Order) -> Self {
                const TOP: $unsigned = 1 << (<$unsigned>::BITS - 1);
                match order {
                    Order::Plain => self,
                    Order::Ordered => self ^ (!(((self as $signed) >> (<$unsigned>::BITS - 1)) as $unsigned) | TOP),
                }
            }
            #[inline(always)]
            fn delta(base: Self, target: Self, order: Order) -> Self {
                let d = target.ordered(order).wrapping_sub(base.ordered(order));
                (d << 1) ^ (((d as $signed) >> (<$unsigned>::BITS - 1)) as $unsigned)
            }
            #[inline(always)]
            fn apply(base: Self, delta: Self, order: Order) -> Self {
                let d = (delta >> 1) ^ (delta & 1).wrapping_neg();
                base.ordered(order).wrapping_add(d).unordered(order)
            }
            #[inline(always)]
            fn exponent(self, shift: u32, bits: u32) -> Self {
                (self >> shift) & ((1 << bits) - 1)
            }
            #[inline(always)]
            fn context(self, of: Context) -> Self {
                match of {
                    Context::Exponent { shift, bits } => self.exponent(shift, bits),
                    Context::SignedBits => self.magnitude().bit_count(),
                    Context::Bits => self.bit_count(),
                }
            }
            #[inline(always)]
            fn bit_count(self) -> Self {
                (<$unsigned>::BITS - self.leading_zeros()) as $unsigned
            }
            #[inline(always)]
            fn magnitude(self) -> Self {
                self ^ (((self as $signed) >> (<$unsigned>::BITS - 1)) as $unsigned)
            }
            #[inline(always)]
            fn index_from(self, first: Self) -> u8 {
                self.saturating_sub(first).min(255) as u8
            }
            #[inline(always)]
            fn saturate(x: u16) -> Self {
                <$unsigned>::try_from(x).unwrap_or(<$unsigned>::MAX)
            }
        }
    };
}

lane!(u8, i8, u8, |x| x, |x| x);
lane!(u16, i16, U16, |x: U16| x.get(), U16::new);
lane!(u32, i32, U32, |x: U32| x.get(), U32::new);
lane!(u64, i64, U64, |x: U64| x.get(), U64::new);

/// Runs `$body` with the type `$L` bound to the lane type of `$bytes` bytes.
#[doc(hidden)]
#[macro_export]
macro_rules! with_lane {
    ($bytes:expr, $L:ident => $body:expr) => {
        match $bytes {
            1 => {
                type $L = u8;
                $body
            }
            2 => {
                type $L = u16;
                $body
            }
            4 => {
                type $L = u32;
                $body
            }
            _ => {
                type $L = u64;
                $body
            }
        }
    };
}
#[doc(hidden)]
pub use with_lane;

/// Returns the lanes in `bytes`, without a partial lane at the end.
#[inline(always)]
pub fn lanes_of<L: Lane>(bytes: &[u8]) -> &[L::Le] {
    <[L::Le]>::ref_from_prefix_with_elems(bytes, bytes.len() / L::BYTES).map_or(&[], |(lanes, _)| lanes)
}

/// Returns the lanes in `bytes`, mutable, without a partial lane at the end.
#[inline(always)]
pub fn lanes_of_mut<L: Lane>(bytes: &mut [u8]) -> &mut [L::Le] {
    let count = bytes.len() / L::BYTES;
    <[L::Le]>::mut_from_prefix_with_elems(bytes, count).map_or(&mut [], |(lanes, _)| lanes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use proptest::prelude::*;

    #[test]
    fn registry_codes_survive() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_code(dtype.code()), Some(*dtype));
        }
        assert_eq!(Dtype::from_code(9), None);
    }

    #[test]
    fn ordered_sorts_floats_and_keeps_zeros_apart() {
        let order = Order::Ordered;
        let o = |x: f32| x.to_bits().ordered(order);
        assert!(o(f32::NEG_INFINITY) < o(-1.0) && o(-1.0) < o(-f32::MIN_POSITIVE) && o(-0.0) < o(0.0) && o(0.0) < o(1.0));
        assert_eq!(o(0.0) - o(-0.0), 1);
        assert_eq!(u32::delta((-0.0f32).to_bits(), 0.0f32.to_bits(), order), 2);
        assert_eq!(u16::delta(0x3F80, 0x3F81, order), 2);
        assert_eq!(u16::delta(0x3F81, 0x3F80, order), 1);
    }

    /// Tests every 16-bit pattern as base, with a sample of targets that includes special values.
    #[test]
    fn all_patterns_of_16_bits_come_back() {
        let mut sample: Vec<u16> = vec![
            0, 1, 2, 0x7F, 0x80, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFFE, 0x7C00, 0x7C01, 0x7E00, 0xFC00, 0xFC01, 0x7F80, 0x7F81,
            0xFF80, 0xFFC0, 0x3F80, 0x3C00, 0xBF80, 0x0400, 0x03FF,
        ];
        sample.extend((0..997u32).map(|i| (i * 6_547 % 65_521) as u16));
        for order in [Order::Plain, Order::Ordered] {
            for base in 0..=u16::MAX {
                assert_eq!(base.ordered(order).unordered(order), base);
                for &target in &sample {
                    let delta = u16::delta(base, target, order);
                    assert_eq!(u16::apply(base, delta, order), target);
                    assert_eq!(delta == 0, base == target);
                }
            }
        }
    }

    #[test]
    fn lanes_of_huge_and_odd_shapes() {
        assert_eq!(Dtype::Bf16.lanes(&[1 << 20, 1 << 20]), Some(1 << 40));
        assert_eq!(Dtype::F32.lanes(&[]), Some(1));
        assert_eq!(Dtype::F32.lanes(&[3, 0, u64::MAX, u64::MAX]), Some(0));
        assert_eq!(Dtype::U8.lanes(&[1 << 60]), None);
        assert_eq!(Dtype::U8.lanes(&[u64::MAX, 2]), None);
        assert_eq!(Dtype::C64.lanes(&[5]), Some(10));
        assert_eq!(Dtype::F4.lanes(&[6]), Some(3));
        assert_eq!(Dtype::F4.lanes(&[5]), None);
        assert_eq!(Dtype::F6E2m3.lanes(&[4]), Some(3));
    }

    fn round_trip<L: Lane>(base: u64, target: u64) {
        let (base, target) = (L::from_u64(base), L::from_u64(target));
        for order in [Order::Plain, Order::Ordered] {
            let delta = L::delta(base, target, order);
            assert_eq!(L::apply(base, delta, order), target);
            assert_eq!(delta == L::default(), base == target);
        }
    }

    proptest! {
        #[test]
        fn every_width_comes_back(base: u64, target: u64) {
            round_trip::<u8>(base, target);
            round_trip::<u16>(base, target);
            round_trip::<u32>(base, target);
            round_trip::<u64>(base, target);
        }
    }
}
