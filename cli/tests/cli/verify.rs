//! Output of `verify`.

use crate::common::forge::forge;
use crate::common::place::*;
use crate::common::*;

/// The payload was changed so that its CRC and sums stay the same: the output of `verify` must not claim that forgery was excluded.
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
    assert_eq!(place.fails("verify pair --no-base", USAGE, "needs a base")["kind"], "invalid_argument");
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

    // The same tensors under a different header. The pair does not store headers that equal the base's.
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
