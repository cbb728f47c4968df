//! Payload digests of an application: the distribution of leaves to the warps of `tpde_digests`.

use super::program::PayloadChecks;
use super::schedule::{Group, Schedule};
use crate::index::{DeviceIndex, PayloadDigestSource};
use std::ops::Range;
use zerocopy::{Immutable, IntoBytes};

/// Leaves per piece. A piece is a subtree of BLAKE3.
const PIECE_LEAVES: u32 = 32;
/// Size of a leaf of BLAKE3, in bytes.
const LEAF: u32 = 1024;

/// Consecutive leaves of a payload for some threads of a warp: `DigestPiece` of `kernels/digest/digests.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Immutable, IntoBytes)]
#[repr(C)]
pub(crate) struct DigestPiece {
    pub chunk: u32,
    pub first_leaf: u32,
    pub thread: u8,
    pub leaves: u8,
    pub reserved: u16,
    pub nodes: u32,
}

/// The payloads of an application, distributed to warps.
#[derive(Debug, Default)]
pub(crate) struct DigestPlan {
    pub pieces: Vec<DigestPiece>,
    /// First piece of each warp, then the number of pieces.
    pub warps: Vec<u32>,
    /// Number of payloads, without the payload list.
    pub payloads: usize,
    /// Number of nodes for payloads of several pieces.
    pub nodes: u32,
    /// Range of warps for each slice of the schedule.
    pub slices: Vec<Range<u32>>,
    /// Size of the payload list in bytes, and the warps that hash it, if the list is formed on the device.
    pub list: Option<(u32, Range<u32>)>,
    /// Whether the host forms the payload list when the application is prepared. The index then has only the root. Besides, the host
    /// expands some payloads, or the device does not read all of them.
    pub is_formed_by_host: bool,
    /// Pieces of the warp that is not yet complete, and the number of its threads in use.
    open: Vec<DigestPiece>,
    used: u32,
}

impl DigestPlan {
    /// Plans the digests of a schedule. If the host `reads_all` payloads, it forms the list that the index lacks.
    ///
    /// Returns `None` if the device has no digests to compare, in three cases:
    /// - The index has no digests of payloads.
    /// - It has only the root, and some payloads are not read.
    /// - It has a list, and the host expands all payloads.
    pub fn new(index: &DeviceIndex, schedule: &Schedule, reads_all: bool) -> Option<Self> {
        let records = &index.uploaded.records;
        let mut plan = Self::default();
        for slice in &schedule.slices {
            let first = plan.warps.len() as u32;
            for run in slice.runs.iter().filter(|run| run.group != Group::Expanded) {
                for &chunk in &schedule.order[run.order.clone()] {
                    let bytes = records[chunk as usize].compressed_size.get();
                    if bytes > 0 {
                        plan.payloads += 1;
                        plan.add(chunk, bytes);
                    }
                }
            }
            plan.close();
            plan.slices.push(first..plan.warps.len() as u32);
        }
        match index.uploaded.payload_digests {
            PayloadDigestSource::None => return None,
            PayloadDigestSource::List => {}
            PayloadDigestSource::Root => {
                let list_bytes = u32::try_from(16 * records.len() as u64).ok()?;
                let is_all = schedule.payload_count(index) == index.uploaded.payload_count as usize;
                if !is_all && !reads_all {
                    return None;
                }
                if schedule.has_expanded || !is_all {
                    plan.is_formed_by_host = true;
                    plan.warps.push(plan.pieces.len() as u32);
                    return Some(plan);
                }
                let first = plan.warps.len() as u32;
                plan.add(0, list_bytes);
                plan.close();
                plan.list = Some((list_bytes, first..plan.warps.len() as u32));
            }
        }
        if plan.pieces.is_empty() {
            return None;
        }
        plan.warps.push(plan.pieces.len() as u32);
        Some(plan)
    }

    /// Returns what the device compares.
    pub fn checks(&self) -> PayloadChecks {
        if self.list.is_some() { PayloadChecks::Root } else { PayloadChecks::Each }
    }

    /// Adds a payload of `bytes` bytes, which must not be 0.
    fn add(&mut self, chunk: u32, bytes: u32) {
        let leaves = bytes.div_ceil(LEAF);
        let count = leaves.div_ceil(PIECE_LEAVES);
        for first_leaf in (0..leaves).step_by(PIECE_LEAVES as usize) {
            let in_piece = (leaves - first_leaf).min(PIECE_LEAVES);
            let piece = DigestPiece { chunk, first_leaf, thread: 0, leaves: in_piece as u8, reserved: 0, nodes: self.nodes };
            if in_piece == PIECE_LEAVES {
                // A warp of its own. The open warp stays open.
                self.warps.push(self.pieces.len() as u32);
                self.pieces.push(piece);
                continue;
            }
            if self.used + in_piece > PIECE_LEAVES {
                self.close();
            }
            self.open.push(DigestPiece { thread: self.used as u8, ..piece });
            self.used += in_piece;
        }
        if count > 1 {
            self.nodes += 1 + count;
        }
    }

    /// Completes the open warp.
    fn close(&mut self) {
        if !self.open.is_empty() {
            self.warps.push(self.pieces.len() as u32);
            self.pieces.append(&mut self.open);
            self.used = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_leaf_has_one_thread() {
        let mut plan = DigestPlan::default();
        let sizes = [1, 1024, 1025, 5000, 32 << 10, (32 << 10) + 1, 70_000, 3, 1 << 20, (1 << 20) + 40_000];
        for (chunk, &bytes) in (0..).zip(&sizes) {
            plan.add(chunk, bytes);
        }
        plan.close();
        plan.warps.push(plan.pieces.len() as u32);
        let mut leaves = vec![Vec::new(); sizes.len()];
        let mut nodes = vec![Vec::new(); sizes.len()];
        for warp in plan.warps.windows(2) {
            let pieces = &plan.pieces[warp[0] as usize..warp[1] as usize];
            assert_eq!(pieces[0].thread, 0);
            for (piece, next) in pieces.iter().zip(pieces.iter().skip(1).map(|next| next.thread).chain([32])) {
                assert!(piece.leaves > 0 && piece.thread + piece.leaves <= next, "{pieces:?}");
                leaves[piece.chunk as usize].extend((0..u32::from(piece.leaves)).map(|leaf| piece.first_leaf + leaf));
                nodes[piece.chunk as usize].push(piece.nodes);
            }
        }
        let mut used = 0;
        for ((mut leaves, nodes), bytes) in leaves.into_iter().zip(nodes).zip(sizes) {
            leaves.sort_unstable();
            assert!(leaves.into_iter().eq(0..bytes.div_ceil(1024)), "{bytes} bytes");
            if nodes.len() > 1 {
                assert!(nodes.iter().all(|&at| at == used), "{bytes} bytes: {nodes:?}");
                used += 1 + nodes.len() as u32;
            }
        }
        assert_eq!(plan.nodes, used);
    }
}
