//! A reference model of the device's algorithm: codec `conditioned` (`spec/codecs.md` section 4) as a GPU runs it, in plain Rust.
//!
//! One block decodes, applies and verifies one chunk in one launch (`spec/tpde-format.md` section 13, steps 8 to 11). The model
//! says what each warp does between two barriers, so that a kernel can follow it line by line: loops over warps and lanes stand
//! for what runs at once, arrays of 32 for registers, [`memory`] for shared and global memory. It is compiled for tests alone,
//! and they hold it equal to the decoder of the crate. An access out of bounds, a misaligned one, a value read before it is
//! written, or one that two warps touch without a barrier between them panics, whatever the payload holds.
//!
//! | file | |
//! |---|---|
//! | `warp` | ballots, shuffles, scans |
//! | `memory` | shared and global memory, with checks for bounds, alignment and races |
//! | `crc` | CRC-32 of a payload by a block |
//! | `prologue` | header, maps, segments, exceptions |
//! | `tables` | table sets: small in global memory, expanded in shared memory |
//! | `stream` | a warp that decodes: token search, states, words |
//! | `sums` | chunk sums |
//! | `block` | segments, tiles and phases: begin here |
//! | `writer`, `shapes`, `generated`, `hostile`, `vectors` | the tests |
//!
//! # Design
//!
//! **Segments and groups.** With *S* segments and *W* warps, min(*S*, *W*) *groups* of warps each work through their segments, one
//! after the other. Within a segment a group goes from *tile* to tile: 256 lanes a warp, 8 consecutive ones a thread. Eight lanes
//! never straddle a block of 128, a segment, or a row of the chunk sums, and their classes fit in one register.
//!
//! **Phases of a tile,** with a barrier of the group (`bar.sync` of its own, or `__syncwarp` for a group of one warp) between them:
//!
//! 1. *classify:* base lanes, loaded one tile ahead, to the base's sum, to their classes, and into the tile in shared memory; a
//!    scan over the warp of the numbers of coded lanes;
//! 2. *append:* place in the tile and class of each coded lane, 16 bits, to the queue; the next tile's loads are issued;
//! 3. *decode:* one warp of the group takes steps of *N* from the queue, applies their deltas to the tile, and makes the changes
//!    that are listed;
//! 4. *hand out:* lanes from the tile to the target's sum and to the output. No barrier follows: a thread reads and then
//!    overwrites its own lanes only.
//!
//! **Put off.** A step needs all its *N* lanes, and words are read for tokens before extra bits, so the last coded lanes of a
//! tile, fewer than *N*, must wait for the next tile. The decoding warp keeps them, with their base lanes, in registers; once they
//! have their values it stores them by themselves and corrects the target's sum by a term each. The alternative, a ring of tiles
//! that waits for them, has no bound: 31 coded lanes may be followed by a million that are not.
//!
//! **Why one warp decodes and the others wait.** A stream is serial: about 200 cycles a step, and no step can begin before the one
//! before has read its words. Warps that wait cost no instructions, and other blocks of the multiprocessor have theirs: what
//! matters is that 4 or more blocks fit on one, hence the small tables and tiles below. A pipeline, with decoding of one tile
//! beside classification of the next, would save a third of a block's time in the sparse case and gain nothing once memory is
//! busy. It needs tiles twice and is the next thing to try if measurements disagree.
//!
//! **Token search.** Buckets of 1, 2 or 4 slots, as fine as the set's classes let 16 KiB be, name a symbol; where its slots end
//! before the one sought, the next symbol is tried, at most 3 times. A full table of 4,096 tokens a class takes 60 KiB for 15
//! classes and halves the blocks of a multiprocessor. A search through the rows as on AVX-512 takes as many rounds as the largest
//! token of 32 lanes, some 5 to 40, of 6 instructions and a look-up each: there the rows are registers, here they are not. With
//! buckets it is two look-ups that depend on each other and, in one step of 5 to 50, a third. The buckets are made by each block:
//! an index of some hundred kilobytes may own 65,535 sets, which must not become gigabytes on the device.
//!
//! **Sums.** Both are formed over all lanes: 0.5 wide multiplications for a BF16 lane and sum, against some 15 operations for a
//! term of a change. A wrong base makes streams fail; so when one does, its group goes on with the base's sum alone, and
//! [`status`] lets that win.
//!
//! **CRC.** A pass over the payload by all threads before anything else; see [`crc`].
//!
//! **Alignment.** Tensors are aligned to their lanes and no more. Blocks, sums and tiles count from the chunk's first lane, so the
//! grid stays there, and where an address is not a multiple of 16 an access of 16 bytes becomes two of 8, and so on. The sectors
//! of memory that are touched are the same. Peeled heads would shift the grid against the words of the sums, differently for
//! base and output. (Files in memory give multiples of 8, allocated tensors of 256.)
//!
//! **Modes.** Dry and out of place are one pass. In place is two, the first without stores, because the target's sum must be
//! known before the first store: twice the instructions, and for BF16 twice the reads but only the vectors that change as writes,
//! which together is no more traffic than out of place. To apply a whole pair *all checked*, a dry launch for all chunks comes
//! first and the storing launch leaves the dry pass out, at the same cost. The exceptions of a tile compare its lanes with the
//! base in memory, which is still there: a tile is stored after them.
//!
//! # Cost
//!
//! Operations of a BF16 lane, as thread instructions:
//!
//! | load, bounds | classify | two sums | scan, totals | append | tile, store | loop, barriers | all |
//! |---|---|---|---|---|---|---|---|
//! | 0.6 | 5 | 2.2 | 2.6 | 5 | 0.8 | 1 | 17 |
//!
//! A step is about 70 instructions of the decoding warp, 12 of them to apply, and 25 more for a round of extra bits; with *N* = 32
//! that is 70 or 95 a coded lane. So 5 % of coded lanes make 21 operations a lane, 9 % 24, 60 % 74 and all of them with extra bits
//! 112. An H200 reads and writes BF16 lanes at its full memory speed if they take at most about 25.
//!
//! The critical path of a chunk of 2^20 lanes (`steps_and_barriers_of_large_chunks` prints what it finds):
//!
//! - *sparse,* 4 % to 8 % coded, *S* = 1 or 2, 16 warps: 1,270 steps, 590 rounds of extra bits, 256 tiles and 769 barriers, and
//!   9 % of the coded lanes put off: about 450,000 cycles, two thirds of them decoding. A multiprocessor's share of the memory
//!   moves the chunk in 220,000, so 3 blocks on it hide the rest.
//! - *dense,* *S* = 16, all coded: each warp on its own, 2,048 steps and rounds of extra bits, 256 tiles, no barrier: 900,000
//!   cycles of issued instructions, which is the bound.
//!
//! These cycles are estimates from latencies and issue rates, not measurements.
//!
//! Shared memory for *W* = 16 and lanes of 2 bytes: 16 KiB buckets, 8 KiB symbols, 8 KiB tile, 8 KiB queue, under 1 KiB for all
//! else: 41 KiB. With *W* = 8 it is 33 KiB, and with 48 registers a thread 5 such blocks fit: more chunks at once, hence more decoding
//! warps, than 16 warps a block give. (The tables of the CRC lie where tile and queue will be.)
mod block;
mod crc;
mod memory;
mod prologue;
mod stream;
mod sums;
mod tables;
mod warp;

mod generated;
mod hostile;
pub mod shapes;
mod vectors;
pub mod writer;

use self::memory::{Memory, Payload};
use self::tables::DeviceTables;
use crate::error::Rule;
use crate::lane::Dtype;

/// A chunk's status word: 0, or what is wrong with it.
///
/// Where several checks fail, the least code is reported, whichever warp comes first (`atomicMin`). So a base that is not the
/// one that the pair was made from is not taken for a damaged stream, which is what it looks like to the decoder.
pub type Status = u32;

/// The codes, named as the spec's rules.
pub mod status {
    use super::Status;

    pub const OK: Status = 0;
    pub const PAYLOAD_CRC32: Status = 1;
    pub const PAYLOAD_PADDING: Status = 2;
    pub const PAYLOAD_SIZE: Status = 3;
    pub const PAYLOAD_HEADER: Status = 4;
    pub const PAYLOAD_CLASSES: Status = 5;
    pub const CHUNK_BASE_SUM: Status = 6;
    pub const PAYLOAD_STREAM: Status = 7;
    pub const PAYLOAD_POSITIONS: Status = 8;
    pub const PAYLOAD_DELTAS: Status = 9;
    pub const CHUNK_TARGET_SUM: Status = 10;
}

/// The rule that a status names.
pub fn rule(status: Status) -> Option<Rule> {
    Some(match status {
        status::PAYLOAD_CRC32 => Rule::PayloadCrc32,
        status::PAYLOAD_PADDING => Rule::PayloadPadding,
        status::PAYLOAD_SIZE => Rule::PayloadSize,
        status::PAYLOAD_HEADER => Rule::PayloadHeader,
        status::PAYLOAD_CLASSES => Rule::PayloadClasses,
        status::CHUNK_BASE_SUM => Rule::ChunkBaseSum,
        status::PAYLOAD_STREAM => Rule::PayloadStream,
        status::PAYLOAD_POSITIONS => Rule::PayloadPositions,
        status::PAYLOAD_DELTAS => Rule::PayloadDeltas,
        status::CHUNK_TARGET_SUM => Rule::ChunkTargetSum,
        _ => return None,
    })
}

/// What a launch does with the target lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Decode and check, store nothing.
    Dry,
    /// Base read, output written, unchanged lanes copied.
    OutOfPlace,
    /// Where the base lies: a dry pass, and if all is well a second one that stores what changes.
    InPlace,
}

/// A chunk as its record, its tensor's entry and its sums describe it; all of that has passed the checks of the index.
#[derive(Clone, Copy)]
pub struct Chunk<'a> {
    pub dtype: Dtype,
    pub lanes: usize,
    pub tables: Option<&'a DeviceTables>,
    /// The payload and its padding, and the size of the payload.
    pub payload: &'a [u8],
    pub size: usize,
    pub num_deltas: u32,
    pub crc32: u32,
    pub base_sum: u64,
    pub target_sum: u64,
}

/// How a block is made up, and in which order the model runs what on the device runs at once.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Warps of a block: a power of two up to 16.
    pub warps: usize,
    /// Which warp of a group decodes. A block would take it from its number: the decoding warps of the blocks on one
    /// multiprocessor should not all share the same quarter of it, which the warp's number mod 4 says.
    pub decoder: usize,
    /// Whether the warps of a phase, and the groups, run last to first.
    pub backwards: bool,
}

/// What is counted to say how long a chunk takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Steps of a decoding warp, rounds of extra bits, and times that a warp had to look at another symbol.
    pub steps: usize,
    pub extra_rounds: usize,
    pub searches: usize,
    /// Coded lanes that were put off.
    pub put_off: usize,
    /// Tiles, and barriers.
    pub tiles: usize,
    pub barriers: usize,
}

impl Counts {
    /// Of warps that run at once, what takes longest.
    fn max(self, other: Self) -> Self {
        Self {
            steps: self.steps.max(other.steps),
            extra_rounds: self.extra_rounds.max(other.extra_rounds),
            searches: self.searches.max(other.searches),
            put_off: self.put_off.max(other.put_off),
            tiles: self.tiles.max(other.tiles),
            barriers: self.barriers.max(other.barriers),
        }
    }
}

/// What a block leaves behind, the output apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    pub status: Status,
    pub base_sum: u64,
    pub target_sum: u64,
    pub changed: u32,
    /// Of the busiest group of the last pass.
    pub counts: Counts,
}

/// Runs a block on a chunk.
pub fn run(chunk: &Chunk<'_>, memory: &mut Memory, config: Config) -> Outcome {
    use crate::lane::with_lane;
    assert!(config.warps.is_power_of_two() && config.warps <= 16);
    let payload = Payload::new(chunk.payload, chunk.size);
    with_lane!(chunk.dtype.lane_bytes(), L => block::run::<L>(chunk, &payload, memory, config))
}
