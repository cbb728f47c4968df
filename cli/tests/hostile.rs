//! The command line on files made to harm: memory use, length of the output, hostile names.

#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
mod common;

use common::place::*;
use common::*;
use std::fs::{self, File};
use std::path::Path;
use tpde::internals;
use tpde::{BaseKind, Checkpoint, Codec, Dtype, EncodeOptions, Error, FileKind, Pair, TensorInfo};
use tpde_core::codec::Encoded;
use tpde_core::writer::{FileSpec, PairBuilder, TensorSpec};

/// Writes a pair of unchanged tensors with these names and shapes. The pair is tiny for any shapes.
fn write_pair(path: &Path, tensors: impl Iterator<Item = (String, Vec<u64>)>) {
    let mut builder = PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap();
    for (name, shape) in tensors {
        let lanes: u64 = shape.iter().product();
        builder.begin_tensor(&TensorSpec {
            name,
            base_name: None,
            dtype: Dtype::U8,
            shape,
            part: None,
            base_kind: BaseKind::Same,
            base_param: 0,
            derived: None,
            codec: Codec::Raw,
            tables: None,
            chunk_lanes_log2: 12,
        });
        for _ in 0..lanes.div_ceil(4096) {
            builder.chunk(&[], Encoded { uncompressed_size: 0, num_deltas: 0 }, 0, 0).unwrap();
        }
        builder.end_tensor(Some(blake3::hash(b"")), blake3::hash(b""));
    }
    let pair = Pair::try_from(builder.finish().unwrap()).unwrap();
    fs::write(path.with_extension("tpde-index"), pair.index().as_bytes()).unwrap();
    fs::write(path.with_extension("tpde-blob"), pair.blob()).unwrap();
}

/// Runs `tpde` with limited address space, in megabytes. Its output goes to a file; returns the run and the length of that file.
fn within(place: &Place, megabytes: u64, line: &str) -> (Run, u64) {
    let script = format!("ulimit -v {}; exec {TPDE} -T 1 {line} > printed", megabytes << 10);
    let run = place.command("sh", &["-c", &script]);
    (run, place.path("printed").metadata().unwrap().len())
}

#[test]
fn inspect_prints_more_than_fits_in_memory() {
    let place = Place::new();
    write_pair(&place.path("tensors"), (0..200_000).map(|i| (format!("{i:06}"), vec![0])));
    write_pair(&place.path("chunks"), [("x".repeat(4096), vec![100_000 << 12])].into_iter());
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

/// The memory bound stated in the help of `inspect`.
#[test]
fn inspect_takes_no_more_memory_than_its_help_says() {
    let place = Place::new();
    let (tensors, rank) = (1_000_000, 25);
    write_pair(&place.path("large"), (0..tensors).map(|i| (format!("{i:07}"), [&[0; 1][..], &[1; 24]].concat())));
    let index = place.path("large.tpde-index").metadata().unwrap().len();
    let expanded = tensors * (40 + 8 * rank + 7);
    assert!((32_000_000..40_000_000).contains(&index) && expanded > 240_000_000, "{index} {expanded}");
    let program = 64 << 20;
    let bound = index + 2 * expanded + 250 * tensors + program;
    for line in ["inspect large", "inspect large --json"] {
        let (run, printed) = within(&place, bound >> 20, line);
        assert_eq!((run.code, run.err.as_str()), (0, ""), "{line}");
        assert!(printed > tensors * 100, "{line}: {printed} bytes");
    }
    let help = place.ok("inspect --help").out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("the index, twice its expanded sections, and 250 bytes per tensor"), "{help}");
}

#[test]
fn a_store_without_memory_gives_errors_and_keeps_what_it_has() {
    let place = Place::with_pair();
    // So large that the encoder needs more than the smallest limit leaves.
    write_file(&place.path("large.safetensors"), &[tensor("random", "U8", &[40 << 20], 0)]);
    place.ok("store init versions");
    place.ok("store put versions base.safetensors");
    let mut put = Vec::new();
    for megabytes in [80, 100, 110, 120, 130, 140, 160, 240, 320, 400, 1500] {
        let (run, _) = within(&place, megabytes, "store put --memory 96 --whole versions large.safetensors");
        let (get, _) = within(&place, megabytes, &format!("store get --memory 96 versions main@0 -o {megabytes}.safetensors"));
        for run in [&run, &get] {
            let is_refused = run.code == SYSTEM && run.err.contains("out of memory");
            assert!(run.code == 0 || is_refused, "{megabytes} MB: {} {}", run.code, run.err);
        }
        put.push(run.code == 0);
        if get.code == 0 {
            place.assert_same(&format!("{megabytes}.safetensors"), "base.safetensors");
        }
    }
    assert!(!put[0] && put[10], "{put:?}");
    let versions = put.iter().filter(|is_put| **is_put).count() + 1;
    assert_eq!(place.json("store verify versions")["versions"], versions);
    place.fails("store gc --memory much versions", USAGE, "much");
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

    fs::write(place.path("header.safetensors"), 100_000_001u64.to_le_bytes()).unwrap();
    enlarge("header.safetensors", 200_000_000);
    place.fails("encode --no-base header.safetensors -o x", DATA, "than 100000000 bytes");

    // Sizes far above the limits and above memory: of an index, a shard index, and a rename map.
    enlarge("pair.tpde-index", 1 << 40);
    assert_eq!(refused("inspect pair").0, "limit");
    write_folder(&place.path("folder"), &[&model()]);
    enlarge("folder/model.safetensors.index.json", 1 << 40);
    assert_eq!(refused("encode --no-base folder -o x").0, "limit");
    File::create(place.path("map.json")).unwrap();
    enlarge("map.json", 1 << 40);
    assert_eq!(refused("encode base.safetensors target.safetensors -o x --rename-map map.json").0, "limit");
}

/// Writes a safetensors file with this header and no data.
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

/// A checkpoint that panics when a tensor is read.
struct Unread(Vec<TensorInfo>);

impl Checkpoint for Unread {
    fn tensors(&self) -> &[TensorInfo] {
        &self.0
    }

    fn read(&self, _: usize, _: u64, _: &mut [u8]) -> tpde::Result<()> {
        panic!("read before the names were checked")
    }
}

fn encode_unread(tensors: &[(&str, usize)], files: &[&str]) -> Error {
    let infos = tensors.iter().map(|&(name, rank)| TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![1; rank] });
    let file = |name: &&str| FileSpec {
        name: (*name).into(),
        kind: FileKind::Safetensors,
        content_size: 8,
        content_digest: blake3::hash(&[0; 8]).as_bytes()[..16].try_into().unwrap(),
        content: vec![0; 8],
    };
    let builder = PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap();
    let (target, files) = (Unread(infos.collect()), files.iter().map(file).collect());
    internals::encode(None, &target, files, &EncodeOptions::default(), builder, &|_| {}).map(|_| ()).unwrap_err()
}

#[test]
fn names_that_a_pair_cannot_hold_are_refused_before_anything_is_read() {
    let long = "n".repeat(4097);
    for (name, rank, rule) in [("", 1, "name"), ("a\0b", 1, "name"), (&long, 1, "name"), ("r", 33, "rank"), ("r", 1 << 16, "rank")]
    {
        let Error::Invalid(invalid) = encode_unread(&[("0", 1), (name, rank)], &[]) else { panic!("{name}: another error") };
        assert_eq!((invalid.rule.id(), invalid.at.tensor.as_deref()), (&*format!("tensor.{rule}"), Some(name)));
    }
    for (files, shown) in [
        (["M.safetensors", "m.safetensors"], "m.safetensors beside M.safetensors"),
        (["a.safetensors", "b c.safetensors"], "b c.safetensors"),
        (["b.safetensors", "a.safetensors"], "a.safetensors after b.safetensors"),
    ] {
        let error = encode_unread(&[("0", 1)], &files);
        assert_eq!(error.rule().map(|rule| rule.id()), Some("file.name"));
        assert!(error.to_string().contains(shown), "{error}");
    }
    let error = encode_unread(&vec![(&long[1..], 0); 70_000], &[]);
    assert!(matches!(error, Error::Limit { what: "size of the tensor table", .. }), "{error}");
}

#[test]
fn shards_whose_names_differ_in_case_alone_are_named() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    write_file(&place.path("folder/M.safetensors"), &[tensor("a", "U8", &[1], 1)]);
    write_file(&place.path("folder/m.safetensors"), &[tensor("b", "U8", &[1], 1)]);
    let error = place.fails("encode --no-base folder -o x", DATA, "m.safetensors beside M.safetensors");
    assert_eq!(error["rule"], "file.name");
    assert_eq!(place.names(), ["folder"]);
}

#[test]
fn paths_that_are_not_utf8_are_valid_json() {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;
    let place = Place::with_pair();
    let named = |ending: &str| OsString::from_vec([b"\xffpair", ending.as_bytes()].concat());
    for ending in [".tpde-index", ".tpde-blob"] {
        fs::copy(place.path(&format!("pair{ending}")), place.0.path().join(named(ending))).unwrap();
    }
    let json = |words: &[&str], last: OsString| -> serde_json::Value {
        let mut command = std::process::Command::new(TPDE);
        let output = command.args(words).arg(last).arg("--json").current_dir(place.0.path()).output().unwrap();
        assert!(output.stdout.is_ascii());
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let bytes = "ff70616972";
    let is_named = |value: &serde_json::Value| value["bytes"] == bytes && value["shown"].as_str().unwrap().contains("pair");
    assert!(is_named(&json(&["verify"], named(""))["pair"]));
    assert!(is_named(&json(&["apply", "base.safetensors", "pair", "-o"], named(""))["output"]));
    let index = &json(&["inspect"], named(""))["summary"]["index"];
    assert_eq!(index["bytes"], format!("{bytes}2e747064652d696e646578"));
    let words = ["encode", "base.safetensors", "target.safetensors", "-f", "-o"];
    assert!(json(&words, named(""))["index"].is_object());
    let error = json(&["inspect"], OsString::from_vec(b"\xffnone".to_vec()));
    assert!(error["error"]["message"].as_str().unwrap().contains('\u{fffd}'), "{error}");
}

#[test]
fn benchmarks_that_do_not_fit_in_memory_are_refused() {
    let place = Place::new();
    write_file(&place.path("large.safetensors"), &[tensor("w", "U8", &[4 << 20], 1)]);
    let error = place.fails("bench large.safetensors large.safetensors --repeat 10000", SYSTEM, "of memory");
    assert_eq!(error["kind"], "io");
    write_header(
        &place.path("odd.safetensors"),
        r#"{"w": {"dtype": "U8", "shape": [4611686018427387904, 0], "data_offsets": [0, 0]}}"#,
    );
    place.fails("bench odd.safetensors odd.safetensors --repeat 10000", USAGE, "repeated 10000 times");
    let (run, _) = within(&place, 300, "bench large.safetensors large.safetensors --repeat 16 --runs 1");
    assert_eq!(run.code, SYSTEM, "{}", run.err);
}
