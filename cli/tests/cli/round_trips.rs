//! An encoded checkpoint is restored byte for byte.

use crate::common::place::*;
use crate::common::*;
use std::fs;

#[test]
fn a_file_comes_back_byte_for_byte() {
    let place = Place::with_pair();
    place.ok("apply base.safetensors pair -o out.safetensors");
    place.assert_same("out.safetensors", "target.safetensors");
    for pair in ["pair.tpde-index", "pair.tpde-blob"] {
        place.ok(&format!("patch base.safetensors {pair} -o again.safetensors -f"));
        place.assert_same("again.safetensors", "target.safetensors");
    }
    let verified = place.json("verify pair --base base.safetensors --target target.safetensors");
    assert_eq!((&verified["base_checked"], &verified["target_checked"]), (&true.into(), &true.into()));
}

#[test]
fn a_folder_of_shards_comes_back_byte_for_byte() {
    let place = Place::new();
    let base = model();
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 9)).collect();
    write_folder(&place.path("base"), &[&base[..2], &base[2..]]);
    write_folder(&place.path("target"), &[&target[..3], &target[3..]]);
    let report = place.json("diff base target -o pair");
    assert_eq!(list(&report["not_included"]), ["config.json", "tokenizer.json"]);
    let text = place.ok("encode base target -o pair -f").out;
    assert!(text.contains("config.json, tokenizer.json"), "{text}");

    place.ok("apply base pair -o out");
    for name in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"] {
        place.assert_same(&format!("out/{name}"), &format!("target/{name}"));
    }
    assert_eq!(place.path("out").read_dir().unwrap().count(), 3);

    // An existing output folder is replaced only with --force, and never if it is the base.
    place.fails("apply base pair -o out", SYSTEM, "it exists");
    place.ok("apply base pair -o out -f");
    let before = place.read("base/model-00001-of-00002.safetensors");
    place.fails("apply base pair -o base -f", USAGE, "is the same as input base");
    place.fails("apply base pair -o base/model-00001-of-00002.safetensors --tensor step -f", USAGE, "is the same as input base");
    assert!(before == place.read("base/model-00001-of-00002.safetensors"));
}

#[test]
fn renamed_tensors_are_paired() {
    let place = Place::new();
    let base = model();
    let mut target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 50)).collect();
    target[0].name = "embedding".into();
    target[1].name = "blocks.0".into();
    write_file(&place.path("base.safetensors"), &base);
    write_file(&place.path("target.safetensors"), &target);
    fs::write(place.path("map.json"), r#"{"embedding": "embed.weight", "blocks.0": "layers.0.weight"}"#).unwrap();

    let apart = place.json("encode base.safetensors target.safetensors -o apart");
    assert_eq!(list(&apart["added"]), ["blocks.0", "embedding"]);
    assert_eq!(list(&apart["removed"]), ["embed.weight", "layers.0.weight"]);
    let options = "--rename embedding=embed.weight --rename blocks.0=layers.0.weight";
    let by_options = place.json(&format!("encode base.safetensors target.safetensors -o by-options {options}"));
    let by_map = place.json("encode base.safetensors target.safetensors -o by-map --rename-map map.json");
    assert!(list(&by_map["added"]).is_empty() && list(&by_map["removed"]).is_empty());
    assert_eq!(by_options["stored_bytes"], by_map["stored_bytes"]);
    assert!(by_map["stored_bytes"].as_u64() < apart["stored_bytes"].as_u64());
    place.assert_same("by-options.tpde-index", "by-map.tpde-index");
    place.ok("apply base.safetensors by-map -o out.safetensors");
    place.assert_same("out.safetensors", "target.safetensors");

    let note = "no tensor of the target is in the base";
    assert!(!place.ok("encode base.safetensors target.safetensors -o apart --force").out.contains(note));
    target.iter_mut().for_each(|tensor| tensor.name.insert_str(0, "model."));
    write_file(&place.path("prefixed.safetensors"), &target);
    let text = place.ok("encode base.safetensors prefixed.safetensors -o prefixed").out;
    assert!(text.contains("--rename 'model.*=*'") && !text.contains(note), "{text}");
    let report = place.json("encode base.safetensors prefixed.safetensors -o prefixed -f");
    assert_eq!(report["suggested_rename"], "model.*=*");
    let pattern = "--rename model.*=* --rename model.embedding=embed.weight";
    let report = place.json(&format!("encode base.safetensors prefixed.safetensors -o prefixed -f {pattern}"));
    assert_eq!((list(&report["added"]), report["suggested_rename"].is_null()), (vec!["model.blocks.0"], true));
    place.ok("apply base.safetensors prefixed -o out.safetensors -f");
    place.assert_same("out.safetensors", "prefixed.safetensors");
    for (pattern, fault) in
        [("nothing.*=*", "renames nothing"), ("model.*=other.*", "renames nothing"), ("model.*=embed", "same number of *")]
    {
        place.fails(&format!("encode base.safetensors prefixed.safetensors -o x --rename {pattern}"), USAGE, fault);
    }
    write_file(&place.path("other.safetensors"), &[tensor("w", "BF16", &[8, 8], 1)]);
    assert!(place.ok("encode base.safetensors other.safetensors -o other").out.contains(note));

    place.fails("encode base.safetensors target.safetensors -o x --rename embedding=nothing", USAGE, "no tensor nothing");
    fs::write(place.path("map.json"), "[1]").unwrap();
    place.fails("encode base.safetensors target.safetensors -o x --rename-map map.json", USAGE, "map.json");
}

#[test]
fn tensors_may_come_go_grow_and_change_their_type() {
    let place = Place::new();
    let base = model();
    let mut target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 50)).collect();
    let mut grown = tensor("embed.weight", "BF16", &[100, 64], 77);
    grown.bytes[..target[0].bytes.len()].copy_from_slice(&target[0].bytes);
    target[0] = grown;
    target[3].shape[0] = 32;
    target[3].bytes.truncate(32 * 64 * 2);
    target[2] = tensor("layers.0.norm", "F64", &[64], 8);
    target.remove(4);
    target.push(tensor("new", "U8", &[3, 5], 9));
    target.push(tensor("nothing", "F16", &[0, 7], 10));
    write_file(&place.path("base.safetensors"), &base);
    write_file(&place.path("target.safetensors"), &target);
    let report = place.json("encode base.safetensors target.safetensors -o pair");
    assert_eq!(list(&report["added"]), ["new", "nothing"]);
    assert_eq!(list(&report["retyped"]), ["layers.0.norm"]);
    assert_eq!(list(&report["resized"]), ["embed.weight", "layers.1.weight"]);
    assert_eq!(list(&report["removed"]), ["layers.1.norm"]);
    let text = place.ok("encode base.safetensors target.safetensors -o pair -f").out;
    assert_eq!((list(&report["reshaped"]), list(&report["unrelated"])), (vec![], vec![]));
    for label in ["added", "retyped", "resized", "removed"] {
        assert!(text.contains(label), "{text}");
    }
    place.ok("apply base.safetensors pair -o out.safetensors");
    place.assert_same("out.safetensors", "target.safetensors");
    place.ok("verify pair --base base.safetensors --target out.safetensors");
}

#[test]
fn some_tensors_can_be_rebuilt_alone() {
    let place = Place::with_pair();
    let report = place.json("apply base.safetensors pair -o some.safetensors --tensor layers.*.norm --tensor st?p");
    assert_eq!(report["tensors"], 3);
    let file = place.read("some.safetensors");
    let some = safetensors::SafeTensors::deserialize(&file).unwrap();
    for name in ["layers.0.norm", "layers.1.norm", "step"] {
        let wanted = model().iter().find(|tensor| tensor.name == name).map(|tensor| tuned(tensor, 50)).unwrap();
        assert_eq!(some.tensor(name).unwrap().data(), wanted.bytes);
    }
    place.fails("apply base.safetensors pair -o none.safetensors --tensor step --tensor layer.*", USAGE, "layer.*");
    place.fails("apply base.safetensors pair -o none.safetensors --tensor [", USAGE, "--tensor");
}

#[test]
fn the_report_says_why_a_base_is_not_used() {
    let place = Place::new();
    let base = [tensor("a", "BF16", &[64, 64], 1), tensor("b", "BF16", &[64, 64], 2), tensor("c", "U32", &[64], 3)];
    let mut target = [tensor("a", "BF16", &[64, 64], 4), tensor("b", "BF16", &[32, 128], 5), tensor("c", "BF16", &[64], 6)];
    // Weights of one magnitude are small without a base.
    target[0].bytes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 0x3C);
    write_file(&place.path("base.safetensors"), &base);
    write_file(&place.path("target.safetensors"), &target);
    let report = place.json("encode base.safetensors target.safetensors -o pair");
    for (field, tensor) in [("unrelated", "a"), ("reshaped", "b"), ("retyped", "c")] {
        assert_eq!(list(&report[field]), [tensor]);
    }
    let unused = report["unused_bases"].as_array().unwrap().iter();
    let causes: Vec<_> =
        unused.map(|unused| [&unused["tensor"], &unused["cause"], &unused["reason"]].map(|text| text.as_str().unwrap())).collect();
    assert_eq!(
        causes,
        [
            ["a", "larger", "the pair is smaller without it"],
            ["b", "shape", "expected [32, 128], found [64, 64]"],
            ["c", "dtype", "expected BF16, found U32"],
        ]
    );
    assert!(list(&report["added"]).is_empty() && list(&report["removed"]).is_empty());
    let text = place.ok("encode base.safetensors target.safetensors -o pair -f").out;
    for fact in ["smaller without the base", "the base has another shape", "the base has another dtype", "is it the right base?"] {
        assert!(text.contains(fact), "{fact}: {text}");
    }
}

#[test]
fn a_pair_can_do_without_a_base() {
    let place = Place::with_pair();
    place.ok("encode --no-base target.safetensors -o anchor");
    place.ok("apply --no-base anchor -o out.safetensors");
    place.assert_same("out.safetensors", "target.safetensors");
    for (options, tensor) in [("", "embed.weight"), (" --tensor step", "step")] {
        let error = place.fails(&format!("apply --no-base pair -o x.safetensors{options}"), DATA, "found no base");
        assert_eq!((&error["rule"], &error["tensor"]), (&"base.tensor".into(), &tensor.into()));
        assert!(error["hint"].as_str().unwrap().contains("pass that as BASE"), "{error}");
    }
}

#[test]
fn every_codec_and_layout_works() {
    let place = Place::with_pair();
    let layouts = ["auto", "planes", "gaps", "elias-delta", "nibble-gaps", "nibble-planes"];
    // A layout without a codec implies codec zstd.
    let zstd = layouts.map(|layout| format!("--codec {} --layout {layout}", if layout == "gaps" { "auto" } else { "zstd" }));
    let others = [
        "--codec auto",
        "--codec conditioned",
        "--codec conditioned --chunk-lanes 4096",
        "--codec conditioned --favor speed",
        "--codec raw",
        "--chunk-lanes 4096",
    ];
    for options in zstd.iter().map(String::as_str).chain(others) {
        place.ok(&format!("encode base.safetensors target.safetensors -o coded -f {options}"));
        place.ok("verify coded --base base.safetensors --target target.safetensors");
    }
    place.fails("encode base.safetensors target.safetensors -o x --chunk-lanes 5000", USAGE, "5000");
    for other in ["raw", "conditioned"] {
        place.fails(&format!("encode base.safetensors target.safetensors -o x --codec {other} --layout gaps"), USAGE, "zstd");
    }
}

#[test]
fn the_bytes_are_the_same_for_any_number_of_threads() {
    let place = Place::with_pair();
    for threads in [1, 2, 3] {
        place.ok(&format!("-T {threads} encode base.safetensors target.safetensors -o t{threads} --chunk-lanes 4096"));
        place.assert_same(&format!("t{threads}.tpde-index"), "t1.tpde-index");
        place.assert_same(&format!("t{threads}.tpde-blob"), "t1.tpde-blob");
        place.ok(&format!("apply base.safetensors t1 -o out{threads}.safetensors -T {threads}"));
        place.assert_same(&format!("out{threads}.safetensors"), "target.safetensors");
    }
}

#[test]
fn a_target_may_have_more_files_than_may_be_open() {
    let place = Place::new();
    let tensors: Vec<_> = (0..300).map(|i| tensor(&format!("{}.{i}", i % 7), "BF16", &[8], i)).collect();
    write_folder(&place.path("target"), &tensors.chunks(1).collect::<Vec<_>>());
    place.ok("encode --no-base target -o pair");
    let run = place.command("sh", &["-c", &format!("ulimit -n 160; exec {TPDE} apply --no-base pair -o out -T 2")]);
    assert_eq!(run.code, 0, "{}", run.err);
    for i in 1..=300 {
        let name = format!("model-{i:05}-of-00300.safetensors");
        place.assert_same(&format!("out/{name}"), &format!("target/{name}"));
    }
    assert_eq!(place.names(), ["out", "pair.tpde-blob", "pair.tpde-index", "target"]);
}

/// The maximum number of files that the format allows, including the shard index.
#[test]
#[ignore = "syncs 65,536 files, which takes minutes; run it with --ignored"]
fn a_checkpoint_may_have_as_many_files_as_the_format_allows() {
    let place = Place::new();
    let base: Vec<_> = (0..65_535).map(|i| tensor(&format!("t{i}"), "BF16", &[8], i)).collect();
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 3)).collect();
    write_folder(&place.path("base"), &base.chunks(1).collect::<Vec<_>>());
    write_folder(&place.path("target"), &target.chunks(1).collect::<Vec<_>>());
    for line in [
        "encode base target -o pair",
        "verify pair --base base --target target",
        "inspect pair",
        "apply base pair -o out",
        "verify pair --target out",
    ] {
        let script = format!("ulimit -n 256; exec {TPDE} -q {line}");
        let status = std::process::Command::new("sh").args(["-c", &script]).current_dir(place.0.path()).status().unwrap();
        assert!(status.success(), "{line}");
    }
}

#[test]
fn more_shards_than_a_process_may_open_are_encoded_and_verified() {
    let place = Place::new();
    let base: Vec<_> = (0..200).map(|i| tensor(&format!("t{i}"), "BF16", &[16, 16], i)).collect();
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 9)).collect();
    write_folder(&place.path("base"), &base.chunks(1).collect::<Vec<_>>());
    write_folder(&place.path("target"), &target.chunks(1).collect::<Vec<_>>());
    for line in ["encode base target -o pair", "verify pair --base base --target target"] {
        let run = place.command("sh", &["-c", &format!("ulimit -n 64; exec {TPDE} {line}")]);
        assert_eq!(run.code, 0, "{line}: {}", run.err);
    }
}

#[test]
fn a_base_of_another_dtype_is_converted_or_dequantised() {
    let place = Place::new();
    let upper_halves = |tensor: &Tensor| tensor.bytes.chunks(4).flat_map(|lane| [lane[2], lane[3]]).collect();
    let mut cast = tensor("cast", "F32", &[64, 64], 1);
    // Lanes with a low half of zero are cast exactly, but those of infinity and NaN.
    cast.bytes.chunks_mut(4).for_each(|lane| (lane[0], lane[1], lane[3]) = (0, 0, lane[3] & 0x3F));
    let target = vec![
        tuned(&Tensor { dtype: "BF16", bytes: upper_halves(&cast), ..cast.clone() }, 50),
        Tensor { name: "fp8".into(), dtype: "BF16", shape: vec![128, 200], bytes: vec![0; 2 * 128 * 200] },
        Tensor { name: "experts".into(), dtype: "BF16", shape: vec![2, 64, 7], bytes: vec![0; 2 * 2 * 64 * 7] },
    ];
    let zeros = |name: &str, dtype, shape: &[usize]| {
        let mut zeros = tensor(name, dtype, shape, 1);
        zeros.bytes.fill(0);
        zeros
    };
    let quantised = [
        zeros("fp8", "F8_E4M3", &[128, 200]),
        zeros("fp8_scale_inv", "F32", &[1, 2]),
        zeros("experts_blocks", "U8", &[2, 7, 2, 16]),
        zeros("experts_scales", "U8", &[2, 7, 2]),
    ];
    let base = [&[cast][..], &quantised].concat();
    write_file(&place.path("base.safetensors"), &base);
    write_file(&place.path("target.safetensors"), &target);

    let report = place.json("encode base.safetensors target.safetensors -o pair");
    assert_eq!(list(&report["derived"]), ["cast", "experts", "fp8"]);
    let facts = |report: &serde_json::Value, field: &str| -> Vec<serde_json::Value> {
        report["tensors"].as_array().unwrap().iter().map(|tensor| tensor[field].clone()).collect()
    };
    for report in [&report, &place.json("inspect pair")] {
        assert_eq!(facts(report, "base_kind"), ["cast", "dequantised", "dequantised"]);
        assert_eq!(facts(report, "base_dtype"), ["F32", "U8", "F8_E4M3"]);
        let forms = ["".into(), "mxfp4_transposed".into(), "fp8_blocks".into()];
        assert_eq!(facts(report, "base_form"), forms.map(|form: serde_json::Value| if form == "" { ().into() } else { form }));
    }
    let text = place.ok("encode base.safetensors target.safetensors -o pair -f").out;
    assert!(text.contains("3 tensors, from a base of another dtype: cast, experts, fp8"), "{text}");
    place.ok("apply base.safetensors pair -o out.safetensors");
    place.assert_same("out.safetensors", "target.safetensors");
    place.json("verify pair --base base.safetensors --target target.safetensors");
    place.ok("revert base.safetensors pair -o back");
    place.ok("apply target.safetensors back -o again.safetensors");
    place.assert_same("again.safetensors", "base.safetensors");

    let whole = place.json("encode base.safetensors target.safetensors -o whole --no-derived --format 1.2");
    assert_eq!((list(&whole["derived"]), list(&whole["retyped"])), (vec![], vec!["cast", "fp8"]));
    assert!(whole["stored_bytes"].as_u64() > report["stored_bytes"].as_u64());
    place.ok("apply base.safetensors whole -o out.safetensors -f");
    place.assert_same("out.safetensors", "target.safetensors");

    // A tensor of scales is missing, or has another shape, when the pair is made and when it is applied.
    for scales in [None, Some(zeros("fp8_scale_inv", "F32", &[2, 1]))] {
        let found = base.iter().filter(|tensor| tensor.name != "fp8_scale_inv").cloned().chain(scales).collect::<Vec<_>>();
        write_file(&place.path("other.safetensors"), &found);
        let error = place.fails("apply other.safetensors pair -o x.safetensors", DATA, "fp8_scale_inv");
        assert_eq!(error["rule"], "base.tensor");
    }
    let report = place.json("encode other.safetensors target.safetensors -o other");
    let expected = serde_json::json!([{
        "tensor": "fp8", "base": "fp8", "cause": "scales",
        "reason": "expected scales of F32 [1, 2], found fp8_scale_inv with F32 [2, 1]",
    }]);
    assert_eq!(report["unused_bases"], expected);
    place.ok("apply other.safetensors other -o again.safetensors -f");
    place.assert_same("again.safetensors", "target.safetensors");
    let text = place.ok("encode other.safetensors target.safetensors -o other -f").out;
    assert!(text.contains("fp8 for fp8 (expected scales of F32 [1, 2]"), "{text}");
    assert!(!place.path("x.safetensors").exists() && !place.path("x.tpde-index").exists());
}

/// `from_pretrained` needs them, and a pair has only weights.
#[test]
fn a_command_is_shown_that_copies_what_is_beside_the_weights() {
    let place = Place::new();
    for folder in ["base", "it's new"] {
        write_folder(&place.path(folder), &[&model()]);
        fs::write(place.path(folder).join("config.json"), folder).unwrap();
        fs::write(place.path(folder).join("pytorch_model.bin"), "older weights").unwrap();
        fs::write(place.path(folder).join("tokenizer $(touch x).json"), folder).unwrap();
    }
    let shown = |out: &str| Some(out.lines().find(|line| line.starts_with("  copy"))?.split_once("cp ")?.1.to_owned());
    let target = place.command(TPDE, &["encode", "base", "it's new", "-o", "pair"]);
    let apply = "apply base pair -o out -f";
    let base = place.ok(apply);
    for (out, to, content) in [(target.out, "OUT", "it's new"), (base.out, "out", "base")] {
        let run = place.command("sh", &["-c", &format!("mkdir -p {to}; cp {}", shown(&out).unwrap())]);
        assert_eq!((run.code, run.err.as_str()), (0, ""), "{out}");
        for name in ["config.json", "tokenizer $(touch x).json"] {
            assert_eq!(fs::read_to_string(place.path(to).join(name)).unwrap(), content);
        }
        assert!(!place.path(to).join("pytorch_model.bin").exists());
    }
    assert!(!place.path("x").exists() && shown(&place.ok(apply).out).is_none());
    // A name for no terminal is not part of a command, and a file has no folder of its own.
    fs::write(place.path("base/\u{1b}[2J.json"), "").unwrap();
    assert!(shown(&place.ok("apply base pair -o other").out).is_none());
    place.ok("encode --no-base base/model-00001-of-00001.safetensors -o single");
    assert!(shown(&place.ok("apply --no-base single -o single.safetensors").out).is_none());
}
