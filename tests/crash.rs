//! Publication under crashes and faults: whatever dies or fails, and wherever, what is left is the old, the new, or refused.
//!
//! `strace` stops the real command at each of its system calls on files, or makes the call fail.

#![cfg(feature = "cli")]

#[allow(dead_code, reason = "other tests use more of it")]
mod common;

use common::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;
use tpde::{Apply, Checkpoint, EncodeOptions, Error, Pair, SafetensorsCheckpoint, encode_files};

const TPDE: &str = env!("CARGO_BIN_EXE_tpde");
/// Exit code where the system refused.
const SYSTEM: i32 = 3;
/// Calls that change what lies on disk.
const CHANGES: [&str; 16] = [
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
/// Other calls on files, at which the command is stopped too.
const OTHERS: [&str; 14] = [
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

/// What is there after a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Old,
    New,
    /// Parts of both, which no reader takes for either.
    Refused,
}

/// A command that publishes something.
struct Scenario {
    command: &'static str,
    /// What is there before, apart from the checkpoints.
    before: &'static [(&'static str, &'static str)],
    /// What must be there afterwards but hidden files: where the old state is left, and where the new one is.
    old: &'static [&'static str],
    new: &'static [&'static str],
    judge: fn(&Path) -> State,
}

const ENCODE: Scenario = Scenario {
    command: "encode base.safetensors new.safetensors -o pair -f",
    before: &[("old-pair.tpde-index", "pair.tpde-index"), ("old-pair.tpde-blob", "pair.tpde-blob")],
    old: &["pair.tpde-blob", "pair.tpde-index"],
    new: &["pair.tpde-blob", "pair.tpde-index"],
    judge: judge_pair,
};

const APPLY_FILE: Scenario = Scenario {
    command: "apply base.safetensors new-pair -o out.safetensors -f",
    before: &[("old.safetensors", "out.safetensors")],
    old: &["out.safetensors"],
    new: &["out.safetensors"],
    judge: judge_file,
};

const APPLY_NEW_FOLDER: Scenario = Scenario {
    command: "apply base new-shards -o out",
    before: &[],
    old: &[],
    new: &["out"],
    judge: |place| {
        if !place.join("out").exists() {
            return State::Old;
        }
        // A folder appears whole.
        assert_eq!(names(&place.join("out")), names(&place.join("new")));
        judge_folder(place)
    },
};

const APPLY_FOLDER: Scenario = Scenario {
    command: "apply base new-shards -o out -f",
    before: &[("old", "out"), ("config.json", "out/config.json")],
    old: &["out"],
    new: &["out"],
    judge: judge_folder,
};

const APPLY_FOLDER_WITHOUT_INDEX: Scenario = Scenario {
    command: "apply base new-plain -o out -f",
    before: &[("old-plain-shards", "out"), ("config.json", "out/config.json")],
    old: &["out"],
    new: &["out"],
    judge: judge_folder,
};

const APPLY_INTO_FOLDER: Scenario = Scenario {
    command: "apply base new-shards -o out",
    before: &[("settings", "out")],
    old: &["out"],
    new: &["out"],
    judge: |place| {
        let found = names(&place.join("out")).into_iter().filter(|name| !name.starts_with('.'));
        if found.eq(["config.json"]) { State::Old } else { judge_folder(place) }
    },
};

/// The pair is looked at as a reader would; one that opens and decodes must give one of the two targets.
fn judge_pair(place: &Path) -> State {
    let base = SafetensorsCheckpoint::open(&place.join("base.safetensors")).unwrap();
    let rebuilt = Pair::open(&place.join("pair")).and_then(|pair| {
        let mut tensors: Vec<_> = pair.index().tensors().map(|tensor| vec![0; tensor.bytes() as usize]).collect();
        pair.verify()?;
        Apply::new(&pair, &base).to_buffers(&mut tensors.iter_mut().map(|tensor| &mut tensor[..]).collect::<Vec<_>>())?;
        Ok(tensors)
    });
    match rebuilt {
        Ok(tensors) if tensors == bytes_of(&target(1)) => State::Old,
        Ok(tensors) if tensors == bytes_of(&target(2)) => State::New,
        Ok(_) => panic!("a pair that gives neither target"),
        Err(Error::Invalid(_)) => State::Refused,
        Err(error) => panic!("no clean refusal: {error}"),
    }
}

/// The file is wholly the old one or wholly the new one.
fn judge_file(place: &Path) -> State {
    let read = |name: &str| fs::read(place.join(name)).unwrap();
    match read("out.safetensors") {
        bytes if bytes == read("old.safetensors") => State::Old,
        bytes if bytes == read("new.safetensors") => State::New,
        _ => panic!("neither the old file nor the new one"),
    }
}

/// A folder that opens as a checkpoint is wholly the old one or wholly the new one. What is not the pair's is left alone.
fn judge_folder(place: &Path) -> State {
    let out = place.join("out");
    let has_config = !place.join("out/config.json").exists() || fs::read(out.join("config.json")).unwrap() == b"{}";
    assert!(has_config, "config.json has changed");
    let Ok(checkpoint) = SafetensorsCheckpoint::open(&out) else { return State::Refused };
    let tensors: Vec<_> = checkpoint
        .tensors()
        .iter()
        .enumerate()
        .map(|(place, info)| {
            let mut bytes = vec![0; info.bytes() as usize];
            checkpoint.read(place, 0, &mut bytes).unwrap();
            bytes
        })
        .collect();
    match tensors {
        tensors if tensors == bytes_of(&target(1)) => State::Old,
        tensors if tensors == bytes_of(&target(2)) => State::New,
        _ => panic!("a mixture that opens: {:?}", names(&out)),
    }
}

fn base() -> Vec<Tensor> {
    vec![tensor("a", "BF16", &[24, 8], 1), tensor("b", "F32", &[5], 2), tensor("c", "U8", &[], 3)]
}

/// Two targets of other sizes of payloads and headers, so that no part of one pair fits to the other.
fn target(which: usize) -> Vec<Tensor> {
    let mut target: Vec<_> = base().iter().map(|tensor| tuned(tensor, 3 * which)).collect();
    if which == 2 {
        target[1] = tensor("b", "F32", &[9], 7);
    }
    target
}

fn bytes_of(tensors: &[Tensor]) -> Vec<Vec<u8>> {
    tensors.iter().map(|tensor| tensor.bytes.clone()).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn tpde(place: &Path, line: &str) -> Output {
    Command::new(TPDE).args(line.split_whitespace()).args(["-q", "-T", "1"]).current_dir(place).output().unwrap()
}

/// Names that none of our files has when a command has ended in order.
fn hidden(folder: &Path) -> Vec<String> {
    names(folder).into_iter().filter(|name| name.starts_with('.')).collect()
}

fn copy(from: &Path, to: &Path) {
    if !from.is_dir() {
        fs::copy(from, to).unwrap();
        return;
    }
    fs::create_dir(to).unwrap();
    for name in names(from) {
        copy(&from.join(&name), &to.join(&name));
    }
}

/// Checkpoints, in files and in folders, and pairs of them.
fn checkpoints() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    write_file(&place.join("base.safetensors"), &base());
    let base = base();
    write_folder(&place.join("base"), &[&base[..2], &base[2..]]);
    fs::write(place.join("config.json"), "{}").unwrap();
    fs::create_dir(place.join("settings")).unwrap();
    fs::write(place.join("settings/config.json"), "{}").unwrap();
    for (name, which) in [("old", 1), ("new", 2)] {
        let target = target(which);
        write_file(&place.join(format!("{name}.safetensors")), &target);
        // Cut alike, so that nothing but care keeps a mixture of the two from opening.
        write_folder(&place.join(name), &[&target[..1], &target[1..]]);
        for file in ["config.json", "tokenizer.json"] {
            fs::remove_file(place.join(name).join(file)).unwrap(); // no part of a pair
        }
        let plain = format!("{name}-plain-shards");
        copy(&place.join(name), &place.join(&plain));
        fs::remove_file(place.join(&plain).join("model.safetensors.index.json")).unwrap();
        let shards = [("base", name, "shards"), ("base", &plain, "plain")];
        for (base, target, pair) in [("base.safetensors", &format!("{name}.safetensors")[..], "pair")].into_iter().chain(shards) {
            let output = tpde(place, &format!("encode {base} {target} -o {name}-{pair}"));
            assert!(output.status.success(), "{output:?}");
        }
    }
    folder
}

/// One system call of a traced run, with what follows its name.
#[derive(Debug)]
struct Call {
    thread: String,
    name: String,
    rest: String,
}

impl Call {
    fn has_worked(&self) -> bool {
        self.rest.rsplit_once(" = ").is_some_and(|(_, result)| result.starts_with(|c: char| c.is_ascii_digit()))
    }

    /// Whether it has changed something on disk; what is written to the terminal does not count.
    fn has_changed(&self) -> bool {
        let creates = self.name.starts_with("open") && self.rest.contains("O_CREAT");
        let changes = CHANGES.contains(&self.name.as_str()) && !self.is_output();
        (creates || changes) && self.has_worked()
    }

    fn is_output(&self) -> bool {
        self.name == "write" && ["1<", "2<", "1,", "2,"].iter().any(|stream| self.rest.starts_with(stream))
    }

    /// Whether a file or folder has got or lost a name that is not temporary, by this call.
    fn has_named(&self) -> bool {
        ["rename", "link", "unlink"].iter().any(|names| self.name.starts_with(names))
            && self.has_worked()
            && self.paths().last().is_some_and(|to| !is_temporary(to))
    }

    /// The strings among its arguments.
    fn paths(&self) -> Vec<&str> {
        self.rest.split('"').skip(1).step_by(2).collect()
    }

    /// Whether it opens a file without a name.
    fn opens_unnamed(&self) -> bool {
        self.name.starts_with("open") && self.rest.contains("O_TMPFILE")
    }
}

fn is_temporary(path: &str) -> bool {
    path.contains(".tpde-") && path.contains(".tmp")
}

/// Runs a command under strace, with what it shall do to calls.
fn traced(place: &Path, line: &str, inject: &[String]) -> (Output, Vec<Call>) {
    let log = place.join("strace.log");
    let calls: Vec<_> = CHANGES.iter().chain(&OTHERS).map(|call| format!("?{call}")).collect(); // not every machine has all
    // Whoever runs the tests in the background may have set signals to be ignored.
    let mut command = Command::new("env");
    command.args(["--default-signal", "strace"]);
    // The loader's calls in cargo's library path would hide those of ours that strace counts alike.
    command.env_remove("LD_LIBRARY_PATH").env("TMPDIR", place);
    command.args(["-f", "-y", "-qq", "-o"]).arg(&log).arg("-e").arg(format!("trace={}", calls.join(",")));
    for inject in inject {
        command.arg("-e").arg(format!("inject={inject}"));
    }
    let output = command.arg(TPDE).args(line.split_whitespace()).args(["-q", "-T", "1"]).current_dir(place).output().unwrap();
    let text = fs::read_to_string(&log).unwrap();
    fs::remove_file(log).unwrap();
    (output, parse(&text))
}

/// The calls of a log of strace, in the order in which they began. A call that another thread's interrupts in the log is put
/// together again; lines that are no calls, such as `???(` of a killed thread, are left out.
fn parse(log: &str) -> Vec<Call> {
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

/// Says what cannot be tested on this machine; where everything was to be tested, that is a failure.
fn skip(why: &str) {
    eprintln!("skipped: {why}");
    assert_ne!(std::env::var("TPDE_NO_SKIP").as_deref(), Ok("1"), "{why}, and TPDE_NO_SKIP is set");
}

/// Whether strace is there and may trace.
fn can_trace() -> bool {
    let traces = Command::new("strace").args(["-f", "-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "true"]).status();
    let traces = traces.is_ok_and(|status| status.success());
    if !traces {
        skip("strace not available or not permitted");
    }
    traces
}

impl Scenario {
    /// A folder as it is before the command runs.
    fn place(&self, checkpoints: &TempDir) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names(checkpoints.path()) {
            copy(&checkpoints.path().join(&name), &folder.path().join(&name));
        }
        for (from, to) in self.before {
            copy(&checkpoints.path().join(from), &folder.path().join(to));
        }
        // A file that was written just before is looked at once more. Every run shall make the same calls.
        std::thread::sleep(std::time::Duration::from_millis(30));
        folder
    }

    /// A run in which nothing happens: how often each call is made, by the thread that makes it most, and all calls. strace
    /// counts by threads.
    fn calls(&self, checkpoints: &TempDir, inject: &[String]) -> (BTreeMap<String, usize>, Vec<Call>) {
        let folder = self.place(checkpoints);
        let (output, calls) = traced(folder.path(), self.command, inject);
        assert!(output.status.success(), "{output:?}");
        assert_eq!((self.judge)(folder.path()), State::New);
        assert_eq!(hidden(folder.path()), [""; 0]);
        let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        calls.iter().for_each(|call| *counts.entry((&call.name, &call.thread)).or_default() += 1);
        let mut most = BTreeMap::new();
        for ((name, _), count) in counts {
            let entry: &mut usize = most.entry(name.to_owned()).or_default();
            *entry = count.max(*entry);
        }
        (most, calls)
    }

    /// What makes the file system seem to lack files without names, from the run in which it has them; `None` if it lacks them.
    fn without_unnamed(&self, clean: &[Call]) -> Option<String> {
        let first = clean.iter().find(|call| call.opens_unnamed())?;
        let alike: Vec<_> = clean.iter().filter(|call| (&call.name, &call.thread) == (&first.name, &first.thread)).collect();
        let begin = alike.iter().position(|call| call.opens_unnamed())?;
        let count = alike[begin..].iter().take_while(|call| call.opens_unnamed()).count();
        // After each that fails, std opens a file with a name, by openat.
        let step = if first.name == "openat" { 2 } else { 1 };
        Some(format!("{}:error=EOPNOTSUPP:when={}..{}+{step}", first.name, begin + 1, begin + 1 + step * (count - 1)))
    }

    /// Both ways to write a file before it has its name, as strace is told: without any name, and under a temporary one.
    fn ways(&self, checkpoints: &TempDir) -> Vec<Vec<String>> {
        let (_, clean) = self.calls(checkpoints, &[]);
        let named: Vec<_> = self.without_unnamed(&clean).into_iter().collect();
        let (_, calls) = self.calls(checkpoints, &named);
        let renamed = calls.iter().filter(|call| call.name.starts_with("rename") && is_temporary(call.paths()[0])).count();
        assert!(renamed >= 1, "nothing was written under a temporary name");
        if named.is_empty() { vec![named] } else { vec![Vec::new(), named] }
    }

    /// Kills the command at each of its calls.
    fn kill_everywhere(&self) {
        if !can_trace() {
            return;
        }
        let checkpoints = checkpoints();
        for way in self.ways(&checkpoints) {
            let (counts, clean) = self.calls(&checkpoints, &way);
            let (mut seen, mut done) = (BTreeSet::new(), BTreeSet::new());
            for (name, count) in counts {
                if way.first().is_some_and(|way| way.starts_with(&format!("{name}:"))) {
                    continue; // strace does one thing to a call
                }
                for k in 1..=count {
                    let folder = self.place(&checkpoints);
                    let place = folder.path();
                    let inject = [&way[..], &[format!("{name}:signal=KILL:when={k}")]].concat();
                    let (output, calls) = traced(place, self.command, &inject);
                    assert!(!output.status.success(), "{name} {k} was to be the last call");
                    let state = (self.judge)(place);
                    let named = calls.iter().any(Call::has_named);
                    assert!(named || state == State::Old, "{name} {k}: {state:?} before anything had its name");
                    seen.insert(state);
                    done.insert(calls.iter().filter(|call| call.has_changed()).count());

                    // What a crash leaves is in nobody's way.
                    let command = format!("{} -f", self.command.trim_end_matches(" -f"));
                    let again = tpde(place, &command);
                    assert!(again.status.success(), "{name} {k}: {}", String::from_utf8_lossy(&again.stderr));
                    assert_eq!((self.judge)(place), State::New);
                }
            }
            // Between any two changes the command was stopped at least once.
            let changes = clean.iter().filter(|call| call.has_changed()).count();
            assert_eq!(done.into_iter().collect::<Vec<_>>(), (0..=changes).collect::<Vec<_>>());
            assert!(seen.contains(&State::Old) && seen.contains(&State::New));
        }
    }

    /// Makes each call that can fail in the middle fail.
    fn fail_everywhere(&self) {
        if !can_trace() {
            return;
        }
        let checkpoints = checkpoints();
        for way in self.ways(&checkpoints) {
            let (counts, clean) = self.calls(&checkpoints, &way);
            let all = clean.iter().filter(|call| call.has_named()).count();
            let mut tried = BTreeSet::new();
            for (name, count) in &counts {
                let errors: &[&str] = match name.as_str() {
                    "write" | "pwrite64" => &["ENOSPC", "EDQUOT", "EFBIG", "EIO"],
                    "ftruncate" => &["ENOSPC", "EFBIG", "EIO"],
                    "mkdir" | "mkdirat" => &["ENOSPC", "EDQUOT"],
                    "fsync" | "fdatasync" | "rename" | "renameat" | "renameat2" | "link" | "linkat" | "statfs" => &["EIO"],
                    _ => continue,
                };
                for (error, k) in errors.iter().flat_map(|error| (1..=*count).map(move |k| (error, k))) {
                    let folder = self.place(&checkpoints);
                    let place = folder.path();
                    let before = names(place);
                    let inject = [&way[..], &[format!("{name}:error={error}:when={k}")]].concat();
                    let (output, calls) = traced(place, self.command, &inject);
                    let context = format!("{error} of {name} {k}: {}", String::from_utf8_lossy(&output.stderr));
                    let failed = calls.iter().position(|call| call.name == *name && call.rest.contains("(INJECTED)"));
                    let failed = failed.unwrap_or_else(|| panic!("no call has failed, {context}"));
                    assert_eq!(output.status.code(), Some(SYSTEM), "{context}");
                    // Until the first file has its name the old is intact, after the last the new is there. Between, new files
                    // are removed again, and where files were replaced a reader refuses.
                    let named = calls[..failed].iter().filter(|call| call.has_named()).count();
                    let expected = match named {
                        0 => State::Old,
                        named if named == all => State::New,
                        _ if self.command.ends_with(" -f") => State::Refused,
                        _ => State::Old,
                    };
                    assert_eq!((self.judge)(place), expected, "{context}");
                    let mut expected: BTreeSet<_> = before.into_iter().collect();
                    expected.extend(if named == all { self.new } else { self.old }.iter().map(|name| name.to_string()));
                    assert_eq!(names(place), expected.into_iter().collect::<Vec<_>>(), "{context}");
                    if place.join("out").is_dir() {
                        assert_eq!(hidden(&place.join("out")), [""; 0], "{context}");
                    }
                    tried.insert((name.clone(), error, k));
                }
            }
            assert!(tried.len() >= 10);
            // The room on the disk is looked at before anything is written.
            let looks = tried.iter().any(|(name, ..)| name == "statfs");
            assert_eq!(looks, self.command.starts_with("apply"));
        }
    }

    /// Ends the command by a signal at each of its calls that change something or wait for the disk.
    fn signal_everywhere(&self, signal: &str) {
        if !can_trace() {
            return;
        }
        let checkpoints = checkpoints();
        for way in self.ways(&checkpoints) {
            let (counts, _) = self.calls(&checkpoints, &way);
            let mut seen = BTreeSet::new();
            for (name, count) in counts {
                let is_worth_it = CHANGES.contains(&name.as_str()) || ["openat", "fsync", "flock"].contains(&name.as_str());
                if !is_worth_it || way.first().is_some_and(|way| way.starts_with(&format!("{name}:"))) {
                    continue;
                }
                for k in 1..=count {
                    let folder = self.place(&checkpoints);
                    let place = folder.path();
                    let inject = [&way[..], &[format!("{name}:signal={signal}:when={k}")]].concat();
                    let (output, _) = traced(place, self.command, &inject);
                    assert!(!output.status.success(), "{name} {k}: {output:?}");
                    assert!(output.stderr.is_empty(), "{name} {k}: {output:?}");
                    let state = (self.judge)(place);
                    assert_ne!(state, State::Refused, "{name} {k}: a commit was interrupted");
                    seen.insert(state);
                    assert_eq!(hidden(place), [""; 0], "{name} {k}");
                    if place.join("out").is_dir() {
                        assert_eq!(hidden(&place.join("out")), [""; 0], "{name} {k}");
                    }
                }
            }
            assert!(seen.contains(&State::Old));
        }
    }

    /// What is synced and what gets its name, in order. Checks that nothing is written to a file after it was synced.
    fn order(&self, checkpoints: &TempDir, way: &[String]) -> Vec<String> {
        let (_, calls) = self.calls(checkpoints, way);
        // A file without a name is known by its descriptor, others by their path.
        let mut steps: Vec<(&str, String)> = Vec::new();
        let mut names: Vec<(String, String)> = Vec::new();
        for call in calls.iter().filter(|call| call.has_worked() && !call.is_output()) {
            let descriptor = call.rest.split(&[',', ')']).next().unwrap_or_default();
            let of = match descriptor.split_once('<') {
                Some((number, path)) if path.contains("#") => format!("/proc/self/fd/{number}"),
                Some((_, path)) => path.trim_end_matches('>').to_owned(),
                None => String::new(),
            };
            match call.name.as_str() {
                "write" | "pwrite64" | "ftruncate" => {
                    let synced = steps.iter().any(|(step, path)| *step == "sync" && *path == of);
                    assert!(!synced || !of.starts_with("/proc"), "written after it was synced: {call:?}");
                }
                "fsync" => steps.push(("sync", of)),
                name if name.starts_with("rename") || name.starts_with("link") => {
                    let [from, to] = call.paths()[..] else { panic!("{call:?}") };
                    names.push((from.to_owned(), to.to_owned()));
                    steps.push(("name", to.to_owned()));
                }
                _ => {}
            }
        }
        // What had a temporary name is called by its last one.
        let last = |path: &str| {
            let file_name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
            let mut path = path.to_owned();
            while let Some((_, to)) =
                names.iter().find(|(from, _)| *from == path || is_temporary(from) && file_name(from) == file_name(&path))
            {
                path = to.clone();
            }
            file_name(&path)
        };
        let steps = steps.iter().filter(|(step, path)| *step == "sync" || !is_temporary(&last(path)) && !path.ends_with(".tmp"));
        let shown = |path: &str| match last(path) {
            name if name.starts_with(".tmp") => ".".to_owned(), // the folder of the test
            name => name,
        };
        steps.map(|(step, path)| format!("{step} {}", shown(path))).collect()
    }
}

#[test]
fn an_encode_that_is_killed_leaves_the_old_pair_or_the_new_one_or_none() {
    ENCODE.kill_everywhere();
}

#[test]
fn an_encode_that_fails_leaves_the_old_pair() {
    ENCODE.fail_everywhere();
}

#[test]
fn an_apply_that_is_killed_leaves_the_old_file_or_the_new_one() {
    APPLY_FILE.kill_everywhere();
}

#[test]
fn an_apply_that_fails_leaves_the_old_file() {
    APPLY_FILE.fail_everywhere();
}

#[test]
fn a_new_folder_appears_whole_or_not_at_all() {
    APPLY_NEW_FOLDER.kill_everywhere();
    APPLY_NEW_FOLDER.fail_everywhere();
}

#[test]
fn a_folder_whose_files_are_replaced_never_opens_as_a_mixture() {
    APPLY_FOLDER.kill_everywhere();
    APPLY_FOLDER.fail_everywhere();
}

#[test]
fn files_that_are_added_to_a_folder_all_appear_or_none() {
    APPLY_INTO_FOLDER.kill_everywhere();
    APPLY_INTO_FOLDER.fail_everywhere();
}

#[test]
fn a_folder_without_a_shard_index_never_opens_as_a_mixture() {
    APPLY_FOLDER_WITHOUT_INDEX.kill_everywhere();
    APPLY_FOLDER_WITHOUT_INDEX.fail_everywhere();
}

#[test]
fn a_signal_leaves_no_temporary_files_of_encode() {
    ENCODE.signal_everywhere("TERM");
}

#[test]
fn a_signal_leaves_no_temporary_files_of_apply() {
    APPLY_FILE.signal_everywhere("INT");
    APPLY_NEW_FOLDER.signal_everywhere("HUP");
    APPLY_FOLDER_WITHOUT_INDEX.signal_everywhere("TERM");
}

#[test]
fn a_demo_that_is_ended_by_a_signal_leaves_no_folder() {
    if !can_trace() {
        return;
    }
    let run = |inject: &[String]| {
        let folder = tempfile::tempdir().unwrap(); // the demo's temporary folder is made here
        let (output, calls) = traced(folder.path(), "demo", inject);
        assert_eq!(names(folder.path()), [""; 0], "{inject:?}");
        (output, calls)
    };
    let (_, clean) = run(&[]);
    for (signal, name) in [("INT", "fsync"), ("TERM", "linkat"), ("HUP", "mkdir"), ("INT", "statfs"), ("TERM", "flock")] {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        clean.iter().filter(|call| call.name == name).for_each(|call| *counts.entry(&call.thread).or_default() += 1);
        let most = counts.into_values().max().unwrap_or_else(|| panic!("no {name}"));
        for k in 1..=most {
            let (output, _) = run(&[format!("{name}:signal={signal}:when={k}")]);
            assert!(!output.status.success(), "{name} {k}");
        }
    }
}

#[test]
fn a_second_signal_ends_the_process_at_once() {
    if !can_trace() {
        return;
    }
    let checkpoints = checkpoints();
    let way = ENCODE.ways(&checkpoints).pop().unwrap();
    let folder = ENCODE.place(&checkpoints);
    let place = folder.path();
    let log = place.join("strace.log");
    let mut command = Command::new("env");
    command.args(["--default-signal", "strace", "-f", "-qq", "-o"]).arg(&log);
    // The removal that the first signal begins takes ten seconds.
    let inject = ["fsync:signal=TERM:when=1", "unlink:delay_enter=10000000"].map(str::to_owned);
    for inject in way.iter().chain(&inject) {
        command.args(["-e", &format!("inject={inject}")]);
    }
    command.args(["-e", "trace=open,openat,fsync,unlink"]).arg(TPDE).args(ENCODE.command.split_whitespace());
    let mut child = command.args(["-q", "-T", "1"]).current_dir(place).spawn().unwrap();
    let process = loop {
        let log = fs::read_to_string(&log).unwrap_or_default();
        match log.split_once(' ') {
            Some((process, calls)) if calls.contains(" unlink(") => break process.to_owned(),
            _ => assert!(child.try_wait().unwrap().is_none(), "{log}"),
        }
        std::thread::yield_now();
    };
    assert!(Command::new("kill").args(["-TERM", &process]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), None);
    assert_ne!(hidden(place), [""; 0], "the removal has ended");
}

/// Data reach the disk before names, names before the call returns, and what commits comes last.
#[test]
fn files_are_synced_before_they_get_their_names_and_folders_after() {
    if !can_trace() {
        return;
    }
    let checkpoints = checkpoints();
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let index = "model.safetensors.index.json";
    let expected: [(&Scenario, &[(&str, &str)]); 5] = [
        (
            &ENCODE,
            &[
                ("sync", "pair.tpde-blob"),
                ("sync", "pair.tpde-index"),
                ("name", "pair.tpde-blob"),
                ("name", "pair.tpde-index"),
                ("sync", "."),
            ],
        ),
        (&APPLY_FILE, &[("sync", "out.safetensors"), ("name", "out.safetensors"), ("sync", ".")]),
        (
            &APPLY_NEW_FOLDER,
            &[
                ("sync", first),
                ("sync", second),
                ("sync", index),
                ("name", first),
                ("name", second),
                ("name", index),
                ("sync", "out"),
                ("name", "out"),
                ("sync", "."),
            ],
        ),
        (
            &APPLY_FOLDER,
            &[
                ("sync", first),
                ("sync", second),
                ("sync", index),
                ("sync", index), // the barrier
                ("name", index),
                ("sync", "out"),
                ("name", first),
                ("name", second),
                ("sync", "out"),
                ("name", index),
                ("sync", "out"),
            ],
        ),
        (
            &APPLY_FOLDER_WITHOUT_INDEX,
            &[
                ("sync", first),
                ("sync", second),
                ("sync", index), // the barrier
                ("name", index),
                ("sync", "out"),
                ("name", first),
                ("name", second),
                ("sync", "out"),
                ("sync", "out"), // the barrier is removed
            ],
        ),
    ];
    for (scenario, expected) in expected {
        for way in scenario.ways(&checkpoints) {
            let steps = scenario.order(&checkpoints, &way);
            let expected: Vec<_> = expected.iter().map(|(step, name)| format!("{step} {name}")).collect();
            assert_eq!(steps, expected, "{}, {way:?}", scenario.command);
        }
    }
}

#[test]
fn a_full_disk_leaves_what_was_there() {
    let checkpoints = checkpoints();
    // In a mount namespace of its own, so that the small disk goes with the process.
    let script = r#"
        mkdir disk out || exit 77
        mount -t tmpfs -o size=40k tpde disk || exit 77
        cp old-pair.tpde-index disk/pair.tpde-index && cp old-pair.tpde-blob disk/pair.tpde-blob || exit 77
        cp old.safetensors disk/out.safetensors || exit 77
        head -c "$2" /dev/zero > disk/filler || exit 77
        "$1" -q -T 1 encode base.safetensors new.safetensors -o disk/pair -f
        echo "$?" > out/codes
        "$1" -q -T 1 apply base.safetensors new-pair -o disk/out.safetensors -f
        echo "$?" >> out/codes
        cp -a disk/. out/
    "#;
    let mut codes = BTreeSet::new();
    for pages in 0..=7 {
        let folder = ENCODE.place(&checkpoints);
        let place = folder.path();
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh", TPDE, &(4096 * pages).to_string()]);
        let output = match command.current_dir(place).output() {
            Ok(output) if output.status.code() == Some(0) => output,
            Ok(output) if output.status.code() != Some(77) && !String::from_utf8_lossy(&output.stderr).contains("unshare") => {
                panic!("{output:?}")
            }
            _ => return skip("no disk may be mounted here"),
        };
        let out = place.join("out");
        let codes_here: Vec<i32> =
            fs::read_to_string(out.join("codes")).unwrap().lines().map(|code| code.parse().unwrap()).collect();
        assert_eq!(names(&out), ["codes", "filler", "out.safetensors", "pair.tpde-blob", "pair.tpde-index"], "{output:?}");
        for name in ["pair.tpde-index", "pair.tpde-blob", "out.safetensors"] {
            fs::copy(out.join(name), place.join(name)).unwrap();
        }
        let states = [judge_pair(place), (APPLY_FILE.judge)(place)];
        for (code, state) in codes_here.iter().zip(states) {
            let expected = match *code {
                0 => State::New,
                SYSTEM => State::Old,
                code => panic!("exit code {code}: {output:?}"),
            };
            assert_eq!(state, expected, "{output:?}");
        }
        if codes_here[1] == SYSTEM {
            // Before anything is written, not at the first write that fails.
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(stderr.contains("bytes are needed"), "{stderr}");
        }
        codes.extend(codes_here);
    }
    assert_eq!(codes.into_iter().collect::<Vec<_>>(), [0, SYSTEM], "the disk was to be too small for some and not for all");
}

/// Checkpoints in files, for the library.
fn open_all(place: &Path) -> [SafetensorsCheckpoint; 3] {
    ["base.safetensors", "old.safetensors", "new.safetensors"].map(|name| SafetensorsCheckpoint::open(&place.join(name)).unwrap())
}

fn publish(base: &SafetensorsCheckpoint, target: &SafetensorsCheckpoint, pair: &Path, replace: bool) -> tpde::Result<()> {
    encode_files(Some(base), target, &EncodeOptions::default(), pair, replace, &|_| {}).map(|_| ())
}

#[test]
fn a_reader_sees_one_pair_or_the_other_while_they_are_replaced() {
    let checkpoints = checkpoints();
    let place = checkpoints.path();
    let [base, old, new] = open_all(place);
    let pair = place.join("pair");
    publish(&base, &old, &pair, false).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = BTreeMap::new();
            while !stop.load(Ordering::Relaxed) {
                *seen.entry(judge_pair(place)).or_insert(0) += 1;
            }
            seen
        });
        for round in 0..100 {
            publish(&base, if round % 2 == 0 { &new } else { &old }, &pair, true).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        let seen = reader.join().unwrap();
        assert!(seen.keys().eq(&[State::Old, State::New]), "{seen:?}");
    });
    assert_eq!(hidden(place), [""; 0]);
}

#[test]
fn of_two_writers_at_once_one_wins() {
    let checkpoints = checkpoints();
    let place = checkpoints.path();
    let [base, old, new] = open_all(place);
    let files = ["pair.tpde-index", "pair.tpde-blob"].map(|name| place.join(name));
    for replace in [true, false] {
        for _ in 0..30 {
            let start = Barrier::new(2);
            let write = |target| {
                start.wait();
                publish(&base, target, &place.join("pair"), replace)
            };
            let [first, second] = std::thread::scope(|scope| {
                [&old, &new].map(|target| scope.spawn(move || write(target))).map(|writer| writer.join().unwrap())
            });
            let state = judge_pair(place);
            match (&first, &second) {
                (Ok(()), Ok(())) => assert!(replace && state != State::Refused),
                (Ok(()), Err(Error::Io { source, .. })) | (Err(Error::Io { source, .. }), Ok(())) => {
                    assert!(!replace && source.kind() == std::io::ErrorKind::AlreadyExists, "{source}");
                    assert_eq!(state, if first.is_ok() { State::Old } else { State::New });
                }
                outcome => panic!("{outcome:?}"),
            }
            files.iter().for_each(|file| fs::remove_file(file).unwrap());
            assert_eq!(hidden(place), [""; 0]);
        }
    }
}

/// A pair that is half copied is not taken for a pair.
#[test]
fn half_of_a_pair_is_refused() {
    let checkpoints = checkpoints();
    let place = checkpoints.path();
    let file = |name: &str| -> PathBuf { place.join(name) };
    fs::copy(file("old-pair.tpde-index"), file("pair.tpde-index")).unwrap();
    assert!(matches!(Pair::open(&file("pair")), Err(Error::Io { .. })));
    fs::copy(file("new-pair.tpde-blob"), file("pair.tpde-blob")).unwrap();
    assert_eq!(judge_pair(place), State::Refused);
    fs::copy(file("new-pair.tpde-index"), file("pair.tpde-index")).unwrap();
    assert_eq!(judge_pair(place), State::New);
}
