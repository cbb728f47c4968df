//! Output of `verify`.

use crate::common::forge::forge;
use crate::common::place::*;
use crate::common::*;

/// The payload was changed so that its CRC and sums stay the same: the output of `verify` must not claim that forgery was
/// excluded.
#[test]
fn verify_says_whether_it_excludes_a_forged_payload() {
    let place = Place::new();
    let [old, mut new] = [1, 2].map(|seed| tensor("w", "U32", &[1024], seed));
    write_file(&place.path("base.safetensors"), &[old]);
    write_file(&place.path("target.safetensors"), std::slice::from_ref(&new));
    place.ok("encode base.safetensors target.safetensors -o pair --codec raw --format 1.1");
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

/// From format 1.2 on, the pair digest covers the payloads, and --expect names the pair.
#[test]
fn a_forged_payload_under_an_expected_pair_digest_is_refused() {
    let place = Place::new();
    let [old, new] = [1, 2].map(|seed| tensor("w", "U32", &[1024], seed));
    write_file(&place.path("base.safetensors"), &[old]);
    write_file(&place.path("target.safetensors"), std::slice::from_ref(&new));
    for (option, rule) in [("", "header.payload_root"), ("--payload-digests", "payload.digest")] {
        place.ok(&format!("encode base.safetensors target.safetensors -o pair --codec raw -f {option}"));
        let digest = place.json("inspect pair")["summary"]["pair_digest"].as_str().unwrap().to_owned();
        let report = place.json(&format!("verify pair --expect {digest}"));
        assert_eq!((&report["payload_authenticity"], &report["payload_digests"]), (&"checked".into(), &"all".into()));
        let index = tpde::ValidatedIndex::parse(place.read("pair.tpde-index"), &tpde::Limits::default()).unwrap();
        place.edit("pair.tpde-blob", |blob| forge(&index, blob, &mut new.bytes.clone()));
        for line in ["verify pair", "verify pair --base base.safetensors", "apply base.safetensors pair -o out.safetensors"] {
            assert_eq!(place.fails(&format!("{line} --expect {digest}"), DATA, "")["rule"], rule, "{line}");
        }
    }
}

#[test]
fn another_pair_than_the_expected_one_is_refused_before_it_is_parsed() {
    let place = Place::with_pair();
    let digest = place.json("inspect pair")["summary"]["pair_digest"].as_str().unwrap().to_owned();
    let apply = "apply base.safetensors pair -o out.safetensors -f";
    for line in ["inspect pair", "verify pair", apply] {
        place.ok(&format!("{line} --expect {digest}"));
        place.ok(&format!("{line} --expect {}", digest.to_uppercase()));
        let error = place.fails(&format!("{line} --expect {}", "0".repeat(64)), DATA, "not the expected pair");
        assert_eq!((&error["kind"], &error["rule"]), (&"unexpected_pair".into(), &serde_json::Value::Null));
        for malformed in ["", "00", &digest[1..], &format!("{digest}0"), &digest.replace(&digest[..1], "g")] {
            let run = place.tpde(&format!("{line} --expect={malformed}"));
            assert_eq!(run.code, USAGE, "{malformed}");
        }
    }
    // The digest is compared before the magic is checked and before the blob is opened.
    place.edit("pair.tpde-index", |index| index[0] = 0);
    std::fs::remove_file(place.path("pair.tpde-blob")).unwrap();
    for line in ["inspect pair", "verify pair", apply] {
        assert_eq!(place.fails(&format!("{line} --expect {digest}"), DATA, "")["kind"], "unexpected_pair");
    }
    place.edit("pair.tpde-index", |index| index.truncate(31));
    assert_eq!(place.fails(&format!("inspect pair --expect {digest}"), DATA, "a file of 31 bytes")["kind"], "unexpected_pair");
}

#[test]
fn a_pair_of_format_1_1_has_no_features() {
    let place = Place::with_pair();
    assert_eq!(place.json("inspect pair")["summary"]["version"], "1.2");
    place.ok("encode base.safetensors target.safetensors -o old --format 1.1");
    assert!(place.read("old.tpde-index")[16..24] == [0; 8] && place.read("old.tpde-index")[208..252] == [0; 44]);
    assert_ne!(place.json("inspect old")["summary"]["version"], "1.2");
    let line = "encode base.safetensors target.safetensors -o other --format 1.1 --payload-digests";
    assert_eq!(place.fails(line, USAGE, "need format 1.2")["kind"], "invalid_argument");
}

#[test]
fn a_pair_without_a_base_is_rebuilt_when_it_is_verified() {
    let place = Place::with_pair();
    let error = place.fails("verify pair --no-base", DATA, "found no base");
    assert_eq!((&error["kind"], &error["rule"]), (&"invalid".into(), &"base.tensor".into()));
    let mut new = tensor("w", "U32", &[1024], 2);
    write_file(&place.path("new.safetensors"), std::slice::from_ref(&new));
    place.ok("encode --no-base new.safetensors -o new --codec raw --format 1.1");
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

/// Any checkpoint fits beside such a pair, so none may be called its base.
#[test]
fn a_base_beside_a_pair_that_needs_none_is_not_confirmed() {
    let place = Place::with_pair();
    place.ok("encode --no-base target.safetensors -o new");
    for checkpoint in ["base.safetensors", "target.safetensors"] {
        let line = format!("verify new --base {checkpoint}");
        assert_eq!(place.json(&line)["base_checked"], false);
        assert!(place.ok(&line).out.contains("base     not needed"), "{}", place.ok(&line).out);
        let applied = place.ok(&format!("apply {checkpoint} new -o out.safetensors --force")).out;
        assert!(applied.contains("no base is needed"), "{applied}");
    }
    assert_eq!(place.json("verify pair --base base.safetensors")["base_checked"], true);
}

#[test]
fn a_sound_pair_whose_files_cannot_be_written_is_told_apart() {
    let place = Place::with_pair();
    assert_eq!(place.json("verify pair --base base.safetensors")["writable"], true);
    assert!(place.json("verify pair")["writable"].is_null());
    place.ok("encode --no-base target.safetensors -o anchor");
    assert!(place.json("verify anchor")["writable"].is_null());
    assert_eq!(place.json("verify anchor --no-base")["writable"], true);

    // The same tensors under a different header. The pair does not store long headers that equal the base's.
    for name in ["base.safetensors", "target.safetensors"] {
        place.edit(name, |bytes| *bytes = with_long_header(std::mem::take(bytes)));
    }
    place.ok("encode base.safetensors target.safetensors -o pair -f");
    place.edit("base.safetensors", |bytes| bytes[9] = b' ');
    let run = place.tpde("verify pair --base base.safetensors");
    assert_eq!(run.code, DATA, "{}", run.err);
    assert!(run.out.contains("sound, not writable") && run.err.contains("base.file"), "{}{}", run.out, run.err);
    let run = place.tpde("verify pair --base base.safetensors --json");
    let report: serde_json::Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!((run.code, &report["schema"], &report["writable"]), (DATA, &"tpde.verify/1".into(), &false.into()));
    assert!(report["not_writable"].as_str().unwrap().contains("base.file"));
    assert_eq!(report["not_writable_rule"], "base.file");
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
fn split_cuts_tensors_into_parts_that_apply_puts_together() {
    let place = Place::new();
    let base = [
        tensor("a.o_proj.weight", "BF16", &[12, 40], 1),
        tensor("a.q_proj.weight", "BF16", &[30, 8], 2),
        tensor("b", "F32", &[9], 3),
    ];
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 5)).collect();
    write_file(&place.path("base.safetensors"), &base);
    write_file(&place.path("target.safetensors"), &target);
    let report = place.json("encode base.safetensors target.safetensors -o pair --split b=0:2,mistral:4");
    let rows = report["tensors"].as_array().unwrap();
    assert_eq!(rows.len(), 4 + 4 + 2);
    assert_eq!(
        (&rows[1]["shape"], &rows[1]["part"]["origin"], &rows[1]["part"]["whole"]),
        (&[12, 10].into(), &[0, 10].into(), &[12, 40].into())
    );
    assert!(place.ok("inspect pair").out.contains("12×10 at 0,10 of 12×40"));
    place.ok("verify pair --base base.safetensors --target target.safetensors");
    place.ok("apply base.safetensors pair -o out.safetensors");
    place.assert_same("out.safetensors", "target.safetensors");
    let encode = "encode base.safetensors target.safetensors -o other";
    for (rules, what) in [("gpt:2", "PATTERN=DIM:N"), ("b=1:2", "no such dimension"), ("b=0:2 --format 1.1", "need format 1.2")] {
        assert_eq!(place.tpde(&format!("{encode} --split {rules}")).code, USAGE, "{rules}");
        assert!(place.tpde(&format!("{encode} --split {rules}")).err.contains(what), "{rules}");
    }
}

/// A tensor whose name is not known has a number. In JSON, no name of a tensor can be taken for it.
#[test]
fn a_tensor_without_a_name_has_its_place_in_the_table() {
    let place = Place::new();
    for (vector, entry) in [("tensor_name_empty", 0), ("tensor_name_nul", 1), ("tensors_size_byte_short", 3)] {
        let pair = versions::folder("v1").join("invalid").join(vector);
        let error = place.fails(&format!("verify {}", pair.display()), DATA, &format!("tensor #{entry}, tensor"));
        assert!(error["entry"] == entry && error["tensor"].is_null(), "{error}");
    }
    let place = Place::with_pair();
    let error = place.fails("apply target.safetensors pair -o out.safetensors", DATA, "");
    assert!(error["entry"].is_null() && error["tensor"].is_string(), "{error}");
}
