//! `--device`.

use crate::common::place::*;
#[cfg(feature = "cuda")]
use crate::common::*;

#[test]
fn a_device_that_is_not_there_is_said_so() {
    let place = Place::with_pair();
    for command in [
        "apply base.safetensors pair -o out.safetensors --device cuda:999",
        "verify pair --base base.safetensors --device cuda:999",
        "bench base.safetensors target.safetensors --device cuda:999",
        "encode base.safetensors target.safetensors -o out --codec raw --device cuda:999",
        "fold base.safetensors pair -o out --codec raw --device cuda:999",
    ] {
        place.fails(command, DEVICE, "no CUDA device");
        assert!(!place.path("out.safetensors").exists() && !place.path("out.tpde-index").exists());
    }
    place.ok("apply base.safetensors pair -o out.safetensors --device cpu");
    place.fails("verify pair --device tpu", USAGE, "cpu, cuda, cuda:N");
    for command in ["apply base.safetensors pair -o other.safetensors", "verify pair", "bench base.safetensors target.safetensors"]
    {
        // Without nvCOMP there is no such option.
        let what = if cfg!(feature = "nvcomp") { "--trust requires a CUDA device" } else { "--trust" };
        place.fails(&format!("{command} --trust"), USAGE, what);
    }
    let needs = &place.json("inspect pair")["summary"]["device"];
    assert!(needs["payload_bytes"].as_u64() > Some(0) && needs["kernels"].is_array(), "{needs}");
}

/// A device rebuilds the same bytes as the CPU.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn a_device_gives_the_same_files() {
    let place = Place::with_pair();
    place.ok("apply base.safetensors pair -o out.safetensors --device cuda");
    place.assert_same("out.safetensors", "target.safetensors");
    place.ok("verify pair --base base.safetensors --device cuda");
    place.fails("verify pair --base target.safetensors --device cuda", DATA, "already applied");
}

/// A device encodes the same pairs as the CPU.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn a_device_encodes_the_same_pairs() {
    let place = Place::with_pair();
    for (n, options) in [
        "base.safetensors target.safetensors --codec conditioned",
        "base.safetensors target.safetensors --codec conditioned --favor speed --payload-digests",
        "base.safetensors target.safetensors --codec raw --format 1.1",
        "--no-base target.safetensors --codec conditioned --favor size",
        "base.safetensors target.safetensors --codec device",
        "--no-base target.safetensors --codec device",
    ]
    .iter()
    .enumerate()
    {
        place.ok(&format!("encode {options} -o cpu{n}"));
        place.ok(&format!("encode {options} -o cuda{n} --device cuda"));
        for ending in ["tpde-index", "tpde-blob"] {
            place.assert_same(&format!("cuda{n}.{ending}"), &format!("cpu{n}.{ending}"));
        }
    }
    place.ok("apply base.safetensors cuda0 -o rebuilt.safetensors");
    place.assert_same("rebuilt.safetensors", "target.safetensors");
    for (options, why) in [
        ("", "expected codec device, conditioned or raw, found auto"),
        ("--codec zstd", "expected codec device, conditioned or raw, found zstd"),
    ] {
        place.fails(&format!("encode base.safetensors target.safetensors -o no --device cuda {options}"), USAGE, why);
        assert!(!place.path("no.tpde-index").exists() && !place.path("no.tpde-blob").exists());
    }
    place.fails("encode base.safetensors target.safetensors -o cuda0 --codec raw --device cuda", SYSTEM, "cuda0");

    // Bases of another dtype.
    let base =
        [tensor("cast", "F32", &[40, 30], 1), tensor("fp8", "F8_E4M3", &[20, 200], 2), tensor("fp8_scale_inv", "F32", &[1, 2], 3)];
    let target = [tensor("cast", "BF16", &[40, 30], 4), tensor("fp8", "BF16", &[20, 200], 5)];
    write_file(&place.path("wide.safetensors"), &base);
    write_file(&place.path("narrow.safetensors"), &target);
    let options = "wide.safetensors narrow.safetensors --codec conditioned";
    place.ok(&format!("encode {options} -o cpu"));
    let report = place.json(&format!("encode {options} -o cuda --device cuda"));
    assert_eq!(list(&report["derived"]), ["cast", "fp8"]);
    for ending in ["tpde-index", "tpde-blob"] {
        place.assert_same(&format!("cuda.{ending}"), &format!("cpu.{ending}"));
    }
}

/// A device folds the same pairs as the CPU.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn a_device_folds_the_same_pairs() {
    let place = Place::with_pair();
    let tensors = [tensor("added", "F32", &[300], 1), tensor("w", "BF16", &[70, 90], 2)];
    write_file(&place.path("last.safetensors"), &tensors);
    place.ok("encode target.safetensors last.safetensors -o next --split *=0:2");
    place.ok("encode --no-base base.safetensors -o whole");
    for (n, options) in [
        "base.safetensors pair next --codec device",
        "base.safetensors pair next --codec raw --format 1.1 --split added=0:1",
        "base.safetensors pair --codec conditioned --favor speed --chunk-lanes 4096 --payload-digests",
        "--no-base whole pair next --codec raw",
    ]
    .iter()
    .enumerate()
    {
        let expected = place.json(&format!("fold {options} -o cpu{n}"));
        let found = place.json(&format!("fold {options} -o cuda{n} --device cuda"));
        for key in ["tensors", "added", "removed", "stored_bytes"] {
            assert_eq!(found[key], expected[key], "{key}");
        }
        for ending in ["tpde-index", "tpde-blob"] {
            place.assert_same(&format!("cuda{n}.{ending}"), &format!("cpu{n}.{ending}"));
        }
    }
    place.ok("apply base.safetensors cuda0 -o rebuilt.safetensors");
    place.assert_same("rebuilt.safetensors", "last.safetensors");
    let why = "expected codec device, conditioned or raw, found auto";
    place.fails("fold base.safetensors pair next -o no --device cuda", USAGE, why);
    place.fails("fold base.safetensors next pair -o no --codec raw --device cuda", DATA, "step 2 of the chain");
    place.fails("fold target.safetensors pair next -o no --codec raw --device cuda", DATA, "wrong base");
    assert!(!place.path("no.tpde-index").exists() && !place.path("no.tpde-blob").exists());
}

/// Each row of `bench` was compared: pairs that the device encodes with those of the CPU, rebuilt tensors with the target.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn a_device_is_measured() {
    let place = Place::with_pair();
    let rows_of = |options: &str| {
        let report = place.json(&format!("bench base.safetensors target.safetensors --device cuda --runs 1 {options}"));
        let rows = report["pairs"][0]["rows"].as_array().unwrap().clone();
        rows.iter().map(|row| row["what"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let encoded = ["encode, all digests", "encode, digests of targets", "encode, digests given"];
    let rows = rows_of("--codec conditioned");
    assert!(rows[..3] == encoded && rows.iter().any(|row| row == "in place, all checked"), "{rows:?}");
    assert_eq!(rows_of("--codec raw")[..3], encoded);
    assert_eq!(rows_of("--codec device")[..3], encoded);
    assert!(!rows_of("--codec zstd").iter().any(|row| row.starts_with("encode")));
}

/// The same with a driver that has no device and runs the kernels on the CPU.
#[cfg(feature = "cuda")]
#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn the_stand_in_of_a_device_gives_the_same_files() {
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(3).unwrap().join("emulator");
    let script = crate::common::root().join("kernels/emulator/build");
    let built = std::process::Command::new(script).arg(&folder).arg("driver").output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let output = std::process::Command::new(&test)
        .args(["--ignored", "--exact", "device::a_device_gives_the_same_files", "device::a_device_encodes_the_same_pairs"])
        .arg("device::a_device_folds_the_same_pairs")
        .arg("device::a_device_is_measured")
        .envs([("LD_LIBRARY_PATH", folder.join("driver")), ("TPDE_STAND_IN", "late".into())])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("4 passed"), "{told}");
}
