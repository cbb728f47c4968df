//! Publication under crashes and faults: after any crash or failure, at any point, a reader sees the old state or the new state, or
//! refuses what it finds.
//!
//! `strace` kills the real command at each of its system calls on files, or makes the call fail.

#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
#[path = "../common/mod.rs"]
mod common;

mod courtesies;
mod ends;
mod everywhere;
mod order;
mod readers;
mod scenario;
mod stores;
mod trace;
