//! An input of a merge.

use crate::reader::Pair;
use tpde_core::error::{Conflict, Error, NotMergeable};
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::source::Source;

/// An input of a merge: a pair, and the tensors of it that are kept.
pub(super) struct Input<'a, B> {
    pub pair: &'a Pair<B>,
    /// Indexes of the kept tensors, ascending.
    pub kept: Vec<u32>,
    /// Name of the pair for errors: its path, or its number.
    pub label: String,
}

impl<'a, B: Source> Input<'a, B> {
    /// Creates the input with this number, from 1, which keeps all tensors of `pair`.
    pub fn new(pair: &'a Pair<B>, number: usize) -> Self {
        Self { pair, kept: (0..pair.index().tensor_count() as u32).collect(), label: pair.label(number) }
    }

    pub fn index(&self) -> &'a ValidatedIndex {
        self.pair.index()
    }

    pub fn is_whole(&self) -> bool {
        self.kept.len() == self.index().tensor_count()
    }

    /// Returns whether payloads of this input must be compared with the payload root before they are copied. If all payloads are
    /// copied, they are compared meanwhile.
    pub fn must_authenticate(&self) -> bool {
        !self.is_whole() && self.index().has_payload_root() && !self.pair.is_authentic()
    }

    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'a>> + '_ {
        self.kept.iter().map(|&i| self.index().tensor(i as usize))
    }

    /// Returns the size of the payloads of the kept tensors, in bytes.
    pub fn payload_bytes(&self) -> u64 {
        let records = self.index().records();
        let chunks = self.tensors().flat_map(|tensor| tensor.chunks());
        chunks.map(|chunk| u64::from(records[chunk as usize].compressed_size.get())).sum()
    }
}

/// Returns the error for a contradiction between two inputs, with the property found in each.
pub(super) fn conflict<B>(conflict: Conflict, name: &str, pairs: [&Input<'_, B>; 2], found: [String; 2]) -> Error {
    Box::new(NotMergeable::new(conflict, name.to_owned(), pairs.map(|input| input.label.clone()), found)).into()
}
