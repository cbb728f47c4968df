//! Any bytes as a table set: the parser agrees with the text of the specification, and a parsed set is written as the same bytes.
//!
//! Input: one byte that selects whether the set is repaired, and the set.

#![no_main]

use arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use tpde_core::codec::TableSet;
use tpde_core::codec::fuzzing::check_lookup;
use tpde_fuzz::tables;

fuzz_target!(|data: &[u8]| {
    let Some((&repair, bytes)) = data.split_first() else { return };
    if repair % 2 == 0 {
        return check(bytes);
    }
    let Ok(set) = tables(&mut Unstructured::new(bytes)) else { return };
    assert!(TableSet::parse(&set).is_ok());
    check(&set);
});

fn check(bytes: &[u8]) {
    let expected = classes(bytes);
    match TableSet::parse(bytes) {
        Ok(set) => {
            assert!(expected.is_some_and(|expected| set.classes().eq(expected)));
            assert_eq!(set.to_bytes(), bytes);
            // About a hundred times as expensive as all other checks, so only one input in 1024 is checked.
            if crc32fast::hash(bytes).is_multiple_of(1024) {
                check_lookup(&set);
            }
        }
        Err(error) => {
            assert!(error.rule().is_some_and(|rule| rule.id() == "tensor.tables"), "{error}");
            assert_eq!(expected, None, "{error}");
        }
    }
}

/// Section 4.2 of `spec/codecs.md`: the frequencies of each class; `None` if the bytes are not a table set.
fn classes(bytes: &[u8]) -> Option<Vec<Vec<u16>>> {
    let (&count, mut rest) = bytes.split_first()?;
    let mut classes = Vec::new();
    for _ in 0..count {
        let (&tokens, frequencies) = rest.split_first()?;
        rest = frequencies;
        let mut class = Vec::new();
        for _ in 0..tokens {
            let (&low, after) = rest.split_first()?;
            let (frequency, after) = match (low, after) {
                (0..128, _) => (low.into(), after),
                (128.., [high @ 1..=255, after @ ..]) => (u16::from(low - 128) + 128 * u16::from(*high), after),
                _ => return None,
            };
            class.push(frequency);
            rest = after;
        }
        let sum: u64 = class.iter().map(|&frequency| u64::from(frequency)).sum();
        if !(1..=180).contains(&tokens) || sum != 4096 || class.last() == Some(&0) {
            return None;
        }
        classes.push(class);
    }
    ((1..=15).contains(&count) && rest.is_empty()).then_some(classes)
}
