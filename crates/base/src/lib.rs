//! Foundation of every room of rangecache.
//!
//! | module | what it is for |
//! |---|---|
//! | [`telemetry`] | metrics, logs, traces |
//! | [`flags`] | parsers that flags of all rooms share; flags that a reload replaces |
//! | [`http_request`] | one request over HTTP/1 |
//! | [`net`] | URLs, and the byte streams of both sides |
//! | [`instance`] | identity of the process towards other rangecaches |
//! | [`memory`] | the memory limit of the container |
//! | [`panics`], [`faults`] | isolation of panics; faults that tests inject |
//! | [`blocking`] | work that waits for the disk |
//! | [`simulated`] | connections within the process, for tests |
//! | [`unix_time`] | wall-clock time |
//! | [`wake_gated`] | futures that are polled only once they were woken |

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod blocking;
pub mod faults;
pub mod flags;
pub mod http_request;
pub mod instance;
pub mod memory;
pub mod net;
pub mod panics;
pub mod simulated;
pub mod telemetry;
pub mod unix_time;
pub mod wake_gated;
