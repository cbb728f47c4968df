//! `tpde store`: versions of checkpoints in a folder or an object store.

use super::common::Common;
use super::failure;
use super::inputs::{CodecArgs, glob};
use super::signals::TemporaryFolder;
use super::text;
use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use globset::{Glob, GlobSetBuilder};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tpde::{Checkpoint, Escaped, SafetensorsCheckpoint, Split};
use tpde_store::{Anchor, Content, GcReport, GetOptions, PutOptions, Store as Opened, StoreOptions, Usage, VerifyReport, Version};

/// Keep versions of checkpoints in a folder or an object store
///
/// STORE is a folder, or a URL such as s3://BUCKET/PREFIX if this program was built with that feature. Most versions are stored as
/// their difference from the version before. VERSION is BRANCH@NUMBER, or BRANCH for its newest version.
#[derive(Args)]
pub struct Store {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Init(Init),
    Put(Put),
    Get(Get),
    Log(Log),
    Branch(Branch),
    Verify(Verify),
    Gc(Gc),
    Du(Du),
    Watch(Watch),
}

/// Make a store
#[derive(Args)]
struct Init {
    /// Folder, which is created, or URL
    store: String,
    /// Seconds for which objects that no version uses are kept. A put must end within half of it
    #[arg(long, value_name = "SECONDS", default_value_t = StoreOptions::default().grace.as_secs())]
    grace: u64,
    /// Store a version whole after this many versions; 0 for never
    #[arg(long, value_name = "VERSIONS", default_value_t = StoreOptions::default().anchor_every)]
    anchor_every: u64,
    /// Store a version whole if the chain since the last whole one is larger than this share of it; 0 for never
    #[arg(long, value_name = "PERCENT", default_value_t = StoreOptions::default().anchor_percent)]
    anchor_percent: u64,
}

/// Store a checkpoint as the next version of a branch
///
/// The other files of a folder, such as configuration and tokenizer, are stored too. If another writer stores the version first,
/// nothing is overwritten, and the error is `conflict`: run the command again.
#[derive(Args)]
struct Put {
    /// Folder or URL of the store
    store: String,
    /// Checkpoint: a .safetensors file, or a folder
    checkpoint: PathBuf,
    /// Branch, which is created if it does not exist
    #[arg(long, value_name = "BRANCH", default_value = "main")]
    branch: String,
    /// Version that a new branch begins at
    #[arg(long, value_name = "VERSION")]
    parent: Option<String>,
    /// Checkpoint of a version that is here, so that it need not be read from the store; may be repeated
    #[arg(long, value_name = "VERSION=PATH", value_parser = have)]
    have: Vec<(String, PathBuf)>,
    /// Value of your own to keep with the version; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair_of_texts)]
    metadata: Vec<(String, String)>,
    /// Store the version whole, without its parent
    #[arg(long, conflicts_with = "external")]
    whole: bool,
    /// Store only the digest of the version, and where to find it: readers pass the checkpoint with --have
    #[arg(long, value_name = "WHERE")]
    external: Option<String>,
    #[command(flatten)]
    codec: CodecArgs,
    /// Cut tensors into parts, as for encode
    #[arg(long, value_name = "RULES", default_value = "", hide_default_value = true)]
    split: Split,
}

/// Rebuild a version
///
/// The output appears when it is complete and all digests were compared. After an interruption, the same command goes on.
#[derive(Args)]
struct Get {
    /// Folder or URL of the store
    store: String,
    /// BRANCH@NUMBER, or BRANCH
    version: String,
    /// Output, which must not exist: a file, or a folder if the checkpoint was one
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// Checkpoint of a version that is here; may be repeated
    #[arg(long, value_name = "VERSION=PATH", value_parser = have)]
    have: Vec<(String, PathBuf)>,
    /// Rebuild only tensors whose names match; may be repeated. The output is then one safetensors file
    #[arg(long, value_name = "GLOB", value_parser = glob)]
    tensor: Vec<Glob>,
    /// Folder in which the pairs that were read stay for later calls
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

/// List the versions of a branch, the newest first
#[derive(Args)]
struct Log {
    /// Folder or URL of the store
    store: String,
    #[arg(default_value = "main")]
    branch: String,
}

/// List, create or delete branches
#[derive(Args)]
struct Branch {
    #[command(subcommand)]
    verb: BranchVerb,
}

#[derive(Subcommand)]
enum BranchVerb {
    /// List the newest version of each branch
    List {
        /// Folder or URL of the store
        store: String,
    },
    /// Create a branch at a version; nothing is copied
    Create {
        /// Folder or URL of the store
        store: String,
        /// Name of the new branch
        name: String,
        /// Version that it begins at
        #[arg(long, value_name = "VERSION", default_value = "main")]
        from: String,
    },
    /// Delete a branch: gc removes what no other branch needs
    ///
    /// Branches that begin at a version of it stay whole. gc waits until the deletion is older than the grace of the store.
    Delete {
        /// Folder or URL of the store
        store: String,
        /// Name of the branch
        name: String,
    },
}

/// Read everything and compare all digests
///
/// If a version is damaged, the exit code is 1, and the output lists all damaged versions.
#[derive(Args)]
struct Verify {
    /// Folder or URL of the store
    store: String,
    /// Only this branch
    #[arg(long, value_name = "BRANCH")]
    branch: Option<String>,
    /// Also rebuild every version, and compare the digests of its tensors
    #[arg(long)]
    rebuild: bool,
}

/// Remove objects that no version uses
#[derive(Args)]
struct Gc {
    /// Folder or URL of the store
    store: String,
}

/// Show the size of a store
#[derive(Args)]
struct Du {
    /// Folder or URL of the store
    store: String,
}

/// Print each new version of a branch, one per line
#[derive(Args)]
struct Watch {
    /// Folder or URL of the store
    store: String,
    #[arg(default_value = "main")]
    branch: String,
    /// Number of the first version to print
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    from: u64,
    /// Seconds between two looks at the store
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    interval: u64,
    /// End after this many versions
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
}

impl Store {
    pub fn run(&self, common: &Common) -> anyhow::Result<ExitCode> {
        // The pairs that `put` and `verify` read. They go away at a signal too.
        let temporary = TemporaryFolder::create("tpde-store-").context("create a temporary folder")?;
        // Another folder is set only if this was called before; that folder serves as well.
        let _ = tempfile::env::override_temp_dir(temporary.path());
        match &self.verb {
            Verb::Init(verb) => common.show("store.init", verb.run()?),
            Verb::Put(verb) => common.show("store.put", verb.run(common)?),
            Verb::Get(verb) => common.show("store.get", verb.run(common)?),
            Verb::Log(verb) => common.show("store.log", Versions::of(open(&verb.store)?.log(&verb.branch).map_err(error)?)),
            Verb::Branch(verb) => match &verb.verb {
                BranchVerb::List { store } => common.show("store.branch", Versions::of(open(store)?.branches().map_err(error)?)),
                BranchVerb::Create { store, name, from } => {
                    common.show("store.branch", Row::of(&open(store)?.create_branch(name, from).map_err(error)?))
                }
                BranchVerb::Delete { store, name } => {
                    let head = open(store)?.delete_branch(name).map_err(error)?;
                    common.show("store.branch", Deleted { branch: name.clone(), head: head.name() })
                }
            },
            Verb::Verify(verb) => {
                let report = open(&verb.store)?.verify(verb.branch.as_deref(), verb.rebuild).map_err(error)?;
                let damaged = report.faults.len() as u64;
                common.show("store.verify", Verified(report))?;
                if damaged > 0 {
                    return Ok(failure::refused(&format!("{} damaged", text::counted(damaged, "version"))));
                }
                Ok(())
            }
            Verb::Gc(verb) => common.show("store.gc", Collected(open(&verb.store)?.gc().map_err(error)?)),
            Verb::Du(verb) => common.show("store.du", Sizes(open(&verb.store)?.usage().map_err(error)?)),
            Verb::Watch(verb) => verb.run(common),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}

fn open(store: &str) -> anyhow::Result<Opened> {
    Opened::open(store).map_err(error)
}

/// Errors of the library keep their own kind and hint.
fn error(error: tpde_store::Error) -> anyhow::Error {
    match error {
        tpde_store::Error::Tpde(error) => error.into(),
        error => anyhow!(error),
    }
}

fn pair_of_texts(text: &str) -> Result<(String, String), &'static str> {
    text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).ok_or("expected KEY=VALUE")
}

fn have(text: &str) -> Result<(String, PathBuf), &'static str> {
    text.split_once('=').map(|(version, path)| (version.to_owned(), path.into())).ok_or("expected VERSION=PATH")
}

impl Init {
    fn run(&self) -> anyhow::Result<Made> {
        let options = StoreOptions::default()
            .grace(Duration::from_secs(self.grace))
            .anchor_every(self.anchor_every)
            .anchor_percent(self.anchor_percent);
        Opened::init(&self.store, &options).map_err(error)?;
        Ok(Made { store: self.store.clone() })
    }
}

impl Put {
    fn run(&self, common: &Common) -> anyhow::Result<Row> {
        let store = open(&self.store)?;
        let target = SafetensorsCheckpoint::open(&self.checkpoint)?;
        let bar = common.bar("put", target.tensors().iter().map(|tensor| tensor.bytes()).sum());
        let advance = |bytes| bar.inc(bytes);
        let mut options = PutOptions::default().watch(&advance).branch(&self.branch).metadata(self.metadata.clone());
        options = options.encode(self.codec.options().split(self.split.clone())).anchor(match &self.external {
            Some(hint) => Anchor::External { hint: hint.clone() },
            None if self.whole => Anchor::Whole,
            None => Anchor::ByRule,
        });
        if let Some(parent) = &self.parent {
            options = options.parent(parent);
        }
        for (version, path) in &self.have {
            options = options.have(version, path);
        }
        let version = store.put(&self.checkpoint, &options).map_err(error)?;
        bar.finish_and_clear();
        Ok(Row::of(&version))
    }
}

impl Get {
    fn run(&self, common: &Common) -> anyhow::Result<Row> {
        let store = open(&self.store)?;
        let version = store.version(&self.version).map_err(error)?;
        // Of some tensors, less is rebuilt: the bar ends early.
        let bar = common.bar("get", version.tensor_bytes);
        let advance = |bytes| bar.inc(bytes);
        let mut set = GlobSetBuilder::new();
        self.tensor.iter().for_each(|one| _ = set.add(one.clone()));
        let set = set.build().context("the patterns of --tensor")?;
        let is_wanted = |name: &str| set.is_match(name);
        let mut options = GetOptions::default().watch(&advance);
        if !self.tensor.is_empty() {
            options = options.tensors(&is_wanted);
        }
        if let Some(cache) = &self.cache {
            options = options.cache(cache);
        }
        for (version, path) in &self.have {
            options = options.have(version, path);
        }
        let version = store.get(&version.name(), &self.output, &options).map_err(error)?;
        bar.finish_and_clear();
        Ok(Row::of(&version))
    }
}

impl Watch {
    fn run(&self, common: &Common) -> anyhow::Result<()> {
        let store = open(&self.store)?;
        let versions = store.watch(&self.branch, self.from, Duration::from_secs(self.interval));
        for version in versions.take(self.limit.unwrap_or(usize::MAX)) {
            let row = Row::of(&version.map_err(error)?);
            if common.json {
                common.show("store.watch", row)?;
            } else {
                let mut out = anstream::stdout().lock();
                writeln!(out, "{}", row.version).and_then(|()| out.flush()).map_err(failure::Output)?;
            }
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct Made {
    store: String,
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "made the store {}", Escaped(&self.store))
    }
}

#[derive(Serialize)]
struct Deleted {
    branch: String,
    /// The version that was its newest.
    head: String,
}

impl fmt::Display for Deleted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "deleted the branch {}, whose newest version was {}", self.branch, self.head)
    }
}

/// A version, without the list of its objects.
#[derive(Serialize)]
struct Row {
    version: String,
    parent: Option<String>,
    /// `whole`, `difference`, `external` or `same`.
    content: &'static str,
    /// Where an external version can be found.
    hint: Option<String>,
    /// Size of the pair in bytes.
    stored_bytes: u64,
    tensor_bytes: u64,
    tensors: u64,
    files: u64,
    /// Seconds since 1970.
    created: u64,
    state: String,
    metadata: BTreeMap<String, String>,
}

impl Row {
    fn of(version: &Version) -> Self {
        let (content, hint) = match &version.content {
            Content::Whole(_) => ("whole", None),
            Content::Difference(_) => ("difference", None),
            Content::External { hint } => ("external", Some(hint.clone())),
            Content::Same => ("same", None),
            _ => ("other", None),
        };
        Self {
            version: version.name(),
            parent: version.parent.as_ref().map(|parent| format!("{}@{}", parent.branch, parent.number)),
            content,
            hint,
            stored_bytes: version.pair().map_or(0, |pair| pair.bytes()),
            tensor_bytes: version.tensor_bytes,
            tensors: version.tensors,
            files: version.files.len() as u64,
            created: version.created,
            state: version.state.to_string(),
            metadata: version.metadata.clone(),
        }
    }

    fn metadata(&self) -> String {
        let pairs: Vec<_> = self.metadata.iter().map(|(key, value)| format!("{}={}", Escaped(key), Escaped(value))).collect();
        pairs.join(" ")
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.version)?;
        let stored = format!("{} for {} of tensors", text::bytes(self.stored_bytes), text::bytes(self.tensor_bytes));
        let mut facts = vec![
            ("stored", format!("{}: {stored}", self.content)),
            ("holds", format!("{}, {}", text::counted(self.tensors, "tensor"), text::counted(self.files, "other file"))),
        ];
        facts.extend(self.parent.iter().map(|parent| ("parent", parent.clone())));
        facts.extend(self.hint.iter().map(|hint| ("found at", Escaped(hint).to_string())));
        facts.extend((!self.metadata.is_empty()).then(|| ("metadata", self.metadata())));
        text::facts(f, &facts)
    }
}

#[derive(Serialize)]
struct Versions {
    versions: Vec<Row>,
}

impl Versions {
    fn of(versions: Vec<Version>) -> Self {
        Self { versions: versions.iter().map(Row::of).collect() }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |row: &Row| {
            let parent = row.parent.clone().unwrap_or_default();
            vec![row.version.clone(), row.content.into(), parent, row.metadata(), text::bytes(row.stored_bytes)]
        };
        text::table(f, 4, &["version", "stored", "parent", "metadata", "bytes"], self.versions.iter().map(row))
    }
}

#[derive(Serialize)]
#[serde(transparent)]
struct Verified(VerifyReport);

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(report) = self;
        writeln!(f, "checked {}, {}", text::counted(report.versions, "version"), text::bytes(report.bytes))?;
        for (version, fault) in &report.faults {
            writeln!(f, "  {version}: {}", Escaped(fault))?;
        }
        for version in &report.external {
            writeln!(f, "  {version} needs a checkpoint from outside: only its own objects were checked")?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
#[serde(transparent)]
struct Collected(GcReport);

impl fmt::Display for Collected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(report) = self;
        writeln!(f, "removed {}, {}", text::counted(report.removed, "object"), text::bytes(report.removed_bytes))?;
        if report.versions > 0 {
            writeln!(f, "  {} of deleted branches", text::counted(report.versions, "version"))?;
        }
        let (used, young) = (text::count(report.used), text::count(report.young));
        writeln!(f, "  kept: {used} that versions use, {young} younger than the grace")
    }
}

#[derive(Serialize)]
#[serde(transparent)]
struct Sizes(Usage);

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(usage) = self;
        text::facts(
            f,
            &[
                ("versions", text::count(usage.versions)),
                ("whole versions", text::bytes(usage.anchor_bytes)),
                ("differences", text::bytes(usage.difference_bytes)),
                ("other files", text::bytes(usage.file_bytes)),
                ("tensors of all versions", text::bytes(usage.tensor_bytes)),
            ],
        )
    }
}
