//! The arithmetic of derived bases (spec sections 8.5 and 8.6) on the vectors of version 1.3, whose lanes another
//! program forms by a search among all lanes. The test reads the pairs without the library's parser.

use crate::common::manifest;
use safetensors::SafeTensors;
use tpde::Dtype;
use tpde_core::floats::{cast_lanes, scale_lanes, scale_nibbles};

fn number(bytes: &[u8], at: usize, size: usize) -> usize {
    bytes[at..at + size].iter().rev().fold(0, |n, &byte| n << 8 | usize::from(byte))
}

fn dtype(code: usize) -> Dtype {
    Dtype::from_code(code as u16).unwrap()
}

/// An index with one entry, for a whole tensor of base kind 3 or 4.
struct Derived {
    dtype: Dtype,
    shape: Vec<usize>,
    base_dtype: Dtype,
    form: u8,
    base_name: String,
    scales_name: String,
    base_digest: [u8; 16],
}

/// Returns `None` if the index has several entries, parts, or a compressed section.
fn derived(index: &[u8]) -> Option<Derived> {
    let (digests, tensors) = (number(index, 112, 8), number(index, 136, 8));
    let stored = number(index, 144, 8) == number(index, 152, 8);
    let section = &index[tensors..];
    if number(index, 52, 4) != 1 || !stored || section[17] != 0 {
        return None;
    }
    let rank = number(section, 10, 2);
    let mut names = &section[40 + 8 * rank..];
    let mut take = |size| {
        let (name, rest) = names.split_at(size);
        names = rest;
        String::from_utf8(name.to_vec()).unwrap()
    };
    let (name, base_name, scales_name) = (take(number(section, 0, 4)), take(number(section, 4, 4)), take(number(section, 36, 4)));
    Some(Derived {
        dtype: dtype(number(section, 8, 2)),
        shape: (0..rank).map(|i| number(section, 40 + 8 * i, 8)).collect(),
        base_dtype: dtype(number(section, 32, 2)),
        form: section[34],
        base_name: if base_name.is_empty() { name } else { base_name },
        scales_name,
        base_digest: index[digests + 64..digests + 80].try_into().unwrap(),
    })
}

/// The formed lanes of a tensor.
fn formed(of: &Derived, base: &[u8], scales: &[u8]) -> Vec<u8> {
    let width = of.dtype.lane_bytes();
    let mut out = vec![0; of.shape.iter().product::<usize>() * width];
    match of.form {
        0 => assert!(cast_lanes(of.base_dtype, of.dtype, base, &mut out)),
        1 if !out.is_empty() => {
            let columns = of.shape[1];
            for (r, (row, out)) in base.chunks(columns).zip(out.chunks_mut(columns * width)).enumerate() {
                for (c, (run, out)) in row.chunks(128).zip(out.chunks_mut(128 * width)).enumerate() {
                    let scale = number(scales, 4 * (r / 128 * columns.div_ceil(128) + c), 4);
                    assert!(scale_lanes(run, scale as u32, of.dtype, out));
                }
            }
        }
        2 | 3 => {
            for ((block, &scale), out) in base.chunks(16).zip(scales).zip(out.chunks_mut(64)) {
                scale_nibbles(block, scale, out);
            }
        }
        form => assert_eq!(form, 1),
    }
    if of.form != 3 {
        return out;
    }
    let (rows, columns) = (of.shape[1], of.shape[2]);
    let place = |i: usize| (i / (rows * columns) * columns + i % columns) * rows + i / columns % rows;
    (0..out.len() / width).flat_map(|i| out[place(i) * width..][..width].to_vec()).collect()
}

#[test]
fn formed_lanes_of_the_vectors_have_their_base_digest() {
    let mut seen = [0; 4];
    for vector in manifest::vectors_of("v1.3").into_iter().filter(|vector| vector.verdict == "valid") {
        let Some(of) = derived(&manifest::read(&vector.index)) else { continue };
        let file = manifest::read(&vector.base.unwrap());
        let base = SafeTensors::deserialize(&file).unwrap();
        let data = |name: &str| if name.is_empty() { &[] } else { base.tensor(name).unwrap().data() };
        let lanes = formed(&of, data(&of.base_name), data(&of.scales_name));
        assert_eq!(blake3::hash(&lanes).as_bytes()[..16], of.base_digest, "{}", vector.name);
        seen[usize::from(of.form)] += 1;
    }
    assert!(seen[0] > 20 && seen[1] > 12 && seen[2] > 6 && seen[3] > 4, "{seen:?}");
}

#[test]
fn products_are_those_of_the_processor() {
    let mut random = crate::common::Xorshift(13);
    let all: Vec<u8> = (0..=255).filter(|lane| lane & 127 != 127).collect();
    // The values of the lanes: their products with 1.
    let (mut values, mut products) = (vec![0; 4 * all.len()], vec![0; 4 * all.len()]);
    assert!(scale_lanes(&all, 1f32.to_bits(), Dtype::F32, &mut values));
    let float = |bytes: &[u8]| f32::from_bits(number(bytes, 0, 4) as u32);
    for _ in 0..20_000 {
        let scale = random.next() as u32;
        assert!(scale_lanes(&all, scale, Dtype::F32, &mut products));
        for ((lane, value), ours) in all.iter().zip(values.chunks(4)).zip(products.chunks(4)) {
            let (ours, theirs) = (float(ours), float(value) * f32::from_bits(scale));
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{lane:02X} times {scale:08X}");
        }
    }
}

#[test]
fn casts_to_f32_and_back_keep_all_lanes() {
    for (dtype, quiet) in [(Dtype::F16, 0x200), (Dtype::Bf16, 0x40)] {
        let lanes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let (mut wide, mut back) = (vec![0; 2 * lanes.len()], vec![0; lanes.len()]);
        assert!(cast_lanes(dtype, Dtype::F32, &lanes, &mut wide) && cast_lanes(Dtype::F32, dtype, &wide, &mut back));
        for ((lane, wide), back) in lanes.chunks(2).zip(wide.chunks(4)).zip(back.chunks(2)) {
            let (lane, back, nan) = (number(lane, 0, 2), number(back, 0, 2), f32::from_bits(number(wide, 0, 4) as u32).is_nan());
            assert_eq!(back, if nan { lane | quiet } else { lane }, "{dtype:?}");
        }
    }
}

#[test]
fn other_casts_are_not_defined() {
    let mut out = [7; 8];
    for (from, to) in
        [(Dtype::F16, Dtype::Bf16), (Dtype::F32, Dtype::F32), (Dtype::F32, Dtype::F8E4m3), (Dtype::F8E4m3, Dtype::F32)]
    {
        assert!(!cast_lanes(from, to, &[0; 8], &mut out));
    }
    assert!(!scale_lanes(&[0; 8], 0, Dtype::F64, &mut out));
    assert_eq!(out, [7; 8]);
}
