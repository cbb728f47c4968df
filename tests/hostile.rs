//! The command line given files that were made to harm: memory, the length of what is printed, names.

#![cfg(feature = "cli")]

#[allow(dead_code, reason = "other tests use more of it")]
mod common;

use common::place::*;
use common::*;
use std::fs::{self, File};
use std::path::Path;
use tpde::codec::Encoded;
use tpde::format::BaseKind;
use tpde::writer::{PairBuilder, TensorSpec};
use tpde::{Codec, Dtype};

/// Writes a pair of tensors of these names and numbers of lanes, none of which changes: hardly any bytes, for any shapes.
fn write_pair(path: &Path, tensors: impl Iterator<Item = (String, u64)>) {
    let mut builder = PairBuilder::new(Vec::new(), "memory".into()).unwrap();
    for (name, lanes) in tensors {
        builder.begin_tensor(&TensorSpec {
            name,
            base_name: None,
            dtype: Dtype::U8,
            shape: vec![lanes],
            base_kind: BaseKind::Same,
            base_param: 0,
            codec: Codec::Raw,
            tables: None,
            chunk_lanes_log2: 12,
        });
        for _ in 0..lanes.div_ceil(4096) {
            builder.chunk(&[], Encoded { uncompressed_size: 0, num_deltas: 0 }, 0, 0).unwrap();
        }
        builder.end_tensor(Some(blake3::hash(b"")), blake3::hash(b""));
    }
    let pair = builder.finish().unwrap().into_pair().unwrap();
    fs::write(path.with_extension("tpde-index"), pair.index().as_bytes()).unwrap();
    fs::write(path.with_extension("tpde-blob"), pair.blob()).unwrap();
}

/// Runs `tpde` with so many megabytes of address space; what it prints goes to a file, whose length comes back.
fn within(place: &Place, megabytes: u64, line: &str) -> (Run, u64) {
    let script = format!("ulimit -v {}; exec {TPDE} -T 1 {line} > printed", megabytes << 10);
    let run = place.command("sh", &["-c", &script]);
    (run, place.path("printed").metadata().unwrap().len())
}

#[test]
fn inspect_prints_more_than_fits_in_memory() {
    let place = Place::new();
    write_pair(&place.path("tensors"), (0..200_000).map(|i| (format!("{i:06}"), 0)));
    write_pair(&place.path("chunks"), [("x".repeat(4096), 100_000 << 12)].into_iter());
    for (line, least) in [
        ("inspect tensors", 200_000 * 40),
        ("inspect tensors --json", 200_000 * 100),
        ("inspect chunks --chunks", 100_000 * 200),
        ("inspect chunks --chunks --json", 100_000 * 4096),
    ] {
        let (run, printed) = within(&place, 300, line);
        assert_eq!((run.code, run.err.as_str()), (0, ""), "{line}");
        assert!(printed > least, "{line}: {printed} bytes");
    }
    let printed = place.ok("inspect chunks --chunks").out;
    assert!(printed.lines().all(|line| line.chars().count() < 320), "names are cut in tables");
}

#[test]
fn large_files_that_are_no_index_are_refused_before_they_are_read() {
    let place = Place::with_pair();
    let enlarge = |name: &str, size: u64| File::options().write(true).open(place.path(name)).unwrap().set_len(size).unwrap();
    let refused = |line: &str| {
        let (run, _) = within(&place, 300, &format!("--json {line}"));
        assert_eq!(run.code, DATA, "{line}: {}", run.err);
        let error: serde_json::Value = serde_json::from_slice(&place.read("printed")).unwrap();
        (error["error"]["kind"].as_str().unwrap().to_owned(), error["error"]["rule"].clone())
    };
    File::create(place.path("zeros.tpde-index")).unwrap();
    enlarge("zeros.tpde-index", 1 << 30);
    assert_eq!(refused("inspect zeros"), ("invalid".into(), "header.magic".into()));
    enlarge("pair.tpde-index", 1 << 30);
    assert_eq!(refused("inspect pair"), ("invalid".into(), "header.index_size".into()));

    // Above the limits, and much more than memory: of an index, a shard index, and a map of names.
    enlarge("pair.tpde-index", 1 << 40);
    assert_eq!(refused("inspect pair").0, "limit");
    write_folder(&place.path("folder"), &[&model()]);
    enlarge("folder/model.safetensors.index.json", 1 << 40);
    assert_eq!(refused("encode --no-base folder -o x").0, "limit");
    File::create(place.path("map.json")).unwrap();
    enlarge("map.json", 1 << 40);
    assert_eq!(refused("encode base.safetensors target.safetensors -o x --rename-map map.json").0, "limit");
}

/// A safetensors file with this header and no data.
fn write_header(path: &Path, json: &str) {
    fs::write(path, [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()).unwrap();
}

#[test]
fn messages_are_short_whatever_a_file_holds() {
    let place = Place::new();
    let long = "\\u001b[31m".repeat(300_000);
    let dims = "1,".repeat(1_000_000) + "0";
    for header in [
        format!(r#"{{"a": {{"dtype": "{long}", "shape": [], "data_offsets": [0, 0]}}}}"#),
        format!(r#"{{"{long}": {{"dtype": "U8", "shape": [], "data_offsets": [0, 0]}}}}"#),
        format!(r#"{{"a": {{"dtype": "U8", "shape": [{dims}], "data_offsets": [0, 0]}}}}"#),
        format!(r#"{{"__metadata__": "{long}"}}"#),
        format!(r#"{{"a": {{"{long}": 1}}}}"#),
    ] {
        write_header(&place.path("file.safetensors"), &header);
        let error = place.fails("encode --no-base file.safetensors -o x", DATA, "");
        let message = error["message"].as_str().unwrap();
        assert!(message.chars().count() < 2000 && !message.contains('\u{1b}'), "{message}");
    }
}
