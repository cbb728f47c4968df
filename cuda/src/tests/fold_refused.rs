//! Folds on a device that are refused, or that the caller ends, and what still runs then.

use super::super::{DeviceCheckpoint, Encode, Rebuild};
use super::derived::memory;
use super::fold::{Place, Stop};
use super::is_idle;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use tpde::{Chain, Codec, EncodeOptions};
use tpde_core::error::{Error, Rule};

/// The last version on the device must have the digests of the last pair. Tensors and parts that the pair lacks are not compared.
#[test]
#[ignore = "needs a CUDA device"]
fn a_last_version_with_other_bytes_is_refused() {
    let place = Place::new(2);
    let base = memory(&place.versions[0]);
    let chain = Chain::new(&base, &place.pairs).unwrap();
    let on_device = DeviceCheckpoint::upload(super::device(), &base).unwrap();
    let path = place.folder.path().join("folded");
    let raw = EncodeOptions::default().codec(Codec::Raw);
    for (tensor, name) in ["a", "b"].into_iter().enumerate() {
        let mut other = place.versions[2].clone();
        *other[tensor].1.last_mut().unwrap() ^= 1;
        let last = DeviceCheckpoint::upload(super::device(), &memory(&other)).unwrap();
        let fold = || Encode::fold(&chain, &on_device, &last).options(raw.clone());
        for error in [fold().to_path(&path).err(), fold().to_memory().err(), fold().to_pinned().err()] {
            let Some(Error::Step { number: 2, source, .. }) = &error else { panic!("{error:?}") };
            let Error::Invalid(invalid) = &**source else { panic!("{source}") };
            assert_eq!((invalid.rule, invalid.at.tensor.as_deref()), (Rule::TensorTargetDigest, Some(name)));
        }
        assert_eq!(place.published(), Vec::<PathBuf>::new());
        // The last pair has the digest of the whole tensor, and the fold those of its parts.
        fold().options(raw.clone().split("*=0:3".parse().unwrap())).to_memory().unwrap();
    }
}

/// Options and outputs are checked before the base is copied to a device, and without one.
#[test]
fn options_and_outputs_of_a_fold_are_checked_first() {
    let place = Place::new(1);
    let base = memory(&place.versions[0]);
    let chain = Chain::new(&base, &place.pairs).unwrap();
    let path = place.folder.path().join("folded");
    let raw = EncodeOptions::default().codec(Codec::Raw);
    Encode::check_fold(&chain, &raw, &path, false).unwrap();
    assert_eq!(place.published(), Vec::<PathBuf>::new());
    let refused = |options: &EncodeOptions, path: &PathBuf| Encode::check_fold(&chain, options, path, false).unwrap_err();
    for options in [raw.clone().codec(Codec::Zstd), raw.clone().chunk_lanes(5000)] {
        assert!(matches!(refused(&options, &path), Error::InvalidArgument(_)));
    }
    assert!(matches!(refused(&raw, &place.folder.path().join("no folder/folded")), Error::Io { .. }));
    let index = path.with_extension("tpde-index");
    std::fs::write(&index, "kept").unwrap();
    let error = refused(&raw, &path);
    assert!(error.to_string().contains("exists"), "{error}");
    Encode::check_fold(&chain, &raw, &path, true).unwrap();
    assert!(place.published() == [index.clone()] && std::fs::read(index).unwrap() == b"kept");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_watcher_ends_an_upload() {
    let place = Place::new(0);
    let base = memory(&place.versions[0]);
    for after in 0..3 {
        let stop = Stop { after, calls: AtomicU64::new(0) };
        let outcome = DeviceCheckpoint::upload_watched(super::device(), &base, &stop);
        // There is one call per tensor.
        match outcome {
            Err(Error::Cancelled) => assert!(after < 2),
            outcome => assert!(after == 2 && outcome.is_ok(), "{after}: {outcome:?}"),
        }
    }
}

/// After a panic of the watcher, no queued step still reads the base, which may be memory of the caller.
#[test]
#[ignore = "needs a CUDA device"]
fn a_watcher_that_panics_leaves_no_work() {
    let place = Place::new(4);
    let base = memory(&place.versions[0]);
    let chain = Chain::new(&base, &place.pairs).unwrap();
    let on_device = DeviceCheckpoint::upload(super::device(), &base).unwrap();
    for after in 0..4 {
        let calls = AtomicU64::new(0);
        let watch = |_| assert!(calls.fetch_add(1, Relaxed) < after, "the watcher panics");
        let stream = super::device().stream().unwrap();
        catch_unwind(AssertUnwindSafe(|| Rebuild::new(&chain, &on_device).watch(&watch).run_on(&stream))).unwrap_err();
        assert!(is_idle(&stream), "{after}");
    }
}
