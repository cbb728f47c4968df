//! Signals and full disks.

use crate::scenario::*;
use crate::trace::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

#[test]
fn a_demo_that_is_ended_by_a_signal_leaves_no_folder() {
    if !can_trace() {
        return;
    }
    let run = |inject: &[String]| {
        let folder = tempfile::tempdir().unwrap(); // for the demo's temporary folder
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
    // The removal started by the first signal takes ten seconds. The commit must not overtake it.
    let inject = ["fsync:signal=TERM:when=1", "flock:delay_enter=10000000", "unlink:delay_enter=10000000"].map(str::to_owned);
    for inject in way.iter().chain(&inject) {
        command.args(["-e", &format!("inject={inject}")]);
    }
    command.args(["-e", "trace=open,openat,fsync,flock,unlink"]).arg(TPDE).args(ENCODE.command.split_whitespace());
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

#[test]
fn a_full_disk_leaves_what_was_there() {
    let checkpoints = checkpoints();
    // Runs in its own mount namespace, so that the small disk disappears with the process.
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
            // Fails before anything is written, not at the first write that does not fit.
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(stderr.contains("bytes are needed"), "{stderr}");
        }
        codes.extend(codes_here);
    }
    assert_eq!(codes.into_iter().collect::<Vec<_>>(), [0, SYSTEM], "the disk was to be too small for some and not for all");
}
