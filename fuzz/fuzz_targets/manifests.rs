//! Any bytes as a manifest of a store: of the store, of a version, of a shortcut. What is read, is written and read again in the same
//! way, and names of files and objects stay below their folders.

#![no_main]

// The modules of tpde-store that read manifests, as files: the crate itself would bring tokio and the clients of object stores.
#[allow(dead_code)]
#[path = "../../store/src/digest.rs"]
mod digest;
#[allow(dead_code)]
#[path = "../../store/src/error.rs"]
mod error;
#[allow(dead_code)]
#[path = "../../store/src/manifest.rs"]
mod manifest;
#[allow(dead_code)]
#[path = "../../store/src/names.rs"]
mod names;

use digest::UploadId;
use error::Error;
use libfuzzer_sys::fuzz_target;
use manifest::{Reference, Shortcut, StoreManifest, StoredPair, Version};
use std::path::{Component, Path};

fuzz_target!(|data: &[u8]| {
    checked(StoreManifest::parse(data, names::STORE));
    // Branch and numbers come from the name of the object. Here they come from the manifest, so that they match.
    let json: serde_json::Value = serde_json::from_slice(data).unwrap_or_default();
    let place = |of: &serde_json::Value| {
        let branch = of["branch"].as_str().unwrap_or("main").to_owned();
        (branch, of["number"].as_u64().unwrap_or(3))
    };
    let (branch, number) = place(&json);
    let object = names::manifest(&branch, number);
    if let Some(version) = checked(Version::parse(data, &object, &branch, number)) {
        let written = serde_json::to_vec(&version).expect("a version can be written");
        assert_eq!(Version::parse(&written, &object, &branch, number).expect("what was written can be read"), version);
        check_version(&version, &object);
    }
    let (from, to) = (place(&json["from"]), place(&json["to"]));
    for id in [None, UploadId::parse("0123456789abcdef0123456789abcdef")] {
        let object = names::shortcut((&to.0, to.1), (&from.0, from.1), id);
        if let Some(shortcut) = checked(Shortcut::parse(data, &object)) {
            let written = serde_json::to_vec(&shortcut).expect("a shortcut can be written");
            assert_eq!(Shortcut::parse(&written, &object).expect("what was written can be read"), shortcut);
            assert_eq!(names::of_shortcut(&object), {
                let ends = [&shortcut.to, &shortcut.from].map(|end| (end.branch.as_str(), end.number));
                Some((ends[0], ends[1]))
            });
            check_reference(&shortcut.from);
            check_pair(&shortcut.pair);
        }
    }
    // As the name of a version and of an object, which come from users and from lists.
    if let Ok(text) = std::str::from_utf8(data) {
        if let Ok((branch, number)) = names::version(text) {
            check_below(&names::manifest(branch, number.unwrap_or(0)));
        }
        for name in
            [names::of_manifest(text), names::of_mark(text), names::of_deletion(text), names::of_shortcut(text).map(|ends| ends.0)]
                .into_iter()
                .flatten()
        {
            assert!(text.contains(name.0) && names::check_branch(name.0).is_ok());
            check_below(text);
        }
    }
});

/// What was read; an error must be one of manifests.
fn checked<T>(read: error::Result<T>) -> Option<T> {
    read.inspect_err(|e| assert!(matches!(e, Error::Schema { .. } | Error::Manifest { .. }), "{e}")).ok()
}

fn check_version(version: &Version, object: &str) {
    assert_eq!(names::of_manifest(object), Some((version.branch.as_str(), version.number)));
    assert_eq!(version.reference().name(), version.name());
    version.parent.iter().for_each(check_reference);
    version.pair().into_iter().for_each(check_pair);
    version.files.iter().for_each(|file| check_below(&file.name));
    assert!(version.files.is_sorted_by(|a, b| a.name < b.name));
    let total: u64 = version.file_segments().map(|segment| segment.bytes).sum();
    assert_eq!(total, version.files.iter().map(|file| file.content.bytes).sum::<u64>());
}

fn check_reference(reference: &Reference) {
    check_below(&names::manifest(&reference.branch, reference.number));
    check_below(&names::mark(&reference.branch, reference.number));
}

fn check_pair(pair: &StoredPair) {
    let total: u64 = pair.segments().map(|segment| segment.bytes).sum();
    assert_eq!(total, pair.bytes());
}

/// A path of names alone, so it leads to a place below the folder to which it is appended.
fn check_below(name: &str) {
    assert!(Path::new(name).components().all(|part| matches!(part, Component::Normal(_))), "{name:?}");
    assert!(!name.is_empty() && !name.contains("//") && !name.ends_with('/'), "{name:?}");
}
