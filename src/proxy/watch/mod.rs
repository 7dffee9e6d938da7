//! Watch streams from memory.
//!
//! | file | what it does |
//! |---|---|
//! | `request` | decodes the client's messages, allocates the ids of watchers |
//! | `plan` | decides how one create request is answered; a pure function |

#![expect(dead_code, reason = "the stream that uses these pieces follows")]

mod plan;
mod request;
