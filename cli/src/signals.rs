//! Signals that end the process. Temporary files are removed first.

use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tpde::Temporaries;

/// Signals that end a process by default.
const ENDING: [i32; 8] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGALRM, SIGUSR1, SIGUSR2, SIGXCPU];

/// Set by the first signal, before any file is removed.
static RECEIVED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
/// The temporary folder of the running verb, if any.
static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Starts a thread that removes temporary files at the first signal, and then ends the process by that signal. A second signal
/// ends it at once. Signals that the parent process has set to be ignored, as `nohup` does, stay ignored.
pub fn catch() -> io::Result<()> {
    // With a handler installed, a write beyond the file-size limit returns an error instead of ending the process.
    flag::register(SIGXFSZ, Arc::default())?;
    let ignored = ignored();
    let caught: Vec<_> = ENDING.into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect();
    let received = RECEIVED.get_or_init(Arc::default);
    for &signal in &caught {
        flag::register_conditional_default(signal, received.clone())?; // first, so that only a second signal ends the process
        flag::register(signal, received.clone())?;
    }
    let mut signals = Signals::new(&caught)?;
    let temporaries = Temporaries::track();
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            temporaries.remove_then(|| -> () {
                if let Some(folder) = folder().as_deref() {
                    let _ = std::fs::remove_dir_all(folder);
                }
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

fn folder() -> std::sync::MutexGuard<'static, Option<PathBuf>> {
    FOLDER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The temporary folder of a verb. At most one exists at a time. Removed on drop and at a signal.
pub struct TemporaryFolder(tempfile::TempDir);

impl TemporaryFolder {
    pub fn create(prefix: &str) -> io::Result<Self> {
        let mut folder = folder(); // locked: a signal waits until the folder is recorded
        let created = tempfile::Builder::new().prefix(prefix).tempdir()?;
        *folder = Some(created.path().to_owned());
        Ok(Self(created))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Keeps the folder on disk.
    pub fn keep(self) {
        *folder() = None;
        let _path = self.0.keep();
    }
}
