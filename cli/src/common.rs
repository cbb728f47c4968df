//! Options of every verb, and the output that they control: reports and progress bars.

use super::{failure, text};
use clap::{ArgAction, Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::fmt::Display;
use std::io::{BufWriter, Write};

/// Options of every verb.
#[derive(Args)]
#[command(next_help_heading = "Common options")]
pub struct Common {
    /// Print one JSON object instead of text; help and version are always text
    #[arg(long, global = true)]
    pub json: bool,
    /// Number of threads; 0 means one per core [default: 0, for bench 1]
    #[arg(short = 'T', long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(..=1024))]
    pub threads: Option<u16>,
    /// Print only errors, and with --json the object
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print more messages on stderr; -vv and -vvv print still more
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// When to use colours; auto also respects NO_COLOR
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
    /// When to show progress bars; auto shows them on a terminal
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub progress: Progress,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Color {
    Auto,
    Always,
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Progress {
    Auto,
    Never,
}

impl Common {
    /// Prints the report of a verb piece by piece, because a report may be larger than memory.
    pub fn show(&self, verb: &str, report: impl Serialize + Display) -> anyhow::Result<()> {
        if self.quiet && !self.json {
            return Ok(());
        }
        // JSON has no escape sequences, and looking for them takes longer than printing.
        let to: Box<dyn Write> = if self.json { Box::new(std::io::stdout().lock()) } else { Box::new(anstream::stdout().lock()) };
        let mut out = BufWriter::with_capacity(1 << 16, to);
        let written = if self.json { text::json(&mut out, &format!("tpde.{verb}/1"), &report) } else { write!(out, "{report}") };
        Ok(written.and_then(|()| out.flush()).map_err(failure::Output)?)
    }

    /// Returns a progress bar on stderr. The bar is hidden by --quiet, by --progress never, or if stderr is not a terminal.
    pub fn bar(&self, verb: &'static str, bytes: u64) -> ProgressBar {
        let shown = self.progress == Progress::Auto && !self.quiet;
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let template = "{msg} {wide_bar} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::with_draw_target(Some(bytes), target).with_style(style).with_message(verb)
    }
}
