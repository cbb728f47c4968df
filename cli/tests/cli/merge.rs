//! Merging pairs, and making a pair of some tensors of one.

use crate::common::place::*;
use crate::common::*;

/// Two pairs, `a` and `b`, of the halves of the model, from one base.
fn halves() -> Place {
    let place = Place::with_pair();
    let base = model();
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 9)).collect();
    write_file(&place.path("a.safetensors"), &target[..2]);
    write_file(&place.path("b.safetensors"), &target[2..]);
    write_file(&place.path("whole.safetensors"), &target);
    for half in ["a", "b"] {
        place.ok(&format!("encode base.safetensors {half}.safetensors -o {half}"));
    }
    place
}

#[test]
fn merged_pairs_rebuild_the_whole_target() {
    let place = halves();
    let report = place.json("merge a b.tpde-blob -o both --no-files");
    assert_eq!((&report["pairs"], &report["tensors"], &report["files"]), (&2.into(), &(model().len() as u64).into(), &0.into()));
    assert_eq!(report["blob_bytes"].as_u64().unwrap(), place.read("both.tpde-blob").len() as u64);
    assert_eq!(report["index"].as_str().unwrap(), "both.tpde-index");
    place.json("verify both --base base.safetensors --target whole.safetensors");
    let text = place.ok("merge a b -o both --no-files --force").out;
    assert!(text.contains("wrote both.tpde-index and both.tpde-blob") && text.contains("2 pairs"), "{text}");

    // The halves of the merged pair are the pairs again, apart from their files.
    let subset = place.json("subset both --tensor embed* --tensor *norm* -o part");
    let mut names: Vec<_> = model().into_iter().map(|tensor| tensor.name).collect();
    names.retain(|name| name.starts_with("embed") || name.contains("norm"));
    names.sort_unstable();
    assert!(!names.is_empty() && names.len() < model().len());
    assert_eq!(subset["tensors"], names.len());
    let inspected = place.json("inspect part --tensors");
    let mut found: Vec<_> =
        inspected["tensors"].as_array().unwrap().iter().map(|tensor| tensor["name"].as_str().unwrap()).collect();
    found.sort_unstable();
    assert_eq!(found, names);
    place.ok("apply base.safetensors part -o part.safetensors");
}

/// Name, origin and shape of the entries of a pair. The origin of a whole tensor is null.
fn entries(place: &Place, pair: &str) -> Vec<String> {
    let inspected = place.json(&format!("inspect {pair} --tensors"));
    let entry = |tensor: &serde_json::Value| {
        format!("{} {} {}", tensor["name"].as_str().unwrap(), tensor["part"]["origin"], tensor["shape"])
    };
    let mut entries: Vec<_> = inspected["tensors"].as_array().unwrap().iter().map(entry).collect();
    entries.sort_unstable();
    entries
}

#[test]
fn a_subset_has_the_parts_within_a_rectangle() {
    let place = Place::with_pair();
    place.ok("encode base.safetensors target.safetensors -o cut --split embed.weight=0:4,layers.*.weight=1:2");
    let subset = |line: &str| {
        place.ok(&format!("subset cut -o rank -f {line}"));
        entries(&place, "rank")
    };
    let half = "layers.0.weight [0,32] [64,32]";
    assert_eq!(subset("--part layers.0.weight=[:,32:64]"), [half]);
    assert_eq!(subset("--part layers.0.weight=[0:64,32:]"), [half]);
    assert_eq!(subset("--part embed.*=[24:72]"), ["embed.weight [24,0] [24,64]", "embed.weight [48,0] [24,64]"]);
    assert_eq!(subset("--part embed.*=[:24] --part embed.weight=[:48]").len(), 2);
    // A tensor has the parts within one of its rectangles, also if its name matches --tensor.
    let found = subset("--tensor *norm --tensor layers.* --part layers.*.weight=[:,:32] --part layers.1.*=[:] --part embed*=[:24]");
    let expected = [
        "embed.weight [0,0] [24,64]",
        "layers.0.norm null [64]",
        "layers.0.weight [0,0] [64,32]",
        "layers.1.norm null [64]",
        "layers.1.weight [0,0] [64,32]",
        "layers.1.weight [0,32] [64,32]",
    ];
    assert_eq!(found, expected);
    place.ok("merge rank -o again");
    assert_eq!(subset("--part layers.0.weight=[:] --tensor *norm").len(), 4);
    place.json("verify rank --base base.safetensors");

    place.fails("subset cut -o x --part layers.2.*=[:]", USAGE, "no tensor of the pair matches layers.2.*");
    let refused = |part: &str, message: &str| _ = place.fails(&format!("subset cut -o x --part {part}"), USAGE, message);
    refused("embed.weight=[0:25]", "[0:25, 0:64] of tensor embed.weight of [96, 64]: only some elements of [24:48, 0:64], which");
    refused("embed.weight=[0:24,0:63]", "only some elements of [0:24, 0:64], which the pair stores as one");
    refused("layers.0.norm=[0:32]", "only some elements of [0:64], which the pair stores as one");
    refused("embed.weight=[24:97]", "[24:97, 0:64] of tensor embed.weight of [96, 64]: an end beyond the tensor");
    refused("embed.weight=[97:]", "an extent of 0");
    refused("embed.weight=[0:24,8:4]", "range 8:4 starts after its end");
    refused("embed.weight=[:,:,:]", "tensor embed.weight of [96, 64] has no 3 dimensions");
    refused("step=[:]", "tensor step of [] has no 1 dimensions");
    place.ok("subset cut -o half -f --part embed.weight=[:48]");
    place.fails("subset half -o x --part embed.weight=[48:]", USAGE, "no part of the pair is within [48:96, 0:64] of tensor embed");
    assert!(!place.path("x.tpde-index").exists());
}

#[test]
fn what_cannot_be_merged_is_refused_with_a_hint() {
    let place = halves();
    let hint = |line: &str, code: i32, message: &str, hint: &str| {
        let error = place.fails(line, code, message);
        assert!(error["hint"].as_str().unwrap_or_default().contains(hint), "{error}");
        error
    };
    let error = hint("merge a b -o x", DATA, "the files differ: a lone safetensors file", "--no-files");
    assert_eq!((&error["kind"], &error["tensor"]), (&"not_mergeable".into(), &serde_json::Value::Null));
    assert!(error["message"].as_str().unwrap().contains("in a, ") && error["message"].as_str().unwrap().ends_with("in b"));
    let error = hint("merge a a -o x --no-files", DATA, "is in two pairs", "subset makes a pair without the tensor");
    assert_eq!(error["tensor"], model()[0].name.as_str());
    hint("merge a b -o a --no-files -f", USAGE, "is the same as input", "");
    hint("merge a b -o pair --no-files", SYSTEM, "exists", "--force");
    place.fails("subset a --tensor nothing* -o x", USAGE, "no tensor of the pair matches nothing*");
    place.fails("subset a --tensor * -o x --expect 00", USAGE, "64 hexadecimal digits");
    place.fails(&format!("subset a --tensor * -o x --expect {}", "00".repeat(32)), DATA, "digest");
    place.edit("b.tpde-blob", |blob| *blob.get_mut(70).unwrap() ^= 1);
    let error = place.fails("merge a b -o x --no-files", DATA, "payload.crc32");
    assert_eq!((&error["kind"], &error["pair"]), (&"invalid".into(), &"b".into()));
    place.edit("a.tpde-index", |index| *index.last_mut().unwrap() ^= 1);
    place.fails("merge b a -o x --no-files", DATA, "open a: index.digest");
    assert!(!place.path("x.tpde-index").exists() && !place.path("x.tpde-blob").exists());
}
