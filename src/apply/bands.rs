//! Gathers short runs of bytes in memory and writes them together.
//!
//! The rows of a part that is cut by columns are short runs in the file of its tensor. One write for each of them would cost more
//! than decoding.

use crate::safetensors::Location;
use std::collections::BTreeMap;
use std::io::Result;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tpde_core::layout::StridedLayout;

/// Size in bytes of a block of a tensor.
const BLOCK: u64 = 1 << 20;
/// Maximum number of blocks in memory. They hold the bytes of a batch of chunks, and the blocks that two batches share.
const MAX_BLOCKS: usize = 64;
/// Minimum size, in bytes, of runs that are not gathered.
const LONG_RUN: u64 = 64 << 10;

/// Whether writing these runs one by one is expensive.
pub(super) fn are_short(runs: &StridedLayout) -> bool {
    runs.is_scattered() && runs.run() < LONG_RUN
}

/// A block of a tensor that is not yet complete.
struct Block {
    /// The bytes. `None` if there was no memory for them: the runs of the block are written one by one.
    bytes: Option<Vec<u8>>,
    /// Number of bytes that have not arrived.
    missing: usize,
}

/// Key of a block: the number of its file, and its offset in the file.
type Key = (usize, u64);

/// The blocks that are not yet complete.
#[derive(Default)]
struct Blocks {
    all: BTreeMap<Key, Arc<Mutex<Block>>>,
    /// Number of blocks that are in memory.
    in_memory: usize,
}

/// Blocks of tensors whose parts arrive in any order and are disjoint. A block is written when its last byte arrives, so nothing is
/// left when all parts of the tensors have arrived.
#[derive(Default)]
pub(super) struct Bands(Mutex<Blocks>);

impl Bands {
    /// Takes the bytes of a part of a tensor of `size` bytes at `location`, from byte `offset` of the part on. `write` writes bytes at
    /// an offset of the file.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn put(
        &self,
        location: Location,
        size: u64,
        runs: &StridedLayout,
        offset: u64,
        bytes: &[u8],
        write: impl Fn(&[u8], u64) -> Result<()>,
    ) -> Result<()> {
        let mut number = 0;
        // The runs in one block: offset in the block, and range of `bytes`.
        let mut in_block: Vec<(usize, Range<usize>)> = Vec::new();
        runs.try_each(offset, bytes.len(), |mut at, mut range| -> Result<()> {
            while !range.is_empty() {
                if at / BLOCK != number {
                    self.put_in_block(location, size, number, &in_block, bytes, &write)?;
                    in_block.clear();
                    number = at / BLOCK;
                }
                let within = at % BLOCK;
                let here = range.len().min((BLOCK - within) as usize);
                in_block.push((within as usize, range.start..range.start + here));
                range.start += here;
                at += here as u64;
            }
            Ok(())
        })?;
        self.put_in_block(location, size, number, &in_block, bytes, &write)
    }

    fn put_in_block(
        &self,
        location: Location,
        size: u64,
        number: u64,
        runs: &[(usize, Range<usize>)],
        bytes: &[u8],
        write: &impl Fn(&[u8], u64) -> Result<()>,
    ) -> Result<()> {
        if runs.is_empty() {
            return Ok(());
        }
        let start = location.start + number * BLOCK;
        let key = (location.file, start);
        let block = self.block(key, BLOCK.min(size - number * BLOCK) as usize);
        let mut block = block.lock().unwrap_or_else(PoisonError::into_inner);
        for (within, range) in runs {
            match &mut block.bytes {
                Some(all) => all[*within..][..range.len()].copy_from_slice(&bytes[range.clone()]),
                None => write(&bytes[range.clone()], start + *within as u64)?,
            }
            block.missing = block.missing.saturating_sub(range.len());
        }
        if block.missing == 0 {
            let complete = block.bytes.take();
            let mut blocks = self.blocks();
            blocks.all.remove(&key);
            blocks.in_memory -= usize::from(complete.is_some());
            drop(blocks);
            if let Some(complete) = complete {
                write(&complete, start)?;
            }
        }
        Ok(())
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of `size` bytes.
    fn block(&self, key: Key, size: usize) -> Arc<Mutex<Block>> {
        let blocks = &mut *self.blocks();
        let make = || {
            let has_room = blocks.in_memory < MAX_BLOCKS;
            blocks.in_memory += usize::from(has_room);
            Arc::new(Mutex::new(Block { bytes: has_room.then(|| vec![0; size]), missing: size }))
        };
        blocks.all.entry(key).or_insert_with(make).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    /// Writes a tensor of 3-byte rows in three parts by columns, in pieces in an order that `order` permutes. Returns the number of
    /// writes.
    fn written(rows: u64, pieces_of: impl Fn(&mut Vec<(u64, u64, usize)>)) -> u64 {
        let start = 100;
        let (location, all) = (Location { file: 0, start }, 3 * rows);
        let file = RefCell::new(vec![0; (start + all) as usize]);
        let expected: Vec<u8> = (0..all).map(|at| (at % 251) as u8 + 1).collect();
        let bands = Bands::default();
        let runs: Vec<_> =
            (0..3).map(|column| StridedLayout::of_rectangle(8, &[rows, 3], None, &[0, column], &[rows, 1])).collect();
        let mut pieces = Vec::new();
        for column in 0..3 {
            pieces.extend((0..rows).step_by(1000).map(|row| (row, column, 1000.min(rows - row) as usize)));
        }
        pieces_of(&mut pieces);
        let writes = Cell::new(0);
        for (row, column, size) in pieces {
            let bytes: Vec<u8> = (row..row + size as u64).map(|row| expected[(3 * row + column) as usize]).collect();
            let write = |bytes: &[u8], at: u64| {
                writes.set(writes.get() + 1);
                file.borrow_mut()[at as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            };
            bands.put(location, all, &runs[column as usize], row, &bytes, write).unwrap();
        }
        assert!(file.borrow()[start as usize..] == expected[..]);
        let blocks = bands.0.into_inner().unwrap();
        assert!(blocks.all.is_empty() && blocks.in_memory == 0);
        writes.get()
    }

    #[test]
    fn runs_that_fill_blocks_are_written_block_by_block() {
        let blocks = 5;
        let rows = blocks * BLOCK / 3 - 7;
        assert_eq!(written(rows, |_| {}), blocks);
        assert_eq!(written(rows, |pieces| pieces.sort_unstable()), blocks);
        assert_eq!(written(rows, |pieces| pieces.reverse()), blocks);
    }

    #[test]
    fn runs_beyond_the_memory_are_written_one_by_one() {
        let rows = (MAX_BLOCKS as u64 + 1) * BLOCK / 3;
        assert_eq!(written(rows, |pieces| pieces.sort_unstable()), MAX_BLOCKS as u64 + 1);
        // Whole parts one after another: the blocks after the first `MAX_BLOCKS` are not held in memory.
        let writes = written(rows, |_| {});
        assert!(writes > BLOCK, "{writes}");
    }
}
