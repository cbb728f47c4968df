//! Refuses benchmarks that need more memory than is available, before any data is read. A system that overcommits would otherwise
//! kill the process later.

use crate::text;
use std::fs::read_to_string;
use std::io;

/// Refuses work that needs more memory than the machine, the container or the limits of the process allow.
///
/// # Errors
/// [`io::ErrorKind::OutOfMemory`], with the bytes needed and the bytes available.
pub fn check(needed: u64) -> io::Result<()> {
    let available = available();
    // An allocation attempt shows the limits of the process. The memory is freed without being touched.
    let is_granted = || usize::try_from(needed).is_ok_and(|needed| Vec::<u8>::new().try_reserve_exact(needed).is_ok());
    if available.is_none_or(|available| needed <= available) && is_granted() {
        return Ok(());
    }
    let available = available.map_or(String::new(), |available| format!(", {} are available", text::bytes(available)));
    let message = format!("this takes {} of memory{available}", text::bytes(needed));
    Err(io::Error::new(io::ErrorKind::OutOfMemory, message))
}

/// Bytes available without swapping; `None` if the system does not report them.
fn available() -> Option<u64> {
    let system = read_to_string("/proc/meminfo").ok().and_then(|info| parse_meminfo(&info));
    let number = |name: &str| read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    let container = number("memory.max").map(|max| max.saturating_sub(number("memory.current").unwrap_or(0)));
    [system, container].into_iter().flatten().min()
}

/// Parses `MemAvailable`, which is in KiB, and returns bytes.
fn parse_meminfo(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_nobody_has_is_refused() {
        assert!(check(1 << 20).is_ok());
        for needed in [1 << 60, u64::MAX] {
            assert_eq!(check(needed).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        }
    }

    #[test]
    fn meminfo_is_read() {
        let info = "MemTotal:       24683624 kB\nMemFree:         1 kB\nMemAvailable:   22731556 kB\n";
        assert_eq!(parse_meminfo(info), Some(22_731_556 << 10));
        assert_eq!(parse_meminfo("MemTotal: 1 kB"), None);
    }
}
