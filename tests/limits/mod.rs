//! Bounds on memory, connections and calls to etcd: budgets, large responses, series of pages.

mod admin;
mod budgets;
mod buffers;
mod connections;
mod exhaustion;
mod http1;
mod large;
mod memory;
mod scans;
mod series;
mod shares;
mod small;
mod unread;
mod watches;
mod websockets;
