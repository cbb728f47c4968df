//! An allocator that counts bytes, so that targets can assert how much memory the library allocates.
//!
//! Memory allocated by zstd in C is not counted; libFuzzer's `-rss_limit_mb` bounds it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator with a count of allocated bytes.
pub struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(size: usize) {
    let now = NOW.fetch_add(size, Relaxed) + size;
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: every method passes its arguments to `System` unchanged and returns its result. Counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller keeps the contract of this method, which is that of `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks may exist while the content is copied.
        grow(size);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of this method, which is that of `System`.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of this method, which is that of `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs `work`. Panics if it allocates more than `limit` bytes on top of what is already allocated.
pub fn within<R>(limit: usize, work: impl FnOnce() -> R) -> R {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    let used = PEAK.load(Relaxed) - before;
    assert!(used <= limit, "{used} bytes allocated, the limit is {limit}");
    result
}
