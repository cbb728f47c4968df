//! Chains of pairs: applied and verified in one pass, folded, reverted.

use crate::common::place::*;
use crate::common::*;

/// Versions `v0` to `v3` of the model, and the pairs `p1` to `p3` between them.
fn versions() -> Place {
    let place = Place::new();
    let mut version = model();
    for i in 0..4 {
        write_file(&place.path(&format!("v{i}.safetensors")), &version);
        version = version.iter().map(|tensor| tuned(tensor, 7 + i)).collect();
    }
    for i in 1..4 {
        place.ok(&format!("encode v{}.safetensors v{i}.safetensors -o p{i}", i - 1));
    }
    place
}

#[test]
fn a_chain_is_applied_and_verified_in_one_pass() {
    let place = versions();
    let report = place.json("apply v0.safetensors p1 p2.tpde-blob p3 -o out.safetensors");
    assert_eq!((&report["pairs"], &report["digests_checked"]), (&3.into(), &true.into()));
    place.assert_same("out.safetensors", "v3.safetensors");
    let text = place.ok("apply v0.safetensors p1 p2 -o out.safetensors --force").out;
    assert!(text.contains("target has the digests of the last pair"), "{text}");
    place.assert_same("out.safetensors", "v2.safetensors");
    place.ok("apply v0.safetensors p1 p2 -o some.safetensors --tensor embed*");

    let report = place.json("verify p1 p2 p3 --base v0.safetensors --target v3.safetensors");
    assert_eq!((&report["pairs"], &report["pair"], &report["target_checked"]), (&3.into(), &"p3".into(), &true.into()));
    place.fails("verify p1 p2 p3 --base v0.safetensors --target v2.safetensors", DATA, "tensor.target_digest");
    place.fails("verify p1 p2", USAGE, "needs --base or --no-base");

    // A chain may begin with a pair that needs no base.
    place.ok("encode --no-base v0.safetensors -o p0");
    place.ok("apply --no-base p0 p1 p2 p3 -o anchored.safetensors");
    place.assert_same("anchored.safetensors", "v3.safetensors");
    place.json("verify p0 p1 --no-base --target v1.safetensors");
    place.ok("fold --no-base p0 p1 -o whole");
    place.ok("encode --no-base v1.safetensors -o direct");
    place.assert_same("whole.tpde-blob", "direct.tpde-blob");
    place.assert_same("whole.tpde-index", "direct.tpde-index");

    // The expected digest is that of the last pair.
    let digest = |pair: &str| place.json(&format!("inspect {pair}"))["summary"]["pair_digest"].as_str().unwrap().to_owned();
    for line in
        ["apply v0.safetensors p1 p2 -o x.safetensors", "verify p1 p2 --base v0.safetensors", "fold v0.safetensors p1 p2 -o x"]
    {
        let error = place.fails(&format!("{line} --expect {}", digest("p1")), DATA, "not the expected pair");
        assert_eq!(error["kind"], "unexpected_pair");
        place.ok(&format!("{line} --expect {}", digest("p2")));
    }
    place.fails("apply v0.safetensors p1 p2 -o y.safetensors --device cuda", USAGE, "applied on the processor");
    place.fails("verify p1 p2 --base v0.safetensors --device cuda", USAGE, "applied on the processor");
}

#[test]
fn folded_and_reverted_pairs_are_those_of_the_checkpoints() {
    let place = versions();
    for options in ["", "--codec zstd --chunk-lanes 4096", "--split *weight=0:2 --payload-digests", "--format 1.1 --favor size"] {
        let report = place.json(&format!("fold v0.safetensors p1 p2 p3 -o folded --force {options}"));
        let direct = place.json(&format!("encode v0.safetensors v3.safetensors -o direct --force {options}"));
        for field in ["ratio", "changed", "removed", "added", "tensors", "has_base"] {
            assert_eq!(report[field], direct[field], "{field}");
        }
        place.json(&format!("revert v0.safetensors p1 p2 p3 -o back --force {options}"));
        place.json(&format!("encode v3.safetensors v0.safetensors -o direct_back --force {options}"));
        for ending in ["tpde-index", "tpde-blob"] {
            place.assert_same(&format!("folded.{ending}"), &format!("direct.{ending}"));
            place.assert_same(&format!("back.{ending}"), &format!("direct_back.{ending}"));
        }
    }
    place.ok("apply v3.safetensors back -o again.safetensors");
    place.assert_same("again.safetensors", "v0.safetensors");
    // Renamed tensors are followed in both directions.
    let renamed: Vec<_> = model().iter().map(|tensor| named(&tuned(tensor, 5), &format!("new.{}", tensor.name))).collect();
    write_file(&place.path("v4.safetensors"), &renamed);
    let renames: String = model().iter().map(|tensor| format!(" --rename new.{0}={0}", tensor.name)).collect();
    place.ok(&format!("encode v3.safetensors v4.safetensors -o p4{renames}"));
    let report = place.json("fold v0.safetensors p1 p2 p3 p4 -o folded --force");
    assert!(list(&report["added"]).is_empty() && list(&report["removed"]).is_empty(), "{report}");
    place.ok("apply v0.safetensors folded -o out.safetensors");
    place.assert_same("out.safetensors", "v4.safetensors");
    let text = place.ok("revert v0.safetensors p1 p2 p3 p4 -o back --force").out;
    assert!(text.contains("wrote back.tpde-index") && !text.contains("added"), "{text}");
    place.ok("apply v4.safetensors back -o again.safetensors --force");
    place.assert_same("again.safetensors", "v0.safetensors");
}

#[test]
fn a_chain_that_does_not_fit_is_refused_with_its_step() {
    let place = versions();
    let before = place.names();
    let verbs = |chain: &str| {
        [
            "apply v0.safetensors CHAIN -o x",
            "fold v0.safetensors CHAIN -o x",
            "revert v0.safetensors CHAIN -o x",
            "verify CHAIN --base v0.safetensors",
        ]
        .map(|line| line.replace("CHAIN", chain))
    };
    for (chain, step, kind) in [
        ("p1 p3", 2, "wrong_base"),
        ("p1 p2 p2 p3", 3, "already_applied"),
        ("p2 p3", 1, "wrong_base"),
        ("p1 p3 p2", 2, "wrong_base"),
    ] {
        for line in verbs(chain) {
            let error = place.fails(&line, DATA, &format!("step {step} of the chain"));
            assert_eq!((&error["step"], &error["kind"]), (&step.into(), &kind.into()), "{line}: {error}");
            let rule = if step == 1 { "chunk.base_sum" } else { "tensor.base_digest" };
            assert_eq!((error["tensor"].is_string(), &error["rule"]), (true, &rule.into()), "{error}");
            assert_eq!(error["chunk"].is_u64(), step == 1, "{error}");
            assert_eq!(error["hint"].as_str().unwrap().contains("order"), step > 1, "{error}");
        }
    }
    place.edit("p2.tpde-blob", |blob| *blob.get_mut(70).unwrap() ^= 1);
    for line in verbs("p1 p2 p3") {
        let error = place.fails(&line, DATA, "step 2 of the chain, p2: ");
        assert_eq!((&error["rule"], &error["step"]), (&"payload.crc32".into(), &2.into()), "{line}: {error}");
        assert!(error["hint"].as_str().unwrap().contains("fetch it again"), "{error}");
    }
    place.edit("p2.tpde-blob", |blob| *blob.get_mut(70).unwrap() ^= 1);
    place.edit("p3.tpde-blob", |blob| *blob.get_mut(70).unwrap() ^= 1);
    for line in verbs("p1 p2 p3") {
        let error = place.fails(&line, DATA, "step 3 of the chain, p3: ");
        assert_eq!((&error["pair"], &error["rule"]), (&"p3".into(), &"payload.crc32".into()), "{line}: {error}");
    }
    place.edit("p2.tpde-index", |index| *index.get_mut(300).unwrap() ^= 1);
    for line in verbs("p1 p2 p3") {
        let error = place.fails(&line, DATA, "step 2 of the chain, p2: index.digest");
        assert_eq!((&error["pair"], &error["step"]), (&"p2".into(), &2.into()), "{line}: {error}");
    }
    place.fails("apply v1.safetensors p2 -o x", DATA, "apply p2 to x: index.digest");
    place.fails("fold v0.safetensors p1 p2 -o x", DATA, "fold 2 pairs to x: step 2 of the chain, p2: index.digest");
    place.fails("fold v0.safetensors p1 -o p1 --force", USAGE, "is the same as input");
    place.fails("fold v0.safetensors -o x", USAGE, "required");
    place.fails("apply v0.safetensors -o x", USAGE, "required");
    assert_eq!(place.names(), before);
}
