//! The page about a pair: text, and drawings in SVG.

use super::document::{
    Fact, WIDTH, bits_or_more, cell, document, end_of_scale, legend, number, on_log_scale, percent, shade, shortened,
};
use super::figures::{Cell, Figures, Grid, Share, Sums};
use super::treemap::{Area, squarify};
use crate::text;
use maud::{Markup, html};
use tpde::Moves;

/// The page of a pair.
pub fn page(title: &str, facts: &[Fact], figures: &Figures) -> String {
    let drawings = html! {
        (grids(&figures.grid))
        (treemap(&figures.shares))
        @if let Some(moves) = &figures.moves { (histogram(moves)) }
        (chunk_map(&figures.cells))
        (table(figures))
    };
    document(title, facts, &drawings)
}

/// Both heat maps: layers by kinds of tensors.
fn grids(grid: &Grid) -> Markup {
    let all = grid.rows.iter().flat_map(|(_, row)| row);
    let scale = end_of_scale(all.filter_map(|sums| Some((sums.bits_per_change()?, sums.changed))));
    let changed = |sums: &Sums| sums.share().map(|share| (on_log_scale(share) * f64::from(u8::from(share > 0.0)), percent(share)));
    let bits =
        |sums: &Sums| sums.bits_per_change().map(|bits| ((bits / scale.0).sqrt(), format!("{} bits per change", number(bits))));
    html! {
        @if !grid.rows.is_empty() {
            section {
                h2 id="changed" { "Changed lanes" }
                p {
                    "Share of the lanes that change, by kind of tensor and layer, on a logarithmic scale. "
                    "A lane is one number of a tensor, taken as an integer."
                }
                (heat_map(grid, "changed", &changed))
                (legend("0.01 %", "100 %"))
            }
            section {
                h2 id="bits" { "Stored bits per change" }
                p { "Size of the payloads, divided by the number of lanes that change, on a scale of square roots. Empty: nothing changes." }
                (heat_map(grid, "bits", &bits))
                (legend("0", &bits_or_more(scale)))
            }
        }
    }
}

fn heat_map(grid: &Grid, id: &str, value: &dyn Fn(&Sums) -> Option<(f64, String)>) -> Markup {
    const NAMES: f64 = 300.0;
    const ROW: f64 = 16.0;
    let (count, height) = (grid.columns.len(), 20.0 + ROW * grid.rows.len() as f64);
    let cell = (WIDTH - NAMES) / count as f64;
    let every = count.div_ceil(16).max(1);
    html! {
        @let view = format!("0 0 {WIDTH} {height}");
        svg viewBox=(view) role="img" aria-labelledby=(id) {
            text.soft x=(number(NAMES - 8.0)) y="12" text-anchor="end" { "layer" }
            @for (i, layers) in grid.columns.iter().enumerate().step_by(every) {
                text.soft x=(number(NAMES + cell * i as f64)) y="12" { (layers.start) }
            }
            @for (r, (kind, row)) in grid.rows.iter().enumerate() {
                @let y = 20.0 + ROW * r as f64;
                text x=(number(NAMES - 8.0)) y=(number(y + 12.0)) text-anchor="end" { (shortened(kind, 46)) title { (kind) } }
                @for (c, sums) in row.iter().enumerate() {
                    @if let Some((value, label)) = value(sums) {
                        rect.value x=(number(NAMES + cell * c as f64)) y=(y) width=(number(cell * 0.94)) height=(ROW - 1.0)
                            fill-opacity=(if value > 0.0 { shade(value) } else { "0.04".into() }) {
                            title { (kind) ", " (layers_of(grid, c)) ": " (label) }
                        }
                    }
                }
            }
        }
    }
}

fn layers_of(grid: &Grid, column: usize) -> String {
    let layers = &grid.columns[column];
    match layers.end - layers.start {
        1 => format!("layer {}", layers.start),
        _ => format!("layers {} to {}", layers.start, layers.end - 1),
    }
}

fn treemap(shares: &[Share]) -> Markup {
    const HEIGHT: f64 = 360.0;
    let total: u64 = shares.iter().map(|share| share.bytes).sum();
    let weights: Vec<_> = shares.iter().map(|share| share.bytes as f64).collect();
    let tiles = squarify(&weights, Area { x: 0.0, y: 0.0, width: WIDTH, height: HEIGHT });
    html! {
        section {
            h2 id="stored" { "Stored bytes" }
            p { "Area: size of the payloads of each kind of tensor, and of the index. Together " (text::bytes(total)) "." }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-labelledby="stored" {
                @for (share, tile) in shares.iter().zip(tiles) {
                    @let label = format!("{}: {}, {}", share.name, text::bytes(share.bytes), text::share(share.bytes, total));
                    g {
                        title { (label) }
                        rect.tile x=(number(tile.x)) y=(number(tile.y)) width=(number(tile.width)) height=(number(tile.height))
                            fill-opacity="0.28" {}
                        // A character takes about 6 units.
                        @if tile.width > 60.0 && tile.height > 34.0 {
                            text x=(number(tile.x + 6.0)) y=(number(tile.y + 16.0)) {
                                (shortened(&share.name, ((tile.width - 12.0) / 6.2) as usize))
                            }
                            text.soft x=(number(tile.x + 6.0)) y=(number(tile.y + 30.0)) { (text::bytes(share.bytes)) }
                        }
                    }
                }
            }
        }
    }
}

/// Name of the moves from 2^i to 2^(i+1) − 1 steps.
fn steps(i: usize) -> String {
    match i {
        0 => "1 step".into(),
        1..=9 => format!("{} to {} steps", 1u64 << i, (2u64 << i) - 1),
        _ => format!("2^{i} to 2^{} − 1 steps", i + 1),
    }
}

fn histogram(moves: &Moves) -> Markup {
    const HEIGHT: f64 = 236.0;
    const FLOOR: f64 = 190.0;
    let last = moves.up.iter().zip(&moves.down).rposition(|(up, down)| up + down > 0).unwrap_or(0);
    let bars: Vec<_> = (0..=last)
        .rev()
        .map(|i| (moves.down[i], format!("down by {}", steps(i)), format!("−2^{i}"), true))
        .chain((0..=last).map(|i| (moves.up[i], format!("up by {}", steps(i)), format!("2^{i}"), false)))
        .collect();
    let most = bars.iter().map(|bar| bar.0).max().unwrap_or(0).max(1);
    let height = |n: u64| if n == 0 { 0.0 } else { (FLOOR - 10.0) * (1.0 + (n as f64).ln()) / (1.0 + (most as f64).ln()) };
    let bar = WIDTH / bars.len() as f64;
    // A label needs about 40 units.
    let every = (40.0 / bar).ceil() as usize;
    let changed = moves.changed();
    html! {
        section {
            h2 id="moves" { "Moves" }
            p {
                "Distance between base and target of the " (text::count(changed)) " lanes that change, in steps to the next number "
                "that the dtype can hold. Height: number of lanes, on a logarithmic scale. "
                (text::count(moves.unchanged)) " lanes do not change."
            }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-labelledby="moves" {
                path.frame d=(format!("M0 {FLOOR} H{WIDTH}")) {}
                @for (i, (n, label, short, down)) in bars.iter().enumerate() {
                    @let (x, height) = (bar * i as f64, height(*n));
                    rect class=(if *down { "down" } else { "value" }) x=(number(x + 0.08 * bar)) y=(number(FLOOR - height))
                        width=(number(0.84 * bar)) height=(number(height)) {
                        title { (label) ": " (text::counted(*n, "lane")) ", " (text::share(*n, changed)) " of the changes" }
                    }
                    @if i % every == 0 {
                        text.soft x=(number(x + bar / 2.0)) y=(FLOOR + 16.0) text-anchor="middle" { (short) }
                    }
                }
                text.soft x=(WIDTH / 2.0) y=(FLOOR + 36.0) text-anchor="middle" { "steps from base to target, at least" }
            }
        }
    }
}

fn chunk_map(cells: &[Cell]) -> Markup {
    const SIDE: f64 = 15.0;
    let in_row = (WIDTH / SIDE) as usize;
    let height = SIDE * cells.len().div_ceil(in_row).max(1) as f64;
    let bits = |cell: &Cell| cell.sums.bits_per_lane().unwrap_or(0.0);
    let scale = end_of_scale(cells.iter().map(|cell| (bits(cell), cell.sums.lanes)));
    let per_cell = cells.first().map_or(1, |cell| cell.chunks.end - cell.chunks.start);
    html! {
        section {
            h2 id="chunks" { "Chunks" }
            p {
                "Chunks in the order of the blob, "
                @if per_cell > 1 { (text::count(per_cell.into())) " in each cell. " } @else { "one in each cell. " }
                "Colour: stored bits per lane."
            }
            svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-labelledby="chunks" {
                @for (i, cell) in cells.iter().enumerate() {
                    @let (x, y) = (SIDE * (i % in_row) as f64, SIDE * (i / in_row) as f64);
                    rect.value x=(x) y=(y) width=(SIDE - 1.0) height=(SIDE - 1.0)
                        fill-opacity=(if bits(cell) > 0.0 { shade((bits(cell) / scale.0).sqrt()) } else { "0.04".into() }) {
                        title {
                            "chunk " (cell.chunks.start)
                            @if per_cell > 1 { " to " (cell.chunks.end - 1) }
                            " of " (cell.name) ": " (text::bytes(cell.sums.stored)) ", " (number(bits(cell))) " bits per lane, "
                            (text::share(cell.sums.changed, cell.sums.lanes)) " changed"
                        }
                    }
                }
            }
            (legend("0", &bits_or_more(scale)))
        }
    }
}

/// The figures as a table, for readers who do not see the drawings.
fn table(figures: &Figures) -> Markup {
    let row = |kind: &str, sums: &Sums| {
        html! {
            tr {
                (cell(kind))
                td { (text::count(sums.tensors)) }
                td { (text::share(sums.changed, sums.lanes)) }
                td { (sums.bits_per_change().map_or("–".into(), number)) }
                td { (text::times(text::ratio(sums.bytes, sums.stored))) }
                td { (text::bytes(sums.stored)) }
            }
        }
    };
    let total = |row: &[Sums]| {
        row.iter().fold(Sums::default(), |mut sum, sums| {
            sum += *sums;
            sum
        })
    };
    let grid = &figures.grid;
    html! {
        section {
            h2 id="kinds" { "Kinds of tensors" }
            div.wide {
                table aria-labelledby="kinds" {
                    thead { tr {
                        th scope="col" { "kind" } th scope="col" { "tensors" } th scope="col" { "changed" }
                        th scope="col" { "bits per change" } th scope="col" { "ratio" } th scope="col" { "stored" }
                    } }
                    tbody {
                        @for (kind, of_layers) in &grid.rows { (row(kind, &total(of_layers))) }
                        @for (kind, sums) in &grid.others { (row(kind, sums)) }
                        @if grid.left_out.0 > 0 {
                            (row(&text::counted(grid.left_out.0 as u64, "smaller kind"), &grid.left_out.1))
                        }
                        (row("all", &figures.all))
                    }
                }
            }
        }
    }
}
