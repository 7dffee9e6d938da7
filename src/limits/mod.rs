//! **limits**: bounds on calls in flight, on concurrent large reads of etcd, and on buffered bytes.
//!
//! | file | bound |
//! |---|---|
//! | `admission` | calls in flight (`--max-calls`) |
//! | `turns` | large reads that call etcd at once (`--forward-max-large`), reads that wait (`--forward-max-waiting`) |
//! | `byte_budget` | buffered bytes of several responses |

mod admission;
mod byte_budget;
mod turns;

pub use admission::Admission;
pub use byte_budget::{BudgetExceeded, ByteBudget, HeldBytes};
pub use turns::{NoTurn, Turn, Turns, Waiting};
