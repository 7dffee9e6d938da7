//! Tests of the running binary in front of a real etcd. One program, so that what they share is compiled once, and one suite's slow
//! tests do not keep the next one waiting.
//!
//! A test that is ignored as `nightly` repeats another one on an older etcd; `make nightly` runs them all.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test fails by a panic and reports by printing"
)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::large_futures,
    unreachable_pub,
    reason = "small numbers, no load, and one crate"
)]

mod contract;
mod limits;
mod mirror;
mod operate;
