//! Builders: the effect of each setting, and the arguments that they refuse.

#[allow(dead_code, reason = "other tests use more of it")]
mod common;

use common::*;
use std::fs;
use std::path::Path;
use tempfile::TempDir;
use tpde::{
    Apply, Authenticity, Checkpoint, Codec, Encode, EncodeOptions, Error, InPlace, MemoryCheckpoint, Pair, Rectangle, Result,
    SafetensorsCheckpoint, SliceMut, TensorInfo, TensorMut, Verify, Work,
};

/// A folder with the checkpoint files `base` and `target`, of two tensors each, and the tensors.
struct Files {
    place: TempDir,
    base: Vec<Tensor>,
    target: Vec<Tensor>,
}

impl Files {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let base: Vec<_> = ["a", "b"].iter().map(|name| tensor(name, "BF16", &[64, 256], 1)).collect();
        let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 20)).collect();
        write_file(&place.path().join("base"), &base);
        write_file(&place.path().join("target"), &target);
        Self { place, base, target }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.place.path().join(name)
    }

    fn open(&self, name: &str) -> SafetensorsCheckpoint {
        SafetensorsCheckpoint::open(self.path(name)).unwrap()
    }

    fn pair(&self) -> Pair<Vec<u8>> {
        Encode::new(&self.open("target")).base(&self.open("base")).to_memory().unwrap().0
    }
}

fn is_argument<T: std::fmt::Debug>(outcome: Result<T>, what: &str) {
    assert!(matches!(&outcome, Err(Error::InvalidArgument(message)) if message.contains(what)), "{outcome:?}");
}

#[test]
fn a_pair_in_memory_rebuilds_the_files_of_its_target() {
    let files = Files::new();
    let pair = files.pair();
    assert_eq!(pair.index().files().len(), 1);
    Apply::new(&pair).base(&files.open("base")).to_path(files.path("out")).unwrap();
    assert!(fs::read(files.path("out")).unwrap() == fs::read(files.path("target")).unwrap());
}

#[test]
fn a_pair_that_needs_a_base_is_refused_without_one() {
    let files = Files::new();
    let pair = files.pair();
    let apply = Apply::new(&pair);
    is_argument(apply.to_path(files.path("out")), "needs a base, for tensor a");
    is_argument(apply.to_memory(), "needs a base, for tensor a");
    is_argument(apply.verify(), "needs a base, for tensor a");
    is_argument(apply.range("b", 0..1), "needs a base, for tensor b");
    is_argument(apply.changes("b"), "needs a base, for tensor b");
    is_argument(Verify::new(&pair).without_base().run(), "needs a base, for tensor a");
    assert!(!files.path("out").exists());

    let whole = Encode::new(&files.open("target")).to_memory().unwrap().0;
    Apply::new(&whole).to_path(files.path("out")).unwrap();
    assert!(fs::read(files.path("out")).unwrap() == fs::read(files.path("target")).unwrap());
}

#[test]
fn a_header_that_only_the_base_has_needs_the_base() {
    // The all-zero target is smallest without a base, but its header is still taken from the base.
    let mut files = Files::new();
    files.target.iter_mut().for_each(|tensor| tensor.bytes.fill(0));
    write_file(&files.path("target"), &files.target);
    let pair = files.pair();
    let tensors = Apply::new(&pair).to_memory().unwrap();
    assert!(tensors.iter().all(|(_, bytes)| bytes.iter().all(|&byte| byte == 0)));
    is_argument(Apply::new(&pair).to_path(files.path("out")), "needs a base, for the header of a file");
    is_argument(Verify::new(&pair).without_base().run(), "needs a base, for the header of a file");
    assert_eq!(Apply::new(&pair).check_writable().unwrap_err().rule(), Some(tpde::Rule::BaseFile));
    // A selection of tensors gets its own header.
    Apply::new(&pair).tensors(|name| name == "a").to_path(files.path("out")).unwrap();
    assert_eq!(files.open("out").tensors().len(), 1);
}

#[test]
fn memory_has_the_selected_tensors_in_their_order() {
    let files = Files::new();
    let (pair, base) = (files.pair(), files.open("base"));
    let names = |tensors: &[(TensorInfo, Vec<u8>)]| tensors.iter().map(|(info, _)| info.name.clone()).collect::<Vec<_>>();
    let all = Apply::new(&pair).base(&base).to_memory().unwrap();
    assert_eq!(names(&all), ["a", "b"]);
    assert!(all.iter().zip(&files.target).all(|((_, bytes), target)| *bytes == target.bytes));
    let one = Apply::new(&pair).base(&base).tensors(|name| name != "a").to_memory().unwrap();
    assert!(names(&one) == ["b"] && one[0].1 == files.target[1].bytes);
}

#[test]
fn in_place_refuses_what_it_cannot_honour() {
    struct NoDevice;
    impl tpde::Accelerator for NoDevice {
        fn rebuild(&self, _: &Work<'_>, _: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<tpde::PayloadDigests> {
            panic!("the device was used")
        }
    }
    let files = Files::new();
    let (pair, base) = (files.pair(), files.open("base"));
    let mut bytes = files.base[0].bytes.clone();
    let apply = |apply: Apply<'_, Vec<u8>>, bytes: &mut Vec<u8>, name: &str| {
        apply.in_place([TensorMut { name, bytes }], InPlace::AllChecked)
    };
    is_argument(apply(Apply::new(&pair).base(&base), &mut bytes, "a"), "takes no base");
    is_argument(apply(Apply::new(&pair).on(&NoDevice), &mut bytes, "a"), "runs on the processor");
    let slice = SliceMut::new("a", Rectangle::whole(&[64, 256]), &mut bytes);
    let slices = Apply::new(&pair).on(&NoDevice).in_place_slices([slice], InPlace::AllChecked);
    is_argument(slices, "runs on the processor");
    is_argument(apply(Apply::new(&pair).tensors(|name| name == "b"), &mut bytes, "a"), "tensor a is not selected");
    is_argument(apply(Apply::new(&pair), &mut bytes, "c"), "no tensor c in the pair");
    assert!(bytes == files.base[0].bytes, "nothing was written");
    write_file(&files.path("grown"), &[tensor("a", "BF16", &[65, 256], 1)]);
    let zstd = EncodeOptions::default().codec(Codec::Zstd);
    let (grown, _) = Encode::new(&files.open("grown")).base(&base).options(zstd).to_memory().unwrap();
    is_argument(apply(Apply::new(&grown), &mut bytes, "a"), "tensor a changes its number of rows, which cannot be done in place");
    let report = apply(Apply::new(&pair).tensors(|name| name == "a"), &mut bytes, "a").unwrap();
    assert!(report.tensors == 1 && report.digests_checked && bytes == files.target[0].bytes);
    // Without digests, the sums still detect a wrong base.
    let mut wrong = files.base[0].bytes.clone();
    wrong[0] ^= 1;
    let outcome = apply(Apply::new(&pair).digests(false), &mut wrong, "a");
    assert!(matches!(outcome, Err(Error::WrongBase { .. })), "{outcome:?}");
}

#[test]
fn existing_files_and_other_inputs_are_replaced_only_where_that_is_allowed() {
    let files = Files::new();
    let (base, target) = (files.open("base"), files.open("target"));
    let encode = || Encode::new(&target).base(&base);
    encode().to_path(files.path("pair")).unwrap();
    assert!(matches!(encode().to_path(files.path("pair")), Err(Error::Io { .. })));
    encode().overwrite(true).to_path(files.path("pair")).unwrap();
    // A file listed as an input is never replaced, whatever its name.
    is_argument(encode().overwrite(true).inputs([files.path("pair.tpde-index")]).to_path(files.path("pair")), "pair.tpde-index");

    let pair = Pair::open(files.path("pair")).unwrap();
    let apply = || Apply::new(&pair).base(&base);
    apply().to_path(files.path("out")).unwrap();
    assert!(matches!(apply().to_path(files.path("out")), Err(Error::Io { .. })));
    apply().overwrite(true).to_path(files.path("out")).unwrap();
    is_argument(apply().overwrite(true).to_path(files.path("base")), "base");
}

#[test]
fn a_target_in_memory_is_compared_by_its_tensors() {
    let files = Files::new();
    let (pair, base) = (files.pair(), files.open("base"));
    let tensors = Apply::new(&pair).base(&base).to_memory().unwrap();
    let memory = |tensors: &[(TensorInfo, Vec<u8>)]| -> Result<_> {
        let target = MemoryCheckpoint::new(tensors.iter().map(|(info, bytes)| (info.clone(), &bytes[..])))?;
        Verify::new(&pair).target(&target).run()
    };
    let found = memory(&tensors).unwrap();
    assert!(found.checked.target_checked && found.payload_authenticity == Authenticity::Checked);
    let mut other = tensors.clone();
    other[1].1[7] ^= 1;
    assert_eq!(memory(&other).unwrap_err().rule(), Some(tpde::Rule::TensorTargetDigest));
}

#[test]
fn paths_may_be_of_any_type_of_path() {
    let files = Files::new();
    let text = files.path("pair").to_str().unwrap().to_owned();
    Encode::new(&files.open("target")).to_path(&*text).unwrap();
    Pair::open(&text).unwrap();
    Pair::open(Path::new(&text)).unwrap();
    Pair::open(std::ffi::OsStr::new(&text)).unwrap();
    assert_eq!(tpde::PairPaths::new(&text).blob, files.path("pair.tpde-blob"));
}
