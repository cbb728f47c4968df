//! Finds the base of a target tensor: a tensor of the base, or tensors of other dtypes from which its base lanes are formed.

use super::options::EncodeOptions;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::Formed;
use crate::derived::{BaseForm, is_cast};
use crate::error::{Error, Escaped, Result, Rule};
use crate::lane::Dtype;
use crate::rectangle::Rectangle;
use crate::writer::DerivedSpec;

/// The base of a target tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct FoundBase {
    /// Index of the base tensor. It has the dtype of the target unless `derived` is set, or it is not used.
    pub base: usize,
    pub derived: Option<Derivation>,
}

/// How base lanes are formed.
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
    pub fn formed(self, base: usize, target: &TensorInfo, part: &Rectangle) -> Option<Formed> {
        match self {
            Derivation::Cast(base_dtype) => Some(Formed::cast(target.dtype, base_dtype, &target.shape, part, base)),
            Derivation::Dequantised(form, scales) => form
                .cut_dim(&target.shape, &part.origin, &part.extent)
                .is_none()
                .then(|| Formed::dequantised(target.dtype, form, &target.shape, part, base, scales)),
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
/// # Errors
/// [`Error::Invalid`] with rule `base.tensor` if the tensor of scales of such a tensor, or `NAME_scale_inv` of a tensor of F8_E4M3,
/// is missing or has another dtype or shape.
pub(super) fn find_base(
    base: &dyn Checkpoint,
    name: &str,
    info: &TensorInfo,
    options: &EncodeOptions,
) -> Result<Option<FoundBase>> {
    let plain = base.find(name).map(|base| FoundBase { base, derived: None });
    if !options.derived || plain.is_some_and(|found| base.tensors()[found.base].dtype == info.dtype) {
        return Ok(plain);
    }
    let Some(found) = plain else {
        let blocks = MXFP4_NAMES.iter().find_map(|names| base.find(&format!("{name}{}", names.0)));
        return Ok(blocks.map(|blocks| mxfp4(base, blocks, info)).transpose()?.flatten());
    };
    let of = &base.tensors()[found.base];
    match of.dtype {
        Dtype::U8 => Ok(mxfp4(base, found.base, info)?.or(plain)),
        Dtype::F8E4m3 => Ok(fp8(base, found.base, info)?.or_else(|| cast(of, info, found.base)).or(plain)),
        _ => Ok(cast(of, info, found.base).or(plain)),
    }
}

/// Whether [`find_base`] may find a base of this name.
pub(super) fn has_base(base: &dyn Checkpoint, name: &str) -> bool {
    base.find(name).is_some() || MXFP4_NAMES.iter().any(|names| base.find(&format!("{name}{}", names.0)).is_some())
}

fn cast(of: &TensorInfo, info: &TensorInfo, base: usize) -> Option<FoundBase> {
    let is_base = is_cast(of.dtype, info.dtype) && of.shape == info.shape;
    is_base.then_some(FoundBase { base, derived: Some(Derivation::Cast(of.dtype)) })
}

fn fp8(base: &dyn Checkpoint, index: usize, info: &TensorInfo) -> Result<Option<FoundBase>> {
    let (form, of) = (BaseForm::Fp8Blocks, &base.tensors()[index]);
    if !form.fits(info.dtype, &info.shape) || of.shape != info.shape {
        return Ok(None);
    }
    let scales = match base.find(&format!("{}_scale_inv", of.name)) {
        Some(scales) => Some(checked_scales(base, scales, form, info)?),
        // Other publishers have scales of other shapes under this name.
        None => base.find(&format!("{}_scale", of.name)).filter(|&scales| is_scales(&base.tensors()[scales], form, info)),
    };
    Ok(scales.map(|scales| FoundBase { base: index, derived: Some(Derivation::Dequantised(form, scales)) }))
}

fn mxfp4(base: &dyn Checkpoint, index: usize, info: &TensorInfo) -> Result<Option<FoundBase>> {
    let of = &base.tensors()[index];
    let named = MXFP4_NAMES.iter().find_map(|(blocks, scales, form)| Some((of.name.strip_suffix(blocks)?, scales, *form)));
    let Some((stem, suffix, usual)) = named else { return Ok(None) };
    let other = if usual == BaseForm::Mxfp4 { BaseForm::Mxfp4Transposed } else { BaseForm::Mxfp4 };
    let fits = |form: &BaseForm| {
        of.dtype == form.base_dtype() && form.fits(info.dtype, &info.shape) && of.shape == form.base_shape(&info.shape)
    };
    let Some(form) = [usual, other].into_iter().find(fits) else { return Ok(None) };
    let name = format!("{stem}{suffix}");
    let missing = || scales_fault(&name, form, info, "none");
    let scales = checked_scales(base, base.find(&name).ok_or_else(missing)?, form, info)?;
    Ok(Some(FoundBase { base: index, derived: Some(Derivation::Dequantised(form, scales)) }))
}

fn is_scales(scales: &TensorInfo, form: BaseForm, info: &TensorInfo) -> bool {
    scales.dtype == form.scales_dtype() && scales.shape == form.scales_dims(&info.shape)
}

fn checked_scales(base: &dyn Checkpoint, scales: usize, form: BaseForm, info: &TensorInfo) -> Result<usize> {
    let of = &base.tensors()[scales];
    match is_scales(of, form, info) {
        true => Ok(scales),
        false => Err(scales_fault(&of.name, form, info, &format!("{} {:?}", of.dtype, of.shape))),
    }
}

fn scales_fault(name: &str, form: BaseForm, info: &TensorInfo, found: &str) -> Error {
    let (dtype, shape) = (form.scales_dtype(), form.scales_dims(&info.shape));
    let expected = format_args!("tensor of scales {} of {dtype} {shape:?}", Escaped(name));
    Rule::BaseTensor.broken(expected, found).in_tensor(&info.name)
}
