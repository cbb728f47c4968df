//! Reads and writes single zstd frames with a content size, without a dictionary, with a bounded window (spec section 5.2).
//!
//! Feature `zstd` writes and reads frames with the C library. Feature `ruzstd` only reads them. This file checks the header, which
//! neither library checks in full.

use crate::prelude::*;

use super::library::{self, Context, Outcome};

const MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];

/// Reads frames. The memory of the decoder is allocated for the first frame, because many decoders read no frame.
#[derive(Default)]
pub struct Expander(Option<Context>);

impl Expander {
    /// Expands `frame`, which must be one frame with exactly `out.len()` bytes of content. An error describes the difference.
    pub fn expand(&mut self, frame: &[u8], out: &mut [u8], window_log_max: u32) -> Outcome<()> {
        let header_size = check_header(frame, out.len() as u64, window_log_max)?;
        let written = library::expand(self.0.get_or_insert_default(), frame, header_size, out)?;
        if written == out.len() { Ok(()) } else { Err("a frame of another size") }
    }

    /// [`Expander::expand`] into a new buffer. The caller has bounded `size`.
    pub fn expand_to_vec(&mut self, frame: &[u8], size: usize, window_log_max: u32) -> Outcome<Vec<u8>> {
        // The header is checked before memory of that size is allocated.
        check_header(frame, size as u64, window_log_max)?;
        let mut out = vec![0; size];
        self.expand(frame, &mut out, window_log_max)?;
        Ok(out)
    }
}

/// Checks the magic, the content size and the window, and that no dictionary is needed (RFC 8878, section 3.1.1.1). Returns the size
/// of the header.
fn check_header(frame: &[u8], size: u64, window_log_max: u32) -> Outcome<usize> {
    let few = "too few bytes for a frame";
    let (magic, rest) = frame.split_first_chunk::<4>().ok_or(few)?;
    let (&descriptor, rest) = rest.split_first().ok_or(few)?;
    if *magic != MAGIC {
        return Err("another magic");
    }
    let single_segment = descriptor & 0x20 != 0;
    let (window, rest) = match (single_segment, rest) {
        (true, rest) => (size, rest),
        (false, [window, rest @ ..]) => {
            let base = 1 << (10 + (window >> 3));
            (base + base / 8 * u64::from(window & 7), rest)
        }
        (false, []) => return Err(few),
    };
    if window > 1 << window_log_max {
        return Err("a window beyond the limit");
    }
    let damaged = "a damaged frame header";
    if descriptor & 0x08 != 0 {
        return Err(damaged);
    }
    let (dictionary, rest) = rest.split_at_checked([0, 1, 2, 4][usize::from(descriptor & 3)]).ok_or(damaged)?;
    if dictionary.iter().any(|&byte| byte != 0) {
        return Err("a dictionary");
    }
    let size_bytes = match (descriptor >> 6, single_segment) {
        (0, false) => return Err("no content size"),
        (log2, _) => 1 << log2,
    };
    let (stored, rest) = rest.split_at_checked(size_bytes).ok_or(damaged)?;
    let number = stored.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
    // Two bytes store the size minus 256.
    let found = if size_bytes == 2 { number + 256 } else { number };
    if found == size { Ok(frame.len() - rest.len()) } else { Err("another content size") }
}

#[cfg(test)]
pub fn expand(frame: &[u8], size: usize, window_log_max: u32) -> Outcome<Vec<u8>> {
    Expander::default().expand_to_vec(frame, size, window_log_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::zstd::library::Compressor;

    #[test]
    fn a_context_is_made_for_the_first_frame_that_is_in_order() {
        let mut expander = Expander::default();
        assert_eq!(expander.expand(b"no frame", &mut [0; 3], 27), Err("another magic"));
        assert!(expander.0.is_none());
        let mut frame = Vec::new();
        Compressor::new().unwrap().compress(b"abc", &[], &mut frame).unwrap();
        let mut out = [0; 3];
        expander.expand(&frame, &mut out, 27).unwrap();
        assert!(out == *b"abc" && expander.0.is_some());
    }

    /// Returns the first bytes of a frame with this window and content size.
    fn header_with_window(window: u8, size: u32) -> Vec<u8> {
        [&MAGIC[..], &[0x80, window], &size.to_le_bytes()].concat()
    }

    #[test]
    fn windows_are_allowed_up_to_the_limit_and_no_further() {
        // The high 5 bits are an exponent above 2^10, the low 3 bits a number of eighths.
        for (window, allowed) in [(17 << 3, true), (17 << 3 | 1, false), (16 << 3 | 7, true), (18 << 3, false), (0, true)] {
            let outcome = check_header(&header_with_window(window, 5), 5, 27);
            let expected = if allowed { Ok(10) } else { Err("a window beyond the limit") };
            assert_eq!(outcome, expected, "{window:#x}");
        }
    }

    #[test]
    fn memory_is_taken_only_for_the_size_that_the_frame_states() {
        assert_eq!(expand(b"no frame", usize::MAX, 27), Err("another magic"));
        assert_eq!(expand(&header_with_window(0, 5), usize::MAX, 27), Err("another content size"));
        assert_eq!(expand(&MAGIC, usize::MAX, 27), Err("too few bytes for a frame"));
        assert_eq!(expand(&[&MAGIC[..], &[0]].concat(), usize::MAX, 27), Err("too few bytes for a frame"));
    }

    /// Returns the sizes of a frame's blocks. All blocks must be raw.
    fn raw_blocks(frame: &[u8]) -> Vec<usize> {
        let single_segment = frame[4] & 0x20 != 0;
        let size_bytes = match frame[4] >> 6 {
            0 => usize::from(single_segment),
            log2 => 1 << log2,
        };
        let mut rest = &frame[5 + usize::from(!single_segment) + size_bytes..];
        let mut sizes = Vec::new();
        loop {
            let header = u32::from_le_bytes([rest[0], rest[1], rest[2], 0]);
            assert_eq!(header >> 1 & 3, 0, "a raw block");
            sizes.push((header >> 3) as usize);
            rest = &rest[3 + (header >> 3) as usize..];
            if header & 1 == 1 {
                assert!(rest.is_empty());
                return sizes;
            }
        }
    }

    #[test]
    fn parts_of_128_bytes_have_a_block_of_their_own_and_shorter_ones_share_it() {
        let mut state = 1u64;
        let content: Vec<u8> = core::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(1000)
        .collect();
        for (ends, blocks) in [
            (&[][..], &[1000][..]),
            (&[1000], &[1000]),
            (&[500], &[500, 500]),
            (&[128], &[128, 872]),
            (&[127], &[1000]),
            (&[872], &[872, 128]),
            (&[873], &[1000]),
            (&[300, 427, 700], &[300, 400, 300]),
            (&[300, 428, 700], &[300, 128, 272, 300]),
        ] {
            let mut frame = vec![7; 5];
            let mut compressor = Compressor::new().unwrap();
            compressor.compress(&content, ends, &mut frame).unwrap();
            assert_eq!(raw_blocks(&frame[5..]), blocks, "{ends:?}");
        }
    }

    /// Both libraries accept the same frames, whole, cut, changed and followed by bytes, and expand them to the same bytes.
    #[cfg(feature = "ruzstd")]
    #[test]
    fn the_two_libraries_agree() {
        use crate::codec::zstd::ruzstd;
        use proptest::prelude::*;
        let contents = prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..3000),
            (any::<[u8; 3]>(), 0..40_000usize).prop_map(|(of, size)| of.iter().copied().cycle().take(size).collect()),
            proptest::collection::vec(0..4u8, 0..200_000),
        ];
        let frames =
            (contents, 0..2u8, any::<bool>(), any::<prop::sample::Index>(), 0..4u8, any::<prop::sample::Index>(), any::<u8>());
        proptest!(|((content, level, checksum, part, change, at, byte) in frames)| {
            let mut frame = Vec::new();
            if level == 0 {
                Compressor::new().unwrap().compress(&content, &[part.index(content.len() + 1)], &mut frame).unwrap();
            } else {
                let mut compressor = zstd::bulk::Compressor::new(19).unwrap();
                compressor.include_checksum(checksum).unwrap();
                frame = compressor.compress(&content).unwrap();
            }
            match change {
                0 => {}
                1 => frame.truncate(at.index(frame.len())),
                2 => {
                    let at = at.index(frame.len());
                    frame[at] ^= byte;
                }
                _ => frame.push(byte),
            }
            let (mut by_library, mut by_rust) = (vec![0; content.len()], vec![0; content.len()]);
            if let Ok(header_size) = check_header(&frame, content.len() as u64, 27) {
                let expanded = library::expand(&mut Default::default(), &frame, header_size, &mut by_library);
                let also = ruzstd::expand(&mut Default::default(), &frame, header_size, &mut by_rust);
                prop_assert_eq!(expanded.is_ok_and(|size| size == content.len()), also.is_ok_and(|size| size == content.len()), "{:?} {:?}", expanded, also);
                prop_assert!(expanded.is_err() || by_library == by_rust);
            }
        });
    }
}
