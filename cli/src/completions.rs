//! `tpde completions`: completion scripts for shells.

use clap::{Args, Command};
use clap_complete::Shell;
use serde::Serialize;
use std::fmt;

/// Print completions for a shell
#[derive(Args)]
pub struct Completions {
    shell: Shell,
}

/// A script for a shell.
#[derive(Serialize)]
pub struct CompletionScript {
    shell: String,
    script: String,
}

impl Completions {
    /// A script for this command line.
    pub fn run(&self, mut command: Command) -> CompletionScript {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "tpde", &mut script);
        CompletionScript { shell: self.shell.to_string(), script: String::from_utf8_lossy(&script).into_owned() }
    }
}

impl fmt::Display for CompletionScript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.script)
    }
}
