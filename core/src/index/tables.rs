//! Table sets of codec `conditioned` (`spec/codecs.md` section 4.2; `spec/tpde-format.md` section 13, end of step 4).

use super::tensors::TensorTable;
use crate::codec::TableSet;
use crate::error::{Result, Rule};
use crate::prelude::*;

/// Maximum number of table sets per pair.
pub const MAX_TABLE_SETS: usize = 65_535;

/// Parses the tables of all tensors and assigns each tensor its set. Returns the sets in the order of the tensors that define them.
/// [`TensorTable::parse`] has checked that the sizes in the entries add up to the size of `section`.
pub(super) fn parse(mut section: &[u8], tensors: &mut TensorTable) -> Result<Vec<TableSet>> {
    let mut sets = Vec::new();
    for i in 0..tensors.len() {
        let size = tensors.tables_size(i);
        if size == 0 {
            continue;
        }
        let (tables, rest) = section.split_at_checked(size as usize).unwrap_or((section, &[]));
        section = rest;
        let set = number_of(tables, &mut sets).map_err(|e| e.in_tensor(tensors.name(i)))?;
        tensors.set_table_set(i, set);
    }
    Ok(sets)
}

/// Number, from 1, of the set that `tables` refers to, or defines and so adds to `sets`.
fn number_of(tables: &[u8], sets: &mut Vec<TableSet>) -> Result<u32> {
    let rule = Rule::TensorTables;
    let (number, set) = tables.split_first_chunk().ok_or_else(|| rule.broken("2 bytes or more", tables.len()))?;
    let number = u16::from_le_bytes(*number);
    if set.is_empty() {
        let known = sets.len();
        rule.check((1..=known).contains(&number.into()), format_args!("the number of a set, 1 to {known}"), number)?;
        return Ok(number.into());
    }
    rule.check(number == 0, "0 before a set", number)?;
    rule.check(sets.len() < MAX_TABLE_SETS, format_args!("at most {MAX_TABLE_SETS} sets"), "another one")?;
    sets.push(TableSet::parse(set)?);
    Ok(sets.len() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_sets_is_bounded() {
        let set = [&[0; 2][..], &TableSet::new(&[vec![4096]]).to_bytes()].concat();
        let mut sets = Vec::new();
        for number in 1..=MAX_TABLE_SETS {
            assert_eq!(number_of(&set, &mut sets).unwrap() as usize, number);
        }
        assert_eq!(number_of(&set, &mut sets).unwrap_err().rule(), Some(Rule::TensorTables));
        let last = (MAX_TABLE_SETS as u16).to_le_bytes();
        assert_eq!(number_of(&last, &mut sets).unwrap() as usize, MAX_TABLE_SETS);
    }
}
