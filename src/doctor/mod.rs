//! `rangecache doctor`: looks at an etcd, and says what rangecache would make of it with the same flags.
//!
//! | file | subject |
//! |---|---|
//! | `report` | what was found: findings, figures, the exit code |
//! | `text`, `json` | the report for people and for scripts |
//! | `members` | the endpoints: connections, health, versions, quorum |
//! | `cluster` | what they are together: gates, members, alarms |
//! | `identity` | auth, and the rights of rangecache's own user |
//! | `certificates` | what both sides show, and until when |
//! | `keyspace` | how many keys there are under which prefix, found with few and cheap calls |
//! | `weigh` | what they weigh: samples, or all of them |
//! | `prospects` | what would be cached, in how much memory, and who gains |
//!
//! It keeps no connection and starts no mirror. Each call has a deadline, and what reads many keys is paced. It uses
//! `config`, `upstream`, `tls`, `cache` (to weigh entries) and the `mirror` room's scopes and questions to etcd; only `main` uses it.

mod certificates;
mod cluster;
mod identity;
mod json;
mod keyspace;
mod members;
mod prospects;
mod report;
mod text;
mod weigh;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::TaskTracker;

pub use report::{Area, Finding, Level, Report};
pub use text::Style;

use crate::config::DoctorConfig;
use crate::telemetry::Metrics;
use crate::tls::{Acceptor, Connector};
use crate::upstream::Credentials;

/// What comes of files and users that cannot be used.
const NO_START: &str = "rangecache does not start with it";
/// Bound on each call, and on each attempt to connect.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Looks at everything. Where something is missing that later looks need, these are left out.
pub async fn examine(options: &DoctorConfig) -> Report {
    let config = &options.config;
    let mut report = Report::default();
    certificates::ours(config, &mut report);
    // A registry of our own: what the rooms count while we look is nobody's.
    let metrics = Arc::new(Metrics::new());
    if let Err(error) = Acceptor::open(config, &metrics) {
        report.bad(Area::Certificates, error.to_string(), NO_START);
    }
    let connector = match Connector::open(config, &metrics) {
        Ok(connector) => connector,
        Err(error) => {
            report.bad(Area::Certificates, error.to_string(), NO_START);
            return report;
        }
    };
    let account = match config.etcd.account() {
        Ok(account) => account,
        Err(error) => {
            report.bad(Area::Auth, error.to_string(), NO_START);
            return report;
        }
    };
    let credentials = Credentials::new(account);
    let tasks = TaskTracker::new();
    let mut members = members::connect(config, &connector, &credentials, &tasks).await;
    certificates::theirs(&members, &connector, &mut report).await;
    let quorum = members::quorum(&members, &mut report).await;
    let auth = identity::look(config, &connector, &credentials, &members, &quorum, &mut report).await;
    members::ask_status(&mut members).await;
    cluster::judge(config, &members, &auth, &mut report).await;
    let found = match (auth.may_read(), members::best(&members)) {
        (true, Some(member)) if quorum.auth.is_some() => {
            keyspace::look(config, options.deep, member, &auth.readable, &mut report).await
        }
        _ => None,
    };
    prospects::judge(config, &quorum, found.as_ref(), &mut report);
    report.keyspace = found;
    report.endpoints = members::described(&members);
    report
}
