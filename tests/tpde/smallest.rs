//! Compares `auto` with everything that it could have chosen: every codec and layout, with and without the base.

use crate::common::inputs::{Input, inputs};
use std::fmt::Write;
use tpde::{Codec, CodecChoice, Encode, EncodeOptions, Favor, Layout};

/// Rows of most matrices, unless `TPDE_SIDE` is set.
const SIDE: u64 = 1024;

/// Size of index and blob in bytes.
fn size(input: &Input, with_base: bool, options: &EncodeOptions) -> u64 {
    let (base, target) = (input.base(), input.target());
    let encode = Encode::new(&target).options(options.clone());
    let (pair, _) = if with_base { encode.base(&base) } else { encode }.to_memory().unwrap();
    pair.index().size() + pair.blob().len() as u64
}

/// Name and size of each encoding that `choice` may select.
fn by_hand(input: &Input, choice: CodecChoice, favor: Favor) -> Vec<(String, u64)> {
    let with = |codec: Codec, layout| EncodeOptions::default().codec(codec).layout(layout).favor(favor);
    let mut found = Vec::new();
    for with_base in [true, false] {
        let mut add = |name: &str, options| {
            let name = if with_base { name.to_owned() } else { format!("{name}, no base") };
            found.push((name, size(input, with_base, &options)));
        };
        add("conditioned", with(Codec::Conditioned, None));
        add("raw", with(Codec::Raw, None));
        if choice == CodecChoice::Auto {
            add("zstd", with(Codec::Zstd, None));
            Layout::ALL.iter().for_each(|layout| add(&format!("zstd {}", layout.name()), with(Codec::Zstd, Some(*layout))));
        }
    }
    found
}

/// Fails if the choice is more than `percent` % larger than the best explicit option.
fn check(choice: CodecChoice, favor: Favor, percent: u64) {
    let side = std::env::var("TPDE_SIDE").map_or(SIDE, |side| side.parse().unwrap());
    let mut table = format!("| input | {} | best by hand | named | part |\n|---|---|---|---|---|\n", choice.name());
    let mut worse = Vec::new();
    for input in inputs(side) {
        let bytes: u64 = input.target.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let found = size(&input, true, &EncodeOptions::default().codec(choice).favor(favor));
        let (name, best) = by_hand(&input, choice, favor).into_iter().min_by_key(|(_, size)| *size).unwrap();
        let (ratio, part) = (|size: u64| bytes as f64 / size as f64, found as f64 / best as f64);
        writeln!(table, "| {} | {:.2} | {:.2} | {name} | {part:.3} |", input.name, ratio(found), ratio(best)).unwrap();
        if 100 * found > (100 + percent) * best {
            worse.push(format!("{}: {found} bytes, {best} with {name}", input.name));
        }
    }
    println!("{table}");
    assert!(worse.is_empty(), "{worse:#?}");
}

#[test]
fn no_codec_that_is_named_by_hand_makes_a_pair_clearly_smaller_than_auto() {
    check(CodecChoice::Auto, Favor::Ratio, 5);
}

#[test]
fn nor_than_device_of_the_codecs_that_a_device_decodes() {
    check(CodecChoice::Device, Favor::Ratio, 5);
}

#[test]
fn where_size_is_favored_the_choice_is_closer() {
    check(CodecChoice::Auto, Favor::Size, 2);
}
