//! `tpde store`: versions of checkpoints in a folder or an object store.

mod report;
mod rows;

use crate::common::Common;
use crate::inputs::{CodecArgs, PartArg, glob, matchers, rectangles};
use crate::renames::rename;
use crate::{failure, text};
use anyhow::anyhow;
use clap::{Args, Subcommand};
use globset::Glob;
use report::ReportOutput;
use rows::{DeleteOutput, FoldOutput, GcOutput, GetOutput, InitOutput, PruneOutput, Row, Sizes, VerifyOutput, Versions, row};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tpde::{Checkpoint, Escaped, OutputFile, Rectangle, SafetensorsCheckpoint, Split, ValidatedIndex};
use tpde_store::{Anchor, FoldOptions, GetOptions, PutOptions, Store as Opened, StoreOptions};

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
    Fold(Fold),
    Prune(Prune),
    Gc(Gc),
    Du(Du),
    Report(Report),
    Watch(Watch),
}

/// Make a store
#[derive(Args)]
struct Init {
    /// Folder, which is created, or URL
    store: String,
    /// Seconds for which objects that no version uses are kept. A call whose lease is not renewed for so long is given up
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
    #[command(flatten)]
    store: Location,
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
    /// Pair a tensor with a tensor of the parent that has another name, as for encode; may be repeated. A version that is stored
    /// whole ignores it
    #[arg(long, value_name = "TARGET=BASE", value_parser = rename)]
    rename: Vec<(String, String)>,
    /// Do not use tensors of the parent of another dtype
    #[arg(long)]
    no_derived: bool,
}

/// Rebuild a version
///
/// The output appears when it is complete and all digests were compared. After an interruption, the same command goes on.
#[derive(Args)]
struct Get {
    #[command(flatten)]
    store: Location,
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
    /// Of the tensors whose names match, rebuild only a rectangle, as in '*.o_proj.weight=[:, 0:512]'; may be repeated. The output is
    /// then one safetensors file, in which such a tensor has the shape of its rectangle. The ranges are those of the dimensions in
    /// order. A missing bound is that of the tensor, and so is a missing range at the end
    #[arg(long, value_name = "GLOB=[RANGES]", value_parser = PartArg::parse)]
    part: Vec<PartArg>,
    /// Folder in which the pairs that were read stay for later calls
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

/// List the versions of a branch, the newest first
#[derive(Args)]
struct Log {
    #[command(flatten)]
    store: Location,
    #[arg(default_value = "main")]
    branch: String,
    /// Only the newest N versions
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
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
        #[command(flatten)]
        store: Location,
    },
    /// Create a branch at a version; nothing is copied
    Create {
        #[command(flatten)]
        store: Location,
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
        #[command(flatten)]
        store: Location,
        /// Name of the branch
        name: String,
    },
}

/// Read everything and compare all digests
///
/// If a version or a shortcut is damaged, the exit code is 1, and the output lists all that are. fold makes a shortcut anew.
#[derive(Args)]
struct Verify {
    #[command(flatten)]
    store: Location,
    /// Only this branch
    #[arg(long, value_name = "BRANCH")]
    branch: Option<String>,
    /// Also rebuild the versions whose anchors the store has, and compare digests
    #[arg(long)]
    rebuild: bool,
}

/// Store a shortcut: one pair that skips the versions in between
///
/// Readers that have FROM, or pass it, read this pair instead of those between FROM and TO.
#[derive(Args)]
struct Fold {
    #[command(flatten)]
    store: Location,
    /// Version that is the base of the shortcut
    from: String,
    /// Version that derives from it
    to: String,
    #[command(flatten)]
    options: FoldArgs,
}

/// Remove versions of a branch, and keep the others readable
///
/// The newest version, whole and external versions, and versions where another branch, or a shortcut into one, begins are kept
/// too. First, shortcuts that skip the other versions are stored. gc removes the pairs of these versions after the grace of the
/// store. After an interruption, the same command goes on.
#[derive(Args)]
struct Prune {
    #[command(flatten)]
    store: Location,
    /// Keep the versions whose number is a multiple of N
    #[arg(long, value_name = "N", required_unless_present = "damaged")]
    keep_every: Option<u64>,
    /// Only remove versions whose manifests are damaged, so that put and gc go on without them
    #[arg(long, conflicts_with_all = ["keep_every", "have"])]
    damaged: bool,
    /// Branch
    #[arg(long, value_name = "BRANCH", default_value = "main")]
    branch: String,
    #[command(flatten)]
    options: FoldArgs,
}

#[derive(Args)]
struct FoldArgs {
    /// Checkpoint of a version that is here; may be repeated
    #[arg(long, value_name = "VERSION=PATH", value_parser = have)]
    have: Vec<(String, PathBuf)>,
    #[command(flatten)]
    codec: CodecArgs,
}

/// Remove versions and objects that are no longer needed
#[derive(Args)]
struct Gc {
    #[command(flatten)]
    store: Location,
}

/// Show the size of a store
#[derive(Args)]
struct Du {
    #[command(flatten)]
    store: Location,
}

/// Describe what each version takes and changes
///
/// Reads the indexes of all pairs, and no blob.
#[derive(Args)]
struct Report {
    #[command(flatten)]
    store: Location,
    /// Only this branch; may be repeated
    #[arg(long, value_name = "BRANCH")]
    branch: Vec<String>,
    #[cfg(feature = "html")]
    /// Write a page with drawings to FILE: sizes, changed shares, and bytes to read, per version. The page is one file of HTML,
    /// without scripts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[cfg(feature = "html")]
    /// With --html: replace an existing file
    #[arg(short, long, requires = "html")]
    force: bool,
}

/// Print each new version of a branch, one per line
#[derive(Args)]
struct Watch {
    #[command(flatten)]
    store: Location,
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
        match &self.verb {
            Verb::Init(verb) => common.show("store.init", verb.run()?),
            Verb::Put(verb) => common.show("store.put", verb.run(common)?),
            Verb::Get(verb) => common.show("store.get", verb.run(common)?),
            Verb::Log(verb) => common.show("store.log", verb.run()?),
            Verb::Branch(verb) => match &verb.verb {
                BranchVerb::List { store } => {
                    let store = store.open()?;
                    let heads = store.branches().map_err(error)?;
                    common.show("store.branch", Versions::of(&store, &heads).map_err(error)?)
                }
                BranchVerb::Create { store, name, from } => {
                    let store = store.open()?;
                    let version = store.create_branch(name, from).map_err(error)?;
                    common.show("store.branch", row(&store, &version).map_err(error)?)
                }
                BranchVerb::Delete { store, name } => {
                    let head = store.open()?.delete_branch(name).map_err(error)?;
                    common.show("store.branch", DeleteOutput { branch: name.clone(), head: head.name() })
                }
            },
            Verb::Verify(verb) => {
                let report = verb.store.open()?.verify(verb.branch.as_deref(), verb.rebuild).map_err(error)?;
                let (damaged, shortcuts) = (report.faults.len() as u64, report.shortcuts.len() as u64);
                common.show("store.verify", VerifyOutput(report))?;
                if damaged + shortcuts > 0 {
                    let (damaged, shortcuts) = (text::counted(damaged, "version"), text::counted(shortcuts, "shortcut"));
                    return Ok(failure::refused(&format!("{damaged} and {shortcuts} damaged")));
                }
                Ok(())
            }
            Verb::Fold(verb) => common.show("store.fold", verb.run(common)?),
            Verb::Prune(verb) => common.show("store.prune", verb.run(common)?),
            Verb::Gc(verb) => common.show("store.gc", GcOutput(verb.store.open()?.gc().map_err(error)?)),
            Verb::Du(verb) => common.show("store.du", Sizes(verb.store.open()?.usage().map_err(error)?)),
            Verb::Report(verb) => common.show("store.report", verb.run()?),
            Verb::Watch(verb) => verb.run(common),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}

/// A store, and how it is read and written.
#[derive(Args)]
struct Location {
    /// Folder or URL of the store
    #[arg(value_name = "STORE")]
    url: String,
    /// Limit of the memory for objects that are read or written at the same time, in MiB; the minimum is 96
    #[arg(long, value_name = "MIB", default_value_t = tpde_store::MEMORY >> 20)]
    memory: u64,
}

impl Location {
    fn open(&self) -> anyhow::Result<Opened> {
        Ok(Opened::open(&self.url).map_err(error)?.with_memory(self.memory.saturating_mul(1 << 20)))
    }
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
    fn run(&self) -> anyhow::Result<InitOutput> {
        let options = StoreOptions::default()
            .grace(Duration::from_secs(self.grace))
            .anchor_every(self.anchor_every)
            .anchor_percent(self.anchor_percent);
        Opened::init(&self.store, &options).map_err(error)?;
        Ok(InitOutput { store: self.store.clone() })
    }
}

impl Put {
    fn run(&self, common: &Common) -> anyhow::Result<Row> {
        let store = self.store.open()?;
        let target = SafetensorsCheckpoint::open(&self.checkpoint)?;
        let bar = common.bar("put", target.tensors().iter().map(|tensor| tensor.bytes()).sum());
        let advance = |bytes| bar.inc(bytes);
        let mut options = PutOptions::default().watch(&advance).branch(&self.branch).metadata(self.metadata.clone());
        let encode = self.codec.options().split(self.split.clone()).renamed(self.rename.iter().cloned()).derived(!self.no_derived);
        options = options.encode(encode).anchor(match &self.external {
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
        row(&store, &version).map_err(error)
    }
}

impl Get {
    fn run(&self, common: &Common) -> anyhow::Result<GetOutput> {
        let store = self.store.open()?;
        let version = store.version(&self.version).map_err(error)?;
        // If only some tensors are rebuilt, the bar ends early.
        let bar = common.bar("get", version.tensor_bytes);
        let advance = |bytes| bar.inc(bytes);
        let select = |index: &ValidatedIndex| self.selection(index);
        let mut options = GetOptions::default().watch(&advance);
        if !self.tensor.is_empty() || !self.part.is_empty() {
            options = options.select(&select);
        }
        if let Some(cache) = &self.cache {
            options = options.cache(cache);
        }
        for (version, path) in &self.have {
            options = options.have(version, path);
        }
        let report = store.get(&version.name(), &self.output, &options).map_err(error)?;
        bar.finish_and_clear();
        GetOutput::of(&store, report).map_err(error)
    }

    /// The tensors and rectangles that the patterns select. A tensor that matches --part has the shape of its rectangle, also if it
    /// matches --tensor.
    fn selection(&self, index: &ValidatedIndex) -> tpde::Result<BTreeMap<String, Rectangle>> {
        let globs = matchers(&self.tensor, index)?;
        let named = index.tensors().filter(|tensor| globs.iter().any(|glob| glob.is_match(tensor.name)));
        let mut selection: BTreeMap<_, _> =
            named.map(|tensor| (tensor.name.to_owned(), Rectangle::whole(tensor.whole_shape()))).collect();
        for (name, rectangles) in rectangles(&self.part, index)? {
            let [rectangle] = <[_; 1]>::try_from(rectangles).map_err(|all| {
                let (count, escaped) = (all.len(), Escaped(&name));
                tpde::Error::InvalidArgument(format!("--part selects {count} rectangles of tensor {escaped}: expected one"))
            })?;
            selection.insert(name, rectangle);
        }
        Ok(selection)
    }
}

impl Log {
    fn run(&self) -> anyhow::Result<Versions> {
        let store = self.store.open()?;
        let versions = match self.limit {
            Some(limit) => store.newest(&self.branch, limit),
            None => store.log(&self.branch),
        };
        Versions::of(&store, &versions.map_err(error)?).map_err(error)
    }
}

impl FoldArgs {
    fn options<'a>(&self, watch: &'a dyn tpde::Watch) -> FoldOptions<'a> {
        let options = FoldOptions::default().watch(watch).encode(self.codec.options());
        self.have.iter().fold(options, |options, (version, path)| options.have(version, path))
    }
}

impl Fold {
    fn run(&self, common: &Common) -> anyhow::Result<FoldOutput> {
        let store = self.store.open()?;
        let bar = common.bar("fold", store.version(&self.to).map_err(error)?.tensor_bytes);
        let advance = |bytes| bar.inc(bytes);
        let shortcut = store.fold(&self.from, &self.to, &self.options.options(&advance)).map_err(error)?;
        bar.finish_and_clear();
        Ok(FoldOutput::of(&shortcut))
    }
}

impl Prune {
    fn run(&self, common: &Common) -> anyhow::Result<PruneOutput> {
        let store = self.store.open()?;
        let Some(keep_every) = self.keep_every.filter(|_| !self.damaged) else {
            return store.prune_damaged(&self.branch).map(PruneOutput).map_err(error);
        };
        // It is not known yet which shortcuts are needed. They never have more bytes than all versions of the branch.
        let most = store.log(&self.branch).map_err(error)?.iter().map(|version| version.tensor_bytes).sum();
        let bar = common.bar("prune", most);
        let advance = |bytes| bar.inc(bytes);
        let report = store.prune(&self.branch, keep_every, &self.options.options(&advance)).map_err(error)?;
        bar.finish_and_clear();
        Ok(PruneOutput(report))
    }
}

impl Report {
    fn run(&self) -> anyhow::Result<ReportOutput> {
        // Of a store elsewhere, no file is here.
        #[cfg(feature = "html")]
        let folder = PathBuf::from(self.store.url.strip_prefix("file://").unwrap_or(&self.store.url));
        #[cfg(feature = "html")]
        let file = self.html.as_ref().map(|path| OutputFile::create(path, &[folder], self.force)).transpose()?;
        let store = self.store.open()?;
        let mut names = self.branch.clone();
        if names.is_empty() {
            names = store.branches().map_err(error)?.into_iter().map(|head| head.branch).collect();
        }
        let mut branches = Vec::new();
        for name in names {
            let versions = store.report(&name).map_err(error)?;
            branches.push((name, versions));
        }
        let described = ReportOutput::of(branches);
        #[cfg(feature = "html")]
        if let Some(file) = file {
            file.publish(described.page(&self.store.url, &store.usage().map_err(error)?).as_bytes())?;
        }
        Ok(described)
    }
}

impl Watch {
    fn run(&self, common: &Common) -> anyhow::Result<()> {
        let store = self.store.open()?;
        let versions = store.watch(&self.branch, self.from, Duration::from_secs(self.interval));
        for version in versions.take(self.limit.unwrap_or(usize::MAX)) {
            let version = version.map_err(error)?;
            if common.json {
                common.show("store.watch", row(&store, &version).map_err(error)?)?;
            } else {
                let mut out = anstream::stdout().lock();
                writeln!(out, "{}", version.name()).and_then(|()| out.flush()).map_err(failure::Output)?;
            }
        }
        Ok(())
    }
}
