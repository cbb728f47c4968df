//! Encode options.

use super::split::Split;
use std::collections::BTreeMap;
use tpde_core::codec::{Codec, DecodeCost, Layout};
use tpde_core::format::{Form, FormatVersion, named, parsed_by_name};
use tpde_core::rectangle::Rectangle;

/// Options of [`Encode`](crate::Encode).
///
/// ```
/// # use tpde::{Codec, EncodeOptions};
/// let options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(1 << 14);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EncodeOptions {
    /// The codecs to choose from. By default each tensor gets the codec that makes it smallest.
    pub codec: CodecChoice,
    /// Layout of codec `zstd`. If set, `codec` must be `zstd` for all tensors. By default each chunk gets its own layout.
    pub layout: Option<Layout>,
    /// Maximum number of lanes per chunk: a power of two, at least 4,096. The default is 1,048,576. A chunk also has at most
    /// 4 MiB of lanes. Smaller chunks give decoders more parallelism; each chunk costs 48 bytes of index. Below the default,
    /// [`Favor::Ratio`] also divides chunks into more streams.
    pub chunk_lanes: u64,
    /// Whether codec `conditioned` favors a small pair or fast decoding.
    pub favor: Favor,
    /// Renamed tensors: a map from the name in the target to the name in the base. Names with `*` are patterns: `A.*` with `B.*`
    /// gives each tensor of the target whose name begins with `A.` the base tensor with `B.` and the same rest. A
    /// tensor keeps its name if the base has no tensor of the name that a pattern gives. Tensors that the map names are not
    /// matched with patterns. Of several patterns that match, the longest applies.
    pub renamed: BTreeMap<String, String>,
    /// Whether base tensors of another dtype are used: base kinds `cast` and `dequantised`. The default is `true`. A tensor takes
    /// such a base only if it fits and makes the tensor smaller; if `codec` fixes the codec, if it fits. They need format 1.3: with
    /// an earlier one they are not used. [`EncodeReport::unused`](crate::EncodeReport#structfield.unused) lists bases that do not
    /// fit.
    pub derived: bool,
    /// Version of the format. The default is 1.3. A pair without derived bases states version 1.2.
    pub format: FormatVersion,
    /// Tensors to describe in parts, each with codec, chunks and digests of its own: a map from the name in the target to
    /// rectangles that do not overlap. So that readers can find them, cuts must nest: sorted by origin, each rectangle ends
    /// before the next one begins, in the first dimension in which they differ. If the rectangles of a tensor do not cover it, or
    /// the target holds only slices, the pair has only the parts that are named and held, and no files. Takes precedence over
    /// [`split`](Self#structfield.split). Needs format 1.2.
    pub cuts: BTreeMap<String, Vec<Rectangle>>,
    /// Rules that cut tensors into parts by name. A tensor whose base has another number of rows stays whole. Needs format 1.2.
    pub split: Split,
    /// Whether the index stores the digest of each payload: 16 bytes per chunk. Readers of a part of the payloads then compare
    /// digests too. The pair digest of format 1.2 covers all payloads without it. Needs format 1.2. Pairs with parts always have
    /// it.
    pub payload_digests: bool,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self {
            codec: CodecChoice::Auto,
            layout: None,
            chunk_lanes: 1 << 20,
            favor: Favor::Ratio,
            renamed: BTreeMap::new(),
            derived: true,
            format: FormatVersion::default(),
            payload_digests: false,
            cuts: BTreeMap::new(),
            split: Split::default(),
        }
    }
}

/// Defines methods that set fields of these names.
macro_rules! setters {
    ($($field:ident: $value:ty,)+) => {$(
        #[doc = concat!("Sets [`", stringify!($field), "`](Self#structfield.", stringify!($field), ").")]
        #[must_use]
        pub fn $field(mut self, $field: $value) -> Self {
            self.$field = $field.into();
            self
        }
    )+};
}

impl EncodeOptions {
    setters! {
        codec: impl Into<CodecChoice>,
        layout: impl Into<Option<Layout>>,
        chunk_lanes: u64,
        favor: Favor,
        derived: bool,
        format: FormatVersion,
        payload_digests: bool,
        split: Split,
    }

    /// Adds pairs of target name and base name to [`renamed`](Self#structfield.renamed).
    #[must_use]
    pub fn renamed(mut self, names: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>) -> Self {
        self.renamed.extend(names.into_iter().map(|(target, base)| (target.into(), base.into())));
        self
    }

    /// Adds tensors and their rectangles to [`cuts`](Self#structfield.cuts).
    #[must_use]
    pub fn cuts(mut self, cuts: impl IntoIterator<Item = (impl Into<String>, Vec<Rectangle>)>) -> Self {
        self.cuts.extend(cuts.into_iter().map(|(name, rectangles)| (name.into(), rectangles)));
        self
    }

    /// The name in the base of the target tensor `name`.
    pub(crate) fn base_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.renamed.get(name).map_or(name, String::as_str)
    }

    #[doc(hidden)]
    pub fn form(&self) -> Form {
        Form { version: self.format, payload_digests: self.payload_digests }
    }
}

named! {
    /// The trade-off that codec `conditioned` makes between size and speed.
    // The first line of each variant equals its `Favor::job`.
    #[derive(Default)]
    #[non_exhaustive]
    enum Favor as "favor" {
        /// Most jobs. Small, and fast to decode.
        ///
        /// Weighs the decoding time of coded lanes and of streams against the bytes that they save.
        #[default]
        Ratio => "ratio",
        /// Rebuilt often on a GPU. Faster, and larger.
        ///
        /// If few lanes change, entropy-codes fewer lanes and lists more changes one by one. Pairs grow by a few percent, or to
        /// twice their size if all lanes are equally likely to change.
        Speed => "speed",
        /// Archives and slow links. Smallest, and slower.
        ///
        /// Trains tables on all lanes, so encoding takes longer. Streams have the maximum length, so a device takes longer to
        /// decode them.
        Size => "size",
    }
}

impl Favor {
    /// One line for help texts: the purpose, and the result.
    pub fn job(self) -> &'static str {
        match self {
            Self::Ratio => "Most jobs. Small, and fast to decode.",
            Self::Speed => "Rebuilt often on a GPU. Faster, and larger.",
            Self::Size => "Archives and slow links. Smallest, and slower.",
        }
    }

    /// The weight of decoding time, for this value of the option `chunk_lanes`.
    #[doc(hidden)]
    pub fn decode_cost(self, chunk_lanes: u64) -> DecodeCost {
        let streams = if chunk_lanes <= LANES_FOR_LATENCY { WARPS } else { 1 };
        match self {
            Self::Ratio if streams_are_short(chunk_lanes) => {
                DecodeCost { steps: DecodeCost::default().steps / 2, state: 2, streams, ..DecodeCost::default() }
            }
            Self::Ratio => DecodeCost::default(),
            Self::Speed => DecodeCost { lane: 256, steps: 512, state: 2, streams },
            Self::Size => DecodeCost { lane: 0, steps: usize::MAX, state: 1000, streams: 1 },
        }
    }
}

/// Number of streams of a chunk that a CUDA device decodes at once: each is decoded by one warp of a block.
const WARPS: usize = 8;
/// Chunks of at most this many lanes have as many streams, if these have enough payload. Larger chunks have enough steps for more
/// streams, or so little payload that states cost more than they gain.
const LANES_FOR_LATENCY: u64 = 1 << 16;

/// Whether [`Favor::Ratio`] divides chunks of codec `conditioned` into more streams. It does if the option `chunk_lanes` is below its
/// default: small chunks imply that latency matters, and the steps of a stream are decoded one after another. Cost: more streams,
/// so more initial states in the payloads.
fn streams_are_short(chunk_lanes: u64) -> bool {
    chunk_lanes < EncodeOptions::default().chunk_lanes
}

/// The codecs that an encoder may choose from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CodecChoice {
    /// Store or send. Each tensor takes its smallest codec.
    ///
    /// Each tensor is coded from the base or from zeros, in any codec.
    #[default]
    Auto,
    /// Rebuild on a GPU. Each tensor takes conditioned or raw.
    ///
    /// Each tensor is coded from the base or from zeros, in a codec that a device can decode without the CPU. Sizes are estimated, so
    /// that a device can encode with this profile too.
    Device,
    /// One codec for all tensors, from the base if there is one.
    Only(Codec),
}

impl From<Codec> for CodecChoice {
    fn from(codec: Codec) -> Self {
        Self::Only(codec)
    }
}

parsed_by_name!(CodecChoice, "codec");

impl CodecChoice {
    /// All choices.
    pub const ALL: &[Self] =
        &[Self::Auto, Self::Device, Self::Only(Codec::Conditioned), Self::Only(Codec::Zstd), Self::Only(Codec::Raw)];

    /// The name on the command line and in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Device => "device",
            Self::Only(codec) => codec.name(),
        }
    }

    /// One line for help texts: the purpose, and the result.
    pub fn job(self) -> &'static str {
        match self {
            Self::Auto => "Store or send. Each tensor takes its smallest codec.",
            Self::Device => "Rebuild on a GPU. Each tensor takes conditioned or raw.",
            Self::Only(Codec::Conditioned) => "Training steps and fine-tunes. One codec throughout.",
            Self::Only(Codec::Zstd) => "Readers with zstd and no other entropy decoder.",
            Self::Only(Codec::Raw) => "Debugging, and the simplest readers. Large.",
        }
    }

    /// The codecs, in order of preference: if several give the same size, the encoder takes the first.
    fn codecs(&self) -> &[Codec] {
        match self {
            Self::Auto => &[Codec::Conditioned, Codec::Zstd, Codec::Raw],
            Self::Device => &[Codec::Conditioned, Codec::Raw],
            Self::Only(codec) => std::slice::from_ref(codec),
        }
    }

    /// Whether codec `conditioned`, which uses tables, is among the codecs.
    pub(super) fn has_tables(&self) -> bool {
        self.codecs().contains(&Codec::Conditioned)
    }

    /// The candidates for the coding of a tensor, with or without a base.
    pub(super) fn candidates(&self, has_base: bool) -> Vec<Candidate> {
        let from = |from_base| self.codecs().iter().map(move |&codec| Candidate { from_base, codec });
        match (has_base, self) {
            (true, Self::Only(_)) => from(true).collect(),
            (true, _) => from(true).chain(from(false)).collect(),
            (false, _) => from(false).collect(),
        }
    }
}

/// A candidate for the coding of a tensor: from its base or from zeros, with one codec for all its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub struct Candidate {
    pub from_base: bool,
    pub codec: Codec,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Encode, MemoryCheckpoint, TensorInfo};

    #[test]
    fn streams_are_more_and_half_as_long_where_chunks_below_the_default_are_asked_for() {
        let default = EncodeOptions::default().chunk_lanes;
        let cost = |favor: Favor, chunk_lanes| {
            let cost = favor.decode_cost(chunk_lanes);
            (cost.steps, cost.streams)
        };
        assert_eq!(cost(Favor::Ratio, default), (1024, 1));
        assert_eq!(cost(Favor::Ratio, 2 * default), (1024, 1));
        assert_eq!(cost(Favor::Speed, default), (512, 1));
        assert_eq!(cost(Favor::Size, default), (usize::MAX, 1));
        for (small, streams) in [(4096, 8), (1 << 16, 8), (default / 2, 1)] {
            assert_eq!(cost(Favor::Ratio, small), (512, streams));
            assert_eq!(cost(Favor::Speed, small), (512, streams));
            assert_eq!(cost(Favor::Size, small).0, usize::MAX);
        }
    }

    #[test]
    fn a_pair_states_the_lowest_version_that_has_all_it_uses() {
        let info = TensorInfo { name: "t".into(), dtype: Dtype::Bf16, shape: vec![2] };
        let base = MemoryCheckpoint::new([(info.clone(), &[0, 1, 2, 3][..])]).unwrap();
        let target = MemoryCheckpoint::new([(info, &[0, 1, 3, 3][..])]).unwrap();
        for (codec, minor) in [(Codec::Raw, 0), (Codec::Zstd, 0), (Codec::Conditioned, 1)] {
            let options = EncodeOptions { codec: codec.into(), ..EncodeOptions::default() };
            let version = |format| {
                let options = options.clone().format(format);
                let pair = Encode::new(&target).base(&base).options(options).to_memory().unwrap().0;
                let header = *pair.index().header();
                assert_eq!(
                    (header.payload_root == [0; 32], header.required_features),
                    (header.version_minor < 2, header.version_minor as u64 / 2)
                );
                header.version_minor
            };
            assert_eq!((version(FormatVersion::V1_1), version(FormatVersion::V1_2)), (minor, 2), "{codec:?}");
        }
        let nothing = MemoryCheckpoint::default();
        for (format, minor) in [(FormatVersion::V1_1, 0), (FormatVersion::V1_2, 2)] {
            let pair = Encode::new(&nothing).options(EncodeOptions::default().format(format)).to_memory().unwrap().0;
            assert_eq!(pair.index().header().version_minor, minor, "no tensors");
        }
    }
}
