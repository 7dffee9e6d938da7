//! Findings about rangecache and etcd, and the words for them: one wording for the page, `/readyz` and `doctor`.
//!
//! | file | subject |
//! |---|---|
//! | `ids` | every finding that there can be: its id, severities, meaning, remedy and alerts |
//! | `finding` | a finding with its texts, and those that both the page and `doctor` report |
//! | [`output`] | output of commands |
//! | [`reasons`] | outcomes and reasons of reads in words |
//! | [`format`](mod@format) | numbers, bytes and durations for people |
//!
//! This room computes nothing itself and does no I/O. It imports `telemetry` (outcomes and reasons) and `upstream`
//! (gates); `admin` and `doctor` import it.

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod finding;
pub mod format;
mod ids;
pub mod output;
pub mod reasons;

pub use finding::{
    Finding, budget_above_memory, different_clusters, judge_gate, no_own_user, user_problem, version_unknown,
    write_finding,
};
pub use ids::{Area, FindingId, ReportedBy, Severity};
