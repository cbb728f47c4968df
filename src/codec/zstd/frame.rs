//! Reads and writes single zstd frames with a content size, without a dictionary, with a bounded window (spec section 5.2).

use zstd::zstd_safe::zstd_sys::ZSTD_EndDirective;
use zstd::zstd_safe::{self, CCtx, CParameter, DCtx, InBuffer, OutBuffer, ResetDirective, Strategy};

const MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
/// Minimum size of a block in bytes. A shorter part shares a block with the next part, because each block costs a header and a
/// table.
const MIN_BLOCK_SIZE: usize = 128;

type Outcome<T> = Result<T, &'static str>;

fn named(code: usize) -> &'static str {
    zstd_safe::get_error_name(code)
}

/// Writes frames.
pub(super) struct Compressor(CCtx<'static>);

impl Compressor {
    pub fn new() -> Outcome<Self> {
        let mut context = CCtx::try_create().ok_or("out of memory")?;
        // Entropy coding of literals gives nearly all of the gain. On real pairs, the fastest match finder, restricted to long
        // matches, gives the best ratio and the fastest decoding.
        for parameter in [
            CParameter::CompressionLevel(1),
            CParameter::Strategy(Strategy::ZSTD_fast),
            CParameter::MinMatch(7),
            CParameter::HashLog(6),
            CParameter::ChecksumFlag(false),
            CParameter::ContentSizeFlag(true),
        ] {
            context.set_parameter(parameter).map_err(named)?;
        }
        Ok(Self(context))
    }

    /// Appends a frame of `content` to `out`. Blocks end at `part_ends`, because each part has its own statistics.
    pub fn compress(&mut self, content: &[u8], part_ends: &[usize], out: &mut Vec<u8>) -> Outcome<()> {
        self.0.reset(ResetDirective::SessionOnly).map_err(named)?;
        self.0.set_pledged_src_size(Some(content.len() as u64)).map_err(named)?;
        let bound = zstd_safe::compress_bound(content.len()) + 64 + 4 * part_ends.len();
        out.reserve(bound);
        let start = out.len();
        let mut buffer = OutBuffer::around_pos(out, start);
        let mut from = 0;
        let last = content.len();
        let ends = part_ends.iter().copied().filter(|&end| end < last).chain([last]);
        for end in ends {
            let directive = if end == last { ZSTD_EndDirective::ZSTD_e_end } else { ZSTD_EndDirective::ZSTD_e_flush };
            if end != last && (end - from < MIN_BLOCK_SIZE || last - end < MIN_BLOCK_SIZE) {
                continue;
            }
            let mut input = InBuffer::around(&content[from..end]);
            loop {
                let left = self.0.compress_stream2(&mut buffer, &mut input, directive).map_err(named)?;
                if left == 0 && input.pos() == end - from {
                    break;
                }
                if buffer.pos() == buffer.capacity() {
                    return Err("a frame larger than its bound");
                }
            }
            from = end;
        }
        Ok(())
    }
}

/// Reads frames. The context of 95 kB is created for the first frame, because many decoders read no frame.
#[derive(Default)]
pub(crate) struct Expander(Option<DCtx<'static>>);

impl Expander {
    /// Expands `frame`, which must be one frame with exactly `out.len()` bytes of content. An error describes the difference.
    pub fn expand(&mut self, frame: &[u8], out: &mut [u8], window_log_max: u32) -> Outcome<()> {
        check_header(frame, out.len() as u64, window_log_max)?;
        match zstd_safe::find_frame_compressed_size(frame) {
            Ok(size) if size == frame.len() => {}
            Ok(_) => return Err("bytes after the frame"),
            Err(code) => return Err(named(code)),
        }
        let context = self.0.get_or_insert_with(DCtx::create);
        let written = context.decompress(out, frame).map_err(named)?;
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

/// Checks the magic, the content size and the window, which the zstd library does not check. The library refuses dictionaries.
fn check_header(frame: &[u8], size: u64, window_log_max: u32) -> Outcome<()> {
    let Some((magic, [descriptor, rest @ ..])) = frame.split_first_chunk::<4>() else {
        return Err("too few bytes for a frame");
    };
    if *magic != MAGIC {
        return Err("another magic");
    }
    let single_segment = descriptor & 0x20 != 0;
    let window = match (single_segment, rest) {
        (true, _) => size,
        (false, &[window, ..]) => {
            let base = 1 << (10 + (window >> 3));
            base + base / 8 * u64::from(window & 7)
        }
        (false, []) => return Err("too few bytes for a frame"),
    };
    if window > 1 << window_log_max {
        return Err("a window beyond the limit");
    }
    match zstd_safe::get_frame_content_size(frame) {
        Ok(Some(found)) if found == size => Ok(()),
        Ok(Some(_)) => Err("another content size"),
        Ok(None) => Err("no content size"),
        Err(_) => Err("a damaged frame header"),
    }
}

/// Expands a frame into a new buffer. The caller has bounded `size`.
#[cfg(test)]
pub(crate) fn expand(frame: &[u8], size: usize, window_log_max: u32) -> Outcome<Vec<u8>> {
    Expander::default().expand_to_vec(frame, size, window_log_max)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let expected = if allowed { Ok(()) } else { Err("a window beyond the limit") };
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
        let content: Vec<u8> = std::iter::repeat_with(|| {
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
}
