//! Elias-δ code of gaps (`spec/codecs.md` section 3.3; P. Elias, "Universal codeword sets and representations of the
//! integers", IEEE Transactions on Information Theory 21, 1975).

use crate::prelude::*;

/// Appends the codes of `gap + 1`, most significant bit first. The last byte is padded with zeros.
pub(super) fn encode(gaps: impl Iterator<Item = u32>, out: &mut Vec<u8>) {
    let (mut buffer, mut filled) = (0u64, 0);
    let mut put = |value: u64, bits: u32, out: &mut Vec<u8>| {
        buffer = buffer << bits | value;
        filled += bits;
        while filled >= 8 {
            filled -= 8;
            out.push((buffer >> filled) as u8);
        }
    };
    for gap in gaps {
        let x = u64::from(gap) + 1;
        let n = x.ilog2();
        let k = (n + 1).ilog2();
        put(u64::from(n + 1), 2 * k + 1, out);
        put(x & ((1 << n) - 1), n, out);
    }
    // Pads a partial last byte with zeros.
    put(0, 7, out);
}

/// Reason why there is no next gap.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Bad {
    /// The bytes end inside a code.
    End,
    /// A code starts with five zeros. No gap of a chunk is that large.
    TooLong,
}

/// Reads codes from the most significant bit down.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    /// Number of bits read so far.
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the next 32 bits without consuming them. Bits past the end are 0.
    fn peek(&self) -> u32 {
        let from = self.at / 8;
        let mut window = [0; 8];
        let rest = self.bytes.get(from..).unwrap_or_default();
        let n = rest.len().min(8);
        window[..n].copy_from_slice(&rest[..n]);
        (u64::from_be_bytes(window) << (self.at % 8) >> 32) as u32
    }

    fn take(&mut self, bits: u32) -> Result<(), Bad> {
        self.at += bits as usize;
        if self.at <= 8 * self.bytes.len() { Ok(()) } else { Err(Bad::End) }
    }

    /// Reads the next gap.
    pub fn gap(&mut self) -> Result<u32, Bad> {
        let k = self.peek().leading_zeros();
        if k > 4 {
            return Err(if self.at + 5 <= 8 * self.bytes.len() { Bad::TooLong } else { Bad::End });
        }
        self.take(k)?;
        let n = (self.peek() >> (31 - k)) - 1;
        self.take(k + 1)?;
        let low = (u64::from(self.peek()) >> (32 - n)) as u32;
        self.take(n)?;
        // n <= 30, because n + 1 has k + 1 <= 5 bits.
        Ok((1 << n | low) - 1)
    }

    /// Returns whether all unread bits are zero padding of the last byte.
    pub fn is_finished(&self) -> bool {
        self.at.div_ceil(8) == self.bytes.len() && (self.at.is_multiple_of(8) || self.peek() >> 24 == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn example_of_the_spec() {
        let mut out = Vec::new();
        encode([3, 16, 279].into_iter(), &mut out);
        assert_eq!(out, [0x61, 0x44, 0x48, 0xC0]);
    }

    #[test]
    fn a_truncated_code_and_a_code_that_is_too_long_differ() {
        // A gap of 0 is the single bit 1.
        for (ones, bytes, bad) in [
            (0, &[][..], Bad::End),
            (0, &[0][..], Bad::TooLong),
            (3, &[0xE0][..], Bad::TooLong),
            (4, &[0xF0][..], Bad::End),
            (8, &[0xFF][..], Bad::End),
            (11, &[0xFF, 0xE0][..], Bad::TooLong),
            (12, &[0xFF, 0xF0][..], Bad::End),
        ] {
            let mut reader = Reader::new(bytes);
            for _ in 0..ones {
                assert_eq!(reader.gap(), Ok(0));
            }
            assert_eq!(reader.gap(), Err(bad), "{bytes:x?}");
        }
        for gap in [1, 3, 16, 279, (1 << 22) - 1] {
            let mut out = Vec::new();
            encode([gap].into_iter(), &mut out);
            assert_eq!(Reader::new(&out).gap(), Ok(gap));
            out.pop();
            assert_eq!(Reader::new(&out).gap(), Err(Bad::End), "{gap} without its last byte");
        }
    }

    #[test]
    fn only_zeros_up_to_the_end_of_a_byte_may_be_left() {
        let finished_after = |gaps: usize, bytes: &[u8]| {
            let mut reader = Reader::new(bytes);
            (0..gaps).for_each(|_| assert!(reader.gap().is_ok()));
            reader.is_finished()
        };
        assert!(finished_after(3, &[0x61, 0x44, 0x48, 0xC0]));
        assert!(!finished_after(2, &[0x61, 0x44, 0x48, 0xC0]), "before the last gap");
        assert!(!finished_after(3, &[0x61, 0x44, 0x48, 0xC1]), "a bit that is set");
        assert!(!finished_after(3, &[0x61, 0x44, 0x48, 0xC0, 0]), "a byte more");
        assert!(finished_after(8, &[0xFF]) && !finished_after(8, &[0xFF, 0]) && !finished_after(7, &[0xFF]));
        assert!(finished_after(0, &[]));
    }

    proptest! {
        #[test]
        fn gaps_come_back(gaps in proptest::collection::vec(0u32..1 << 22, 0..300)) {
            let mut out = Vec::new();
            encode(gaps.iter().copied(), &mut out);
            let mut reader = Reader::new(&out);
            let read: Vec<_> = gaps.iter().map(|_| reader.gap().unwrap()).collect();
            prop_assert_eq!(read, gaps);
            prop_assert!(reader.is_finished());
        }

        #[test]
        fn any_bytes_end(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut reader = Reader::new(&bytes);
            let mut count = 0;
            while reader.gap().is_ok() { count += 1; }
            prop_assert!(count <= 8 * bytes.len());
        }
    }
}
