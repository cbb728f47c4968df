//! A decoder for WebAssembly: index, blob and base tensor in memory, and out comes the target tensor. `decode.mjs` calls it.

use tpde_core::blob;
use tpde_core::error::{Error, Result};
use tpde_core::format::BaseKind;
use tpde_core::index::ValidatedIndex;
use tpde_core::limits::Limits;

/// Returns the address of `size` bytes for an argument. Nothing frees them: a caller makes an instance per pair.
#[unsafe(no_mangle)]
pub extern "C" fn allocate(size: usize) -> *mut u8 {
    vec![0; size].leak().as_mut_ptr()
}

/// Rebuilds a tensor from four arguments: index, blob, name of the tensor, base tensor. Each is an address and a size. Returns the
/// address of the result, times 2^32, plus its size. If bit 63 is set, the result is the text of an error.
///
/// # Safety
/// Each argument is memory of [`allocate`] that the caller has filled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rebuild(
    index: *const u8,
    index_size: usize,
    blob: *const u8,
    blob_size: usize,
    name: *const u8,
    name_size: usize,
    base: *const u8,
    base_size: usize,
) -> u64 {
    // SAFETY: the caller passes memory of `allocate`.
    let memory = |address, size| unsafe { std::slice::from_raw_parts(address, size) };
    let name = String::from_utf8_lossy(memory(name, name_size));
    let (bytes, is_error) = match tensor(memory(index, index_size), memory(blob, blob_size), &name, memory(base, base_size)) {
        Ok(lanes) => (lanes, 0),
        Err(error) => (error.to_string().into_bytes(), 1),
    };
    let bytes = bytes.leak();
    is_error << 63 | (bytes.as_ptr() as u64) << 32 | bytes.len() as u64
}

fn tensor(index: &[u8], blob: &[u8], name: &str, base: &[u8]) -> Result<Vec<u8>> {
    let index = ValidatedIndex::parse(index.to_vec(), &Limits::default())?;
    blob::check_header(&index, &blob[..blob.len().min(64)], blob.len() as u64)?;
    let tensor = index.find(name).ok_or_else(|| Error::InvalidArgument(format!("no tensor {name}")))?;
    let mut lanes = match tensor.base_kind {
        BaseKind::None if tensor.part.is_none() => vec![0; tensor.bytes() as usize],
        BaseKind::Same if tensor.part.is_none() && base.len() as u64 == tensor.bytes() => base.to_vec(),
        _ => return Err(Error::InvalidArgument("this example decodes whole tensors with an equal base or without one".into())),
    };
    blob::decode_tensor(&index, &tensor, &blob, &mut lanes)?;
    Ok(lanes)
}
