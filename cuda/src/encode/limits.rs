//! Sizes of the memory of an encoding.

/// Sizes of device memory. Tests make them small, so that small checkpoints need several rounds.
///
/// Each of [`WORKERS`] threads has at most `memory` bytes for all but payloads and digests: in the analysis of a wave, `scratch`
/// and `wave` or `ahead`; when streams are written, the same and `payloads`, twice if streams overflow. While tables are trained,
/// the first thread has no memory, the others have that of [`Limits::in_training`], and training has the rest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum size of the chunks of a wave, which are analysed together, in bytes of lanes. A wave may have one chunk more.
    pub lanes: u64,
    /// Maximum size of the memory for the chunks of a wave, or of a sample, in bytes: see `chunks::memory_of`. A chunk may need more.
    pub wave: u64,
    /// Maximum size of the memory for waves of a thread that are analysed while tables are trained, in bytes. One wave is always.
    pub ahead: u64,
    /// Maximum size of the scratch memory in bytes. It has a slot at least.
    pub scratch: u64,
    /// Memory that is not in use is freed before all exceeds this size, in bytes.
    pub memory: u64,
    /// Maximum size of the streams, and of the payloads without streams, that are written together, in bytes. A chunk may need
    /// more.
    pub payloads: u64,
    /// Room for streams in 256ths of their estimated size.
    pub room: u64,
    /// Maximum size of the tensors that are hashed in one launch, in bytes. A tensor may have more.
    pub hashed: u64,
    /// Size of the memory for converted lanes that are hashed, in bytes: a multiple of 32 KiB.
    pub converted: u64,
    /// From this number of segments per multiprocessor on, one warp encodes a segment, otherwise several.
    pub alone: u64,
}

/// Maximum number of threads that encode waves.
pub(crate) const WORKERS: usize = 2;
/// From this size on, in bytes of lanes, a checkpoint has waves for every thread. Smaller waves leave much of a device idle.
const SHARED: u64 = 64 << 20;

impl Limits {
    /// The limits of a thread while tables are trained. Training may use what the threads leave.
    pub fn in_training(self) -> Self {
        Self { memory: self.memory - self.memory / 8, ..self }
    }

    /// Size of the lanes of a wave, for `total` bytes of lanes in all: waves have about the same size, and threads as many waves.
    pub fn wave_bytes(&self, total: u64) -> u64 {
        let workers = if total < SHARED { 1 } else { WORKERS as u64 };
        total.div_ceil(total.div_ceil(self.lanes.max(1)).max(1).next_multiple_of(workers))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            lanes: 268 << 20,
            wave: 44 << 20,
            ahead: 76 << 20,
            scratch: 156 << 20,
            memory: 240 << 20,
            payloads: 32 << 20,
            room: 320,
            hashed: 4 << 30,
            converted: 12 << 20,
            alone: 16,
        }
    }
}
