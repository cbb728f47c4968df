//! Signals that end the process. Temporary files are removed first.

use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tpde::Temporaries;

/// Signals that end a process by default.
const ENDING: [i32; 8] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGALRM, SIGUSR1, SIGUSR2, SIGXCPU];

/// Set by the first signal, before any file is removed.
static RECEIVED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Starts a thread that removes temporary files at the first signal, and then ends the process by that signal. A second signal
/// ends it at once. Signals that the parent process has set to be ignored, as `nohup` does, stay ignored.
pub fn catch() -> io::Result<()> {
    // With a handler installed, a write beyond the file-size limit returns an error instead of ending the process.
    flag::register(SIGXFSZ, Arc::default())?;
    let ignored = ignored();
    let caught: Vec<_> = ENDING.into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect();
    // Before RECEIVED can be set: each signal that sets it must also reach the thread.
    let mut signals = Signals::new(&caught)?;
    let received = RECEIVED.get_or_init(Arc::default);
    for &signal in &caught {
        flag::register_conditional_default(signal, received.clone())?; // first, so that only a second signal ends the process
        flag::register(signal, received.clone())?;
    }
    let temporaries = Temporaries::track();
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            temporaries.remove_then(|| -> () {
                let _ = low_level::emulate_default_handler(signal); // does not return
                std::process::exit(128 + signal);
            });
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(())
}

/// Blocks forever after a signal, so that the process ends by that signal and prints no errors caused by the removal of files.
pub fn settle() {
    while RECEIVED.get().is_some_and(|received| received.load(Ordering::SeqCst)) {
        std::thread::park();
    }
}

/// Set of ignored signals, bit `n - 1` for signal `n`.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}
