//! Base parameters of derived bases (spec section 8.5).

use crate::derived::{BaseForm, is_cast};
use crate::error::{Result, Rule};
use crate::format::{BaseKind, DerivedParam};
use crate::lane::Dtype;
use crate::prelude::*;

/// The dtype of the base tensor and the form that a base parameter states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Derivation {
    pub base_dtype: Dtype,
    /// `None` for base kind `cast`.
    pub form: Option<BaseForm>,
}

impl Derivation {
    /// Checks the base parameter of an entry with a derived base. `dtype` and `shape` are those of its whole tensor.
    pub fn parse(kind: BaseKind, param: DerivedParam, dtype: Dtype, shape: &[u64]) -> Result<Self> {
        let rule = Rule::TensorBaseParam;
        rule.check_eq(0, param.reserved)?;
        let base_dtype = Dtype::from_code(param.base_dtype);
        if kind == BaseKind::Cast {
            rule.check(param.form == 0, "form 0 of base kind cast", param.form)?;
            let Some(base_dtype) = base_dtype.filter(|&base_dtype| is_cast(base_dtype, dtype)) else {
                return Err(rule.broken(format_args!("a dtype that is cast to {dtype}"), shown(param.base_dtype)));
            };
            rule.check(param.scales_name_size == 0, "no scales name of base kind cast", param.scales_name_size)?;
            return Ok(Self { base_dtype, form: None });
        }
        let form = BaseForm::from_code(param.form).ok_or_else(|| rule.broken("a known form", param.form))?;
        let expected = form.base_dtype();
        rule.check(base_dtype == Some(expected), format_args!("{expected} for form {form}"), shown(param.base_dtype))?;
        let fits = form.fits(dtype, shape);
        rule.check(fits, format_args!("a tensor that form {form} gives"), format_args!("{dtype} {shape:?}"))?;
        Ok(Self { base_dtype: expected, form: Some(form) })
    }

    /// The derivation of an entry whose base parameter was checked; `None` if its base is not derived.
    pub fn of_checked(kind: BaseKind, param: u64) -> Option<Self> {
        let param = DerivedParam::from_bits(param);
        let base_dtype = Dtype::from_code(param.base_dtype).filter(|_| kind.is_derived())?;
        Some(Self { base_dtype, form: BaseForm::from_code(param.form) })
    }

    /// Checks that a part states what the parts before it state.
    pub fn check_is(self, before: Self) -> Result<()> {
        let shown = |of: Self| format!("{} {}", of.base_dtype, of.form.map_or("without form", BaseForm::name));
        Rule::TensorBaseParam.check(self == before, format_args!("that of the parts before, {}", shown(before)), shown(self))
    }

    /// Checks that a part consists of whole blocks.
    pub fn check_blocks(self, shape: &[u64], origin: &[u64], extent: &[u64]) -> Result<()> {
        let cut = self.form.and_then(|form| form.cut_dim(shape, origin, extent));
        cut.map_or(Ok(()), |dim| {
            let expected = format_args!("whole blocks of {shape:?} in dimension {dim}");
            Err(Rule::TensorPart.broken(expected, format_args!("{origin:?} + {extent:?}")))
        })
    }
}

fn shown(code: u16) -> String {
    Dtype::from_code(code).map_or_else(|| format!("code {code}"), |dtype| dtype.name().to_owned())
}
