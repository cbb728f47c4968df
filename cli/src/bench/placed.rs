//! Tensors in device memory, with or without gaps between the rows of matrices.

use std::ops::Range;
use tpde::TensorInfo;
use tpde_cuda::{Device, DeviceSlice, Rows};

/// Maximum bytes of a tensor that are in host memory at once.
pub const PIECE: usize = 64 << 20;
/// Alignment of tensors in bytes, the same as of allocations.
const ALIGN: u64 = 256;

/// Offset and size of each piece of `bytes` bytes that is in host memory at one time.
pub fn pieces(bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..bytes).step_by(PIECE).map(move |at| (at, (bytes - at).min(PIECE as u64) as usize))
}

/// Places of tensors in an allocation.
pub struct Placement {
    /// Size of the allocation.
    pub bytes: u64,
    tensors: Vec<Place>,
}

struct Place {
    offset: u64,
    /// From the first byte of the first row to the last byte of the last row.
    extent: u64,
    /// Without gaps: the whole tensor is one row.
    rows: Option<Rows>,
}

impl Placement {
    pub fn dense(tensors: &[TensorInfo]) -> Self {
        Self::place(tensors, |_| None)
    }

    /// Each row of a matrix is followed by a gap of the same size. Tensors of fewer dimensions have no gaps.
    pub fn with_gaps(tensors: &[TensorInfo]) -> Self {
        Self::place(tensors, |info| {
            let bytes = match info.shape[..] {
                [.., _, columns] if info.bytes() > 0 => columns * info.bytes() / info.shape.iter().product::<u64>(),
                _ => 0,
            };
            (bytes > 0).then(|| Rows::new(bytes, 2 * bytes))
        })
    }

    fn place(tensors: &[TensorInfo], rows: impl Fn(&TensorInfo) -> Option<Rows>) -> Self {
        let mut bytes = 0;
        let place = |info: &TensorInfo| {
            let rows = rows(info);
            let extent = rows.map_or(info.bytes(), |rows| (info.bytes() / rows.bytes - 1) * rows.pitch + rows.bytes);
            let offset = bytes;
            bytes += extent.next_multiple_of(ALIGN);
            Place { offset, extent, rows }
        };
        let tensors = tensors.iter().map(place).collect();
        Self { bytes, tensors }
    }

    /// The memory of a tensor, with its gaps.
    pub fn tensor(&self, memory: &DeviceSlice, number: usize) -> tpde::Result<DeviceSlice> {
        memory.slice(self.tensors[number].offset, self.tensors[number].extent)
    }

    pub fn rows(&self, number: usize) -> Option<Rows> {
        self.tensors[number].rows
    }

    /// Writes bytes of a tensor from `offset` on, and fills the gaps between them with `gap`.
    pub fn write(
        &self,
        device: &Device,
        memory: &DeviceSlice,
        number: usize,
        offset: u64,
        bytes: &[u8],
        gap: u8,
    ) -> tpde::Result<()> {
        let (at, size) = self.span(number, offset, bytes.len());
        let memory = self.tensor(memory, number)?.slice(at, size as u64)?;
        let Some(rows) = self.rows(number) else { return device.write(&memory, bytes) };
        let mut image = vec![gap; size];
        for (from, to) in runs(rows, offset, bytes.len()) {
            image[to..to + from.len()].copy_from_slice(&bytes[from]);
        }
        device.write(&memory, &image)
    }

    /// Reads bytes of a tensor from `offset` on. Returns whether every byte of the gaps between them is `gap`.
    pub fn read(
        &self,
        device: &Device,
        memory: &DeviceSlice,
        number: usize,
        offset: u64,
        bytes: &mut [u8],
        gap: u8,
    ) -> tpde::Result<bool> {
        let (at, size) = self.span(number, offset, bytes.len());
        let memory = self.tensor(memory, number)?.slice(at, size as u64)?;
        let Some(rows) = self.rows(number) else {
            device.read(&memory, bytes)?;
            return Ok(true);
        };
        let mut image = vec![0; size];
        device.read(&memory, &mut image)?;
        let (mut end, mut unchanged) = (0, true);
        for (to, from) in runs(rows, offset, bytes.len()) {
            unchanged &= image[end..from].iter().all(|&byte| byte == gap);
            end = from + to.len();
            bytes[to].copy_from_slice(&image[from..end]);
        }
        Ok(unchanged)
    }

    /// Where `size` bytes of a tensor are in its memory, from `offset` on: the first byte, and the size with gaps.
    fn span(&self, number: usize, offset: u64, size: usize) -> (u64, usize) {
        let Some(rows) = self.rows(number) else { return (offset, size) };
        let at = |byte: u64| byte / rows.bytes * rows.pitch + byte % rows.bytes;
        let first = at(offset);
        (first, (at(offset + size as u64 - 1) + 1 - first) as usize)
    }
}

/// Cuts `size` bytes of a tensor at the ends of rows, from `offset` on. Returns each run of bytes, and where it begins with gaps.
fn runs(rows: Rows, offset: u64, size: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let column = offset % rows.bytes;
    let mut begin = 0;
    std::iter::from_fn(move || {
        (begin < size).then(|| {
            let at = column + begin as u64;
            let left = (rows.bytes - at % rows.bytes) as usize;
            let run = begin..size.min(begin + left);
            begin = run.end;
            (run, (at / rows.bytes * rows.pitch + at % rows.bytes - column) as usize)
        })
    })
}
