//! The kernels, compiled for a device.

use super::driver::{Context, EnterGuard, Kernel, Module};
use super::ptx::{self, Ptx};
use crate::abi;
use std::sync::{Mutex, PoisonError};
use tpde_core::error::Result;

/// All kernels.
#[derive(Debug)]
pub(crate) struct Kernels {
    raw: Kernel,
    conditioned: Kernel,
    /// `tpde_layout`, which reports struct layouts for a test.
    pub layout: Kernel,
    lazy: Lazy,
    modules: Mutex<Vec<Module>>,
}

/// Kernels that only some pairs need. They are compiled at their first use.
#[derive(Debug, Default)]
struct Lazy {
    without_base: Mutex<Option<Kernel>>,
    /// In the order of [`Decoder`].
    strided: [Mutex<Option<Kernel>>; 3],
    /// For derived bases: `Raw` and `Conditioned`.
    derived: [Mutex<Option<Kernel>>; 2],
    #[cfg(feature = "nvcomp")]
    frames: Mutex<Option<FrameKernels>>,
    digests: Mutex<Option<Kernel>>,
    hash: Mutex<Option<Kernel>>,
    encoder: Mutex<Option<EncodeKernels>>,
    form: Mutex<Option<Kernel>>,
}

/// A decoding kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decoder {
    Raw,
    Conditioned,
    WithoutBase,
}

/// Tensors with kernels of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Variant {
    /// No gaps between rows.
    Plain,
    /// Rows with gaps between them.
    Strided,
    /// Base lanes that are converted, with gaps or without.
    Derived,
}

impl Variant {
    pub const ALL: [Self; 3] = [Self::Plain, Self::Strided, Self::Derived];
}

/// `tpde_frames_check` and `tpde_frames_expand`.
#[cfg(feature = "nvcomp")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameKernels {
    pub check: Kernel,
    pub expand: Kernel,
}

/// The kernels of an encoder, `tpde_encode_…`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EncodeKernels {
    pub survey: Kernel,
    pub sample: Kernel,
    pub groups: Kernel,
    pub choose: Kernel,
    pub count: Kernel,
    pub streams: Kernel,
    pub gather: Kernel,
    pub copy: Kernel,
    pub crc: Kernel,
}

impl Kernels {
    pub fn load(cx: &EnterGuard<'_>) -> Result<Self> {
        let mut modules = Vec::new();
        let mut load = |ptx: Ptx, name, threads, shared| -> Result<Kernel> {
            let (kernel, module) = Kernel::load(cx, &ptx.text()?, name, threads, shared)?;
            modules.push(module);
            Ok(kernel)
        };
        let raw = load(ptx::RAW, "tpde_raw", abi::RAW_THREADS, abi::RAW_SHARED)?;
        let shared = abi::CONDITIONED_SHARED + abi::CONDITIONED_TABLES_MAX;
        let conditioned = load(ptx::CONDITIONED, "tpde_conditioned", abi::CONDITIONED_THREADS, shared)?;
        let layout = load(ptx::LAYOUT, "tpde_layout", 1, 0)?;
        Ok(Self { raw, conditioned, layout, lazy: Lazy::default(), modules: Mutex::new(modules) })
    }

    /// Returns a decoding kernel. A derived base has all lanes, so it needs no kernel for chunks without a base.
    pub fn decoder(&self, context: &Context, decoder: Decoder, variant: Variant) -> Result<Kernel> {
        let (threads, shared) = match decoder {
            Decoder::Raw => (abi::RAW_THREADS, abi::RAW_SHARED),
            Decoder::Conditioned => (abi::CONDITIONED_THREADS, abi::CONDITIONED_SHARED + abi::CONDITIONED_TABLES_MAX),
            Decoder::WithoutBase => (abi::WITHOUT_BASE_THREADS, abi::WITHOUT_BASE_SHARED + abi::CONDITIONED_TABLES_MAX),
        };
        let (ptx, name) = match (decoder, variant) {
            (Decoder::Raw, Variant::Plain) => return Ok(self.raw),
            (Decoder::Raw, Variant::Strided) => (ptx::RAW_STRIDED, "tpde_raw_strided"),
            (Decoder::Raw, Variant::Derived) => (ptx::RAW_DERIVED, "tpde_raw_derived"),
            (Decoder::Conditioned, Variant::Plain) => return Ok(self.conditioned),
            (Decoder::Conditioned, Variant::Strided) => (ptx::CONDITIONED_STRIDED, "tpde_conditioned_strided"),
            (Decoder::Conditioned, Variant::Derived) => (ptx::CONDITIONED_DERIVED, "tpde_conditioned_derived"),
            (Decoder::WithoutBase, Variant::Strided) => (ptx::WITHOUT_BASE_STRIDED, "tpde_without_base_strided"),
            (Decoder::WithoutBase, _) => (ptx::WITHOUT_BASE, "tpde_without_base"),
        };
        let cell = match (variant, decoder) {
            (Variant::Strided, _) => &self.lazy.strided[decoder as usize],
            (Variant::Derived, Decoder::Raw) => &self.lazy.derived[0],
            (Variant::Derived, Decoder::Conditioned) => &self.lazy.derived[1],
            _ => &self.lazy.without_base,
        };
        load_once(cell, context, |cx| self.load_more(cx, ptx, name, threads, shared))
    }

    /// Returns the kernels before and after nvCOMP.
    #[cfg(feature = "nvcomp")]
    pub fn frames(&self, context: &Context) -> Result<FrameKernels> {
        load_once(&self.lazy.frames, context, |cx| {
            let load = |name| self.load_more(cx, ptx::FRAMES, name, abi::FRAMES_THREADS, 0);
            Ok(FrameKernels { check: load("tpde_frames_check")?, expand: load("tpde_frames_expand")? })
        })
    }

    /// Returns the kernel for payload digests.
    pub fn digests(&self, context: &Context) -> Result<Kernel> {
        load_once(&self.lazy.digests, context, |cx| self.load_more(cx, ptx::DIGESTS, "tpde_digests", abi::DIGESTS_THREADS, 0))
    }

    /// Returns the kernel for hashes of memory.
    pub fn hash(&self, context: &Context) -> Result<Kernel> {
        load_once(&self.lazy.hash, context, |cx| self.load_more(cx, ptx::HASH, "tpde_hash", abi::HASH_THREADS, abi::HASH_SHARED))
    }

    /// Returns the kernel that forms base lanes for an encoder.
    pub fn form(&self, context: &Context) -> Result<Kernel> {
        load_once(&self.lazy.form, context, |cx| self.load_more(cx, ptx::ENCODE_FORM, "tpde_encode_form", abi::FORM_THREADS, 0))
    }

    /// Returns the kernels of an encoder.
    pub fn encoder(&self, context: &Context) -> Result<EncodeKernels> {
        load_once(&self.lazy.encoder, context, |cx| {
            let plan = self.keep(Module::load(cx, &ptx::ENCODE_PLAN.text()?)?);
            let write = self.keep(Module::load(cx, &ptx::ENCODE_WRITE.text()?)?);
            let load = |module: &Module, name| module.kernel(cx, name, abi::ENCODE_THREADS, 0);
            Ok(EncodeKernels {
                survey: load(&plan, "tpde_encode_survey")?,
                sample: load(&plan, "tpde_encode_sample")?,
                groups: load(&plan, "tpde_encode_groups")?,
                choose: load(&plan, "tpde_encode_choose")?,
                count: load(&write, "tpde_encode_count")?,
                streams: write.kernel(cx, "tpde_encode_streams", abi::ENCODE_STREAM_THREADS, 0)?,
                gather: load(&write, "tpde_encode_gather")?,
                copy: load(&write, "tpde_encode_copy")?,
                crc: load(&write, "tpde_encode_crc")?,
            })
        })
    }

    /// Keeps a module until all are unloaded.
    fn keep(&self, module: Module) -> Module {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner).push(module.clone());
        module
    }

    fn load_more(&self, cx: &EnterGuard<'_>, ptx: Ptx, name: &str, threads: u32, shared: u32) -> Result<Kernel> {
        let (kernel, module) = Kernel::load(cx, &ptx.text()?, name, threads, shared)?;
        self.modules.lock().unwrap_or_else(PoisonError::into_inner).push(module);
        Ok(kernel)
    }

    /// Unloads all modules.
    ///
    /// # Safety
    /// All launches have completed.
    pub unsafe fn unload(&mut self, cx: &EnterGuard<'_>) {
        for module in self.modules.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: promised by the caller.
            unsafe { module.unload(cx) };
        }
    }
}

/// Returns the value of the cell, or loads it.
fn load_once<T: Copy>(cell: &Mutex<Option<T>>, context: &Context, load: impl FnOnce(&EnterGuard<'_>) -> Result<T>) -> Result<T> {
    let mut cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = *cell {
        return Ok(loaded);
    }
    Ok(*cell.insert(load(&context.enter()?)?))
}
