//! Reading and writing files: a file that changes while it is read is refused, and no output is written that a reader refuses.

use crate::common::*;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;
use tpde::{
    Apply, Authenticity, Checkpoint, Codec, Dtype, Encode, EncodeOptions, Error, FileSource, FormatVersion, MemoryCheckpoint, Pair,
    Result, Rule, SafetensorsCheckpoint, TensorInfo, Verify,
};

fn open(path: &Path) -> SafetensorsCheckpoint {
    SafetensorsCheckpoint::open(path).unwrap()
}

fn compare(pair: &Pair<FileSource>, target: &Path) -> Result<()> {
    Verify::new(pair).target(&open(target)).run().map(|_| ())
}

/// Three tensors. The first takes several batches of work.
fn large(seed: u64) -> Vec<Tensor> {
    ["a", "b", "c"].iter().map(|name| tensor(name, "BF16", &[256, 1024], seed)).collect()
}

/// A folder with the checkpoints `base` and `target`, each in two shards.
fn two_folders() -> TempDir {
    let place = tempfile::tempdir().unwrap();
    let base = large(1);
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 50)).collect();
    write_folder(&place.path().join("base"), &[&base[..1], &base[1..]]);
    write_folder(&place.path().join("target"), &[&target[..1], &target[1..]]);
    place
}

/// A folder with the checkpoints `base` and `target` without shard indexes, their pair, and the rebuilt target `out`.
fn rebuilt_without_index(shards: usize) -> (TempDir, Pair<FileSource>, SafetensorsCheckpoint) {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let base = large(1);
    let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 50)).collect();
    for (name, tensors) in [("base", &base), ("target", &target)] {
        let (first, rest) = tensors.split_at(if shards == 1 { tensors.len() } else { 1 });
        write_folder(&path(name), &[first, rest][..shards]);
        fs::remove_file(path(name).join("model.safetensors.index.json")).unwrap();
    }
    let base = open(&path("base"));
    Encode::new(&open(&path("target"))).base(&base).to_path(path("pair")).unwrap();
    let pair = Pair::open(path("pair")).unwrap();
    Apply::new(&pair).base(&base).to_path(path("out")).unwrap();
    (place, pair, base)
}

#[test]
fn a_file_that_appears_during_the_work_is_not_mixed_with_the_outputs() {
    let (place, pair, base) = rebuilt_without_index(2);
    let out = place.path().join("out");
    let before: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().metadata().unwrap().ino()).collect();
    let once = Once::new();
    let watch = |_| once.call_once(|| write_file(&out.join("old.safetensors"), &[tensor("old", "BF16", &[4], 1)]));
    let outcome = Apply::new(&pair).base(&base).overwrite(true).progress(watch).to_path(&out);
    assert!(matches!(&outcome, Err(Error::BadCheckpoint { reason, .. }) if reason.contains("old.safetensors")), "{outcome:?}");
    fs::remove_file(out.join("old.safetensors")).unwrap();
    let after: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().metadata().unwrap().ino()).collect();
    assert_eq!(after, before, "no file was replaced");
}

#[test]
fn what_an_interrupted_publication_left_goes_with_the_next_one() {
    let (place, pair, base) = rebuilt_without_index(1);
    let out = place.path().join("out");
    let barrier = r#"{"metadata": {}, "weight_map": {"unfinished": "publication-of-this-folder-is-unfinished.safetensors"}}"#;
    fs::write(out.join("model.safetensors.index.json"), barrier).unwrap();
    assert!(SafetensorsCheckpoint::open(&out).is_err());
    Apply::new(&pair).base(&base).overwrite(true).to_path(&out).unwrap();
    compare(&pair, &out).unwrap();
}

/// Encodes, and makes `change` to a file after the work has begun.
fn encode_while(place: &Path, change: impl Fn() + Sync) -> Result<()> {
    let (base, target) = (open(&place.join("base")), open(&place.join("target")));
    let once = Once::new();
    let watch = |_| once.call_once(&change);
    let options = EncodeOptions::default().chunk_lanes(4096);
    Encode::new(&target).base(&base).options(options).progress(watch).to_path(place.join("pair")).map(|_| ())
}

#[test]
fn a_file_that_changes_while_it_is_encoded_is_named_and_nothing_is_published() {
    let shard = "model-00002-of-00002.safetensors";
    for checkpoint in ["base", "target"] {
        for file in [shard, "model.safetensors.index.json"] {
            for replaced in [false, true] {
                let place = two_folders();
                let path = place.path().join(checkpoint).join(file);
                let outcome = encode_while(place.path(), || {
                    if replaced {
                        fs::copy(&path, path.with_extension("new")).unwrap();
                        fs::rename(path.with_extension("new"), &path).unwrap();
                    } else {
                        let end = fs::metadata(&path).unwrap().len();
                        File::options().write(true).open(&path).unwrap().write_all_at(b" ", end - 1).unwrap();
                    }
                });
                let Err(Error::Changed { what }) = outcome else { panic!("{checkpoint} {file} {replaced}: {outcome:?}") };
                assert!(what.ends_with(&format!("{checkpoint}/{file}")), "{what}");
                let names = place.path().read_dir().unwrap().count();
                assert_eq!(names, 2, "the two checkpoints and nothing else");
            }
        }
    }
}

#[test]
fn files_that_do_not_change_are_encoded() {
    let place = two_folders();
    encode_while(place.path(), || {
        fs::read(place.path().join("target/model.safetensors.index.json")).unwrap();
    })
    .unwrap();
    assert!(place.path().join("pair.tpde-index").exists());
}

#[test]
fn bytes_after_the_data_of_a_safetensors_file_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model.safetensors");
    let mut bytes = safetensors(&large(1));
    fs::write(&path, &bytes).unwrap();
    open(&path);
    bytes.push(0);
    fs::write(&path, &bytes).unwrap();
    let error = SafetensorsCheckpoint::open(&path).unwrap_err();
    assert!(matches!(error, Error::BadCheckpoint { .. }), "{error}");
    fs::write(&path, &bytes[..bytes.len() - 2]).unwrap();
    let error = SafetensorsCheckpoint::open(&path).unwrap_err();
    assert!(matches!(error, Error::BadCheckpoint { .. }), "{error}");
}

#[test]
fn more_shards_than_descriptors_are_read() {
    let place = tempfile::tempdir().unwrap();
    let tensors: Vec<_> = (0..100).map(|i| tensor(&format!("t{i}"), "BF16", &[8, 8], i)).collect();
    let shards: Vec<_> = tensors.chunks(1).collect();
    write_folder(&place.path().join("base"), &shards);
    let checkpoint = open(&place.path().join("base"));
    let open_here = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let open_here = open_here.filter(|path| path.starts_with(place.path())).count();
    assert!(open_here <= 17, "{open_here} files are open");
    for tensor in &tensors {
        let mut bytes = vec![0; tensor.bytes.len()];
        checkpoint.read(checkpoint.find(&tensor.name).unwrap(), 0, &mut bytes).unwrap();
        assert!(bytes == tensor.bytes);
    }
}

/// Tensors without elements, with these names.
fn empty(names: impl Iterator<Item = String>) -> Vec<TensorInfo> {
    names.map(|name| TensorInfo { name, dtype: Dtype::U8, shape: vec![0] }).collect()
}

fn refused_everywhere(tensors: Vec<TensorInfo>, what: &str) {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("out");
    let target = MemoryCheckpoint::new(tensors.into_iter().map(|info| (info, &[][..]))).unwrap();
    let refuses = |outcome: Result<()>| match outcome {
        Err(Error::NotWritable { reason }) => assert!(reason.contains(what), "{reason}"),
        outcome => panic!("{outcome:?}"),
    };
    refuses(Encode::new(&target).to_path(&path).map(|_| ()));
    let pair = Encode::new(&target).to_memory().unwrap().0;
    pair.verify().unwrap();
    refuses(Apply::new(&pair).check_writable());
    refuses(Apply::new(&pair).to_path(&path).map(|_| ()));
    assert_eq!(place.path().read_dir().unwrap().count(), 0);
}

#[test]
fn a_tensor_with_the_name_of_metadata_is_not_written() {
    refused_everywhere(empty(["__metadata__".to_owned()].into_iter()), "__metadata__");
}

#[test]
fn a_header_that_no_reader_takes_is_not_written() {
    // Each byte of a name takes six bytes when escaped.
    let names = |count: usize| (0..count).map(|i| format!("{i:05}{}", "\u{1}".repeat(4091)));
    refused_everywhere(empty(names(4100)), "100000000 bytes");
}

#[test]
fn a_header_that_differs_in_a_space_is_another_target() {
    let place = tempfile::tempdir().unwrap();
    let (path, other) = (place.path().join("target.safetensors"), place.path().join("other.safetensors"));
    write_file(&path, &large(1));
    let mut bytes = fs::read(&path).unwrap();
    // A line break follows the opening brace of the header.
    assert_eq!(bytes[9], b'\n');
    bytes[9] = b' ';
    fs::write(&other, bytes).unwrap();
    Encode::new(&open(&path)).to_path(place.path().join("pair")).unwrap();
    let pair = Pair::open(place.path().join("pair")).unwrap();
    compare(&pair, &path).unwrap();
    let error = compare(&pair, &other).unwrap_err();
    assert_eq!(error.rule(), Some(Rule::FileContentDigest), "{error}");

    // The same file inside a folder is a different checkpoint.
    fs::create_dir(place.path().join("folder")).unwrap();
    fs::copy(&path, place.path().join("folder/target.safetensors")).unwrap();
    let error = compare(&pair, &place.path().join("folder")).unwrap_err();
    assert!(error.to_string().contains("no such file"), "{error}");
}

/// The base of a verification.
#[derive(Debug, Clone, Copy)]
enum Base<'a> {
    Missing,
    NotNeeded,
    Files(&'a SafetensorsCheckpoint),
}

#[test]
fn a_verification_says_what_was_compared_and_nothing_more() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let [old, new] = [1, 2].map(|seed| tensor("w", "U32", &[1024], seed));
    write_file(&path("base"), std::slice::from_ref(&old));
    write_file(&path("target"), std::slice::from_ref(&new));
    let (base, target) = (open(&path("base")), open(&path("target")));
    // Of formats before 1.2, the pair alone does not show whether payloads are forged.
    let options = |format| EncodeOptions::default().codec(Codec::Raw).format(format);
    for (name, base, format) in [
        ("pair", Some(&base), FormatVersion::V1_1),
        ("anchor", None, FormatVersion::V1_1),
        ("covered", Some(&base), FormatVersion::V1_2),
    ] {
        let encode = Encode::new(&target).options(options(format));
        base.into_iter().fold(encode, |encode, base| encode.base(base)).to_path(path(name)).unwrap();
    }
    let found = |name: &str, base, target: Option<&SafetensorsCheckpoint>| {
        let pair = Pair::open(path(name)).unwrap();
        let bytes = AtomicU64::new(0);
        let verify = Verify::new(&pair).progress(|n| _ = bytes.fetch_add(n, Ordering::Relaxed));
        let verify = target.into_iter().fold(verify, |verify, target| verify.target(target));
        let verify = match base {
            Base::Missing => verify,
            Base::NotNeeded => verify.without_base(),
            Base::Files(base) => verify.base(base),
        };
        let verified = verify.run()?;
        let bytes = bytes.load(Ordering::Relaxed);
        assert!((1..=verify.progress_bytes()).contains(&bytes), "{bytes}");
        let checked = (verified.checked.base_checked, verified.checked.target_checked);
        Ok::<_, Error>((checked, verified.payload_authenticity, verified.writable, verified.not_writable))
    };
    let (missing, not_needed, files) = (Base::Missing, Base::NotNeeded, Base::Files(&base));
    let (checked, not_checked) = (Authenticity::Checked, Authenticity::NotChecked);
    for (name, base, target, expected) in [
        ("pair", missing, None, ((false, false), not_checked, None, None)),
        ("pair", missing, Some(&target), ((false, true), not_checked, None, None)),
        ("pair", files, None, ((true, true), checked, Some(true), None)),
        ("pair", files, Some(&target), ((true, true), checked, Some(true), None)),
        ("anchor", missing, None, ((false, false), not_checked, None, None)),
        ("anchor", not_needed, None, ((false, true), checked, Some(true), None)),
        ("covered", missing, None, ((false, false), checked, None, None)),
        ("covered", files, None, ((true, true), checked, Some(true), None)),
    ] {
        assert_eq!(found(name, base, target).unwrap(), expected, "{name}, {base:?}");
    }
    assert_eq!(found("pair", not_needed, None).unwrap_err().rule(), Some(Rule::BaseTensor));

    // The pair takes a long header from its base, and this base has a different one. Without the base, that cannot be detected.
    let long = |name: &str| with_long_header(fs::read(path(name)).unwrap());
    fs::write(path("long-base"), long("base")).unwrap();
    fs::write(path("long-target"), long("target")).unwrap();
    Encode::new(&open(&path("long-target"))).base(&open(&path("long-base"))).to_path(path("long")).unwrap();
    let (_, authenticity, writable, reason) = found("long", files, None).unwrap();
    assert_eq!((authenticity, writable), (checked, Some(false)));
    assert!(reason.unwrap().contains("base.file"));

    for (name, base) in [("pair", files), ("anchor", not_needed), ("covered", files)] {
        let blob = path(name).with_extension("tpde-blob");
        let mut bytes = fs::read(&blob).unwrap();
        forge::forge(Pair::open(path(name)).unwrap().index(), &mut bytes, &mut new.bytes.clone());
        fs::write(&blob, bytes).unwrap();
        let rule = if name == "covered" {
            assert_eq!(found(name, missing, Some(&target)).unwrap_err().rule(), Some(Rule::HeaderPayloadRoot));
            Rule::HeaderPayloadRoot
        } else {
            assert_eq!(found(name, missing, Some(&target)).unwrap().1, not_checked);
            Rule::TensorTargetDigest
        };
        assert_eq!(found(name, base, None).unwrap_err().rule(), Some(rule));
    }
}

#[test]
fn names_and_shard_indexes_of_targets_are_compared() {
    let place = two_folders();
    encode_while(place.path(), || {}).unwrap();
    let pair = Pair::open(place.path().join("pair")).unwrap();
    let folder = place.path().join("target");
    let index = folder.join("model.safetensors.index.json");
    compare(&pair, &folder).unwrap();
    let content = fs::read(&index).unwrap();
    fs::write(&index, [&content[..], b"\n"].concat()).unwrap();
    assert!(compare(&pair, &folder).unwrap_err().to_string().contains("index.json"));
    fs::write(&index, &content).unwrap();
    fs::rename(&index, folder.join("other.safetensors.index.json")).unwrap();
    assert!(compare(&pair, &folder).unwrap_err().to_string().contains("no such file"));
    fs::rename(folder.join("other.safetensors.index.json"), &index).unwrap();
    // One more shard: without a shard index, all safetensors files of a folder belong to the checkpoint.
    fs::remove_file(&index).unwrap();
    write_file(&folder.join("more.safetensors"), &[]);
    assert!(compare(&pair, &folder).is_err());
}
