//! Tests of the public interface of the library, in one program: each program would compile the library's generic code anew.

#[allow(dead_code, reason = "other packages' tests use more of it")]
#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "fuzz targets use more of it")]
#[path = "../../fuzz/src/sign.rs"]
mod sign;

mod builders;
mod chains;
mod chains_in_place;
mod damage;
mod decisions;
mod derived;
mod documents;
mod encoded;
mod explain;
mod files;
mod floats;
mod hints;
mod layouts;
#[cfg(feature = "mmap")]
mod mapped;
mod merge;
mod merge_parts;
mod models;
mod names;
mod oracle;
mod parts;
mod properties;
mod ranks;
mod refused;
mod reports;
mod slices;
mod smallest;
mod unreadable;
mod vectors;
mod writable;
