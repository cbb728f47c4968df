//! Finds the base of a target tensor: a tensor of the base, or tensors of other dtypes from which its base lanes are converted.

use super::options::EncodeOptions;
use super::plan::is_prefix;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::ConvertedTensor;
use serde::Serialize;
use tpde_core::derived::{BaseForm, is_cast};
use tpde_core::error::Escaped;
use tpde_core::format::{FormatVersion, MAX_NAME_SIZE, named};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::Rectangle;
use tpde_core::writer::DerivedSpec;

named! {
    /// The reason why a target tensor is not encoded from a base tensor.
    #[non_exhaustive]
    enum UnusedCause as "cause" {
        /// The base tensor has another dtype, and is not converted.
        Dtype => "dtype",
        /// The base tensor has other dimensions. Only a base of the target's dtype may have another number of rows.
        Shape => "shape",
        /// The base tensor is quantised, and its tensor of scales is missing or has another dtype or shape.
        Scales => "scales",
        /// The base tensor is quantised in blocks, and a part of the target has a part of a block.
        Blocks => "blocks",
        /// The base holds only some elements of the base tensor, and lanes of another dtype would be converted from all.
        Held => "held",
        /// The pair is smaller without the base tensor, which may be unrelated.
        Larger => "larger",
    }
}

/// A base tensor that was found for a target tensor, and is not used, or not as it was meant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnusedBase {
    /// Name of the target tensor.
    pub tensor: String,
    /// Name of the base tensor.
    pub base: String,
    /// The kind of reason.
    pub cause: UnusedCause,
    /// What was expected and found.
    pub reason: String,
}

/// The base of a target tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct FoundBase {
    /// Index of the base tensor. It has the dtype of the target unless `derived` is set.
    pub base: usize,
    pub derived: Option<Derivation>,
}

/// The base of a target tensor, and a base tensor that does not fit. Both are set if the second one is used in another way.
#[derive(Debug, Default)]
pub(super) struct BaseSearch {
    pub found: Option<FoundBase>,
    pub unused: Option<UnusedBase>,
}

impl BaseSearch {
    fn found(base: usize, derived: Option<Derivation>) -> Self {
        Self { found: Some(FoundBase { base, derived }), unused: None }
    }

    fn unused(info: &TensorInfo, of: &TensorInfo, cause: UnusedCause, reason: String) -> Self {
        Self { found: None, unused: Some(UnusedBase { tensor: info.name.clone(), base: of.name.clone(), cause, reason }) }
    }

    /// The base of `other`, if this one has none.
    fn or(self, other: impl FnOnce() -> Self) -> Self {
        if self.found.is_some() {
            return self;
        }
        let other = other();
        Self { found: other.found, unused: self.unused.or(other.unused) }
    }
}

/// How base lanes are converted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Derivation {
    Cast(Dtype),
    /// The form, and the index of the tensor of scales.
    Dequantised(BaseForm, usize),
}

impl Derivation {
    /// The description for the table entry.
    pub fn spec(self, base: &dyn Checkpoint) -> DerivedSpec {
        match self {
            Derivation::Cast(base_dtype) => DerivedSpec { base_dtype, scales: None },
            Derivation::Dequantised(form, scales) => {
                let scales = (form, base.tensors()[scales].name.clone());
                DerivedSpec { base_dtype: form.base_dtype(), scales: Some(scales) }
            }
        }
    }

    /// The base lanes of a part of a target tensor; `None` if the part has a part of a block.
    pub fn converted(self, base: usize, target: &TensorInfo, part: &Rectangle) -> Option<ConvertedTensor> {
        match self {
            Derivation::Cast(base_dtype) => Some(ConvertedTensor::cast(target.dtype, base_dtype, &target.shape, part, base)),
            Derivation::Dequantised(form, scales) => form
                .cut_dim(&target.shape, &part.origin, &part.extent)
                .is_none()
                .then(|| ConvertedTensor::dequantised(target.dtype, form, &target.shape, part, base, scales)),
        }
    }
}

/// Suffixes with which publishers of MXFP4 name the two tensors that stand for a tensor: its blocks and its scales. The third
/// member is the form that is used if the shape of the tensor allows both forms.
const MXFP4_NAMES: [(&str, &str, BaseForm); 2] =
    [("_blocks", "_scales", BaseForm::Mxfp4Transposed), (".blocks", ".scales", BaseForm::Mxfp4)];

/// The base of target tensor `info`, whose name in the base is `name`. If the base has no tensor of that name, tensors named
/// `NAME_blocks` or `NAME.blocks` are its base, if their dtype and shape are those of MXFP4.
///
/// These are guesses: what does not fit is not used.
pub(super) fn find_base(base: &dyn Checkpoint, name: &str, info: &TensorInfo, options: &EncodeOptions) -> BaseSearch {
    let is_derived = options.derived && options.format >= FormatVersion::V1_3;
    let Some(index) = base.find(name) else {
        let blocks = MXFP4_NAMES.iter().filter(|_| is_derived).filter_map(|names| find_guessed(base, name, names.0));
        return blocks.fold(BaseSearch::default(), |found, blocks| found.or(|| mxfp4(base, blocks, info)));
    };
    let of = &base.tensors()[index];
    if of.dtype == info.dtype {
        return match of.shape == info.shape || is_prefix(&of.shape, &info.shape) {
            true => BaseSearch::found(index, None),
            false => {
                BaseSearch::unused(info, of, UnusedCause::Shape, differs(&format!("{:?}", info.shape), &format!("{:?}", of.shape)))
            }
        };
    }
    let converted = match of.dtype {
        _ if !is_derived => BaseSearch::default(),
        Dtype::U8 => mxfp4(base, index, info),
        Dtype::F8E4m3 => fp8(base, index, info).or(|| cast(of, info, index)),
        _ => cast(of, info, index),
    };
    converted.or(|| BaseSearch::unused(info, of, UnusedCause::Dtype, differs(info.dtype.name(), of.dtype.name())))
}

/// Whether [`find_base`] may find a base of this name.
pub(super) fn has_base(base: &dyn Checkpoint, name: &str) -> bool {
    base.find(name).is_some() || MXFP4_NAMES.iter().any(|names| find_guessed(base, name, names.0).is_some())
}

/// A tensor whose name is derived from that of another tensor, if the format can hold that name.
fn find_guessed(base: &dyn Checkpoint, stem: &str, suffix: &str) -> Option<usize> {
    base.find(&format!("{stem}{suffix}")).filter(|_| stem.len() + suffix.len() <= MAX_NAME_SIZE as usize)
}

fn differs(expected: &str, found: &str) -> String {
    format!("expected {expected}, found {found}")
}

fn cast(of: &TensorInfo, info: &TensorInfo, base: usize) -> BaseSearch {
    match is_cast(of.dtype, info.dtype) {
        false => BaseSearch::default(),
        true if of.shape == info.shape => BaseSearch::found(base, Some(Derivation::Cast(of.dtype))),
        true => BaseSearch::unused(info, of, UnusedCause::Shape, differs(&format!("{:?}", info.shape), &format!("{:?}", of.shape))),
    }
}

fn fp8(base: &dyn Checkpoint, index: usize, info: &TensorInfo) -> BaseSearch {
    let (form, of) = (BaseForm::Fp8Blocks, &base.tensors()[index]);
    if !form.fits(info.dtype, &info.shape) || of.shape != info.shape {
        return BaseSearch::default();
    }
    let scales = ["_scale_inv", "_scale"].into_iter().filter_map(|suffix| find_guessed(base, &of.name, suffix));
    scales.fold(BaseSearch::default(), |found, scales| found.or(|| with_scales(base, index, Some(scales), form, info)))
}

fn mxfp4(base: &dyn Checkpoint, index: usize, info: &TensorInfo) -> BaseSearch {
    let of = &base.tensors()[index];
    let named = MXFP4_NAMES.iter().find_map(|(blocks, scales, form)| Some((of.name.strip_suffix(blocks)?, scales, *form)));
    let Some((stem, suffix, usual)) = named else { return BaseSearch::default() };
    let other = if usual == BaseForm::Mxfp4 { BaseForm::Mxfp4Transposed } else { BaseForm::Mxfp4 };
    let fits = |form: &BaseForm| {
        of.dtype == form.base_dtype() && form.fits(info.dtype, &info.shape) && of.shape == form.base_shape(&info.shape)
    };
    match [usual, other].into_iter().find(fits) {
        Some(form) => with_scales(base, index, find_guessed(base, stem, suffix), form, info),
        None => {
            let (dtype, shape) = (info.dtype, &info.shape);
            let expected = format!("blocks of MXFP4 for {dtype} {shape:?}");
            BaseSearch::unused(info, of, UnusedCause::Shape, differs(&expected, &format!("{} {:?}", of.dtype, of.shape)))
        }
    }
}

/// The quantised base `index`, if its tensor of scales has the dtype and shape of the form.
fn with_scales(base: &dyn Checkpoint, index: usize, scales: Option<usize>, form: BaseForm, info: &TensorInfo) -> BaseSearch {
    let (dtype, shape) = (form.scales_dtype(), form.scales_dims(&info.shape));
    let found = match scales.map(|scales| (scales, &base.tensors()[scales])) {
        Some((scales, of)) if of.dtype == dtype && of.shape == shape => {
            return BaseSearch::found(index, Some(Derivation::Dequantised(form, scales)));
        }
        Some((_, of)) => format!("{} with {} {:?}", Escaped(&of.name), of.dtype, of.shape),
        None => "none".to_owned(),
    };
    let reason = differs(&format!("scales of {dtype} {shape:?}"), &found);
    BaseSearch::unused(info, &base.tensors()[index], UnusedCause::Scales, reason)
}
