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
use tpde::{Apply, EncodeOptions, Error, Pair, SafetensorsCheckpoint, encode_files};

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
const OTHERS: [&str; 12] =
    ["open", "openat", "close", "lseek", "fsync", "fdatasync", "flock", "fstat", "stat", "lstat", "statx", "newfstatat"];

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
    judge: |place| judge_files(place, &[("out.safetensors", "old.safetensors", "new.safetensors")]),
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
        judge_files(place, &SHARDS)
    },
};

const APPLY_FOLDER: Scenario = Scenario {
    command: "apply base new-shards -o out -f",
    before: &[("old", "out")],
    old: &["out"],
    new: &["out"],
    judge: |place| judge_files(place, &SHARDS),
};

const SHARDS: [(&str, &str, &str); 3] = [
    ("out/model-00001-of-00002.safetensors", "old/model-00001-of-00002.safetensors", "new/model-00001-of-00002.safetensors"),
    ("out/model-00002-of-00002.safetensors", "old/model-00002-of-00002.safetensors", "new/model-00002-of-00002.safetensors"),
    ("out/model.safetensors.index.json", "old/model.safetensors.index.json", "new/model.safetensors.index.json"),
];

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

/// Each file is wholly the old one or wholly the new one.
fn judge_files(place: &Path, files: &[(&str, &str, &str)]) -> State {
    let read = |name: &str| fs::read(place.join(name)).unwrap();
    let states: BTreeSet<State> = files
        .iter()
        .filter(|(_, old, new)| read(old) != read(new))
        .map(|(file, old, new)| match read(file) {
            bytes if bytes == read(old) => State::Old,
            bytes if bytes == read(new) => State::New,
            _ => panic!("{file} is neither the old one nor the new one"),
        })
        .collect();
    if states.len() == 1 { *states.first().unwrap() } else { State::Refused }
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
    for (name, which) in [("old", 1), ("new", 2)] {
        let target = target(which);
        write_file(&place.join(format!("{name}.safetensors")), &target);
        write_folder(&place.join(name), &[&target[..which], &target[which..]]);
        for file in ["config.json", "tokenizer.json"] {
            fs::remove_file(place.join(name).join(file)).unwrap(); // no part of a pair
        }
        for (base, target, pair) in [("base.safetensors", format!("{name}.safetensors"), "pair"), ("base", name.into(), "shards")] {
            let output = tpde(place, &format!("encode {base} {target} -o {name}-{pair}"));
            assert!(output.status.success(), "{output:?}");
        }
    }
    folder
}

/// One system call of a traced run, with what follows its name.
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
        self.name == "write" && (self.rest.starts_with("1,") || self.rest.starts_with("2,"))
    }

    fn has_renamed(&self) -> bool {
        self.name.starts_with("rename") && self.has_worked()
    }
}

/// Runs a command under strace, with what it shall do to a call.
fn traced(place: &Path, line: &str, inject: Option<&str>) -> (Output, Vec<Call>) {
    let log = place.join("strace.log");
    let calls: Vec<_> = CHANGES.iter().chain(&OTHERS).map(|call| format!("?{call}")).collect(); // not every machine has all
    let mut command = Command::new("strace");
    // The loader's calls in cargo's library path would hide those of ours that strace counts alike.
    command.env_remove("LD_LIBRARY_PATH");
    command.args(["-f", "-qq", "-o"]).arg(&log).arg("-e").arg(format!("trace={}", calls.join(",")));
    if let Some(inject) = inject {
        command.arg("-e").arg(format!("inject={inject}"));
    }
    let output = command.arg(TPDE).args(line.split_whitespace()).args(["-q", "-T", "1"]).current_dir(place).output().unwrap();
    let text = fs::read_to_string(&log).unwrap();
    fs::remove_file(log).unwrap();
    let calls = text.lines().filter_map(|line| {
        let (thread, call) = line.split_once(' ')?;
        let (name, rest) = call.trim_start().split_once('(')?;
        Some(Call { thread: thread.into(), name: name.into(), rest: rest.into() })
    });
    (output, calls.collect())
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
        folder
    }

    /// How often each call is made, by the thread that makes it most: strace counts by threads.
    fn calls(&self, checkpoints: &TempDir) -> (BTreeMap<String, usize>, Vec<Call>) {
        let folder = self.place(checkpoints);
        let (output, calls) = traced(folder.path(), self.command, None);
        assert!(output.status.success(), "{output:?}");
        assert_eq!((self.judge)(folder.path()), State::New);
        let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        calls.iter().for_each(|call| *counts.entry((&call.name, &call.thread)).or_default() += 1);
        let mut most = BTreeMap::new();
        for ((name, _), count) in counts {
            let entry: &mut usize = most.entry(name.to_owned()).or_default();
            *entry = count.max(*entry);
        }
        (most, calls)
    }

    /// Kills the command at each of its calls.
    fn kill_everywhere(&self) {
        if !can_trace() {
            return;
        }
        let checkpoints = checkpoints();
        let (counts, clean) = self.calls(&checkpoints);
        let (mut seen, mut done) = (BTreeSet::new(), BTreeSet::new());
        for (name, count) in counts {
            for k in 1..=count {
                let folder = self.place(&checkpoints);
                let place = folder.path();
                let (output, calls) = traced(place, self.command, Some(&format!("{name}:signal=KILL:when={k}")));
                assert!(!output.status.success(), "{name} {k} was to be the last call");
                let state = (self.judge)(place);
                let renamed = calls.iter().any(Call::has_renamed);
                assert!(renamed || state == State::Old, "{name} {k}: {state:?} before anything was renamed");
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

    /// Makes each call that can fail in the middle fail.
    fn fail_everywhere(&self) {
        if !can_trace() {
            return;
        }
        let checkpoints = checkpoints();
        let (counts, clean) = self.calls(&checkpoints);
        let renames = clean.iter().filter(|call| call.has_renamed()).count();
        let mut tried = 0;
        for (name, count) in &counts {
            let errors: &[&str] = match name.as_str() {
                "write" | "pwrite64" => &["ENOSPC", "EDQUOT", "EFBIG", "EIO"],
                "ftruncate" => &["ENOSPC", "EFBIG", "EIO"],
                "mkdir" | "mkdirat" => &["ENOSPC", "EDQUOT"],
                "fsync" | "fdatasync" | "rename" | "renameat" | "renameat2" => &["EIO"],
                _ => continue,
            };
            for (error, k) in errors.iter().flat_map(|error| (1..=*count).map(move |k| (error, k))) {
                let folder = self.place(&checkpoints);
                let place = folder.path();
                let before = names(place);
                let (output, calls) = traced(place, self.command, Some(&format!("{name}:error={error}:when={k}")));
                let context = format!("{error} of {name} {k}: {}", String::from_utf8_lossy(&output.stderr));
                let failed = calls.iter().position(|call| call.rest.contains("(INJECTED)"));
                let failed = failed.unwrap_or_else(|| panic!("no call has failed, {context}"));
                assert_eq!(output.status.code(), Some(SYSTEM), "{context}");
                // Up to the first rename the old is intact, after the last the new is there; between, a reader refuses.
                let renamed = calls[..failed].iter().filter(|call| call.has_renamed()).count();
                let state = (self.judge)(place);
                match renamed {
                    0 => assert_eq!(state, State::Old, "{context}"),
                    n if n == renames => assert_eq!(state, State::New, "{context}"),
                    _ => {}
                }
                let mut expected: BTreeSet<_> = before.into_iter().collect();
                expected.extend(if renamed == renames { self.new } else { self.old }.iter().map(|name| name.to_string()));
                assert_eq!(names(place), expected.into_iter().collect::<Vec<_>>(), "{context}");
                let out = place.join("out");
                assert!(!out.is_dir() || names(&out).len() == 3, "{context}: {:?}", names(&out));
                tried += 1;
            }
        }
        assert!(tried >= 10);
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
fn files_of_a_folder_are_each_old_or_new() {
    APPLY_FOLDER.kill_everywhere();
    APPLY_FOLDER.fail_everywhere();
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
    assert!(names(place).iter().all(|name| !name.starts_with('.')));
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
            assert!(names(place).iter().all(|name| !name.starts_with('.')));
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
