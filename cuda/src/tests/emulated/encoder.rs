//! The kernels of the encoder, in a process whose stand-in for the driver is compiled with sanitizers.

use super::emulator;
use std::path::Path;
use std::process::{Command, Output};

/// Tests that encode small checkpoints, without and with derived bases.
const PLAIN: &str = "tests::encode::small_pairs_of_all_widths";
const DERIVED: &str = "tests::encode_derived::small_pairs_with_derived_bases";

/// Runs tests with a stand-in. `unordered` is a barrier that does not order memory, see `block.cpp`.
fn encode(program: &str, library: &str, tests: &[&str], unordered: Option<&str>) -> Output {
    emulator::build(program);
    let folder = emulator::folder().join(program);
    // The thread sanitizer does not support address space layout with much randomisation.
    let mut command = Command::new("setarch");
    command.arg("-R").arg(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--test-threads", "1"]).args(tests);
    command.env("LD_PRELOAD", folder.join(library)).env("LD_LIBRARY_PATH", folder).env("TPDE_STAND_IN", "late");
    // The rest of the process has no sanitizers: only the kernels and the stand-in are checked.
    command.env("TSAN_OPTIONS", "halt_on_error=1:ignore_noninstrumented_modules=1").env("ASAN_OPTIONS", "detect_leaks=0");
    command.envs(unordered.map(|place| ("TPDE_UNORDERED", place))).output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn no_invalid_accesses() {
    let output = encode("driver-memory", "libasan.so", &[PLAIN, DERIVED], None);
    assert!(output.status.success() && text(&output).contains("2 passed"), "{}", text(&output));
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn no_races() {
    let output = encode("driver-races", "libtsan.so", &[PLAIN, DERIVED], None);
    assert!(output.status.success() && text(&output).contains("2 passed"), "{}", text(&output));
}

/// Without the memory order of one barrier, a race is found at the memory that it protects.
#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn planted_races_are_found() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/encode");
    for (file, barrier, found_in, test) in [
        ("streams.cuh", "__syncwarp(); // all threads have read the queue", "streams.cuh", PLAIN),
        ("gather.cuh", "__syncthreads();", "gather.cuh", PLAIN),
        ("encode_form.cu", "__syncthreads();", "formed.cuh", DERIVED),
    ] {
        let source = std::fs::read_to_string(kernels.join(file)).unwrap();
        let line = 1 + source.lines().position(|line| line.contains(barrier)).unwrap();
        let output = encode("driver-races", "libtsan.so", &[test], Some(&format!("{file}:{line}")));
        let text = text(&output);
        let summary = text.lines().find(|line| line.contains("SUMMARY: ThreadSanitizer: data race"));
        assert!(!output.status.success(), "without {file}:{line}: {text}");
        assert!(summary.is_some_and(|summary| summary.contains(found_in)), "without {file}:{line}: {text}");
    }
}
