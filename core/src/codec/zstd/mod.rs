//! Codec 1: a layout of gaps and deltas in one zstd frame (`spec/codecs.md` section 3).

mod elias;
mod frame;
mod layout;
mod layouts;
#[cfg_attr(not(feature = "zstd"), path = "ruzstd.rs")]
mod library;
#[cfg(all(test, feature = "zstd", feature = "ruzstd"))]
mod ruzstd;

#[doc(hidden)]
pub use frame::Expander;
#[cfg(test)]
#[doc(hidden)]
pub use frame::expand as expand_frame;
pub use layout::Layout;

use super::Encoded;
use super::difference::{Changes, Difference};
use crate::error::{Error, Result, Rule};
use crate::lane::{Lane, Order};
use crate::prelude::*;
use layouts::{Content, WIDE};

/// log2 of the largest window of a payload's frame.
const WINDOW_LOG_MAX: u32 = 27;

/// Returns whether the content of a chunk can have this size.
pub(super) fn check_size(uncompressed: u32, lanes: u32, lane_bytes: usize) -> bool {
    uncompressed >= 2 && u64::from(uncompressed) <= (lane_bytes as u64 + 3) * u64::from(lanes) + 64
}

/// Layouts to try for a chunk. The smallest payload is kept.
#[derive(Debug, Clone, Copy)]
pub enum Layouts<'a> {
    /// One layout, selected by rule.
    ByRule,
    /// These layouts.
    These(&'a [Layout]),
    /// All layouts that can give the smallest payload. The layout selected by rule is tried first.
    Any,
}

/// A layout, and the size in bytes of the payload in this layout.
pub type LayoutSize = (Layout, usize);

pub(super) struct Encoder {
    frames: library::Compressor,
    content: Content,
    /// Buffer for a candidate payload.
    candidate: Vec<u8>,
}

impl Encoder {
    pub fn new() -> Result<Self> {
        Ok(Self { frames: library::Compressor::new().map_err(zstd_error)?, content: Content::default(), candidate: Vec::new() })
    }

    /// Appends the smallest payload, and returns its size in each tried layout. If the first dense layout takes more than
    /// `enough` bytes, no other dense layout is tried, because it would gain little. The same applies to sparse layouts.
    pub fn encode<L: Lane>(
        &mut self,
        difference: Difference<'_>,
        layouts: Layouts<'_>,
        enough: u64,
        payload: &mut Vec<u8>,
    ) -> Result<(Encoded, Vec<LayoutSize>)> {
        let mut deltas = Deltas::<L>::new(difference);
        // If nearly all lanes change, nearly all gaps are 0, and sparse layouts gain nothing over dense ones.
        let more = matches!(layouts, Layouts::Any) && 32 * difference.changed <= 31 * difference.lanes();
        let mut layouts = match layouts {
            Layouts::ByRule => vec![deltas.by_rule()],
            Layouts::These(layouts) => layouts.to_vec(),
            Layouts::Any => {
                let by_rule = deltas.by_rule();
                let others = candidates(difference).iter().copied().filter(|layout| *layout != by_rule);
                core::iter::once(by_rule).chain(others).collect()
            }
        };
        let (mut encoded, mut sizes) = (Encoded::default(), Vec::with_capacity(layouts.len()));
        let start = payload.len();
        let mut too_large = [false; 2];
        let mut tried = 0;
        while let Some(&layout) = layouts.get(tried) {
            tried += 1;
            let kind = usize::from(is_dense(layout));
            if too_large[kind] {
                continue;
            }
            self.content.clear();
            if is_dense(layout) {
                self.content.put_dense(layout, deltas.of_all());
            } else {
                self.content.put_sparse(layout, deltas.of_changed());
            }
            self.candidate.clear();
            self.frames.compress(self.content.bytes(), self.content.parts(), &mut self.candidate).map_err(zstd_error)?;
            let size = self.candidate.len();
            if sizes.is_empty() || size < payload.len() - start {
                encoded = Encoded { uncompressed_size: self.content.bytes().len() as u32, num_deltas: difference.changed as u32 };
                payload.truncate(start);
                payload.extend(&self.candidate);
            }
            let first_of_kind = sizes.iter().all(|(other, _)| is_dense(*other) != is_dense(layout));
            sizes.push((layout, size));
            too_large[kind] = first_of_kind && size as u64 > enough;
            if more && tried == layouts.len() && is_repeats(encoded, payload.len() - start) {
                layouts.extend(Layout::ALL.iter().filter(|layout| sizes.iter().all(|(other, _)| other != *layout)));
            }
        }
        Ok((encoded, sizes))
    }
}

/// Returns whether a frame is so small that its content must consist of repeats. All layouts are then tried: compression is fast,
/// and the layout with the longest repeats is hard to predict.
pub fn is_repeats(encoded: Encoded, size: usize) -> bool {
    16 * size as u64 <= u64::from(encoded.uncompressed_size)
}

/// Returns whether a layout codes every lane, changed or not.
fn is_dense(layout: Layout) -> bool {
    matches!(layout, Layout::Planes | Layout::NibblePlanes)
}

/// Maximum number of lanes for which all layouts are tried because that is cheap.
const SMALL: usize = 1 << 12;

/// Returns the layouts that can give the smallest payload: sparse layouts if few lanes change, dense layouts if most of many
/// lanes change, otherwise all.
fn candidates(difference: Difference<'_>) -> &'static [Layout] {
    match (difference.changed, difference.lanes()) {
        (changed, lanes) if 8 * changed <= lanes => &[Layout::Gaps, Layout::EliasDelta, Layout::NibbleGaps],
        (changed, lanes) if 4 * changed > 3 * lanes && lanes > SMALL => &[Layout::Planes, Layout::NibblePlanes],
        _ => Layout::ALL,
    }
}

/// Deltas of a chunk. Each list is computed on first use.
struct Deltas<'a, L> {
    difference: Difference<'a>,
    all: Option<Vec<L>>,
    changes: Option<Changes<L>>,
}

impl<'a, L: Lane> Deltas<'a, L> {
    fn new(difference: Difference<'a>) -> Self {
        Self { difference, all: None, changes: None }
    }

    fn of_all(&mut self) -> &[L] {
        let Difference { dtype, base, target, .. } = self.difference;
        self.all.get_or_insert_with(|| layouts::deltas_of_all::<L>(base, target, dtype.order()))
    }

    fn of_changed(&mut self) -> &Changes<L> {
        self.changes.get_or_insert_with(|| self.difference.changes())
    }

    /// Selects a layout. If more than a quarter of the lanes change, one token per lane costs no more than one token per change
    /// (measured on real pairs).
    fn by_rule(&mut self) -> Layout {
        let count = self.difference.changed;
        let (dense, deltas) = match 4 * count > self.difference.lanes() {
            true => (true, self.of_all()),
            false => (false, &self.of_changed().deltas[..]),
        };
        match (dense, has_many_wide(deltas, count)) {
            (true, true) => Layout::Planes,
            (true, false) => Layout::NibblePlanes,
            (false, true) => Layout::Gaps,
            (false, false) => Layout::NibbleGaps,
        }
    }
}

/// Returns whether more than 1/8 of the deltas are wide. Byte planes are then smaller than nibbles with escapes.
fn has_many_wide<L: Lane>(deltas: &[L], count: usize) -> bool {
    8 * deltas.iter().filter(|d| d.to_u64() >= WIDE).count() > count
}

fn zstd_error(message: &'static str) -> Error {
    Error::InvalidArgument(format!("the zstd library failed: {message}"))
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
        // The checks of the index have bounded the size. The buffer never shrinks.
        if self.content.len() < size {
            self.content.resize(size, 0);
        }
        let content = &mut self.content[..size];
        self.frames
            .expand(payload, content, WINDOW_LOG_MAX)
            .map_err(|found| Rule::PayloadFrame.broken(format_args!("one zstd frame that expands to {size} bytes"), found))?;
        let (&layout, parts) = content.split_first().ok_or_else(|| Rule::PayloadSize.broken("a layout", "nothing"))?;
        let layout = Layout::from_code(layout).ok_or_else(|| Rule::PayloadLayout.broken("a known layout", layout))?;
        layouts::decode::<L>(layout, parts, encoded.num_deltas as usize, order, base_sum, lanes)
    }
}
