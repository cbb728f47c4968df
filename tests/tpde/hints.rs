//! Advice for errors.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tpde::{Conflict, Encode, Error, Pair, Rule, SafetensorsCheckpoint, hint};

fn missing(path: impl AsRef<Path>) -> Error {
    Error::Io { action: "open", path: path.as_ref().to_owned(), source: io::ErrorKind::NotFound.into() }
}

fn wrong_base() -> Error {
    let [tensor, base, expected, found] = ["a", "a", "1", "2"].map(str::to_owned);
    Error::WrongBase { tensor, base, chunk: None, rule: Rule::TensorBaseDigest, expected, found }
}

#[test]
fn a_path_that_does_not_exist_may_be_something_else() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["model.safetensors", "pair.tpde-index", "both", "both.tpde-index"] {
        fs::write(at(name), "").unwrap();
    }
    let cases: [(PathBuf, Option<&str>); 18] = [
        ("https://host/model.safetensors".into(), Some("download the files first")),
        ("s3://bucket/pair.tpde-index".into(), Some("download the files first")),
        ("owner/Model-8B".into(), Some("hf download")),
        ("src/Model-8B".into(), None),
        ("owner/model.safetensors".into(), None),
        ("git+ssh://host/model".into(), Some("download the files first")),
        ("C:/models/model".into(), None),
        ("~/Model-8B".into(), None),
        ("models/llama.gguf".into(), None),
        ("checkpoints/step-10.bin".into(), None),
        ("owner/model@1".into(), None),
        ("owner/model\nb".into(), None),
        ("owner/model/file".into(), None),
        (at("nowhere"), None),
        (at("nowhere.tpde-index"), Some("named without its endings")),
        (at("both.tpde-blob"), Some("named without its endings")),
        (at("model.safetensors.tpde-index"), Some("no pair: is it a checkpoint, or are two arguments swapped")),
        (at("pair"), Some("a checkpoint is expected: are two arguments swapped")),
    ];
    for (path, expected) in cases {
        let found = hint(&missing(&path));
        assert_eq!(found.is_some(), expected.is_some(), "{path:?}: {found:?}");
        assert!(found.unwrap_or_default().contains(expected.unwrap_or_default()), "{path:?}: {found:?}");
    }
    let refused = Error::Io { action: "open", path: "owner/Model-8B".into(), source: io::ErrorKind::PermissionDenied.into() };
    assert_eq!(hint(&refused), None);
    // Where an output or a temporary file cannot be made, nothing is to be downloaded.
    for action in ["create", "create a file in", "write", "publish", "create a temporary folder in"] {
        for path in ["owner/Model-8B", "s3://bucket/pair", "pair.tpde-index"] {
            let error = Error::Io { action, path: path.into(), source: io::ErrorKind::NotFound.into() };
            assert_eq!(hint(&error), None, "{action} {path}");
        }
    }
    // The errors that opening gives.
    assert!(hint(&SafetensorsCheckpoint::open(at("pair")).err().unwrap()).unwrap().contains("swapped"));
    assert!(hint(&Pair::open(at("model.safetensors")).err().unwrap()).unwrap().contains("swapped"));
}

#[test]
fn a_step_has_the_hint_of_its_error_or_is_out_of_order() {
    let step = |number, source| Error::Step { number, pair: "p".into(), source: Box::new(source) };
    assert!(hint(&step(1, wrong_base())).unwrap().contains("one checkpoint that it was made from"));
    assert!(hint(&step(2, wrong_base())).unwrap().contains("is the order right"));
    assert!(hint(&step(2, missing("x.tpde-index"))).unwrap().contains("named without its endings"));
    let poisoned = Error::Poisoned { written: vec![0], total: 2, source: Box::new(wrong_base()) };
    assert_eq!(hint(&poisoned), hint(&wrong_base()));
    assert_eq!(hint(&Error::Cancelled), None);
}

#[test]
fn a_pair_without_its_base_says_what_it_fits() {
    let folder = tempfile::tempdir().unwrap();
    let weights = |value: u8| [0_u8; 512].map(|_| value);
    let info = || tpde::TensorInfo { name: "w".into(), dtype: tpde::Dtype::U8, shape: vec![512] };
    let (first, second) = (weights(1), weights(2));
    let base = tpde::MemoryCheckpoint::new([(info(), &first[..])]).unwrap();
    let target = tpde::MemoryCheckpoint::new([(info(), &second[..])]).unwrap();
    Encode::new(&target).base(&base).to_path(folder.path().join("pair")).unwrap();
    let pair = Pair::open(folder.path().join("pair")).unwrap();
    let error = tpde::Apply::new(&pair).to_path(folder.path().join("out")).unwrap_err();
    assert_eq!(error.rule(), Some(Rule::BaseTensor));
    assert!(hint(&error).unwrap().contains("one checkpoint that it was made from"));
    let again = Encode::new(&target).base(&base).to_path(folder.path().join("pair")).unwrap_err();
    assert_eq!(hint(&again), None, "programs name their own options");
    let twice = [pair, Pair::open(folder.path().join("pair")).unwrap()];
    let error = tpde::Merge::new(&twice).to_path(folder.path().join("merged")).unwrap_err();
    assert!(matches!(&error, Error::NotMergeable(refused) if refused.conflict == Conflict::Tensor), "{error}");
    assert!(hint(&error).unwrap().contains("fold joins pairs"));
}
