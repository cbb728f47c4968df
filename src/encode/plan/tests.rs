use super::*;
use crate::MemoryCheckpoint;
use crate::encode::encode;
use std::collections::BTreeMap;
use tpde_core::format::{FileKind, Section};
use tpde_core::writer::{Finished, PairBuilder};

#[test]
fn sizes_of_tables_are_known_before_the_work() {
    let of = |names: &[&str]| {
        let infos = names.iter().map(|name| TensorInfo { name: (*name).into(), dtype: Dtype::U8, shape: vec![1, 2] });
        MemoryCheckpoint::new(infos.map(|info| (info, &[1, 2][..]))).unwrap()
    };
    let (base, target) = (of(&["a", "old", "unused"]), of(&["a", "new", "third"]));
    let renamed = BTreeMap::from([("new".to_owned(), "old".to_owned())]);
    let options = EncodeOptions { renamed, ..EncodeOptions::default() };
    let plans: Vec<_> = (0..3).map(|i| plan(Some(&base), &target, i, &options).unwrap()).collect();
    let builder = || PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap();
    let (finished, _) = encode(Some(&base), &target, Vec::new(), &options, builder(), &|_| {}).unwrap();
    let expanded = |finished: &Finished<Vec<u8>>, section| finished.index.header().section(section).expanded_size;
    assert_eq!(tensor_table_bytes(Some(&base), &target, &plans), expanded(&finished, Section::Tensors));
    assert_eq!(plans.iter().map(|plan| plan.base_name(Some(&base), &target)).collect::<Vec<_>>(), [None, Some("old"), None]);

    let entry =
        |(i, name): (usize, &str)| format!(r#""{name}":{{"dtype":"U8","shape":[1,2],"data_offsets":[{},{}]}}"#, 2 * i, 2 * i + 2);
    let header = format!("{{{}}}", ["a", "new", "third"].into_iter().enumerate().map(entry).collect::<Vec<_>>().join(","));
    let model = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let file = |name: &str, kind, content: Vec<u8>| FileSpec {
        name: name.into(),
        kind,
        content_size: content.len() as u64,
        content_digest: tpde_core::digest::short(&blake3::hash(&content)),
        content,
    };
    let files = [
        file("model.safetensors", FileKind::Safetensors, model),
        file("model.safetensors.index.json", FileKind::Verbatim, b"{}".to_vec()),
    ];
    let size = file_table_bytes(&files);
    let (finished, _) = encode(Some(&base), &target, files.into(), &options, builder(), &|_| {}).unwrap();
    assert_eq!(size, expanded(&finished, Section::Files));
}

#[test]
fn a_base_is_taken_where_it_differs_in_the_number_of_rows_at_most() {
    let shapes: [(&[u64], BaseKind); 7] = [
        (&[4, 2, 3], BaseKind::Same),
        (&[3, 2, 3], BaseKind::Prefix),
        (&[5, 2, 3], BaseKind::Prefix),
        (&[4, 3, 2], BaseKind::None),
        (&[3, 3, 3], BaseKind::None),
        (&[4, 6], BaseKind::None),
        (&[], BaseKind::None),
    ];
    let of = |dtype, shape: &[u64]| {
        let info = TensorInfo { name: "t".into(), dtype, shape: shape.to_vec() };
        let bytes = vec![1; info.bytes() as usize];
        (info, bytes)
    };
    let kind = |dtype, shape: &[u64]| {
        let (base, target) = (of(dtype, shape), of(Dtype::U8, &[4, 2, 3]));
        let base = MemoryCheckpoint::new([(base.0, &base.1[..])]).unwrap();
        let target = MemoryCheckpoint::new([(target.0, &target.1[..])]).unwrap();
        plan(Some(&base), &target, 0, &EncodeOptions::default()).unwrap().base_kind
    };
    for (shape, expected) in shapes {
        assert_eq!(kind(Dtype::U8, shape), expected, "{shape:?}");
        assert_eq!(kind(Dtype::I8, shape), BaseKind::None, "{shape:?} of another dtype");
    }
}
