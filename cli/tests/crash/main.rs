//! Publication under crashes and faults: whatever dies or fails, and wherever, what is left is the old, the new, or refused.
//!
//! `strace` stops the real command at each of its system calls on files, or makes the call fail.

#[allow(dead_code, unused_imports, reason = "other tests use more of it")]
#[path = "../common/mod.rs"]
mod common;

mod ends;
mod everywhere;
mod order;
mod readers;
mod scenario;
mod trace;
