//! Inputs that are damaged, missing or of the wrong kind.

use crate::common::place::*;
use crate::common::*;
use std::fs;

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
    assert_eq!(place.fails("apply fewer.safetensors pair -o out.safetensors", DATA, "embed.weight")["rule"], "base.tensor");
    // A long header that is the base's too is not stored.
    for name in ["base", "target"] {
        fs::write(place.path(&format!("long-{name}")), with_long_header(place.read(&format!("{name}.safetensors")))).unwrap();
    }
    place.ok("encode long-base long-target -o long");
    let error = place.fails("apply base.safetensors long -o out.safetensors", DATA, "safetensors file of the base");
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

/// Makes each read of a file fail, one per run, until a run has no more reads.
#[test]
fn a_checkpoint_that_cannot_be_read_is_an_error_of_the_system() {
    let place = Place::with_pair();
    let probe = std::process::Command::new("strace").args(["-qq", "-e", "inject=fsync:error=EIO", "true"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
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
            let mut arguments = vec!["-f", "-qq", "-o", "log", "-P", file.to_str().unwrap(), "-e", "trace=pread64", "-e", &inject];
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

/// Makes a folder of two shards with a shard index.
fn folder() -> Place {
    let place = Place::with_pair();
    write_folder(&place.path("shards"), &[&model()[..2], &model()[2..]]);
    place
}

#[test]
fn a_folder_that_programs_read_in_two_ways_is_not_encoded() {
    let place = folder();
    for name in ["model", "diffusion_pytorch_model", "other"] {
        fs::rename(place.path("shards/model.safetensors.index.json"), place.path("index")).unwrap();
        fs::rename(place.path("index"), place.path(&format!("shards/{name}.safetensors.index.json"))).unwrap();
        let whole = format!("{name}.safetensors");
        fs::copy(place.path("target.safetensors"), place.path("shards").join(&whole)).unwrap();
        for line in ["encode base.safetensors shards -o x", "encode shards target.safetensors -o x", "encode --no-base shards -o x"]
        {
            assert_eq!(place.fails(line, DATA, &format!("{whole}, which it does not name"))["kind"], "bad_checkpoint");
        }
        place.fails("store put st shards", DATA, "store");
        place.ok("store init st");
        place.fails("store put st shards", DATA, &whole);
        fs::remove_dir_all(place.path("st")).unwrap();
        // Either of the two may be given.
        place.ok(&format!("encode base.safetensors shards/{whole} -o a"));
        place.ok(&format!("encode base.safetensors shards/{name}.safetensors.index.json -o b"));
        place.ok("apply base.safetensors a -o a.safetensors");
        place.assert_same("a.safetensors", "target.safetensors");
        place.ok("apply base.safetensors b -o rebuilt");
        place.assert_same("rebuilt/model-00001-of-00002.safetensors", "shards/model-00001-of-00002.safetensors");
        fs::remove_dir_all(place.path("rebuilt")).unwrap();
        for name in ["a.safetensors", "a.tpde-index", "a.tpde-blob", "b.tpde-index", "b.tpde-blob", &format!("shards/{whole}")] {
            fs::remove_file(place.path(name)).unwrap();
        }
        fs::rename(place.path(&format!("shards/{name}.safetensors.index.json")), place.path("shards/model.safetensors.index.json"))
            .unwrap();
    }
}

#[test]
fn a_shard_index_in_place_of_its_folder() {
    let place = folder();
    let index = place.read("shards/model.safetensors.index.json");
    fs::write(place.path("shards/consolidated.safetensors.index.json"), &index).unwrap();
    place.fails("encode base.safetensors shards -o x", DATA, "two shard indexes");
    place.ok("encode shards/model.safetensors.index.json target.safetensors -o x");
    place.ok("apply shards/model.safetensors.index.json x -o x.safetensors");
    place.assert_same("x.safetensors", "target.safetensors");
    place.fails("apply shards/model.safetensors.index.json x -o shards/x.safetensors", USAGE, "is inside input");
    place.fails("encode --no-base missing/model.safetensors.index.json -o y", SYSTEM, "missing");
}

#[test]
fn folders_that_are_no_checkpoint_are_refused_with_what_to_do() {
    let place = folder();
    let map = |names: &[(&str, &str)]| {
        let map: serde_json::Map<_, _> = names.iter().map(|(tensor, file)| ((*tensor).to_owned(), (*file).into())).collect();
        serde_json::to_vec(&serde_json::json!({ "weight_map": map })).unwrap()
    };
    let make = |folder: &str, files: &[(&str, &[u8])]| {
        for (name, content) in files {
            let path = place.path(folder).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
    };
    let (a, b) = (safetensors(&[tensor("a", "U8", &[4], 1)]), safetensors(&[tensor("b", "U8", &[4], 1)]));
    let ab = safetensors(&[tensor("a", "U8", &[4], 1), tensor("b", "U8", &[4], 1)]);
    let index = "model.safetensors.index.json";
    make("pipeline", &[("unet/diffusion_pytorch_model.safetensors", &a), ("vae/diffusion_pytorch_model.safetensors", &a)]);
    make("pickles", &[("pytorch_model.bin", b"PK")]);
    make("gguf", &[("m.gguf", b"GGUF")]);
    make("stale", &[("m1.safetensors", &a), (index, &map(&[("a", "model-00001-of-00002.safetensors"), ("b", "x.safetensors")]))]);
    make("ghost", &[("m1.safetensors", &a), (index, &map(&[("a", "m1.safetensors"), ("mtp.fc.weight", "m1.safetensors")]))]);
    make(
        "other",
        &[("1.safetensors", &a), ("2.safetensors", &b), (index, &map(&[("a", "2.safetensors"), ("b", "1.safetensors")]))],
    );
    make(
        "overlay",
        &[("m1.safetensors", &ab), ("m2.safetensors", &b), (index, &map(&[("a", "m1.safetensors"), ("b", "m2.safetensors")]))],
    );
    make("twice", &[("model.safetensors", &a), ("consolidated.safetensors", &a)]);
    make("bom", &[("m1.safetensors", &a), (index, &[b"\xef\xbb\xbf", &map(&[("a", "m1.safetensors")])[..]].concat())]);
    make("utf-16", &[("m1.safetensors", &a), (index, b"\xff\xfe{\0}\0")]);
    make("space", &[("model v2 (1).safetensors", &a)]);
    for (folder, expected) in [
        ("pipeline", &["unet, vae", "a checkpoint of its own"][..]),
        ("pickles", &["pytorch_model.bin", "torch.load"]),
        ("gguf", &["m.gguf", "safetensors files"]),
        ("stale", &["model-00001-of-00002.safetensors, which is missing", "1 more of its 2 files"]),
        ("ghost", &["mtp.fc.weight in m1.safetensors", "no shard has it"]),
        ("other", &["tensor a in 2.safetensors", "it is in 1.safetensors"]),
        ("overlay", &["tensor b occurs twice, in m1.safetensors and m2.safetensors", "the shard index names m2.safetensors"]),
        ("twice", &["tensor a occurs twice, in consolidated.safetensors and model.safetensors", "give one of the files"]),
        ("bom", &["byte order mark of UTF-8"]),
        ("utf-16", &["byte order mark of UTF-16"]),
        ("space", &["model v2 (1).safetensors", "rename it"]),
    ] {
        for line in [format!("encode base.safetensors {folder} -o x"), format!("encode {folder} target.safetensors -o x")] {
            let error = place.fails(&line, DATA, folder);
            assert_eq!(error["kind"], "bad_checkpoint");
            for expected in expected {
                assert!(error["message"].as_str().unwrap().contains(expected), "{folder}: {error}");
            }
        }
    }
}

#[test]
fn files_of_other_formats_are_named() {
    let place = Place::with_pair();
    let json = br#"{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}"#;
    for (content, expected) in [
        (&b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"[..], "Git LFS"),
        (b"PK\x03\x04 zip, and more than 8 bytes", "torch.load"),
        (b"\x80\x02}q\x00(X\x01\x00\x00", "a pickle"),
        (b"GGUF\x03\0\0\0\x01\0\0\0", "GGUF"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"\n<html lang=\"en\">", "an HTML page"),
        (b"\xef\xbb\xbf<!doctype html>", "an HTML page"),
        (b"<?xml version='1.0'?><Error>", "an XML document"),
        (json, "a shard index under another name"),
        (b"{\"model_type\": \"llama\"}", "JSON"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x1f\x8b\x08\0\0\0\0\x03", "compressed"),
        (b"PK\x03\x04\0\0\0\0\0\0", "torch.load"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\x03", "compressed"),
        (b"\x80\x02\0\0\0\0\0\0{}", "longer than the file"), // a header of 640 bytes, cut short
    ] {
        fs::write(place.path("file.safetensors"), content).unwrap();
        for line in [
            "encode base.safetensors file.safetensors -o x",
            "apply file.safetensors pair -o x",
            "verify pair --base file.safetensors",
        ] {
            assert_eq!(place.fails(line, DATA, expected)["kind"], "bad_checkpoint");
        }
    }
    for file in ["pair.tpde-index", "pair.tpde-blob"] {
        place.fails(&format!("encode base.safetensors {file} -o x"), DATA, "of a pair, not a checkpoint");
    }
}

/// Mirrors of a base have its tensors in other files, or its shard index in another form.
#[test]
fn a_base_with_other_files_gives_the_files_of_the_target() {
    let place = folder();
    let target: Vec<_> = model().iter().map(|tensor| tuned(tensor, 50)).collect();
    write_folder(&place.path("target"), &[&target[..2], &target[2..]]);
    place.ok("encode shards target -o pair -f");
    write_folder(&place.path("mirror"), &[&model()[..1], &model()[1..3], &model()[3..]]);
    fs::create_dir(place.path("reformatted")).unwrap();
    for name in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        fs::copy(place.path("shards").join(name), place.path("reformatted").join(name)).unwrap();
    }
    let map: serde_json::Value = serde_json::from_slice(&place.read("shards/model.safetensors.index.json")).unwrap();
    fs::write(place.path("reformatted/model.safetensors.index.json"), map.to_string()).unwrap();
    let mut header = place.read("base.safetensors");
    header[9] = b' ';
    fs::write(place.path("header.safetensors"), header).unwrap();
    for base in ["shards", "mirror", "reformatted", "base.safetensors", "header.safetensors"] {
        place.ok(&format!("apply {base} pair -o out"));
        for name in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"] {
            place.assert_same(&format!("out/{name}"), &format!("target/{name}"));
        }
        fs::remove_dir_all(place.path("out")).unwrap();
        assert_eq!(place.json(&format!("verify pair --base {base}"))["writable"], true);
    }
    place.ok("encode base.safetensors target.safetensors -o lone");
    for base in ["shards", "mirror", "header.safetensors"] {
        place.ok(&format!("apply {base} lone -o out.safetensors -f"));
        place.assert_same("out.safetensors", "target.safetensors");
    }
}
