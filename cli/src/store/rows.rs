//! What the verbs of `tpde store` print.

use super::report::{content, facts};
use crate::text;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use tpde::Escaped;
use tpde_store::{Content, GcReport, GetReport, LeftOut, PruneReport, Result, Shortcut, Store, Usage, VerifyReport, Version};

#[derive(Serialize)]
pub struct InitOutput {
    pub store: String,
}

impl fmt::Display for InitOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "made the store {}", Escaped(&self.store))
    }
}

#[derive(Serialize)]
pub struct DeleteOutput {
    pub branch: String,
    /// The version that was its newest.
    pub head: String,
}

impl fmt::Display for DeleteOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "deleted the branch {}, whose newest version was {}", self.branch, self.head)
    }
}

/// A version, without the list of its objects.
#[derive(Serialize)]
pub struct Row {
    pub version: String,
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
    /// Size of the other files that the parent does not have, in bytes.
    new_file_bytes: u64,
    /// Seconds since 1970.
    created: u64,
    state: String,
    metadata: BTreeMap<String, String>,
}

/// A version of a store, as a row.
pub fn row(store: &Store, version: &Version) -> Result<Row> {
    Ok(Row::of(version, store.new_file_bytes(std::slice::from_ref(version))?[0]))
}

impl Row {
    fn of(version: &Version, new_file_bytes: u64) -> Self {
        let hint = match &version.content {
            Content::External { hint } => Some(hint.clone()),
            _ => None,
        };
        Self {
            version: version.name(),
            parent: version.parent.as_ref().map(|parent| format!("{}@{}", parent.branch, parent.number)),
            content: content(&version.content),
            hint,
            stored_bytes: version.pair().map_or(0, |pair| pair.bytes()),
            tensor_bytes: version.tensor_bytes,
            tensors: version.tensors,
            files: version.files.len() as u64,
            new_file_bytes,
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
        let mut stored = format!("{} for {} of tensors", text::bytes(self.stored_bytes), text::bytes(self.tensor_bytes));
        if self.new_file_bytes > 0 {
            stored = format!("{stored}, and {} of other files", text::bytes(self.new_file_bytes));
        }
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

/// A version that was rebuilt.
#[derive(Serialize)]
pub struct GetOutput {
    #[serde(flatten)]
    version: Row,
    /// Damaged pairs that were not used.
    left_out: Vec<LeftOut>,
}

impl GetOutput {
    pub fn of(store: &Store, report: GetReport) -> Result<Self> {
        Ok(Self { version: row(store, &report.version)?, left_out: report.left_out })
    }
}

impl fmt::Display for GetOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.version)?;
        for LeftOut { pair, reason, .. } in &self.left_out {
            writeln!(f, "  warning: left out {}: {}", Escaped(pair), Escaped(reason))?;
        }
        Ok(())
    }
}

/// Maximum number of characters of the metadata in a row.
const MAX_METADATA: usize = 60;

#[derive(Serialize)]
pub struct Versions {
    versions: Vec<Row>,
}

impl Versions {
    pub fn of(store: &Store, versions: &[Version]) -> Result<Self> {
        let bytes = store.new_file_bytes(versions)?;
        Ok(Self { versions: versions.iter().zip(bytes).map(|(version, bytes)| Row::of(version, bytes)).collect() })
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |row: &Row| {
            vec![
                row.version.clone(),
                row.content.into(),
                row.parent.clone().unwrap_or_default(),
                text::date(row.created),
                text::begin(&row.metadata(), MAX_METADATA),
                text::bytes(row.stored_bytes),
                text::times(text::ratio(row.tensor_bytes, row.stored_bytes)),
                text::bytes(row.new_file_bytes),
            ]
        };
        let header = ["version", "stored", "parent", "created (UTC)", "metadata", "bytes", "ratio", "other files"];
        text::table(f, 5, &header, self.versions.iter().map(row))?;
        let sum = |bytes: fn(&Row) -> u64| self.versions.iter().map(bytes).fold(0, u64::saturating_add);
        // The tensors of an external version are not stored.
        let tensors = sum(|row| if row.content == "external" { 0 } else { row.tensor_bytes });
        let stored = sum(|row| row.stored_bytes);
        let (ratio, files) = (text::times(text::ratio(tensors, stored)), text::bytes(sum(|row| row.new_file_bytes)));
        let versions = text::counted(self.versions.len() as u64, "version");
        let (stored, tensors) = (text::bytes(stored), text::bytes(tensors));
        writeln!(f, "  {versions}: {stored} for {tensors} of tensors, {ratio}; {files} of other files")
    }
}

#[derive(Serialize)]
#[serde(transparent)]
pub struct VerifyOutput(pub VerifyReport);

impl fmt::Display for VerifyOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(report) = self;
        writeln!(f, "checked {}, {}", text::counted(report.versions, "version"), text::bytes(report.bytes))?;
        for (version, fault) in &report.faults {
            writeln!(f, "  {version}: {}", Escaped(fault))?;
        }
        for (shortcut, fault) in &report.shortcuts {
            writeln!(f, "  {}: {}", Escaped(shortcut), Escaped(fault))?;
        }
        for version in &report.external {
            writeln!(f, "  {version} needs a checkpoint from outside: only its own objects were checked")?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
pub struct FoldOutput {
    from: String,
    to: String,
    /// Size of the pair in bytes.
    stored_bytes: u64,
}

impl FoldOutput {
    pub fn of(shortcut: &Shortcut) -> Self {
        Self { from: shortcut.from.name(), to: shortcut.to.name(), stored_bytes: shortcut.pair.bytes() }
    }
}

impl fmt::Display for FoldOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} to {} in {}", self.from, self.to, text::bytes(self.stored_bytes))
    }
}

#[derive(Serialize)]
#[serde(transparent)]
pub struct PruneOutput(pub PruneReport);

impl fmt::Display for PruneOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(report) = self;
        let pruned = report.pruned.len() as u64;
        writeln!(f, "pruned {}, kept {}", text::counted(pruned, "version"), text::count(report.kept))?;
        let shortcuts = text::counted(report.shortcuts, "shortcut");
        writeln!(f, "  stored {shortcuts}, {}", text::bytes(report.shortcut_bytes))?;
        for (version, reason) in &report.skipped {
            writeln!(f, "  no shortcut to {version}: {}", Escaped(reason))?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
#[serde(transparent)]
pub struct GcOutput(pub GcReport);

impl fmt::Display for GcOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(report) = self;
        writeln!(f, "removed {}, {}", text::counted(report.removed, "object"), text::bytes(report.removed_bytes))?;
        if report.versions > 0 {
            let were = if report.versions == 1 { "was" } else { "were" };
            writeln!(f, "  {} that {were} pruned, or whose branch was deleted", text::counted(report.versions, "version"))?;
        }
        if report.shortcuts > 0 {
            writeln!(f, "  {}", text::counted(report.shortcuts, "shortcut"))?;
        }
        let (used, young) = (text::count(report.used), text::count(report.young));
        writeln!(f, "  kept: {used} that versions use, {young} younger than the grace or of running calls")?;
        if report.waiting > 0 {
            let (waiting, (were, stay, them)) = (
                text::counted(report.waiting, "version"),
                match report.waiting {
                    1 => ("was", "stays", "it"),
                    _ => ("were", "stay", "them"),
                },
            );
            writeln!(
                f,
                "  {waiting} that {were} pruned, or whose branch was deleted, {stay} until the grace of the store is over and no other needs {them}"
            )?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
#[serde(transparent)]
pub struct Sizes(pub Usage);

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(usage) = self;
        text::facts(f, &facts(usage))
    }
}
