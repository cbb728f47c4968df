//! Damaged objects, and manifests by strangers.

use super::{Fault, Faulty, Place, SEGMENT, init, never_whole, open};
use crate::checkpoints::{Weights, tree};
use futures_util::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt};
use serde_json::{Value, json};
use std::future::Future;
use std::sync::Arc;
use tpde_store::*;

fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

pub fn names(memory: &Arc<InMemory>, below: &str) -> Vec<ObjectPath> {
    let listed = wait(memory.list(Some(&ObjectPath::from(format!("a/prefix/{below}")))).try_collect::<Vec<_>>()).unwrap();
    listed.into_iter().map(|meta| meta.location).collect()
}

pub fn read(memory: &Arc<InMemory>, name: &ObjectPath) -> Vec<u8> {
    wait(async { memory.get(name).await.unwrap().bytes().await.unwrap().to_vec() })
}

pub fn write(memory: &Arc<InMemory>, name: &ObjectPath, bytes: Vec<u8>) {
    wait(memory.put(name, bytes.into())).unwrap();
}

/// A store with two versions of a folder.
fn folders(place: &Place) -> Arc<InMemory> {
    let memory = Arc::new(InMemory::new());
    let store = init(&memory, &never_whole());
    let mut weights = Weights::new(4);
    for _ in 0..2 {
        weights.write_folder(&place.at("step"), "{}");
        store.put(place.at("step"), &PutOptions::default()).unwrap();
        weights.step(1);
    }
    memory
}

#[test]
fn any_damaged_or_missing_object_is_an_error_and_nothing_is_published() {
    let place = Place::new();
    let memory = folders(&place);
    let store = open(&memory);
    for name in names(&memory, "objects") {
        let right = read(&memory, &name);
        let mut flipped = right.clone();
        flipped[right.len() / 2] ^= 4;
        let short = right[..right.len() - 1].to_vec();
        for wrong in [Some(flipped), Some(short), None] {
            match wrong {
                Some(bytes) => write(&memory, &name, bytes),
                None => wait(memory.delete(&name)).unwrap(),
            }
            // Without what an interrupted call has left.
            let place = Place::new();
            let error = store.get("main", place.at("out"), &GetOptions::default()).unwrap_err();
            assert!(matches!(&error, Error::Damaged { object, .. } if name.as_ref().ends_with(object)), "{error}");
            assert!(!place.at("out").exists());
            let report = store.verify(None, false).unwrap();
            assert!(!report.faults.is_empty(), "{name}");
            write(&memory, &name, right.clone());
        }
    }
    assert!(store.verify(None, true).unwrap().faults.is_empty());
    store.get("main", place.at("out"), &GetOptions::default()).unwrap();
}

/// Changes the manifest of the head, and returns what a reader says.
fn changed(place: &Place, memory: &Arc<InMemory>, change: impl Fn(&mut Value)) -> Error {
    let name = ObjectPath::from("a/prefix/branches/main/0000000001.json");
    let right = read(memory, &name);
    let mut manifest: Value = serde_json::from_slice(&right).unwrap();
    change(&mut manifest);
    write(memory, &name, manifest.to_string().into_bytes());
    let before =
        tree(place.0.path()).into_iter().map(|(name, _)| name).filter(|name| !name.starts_with(".tpde-get-")).collect::<Vec<_>>();
    let store = open(memory);
    let error = store.get("main", place.at("out"), &GetOptions::default()).unwrap_err();
    let after =
        tree(place.0.path()).into_iter().map(|(name, _)| name).filter(|name| !name.starts_with(".tpde-get-")).collect::<Vec<_>>();
    assert_eq!(before, after, "something was written");
    if matches!(error, Error::Manifest { .. } | Error::Schema { .. })
        && !error.to_string().contains("state")
        && !error.to_string().contains("file of the pair")
    {
        store.gc().unwrap_err(); // what the manifest uses is not known
    }
    write(memory, &name, right);
    error
}

/// A change of a manifest.
pub type Change = Box<dyn Fn(&mut Value)>;

#[test]
fn manifests_that_break_a_rule_are_refused_with_the_rule() {
    let place = Place::new();
    let memory = folders(&place);
    let id = "0123456789abcdef0123456789abcdef";
    let cases: Vec<(&str, Change)> = vec![
        ("found tpde.store.version/2", Box::new(|m| m["schema"] = json!("tpde.store.version/2"))),
        ("missing field `schema`", Box::new(|m| *m = json!({}))),
        ("unknown field `extra`", Box::new(|m| m["extra"] = json!(1))),
        ("expected the manifest of main@1, found that of main@2", Box::new(|m| m["number"] = json!(2))),
        ("expected the manifest of main@1, found that of side@1", Box::new(|m| m["branch"] = json!("side"))),
        ("expected an id", Box::new(|m| m["id"] = json!("../../x"))),
        ("needs a parent", Box::new(|m| m["parent"] = json!(null))),
        (
            "number of the parent: expected less than 1, found 1",
            Box::new(move |m| m["parent"] = json!({"branch": "main", "number": 1, "id": id})),
        ),
        ("expected a branch", Box::new(move |m| m["parent"]["branch"] = json!("../main"))),
        ("its ancestor main@0 was deleted", Box::new(move |m| m["parent"]["id"] = json!(id))),
        ("its ancestor side@4 was deleted", Box::new(move |m| m["parent"] = json!({"branch": "side", "number": 4, "id": id}))),
        ("below the folder", Box::new(|m| m["files"][0]["name"] = json!("../outside"))),
        ("below the folder", Box::new(|m| m["files"][0]["name"] = json!("/outside"))),
        ("below the folder", Box::new(|m| m["files"][0]["name"] = json!("a/./b"))),
        ("below the folder", Box::new(|m| m["files"][0]["name"] = json!("C:\\outside"))),
        ("expected ascending names", Box::new(|m| m["files"][0]["name"] = json!("config.json"))),
        ("is a file of the pair too", Box::new(|m| m["files"][3]["name"] = json!("model.safetensors.index.json"))),
        ("expected segments of", Box::new(|m| m["files"][0]["content"]["bytes"] = json!(5))),
        ("segments of 1 to", Box::new(|m| m["content"]["difference"]["blob"]["segments"][0]["bytes"] = json!(0))),
        ("expected segments of", Box::new(|m| m["content"]["difference"]["blob"]["bytes"] = json!(u64::MAX))),
        ("a deletion has files", Box::new(|m| m["content"] = json!("deleted"))),
        (
            "a deletion needs a parent of the same branch",
            Box::new(move |m| {
                m["content"] = json!("deleted");
                m["parent"] = json!({"branch": "side", "number": 0, "id": id});
            }),
        ),
        ("64 hexadecimal digits", Box::new(|m| m["state"] = json!("xyz"))),
        ("expected a pair whose target has state", Box::new(|m| m["state"] = json!("0".repeat(64)))),
        ("not the expected pair", Box::new(|m| m["content"]["difference"]["digest"] = json!("0".repeat(64)))),
        ("no such object", Box::new(|m| m["content"]["difference"]["index"]["segments"][0]["digest"] = json!("0".repeat(64)))),
    ];
    for (expected, change) in cases {
        let error = changed(&place, &memory, change);
        assert!(error.to_string().contains(expected), "expected {expected:?}, found {error}");
    }
    open(&memory).get("main", place.at("out"), &GetOptions::default()).unwrap();
}

#[test]
fn files_of_a_checkpoint_that_is_one_file_are_refused() {
    let place = Place::new();
    let memory = Arc::new(InMemory::new());
    init(&memory, &never_whole()).put(place.file(&Weights::new(7)), &PutOptions::default()).unwrap();
    let name = ObjectPath::from("a/prefix/branches/main/0000000000.json");
    let mut manifest: Value = serde_json::from_slice(&read(&memory, &name)).unwrap();
    manifest["files"] = json!([{"name": "config.json", "content": manifest["content"]["whole"]["index"]}]);
    write(&memory, &name, manifest.to_string().into_bytes());
    let error = open(&memory).get("main", place.at("out"), &GetOptions::default()).unwrap_err();
    assert!(error.to_string().contains("file config.json of a checkpoint that is one file"), "{error}");
    assert!(!place.at("out").exists());
    let report = open(&memory).verify(None, false).unwrap();
    assert!(report.faults["main@0"].contains("one file"), "{report:?}");
}

#[test]
fn a_version_that_is_its_own_ancestor_is_refused() {
    let place = Place::new();
    let memory = folders(&place);
    let store = open(&memory);
    store.create_branch("side", "main").unwrap();
    let name = |branch: &str| ObjectPath::from(format!("a/prefix/branches/{branch}.json"));
    let side: Value = serde_json::from_slice(&read(&memory, &name("side/0000000000"))).unwrap();
    let mut main: Value = serde_json::from_slice(&read(&memory, &name("main/0000000001"))).unwrap();
    main["parent"] = json!({"branch": "side", "number": 0, "id": side["id"]});
    write(&memory, &name("main/0000000001"), main.to_string().into_bytes());
    for version in ["main", "side"] {
        let error = store.get(version, place.at("out"), &GetOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains("its own ancestor"), "{error}");
    }
    assert_eq!(store.verify(None, false).unwrap().faults.len(), 2);
    store.gc().unwrap();
    // The next version does not need it.
    let version = store.put(place.at("step"), &PutOptions::default()).unwrap();
    assert!(matches!(version.content, Content::Whole(_)));
    store.get("main", place.at("out"), &GetOptions::default()).unwrap();
}

/// A deletion that cannot be read must not bring the branch back.
#[test]
fn a_damaged_deletion_is_not_pruned() {
    let place = Place::new();
    let memory = folders(&place);
    let store = open(&memory);
    assert!(matches!(store.prune_damaged("other").unwrap_err(), Error::NoVersion { .. }));
    store.delete_branch("main").unwrap();
    write(&memory, &ObjectPath::from("a/prefix/branches/main/0000000002.json"), b"{".to_vec());
    let store = open(&memory);
    let error = store.prune_damaged("main").unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)) && error.to_string().contains("0000000002.json"), "{error}");
    store.delete_branch("main").unwrap();
    assert!(matches!(store.log("main").unwrap_err(), Error::NoVersion { .. }));
}

#[test]
fn a_store_of_another_schema_is_refused() {
    let memory = Arc::new(InMemory::new());
    init(&memory, &never_whole());
    write(&memory, &ObjectPath::from("a/prefix/store.json"), b"{\"schema\": \"tpde.store/9\"}".to_vec());
    let error = internals::open(memory, SEGMENT).err().unwrap();
    assert!(matches!(&error, Error::Schema { found, .. } if found == "tpde.store/9"), "{error}");
}

#[test]
fn changed_bytes_of_manifests_are_refused_or_read_again_as_they_are_written() {
    let place = Place::new();
    let memory = folders(&place);
    let mut random = crate::checkpoints::Random(11);
    for name in [ObjectPath::from("a/prefix/store.json"), ObjectPath::from("a/prefix/branches/main/0000000001.json")] {
        let right = String::from_utf8(read(&memory, &name)).unwrap().replace("\"number\": 1", "\"number\": 3").into_bytes();
        internals::parse_manifests(&right);
        for _ in 0..4000 {
            let mut wrong = right.clone();
            for _ in 0..1 + random.below(3) {
                let at = random.below(wrong.len() as u64) as usize;
                match random.below(3) {
                    0 => wrong[at] ^= 1 << random.below(8),
                    1 => drop(wrong.drain(at..(at + random.below(40) as usize).min(wrong.len()))),
                    _ => wrong[at] = b"0\"{}[],:9e-/."[random.below(13) as usize],
                }
            }
            internals::parse_manifests(&wrong);
        }
    }
}

#[test]
fn the_limits_of_a_reader_bind_the_writer() {
    let place = Place::new();
    let memory = Arc::new(InMemory::new());
    let store = init(&memory, &never_whole());
    let file = place.file(&Weights::new(7));
    store.put(&file, &PutOptions::default()).unwrap();
    let large = "a".repeat(70_000_000);
    let refused = |error: Option<Error>| {
        let error = error.unwrap();
        assert!(error.to_string().contains("expected at most 67108864 bytes, found 7"), "{error}");
    };
    refused(store.put(&file, &PutOptions::default().metadata([("log", &large)])).err());
    refused(store.put(&file, &PutOptions::default().anchor(Anchor::External { hint: large })).err());
    assert_eq!(store.log("main").unwrap().len(), 1);
    assert_eq!(store.put(&file, &PutOptions::default()).unwrap().number, 1);
    store.gc().unwrap();
    assert!(names(&memory, "leases").is_empty());
    // Names of branches are as long as a reader allows, also in names of shortcuts in a folder.
    let name = "b".repeat(255);
    let store = Store::init(place.at("store").to_str().unwrap(), &never_whole()).unwrap();
    let mut weights = Weights::new(7);
    for step in 0..3 {
        store.put(place.file(&weights), &PutOptions::default().branch(&name)).unwrap();
        weights.step(step);
    }
    store.fold(&format!("{name}@0"), &format!("{name}@2"), &FoldOptions::default()).unwrap();
    assert_eq!(store.shortcuts(&name).unwrap().len(), 1);
    store.create_branch("side", &name).unwrap();
    store.delete_branch(&name).unwrap();
}

#[test]
fn one_damaged_manifest_blocks_nothing_for_good() {
    let place = Place::new();
    let wrong: [(&str, Vec<u8>); 3] = [
        ("syntax", b"{".to_vec()),
        ("rule", b"{\"schema\": \"tpde.store.version/1\"}".to_vec()),
        ("size", vec![b' '; (64 << 20) + 1]),
    ];
    for (what, bytes) in &wrong {
        for number in [0, 1, 2] {
            let memory = folders(&place);
            let store = open(&memory);
            store.put(place.at("step"), &PutOptions::default()).unwrap();
            store.put(place.at("step"), &PutOptions::default().branch("side")).unwrap();
            let name = ObjectPath::from(format!("a/prefix/branches/main/000000000{number}.json"));
            write(&memory, &name, bytes.clone());
            let store = open(&memory);
            let is_named =
                |error: Error| assert!(error.to_string().contains(&format!("000000000{number}.json")), "{what}: {error}");
            is_named(store.gc().unwrap_err());
            is_named(store.log("main").unwrap_err());
            is_named(store.get(&format!("main@{number}"), place.at("none"), &GetOptions::default()).unwrap_err());
            let report = store.verify(None, false).unwrap();
            assert!(report.faults.contains_key(&format!("main@{number}")), "{what} {number}: {report:?}");
            // Other versions and branches can be read.
            for version in ["main@0", "side"].iter().filter(|version| **version != format!("main@{number}")) {
                let out = Place::new();
                store.get(version, out.at("out"), &GetOptions::default()).unwrap();
            }
            if number == 2 {
                is_named(store.put(place.at("step"), &PutOptions::default()).unwrap_err());
            }
            // Two ways out.
            let report = store.prune_damaged("main").unwrap();
            assert_eq!(report.pruned, [format!("main@{number}")]);
            store.gc().unwrap();
            let old = Faulty::with(&memory, Fault::None, 0, 100_000);
            internals::open(old.clone(), SEGMENT).unwrap().gc().unwrap();
            assert!(!names(&memory, "branches").contains(&name));
            assert_eq!(store.log("main").unwrap().len(), 2);
            assert_eq!(store.put(place.at("step"), &PutOptions::default()).unwrap().number, 3);
            let out = Place::new();
            store.get("main", out.at("out"), &GetOptions::default()).unwrap();
            write(&memory, &ObjectPath::from("a/prefix/branches/side/0000000000.json"), bytes.clone());
            let store = open(&memory);
            store.gc().unwrap_err();
            store.delete_branch("side").unwrap();
            store.gc().unwrap();
            internals::open(old, SEGMENT).unwrap().gc().unwrap();
            assert_eq!(store.branches().unwrap().len(), 1);
            store.get("main", out.at("again"), &GetOptions::default()).unwrap();
        }
    }
}
