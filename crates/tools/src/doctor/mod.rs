//! `rangecache doctor`: examines an etcd, and reports what rangecache with the same flags would do with it.
//!
//! | file | subject |
//! |---|---|
//! | `model` | results: findings, figures by prefix and by resource, the exit code; the report for scripts |
//! | `render` | the report for people |
//! | `members` | endpoints: connections, health, status, quorum; paced calls |
//! | `cluster` | gates, members that are not named, alarms |
//! | `identity` | auth, and the permissions of rangecache's own user |
//! | `certificates` | certificates of both sides and their validity |
//! | `keyspace` | number of keys under each prefix, found with few and cheap calls |
//! | `size_estimate` | sizes of keys, from samples or from all of them |
//! | `verdict` | what would be mirrored, in how much memory, and which requests benefit |
//!
//! No connection is kept and no mirror is started. Each call has a timeout, and reads of many keys are paced. This
//! room imports `config`, `upstream`, `tls`, `keyspace`, `cache` (for the size of entries), `report` and
//! `telemetry`; only `main` and `static_pod` import it.

mod certificates;
mod cluster;
mod identity;
mod keyspace;
mod members;
mod model;
mod render;
mod size_estimate;
#[cfg(test)]
mod testing;
mod verdict;
mod watches;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use tokio_util::task::TaskTracker;

use model::Report;
use rangecache_base::telemetry::Metrics;
use rangecache_config::Config;
use rangecache_report::FindingId;
use rangecache_report::output::ReportFormat;
use rangecache_upstream::Credentials;

/// Flags of `rangecache doctor`.
#[derive(Args, Debug, Clone)]
pub struct DoctorConfig {
    /// The flags of `serve`.
    #[command(flatten)]
    pub config: Config,

    /// Form of the report
    ///
    /// When to change it: `json` for scripts
    #[arg(
        long,
        value_name = "FORMAT",
        value_enum,
        default_value = "text",
        help_heading = "Report"
    )]
    pub output: ReportFormat,

    /// Measure every key instead of a sample: reads the whole keyspace once, at 32 MiB/s
    ///
    /// When to change it: samples are not precise enough
    #[arg(long, help_heading = "Report")]
    pub deep: bool,
}

/// Examines etcd, prints the report, and returns the report's exit code. The flags are valid. Nothing is logged: failures are in the report.
#[must_use]
pub fn run(options: &DoctorConfig) -> ExitCode {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    let report = runtime.block_on(examine(options));
    let text = |style| report.to_text(style);
    options.output.print(report.exit_code(), text, &report)
}

/// Examines everything. A step whose prerequisites are missing is skipped.
pub(crate) async fn examine(options: &DoctorConfig) -> Report {
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        ..Report::default()
    };
    if let Err((id, error)) = examine_into(&mut report, options).await {
        report.find(id, error);
    }
    report
}

/// Adds everything to the report.
///
/// # Errors
/// What rangecache would not start with, or the first step cannot do without.
async fn examine_into(report: &mut Report, options: &DoctorConfig) -> Result<(), (FindingId, String)> {
    let mut config = options.config.clone();
    let discovered = config.etcd.discover().await;
    discovered.map_err(|error| (FindingId::EtcdUnreachable, error.to_string()))?;
    let config = &config;
    certificates::examine_files(config, report);
    // Throwaway registry; these metrics are discarded.
    let metrics = Arc::new(Metrics::new());
    if let Err(error) = config.acceptor(&metrics) {
        report.find(FindingId::CertificateUnusable, error.to_string());
    }
    let connector = config.connector(&metrics);
    let connector = connector.map_err(|error| (FindingId::CertificateUnusable, error.to_string()))?;
    let credentials = Credentials::open(&config.etcd, &connector);
    let credentials = credentials.map_err(|error| (FindingId::UserUnusable, error.to_string()))?;
    let tasks = TaskTracker::new();
    let mut members = members::connect(config, &connector, &credentials, &tasks).await;
    certificates::examine_members(&members, &connector, report).await;
    let quorum = members::check_quorum(&members, report).await;
    let auth = identity::examine(config, &connector, &credentials, &members, &quorum, report).await;
    members::read_status(&mut members).await;
    cluster::examine(config, &members, &auth, report).await;
    let keyspace = match (auth.may_read_keys(), members::best(&members)) {
        (true, Some(member)) if quorum.auth_is_on.is_some() => {
            keyspace::examine(config, options.deep, member, &auth, report).await
        }
        _ => None,
    };
    watches::examine(config, &connector, &members, report).await;
    verdict::conclude(config, &quorum, keyspace.as_ref(), report);
    report.keyspace = keyspace;
    report.endpoints = members::facts(&members);
    Ok(())
}
