//! Range and RangeStream: **plan**, **prove** and **answer** from memory; other reads are passed to `fallback`.
//!
//! A read enters these files in this order:
//!
//! | file | what it does |
//! |---|---|
//! | `serve` | serves a read in any wire format: calls what follows |
//! | `grpc` | the formats of KV/Range and KV/RangeStream: receive, and get the response from etcd by way of `fallback` |
//! | `json` | the format of `/v3/kv/range` of the JSON gateway |
//! | `decide` | has the read planned, and chooses the attempt |
//! | `plan` | decides what must be proven; a pure function |
//! | `leaf` | answers the checks of rangecaches whose endpoint this process is |
//! | `attempt` | waits for the quorum check and for the mirror |
//! | `authorize` | has etcd check the caller's permission to read the range |
//! | `answer` | selects the entries of the response from a proven view |
//! | `scan` | looks at every entry of a range, for filtered and sorted reads |
//! | `stale` | answers from the last view while no member of etcd answers |
//! | `body` | produces the bytes of responses from memory as the client reads |

mod answer;
mod attempt;
mod authorize;
mod body;
mod decide;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) mod fuzzing;
mod grpc;
mod json;
mod leaf;
mod plan;
mod scan;
mod serve;
mod stale;

pub(super) use grpc::{Streaming, Unary};
pub(super) use json::{Json, is_json_range};
pub(super) use leaf::answer_leaf_health;
pub(super) use serve::serve;
