//! Frames by `ruzstd`, in Rust alone.

use super::frame::Outcome;
#[cfg(not(feature = "zstd"))]
use crate::prelude::*;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use ruzstd::io::Read;

const DAMAGED: &str = "a damaged frame";

/// Refuses to write frames.
#[cfg(not(feature = "zstd"))]
pub(super) struct Compressor;

#[cfg(not(feature = "zstd"))]
impl Compressor {
    pub fn new() -> Outcome<Self> {
        Ok(Self)
    }

    pub fn compress(&mut self, _content: &[u8], _part_ends: &[usize], _out: &mut Vec<u8>) -> Outcome<()> {
        Err("this build only reads frames: feature `zstd` of tpde-core is off")
    }
}

/// What the library keeps between frames: a window.
pub(super) type Context = FrameDecoder;

/// Expands a frame with nothing after it. Returns the size of the content. Takes memory of a window and a block, whatever the
/// blocks expand to.
pub(super) fn expand(decoder: &mut Context, mut frame: &[u8], out: &mut [u8]) -> Outcome<usize> {
    decoder.reset(&mut frame).map_err(|_| DAMAGED)?;
    let mut written = 0;
    while !decoder.is_finished() || decoder.can_collect() > 0 {
        if !decoder.is_finished() {
            decoder.decode_blocks(&mut frame, BlockDecodingStrategy::UptoBlocks(1)).map_err(|_| DAMAGED)?;
        }
        while decoder.can_collect() > 0 {
            match decoder.read(&mut out[written..]).map_err(|_| DAMAGED)? {
                0 => return Err("a frame of another size"),
                more => written += more,
            }
        }
    }
    if !frame.is_empty() {
        return Err("bytes after the frame");
    }
    let stated = decoder.get_checksum_from_data();
    if stated.is_some() && stated != decoder.get_calculated_checksum() {
        return Err("another checksum of the content");
    }
    Ok(written)
}
