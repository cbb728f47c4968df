//! Finds the base lanes of an entry in a base.

use crate::checkpoint::Checkpoint;
use crate::cut::{ConvertedTensor, Piece};
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

/// The base lanes of an entry in `base`, after checking dtypes and shapes; `None` if the entry has no base.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) with rule `base.tensor` if a tensor is missing, or has another dtype or shape.
pub(crate) fn find_base(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Result<Option<Piece>> {
    let Some(shape) = tensor.base_shape() else { return Ok(None) };
    let found = find(tensor, base, "base tensor", tensor.base_name, tensor.base_dtype(), &shape)?;
    let Some(derived) = tensor.derived else { return Ok(Some(Piece::of(found, tensor.layout()))) };
    let (dtype, whole, part) = (tensor.dtype, tensor.whole_shape(), tensor.rectangle());
    Ok(Some(Piece::Converted(match derived.scales.zip(tensor.scales()) {
        Some(((form, _), (name, scales_dtype, shape))) => {
            let scales = find(tensor, base, "tensor of scales", name, scales_dtype, &shape)?;
            ConvertedTensor::dequantised(dtype, form, whole, &part, found, scales)
        }
        None => ConvertedTensor::cast(dtype, derived.base_dtype, whole, &part, found),
    })))
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
