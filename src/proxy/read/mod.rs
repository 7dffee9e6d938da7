//! Range and RangeStream: **plan**, **prove** and **answer** from memory; other reads are passed to `fallback`.
//!
//! | file | what it does |
//! |---|---|
//! | `receive` | reads and decodes the request of either method |
//! | `plan` | decides what must be proven; a pure function |
//! | `decide` | executes the plan: quorum check, wait for the mirror |
//! | `authorize` | has etcd check the caller's permission to read the range |
//! | `past` | answers a read at a past revision with the header of its check |
//! | `stale` | answers from the last view while no member of etcd answers |
//! | `answer` | selects the entries of the response from a proven view |
//! | `unary`, `streaming` | build the response of KV/Range and of KV/RangeStream, or call `fetch` |
//! | `shadow` | compares etcd's responses with memory's (`--shadow`) |
//! | `json` | `/v3/kv/range` of the JSON gateway |
//! | `fetch` | gets the response from etcd by way of `fallback` |
//! | `body` | produces the bytes of responses from memory as the client reads |

mod answer;
mod authorize;
mod body;
mod decide;
mod fetch;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzzing;
mod json;
mod past;
mod plan;
mod receive;
mod shadow;
mod stale;
mod streaming;
mod unary;

pub(super) use json::{is_json_range, json_range};
pub(super) use streaming::range_stream;
pub(super) use unary::range;
