//! The plan of a merge: the tensors of the result in order, and their table sets. Made before any payload is read.

use super::files;
use super::input::{Input, conflict};
use crate::codec::TableSet;
use crate::error::{Conflict, Error, Result, hex};
use crate::format::{BaseKind, MAX_CHUNKS, MAX_TENSORS};
use crate::index::{MAX_TABLE_SETS, Tensor};
use crate::source::Source;
use crate::writer::{FileSpec, TensorSpec};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A tensor of the result: a tensor of an input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub input: u32,
    /// Index of the tensor in its pair.
    pub tensor: u32,
}

/// The tensors and files of the result.
pub(super) struct Plan {
    /// Tensors in ascending order of name.
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
        bounded("number of tensors", MAX_TENSORS.into(), entries.len() as u64)?;
        bounded("number of chunks", MAX_CHUNKS.into(), chunks)?;
        let sets: Vec<_> = inputs.iter().map(used_sets).collect();
        let set_count = sets.iter().flatten().flatten().collect::<HashSet<_>>().len();
        bounded("number of table sets", MAX_TABLE_SETS as u64, set_count as u64)?;
        Ok(Self { entries, files, sets, set_count })
    }

    /// Returns the description of a tensor for the builder.
    pub fn spec<B: Source>(&self, inputs: &[Input<'_, B>], entry: Entry) -> TensorSpec {
        let tensor = tensor(inputs, entry);
        let set = inputs[entry.input as usize].index().table_set(entry.tensor as usize);
        TensorSpec {
            name: tensor.name.to_owned(),
            base_name: Some(tensor.base_name.to_owned()),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            base_kind: tensor.base_kind,
            base_param: tensor.base_param,
            codec: tensor.codec,
            tables: set.and_then(|set| self.sets[entry.input as usize][set].clone()),
            chunk_lanes_log2: tensor.chunk_lanes.ilog2() as u8,
        }
    }
}

/// Returns the tensor of an entry.
pub(super) fn tensor<'a, B: Source>(inputs: &[Input<'a, B>], entry: Entry) -> Tensor<'a> {
    inputs[entry.input as usize].index().tensor(entry.tensor as usize)
}

fn bounded(what: &'static str, limit: u64, found: u64) -> Result<()> {
    if found > limit { Err(Error::Limit { what, limit, found }) } else { Ok(()) }
}

/// Returns the kept tensors of all inputs, in ascending order of name. No two may have the same name.
fn entries<B: Source>(inputs: &[Input<'_, B>]) -> Result<Vec<Entry>> {
    let of_input = |(i, input): (usize, &Input<'_, B>)| {
        let input_index = i as u32;
        input.kept.iter().map(move |&tensor| Entry { input: input_index, tensor }).collect::<Vec<_>>()
    };
    let mut entries: Vec<Entry> = inputs.iter().enumerate().flat_map(of_input).collect();
    // Stable: for equal names, errors name the inputs in order. Fast, because the entries are sorted runs.
    entries.sort_by(|a, b| tensor(inputs, *a).name.cmp(tensor(inputs, *b).name));
    for pair in entries.windows(2) {
        let [first, second] = [tensor(inputs, pair[0]), tensor(inputs, pair[1])];
        if first.name == second.name {
            let kind = if (first.dtype, first.shape) == (second.dtype, second.shape) { Conflict::Tensor } else { Conflict::Type };
            let found = [first, second].map(|tensor| format!("{} {:?}", tensor.dtype, tensor.shape));
            let inputs = [0, 1].map(|i| &inputs[pair[i].input as usize]);
            return Err(conflict(kind, first.name, inputs, found));
        }
    }
    Ok(entries)
}

/// Checks that all tensors that use a base tensor state the same dtype, shape and digest for it.
fn check_bases<B: Source>(inputs: &[Input<'_, B>], entries: &[Entry]) -> Result<()> {
    let mut bases: HashMap<&str, Entry> = HashMap::new();
    for &entry in entries {
        let second = tensor(inputs, entry);
        if second.base_kind == BaseKind::None {
            continue;
        }
        let known = *bases.entry(second.base_name).or_insert(entry);
        let first = tensor(inputs, known);
        let base = |tensor: &Tensor<'_>| (tensor.dtype, tensor.base_shape(), *tensor.base_digest());
        if base(&first) != base(&second) {
            let shown = |tensor: Tensor<'_>| {
                let shape = tensor.base_shape().unwrap_or_default();
                format!("{} {shape:?} with digest {}", tensor.dtype, hex(tensor.base_digest()))
            };
            let inputs = [known, entry].map(|entry| &inputs[entry.input as usize]);
            return Err(conflict(Conflict::Base, second.base_name, inputs, [shown(first), shown(second)]));
        }
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
    use crate::codec::Codec;
    use crate::format::{DIGEST_SIZE, Form, TensorDigests};
    use crate::lane::Dtype;
    use crate::merge::Merge;
    use crate::reader::Pair;
    use crate::writer::PairBuilder;
    use std::ops::Range;

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
                base_kind: BaseKind::None,
                base_param: 0,
                codec: Codec::Conditioned,
                tables: Some(Arc::new(TableSet::new(&[a, b]))),
                chunk_lanes_log2: 12,
            });
            builder.end_copied_tensor(&TensorDigests { base_digest: [0; DIGEST_SIZE], target_digest: [7; DIGEST_SIZE] }).unwrap();
        }
        builder.finish().unwrap().into_pair().unwrap()
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
