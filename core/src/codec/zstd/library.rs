//! Frames by the C library.

use crate::prelude::*;
use zstd::zstd_safe::zstd_sys::ZSTD_EndDirective;
use zstd::zstd_safe::{self, CCtx, CParameter, DCtx, InBuffer, OutBuffer, ResetDirective, Strategy};

/// An error says what is wrong with the frame.
pub(super) type Outcome<T> = Result<T, &'static str>;

/// Minimum size of a block in bytes. A shorter part shares a block with the next part, because each block costs a header and a
/// table.
const MIN_BLOCK_SIZE: usize = 128;

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

/// State that the library reuses for every frame: 95 kB.
pub(super) struct Context(DCtx<'static>);

impl Default for Context {
    fn default() -> Self {
        Self(DCtx::create())
    }
}

/// Expands a frame with nothing after it. Returns the size of the content.
pub(super) fn expand(context: &mut Context, frame: &[u8], _header_size: usize, out: &mut [u8]) -> Outcome<usize> {
    match zstd_safe::find_frame_compressed_size(frame) {
        Ok(size) if size == frame.len() => context.0.decompress(out, frame).map_err(named),
        Ok(_) => Err("bytes after the frame"),
        Err(code) => Err(named(code)),
    }
}
