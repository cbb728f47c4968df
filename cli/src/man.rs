//! `tpde man`: manual pages.

use super::inputs::create_folder;
use super::text::{self, JsonPath};
use anyhow::Context;
use clap::Args;
use clap_mangen::Man as Page;
use serde::Serialize;
use std::collections::VecDeque;
use std::fmt;
use std::path::{Path, PathBuf};
use tpde::{Error, OutputFile};

/// Print the manual page, or write those of all verbs
#[derive(Args)]
pub struct Man {
    /// Write tpde.1, tpde-encode.1 and so on into this folder, over older ones
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// One page, or the paths of all written pages.
#[derive(Serialize)]
#[serde(untagged)]
pub enum ManOutput {
    Page { page: String },
    Files { files: Vec<JsonPath> },
}

impl Man {
    /// Prints or writes the pages of this command line.
    pub fn run(&self, mut command: clap::Command) -> anyhow::Result<ManOutput> {
        command.build();
        match &self.dir {
            None => {
                let mut page = Vec::new();
                Page::new(command).render(&mut page)?;
                Ok(ManOutput::Page { page: String::from_utf8_lossy(&page).into_owned() })
            }
            Some(dir) => write(command, dir).with_context(|| format!("man {}", text::path(dir))),
        }
    }
}

fn write(command: clap::Command, dir: &Path) -> tpde::Result<ManOutput> {
    create_folder(dir)?;
    let (mut files, mut left) = (Vec::new(), VecDeque::from([command]));
    while let Some(command) = left.pop_front() {
        // Verbs may have verbs, as `tpde store put`.
        left.extend(command.get_subcommands().filter(|verb| verb.get_name() != "help").cloned());
        let page = Page::new(command);
        let path = dir.join(page.get_filename());
        let mut bytes = Vec::new();
        page.render(&mut bytes).map_err(|source| Error::Io { action: "write", path: path.clone(), source })?;
        OutputFile::create(&path, &[], true)?.publish(&bytes)?;
        files.push(JsonPath(path));
    }
    Ok(ManOutput::Files { files })
}

impl fmt::Display for ManOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ManOutput::Page { page } => f.write_str(page),
            ManOutput::Files { files } => files.iter().try_for_each(|path| writeln!(f, "{}", text::path(path))),
        }
    }
}
