//! Frames by `ruzstd`, in Rust alone.

#[cfg(not(feature = "zstd"))]
use crate::prelude::*;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use ruzstd::io::Read;

/// An error says what is wrong with the frame.
pub(super) type Outcome<T> = Result<T, &'static str>;

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

/// State that the library reuses for every frame.
pub(super) type Context = FrameDecoder;

/// A header, and the blocks of a frame that had another one.
struct Reheaded<'a>(&'a [u8], &'a [u8]);

impl Read for Reheaded<'_> {
    fn read(&mut self, out: &mut [u8]) -> Result<usize, ruzstd::io::Error> {
        let Self(header, blocks) = self;
        if header.is_empty() { blocks.read(out) } else { header.read(out) }
    }
}

/// Expands a frame with nothing after it, whose header is in order and has `header_size` bytes. Returns the size of the content.
/// Takes memory for the content and a block, whatever the blocks expand to.
///
/// The library refuses windows that the format allows. So it gets a header without a window: the content is its own window.
pub(super) fn expand(decoder: &mut Context, frame: &[u8], header_size: usize, out: &mut [u8]) -> Outcome<usize> {
    let (Some((magic, [descriptor, ..])), Some(blocks)) = (frame.split_first_chunk::<4>(), frame.get(header_size..)) else {
        return Err(DAMAGED);
    };
    let mut header = [0; 13];
    header[..4].copy_from_slice(magic);
    header[4] = 0xE0 | descriptor & 0x04; // 8 bytes of content size, a single segment, perhaps a checksum
    header[5..].copy_from_slice(&(out.len() as u64).to_le_bytes());
    let mut source = Reheaded(&header, blocks);

    decoder.reset(&mut source).map_err(|_| DAMAGED)?;
    let mut written = 0;
    while !decoder.is_finished() || decoder.can_collect() > 0 {
        if !decoder.is_finished() {
            decoder.decode_blocks(&mut source, BlockDecodingStrategy::UptoBlocks(1)).map_err(|_| DAMAGED)?;
        }
        while decoder.can_collect() > 0 {
            match decoder.read(&mut out[written..]).map_err(|_| DAMAGED)? {
                0 => return Err("a frame of another size"),
                more => written += more,
            }
        }
    }
    if !source.1.is_empty() {
        return Err("bytes after the frame");
    }
    let stated = decoder.get_checksum_from_data();
    if stated.is_some() && stated != decoder.get_calculated_checksum() {
        return Err("another checksum of the content");
    }
    Ok(written)
}
