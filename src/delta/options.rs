//! What a caller may ask of an encoder.

use crate::codec::{Codec, Layout, Pace};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What an encoder may choose.
#[derive(Debug, Clone)]
pub struct EncodeOptions {
    /// Which codecs tensors may have.
    pub codec: CodecChoice,
    /// Layout of codec `zstd`; without it each chunk gets what suits it.
    pub layout: Option<Layout>,
    /// Most lanes of a chunk, a power of two of at least 4,096; bounded further by 4 MiB. Smaller chunks decode in more
    /// parallel pieces and cost more: 48 bytes each in the index.
    pub chunk_lanes: u64,
    /// What to favor where codec `conditioned` has the choice.
    pub favor: Favor,
    /// Base tensors of targets that were renamed: target name to base name.
    pub renamed: BTreeMap<String, String>,
    /// Files besides the checkpoints that the caller has read for this encoding. No file of the pair may replace one of them.
    pub inputs: Vec<PathBuf>,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self {
            codec: CodecChoice::Auto,
            layout: None,
            chunk_lanes: 1 << 20,
            favor: Favor::Ratio,
            renamed: BTreeMap::new(),
            inputs: Vec::new(),
        }
    }
}

/// What an encoder favors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Favor {
    /// Small pairs.
    #[default]
    Ratio,
    /// Fast decoding, above all on a device: where few lanes change, fewer of them are coded, and changes of others are listed one
    /// by one. Pairs grow by some percent, or to twice their size where all lanes change alike seldom.
    Speed,
    /// The smallest pairs, for what is stored or sent far: tables are made from all lanes, and streams are as long as they may be,
    /// which takes a device longer.
    Size,
}

impl Favor {
    /// All of them.
    pub const ALL: &[Self] = &[Self::Ratio, Self::Speed, Self::Size];

    /// The name that users know.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ratio => "ratio",
            Self::Speed => "speed",
            Self::Size => "size",
        }
    }

    /// For chunks of at most so many lanes: who wants small ones wants them to be decoded soon.
    pub(super) fn pace(self, chunk_lanes: u64) -> Pace {
        match self {
            Self::Ratio if chunk_lanes >= EncodeOptions::default().chunk_lanes => Pace::default(),
            Self::Ratio => Pace { steps: 512, state: 2, ..Pace::default() },
            Self::Speed => Pace { lane: 256, steps: 512, state: 2 },
            Self::Size => Pace { lane: 0, steps: usize::MAX, state: 1000 },
        }
    }
}

/// Which codecs an encoder may choose from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CodecChoice {
    /// All, from the base and without it: each tensor gets what makes it smallest.
    #[default]
    Auto,
    /// The same of the codecs that a device decodes alone: `conditioned` and `raw`.
    Device,
    /// One, from the base where there is one.
    Only(Codec),
}

impl From<Codec> for CodecChoice {
    fn from(codec: Codec) -> Self {
        Self::Only(codec)
    }
}

impl CodecChoice {
    /// All of them.
    pub const ALL: &[Self] =
        &[Self::Auto, Self::Device, Self::Only(Codec::Conditioned), Self::Only(Codec::Zstd), Self::Only(Codec::Raw)];

    /// The name that users know.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Device => "device",
            Self::Only(codec) => codec.name(),
        }
    }

    /// The codecs, the first of which is taken where several are as good.
    fn codecs(&self) -> &[Codec] {
        match self {
            Self::Auto => &[Codec::Conditioned, Codec::Zstd, Codec::Raw],
            Self::Device => &[Codec::Conditioned, Codec::Raw],
            Self::Only(codec) => std::slice::from_ref(codec),
        }
    }

    /// Whether tables of codec `conditioned` may be wanted.
    pub(super) fn has_tables(&self) -> bool {
        self.codecs().contains(&Codec::Conditioned)
    }

    /// The ways that a tensor with or without a base may be coded.
    pub(super) fn ways(&self, has_base: bool) -> Vec<Way> {
        let from = |from_base| self.codecs().iter().map(move |&codec| Way { from_base, codec });
        match (has_base, self) {
            (true, Self::Only(_)) => from(true).collect(),
            (true, _) => from(true).chain(from(false)).collect(),
            (false, _) => from(false).collect(),
        }
    }
}

/// How all chunks of a tensor are coded: from its base or from zeros, and the codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    pub from_base: bool,
    pub codec: Codec,
}
