//! Commands that are killed, fail, or receive a signal at each of their system calls.

use crate::scenario::*;
use crate::trace::*;
use std::collections::BTreeSet;

impl Scenario {
    /// Kills the command at each of its system calls.
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
                    continue; // strace can inject only one thing per call
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

                    // The remains of a crash do not hinder the next run.
                    let command = format!("{} -f", self.command.trim_end_matches(" -f"));
                    let again = tpde(place, &command);
                    assert!(again.status.success(), "{name} {k}: {}", String::from_utf8_lossy(&again.stderr));
                    assert_eq!((self.judge)(place), State::New);
                }
            }
            // The command was stopped at least once between any two changes.
            let changes = clean.iter().filter(|call| call.has_changed()).count();
            assert_eq!(done.into_iter().collect::<Vec<_>>(), (0..=changes).collect::<Vec<_>>());
            assert!(seen.contains(&State::Old) && seen.contains(&State::New));
        }
    }

    /// Makes each system call fail, if it can fail midway.
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
                    // Before the first file gets its name, the old state is intact; after the last, the new state is complete. In
                    // between, new files are removed again, and where files were replaced a reader refuses.
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
            // Free space on the disk is checked before anything is written.
            let looks = tried.iter().any(|(name, ..)| name == "statfs");
            assert_eq!(looks, self.command.starts_with("apply"));
        }
    }

    /// Sends a signal at each system call that changes something or waits for the disk.
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
fn stale_files_go_with_the_publication_and_never_before() {
    for scenario in [APPLY_SHARDS_OVER_FILE, APPLY_FILE_OVER_SHARDS] {
        scenario.kill_everywhere();
        scenario.fail_everywhere();
    }
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
