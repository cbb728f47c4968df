//! Derived bases on a device: the tensors from which kernels form base lanes (spec section 8.5).

use super::abi::{ENDLESS_ROW, TensorForm};
use super::rows::Rows;
use tpde_core::derived::{BaseForm, Derived, MXFP4_BLOCK_BYTES};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::Rectangle;

/// What a derived base is converted from: for a part, rectangles of the base tensor and of the tensor of scales.
#[derive(Debug, Clone)]
pub(crate) struct DerivedOnDevice {
    pub base: SourceTensor,
    /// The tensor of scales and its name, for base kind `dequantised`.
    pub scales: Option<(String, SourceTensor)>,
    /// The kernels' struct, without pointers.
    pub form: TensorForm,
}

/// A rectangle of a tensor of the base.
#[derive(Debug, Clone)]
pub(crate) struct SourceTensor {
    pub dtype: Dtype,
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
    pub rectangle: Rectangle,
}

impl SourceTensor {
    pub fn bytes(&self) -> u64 {
        self.dtype.lanes(&self.rectangle.extent).unwrap_or(0) * self.dtype.lane_bytes() as u64
    }
}

impl DerivedOnDevice {
    pub fn new(derived: Derived<'_>, shape: &[u64], part: &Rectangle) -> Self {
        let source = |dtype, shape, origin, extent| SourceTensor { dtype, shape, rectangle: Rectangle::new(origin, extent) };
        let dim = |from_end: usize| part.extent.iter().rev().nth(from_end).map_or(1, |&length| length.max(1));
        let form = TensorForm {
            columns: dim(0),
            depth: dim(1),
            base_dtype: derived.base_dtype.code(),
            form: derived.scales.map_or(0, |(form, _)| form.code()),
            ..TensorForm::default()
        };
        let Some((of, name)) = derived.scales else {
            let base = source(derived.base_dtype, shape.to_vec(), part.origin.clone(), part.extent.clone());
            return Self { base, scales: None, form };
        };
        let (origin, extent) = (of.scales_dims(&part.origin), of.scales_dims(&part.extent));
        let base = match of {
            BaseForm::Fp8Blocks => source(of.base_dtype(), shape.to_vec(), part.origin.clone(), part.extent.clone()),
            BaseForm::Mxfp4 | BaseForm::Mxfp4Transposed => {
                let block = |dims: &[u64], last| [dims, &[last]].concat();
                source(of.base_dtype(), of.base_shape(shape), block(&origin, 0), block(&extent, MXFP4_BLOCK_BYTES))
            }
        };
        let scales = source(of.scales_dtype(), of.scales_dims(shape), origin, extent);
        Self { base, scales: Some((name.to_owned(), scales)), form }
    }

    /// Returns the kernels' struct for scales at this address. Memory without gaps is one row.
    pub fn form_of(&self, scales: u64, rows: Option<Rows>) -> TensorForm {
        let Rows { bytes, pitch } = rows.unwrap_or(Rows { bytes: ENDLESS_ROW, pitch: ENDLESS_ROW });
        TensorForm { scales, scales_row: bytes, scales_pitch: pitch, ..self.form }
    }
}
