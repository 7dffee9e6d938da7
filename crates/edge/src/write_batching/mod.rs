//! Write batching: frames that become ready together leave in one write. Each write is a system call and a wake-up of the
//! peer.
//!
//! | file | subject |
//! |---|---|
//! | `buffer` | collects what one poll of a connection writes |
//! | `responses` | server: a connection is polled once the calls that were woken together have their responses |
//! | `requests` | client: a connection writes once the bodies of the requests that it has begun are there, too |
//!
//! A leaf; `server` and `upstream` use it.

mod buffer;
mod requests;
mod responses;

pub use buffer::{Collecting, Room, WriteBuffer, write_buffer};
pub use requests::{PING_ACK_DELAY, RequestBatching};
pub use responses::batch_responses;
