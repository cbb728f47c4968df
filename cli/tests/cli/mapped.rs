//! `--mmap`.

use crate::common::place::*;

#[test]
fn a_mapped_pair_gives_the_same_output_and_the_same_errors() {
    let place = Place::with_pair();
    place.ok("encode target.safetensors base.safetensors -o back");
    place.ok("encode --no-base target.safetensors -o whole");
    place.ok("encode base.safetensors base.safetensors -o none");
    for (operands, expected) in [
        ("base.safetensors pair", "target.safetensors"),
        ("base.safetensors pair back", "base.safetensors"),
        ("base.safetensors none", "base.safetensors"),
        ("--no-base whole", "target.safetensors"),
    ] {
        place.ok(&format!("apply {operands} -o out.safetensors -f --mmap"));
        place.assert_same("out.safetensors", expected);
    }
    let base = "--base base.safetensors";
    for line in
        [format!("pair {base}"), format!("pair back {base}"), format!("none {base}"), "whole --no-base".into(), "pair".into()]
    {
        assert_eq!(place.json(&format!("verify {line} --mmap")), place.json(&format!("verify {line}")));
    }
    let whole = place.read("pair.tpde-blob");
    let mut damaged = whole.clone();
    damaged[100] ^= 1;
    for blob in [&damaged, &whole[..whole.len() - 1], &whole[..10], &[]] {
        place.edit("pair.tpde-blob", |bytes| *bytes = blob.to_vec());
        for line in ["verify pair", "verify pair --base base.safetensors", "apply base.safetensors pair -o new.safetensors"] {
            let error = place.fails(line, DATA, "");
            assert_eq!(place.fails(&format!("{line} --mmap"), DATA, ""), error);
            assert!(error["kind"] == "invalid" && !place.path("new.safetensors").exists());
        }
    }
}
