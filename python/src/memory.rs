//! Tensors in memory that Python owns.

use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use tpde::{Checkpoint, Dtype, FusedSlices, MemoryCheckpoint, Rectangle, Result, Slice, SliceCheckpoint, TensorInfo};
use tpde_core::layout::StridedLayout;
use tpde_cuda::{DeviceSlice, TensorSlice};

/// A tensor: name, dtype, dims, address, size in bytes, and an object that keeps the memory in place.
///
/// Only the modules of `tpde/_memory/` make this tuple. They have checked that the tensor is contiguous, or has the rows of
/// [`SliceMemory`], and that it is in host memory, or on the device for device functions. Device functions make no host slices from it.
/// The address stays valid while the object is held, unless the owner's memory is freed by other means. The caller of the public
/// function promises that nothing else writes the memory during the call, and that nothing else reads memory being written.
#[derive(FromPyObject, IntoPyObject)]
pub struct Memory(
    String,
    String,
    Vec<u64>,
    usize,
    usize,
    #[allow(dead_code, reason = "held to keep the memory alive")] Option<Py<PyAny>>,
);

impl Memory {
    pub fn name(&self) -> &str {
        &self.0
    }

    pub fn shape(&self) -> &[u64] {
        &self.2
    }

    /// The memory as a device slice, at an address that is valid on the device.
    ///
    /// # Safety
    /// The memory must be on the device. Its owner must be held until all work queued with the slice has finished. For a tensor
    /// whose streams were recorded, PyTorch does this: it does not reuse the memory until those streams have finished.
    pub unsafe fn device_slice(&self) -> DeviceSlice {
        // SAFETY: promised by the caller.
        unsafe { DeviceSlice::from_raw(self.3 as u64, self.4 as u64) }
    }

    /// A copy without the owner, which does not keep the memory alive.
    pub fn unowned(&self) -> Self {
        Self(self.0.clone(), self.1.clone(), self.2.clone(), self.3, self.4, None)
    }

    /// Address of the first byte.
    pub fn address(&self) -> usize {
        self.3
    }

    /// Address range: the first byte, and the byte after the last.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.3..self.3.saturating_add(self.4)
    }

    /// [`Memory::range`] as a layout.
    pub fn span(&self) -> StridedLayout {
        StridedLayout::contiguous(self.3 as u64, self.4 as u64)
    }

    pub fn dtype(&self) -> Result<Dtype> {
        dtype(&self.1)
    }

    pub fn bytes(&self) -> &[u8] {
        if self.4 == 0 || self.3 == 0 {
            return &[];
        }
        // SAFETY: the memory is valid while the owner is held, and nothing writes it during the call (type documentation).
        unsafe { std::slice::from_raw_parts(self.3 as *const u8, self.4) }
    }

    /// The bytes of the tensor, for writing.
    ///
    /// # Safety
    /// No other slice of the same memory may exist.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        if self.4 == 0 || self.3 == 0 {
            return &mut [];
        }
        // SAFETY: the memory is valid while the owner is held, and the caller promises that this slice is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.3 as *mut u8, self.4) }
    }
}

/// A tensor that a call takes.
#[derive(Clone)]
pub struct ExpectedTensor {
    pub name: String,
    pub dtype: Dtype,
    /// `None` if the number of rows may be any.
    pub shape: Option<Vec<u64>>,
    /// Whether an application in place writes it.
    pub is_written: bool,
    /// Index of the entry of the pair that is this tensor. `None` for a tensor in parts, and for a base.
    pub entry: Option<usize>,
}

/// Memory of contiguous tensors of the dtypes and shapes that a call takes. It takes the place of a list of [`Memory`]: a column per
/// property costs less than a tuple per tensor.
#[pyclass(frozen, module = "tpde._tpde")]
pub struct PlainTensors {
    /// All with shapes.
    pub expected: Arc<Vec<ExpectedTensor>>,
    pub places: Vec<Place>,
    /// Keeps the memory in place.
    pub owners: Py<PyAny>,
}

/// Address and size in bytes of a tensor.
pub type Place = (usize, usize);

#[pymethods]
impl PlainTensors {
    fn __len__(&self) -> usize {
        self.places.len()
    }

    /// Name, dtype, dims, address, size in bytes, and owner of each tensor.
    fn memories(&self, py: Python<'_>) -> Vec<Memory> {
        let memory = |(one, place): (&ExpectedTensor, &Place)| one.at(*place, Some(self.owners.clone_ref(py)));
        self.expected.iter().zip(&self.places).map(memory).collect()
    }
}

impl ExpectedTensor {
    fn at(&self, (address, size): Place, owner: Option<Py<PyAny>>) -> Memory {
        let (name, dtype, shape) = (self.name.clone(), self.dtype.name().to_owned(), self.shape.clone());
        Memory(name, dtype, shape.unwrap_or_default(), address, size, owner)
    }
}

/// Memory that holds a rectangle of a tensor: the shape of the whole tensor in [`Memory`], the address and the size from the first
/// row to the last, the first index and the number of indexes in each dimension, and the distance between rows in bytes.
#[derive(FromPyObject)]
pub struct SliceMemory(pub Memory, Vec<u64>, Vec<u64>, Option<u64>);

impl SliceMemory {
    /// Size of the elements in bytes, without what is between rows.
    pub fn size(&self) -> u64 {
        let bits = self.0.dtype().map_or(0, Dtype::bits);
        self.2.iter().fold(bits, |n, &extent| n.saturating_mul(extent)) / 8
    }

    fn rectangle(&self) -> Rectangle {
        Rectangle::new(&self.1[..], &self.2[..])
    }

    pub fn slice(&self) -> Result<Slice<'_>> {
        let slice = Slice::new(info(&self.0)?, self.rectangle(), self.0.bytes());
        Ok(if let Some(pitch) = self.3 { slice.pitch(pitch) } else { slice })
    }

    /// The memory on a device, as for [`Memory::device_slice`].
    ///
    /// # Safety
    /// As for [`Memory::device_slice`].
    pub unsafe fn on_device(&self) -> TensorSlice<'_> {
        // SAFETY: promised by the caller.
        let slice = TensorSlice::new(self.0.name(), self.rectangle(), unsafe { self.0.device_slice() });
        if let Some(pitch) = self.3 { slice.pitch(pitch) } else { slice }
    }

    /// A copy without the owner, which does not keep the memory alive.
    fn unowned(&self) -> Self {
        Self(self.0.unowned(), self.1.clone(), self.2.clone(), self.3)
    }

    /// A whole tensor, as a slice.
    pub fn whole(tensor: Memory) -> Self {
        let shape = tensor.2.clone();
        Self(tensor, vec![0; shape.len()], shape, None)
    }
}

/// Slices for writing. Those whose rows interleave are in one memory.
///
/// # Safety
/// No other slice of the memory from the first row to the last of any of these may exist.
pub unsafe fn fused(slices: &[SliceMemory]) -> Vec<FusedSlices<'_>> {
    let mut sorted: Vec<_> = slices.iter().collect();
    sorted.sort_by_key(|slice| slice.0.address());
    let mut all = Vec::new();
    let mut rest = &sorted[..];
    while let Some(first) = rest.first() {
        let Range { start, mut end } = first.0.range();
        let mut count = 1;
        while let Some(next) = rest.get(count).filter(|next| next.0.address() < end) {
            end = end.max(next.0.range().end);
            count += 1;
        }
        let (together, further) = rest.split_at(count);
        rest = further;
        let bytes: &mut [u8] = if start == end || start == 0 {
            &mut []
        } else {
            // SAFETY: the memory of each of these is valid while the owners are held. Each reaches into one before it, so they
            // are parts of one allocation, without a gap. The caller promises that no other slice of it exists, and others in
            // `all` begin behind it.
            unsafe { std::slice::from_raw_parts_mut(start as *mut u8, end - start) }
        };
        all.push(together.iter().fold(FusedSlices::new(bytes), |memory, slice| {
            let range = slice.0.range();
            memory.slice(slice.0.name(), slice.rectangle(), range.start - start..range.end - start, slice.3)
        }));
    }
    all
}

/// Parses the name of a dtype.
pub fn dtype(name: &str) -> Result<Dtype> {
    Ok(name.parse()?)
}

/// Name, dtype and shape of a tensor.
pub fn info(tensor: &Memory) -> Result<TensorInfo> {
    Ok(TensorInfo { name: tensor.name().to_owned(), dtype: tensor.dtype()?, shape: tensor.shape().to_vec() })
}

/// Tensors of a call: whole ones, or slices of tensors. An empty list is either.
pub enum Tensors {
    Whole(Vec<Memory>),
    Slices(Vec<SliceMemory>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Tensors {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(match object.extract()? {
            DeviceTensors::Plain(plain) => Self::Whole(plain.get().memories(object.py())),
            DeviceTensors::Whole(tensors) => Self::Whole(tensors),
            DeviceTensors::Slices(slices) => Self::Slices(slices),
        })
    }
}

impl Tensors {
    /// A checkpoint of these tensors, which reads their memory.
    pub fn checkpoint(&self) -> Result<Box<dyn Checkpoint + '_>> {
        Ok(match self {
            Self::Whole(tensors) => {
                let infos = tensors.iter().map(|tensor| Ok((info(tensor)?, tensor.bytes())));
                Box::new(MemoryCheckpoint::new(infos.collect::<Result<Vec<_>>>()?)?)
            }
            Self::Slices(slices) => {
                Box::new(SliceCheckpoint::new(slices.iter().map(SliceMemory::slice).collect::<Result<Vec<_>>>()?)?)
            }
        })
    }

    /// All tensors as slices, without their owners, which do not keep the memory alive.
    pub fn into_unowned(self) -> Vec<SliceMemory> {
        let mut slices = match self {
            Self::Whole(tensors) => tensors.into_iter().map(SliceMemory::whole).collect(),
            Self::Slices(slices) => slices,
        };
        slices.iter_mut().for_each(|slice| slice.0.5 = None);
        slices
    }

    /// The rectangles of slices, by name of the tensor.
    pub fn rectangles(&self) -> BTreeMap<String, Vec<Rectangle>> {
        let mut rectangles: BTreeMap<_, Vec<_>> = BTreeMap::new();
        if let Self::Slices(slices) = self {
            slices.iter().for_each(|slice| rectangles.entry(slice.0.name().to_owned()).or_default().push(slice.rectangle()));
        }
        rectangles
    }

    /// Size of the elements in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Whole(tensors) => tensors.iter().map(|tensor| tensor.range().len() as u64).sum(),
            Self::Slices(slices) => slices.iter().map(SliceMemory::size).sum(),
        }
    }

    /// The memory of each tensor or slice.
    pub fn memories(&self) -> Vec<&Memory> {
        match self {
            Self::Whole(tensors) => tensors.iter().collect(),
            Self::Slices(slices) => slices.iter().map(|slice| &slice.0).collect(),
        }
    }
}

/// Tensors of a call on a device, as [`Tensors`].
#[derive(FromPyObject)]
pub enum DeviceTensors {
    Plain(Py<PlainTensors>),
    Whole(Vec<Memory>),
    Slices(Vec<SliceMemory>),
}

impl DeviceTensors {
    /// Whether these are whole tensors.
    pub fn is_whole(&self) -> bool {
        !matches!(self, Self::Slices(_))
    }

    /// All tensors, without their owners.
    pub fn into_unowned(self) -> UnownedTensors {
        match self {
            Self::Plain(plain) => {
                UnownedTensors::Plain { expected: plain.get().expected.clone(), places: plain.get().places.clone() }
            }
            Self::Whole(tensors) => UnownedTensors::Slices(Tensors::Whole(tensors).into_unowned()),
            Self::Slices(slices) => UnownedTensors::Slices(Tensors::Slices(slices).into_unowned()),
        }
    }
}

/// Tensors without their owners, which do not keep the memory alive.
pub enum UnownedTensors {
    /// As [`PlainTensors`].
    Plain {
        expected: Arc<Vec<ExpectedTensor>>,
        places: Vec<Place>,
    },
    Slices(Vec<SliceMemory>),
}

impl UnownedTensors {
    /// All tensors as slices.
    pub fn slices(&self) -> Vec<SliceMemory> {
        match self {
            Self::Plain { expected, places } => {
                let slice = |(one, place): (&ExpectedTensor, &Place)| SliceMemory::whole(one.at(*place, None));
                expected.iter().zip(places).map(slice).collect()
            }
            Self::Slices(slices) => slices.iter().map(SliceMemory::unowned).collect(),
        }
    }

    pub fn addresses(&self) -> Vec<usize> {
        match self {
            Self::Plain { places, .. } => places.iter().map(|place| place.0).collect(),
            Self::Slices(slices) => slices.iter().map(|slice| slice.0.address()).collect(),
        }
    }

    /// Sets all addresses. All other fields stay.
    pub fn move_to(&mut self, to: &[usize]) {
        match self {
            Self::Plain { places, .. } => places.iter_mut().zip(to).for_each(|(place, &address)| place.0 = address),
            Self::Slices(slices) => slices.iter_mut().zip(to).for_each(|(slice, &address)| slice.0.3 = address),
        }
    }

    /// Size of the elements in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Plain { places, .. } => places.iter().map(|place| place.1 as u64).sum(),
            Self::Slices(slices) => slices.iter().map(SliceMemory::size).sum(),
        }
    }
}
