//! The order of syncs and renames.

use crate::scenario::*;
use crate::trace::*;
use tempfile::TempDir;

impl Scenario {
    /// The syncs and the renames, in order. Asserts that no file is written to after it was synced.
    fn order(&self, checkpoints: &TempDir, way: &[String]) -> Vec<String> {
        let (_, calls) = self.calls(checkpoints, way);
        // A file without a name is identified by its descriptor, any other by its path.
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
        // A file that was renamed from a temporary name is listed under its final name.
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

/// Data are on disk before names, names before the call returns, and the committing rename is last.
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
