//! Looks for what tests need besides Rust, so that tests that cannot run are reported as ignored.

use std::process::Command;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(has_cxx, has_jq)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CXX");
    println!("cargo::rerun-if-env-changed=TPDE_NO_SKIP");
    // The compiler that `kernels/emulator/build` takes.
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
    for (name, program) in [("has_cxx", compiler), ("has_jq", "jq".into())] {
        let is_there = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
        // Where nothing may be skipped, the tests run and fail.
        if is_there || std::env::var("TPDE_NO_SKIP").is_ok_and(|value| value == "1") {
            println!("cargo::rustc-cfg={name}");
        }
    }
}
