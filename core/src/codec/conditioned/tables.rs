//! Table sets and tokens (`spec/codecs.md` sections 4.2 and 4.3).

use crate::codec::simd::{DIRECT, EXTRA_BIAS, Entry, NO_CLASS};
use crate::error::{Result, Rule};
use crate::prelude::*;

/// Maximum number of classes per set. Class 0, for lanes that are not coded, does not count.
pub const MAX_CLASSES: usize = 15;
/// Maximum number of tokens per class.
pub const MAX_TOKENS: usize = tokens_within(64);
/// log2 of the sum of a class's frequencies.
pub const SCALE_LOG2: u32 = 12;
/// Sum of a class's frequencies.
pub const SCALE: u32 = 1 << SCALE_LOG2;

/// Returns the token of `value` and the number of its extra bits. The extra bits are the low bits of the value.
#[inline(always)]
pub fn token_of(value: u64) -> (u8, u32) {
    if value < u64::from(DIRECT) {
        return (value as u8, 0);
    }
    let extra = 62 - value.leading_zeros();
    ((2 * (extra + EXTRA_BIAS) + (value >> extra & 1) as u32) as u8, extra)
}

/// Returns the number of extra bits of `token`.
#[inline(always)]
pub fn extra_bits(token: u8) -> u32 {
    if u32::from(token) < DIRECT { 0 } else { u32::from(token) / 2 - EXTRA_BIAS }
}

/// Returns the smallest value of `token`: its extra bits are 0.
#[inline(always)]
pub fn base_value(token: u8) -> u64 {
    if u32::from(token) < DIRECT { u64::from(token) } else { (2 + u64::from(token & 1)) << extra_bits(token) }
}

/// Returns the number of tokens whose values fit in `bits` bits.
pub const fn tokens_within(bits: u32) -> usize {
    let direct = DIRECT.ilog2();
    if bits <= direct { 1 << bits } else { (DIRECT + 2 * (bits - direct)) as usize }
}

/// Table set: the token frequencies of up to 15 classes. Several tensors can share a set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct TableSet {
    /// Number of tokens per class.
    counts: Vec<u8>,
    /// Frequencies of all tokens, class after class.
    frequencies: Vec<u16>,
}

impl TableSet {
    /// Creates a set of these classes. Each class is a list of frequencies with sum 4,096 whose last element is not 0.
    pub fn new(classes: &[Vec<u16>]) -> Self {
        debug_assert!((1..=MAX_CLASSES).contains(&classes.len()));
        debug_assert!(classes.iter().all(|c| c.iter().map(|&f| u32::from(f)).sum::<u32>() == SCALE && c.last() != Some(&0)));
        Self { counts: classes.iter().map(|c| c.len() as u8).collect(), frequencies: classes.concat() }
    }

    /// Reads a set that fills `bytes`.
    ///
    /// # Errors
    /// [`Rule::TensorTables`] if the bytes violate section 4.2.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let rule = Rule::TensorTables;
        let capacity = bytes.len().min(MAX_CLASSES * MAX_TOKENS); // a frequency takes at least a byte
        let mut bytes = bytes.iter().copied();
        let mut next = || bytes.next().ok_or_else(|| rule.broken("a whole set of tables", "an early end"));
        let classes = usize::from(next()?);
        rule.check((1..=MAX_CLASSES).contains(&classes), format_args!("1 to {MAX_CLASSES} classes"), classes)?;
        let mut set = Self { counts: Vec::with_capacity(classes), frequencies: Vec::with_capacity(capacity) };
        for _ in 0..classes {
            let count = next()?;
            rule.check((1..=MAX_TOKENS).contains(&count.into()), format_args!("1 to {MAX_TOKENS} tokens"), count)?;
            let mut sum = 0;
            let mut last = 0;
            for _ in 0..count {
                last = u16::from(next()?);
                if last >= 128 {
                    let high = u16::from(next()?);
                    rule.check(high != 0, "a frequency in its shortest form", "a second byte of 0")?;
                    last = last - 128 + (high << 7);
                }
                sum += u32::from(last);
                set.frequencies.push(last);
            }
            rule.check(last != 0, "a last frequency that is not 0", last)?;
            rule.check(sum == SCALE, format_args!("frequencies that add up to {SCALE}"), sum)?;
            set.counts.push(count);
        }
        rule.check(bytes.next().is_none(), "nothing after the last class", "more bytes")?;
        Ok(set)
    }

    /// Serializes the set: the inverse of [`TableSet::parse`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.counts.len() as u8];
        for class in self.classes() {
            bytes.push(class.len() as u8);
            for &frequency in class {
                if frequency < 128 {
                    bytes.push(frequency as u8);
                } else {
                    bytes.extend([128 + (frequency & 127) as u8, (frequency >> 7) as u8]);
                }
            }
        }
        bytes
    }

    /// Returns the frequencies of each class, from class 1 on.
    pub fn classes(&self) -> impl ExactSizeIterator<Item = &[u16]> {
        let mut rest = &self.frequencies[..];
        self.counts.iter().map(move |&count| {
            let (class, after) = rest.split_at(count.into());
            rest = after;
            class
        })
    }
}

/// Look-up table of a decoder: one entry per slot of a set.
#[derive(Debug, Clone, Default)]
pub struct Lookup {
    set: TableSet,
    /// Entries of all slots of all classes. Zero for absent classes, except class 0. Empty before the first set.
    pub entries: Vec<Entry>,
}

impl Lookup {
    /// Rebuilds the look-up for `set`, in the same memory.
    pub fn set(&mut self, set: &TableSet) {
        let entries = &mut self.entries;
        entries.clear();
        entries.resize((MAX_CLASSES + 1) << SCALE_LOG2, 0);
        entries[..SCALE as usize].fill(NO_CLASS);
        for (class, frequencies) in (1..).zip(set.classes()) {
            let slots = &mut entries[class << SCALE_LOG2..][..SCALE as usize];
            let mut start = 0;
            for (token, &frequency) in (0..).zip(frequencies).filter(|(_, frequency)| **frequency != 0) {
                let frequency = u32::from(frequency);
                slots[start as usize..][..frequency as usize].fill(start | (frequency - 1) << 12 | token << 24);
                start += frequency;
            }
        }
        self.set.clone_from(set);
    }

    pub fn is_of(&self, set: &TableSet) -> bool {
        self.set == *set
    }
}

/// Asserts that the look-up table of a set agrees with the set, for every slot.
#[cfg(any(test, fuzzing))]
pub fn check_lookup(set: &TableSet) {
    let mut lookup = Lookup::default();
    lookup.set(set);
    assert!(lookup.is_of(set));
    for (class, frequencies) in (1..).zip(set.classes()) {
        let mut start = 0;
        for (token, &frequency) in (0..).zip(frequencies).filter(|(_, frequency)| **frequency != 0) {
            let entry = start | u32::from(frequency - 1) << 12 | token << 24;
            let slots = &lookup.entries[class << SCALE_LOG2..][start as usize..][..frequency.into()];
            assert!(slots.iter().all(|&slot| slot == entry));
            start += u32::from(frequency);
        }
        assert_eq!(start, SCALE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tokens_cover_all_values() {
        let mut token = 0u8;
        let mut value = 0u64;
        while (token as usize) < MAX_TOKENS {
            let extra = extra_bits(token);
            let last = value + (((1u128 << extra) - 1) as u64);
            assert_eq!(base_value(token), value);
            assert_eq!(token_of(value), (token, extra));
            assert_eq!(token_of(last), (token, extra));
            token += 1;
            value = last.wrapping_add(1);
        }
        assert_eq!(value, 0, "the last token ends with the largest value");
        assert_eq!([0, 1, 6, 7, 8, 16, 32, 64].map(tokens_within), [1, 2, 64, 66, 68, 84, 116, 180]);
    }

    fn sets() -> impl Strategy<Value = TableSet> {
        let class = (1usize..90, any::<u64>()).prop_map(|(count, seed)| {
            let mut class = vec![0u16; count];
            let mut x = seed;
            class[count - 1] = 1;
            let mut left = SCALE as u16 - 1;
            while left > 0 {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let part = (1 + (x >> 40) as u16 % left.max(1)).min(left);
                class[(x >> 33) as usize % count] += part;
                left -= part;
            }
            class
        });
        proptest::collection::vec(class, 1..=MAX_CLASSES).prop_map(|classes| TableSet::new(&classes))
    }

    proptest! {
        #[test]
        fn sets_come_back(set in sets()) {
            let bytes = set.to_bytes();
            prop_assert_eq!(TableSet::parse(&bytes).unwrap(), set);
            prop_assert!(TableSet::parse(&bytes[..bytes.len() - 1]).is_err());
        }

        #[test]
        fn any_bytes_are_a_canonical_set_or_refused(bytes: Vec<u8>) {
            if let Ok(set) = TableSet::parse(&bytes) {
                prop_assert_eq!(set.to_bytes(), bytes);
            }
        }

        #[test]
        fn lookups_agree(set in sets()) {
            check_lookup(&set);
        }

        #[test]
        fn a_lookup_keeps_nothing_of_the_set_before(before in sets(), set in sets()) {
            let (mut again, mut fresh) = (Lookup::default(), Lookup::default());
            again.set(&before);
            let memory = again.entries.as_ptr();
            again.set(&set);
            fresh.set(&set);
            prop_assert!(again.is_of(&set) && again.entries == fresh.entries);
            prop_assert_eq!(again.entries.as_ptr(), memory, "the memory is used again");
        }
    }
}
