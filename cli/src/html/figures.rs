//! The figures of a page: what they show, without its form.

use super::names::place;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::{AddAssign, Range};
use tpde::{Escaped, Moves, TensorReport, ValidatedIndex};

/// Maximum number of columns, of rows, of tiles and of cells. An untrusted index may have millions of tensors.
const COLUMNS: usize = 128;
const ROWS: usize = 48;
const TILES: usize = 40;
const CELLS: usize = 2048;

/// Sums over some tensors or chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    pub tensors: u64,
    pub lanes: u64,
    pub changed: u64,
    /// Size of the target and of the payloads, in bytes.
    pub bytes: u64,
    pub stored: u64,
}

impl AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.tensors += other.tensors;
        self.lanes += other.lanes;
        self.changed += other.changed;
        self.bytes += other.bytes;
        self.stored += other.stored;
    }
}

impl Sums {
    /// Share of the lanes that change; `None` without lanes.
    pub fn share(&self) -> Option<f64> {
        (self.lanes > 0).then(|| self.changed as f64 / self.lanes as f64)
    }

    /// Stored bits per changed lane; `None` without changes.
    pub fn bits_per_change(&self) -> Option<f64> {
        (self.changed > 0).then(|| 8.0 * self.stored as f64 / self.changed as f64)
    }

    /// Stored bits per lane; `None` without lanes.
    pub fn bits_per_lane(&self) -> Option<f64> {
        (self.lanes > 0).then(|| 8.0 * self.stored as f64 / self.lanes as f64)
    }
}

/// Tensors by kind and layer. A kind is a name without its numbers.
pub struct Grid {
    /// The layers of each column.
    pub columns: Vec<Range<u32>>,
    /// Kinds, and the sums of each column. In the order of names.
    pub rows: Vec<(String, Vec<Sums>)>,
    /// Kinds without layers, the largest first.
    pub others: Vec<(String, Sums)>,
    /// Number of kinds that are left out, and their sums.
    pub left_out: (usize, Sums),
}

/// A part of the stored bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Share {
    pub name: String,
    pub bytes: u64,
}

/// Some chunks that follow one another.
pub struct Cell {
    pub chunks: Range<u32>,
    /// Name of the first chunk's tensor.
    pub name: String,
    pub sums: Sums,
}

/// All that a page shows.
pub struct Figures {
    pub all: Sums,
    pub grid: Grid,
    pub shares: Vec<Share>,
    pub cells: Vec<Cell>,
    pub moves: Option<Moves>,
}

impl Figures {
    /// Reads an index. Memory: that of the kinds and layers that the names tell.
    pub fn new(index: &ValidatedIndex, moves: Option<Moves>) -> Self {
        let mut kinds = BTreeMap::<String, BTreeMap<Option<u32>, Sums>>::new();
        let mut all = Sums::default();
        for tensor in index.tensors() {
            let report = TensorReport::new(index, &tensor);
            let (layer, kind) = place(tensor.name);
            let TensorReport { lanes, changed, bytes, payload_bytes: stored, .. } = report;
            let sums = Sums { tensors: 1, lanes, changed, bytes, stored };
            *kinds.entry(kind).or_default().entry(layer).or_default() += sums;
            all += sums;
        }
        let total = |layers: &BTreeMap<Option<u32>, Sums>| {
            layers.values().fold(Sums::default(), |mut sum, sums| {
                sum += *sums;
                sum
            })
        };
        let mut shares: Vec<_> =
            kinds.iter().map(|(kind, layers)| Share { name: Escaped(kind).to_string(), bytes: total(layers).stored }).collect();
        shares.sort_by_key(|share| Reverse(share.bytes)); // stable: names break ties
        let rest = shares.split_off(shares.len().min(TILES));
        if !rest.is_empty() {
            let bytes = rest.iter().map(|share| share.bytes).sum();
            shares.push(Share { name: format!("{} other kinds", rest.len()), bytes });
        }
        shares.push(Share { name: "index".into(), bytes: index.size() });
        shares.retain(|share| share.bytes > 0);
        shares.sort_by_key(|share| Reverse(share.bytes));

        let mut sizes: Vec<_> = kinds.iter().map(|(kind, layers)| (Reverse(total(layers).lanes), kind.clone())).collect();
        sizes.sort();
        let mut left_out = (0, Sums::default());
        for (_, kind) in sizes.into_iter().skip(ROWS) {
            left_out.0 += 1;
            left_out.1 += total(&kinds.remove(&kind).unwrap_or_default());
        }
        Self { all, grid: grid(kinds, left_out), shares, cells: cells(index), moves }
    }
}

fn grid(kinds: BTreeMap<String, BTreeMap<Option<u32>, Sums>>, left_out: (usize, Sums)) -> Grid {
    let mut layers: Vec<u32> = kinds.values().flat_map(|layers| layers.keys().filter_map(|layer| *layer)).collect();
    layers.sort_unstable();
    layers.dedup();
    let per_column = layers.len().div_ceil(COLUMNS).max(1);
    let columns: Vec<_> = layers.chunks(per_column).map(|some| some[0]..some[some.len() - 1].saturating_add(1)).collect();
    let (mut rows, mut others) = (Vec::new(), Vec::new());
    for (kind, of_layers) in kinds {
        let kind = Escaped(&kind).to_string();
        let mut row = vec![Sums::default(); columns.len()];
        for (layer, sums) in of_layers {
            match layer.and_then(|layer| layers.binary_search(&layer).ok()) {
                Some(at) => row[at / per_column] += sums,
                None => others.push((kind.clone(), sums)),
            }
        }
        if row.iter().any(|sums| sums.tensors > 0) {
            rows.push((kind, row));
        }
    }
    others.sort_by_key(|(_, sums)| Reverse(sums.lanes));
    Grid { columns, rows, others, left_out }
}

fn cells(index: &ValidatedIndex) -> Vec<Cell> {
    let per_cell = (index.chunk_count() as usize).div_ceil(CELLS).max(1) as u32;
    let mut cells = Vec::<Cell>::new();
    for tensor in index.tensors() {
        for chunk in tensor.chunks() {
            if chunk % per_cell == 0 {
                let end = chunk.saturating_add(per_cell).min(index.chunk_count());
                cells.push(Cell { chunks: chunk..end, name: Escaped(tensor.name).to_string(), sums: Sums::default() });
            }
            let (record, range) = (index.chunk(chunk), tensor.chunk_range(chunk));
            let lanes = range.end - range.start;
            let sums = Sums {
                tensors: 0,
                lanes,
                changed: record.num_deltas.into(),
                bytes: lanes * tensor.lane_bytes() as u64,
                stored: record.compressed_size.into(),
            };
            if let Some(cell) = cells.last_mut() {
                cell.sums += sums;
            }
        }
    }
    cells
}
