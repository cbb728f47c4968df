//! Builders: the effect of each setting, and the arguments that they refuse.

use crate::common::*;
use std::fs;
use std::path::Path;
use tempfile::TempDir;
use tpde::{
    Apply, Authenticity, Checkpoint, Codec, Encode, EncodeOptions, Error, InPlace, MemoryCheckpoint, Pair, Rectangle, Result, Rule,
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

/// Whether the outcome says that a tensor of the base is missing, or a file if there is no tensor.
fn needs_base<T: std::fmt::Debug>(outcome: Result<T>, tensor: Option<&str>) {
    let Err(Error::Invalid(invalid)) = outcome else { panic!("{outcome:?}") };
    let rule = if tensor.is_some() { Rule::BaseTensor } else { Rule::BaseFile };
    assert_eq!((invalid.rule, invalid.at.tensor.as_deref()), (rule, tensor), "{invalid}");
    assert!(invalid.found.contains("no base"), "{invalid}");
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
    needs_base(apply.to_path(files.path("out")), Some("a"));
    needs_base(apply.to_memory(), Some("a"));
    needs_base(apply.verify(), Some("a"));
    needs_base(apply.range("b", 0..1), Some("b"));
    needs_base(apply.changes("b"), Some("b"));
    needs_base(Verify::new(&pair).without_base().run(), Some("a"));
    assert!(!files.path("out").exists());

    let whole = Encode::new(&files.open("target")).to_memory().unwrap().0;
    Apply::new(&whole).to_path(files.path("out")).unwrap();
    assert!(fs::read(files.path("out")).unwrap() == fs::read(files.path("target")).unwrap());
}

#[test]
fn a_header_that_only_the_base_has_needs_the_base() {
    // The all-zero target is smallest without a base, but its long header is still taken from the base.
    let mut files = Files::new();
    files.target.iter_mut().for_each(|tensor| tensor.bytes.fill(0));
    write_file(&files.path("target"), &files.target);
    for name in ["base", "target"] {
        let long = with_long_header(fs::read(files.path(name)).unwrap());
        fs::write(files.path(name), long).unwrap();
    }
    let pair = files.pair();
    let tensors = Apply::new(&pair).to_memory().unwrap();
    assert!(tensors.iter().all(|(_, bytes)| bytes.iter().all(|&byte| byte == 0)));
    needs_base(Apply::new(&pair).to_path(files.path("out")), None);
    needs_base(Verify::new(&pair).without_base().run(), None);
    assert_eq!(Apply::new(&pair).check_writable().unwrap_err().rule(), Some(Rule::BaseFile));
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
fn a_wrong_base_is_reported_with_the_tensor_of_the_pair_the_chunk_and_the_rule() {
    let files = Files::new();
    let (grown, base) = (tensor("grown", "BF16", &[32, 256], 1), files.open("base"));
    write_file(&files.path("target"), &[named(&files.target[0], "a"), named(&files.target[1], "renamed"), tuned(&grown, 20)]);
    let options = EncodeOptions::default().codec(Codec::Zstd).chunk_lanes(4096).renamed([("renamed", "b"), ("grown", "a")]);
    let (pair, _) = Encode::new(&files.open("target")).base(&base).options(options).to_memory().unwrap();
    let kinds: Vec<_> = pair.index().tensors().map(|tensor| (tensor.name, tensor.base_name, tensor.chunk_count)).collect();
    assert_eq!(kinds, [("a", "a", 4), ("grown", "a", 2), ("renamed", "b", 4)]);

    let wrong = |name: &str, byte: usize| {
        let mut tensors = files.base.clone();
        tensors.iter_mut().filter(|tensor| tensor.name == name).for_each(|tensor| tensor.bytes[byte] ^= 1);
        write_file(&files.path("wrong"), &tensors);
        files.open("wrong")
    };
    let is = |error: Error, expected: (&str, &str, Option<u32>)| {
        let Error::WrongBase { tensor, base, chunk, rule, .. } = &error else { panic!("{error}") };
        assert_eq!((&tensor[..], &base[..], *chunk), expected, "{error}");
        assert_eq!(*rule, if chunk.is_some() { Rule::ChunkBaseSum } else { Rule::TensorBaseDigest });
        assert_eq!(error.rule(), Some(*rule));
        assert!(error.to_string().starts_with(&format!("wrong base: tensor {tensor}")), "{error}");
    };
    // Chunk 8 is the third of `renamed`.
    let other = wrong("b", 2 * 4096 * 2 + 5);
    let apply = Apply::new(&pair).base(&other);
    is(apply.verify().unwrap_err(), ("renamed", "b", Some(8)));
    is(apply.to_memory().unwrap_err(), ("renamed", "b", Some(8)));
    is(apply.to_path(files.path("out")).unwrap_err(), ("renamed", "b", Some(8)));
    is(Verify::new(&pair).base(&other).run().unwrap_err(), ("renamed", "b", Some(8)));
    let mut bytes = files.base[1].bytes.clone();
    bytes[2 * 4096 * 2 + 5] ^= 1;
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let apply = Apply::new(&pair).tensors(|name| name == "renamed");
        let error = apply.in_place([TensorMut { name: "renamed", bytes: &mut bytes.clone() }], mode).unwrap_err();
        match error {
            Error::Poisoned { source, .. } => assert_eq!(source.rule(), Some(Rule::ChunkBaseSum), "{source}"),
            error => is(error, ("renamed", "b", Some(8))),
        }
        let slice = SliceMut::new("renamed", Rectangle::whole(&[64, 256]), &mut bytes);
        let error = Apply::new(&pair).in_place_slices([slice], InPlace::AllChecked).unwrap_err();
        is(error, ("renamed", "b", Some(8)));
    }
    let mut out = vec![0; files.base[1].bytes.len()];
    let slice = SliceMut::new("renamed", Rectangle::whole(&[64, 256]), &mut out);
    is(apply.to_slices([slice]).unwrap_err(), ("renamed", "b", Some(8)));
    let Err(Error::Invalid(invalid)) = apply.range("renamed", 8192..8193) else { panic!() };
    assert_eq!((invalid.rule, invalid.at.tensor.as_deref(), invalid.at.chunk), (Rule::ChunkBaseSum, Some("renamed"), Some(8)));

    // Rows of `a` that `grown` does not have: its sums are right, those of tensor `a` are not.
    let other = wrong("a", 3 * 4096 * 2);
    is(Apply::new(&pair).base(&other).verify().unwrap_err(), ("a", "a", Some(3)));
    let grown = Apply::new(&pair).base(&other).tensors(|name| name == "grown").verify().unwrap_err();
    is(grown, ("grown", "a", None));

    let applied = [named(&files.target[1], "b"), named(&files.target[0], "a")];
    write_file(&files.path("applied"), &applied);
    let applied = files.open("applied");
    let applied = Apply::new(&pair).base(&applied).tensors(|name| name == "renamed").verify().unwrap_err();
    let Error::AlreadyApplied { tensor, chunk, rule } = &applied else { panic!("{applied}") };
    assert_eq!((&tensor[..], *chunk, *rule), ("renamed", Some(6), Rule::ChunkBaseSum));
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
    assert_eq!(memory(&other).unwrap_err().rule(), Some(Rule::TensorTargetDigest));
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
