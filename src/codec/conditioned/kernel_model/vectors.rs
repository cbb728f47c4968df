//! The model on the published vectors: every chunk of codec `conditioned` in `testdata/v1`.

use super::writer::Case;
use crate::checkpoint::Checkpoint;
use crate::codec::Codec;
use crate::error::Rule;
use crate::index::ValidatedIndex;
use crate::{Limits, Pair, SafetensorsCheckpoint};
use std::path::Path;

#[test]
fn published_vectors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/v1");
    // A published crate comes without them.
    let Ok(manifest) = std::fs::read(folder.join("manifest.json")) else { return };
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let (mut accepted, mut refused) = (0, 0);
    for vector in manifest["vectors"].as_array().unwrap() {
        let text = |key: &str| vector[key].as_str();
        let bytes = |key: &str| std::fs::read(folder.join(text(key).unwrap())).unwrap();
        let Ok(index) = ValidatedIndex::parse(bytes("index"), &Limits::default()) else { continue };
        let Ok(pair) = Pair::new(index, bytes("blob")) else { continue };
        let base = text("base").map(|base| SafetensorsCheckpoint::open(&folder.join(base)).unwrap());
        let found = rules_of_chunks(&pair, base.as_ref());
        match text("verdict").unwrap() {
            "valid" => assert!(found.iter().all(Option::is_none), "{:?}: {found:?}", text("name")),
            _ => {
                let rule = text("rule").filter(|rule| rule.starts_with("payload.") || *rule == "chunk.target_sum");
                if let Some(rule) = rule.filter(|_| !found.is_empty()) {
                    let broken: Vec<_> = found.iter().flatten().map(|rule| rule.id()).collect();
                    assert_eq!(broken, [rule], "{:?}", text("name"));
                }
            }
        }
        accepted += found.iter().filter(|rule| rule.is_none()).count();
        refused += found.iter().flatten().count();
    }
    assert!(accepted >= 100 && refused >= 50, "{accepted} chunks accepted, {refused} refused");
}

/// What the model says of each chunk.
fn rules_of_chunks(pair: &Pair<Vec<u8>>, checkpoint: Option<&SafetensorsCheckpoint>) -> Vec<Option<Rule>> {
    let mut rules = Vec::new();
    for tensor in pair.index().tensors().filter(|tensor| tensor.codec == Codec::Conditioned) {
        let width = tensor.lane_bytes();
        let mut base = vec![0; tensor.base_bytes() as usize];
        if let (Some(checkpoint), false) = (checkpoint, base.is_empty()) {
            // A base of another shape is the reader's business.
            let Some(place) = checkpoint.find(tensor.base_name) else { continue };
            if checkpoint.tensors()[place].shape != tensor.base_shape().unwrap() {
                continue;
            }
            checkpoint.read(place, 0, &mut base).unwrap();
        }
        for chunk in tensor.chunks() {
            let (record, sums) = (&pair.index().chunks()[chunk as usize], &pair.index().sums()[chunk as usize]);
            let lanes = tensor.chunk_range(chunk);
            let start = record.blob_offset.get() as usize;
            let end = start + record.compressed_size.get() as usize;
            let here = |lane: u64| (lane as usize * width).min(base.len());
            let case = Case {
                dtype: tensor.dtype,
                lanes: (lanes.end - lanes.start) as usize,
                set: tensor.tables.cloned(),
                base: base[here(lanes.start)..here(lanes.end)].to_vec(),
                payload: pair.blob()[start..end].to_vec(),
                padding: pair.blob()[end..end.next_multiple_of(16)].iter().copied().max().unwrap_or(0),
                num_deltas: record.num_deltas.get(),
                crc32: record.crc32.get(),
                base_sum: sums.base_sum.get(),
                target_sum: sums.target_sum.get(),
            };
            let found: Vec<_> = (0..5).map(|n| case.compare(n).1).collect();
            assert!(found.iter().all(|rule| *rule == found[0]), "{found:?}");
            rules.push(found[0]);
        }
    }
    rules
}
