//! Bounds on memory, connections and calls to etcd: budgets, large responses, series of pages.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::large_futures,
    unreachable_pub,
    reason = "small numbers, no load, and one crate"
)]

mod admin;
mod budgets;
mod buffers;
mod connections;
mod exhaustion;
mod http1;
mod large;
mod memory;
mod series;
mod shares;
mod small;
mod unread;
mod watches;
mod websockets;
