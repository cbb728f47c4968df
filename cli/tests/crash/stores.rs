//! Verbs of stores that are killed or receive a signal at each of their system calls: what stays is used by the same command or
//! removed by it.

use crate::common::*;
use crate::scenario::*;
use crate::trace::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A store `st` with two versions of a folder, and a third version in `v2`.
fn store() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    assert!(tpde(place, "store init st --grace 2").status.success());
    for which in 0..3 {
        let path = place.join(format!("v{which}"));
        fs::create_dir_all(path.join("extra")).unwrap();
        write_file(&path.join("model.safetensors"), &if which == 0 { base() } else { target(which) });
        fs::write(path.join("extra/merges.txt"), format!("merges {which}")).unwrap();
        if which < 2 {
            assert!(tpde(place, &format!("store put st v{which}")).status.success());
        }
    }
    folder
}

fn copied(store: &TempDir) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names(store.path()) {
        copy(&store.path().join(&name), &folder.path().join(&name));
    }
    std::thread::sleep(std::time::Duration::from_millis(30)); // as in `Scenario::place`
    folder
}

/// Files that writes to the store have left.
fn remains(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(remains(&path)),
            false if path.to_string_lossy().contains('#') => found.push(path),
            false => {}
        }
    }
    found
}

/// Ends a command at each system call. A signal leaves nothing but what the same command uses again, and after that command nothing is
/// left. A killed process may leave more, and the same command removes that too.
fn ends_everywhere(command: &str, signal: &str) {
    if !can_trace() {
        return;
    }
    let store = store();
    let clean = copied(&store);
    let (output, calls) = traced(clean.path(), command, &[]);
    assert!(output.status.success(), "{output:?}");
    let expected = names(clean.path());
    assert_eq!(hidden(clean.path()), [""; 0]);
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    calls.iter().for_each(|call| *counts.entry((&call.name, &call.thread)).or_default() += 1);
    let mut most: BTreeMap<&str, usize> = BTreeMap::new();
    for ((name, _), count) in counts {
        let entry = most.entry(name).or_default();
        *entry = count.max(*entry);
    }
    let mut ended = 0;
    for (name, count) in most {
        if !CHANGES.contains(&name) && !["fsync", "flock", "openat"].contains(&name) {
            continue;
        }
        for k in 1..=count {
            let folder = copied(&store);
            let place = folder.path();
            let (output, calls) = traced(place, command, &[format!("{name}:signal={signal}:when={k}")]);
            ended += usize::from(!output.status.success());
            let context = format!("{command}: {name} {k}: {output:?}");
            // strace counts per thread. A second signal ends the process at once.
            let mut of_threads: BTreeMap<&str, usize> = BTreeMap::new();
            calls.iter().filter(|call| call.name == name).for_each(|call| *of_threads.entry(&call.thread).or_default() += 1);
            let signals = of_threads.values().filter(|count| **count >= k).count();
            if signal != "KILL" && signals <= 1 {
                assert!(output.stderr.is_empty(), "{context}");
                assert!(hidden(place).iter().all(|name| name.starts_with(".tpde-get-")), "{context}: {:?}", hidden(place));
            }
            let again = tpde_in(place, command);
            // It may have been done before the end.
            let is_done = String::from_utf8_lossy(&again.stderr).contains("it exists");
            assert!(again.status.success() || is_done, "{context}: {again:?}");
            if is_done {
                continue;
            }
            assert_eq!(names(place), expected, "{context}");
            for left in remains(&place.join("st")) {
                let old = std::time::SystemTime::now() - std::time::Duration::from_secs(10);
                fs::File::options().write(true).open(left).unwrap().set_modified(old).unwrap();
            }
            assert!(tpde(place, "store gc st").status.success());
            assert!(remains(&place.join("st")).is_empty(), "{context}: {:?}", remains(&place.join("st")));
            assert!(tpde_in(place, "store verify st --rebuild").status.success(), "{context}");
        }
    }
    assert!(ended > 10, "{command} was ended {ended} times");
}

/// Runs a command whose temporary folders are in `place`.
fn tpde_in(place: &Path, line: &str) -> std::process::Output {
    let mut command = std::process::Command::new(TPDE);
    command.args(line.split_whitespace()).args(["-q", "-T", "1"]).env("TMPDIR", place).current_dir(place).output().unwrap()
}

#[test]
fn a_get_that_is_ended_anywhere_leaves_what_it_uses_again() {
    ends_everywhere("store get st main -o out", "TERM");
    ends_everywhere("store get st main -o out", "KILL");
}

#[test]
fn a_put_that_is_ended_anywhere_leaves_what_gc_removes() {
    ends_everywhere("store put st v2", "TERM");
    ends_everywhere("store put st v2", "KILL");
}

#[test]
fn a_verify_or_fold_that_is_ended_anywhere_leaves_nothing() {
    ends_everywhere("store verify st --rebuild", "INT");
    ends_everywhere("store verify st --rebuild", "KILL");
    ends_everywhere("store fold st main@0 main@1", "HUP");
}
