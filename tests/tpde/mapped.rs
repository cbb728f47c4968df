//! Pairs whose blobs are mapped: they give what pairs whose blobs are read give, errors included.

use crate::common::inputs::{Input, inputs};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tpde::{
    Apply, Encode, EncodeOptions, Error, InPlace, MappedSource, OpenOptions, Pair, Result, Rule, Source, TensorMut, Verify,
};

/// Maps a pair whose files nothing changes.
fn map(path: &Path) -> Result<Pair<MappedSource>> {
    // SAFETY: the folder is that of one test, which changes no blob in place while it is mapped.
    unsafe { Pair::open_mapped(path, &OpenOptions::default(), &|_| {}) }
}

/// A folder with the files of a pair of `input`.
fn encoded(input: &Input) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pair");
    let options = EncodeOptions::default().chunk_lanes(4096);
    Encode::new(&input.target()).base(&input.base()).options(options).to_path(&path).unwrap();
    (folder, path)
}

fn kind(name: &str) -> Input {
    inputs(96).find(|input| input.name == name).unwrap()
}

/// All ways of reading a pair: the outcome of each, and the bytes that it leaves.
fn outcomes<B: Source>(pair: &Pair<B>, input: &Input) -> Vec<(String, Vec<Vec<u8>>)> {
    let base = input.base();
    let text = |outcome: Result<String>| outcome.unwrap_or_else(|error| format!("{error:?}"));
    let mut all = vec![
        (text(pair.verify().map(|report| format!("{report:?}"))), Vec::new()),
        (text(Verify::new(pair).base(&base).run().map(|found| format!("{found:?}"))), Vec::new()),
    ];
    match Apply::new(pair).base(&base).to_memory() {
        Ok(tensors) => all.push(("memory".into(), tensors.into_iter().map(|(_, bytes)| bytes).collect())),
        Err(error) => all.push((format!("{error:?}"), Vec::new())),
    }
    for tensor in pair.index().tensors() {
        let end = tensor.shape.iter().product::<u64>() / 2;
        match Apply::new(pair).base(&base).range(tensor.name, 0..end) {
            Ok(range) => all.push((tensor.name.into(), vec![range])),
            Err(error) => all.push((format!("{error:?}"), Vec::new())),
        }
    }
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let before = |tensor: tpde::Tensor<'_>| {
            let held = input.base.iter().find(|(info, _)| info.name == tensor.base_name);
            held.map(|(_, bytes)| bytes.clone()).filter(|bytes| bytes.len() as u64 == tensor.bytes())
        };
        let mut lanes: Vec<_> =
            pair.index().tensors().map(|tensor| before(tensor).unwrap_or_else(|| vec![0; tensor.bytes() as usize])).collect();
        let tensors: Vec<_> = pair.index().tensors().zip(&mut lanes).map(|(t, bytes)| TensorMut { name: t.name, bytes }).collect();
        let outcome = Apply::new(pair).in_place(tensors, mode).map(|report| format!("{report:?}"));
        all.push((text(outcome), lanes));
    }
    all
}

#[test]
fn mapped_pairs_give_what_read_pairs_give() {
    for input in inputs(96) {
        let (_folder, path) = encoded(&input);
        let (read, mapped) = (Pair::open(&path).unwrap(), map(&path).unwrap());
        assert!(outcomes(&mapped, &input) == outcomes(&read, &input), "{}", input.name);
        assert!(mapped.blob().in_memory().is_none());
    }
}

#[test]
fn a_blob_without_payloads_can_be_mapped() {
    let mut input = kind("several dtypes");
    input.target = input.base.clone();
    let (_folder, path) = encoded(&input);
    let (read, mapped) = (Pair::open(&path).unwrap(), map(&path).unwrap());
    assert_eq!(mapped.blob().size(), 64);
    assert!(outcomes(&mapped, &input) == outcomes(&read, &input));
}

#[test]
fn damage_gives_the_same_error_mapped_and_read() {
    let input = kind("several dtypes");
    let (_folder, path) = encoded(&input);
    let blob = path.with_extension("tpde-blob");
    let whole = fs::read(&blob).unwrap();
    // The magic number, the pair digest, the first payload, and the last one.
    let mut refused = 0;
    for at in [0, 30, 64, 70, whole.len() - 9] {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(&blob, damaged).unwrap();
        match (Pair::open(&path), map(&path)) {
            (Ok(read), Ok(mapped)) => assert!(outcomes(&mapped, &input) == outcomes(&read, &input), "byte {at}"),
            (Err(read), Err(mapped)) => {
                assert_eq!(format!("{mapped:?}"), format!("{read:?}"));
                refused += 1;
            }
            other => panic!("byte {at}: {other:?}"),
        }
    }
    assert_eq!(refused, 2);
    for size in [0, 1, 63, 64, whole.len() - 1] {
        fs::write(&blob, &whole[..size]).unwrap();
        let (read, mapped) = (Pair::open(&path).unwrap_err(), map(&path).unwrap_err());
        assert_eq!(format!("{mapped:?}"), format!("{read:?}"), "{size} bytes");
        assert!(matches!(mapped, Error::Invalid(_)), "{mapped}");
    }
    fs::write(&blob, [&whole[..], &[0]].concat()).unwrap();
    assert_eq!(map(&path).unwrap_err().rule(), Some(Rule::BlobBlobSize));
    fs::remove_file(&blob).unwrap();
    assert!(matches!(map(&path), Err(Error::Io { action: "open", .. })));
}

#[test]
fn a_mapped_pair_that_is_replaced_stays_as_it_was() {
    let input = kind("several dtypes");
    let (_folder, path) = encoded(&input);
    let mapped = map(&path).unwrap();
    let before = outcomes(&mapped, &input);
    Encode::new(&input.target()).overwrite(true).to_path(&path).unwrap();
    assert!(outcomes(&mapped, &input) == before);
    assert_ne!(map(&path).unwrap().index().pair_digest(), mapped.index().pair_digest());
}

#[test]
fn a_mapped_pair_must_have_the_expected_digest() {
    let (_folder, path) = encoded(&kind("several dtypes"));
    let open = |digest| {
        // SAFETY: nothing changes the blob.
        unsafe { Pair::open_mapped(&path, &OpenOptions::default().expect(digest), &|_| {}) }
    };
    let digest = *Pair::open(&path).unwrap().index().pair_digest();
    open(digest).unwrap();
    assert!(matches!(open([0; 32]), Err(Error::UnexpectedPair { .. })));
}
