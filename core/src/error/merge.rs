//! Why pairs cannot be merged (section 12.2 of the specification).

use super::text::{Escaped, Text};
use crate::prelude::*;
use core::fmt;

/// A contradiction between two pairs that are to be merged.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotMergeable {
    /// The kind of contradiction.
    pub conflict: Conflict,
    /// Name of the tensor, base tensor or file. Empty for a lone safetensors file.
    pub name: String,
    /// The two pairs: their paths, or their numbers from 1.
    pub pairs: [String; 2],
    /// The property of the tensor, base tensor or file in each of these pairs.
    pub found: [String; 2],
}

impl NotMergeable {
    #[doc(hidden)]
    pub fn new(conflict: Conflict, name: String, pairs: [String; 2], found: [String; 2]) -> Self {
        Self { conflict, name, pairs, found }
    }
}

impl fmt::Display for NotMergeable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { conflict, name, pairs: [first, second], found: [in_first, in_second] } = self;
        let name = Escaped(name);
        write!(f, "the pairs cannot be merged: ")?;
        match conflict {
            Conflict::Tensor => write!(f, "tensor {name} is in two pairs"),
            Conflict::Type => write!(f, "tensor {name} has two types"),
            Conflict::Cuts => write!(f, "tensor {name} has parts that do not nest"),
            Conflict::Base => write!(f, "base tensor {name} differs"),
            Conflict::File if self.name.is_empty() => write!(f, "the files differ"),
            Conflict::File => write!(f, "file {name} differs"),
        }?;
        let (first, second) = (Escaped(first), Escaped(second));
        write!(f, ": {} in {first}, {} in {second}", Text(in_first), Text(in_second))
    }
}

impl core::error::Error for NotMergeable {}

/// The kind of a [`NotMergeable`] contradiction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// Both pairs have the tensor, or have parts of it that overlap.
    Tensor,
    /// The pairs state different dtypes or shapes for the tensor.
    Type,
    /// Parts of the tensor are disjoint, but are not in the order that the format requires (section 8.4).
    Cuts,
    /// The pairs state different digests, dtypes or shapes for the base tensor: they were made from different bases. Or they use
    /// different base tensors for parts of one tensor.
    Base,
    /// The files of the pairs cannot be those of one target.
    File,
}

impl Conflict {
    /// The name that JSON uses.
    pub const fn name(self) -> &'static str {
        match self {
            Conflict::Tensor => "tensor",
            Conflict::Type => "type",
            Conflict::Cuts => "cuts",
            Conflict::Base => "base",
            Conflict::File => "file",
        }
    }
}
