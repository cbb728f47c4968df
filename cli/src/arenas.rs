//! How the allocator of the C library shares addresses among threads.

/// Lets all threads allocate from one arena if the addresses of this process are limited, as by `ulimit -v`. By default each thread
/// reserves 64 MiB of addresses. Under a limit a small allocation of another thread then fails, which ends the process. Call
/// it before any thread starts.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code)]
pub fn one_if_limited() {
    use rustix::process::{Resource, getrlimit};
    if getrlimit(Resource::As).current.is_some() {
        // SAFETY: mallopt takes two integers, and glibc locks its state. If it refuses, arenas stay as they are.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Other allocators reserve no addresses per thread.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn one_if_limited() {}
