//! Codec 1: a layout of gaps and deltas in one zstd frame (`spec/codecs.md` section 3).

mod elias;
mod frame;
mod layouts;

pub(crate) use frame::expand as expand_frame;

use super::{Difference, Encoded};
use crate::error::{Error, Result, Rule};
use crate::format::registry;
use crate::lane::{Lane, Order};
use layouts::{Content, WIDE};

registry! {
    /// How the content of a frame is laid out: its first byte.
    #[derive(Default)]
    Layout: u8 {
        /// Byte planes of all lanes' deltas.
        #[default]
        Planes = 0 => "planes",
        /// Gaps in bytes, byte planes of the changed lanes' deltas.
        Gaps = 1 => "gaps",
        /// Gaps in Elias-δ, byte planes of the changed lanes' deltas.
        EliasDelta = 2 => "elias-delta",
        /// A gap and a delta in a byte, the larger ones escaped.
        NibbleGaps = 3 => "nibble-gaps",
        /// Two lanes' deltas in a byte, the larger ones escaped.
        NibblePlanes = 4 => "nibble-planes",
    }
}

/// Largest window of a payload's frame.
const WINDOW_LOG_MAX: u32 = 27;

/// Whether a content of a chunk can have this size.
pub(super) fn check_size(uncompressed: u32, lanes: u32, lane_bytes: usize) -> bool {
    uncompressed >= 2 && u64::from(uncompressed) <= (lane_bytes as u64 + 3) * u64::from(lanes) + 64
}

pub(super) struct Encoder {
    frames: frame::Compressor,
    content: Content,
}

impl Encoder {
    pub fn new() -> Result<Self> {
        Ok(Self { frames: frame::Compressor::new().map_err(library)?, content: Content::default() })
    }

    pub fn encode<L: Lane>(
        &mut self,
        difference: Difference<'_>,
        layout: Option<Layout>,
        payload: &mut Vec<u8>,
    ) -> Result<Encoded> {
        let Difference { dtype, base, target, changed: count, .. } = difference;
        let dense = match layout {
            Some(layout) => matches!(layout, Layout::Planes | Layout::NibblePlanes),
            // From a quarter of the lanes on, a token a lane costs no more than a token a change; measured on real pairs, in
            // DECISIONS.md.
            None => 4 * count > difference.lanes(),
        };
        self.content.clear();
        if dense {
            let deltas = layouts::deltas_of_all::<L>(base, target, dtype.order());
            let layout = layout.unwrap_or_else(|| if mostly_wide(&deltas, count) { Layout::Planes } else { Layout::NibblePlanes });
            self.content.put_dense(layout, &deltas);
        } else {
            let changes = difference.changes::<L>();
            let layout =
                layout.unwrap_or_else(|| if mostly_wide(&changes.deltas, count) { Layout::Gaps } else { Layout::NibbleGaps });
            self.content.put_sparse(layout, &changes);
        }
        self.frames.compress(self.content.bytes(), self.content.parts(), payload).map_err(library)?;
        Ok(Encoded { uncompressed_size: self.content.bytes().len() as u32, num_deltas: count as u32 })
    }
}

/// Whether nibbles with escapes would mostly be escapes.
fn mostly_wide<L: Lane>(deltas: &[L], count: usize) -> bool {
    8 * deltas.iter().filter(|d| d.to_u64() >= WIDE).count() > count
}

fn library(message: &'static str) -> Error {
    Error::Misuse(format!("the zstd library failed: {message}"))
}

#[derive(Default)]
pub(super) struct Decoder {
    frames: frame::Expander,
    content: Vec<u8>,
}

impl Decoder {
    pub fn decode<L: Lane>(
        &mut self,
        payload: &[u8],
        encoded: Encoded,
        order: Order,
        base_sum: u64,
        lanes: &mut [u8],
    ) -> Result<u64> {
        let size = encoded.uncompressed_size as usize;
        // The index has bounded the size by the chunk's lanes; the buffer stays as large as the largest chunk so far.
        if self.content.len() < size {
            self.content.resize(size, 0);
        }
        let content = &mut self.content[..size];
        self.frames
            .expand(payload, content, WINDOW_LOG_MAX)
            .map_err(|found| Rule::PayloadFrame.broken(format_args!("one zstd frame of {size} bytes"), found))?;
        let (&layout, parts) = content.split_first().ok_or_else(|| Rule::PayloadSize.broken("a layout", "nothing"))?;
        let layout = Layout::from_code(layout).ok_or_else(|| Rule::PayloadLayout.broken("a known layout", layout))?;
        layouts::decode::<L>(layout, parts, encoded.num_deltas as usize, order, base_sum, lanes)
    }
}
