//! The table of ARCHITECTURE.md that says which applications are refused, and why.

use crate::common::root;
use std::collections::{BTreeMap, BTreeSet};
use tpde::{
    Apply, ApplyChain, ApplyReport, Dtype, Encode, EncodeOptions, Error, FormatVersion, FusedSlices, InPlace, MemoryCheckpoint,
    Pair, Rectangle, Result, Slice, SliceCheckpoint, SliceMut, TensorInfo, TensorMut,
};

fn info(name: &str, dtype: Dtype, shape: &[u64]) -> TensorInfo {
    TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }
}

fn checkpoint<'a>(tensors: &[(TensorInfo, &'a [u8])]) -> MemoryCheckpoint<'a> {
    MemoryCheckpoint::new(tensors.iter().cloned()).unwrap()
}

fn pair(base: &[(TensorInfo, &[u8])], target: &[(TensorInfo, &[u8])], options: EncodeOptions) -> Pair<Vec<u8>> {
    Encode::new(&checkpoint(target)).base(&checkpoint(base)).options(options).to_memory().unwrap().0
}

/// Refusals by the first column of the table.
fn refusals() -> BTreeMap<&'static str, Error> {
    let (old, new) = ([1; 16], [2; 16]);
    let w = || info("w", Dtype::U8, &[4, 4]);
    let (base, target) = ([(w(), &old[..])], [(w(), &new[..])]);
    let whole = pair(&base, &target, EncodeOptions::default());
    let held = checkpoint(&base);
    let rows = |first: u64, count: u64| Rectangle::new([first, 0], [count, 4]);
    let slices = |slices: Vec<SliceMut<'_>>| Apply::new(&whole).base(&held).to_slices(slices);
    let mut memory = [0; 32];
    let mut found = BTreeMap::new();
    let mut add = |name, outcome: Result<ApplyReport>| _ = found.insert(name, outcome.unwrap_err());

    add("a tensor that the pair lacks", slices(vec![SliceMut::new("v", rows(0, 4), &mut memory[..16])]));
    let of_rank = {
        let part = |bytes| SliceCheckpoint::new([Slice::new(w(), rows(0, 2), bytes)]).unwrap();
        let options = EncodeOptions::default().cuts([("w", vec![rows(0, 2)])]);
        Encode::new(&part(&new[..8])).base(&part(&old[..8])).options(options).to_memory().unwrap().0
    };
    let outcome = Apply::new(&of_rank).base(&held).to_slices([SliceMut::new("w", rows(0, 4), &mut memory[..16])]);
    add("a slice of which the pair lacks elements", outcome);
    add("a slice beyond its tensor", slices(vec![SliceMut::new("w", rows(2, 4), &mut memory[..16])]));
    add("memory of another size", slices(vec![SliceMut::new("w", rows(0, 4), &mut memory[..15])]));
    add("a pitch below a row", slices(vec![SliceMut::new("w", rows(0, 4), &mut memory[..16]).pitch(3)]));
    let (a, b) = memory.split_at_mut(16);
    let outcome = slices(vec![SliceMut::new("w", rows(0, 2), &mut a[..8]), SliceMut::new("w", rows(1, 2), &mut b[..8])]);
    add("two slices with common elements", outcome);
    let fused = FusedSlices::new(&mut memory).slice("w", rows(0, 2), 0..8, None).slice("w", rows(2, 2), 7..15, None);
    add("two slices with common memory", Apply::new(&whole).base(&held).to_slices([fused]));

    let part = [SliceMut::new("w", rows(0, 2), &mut memory[..8])];
    add("in place, a part of a chunk", Apply::new(&whole).in_place_slices(part, InPlace::AllChecked));
    let in_place =
        |pair: &Pair<Vec<u8>>, bytes: &mut [u8]| Apply::new(pair).in_place([TensorMut { name: "w", bytes }], InPlace::AllChecked);
    let longer = pair(&base, &[(info("w", Dtype::U8, &[5, 4]), &[2; 20])], EncodeOptions::default());
    add("in place, another number of rows", in_place(&longer, &mut memory[..20]));
    let floats = pair(
        &[(info("w", Dtype::F32, &[4]), &old[..])],
        &[(info("w", Dtype::Bf16, &[4]), &new[..8])],
        EncodeOptions::default().format(FormatVersion::V1_3),
    );
    add("in place, a base of another dtype", in_place(&floats, &mut memory[..8]));
    let renaming = pair(&[(info("v", Dtype::U8, &[4, 4]), &old[..])], &target, EncodeOptions::default().renamed([("w", "v")]));
    let chain = ApplyChain::new([&renaming, &pair(&target, &base, EncodeOptions::default())])
        .in_place([TensorMut { name: "w", bytes: &mut memory[..16] }]);
    add("in place, a chain that renames", chain);

    let onto = |base: &MemoryCheckpoint<'_>| Apply::new(&whole).base(base).to_buffers(&mut [&mut [0; 16]]);
    add("a base without a tensor", onto(&checkpoint(&[(info("v", Dtype::U8, &[4, 4]), &old[..])])));
    add("a base of another shape", onto(&checkpoint(&[(info("w", Dtype::U8, &[2, 8]), &old[..])])));
    let some = SliceCheckpoint::new([Slice::new(w(), rows(0, 2), &old[..8])]).unwrap();
    let outcome = Apply::new(&whole).base(&some).to_slices([SliceMut::new("w", rows(0, 2), &mut memory[..8])]);
    add("a base that lacks lanes of a chunk", outcome);
    found
}

#[test]
fn the_table_of_refusals_is_what_the_code_does() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let table = text.split_once("| request | refused as | the message contains |\n|---|---|---|\n").expect("the table").1;
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect();
    let found = refusals();
    assert_eq!(rows.iter().map(|row| row[0]).collect::<BTreeSet<_>>(), found.keys().copied().collect());
    for row in rows {
        let [request, kind, why] = row[..] else { panic!("{row:?}") };
        let error = &found[request];
        let variant = format!("{error:?}");
        let variant = variant.split(|c: char| !c.is_alphanumeric()).next().unwrap();
        assert_eq!(kind.trim_matches('`'), variant, "{request}: {error}");
        assert!(error.to_string().contains(why), "{request}: {error}");
    }
}
