//! DOC
mod block;
mod crc;
mod memory;
mod prologue;
mod stream;
mod sums;
mod warp;

mod generated;
mod hostile;
mod shapes;
mod vectors;
mod writer;

use self::memory::{Memory, Payload};
use self::stream::DeviceTables;
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
