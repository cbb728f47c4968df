//! Base lanes that are converted from tensors of other dtypes (spec section 8.5): the kernel `tpde_encode_form`.

use crate::abi::{ENDLESS_ROW, TensorForm};
use crate::derived::{DerivedOnDevice, SourceTensor};
use crate::hashes::{HashPlan, HashSlice, Hashes, PIECE};
use crate::rows::Rows;
use crate::runtime::driver::Kernel;
use crate::runtime::memory::DeviceSlice;
use crate::runtime::stream::Stream;
use std::ops::Range;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::lane::Dtype;
use zerocopy::{Immutable, IntoBytes};

/// Number of lanes per part, the work of a block.
const PART: u64 = 16384;

/// Consecutive lanes to be converted: `FormRange` of `kernels/encode/form.cuh`.
#[derive(Debug, Clone, Copy, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct FormRange {
    pub base: u64,
    pub base_row: u64,
    pub base_pitch: u64,
    pub output: u64,
    pub first: u64,
    pub lanes: u32,
    pub first_part: u32,
    pub dtype: u16,
    pub lane_log2: u16,
    pub reserved: u32,
    pub form: TensorForm,
}

/// The parameter of `tpde_encode_form`: `Form` of `kernels/encode/form.cuh`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct FormLaunch {
    pub ranges: u64,
    pub count: u32,
    pub parts: u32,
}

/// How lanes are converted from the memory of the base tensor, and from its scales.
#[derive(Debug, Clone)]
pub(super) struct Conversion {
    base: DeviceSlice,
    base_rows: Option<Rows>,
    /// The memory of the scales, whose address `form` has.
    _scales: Option<DeviceSlice>,
    form: TensorForm,
    dtype: Dtype,
    /// Number of lanes.
    lanes: u64,
}

/// Lanes that one launch converts.
#[derive(Debug, Default)]
pub(super) struct ConversionRanges {
    pub ranges: Vec<FormRange>,
    pub parts: u32,
}

impl Conversion {
    /// How the `lanes` lanes of tensor `name` are converted from these tensors.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if elements of the base or of the scales are not at multiples of their size.
    pub fn new(
        name: &str,
        derived: &DerivedOnDevice,
        (base, base_rows): (DeviceSlice, Option<Rows>),
        scales: Option<(DeviceSlice, Option<Rows>)>,
        (dtype, lanes): (Dtype, u64),
    ) -> Result<Self> {
        check_alignment(name, "the base", &derived.base, &base, base_rows)?;
        if let (Some((of, source)), Some((memory, rows))) = (&derived.scales, &scales) {
            check_alignment(name, &format!("tensor {} of scales", Escaped(of)), source, memory, *rows)?;
        }
        let (address, rows) = scales.as_ref().map_or((0, None), |(memory, rows)| (memory.address(), *rows));
        let form = derived.form_of(address, rows);
        Ok(Self { base, base_rows, _scales: scales.map(|(memory, _)| memory), form, dtype, lanes })
    }

    /// Size of the converted lanes in bytes.
    pub fn bytes(&self) -> u64 {
        self.lanes * self.dtype.lane_bytes() as u64
    }
}

fn check_alignment(name: &str, what: &str, source: &SourceTensor, memory: &DeviceSlice, rows: Option<Rows>) -> Result<()> {
    let (width, at) = (source.dtype.lane_bytes() as u64, memory.address());
    let pitch = rows.map_or(0, |rows| rows.pitch);
    if source.bytes() == 0 || (at.is_multiple_of(width) && pitch.is_multiple_of(width)) {
        return Ok(());
    }
    let dtype = source.dtype;
    Err(Error::InvalidArgument(format!(
        "{what} of tensor {}: {dtype} at {at:#x} with a pitch of {pitch} bytes, expected multiples of {width}",
        Escaped(name)
    )))
}

impl ConversionRanges {
    /// Adds bytes `range` of converted lanes, to be stored at `output`. `range` begins with a multiple of 64
    /// lanes.
    pub fn push(&mut self, conversion: &Conversion, range: Range<u64>, output: u64) {
        if range.is_empty() {
            return;
        }
        let width = conversion.dtype.lane_bytes() as u64;
        let Rows { bytes: base_row, pitch: base_pitch } =
            conversion.base_rows.unwrap_or(Rows { bytes: ENDLESS_ROW, pitch: ENDLESS_ROW });
        let lanes = (range.end - range.start) / width;
        self.ranges.push(FormRange {
            base: conversion.base.address(),
            base_row,
            base_pitch,
            output,
            first: range.start / width,
            lanes: lanes as u32,
            first_part: self.parts,
            dtype: conversion.dtype.code(),
            lane_log2: width.ilog2() as u16,
            reserved: 0,
            form: conversion.form,
        });
        self.parts += lanes.div_ceil(PART) as u32;
    }
}

/// Queues the hashes of converted lanes. `buffer` holds one part of the lanes at a time, and its size is a multiple of [`PIECE`].
pub(super) fn queue_hashes(stream: &Stream, kernel: Kernel, buffer: &DeviceSlice, bases: &[&Conversion]) -> Result<Hashes> {
    let mut plan = HashPlan::default();
    let mut ranges = ConversionRanges::default();
    // For each launch, the end of its ranges and of its parts, and what is hashed after it.
    let mut steps: Vec<(usize, u32, HashSlice)> = Vec::new();
    let mut used = 0;
    for conversion in bases {
        let (bytes, mut start) = (conversion.bytes(), 0);
        let hashed = plan.begin(bytes)?;
        loop {
            if used == buffer.bytes() {
                steps.push((ranges.ranges.len(), ranges.parts, plan.slice_after(steps.last().map(|(.., slice)| slice))));
                used = 0;
            }
            let (output, end) = (buffer.address() + used, bytes.min(start + buffer.bytes() - used));
            ranges.push(conversion, start..end, output);
            plan.add_part(hashed, output.wrapping_sub(start), None, start..end)?;
            used = (used + (end - start).max(1)).next_multiple_of(PIECE);
            start = end;
            if start == bytes {
                break;
            }
        }
    }
    steps.push((ranges.ranges.len(), ranges.parts, plan.slice_after(steps.last().map(|(.., slice)| slice))));
    // First parts are counted from the beginning of a launch.
    let mut first = (0, 0);
    let launches = steps.into_iter().map(|(end, parts, slice)| {
        let (begin, before) = std::mem::replace(&mut first, (end, parts));
        ranges.ranges[begin..end].iter_mut().for_each(|range| range.first_part -= before);
        (begin, FormLaunch { ranges: 0, count: (end - begin) as u32, parts: parts - before }, slice)
    });
    let launches: Vec<_> = launches.collect();
    Hashes::queue_with(stream, &plan, ranges.ranges.as_bytes(), |cx, hash, launch, uploaded| {
        for (begin, form, slice) in &launches {
            let form = FormLaunch { ranges: uploaded + (begin * size_of::<FormRange>()) as u64, ..*form };
            // SAFETY: the ranges were uploaded on this stream. The memory of bases, scales and buffer is held by the caller and by
            // the guard of the queueing. The stream orders the uses of the buffer.
            unsafe {
                if form.parts > 0 {
                    kernel.launch(cx, stream.raw(), form.parts, &form)?;
                }
                slice.queue(cx, hash, stream.raw(), launch)?;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::mem::offset_of;

    const TEXT: &str = include_str!("../../kernels/encode/form.cuh");

    #[test]
    fn structs_are_those_of_the_kernel() {
        macro_rules! ours {
            ($name:literal $type:ident { $($field:ident),+ $(,)? }) => {
                [$((concat!($name, ", ", stringify!($field)), offset_of!($type, $field))),+]
            };
        }
        let ranges = ours!("FormRange" FormRange {
            base, base_row, base_pitch, output, first, lanes, first_part, dtype, lane_log2, reserved, form,
        });
        let launch = ours!("Form" FormLaunch { ranges, count, parts });
        let theirs = TEXT.lines().filter_map(|line| {
            let (field, at) = line.strip_prefix("TPDE_OFFSET(")?.strip_suffix(");")?.rsplit_once(", ")?;
            Some((field, at.parse().unwrap()))
        });
        assert_eq!(ranges.into_iter().chain(launch).collect::<BTreeMap<_, _>>(), theirs.collect());
        assert!(TEXT.contains(&format!("TPDE_SIZE(FormRange, {});", size_of::<FormRange>())));
        assert!(TEXT.contains(&format!("TPDE_SIZE(Form, {});", size_of::<FormLaunch>())));
        assert!(TEXT.contains(&format!("#define TPDE_FORM_THREADS {}\n", crate::abi::FORM_THREADS)));
        assert!(TEXT.contains(&format!("#define TPDE_FORM_PART {PART} ")));
    }
}
