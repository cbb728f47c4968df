//! The text of the kernels, which `kernels/build` packs into archives.
//!
//! An archive names a register by the number of other registers of its class that were used since its last use, or `!` at its first
//! use. So similar code is the same text, and compresses well.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use tpde_core::error::{Error, Result};

const DECODE: &[u8] = include_bytes!("../../kernels/ptx/decode.zst");
const DIGEST: &[u8] = include_bytes!("../../kernels/ptx/digest.zst");
const ENCODE: &[u8] = include_bytes!("../../kernels/ptx/encode.zst");

/// The PTX of a source file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ptx {
    /// A frame of zstd. A line `//NAME` precedes the text of each source file.
    archive: &'static [u8],
    name: &'static str,
}

pub(crate) const RAW: Ptx = Ptx { archive: DECODE, name: "raw" };
pub(crate) const CONDITIONED: Ptx = Ptx { archive: DECODE, name: "conditioned" };
pub(crate) const WITHOUT_BASE: Ptx = Ptx { archive: DECODE, name: "without_base" };
pub(crate) const RAW_STRIDED: Ptx = Ptx { archive: DECODE, name: "raw_strided" };
pub(crate) const CONDITIONED_STRIDED: Ptx = Ptx { archive: DECODE, name: "conditioned_strided" };
pub(crate) const WITHOUT_BASE_STRIDED: Ptx = Ptx { archive: DECODE, name: "without_base_strided" };
pub(crate) const RAW_DERIVED: Ptx = Ptx { archive: DECODE, name: "raw_derived" };
pub(crate) const CONDITIONED_DERIVED: Ptx = Ptx { archive: DECODE, name: "conditioned_derived" };
pub(crate) const LAYOUT: Ptx = Ptx { archive: DECODE, name: "layout" };
#[cfg(feature = "nvcomp")]
pub(crate) const FRAMES: Ptx = Ptx { archive: DIGEST, name: "frames" };
pub(crate) const DIGESTS: Ptx = Ptx { archive: DIGEST, name: "digests" };
pub(crate) const HASH: Ptx = Ptx { archive: DIGEST, name: "hash" };
pub(crate) const ENCODE_PLAN: Ptx = Ptx { archive: ENCODE, name: "encode_plan" };
pub(crate) const ENCODE_WRITE: Ptx = Ptx { archive: ENCODE, name: "encode_write" };
pub(crate) const ENCODE_FORM: Ptx = Ptx { archive: ENCODE, name: "encode_form" };

impl Ptx {
    /// Returns the text for the driver. It reads the archive up to the end of this text.
    pub fn text(&self) -> Result<String> {
        let damaged = |reason: String| Error::Device { action: "unpack the kernels", reason: format!("{}: {reason}", self.name) };
        let archive = zstd::Decoder::with_buffer(self.archive).map_err(|e| damaged(e.to_string()))?;
        let (mut text, mut registers, mut is_found) = (String::new(), Registers::default(), false);
        for line in BufReader::new(archive).lines() {
            let line = line.map_err(|e| damaged(e.to_string()))?;
            match line.strip_prefix("//") {
                Some(name) if is_found || name == self.name => {
                    if is_found {
                        break;
                    }
                    is_found = true;
                }
                None if is_found => registers.expand(&line, &mut text).ok_or_else(|| damaged(format!("{line:?}")))?,
                _ => {}
            }
        }
        if is_found { Ok(text) } else { Err(damaged("not in the archive".into())) }
    }
}

/// The registers of a function, by class: their numbers, the last used one at the end.
#[derive(Debug, Default)]
struct Registers(BTreeMap<String, Vec<u32>>);

impl Registers {
    /// Appends a line to the text, with numbers of registers. `None` if it names a register that was not used before.
    fn expand(&mut self, line: &str, text: &mut String) -> Option<()> {
        let mut parts = line.split('%');
        text.push_str(parts.next()?);
        for part in parts {
            let (class, rest) = part.split_at(part.bytes().take_while(u8::is_ascii_lowercase).count());
            let (recency, mut after) = rest.split_at(rest.bytes().take_while(u8::is_ascii_digit).count());
            text.push('%');
            text.push_str(class);
            if after.starts_with('<') {
                // The declaration of a class, at the beginning of a function.
                self.0.insert(class.to_owned(), Vec::new());
            } else if let Some(used) = self.0.get_mut(class) {
                let first = after.strip_prefix('!').filter(|_| recency.is_empty());
                let number = match first {
                    Some(rest) => {
                        after = rest;
                        u32::try_from(used.len()).ok()? + 1
                    }
                    None => used.remove(used.len().checked_sub(recency.parse::<usize>().ok()?.checked_add(1)?)?),
                };
                used.push(number);
                text.push_str(&number.to_string());
            } else {
                text.push_str(recency);
            }
            text.push_str(after);
        }
        text.push('\n');
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    fn expanded(lines: &[&str]) -> Option<String> {
        let (mut text, mut registers) = (String::new(), Registers::default());
        lines.iter().try_for_each(|line| registers.expand(line, &mut text)).map(|()| text)
    }

    #[test]
    fn kernels_have_the_digests_of_their_list() {
        let list = include_str!("../../kernels/ptx/SHA256");
        let mut names = Vec::new();
        for archive in [DECODE, DIGEST, ENCODE] {
            let text = String::from_utf8(zstd::decode_all(archive).unwrap()).unwrap();
            names.extend(text.lines().filter_map(|line| line.strip_prefix("//").map(|name| (name.to_owned(), archive))));
        }
        let digests = names.into_iter().map(|(name, archive)| {
            let text = Ptx { archive, name: name.clone().leak() }.text().unwrap();
            let digest: String = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{digest}  {name}.ptx")
        });
        let mut digests: Vec<_> = digests.collect();
        digests.sort_by(|a, b| a[66..].cmp(&b[66..]));
        assert_eq!(digests, list.lines().collect::<Vec<_>>());
    }

    #[test]
    fn registers_get_numbers_by_their_last_use() {
        let lines = [".reg .b32 %r<4>;", "ld %r!,[%rd_x+4];", "ld %r!,%tid.x;", "add %r!,%r1,%r1;", "st %r2,{%r0,%clock64};"];
        let text = ".reg .b32 %r<4>;\nld %r1,[%rd_x+4];\nld %r2,%tid.x;\nadd %r3,%r2,%r3;\nst %r1,{%r1,%clock64};\n";
        assert_eq!(expanded(&lines).unwrap(), text);
        // A function that follows counts anew.
        assert_eq!(expanded(&["%r<2>", "%r!", "%r<2>", "%r!"]).unwrap(), "%r<2>\n%r1\n%r<2>\n%r1\n");
        for damaged in ["%r0", "%r", "%r99999999999999999999999"] {
            assert_eq!(expanded(&["%r<1>", damaged]), None, "{damaged}");
        }
    }

    #[test]
    fn damaged_archives_are_errors() {
        let cut = Ptx { archive: &DECODE[..DECODE.len() / 2], name: "without_base_strided" };
        let other = Ptx { archive: DIGEST, name: "raw" };
        let none = Ptx { archive: b"no frame", name: "raw" };
        for ptx in [cut, other, none] {
            let error = ptx.text().unwrap_err();
            assert!(
                matches!(&error, Error::Device { action: "unpack the kernels", reason } if reason.starts_with(ptx.name)),
                "{error}"
            );
        }
    }
}
