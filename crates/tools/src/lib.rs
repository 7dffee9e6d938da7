//! Commands beside serving.
//!
//! | room | what it is for |
//! |---|---|
//! | [`doctor`] | report about an etcd before rangecache is deployed |
//! | [`diff`] | comparison of two endpoints at one revision |
//! | [`running`] | commands that ask a rangecache that runs: `status`, `health`, `ctl` |
//! | [`static_pod`] | manifest of a static pod, written into the kubelet's folder |

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod diff;
pub mod doctor;
pub mod running;
pub mod static_pod;
