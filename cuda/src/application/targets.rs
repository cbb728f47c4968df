//! Digests of targets of an application: the hashes that are compared on the device.

use super::digests::Report;
use crate::abi::{DeviceTensor, TensorRows};
use crate::hashes::{HashLaunch, HashSlice};
use crate::plan::Offsets;
use crate::plan::targets::{Batch, Targets};
use crate::runtime::driver::{EnterGuard, Kernel, RawStream};
use tpde_core::error::Result;

/// The addresses of what is hashed and compared.
#[derive(Debug)]
pub(super) struct DeviceTargets {
    kernel: Kernel,
    launch: HashLaunch,
    order: u64,
    tensors: u64,
    /// 0 if no tensor is strided.
    rows: u64,
    pub scratch: u64,
}

/// The tensor table of a launch, and the order of its chunks: addresses that element 0 would have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table {
    pub tensors: u64,
    /// Rows of the tensors, if some have gaps between them or a derived base, else 0.
    pub rows: u64,
    /// How base lanes are converted, if some bases are derived, else 0. 0 in batches: a derived base is applied out of place.
    pub forms: u64,
    pub order: u64,
}

impl DeviceTargets {
    /// `table` is the address of [`Targets::table`], `at_zero` that of the application's memory.
    pub fn new(kernel: Kernel, targets: &Targets, table: u64, offsets: &Offsets, at_zero: u64, is_strided: bool) -> Self {
        let [rows, parts, _] = targets.offsets();
        let launch = HashLaunch {
            ranges: table + parts,
            nodes: at_zero + offsets.target_nodes,
            expected: at_zero + offsets.target_digests,
            ..HashLaunch::default()
        };
        Self {
            kernel,
            launch,
            order: at_zero + offsets.target_order,
            tensors: table,
            rows: if is_strided { table + rows } else { 0 },
            scratch: at_zero + offsets.target_scratch,
        }
    }

    /// Returns the address of the nodes.
    pub fn nodes(&self) -> u64 {
        self.launch.nodes
    }

    /// Returns the tables of a batch.
    pub fn table_of(&self, batch: &Batch) -> Table {
        let from_zero = |at: u64, bytes: usize| {
            at.wrapping_add((batch.first_entry * bytes) as u64).wrapping_sub((batch.first_tensor * bytes) as u64)
        };
        Table {
            tensors: from_zero(self.tensors, size_of::<DeviceTensor>()),
            rows: if self.rows == 0 { 0 } else { from_zero(self.rows, size_of::<TensorRows>()) },
            forms: 0,
            order: self.order,
        }
    }

    /// Queues kernels that hash targets, or parts of targets, and compare the hashes.
    ///
    /// # Safety
    /// The memory of the application, of its outputs, and of the report is held until the stream has completed.
    pub unsafe fn compare(&self, cx: &EnterGuard<'_>, stream: RawStream, hashes: &HashSlice, report: Report) -> Result<()> {
        // SAFETY: promised by the caller. The parts are those of the plan, and the nodes were zeroed when it was prepared.
        unsafe {
            hashes.queue(cx, self.kernel, stream, &HashLaunch { statuses: report.statuses, flag: report.flag, ..self.launch })
        }
    }
}
