//! Commands that publish files, and the states that a run may leave.

use crate::common::*;
use crate::trace::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;
use tpde::{Apply, Checkpoint, Error, Pair, SafetensorsCheckpoint};

/// Exit code for an error of the operating system.
pub const SYSTEM: i32 = 3;

/// State after a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Old,
    New,
    /// A mixture of old and new, which every reader refuses.
    Refused,
}

/// A command that publishes files.
pub struct Scenario {
    pub command: &'static str,
    /// Files that exist before the run, apart from the checkpoints.
    pub before: &'static [(&'static str, &'static str)],
    /// Files that must exist after the run, hidden files aside: `old` in the old state, `new` in the new state.
    pub old: &'static [&'static str],
    pub new: &'static [&'static str],
    pub judge: fn(&Path) -> State,
}

pub const ENCODE: Scenario = Scenario {
    command: "encode base.safetensors new.safetensors -o pair -f",
    before: &[("old-pair.tpde-index", "pair.tpde-index"), ("old-pair.tpde-blob", "pair.tpde-blob")],
    old: &["pair.tpde-blob", "pair.tpde-index"],
    new: &["pair.tpde-blob", "pair.tpde-index"],
    judge: judge_pair,
};

pub const APPLY_FILE: Scenario = Scenario {
    command: "apply base.safetensors new-pair -o out.safetensors -f",
    before: &[("old.safetensors", "out.safetensors")],
    old: &["out.safetensors"],
    new: &["out.safetensors"],
    judge: judge_file,
};

pub const APPLY_NEW_FOLDER: Scenario = Scenario {
    command: "apply base new-shards -o out",
    before: &[],
    old: &[],
    new: &["out"],
    judge: |place| {
        if !place.join("out").exists() {
            return State::Old;
        }
        // A folder appears with all its files at once.
        assert_eq!(names(&place.join("out")), names(&place.join("new")));
        judge_folder(place)
    },
};

pub const APPLY_FOLDER: Scenario = Scenario {
    command: "apply base new-shards -o out -f",
    before: &[("old", "out"), ("config.json", "out/config.json")],
    old: &["out"],
    new: &["out"],
    judge: judge_folder,
};

pub const APPLY_FOLDER_WITHOUT_INDEX: Scenario = Scenario {
    command: "apply base new-plain -o out -f",
    before: &[("old-plain-shards", "out"), ("config.json", "out/config.json")],
    old: &["out"],
    new: &["out"],
    judge: judge_folder,
};

pub const APPLY_INTO_FOLDER: Scenario = Scenario {
    command: "apply base new-shards -o out",
    before: &[("settings", "out")],
    old: &["out"],
    new: &["out"],
    judge: |place| {
        let found = names(&place.join("out")).into_iter().filter(|name| !name.starts_with('.'));
        if found.eq(["config.json"]) { State::Old } else { judge_folder(place) }
    },
};

/// A folder with an older checkpoint in one file, which some loaders prefer to shards.
pub const APPLY_SHARDS_OVER_FILE: Scenario = Scenario {
    command: "apply base new-shards -o out -f",
    before: &[("settings", "out"), ("old.safetensors", "out/model.safetensors")],
    old: &["out"],
    new: &["out"],
    judge: |place| {
        let state = judge_folder(place);
        if let Ok(whole) = fs::read(place.join("out/model.safetensors")) {
            assert!(whole == fs::read(place.join("old.safetensors")).unwrap() && state != State::New);
        }
        state
    },
};

/// A folder with older shards, which some loaders prefer to a file.
pub const APPLY_FILE_OVER_SHARDS: Scenario = Scenario {
    command: "apply base.safetensors new-pair -o out/model.safetensors -f",
    before: &[("old", "out"), ("config.json", "out/config.json")],
    old: &["out"],
    new: &["out"],
    judge: |place| {
        if let Ok(whole) = fs::read(place.join("out/model.safetensors")) {
            assert!(whole == fs::read(place.join("new.safetensors")).unwrap());
        }
        judge_folder(place)
    },
};

/// Reads the pair as a reader would. If it opens and decodes, it must give one of the two targets.
pub fn judge_pair(place: &Path) -> State {
    let base = SafetensorsCheckpoint::open(place.join("base.safetensors")).unwrap();
    let rebuilt = Pair::open(place.join("pair")).and_then(|pair| {
        let mut tensors: Vec<_> = pair.index().tensors().map(|tensor| vec![0; tensor.bytes() as usize]).collect();
        pair.verify()?;
        Apply::new(&pair).base(&base).to_buffers(&mut tensors.iter_mut().map(|tensor| &mut tensor[..]).collect::<Vec<_>>())?;
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

/// The file must be entirely the old one or entirely the new one.
pub fn judge_file(place: &Path) -> State {
    let read = |name: &str| fs::read(place.join(name)).unwrap();
    match read("out.safetensors") {
        bytes if bytes == read("old.safetensors") => State::Old,
        bytes if bytes == read("new.safetensors") => State::New,
        _ => panic!("neither the old file nor the new one"),
    }
}

/// A folder that opens as a checkpoint must be entirely the old one or entirely the new one. Files outside the pair are untouched.
pub fn judge_folder(place: &Path) -> State {
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

pub fn base() -> Vec<Tensor> {
    vec![tensor("a", "BF16", &[24, 8], 1), tensor("b", "F32", &[5], 2), tensor("c", "U8", &[], 3)]
}

/// Two targets whose payloads and headers differ in size, so that parts of their pairs never fit together.
pub fn target(which: usize) -> Vec<Tensor> {
    let mut target: Vec<_> = base().iter().map(|tensor| tuned(tensor, 3 * which)).collect();
    if which == 2 {
        target[1] = tensor("b", "F32", &[9], 7);
    }
    target
}

pub fn bytes_of(tensors: &[Tensor]) -> Vec<Vec<u8>> {
    tensors.iter().map(|tensor| tensor.bytes.clone()).collect()
}

pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub fn tpde(place: &Path, line: &str) -> Output {
    Command::new(TPDE).args(line.split_whitespace()).args(["-q", "-T", "1"]).current_dir(place).output().unwrap()
}

/// Hidden names, which none of our files has after a command has ended normally.
pub fn hidden(folder: &Path) -> Vec<String> {
    names(folder).into_iter().filter(|name| name.starts_with('.')).collect()
}

pub fn copy(from: &Path, to: &Path) {
    if !from.is_dir() {
        fs::copy(from, to).unwrap();
        return;
    }
    fs::create_dir(to).unwrap();
    for name in names(from) {
        copy(&from.join(&name), &to.join(&name));
    }
}

/// Makes checkpoints in files and in folders, and their pairs.
pub fn checkpoints() -> TempDir {
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
        // Both have the same shard boundaries, so that only correct publication keeps a mixture from opening.
        write_folder(&place.join(name), &[&target[..1], &target[1..]]);
        for file in ["config.json", "tokenizer.json"] {
            fs::remove_file(place.join(name).join(file)).unwrap(); // not part of a pair
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

impl Scenario {
    /// Makes the folder as it is before the command runs.
    pub fn place(&self, checkpoints: &TempDir) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names(checkpoints.path()) {
            copy(&checkpoints.path().join(&name), &folder.path().join(&name));
        }
        for (from, to) in self.before {
            copy(&checkpoints.path().join(from), &folder.path().join(to));
        }
        // The library waits for files that were written within the last 20 ms, and then queries their times again. The sleep
        // makes every run do the same calls.
        std::thread::sleep(std::time::Duration::from_millis(30));
        folder
    }

    /// Runs the command without faults. Returns the maximum number of calls per thread for each kind of call, because strace
    /// counts per thread, and the list of all calls.
    pub fn calls(&self, checkpoints: &TempDir, inject: &[String]) -> (BTreeMap<String, usize>, Vec<Call>) {
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

    /// The strace option that simulates a file system without unnamed files, derived from a run with unnamed files; `None` if that
    /// run used none.
    pub fn without_unnamed(&self, clean: &[Call]) -> Option<String> {
        let first = clean.iter().find(|call| call.opens_unnamed())?;
        let alike: Vec<_> = clean.iter().filter(|call| (&call.name, &call.thread) == (&first.name, &first.thread)).collect();
        let begin = alike.iter().position(|call| call.opens_unnamed())?;
        let count = alike[begin..].iter().take_while(|call| call.opens_unnamed()).count();
        // After each failed call, std opens a file with a name, by openat.
        let step = if first.name == "openat" { 2 } else { 1 };
        Some(format!("{}:error=EOPNOTSUPP:when={}..{}+{step}", first.name, begin + 1, begin + 1 + step * (count - 1)))
    }

    /// strace options for both ways to write a file before it gets its name: unnamed, and under a temporary name.
    pub fn ways(&self, checkpoints: &TempDir) -> Vec<Vec<String>> {
        let (_, clean) = self.calls(checkpoints, &[]);
        let named: Vec<_> = self.without_unnamed(&clean).into_iter().collect();
        let (_, calls) = self.calls(checkpoints, &named);
        let renamed = calls.iter().filter(|call| call.name.starts_with("rename") && is_temporary(call.paths()[0])).count();
        assert!(renamed >= 1, "nothing was written under a temporary name");
        if named.is_empty() { vec![named] } else { vec![Vec::new(), named] }
    }
}
