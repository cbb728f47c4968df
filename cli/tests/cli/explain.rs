//! `tpde inspect --explain`.

use crate::common::place::*;
use crate::common::*;
use serde_json::Value;
use std::fs;

/// Sum of all numbers in an object.
fn sum(object: &Value) -> u64 {
    object.as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum()
}

/// The tensor with this name.
fn of<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == name).unwrap()
}

#[test]
fn what_the_bytes_are_for_adds_up_to_the_files() {
    let place = Place::with_pair();
    place.ok("encode --no-base target.safetensors -o whole");
    for line in ["pair", "pair --base base.safetensors", "whole --no-base", "whole", "pair --tensors"] {
        let report = place.json(&format!("inspect --explain {line}"));
        let pair = line.split(' ').next().unwrap();
        let size = |ending: &str| place.read(&format!("{pair}.tpde-{ending}")).len() as u64;
        let bytes = &report["bytes"];
        assert_eq!(sum(&bytes["index"]), size("index"), "{line}");
        assert_eq!(bytes["blob_header"].as_u64().unwrap() + sum(&bytes["payloads"]), size("blob"), "{line}");
        for tensor in report["tensors"].as_array().unwrap() {
            assert_eq!(sum(&tensor["parts"]), tensor["payload_bytes"].as_u64().unwrap(), "{line}");
        }
        assert_eq!(report["summary"].is_null(), line.contains("--tensors"));
    }
}

#[test]
fn text_and_json_of_an_explanation_say_the_same() {
    let place = Place::with_pair();
    let line = "inspect pair --explain --base base.safetensors";
    let (text, report) = (place.ok(line).out, place.json(line));
    for heading in ["what the bytes are for", "bits per change", "taken", "why"] {
        assert!(text.contains(heading), "{text}");
    }
    let tensor = of(&report, "embed.weight");
    assert_eq!(tensor["bits_per_change"], 8.0 * tensor["payload_bytes"].as_f64().unwrap() / tensor["changed"].as_f64().unwrap());
    let ways = tensor["ways"].as_array().unwrap();
    let taken: Vec<_> = ways.iter().filter(|way| way["taken"] == true).collect();
    assert_eq!((ways.len(), taken.len()), (6, 1));
    assert_eq!((&taken[0]["codec"], &taken[0]["payload_bytes"]), (&tensor["codec"], &tensor["payload_bytes"]));
    // The text row of a tensor lists the size of each encoding, with the base and without it.
    let row = text.lines().rfind(|line| line.contains("embed.weight")).unwrap();
    let cells: Vec<_> = row.split_whitespace().collect();
    for way in ways {
        let bytes = way["payload_bytes"].as_u64().unwrap() + way["table_bytes"].as_u64().unwrap();
        let mark = if way["estimated"] == true { "~" } else { "" };
        assert!(cells.iter().any(|cell| cell.replace(',', "") == format!("{mark}{bytes}")), "{way} in {row}");
    }
}

#[test]
fn reasons_are_given_where_they_are_known() {
    let place = Place::with_pair();
    let base = model();
    let mut target = base.clone();
    target[1] = tuned(&base[1], 20);
    target[3].bytes.fill(0);
    target.push(tensor("empty", "F32", &[0, 3], 1));
    target.push(tensor("new", "F32", &[16], 2));
    target.push(Tensor { bytes: vec![0; 64], ..tensor("zeros", "F32", &[16], 2) });
    write_file(&place.path("next.safetensors"), &target);
    place.ok("encode base.safetensors next.safetensors -o next");
    let alone = place.json("inspect next --explain");
    let with_base = place.json("inspect next --explain --base base.safetensors");
    for (name, known, compared) in [
        ("embed.weight", "unchanged: ", "unchanged: "),
        ("empty", "empty: ", "empty: "),
        ("zeros", "all zero: ", "all zero: "),
        ("layers.1.weight", "all zero: ", "all zero: "),
        ("new", "without a base: ", "the smallest of all ways"),
        ("layers.0.weight", "", "the smallest of all ways"),
    ] {
        let [why, found] = [&alone, &with_base].map(|report| of(report, name)["why"].as_str().unwrap_or("").to_owned());
        assert!(why.starts_with(known) && why.is_empty() == known.is_empty(), "{name}: {why}");
        assert!(found.starts_with(compared), "{name}: {found}");
    }
    assert!(place.ok("inspect next --explain").out.contains("not known from the pair alone"));

    // The pair was encoded with a named codec that is not the smallest.
    place.ok("encode base.safetensors next.safetensors -o named --codec raw");
    let named = place.json("inspect named --explain --base base.safetensors");
    let why = of(&named, "layers.1.weight")["why"].as_str().unwrap().to_owned();
    assert!(why.starts_with("not the smallest way: ") && why.contains("--codec"), "{why}");
}

#[test]
fn ways_are_compared_with_what_the_pair_was_encoded_to_favor() {
    let place = Place::new();
    let base = tensor("w", "BF16", &[200, 1000], 1);
    write_file(&place.path("base.safetensors"), std::slice::from_ref(&base));
    write_file(&place.path("target.safetensors"), &[tuned(&base, 40)]);
    // The reported size for codec conditioned is the size of a pair encoded with it.
    place.ok("encode base.safetensors target.safetensors -o raw --codec raw");
    let mut sizes = Vec::new();
    for favor in ["ratio", "speed"] {
        let line = format!("encode base.safetensors target.safetensors -o named -f --codec conditioned --favor {favor}");
        let bytes = place.json(&line)["tensors"][0]["payload_bytes"].as_u64().unwrap();
        let report = place.json(&format!("inspect raw --explain --base base.safetensors --favor {favor}"));
        let ways = report["tensors"][0]["ways"].as_array().unwrap();
        let way = ways.iter().find(|way| way["codec"] == "conditioned" && way["from_base"] == true).unwrap();
        assert_eq!((&way["estimated"], &way["payload_bytes"]), (&false.into(), &bytes.into()), "{favor}");
        sizes.push(bytes);
    }
    assert_ne!(sizes[0], sizes[1]);
}

#[test]
fn a_pair_that_cannot_be_explained_is_an_error_that_says_where() {
    let place = Place::with_pair();
    let size = place.read("pair.tpde-blob").len();
    place.edit("pair.tpde-blob", |blob| blob[size / 2] ^= 1);
    place.ok("inspect pair");
    for line in ["inspect pair --explain", "inspect pair --explain --base base.safetensors"] {
        let error = place.fails(line, DATA, "tensor ");
        assert!(error["chunk"].is_number() && error["tensor"].is_string(), "{error}");
        assert_eq!(error["rule"], "payload.crc32");
    }
    place.ok("encode base.safetensors target.safetensors -o pair -f");
    place.fails("inspect pair --explain --base target.safetensors", DATA, "already applied");
    place.fails("inspect pair --explain --no-base", DATA, "no base, or one without tensors");
    place.fails("inspect pair --explain --base nothing.safetensors", SYSTEM, "nothing.safetensors");
    fs::remove_file(place.path("pair.tpde-blob")).unwrap();
    place.fails("inspect pair --explain", SYSTEM, "pair.tpde-blob");
}
