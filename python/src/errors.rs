//! Converts errors of the library to the exceptions of `tpde/_core/errors.py`.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PySlice, PyTuple};
use std::io::ErrorKind;
use tpde::{Conflict, Error, Rule};

/// The keyword of the exceptions for advice. They show it after their message.
pub const HINT: &str = "_hint";

/// The exception with this code, message and attributes.
pub fn exception<'py>(py: Python<'py>, code: &str, message: &str, attributes: &Bound<'py, PyDict>) -> PyErr {
    let made = py
        .import("tpde._core.errors")
        .and_then(|module| module.getattr("make_error"))
        .and_then(|make| make.call((code, message), Some(attributes)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// The exception for an error of the library.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    with_hint(py, error, hint(error))
}

/// The exception for an error of the library, with this advice.
pub fn with_hint(py: Python<'_>, error: &Error, hint: Option<&str>) -> PyErr {
    attributes(py, error, hint).unwrap_or_else(|error| error)
}

/// Advice that names arguments of the package; otherwise that of the library.
fn hint(error: &Error) -> Option<&'static str> {
    let cause = match error {
        Error::Step { source, .. } => source,
        error => error,
    };
    Some(match cause {
        // Raised by the library itself: an error of the operating system would have a number.
        Error::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists && source.raw_os_error().is_none() => {
            "replace=True replaces what exists"
        }
        Error::NotMergeable(refused) if refused.conflict == Conflict::File => "files=False merges the tensors without the files",
        Error::NoDevice(_) => "without a device the processor does the same work",
        Error::Invalid(invalid) if invalid.rule == Rule::BaseTensor => {
            "the pair needs the checkpoint that it was made from: pass that as base="
        }
        Error::Invalid(invalid) if invalid.rule == Rule::BaseFile => {
            "the pair takes this header from its base: pass that file as base=, or rebuild the tensors under a new header with \
             tensors='*'"
        }
        _ => return tpde::hint(error),
    })
}

fn attributes(py: Python<'_>, error: &Error, hint: Option<&str>) -> PyResult<PyErr> {
    let with = PyDict::new(py);
    with.set_item(HINT, hint)?;
    let code = match error {
        Error::Io { action, path, source } => {
            with.set_item("action", action)?;
            with.set_item("path", path)?;
            with.set_item("errno", source.raw_os_error())?;
            match source.kind() {
                ErrorKind::NotFound => "not_found",
                ErrorKind::AlreadyExists => "already_exists",
                _ => "io",
            }
        }
        Error::Invalid(invalid) => {
            with.set_item("rule", invalid.rule.id())?;
            with.set_item("section", invalid.rule.section())?;
            with.set_item("pair", &invalid.at.pair)?;
            with.set_item("tensor", &invalid.at.tensor)?;
            with.set_item("entry", invalid.at.entry)?;
            with.set_item("chunk", invalid.at.chunk)?;
            with.set_item("expected", &invalid.expected)?;
            with.set_item("found", &invalid.found)?;
            "invalid"
        }
        Error::UnexpectedPair { expected, found } => {
            with.set_item("expected", expected)?;
            with.set_item("found", found)?;
            "unexpected_pair"
        }
        Error::WrongBase { tensor, base, chunk, rule, expected, found } => {
            with.set_item("tensor", tensor)?;
            with.set_item("base", base)?;
            with.set_item("chunk", chunk)?;
            with.set_item("rule", rule.id())?;
            with.set_item("expected", expected)?;
            with.set_item("found", found)?;
            "wrong_base"
        }
        Error::AlreadyApplied { tensor, chunk, rule } => {
            with.set_item("tensor", tensor)?;
            with.set_item("chunk", chunk)?;
            with.set_item("rule", rule.id())?;
            "already_applied"
        }
        Error::BadCheckpoint { path, reason } => {
            with.set_item("path", path)?;
            with.set_item("reason", reason)?;
            "bad_checkpoint"
        }
        Error::Changed { what } => {
            with.set_item("what", what)?;
            "changed"
        }
        Error::NotWritable { reason } => {
            with.set_item("reason", reason)?;
            "not_writable"
        }
        Error::NotMergeable(refused) => {
            with.set_item("conflict", refused.conflict.name())?;
            with.set_item("name", &refused.name)?;
            with.set_item("pairs", (&refused.pairs[0], &refused.pairs[1]))?;
            with.set_item("found", (&refused.found[0], &refused.found[1]))?;
            "not_mergeable"
        }
        Error::Limit { what, limit, found } => {
            with.set_item("what", what)?;
            with.set_item("limit", limit)?;
            with.set_item("found", found)?;
            "limit"
        }
        Error::Step { number, pair, source } => {
            with.set_item("number", number)?;
            with.set_item("pair", pair)?;
            let step = exception(py, "step", &error.to_string(), &with);
            step.set_cause(py, Some(to_python(py, source)));
            return Ok(step);
        }
        Error::Poisoned { written, total, source } => {
            with.set_item("written", written)?;
            with.set_item("total", total)?;
            let poisoned = exception(py, "poisoned", &error.to_string(), &with);
            poisoned.set_cause(py, Some(to_python(py, source)));
            return Ok(poisoned);
        }
        Error::NotHeld { tensor, chunk, .. } => {
            with.set_item("tensor", tensor)?;
            with.set_item("chunk", chunk)?;
            "not_held"
        }
        Error::PartNotHeld(refused) => {
            with.set_item("tensor", &refused.tensor)?;
            "not_held"
        }
        Error::Incomplete { tensor, missing } => {
            let ends = missing.origin.iter().zip(&missing.extent).map(|(origin, extent)| origin + extent);
            let ranges = missing.origin.iter().zip(ends).map(|(origin, end)| PySlice::new(py, *origin as isize, end as isize, 1));
            with.set_item("tensor", tensor)?;
            with.set_item("missing", PyTuple::new(py, ranges)?)?;
            "incomplete"
        }
        Error::NoDevice(_) => {
            with.set_item("device", "cuda")?;
            "no_device"
        }
        Error::Device { action, reason } => {
            with.set_item("action", action)?;
            with.set_item("reason", reason)?;
            "device"
        }
        Error::NoLibrary { .. } => "no_library",
        Error::InvalidArgument(_) => "invalid_argument",
        _ => "other",
    };
    Ok(exception(py, code, &error.to_string(), &with))
}

/// The exception for a panic. A panic is a defect of the library.
pub fn panicked(py: Python<'_>, payload: &(dyn std::any::Any + Send)) -> PyErr {
    let message = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let message = format!("this is a defect of tpde: {}", message.unwrap_or("it panicked"));
    exception(py, "internal", &message, &PyDict::new(py))
}
