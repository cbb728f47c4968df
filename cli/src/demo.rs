//! `tpde demo`: runs every step once, on checkpoints made for it.

use super::common::Common;
use super::inputs::create_folder;
use super::text::{self, BOLD, GOOD, JsonPath};
use super::{apply, encode, inspect, verify};
use anyhow::{Context, ensure};
use clap::{Args, Parser, Subcommand};
use serde::Serialize;
use serde_json::Value;
use std::ffi::OsStr;
use std::fmt::{self, Display};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tpde::{Dtype, MemoryCheckpoint, TemporaryFolder, TensorInfo};

/// Make a small checkpoint and a fine-tuned one, and show every step
#[derive(Args)]
pub struct Demo {
    /// Work in this folder and leave the files there [default: a temporary folder, removed at the end]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Leave the temporary folder where it is
    #[arg(long)]
    keep: bool,
    /// Replace existing files
    #[arg(short, long)]
    force: bool,
}

/// The steps and their reports.
#[derive(Serialize)]
pub struct DemoOutput {
    dir: JsonPath,
    kept: bool,
    steps: Vec<Step>,
    identical: bool,
    target_bytes: u64,
    stored_bytes: u64,
}

#[derive(Serialize)]
struct Step {
    command: String,
    report: Value,
    #[serde(skip)]
    text: String,
}

impl Demo {
    pub fn run(&self, common: &Common) -> anyhow::Result<DemoOutput> {
        self.demo(common).context("demo")
    }

    fn demo(&self, common: &Common) -> anyhow::Result<DemoOutput> {
        let (dir, temporary) = match &self.dir {
            Some(dir) => {
                create_folder(dir)?;
                // With `./`, a name that begins with a dash is not an option in the commands below.
                let is_option = dir.as_os_str().as_bytes().starts_with(b"-");
                (if is_option { Path::new(".").join(dir) } else { dir.clone() }, None)
            }
            None if self.keep => (tempfile::Builder::new().prefix("tpde-demo-").tempdir()?.keep(), None),
            None => {
                let folder = TemporaryFolder::create()?;
                (folder.path().to_owned(), Some(folder))
            }
        };
        let [base, tuned, rebuilt] = ["base", "tuned", "rebuilt"].map(|name| dir.join(format!("{name}.safetensors")));
        let update = dir.join("update");
        let (old, new) = tensors();
        write(&old, &base, self.force)?;
        write(&new, &tuned, self.force)?;

        let mut demo = Steps { common, force: self.force, steps: Vec::new() };
        let [base_word, tuned_word, update_word, rebuilt_word] = [&base, &tuned, &update, &rebuilt].map(|path| path.as_os_str());
        let word = OsStr::new;
        demo.step(&[word("encode"), base_word, tuned_word, word("-o"), update_word])?;
        demo.step(&[word("inspect"), update_word])?;
        demo.step(&[word("verify"), update_word, word("--base"), base_word])?;
        demo.step(&[word("apply"), base_word, update_word, word("-o"), rebuilt_word])?;

        let read = |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", text::path(path)));
        let (wanted, found) = (read(&tuned)?, read(&rebuilt)?);
        ensure!(wanted == found, "{} differs from {}", text::path(&rebuilt), text::path(&tuned));
        let command = format!("cmp {} {}", text::path(&tuned), text::path(&rebuilt));
        demo.steps.push(Step { command, report: Value::Bool(true), text: String::new() });

        let size = |path: PathBuf| path.metadata().map(|metadata| metadata.len());
        let stored_bytes = size(update.with_extension("tpde-index"))? + size(update.with_extension("tpde-blob"))?;
        let kept = temporary.is_none();
        Ok(DemoOutput {
            dir: JsonPath(dir),
            kept,
            steps: demo.steps,
            identical: true,
            target_bytes: wanted.len() as u64,
            stored_bytes,
        })
    }
}

/// A command line of the demo.
#[derive(Parser)]
#[command(name = "tpde")]
struct StepLine {
    #[command(flatten)]
    _common: Common,
    #[command(subcommand)]
    verb: StepVerb,
}

#[derive(Subcommand)]
enum StepVerb {
    Encode(encode::Encode),
    Apply(apply::Apply),
    Verify(verify::Verify),
    Inspect(inspect::Inspect),
}

/// Runs commands as if they had been typed, and collects their reports.
struct Steps<'a> {
    common: &'a Common,
    force: bool,
    steps: Vec<Step>,
}

impl Steps<'_> {
    fn step(&mut self, words: &[&OsStr]) -> anyhow::Result<()> {
        let mut words: Vec<_> = [OsStr::new("tpde")].iter().chain(words).copied().collect();
        if self.force && words.contains(&OsStr::new("-o")) {
            words.push(OsStr::new("-f"));
        }
        let command = words.iter().map(|word| text::path(Path::new(word))).collect::<Vec<_>>().join(" ");
        let common = self.common;
        match StepLine::try_parse_from(words)?.verb {
            StepVerb::Encode(verb) => self.report(command, verb.run(common)?),
            StepVerb::Apply(verb) => self.report(command, verb.run(common)?),
            StepVerb::Verify(verb) => self.report(command, verb.run(common)?),
            StepVerb::Inspect(verb) => self.report(command, verb.run(common)?),
        }
    }

    fn report(&mut self, command: String, report: impl Serialize + Display) -> anyhow::Result<()> {
        self.steps.push(Step { command, report: serde_json::to_value(&report)?, text: report.to_string() });
        Ok(())
    }
}

/// A synthetic checkpoint, and a fine-tuned version of it. Weights are nearly normally distributed. The tuning changes about 2 %
/// of the weights by one or two units in the last place, as reinforcement learning does.
fn tensors() -> (Tensors, Tensors) {
    let mut random = Xorshift(0x7470_6465);
    let shapes: [(&str, Dtype, &[u64]); 7] = [
        ("embed.weight", Dtype::Bf16, &[2048, 384]),
        ("layers.0.attention.weight", Dtype::Bf16, &[384, 384]),
        ("layers.0.mlp.weight", Dtype::Bf16, &[1536, 384]),
        ("layers.0.norm.weight", Dtype::F32, &[384]),
        ("layers.1.attention.weight", Dtype::Bf16, &[384, 384]),
        ("layers.1.mlp.weight", Dtype::Bf16, &[1536, 384]),
        ("head.weight", Dtype::F32, &[384, 384]),
    ];
    let (mut old, mut new) = (Vec::new(), Vec::new());
    for (name, dtype, shape) in shapes {
        let info = TensorInfo { name: name.into(), dtype, shape: shape.into() };
        let lane_bytes = dtype.lane_bytes();
        let (mut before, mut after) = (Vec::new(), Vec::new());
        for _ in 0..shape.iter().product() {
            // BF16 is the upper half of F32.
            let lane = random.weight().to_bits() >> (32 - 8 * lane_bytes);
            let step = if random.next().is_multiple_of(50) { 1 + (random.next() % 3) as u32 / 2 } else { 0 };
            let moved = if random.next().is_multiple_of(2) { lane.wrapping_add(step) } else { lane.wrapping_sub(step) };
            before.extend_from_slice(&lane.to_le_bytes()[..lane_bytes]);
            after.extend_from_slice(&moved.to_le_bytes()[..lane_bytes]);
        }
        old.push((info.clone(), before));
        new.push((info, after));
    }
    (old, new)
}

type Tensors = Vec<(TensorInfo, Vec<u8>)>;

/// Writes tensors as a safetensors file, by applying a pair without a base.
fn write(tensors: &Tensors, path: &Path, replace: bool) -> tpde::Result<()> {
    let checkpoint = MemoryCheckpoint::new(tensors.iter().map(|(info, bytes)| (info.clone(), bytes.as_slice())))?;
    let (pair, _) = tpde::Encode::new(&checkpoint).to_memory()?;
    tpde::Apply::new(&pair).overwrite(replace).to_path(path)?;
    Ok(())
}

/// A pseudo-random generator with the same sequence on every machine.
struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a nearly normally distributed weight, with a standard deviation of about 0.02: the sum of eight random bytes minus
    /// the mean of such sums, plus finer random bits.
    fn weight(&mut self) -> f32 {
        let sum: i32 = self.next().to_le_bytes().into_iter().map(i32::from).sum();
        let fine = (self.next() >> 48) as i32;
        ((sum - 1020) * 65536 + fine) as f32 * (0.02 / 209.0 / 65536.0)
    }
}

impl fmt::Display for DemoOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            writeln!(f, "{BOLD}$ {}{BOLD:#}\n{}", step.command, step.text)?;
        }
        let smaller = text::times(text::ratio(self.target_bytes, self.stored_bytes));
        writeln!(
            f,
            "{GOOD}success:{GOOD:#} rebuilt.safetensors equals tuned.safetensors byte for byte; {} became {}, {smaller} smaller",
            text::bytes(self.target_bytes),
            text::bytes(self.stored_bytes)
        )?;
        if self.kept { writeln!(f, "the files are in {}", text::path(&self.dir)) } else { Ok(()) }
    }
}
