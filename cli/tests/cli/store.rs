//! `tpde store`: versions in a folder.

use crate::common::place::*;
use crate::common::*;
use std::fs;
use tpde::{Checkpoint, SafetensorsCheckpoint};

/// Versions `v0` to `v2` of a checkpoint in a folder with other files, and an empty store.
fn versions() -> Place {
    let place = Place::new();
    let mut version = model();
    for i in 0..3 {
        let folder = place.path(&format!("v{i}"));
        fs::create_dir_all(folder.join("extra")).unwrap();
        write_file(&folder.join("model.safetensors"), &version);
        fs::write(folder.join("config.json"), "{}\r\n").unwrap();
        fs::write(folder.join("extra/merges.txt"), format!("merges {i}")).unwrap();
        version = version.iter().map(|tensor| tuned(tensor, 7 + i)).collect();
    }
    place.ok("store init st");
    place
}

fn same_folders(place: &Place, one: &str, other: &str) {
    for file in ["model.safetensors", "config.json", "extra/merges.txt"] {
        assert_eq!(fs::read(place.path(one).join(file)).unwrap(), fs::read(place.path(other).join(file)).unwrap(), "{one} {file}");
    }
}

#[test]
fn versions_come_back_as_they_were() {
    let place = versions();
    for i in 0..3 {
        let row = place.json(&format!("store put st v{i} --metadata step={i}"));
        assert_eq!((&row["schema"], &row["version"]), (&"tpde.store.put/1".into(), &format!("main@{i}").into()));
        assert_eq!(row["content"], if i == 0 { "whole" } else { "difference" });
        assert_eq!((&row["metadata"]["step"], &row["files"]), (&i.to_string().into(), &2.into()));
    }
    for i in 0..3 {
        place.ok(&format!("store get st main@{i} -o back{i}"));
        same_folders(&place, &format!("back{i}"), &format!("v{i}"));
    }
    // What is here need not be read from the store.
    place.ok("store get st main -o again --have main@1=v1 --cache kept");
    same_folders(&place, "again", "v2");

    let log = place.json("store log st");
    let names: Vec<_> = log["versions"].as_array().unwrap().iter().map(|row| row["version"].as_str().unwrap()).collect();
    assert_eq!(names, ["main@2", "main@1", "main@0"]);
    let newest = place.json("store log st --limit 2");
    assert_eq!(newest["versions"].as_array().unwrap()[..], log["versions"].as_array().unwrap()[..2]);
    let text = place.ok("store log st").out;
    assert!(text.contains("step=2") && text.contains("difference"), "{text}");
    let rows = log["versions"].as_array().unwrap();
    let dates = rows.iter().map(|row| humantime::parse_rfc3339_weak(&format!("{}:00Z", date(row["created"].as_u64().unwrap()))));
    assert!(dates.clone().all(|time| time.unwrap().elapsed().unwrap().as_secs() < 600));
    for row in rows {
        let line = text.lines().find(|line| line.contains(row["version"].as_str().unwrap())).unwrap();
        assert!(line.contains(&date(row["created"].as_u64().unwrap())) && line.contains('x'), "{line}");
    }
    let sum = |field: &str| rows.iter().map(|row| row[field].as_u64().unwrap()).sum::<u64>();
    let ratio = format!("{:.2}x", sum("tensor_bytes") as f64 / sum("stored_bytes") as f64);
    let last = text.lines().last().unwrap();
    assert!(last.contains("3 versions: ") && last.contains(&ratio), "{last}");

    place.ok("store branch create st trial --from main@1");
    let heads = place.json("store branch list st");
    assert_eq!(heads["versions"].as_array().unwrap().len(), 2);
    place.ok("store put st v2 --branch trial");
    place.ok("store get st trial -o trial");
    same_folders(&place, "trial", "v2");

    let sizes = place.json("store du st");
    assert_eq!(sizes["versions"], 5);
    assert!(sizes["difference_bytes"].as_u64().unwrap() > 0);
    assert!(sizes["oldest"].as_u64() == rows[2]["created"].as_u64() && sizes["newest"].as_u64() >= rows[0]["created"].as_u64());
    let text = place.ok("store du st").out;
    assert!(text.contains(&format!("{} to ", date(sizes["oldest"].as_u64().unwrap()))) && text.contains("ratio"), "{text}");
    assert_eq!(place.json("store gc st")["removed"], 0);
    assert_eq!(place.json("store verify st --rebuild")["versions"], 5);
    assert_eq!(place.ok("store watch st --from 1 --limit 2").out, "main@1\nmain@2\n");
    let deleted = place.ok("store branch delete st trial").out;
    assert_eq!(deleted, "deleted the branch trial, whose newest version was trial@1\n");
    assert_eq!(place.json("store branch list st")["versions"].as_array().unwrap().len(), 1);
    assert_eq!(place.json("store gc st")["versions"], 0, "the deletion is younger than the grace");

    // Some tensors: the others are not in the output.
    place.ok("store get st main@2 -o some.safetensors --tensor embed*");
    let some = fs::read(place.path("some.safetensors")).unwrap();
    assert!(some.len() < fs::metadata(place.path("v2/model.safetensors")).unwrap().len() as usize);

    // A rectangle of a tensor has the elements that the whole tensor has there, as subset takes it.
    place.ok("store get st main@2 -o part.safetensors --tensor *norm* --part embed*=[7:9]");
    let tensors = |name: &str| SafetensorsCheckpoint::open(place.path(name)).unwrap();
    let (part, whole) = (tensors("part.safetensors"), tensors("v2/model.safetensors"));
    let read = |file: &SafetensorsCheckpoint, name: &str, offset: u64, size: u64| {
        let mut bytes = vec![0; size as usize];
        file.read(file.find(name).unwrap(), offset, &mut bytes).unwrap();
        bytes
    };
    for tensor in part.tensors() {
        let (row, name) = (tensor.bytes() / tensor.shape[0].max(1), &tensor.name);
        let is_part = name.starts_with("embed");
        assert!(is_part != name.contains("norm") && (!is_part || tensor.shape[0] == 2), "{tensor:?}");
        let offset = if is_part { 7 * row } else { 0 };
        assert!(read(&part, name, 0, tensor.bytes()) == read(&whole, name, offset, tensor.bytes()), "{name}");
    }
    assert!(part.tensors().len() > 1);
}

#[test]
fn an_external_version_stores_no_weights() {
    let place = versions();
    let row = place.json("store put st v0 --external hub/base");
    assert_eq!((&row["content"], &row["stored_bytes"], &row["hint"]), (&"external".into(), &0.into(), &"hub/base".into()));
    let error = place.fails("store put st v1", USAGE, "hub/base");
    assert_eq!(error["kind"], "external");
    place.ok("store put st v1 --have main@0=v0");
    let error = place.fails("store get st main -o out", USAGE, "main@0 is not stored");
    assert_eq!(error["kind"], "external");
    place.ok("store get st main -o out --have main@0=v0");
    same_folders(&place, "out", "v1");
    // Another checkpoint is not the version.
    place.fails("store get st main -o other --have main@0=v2", DATA, "");
    assert!(!place.path("other").exists());
}

#[test]
fn failures_have_kinds_and_publish_nothing() {
    let place = versions();
    let kind = |line: &str, code: i32, expected: &str, says: &str| {
        assert_eq!(place.fails(line, code, says)["kind"], expected, "{line}");
    };
    kind("store init st", DATA, "already_a_store", "is a store already");
    kind("store log v0", DATA, "not_a_store", "no store.json");
    kind("store log st", DATA, "no_version", "main");
    kind("store log st --limit 1", DATA, "no_version", "main");
    place.ok("store put st v0");
    kind("store get st main@7 -o out", DATA, "no_version", "main@7");
    kind("store get st main -o v1", SYSTEM, "io", "v1");
    kind("store put st v1 --branch ../out", USAGE, "invalid_argument", "");
    kind("store put st nothing", SYSTEM, "io", "nothing");
    kind("store put st v1 --have main@0", USAGE, "usage", "VERSION=PATH");
    kind("store get st main -o out --tensor nothing*", USAGE, "invalid_argument", "no tensor of the pair matches nothing*");
    kind("store get st main -o out --part embed*=[0:9,0:9,0:9,0:9]", USAGE, "invalid_argument", "dimensions");
    kind("store get st main -o out --part embed*=[0:1] --part *bed*=[1:2]", USAGE, "invalid_argument", "expected one");
    kind("store get st main -o out --part embed*=[0:99999999]", USAGE, "invalid_argument", "expected one within");
    assert!(
        !place.path("out").exists()
            && !place.path(".").read_dir().unwrap().any(|one| one.unwrap().file_name().to_string_lossy().starts_with('.'))
    );

    // A damaged object, and a manifest of a stranger.
    place.ok("store put st v1");
    let objects = || fs::read_dir(place.path("st/objects")).unwrap().map(|entry| entry.unwrap().path());
    let largest = objects().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let mut bytes = fs::read(&largest).unwrap();
    bytes[100] ^= 1;
    fs::write(&largest, bytes).unwrap();
    kind("store get st main@0 -o out", DATA, "damaged", "object");
    let run = place.tpde("store verify st --json");
    assert_eq!(run.code, DATA, "{}{}", run.out, run.err);
    let report: serde_json::Value = serde_json::from_str(&run.out).unwrap();
    let damaged = report["faults"].as_object().unwrap();
    assert!(damaged.contains_key("main@0") && run.err.contains("damaged"), "{damaged:?} {}", run.err);
    let manifest = place.path("st/branches/main/0000000000.json");
    let text = fs::read_to_string(&manifest).unwrap().replace("\"config.json\"", "\"../../config.json\"");
    fs::write(&manifest, text).unwrap();
    kind("store get st main@0 -o out", DATA, "manifest", "config.json");
    kind("store gc st", DATA, "manifest", "config.json");
    assert!(!place.path("out").exists());
}

#[test]
fn a_pruned_branch_reads_on_past_what_is_gone() {
    let place = versions();
    for i in 0..3 {
        place.ok(&format!("store put st v{i}"));
    }
    let row = place.json("store fold st main@0 main@2");
    assert_eq!((&row["from"], &row["to"]), (&"main@0".into(), &"main@2".into()));
    assert!(row["stored_bytes"].as_u64().unwrap() > 0);
    assert!(place.ok("store fold st main@0 main@2").out.starts_with("main@0 to main@2 in "));
    place.fails("store fold st main@2 main@0", USAGE, "does not derive from");
    let report = place.json("store prune st --keep-every 2");
    assert_eq!((&report["pruned"], &report["kept"], &report["shortcuts"]), (&serde_json::json!(["main@1"]), &2.into(), &0.into()));
    assert!(place.ok("store prune st --keep-every 2").out.starts_with("pruned 0 versions, kept 2"));
    let error = place.fails("store get st main@1 -o none", DATA, "nearest: main@0, main@2");
    assert_eq!(error["kind"], "pruned");
    for i in [0, 2] {
        place.ok(&format!("store get st main@{i} -o back{i}"));
        same_folders(&place, &format!("back{i}"), &format!("v{i}"));
    }
    let collected = place.json("store gc st");
    assert_eq!((&collected["versions"], &collected["waiting"]), (&0.into(), &1.into()), "the mark is younger than the grace");
    assert!(place.ok("store gc st").out.contains("\n  1 version that was pruned, or whose branch was deleted, stays until"));
    let sizes = place.json("store du st");
    assert_eq!((&sizes["versions"], &sizes["waiting"], &sizes["shortcuts"]), (&2.into(), &1.into(), &1.into()));
    assert!(place.ok("store du st").out.contains("2, and 1 that was pruned or deleted and waits for gc"));
    // Also one whose manifest cannot be read.
    fs::write(place.path("st/branches/main/0000000002.json"), "{").unwrap();
    place.ok("store prune st --damaged");
    let sizes = place.json("store du st");
    assert_eq!((&sizes["versions"], &sizes["waiting"]), (&1.into(), &2.into()));
    assert_eq!(place.json("store gc st")["waiting"], 2);
    place.ok("store init now --grace 2");
    for version in ["v0", "v1", "v2"] {
        place.ok(&format!("store put now {version}"));
    }
    place.ok("store prune now --keep-every 2");
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(place.ok("store gc now").out.contains("\n  1 version that was pruned, or whose branch was deleted\n"));
}

/// Seconds since 1970 as text.
fn date(seconds: u64) -> String {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()[..16].replace('T', " ")
}

/// Ratios are of what is stored, and sizes that no checkpoint has are no reason to panic.
#[test]
fn totals_leave_out_what_is_elsewhere() {
    let place = versions();
    place.ok("store put st v0 --external elsewhere");
    place.ok("store put st v1 --have main@0=v0");
    let log = place.json("store log st");
    let row = &log["versions"][0];
    let ratio = format!("{:.1}x", row["tensor_bytes"].as_f64().unwrap() / row["stored_bytes"].as_f64().unwrap());
    let [total, sizes] = ["log", "du"].map(|verb| place.ok(&format!("store {verb} st")).out);
    assert!(total.lines().last().unwrap().contains(&ratio) && sizes.contains(&ratio), "{ratio} {total} {sizes}");
    assert_eq!(place.json("store du st")["tensor_bytes"], row["tensor_bytes"]);

    let manifest = place.path("st/branches/main/0000000001.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let bytes = format!("\"tensor_bytes\":{}", row["tensor_bytes"]);
    let compact: String = text.split_whitespace().collect();
    assert!(compact.contains(&bytes), "{text}");
    fs::write(&manifest, compact.replace(&bytes, &format!("\"tensor_bytes\":{}", u64::MAX))).unwrap();
    place.ok("store branch create st side");
    for verb in ["log", "du", "report"] {
        place.ok(&format!("store {verb} st"));
    }

    place.ok("store init empty");
    assert!(!place.ok("store du empty").out.contains("UTC"));
    place.fails("store get st main -o out --have main@0=v0 --cache none/../st/cache", USAGE, "outside of the store");
    assert!(!place.path("none").exists() && !place.path("st/cache").exists());
}

#[test]
fn a_report_shows_sizes_and_changes() {
    let place = versions();
    for i in 0..3 {
        place.ok(&format!("store put st v{i} --metadata note=<b>&{i}"));
    }
    place.ok("store fold st main@0 main@2");
    place.ok("store branch create st side --from main@1");
    let report = place.json("store report st --html page.html");
    let rows = &report["branches"][0]["versions"];
    assert_eq!((&report["branches"][0]["branch"], rows.as_array().unwrap().len()), (&"main".into(), 3));
    let pairs = rows[2]["pairs"].as_array().unwrap();
    assert_eq!((&pairs[0]["from"], &pairs[0]["shortcut"]), (&"main@1".into(), &false.into()));
    assert_eq!((&pairs[1]["from"], &pairs[1]["shortcut"]), (&"main@0".into(), &true.into()));
    let bytes = |pair: &serde_json::Value| pair["bytes"].as_u64().unwrap();
    let read = bytes(&rows[0]["pairs"][0]) + (bytes(&rows[1]["pairs"][0]) + bytes(&pairs[0])).min(bytes(&pairs[1]));
    assert_eq!(rows[2]["bytes_to_read"], read);
    assert!(pairs[0]["changed"].as_u64().unwrap() > 0 && pairs[0]["changed"].as_u64() < pairs[0]["elements"].as_u64());

    let page = fs::read_to_string(place.path("page.html")).unwrap();
    let newest = date(rows[2]["created"].as_u64().unwrap());
    assert!(page.contains(&format!("<h1>Store st, {newest} UTC</h1>")) && page.contains(">version</text>"), "{}", &page[..2000]);
    let of = |branch: u32| ["stored", "changed", "read"].map(|name| format!("{name}-{branch}"));
    assert_eq!(crate::html::names(&page), [of(0), of(1)].concat());
    assert!(page.contains("shortcut from main@0") && page.contains("whole, anchor"));
    assert!(page.contains("note=&lt;b&gt;&amp;1") && !page.contains("<b>"));
    for word in ["<script", "http://", "https://", "src=", "url("] {
        assert!(!page.contains(word), "{word}");
    }
    place.fails("store report st --html page.html", SYSTEM, "exists");
    place.ok("store report st --html page.html --force --branch side");
    assert!(!fs::read_to_string(place.path("page.html")).unwrap().contains("Branch main"));
    let text = place.ok("store report st").out;
    assert_eq!(text.lines().count(), 5, "{text}");
}

#[test]
fn put_says_that_a_base_is_not_used() {
    let place = Place::new();
    write_file(&place.path("base.safetensors"), &[tensor("w", "F8_E4M3", &[64, 64], 1), tensor("w_scale_inv", "BF16", &[1, 1], 2)]);
    write_file(&place.path("target.safetensors"), &[tensor("w", "BF16", &[64, 64], 3)]);
    place.ok("store init st");
    place.ok("store put st base.safetensors");
    let run = place.ok("store put st target.safetensors");
    assert!(run.err.contains("not used as it was meant: 1, such as w "), "{}", run.err);
    place.ok("store get st main@1 -o back.safetensors");
    place.assert_same("back.safetensors", "target.safetensors");
}

#[test]
fn a_verification_without_room_for_temporary_files_finds_no_damage() {
    let place = Place::with_pair();
    place.ok("store init versions");
    place.ok("store put versions base.safetensors");
    let run = place.command("sh", &["-c", &format!("TMPDIR=/nonexistent exec {TPDE} store verify versions --rebuild")]);
    assert_eq!((run.code, run.err.contains("temporary folder")), (SYSTEM, true), "{}", run.err);
    place.ok("store verify versions --rebuild");
}

#[test]
fn a_shard_index_stands_for_its_folder() {
    let place = Place::new();
    write_folder(&place.path("model"), &[&model()[..1], &model()[1..]]);
    fs::write(place.path("model/config.json"), "{}").unwrap();
    place.ok("store init versions");
    place.ok("store put versions model/model.safetensors.index.json");
    place.ok("store get versions main -o out");
    for name in ["config.json", "model.safetensors.index.json"] {
        place.assert_same(&format!("out/{name}"), &format!("model/{name}"));
    }
}
