//! gRPC and etcd's methods as they appear on the wire: paths, framing, metadata, statuses, and scanners that read response
//! messages as their bytes pass through.
//!
//! This room imports `protobuf` only (generated messages excepted). `server`, `upstream` and `proxy` use it.

pub mod frame;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;
pub mod hub;
mod json_scan;
pub mod metadata;
pub mod method;
mod range_scan;
mod scan;
pub mod status;

pub use hub::set_history;
pub use json_scan::JsonHeaderScanner;
pub use metadata::{CallMetadata, InvalidBounds, ReadBounds};
pub use method::{
    HEALTH_CHECK, MEMBER_LIST, Method, SideEffect, WATCH, http_route, is_costly, is_json_member_list,
    is_json_of, is_read_only,
};
pub use range_scan::{MalformedResponse, RangeResponseScanner, ResponseSummary};
pub use scan::{EventScanner, HeaderScanner, Scanned, written};
pub use status::Status;
