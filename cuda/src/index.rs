//! An index on a device.

use super::abi::{self, DeviceTensor, NO_TABLES};
use super::derived::DerivedOnDevice;
#[cfg(feature = "nvcomp")]
use super::nvcomp::{Nvcomp, NvcompSupport};
use super::runtime::device::Device;
use super::runtime::driver::EnterGuard;
use super::runtime::inner::Inner;
use super::runtime::kernels::{Decoder, Variant};
use super::runtime::layout::MemoryLayout;
use super::runtime::memory::{Allocation, DeviceSlice};
use super::runtime::staging::SLOT_BYTES;
#[cfg(not(feature = "nvcomp"))]
use std::convert::Infallible as NvcompSupport;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use tpde_core::codec::{Codec, TableSet};
use tpde_core::error::{Error, Result};
use tpde_core::format::{BaseKind, ChunkMetadata, ChunkSums, DIGEST_SIZE, PAYLOAD_ALIGN, TensorDigests};
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::Rectangle;
use zerocopy::IntoBytes;

/// A validated index on a device, in the form that kernels need. Clones share it.
#[derive(Debug, Clone)]
pub struct DeviceIndex {
    pub(super) uploaded: Arc<UploadedIndex>,
    /// Set if the writer of the pair is trusted and nvCOMP expands the frames.
    pub(super) trusted: Option<NvcompSupport>,
}

#[derive(Debug)]
pub(super) struct UploadedIndex {
    pub device: Device,
    memory: DeviceSlice,
    /// Addresses of the parts of `memory`.
    pub sums: u64,
    pub chunk_tensors: u64,
    pub tables: u64,
    pub payload_list: u64,
    pub payload_root: u64,
    /// Size of the shared memory for the largest table set, in bytes.
    pub table_bytes: u32,
    pub records: Vec<ChunkMetadata>,
    pub tensors: Vec<TensorOnDevice>,
    pub blob_size: u64,
    pub payload_digests: PayloadDigestSource,
    /// Number of payloads of the pair.
    pub payload_count: u32,
    /// The payload root. Zeros if the index has none.
    pub host_root: [u8; 32],
    /// The payload list on the host. Empty if the index has none.
    pub host_list: Vec<[u8; DIGEST_SIZE]>,
}

/// Digests of payloads in an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PayloadDigestSource {
    None,
    /// The payload list: the digest of each payload.
    List,
    /// Only the hash of the payload list.
    Root,
}

/// The host's data of a tensor.
#[derive(Debug, Clone)]
pub(super) struct TensorOnDevice {
    pub name: String,
    pub base_name: String,
    pub dtype: Dtype,
    /// Shape of the whole tensor, also for a part.
    pub whole_shape: Vec<u64>,
    /// The elements of the entry.
    pub rectangle: Rectangle,
    /// Shape of the whole base tensor, if there is one.
    pub base_shape: Option<Vec<u64>>,
    pub base_kind: BaseKind,
    pub codec: Codec,
    pub bytes: u64,
    pub base_bytes: u64,
    pub chunk_count: u32,
    pub digests: TensorDigests,
    /// The tensors from which the base lanes are converted, if the base is derived.
    pub derived: Option<DerivedOnDevice>,
    /// The kernels' struct, without pointers.
    pub device: DeviceTensor,
}

impl TensorOnDevice {
    pub fn chunks(&self) -> Range<u32> {
        self.device.first_chunk..self.device.first_chunk + self.chunk_count
    }

    pub fn is_whole(&self) -> bool {
        self.rectangle.extent == self.whole_shape
    }

    /// Returns the index of the first lane of a chunk in its tensor.
    pub fn first_lane(&self, chunk: u32) -> u64 {
        u64::from(chunk - self.device.first_chunk) << self.device.chunk_lanes_log2
    }

    /// Returns the number of lanes of a chunk.
    pub fn chunk_lanes(&self, chunk: u32) -> u64 {
        (self.device.lanes - self.first_lane(chunk)).min(1 << self.device.chunk_lanes_log2)
    }
}

impl DeviceIndex {
    /// Uploads the records, sums, tensors, tables and payload digests of an index. One upload per pair is enough. Memory: 52 bytes
    /// per chunk on the device, 32 bytes per chunk on the host, and 16 bytes more on both with a payload list. The first index
    /// with chunks without a base compiles their kernel, unless the driver's cache has it.
    ///
    /// The copies are queued. Every application of this index waits for them.
    ///
    /// # Errors
    /// [`Error::Device`] if memory or the driver fails.
    pub fn upload(device: &Device, index: &ValidatedIndex) -> Result<Self> {
        Self::new(device, index, None)
    }

    /// [`DeviceIndex::upload`] to memory of the caller: [`DeviceIndex::bytes_of`] bytes, aligned to 256. Work on
    /// [`Device::copy_stream`] may use the memory at once. Nothing else may use it until the index is dropped and all work with
    /// it has completed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the memory is too small or not aligned; [`Error::Device`] if the driver fails.
    pub fn upload_to(device: &Device, index: &ValidatedIndex, memory: DeviceSlice) -> Result<Self> {
        Self::new(device, index, Some(memory))
    }

    fn new(device: &Device, index: &ValidatedIndex, memory: Option<DeviceSlice>) -> Result<Self> {
        let (sets, tables) = tables_of(index.table_sets())?;
        let chunk_tensors: Vec<u32> =
            index.tensors().flat_map(|t| std::iter::repeat_n(t.place as u32, t.chunk_count as usize)).collect();
        let list = index.payload_list().unwrap_or(&[]);
        let root = if index.has_payload_root() { &index.header().payload_root[..] } else { &[] };
        let parts: [&[u8]; 6] = [
            index.records().as_bytes(),
            index.sums().as_bytes(),
            chunk_tensors.as_bytes(),
            tables.as_bytes(),
            list.as_flattened(),
            root,
        ];
        let (starts, size) = offsets(parts.map(|part| part.len() as u64));

        let inner = &device.inner;
        let tensors = all_on_device(index, &sets);
        if index.has_payload_root() {
            inner.kernels.digests(&inner.context)?;
        }
        if tensors.iter().any(|tensor| tensor.codec == Codec::Conditioned && tensor.device.base_lanes < tensor.device.lanes) {
            // The kernel is compiled here, because a launch must be quick and may be captured.
            inner.kernels.decoder(&inner.context, Decoder::WithoutBase, Variant::Plain)?;
        }
        let cx = inner.context.enter()?;
        let memory = match memory {
            Some(memory) => memory.reserve(size, inner)?,
            None => DeviceSlice::owned(Allocation::new(inner, &cx, size)?, size),
        };
        let [chunks, sums, chunk_tensors, tables, payload_list, payload_root] = starts.map(|start| memory.address() + start);
        send(inner, &cx, &memory, parts, starts)?;
        debug_assert_eq!(chunks, memory.address());
        let uploaded = UploadedIndex {
            device: device.clone(),
            memory,
            sums,
            chunk_tensors,
            tables,
            payload_list,
            payload_root,
            table_bytes: table_bytes(index.table_sets()),
            records: index.records().to_vec(),
            tensors,
            blob_size: index.header().blob_size,
            payload_digests: match (list.is_empty(), root.is_empty()) {
                (false, _) => PayloadDigestSource::List,
                (true, false) => PayloadDigestSource::Root,
                (true, true) => PayloadDigestSource::None,
            },
            payload_count: index.payload_count(),
            host_root: index.header().payload_root,
            host_list: list.to_vec(),
        };
        Ok(Self { uploaded: Arc::new(uploaded), trusted: None })
    }

    /// Returns the same index for applications in which nvCOMP expands payloads of codec `zstd` on the device. Then these
    /// payloads may be in device memory too. The writer of the pair must be trusted, see [`Nvcomp`].
    ///
    /// Device memory per application: the contents of the frames, their payloads of codec `raw`, and nvCOMP's temporary memory.
    /// Cost: the first call per device compiles two kernels.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses.
    #[cfg(feature = "nvcomp")]
    pub fn trust(&self, nvcomp: &Nvcomp) -> Result<Self> {
        let kernels = self.device().inner.kernels.frames(&self.device().inner.context)?;
        let trusted = Some(NvcompSupport { nvcomp: nvcomp.clone(), kernels });
        Ok(Self { uploaded: self.uploaded.clone(), trusted })
    }

    /// Returns the size of the device memory for an index, in bytes; see [`DeviceIndex::upload_to`].
    ///
    /// # Errors
    /// [`Error::Limit`] if the tables have more words than 32 bits can count.
    pub fn bytes_of(index: &ValidatedIndex) -> Result<u64> {
        let (_, tables) = tables_of(index.table_sets())?;
        let chunks = index.records().len() as u64;
        let list_bytes = index.payload_list().map_or(0, |list| 16 * list.len() as u64);
        let root_bytes = if index.has_payload_root() { 32 } else { 0 };
        Ok(offsets([32 * chunks, 16 * chunks, 4 * chunks, 4 * tables.len() as u64, list_bytes, root_bytes]).1)
    }

    /// Returns the range of the blob with the payloads of a tensor and their padding. Empty if the tensor has no payloads.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such tensor.
    pub fn payloads_of(&self, tensor: usize) -> Result<Range<u64>> {
        let chunks = self.tensor(tensor)?.chunks();
        Ok(self.uploaded.payload_ranges(chunks).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or_default())
    }

    /// Returns whether the device decodes a tensor without the processor. False for codec `zstd`: the processor or nvCOMP
    /// expands its frames.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such tensor.
    pub fn is_decoded_alone(&self, tensor: usize) -> Result<bool> {
        Ok(self.tensor(tensor)?.codec != Codec::Zstd)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.uploaded.device
    }

    /// Number of entries of the pair: tensors and parts of tensors.
    pub fn tensor_count(&self) -> usize {
        self.uploaded.tensors.len()
    }

    /// Returns the index of the tensor with this name. `None` if the pair lacks it, or has it in parts: see
    /// [`DeviceIndex::entries`] and [`DeviceIndex::find_part`]. Cost: a binary search.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.entries(name).next().filter(|&i| self.uploaded.tensors[i].is_whole())
    }

    /// Returns the indexes of the entries with this name: of the tensor, or of its parts in ascending order of their origins.
    /// Cost: a binary search.
    pub fn entries(&self, name: &str) -> Range<usize> {
        let tensors = &self.uploaded.tensors;
        let start = tensors.partition_point(|tensor| tensor.name.as_str() < name);
        start..start + tensors[start..].partition_point(|tensor| tensor.name == name)
    }

    /// Returns the index of the entry that has exactly these elements of a tensor.
    pub fn find_part(&self, name: &str, rectangle: &Rectangle) -> Option<usize> {
        self.entries(name).find(|&i| self.uploaded.tensors[i].rectangle == *rectangle)
    }

    pub(super) fn tensor(&self, tensor_index: usize) -> Result<&TensorOnDevice> {
        tensor_at(&self.uploaded.tensors, tensor_index)
    }

    /// Returns the memory of the payload list, of `bytes` bytes.
    #[cfg(test)]
    pub(super) fn payload_list_for_test(&self, bytes: u64) -> DeviceSlice {
        self.uploaded.memory.slice(self.uploaded.payload_list - self.uploaded.memory.address(), bytes).unwrap()
    }

    /// Returns the tensor of a chunk.
    pub(super) fn chunk_tensor(&self, chunk: u32) -> Result<&TensorOnDevice> {
        self.tensor(self.uploaded.tensors.partition_point(|tensor| tensor.chunks().end <= chunk))
    }
}

impl UploadedIndex {
    pub fn chunks(&self) -> u64 {
        self.memory.address()
    }

    /// Returns the ranges of the blob with the payloads of these chunks and their padding.
    pub fn payload_ranges(&self, chunks: Range<u32>) -> impl Iterator<Item = Range<u64>> + '_ {
        let records = self.records[chunks.start as usize..chunks.end as usize].iter();
        records.filter(|record| record.compressed_size.get() > 0).map(|record| {
            let start = record.blob_offset.get();
            start..start + u64::from(record.compressed_size.get()).next_multiple_of(PAYLOAD_ALIGN)
        })
    }
}

/// Returns the tensor with this index.
pub(super) fn tensor_at(tensors: &[TensorOnDevice], tensor_index: usize) -> Result<&TensorOnDevice> {
    tensors
        .get(tensor_index)
        .ok_or_else(|| Error::InvalidArgument(format!("tensor {tensor_index} of a pair of {} tensors", tensors.len())))
}

/// Returns the offsets of the records, sums, tensor indexes, tables, payload list and payload root with these sizes, and the total
/// size.
fn offsets(sizes: [u64; 6]) -> ([u64; 6], u64) {
    let mut layout = MemoryLayout::default();
    (layout.add_all(sizes), layout.bytes())
}

/// Copies parts to their offsets, and zeros the gaps between them.
fn place<const N: usize>(to: &mut [u8], parts: [&[u8]; N], starts: [u64; N]) {
    to.fill(0);
    for (part, start) in parts.into_iter().zip(starts) {
        to[start as usize..][..part.len()].copy_from_slice(part);
    }
}

/// Queues the copies of parts to their offsets in the memory of an index.
fn send(inner: &Inner, cx: &EnterGuard<'_>, memory: &DeviceSlice, parts: [&[u8]; 6], starts: [u64; 6]) -> Result<()> {
    let (copy, size) = (inner.copy.raw(), offsets(parts.map(|part| part.len() as u64)).1);
    let queueing = inner.queueing(cx, copy);
    let mut ring = inner.ring.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the parts are within the memory, which is held until the copies have completed, also after an error.
    unsafe {
        if size <= SLOT_BYTES as u64 {
            ring.send(cx, copy, memory.address(), size as usize, |slot| {
                place(slot, parts, starts);
                Ok(())
            })?;
        } else {
            let mut parts = parts.into_iter().zip(starts);
            parts.try_for_each(|(part, start)| ring.send_bytes(cx, copy, memory.address() + start, part))?;
        }
    }
    drop(ring);
    queueing.end()
}

/// Returns the offset of each set in words, and the words of all sets in the layout of the kernels (`kernels/README.md`).
pub(super) fn tables_of(sets: &[TableSet]) -> Result<(Vec<u32>, Vec<u32>)> {
    let mut starts = Vec::with_capacity(sets.len());
    let mut words = Vec::new();
    for set in sets {
        let start = words.len();
        starts.push(start_of_set(start)?);
        let classes = set.classes().len();
        words.resize(start + classes + 2, 0);
        words[start] = classes as u32;
        for (class, frequencies) in set.classes().enumerate() {
            words[start + 1 + class] = (words.len() - start) as u32;
            let mut cum = 0;
            for (token, &frequency) in (0u32..).zip(frequencies).filter(|(_, frequency)| **frequency != 0) {
                words.push(cum | (u32::from(frequency) - 1) << 12 | token << 24);
                cum += u32::from(frequency);
            }
        }
        words[start + 1 + classes] = (words.len() - start) as u32;
    }
    Ok((starts, words))
}

/// Checks that the offset of a set fits in 32 bits. [`NO_TABLES`] is not a valid offset.
fn start_of_set(words: usize) -> Result<u32> {
    let start = u32::try_from(words).ok().filter(|start| *start != NO_TABLES);
    start.ok_or(Error::Limit { what: "words of codec tables", limit: u64::from(NO_TABLES) - 1, found: words as u64 })
}

/// Returns the size of the shared memory for the largest set, in bytes.
fn table_bytes(sets: &[TableSet]) -> u32 {
    let symbols =
        |set: &TableSet| set.classes().map(|class| class.iter().filter(|frequency| **frequency != 0).count()).sum::<usize>();
    let bytes = |set: &TableSet| abi::conditioned_tables(set.classes().len() as u32, symbols(set) as u32);
    sets.iter().map(bytes).max().unwrap_or(const { abi::conditioned_tables(0, 0) })
}

/// Returns the host's data of all tensors. `starts` are the offsets of the table sets.
pub(super) fn all_on_device(index: &ValidatedIndex, starts: &[u32]) -> Vec<TensorOnDevice> {
    index.tensors().map(|tensor| on_device(&tensor, index.table_set(tensor.place), starts)).collect()
}

fn on_device(tensor: &Tensor<'_>, table_set: Option<usize>, starts: &[u32]) -> TensorOnDevice {
    let codec = if tensor.codec == Codec::Zstd { Codec::Raw } else { tensor.codec };
    TensorOnDevice {
        name: tensor.name.to_owned(),
        base_name: tensor.base_name.to_owned(),
        dtype: tensor.dtype,
        whole_shape: tensor.whole_shape().to_vec(),
        rectangle: tensor.rectangle(),
        base_shape: tensor.base_shape(),
        base_kind: tensor.base_kind,
        codec: tensor.codec,
        bytes: tensor.bytes(),
        base_bytes: tensor.base_bytes(),
        chunk_count: tensor.chunk_count,
        digests: *tensor.digests,
        derived: tensor.derived.map(|derived| DerivedOnDevice::new(derived, tensor.whole_shape(), &tensor.rectangle())),
        device: DeviceTensor {
            base: 0,
            output: 0,
            lanes: tensor.lanes,
            base_lanes: tensor.base_lanes().min(tensor.lanes),
            first_chunk: tensor.first_chunk,
            tables: table_set.map_or(NO_TABLES, |set| starts[set]),
            dtype: tensor.dtype.code(),
            codec: codec.code(),
            lane_log2: tensor.lane_bytes().ilog2() as u8,
            chunk_lanes_log2: tensor.chunk_lanes.ilog2() as u8,
            reserved: 0,
        },
    }
}

const _: () = assert!(size_of::<ChunkMetadata>() == 32 && size_of::<ChunkSums>() == 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_begins_where_kernels_can_count() {
        assert_eq!(start_of_set(0xFFFF_FFFE).unwrap(), 0xFFFF_FFFE);
        for words in [0xFFFF_FFFF, 0x1_0000_0000] {
            let words_found = words as u64;
            assert!(matches!(start_of_set(words), Err(Error::Limit { limit: 0xFFFF_FFFE, found, .. }) if found == words_found));
        }
    }

    #[test]
    fn table_sets_have_the_layout_of_the_kernels() {
        let mut second = vec![0u16; 40];
        (second[0], second[39]) = (4000, 96);
        let sets = [TableSet::new(&[vec![4096]]), TableSet::new(&[vec![1, 4095], second])];
        let (starts, words) = tables_of(&sets).unwrap();
        assert_eq!(starts, [0, 4]);
        assert_eq!(words[..4], [1, 3, 4, 4095 << 12]);
        assert_eq!(words[4..], [2, 4, 6, 8, 0, 1 | 4094 << 12 | 1 << 24, 3999 << 12, 4000 | 95 << 12 | 39 << 24]);
    }
}
