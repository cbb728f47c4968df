//! Output of `tpde inspect --explain`: the purpose of all bytes, and the reason for each tensor's codec.

use super::text;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use tpde::{
    BaseKind, Codec, Escaped, Explanation, IndexParts, PayloadParts, TableSetReport, TensorExplanation, TensorReport, WayReport,
};

/// The bytes of both files by purpose.
#[derive(Serialize)]
pub struct Bytes<'a> {
    index: &'a IndexParts,
    blob_header: u64,
    payloads: &'a PayloadParts,
}

impl<'a> Bytes<'a> {
    pub fn new(explanation: &'a Explanation) -> Self {
        let Explanation { index, blob_header, payloads, .. } = explanation;
        Self { index, blob_header: *blob_header, payloads }
    }
}

/// A tensor with its explanation.
#[derive(Clone, Serialize)]
pub struct ExplainedTensor<'a> {
    #[serde(flatten)]
    tensor: TensorReport,
    bits_per_change: Option<f64>,
    /// The reason for the tensor's codec, if known.
    why: Option<&'static str>,
    #[serde(flatten)]
    found: &'a TensorExplanation,
}

impl<'a> ExplainedTensor<'a> {
    pub fn new(tensor: TensorReport, found: &'a TensorExplanation) -> Self {
        let bits_per_change = (tensor.changed > 0).then(|| 8.0 * tensor.payload_bytes as f64 / tensor.changed as f64);
        let why = why(&tensor, &found.ways);
        Self { tensor, bits_per_change, why, found }
    }
}

/// The reason for a tensor's codec, if the pair or a comparison with the other encodings shows it.
fn why(tensor: &TensorReport, ways: &[WayReport]) -> Option<&'static str> {
    if tensor.lanes == 0 {
        return Some("empty: nothing is stored");
    }
    if tensor.changed == 0 {
        let unchanged = tensor.base_kind != BaseKind::None;
        return Some(if unchanged { "unchanged: nothing is stored" } else { "all zero: nothing is stored" });
    }
    let Some(taken) = ways.iter().find(|way| way.taken) else {
        return (tensor.base_kind == BaseKind::None).then_some("without a base: stored whole");
    };
    let smallest = ways.iter().all(|way| taken.bytes() <= way.bytes());
    Some(if smallest {
        "the smallest of all ways"
    } else {
        "not the smallest way: made with another --codec, --favor or encoder, or its first 64 MiB decided"
    })
}

/// Printed if the reason is not known.
const UNKNOWN: &str = "not known from the pair alone: --base BASE compares all ways";

/// Writes the explanation of a pair. `tensors` are in print order.
pub fn write<'a>(
    f: &mut fmt::Formatter<'_>,
    explanation: &Explanation,
    tensors: impl Iterator<Item = ExplainedTensor<'a>> + Clone,
) -> fmt::Result {
    write_bytes(f, explanation)?;
    if !explanation.table_sets.is_empty() {
        writeln!(f)?;
        write_table_sets(f, &explanation.table_sets)?;
    }
    writeln!(f)?;
    write_parts(f, &explanation.payloads, tensors.clone())?;
    let compared = tensors.clone().filter(|tensor| !tensor.found.ways.is_empty());
    if compared.clone().next().is_some() {
        writeln!(f)?;
        write_ways(f, compared)?;
    }
    writeln!(f)?;
    write_reasons(f, tensors)
}

/// Writes the bytes of both files by purpose.
fn write_bytes(f: &mut fmt::Formatter<'_>, explanation: &Explanation) -> fmt::Result {
    let (index, payloads) = (explanation.index.total(), explanation.payloads.total());
    let (blob, all) = (explanation.blob_header + payloads, index + explanation.blob_header + payloads);
    let mut rows = vec![("index".to_owned(), index)];
    let part = |(name, bytes): (&str, u64)| (bytes > 0).then(|| (format!("  {name}"), bytes));
    rows.extend(explanation.index.each().filter_map(part));
    rows.push(("blob".to_owned(), blob));
    rows.extend(part(("header", explanation.blob_header)));
    rows.extend(explanation.payloads.each().filter_map(part));
    let rows = rows.iter().map(|(name, bytes)| vec![name.clone(), text::count(*bytes), text::share(*bytes, all)]);
    text::table(f, 1, &["what the bytes are for", "bytes", "share"], rows)
}

fn write_table_sets(f: &mut fmt::Formatter<'_>, sets: &[TableSetReport]) -> fmt::Result {
    let row = |set: &TableSetReport| {
        let others = if set.tensors > 1 { format!(" and {} more", text::count(set.tensors - 1)) } else { String::new() };
        let users = format!("{}{others}", Escaped(&set.first_tensor));
        vec![set.number.to_string(), users, text::count(set.expanded_bytes)]
    };
    text::table(f, 2, &["table set", "used by", "bytes before compression"], sets.iter().map(row))
}

/// Writes each tensor's payload bytes by purpose. Only parts that occur in some tensor have a column.
fn write_parts<'a>(
    f: &mut fmt::Formatter<'_>,
    all: &PayloadParts,
    tensors: impl Iterator<Item = ExplainedTensor<'a>> + Clone,
) -> fmt::Result {
    let shown: Vec<bool> = all.each().map(|(_, bytes)| bytes > 0).collect();
    let cells = |parts: &PayloadParts| -> Vec<String> {
        parts.each().zip(&shown).filter(|(_, shown)| **shown).map(|((_, bytes), _)| text::count(bytes)).collect()
    };
    let mut header = vec!["tensor, by bytes", "codec", "base", "set", "lanes changed", "bits per change"];
    header.extend(all.each().map(|(name, _)| name).zip(&shown).filter(|(_, shown)| **shown).map(|(name, _)| name));
    header.push("bytes");
    let bits = |bits: Option<f64>| bits.map_or("–".into(), |bits| format!("{bits:.2}"));
    let row = |tensor: ExplainedTensor<'_>| {
        let ExplainedTensor { tensor, bits_per_change, found, .. } = tensor;
        let mut row = vec![
            Escaped(&tensor.name).to_string(),
            tensor.codec.to_string(),
            tensor.base_kind.to_string(),
            found.table_set.map_or(String::new(), |set| set.to_string()),
            text::count(tensor.changed),
            bits(bits_per_change),
        ];
        row.extend(cells(&found.parts));
        row.push(text::count(tensor.payload_bytes));
        row
    };
    let (count, changed) = tensors.clone().fold((0, 0), |(n, changed), tensor| (n + 1, changed + tensor.tensor.changed));
    let none = String::new;
    let per_change = (changed > 0).then(|| 8.0 * all.total() as f64 / changed as f64);
    let mut total = vec![text::counted(count, "tensor"), none(), none(), none(), text::count(changed), bits(per_change)];
    total.extend(cells(all));
    total.push(text::count(all.total()));
    text::table(f, 4, &header, tensors.map(row).chain([total]))
}

/// Writes the size of each encoding, for tensors that were compared.
fn write_ways<'a>(f: &mut fmt::Formatter<'_>, tensors: impl Iterator<Item = ExplainedTensor<'a>> + Clone) -> fmt::Result {
    writeln!(f, "  Bytes with the tensor's share of tables, in each way to encode it. ~ marks an estimate.\n")?;
    let columns: Vec<(bool, Codec)> = [true, false]
        .into_iter()
        .flat_map(|from_base| Codec::ALL.iter().rev().map(move |&codec| (from_base, codec)))
        .filter(|column| tensors.clone().any(|tensor| tensor.found.ways.iter().any(|way| (way.from_base, way.codec) == *column)))
        .collect();
    let name = |(from_base, codec): (bool, Codec)| if from_base { codec.to_string() } else { format!("{codec}, no base") };
    let names: Vec<_> = columns.iter().map(|&column| name(column)).collect();
    let header: Vec<_> = ["tensor", "taken"].into_iter().chain(names.iter().map(String::as_str)).collect();
    let row = |tensor: ExplainedTensor<'_>| {
        let ways = &tensor.found.ways;
        let taken = ways.iter().find(|way| way.taken).map_or(String::new(), |way| name((way.from_base, way.codec)));
        let cell = |column: &(bool, Codec)| match ways.iter().find(|way| (way.from_base, way.codec) == *column) {
            None => "–".to_owned(),
            Some(way) => format!("{}{}", if way.estimated { "~" } else { "" }, text::count(way.bytes())),
        };
        [Escaped(&tensor.tensor.name).to_string(), taken].into_iter().chain(columns.iter().map(cell)).collect()
    };
    text::table(f, 2, &header, tensors.map(row))
}

/// Writes the reasons for codecs, and the number of tensors for each reason.
fn write_reasons<'a>(f: &mut fmt::Formatter<'_>, tensors: impl Iterator<Item = ExplainedTensor<'a>>) -> fmt::Result {
    let mut reasons = BTreeMap::<(Codec, &str), u64>::new();
    for tensor in tensors {
        *reasons.entry((tensor.tensor.codec, tensor.why.unwrap_or(UNKNOWN))).or_default() += 1;
    }
    let rows = reasons.iter().map(|((codec, why), count)| vec![codec.to_string(), (*why).to_owned(), text::count(*count)]);
    text::table(f, 2, &["codec", "why", "tensors"], rows)
}
