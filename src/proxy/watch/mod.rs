//! Watch streams from memory.
//!
//! | file | what it does |
//! |---|---|
//! | `request` | decodes the client's messages, allocates the ids of watchers |
//! | `plan` | decides how one create request is answered; a pure function |
//! | `relay` | one stream while etcd serves it |
//! | `tap` | the beginnings of etcd's responses |
//! | `handover` | watchers that continue at the other source |

#![expect(dead_code, reason = "the stream that uses these pieces follows")]

mod handover;
mod plan;
mod relay;
mod request;
mod tap;
