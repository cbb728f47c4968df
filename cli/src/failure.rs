//! Failures: messages, hints and exit codes.

use super::text::{self, BAD, HINT};
use clap::builder::StyledStr;
use clap::error::ContextValue;
use serde::Serialize;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use tpde::{Conflict, Error, Escaped, Location, Rule};

/// Exit code for wrong data.
const DATA: u8 = 1;
/// Exit code for a usage error.
const USAGE: u8 = 2;
/// Exit code for an error of the operating system.
const SYSTEM: u8 = 3;
/// Exit code for a device that does not exist.
const DEVICE: u8 = 4;

/// Maximum number of characters of a tip from clap.
const MAX_TIP_CHARS: usize = 200;

/// Error for a failed write to standard output.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub struct Output(#[source] pub io::Error);

#[derive(Serialize)]
struct ErrorDocument {
    error: Failure,
}

#[derive(Serialize)]
struct Failure {
    kind: &'static str,
    /// Id of the violated rule of the specification.
    rule: Option<&'static str>,
    /// The pair, if it is one of several inputs.
    pair: Option<String>,
    tensor: Option<String>,
    /// Number of the entry in the tensor table, if the name is not known.
    entry: Option<usize>,
    chunk: Option<u32>,
    /// Number of the step of a chain, from 1.
    step: Option<usize>,
    message: String,
    hint: Option<&'static str>,
}

/// Prints an error of the library or of a verb, and returns the exit code.
pub fn show(error: &anyhow::Error, json: bool) -> ExitCode {
    let ours = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
    let theirs = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    if ours.is_none() && theirs.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS; // the reader of our output has closed the pipe
    }
    let (kind, code) = of_store(error).unwrap_or_else(|| kind_and_code(ours, theirs.is_some()));
    let mut at = Location::default();
    match ours.map(cause) {
        Some(Error::Invalid(invalid)) => at = invalid.at.clone(),
        Some(Error::WrongBase { tensor, chunk, .. } | Error::AlreadyApplied { tensor, chunk, .. }) => {
            (at.tensor, at.chunk) = (Some(tensor.clone()), *chunk);
        }
        Some(Error::NotMergeable(refused)) if refused.conflict != Conflict::File => at.tensor = Some(refused.name.clone()),
        _ => {}
    }
    let mut step = None;
    if let Some(Error::Step { number, pair, .. }) = ours {
        (step, at.pair) = (Some(*number), Some(pair.clone()));
    }
    let message = message(error);
    let hint = ours.map_or_else(|| hint_of_store(error), hint);
    // If stderr is closed too, only the exit code reports the error.
    let _ = writeln!(anstream::stderr(), "{BAD}error:{BAD:#} {message}");
    if let Some(hint) = hint {
        let _ = writeln!(anstream::stderr(), "{HINT}hint:{HINT:#} {hint}");
    }
    if json {
        let rule = ours.and_then(Error::rule).map(Rule::id);
        print(Failure { kind, rule, pair: at.pair, tensor: at.tensor, entry: at.entry, chunk: at.chunk, step, message, hint });
    }
    ExitCode::from(code)
}

/// The error of a step of a chain; other errors as they are.
fn cause(error: &Error) -> &Error {
    match error {
        Error::Step { source, .. } => source,
        _ => error,
    }
}

/// Kind of the error in JSON, and exit code. Both are listed in docs/cli.md.
fn kind_and_code(ours: Option<&Error>, is_io: bool) -> (&'static str, u8) {
    match ours.map(cause) {
        Some(Error::Io { .. }) => ("io", SYSTEM),
        Some(Error::Invalid(_)) => ("invalid", DATA),
        Some(Error::UnexpectedPair { .. }) => ("unexpected_pair", DATA),
        Some(Error::WrongBase { .. }) => ("wrong_base", DATA),
        Some(Error::AlreadyApplied { .. }) => ("already_applied", DATA),
        Some(Error::BadCheckpoint { .. }) => ("bad_checkpoint", DATA),
        Some(Error::Changed { .. }) => ("changed", SYSTEM),
        Some(Error::NotWritable { .. }) => ("not_writable", DATA),
        Some(Error::NotMergeable(_)) => ("not_mergeable", DATA),
        Some(Error::Limit { .. }) => ("limit", DATA),
        Some(Error::InvalidArgument(_)) => ("invalid_argument", USAGE),
        Some(Error::NoDevice(_)) => ("no_device", DEVICE),
        Some(Error::NoLibrary { .. }) => ("no_library", DEVICE),
        Some(Error::Device { .. }) => ("device", SYSTEM),
        None if is_io => ("io", SYSTEM),
        _ => ("other", DATA),
    }
}

/// As [`kind_and_code`], if the error is one of stores.
#[cfg(feature = "store")]
fn of_store(error: &anyhow::Error) -> Option<(&'static str, u8)> {
    use tpde_store::Error;
    Some(match error.chain().find_map(|cause| cause.downcast_ref::<Error>())? {
        Error::NotAStore { .. } | Error::Replaced { .. } => ("not_a_store", DATA),
        Error::AlreadyAStore { .. } => ("already_a_store", DATA),
        Error::Schema { .. } | Error::Manifest { .. } => ("manifest", DATA),
        Error::Damaged { .. } => ("damaged", DATA),
        Error::NoVersion { .. } => ("no_version", DATA),
        Error::Pruned { .. } => ("pruned", DATA),
        Error::Unreachable { .. } => ("unreachable", DATA),
        Error::External { .. } => ("external", USAGE),
        Error::InvalidArgument(_) => ("invalid_argument", USAGE),
        Error::Request { .. } | Error::NoPutIfAbsent { .. } => ("request", SYSTEM),
        Error::Conflict { .. } => ("conflict", SYSTEM),
        Error::TooSlow { .. } => ("too_slow", SYSTEM),
        _ => ("other", DATA),
    })
}

#[cfg(not(feature = "store"))]
fn of_store(_: &anyhow::Error) -> Option<(&'static str, u8)> {
    None
}

/// Prints to stderr why a command failed after its report was printed.
pub fn refused(reason: &str) -> ExitCode {
    let _ = writeln!(anstream::stderr(), "{BAD}error:{BAD:#} {reason}");
    ExitCode::from(DATA)
}

/// Prints the output of clap: errors, help and version. Help and version are text even with `--json`.
pub fn usage(mut error: clap::Error) -> ExitCode {
    shorten(&mut error);
    let printed = error.print();
    let is_error = error.use_stderr();
    if !is_error && printed.is_err_and(|e| e.kind() != io::ErrorKind::BrokenPipe) {
        return ExitCode::from(SYSTEM);
    }
    if is_error && asks_for_json(std::env::args_os().skip(1)) {
        let message = usage_message(&error);
        print(Failure {
            kind: "usage",
            rule: None,
            pair: None,
            tensor: None,
            entry: None,
            chunk: None,
            step: None,
            message,
            hint: None,
        });
    }
    ExitCode::from(if is_error { USAGE } else { 0 })
}

/// Whether `--json` is among the arguments. `--json=VALUE` counts too, although clap refuses it.
fn asks_for_json(arguments: impl Iterator<Item = OsString>) -> bool {
    let mut options = arguments.take_while(|argument| argument != "--");
    options.any(|option| option == "--json" || option.as_encoded_bytes().starts_with(b"--json="))
}

/// Escapes the arguments that clap quotes. Removes tips longer than [`MAX_TIP_CHARS`].
fn shorten(error: &mut clap::Error) {
    let shown = |text: &String| Escaped(text).to_string();
    let is_long = |tips: &[StyledStr]| tips.iter().any(|tip| tip.to_string().chars().count() > MAX_TIP_CHARS);
    let quoted: Vec<_> = error.context().map(|(kind, value)| (kind, value.clone())).collect();
    for (kind, value) in quoted {
        match value {
            ContextValue::String(text) => _ = error.insert(kind, ContextValue::String(shown(&text))),
            ContextValue::Strings(texts) => _ = error.insert(kind, ContextValue::Strings(texts.iter().map(shown).collect())),
            ContextValue::StyledStrs(tips) if is_long(&tips) => _ = error.remove(kind),
            _ => {}
        }
    }
}

/// clap's error on one line, with missing arguments and tips.
fn usage_message(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let lines = text.trim_start_matches("error: ").lines().map(str::trim);
    let told = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    told.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

fn print(error: Failure) {
    let _ = text::json(io::stdout().lock(), "tpde.error/1", &ErrorDocument { error });
}

/// The context of an error and the first cause from the library, from the system or from a failed output, on one line. Causes
/// below that one are omitted, because its message already includes them.
fn message(error: &anyhow::Error) -> String {
    let mut parts = Vec::new();
    for cause in error.chain() {
        parts.push(cause.to_string());
        if cause.is::<Error>() || cause.is::<Output>() || cause.is::<io::Error>() || is_of_store(cause) {
            break;
        }
    }
    parts.join(": ")
}

#[cfg(feature = "store")]
fn is_of_store(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.is::<tpde_store::Error>()
}

#[cfg(not(feature = "store"))]
fn is_of_store(_: &(dyn std::error::Error + 'static)) -> bool {
    false
}

/// Advice that names options of the program; otherwise that of the library.
fn hint(error: &Error) -> Option<&'static str> {
    Some(match cause(error) {
        // Its message says what to do.
        Error::Io { action: "write a version to", .. } => return None,
        // Raised by the library itself: an error of the operating system would have a number.
        Error::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists && source.raw_os_error().is_none() => {
            "--force replaces what exists"
        }
        Error::NotMergeable(refused) if refused.conflict == Conflict::File => "--no-files merges the tensors without the files",
        Error::NoLibrary { .. } => "without --trust the processor expands payloads of codec zstd",
        Error::NoDevice(_) => "without --device the processor does the same work",
        Error::Invalid(invalid) if invalid.rule == Rule::BaseTensor => {
            "the pair needs the checkpoint that it was made from: pass that as BASE"
        }
        Error::Invalid(invalid) if invalid.rule == Rule::BaseFile => {
            "the pair takes this header from its base: pass that file, or rebuild the tensors under a new header with --tensor '*'"
        }
        _ => return tpde::hint(error),
    })
}

/// As [`hint`], if the error is one of stores.
#[cfg(feature = "store")]
fn hint_of_store(error: &anyhow::Error) -> Option<&'static str> {
    use tpde_store::Error;
    Some(match error.chain().find_map(|cause| cause.downcast_ref::<Error>())? {
        Error::NotAStore { .. } => "tpde store init makes a store: is this the right folder or URL?",
        Error::External { .. } => {
            "--have VERSION=PATH passes it as a base; if it is this version that is wanted, use that checkpoint as it is"
        }
        error => return error.hint(),
    })
}

#[cfg(not(feature = "store"))]
fn hint_of_store(_: &anyhow::Error) -> Option<&'static str> {
    None
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    fn the_documents_list_each_kind_with_its_exit_code() {
        let code = |name: &str| ["", "DATA", "USAGE", "SYSTEM", "DEVICE"].iter().position(|code| *code == name).unwrap();
        let arms = include_str!("failure.rs").lines().filter_map(|line| line.split_once("=> (\"")?.1.strip_suffix("),"));
        let mut expected: BTreeSet<_> =
            arms.map(|arm| arm.split_once("\", ").unwrap()).map(|(kind, name)| (kind, code(name))).collect();
        expected.insert(("usage", code("USAGE")));
        let document = include_str!("../../docs/cli.md");
        let table = document
            .lines()
            .skip_while(|line| !line.starts_with("| `kind` | exit code"))
            .skip(2)
            .take_while(|line| line.starts_with('|'));
        let rows = table.map(|row| row.split('|').map(str::trim).collect::<Vec<_>>());
        let documented: BTreeSet<(&str, usize)> = rows.map(|row| (row[1].trim_matches('`'), row[2].parse().unwrap())).collect();
        assert!(documented.len() > 10);
        assert_eq!(documented, expected);
    }
}
