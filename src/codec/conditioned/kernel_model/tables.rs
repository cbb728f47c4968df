//! Table sets on the device: small in global memory, large in the shared memory of a block.

use super::warp::{WARP, per_lane};
use crate::codec::conditioned::tables::TableSet;

/// log2 of the sum of a class's frequencies.
pub const SCALE_LOG2: u32 = 12;
/// Bytes of the buckets of all classes.
const BUCKET_BYTES: usize = 16 << 10;
/// Most symbols of a class.
pub const SYMBOLS: usize = 136;

/// A table set in global memory, about 4 bytes for each in the index: an index may have very many sets, most of them unused.
///
/// A *symbol* is a token with a frequency that is not zero: where its slots begin in bits 0 to 11, their number less one in bits
/// 12 to 23, the token above.
pub struct DeviceTables {
    /// The symbols of all classes, one class after the other.
    symbols: Vec<u32>,
    /// Where the symbols of each class begin, and where the last ones end.
    firsts: Vec<u16>,
}

impl DeviceTables {
    pub fn new(set: &TableSet) -> Self {
        let mut tables = Self { symbols: Vec::new(), firsts: vec![0] };
        for class in set.classes() {
            let mut start = 0;
            for (token, frequency) in class.iter().enumerate().filter(|(_, frequency)| **frequency != 0) {
                let frequency = u32::from(*frequency);
                tables.symbols.push(start | (frequency - 1) << 12 | (token as u32) << 24);
                start += frequency;
            }
            tables.firsts.push(tables.symbols.len() as u16);
        }
        tables
    }

    /// Number of classes.
    pub fn classes(&self) -> usize {
        self.firsts.len() - 1
    }
}

/// The set of a chunk in shared memory, made by its block.
///
/// Slots are in *buckets* of 2^`shift`, and a bucket names the symbol of its first slot: from there the right one is at most
/// 2^`shift` − 1 symbols away, as each has a slot of its own.
#[derive(Default)]
pub struct Lookup {
    pub shift: u32,
    /// The buckets of each class, as symbols of that class.
    pub buckets: Vec<u8>,
    /// [`SYMBOLS`] places for each class.
    pub symbols: Vec<u32>,
}

impl Lookup {
    /// A warp takes a class, goes through its symbols, and 32 buckets of each at a time: 64 to 260 rounds of some 5 operations,
    /// for a chunk that takes hundreds of thousands.
    pub fn new(tables: &DeviceTables) -> Self {
        let classes = tables.classes();
        let shift = (0..).find(|shift| classes << (SCALE_LOG2 - shift) <= BUCKET_BYTES).unwrap();
        assert!(shift <= 2 && tables.symbols.len() <= classes * SYMBOLS);
        let buckets = 1 << (SCALE_LOG2 - shift);
        // 255 is no symbol: a bucket that is left out shows itself as an access out of bounds.
        let mut lookup = Self { shift, buckets: vec![255; classes * buckets], symbols: vec![0; classes * SYMBOLS] };
        for (class, range) in tables.firsts.windows(2).enumerate() {
            let symbols = &tables.symbols[range[0].into()..range[1].into()];
            for (i, &symbol) in symbols.iter().enumerate() {
                lookup.symbols[class * SYMBOLS + i] = symbol;
                let (start, last) = (symbol & 0xFFF, (symbol & 0xFFF) + (symbol >> 12 & 0xFFF));
                // The buckets whose first slot is one of these.
                let (mut first, end) = (start.div_ceil(1 << shift) as usize, (last >> shift) as usize + 1);
                while first < end {
                    per_lane(|lane| {
                        if first + lane < end {
                            lookup.buckets[class * buckets + first + lane] = i as u8;
                        }
                    });
                    first += WARP;
                }
            }
        }
        lookup
    }
}
