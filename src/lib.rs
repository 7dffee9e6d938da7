//! rangecache: a transparent caching gRPC proxy in front of etcd.
//!
//! | room | what it is for |
//! |---|---|
//! | [`cli`] | sub-commands and their arguments |
//! | [`serve`] | boot sequence: files, sockets, assembly, and the three stages of a stop |
//! | [`otlp`] | export of spans to a collector |

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod cli;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod otlp;
pub mod reload;
pub mod serve;
