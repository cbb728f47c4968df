//! Advice for errors: a likely cause, or what helps.

#![forbid(unsafe_code)]

use crate::reader::PairPaths;
use std::io;
use std::path::Path;
use tpde_core::error::{Conflict, Error, Rule};

/// Advice for an error, which a program shows after the message. `None` if there is none beyond the message.
///
/// The advice names no option: programs know their own. For a path that does not exist, this looks at the file system.
pub fn hint(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::Step { number: 2.., source, .. } if matches!(**source, Error::WrongBase { .. } | Error::AlreadyApplied { .. }) => {
            "each pair of a chain is made from the target of the pair before it: is the order right?"
        }
        Error::Step { source, .. } | Error::Poisoned { source, .. } => return hint(source),
        Error::WrongBase { .. } => {
            "a pair fits the one checkpoint that it was made from; one that was converted or saved anew may differ in its bits"
        }
        Error::Io { action, path, source } if source.kind() == io::ErrorKind::NotFound && is_reading(action) => {
            return of_missing(path);
        }
        Error::Changed { .. } => "let the program that writes the file finish, then try again",
        Error::NotMergeable(refused) => match refused.conflict {
            Conflict::Tensor => "fold joins pairs that follow each other; subset makes a pair without the tensor",
            Conflict::Type | Conflict::Cuts => "subset makes a pair without the tensor",
            Conflict::Base => "the pairs of a merge must all be made from one base",
            Conflict::File => "the tensors can be merged without the files",
        },
        Error::NotWritable { .. } => "the pair can still be applied to tensors in memory",
        Error::Invalid(invalid) => return of_rule(invalid.rule),
        _ => return None,
    })
}

fn of_rule(rule: Rule) -> Option<&'static str> {
    Some(match rule {
        Rule::BaseTensor | Rule::ChunkBaseSum => "a pair fits the one checkpoint that it was made from",
        Rule::BaseFile => "the pair takes this header from its base: pass that file, or rebuild the tensors under a new header",
        Rule::HeaderPayloadRoot | Rule::PayloadDigest => {
            "the payloads are not those that the pair was made with: fetch both files again, from a source that you trust"
        }
        Rule::BlobPairDigest | Rule::BlobVersionMinor => "index and blob are of two pairs: fetch both files of one again",
        Rule::BlobBlobSize => "the blob is cut short or belongs to another index: fetch both files again",
        Rule::HeaderIndexSize => "the index is cut short, or other bytes follow it: fetch it again",
        Rule::HeaderMagic | Rule::BlobMagic => "this is not a file of a pair, or an end-of-line conversion has damaged it",
        Rule::HeaderVersionMajor | Rule::HeaderRequiredFeatures | Rule::TensorCodec | Rule::TensorDtype | Rule::TensorBaseKind => {
            "a newer tpde may be able to read this pair"
        }
        Rule::HeaderCrc32 | Rule::IndexDigest | Rule::BlobCrc32 | Rule::PayloadCrc32 | Rule::PayloadPadding => {
            "the file was damaged after it was written: fetch it again"
        }
        _ => return None,
    })
}

/// Whether an action needs something that is there, and makes nothing.
fn is_reading(action: &str) -> bool {
    matches!(action, "open" | "read" | "list" | "look at")
}

/// Advice for a path that does not exist.
fn of_missing(path: &Path) -> Option<&'static str> {
    let ending = path.extension().and_then(|ending| ending.to_str());
    Some(match ending {
        _ if is_url(path) => "this needs a path of this machine: download the files first. Only stores have URLs",
        Some("tpde-index") if path.with_extension("").exists() => {
            "a file or folder has this name, but is no pair: is it a checkpoint, or are two arguments swapped?"
        }
        Some("tpde-index" | "tpde-blob") if !is_on_hub(&path.with_extension("")) => {
            "a pair is named without its endings, or by either file; both files must be in one folder"
        }
        _ if PairPaths::new(path).index.exists() => {
            "this is the name of a pair, where a checkpoint is expected: are two arguments swapped?"
        }
        _ if is_on_hub(path) => "if this is a model on a hub, download it first: hf download NAME --local-dir FOLDER",
        _ => return None,
    })
}

fn is_url(path: &Path) -> bool {
    // One letter is a drive.
    let is_scheme = |scheme: &str| scheme.len() > 1 && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    path.to_str().and_then(|path| path.split_once(":/")).is_some_and(|(scheme, _)| is_scheme(scheme))
}

/// Whether a path that does not exist may be the name of a model, as in `owner/name`.
fn is_on_hub(path: &Path) -> bool {
    const FILES: [&str; 9] = ["safetensors", "safetensor", "gguf", "bin", "pt", "pth", "ckpt", "json", "npz"];
    let is_name = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) && !name.starts_with('.');
    let is_file = path.extension().and_then(|ending| ending.to_str()).is_some_and(|ending| FILES.contains(&ending));
    let parts: Option<Vec<_>> = path.iter().map(|part| part.to_str().filter(|name| is_name(name))).collect();
    !is_file && parts.is_some_and(|parts| parts.len() == 2 && !Path::new(parts[0]).exists())
}
