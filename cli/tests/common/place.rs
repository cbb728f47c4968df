//! A folder in which to run `tpde`.

use super::{Tensor, tensor, tuned, write_file};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

pub const TPDE: &str = env!("CARGO_BIN_EXE_tpde");
/// Exit code for wrong data.
pub const DATA: i32 = 1;
/// Exit code for a usage error.
pub const USAGE: i32 = 2;
/// Exit code for an error of the operating system.
pub const SYSTEM: i32 = 3;
/// Exit code for a device that does not exist.
pub const DEVICE: i32 = 4;

/// A temporary folder to work in.
pub struct Place(pub TempDir);

/// The result of a command.
pub struct Run {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Place {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Makes a folder with `base.safetensors`, `target.safetensors` and their pair `pair`.
    pub fn with_pair() -> Self {
        let place = Self::new();
        let base = model();
        let target: Vec<_> = base.iter().map(|tensor| tuned(tensor, 50)).collect();
        write_file(&place.path("base.safetensors"), &base);
        write_file(&place.path("target.safetensors"), &target);
        place.ok("encode base.safetensors target.safetensors -o pair");
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Changes the bytes of a file.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.read(name);
        change(&mut bytes);
        fs::write(self.path(name), bytes).unwrap();
    }

    /// Names of all files in the folder.
    pub fn names(&self) -> Vec<String> {
        let entries = self.0.path().read_dir().unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Runs `tpde` with words separated by spaces. A run that hangs fails the test. `TPDE_PROGRAM` selects another program than the
    /// one built with the tests.
    pub fn tpde(&self, line: &str) -> Run {
        let program = std::env::var("TPDE_PROGRAM").unwrap_or_else(|_| TPDE.into());
        self.command(&program, &line.split_whitespace().collect::<Vec<_>>())
    }

    pub fn command(&self, program: &str, arguments: &[&str]) -> Run {
        let mut command = assert_cmd::Command::new(program);
        let command = command.args(arguments).current_dir(self.0.path()).timeout(Duration::from_secs(60));
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let code = output.status.code().expect("an exit code: neither killed nor timed out");
        Run { code, out: text(output.stdout), err: text(output.stderr) }
    }

    /// Runs a command that must succeed.
    pub fn ok(&self, line: &str) -> Run {
        let run = self.tpde(line);
        assert_eq!(run.code, 0, "{line}: {}", run.err);
        run
    }

    /// Runs a command that must succeed, and returns its JSON object.
    pub fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("--json {line}")).out).unwrap()
    }

    /// Runs a command that must fail with an error that contains `what`, in text and in JSON.
    pub fn fails(&self, line: &str, code: i32, what: &str) -> Value {
        let run = self.tpde(&format!("{line} --json"));
        assert_eq!(run.code, code, "{line}: {}{}", run.out, run.err);
        assert!(run.err.starts_with("error: "), "{line}: {}", run.err);
        assert!(run.err.contains(what), "{line}: {}", run.err);
        let json: Value = serde_json::from_str(&run.out).unwrap();
        assert_eq!(json["schema"], "tpde.error/1");
        json["error"].clone()
    }

    pub fn assert_same(&self, a: &str, b: &str) {
        assert!(self.read(a) == self.read(b), "{a} differs from {b}");
    }
}

pub fn model() -> Vec<Tensor> {
    vec![
        tensor("embed.weight", "BF16", &[96, 64], 1),
        tensor("layers.0.weight", "BF16", &[64, 64], 2),
        tensor("layers.0.norm", "F32", &[64], 3),
        tensor("layers.1.weight", "BF16", &[64, 64], 4),
        tensor("layers.1.norm", "F32", &[64], 5),
        tensor("step", "I64", &[], 6),
    ]
}

pub fn list(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect()
}
