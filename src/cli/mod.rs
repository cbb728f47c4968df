//! The command line, one module a verb. A verb takes its arguments and returns a report; this module shows it, as text for
//! people or as JSON for programs, and turns what went wrong into exit codes.

mod apply;
mod bench;
mod completions;
mod demo;
mod device;
mod encode;
mod failure;
mod inputs;
mod inspect;
mod man;
mod signals;
mod text;
mod verify;

use anyhow::Context;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;
use tracing::Level;

/// Lossless differences between neural-network checkpoints.
///
/// A pair of files, NAME.tpde-index and NAME.tpde-blob, holds what turns a base checkpoint into a target, bit for bit.
/// Checkpoints are .safetensors files, or folders of them.
///
/// Exit codes: 0 done; 1 the data is wrong (damage, another base, applied already, no checkpoint, above a limit, not writable);
/// 2 usage; 3 the system refused (files, disk, an input that changed); 4 no such device. A signal ends tpde by that signal, and
/// leaves no temporary files.
#[derive(Parser)]
#[command(version, max_term_width = 110, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    verb: Verb,
}

/// What every verb understands.
#[derive(Args)]
#[command(next_help_heading = "Common options")]
struct Common {
    /// Print one JSON object instead of text; help and version are always text
    #[arg(long, global = true)]
    json: bool,
    /// Threads to work with; 0 means all cores [default: 0, for bench 1]
    #[arg(short = 'T', long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(..=1024))]
    threads: Option<u16>,
    /// Print nothing but errors, and with --json the object
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Say more on stderr; twice for still more
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    /// When to use colours; NO_COLOR is honoured too
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    color: Color,
    /// When to show progress bars: auto means on a terminal
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    progress: Progress,
}

#[derive(Clone, Copy, ValueEnum)]
enum Color {
    Auto,
    Always,
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Progress {
    Auto,
    Never,
}

#[derive(Subcommand)]
enum Verb {
    Encode(encode::Encode),
    Apply(apply::Apply),
    Verify(verify::Verify),
    Inspect(inspect::Inspect),
    Bench(bench::Bench),
    Demo(demo::Demo),
    Completions(completions::Completions),
    Man(man::Man),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    // Before parsing, which prints help and errors itself.
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

/// The value of the last `--color`, if it is one.
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
        let default = if matches!(self.verb, Verb::Bench(_)) { 1 } else { 0 };
        let threads = common.threads.unwrap_or(default).into();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(io::Error::other).context("cannot start threads (--threads asks for fewer)")?;
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
                Verb::Inspect(verb) => common.show("inspect", verb.run()?),
                Verb::Bench(verb) => common.show("bench", verb.run(common)?),
                Verb::Demo(verb) => common.show("demo", verb.run(common)?),
                Verb::Completions(verb) => common.show("completions", verb.run()),
                Verb::Man(verb) => common.show("man", verb.run()?),
            }?;
            Ok(ExitCode::SUCCESS)
        })
    }
}

impl Common {
    /// Prints what a verb found, piece by piece: a report may be longer than memory.
    fn show(&self, verb: &str, report: impl Serialize + Display) -> anyhow::Result<()> {
        if self.quiet && !self.json {
            return Ok(());
        }
        let mut out = BufWriter::with_capacity(1 << 16, anstream::stdout().lock());
        let written = if self.json { text::json(&mut out, &format!("tpde.{verb}/1"), &report) } else { write!(out, "{report}") };
        Ok(written.and_then(|()| out.flush()).map_err(failure::Output)?)
    }

    /// A progress bar on stderr, which hides itself unless that is a terminal.
    fn bar(&self, verb: &'static str, bytes: u64) -> ProgressBar {
        let shown = self.progress == Progress::Auto && !self.quiet;
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let template = "{msg} {wide_bar} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::with_draw_target(Some(bytes), target).with_style(style).with_message(verb)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_arguments_fit_together() {
        use clap::CommandFactory;
        super::Cli::command().debug_assert();
    }
}
