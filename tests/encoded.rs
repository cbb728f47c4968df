//! The bytes that the encoder writes: the same on every machine, for any number of threads, and until someone means to change them.

#[allow(dead_code, reason = "only the inputs are wanted")]
mod common;

use common::inputs::Input;
use std::fmt::Write;
use std::path::Path;
use tpde::{Apply, Codec, EncodeOptions, Favor, Layout, encode_to_memory};

/// Rows of the matrices: few, for all ways to encode; more, of which samples are taken; and many, of one kind.
const SIDES: [u64; 3] = [160, 700, 1600];

/// What the encoder makes of an input: bytes of the index and the blob, and the hash of both.
fn encoded(input: &Input, options: &EncodeOptions) -> String {
    let (base, target) = (input.base(), input.target());
    let (pair, _) = encode_to_memory(Some(&base), &target, options).unwrap();
    let mut rebuilt: Vec<_> = input.target.iter().map(|(_, bytes)| vec![0xA5; bytes.len()]).collect();
    let mut outputs: Vec<_> = rebuilt.iter_mut().map(|bytes| &mut bytes[..]).collect();
    Apply::new(&pair, &base).to_buffers(&mut outputs).unwrap();
    assert!(rebuilt.iter().zip(&input.target).all(|(rebuilt, (_, bytes))| rebuilt == bytes), "{}", input.name);
    let (index, blob) = (pair.index().as_bytes(), pair.blob());
    let mut hasher = blake3::Hasher::new();
    hasher.update(index).update(blob);
    format!("{} {} {}", index.len(), blob.len(), &hasher.finalize().to_hex()[..16])
}

/// `testdata/encoded.txt` has what the encoder wrote when someone last meant to change it. Set TPDE_BLESS=1 to write it anew, and
/// look at the difference: a choice that became worse is seen there too.
#[test]
fn the_encoder_writes_the_bytes_that_it_wrote() {
    let default = EncodeOptions::default;
    let with = |codec: Codec, layout| EncodeOptions { codec: codec.into(), layout, ..default() };
    let mut ways = vec![
        ("auto".to_owned(), default()),
        ("speed".into(), EncodeOptions { favor: Favor::Speed, ..default() }),
        ("small-chunks".into(), EncodeOptions { chunk_lanes: 1 << 12, ..default() }),
        ("conditioned".into(), with(Codec::Conditioned, None)),
        ("raw".into(), with(Codec::Raw, None)),
        ("zstd".into(), with(Codec::Zstd, None)),
    ];
    ways.extend(Layout::ALL.iter().map(|&layout| (format!("zstd-{}", layout.name()), with(Codec::Zstd, Some(layout)))));
    let mut found = String::new();
    for (side, inputs, ways) in [(SIDES[0], usize::MAX, &ways[..]), (SIDES[1], usize::MAX, &ways[..2]), (SIDES[2], 2, &ways[..1])] {
        for input in common::inputs::inputs(side).take(inputs) {
            for (name, options) in ways {
                writeln!(found, "{} {side}: {name}: {}", input.name, encoded(&input, options)).unwrap();
            }
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/encoded.txt");
    if std::env::var_os("TPDE_BLESS").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    let changed: Vec<_> = expected.lines().zip(found.lines()).filter(|(expected, found)| expected != found).collect();
    assert!(changed.is_empty() && expected.lines().count() == found.lines().count(), "{changed:#?}");
}
