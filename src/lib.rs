//! rangecache: a transparent caching gRPC proxy in front of etcd.
//!
//! | room | what it is for |
//! |---|---|
//! | [`cli`] | sub-commands and their arguments |
//! | [`serve`] | boot sequence: files, sockets, assembly, and the three stages of a stop |
//! | [`diagnosis`] | findings, severities and remedies for operators |
//! | [`doctor`] | report about an etcd before rangecache is deployed |
//! | [`static_pod`] | manifest of a static pod, written into the kubelet's folder |
//! | [`report`] | output of commands |
//! | [`running`] | commands that ask a rangecache that runs |
//! | [`otlp`] | export of spans to a collector |
//! | [`admin`] | health, readiness and metrics over HTTP |

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod admin;
pub mod cli;
pub mod diagnosis;
pub mod diff;
pub mod doctor;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod otlp;
pub mod reload;
pub mod report;
pub mod running;
pub mod serve;
pub mod static_pod;
