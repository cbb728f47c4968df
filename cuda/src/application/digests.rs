//! Payload digests of an application: the kernel that compares them beside the decoding kernels.

use crate::index::DeviceIndex;
use crate::plan::Offsets;
use crate::plan::digests::DigestPlan;
use crate::plan::payloads::Payloads;
use crate::runtime::driver::{EnterGuard, Kernel, RawStream};
use rayon::prelude::*;
use std::ops::Range;
use tpde::internals::checked_payload;
use tpde_core::digest;
use tpde_core::error::{Error, Result, Rule, hex};
use tpde_core::format::{ChunkMetadata, DIGEST_SIZE};
use tpde_core::source::Source;

/// The payload list is the only payload: its hash is the payload root.
const OF_LIST: u32 = 1;

/// The parameter of `tpde_digests`: `Digests` of `kernels/digest/digests.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct DigestParameter {
    chunks: u64,
    blob: u64,
    pieces: u64,
    warps: u64,
    nodes: u64,
    expected: u64,
    found: u64,
    root: u64,
    statuses: u64,
    flag: u64,
    first: u32,
    count: u32,
    flags: u32,
    records: u32,
}

/// Where the kernels that compare digests report: the address of their status words, and that of the flag to set if a digest
/// differs, or 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Report {
    pub statuses: u64,
    pub flag: u64,
}

/// The digests of an application that are compared on the device.
#[derive(Debug)]
pub(super) struct DeviceDigests {
    kernel: Kernel,
    parameter: DigestParameter,
    /// Range of warps for each slice.
    slices: Vec<Range<u32>>,
    /// The launch that hashes the payload list, if the list is formed on the device.
    list: Option<DigestParameter>,
    /// Number of payloads.
    pub payloads: usize,
}

impl DeviceDigests {
    /// `at_zero` is the address of the application's memory, whose parts have been filled.
    pub fn new(index: &DeviceIndex, plan: &DigestPlan, offsets: &Offsets, at_zero: u64, span: Range<u32>) -> Result<Self> {
        let device = &index.device().inner;
        let kernel = device.kernels.digests(&device.context)?;
        let at = |offset: u64| at_zero + offset;
        let parameter = DigestParameter {
            pieces: at(offsets.pieces),
            warps: at(offsets.warps),
            nodes: at(offsets.nodes),
            expected: match (plan.is_formed_by_host, plan.list.is_some()) {
                (true, _) => at(offsets.host_list),
                (false, true) => 0,
                (false, false) => index.uploaded.payload_list,
            },
            found: at(offsets.list),
            ..DigestParameter::default()
        };
        let list = plan.list.as_ref().map(|(_, warps)| DigestParameter {
            chunks: at(offsets.list_record),
            blob: at(offsets.list),
            root: index.uploaded.payload_root,
            first: warps.start,
            count: warps.len() as u32,
            flags: OF_LIST,
            records: span.len() as u32,
            ..parameter
        });
        let slices = plan.slices.clone();
        Ok(Self { kernel, parameter, slices, list, payloads: plan.payloads })
    }

    /// Reads all payloads on the host, and returns the payload list after comparing it with the payload root. CRCs are compared
    /// before: unlike the root, they tell which chunk is damaged.
    pub fn form_list(index: &DeviceIndex, payloads: &Payloads<'_>) -> Result<Vec<[u8; DIGEST_SIZE]>> {
        let pinned;
        let source: &dyn Source = match payloads {
            Payloads::Host(source) => *source,
            Payloads::Kept(source) => &**source,
            Payloads::Pinned(buffer) => {
                pinned = &buffer[..];
                &pinned
            }
            Payloads::Device(_) | Payloads::Parts(_) => {
                return Err(Error::InvalidArgument("payloads of codec zstd in device memory".into()));
            }
        };
        let records = index.uploaded.records.par_iter().enumerate();
        let list = records.map_init(Vec::new, |scratch, (chunk, record)| {
            let payload = checked_payload(source, record, None, chunk as u32, scratch);
            let in_tensor = |e: Error| match index.chunk_tensor(chunk as u32) {
                Ok(tensor) => e.in_tensor(&tensor.name),
                Err(_) => e,
            };
            payload.map(digest::of_payload).map_err(in_tensor)
        });
        // The first error, whichever thread ends first.
        let list: Vec<_> = list.collect();
        let list = list.into_iter().collect::<Result<Vec<_>>>()?;
        let (expected, found) = (index.uploaded.host_root, digest::payload_root(&list));
        Rule::HeaderPayloadRoot.check(expected == found, hex(&expected), hex(&found))?;
        Ok(list)
    }

    /// The record of the payload list as a payload.
    pub fn list_record(plan: &DigestPlan) -> Option<ChunkMetadata> {
        let (bytes, _) = plan.list.as_ref()?;
        Some(ChunkMetadata {
            blob_offset: 0.into(),
            compressed_size: (*bytes).into(),
            uncompressed_size: 0.into(),
            num_deltas: 0.into(),
            crc32: 0.into(),
            output_offset: 0.into(),
        })
    }

    /// Queues the digests of slice `n`. The status words begin where that of chunk 0 would be.
    ///
    /// # Safety
    /// `chunks`, `blob` and `report` are those of the launch, and remain valid until the stream has completed.
    pub unsafe fn hash(
        &self,
        cx: &EnterGuard<'_>,
        stream: RawStream,
        n: usize,
        (chunks, blob): (u64, u64),
        report: Report,
    ) -> Result<()> {
        let warps = &self.slices[n];
        if warps.is_empty() {
            return Ok(());
        }
        let Report { statuses, flag } = report;
        let (first, count) = (warps.start, warps.len() as u32);
        let parameter = DigestParameter { chunks, blob, statuses, flag, first, count, ..self.parameter };
        // SAFETY: the pieces cover the payloads, whose sizes a validated index has. The rest is promised by the caller.
        unsafe { self.kernel.launch(cx, stream, parameter.count, &parameter) }
    }

    /// Queues the comparison of the payload list with the payload root, if the list is formed on the device. The status words begin
    /// with that of the first chunk of the span.
    pub fn compare_list(&self, cx: &EnterGuard<'_>, stream: RawStream, report: Report) -> Result<()> {
        let Some(list) = &self.list else { return Ok(()) };
        let parameter = DigestParameter { statuses: report.statuses, flag: report.flag, ..*list };
        // SAFETY: list, record and pieces are in the memory of the application, which is held until the stream has completed.
        unsafe { self.kernel.launch(cx, stream, parameter.count, &parameter) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::digests::DigestPiece;
    use std::collections::BTreeMap;
    use std::mem::offset_of;

    const TEXT: &str = include_str!("../../kernels/digest/digests.cuh");

    #[test]
    fn structs_are_those_of_the_kernel() {
        macro_rules! ours {
            ($name:literal $type:ident { $($field:ident),+ $(,)? }) => {
                [$((concat!($name, ", ", stringify!($field)), offset_of!($type, $field))),+]
            };
        }
        let ours = ours!("Digests" DigestParameter {
            chunks, blob, pieces, warps, nodes, expected, found, root, statuses, flag, first, count, flags, records,
        });
        let pieces = ours!("DigestPiece" DigestPiece { chunk, first_leaf, thread, leaves, reserved, nodes });
        let theirs = TEXT.lines().filter_map(|line| {
            let (field, at) = line.strip_prefix("TPDE_OFFSET(")?.strip_suffix(");")?.rsplit_once(", ")?;
            Some((field, at.parse().unwrap()))
        });
        assert_eq!(ours.into_iter().chain(pieces).collect::<BTreeMap<_, _>>(), theirs.collect());
        assert!(TEXT.contains(&format!("TPDE_SIZE(Digests, {});", size_of::<DigestParameter>())));
        assert!(TEXT.contains(&format!("TPDE_SIZE(DigestPiece, {});", size_of::<DigestPiece>())));
        assert!(TEXT.contains(&format!("TPDE_DIGESTS_OF_LIST = {OF_LIST},\n")));
        assert!(TEXT.contains(&format!("#define TPDE_DIGESTS_THREADS {}\n", crate::abi::DIGESTS_THREADS)));
    }
}
