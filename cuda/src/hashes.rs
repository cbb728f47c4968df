//! BLAKE3 of device memory: the kernel `tpde_hash`.

use super::abi::ENDLESS_ROW;
use super::rows::Rows;
use super::runtime::copies;
use super::runtime::driver::{self, EnterGuard, Kernel, RawEvent, RawStream};
use super::runtime::inner::Inner;
use super::runtime::layout::MemoryLayout;
use super::runtime::memory::{Allocation, DeviceSlice, PinnedBuffer};
use super::runtime::stream::Stream;
use std::ops::Range;
use std::sync::Arc;
use tpde_core::error::{Error, Result};
use zerocopy::{Immutable, IntoBytes};

/// Size of a piece, which a warp hashes, in bytes.
pub(crate) const PIECE: u64 = 32 << 10;
/// Number of nodes that a warp combines. A group of nodes takes one entry more, for its counter.
const GROUP: u32 = 32;
/// Size of an entry in bytes.
const NODE: u64 = 32;
/// Status word of a range whose hash is not the expected one.
pub(crate) const DIFFERS: u32 = 1;

/// Consecutive pieces of a range: `HashRange` of `kernels/digest/hash.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Immutable, IntoBytes)]
#[repr(C)]
pub(crate) struct HashRange {
    pub address: u64,
    pub bytes: u64,
    pub row: u64,
    pub pitch: u64,
    pub first_warp: u32,
    pub first_piece: u32,
    pub nodes: u32,
    pub number: u32,
}

/// The parameter of `tpde_hash`: `Hashes` of `kernels/digest/hash.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct HashLaunch {
    pub ranges: u64,
    pub nodes: u64,
    pub hashes: u64,
    pub expected: u64,
    pub statuses: u64,
    pub flag: u64,
    pub count: u32,
    pub first: u32,
    pub warps: u32,
    pub reserved: u32,
}

/// Ranges of memory to be hashed, distributed to warps. It has no device memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct HashPlan {
    /// Parts of the ranges, in the order of their warps.
    pub parts: Vec<HashRange>,
    /// Number of warps of all parts.
    warps: u32,
    nodes: u32,
    ranges: u32,
}

/// A range of a [`HashPlan`], of which parts can be added.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HashedRange {
    bytes: u64,
    nodes: u32,
    number: u32,
}

/// Parts of a plan that one launch hashes.
#[derive(Debug, Clone)]
pub(crate) struct HashSlice {
    parts: Range<u32>,
    warps: Range<u32>,
}

/// Number of pieces of a range of `bytes` bytes.
fn pieces(bytes: u64) -> Result<u32> {
    let pieces = bytes.div_ceil(PIECE).max(1);
    u32::try_from(pieces).map_err(|_| Error::InvalidArgument(format!("a hash of {bytes} bytes: more than 2^32 pieces of 32 KiB")))
}

impl HashPlan {
    /// Adds a range of `bytes` bytes, without parts. Ranges are numbered in the order in which they are added.
    pub fn begin(&mut self, bytes: u64) -> Result<HashedRange> {
        let range = HashedRange { bytes, nodes: self.nodes, number: self.ranges };
        let mut level = pieces(bytes)?;
        while level > 1 {
            level = level.div_ceil(GROUP);
            let nodes = u64::from(self.nodes) + u64::from(GROUP + 1) * u64::from(level);
            self.nodes = u32::try_from(nodes).map_err(|_| Error::InvalidArgument("hashes with more than 2^32 nodes".into()))?;
        }
        self.ranges += 1;
        Ok(range)
    }

    /// Adds the pieces of a range that contain bytes `part`. `address` is that of byte 0 of the range. `part` begins with a piece.
    /// Each piece must be added once. An empty range has an empty part.
    pub fn add_part(&mut self, range: HashedRange, address: u64, rows: Option<Rows>, part: Range<u64>) -> Result<()> {
        debug_assert!(part.start.is_multiple_of(PIECE) && part.end <= range.bytes);
        let (row, pitch) = match rows {
            Some(rows) if rows.bytes < range.bytes => (rows.bytes, rows.pitch),
            _ => (ENDLESS_ROW, ENDLESS_ROW),
        };
        let first_piece = (part.start / PIECE) as u32;
        let own = pieces(part.end - part.start)?;
        let HashedRange { bytes, nodes, number } = range;
        self.parts.push(HashRange { address, bytes, row, pitch, first_warp: self.warps, first_piece, nodes, number });
        let warps = self.warps.checked_add(own).filter(|&warps| warps <= i32::MAX as u32);
        self.warps = warps.ok_or_else(|| Error::InvalidArgument("hashes of more than 2^31 pieces of 32 KiB".into()))?;
        Ok(())
    }

    /// Adds a range that is in memory as a whole. With `rows`, the memory begins and ends with a row.
    pub fn add(&mut self, memory: &DeviceSlice, rows: Option<Rows>) -> Result<()> {
        let bytes = match rows {
            Some(Rows { bytes, pitch }) if memory.bytes() > 0 => {
                let is_whole = bytes > 0 && bytes <= memory.bytes() && pitch >= bytes;
                if !is_whole || !(memory.bytes() - bytes).is_multiple_of(pitch) {
                    let all = memory.bytes();
                    return Err(Error::InvalidArgument(format!("rows of {bytes} bytes, {pitch} apart, in memory of {all} bytes")));
                }
                ((memory.bytes() - bytes) / pitch + 1) * bytes
            }
            _ => memory.bytes(),
        };
        memory.end()?;
        let range = self.begin(bytes)?;
        self.add_part(range, memory.address(), rows, 0..bytes)
    }

    /// Returns the parts that were added since the end of another slice, or all.
    pub fn slice_after(&self, last: Option<&HashSlice>) -> HashSlice {
        let (part, warp) = last.map_or((0, 0), |last| (last.parts.end, last.warps.end));
        HashSlice { parts: part..self.parts.len() as u32, warps: warp..self.warps }
    }

    /// Number of ranges.
    pub fn len(&self) -> u32 {
        self.ranges
    }

    /// Size of the nodes in bytes. They must be zero before the first launch.
    pub fn node_bytes(&self) -> u64 {
        NODE * u64::from(self.nodes)
    }

    /// Size of the parts in bytes.
    pub fn part_bytes(&self) -> u64 {
        size_of_val::<[HashRange]>(&self.parts) as u64
    }
}

impl HashSlice {
    /// Queues the hashes of these parts. `launch` has the addresses of all parts and nodes of the plan, and those of results.
    /// The hash of a range is complete when all of its parts have been hashed, by any number of launches.
    ///
    /// # Safety
    /// The addresses of `launch` are those of the plan, whose nodes were zero before the first launch. They and the memory of the
    /// ranges are valid until the stream has completed. Launches with the same nodes do not run at the same time.
    pub unsafe fn queue(&self, cx: &EnterGuard<'_>, kernel: Kernel, stream: RawStream, launch: &HashLaunch) -> Result<()> {
        if self.parts.is_empty() {
            return Ok(());
        }
        let launch = HashLaunch {
            ranges: launch.ranges + u64::from(self.parts.start) * size_of::<HashRange>() as u64,
            count: self.parts.len() as u32,
            first: self.warps.start,
            warps: self.warps.len() as u32,
            ..*launch
        };
        // SAFETY: promised by the caller.
        unsafe { kernel.launch(cx, stream, launch.warps, &launch) }
    }
}

/// BLAKE3 hashes of ranges of device memory, queued on a stream.
///
/// The hashes are those of the standard, for any length and alignment. An H200 hashes long ranges at the speed of its integer
/// units. That needs starts, rows and pitches that are multiples of 4; others take four times as long.
#[derive(Debug)]
#[must_use = "only `wait` returns the hashes"]
pub struct Hashes {
    device: Arc<Inner>,
    done: RawEvent,
    found: PinnedBuffer,
    /// The results, on the device.
    hashes: DeviceSlice,
}

impl Hashes {
    /// Queues the hashes of ranges, each with the rows of memory that has gaps. Memory with rows begins and ends with a row. The
    /// bytes in gaps are not read.
    ///
    /// Cost: one allocation of device memory, about 1,100 bytes per MiB of the ranges and 48 per range, and two small copies. The
    /// call waits for no stream. The memory of the ranges is held until the stream has completed, if it belongs to this crate.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for memory of another device, rows that do not fill their memory, more than 64 TiB in all, and a
    /// stream that is being captured; [`Error::Device`] if the driver refuses.
    pub fn queue(stream: &Stream, ranges: &[(DeviceSlice, Option<Rows>)]) -> Result<Self> {
        let device = stream.device();
        let mut plan = HashPlan::default();
        for (memory, rows) in ranges {
            memory.check_device(device)?;
            plan.add(memory, *rows)?;
        }
        Self::queue_with(stream, &plan, &[], |cx, kernel, launch, _| {
            // SAFETY: all parts are in memory that the caller holds until the stream has completed.
            unsafe { plan.slice_after(None).queue(cx, kernel, stream.raw(), launch) }
        })
    }

    /// Queues the hashes of a plan. `queue` queues all of its parts, with the kernel and the addresses that it is given; the last
    /// address is that of a copy of `uploaded`. Device memory that `queue` uses is held until the stream has completed.
    pub(crate) fn queue_with(
        stream: &Stream,
        plan: &HashPlan,
        uploaded: &[u8],
        queue: impl FnOnce(&EnterGuard<'_>, Kernel, &HashLaunch, u64) -> Result<()>,
    ) -> Result<Self> {
        let device = stream.device();
        let kernel = device.kernels.hash(&device.context)?;
        let cx = device.context.enter()?;
        if driver::is_capturing(&cx, stream.raw())? {
            return Err(Error::InvalidArgument("the stream is being captured into a graph, which cannot hold the memory".into()));
        }
        let mut layout = MemoryLayout::default();
        let hash_bytes = 32 * u64::from(plan.len());
        let sizes = [plan.part_bytes(), uploaded.len() as u64, plan.node_bytes(), hash_bytes];
        let [parts_at, uploaded_at, nodes_at, hashes_at] = layout.add_all(sizes);
        let memory = DeviceSlice::owned(Allocation::new(device, &cx, layout.bytes())?, layout.bytes());
        let hashes = memory.slice(hashes_at, hash_bytes)?;
        let contents = [(parts_at, plan.parts.as_bytes()), (uploaded_at, uploaded)];
        let parts = PinnedBuffer::with_parts(device, &cx, uploaded_at + uploaded.len() as u64, &contents)?;
        let found = PinnedBuffer::new(device, &cx, hash_bytes as usize)?;
        let done = RawEvent::new(&cx, false)?;
        let at = |offset: u64| memory.address() + offset;
        let launch = HashLaunch { ranges: at(parts_at), nodes: at(nodes_at), hashes: at(hashes_at), ..HashLaunch::default() };
        let queueing = device.queueing(&cx, stream.raw());
        // SAFETY: all parts are within the new memory. It, the pinned memory and the memory of the ranges are held until the
        // stream has completed, also after an error.
        unsafe {
            copies::copy_in(&cx, memory.address(), parts.as_ptr(), parts.len(), stream.raw())?;
            copies::fill(&cx, launch.nodes, 0, plan.node_bytes() as usize / 4, stream.raw())?;
        }
        queue(&cx, kernel, &launch, at(uploaded_at))?;
        // SAFETY: as above.
        unsafe {
            copies::copy_out(&cx, found.as_ptr(), launch.hashes, found.len(), stream.raw())?;
        }
        // The event of the guard also holds the memory of the ranges.
        queueing.end_with(&done)?;
        drop(cx);
        Ok(Self { device: device.clone(), done, found, hashes })
    }

    /// Returns the hashes on the device, 32 bytes per range. Work that is queued on the same stream, or waits for it, may read
    /// them.
    pub fn on_device(&self) -> &DeviceSlice {
        &self.hashes
    }

    /// Returns whether the stream has hashed all ranges, so that [`Hashes::wait`] does not wait.
    ///
    /// # Errors
    /// [`Error::Device`] if work on the device failed.
    pub fn is_done(&self) -> Result<bool> {
        self.done.is_passed(&self.device.context.enter()?)
    }

    /// Waits on the host until the stream has hashed all ranges, and returns their hashes.
    ///
    /// # Errors
    /// [`Error::Device`] if work on the device failed.
    pub fn wait(self) -> Result<Vec<[u8; 32]>> {
        self.done.wait(&self.device.context.enter()?)?;
        Ok(self.found.as_chunks::<32>().0.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::mem::offset_of;

    const TEXT: &str = include_str!("../kernels/digest/hash.cuh");

    #[test]
    fn structs_are_those_of_the_kernel() {
        macro_rules! ours {
            ($name:literal $type:ident { $($field:ident),+ $(,)? }) => {
                [$((concat!($name, ", ", stringify!($field)), offset_of!($type, $field))),+]
            };
        }
        let ranges = ours!("HashRange" HashRange { address, bytes, row, pitch, first_warp, first_piece, nodes, number });
        let launch = ours!("Hashes" HashLaunch {
            ranges, nodes, hashes, expected, statuses, flag, count, first, warps, reserved,
        });
        let theirs = TEXT.lines().filter_map(|line| {
            let (field, at) = line.strip_prefix("TPDE_OFFSET(")?.strip_suffix(");")?.rsplit_once(", ")?;
            Some((field, at.parse().unwrap()))
        });
        assert_eq!(ranges.into_iter().chain(launch).collect::<BTreeMap<_, _>>(), theirs.collect());
        assert!(TEXT.contains(&format!("TPDE_SIZE(HashRange, {});", size_of::<HashRange>())));
        assert!(TEXT.contains(&format!("TPDE_SIZE(Hashes, {});", size_of::<HashLaunch>())));
        assert!(TEXT.contains(&format!("TPDE_HASH_DIFFERS = {DIFFERS} ")));
        assert!(TEXT.contains(&format!("#define TPDE_HASH_THREADS {}\n", crate::abi::HASH_THREADS)));
        assert!(TEXT.contains(&format!("#define TPDE_HASH_SHARED {} ", crate::abi::HASH_SHARED)));
    }

    #[test]
    fn nodes_and_warps_are_counted() {
        for (bytes, warps, nodes) in [
            (0, 1, 0),
            (1, 1, 0),
            (PIECE, 1, 0),
            (PIECE + 1, 2, 33),
            (32 * PIECE, 32, 33),
            // Two groups of pieces, and the group above them.
            (32 * PIECE + 1, 33, 3 * 33),
            (1 << 30, 32 << 10, (1024 + 32 + 1) * 33),
        ] {
            let mut plan = HashPlan::default();
            let range = plan.begin(bytes).unwrap();
            plan.add_part(range, 256, None, 0..bytes).unwrap();
            assert_eq!((plan.warps, plan.nodes), (warps, nodes), "{bytes} bytes");
        }
        assert!(HashPlan::default().begin(1 << 50).is_err());
    }
}
