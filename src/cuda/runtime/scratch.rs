//! Sizes of scratch memory, which keeps changes of chunks until they are carried out (`kernels/README.md`).

use crate::cuda::abi::{self, LIST_STEP};

/// Bytes of a slot of scratch memory: the changes of a chunk, mostly.
const SCRATCH_SLOT: u32 = 256 << 10;
/// Slots for each multiprocessor: more than blocks that it holds at once, so that one is soon found.
const BLOCKS: u32 = 4;
/// Blocks of `tpde_conditioned` that a multiprocessor holds at once: there are no slots to spare then.
const BLOCKS_LEAST: u32 = 3;

/// Scratch memory of a mode in place, see `kernels/README.md`.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Scratch {
    pub address: u64,
    pub slots: u32,
    pub slot_bytes: u32,
    /// How large it is.
    pub bytes: u64,
}

impl Scratch {
    /// Slots for all blocks that a device runs at once.
    pub fn of_device(multiprocessors: u32) -> Self {
        Self::new(BLOCKS * multiprocessors, SCRATCH_SLOT)
    }

    /// Slots that chunks take while they are decoded. It has no address yet, like all that follow.
    fn new(slots: u32, slot_bytes: u32) -> Self {
        let bytes = abi::scratch_head(slots) + u64::from(slots) * u64::from(slot_bytes);
        Self { address: 0, slots, slot_bytes, bytes }
    }

    /// What keeps the changes of so many chunks, which take `changes` bytes, from one launch to the next, within `most` bytes; none
    /// if there are none, or no room.
    pub fn kept(chunks: u32, changes: u64, most: u64) -> Option<Self> {
        let slots = chunks + 1;
        let head = abi::scratch_head(slots);
        let bytes = changes.min(most.saturating_sub(head)).min(u32::MAX.into()) / LIST_STEP * LIST_STEP;
        (bytes > 0).then_some(Self { address: 0, slots, slot_bytes: bytes as u32, bytes: head + bytes })
    }

    /// What serves so many chunks that change, whose lists of changes take at most `changes` bytes each, within `most` bytes; none if
    /// there are none.
    pub fn of_chunks(chunks: u32, changes: u64, multiprocessors: u32, most: u64) -> Option<Self> {
        let wanted = changes.min(SCRATCH_SLOT.into());
        let room = |slots: u32| (most.saturating_sub(abi::scratch_head(slots)) / u64::from(slots)) / LIST_STEP * LIST_STEP;
        let slots = [BLOCKS, BLOCKS_LEAST].map(|blocks| (blocks * multiprocessors).min(chunks)).into_iter();
        let slots = slots.filter(|slots| *slots > 0).collect::<Vec<_>>();
        let found = slots.iter().find(|slots| room(**slots) >= wanted).or(slots.last())?;
        let slot_bytes = room(*found).min(wanted) as u32;
        (slot_bytes > 0).then_some(Self::new(*found, slot_bytes))
    }

    /// The same at an address; its head is to be zeroed.
    pub fn at(self, address: u64) -> Self {
        Self { address, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_memory_is_within_its_bound() {
        assert!(Scratch::of_chunks(0, 0, 132, 48 << 20).is_none());
        assert!(Scratch::of_chunks(9, 256, 132, 100).is_none());
        for (chunks, changes, multiprocessors, most, slots, slot_bytes) in [
            // A slot for each chunk, no larger than its changes want it; then as many as blocks are in flight.
            (1, 256, 132, 48 << 20, 1, 256),
            (500, 10_240, 132, 48 << 20, 500, 10_240),
            (5000, 10_240, 132, 48 << 20, 528, 10_240),
            // No room for that: one for each block, as large as there is room for.
            (5000, 109_312, 132, 48 << 20, 396, 109_312),
            (5000, 4 << 20, 132, 48 << 20, 396, 126_976),
            (5000, 4 << 20, 8, 48 << 20, 32, 262_144),
        ] {
            let scratch = Scratch::of_chunks(chunks, changes, multiprocessors, most).unwrap();
            assert_eq!((scratch.slots, scratch.slot_bytes), (slots, slot_bytes), "{chunks} chunks of {changes} bytes");
            assert!(scratch.bytes <= most && u64::from(scratch.slot_bytes).is_multiple_of(LIST_STEP));
        }
        assert!(Scratch::kept(9, 0, 48 << 20).is_none());
        assert!(Scratch::kept(9, 256, 300).is_none());
        for (chunks, changes, most, slot_bytes, bytes) in [
            (9, 256, 512, 256, 512),
            (1000, 1 << 20, 48 << 20, 1 << 20, (1 << 20) + 4096),
            (100, 1 << 40, 48 << 20, (48 << 20) - 512, 48 << 20),
        ] {
            let scratch = Scratch::kept(chunks, changes, most).unwrap();
            assert_eq!(
                (scratch.slots, scratch.slot_bytes, scratch.bytes),
                (chunks + 1, slot_bytes, bytes),
                "{chunks} chunks, {changes} bytes"
            );
        }
    }
}
