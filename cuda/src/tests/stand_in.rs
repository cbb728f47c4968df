//! Runs the tests that need a device on a stand-in for the driver (`kernels/emulator/driver.cpp`): they test the host half of
//! this crate, with kernels run by the emulator.
//!
//! Streams of the stand-in make progress in an order that events allow. Each order finds different bugs:
//! - *late* runs only operations that a call waits for. It exposes a missing wait.
//! - *early* runs each operation as soon as possible. It exposes memory that is written or freed too early.
//! - The third order is early for all streams except the copy stream. It exposes memory that is freed before it was copied.

use super::emulated::emulator;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::process::{Command, ExitStatus};

/// Returns whether this process runs on the stand-in. The stand-in is slow, so tests are smaller there.
pub fn is_used() -> bool {
    std::env::var_os("TPDE_STAND_IN").is_some()
}

/// Returns whether this process runs on the stand-in, and streams progress as soon as possible.
pub fn is_early() -> bool {
    is_in_order("early")
}

/// Sets the decoder of the stand-in for nvCOMP.
#[cfg(feature = "nvcomp")]
pub fn expand_frames() {
    extern "C" fn expand(frame: *const u8, size: usize, content: *mut u8, room: usize) -> i64 {
        // SAFETY: the stand-in passes the frame and the memory for its content, which belong to this process.
        let (frame, content) = unsafe { (std::slice::from_raw_parts(frame, size), std::slice::from_raw_parts_mut(content, room)) };
        let expanded = zstd::zstd_safe::DCtx::create().decompress(content, frame);
        expanded.map_or(-1, |size| size as i64)
    }
    type Give = unsafe extern "C" fn(extern "C" fn(*const u8, usize, *mut u8, usize) -> i64);
    // SAFETY: the library is the stand-in, whose function has this type. It stays loaded, because it is also the driver.
    unsafe {
        let library = libloading::Library::new("libnvcomp.so.6").unwrap();
        library.get::<Give>(b"stand_in_expands_with").unwrap()(expand);
    }
}

/// Kind of the calls that the stand-in refuses, see [`refuse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Calls that queue work, create objects or wait for an event.
    Queueing = 1,
}

/// Makes the driver refuse calls after `calls` more calls of that kind. `None` ends this. Returns whether the driver has refused
/// a call since the last request.
pub fn refuse(calls: Option<(Refusal, u32)>) -> bool {
    let (kind, calls) = calls.map_or((0, 0), |(refusal, calls)| (refusal as u32, calls));
    // SAFETY: the library is the stand-in, whose function has this type.
    unsafe { driver().get::<unsafe extern "C" fn(u32, i64) -> i32>(b"stand_in_refuses").unwrap()(kind, calls.into()) != 0 }
}

/// Makes the driver refuse a call of this function, after `calls` more calls of it.
pub fn refuse_named(name: &str, calls: u64) {
    let name = std::ffi::CString::new(name).unwrap();
    type Refuse = unsafe extern "C" fn(*const c_char, i64) -> i32;
    // SAFETY: the library is the stand-in, whose function has this type.
    unsafe { driver().get::<Refuse>(b"stand_in_refuses_named").unwrap()(name.as_ptr(), calls as i64) };
}

/// Returns the number of calls of each function since the last request to refuse.
pub fn calls() -> BTreeMap<String, u64> {
    type Calls = BTreeMap<String, u64>;
    extern "C" fn add(calls: &mut Calls, name: *const c_char, count: u64) {
        // SAFETY: the stand-in passes a string.
        calls.insert(unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned(), count);
    }
    type Count = unsafe extern "C" fn(extern "C" fn(&mut Calls, *const c_char, u64), &mut Calls);
    let mut calls = Calls::new();
    // SAFETY: the library is the stand-in, whose function has this type.
    unsafe { driver().get::<Count>(b"stand_in_counts").unwrap()(add, &mut calls) };
    calls
}

/// Returns the size in bytes of the device memory that is allocated, and the largest size since the last call.
pub fn device_memory() -> (u64, u64) {
    let mut most = 0;
    // SAFETY: the library is the stand-in, whose function has this type.
    let now = unsafe { driver().get::<unsafe extern "C" fn(&mut u64) -> u64>(b"stand_in_memory").unwrap()(&mut most) };
    (now, most)
}

/// Returns whether a call of this function was refused, since the process began.
pub fn has_refused(name: &str) -> bool {
    let name = std::ffi::CString::new(name).unwrap();
    type Has = unsafe extern "C" fn(*const c_char) -> i32;
    // SAFETY: the library is the stand-in, whose function has this type.
    unsafe { driver().get::<Has>(b"stand_in_has_refused").unwrap()(name.as_ptr()) != 0 }
}

/// Returns whether to run tests that select random orders themselves. They run in only one of the orders.
pub fn draws() -> bool {
    is_in_order("late")
}

/// Makes all streams progress in a random order from the seed, until the result is dropped. It has no effect on a device.
pub fn draw(seed: u64) -> Drawing {
    if is_used() {
        set_order(seed);
    }
    Drawing
}

/// Guard of a random order, see [`draw`].
pub struct Drawing;

impl Drop for Drawing {
    fn drop(&mut self) {
        if is_used() {
            set_order(0);
        }
    }
}

fn is_in_order(name: &str) -> bool {
    std::env::var_os("TPDE_STAND_IN").is_some_and(|order| order == name)
}

fn set_order(seed: u64) {
    // SAFETY: the library is the stand-in, whose function has this type.
    unsafe { driver().get::<unsafe extern "C" fn(u64)>(b"stand_in_draws").unwrap()(seed) }
}

fn driver() -> libloading::Library {
    // SAFETY: the library is the stand-in, which is loaded already.
    unsafe { libloading::Library::new("libcuda.so.1").unwrap() }
}

/// Runs the tests that need a device, except those with `skipped` in their names. At least `least` must pass.
fn run(order: &str, skipped: &[&str], least: u32) {
    emulator::build("driver");
    // Tests in `stand_in` and `emulated` need no device. `stand_in` would call itself.
    let skipped = skipped.iter().chain(&["::stand_in::", "::emulated::"]).flat_map(|name| ["--skip", name]);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "tests::", "--test-threads", "1"])
        .args(skipped)
        .env("LD_LIBRARY_PATH", emulator::folder().join("driver"))
        .env("TPDE_STAND_IN", order)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (told, errors) = (text(&output.stdout), text(&output.stderr));
    let again = format!("once more: LD_LIBRARY_PATH={}/driver TPDE_STAND_IN={order}", emulator::folder().display());
    assert!(output.status.success(), "{again}\n\n{}", failures(&told, &errors, output.status));
    let passed = told.split_once("ok. ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok()).unwrap_or(0);
    assert!(passed >= least, "{passed} tests passed, expected at least {least}\n{}", tail(&told, 3));
    // For the summary of scripts/test.
    let counts = format!("order {order}, {passed} tests passed\n");
    std::fs::write(emulator::folder().join(format!("stand-in.{order}")), counts).unwrap();
}

/// Returns what the failed tests printed, from the output of a run of tests one after the other. If the process died, the last test
/// that began has failed.
fn failures(told: &str, errors: &str, status: ExitStatus) -> String {
    const SECTIONS: &str = "\nfailures:\n\n";
    const NAMES: &str = "\nfailures:\n    ";
    match told.split_once(SECTIONS) {
        Some((_, sections)) => sections.split(NAMES).next().unwrap_or(sections).to_owned(),
        None => {
            let begun = told.lines().rev().find_map(|line| line.strip_prefix("test ")?.split_once(" ... "));
            let name = begun.map_or("no test", |(name, _)| name);
            format!("---- {name} stdout ----\nthe process of the tests died: {status}\n{}\n", tail(errors, LINES))
        }
    }
}

/// Number of lines that are shown of a process that died.
const LINES: usize = 30;

/// The last lines of a text.
fn tail(text: &str, count: usize) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Only failed tests are shown, and the test in which a process died: logs of CI are cut in the middle.
#[test]
#[cfg(unix)]
fn failures_are_those_of_the_run() {
    use std::os::unix::process::ExitStatusExt;
    let (failed, killed) = (ExitStatus::from_raw(101 << 8), ExitStatus::from_raw(9));
    let told = "\nrunning 3 tests\ntest a ... ok\ntest b ... FAILED\ntest c ... FAILED\n\nfailures:\n\n---- b stdout ----\nwhy b\n\n\
                ---- c stdout ----\nwhy c\n\n\nfailures:\n    b\n    c\n\ntest result: FAILED. 1 passed; 2 failed\n\n";
    assert_eq!(failures(told, "noise", failed).trim_end(), "---- b stdout ----\nwhy b\n\n---- c stdout ----\nwhy c");
    let errors: String = (0..100).map(|n| format!("line {n}\n")).collect();
    let shown = failures("\nrunning 3 tests\ntest a ... ok\ntest b::c ... ", &errors, killed);
    assert!(shown.starts_with("---- b::c stdout ----\nthe process of the tests died: signal: 9"), "{shown}");
    assert!(shown.contains("line 99") && shown.contains("line 70") && !shown.contains("line 69\n"), "{shown}");
    assert!(failures("", "", failed).contains("no test"));
}

/// Tests of kernels alone, which do not depend on the order of streams, and a test that needs checkpoints.
const ABOUT_KERNELS: [&str; 4] = ["::vectors::", "::hostile::", "::generated::", "::pairs::"];

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn in_late_order() {
    run("late", &["::pairs::"], 95);
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn in_early_order() {
    run("early", &ABOUT_KERNELS, 88);
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn with_late_copies() {
    if std::env::var_os("TPDE_LONG").is_none() {
        return println!("skipped: the other two orders are what a check before a merge has time for, TPDE_LONG=1 runs this one");
    }
    // The copy stream is the third that a device creates.
    run("251", &ABOUT_KERNELS, 88);
}
