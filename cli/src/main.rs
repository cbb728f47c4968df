//! The program `tpde`, one module per verb. A verb takes its arguments and returns a report. This module prints the report, as
//! text or as JSON, and turns errors into exit codes. All format logic is in the library.

#![deny(unsafe_code)]

mod apply;
mod arenas;
#[cfg(feature = "bench")]
mod bench;
mod common;
mod completions;
#[cfg(feature = "demo")]
mod demo;
mod device;
mod encode;
mod explain;
mod failure;
mod fold;
#[cfg(feature = "html")]
mod html;
mod inputs;
mod inspect;
mod man;
mod merge;
mod renames;
mod signals;
#[cfg(feature = "store")]
mod store;
mod subset;
mod text;
mod verify;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
use common::{Color, Common};
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;
use tracing::Level;

/// Lossless differences between neural-network checkpoints.
///
/// A pair of files, NAME.tpde-index and NAME.tpde-blob, turns a base checkpoint into a target, bit for bit. Checkpoints are
/// .safetensors files, or folders of them.
///
/// Exit codes: 0 done; 1 the data is wrong (damaged, wrong base, already applied, not a checkpoint, above a limit, not writable,
/// not mergeable); 2 the arguments are wrong; 3 a system error (files, disk, an input that changed); 4 no such device. A signal
/// ends tpde by that signal, and leaves no temporary files.
#[derive(Parser)]
#[command(name = "tpde", version, max_term_width = 110, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Encode(encode::Encode),
    Apply(apply::Apply),
    Verify(verify::Verify),
    Inspect(inspect::Inspect),
    Fold(fold::Fold),
    Revert(fold::Revert),
    Merge(merge::Merge),
    Subset(subset::Subset),
    #[cfg(feature = "store")]
    Store(store::Store),
    #[cfg(feature = "bench")]
    Bench(bench::Bench),
    #[cfg(feature = "demo")]
    Demo(demo::Demo),
    Completions(completions::Completions),
    Man(man::Man),
}

/// Runs the command line of this process.
fn main() -> ExitCode {
    arenas::one_if_limited();
    // Set before parsing, because clap prints help and errors while parsing.
    match color_argument(std::env::args_os().skip(1)) {
        Color::Auto => anstream::ColorChoice::Auto,
        Color::Always => anstream::ColorChoice::Always,
        Color::Never => anstream::ColorChoice::Never,
    }
    .write_global();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::usage(error),
    };
    let common = &cli.common;
    let level = match (common.quiet, common.verbose) {
        (true, _) => Level::ERROR,
        (_, 0) => Level::WARN,
        (_, 1) => Level::INFO,
        (_, 2) => Level::DEBUG,
        _ => Level::TRACE,
    };
    let ansi = anstream::AutoStream::choice(&io::stderr()) != anstream::ColorChoice::Never;
    tracing_subscriber::fmt().with_max_level(level).with_ansi(ansi).with_writer(io::stderr).init();
    let outcome = signals::catch().map_err(anyhow::Error::from).and_then(|()| cli.run());
    signals::settle();
    match outcome {
        Ok(code) => code,
        Err(error) => failure::show(&error, common.json),
    }
}

/// The value of the last valid `--color` argument, or auto.
fn color_argument(args: impl Iterator<Item = OsString>) -> Color {
    let mut args = args.take_while(|arg| arg != "--").filter_map(|arg| arg.into_string().ok());
    let mut color = Color::Auto;
    while let Some(arg) = args.next() {
        let value = if arg == "--color" { args.next() } else { arg.strip_prefix("--color=").map(str::to_owned) };
        color = value.and_then(|value| Color::from_str(&value, false).ok()).unwrap_or(color);
    }
    color
}

impl Cli {
    fn run(&self) -> anyhow::Result<ExitCode> {
        let common = &self.common;
        #[cfg(feature = "bench")]
        let default = if matches!(self.verb, Verb::Bench(_)) { 1 } else { 0 };
        #[cfg(not(feature = "bench"))]
        let default = 0;
        let threads = common.threads.unwrap_or(default).into();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(io::Error::other).with_context(|| match threads {
            1 => "cannot start a thread",
            _ => "cannot start threads; --threads sets a lower number",
        })?;
        tracing::debug!(threads = pool.current_num_threads(), "thread pool");
        pool.install(|| {
            match &self.verb {
                Verb::Encode(verb) => common.show("encode", verb.run(common)?),
                Verb::Apply(verb) => common.show("apply", verb.run(common)?),
                Verb::Verify(verb) => {
                    let report = verb.run(common)?;
                    let refused = report.refused();
                    common.show("verify", report)?;
                    return Ok(refused.map_or(ExitCode::SUCCESS, |reason| failure::refused(&reason)));
                }
                Verb::Inspect(verb) => common.show("inspect", verb.run(common)?),
                Verb::Fold(verb) => common.show("fold", verb.run(common)?),
                Verb::Revert(verb) => common.show("revert", verb.run(common)?),
                Verb::Merge(verb) => common.show("merge", verb.run(common)?),
                Verb::Subset(verb) => common.show("subset", verb.run(common)?),
                #[cfg(feature = "store")]
                Verb::Store(verb) => return verb.run(common),
                #[cfg(feature = "bench")]
                Verb::Bench(verb) => common.show("bench", verb.run(common)?),
                #[cfg(feature = "demo")]
                Verb::Demo(verb) => common.show("demo", verb.run(common)?),
                Verb::Completions(verb) => common.show("completions", verb.run(Self::command())),
                Verb::Man(verb) => common.show("man", verb.run(Self::command())?),
            }?;
            Ok(ExitCode::SUCCESS)
        })
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_arguments_fit_together() {
        use super::CommandFactory;
        super::Cli::command().debug_assert();
    }
}
