//! Sizes of the scratch memory for lists of changes and copies of lanes (`kernels/README.md`).

use crate::abi::{self, LIST_STEP};

/// Size of a slot in bytes. The lists of changes of most chunks fit.
const SCRATCH_SLOT: u32 = 256 << 10;
/// Slots per multiprocessor. They are more than the resident blocks, so a block finds a free slot quickly.
const SLOTS_PER_MULTIPROCESSOR: u32 = 4;
/// Resident blocks of `tpde_conditioned` per multiprocessor, which is the minimum useful number of slots.
const RESIDENT_BLOCKS: u32 = 3;

/// Scratch memory of an application in place, see `kernels/README.md`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scratch {
    pub address: u64,
    pub slots: u32,
    pub slot_bytes: u32,
    /// Size of the head and all slots, in bytes.
    pub bytes: u64,
}

impl Scratch {
    /// Returns slots for all resident blocks of a device.
    pub fn of_device(multiprocessors: u32) -> Self {
        Self::new(SLOTS_PER_MULTIPROCESSOR * multiprocessors, SCRATCH_SLOT)
    }

    /// Returns slots that blocks use while they decode. Like all constructors it sets no address.
    fn new(slots: u32, slot_bytes: u32) -> Self {
        let bytes = abi::scratch_head(slots) + u64::from(slots) * u64::from(slot_bytes);
        Self { address: 0, slots, slot_bytes, bytes }
    }

    /// Returns memory for lists that are kept from the dry launch to the commit: `changes` bytes for `chunks` chunks, at most
    /// `most` bytes in total. Returns `None` if there are no changes, or the limit is too small.
    pub fn kept(chunks: u32, changes: u64, most: u64) -> Option<Self> {
        let slots = chunks + 1;
        let head = abi::scratch_head(slots);
        let bytes = changes.min(most.saturating_sub(head)).min(u32::MAX.into()) / LIST_STEP * LIST_STEP;
        (bytes > 0).then_some(Self { address: 0, slots, slot_bytes: bytes as u32, bytes: head + bytes })
    }

    /// Returns slots for `chunks` chunks with changes. Their lists have at most `changes` bytes each, and all slots at most
    /// `most` bytes in total. Returns `None` if no slot is needed or fits.
    pub fn of_chunks(chunks: u32, changes: u64, multiprocessors: u32, most: u64) -> Option<Self> {
        let list_bytes = changes.min(SCRATCH_SLOT.into());
        let slot_capacity = |slots: u32| (most.saturating_sub(abi::scratch_head(slots)) / u64::from(slots)) / LIST_STEP * LIST_STEP;
        let slots = [SLOTS_PER_MULTIPROCESSOR, RESIDENT_BLOCKS].map(|blocks| (blocks * multiprocessors).min(chunks)).into_iter();
        let slots = slots.filter(|slots| *slots > 0).collect::<Vec<_>>();
        let slot_count = slots.iter().find(|slots| slot_capacity(**slots) >= list_bytes).or(slots.last())?;
        let slot_bytes = slot_capacity(*slot_count).min(list_bytes) as u32;
        (slot_bytes > 0).then_some(Self::new(*slot_count, slot_bytes))
    }

    /// Returns slots of `bytes` bytes, for all lanes of a chunk, one per resident block or per chunk. Returns `None` if they exceed
    /// `most` bytes in total.
    pub fn of_lanes(chunks: u32, bytes: u64, multiprocessors: u32, most: u64) -> Option<Self> {
        let slot_bytes = u32::try_from(bytes.next_multiple_of(LIST_STEP)).ok()?;
        let scratch = Self::new((RESIDENT_BLOCKS * multiprocessors).min(chunks), slot_bytes);
        (scratch.bytes <= most).then_some(scratch)
    }

    /// Returns the same memory at an address. The caller must zero the head.
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
            // One slot per chunk, sized for its changes; at most SLOTS_PER_MULTIPROCESSOR per multiprocessor.
            (1, 256, 132, 48 << 20, 1, 256),
            (500, 10_240, 132, 48 << 20, 500, 10_240),
            (5000, 10_240, 132, 48 << 20, 528, 10_240),
            // Four slots per multiprocessor would exceed the limit, so there are three. A slot has at most 256 KiB and its share
            // of the limit.
            (5000, 109_312, 132, 48 << 20, 396, 109_312),
            (5000, 4 << 20, 132, 48 << 20, 396, 126_976),
            // The limit has no effect: four slots of 256 KiB per multiprocessor.
            (5000, 4 << 20, 8, 48 << 20, 32, 262_144),
        ] {
            let scratch = Scratch::of_chunks(chunks, changes, multiprocessors, most).unwrap();
            assert_eq!((scratch.slots, scratch.slot_bytes), (slots, slot_bytes), "{chunks} chunks of {changes} bytes");
            assert!(scratch.bytes <= most && u64::from(scratch.slot_bytes).is_multiple_of(LIST_STEP));
        }
        assert!(Scratch::of_lanes(9, 1000, 132, 9 * 1024 + 255).is_none());
        let scratch = Scratch::of_lanes(9, 1000, 132, 9 * 1024 + 256).unwrap();
        assert_eq!((scratch.slots, scratch.slot_bytes, scratch.bytes), (9, 1024, 9 * 1024 + 256));
        let scratch = Scratch::of_lanes(5000, 1 << 20, 132, 1 << 30).unwrap();
        assert_eq!((scratch.slots, scratch.slot_bytes), (396, 1 << 20), "one per resident block");
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
