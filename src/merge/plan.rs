//! The plan of a merge: the tensors of the result in order, and their table sets. Made before any payload is read.

use super::files;
use super::input::{Input, conflict};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tpde_core::codec::TableSet;
use tpde_core::derived::Derived;
use tpde_core::error::{Conflict, Error, Escaped, Result, hex};
use tpde_core::format::{BaseKind, MAX_CHUNKS, MAX_TENSORS};
use tpde_core::index::{MAX_TABLE_SETS, Tensor};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::{Rectangle, precedes};
use tpde_core::source::Source;
use tpde_core::writer::{FileSpec, PartSpec, TensorSpec};

/// An entry of the result, which is an entry of an input: a tensor or a part of a tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub input: u32,
    /// Index of the entry in its pair.
    pub tensor: u32,
}

/// The tensors and files of the result.
pub(super) struct Plan {
    /// Entries in ascending order of name, then of origin.
    pub entries: Vec<Entry>,
    pub files: Vec<FileSpec>,
    /// Used table sets, by input and index in its pair.
    sets: Vec<Vec<Option<Arc<TableSet>>>>,
    /// Number of different table sets.
    pub set_count: usize,
}

impl Plan {
    /// Plans the merge of `inputs`. `is_selection` says that some inputs may be parts of their pairs.
    ///
    /// # Errors
    /// [`Error::NotMergeable`]; [`Error::Limit`]; [`Error::Invalid`] for names of files that a pair cannot have together.
    pub fn new<B: Source>(inputs: &[Input<'_, B>], is_selection: bool, with_files: bool) -> Result<Self> {
        let files = if with_files { files::merged(inputs, is_selection)? } else { Vec::new() };
        let entries = entries(inputs)?;
        check_bases(inputs, &entries)?;
        let chunks = entries.iter().map(|entry| u64::from(tensor(inputs, *entry).chunk_count)).sum();
        Error::check_limit("number of tensors", MAX_TENSORS.into(), entries.len() as u64)?;
        Error::check_limit("number of chunks", MAX_CHUNKS.into(), chunks)?;
        let sets: Vec<_> = inputs.iter().map(used_sets).collect();
        let set_count = sets.iter().flatten().flatten().collect::<HashSet<_>>().len();
        Error::check_limit("number of table sets", MAX_TABLE_SETS as u64, set_count as u64)?;
        Ok(Self { entries, files, sets, set_count })
    }

    /// Returns the description of a tensor for the builder.
    pub fn spec<B: Source>(&self, inputs: &[Input<'_, B>], entry: Entry) -> TensorSpec {
        let tensor = tensor(inputs, entry);
        let set = inputs[entry.input as usize].index().table_set(entry.tensor as usize);
        TensorSpec {
            name: tensor.name.to_owned(),
            // A part without a base may be the only kept part of its tensor. A base name is then not allowed.
            base_name: (tensor.base_kind != BaseKind::None).then(|| tensor.base_name.to_owned()),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            part: tensor.part.map(|part| PartSpec { whole: part.whole.to_vec(), origin: part.origin.to_vec() }),
            base_kind: tensor.base_kind,
            base_param: tensor.base_param,
            derived: tensor.derived.map(Into::into),
            codec: tensor.codec,
            tables: set.and_then(|set| self.sets[entry.input as usize][set].clone()),
            chunk_lanes_log2: tensor.chunk_lanes.ilog2() as u8,
        }
    }
}

pub(super) fn tensor<'a, B: Source>(inputs: &[Input<'a, B>], entry: Entry) -> Tensor<'a> {
    inputs[entry.input as usize].index().tensor(entry.tensor as usize)
}

/// Returns the kept entries of all inputs, in ascending order of name and origin. No two may have the same element of a tensor.
fn entries<B: Source>(inputs: &[Input<'_, B>]) -> Result<Vec<Entry>> {
    let of_input = |(i, input): (usize, &Input<'_, B>)| {
        let input_index = i as u32;
        input.kept.iter().map(move |&tensor| Entry { input: input_index, tensor }).collect::<Vec<_>>()
    };
    let mut entries: Vec<Entry> = inputs.iter().enumerate().flat_map(of_input).collect();
    // Stable: for equal names, errors name the inputs in order. Fast, because the entries are sorted runs.
    entries.sort_by(|a, b| {
        let [a, b] = [tensor(inputs, *a), tensor(inputs, *b)];
        a.name.cmp(b.name).then_with(|| a.part.map(|part| part.origin).cmp(&b.part.map(|part| part.origin)))
    });
    for pair in entries.windows(2) {
        let [first, second] = [tensor(inputs, pair[0]), tensor(inputs, pair[1])];
        if first.name == second.name
            && let Some((kind, found)) = contradiction(&first, &second)
        {
            let inputs = [0, 1].map(|i| &inputs[pair[i].input as usize]);
            return Err(conflict(kind, first.name, inputs, found));
        }
    }
    Ok(entries)
}

/// Returns the reason why two consecutive entries of one tensor contradict each other, if they do.
fn contradiction(first: &Tensor<'_>, second: &Tensor<'_>) -> Option<(Conflict, [String; 2])> {
    let described = |tensor: &Tensor<'_>| {
        let whole = format!("{} {:?}", tensor.dtype, tensor.whole_shape());
        match tensor.part {
            Some(part) => format!("{whole}, the part of {:?} from {:?} on", tensor.shape, part.origin),
            None => whole,
        }
    };
    let found = [described(first), described(second)];
    if (first.dtype, first.whole_shape()) != (second.dtype, second.whole_shape()) {
        return Some((Conflict::Type, found));
    }
    let (Some(a), Some(b)) = (first.part, second.part) else { return Some((Conflict::Tensor, found)) };
    if precedes((a.origin, first.shape), (b.origin, second.shape)) {
        return None;
    }
    let ends = |origin: &[u64], shape: &[u64]| origin.iter().zip(shape).map(|(origin, extent)| origin + extent).collect::<Vec<_>>();
    let (a_ends, b_ends) = (ends(a.origin, first.shape), ends(b.origin, second.shape));
    let overlap = (0..a.origin.len()).all(|i| a.origin[i] < b_ends[i] && b.origin[i] < a_ends[i]);
    Some((if overlap { Conflict::Tensor } else { Conflict::Cuts }, found))
}

/// The base lanes of an entry: name of the base tensor, and for a derived base the dtype of the lanes and how they are formed.
type BaseLanes<'a> = (&'a str, Option<Dtype>, Option<Derived<'a>>);

/// Checks that all entries that use a base tensor state the same dtype and shape for it, and the same digest for the same elements,
/// and that all parts of a tensor have one base tensor.
fn check_bases<B: Source>(inputs: &[Input<'_, B>], entries: &[Entry]) -> Result<()> {
    let mut types: HashMap<&str, (Entry, Dtype, Vec<u64>)> = HashMap::new();
    let mut digests: HashMap<(BaseLanes<'_>, Rectangle), Entry> = HashMap::new();
    let mut last: Option<Entry> = None;
    for &entry in entries.iter().filter(|entry| tensor(inputs, **entry).base_kind != BaseKind::None) {
        let second = tensor(inputs, entry);
        let refuse = |known: Entry, name: &str, found: &dyn Fn(Tensor<'_>) -> String| {
            let pair = [known, entry].map(|entry| &inputs[entry.input as usize]);
            Err(conflict(Conflict::Base, name, pair, [found(tensor(inputs, known)), found(second)]))
        };
        // One tensor of the base may be the base of an entry and the scales of another.
        let of_base = second.base_shape().map(|shape| (second.base_name, second.base_dtype(), shape));
        for (name, dtype, shape) in of_base.into_iter().chain(second.scales()) {
            let (known, known_dtype, known_shape) = types.entry(name).or_insert_with(|| (entry, dtype, shape.clone()));
            if (*known_dtype, &*known_shape) != (dtype, &shape) {
                let pair = [*known, entry].map(|entry| &inputs[entry.input as usize]);
                let found = [format!("{known_dtype} {known_shape:?}"), format!("{dtype} {shape:?}")];
                return Err(conflict(Conflict::Base, name, pair, found));
            }
        }
        let rectangle = if second.part.is_some() { second.rectangle() } else { Rectangle::default() };
        // Other derivations of a base tensor give other lanes.
        let lanes = (second.base_name, second.base_kind.is_derived().then_some(second.dtype), second.derived);
        let known = *digests.entry((lanes, rectangle)).or_insert(entry);
        if tensor(inputs, known).base_digest() != second.base_digest() {
            return refuse(known, second.base_name, &|tensor| format!("digest {}", hex(tensor.base_digest())));
        }
        let same_tensor = last.filter(|last| tensor(inputs, *last).name == second.name);
        if let Some(known) = same_tensor.filter(|last| tensor(inputs, *last).base_name != second.base_name) {
            return refuse(known, second.name, &|tensor| format!("base tensor {}", Escaped(tensor.base_name)));
        }
        let is_derived_alike = |other: Tensor<'_>| (other.base_kind, other.derived) == (second.base_kind, second.derived);
        if let Some(known) = same_tensor.filter(|last| !is_derived_alike(tensor(inputs, *last))) {
            return refuse(known, second.name, &|tensor| {
                let scales = tensor.derived.and_then(|derived| derived.scales);
                let scales = scales.map(|(form, name)| format!(", {form} with scales {}", Escaped(name))).unwrap_or_default();
                format!("base kind {} from {}{scales}", tensor.base_kind, tensor.base_dtype())
            });
        }
        last = Some(entry);
    }
    Ok(())
}

/// Returns the table sets that the kept tensors of an input use, by index in its pair.
fn used_sets<B: Source>(input: &Input<'_, B>) -> Vec<Option<Arc<TableSet>>> {
    let all = input.index().table_sets();
    let mut sets = vec![None; all.len()];
    for &i in &input.kept {
        if let Some(set) = input.index().table_set(i as usize) {
            sets[set].get_or_insert_with(|| Arc::new(all[set].clone()));
        }
    }
    sets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merge::Merge;
    use crate::reader::Pair;
    use std::ops::Range;
    use tpde_core::codec::Codec;
    use tpde_core::format::{DIGEST_SIZE, Form, TensorDigests};
    use tpde_core::lane::Dtype;
    use tpde_core::writer::PairBuilder;

    /// A pair of one empty tensor per table set. Each number in `sets` stands for a set.
    fn pair(sets: Range<usize>) -> Pair<Vec<u8>> {
        let mut builder = PairBuilder::new(Vec::new(), "memory".into(), Form::default()).unwrap();
        for number in sets {
            let [a, b] = [number / 4000, number % 4000].map(|zeros| vec![zeros as u16 + 1, 4095 - zeros as u16]);
            builder.begin_tensor(&TensorSpec {
                name: format!("{number:06}"),
                base_name: None,
                dtype: Dtype::U8,
                shape: vec![0],
                part: None,
                base_kind: BaseKind::None,
                base_param: 0,
                derived: None,
                codec: Codec::Conditioned,
                tables: Some(Arc::new(TableSet::new(&[a, b]))),
                chunk_lanes_log2: 12,
            });
            builder.end_copied_tensor(&TensorDigests { base_digest: [0; DIGEST_SIZE], target_digest: [7; DIGEST_SIZE] }).unwrap();
        }
        builder.finish().unwrap().try_into().unwrap()
    }

    #[test]
    fn table_sets_are_shared_and_limited() {
        let shards = [pair(0..40_000), pair(40_000..65_535)];
        let (merged, report) = Merge::new(&shards).to_memory().unwrap();
        assert_eq!((merged.index().table_sets().len(), report.table_sets), (65_535, 65_535));
        for (input, tensors) in [(0, 0..40_000), (1, 40_000..65_535)] {
            for (of_input, number) in tensors.clone().enumerate() {
                assert_eq!(merged.index().tensor(number).tables, shards[input].index().tensor(of_input).tables);
            }
        }
        let more = pair(65_535..65_536);
        let error = Merge::new([&shards[0], &shards[1], &more]).to_memory().unwrap_err();
        let Error::Limit { what, limit: 65_535, found: 65_536 } = error else { panic!("{error}") };
        assert_eq!(what, "number of table sets");
        // Sets that only dropped tensors use do not count.
        Merge::new([&shards[0], &shards[1], &more]).tensors(|name| name != "000001").to_memory().unwrap();
    }
}
