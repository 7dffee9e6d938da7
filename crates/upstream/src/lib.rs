//! etcd's endpoints: connections, versions, and the choice of a connection for each call.
//!
//! | file | subject |
//! |---|---|
//! | `pool` | [`Upstream`]: all endpoints; picks the least busy live connection of a [`ConnectionClass`] |
//! | `list` | the endpoints that are used, their changes, and their state as gauges |
//! | `srv` | endpoints from DNS |
//! | `sync` | members of the cluster as endpoints |
//! | `endpoint` | one endpoint: connections opened again when lost, version, health |
//! | `connection` | one HTTP/2 connection: calls on it, what is known of its peer |
//! | `standing` | what a connection stands for: which history, since when; the rangecaches behind it |
//! | `opening`, `channel` | how a connection is opened; a connection for tonic's clients |
//! | `transport` | either client of a connection, and errors of connecting |
//! | `upstream_body` | bodies of responses of both; the message of a unary one of `lean_h2`, the client of quorum checks and short calls |
//! | `clusters` | the cluster that is used, if the endpoints lead to several |
//! | `credentials`, `authentication` | rangecache's own user and its token |
//! | `calls` | small calls that rangecache makes itself |
//! | `health` | the status and the health of the member behind a connection |
//! | [`gates`] | versions, and the list of version gates |
//! | `capabilities` | known properties of a server, and roles of members |
//! | `class` | classes of connections, their windows and timeouts |
//! | `flags` | the flags |
//! | `outgoing`, `backoff` | request bodies, pauses between attempts |
//!
//! Feeds and loads open a connection of their own (I9). This room knows nothing of mirrors or clients' requests;
//! `mirror`, `proxy`, `admin`, `report` and `doctor` use it.

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod authentication;
mod backoff;
mod calls;
mod capabilities;
mod channel;
mod class;
mod clusters;
mod connection;
mod credentials;
mod endpoint;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod flags;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub use lean_h2::fuzzing;
pub mod gates;
mod health;
mod list;
mod opening;
mod outgoing;
mod paging;
mod pool;
mod srv;
mod standing;
mod sync;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod transport;
mod upstream_body;

pub use lean_h2::MAX_SHORT_BYTES;

pub use authentication::authenticate_once;
pub use backoff::{Backoff, jittered};
pub use calls::{
    MAX_MESSAGE_BYTES, anonymous_check, caller_identity, check_read_permission, compact_revision,
    header_request, is_check_key, is_compacted, is_compaction, is_future_revision, is_refusal, is_serving,
    is_too_large, members, range,
};
pub use capabilities::{NoRangeStream, Role};
pub use channel::Channel;
pub use class::{ConnectionClass, ReceiveWindow};
pub use clusters::ClusterOfEndpoint;
pub use connection::{Connection, InFlight, SendFailure};
pub use credentials::{Credentials, UserProblem};
pub use endpoint::{EndpointSource, EndpointView};
pub use flags::{
    Account, AccountError, CallerIs, CallerIsError, EtcdConfig, OldEtcd, RangeStream, Secret, WritesTo,
};
pub use gates::Version;
pub use opening::open_once;
pub use outgoing::{BoxError, LimitCovers, MessageLimit, Outgoing};
pub use paging::{first_page_limit, pace, page_limit, pause_after};
pub use pool::Upstream;
pub use srv::{SrvError, follow_srv};
pub use standing::{EndpointPeer, Lineage, Standing, proven_header};
pub use sync::follow_members;
pub use transport::{ConnectError, NoEndpoint};
pub use upstream_body::{UpstreamBody, is_reset};
