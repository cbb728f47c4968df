//! Tensor table (spec section 8; section 13, step 4).

use super::derived::Derivation;
use super::view::{Part, Tensor};
use crate::codec::{Codec, TableSet};
use crate::derived::Derived;
use crate::error::{Escaped, Result, Rule};
use crate::format::*;
use crate::lane::Dtype;
use crate::prelude::*;
use crate::rectangle::{part_fault, precedes};
use binrw::BinRead;
use binrw::io::Cursor;
use core::ops::Range;

/// The table in a form for fast look-ups: rows of fixed size, which refer to a list of all dimensions and a string of all names.
#[derive(Debug, Default)]
pub(super) struct TensorTable {
    rows: Vec<TensorRow>,
    dims: Vec<u64>,
    names: String,
}

#[derive(Debug)]
struct TensorRow {
    lanes: u64,
    base_param: u64,
    /// Offset of the name in `names`. Like all offsets here it fits in 32 bits, because the parser of the header refuses larger
    /// sections.
    name: u32,
    /// Offset of the base name in `names`.
    base_name: u32,
    /// End of the base name in `names`.
    end: u32,
    /// Offset and end, in `names`, of the scales name. Empty if the entry has none. Parts of a tensor share it.
    scales_name: (u32, u32),
    /// Position of the first dimension in `dims`.
    first_dim: u32,
    /// For a part, positions in `dims` of the shape of its tensor and of its origins. Its extents begin at `first_dim`.
    part: Option<PartDims>,
    first_chunk: u32,
    chunk_count: u32,
    rank: u16,
    dtype: Dtype,
    base_kind: BaseKind,
    codec: Codec,
    chunk_lanes_log2: u8,
    /// Size of the tensor's tables in bytes, until [`TensorTable::set_table_set`] replaces it with the number of their set.
    tables: u32,
}

#[derive(Debug, Clone, Copy)]
struct PartDims {
    whole: u32,
    origin: u32,
}

/// Where the dims of an entry are in `dims`.
struct EntryDims {
    extent: u32,
    part: Option<PartDims>,
}

impl TensorTable {
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn parse(section: &[u8], header: &IndexHeader) -> Result<Self> {
        let size = section.len() as u64;
        let count = u64::from(header.tensor_count);
        let entries_size = count * TensorEntry::SIZE as u64;
        let too_small = |needed: u64| Rule::TensorsSize.check(needed <= size, format_args!("at least {needed} bytes"), size);
        too_small(entries_size)?;
        let (entries, rest) = section.split_at(entries_size as usize);

        let mut cursor = Cursor::new(entries);
        let mut next_entry = || TensorEntry::read(&mut cursor).map_err(|e| Rule::TensorsSize.broken("an entry", e));

        // The names follow all dimensions, so first compute the size of the dimensions.
        let has_parts = header.has(FEATURE_PARTS);
        let part_of = |i: usize| if has_parts { *entries.get(i * TensorEntry::SIZE + 17).unwrap_or(&0) } else { PART_WHOLE };
        let mut dims_size = 0u64;
        let mut before = PART_WHOLE;
        for (i, entry) in entries.chunks_exact(TensorEntry::SIZE).enumerate() {
            let part = part_of(i);
            let is_known = part <= PART_FURTHER && (part != PART_FURTHER || before != PART_WHOLE);
            let expected = "0, 1, or 2 after a part of the same tensor";
            Rule::TensorPart.check(is_known, expected, part).map_err(|e| e.in_entry(i))?;
            dims_size += 8 * dims_of(part) * u64::from(u16::from_le_bytes([entry[10], entry[11]]));
            before = part;
        }
        too_small(entries_size + dims_size)?;
        let (dims, names) = rest.split_at(dims_size as usize);
        let dims: Vec<u64> = dims.as_chunks::<8>().0.iter().map(|d| u64::from_le_bytes(*d)).collect();

        let mut parser = TableParser {
            table: Self { rows: Vec::with_capacity(count as usize), dims, names: String::new() },
            ..TableParser::default()
        };
        parser.table.names.reserve_exact(names.len());
        let has_derived = header.has(FEATURE_DERIVED);
        let mut rest = names;
        for i in 0..count as usize {
            let mut entry = next_entry()?;
            let part = part_of(i);
            if has_parts {
                entry.part = PART_WHOLE; // so that the check of reserved bytes passes
            }
            let is_last = part_of(i + 1) != PART_FURTHER;
            let features = EntryFeatures { part, is_last, has_derived };
            parser.entry(&entry, features, &mut rest).map_err(|e| match parser.name.clone() {
                Some(name) => e.in_tensor(&parser.table.names[name]),
                None => e.in_entry(i),
            })?;
        }
        Rule::TensorsSize.check(rest.is_empty(), "nothing after the names", format_args!("{} bytes", rest.len()))?;
        let tables = header.section(Section::Tables).expanded_size;
        Rule::TensorTablesSize.check_eq(parser.tables, tables)?;
        Rule::HeaderChunkCount.check_eq(parser.chunks, u64::from(header.chunk_count))?;
        Ok(parser.table)
    }

    /// Whether a tensor has a base, so that its base digest may differ from zero.
    pub(super) fn has_base(&self, i: usize) -> bool {
        self.rows[i].base_kind != BaseKind::None
    }

    /// Size of a tensor's tables in bytes. Valid before [`TensorTable::set_table_set`].
    pub(super) fn tables_size(&self, i: usize) -> u32 {
        self.rows[i].tables
    }

    /// Sets the number of the table set of a tensor.
    pub(super) fn set_table_set(&mut self, i: usize, number: u32) {
        self.rows[i].tables = number;
    }

    /// Index of the table set that a tensor uses. Valid after [`TensorTable::set_table_set`].
    pub(super) fn table_set(&self, i: usize) -> Option<usize> {
        (self.rows[i].tables as usize).checked_sub(1)
    }

    pub(super) fn name(&self, i: usize) -> &str {
        let row = &self.rows[i];
        &self.names[row.name as usize..row.base_name as usize]
    }

    /// The entries of this name: one whole tensor, or the parts of a tensor.
    pub(super) fn find(&self, name: &str) -> Range<usize> {
        let (mut low, mut high) = (0, self.rows.len());
        while low < high {
            let middle = low.midpoint(high);
            if self.name(middle) < name { low = middle + 1 } else { high = middle }
        }
        let has_name = |&i: &usize| self.rows[i].name == self.rows[low].name;
        match self.rows.get(low) {
            Some(_) if self.name(low) == name => low..(low..self.rows.len()).take_while(has_name).last().unwrap_or(low) + 1,
            _ => low..low,
        }
    }

    /// Whether an entry describes a part.
    pub(super) fn has_parts(&self) -> bool {
        self.rows.iter().any(|row| row.part.is_some())
    }

    /// Whether an entry has a derived base.
    pub(super) fn has_derived(&self) -> bool {
        self.rows.iter().any(|row| row.base_kind.is_derived())
    }

    fn dims(&self, first: u32, rank: u16) -> &[u64] {
        &self.dims[first as usize..][..usize::from(rank)]
    }

    pub(super) fn view<'a>(&'a self, i: usize, digests: &'a TensorDigests, sets: &'a [TableSet]) -> Tensor<'a> {
        let row = &self.rows[i];
        let name = self.name(i);
        let base_name = &self.names[row.base_name as usize..row.end as usize];
        let derived = Derivation::of_checked(row.base_kind, row.base_param).map(|Derivation { base_dtype, form }| {
            let scales_name = &self.names[row.scales_name.0 as usize..row.scales_name.1 as usize];
            Derived { base_dtype, scales: form.map(|form| (form, scales_name)) }
        });
        Tensor {
            place: i,
            name,
            base_name: if base_name.is_empty() { name } else { base_name },
            dtype: row.dtype,
            shape: self.dims(row.first_dim, row.rank),
            part: row.part.map(|part| Part { whole: self.dims(part.whole, row.rank), origin: self.dims(part.origin, row.rank) }),
            base_kind: row.base_kind,
            base_param: row.base_param,
            derived,
            codec: row.codec,
            tables: self.table_set(i).and_then(|set| sets.get(set)),
            lanes: row.lanes,
            chunk_lanes: 1 << row.chunk_lanes_log2,
            first_chunk: row.first_chunk,
            chunk_count: row.chunk_count,
            digests,
        }
    }
}

/// Number of lists of dims that an entry has.
fn dims_of(part: u8) -> u64 {
    match part {
        PART_FIRST => 3,
        PART_FURTHER => 2,
        _ => 1,
    }
}

/// What the parser of an entry knows besides its fields.
#[derive(Clone, Copy)]
struct EntryFeatures {
    part: u8,
    /// Whether the next entry belongs to another tensor.
    is_last: bool,
    /// Whether entries may have derived bases.
    has_derived: bool,
}

/// State of the pass over the table: the rows so far, and totals of their fields.
#[derive(Default)]
struct TableParser {
    table: TensorTable,
    chunks: u64,
    tables: u64,
    dims: usize,
    /// Range of the current entry's name in `table.names`; `None` until the name is read.
    name: Option<Range<usize>>,
    /// Among the rows of the current tensor, the index of the first one with a base.
    with_base: Option<usize>,
}

impl TableParser {
    /// Checks an entry, and adds its row to the table.
    fn entry(&mut self, entry: &TensorEntry, features: EntryFeatures, names: &mut &[u8]) -> Result<()> {
        let EntryFeatures { part, is_last, has_derived } = features;
        let (name, base_name) = match part {
            PART_FURTHER => self.further_names(entry)?,
            _ => self.names(entry, names)?,
        };
        let dtype = Dtype::from_code(entry.dtype).ok_or_else(|| Rule::TensorDtype.broken("a known code", entry.dtype))?;
        if let Some(before) = self.table.rows.last().filter(|_| part == PART_FURTHER) {
            Rule::TensorDtype.check(dtype == before.dtype, format_args!("that of the first part, {}", before.dtype), dtype)?;
            Rule::TensorRank.check_eq(before.rank, entry.rank)?;
        }
        check_rank(entry.rank.into())?;
        Rule::TensorRank.check(part == PART_WHOLE || entry.rank > 0, "at least 1 of a tensor with parts", entry.rank)?;
        let (dims, lanes) = self.shape(dtype, part, entry.rank)?;
        let kind = BaseKind::from_code(entry.base_kind).filter(|kind| has_derived || !kind.is_derived());
        let kind = kind.ok_or_else(|| Rule::TensorBaseKind.broken("a code that the features allow", entry.base_kind))?;
        let is_kind_of_part = kind != BaseKind::Prefix;
        Rule::TensorBaseKind.check(part == PART_WHOLE || is_kind_of_part, "a kind other than prefix for a part", kind)?;
        let before = self.with_base.filter(|_| part == PART_FURTHER).map(|row| &self.table.rows[row]);
        if let Some(before) = before.filter(|_| kind != BaseKind::None) {
            let expected = format_args!("that of the parts before, {}", before.base_kind);
            Rule::TensorBaseKind.check(kind == before.base_kind, expected, kind)?;
        }
        let base_allowed = kind != BaseKind::None || before.is_some() || !is_last || base_name.is_empty();
        Rule::TensorBaseName.check(base_allowed, "no base name without a base", "one")?;
        let codec = Codec::from_code(entry.codec).ok_or_else(|| Rule::TensorCodec.broken("a known id", entry.codec))?;
        let log2 = entry.chunk_lanes_log2;
        let in_range = (MIN_CHUNK_LANES_LOG2..32).contains(&log2) && (dtype.lane_bytes() as u64) << log2 <= MAX_CHUNK_BYTES;
        Rule::TensorChunkLanes.check(in_range, format_args!("12 or more, and at most {MAX_CHUNK_BYTES} bytes"), log2)?;
        Rule::TensorReserved.check(entry.part == PART_WHOLE && entry.reserved == [0; 2], "zeros", "other bytes")?;
        let tables_allowed = codec == Codec::Conditioned || entry.tables_size == 0;
        Rule::TensorTablesSize.check(tables_allowed, format_args!("0 for codec {codec}"), entry.tables_size)?;
        Rule::TensorFirstChunk.check_eq(self.chunks, u64::from(entry.first_chunk))?;
        Rule::TensorChunkCount.check_eq(lanes.div_ceil(1 << log2), u64::from(entry.chunk_count))?;
        let scales_name = match kind.is_derived() {
            true => self.derivation(kind, dtype, entry, part, &dims, base_name.clone(), names)?,
            false => {
                check_base_param(kind, entry.base_param, dtype, self.table.dims(dims.extent, entry.rank))?;
                0..0
            }
        };
        if kind != BaseKind::None && (part != PART_FURTHER || self.with_base.is_none()) {
            self.with_base = Some(self.table.rows.len());
        } else if part != PART_FURTHER {
            self.with_base = None;
        }

        self.table.rows.push(TensorRow {
            lanes,
            base_param: entry.base_param,
            name: name.start as u32,
            base_name: base_name.start as u32,
            end: base_name.end as u32,
            scales_name: (scales_name.start as u32, scales_name.end as u32),
            first_dim: dims.extent,
            part: dims.part,
            first_chunk: entry.first_chunk,
            chunk_count: entry.chunk_count,
            rank: entry.rank,
            dtype,
            base_kind: kind,
            codec,
            chunk_lanes_log2: log2,
            tables: entry.tables_size,
        });
        self.chunks += u64::from(entry.chunk_count);
        self.tables += u64::from(entry.tables_size);
        self.dims += usize::from(entry.rank) * dims_of(part) as usize;
        Ok(())
    }

    /// Checks the shape of an entry, or the extents, origins and order of a part. Returns where they are, and the number of
    /// lanes.
    fn shape(&self, dtype: Dtype, part: u8, rank: u16) -> Result<(EntryDims, u64)> {
        let first = self.dims as u32;
        let table = &self.table;
        let lanes_of = |shape: &[u64]| {
            dtype.lanes(shape).ok_or_else(|| {
                Rule::TensorShape.broken(format_args!("whole bytes, below 2^63 bits, of {dtype}"), format_args!("{shape:?}"))
            })
        };
        if part != PART_FURTHER {
            let lanes = lanes_of(table.dims(first, rank))?;
            if part == PART_WHOLE {
                return Ok((EntryDims { extent: first, part: None }, lanes));
            }
        }
        let before = table.rows.last().filter(|_| part == PART_FURTHER);
        let whole = before.and_then(|row| row.part).map_or(first, |part| part.whole);
        let origin = if part == PART_FURTHER { first } else { first + u32::from(rank) };
        let extent = origin + u32::from(rank);
        let (shape, origins, extents) = (table.dims(whole, rank), table.dims(origin, rank), table.dims(extent, rank));
        if let Some(fault) = part_fault(dtype.bits(), shape, origins, extents) {
            let expected = format_args!("a part of {shape:?}");
            return Err(Rule::TensorPart.broken(expected, format_args!("{fault}: {origins:?} + {extents:?}")));
        }
        if let Some((row, part)) = before.and_then(|row| Some((row, row.part?))) {
            let last = (table.dims(part.origin, rank), table.dims(row.first_dim, rank));
            let expected = format_args!("a part after {:?} + {:?}", last.0, last.1);
            let found = format_args!("{origins:?} + {extents:?}");
            Rule::TensorPartOrder.check(precedes(last, (origins, extents)), expected, found)?;
        }
        Ok((EntryDims { extent, part: Some(PartDims { whole, origin }) }, lanes_of(extents)?))
    }

    /// Checks the base parameter of an entry with a derived base, and takes its scales name. Returns where that is in
    /// `table.names`.
    #[expect(clippy::too_many_arguments, reason = "the parts of one entry")]
    fn derivation(
        &mut self,
        kind: BaseKind,
        dtype: Dtype,
        entry: &TensorEntry,
        part: u8,
        dims: &EntryDims,
        base_name: Range<usize>,
        names: &mut &[u8],
    ) -> Result<Range<usize>> {
        let (param, dims_of) = (DerivedParam::from_bits(entry.base_param), |first| self.table.dims(first, entry.rank));
        let shape = dims_of(dims.part.map_or(dims.extent, |part| part.whole));
        let derivation = Derivation::parse(kind, param, dtype, shape)?;
        let before = self.with_base.filter(|_| part == PART_FURTHER).map(|row| &self.table.rows[row]);
        if let Some(stated) = before.and_then(|row| Derivation::of_checked(row.base_kind, row.base_param)) {
            derivation.check_is(stated)?;
        }
        if kind == BaseKind::Cast {
            return Ok(0..0);
        }
        if let Some(part) = dims.part {
            derivation.check_blocks(shape, dims_of(part.origin), dims_of(dims.extent))?;
        }
        Rule::TensorScalesName.check(param.scales_name_size > 0, "a name", "none")?;
        let scales_name = take_name(names, param.scales_name_size, Rule::TensorScalesName)?;
        let base_name = match base_name.is_empty() {
            true => self.name.clone().unwrap_or_default(),
            false => base_name,
        };
        let is_other = scales_name != &self.table.names[base_name];
        Rule::TensorScalesName.check(is_other, "a name other than that of the base tensor", "the same")?;
        if let Some(stated) = before.map(|row| row.scales_name.0 as usize..row.scales_name.1 as usize) {
            let is_stated = scales_name == &self.table.names[stated.clone()];
            Rule::TensorScalesName.check(is_stated, "that of the parts before", Escaped(scales_name))?;
            return Ok(stated);
        }
        let start = self.table.names.len();
        self.table.names.push_str(scales_name);
        Ok(start..self.table.names.len())
    }

    /// The names of a further part: those of the entry before. Only their sizes are stated, as 0.
    fn further_names(&mut self, entry: &TensorEntry) -> Result<(Range<usize>, Range<usize>)> {
        let before = self.table.rows.last();
        let (start, middle, end) = before.map_or((0, 0, 0), |row| (row.name as usize, row.base_name as usize, row.end as usize));
        self.name = Some(start..middle);
        Rule::TensorName.check(entry.name_size == 0, "a name of 0 bytes for a further part", entry.name_size)?;
        Rule::TensorBaseName.check(entry.base_name_size == 0, "a base name of 0 bytes for a further part", entry.base_name_size)?;
        Ok((start..middle, middle..end))
    }

    /// Takes and checks the name and the base name of an entry.
    fn names(&mut self, entry: &TensorEntry, names: &mut &[u8]) -> Result<(Range<usize>, Range<usize>)> {
        self.name = None;
        let name = take_name(names, entry.name_size, Rule::TensorName)?;
        check_present(name, Rule::TensorName)?;
        let start = self.table.names.len();
        self.table.names.push_str(name);
        self.name = Some(start..self.table.names.len());
        if let Some(last) = self.table.rows.len().checked_sub(1) {
            let before = self.table.name(last);
            Rule::TensorNameOrder.check(before < name, "a name greater than the previous one", "one that is not")?;
        }
        let base_start = self.table.names.len();
        let base_name = take_name(names, entry.base_name_size, Rule::TensorBaseName)?;
        Rule::TensorBaseName.check(base_name != name, "a name of its own or none", "the tensor's name")?;

        self.table.names.push_str(base_name);
        Ok((start..base_start, base_start..self.table.names.len()))
    }
}

fn check_base_param(kind: BaseKind, param: u64, dtype: Dtype, shape: &[u64]) -> Result<()> {
    if kind != BaseKind::Prefix {
        return Rule::TensorBaseParam.check_eq(0, param);
    }
    let Some(&rows) = shape.first() else {
        return Err(Rule::TensorBaseParam.broken("a rank of at least 1", 0));
    };
    Rule::TensorBaseParam.check(param != rows, "a number of rows other than the target's", param)?;
    let mut base = shape.to_vec();
    base[0] = param;
    Rule::TensorBaseParam.check(dtype.lanes(&base).is_some(), "a base of whole bytes, below 2^63 bits", param)
}

/// Takes a name of `size` bytes from the front of `names`.
fn take_name<'a>(names: &mut &'a [u8], size: u32, rule: Rule) -> Result<&'a str> {
    check_name_size(size as usize, rule)?;
    let (name, rest) = names
        .split_at_checked(size as usize)
        .ok_or_else(|| Rule::TensorsSize.broken(format_args!("{size} bytes of name"), names.len()))?;
    *names = rest;
    let name = core::str::from_utf8(name).map_err(|e| rule.broken("UTF-8", e))?;
    check_content(name, rule)?;
    Ok(name)
}

/// Checks that the table can hold a tensor with this name, base name (`None` if equal) and rank. Writers call it before any work.
pub fn check_holdable(name: &str, base_name: Option<&str>, rank: usize) -> Result<()> {
    let check = || {
        check_name(name, Rule::TensorName)?;
        base_name.map_or(Ok(()), |base_name| check_name(base_name, Rule::TensorBaseName))?;
        check_rank(rank)
    };
    check().map_err(|e| e.in_tensor(name))
}

fn check_name(name: &str, rule: Rule) -> Result<()> {
    check_present(name, rule)?;
    check_name_size(name.len(), rule)?;
    check_content(name, rule)
}

fn check_present(name: &str, rule: Rule) -> Result<()> {
    rule.check(!name.is_empty(), "a name", "none")
}

fn check_name_size(size: usize, rule: Rule) -> Result<()> {
    rule.check(size <= MAX_NAME_SIZE as usize, format_args!("at most {MAX_NAME_SIZE} bytes"), size)
}

fn check_content(name: &str, rule: Rule) -> Result<()> {
    rule.check(!name.contains('\0'), "no NUL", "one")
}

fn check_rank(rank: usize) -> Result<()> {
    Rule::TensorRank.check(rank <= usize::from(MAX_RANK), format_args!("at most {MAX_RANK}"), rank)
}
