//! The page about a store: what each version takes and changes.

use super::document::{Fact, WIDTH, cell, document, number, on_log_scale, percent};
use crate::text;
use maud::{Markup, html};

/// Maximum number of columns of a drawing, and of rows of a table. A store may have many thousands of versions.
const COLUMNS: usize = 240;
const ROWS: usize = 2000;

/// A branch, its versions in ascending order of number.
pub struct Branch {
    pub name: String,
    pub versions: Vec<Version>,
}

/// A version of a branch.
pub struct Version {
    pub number: u64,
    /// `whole`, `difference`, `external` or `same`.
    pub content: &'static str,
    /// Its own pair, if it is stored.
    pub own: Option<Pair>,
    /// Shortcuts to it.
    pub shortcuts: Vec<Pair>,
    pub tensor_bytes: u64,
    /// Number and bytes of the pairs that a reader without any version reads.
    pub to_read: (u64, u64),
    /// Seconds since 1970.
    pub created: u64,
    /// The user's own values, as text.
    pub metadata: String,
}

/// A pair that leads to a version.
pub struct Pair {
    /// The version that is its base; `None` if it is whole.
    pub from: Option<String>,
    pub bytes: u64,
    /// Share of the elements that change.
    pub share: f64,
}

impl Version {
    fn is_anchor(&self) -> bool {
        matches!(self.content, "whole" | "external")
    }

    /// The pair that shows best what the version changes: its own, or else the shortest shortcut.
    fn change(&self) -> Option<&Pair> {
        let with_base = |pair: &&Pair| pair.from.is_some();
        self.own.as_ref().filter(with_base).or_else(|| self.shortcuts.iter().min_by_key(|pair| pair.bytes))
    }
}

/// The page of a store.
pub fn page(title: &str, facts: &[Fact], branches: &[Branch]) -> String {
    let drawings = html! {
        @for (i, branch) in branches.iter().enumerate() {
            h2.branch id=(format!("branch-{i}")) { "Branch " (branch.name) }
            (stored(branch, i))
            (changed(branch, i))
            (to_read(branch, i))
            (table(branch, i))
        }
    };
    document(title, facts, &drawings)
}

/// A column of a drawing: some versions that follow one another.
struct Column<'a> {
    versions: &'a [Version],
    x: f64,
    width: f64,
}

impl Column<'_> {
    fn name(&self) -> String {
        match self.versions {
            [one] => format!("version {}", one.number),
            [first, .., last] => format!("versions {} to {}", first.number, last.number),
            [] => String::new(),
        }
    }

    /// The mean of what `value` gives for versions that have it.
    fn mean(&self, value: impl Fn(&Version) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self.versions.iter().filter_map(value).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }
}

fn columns(branch: &Branch) -> Vec<Column<'_>> {
    let per_column = branch.versions.len().div_ceil(COLUMNS).max(1);
    let chunks = branch.versions.chunks(per_column);
    // Bars of a few versions are not as wide as the page.
    let width = ((WIDTH - LEFT) / chunks.len() as f64).min(64.0);
    chunks.enumerate().map(|(i, versions)| Column { versions, x: LEFT + width * i as f64, width }).collect()
}

const HEIGHT: f64 = 200.0;
const FLOOR: f64 = 176.0;
const CEILING: f64 = 14.0;
/// Room for the labels of a scale.
const LEFT: f64 = 72.0;

/// A drawing of bars. Each item has the height between 0 and 1, its class and its label. A tick of the scale has a height and a label.
fn bars<'a>(
    branch: &'a Branch,
    id: &str,
    ticks: &[(f64, String)],
    of_column: impl Fn(&Column<'a>) -> Vec<(f64, &'static str, String)>,
) -> Markup {
    let columns = columns(branch);
    // A number needs about 48 units.
    let every = columns.first().map_or(1, |column| (48.0 / column.width).ceil() as usize);
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-labelledby=(id) {
            path.frame d=(format!("M{LEFT} {FLOOR} H{WIDTH}")) {}
            @for (value, label) in ticks {
                @let y = FLOOR - (FLOOR - CEILING) * value;
                path.frame d=(format!("M{LEFT} {} H{WIDTH}", number(y))) {}
                text.soft x=(LEFT - 8.0) y=(number(y + 4.0)) text-anchor="end" { (label) }
            }
            text.soft x=(LEFT - 8.0) y=(FLOOR + 16.0) text-anchor="end" { "version" }
            @for (i, column) in columns.iter().enumerate() {
                @for (value, class, label) in of_column(column) {
                    @let height = (FLOOR - CEILING) * value.clamp(0.0, 1.0);
                    @if class == "mark" {
                        circle.mark cx=(number(column.x + column.width / 2.0)) cy=(number(FLOOR - height)) r="4" { title { (label) } }
                    } @else {
                        rect class=(class) x=(number(column.x + 0.08 * column.width)) y=(number(FLOOR - height))
                            width=(number(0.84 * column.width)) height=(number(height.max(1.0))) { title { (label) } }
                    }
                }
                @if i % every == 0 {
                    text.soft x=(number(column.x + column.width / 2.0)) y=(FLOOR + 16.0) text-anchor="middle" {
                        (column.versions[0].number)
                    }
                }
            }
        }
    }
}

/// A logarithmic scale of sizes. It ends at the largest, and begins at a quarter of the smallest, but not below a hundred thousandth of
/// the largest.
struct Scale {
    least: f64,
    most: f64,
}

impl Scale {
    fn new(sizes: impl Iterator<Item = u64>) -> Self {
        let (mut least, mut most) = (f64::INFINITY, 0.0f64);
        for size in sizes.filter(|size| *size > 0) {
            least = least.min(size as f64);
            most = most.max(size as f64);
        }
        Self { least: (least / 4.0).max(most / 1e5).min(most), most: most.max(1.0) }
    }

    /// Both ends and the middle.
    fn ticks(&self) -> Vec<(f64, String)> {
        if self.least >= self.most || self.most <= 1.0 {
            return Vec::new();
        }
        [0.0, 0.5, 1.0].map(|at| (at, text::bytes((self.least * (self.most / self.least).powf(at)).round() as u64))).into()
    }

    fn of(&self, size: f64) -> f64 {
        if size <= 0.0 { 0.0 } else { (size / self.least).ln() / (self.most / self.least).ln().max(f64::MIN_POSITIVE) }
    }
}

fn key(entries: &[(&str, &str)]) -> Markup {
    html! {
        div.legend {
            @for (class, text) in entries {
                svg.key viewBox="0 0 10 10" aria-hidden="true" {
                    @if *class == "mark" { circle.mark cx="5" cy="5" r="4" {} } @else { rect class=(class) width="10" height="10" {} }
                }
                (text)
            }
        }
    }
}

fn stored(branch: &Branch, i: usize) -> Markup {
    let id = format!("stored-{i}");
    let pairs = branch.versions.iter().flat_map(|version| version.own.iter().chain(&version.shortcuts));
    let scale = &Scale::new(pairs.map(|pair| pair.bytes));
    let of_column = |column: &Column<'_>| {
        let mut items = Vec::new();
        let name = column.name();
        let mean = |anchor: bool| {
            column.mean(|version| version.own.as_ref().filter(|_| version.is_anchor() == anchor).map(|pair| pair.bytes as f64))
        };
        for (anchor, class, what) in [(true, "down", "whole, "), (false, "value", "")] {
            items.extend(mean(anchor).map(|size| (scale.of(size), class, format!("{name}: {what}{}", text::bytes(size as u64)))));
        }
        for shortcut in column.versions.iter().flat_map(|version| &version.shortcuts) {
            let from = shortcut.from.as_deref().unwrap_or("nothing");
            let label = format!("{name}: shortcut from {from}, {}", text::bytes(shortcut.bytes));
            items.push((scale.of(shortcut.bytes as f64), "mark", label));
        }
        items
    };
    html! {
        section {
            h3 id=(id) { "Stored bytes of " (branch.name) }
            p {
                "Size of the pair of each version, on a logarithmic scale. The largest pair has " (text::bytes(scale.most as u64)) ". "
                "External versions have no pair."
            }
            (bars(branch, &id, &scale.ticks(), of_column))
            (key(&[("value", "difference"), ("down", "anchor: whole"), ("mark", "shortcut")]))
        }
    }
}

fn changed(branch: &Branch, i: usize) -> Markup {
    let id = format!("changed-{i}");
    let of_column = |column: &Column<'_>| {
        let mut items = Vec::new();
        if let Some(share) = column.mean(|version| version.change().map(|pair| pair.share)) {
            let from = match column.versions {
                [one] => {
                    one.change().and_then(|pair| pair.from.as_deref()).map(|from| format!(" since {from}")).unwrap_or_default()
                }
                _ => String::new(),
            };
            let value = if share > 0.0 { on_log_scale(share) } else { 0.0 };
            items.push((value, "value", format!("{}: {} changed{from}", column.name(), percent(share))));
        }
        if column.versions.iter().any(Version::is_anchor) {
            items.push((0.04, "mark", format!("{}: anchor", column.name())));
        }
        items
    };
    html! {
        section {
            @let ticks = [(0.0, "0.01 %"), (0.5, "1 %"), (1.0, "100 %")].map(|(at, label)| (at, label.to_owned()));
            h3 id=(id) { "Changed elements of " (branch.name) }
            p { "Share of the elements that differ from the version before, on a logarithmic scale from 0.01 % to 100 %." }
            (bars(branch, &id, &ticks, of_column))
            (key(&[("value", "changed"), ("mark", "anchor")]))
        }
    }
}

fn to_read(branch: &Branch, i: usize) -> Markup {
    let id = format!("read-{i}");
    let most = branch.versions.iter().map(|version| version.to_read.1).max().unwrap_or(0).max(1);
    let of_column = |column: &Column<'_>| {
        let mean = column.mean(|version| Some(version.to_read.1 as f64)).unwrap_or(0.0);
        let pairs = column.versions.iter().map(|version| version.to_read.0).max().unwrap_or(0);
        let label = format!("{}: {} in {}", column.name(), text::bytes(mean as u64), text::counted(pairs, "pair"));
        vec![(mean / most as f64, "value", label)]
    };
    html! {
        section {
            @let ticks = [(0.0, 0), (0.5, most / 2), (1.0, most)].map(|(at, bytes)| (at, text::bytes(bytes)));
            @let ticks = if most > 1 { &ticks[..] } else { &[] };
            h3 id=(id) { "Bytes to read for " (branch.name) }
            p { "Size of the pairs that a reader without any version reads. The highest bar is " (text::bytes(most)) "." }
            (bars(branch, &id, ticks, of_column))
        }
    }
}

/// The figures as a table, for readers who do not see the drawings.
fn table(branch: &Branch, i: usize) -> Markup {
    let id = format!("table-{i}");
    let none = || "–".to_owned();
    let row = |version: &Version| {
        let shortcuts: Vec<_> = version
            .shortcuts
            .iter()
            .map(|pair| format!("{} from {}", text::bytes(pair.bytes), pair.from.as_deref().unwrap_or("nothing")))
            .collect();
        html! {
            tr {
                (cell(&format!("{}@{}", branch.name, version.number)))
                td { (text::date(version.created)) }
                td { (if version.is_anchor() { format!("{}, anchor", version.content) } else { version.content.to_owned() }) }
                td { (version.own.as_ref().map_or_else(none, |pair| text::bytes(pair.bytes))) }
                td { (version.change().map_or_else(none, |pair| percent(pair.share))) }
                td { (version.own.as_ref().map_or_else(none, |pair| text::times(text::ratio(version.tensor_bytes, pair.bytes)))) }
                td { (text::bytes(version.to_read.1)) " in " (text::counted(version.to_read.0, "pair")) }
                (cell(&shortcuts.join(", ")))
                (cell(&version.metadata))
            }
        }
    };
    let left_out = branch.versions.len().saturating_sub(ROWS);
    html! {
        section {
            h3 id=(id) { "Versions of " (branch.name) }
            @if left_out > 0 { p { "The newest " (ROWS) ", without " (text::counted(left_out as u64, "older one")) "." } }
            div.wide {
                table aria-labelledby=(id) {
                    thead { tr {
                        th scope="col" { "version" } th scope="col" { "created (UTC)" } th scope="col" { "stored" }
                        th scope="col" { "bytes" } th scope="col" { "changed" } th scope="col" { "ratio" } th scope="col" { "to read" } th scope="col" { "shortcuts" } th scope="col" { "metadata" }
                    } }
                    tbody { @for version in branch.versions.iter().skip(left_out).rev() { (row(version)) } }
                }
            }
        }
    }
}
