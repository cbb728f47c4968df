//! The Rust half of the Python package `tpde`: functions of the library for paths, and for memory that Python owns.
//!
//! Private to the package. The Python half in `tpde/` contains the public names, the documentation, and all code that uses NumPy
//! or PyTorch. This crate contains no format logic.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod bound;
mod device;
mod device_pair;
mod encoder;
mod errors;
mod later;
mod memory;
mod opening;
mod outline;
mod pair;
mod paths;
mod read_ahead;
mod rebuild;
mod run;
#[cfg(feature = "store")]
mod store;
mod temporary;

use pyo3::prelude::*;

#[pymodule]
mod _tpde {
    #[pymodule_export]
    use super::device::{Device, Graph};
    #[pymodule_export]
    use super::device_pair::{DevicePair, PlanOfAll, Ready};
    #[pymodule_export]
    use super::encoder::Encoder;
    #[pymodule_export]
    use super::memory::PlainTensors;
    #[pymodule_export]
    use super::opening::Opening;
    #[pymodule_export]
    use super::outline::Outline;
    #[pymodule_export]
    use super::pair::Pair;
    #[pymodule_export]
    use super::paths::{apply, encode, encode_memory, fold, inspect, merge, tensor_names, verify, write_new};
    #[pymodule_export]
    use super::rebuild::{Captured, Launched, Plan, Rebuild};
    #[cfg(feature = "store")]
    #[pymodule_export]
    use super::store::{OpenVersion, Store};
    #[pymodule_export]
    use super::temporary::TemporaryFolder;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        // Warnings of the library go to Python's `logging`, as logger `tpde`. In a second interpreter of the process a logger is
        // already installed, so the error is ignored.
        let logger = pyo3_log::Logger::new(module.py(), pyo3_log::Caching::Nothing)?;
        let _ = logger.filter(log::LevelFilter::Warn).install();
        // Lets tests see how a panic reaches Python.
        module.add_function(wrap_pyfunction!(super::panic_for_tests, module)?)
    }
}

#[pyfunction(name = "_panic")]
fn panic_for_tests(py: Python<'_>) -> PyResult<()> {
    run::run(py, None, 0, |_| panic!("a panic for the tests"))
}
