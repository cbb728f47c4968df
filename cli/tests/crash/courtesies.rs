//! Calls that a file system refuses, and without which files are complete.

use crate::scenario::*;
use crate::trace::*;

/// Calls that are refused together, and how.
const REFUSED: [(&str, &[&str]); 8] = [
    ("fsync", &["EINVAL", "EOPNOTSUPP", "ENOSYS", "EPERM"]),
    ("fchmod", &["EPERM", "EOPNOTSUPP", "ENOSYS"]),
    ("statfs", &["ENOSYS", "EOPNOTSUPP", "EPERM"]),
    ("flock", &["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EINVAL"]),
    ("ftruncate", &["EPERM", "EOPNOTSUPP", "EINVAL"]),
    ("renameat2", &["EINVAL", "EOPNOTSUPP", "EPERM", "ENOSYS"]),
    ("linkat", &["EPERM", "EOPNOTSUPP", "ENOSYS"]),
    ("renameat2,linkat", &["EOPNOTSUPP", "EPERM"]),
];

impl Scenario {
    fn refuse_everywhere(&self) {
        if !can_trace() {
            return;
        }
        let checkpoints = checkpoints();
        let refused = REFUSED.iter().flat_map(|(calls, errors)| errors.iter().map(move |error| format!("{calls}:error={error}")));
        // Some file systems state that they have no blocks at all.
        let zeros = format!("statfs:poke_exit=@arg2={}", "00".repeat(120));
        let tmpfile = self.ways(&checkpoints).pop().unwrap();
        for inject in refused.chain([zeros]).map(|inject| vec![inject]).chain([tmpfile]) {
            let folder = self.place(&checkpoints);
            let place = folder.path();
            let (output, _) = traced(place, self.command, &inject);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{inject:?}: {stderr}");
            assert_eq!((self.judge)(place), State::New, "{inject:?}: {stderr}");
            assert_eq!(hidden(place), [""; 0], "{inject:?}: {stderr}");
            if place.join("out").is_dir() {
                assert_eq!(hidden(&place.join("out")), [""; 0], "{inject:?}: {stderr}");
            }
        }
    }
}

#[test]
fn an_encode_needs_no_courtesy() {
    ENCODE.refuse_everywhere();
}

#[test]
fn an_apply_needs_no_courtesy() {
    for scenario in [APPLY_FILE, APPLY_NEW_FOLDER, APPLY_FOLDER, APPLY_INTO_FOLDER, APPLY_FILE_OVER_SHARDS] {
        scenario.refuse_everywhere();
    }
}

/// A page is an output like others.
#[test]
fn a_page_needs_no_courtesy() {
    let page = Scenario {
        command: "inspect new-pair --html page.html",
        before: &[],
        old: &[],
        new: &["page.html"],
        judge: |place| if place.join("page.html").exists() { State::New } else { State::Old },
    };
    if can_trace() {
        for inject in ["fsync:error=EINVAL", "renameat2,linkat:error=EPERM", "flock:error=ENOLCK"] {
            let folder = page.place(&checkpoints());
            let (output, _) = traced(folder.path(), page.command, &[inject.to_owned()]);
            assert!(output.status.success(), "{inject}: {output:?}");
            assert_eq!((page.judge)(folder.path()), State::New);
        }
    }
}

/// What is refused is logged once, not at each call.
#[test]
fn a_refused_sync_is_logged_once_per_file() {
    if !can_trace() {
        return;
    }
    let folder = APPLY_FOLDER.place(&checkpoints());
    let trace = ["-f", "-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EINVAL", TPDE];
    let command =
        std::process::Command::new("strace").args(trace).args(APPLY_FOLDER.command.split(' ')).current_dir(folder.path()).output();
    let stderr = String::from_utf8(command.unwrap().stderr).unwrap();
    let lines: Vec<_> = stderr.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(lines.iter().filter(|line| line.contains("names in this folder")).count(), 1, "{stderr}");
}

/// Hard links are no courtesy to a store, which says so.
#[test]
fn a_store_names_the_hard_links_that_it_lacks() {
    if !can_trace() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (output, _) = traced(folder.path(), "store init st", &["link,linkat:error=EPERM".into()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(3) && stderr.contains("its file system has no hard links"), "{stderr}");
    assert!(!folder.path().join("st/store.json").exists());
}
