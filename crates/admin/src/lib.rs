//! HTTP for operators and probes: `/livez`, `/readyz`, `/servez`, `/metrics`, the page at `/`, its data as JSON at `/status`, and
//! all clients as JSON at `/clients`. `POST /reload` reloads the flags.
//!
//! | file | subject |
//! |---|---|
//! | `server` | [`Admin`]: paths, and requests that change the process |
//! | `responses` | headers of responses, and their compression |
//! | `handles` | handles to the rooms whose state responses report |
//! | `memory` | memory of mirrors, in figures and words |
//! | `metrics` | metrics of this room, and those of others that the pages show |
//! | `renderings` | bounds on requests and pages: how many per second, and their memory until they are read |
//! | `prefixes` | prefixes of the mirrored keys that cost most |
//! | `process` | figures of the process: CPU time, memory, descriptors |
//! | `readiness` | readiness, and its text |
//! | `status/` | the data of the page: `model` (types), `reads`, `samples` (the last 15 minutes) |
//! | `checks` | findings, gates and used bounds |
//! | `symptoms` | what exported series have shown over time |
//! | `page/` | the data as HTML; charts as SVG; style and script |
//!
//! This room imports `proxy` (its metrics), `mirror`, `upstream`, `server`, `limits`, `tls`, `report`, `telemetry` and
//! `config`; only `serve` imports it.
//! No response waits for a mirror or delays one.

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod checks;
mod handles;
mod memory;
mod metrics;
mod page;
mod prefixes;
mod process;
mod readiness;
mod renderings;
mod responses;
mod server;
mod status;
mod symptoms;

pub use server::Admin;
