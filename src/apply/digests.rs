//! Compares the digests of the tensors that an engine rebuilds (spec section 13, step 12).

use super::chunk::Hashes;
use super::find::wrong_base;
use super::plan::Plan;
use crate::cut::Piece;
use blake3::Hash;
use std::collections::BTreeMap;
use tpde_core::digest::{self, short};
use tpde_core::error::{Result, Rule, hex};
use tpde_core::format::BaseKind;
use tpde_core::index::ValidatedIndex;

/// Combines the hashes of chunks into hashes of tensors, and compares them with the digests in the index.
pub(super) struct DigestCheck<'a> {
    index: &'a ValidatedIndex,
    plan: &'a Plan<'a>,
    /// Gives the hash of base lanes.
    hash_base: &'a dyn Fn(&Piece) -> Result<Hash>,
    /// Number of items at the front of the plan that are compared, or cannot be.
    ended: usize,
    /// Hashes of the chunks of the items after those. The chunks of each item come in order; those of the parts of one tensor may
    /// be mixed.
    chunks: BTreeMap<usize, Vec<Hashes>>,
    /// Whether the hashes are those of tensors instead of chunks.
    of_tensors: bool,
    base_root: digest::Root,
    target_root: digest::Root,
}

impl<'a> DigestCheck<'a> {
    pub fn new(index: &'a ValidatedIndex, plan: &'a Plan<'a>, hash_base: &'a dyn Fn(&Piece) -> Result<Hash>) -> Self {
        let (base_root, target_root) = (digest::Root::default(), digest::Root::default());
        Self { index, plan, hash_base, ended: 0, chunks: BTreeMap::new(), of_tensors: false, base_root, target_root }
    }

    /// Adds the hashes of the next chunk of an item.
    pub fn add(&mut self, item: usize, hashes: Hashes) -> Result<()> {
        self.chunks.entry(item).or_default().push(hashes);
        self.end_complete()
    }

    /// Adds the hashes of an item. Then no hashes of chunks may be added.
    pub fn add_whole(&mut self, item: usize, hashes: Hashes) -> Result<()> {
        self.of_tensors = true;
        self.add(item, hashes)
    }

    /// Compares the digests of the next items, as long as all of their chunks have been added.
    fn end_complete(&mut self) -> Result<()> {
        while let Some(item) = self.plan.items.get(self.ended) {
            let added = self.chunks.get(&self.ended).map_or(0, Vec::len);
            let expected = if self.of_tensors { 1 } else { item.chunks.len() };
            if item.is_complete && added < expected {
                break;
            }
            self.end_item()?;
        }
        Ok(())
    }

    fn end_item(&mut self) -> Result<()> {
        let item = &self.plan.items[self.ended];
        let chunks = self.chunks.remove(&self.ended).unwrap_or_default();
        self.ended += 1;
        if !item.is_complete {
            return Ok(());
        }
        let tensor = &item.tensor;
        let base_hash = match tensor.base_kind {
            BaseKind::None => None,
            BaseKind::Same | BaseKind::Cast | BaseKind::Dequantised => {
                Some(digest::combine(&chunks.iter().filter_map(|hashes| hashes.base).collect::<Vec<_>>()))
            }
            BaseKind::Prefix => item.base.as_ref().map(self.hash_base).transpose()?,
        };
        if let Some(found) = base_hash.as_ref().map(short).filter(|found| *found != tensor.digests.base_digest) {
            // The chunk sums matched. Either the base is forged, or it is a `prefix` base that differs in rows the target lacks.
            return Err(wrong_base(tensor, &found, None));
        }
        let target_hash = digest::combine(&chunks.iter().map(|hashes| hashes.target).collect::<Vec<_>>());
        let (expected, found) = (&tensor.digests.target_digest, short(&target_hash));
        Rule::TensorTargetDigest.check(*expected == found, hex(expected), hex(&found)).map_err(|e| e.in_tensor(tensor.name))?;
        self.base_root.add_hash(base_hash.as_ref());
        self.target_root.add_hash(Some(&target_hash));
        Ok(())
    }

    /// Compares the digests of the last items, and the roots if all tensors of the pair were rebuilt.
    pub fn finish(mut self) -> Result<()> {
        let items = &self.plan.items;
        while self.ended < items.len() {
            self.end_item()?;
        }
        let index = self.index;
        // Roots over stored digests were compared when the index was parsed.
        let is_all = items.len() == index.tensor_count() && items.iter().all(|item| item.is_complete);
        if is_all && !index.has_payload_root() {
            let root = self.base_root.finish();
            Rule::DigestBaseRoot.check(root == index.base_root(), hex(index.base_root()), hex(&root))?;
            let root = self.target_root.finish();
            Rule::DigestTargetRoot.check(root == index.target_root(), hex(index.target_root()), hex(&root))?;
        }
        Ok(())
    }
}
