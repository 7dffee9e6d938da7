//! etcd's endpoints: connections, versions, and the choice of a connection for each call.
//!
//! | file | subject |
//! |---|---|
//! | `pool` | [`Upstream`]: all endpoints; picks the least busy live connection of a [`ConnectionClass`] |
//! | `list` | the endpoints that are used, and their changes |
//! | `srv` | endpoints from DNS |
//! | `sync` | members of the cluster as endpoints |
//! | `endpoint` | one endpoint: connections opened again when lost, version, health |
//! | `health` | the calls that find out a member's health |
//! | `connection` | one HTTP/2 connection: calls on it, what is known of its peer |
//! | `standing` | what a connection stands for: which history, since when; the rangecaches behind it |
//! | `opening`, `channel`, `member_status` | how a connection is opened; a connection for tonic's clients; the status of its member |
//! | `transport`, `upstream_body` | either client of a connection; bodies of responses |
//! | `unary` | the message of a unary response of `lean_h2`, the client of quorum checks and short calls |
//! | `clusters` | the cluster that is used, if the endpoints lead to several |
//! | `credentials`, `authentication` | rangecache's own user and its token |
//! | `calls` | small calls that rangecache makes itself |
//! | [`gates`] | the list of version gates |
//! | `capabilities`, `version`, `role`, `class` | known properties of a server; versions and roles; classes of connections |
//! | `flags` | the flags |
//! | `metrics` | state of the endpoints as gauges |
//! | `outgoing`, `backoff`, `timeouts`, `error` | request bodies, pauses between attempts, waits for silent peers, errors |
//!
//! Feeds and loads open a connection of their own (I9). This room knows nothing of mirrors or clients' requests;
//! `mirror`, `proxy`, `admin`, `diagnosis` and `doctor` use it.

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
mod error;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod flags;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub use lean_h2::fuzzing;
pub mod gates;
mod health;
mod list;
mod member_status;
mod metrics;
mod opening;
mod outgoing;
mod paging;
mod pool;
mod role;
mod srv;
mod standing;
mod sync;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod timeouts;
mod transport;
mod unary;
mod upstream_body;
mod version;
mod window;

pub use authentication::authenticate_once;
pub use backoff::{Backoff, jittered};
pub use calls::{
    MAX_MESSAGE_BYTES, anonymous_check, caller_identity, check_read_permission, compact_revision,
    header_request, is_check_key, is_compacted, is_compaction, is_future_revision, is_refusal, is_serving,
    is_too_large, members, range,
};
pub use capabilities::NoRangeStream;
pub use channel::Channel;
pub use class::ConnectionClass;
pub use clusters::ClusterOfEndpoint;
pub use connection::{Connection, InFlight, SendFailure};
pub use credentials::{Credentials, UserProblem};
pub use endpoint::{EndpointSource, EndpointView};
pub use error::{ConnectError, NoEndpoint};
pub use flags::{
    Account, AccountError, CallerIs, CallerIsError, EtcdConfig, OldEtcd, RangeStream, Secret, WritesTo,
};
pub use lean_h2::MAX_SHORT_BYTES;
pub use opening::open_once;
pub use outgoing::{BoxError, LimitCovers, MessageLimit, Outgoing};
pub use paging::{first_page_limit, pace, page_limit};
pub use pool::Upstream;
pub use role::Role;
pub use srv::{SrvError, follow_srv};
pub use standing::{EndpointPeer, Lineage, Standing, proven_header};
pub use sync::follow_members;
pub use upstream_body::{UpstreamBody, is_reset};
pub use version::Version;
pub use window::ReceiveWindow;
