//! Table sets of codec `conditioned` (`spec/codecs.md` section 4.2; `spec/tpde-format.md` section 13, end of step 4).

use super::tensors::TensorTable;
use crate::codec::TableSet;
use crate::error::{Result, Rule};
use crate::prelude::*;

/// Maximum number of table sets per pair.
pub const MAX_TABLE_SETS: usize = 65_535;

/// All table sets of a pair, in the order of the tensors that define them.
#[derive(Debug, Default)]
pub(super) struct TableSets(Vec<TableSet>);

impl TableSets {
    /// Parses the tables of all tensors and assigns each tensor its set. [`TensorTable::parse`] has checked that the sizes in the
    /// entries add up to the size of `section`.
    pub(super) fn parse(mut section: &[u8], tensors: &mut TensorTable) -> Result<Self> {
        let mut sets = Self::default();
        for i in 0..tensors.len() {
            let size = tensors.tables_size(i);
            if size == 0 {
                continue;
            }
            let (tables, rest) = section.split_at_checked(size as usize).unwrap_or((section, &[]));
            section = rest;
            let set = sets.tables(tables).map_err(|e| e.in_tensor(tensors.name(i)))?;
            tensors.set_table_set(i, set);
        }
        Ok(sets)
    }

    /// Number, from 1, of the set that `tables` defines or refers to.
    fn tables(&mut self, tables: &[u8]) -> Result<u32> {
        let rule = Rule::TensorTables;
        let (number, set) = tables.split_first_chunk().ok_or_else(|| rule.broken("2 bytes or more", tables.len()))?;
        let number = u16::from_le_bytes(*number);
        if set.is_empty() {
            let known = self.0.len();
            rule.check((1..=known).contains(&number.into()), format_args!("the number of a set, 1 to {known}"), number)?;
            return Ok(number.into());
        }
        rule.check(number == 0, "0 before a set", number)?;
        rule.check(self.0.len() < MAX_TABLE_SETS, format_args!("at most {MAX_TABLE_SETS} sets"), "another one")?;
        self.0.push(TableSet::parse(set)?);
        Ok(self.0.len() as u32)
    }

    /// All sets.
    pub(super) fn all(&self) -> &[TableSet] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_sets_is_bounded() {
        let set = [&[0; 2][..], &TableSet::new(&[vec![4096]]).to_bytes()].concat();
        let mut sets = TableSets(Vec::new());
        for number in 1..=MAX_TABLE_SETS {
            assert_eq!(sets.tables(&set).unwrap() as usize, number);
        }
        assert_eq!(sets.tables(&set).unwrap_err().rule(), Some(Rule::TensorTables));
        assert_eq!(sets.tables(&(MAX_TABLE_SETS as u16).to_le_bytes()).unwrap() as usize, MAX_TABLE_SETS);
    }
}
