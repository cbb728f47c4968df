//! `tpde store report`: the versions of a store, as rows and as a page.

#[cfg(feature = "html")]
use crate::html;
use crate::text;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use tpde::Escaped;
use tpde_store::{Content, PairReport, Usage, VersionReport};

/// The versions of some branches.
#[derive(Serialize)]
pub struct ReportOutput {
    branches: Vec<BranchVersions>,
}

#[derive(Serialize)]
struct BranchVersions {
    branch: String,
    versions: Vec<ReportRow>,
}

#[derive(Serialize)]
struct ReportRow {
    version: String,
    number: u64,
    /// `whole`, `difference`, `external` or `same`.
    content: &'static str,
    tensor_bytes: u64,
    pairs: Vec<Pair>,
    /// Number and bytes of the pairs that a reader without any version reads.
    pairs_to_read: u64,
    bytes_to_read: u64,
    /// Seconds since 1970.
    created: u64,
    metadata: BTreeMap<String, String>,
}

/// A pair that leads to a version.
#[derive(Serialize)]
struct Pair {
    /// The version that is its base; null if it is whole.
    from: Option<String>,
    shortcut: bool,
    bytes: u64,
    elements: u64,
    changed: u64,
}

impl Pair {
    fn of(pair: &PairReport) -> Self {
        let from = pair.from.as_ref().map(tpde_store::Reference::name);
        Self { from, shortcut: pair.is_shortcut, bytes: pair.bytes, elements: pair.elements, changed: pair.changed }
    }

    #[cfg(feature = "html")]
    fn drawn(&self) -> html::StorePair {
        let share = if self.elements == 0 { 0.0 } else { self.changed as f64 / self.elements as f64 };
        html::StorePair { from: self.from.clone(), bytes: self.bytes, share }
    }
}

impl ReportRow {
    fn of(report: &VersionReport) -> Self {
        let version = &report.version;
        Self {
            version: version.name(),
            number: version.number,
            content: content(&version.content),
            tensor_bytes: version.tensor_bytes,
            pairs: report.pairs.iter().map(Pair::of).collect(),
            pairs_to_read: report.to_read.0,
            bytes_to_read: report.to_read.1,
            created: version.created,
            metadata: version.metadata.clone(),
        }
    }

    fn own(&self) -> Option<&Pair> {
        self.pairs.iter().find(|pair| !pair.shortcut)
    }

    fn shortcuts(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| pair.shortcut)
    }

    fn metadata(&self) -> String {
        let pairs: Vec<_> = self.metadata.iter().map(|(key, value)| format!("{}={}", Escaped(key), Escaped(value))).collect();
        pairs.join(" ")
    }

    #[cfg(feature = "html")]
    fn drawn(&self) -> html::StoreVersion {
        html::StoreVersion {
            number: self.number,
            content: self.content,
            own: self.own().map(Pair::drawn),
            shortcuts: self.shortcuts().map(Pair::drawn).collect(),
            tensor_bytes: self.tensor_bytes,
            to_read: (self.pairs_to_read, self.bytes_to_read),
            created: self.created,
            metadata: self.metadata(),
        }
    }
}

/// How a version is stored, as a word.
pub fn content(content: &Content) -> &'static str {
    match content {
        Content::Whole(_) => "whole",
        Content::Difference(_) => "difference",
        Content::External { .. } => "external",
        Content::Same => "same",
        _ => "other",
    }
}

impl ReportOutput {
    pub fn of(branches: Vec<(String, Vec<VersionReport>)>) -> Self {
        let branch = |(branch, versions): (String, Vec<VersionReport>)| BranchVersions {
            branch,
            versions: versions.iter().map(ReportRow::of).collect(),
        };
        Self { branches: branches.into_iter().map(branch).collect() }
    }

    #[cfg(feature = "html")]
    /// The page of the store at `location`.
    pub fn page(&self, location: &str, usage: &Usage) -> String {
        let branches: Vec<_> = self
            .branches
            .iter()
            .map(|branch| html::StoreBranch {
                name: branch.branch.clone(),
                versions: branch.versions.iter().map(ReportRow::drawn).collect(),
            })
            .collect();
        const MOST: usize = 60;
        let location = html::shortened(&Escaped(location).to_string(), MOST);
        let until = usage.newest.map_or("no version".into(), |newest| format!("{} UTC", text::date(newest)));
        html::store_page(&format!("Store {location}, {until}"), &facts(usage), &branches)
    }
}

/// The sizes of a store.
pub fn facts(usage: &Usage) -> Vec<(&'static str, String)> {
    let waiting = match usage.waiting {
        0 => String::new(),
        1 => ", and 1 that was pruned or deleted and waits for gc".into(),
        waiting => format!(", and {} that were pruned or deleted and wait for gc", text::count(waiting)),
    };
    let mut facts = vec![("versions", format!("{}{waiting}", text::count(usage.versions)))];
    if let (Some(oldest), Some(newest)) = (usage.oldest, usage.newest) {
        facts.push(("stored", format!("{} to {} UTC", text::date(oldest), text::date(newest))));
    }
    facts.extend([
        ("whole versions", text::bytes(usage.anchor_bytes)),
        ("differences", text::bytes(usage.difference_bytes)),
        ("shortcuts", text::bytes(usage.shortcut_bytes)),
        ("other files", text::bytes(usage.file_bytes)),
        ("all that is stored", text::bytes(usage.stored_bytes)),
        ("tensors of all versions", text::bytes(usage.tensor_bytes)),
        ("ratio", text::times(text::ratio(usage.tensor_bytes, usage.stored_bytes - usage.file_bytes))),
    ]);
    facts
}

impl fmt::Display for ReportOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |row: &ReportRow| {
            let changed = row.own().or_else(|| row.shortcuts().next()).filter(|pair| pair.from.is_some());
            let changed = changed.map(|pair| text::share(pair.changed, pair.elements)).unwrap_or_default();
            vec![
                row.version.clone(),
                row.content.into(),
                row.own().map_or(String::new(), |pair| text::bytes(pair.bytes)),
                changed,
                text::count(row.shortcuts().count() as u64),
                text::bytes(row.bytes_to_read),
            ]
        };
        let rows = self.branches.iter().flat_map(|branch| branch.versions.iter().rev()).map(row);
        text::table(f, 2, &["version", "stored", "bytes", "changed", "shortcuts", "to read"], rows)
    }
}
