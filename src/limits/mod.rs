//! Bounds on what calls may use: calls in flight, large reads at etcd, bytes buffered.
//!
//! `admission` refuses calls beyond `--max-calls`, `turns` lets a few large reads call etcd at once, `byte_budget` bounds the
//! bytes that responses hold. This room imports `telemetry` alone; `proxy` uses it.

mod admission;
mod byte_budget;
mod turns;

pub use admission::Admission;
pub use byte_budget::{BudgetExceeded, ByteBudget, HeldBytes};
pub use turns::{NoTurn, Turn, Turns, Waiting};
