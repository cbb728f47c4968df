//! The bytes that the encoder writes are the same on every machine and for any number of threads and shards, and change only on
//! purpose.

use crate::common::inputs::{Held, Input};
use crate::common::{Tensor, write_file, write_folder};
use std::fmt::Write;
use std::path::Path;
use tpde::{
    Apply, Codec, CodecChoice, Encode, EncodeOptions, Favor, FormatVersion, Layout, Pair, SafetensorsCheckpoint, ValidatedIndex,
};
use tpde_core::format::Section;

/// Rows of the matrices: small for all options, larger so that samples are taken, and large for one kind of input.
const SIDES: [u64; 3] = [160, 700, 1600];

/// Sizes of the index and the blob that the encoder makes of an input, and a hash of both, for formats 1.1 and 1.2.
fn encoded(input: &Input, options: &EncodeOptions) -> [String; 2] {
    let (base, target) = (input.base(), input.target());
    let encode = |format| Encode::new(&target).base(&base).options(options.clone().format(format)).to_memory().unwrap().0;
    let [old, pair] = [FormatVersion::V1_1, FormatVersion::V1_2].map(encode);
    assert!(old.blob()[64..] == pair.blob()[64..], "{}: formats share payloads", input.name);
    let mut rebuilt: Vec<_> = input.target.iter().map(|(_, bytes)| vec![0xA5; bytes.len()]).collect();
    let mut outputs: Vec<_> = rebuilt.iter_mut().map(|bytes| &mut bytes[..]).collect();
    Apply::new(&pair).base(&base).to_buffers(&mut outputs).unwrap();
    assert!(rebuilt.iter().zip(&input.target).all(|(rebuilt, (_, bytes))| rebuilt == bytes), "{}", input.name);
    [old, pair].map(|pair| {
        let (index, blob) = (pair.index().as_bytes(), pair.blob());
        let mut hasher = blake3::Hasher::new();
        hasher.update(index).update(blob);
        format!("{} {} {}", index.len(), blob.len(), &hasher.finalize().to_hex()[..16])
    })
}

/// `testdata/encoded.txt` has the output of the encoder at its last intended change, and `testdata/encoded-1.1.txt` that for format
/// 1.1. Set TPDE_BLESS=1 to rewrite the files, then review the differences: they also show choices that became worse.
#[test]
fn the_encoder_writes_the_bytes_that_it_wrote() {
    let default = EncodeOptions::default;
    let with = |codec: Codec, layout| default().codec(codec).layout(layout);
    let mut ways = vec![
        ("auto".to_owned(), default()),
        ("speed".into(), default().favor(Favor::Speed)),
        ("small-chunks".into(), default().chunk_lanes(1 << 12)),
        ("conditioned".into(), with(Codec::Conditioned, None)),
        ("raw".into(), with(Codec::Raw, None)),
        ("zstd".into(), with(Codec::Zstd, None)),
    ];
    ways.push(("device".into(), default().codec(CodecChoice::Device)));
    ways.extend(Layout::ALL.iter().map(|&layout| (format!("zstd-{}", layout.name()), with(Codec::Zstd, Some(layout)))));
    let mut found = [String::new(), String::new()];
    for (side, inputs, ways) in [(SIDES[0], usize::MAX, &ways[..]), (SIDES[1], usize::MAX, &ways[..2]), (SIDES[2], 2, &ways[..1])] {
        for input in crate::common::inputs::inputs(side).take(inputs) {
            for (name, options) in ways {
                for (found, encoded) in found.iter_mut().zip(encoded(&input, options)) {
                    writeln!(found, "{} {side}: {name}: {encoded}", input.name).unwrap();
                }
            }
        }
    }
    for (found, file) in found.iter().zip(["encoded-1.1.txt", "encoded.txt"]) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(file);
        if std::env::var_os("TPDE_BLESS").is_some() {
            std::fs::write(&path, found).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap();
        let changed: Vec<_> = expected.lines().zip(found.lines()).filter(|(expected, found)| expected != found).collect();
        assert!(changed.is_empty() && expected.lines().count() == found.lines().count(), "{file}: {changed:#?}");
    }
}

/// The profile `device` chooses by estimates. On every input it is about as small as the better of its codecs.
#[test]
fn the_profile_for_devices_is_about_as_small_as_the_best_of_its_codecs() {
    for input in crate::common::inputs::inputs(SIDES[0]) {
        let (base, target) = (input.base(), input.target());
        let size = |codec: CodecChoice| {
            let (pair, _) = Encode::new(&target).base(&base).options(EncodeOptions::default().codec(codec)).to_memory().unwrap();
            pair.index().size() + pair.blob().len() as u64
        };
        let best = size(Codec::Conditioned.into()).min(size(Codec::Raw.into()));
        let found = size(CodecChoice::Device);
        assert!(found <= best + best / 100 + 32, "{}: {found} bytes, {best} with one codec", input.name);
    }
}

/// Writes tensors as one file, or over `shards` shards: neighbours go to different shards, and later names first.
fn write(path: &Path, tensors: &[Held], shards: usize) -> SafetensorsCheckpoint {
    let tensor = |(info, bytes): &Held| Tensor {
        name: info.name.clone(),
        dtype: info.dtype.name(),
        shape: info.shape.iter().map(|&dim| dim as usize).collect(),
        bytes: bytes.clone(),
    };
    if shards == 0 {
        write_file(path, &tensors.iter().map(tensor).collect::<Vec<_>>());
    } else {
        let shard = |s: usize| tensors.iter().skip(s).step_by(shards).rev().map(tensor).collect::<Vec<_>>();
        let held: Vec<_> = (0..shards).rev().map(shard).collect();
        write_folder(path, &held.iter().map(Vec::as_slice).collect::<Vec<_>>());
    }
    SafetensorsCheckpoint::open(path).unwrap()
}

/// All sections that do not describe files, then the payloads.
fn without_files(index: &ValidatedIndex, blob: &[u8]) -> Vec<Vec<u8>> {
    let stored = |section: Section| {
        let entry = index.header().section(section);
        index.as_bytes()[entry.offset as usize..][..entry.stored_size as usize].to_vec()
    };
    let sections = Section::ALL.iter().copied().filter(|section| *section != Section::Files).map(stored);
    sections.chain([blob[64..].to_vec()]).collect()
}

#[test]
fn shards_change_the_file_table_and_no_other_byte() {
    let mut file_tables = std::collections::BTreeSet::new();
    for name in ["several dtypes", "two biases of many tensors", "many small tensors", "no base, outliers"] {
        let input = crate::common::inputs::inputs(300).find(|input| input.name == name).unwrap();
        for favor in [Favor::Ratio, Favor::Size] {
            let options = EncodeOptions::default().favor(favor).chunk_lanes(1 << 14);
            let (in_memory, _) = Encode::new(&input.target()).base(&input.base()).options(options.clone()).to_memory().unwrap();
            let expected = without_files(in_memory.index(), in_memory.blob());
            // Shards of the base, shards of the target (0 for a single file), and threads.
            for (of_base, of_target, threads) in [(0, 0, 1), (2, 2, 2), (0, 7, 3), (7, 2, 1), (7, 7, 5)] {
                if of_base > input.base.len() || of_target > input.target.len() {
                    continue;
                }
                let place = tempfile::tempdir().unwrap();
                let path = |name: &str| place.path().join(name);
                let base = write(&path("base"), &input.base, of_base);
                let target = write(&path("target"), &input.target, of_target);
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| Encode::new(&target).base(&base).options(options.clone()).to_path(path("pair"))).unwrap();
                let pair = Pair::open(path("pair")).unwrap();
                let found = without_files(pair.index(), &std::fs::read(path("pair.tpde-blob")).unwrap());
                assert!(found == expected, "{name}, {favor:?}, shards {of_base} and {of_target}, {threads} threads");
                file_tables.insert(pair.index().files().map(|file| file.name.to_owned()).collect::<Vec<_>>());
            }
        }
    }
    assert!(file_tables.len() >= 3, "{file_tables:?}");
}
