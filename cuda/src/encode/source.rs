//! Base and target in device memory: the lanes of each entry of the pair.

use super::convert::{Conversion, ConversionRanges, FormRange};
use super::session::{Session, SessionGuard};
use crate::abi::{self, EncodeChunk};
use crate::checkpoint::DeviceCheckpoint;
use crate::derived::{DerivedOnDevice, SourceTensor};
use crate::rows::Rows;
use crate::runtime::copies::CopyRows;
use crate::runtime::memory::DeviceSlice;
use std::ops::Range;
use tpde::TensorInfo;
use tpde::internals::{LaneRange, Plan, Selection, low_bits};
use tpde_core::derived::Derived;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::BaseKind;
use tpde_core::rectangle::Rectangle;

/// Alignment of copies without gaps, in bytes.
const ALIGN: u64 = 16;

/// The lanes of a tensor, or of a part of a tensor.
#[derive(Debug, Clone)]
pub(super) struct Lanes {
    /// Of a derived base, the memory of the base tensor.
    pub memory: DeviceSlice,
    pub rows: Option<Rows>,
    /// How the lanes of a derived base are converted.
    pub conversion: Option<Box<Conversion>>,
}

impl Lanes {
    /// Size without gaps in bytes.
    pub fn bytes(&self) -> u64 {
        match (&self.conversion, self.rows) {
            (Some(conversion), _) => conversion.bytes(),
            (None, Some(Rows { bytes, pitch })) if self.memory.bytes() > 0 => ((self.memory.bytes() - bytes) / pitch + 1) * bytes,
            (None, _) => self.memory.bytes(),
        }
    }

    /// Whether kernels need a copy of the lanes: they read lanes without gaps, at whole multiples of their size, and do not convert
    /// them.
    fn needs_copy(&self, width: u64) -> bool {
        self.conversion.is_some() || self.rows.is_some() || !self.memory.address().is_multiple_of(width)
    }

    /// The copies that put bytes `range` of the lanes, without gaps, at address `to`: at most three.
    fn copies(&self, range: Range<u64>, to: u64) -> Vec<(u64, CopyRows)> {
        let whole = self.memory.bytes().max(1);
        let Rows { bytes: row, pitch } = self.rows.unwrap_or(Rows { bytes: whole, pitch: whole });
        let mut copies = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (number, offset) = (at / row, at % row);
            let from = self.memory.address() + number * pitch + offset;
            let (bytes, count) = match (range.end - at) / row {
                rows if offset == 0 && rows > 0 => (row, rows),
                _ => ((row - offset).min(range.end - at), 1),
            };
            copies.push((to + at - range.start, CopyRows { from, bytes, pitch, count }));
            at += bytes * count;
        }
        copies
    }
}

/// The lanes of all entries.
pub(super) struct Source {
    /// By number of the base of an entry.
    base: Vec<Option<Lanes>>,
    /// By number of the target of an entry.
    target: Vec<Lanes>,
}

impl Source {
    /// Finds the memory of all entries. The plans are those of the selection.
    ///
    /// # Errors
    /// Those of [`DeviceCheckpoint::memory_of`] and of [`Conversion::new`].
    pub fn new(
        base: Option<&DeviceCheckpoint>,
        target: &DeviceCheckpoint,
        selection: &Selection<'_>,
        plans: &[Plan],
    ) -> Result<Self> {
        let mut bases = vec![None; selection.base().map_or(0, |base| base.tensors().len())];
        let mut targets = Vec::with_capacity(plans.len());
        for plan in plans {
            let shape = &selection.target().tensors()[plan.target as usize].shape;
            let part = plan.part.as_ref().map(|part| Rectangle::new(part.origin.clone(), shape.clone()));
            let lanes = |what, checkpoint: &DeviceCheckpoint, tensor_index, shape: &[u64]| -> Result<_> {
                // Most tensors are whole. Then no rectangles are made.
                let whole = if part.is_none() { checkpoint.memory_of_whole(tensor_index) } else { None };
                if let Some(memory) = whole {
                    return Ok(Lanes { memory, rows: None, conversion: None });
                }
                let rectangle = part.clone().unwrap_or_else(|| Rectangle::whole(shape));
                let (memory, rows) = checkpoint.memory_of(what, tensor_index, &rectangle)?;
                Ok(Lanes { memory, rows, conversion: None })
            };
            targets.push(lanes("target", target, selection.target_tensor(plan.target as usize), shape)?);
            if let (Some(base), Some(i), Some(infos)) = (base, plan.base, selection.base()) {
                let (tensors, i) = (selection.base_tensors(i as usize), i as usize);
                bases[i] = Some(match (&plan.derived, &tensors[..]) {
                    (None, &[tensor]) => lanes("base", base, tensor, &infos.tensors()[i].shape)?,
                    _ => derived_lanes(base, &tensors, plan, &selection.target().tensors()[plan.target as usize])?,
                });
            }
        }
        Ok(Self { base: bases, target: targets })
    }

    /// The lanes of one entry, whose base has the same memory.
    #[cfg(test)]
    pub fn of_one(memory: DeviceSlice, rows: Option<Rows>) -> Self {
        let lanes = Lanes { memory, rows, conversion: None };
        Self { base: vec![Some(lanes.clone())], target: vec![lanes] }
    }

    /// The base lanes of an entry that may be coded from a base.
    pub fn base(&self, plan: &Plan) -> Option<&Lanes> {
        let number = plan.base.filter(|_| plan.base_kind != BaseKind::None)?;
        self.base.get(number as usize)?.as_ref()
    }

    /// The target lanes of an entry.
    pub fn target(&self, plan: &Plan) -> &Lanes {
        &self.target[plan.target as usize]
    }

    /// Size of the entries of lists that the base lanes of a chunk need, in bytes.
    pub fn list_bytes(&self, plan: &Plan) -> u64 {
        self.base(plan).and_then(|base| base.conversion.as_ref()).map_or(0, |_| size_of::<FormRange>() as u64)
    }

    /// The bytes of memory that copies of the base and target lanes of a chunk need, per lane.
    pub fn copied_per_lane(&self, plan: &Plan) -> u64 {
        let lanes = self.base(plan).into_iter().chain([self.target(plan)]);
        lanes.filter(|lanes| lanes.needs_copy(plan.width())).count() as u64 * plan.width()
    }

    /// Describes chunks: lanes of entries. Queues copies of lanes that the
    /// kernels cannot read where they are. The memory of the copies is needed as long as the chunks.
    pub fn chunks<'p>(
        &self,
        session: &Session<'_>,
        chunks: impl Iterator<Item = LaneRange<'p>>,
    ) -> Result<(Vec<EncodeChunk>, Option<DeviceSlice>)> {
        let (mut described, mut copied, mut bytes) = (Vec::new(), Vec::new(), 0);
        for (i, LaneRange { plan, from_base, first, lanes }) in chunks.enumerate() {
            let width = plan.width();
            let base = self.base(plan).filter(|_| from_base);
            let base_lanes = base.map_or(0, |base| base.bytes() / width).saturating_sub(first).min(lanes);
            let mut place = |source: &Lanes, lanes: u64, is_base| {
                if source.needs_copy(width) && lanes > 0 {
                    copied.push((i, source.clone(), first * width..(first + lanes) * width, bytes, is_base));
                    bytes += (lanes * width).next_multiple_of(ALIGN);
                }
                source.memory.address().wrapping_add(first * width)
            };
            let target = place(self.target(plan), lanes, false);
            described.push(EncodeChunk {
                base: base.map_or(0, |base| place(base, base_lanes, true)),
                target,
                lanes: lanes as u32,
                base_lanes: base_lanes as u32,
                tables: abi::NO_TABLES,
                lane_cost: plan.decode_cost.lane as u32,
                dtype: plan.dtype.code(),
                lane_log2: width.ilog2() as u8,
                low_bits: low_bits(plan.dtype, from_base) as u8,
                ..EncodeChunk::default()
            });
        }
        if copied.is_empty() {
            return Ok((described, None));
        }
        let memory = session.alloc(bytes)?;
        let mut conversion = ConversionRanges::default();
        let queued = copied.into_iter().try_for_each(|(i, source, range, offset, is_base)| {
            let to = memory.address() + offset;
            *(if is_base { &mut described[i].base } else { &mut described[i].target }) = to;
            if let Some(how) = &source.conversion {
                conversion.push(how, range, to);
                return Ok(());
            }
            source.copies(range, to).into_iter().try_for_each(|(to, rows)| session.copy_rows(to, rows))
        });
        let queued = queued.and_then(|()| if conversion.ranges.is_empty() { Ok(()) } else { session.convert(&conversion) });
        if queued.is_err() {
            // Before the memory is freed.
            drop(SessionGuard(session));
        }
        queued.map(|()| (described, Some(memory)))
    }
}

/// The base lanes of an entry with a derived base, which are converted from these tensors of the base.
fn derived_lanes(base: &DeviceCheckpoint, tensors: &[usize], plan: &Plan, target: &TensorInfo) -> Result<Lanes> {
    let missing = || Error::InvalidArgument(format!("a derived base of tensor {} without its tensors", Escaped(&target.name)));
    let spec = plan.derived.as_deref().ok_or_else(missing)?;
    let part = plan.part.as_ref().map(|part| Rectangle::new(part.origin.clone(), target.shape.clone()));
    let whole = plan.part.as_ref().map_or(&target.shape, |part| &part.whole);
    let scales = spec.scales.as_ref().map(|(form, name)| (*form, &name[..]));
    let derived = Derived { base_dtype: spec.base_dtype, scales };
    let derived = DerivedOnDevice::new(derived, whole, &part.unwrap_or_else(|| Rectangle::whole(whole)));
    let &tensor = tensors.first().ok_or_else(missing)?;
    let (memory, rows) = base.memory_of("base", tensor, &derived.base.rectangle)?;
    let of_scales =
        |(_, source): &(String, SourceTensor)| base.memory_of("base", *tensors.get(1).ok_or_else(missing)?, &source.rectangle);
    let scales = derived.scales.as_ref().map(of_scales).transpose()?;
    let conversion = Conversion::new(&target.name, &derived, (memory.clone(), rows), scales, (plan.dtype, plan.lanes))?;
    Ok(Lanes { memory, rows, conversion: Some(Box::new(conversion)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_those_of_the_bytes_of_rows() {
        for (row, pitch, rows) in [(3u64, 7u64, 5u64), (4, 4, 3), (1, 9, 8), (10, 11, 1)] {
            // SAFETY: nothing is done with the memory.
            let memory = unsafe { DeviceSlice::from_raw(1000, (rows - 1) * pitch + row) };
            let lanes = Lanes { memory, rows: Some(Rows::new(row, pitch)), conversion: None };
            assert_eq!(lanes.bytes(), row * rows);
            for start in 0..=row * rows {
                for end in start..=row * rows {
                    let copies = lanes.copies(start..end, 50);
                    assert!(copies.len() <= 3, "{copies:?}");
                    let found = copies.iter().flat_map(|(to, copy)| {
                        (0..copy.count).flat_map(move |n| {
                            (0..copy.bytes).map(move |byte| (to + n * copy.bytes + byte, copy.from + n * copy.pitch + byte))
                        })
                    });
                    let expected = (start..end).map(|at| (50 + at - start, 1000 + at / row * pitch + at % row));
                    assert!(found.eq(expected), "{start}..{end} of {rows} rows of {row}, {pitch} apart");
                }
            }
        }
    }
}
