//! Finds the base tensors of a tensor in a base.

use crate::checkpoint::Checkpoint;
use crate::cut::ConvertedTensor;
use tpde_core::error::{Error, Escaped, Result, Rule, hex};
use tpde_core::format::DIGEST_SIZE;
use tpde_core::index::Tensor;
use tpde_core::lane::Dtype;

/// The error for an entry whose base has the digest `found`. `chunk` is the first chunk whose base sum differs, if the sums were
/// compared before the digest.
pub(crate) fn wrong_base(tensor: &Tensor<'_>, found: &[u8; DIGEST_SIZE], chunk: Option<u32>) -> Error {
    Error::WrongBase {
        tensor: tensor.name.to_owned(),
        base: tensor.base_name.to_owned(),
        chunk,
        rule: if chunk.is_some() { Rule::ChunkBaseSum } else { Rule::TensorBaseDigest },
        expected: hex(tensor.base_digest()),
        found: hex(found),
    }
}

/// The positions of the tensors from which base lanes are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BaseTensors {
    pub base: usize,
    /// The tensor of scales, for base kind `dequantised`.
    pub scales: Option<usize>,
}

impl BaseTensors {
    /// Whether the tensors have the dtypes and shapes that an entry states.
    pub fn fit(self, tensor: &Tensor<'_>, base: &dyn Checkpoint) -> bool {
        let is = |i: usize, dtype: Dtype, shape: &[u64]| base.tensors()[i].dtype == dtype && base.tensors()[i].shape == shape;
        let fits_base = tensor.base_shape().is_some_and(|shape| is(self.base, tensor.base_dtype(), &shape));
        let fit_scales = |(_, dtype, shape): (_, Dtype, Vec<u64>)| self.scales.is_some_and(|scales| is(scales, dtype, &shape));
        fits_base && tensor.scales().is_none_or(fit_scales)
    }

    /// The lanes that these tensors give for an entry; `None` unless its base is derived.
    pub fn converted(self, tensor: &Tensor<'_>) -> Option<ConvertedTensor> {
        let (derived, whole, part) = (tensor.derived?, tensor.whole_shape(), tensor.rectangle());
        Some(match derived.scales.zip(self.scales) {
            Some(((form, _), scales)) => ConvertedTensor::dequantised(tensor.dtype, form, whole, &part, self.base, scales),
            None => ConvertedTensor::cast(tensor.dtype, derived.base_dtype, whole, &part, self.base),
        })
    }
}

/// The base tensors of a tensor in `base`, after checking dtypes and shapes; `None` if the tensor has no base tensor.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) with rule `base.tensor` if a tensor is missing, or has another dtype or shape.
pub(crate) fn find_base(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Result<Option<BaseTensors>> {
    let Some(shape) = tensor.base_shape() else { return Ok(None) };
    let of_base = find(tensor, base, "base tensor", tensor.base_name, tensor.base_dtype(), &shape)?;
    let scales = tensor.scales();
    let of_scales = scales.map(|(name, dtype, shape)| find(tensor, base, "tensor of scales", name, dtype, &shape)).transpose()?;
    Ok(Some(BaseTensors { base: of_base, scales: of_scales }))
}

fn find(tensor: &Tensor<'_>, base: &dyn Checkpoint, what: &str, name: &str, dtype: Dtype, shape: &[u64]) -> Result<usize> {
    let broken = |found: &dyn std::fmt::Display| {
        let expected = format!("{what} {} of {dtype} {shape:?}", Escaped(name));
        Rule::BaseTensor.broken(expected, found).in_tensor(tensor.name)
    };
    let absent = if base.tensors().is_empty() { "no base, or one without tensors" } else { "none" };
    let base_index = base.find(name).ok_or_else(|| broken(&absent))?;
    let info = &base.tensors()[base_index];
    if info.dtype != dtype || info.shape != shape {
        return Err(broken(&format_args!("{} {:?}", info.dtype, info.shape)));
    }
    Ok(base_index)
}
