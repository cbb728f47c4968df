//! The command line from outside: what it writes, what it says, and how it ends.

#![cfg(feature = "cli")]

mod common;

use common::forge::forge;
use common::place::*;
use common::*;
use std::fs;
use std::path::Path;

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

    // Into a folder that is there: only by force, and never into the base.
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
fn a_pair_can_do_without_a_base() {
    let place = Place::with_pair();
    place.ok("encode --no-base target.safetensors -o anchor");
    place.ok("apply --no-base anchor -o out.safetensors");
    place.assert_same("out.safetensors", "target.safetensors");
    place.fails("apply --no-base pair -o x.safetensors", USAGE, "needs a base, for tensor embed.weight");
    place.fails("apply --no-base pair -o x.safetensors --tensor step", USAGE, "needs a base, for tensor step");
}

#[test]
fn every_codec_and_layout_works() {
    let place = Place::with_pair();
    let layouts = ["auto", "planes", "gaps", "elias-delta", "nibble-gaps", "nibble-planes"];
    // A layout alone means the codec that has layouts.
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
fn another_base_is_refused_by_its_name() {
    let place = Place::with_pair();
    let mut other = model();
    other[3].bytes[77] ^= 4;
    write_file(&place.path("other.safetensors"), &other);
    let error = place.fails("apply other.safetensors pair -o out.safetensors", DATA, "wrong base");
    assert_eq!((&error["kind"], &error["tensor"]), (&"wrong_base".into(), &"layers.1.weight".into()));
    place.fails("verify pair --base other.safetensors", DATA, "wrong base");
    let error = place.fails("verify pair --target other.safetensors", DATA, "digest");
    assert_eq!((&error["rule"], &error["tensor"]), (&"tensor.target_digest".into(), &"embed.weight".into()));

    let error = place.fails("apply target.safetensors pair -o out.safetensors", DATA, "already applied");
    assert_eq!(error["kind"], "already_applied");

    write_file(&place.path("fewer.safetensors"), &model()[1..]);
    let error = place.fails("apply fewer.safetensors pair -o out.safetensors", DATA, "safetensors file of the base");
    assert_eq!(error["rule"], "base.file");
    assert!(error["hint"].as_str().unwrap().contains("--tensor"));
    assert_eq!(place.fails("verify pair --base fewer.safetensors", DATA, "embed.weight")["rule"], "base.tensor");
    let more: Vec<_> = model().iter().map(|t| tuned(t, 50)).chain([tensor("more", "U8", &[1], 1)]).collect();
    write_file(&place.path("more.safetensors"), &more);
    assert_eq!(place.fails("verify pair --target more.safetensors", DATA, "more")["rule"], "digest.target_root");
    assert!(!place.path("out.safetensors").exists());
}

#[test]
fn damage_is_found_and_named() {
    let flip = |at: fn(usize) -> usize| {
        move |bytes: &mut Vec<u8>| {
            let at = at(bytes.len());
            bytes[at] ^= 0x10;
        }
    };
    let damaged = |name: &str, change: &dyn Fn(&mut Vec<u8>), rule: &str| {
        let place = Place::with_pair();
        place.edit(name, change);
        for line in ["verify pair", "verify pair --base base.safetensors", "apply base.safetensors pair -o out.safetensors"] {
            assert_eq!(place.fails(line, DATA, rule)["rule"], rule);
        }
        assert!(!place.path("out.safetensors").exists());
    };
    damaged("pair.tpde-blob", &flip(|_| 70), "payload.crc32");
    damaged("pair.tpde-blob", &flip(|_| 0), "blob.magic");
    damaged("pair.tpde-blob", &flip(|_| 30), "blob.crc32");
    damaged("pair.tpde-blob", &|bytes| bytes.truncate(bytes.len() - 1), "blob.blob_size");
    damaged("pair.tpde-blob", &|bytes| bytes.clear(), "blob.blob_size");
    damaged("pair.tpde-index", &flip(|size| size / 2), "index.digest");
    damaged("pair.tpde-index", &flip(|_| 3), "header.magic");
    damaged("pair.tpde-index", &|bytes| bytes.truncate(300), "header.index_size");
    damaged("pair.tpde-index", &|bytes| bytes.push(0), "header.index_size");
}

/// A payload that was changed with its CRC and sums kept: what `verify` prints must not say that this was excluded.
#[test]
fn verify_says_whether_it_excludes_a_forged_payload() {
    let place = Place::new();
    let [old, mut new] = [1, 2].map(|seed| tensor("w", "U32", &[1024], seed));
    write_file(&place.path("base.safetensors"), &[old]);
    write_file(&place.path("target.safetensors"), std::slice::from_ref(&new));
    place.ok("encode base.safetensors target.safetensors -o pair --codec raw");
    let forged = |line: &str| (place.json(line)["payload_authenticity"].clone(), place.ok(line).out);
    let (checked, text) = forged("verify pair --base base.safetensors");
    assert!(checked == "checked" && text.contains("forgery  excluded"), "{checked}, {text}");

    let limits = tpde::Limits::default();
    let index = tpde::ValidatedIndex::parse(place.read("pair.tpde-index"), &limits).unwrap();
    place.edit("pair.tpde-blob", |blob| forge(&index, blob, &mut new.bytes));
    for line in ["verify pair", "verify pair --target target.safetensors"] {
        let (checked, text) = forged(line);
        assert!(checked == "not_checked" && text.contains("forgery  not excluded"), "{line}: {checked}, {text}");
    }
    for line in ["verify pair --base base.safetensors", "apply base.safetensors pair -o out.safetensors"] {
        assert_eq!(place.fails(line, DATA, "target_digest")["rule"], "tensor.target_digest");
    }
    let help = place.ok("verify --help").out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("finds damage, not forgery"), "{help}");
}

#[test]
fn a_pair_without_a_base_is_rebuilt_when_it_is_verified() {
    let place = Place::with_pair();
    assert_eq!(place.fails("verify pair --no-base", USAGE, "needs a base")["kind"], "misuse");
    let mut new = tensor("w", "U32", &[1024], 2);
    write_file(&place.path("new.safetensors"), std::slice::from_ref(&new));
    place.ok("encode --no-base new.safetensors -o new --codec raw");
    let report = place.json("verify new --no-base");
    assert_eq!(report["payload_authenticity"], "checked");
    assert_eq!(
        (&report["target_checked"], &report["base_checked"], &report["writable"]),
        (&true.into(), &false.into(), &true.into())
    );
    assert!(place.ok("verify new --no-base").out.contains("forgery  excluded"));

    let index = tpde::ValidatedIndex::parse(place.read("new.tpde-index"), &tpde::Limits::default()).unwrap();
    place.edit("new.tpde-blob", |blob| forge(&index, blob, &mut new.bytes));
    assert_eq!(place.json("verify new")["payload_authenticity"], "not_checked");
    for line in ["verify new --no-base", "apply --no-base new -o out.safetensors"] {
        assert_eq!(place.fails(line, DATA, "target_digest")["rule"], "tensor.target_digest");
    }
}

#[test]
fn files_of_two_pairs_are_told_apart() {
    let place = Place::with_pair();
    let third: Vec<_> = model().iter().map(|tensor| tuned(tensor, 51)).collect();
    write_file(&place.path("third.safetensors"), &third);
    place.ok("encode base.safetensors third.safetensors -o other");
    fs::copy(place.path("other.tpde-index"), place.path("pair.tpde-index")).unwrap();
    let rule = place.fails("verify pair", DATA, "blob")["rule"].clone();
    assert!(["blob.pair_digest", "blob.blob_size"].contains(&rule.as_str().unwrap()), "{rule}");

    fs::rename(place.path("other.tpde-index"), place.path("swap")).unwrap();
    fs::rename(place.path("other.tpde-blob"), place.path("other.tpde-index")).unwrap();
    fs::rename(place.path("swap"), place.path("other.tpde-blob")).unwrap();
    assert_eq!(place.fails("inspect other", DATA, "header.magic")["rule"], "header.magic");
}

#[test]
fn what_is_not_there_or_no_file_is_refused_at_once() {
    let place = Place::with_pair();
    assert_eq!(place.command("mkfifo", &["pipe", "pipe.tpde-index"]).code, 0);
    fs::create_dir(place.path("empty")).unwrap();
    for input in ["missing", "pipe", "/dev/null", "/dev/zero"] {
        for line in [format!("encode {input} target.safetensors -o x"), format!("encode base.safetensors {input} -o x")] {
            assert_eq!(place.fails(&line, SYSTEM, input)["kind"], "io");
        }
        place.fails(&format!("apply {input} pair -o x"), SYSTEM, input);
        place.fails(&format!("verify {input}"), SYSTEM, input);
        place.fails(&format!("encode --no-base base.safetensors -o x --rename-map {input}"), SYSTEM, input);
    }
    place.fails("encode empty target.safetensors -o x", DATA, "no .safetensors file");
    place.fails("verify empty", SYSTEM, "empty.tpde-index");
    assert_eq!(place.fails("encode --no-base pair.tpde-blob -o x", DATA, "pair.tpde-blob")["kind"], "bad_checkpoint");
    assert!(!place.names().iter().any(|name| name.starts_with('x')), "{:?}", place.names());
}

#[test]
fn outputs_are_replaced_by_force_alone_and_inputs_never() {
    let place = Place::with_pair();
    let before = (place.read("pair.tpde-index"), place.read("base.safetensors"));
    let error = place.fails("encode base.safetensors target.safetensors -o pair", SYSTEM, "exists");
    assert!(error["hint"].as_str().unwrap().contains("--force"));
    place.fails("apply base.safetensors pair -o target.safetensors", SYSTEM, "exists");
    for line in ["-o base.safetensors", "-o pair.tpde-index", "-o pair.tpde-blob"] {
        place.fails(&format!("apply base.safetensors pair -f {line}"), USAGE, "is the same as input");
    }
    fs::copy(place.path("base.safetensors"), place.path("odd.tpde-blob")).unwrap();
    place.fails("encode odd.tpde-blob target.safetensors -o odd -f", USAGE, "is the same as input odd.tpde-blob");
    assert!(before == (place.read("pair.tpde-index"), place.read("base.safetensors")));
    place.ok("encode base.safetensors target.safetensors -o pair --force");
    place.ok("apply base.safetensors pair -o target.safetensors -f");
}

#[test]
fn a_base_is_never_overwritten_whatever_its_name() {
    let place = Place::with_pair();
    let base = model();
    write_folder(&place.path("base"), &[&base[..2], &base[2..]]);
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 30)).collect();
    write_folder(&place.path("target"), &[&target[..2], &target[2..]]);
    place.ok("encode base target -o sharded");
    // A lone base that has the name of a shard of the target, in the folder that is written to.
    place.ok("encode base.safetensors target -o lone");
    fs::create_dir(place.path("out")).unwrap();
    fs::rename(place.path("base.safetensors"), place.path("out/model-00001-of-00002.safetensors")).unwrap();
    let before = place.read("out/model-00001-of-00002.safetensors");
    let line = "apply out/model-00001-of-00002.safetensors lone -f -o";
    place.fails(&format!("{line} out"), USAGE, "output out contains input out/model-00001-of-00002.safetensors");
    assert!(before == place.read("out/model-00001-of-00002.safetensors"));
    // Inside the base, above it, and the same by another name.
    std::os::unix::fs::symlink("base", place.path("link")).unwrap();
    place.fails("apply base sharded -o base/out", USAGE, "output base/out is inside input base");
    place.fails("apply base sharded -o link/out", USAGE, "output link/out is inside input base");
    place.fails("apply link sharded -o base -f", USAGE, "output base is the same as input link");
    place.fails("apply base sharded -o . -f", USAGE, "output . contains input base");
    place.fails("encode base target -o base/pair", USAGE, "output base/pair.tpde-index is inside input base");
    place.fails("encode base target -o target/pair", USAGE, "output target/pair.tpde-index is inside input target");
    place.ok("apply base sharded -o rebuilt");
}

#[test]
fn no_output_replaces_a_file_that_was_read_whatever_links_lead_there() {
    use std::os::unix::fs::symlink;
    let place = Place::with_pair();
    let tensors = model();
    write_folder(&place.path("shards"), &[&tensors[..2], &tensors[2..]]);
    let target: Vec<_> = tensors.iter().map(|tensor| tuned(tensor, 30)).collect();
    write_folder(&place.path("tuned"), &[&target[..2], &target[2..]]);
    place.ok("encode shards tuned -o sharded");
    fs::write(place.path("map.json"), r#"{"embed.weight": "embed.weight"}"#).unwrap();
    let shard = "model-00001-of-00002.safetensors";
    fs::create_dir(place.path("out")).unwrap();
    // Inputs under names that outputs have.
    fs::copy(place.path("map.json"), place.path("named.tpde-blob")).unwrap();
    fs::hard_link(place.path("map.json"), place.path("hard.tpde-index")).unwrap();
    symlink("map.json", place.path("soft.tpde-index")).unwrap();
    symlink("hard.tpde-index", place.path("soft-map.json")).unwrap();
    fs::hard_link(place.path("base.safetensors"), place.path("hard.safetensors")).unwrap();
    symlink("pair.tpde-blob", place.path("soft.safetensors")).unwrap();
    fs::hard_link(place.path("shards").join(shard), place.path("out").join(shard)).unwrap();
    let contents = |place: &Place| place.names().iter().map(|name| fs::read(place.path(name)).ok()).collect::<Vec<_>>();
    let before = contents(&place);

    let encode = "encode base.safetensors target.safetensors -f";
    for (map, pair) in [
        ("named.tpde-blob", "named"),
        ("map.json", "hard"),
        ("map.json", "soft"),
        ("soft-map.json", "hard"),
        ("soft-map.json", "soft"),
    ] {
        place.fails(&format!("{encode} --rename-map {map} -o {pair}"), USAGE, &format!("is the same as input {map}"));
    }
    for output in ["base.safetensors", "hard.safetensors"] {
        place.fails(&format!("apply base.safetensors pair -f -o {output}"), USAGE, "is the same as input base.safetensors");
    }
    place.fails("apply base.safetensors pair -f -o soft.safetensors", USAGE, "is the same as input pair.tpde-blob");
    place.fails("apply shards sharded -f -o out", USAGE, &format!("is the same as input shards/{shard}"));
    fs::remove_file(place.path("out").join(shard)).unwrap();
    symlink(place.path("shards").join(shard), place.path("out").join(shard)).unwrap();
    place.fails("apply shards sharded -f -o out", USAGE, &format!("is the same as input shards/{shard}"));
    assert!(before == contents(&place));
    place.ok(&format!("{encode} --rename-map map.json -o other"));
}

#[test]
fn what_is_no_regular_file_is_not_replaced_through_links_either() {
    let place = Place::with_pair();
    assert_eq!(place.command("mkfifo", &["pipe"]).code, 0);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, place.path(name)).unwrap();
    link("pipe", "to-pipe");
    link("/proc/self/fd/1", "stdout"); // as /dev/stdout
    link("nothing", "to-nothing");
    let before = place.names();
    for output in ["pipe", "to-pipe", "stdout", "to-nothing"] {
        place.fails(&format!("apply base.safetensors pair -o {output} -f"), SYSTEM, "not a regular file");
        assert_eq!(place.names(), before);
        let file_type = place.path(output).symlink_metadata().unwrap().file_type();
        assert!(!file_type.is_file(), "{output} was replaced");
    }
    // Of a link to a file, the link is replaced, not the file, which other links may share.
    fs::write(place.path("shared"), "theirs").unwrap();
    link("shared", "to-shared");
    place.ok("apply base.safetensors pair -o to-shared -f");
    place.assert_same("to-shared", "target.safetensors");
    assert!(!place.path("to-shared").is_symlink());
    assert_eq!(place.read("shared"), b"theirs");
}

#[test]
fn replaced_files_keep_their_modes_and_new_ones_follow_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::with_pair();
    let mode = |name: &str| place.path(name).metadata().unwrap().permissions().mode() & 0o7777;
    let run = |line: &str| {
        let run = place.command("sh", &["-c", &format!("umask 027; exec {TPDE} {line}")]);
        assert_eq!(run.code, 0, "{}", run.err);
    };
    run("apply base.safetensors pair -o out.safetensors");
    run("encode base.safetensors target.safetensors -o other");
    assert_eq!([mode("out.safetensors"), mode("other.tpde-index"), mode("other.tpde-blob")], [0o640; 3]);
    for (name, bits) in [("out.safetensors", 0o606), ("other.tpde-index", 0o600), ("other.tpde-blob", 0o444)] {
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(bits)).unwrap();
    }
    run("apply base.safetensors pair -o out.safetensors -f");
    run("encode base.safetensors target.safetensors -o other -f");
    assert_eq!([mode("out.safetensors"), mode("other.tpde-index"), mode("other.tpde-blob")], [0o606, 0o600, 0o444]);
}

#[test]
fn files_that_would_be_read_with_the_pairs_are_not_left_beside_them() {
    let place = Place::new();
    let base = model();
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 30)).collect();
    for (name, tensors) in [("base", &base), ("target", &target)] {
        write_folder(&place.path(name), &[&tensors[..2], &tensors[2..]]);
        fs::remove_file(place.path(name).join("model.safetensors.index.json")).unwrap();
    }
    place.ok("encode base target -o pair");
    place.ok("apply base pair -o out");
    let before = place.read("out/model-00001-of-00002.safetensors");
    for name in ["old.safetensors", "old.safetensors.index.json"] {
        fs::write(place.path("out").join(name), "{}").unwrap();
        place.fails("apply base pair -o out -f", DATA, name);
        fs::remove_file(place.path("out").join(name)).unwrap();
    }
    assert!(before == place.read("out/model-00001-of-00002.safetensors"));
    fs::write(place.path("out/config.json"), "theirs").unwrap();
    place.ok("apply base pair -o out -f");
    assert_eq!(place.read("out/config.json"), b"theirs");
}

#[test]
fn a_foreign_lock_is_waited_for_with_a_message() {
    use std::io::{BufRead, BufReader, Read};
    let place = Place::with_pair();
    for quiet in [false, true] {
        let lock = fs::File::open(place.0.path()).unwrap();
        lock.lock().unwrap();
        let mut command = std::process::Command::new(TPDE);
        let line = "encode base.safetensors target.safetensors -o other -f";
        command.args(line.split_whitespace()).args(quiet.then_some("-q")).current_dir(place.0.path());
        let mut child = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        if !quiet {
            let mut message = String::new();
            stderr.read_line(&mut message).unwrap();
            assert!(message.contains("is locked by another process, waiting for up to 30 s"), "{message}");
        }
        lock.unlock().unwrap();
        assert!(child.wait().unwrap().success());
        let mut rest = String::new();
        stderr.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "");
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

/// The largest number of files that the format allows, one of them the shard index.
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
fn names_may_be_as_long_as_the_file_system_allows() {
    let place = Place::with_pair();
    let stem = "n".repeat(255 - ".tpde-index".len());
    place.ok(&format!("encode base.safetensors target.safetensors -o {stem}"));
    place.ok(&format!("apply base.safetensors {stem} -o {}", "o".repeat(255)));
    place.assert_same(&"o".repeat(255), "target.safetensors");
    // One more is refused before the work.
    place.fails(&format!("encode base.safetensors target.safetensors -o {stem}n"), SYSTEM, "File name too long");
}

#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let place = Place::with_pair();
    let line = "encode base.safetensors target.safetensors -o other";
    // The process that runs the tests may ignore the signal, which its children inherit.
    for (trap, reset, is_ignored) in [("trap '' HUP", "", true), ("true", "env --default-signal", false)] {
        let script = format!(
            "{trap}; exec {reset} strace -f -qq -o log -e trace=?link,?linkat -e inject=?link,?linkat:signal=HUP:when=1 {TPDE} {line} -f"
        );
        let mut command = std::process::Command::new("sh");
        let output = match command.args(["-c", &script]).current_dir(place.0.path()).output() {
            Ok(output) if place.path("log").exists() => output,
            _ => return assert_ne!(std::env::var("TPDE_NO_SKIP").as_deref(), Ok("1"), "strace is not there"),
        };
        assert_eq!(output.status.success(), is_ignored, "{output:?}");
    }
}

#[test]
fn a_demo_whose_reader_has_gone_leaves_no_folder() {
    let place = Place::new();
    let script = format!("TMPDIR=. {TPDE} demo | true");
    place.command("bash", &["-c", &script]);
    assert!(place.names().is_empty(), "{:?}", place.names());
}

#[test]
fn a_full_disk_leaves_nothing_behind() {
    let place = Place::with_pair();
    let before = place.names();
    // Files end at 4 KiB, as on a disk that is full. A signal comes with it, ignored or not.
    for line in ["encode --no-base target.safetensors -o full", "apply base.safetensors pair -o full.safetensors"] {
        for trap in ["trap '' XFSZ", "true"] {
            let script = format!("{trap}; ulimit -f 8; exec env {TPDE} {line}");
            let run = place.command("sh", &["-c", &script]);
            assert_eq!(run.code, SYSTEM, "{trap}: {}", run.err);
            assert!(run.err.contains("cannot write"), "{}", run.err);
            assert_eq!(place.names(), before);
        }
    }
}

#[test]
fn patterns_that_are_too_large_are_refused() {
    let place = Place::with_pair();
    for pattern in [format!("{}w{}", "{a,".repeat(130), "}".repeat(130)), "*".repeat(100_000)] {
        let run = place.command(TPDE, &["apply", "base.safetensors", "pair", "-o", "out", "--tensor", &pattern]);
        assert_eq!(run.code, USAGE, "{}", run.err);
        assert!(run.err.contains("too large") && run.err.len() < 2000, "{}", run.err);
    }
}

#[test]
fn long_arguments_are_cut_in_messages_and_escaped() {
    let place = Place::with_pair();
    let long = "x".repeat(50_000);
    let bad_pattern = format!("[{long}");
    let option = format!("--{long}");
    let apply = ["apply", "base.safetensors", "pair", "-o", "out", "--tensor"];
    for arguments in [
        &[&apply[..], &[&long]].concat(),
        &[&apply[..], &[&bad_pattern]].concat(),
        &vec!["inspect", "pair", &option],
        &vec!["inspect", "pair", &long],
        &vec![&long[..]],
        &vec!["inspect", "pair", "--threads", &long],
        &vec!["encode", "a", "b", "-o", "c", "--codec", &long],
        &vec!["encode", "a", "b", "-o", "c", "--rename", &long],
        &vec!["verify", "pair", "--device", &long],
        &vec!["completions", &long],
    ] {
        let run = place.command(TPDE, &[&arguments[..], &["--json"]].concat());
        assert_eq!(run.code, USAGE, "{}", run.err);
        assert!(run.err.contains("xxx…xxx") && run.err.len() < 2000 && run.out.len() < 2000, "{} {}", run.err, run.out);
    }
    let run = place.command(TPDE, &["verify", "pair", "--device", "\u{1b}[2J"]);
    assert!(run.code == USAGE && run.err.contains("\\u{1b}[2J") && !run.err.contains('\u{1b}'), "{}", run.err);
}

#[test]
fn help_is_text_and_a_value_of_json_is_an_error_in_json() {
    let place = Place::with_pair();
    for line in ["--json --help", "inspect --json -h", "--json help inspect", "--json --version"] {
        let run = place.ok(line);
        assert!(run.out.starts_with("tpde ") || run.out.contains("Usage: tpde"), "{line}: {}", run.out);
    }
    assert!(place.ok("--help").out.contains("help and version are always text"));
    for line in ["inspect pair --json=1", "inspect --json=", "--json=true inspect pair"] {
        let run = place.tpde(line);
        let report: serde_json::Value = serde_json::from_str(&run.out).unwrap_or_else(|e| panic!("{line}: {e} {}", run.out));
        assert_eq!((run.code, &report["error"]["kind"]), (USAGE, &"usage".into()), "{line}");
    }
    let run = place.tpde("inspect -- --json --json=1");
    assert_eq!((run.code, run.out.as_str()), (USAGE, ""), "{}", run.err);
}

#[test]
fn bad_usage_ends_with_2() {
    let place = Place::with_pair();
    let lines = [
        "",
        "no-such-verb",
        "encode base.safetensors -o x",
        "encode base.safetensors target.safetensors",
        "encode --no-base base.safetensors target.safetensors -o x",
        "encode a b c -o x",
        "encode base.safetensors target.safetensors -o x --codec lzma",
        "encode base.safetensors target.safetensors -o x --layout best",
        "encode base.safetensors target.safetensors -o x --rename nothing",
        "apply pair -o x",
        "verify",
        "inspect pair --tensors --chunks",
        "inspect pair -T 100000",
        "inspect pair -q -v",
        "bench base.safetensors target.safetensors --runs 0",
        "completions tcsh",
    ];
    for line in lines {
        let run = place.tpde(line);
        assert_eq!((run.code, run.out.as_str()), (USAGE, ""), "{line}: {}", run.err);
    }
    assert_eq!(place.fails("inspect", USAGE, "required")["kind"], "usage");
}

#[test]
fn outputs_that_name_no_file_are_refused_before_the_work() {
    let place = Place::with_pair();
    fs::create_dir(place.path("folder")).unwrap();
    let before = place.names();
    for output in ["folder/", "new/", ".", "..", "folder/..", "folder/."] {
        place.fails(&format!("encode base.safetensors target.safetensors -o {output}"), USAGE, "names no pair");
        place.fails(&format!("inspect {output}"), USAGE, "names no pair");
        for only in ["", "--tensor step"] {
            place.fails(&format!("apply base.safetensors pair -o {output} {only}"), USAGE, "must name a file");
        }
    }
    place.fails("apply base.safetensors pair -o folder", USAGE, "folder/model.safetensors");
    for words in [["inspect", ""], ["verify", ""]] {
        let run = place.command(TPDE, &words);
        assert_eq!(run.code, USAGE, "{}", run.err);
    }
    assert_eq!(place.names(), before);

    // A pair of shards gives a folder.
    write_folder(&place.path("shards"), &[&model()]);
    place.ok("encode --no-base shards -o anchor");
    place.ok("apply --no-base anchor -o rebuilt/");
    place.assert_same("rebuilt/model-00001-of-00001.safetensors", "shards/model-00001-of-00001.safetensors");
}

#[test]
fn files_that_macos_leaves_in_a_folder_are_no_shards() {
    let place = Place::new();
    for name in ["index", "no-index"] {
        write_folder(&place.path(name), &[&model()]);
        fs::write(place.path(name).join("._model-00001-of-00001.safetensors"), "AppleDouble").unwrap();
        fs::write(place.path(name).join("._model.safetensors.index.json"), "AppleDouble").unwrap();
    }
    fs::remove_file(place.path("no-index/model.safetensors.index.json")).unwrap();
    for name in ["index", "no-index"] {
        place.ok(&format!("encode --no-base {name} -o {name}"));
    }
    let shard = |name: &str| place.path("index").join(name);
    for name in ["a b.safetensors", "a+b.safetensors", "é.safetensors"] {
        write_file(&shard(name), &[tensor(name, "U8", &[1], 1)]);
        fs::remove_file(shard("model.safetensors.index.json")).ok();
        let error = place.fails("encode --no-base index -o x", DATA, "rename it");
        assert!(error["message"].as_str().unwrap().contains(name), "{error}");
        fs::remove_file(shard(name)).unwrap();
    }
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
fn messages_say_what_helps() {
    let place = Place::with_pair();
    let message = |line: &str, code| place.fails(line, code, "")["message"].as_str().unwrap().to_owned();
    assert!(message("encode base.safetensors", USAGE).contains("<TARGET>"));
    assert!(message("encode base.safetensors", USAGE).contains("--output <OUT>"));
    assert!(message("", USAGE).contains("requires a subcommand"));
    assert!(message("inspec pair", USAGE).contains("inspect"));
    for line in ["man --dir base.safetensors", "demo --dir base.safetensors"] {
        let error = place.fails(line, SYSTEM, "directory");
        assert!(error["hint"].is_null() && error["message"].as_str().unwrap().contains("base.safetensors"), "{error}");
    }
    // Stacks of 2 MiB, for which there is no space.
    let run = place.command("sh", &["-c", &format!("ulimit -v 600000; exec {TPDE} -T 1024 inspect pair")]);
    assert_eq!((run.code, run.out.as_str()), (SYSTEM, ""), "{}", run.err);
    assert!(run.err.contains("cannot start threads") && run.err.contains("--threads"), "{}", run.err);
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
    for contender in bench["contenders"].as_array().unwrap() {
        assert_eq!(contender["decode_with_digests"]["all_seconds"].as_array().unwrap().len(), 2);
    }
    let encoded = place.json("encode base.safetensors target.safetensors -o again -v");
    assert_eq!((&encoded["schema"], &encoded["tensors"][0]["name"]), (&"tpde.encode/1".into(), &"embed.weight".into()));
    assert_eq!(place.json("apply base.safetensors pair -o out.safetensors")["schema"], "tpde.apply/1");
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
    // Our own colours, where they are asked for, are the only escapes.
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
fn a_device_that_is_not_there_is_said_so() {
    let place = Place::with_pair();
    for command in [
        "apply base.safetensors pair -o out.safetensors --device cuda:999",
        "verify pair --base base.safetensors --device cuda:999",
        "bench base.safetensors target.safetensors --device cuda:999",
    ] {
        place.fails(command, DEVICE, "no CUDA device");
        assert!(!place.path("out.safetensors").exists());
    }
    place.ok("apply base.safetensors pair -o out.safetensors --device cpu");
    place.fails("verify pair --device tpu", USAGE, "cpu, cuda, cuda:N");
    for command in ["apply base.safetensors pair -o other.safetensors", "verify pair", "bench base.safetensors target.safetensors"]
    {
        place.fails(&format!("{command} --trust"), USAGE, "--trust is for a device");
    }
    let needs = &place.json("inspect pair")["summary"]["device"];
    assert!(needs["payload_bytes"].as_u64() > Some(0) && needs["kernels"].is_array(), "{needs}");
}

/// What a device rebuilds is what the processor does.
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

/// The same on a driver without a device, which runs the kernels on the processor.
#[cfg(feature = "cuda")]
#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn the_stand_in_of_a_device_gives_the_same_files() {
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(3).unwrap().join("emulator");
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/emulator/build");
    let built = std::process::Command::new(script).arg(&folder).arg("driver").output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let output = std::process::Command::new(&test)
        .args(["--ignored", "--exact", "a_device_gives_the_same_files"])
        .envs([("LD_LIBRARY_PATH", folder.join("driver")), ("TPDE_STAND_IN", "late".into())])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
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

#[test]
fn help_completions_and_manual_pages_are_there() {
    let place = Place::new();
    let verbs = ["encode", "apply", "verify", "inspect", "bench", "demo", "completions", "man"];
    let all = place.ok("--help").out;
    for verb in verbs {
        assert!(all.contains(verb));
        let help = place.ok(&format!("{verb} --help")).out;
        assert!(help.contains("Usage: ") && help.contains("--json"), "{help}");
    }
    assert!(place.ok("--version").out.starts_with("tpde "));
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        assert!(place.ok(&format!("completions {shell}")).out.contains("rename-map"));
    }
    assert!(place.ok("man").out.contains(".TH tpde 1"));
    place.ok("man --dir pages");
    assert_eq!(place.path("pages").read_dir().unwrap().count(), 1 + verbs.len());
    assert!(fs::read_to_string(place.path("pages/tpde-encode.1")).unwrap().contains("rename"));
}

#[test]
fn the_demo_succeeds() {
    let place = Place::new();
    let text = place.ok("demo --dir here").out;
    assert!(text.contains("$ tpde encode ") && text.contains("success: "), "{text}");
    place.assert_same("here/rebuilt.safetensors", "here/tuned.safetensors");
    place.fails("demo --dir here", SYSTEM, "exists");
    place.ok("demo --dir=-here -q");
    assert_eq!(place.json("demo --dir here -f")["identical"], true);

    let report = place.json("demo --keep");
    let dir = Path::new(report["dir"].as_str().unwrap()).to_owned();
    assert!(dir.join("update.tpde-index").exists());
    fs::remove_dir_all(dir).unwrap();
    let report = place.json("demo");
    assert!(!Path::new(report["dir"].as_str().unwrap()).exists());
}

/// Each read of a file fails in turn, until there are no more.
#[test]
fn a_checkpoint_that_cannot_be_read_is_an_error_of_the_system() {
    let place = Place::with_pair();
    let probe = ["-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "true"];
    if !std::process::Command::new("strace").args(probe).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: strace not available or not permitted");
        assert_ne!(std::env::var("TPDE_NO_SKIP").as_deref(), Ok("1"), "TPDE_NO_SKIP is set");
        return;
    }
    let commands = [
        ("base", "verify pair --base base.safetensors"),
        ("base", "apply base.safetensors pair -o out.safetensors"),
        ("base", "encode base.safetensors target.safetensors -o other"),
        ("target", "encode base.safetensors target.safetensors -o other"),
        ("target", "verify pair --target target.safetensors"),
    ];
    for (file, command) in commands {
        let file = place.path(&format!("{file}.safetensors"));
        let mut failed = 0;
        loop {
            let inject = format!("inject=pread64:error=EIO:when={}", failed + 1);
            let mut arguments =
                vec!["-f", "-qq", "-o", "/dev/null", "-P", file.to_str().unwrap(), "-e", "trace=pread64", "-e", &inject];
            arguments.extend([TPDE, "-T", "1", "--json"]);
            arguments.extend(command.split_whitespace());
            let run = place.command("strace", &arguments);
            if run.code == 0 {
                break;
            }
            let json: serde_json::Value = serde_json::from_str(&run.out).unwrap();
            assert_eq!((run.code, json["error"]["kind"].as_str()), (SYSTEM, Some("io")), "{command} {failed}: {}", run.err);
            failed += 1;
        }
        assert!(failed > 3, "{command} reads {file:?} {failed} times");
        let _ = fs::remove_file(place.path("out.safetensors"));
        let _ = (fs::remove_file(place.path("other.tpde-index")), fs::remove_file(place.path("other.tpde-blob")));
    }
}

#[test]
fn a_sound_pair_whose_files_cannot_be_written_is_told_apart() {
    let place = Place::with_pair();
    assert_eq!(place.json("verify pair --base base.safetensors")["writable"], true);
    assert!(place.json("verify pair")["writable"].is_null());
    place.ok("encode --no-base target.safetensors -o anchor");
    assert!(place.json("verify anchor")["writable"].is_null());
    assert_eq!(place.json("verify anchor --no-base")["writable"], true);

    // The same tensors under another header, which the pair does not store.
    place.edit("base.safetensors", |bytes| bytes[9] = b' ');
    let run = place.tpde("verify pair --base base.safetensors");
    assert_eq!(run.code, DATA, "{}", run.err);
    assert!(run.out.contains("sound, not writable") && run.err.contains("base.file"), "{}{}", run.out, run.err);
    let run = place.tpde("verify pair --base base.safetensors --json");
    let report: serde_json::Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!((run.code, &report["schema"], &report["writable"]), (DATA, &"tpde.verify/1".into(), &false.into()));
    assert!(report["not_writable"].as_str().unwrap().contains("base.file"));
    assert_eq!(place.fails("apply base.safetensors pair -o out.safetensors", DATA, "base.file")["rule"], "base.file");
}

#[test]
fn a_target_is_compared_with_its_header() {
    let place = Place::with_pair();
    place.ok("verify pair --target target.safetensors");
    place.edit("target.safetensors", |bytes| bytes[9] = b' ');
    let error = place.fails("verify pair --target target.safetensors", DATA, "lone safetensors file of the target");
    assert_eq!(error["rule"], "file.content_digest");
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
