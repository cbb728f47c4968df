//! Writes rectangles of tensors as one safetensors file.

use super::plan::no_tensor;
use super::request::ApplyReport;
use crate::checkpoint::TensorInfo;
use crate::publish::{check_apart, reserve};
use crate::reader::PayloadDigests;
use crate::safetensors::{Neighbours, compose};
use crate::slice::{SliceMut, View};
use crate::source::zeroed;
use crate::watch::Progress;
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::index::ValidatedIndex;
use tpde_core::rectangle::Rectangle;

/// The default of [`Output::group_bytes`].
pub(super) const GROUP_BYTES: u64 = 256 << 20;

/// The file to be written.
pub(super) struct Output<'a> {
    pub path: &'a Path,
    /// Whether an existing file is replaced.
    pub replace: bool,
    /// The files that are read.
    pub inputs: Vec<PathBuf>,
    pub progress: Progress<'a>,
    /// Slices are rebuilt in groups of at most so many bytes, or one by one if they are larger.
    pub group_bytes: u64,
}

/// Writes and publishes a file of slices, which `rebuild` rebuilds.
pub(super) fn write(
    index: &ValidatedIndex,
    slices: &BTreeMap<String, Rectangle>,
    output: Output<'_>,
    rebuild: impl Fn(Vec<SliceMut<'_>>) -> Result<ApplyReport>,
) -> Result<ApplyReport> {
    let Output { path, replace, inputs, progress, group_bytes } = output;
    let infos = slices.iter().map(|(name, rectangle)| info(index, name, rectangle)).collect::<Result<Vec<_>>>()?;
    let (composed, tensors) = compose(infos)?;
    let neighbours = Neighbours::of_file(path, replace);
    check_apart(&[&[path.to_owned()], &neighbours.stale()?[..]].concat(), &inputs)?;
    let mut publication = neighbours.publication();
    publication.check_space(composed.size())?;
    let file = publication.add(path)?;
    let error = |e| Error::io("write", path, e);
    reserve(&file, composed.size()).and_then(|()| (&*file).write_all(&composed.content)).map_err(error)?;
    let (payload_digests, removed) = (PayloadDigests::All, Vec::new());
    let mut report = ApplyReport { tensors: 0, bytes: 0, digests_checked: true, payload_digests, removed };
    let mut rest = &tensors[..];
    while let Some(first) = rest.first() {
        let is_near = |end: u64| end - first.offset <= group_bytes;
        let count = rest.iter().take_while(|one| is_near(one.offset + one.info.bytes())).count().max(1);
        let (group, next) = rest.split_at(count);
        let size = group.iter().map(|one| one.info.bytes()).sum();
        let mut bytes = zeroed(size).map_err(|e| Error::io("allocate memory for", path, e))?;
        let (mut memories, mut left) = (Vec::with_capacity(count), &mut bytes[..]);
        for one in group {
            let (memory, behind) = left.split_at_mut(one.info.bytes() as usize);
            memories.push(SliceMut::new(&one.info.name, slices[&one.info.name].clone(), memory));
            left = behind;
        }
        add(&mut report, rebuild(memories)?);
        file.write_all_at(&bytes, composed.content.len() as u64 + first.offset).map_err(error)?;
        rest = next;
    }
    report.removed = publication.commit_after(progress, &|| neighbours.stale())?;
    Ok(report)
}

/// The tensor that a slice becomes.
fn info(index: &ValidatedIndex, name: &str, rectangle: &Rectangle) -> Result<TensorInfo> {
    let tensor = index.find(name).ok_or_else(|| no_tensor(name))?;
    let shape = tensor.whole_shape();
    if !rectangle.is_within(shape) {
        let name = Escaped(name);
        return Err(Error::InvalidArgument(format!("slice {rectangle} of tensor {name}: expected one within {shape:?}")));
    }
    let info = TensorInfo { name: name.to_owned(), dtype: tensor.dtype, shape: rectangle.extent.clone() };
    View::new((name, tensor.dtype, shape), rectangle.clone(), None, info.bytes(), ())?;
    index.check_has(name, rectangle)?;
    Ok(info)
}

/// Adds the report of a group.
fn add(sum: &mut ApplyReport, one: ApplyReport) {
    sum.payload_digests = match (sum.tensors, sum.payload_digests) {
        (0, _) => one.payload_digests,
        (_, before) => PayloadDigests::EachRead.and(before).and(one.payload_digests),
    };
    sum.tensors += one.tensors;
    sum.bytes += one.bytes;
    sum.digests_checked &= one.digests_checked;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Apply, Checkpoint, Dtype, Encode, EncodeOptions, MemoryCheckpoint, SafetensorsCheckpoint};

    #[test]
    fn slices_in_any_groups_are_the_bytes_of_one_file() {
        let shape = vec![64, 300];
        let names = ["a", "b", "c", "d"];
        let data: Vec<Vec<u8>> = (0..4u64).map(|i| (0..64 * 300 * 2).map(|n: u64| (n * (i + 3) / 7) as u8).collect()).collect();
        let infos = names.map(|name| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: shape.clone() });
        let target = MemoryCheckpoint::new(infos.into_iter().zip(data.iter().map(|bytes| &bytes[..]))).unwrap();
        let options = EncodeOptions::default().chunk_lanes(4096).payload_digests(true);
        let (pair, _) = Encode::new(&target).options(options).to_memory().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let whole = Rectangle::whole(&shape);
        let rows = Rectangle::new([3, 0], [1, 300]);
        let part = Rectangle::new([10, 20], [7, 30]);
        let empty = Rectangle::new([0, 300], [64, 0]);
        let slices: BTreeMap<_, _> = names.map(str::to_owned).into_iter().zip([whole, rows, part.clone(), empty]).collect();
        let apply = Apply::new(&pair);
        let files = [1, 700, 39_000, GROUP_BYTES].map(|group_bytes| {
            let path = folder.path().join(group_bytes.to_string());
            let output = Output { path: &path, replace: false, inputs: Vec::new(), progress: &|_| {}, group_bytes };
            let report = write(pair.index(), &slices, output, |slices| apply.to_slices(slices)).unwrap();
            assert_eq!((report.tensors, report.bytes), (4, 2 * (64 * 300 + 300 + 7 * 30)));
            assert_eq!(report.payload_digests, PayloadDigests::EachRead);
            std::fs::read(path).unwrap()
        });
        assert!(files.windows(2).all(|files| files[0] == files[1]));
        let written = SafetensorsCheckpoint::open(folder.path().join("1")).unwrap();
        let shapes: Vec<_> = written.tensors().iter().map(|tensor| tensor.shape.clone()).collect();
        assert_eq!(shapes, [vec![64, 300], vec![1, 300], vec![7, 30], vec![64, 0]]);
        let mut found = vec![0; 7 * 30 * 2];
        written.read(2, 0, &mut found).unwrap();
        let row = |row: usize| &data[2][2 * (row * 300 + 20)..][..60];
        assert!(found == (10..17).map(row).collect::<Vec<_>>().concat());

        for wrong in [Rectangle::new([60, 0], [5, 300]), Rectangle::new([0], [1]), Rectangle::new([u64::MAX, 0], [u64::MAX, 1])] {
            let path = folder.path().join("wrong");
            let refused = apply.slices_to_path(&BTreeMap::from([("a".to_owned(), wrong)]), &path);
            assert!(matches!(&refused, Err(Error::InvalidArgument(reason)) if reason.contains("within [64, 300]")), "{refused:?}");
            assert!(!path.exists());
        }
        let refused = apply.slices_to_path(&BTreeMap::from([("z".to_owned(), part)]), folder.path().join("z"));
        assert!(matches!(refused, Err(Error::InvalidArgument(_))));
    }
}
