//! Rectangles of made-up tensors, from the definition: element by element.

use super::{Tensor, width};
use tpde::{MemoryCheckpoint, Rectangle, Slice, SliceMut, TensorInfo};

/// What gaps between rows hold.
pub const GAP: u8 = 0xE7;

pub fn info(data: &Tensor) -> TensorInfo {
    let shape = data.shape.iter().map(|&dim| dim as u64).collect();
    TensorInfo { name: data.name.clone(), dtype: data.dtype.parse().unwrap(), shape }
}

pub fn memory(tensors: &[Tensor]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(tensors.iter().map(|data| (info(data), &data.bytes[..]))).unwrap()
}

pub fn whole(data: &Tensor) -> Rectangle {
    Rectangle::whole(&info(data).shape)
}

/// A rectangle of a tensor in memory, with gaps of `gap` bytes between rows.
#[derive(Clone)]
pub struct Held {
    pub part: Rectangle,
    pub bytes: Vec<u8>,
    pub pitch: Option<u64>,
}

impl Held {
    pub fn new(data: &Tensor, part: &Rectangle, gap: usize) -> Self {
        let width = width(data.dtype);
        let last = *part.extent.last().unwrap();
        let mut bytes = Vec::new();
        for element in 0..part.extent.iter().product::<u64>() {
            if element > 0 && element % last == 0 {
                bytes.extend(vec![GAP; gap]);
            }
            let (mut rest, mut number, mut stride): (u64, u64, u64) = (element, 0, 1);
            for i in (0..part.extent.len()).rev() {
                number += (part.origin[i] + rest % part.extent[i]) * stride;
                rest /= part.extent[i];
                stride *= data.shape[i] as u64;
            }
            bytes.extend(&data.bytes[number as usize * width..][..width]);
        }
        Self { part: part.clone(), bytes, pitch: (gap > 0).then_some(last * width as u64 + gap as u64) }
    }

    /// Memory of the same layout with zeros in place of elements.
    pub fn zeros(data: &Tensor, part: &Rectangle, gap: usize) -> Self {
        Self::new(&Tensor { bytes: vec![0; data.bytes.len()], ..data.clone() }, part, gap)
    }

    pub fn slice(&self, info: TensorInfo) -> Slice<'_> {
        let slice = Slice::new(info, self.part.clone(), &self.bytes);
        self.pitch.into_iter().fold(slice, |slice, pitch| slice.pitch(pitch))
    }

    pub fn slice_mut<'a>(&'a mut self, name: &'a str) -> SliceMut<'a> {
        let slice = SliceMut::new(name, self.part.clone(), &mut self.bytes);
        self.pitch.into_iter().fold(slice, |slice, pitch| slice.pitch(pitch))
    }
}

/// Cuts a rectangle again and again, as the numbers say. The results nest.
pub fn cut(rectangle: &Rectangle, numbers: &mut impl Iterator<Item = u64>, depth: u32, dim: usize) -> Vec<Rectangle> {
    let last = rectangle.extent.len();
    if depth == 0 || dim == last {
        return vec![rectangle.clone()];
    }
    let mut number = || numbers.next().unwrap_or(0);
    let length = rectangle.extent[dim];
    let ends: std::collections::BTreeSet<u64> = (0..number() % 4).map(|_| 1 + number() % length).chain([length]).collect();
    let mut from = 0;
    let mut parts = Vec::new();
    for end in ends {
        let mut slab = rectangle.clone();
        (slab.origin[dim], slab.extent[dim]) = (rectangle.origin[dim] + from, end - from);
        // Each slab is cut by itself, in this dimension's successors.
        parts.extend(cut(&slab, numbers, depth - 1, dim + 1));
        from = end;
    }
    parts
}
