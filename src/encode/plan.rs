//! The plan of an encoding: pairs each target tensor with its base, and checks that the format can hold all tensors and files.

use super::options::{Candidate, EncodeOptions};
use crate::checkpoint::{Checkpoint, TensorInfo};
use std::sync::{Arc, OnceLock};
use tpde_core::codec::{Codec, Coding, DecodeCost, Layout, TableSet};
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::{BaseKind, FileEntry, MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_FILES, MAX_TENSORS, TensorEntry};
use tpde_core::index::{self, FileNames};
use tpde_core::lane::Dtype;
use tpde_core::limits::Limits;
use tpde_core::writer::{DerivedSpec, FileSpec, PartSpec, TensorSpec};

/// One target tensor with its base. The struct is small, because a model may have very many tensors.
pub struct Plan {
    /// Index of the tensor in the target.
    pub target: u32,
    /// Index of the base tensor in the base.
    pub base: Option<u32>,
    pub base_kind: BaseKind,
    pub dtype: Dtype,
    pub chunk_lanes_log2: u8,
    pub decode_cost: DecodeCost,
    pub lanes: u64,
    /// Tables of codec `conditioned`, once trained: `[0]` for lanes coded from the base, `[1]` for lanes coded from zeros.
    pub tables: [OnceLock<Arc<TableSet>>; 2],
    /// How base lanes are converted, if the base is derived.
    pub derived: Option<Box<DerivedSpec>>,
    /// For a part, its place in the tensor.
    pub part: Option<Box<PartSpec>>,
    /// The candidate with which all chunks are coded, once chosen.
    pub choice: OnceLock<Candidate>,
}

impl Plan {
    pub fn has_base(&self) -> bool {
        self.base_kind != BaseKind::None
    }

    pub fn width(&self) -> u64 {
        self.dtype.lane_bytes() as u64
    }

    /// The same plan for a base whose lanes are converted as `derived` says.
    pub fn derived_from(self, derived: Option<DerivedSpec>) -> Self {
        let base_kind = match &derived {
            None => self.base_kind,
            Some(DerivedSpec { scales: None, .. }) => BaseKind::Cast,
            Some(_) => BaseKind::Dequantised,
        };
        Self { base_kind, derived: derived.map(Box::new), ..self }
    }

    /// The parameters for encoding a chunk of this tensor as a candidate.
    pub fn coding(&self, candidate: Candidate, layout: Option<Layout>) -> Coding<'_> {
        match candidate.codec {
            Codec::Raw => Coding::Raw,
            Codec::Zstd => Coding::Zstd(layout),
            Codec::Conditioned => Coding::Conditioned {
                tables: self.tables_of(candidate).map(|set| &**set),
                low_bits: low_bits(self.dtype, candidate.from_base),
                decode_cost: self.decode_cost,
            },
        }
    }

    /// The table set of codec `conditioned` as a candidate.
    pub fn tables_of(&self, candidate: Candidate) -> Option<&Arc<TableSet>> {
        self.tables[usize::from(!candidate.from_base)].get()
    }

    /// Name of the base tensor, if it differs from the name in the target.
    fn base_name<'a>(&self, base: Option<&'a dyn Checkpoint>, target: &dyn Checkpoint) -> Option<&'a str> {
        let name = base.zip(self.base).map(|(base, tensor_index)| base.tensors()[tensor_index as usize].name.as_str());
        name.filter(|name| *name != target.tensors()[self.target as usize].name)
    }

    /// The tensor's table entry for chunks coded as `candidate`. `tables` says whether the entry has tables.
    pub fn spec(&self, candidate: Candidate, tables: bool, base: Option<&dyn Checkpoint>, target: &dyn Checkpoint) -> TensorSpec {
        let TensorInfo { name, dtype, shape } = target.tensors()[self.target as usize].clone();
        let base = base.zip(self.base).filter(|_| candidate.from_base).map(|(base, i)| &base.tensors()[i as usize]);
        let base_kind = if candidate.from_base { self.base_kind } else { BaseKind::None };
        let base_param = match (base_kind, base) {
            (BaseKind::Prefix, Some(base)) => base.shape[0],
            _ => 0,
        };
        TensorSpec {
            name,
            base_name: base.map(|base| base.name.clone()),
            dtype,
            shape,
            part: self.part.as_deref().cloned(),
            base_kind,
            base_param,
            derived: self.derived.as_deref().filter(|_| candidate.from_base).cloned(),
            codec: candidate.codec,
            tables: self.tables_of(candidate).filter(|_| tables && candidate.codec == Codec::Conditioned).cloned(),
            chunk_lanes_log2: self.chunk_lanes_log2,
        }
    }
}

/// Number of bits of each delta that codec `conditioned` stores uncoded: mantissa and sign if the lanes are floats coded from
/// zeros, otherwise 0.
pub fn low_bits(dtype: Dtype, from_base: bool) -> u32 {
    if from_base { 0 } else { dtype.mantissa_bits().map_or(0, |bits| bits + 1) }
}

/// Returns an error for tensors and files that the format cannot hold. Called before any lane is read.
pub fn check_holdable(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, plans: &[Plan], files: &[FileSpec]) -> Result<()> {
    let max_section = Limits::default().section_size;
    let mut chunks = 0u64;
    for plan in plans {
        let info = &target.tensors()[plan.target as usize];
        index::check_holdable(&info.name, plan.base_name(base, target), info.shape.len())?;
        chunks = chunks.saturating_add(plan.lanes.div_ceil(1 << plan.chunk_lanes_log2));
    }
    Error::check_limit("number of tensors", MAX_TENSORS.into(), plans.len() as u64)?;
    Error::check_limit("number of chunks", MAX_CHUNKS.into(), chunks)?;
    Error::check_limit("size of the tensor table", max_section, tensor_table_bytes(base, target, plans))?;
    let mut names = FileNames::default();
    for file in files {
        names.add(file.name.as_bytes(), file.kind, files.len())?;
    }
    Error::check_limit("number of files", MAX_FILES.into(), files.len() as u64)?;
    Error::check_limit("size of the file table", max_section, file_table_bytes(files))
}

/// Size of the tensor table in bytes, before compression.
fn tensor_table_bytes(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, plans: &[Plan]) -> u64 {
    let entry = |plan: &Plan| {
        let info = &target.tensors()[plan.target as usize];
        let scales_name = plan.derived.as_ref().and_then(|derived| Some(derived.scales.as_ref()?.1.len()));
        let names = info.name.len() + plan.base_name(base, target).map_or(0, str::len) + scales_name.unwrap_or(0);
        (TensorEntry::SIZE + 8 * info.shape.len() + names) as u64
    };
    plans.iter().map(entry).sum()
}

/// Size of the file table in bytes, before compression.
fn file_table_bytes(files: &[FileSpec]) -> u64 {
    files.iter().map(|file| (FileEntry::SIZE + file.name.len() + file.content.len()) as u64).sum()
}

/// The number of lanes of a tensor.
///
/// # Errors
/// [`Error::InvalidArgument`] if no tensor can have its shape.
pub(super) fn lanes(info: &TensorInfo) -> Result<u64> {
    let TensorInfo { name, dtype, shape } = info;
    let impossible = || {
        Error::InvalidArgument(format!(
            "tensor {} of {dtype} {shape:?}: expected fewer than 2^63 bits, in whole bytes",
            Escaped(name)
        ))
    };
    dtype.lanes(shape).ok_or_else(impossible)
}

pub(crate) fn plan(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    tensor_index: usize,
    options: &EncodeOptions,
) -> Result<Plan> {
    let name = &target.tensors()[tensor_index].name;
    plan_from(base, base.and_then(|base| base.find(options.base_name(name))), target, tensor_index, options)
}

/// [`plan`] for a known number of the base tensor.
pub(super) fn plan_from(
    base: Option<&dyn Checkpoint>,
    base_index: Option<usize>,
    target: &dyn Checkpoint,
    tensor_index: usize,
    options: &EncodeOptions,
) -> Result<Plan> {
    let info = &target.tensors()[tensor_index];
    let lanes = lanes(info)?;
    let TensorInfo { dtype, shape, .. } = info;
    let known_base = base.zip(base_index).map(|(base, i)| (i as u32, &base.tensors()[i]));
    let (base, base_kind) = match known_base {
        Some((i, base)) if base.dtype == *dtype && base.shape == *shape => (Some(i), BaseKind::Same),
        Some((i, base)) if base.dtype == *dtype && is_prefix(&base.shape, shape) => (Some(i), BaseKind::Prefix),
        // A base with another dtype, or with other dimensions after the first, is not used. The checkpoint of entries has derived
        // bases with the dtype of the target.
        _ => (None, BaseKind::None),
    };
    let chunk_lanes_log2 = options.chunk_lanes.min(MAX_CHUNK_BYTES / dtype.lane_bytes() as u64).ilog2() as u8;
    let candidates = options.codec.candidates(base_kind != BaseKind::None);
    let choice = if let [only] = candidates[..] { OnceLock::from(only) } else { OnceLock::new() };
    Ok(Plan {
        target: tensor_index as u32,
        base,
        base_kind,
        dtype: *dtype,
        chunk_lanes_log2,
        decode_cost: options.favor.decode_cost(options.chunk_lanes),
        lanes,
        tables: Default::default(),
        derived: None,
        part: None,
        choice,
    })
}

/// Whether the shapes differ in the first dimension and in no other.
pub(super) fn is_prefix(base: &[u64], target: &[u64]) -> bool {
    matches!((base, target), ([b, base @ ..], [t, target @ ..]) if b != t && base == target)
}

#[cfg(test)]
mod tests;
