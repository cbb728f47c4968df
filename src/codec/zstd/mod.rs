//! Codec 1: a layout of gaps and deltas in one zstd frame (`spec/codecs.md` section 3).

mod elias;
mod frame;
mod layout;
mod layouts;

pub(crate) use frame::expand as expand_frame;
pub use layout::Layout;

use super::Encoded;
use super::difference::{Changes, Difference};
use crate::error::{Error, Result, Rule};
use crate::lane::{Lane, Order};
use layouts::{Content, WIDE};

/// Largest window of a payload's frame.
const WINDOW_LOG_MAX: u32 = 27;

/// Whether a content of a chunk can have this size.
pub(super) fn check_size(uncompressed: u32, lanes: u32, lane_bytes: usize) -> bool {
    uncompressed >= 2 && u64::from(uncompressed) <= (lane_bytes as u64 + 3) * u64::from(lanes) + 64
}

/// In which layouts a chunk is to be encoded, of which the smallest is taken.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Layouts<'a> {
    /// The one that suits it by rule.
    Suited,
    /// Some, each once.
    These(&'a [Layout]),
    /// All that may be the smallest, the one that suits it first.
    Any,
}

/// A layout, and the bytes of a payload in it.
pub(crate) type LayoutSize = (Layout, usize);

pub(super) struct Encoder {
    frames: frame::Compressor,
    content: Content,
    /// A payload that may be the smallest.
    trial: Vec<u8>,
}

impl Encoder {
    pub fn new() -> Result<Self> {
        Ok(Self { frames: frame::Compressor::new().map_err(library)?, content: Content::default(), trial: Vec::new() })
    }

    /// Appends the smallest payload, and says what each layout took. If the first layout that says something of every lane, or of
    /// changed lanes alone, takes more than `enough` bytes, no other of its kind is tried: it gains little.
    pub fn encode<L: Lane>(
        &mut self,
        difference: Difference<'_>,
        layouts: Layouts<'_>,
        enough: u64,
        payload: &mut Vec<u8>,
    ) -> Result<(Encoded, Vec<LayoutSize>)> {
        let mut deltas = Deltas::<L>::new(difference);
        // Where all lanes change, layouts of the changed ones say the same as those of all.
        let more = matches!(layouts, Layouts::Any) && 32 * difference.changed <= 31 * difference.lanes();
        let mut layouts = match layouts {
            Layouts::Suited => vec![deltas.suited()],
            Layouts::These(layouts) => layouts.to_vec(),
            Layouts::Any => {
                let suited = deltas.suited();
                let others = that_may_win(difference).iter().copied().filter(|layout| *layout != suited);
                std::iter::once(suited).chain(others).collect()
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
            self.trial.clear();
            self.frames.compress(self.content.bytes(), self.content.parts(), &mut self.trial).map_err(library)?;
            let size = self.trial.len();
            if sizes.is_empty() || size < payload.len() - start {
                encoded = Encoded { uncompressed_size: self.content.bytes().len() as u32, num_deltas: difference.changed as u32 };
                payload.truncate(start);
                payload.extend(&self.trial);
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

/// Whether a frame is so much smaller than its content that it is made of repeats. It takes little time then, and how far the
/// repeats of a layout reach is hard to foresee.
pub(crate) fn is_repeats(encoded: Encoded, size: usize) -> bool {
    16 * size as u64 <= u64::from(encoded.uncompressed_size)
}

/// Whether a layout says something of every lane.
fn is_dense(layout: Layout) -> bool {
    matches!(layout, Layout::Planes | Layout::NibblePlanes)
}

/// Lanes for which all layouts take little time.
const SMALL: usize = 1 << 12;

/// The layouts in which a chunk may be smallest: where few lanes change not those that say something of every lane, and where
/// most of many do, only those.
fn that_may_win(difference: Difference<'_>) -> &'static [Layout] {
    match (difference.changed, difference.lanes()) {
        (changed, lanes) if 8 * changed <= lanes => &[Layout::Gaps, Layout::EliasDelta, Layout::NibbleGaps],
        (changed, lanes) if 4 * changed > 3 * lanes && lanes > SMALL => &[Layout::Planes, Layout::NibblePlanes],
        _ => Layout::ALL,
    }
}

/// What layouts are made from, each made once.
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

    /// The layout that suits the chunk. From a quarter of the lanes on, a token a lane costs no more than a token a change;
    /// measured on real pairs, in DECISIONS.md.
    fn suited(&mut self) -> Layout {
        let count = self.difference.changed;
        let (dense, deltas) = match 4 * count > self.difference.lanes() {
            true => (true, self.of_all()),
            false => (false, &self.of_changed().deltas[..]),
        };
        match (dense, mostly_wide(deltas, count)) {
            (true, true) => Layout::Planes,
            (true, false) => Layout::NibblePlanes,
            (false, true) => Layout::Gaps,
            (false, false) => Layout::NibbleGaps,
        }
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
