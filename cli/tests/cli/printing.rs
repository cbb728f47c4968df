//! Standard output and standard error.

use crate::common::place::*;
use crate::common::*;
use std::fs;

#[test]
fn json_tells_what_the_text_tells() {
    let place = Place::with_pair();
    let inspected = place.json("inspect pair");
    assert_eq!(inspected["schema"], "tpde.inspect/1");
    let tensors = inspected["tensors"].as_array().unwrap();
    assert_eq!(inspected["summary"]["tensors"], tensors.len());
    let payloads: Vec<_> = tensors.iter().map(|tensor| tensor["payload_bytes"].as_u64().unwrap()).collect();
    assert!(payloads.is_sorted_by(|a, b| a >= b), "{payloads:?}");
    assert!(place.json("inspect pair --tensors")["summary"].is_null());
    let chunks = place.json("inspect pair --chunks");
    assert_eq!(chunks["chunks"].as_array().unwrap().len() as u64, inspected["summary"]["chunks"].as_u64().unwrap());
    let text = place.ok("inspect pair").out;
    assert!(text.contains("layers.0.weight") && text.contains("64×64") && text.contains("6 tensors"), "{text}");
    assert!(place.ok("inspect pair --chunks").out.lines().count() > chunks["chunks"].as_array().unwrap().len());

    let bench = place.json("bench base.safetensors target.safetensors --runs 2");
    assert_eq!((&bench["schema"], &bench["threads"]), (&"tpde.bench/1".into(), &1.into()));
    let contenders = bench["contenders"].as_array().unwrap();
    let names: Vec<_> = contenders.iter().map(|contender| contender["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["tpde, auto", "XOR + zstd-1", "XOR planes + zstd-3", "zstd-3 --patch-from"]);
    for contender in contenders {
        assert!(contender["ratio"].as_f64().unwrap() > 1.0, "{contender}");
        assert_eq!(contender["decode_with_digests"]["all_seconds"].as_array().unwrap().len(), 2);
    }
    let encoded = place.json("encode base.safetensors target.safetensors -o again -v");
    assert_eq!((&encoded["schema"], &encoded["tensors"][0]["name"]), (&"tpde.encode/1".into(), &"embed.weight".into()));
    assert_eq!(place.json("apply base.safetensors pair -o out.safetensors")["schema"], "tpde.apply/1");
}

#[test]
fn quiet_runs_print_nothing_but_errors() {
    let place = Place::with_pair();
    for line in ["encode base.safetensors target.safetensors -o again", "verify pair", "inspect pair", "demo"] {
        let run = place.ok(&format!("{line} -q"));
        assert_eq!((run.out.as_str(), run.err.as_str()), ("", ""), "{line}");
    }
    assert_eq!(place.json("verify pair -q")["schema"], "tpde.verify/1");
    assert!(place.tpde("verify none -q").err.starts_with("error: "));
}

#[test]
fn names_of_strangers_reach_no_terminal() {
    let place = Place::new();
    let evil = "a\u{1b}[31m\u{9b}2J\r\n\u{202e}b\u{7f}";
    let base = [named(&model()[0], evil), named(&model()[1], "\u{1b}]0;gone\u{7}")];
    let target = [tuned(&base[0], 50), named(&model()[2], "\u{1b}[2Jnew")];
    write_file(&place.path("base.safetensors"), &base);
    fs::create_dir(place.path("target")).unwrap();
    write_file(&place.path("target/model.safetensors"), &target);
    fs::write(place.path("target/\u{1b}[31mfile"), "").unwrap();
    fs::write(place.path("target/\u{9b}file"), "").unwrap();

    let mut said = String::new();
    for line in [
        "encode base.safetensors target -o pair --color always",
        "--json encode base.safetensors target -o pair -f",
        "inspect pair",
        "inspect pair --chunks",
        "inspect pair --json",
        "inspect pair --explain --base base.safetensors",
        "inspect pair --explain --json",
        "apply base.safetensors pair -o out",
        "apply base.safetensors pair -o x --tensor nothing",
        "verify pair --base target",
        "verify pair --base target --json",
        "verify pair --target base.safetensors -vvv",
        "encode base.safetensors target -o y --rename \u{1b}[2Jx=y",
        "apply \u{1b}[2Jx pair -o y",
    ] {
        let run = place.tpde(line);
        said += &run.out;
        said += &run.err;
    }
    assert!(said.contains("\\u{1b}[31m") && said.contains("\\u001b[31m"), "{said}");
    // The only escapes are our own colours, and only if colours were requested.
    let ours = said.replace("\u{1b}[1m", "").replace("\u{1b}[0m", "");
    let bad: Vec<_> = ours.chars().filter(|c| (c.is_control() && *c != '\n') || *c == '\u{202e}').collect();
    assert!(bad.is_empty(), "{bad:?} in {ours}");
    place.ok("apply base.safetensors pair -o out -f");
    place.assert_same("out/model.safetensors", "target/model.safetensors");
}

#[test]
fn colours_are_for_terminals() {
    let place = Place::with_pair();
    assert!(!place.ok("inspect pair").out.contains('\u{1b}'));
    assert!(!place.tpde("inspect none").err.contains('\u{1b}'));
    assert!(place.ok("inspect pair --color always").out.contains('\u{1b}'));
    assert!(!place.ok("inspect pair --color never").out.contains('\u{1b}'));
    for line in ["--color always --help", "inspect --help --color=always"] {
        assert!(place.ok(line).out.contains('\u{1b}'), "{line}");
    }
    assert!(!place.ok("--color always --help --color never").out.contains('\u{1b}'));
}

#[test]
fn output_that_cannot_be_written_is_an_error_of_the_system() {
    let place = Place::with_pair();
    for line in ["inspect pair", "inspect pair --json", "completions bash"] {
        let run = place.command("sh", &["-c", &format!("exec {TPDE} {line} > /dev/full")]);
        assert_eq!(run.code, SYSTEM, "{line}: {}", run.err);
        assert!(run.err.contains("cannot write to standard output"), "{line}: {}", run.err);
    }
    assert_eq!(place.command("sh", &["-c", &format!("exec {TPDE} --help > /dev/full")]).code, SYSTEM);
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let place = Place::with_pair();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = std::process::Command::new(TPDE);
    let output = command.args(["inspect", "pair"]).current_dir(place.0.path()).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

/// A base of another dtype, or with more or fewer rows, is a base of peers too, as far as they can use one.
#[test]
fn bases_of_other_dtypes_and_shapes_are_measured() {
    let place = Place::new();
    let wide = tensor("w", "F32", &[64, 64], 1);
    let narrow =
        Tensor { dtype: "BF16", bytes: wide.bytes.chunks(4).flat_map(|lane| [lane[2], lane[3]]).collect(), ..wide.clone() };
    let longer = tensor("w", "BF16", &[80, 64], 2);
    for (name, one) in [("wide", &wide), ("narrow", &narrow), ("longer", &longer)] {
        write_file(&place.path(&format!("{name}.safetensors")), std::slice::from_ref(one));
    }
    for (base, target) in [("wide", "narrow"), ("narrow", "wide"), ("longer", "narrow"), ("narrow", "longer")] {
        let report = place.json(&format!("bench {base}.safetensors {target}.safetensors --runs 1"));
        assert_eq!(report["contenders"].as_array().unwrap().len(), 4, "{base} {target}");
    }
}
