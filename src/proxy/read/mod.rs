//! Range and RangeStream: **plan**, **prove** and **answer** from memory, or hand over to `fallback`.
//!
//! | file | what it does |
//! |---|---|
//! | `receive` | reads the request, for both methods |
//! | `plan` | decides what must be proven; pure |
//! | `decide` | carries the plan out: quorum check, wait for the mirror |
//! | `authorize` | proves a client's rights by etcd's own check |
//! | `answer` | selects the entries |
//! | `unary`, `streaming` | write the response, or hand over |
//! | `body` | produces responses from memory as the client reads |

mod answer;
mod authorize;
mod body;
mod decide;
mod plan;
mod receive;
mod streaming;
mod unary;

pub(super) use streaming::range_stream;
pub(super) use unary::range;
