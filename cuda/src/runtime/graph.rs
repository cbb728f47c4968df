//! Graphs of callers: the capture of a stream, and the destruction of the graph.

use super::calls;
use super::driver::{EnterGuard, RawStream, check};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tpde_core::error::{Error, Result};

/// A graph that a stream was captured into.
#[derive(Debug)]
pub struct Graph {
    is_destroyed: Arc<AtomicBool>,
}

impl Graph {
    /// Returns the graph that the stream is being captured into.
    pub(crate) fn of_capture(cx: &EnterGuard<'_>, stream: RawStream) -> Result<Self> {
        let not_captured = || Error::InvalidArgument("the stream is not being captured".into());
        let (_, graph) = capture(cx, stream)?.ok_or_else(not_captured)?;
        let is_destroyed = Arc::new(AtomicBool::new(false));
        let flag = Arc::into_raw(is_destroyed.clone()).cast_mut().cast::<c_void>();
        let mut object = ptr::null_mut();
        let no_sync = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        // SAFETY: `object` is valid for a handle. `destroyed` may be called once, by any thread, with `flag`.
        let made = unsafe { calls::cuUserObjectCreate(&mut object, flag, Some(destroyed), 1, no_sync) };
        if let Err(error) = check(made, "create a user object for a CUDA graph") {
            // SAFETY: the driver did not take this reference.
            drop(unsafe { Arc::from_raw(flag.cast_const().cast::<AtomicBool>()) });
            return Err(error);
        }
        let to_graph = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: the driver has just returned this graph, and its capture keeps it alive. The graph takes over the one
        // reference to the object.
        let retained = unsafe { calls::cuGraphRetainUserObject(graph, object, 1, to_graph) };
        if let Err(error) = check(retained, "attach a user object to a CUDA graph") {
            // SAFETY: the reference was not taken over.
            unsafe { calls::cuUserObjectRelease(object, 1) };
            return Err(error);
        }
        Ok(Self { is_destroyed })
    }

    /// Returns whether the graph and all its instances are destroyed. After that the captured work does not run again.
    pub fn is_destroyed(&self) -> bool {
        self.is_destroyed.load(Ordering::Acquire)
    }
}

/// Called by the driver when the last graph that refers to the object is destroyed. It must not call the driver.
unsafe extern "C" fn destroyed(flag: *mut c_void) {
    // SAFETY: made by `Arc::into_raw`, and converted back once.
    let is_destroyed = unsafe { Arc::from_raw(flag.cast_const().cast::<AtomicBool>()) };
    is_destroyed.store(true, Ordering::Release);
}

/// Returns the id of the capture of the stream, or `None` if the stream is not being captured.
pub(crate) fn capture_id(cx: &EnterGuard<'_>, stream: RawStream) -> Result<Option<u64>> {
    Ok(capture(cx, stream)?.map(|(id, _)| id))
}

/// Returns the id and the graph of the capture of the stream, or `None` if the stream is not being captured.
fn capture(_: &EnterGuard<'_>, stream: RawStream) -> Result<Option<(u64, sys::CUgraph)>> {
    // The status is a number instead of an enum, as for result codes.
    let (mut status, mut id, mut graph) = (0u32, 0, ptr::null_mut());
    let (status_pointer, no_list, no_count) = ((&raw mut status).cast(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: the stream is ours or promised by the caller. The pointers have the right types, and null is allowed for the
    // others.
    let code = unsafe { calls::cuStreamGetCaptureInfo_v2(stream, status_pointer, &mut id, &mut graph, no_list, no_count) };
    check(code, "query the capture of a stream")?;
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32 {
        return Ok(None);
    }
    if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 {
        return Err(Error::Device { action: "capture a stream", reason: "an earlier error has invalidated the capture".into() });
    }
    Ok(Some((id, graph)))
}
