//! System calls of a run, as logged by strace.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

pub const TPDE: &str = env!("CARGO_BIN_EXE_tpde");

/// Calls that change data on disk.
pub const CHANGES: [&str; 16] = [
    "write",
    "pwrite64",
    "ftruncate",
    "fallocate",
    "copy_file_range",
    "fchmod",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "unlink",
    "unlinkat",
    "mkdir",
    "mkdirat",
    "rmdir",
];

/// Other calls on files. The command is stopped at them too.
pub const OTHERS: [&str; 14] = [
    "open",
    "openat",
    "close",
    "lseek",
    "fsync",
    "fdatasync",
    "flock",
    "fstat",
    "stat",
    "lstat",
    "statx",
    "newfstatat",
    "statfs",
    "fstatfs",
];

/// One system call of a traced run: its name, and the text after the name.
#[derive(Debug)]
pub struct Call {
    pub thread: String,
    pub name: String,
    pub rest: String,
}

impl Call {
    pub fn has_worked(&self) -> bool {
        self.rest.rsplit_once(" = ").is_some_and(|(_, result)| result.starts_with(|c: char| c.is_ascii_digit()))
    }

    /// Whether the call changed anything on disk. Output to the terminal does not count.
    pub fn has_changed(&self) -> bool {
        let creates = self.name.starts_with("open") && self.rest.contains("O_CREAT");
        let changes = CHANGES.contains(&self.name.as_str()) && !self.is_output();
        (creates || changes) && self.has_worked()
    }

    pub fn is_output(&self) -> bool {
        self.name == "write" && ["1<", "2<", "1,", "2,"].iter().any(|stream| self.rest.starts_with(stream))
    }

    /// Whether a file or folder got or lost a name other than a temporary one.
    pub fn has_named(&self) -> bool {
        ["rename", "link", "unlink"].iter().any(|names| self.name.starts_with(names))
            && self.has_worked()
            && self.paths().last().is_some_and(|to| !is_temporary(to))
    }

    /// The string arguments.
    pub fn paths(&self) -> Vec<&str> {
        self.rest.split('"').skip(1).step_by(2).collect()
    }

    /// Whether the call opens a file without a name.
    pub fn opens_unnamed(&self) -> bool {
        self.name.starts_with("open") && self.rest.contains("O_TMPFILE")
    }
}

pub fn is_temporary(path: &str) -> bool {
    path.contains(".tpde-") && (path.contains(".tmp") || path.contains(".dir"))
}

/// Runs a command under strace, with these injections.
pub fn traced(place: &Path, line: &str, inject: &[String]) -> (Output, Vec<Call>) {
    let log = place.join("strace.log");
    let calls: Vec<_> = CHANGES.iter().chain(&OTHERS).map(|call| format!("?{call}")).collect(); // "?": if the machine has it
    // A shell that runs the tests in the background may have set signals to be ignored.
    let mut command = Command::new("env");
    command.args(["--default-signal", "strace"]);
    // With cargo's library path, the loader makes more calls of the same kinds, which strace would count together with ours.
    command.env_remove("LD_LIBRARY_PATH").env("TMPDIR", place);
    // With one heap for all threads, glibc does not read /proc when it frees memory, which depends on where the heap is.
    command.env("GLIBC_TUNABLES", "glibc.malloc.arena_max=1");
    command.args(["-f", "-y", "-qq", "-o"]).arg(&log).arg("-e").arg(format!("trace={}", calls.join(",")));
    for inject in inject {
        command.arg("-e").arg(format!("inject={inject}"));
    }
    let output = command.arg(TPDE).args(line.split_whitespace()).args(["-q", "-T", "1"]).current_dir(place).output().unwrap();
    let text = fs::read_to_string(&log).unwrap();
    fs::remove_file(log).unwrap();
    (output, parse(&text))
}

/// Parses a strace log into calls, in the order in which they began. A call that the log interrupts with another thread's call is
/// joined again. Other lines, such as `???(` of a killed thread, are ignored.
pub fn parse(log: &str) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    for line in log.lines() {
        let Some((thread, text)) = line.split_once(' ') else { continue };
        let text = text.trim_start();
        if let Some(resumed) = text.strip_prefix("<... ") {
            let rest = resumed.split_once("resumed>").map_or("", |(_, rest)| rest);
            if let Some(call) = calls.iter_mut().rev().find(|call| call.thread == thread) {
                call.rest.push_str(rest);
            }
        } else if let Some((name, rest)) = text.split_once('(')
            && CHANGES.iter().chain(&OTHERS).any(|known| *known == name)
        {
            let rest = rest.trim_end_matches(" <unfinished ...>");
            calls.push(Call { thread: thread.into(), name: name.into(), rest: rest.into() });
        }
    }
    calls
}

#[test]
fn logs_of_several_threads_are_put_together() {
    let log = "7 write(3</a>, \"x(y\", 3 <unfinished ...>\n8 ???( <unfinished ...>\n8 openat(AT_FDCWD, \"b\", O_RDONLY) = 4\n\
               7 <... write resumed>) = 3\n8 +++ killed by SIGKILL +++\n9 ???() = ?\n";
    let calls: Vec<_> = parse(log).into_iter().map(|call| (call.thread, call.name, call.rest)).collect();
    let call = |thread: &str, name: &str, rest: &str| (thread.to_owned(), name.to_owned(), rest.to_owned());
    assert_eq!(calls, [call("7", "write", "3</a>, \"x(y\", 3) = 3"), call("8", "openat", "AT_FDCWD, \"b\", O_RDONLY) = 4")]);
}

/// Reports that a test cannot run on this machine. Fails if all tests were required to run.
pub fn skip(why: &str) {
    eprintln!("skipped: {why}");
    assert_ne!(std::env::var("TPDE_NO_SKIP").as_deref(), Ok("1"), "{why}, and TPDE_NO_SKIP is set");
}

/// Whether strace is installed and allowed to trace.
pub fn can_trace() -> bool {
    let traces = Command::new("strace").args(["-f", "-qq", "-e", "inject=fsync:error=EIO", "true"]).output();
    let traces = traces.is_ok_and(|output| output.status.success());
    if !traces {
        skip("strace not available or not permitted");
    }
    traces
}
