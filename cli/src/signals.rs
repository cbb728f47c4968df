//! Signals that end the process: it leaves no temporary files behind.

use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tpde::Temporaries;

/// Signals that are sent to end a process.
const ENDING: [i32; 8] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGALRM, SIGUSR1, SIGUSR2, SIGXCPU];

/// Set by the first signal, before anything is removed.
static RECEIVED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
/// The temporary folder of a verb.
static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Starts a thread that removes temporary files at the first signal, and then ends the process by that signal. A second signal
/// ends it at once. Signals that the parent process has set to be ignored, as `nohup` does, stay ignored.
pub fn catch() -> io::Result<()> {
    // With a handler, a write beyond the limit of file sizes is an error like any other.
    flag::register(SIGXFSZ, Arc::default())?;
    let ignored = ignored();
    let caught: Vec<_> = ENDING.into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect();
    let received = RECEIVED.get_or_init(Arc::default);
    for &signal in &caught {
        flag::register_conditional_default(signal, received.clone())?; // before the next line: not at the first signal
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

/// Does not return after a signal: the process then ends by it, and errors that the removal of files causes are not shown.
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

/// The temporary folder of a verb, of which there is one at a time. Removed on drop and at a signal.
pub struct TemporaryFolder(tempfile::TempDir);

impl TemporaryFolder {
    pub fn create(prefix: &str) -> io::Result<Self> {
        let mut folder = folder(); // a signal waits until the folder is known
        let created = tempfile::Builder::new().prefix(prefix).tempdir()?;
        *folder = Some(created.path().to_owned());
        Ok(Self(created))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Leaves the folder.
    pub fn keep(self) {
        *folder() = None;
        let _path = self.0.keep();
    }
}
