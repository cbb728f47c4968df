//! Descriptions of the tensors, parts and files of a new pair (spec sections 8 and 10).

use crate::codec::{Codec, TableSet};
use crate::derived::{BaseForm, Derived};
use crate::format::{BaseKind, DIGEST_SIZE, DerivedParam, FileKind};
use crate::lane::Dtype;
use crate::prelude::*;
use alloc::sync::Arc;

/// The description of a tensor for the tensor table. The builder adds the fields that follow from the tensor's chunks.
#[derive(Debug, Clone)]
pub struct TensorSpec {
    /// Name in the target. Tensors must be added in ascending order of name.
    pub name: String,
    /// Name of the base tensor, if it differs from `name`.
    pub base_name: Option<String>,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions of the tensor, or extents of the part.
    pub shape: Vec<u64>,
    /// For a part, the shape of its tensor and the origins of the part. The parts of a tensor are added one after another, each
    /// preceding the next (section 8.4).
    pub part: Option<PartSpec>,
    /// Source of the base lanes.
    pub base_kind: BaseKind,
    /// Number of rows of the base tensor for [`BaseKind::Prefix`], else 0. The builder sets it for a derived base.
    pub base_param: u64,
    /// The tensors from which base lanes are formed, for [`BaseKind::Cast`] and [`BaseKind::Dequantised`].
    pub derived: Option<DerivedSpec>,
    /// Codec of the payloads.
    pub codec: Codec,
    /// Tables of codec `conditioned`.
    pub tables: Option<Arc<TableSet>>,
    /// log2 of the number of lanes per chunk.
    pub chunk_lanes_log2: u8,
}

/// The tensors from which base lanes are formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DerivedSpec {
    /// Dtype of the base tensor.
    pub base_dtype: Dtype,
    /// Form and name of the tensor of scales, for [`BaseKind::Dequantised`].
    pub scales: Option<(BaseForm, String)>,
}

impl DerivedSpec {
    pub(super) fn param(&self) -> DerivedParam {
        let (form, size) = self.scales.as_ref().map_or((0, 0), |(form, name)| (form.code(), name.len() as u32));
        DerivedParam { base_dtype: self.base_dtype.code(), form, reserved: 0, scales_name_size: size }
    }
}

impl From<Derived<'_>> for DerivedSpec {
    fn from(of: Derived<'_>) -> Self {
        Self { base_dtype: of.base_dtype, scales: of.scales.map(|(form, name)| (form, name.to_owned())) }
    }
}

/// The place of a part in its tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartSpec {
    /// Shape of the tensor.
    pub whole: Vec<u64>,
    /// First index of the part in each dimension.
    pub origin: Vec<u64>,
}

/// A target file that readers can rebuild.
#[derive(Debug, Clone)]
pub struct FileSpec {
    /// Name of the file. Empty if the target is a single file.
    pub name: String,
    /// Structure of the file.
    pub kind: FileKind,
    /// Size of the content in bytes.
    pub content_size: u64,
    /// BLAKE3-128 of the content.
    pub content_digest: [u8; DIGEST_SIZE],
    /// The content if `kind` stores it, else empty.
    pub content: Vec<u8>,
}
