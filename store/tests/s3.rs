//! The S3 protocol, on a server that `TPDE_S3` names as `s3://BUCKET/PREFIX`. `scripts/test-s3` starts one.

#![cfg(feature = "aws")]

use std::fs;
use tpde_store::{Error, GetOptions, PutOptions, Store, StoreOptions};

/// A checkpoint of one tensor of 32,768 bytes, of which each step changes some.
fn checkpoint(step: usize) -> Vec<u8> {
    let header = br#"{"w":{"dtype":"BF16","shape":[128,128],"data_offsets":[0,32768]}}"#;
    let lane = |i: usize| 0x3c00u16 + (i * 7919 % 700) as u16 + if i % 97 < step { 1 } else { 0 };
    let lanes = (0..128 * 128).flat_map(|i| lane(i).to_le_bytes());
    (header.len() as u64).to_le_bytes().into_iter().chain(*header).chain(lanes).collect()
}

#[test]
#[ignore = "needs a server: scripts/test-s3"]
fn versions_come_back_and_of_two_writers_one_wins() {
    let location = std::env::var("TPDE_S3").expect("TPDE_S3 names a prefix without a store");
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert!(matches!(Store::open(&location), Err(Error::NotAStore { .. })));
    Store::init(&location, &StoreOptions::default()).unwrap();
    assert!(matches!(Store::init(&location, &StoreOptions::default()), Err(Error::AlreadyAStore { .. })));

    let store = Store::open(&location).unwrap();
    for step in 0..3 {
        fs::write(at("step.safetensors"), checkpoint(step)).unwrap();
        store.put(at("step.safetensors"), &PutOptions::default()).unwrap();
    }
    let mut conflicts = 0;
    let mut won = 0;
    while conflicts == 0 {
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let put = || Store::open(&location).unwrap().put(at("step.safetensors"), &PutOptions::default());
            [scope.spawn(put), scope.spawn(put)].into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        for outcome in outcomes {
            match outcome {
                Ok(_) => won += 1,
                Err(Error::Conflict { .. }) => conflicts += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(won < 40, "no race happened");
    }
    let log = store.log("main").unwrap();
    assert_eq!(log.len(), 3 + won);
    for version in &log {
        let out = at(&format!("out-{}.safetensors", version.number));
        store.get(&version.name(), &out, &GetOptions::default()).unwrap();
        assert!(fs::read(&out).unwrap() == checkpoint((version.number as usize).min(2)), "{}", version.name());
    }
    store.get("main@1", at("some.safetensors"), &GetOptions::default().tensors(&|name| name == "w")).unwrap();
    assert!(store.verify(None, true).unwrap().faults.is_empty());
    assert_eq!(store.gc().unwrap().removed, 0);
}
