//! The two inner loops of codec `conditioned` that are worth vector instructions written by hand: finding the coded lanes of a
//! base, and decoding steps of 32 states. Both give the same results on every path; tests hold them together.
//!
//! This module and [`crate::dispatch`] are the only places of the codecs with `unsafe`, and it is safe to call: a [`Path`] other
//! than [`Path::Scalar`] exists only where its instructions were detected.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

/// Lanes of a step that has a vector path: as many as a stream may have states.
pub(crate) const STEP: usize = 32;

/// Instructions to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Why a stream is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// A word is missing.
    Short,
    /// A value has too many bits.
    Value,
}

/// Where the slots of tokens end: `rows[t][class]`, ascending in `t`, 4,096 in all columns of the last row.
pub(crate) type Rows = [[u32; 16]];

/// The part of a stream that is read as it is decoded.
#[derive(Debug)]
pub(crate) struct Words<'a> {
    /// The words after the states.
    pub words: &'a [[u8; 2]],
    /// How many of them have been read.
    pub read: usize,
}

impl Words<'_> {
    /// State `x` after a word if it needs one.
    #[inline(always)]
    pub fn renormalize(&mut self, x: u32) -> Result<u32, Broken> {
        if x >= 1 << 16 {
            return Ok(x);
        }
        let word = *self.words.get(self.read).ok_or(Broken::Short)?;
        self.read += 1;
        Ok(x << 16 | u32::from(u16::from_le_bytes(word)))
    }
}

impl Path {
    /// The portable path.
    pub const SCALAR: Self = Self(Kind::Scalar);

    /// Every path that this processor can take, the fastest last.
    pub fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "there is one path"))]
        let mut paths = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2") && is_x86_feature_detected!("popcnt") {
                paths.push(Self(Kind::Avx2));
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("avx512vbmi2")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("popcnt")
            {
                paths.push(Self(Kind::Avx512));
            }
        }
        paths
    }

    /// The fastest path of this processor.
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self::SCALAR)
    }

    /// Whether [`Path::decode_steps`] exists.
    pub fn has_steps(self) -> bool {
        self != Self::SCALAR
    }

    /// Looks up the classes of 64 lanes, each `map[index]` where the index is below 64 and 0 elsewhere, and returns the mask of
    /// those that are not 0. They go to the front of `out`, in order; the rest of its first 64 bytes is undefined.
    #[inline(always)]
    pub fn compact(self, indexes: &[u8; 64], map: &[u8; 64], out: &mut [u8; 64]) -> u64 {
        match self.0 {
            Kind::Scalar => scalar::compact(indexes, map, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a path of this kind is only made in `available`, which detects all features that the function enables.
            Kind::Avx2 => unsafe { avx2::compact(indexes, map, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512 => unsafe { avx512::compact(indexes, map, out) },
        }
    }

    /// Decodes steps of 32 coded lanes, whose classes (1 to 15) fill `classes`, into as many values of at most 32 bits.
    ///
    /// `tokens` is the number of tokens whose values are allowed: at most those of 32 bits.
    ///
    /// # Errors
    /// A word that is missing, or a value with too many bits; states and values are then undefined.
    ///
    /// # Panics
    /// If the lengths differ or are no multiple of 32, or on the scalar path, which has no such function.
    pub fn decode_steps(
        self,
        rows: &Rows,
        tokens: usize,
        words: &mut Words<'_>,
        states: &mut [u32; STEP],
        classes: &[u8],
        values: &mut [u32],
    ) -> Result<(), Broken> {
        assert!(classes.len() == values.len() && classes.len().is_multiple_of(STEP) && !rows.is_empty());
        let (classes, values) = (classes.as_chunks().0, values.as_chunks_mut().0);
        match self.0 {
            Kind::Scalar => unreachable!("the scalar path decodes lane by lane"),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            Kind::Avx2 => unsafe { avx2::decode_steps(rows, tokens as u32, words, states, classes, values) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            Kind::Avx512 => unsafe { avx512::decode_steps(rows, tokens as u32, words, states, classes, values) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn compacting_is_the_same_on_every_path(
            indexes in proptest::collection::vec(prop_oneof![0u8..70, any::<u8>()], 64),
            map in proptest::collection::vec(prop_oneof![Just(0u8), 0u8..16], 64),
        ) {
            let (indexes, map) = (indexes.try_into().unwrap(), map.try_into().unwrap());
            let mut expected = [0; 64];
            let mask = scalar::compact(&indexes, &map, &mut expected);
            for (i, &index) in indexes.iter().enumerate() {
                prop_assert_eq!(mask >> i & 1 == 1, index < 64 && map[usize::from(index)] != 0);
            }
            let count = mask.count_ones() as usize;
            for path in Path::available() {
                let mut out = [0; 64];
                prop_assert_eq!(path.compact(&indexes, &map, &mut out), mask);
                prop_assert_eq!(&out[..count], &expected[..count], "{:?}", path);
            }
        }
    }
}
