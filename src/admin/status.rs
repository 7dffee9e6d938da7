//! All that the page shows, as data: what `/status` sends as JSON. Gathered from gauges and counters, without a lock that a
//! mirror or a read ever waits for.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};
use tokio::time::Instant;

use super::Admin;
use super::advice::Group;
use super::budgets::{Budget, budgets};
use super::findings::{self, Finding, Seen};
use super::gates::{Gate, gates};
use super::recent::{Counts, INTERVAL, Sample};
use super::slowest::Slow;
use crate::mirror::state;
use crate::telemetry::outcome::Outcome;
use crate::telemetry::{Metrics, Reason};
use crate::upstream::{EndpointView, NoRangeStream, Role};

/// What rates are made of.
const RATE_WINDOW: Duration = Duration::from_secs(60);

/// See the module. Fields may be added.
#[derive(Debug, Serialize)]
pub(super) struct Status {
    /// rangecache's.
    pub(super) version: &'static str,
    /// UTC, RFC 3339.
    pub(super) at: String,
    pub(super) uptime_seconds: u64,
    /// As `/readyz` says.
    pub(super) ready: bool,
    /// What is wrong, the worst first.
    pub(super) findings: Vec<Finding>,
    pub(super) reads: Reads,
    /// Of the last minutes, the slowest first.
    pub(super) slowest: Vec<Slow>,
    pub(super) mirrors: Vec<Mirror>,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) gates: Vec<Gate>,
    pub(super) budgets: Vec<Budget>,
    pub(super) samples: Samples,
}

/// Ranges and RangeStreams.
#[derive(Debug, Serialize)]
pub(super) struct Reads {
    pub(super) since_start: u64,
    /// In the last minute.
    pub(super) per_second: f64,
    /// Calls that are no reads, in the last minute.
    pub(super) other_calls_per_second: f64,
    /// Events that mirrors applied, in the last minute.
    pub(super) events_per_second: f64,
    /// In the last minute.
    pub(super) quorum_checks_per_second: f64,
    /// In the last minute; none if there were no checks.
    pub(super) per_quorum_check: Option<f64>,
    /// What follows is of so many seconds: fifteen minutes, or since the start.
    pub(super) window_seconds: f64,
    /// Of those that were answered at all, by memory; none if there were none.
    pub(super) memory_ratio: Option<f64>,
    /// The most frequent first.
    pub(super) outcomes: Vec<Ended>,
}

/// Reads that ended alike.
#[derive(Debug, Serialize)]
pub(super) struct Ended {
    #[serde(flatten, serialize_with = "labels")]
    pub(super) outcome: Outcome,
    pub(super) count: u64,
}

/// One mirror.
#[derive(Debug, Serialize)]
pub(super) struct Mirror {
    /// Made of the operator's prefixes.
    pub(super) name: String,
    /// Why it is out of service; none while it is in.
    #[serde(rename = "out_of_service", serialize_with = "label")]
    pub(super) reason: Option<Reason>,
    /// Up to which it has every event; none while it is out of service.
    pub(super) revision: Option<i64>,
    /// Revisions that etcd is known to be ahead.
    pub(super) lag_revisions: Option<i64>,
    /// Of the past, that can be read.
    pub(super) oldest_revision: Option<i64>,
    pub(super) keys: u64,
    /// History included.
    pub(super) memory_bytes: u64,
    pub(super) history_bytes: u64,
    /// By the load that is under way, or the last one.
    pub(super) load_keys: u64,
    pub(super) load_bytes: u64,
    pub(super) events: u64,
    /// Found by verification.
    pub(super) mismatches: u64,
    /// Its past, the oldest first.
    pub(super) timeline: Vec<Stretch>,
}

/// Samples in a row at which a mirror was the same.
#[derive(Debug, Serialize)]
pub(super) struct Stretch {
    #[serde(rename = "out_of_service", serialize_with = "label")]
    pub(super) reason: Option<Reason>,
    pub(super) samples: usize,
}

/// One endpoint of etcd.
#[derive(Debug, Serialize)]
pub(super) struct Endpoint {
    pub(super) url: String,
    pub(super) version: Option<String>,
    /// `leader`, `follower`, `learner`, `no_leader` or `unknown`.
    pub(super) role: &'static str,
    pub(super) is_connected: bool,
    /// It serves, votes and knows a leader.
    pub(super) is_healthy: bool,
    /// Calls failed on it a moment ago.
    pub(super) is_avoided: bool,
    pub(super) connections: usize,
    pub(super) connections_wanted: usize,
    pub(super) calls: usize,
    /// Of its last lost or refused connection.
    pub(super) last_error: String,
    /// Why RangeStream is not used on it.
    pub(super) no_range_stream: Option<&'static str>,
}

/// The last fifteen minutes, the oldest first. The last sample is under way; each of the others spans `interval_seconds`, or
/// more where the machine slept.
#[derive(Debug, Serialize)]
pub(super) struct Samples {
    pub(super) interval_seconds: u64,
    pub(super) reads_from_memory: Vec<u64>,
    pub(super) reads_after_a_wait: Vec<u64>,
    pub(super) reads_by_etcd: Vec<u64>,
    pub(super) reads_refused_or_gone: Vec<u64>,
    pub(super) other_calls: Vec<u64>,
    pub(super) events: Vec<u64>,
    pub(super) quorum_checks: Vec<u64>,
    /// For charts.
    #[serde(skip)]
    pub(super) all: Vec<Arc<Sample>>,
}

fn label<S: Serializer>(reason: &Option<Reason>, serializer: S) -> Result<S::Ok, S::Error> {
    reason.map(Reason::as_str).serialize(serializer)
}

/// `outcome` and `reason`, as in the metrics.
pub(super) fn labels<S: Serializer>(outcome: &Outcome, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Labels {
        outcome: &'static str,
        reason: &'static str,
    }
    let (outcome, reason) = outcome.labels();
    Labels { outcome, reason }.serialize(serializer)
}

impl Status {
    pub(super) fn of(admin: &Admin) -> Status {
        let now = Instant::now();
        let counts = Counts::now(&admin.telemetry.metrics, &admin.mirrors);
        let all = admin.recent.samples(now, &counts);
        let cluster_state = &admin.mirrors.cluster_state;
        let views = admin.upstream.endpoints();
        let endpoints: Vec<_> = views.iter().map(Endpoint::of).collect();
        let mirrors: Vec<_> = admin
            .mirrors
            .all()
            .iter()
            .enumerate()
            .map(|(index, mirror)| {
                let timeline = timeline(&all, index);
                Mirror::of(mirror, cluster_state.known(), &admin.telemetry.metrics, timeline)
            })
            .collect();
        let budgets = budgets(admin, &mirrors);
        let reads = Reads::of(&counts, &all);
        let version = admin.upstream.lowest_version();
        let credentials = admin.upstream.credentials();
        let shed = |ended: &&Ended| matches!(ended.outcome, Outcome::Shed(_));
        let findings = findings::find(&Seen {
            draining: admin.draining.is_cancelled(),
            mirrors: &mirrors,
            endpoints: &endpoints,
            budgets: &budgets,
            version,
            auth: cluster_state.auth(),
            has_own_user: credentials.is_configured(),
            user_problem: credentials.problem().map(|problem| problem.to_string()),
            panics: admin.telemetry.metrics.process.panics.get(),
            shed: reads.outcomes.iter().filter(shed).map(|ended| ended.count).sum(),
        });
        Status {
            version: env!("CARGO_PKG_VERSION"),
            at: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            uptime_seconds: now.duration_since(admin.started).as_secs(),
            ready: admin.ready(),
            findings,
            reads,
            slowest: Slow::list(&admin.telemetry.slowest.list()),
            mirrors,
            gates: gates(
                version,
                cluster_state.auth(),
                credentials.is_configured(),
                &views,
                &admin.telemetry.metrics,
            ),
            endpoints,
            budgets,
            samples: Samples::of(all),
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "ratios and rates show magnitudes")]
impl Reads {
    fn of(counts: &Counts, samples: &[Arc<Sample>]) -> Reads {
        let mut outcomes: Vec<_> = Outcome::all()
            .map(|outcome| Ended {
                outcome,
                count: samples.iter().map(|sample| sample.added.of(outcome)).sum(),
            })
            .filter(|ended| ended.count > 0)
            .collect();
        outcomes.sort_by_key(|ended| std::cmp::Reverse(ended.count));
        let of = |groups: &[Group]| -> u64 {
            let counted = outcomes
                .iter()
                .filter(|ended| groups.contains(&Group::of(ended.outcome)));
            counted.map(|ended| ended.count).sum()
        };
        let memory = of(&[Group::Memory, Group::Waited]);
        let answered = memory + of(&[Group::Etcd]);
        let mut seconds = 0.0;
        let latest: Vec<_> = samples
            .iter()
            .rev()
            .take_while(|sample| {
                let wanted = seconds < RATE_WINDOW.as_secs_f64();
                seconds += sample.seconds;
                wanted
            })
            .collect();
        let seconds: f64 = latest.iter().map(|sample| sample.seconds).sum();
        let sum =
            |what: fn(&Counts) -> u64| latest.iter().map(|sample| what(&sample.added)).sum::<u64>() as f64;
        let rate = |what| sum(what) / seconds.max(1.0);
        let checks = sum(|added| added.checks.proven);
        Reads {
            since_start: counts.total(),
            per_second: rate(Counts::total),
            other_calls_per_second: rate(|added| added.passed),
            events_per_second: rate(|added| added.events),
            quorum_checks_per_second: rate(|added| added.checks.proven + added.checks.failed),
            per_quorum_check: (checks > 0.0).then(|| sum(|added| added.checks.reads) / checks),
            window_seconds: samples.iter().map(|sample| sample.seconds).sum(),
            memory_ratio: (answered > 0).then(|| memory as f64 / answered as f64),
            outcomes,
        }
    }
}

impl Mirror {
    fn of(mirror: &state::Mirror, known: i64, metrics: &Metrics, timeline: Vec<Stretch>) -> Mirror {
        let gauges = &mirror.metrics;
        let unsigned = |value: i64| u64::try_from(value).unwrap_or(0);
        let revision = mirror.revision();
        let in_service = revision.ok();
        Mirror {
            name: mirror.name.clone(),
            reason: revision.err(),
            revision: in_service,
            lag_revisions: in_service.map(|revision| known.saturating_sub(revision).max(0)),
            oldest_revision: in_service.map(|_| gauges.oldest_revision.get()),
            keys: unsigned(gauges.keys.get()),
            memory_bytes: mirror.memory_bytes(),
            history_bytes: unsigned(gauges.history_bytes.get()),
            load_keys: unsigned(gauges.load_keys.get()),
            load_bytes: unsigned(gauges.load_bytes.get()),
            events: gauges.events.get(),
            mismatches: metrics.mirrors.mismatches(&mirror.name),
            timeline,
        }
    }
}

fn timeline(samples: &[Arc<Sample>], mirror: usize) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for reason in samples
        .iter()
        .filter_map(|sample| sample.added.mirrors.get(mirror))
    {
        match stretches.last_mut() {
            Some(last) if last.reason == *reason => last.samples += 1,
            _ => stretches.push(Stretch {
                reason: *reason,
                samples: 1,
            }),
        }
    }
    stretches
}

impl Endpoint {
    fn of(view: &EndpointView) -> Endpoint {
        Endpoint {
            url: view.url.to_string(),
            version: view.version.map(|version| version.to_string()),
            role: match view.role {
                Role::Unknown => "unknown",
                Role::Leader => "leader",
                Role::Follower => "follower",
                Role::Learner => "learner",
                Role::Leaderless => "no_leader",
            },
            is_connected: view.is_connected,
            is_healthy: view.is_healthy,
            is_avoided: view.is_avoided,
            connections: view.connections,
            connections_wanted: view.connections_wanted,
            calls: view.calls,
            last_error: view.last_error.clone(),
            no_range_stream: view.no_range_stream.map(NoRangeStream::as_str),
        }
    }
}

impl Samples {
    fn of(all: Vec<Arc<Sample>>) -> Samples {
        let counted = |what: &dyn Fn(&Counts) -> u64| all.iter().map(|sample| what(&sample.added)).collect();
        let group = |group| counted(&|added| added.of_group(group));
        Samples {
            interval_seconds: INTERVAL.as_secs(),
            reads_from_memory: group(Group::Memory),
            reads_after_a_wait: group(Group::Waited),
            reads_by_etcd: group(Group::Etcd),
            reads_refused_or_gone: group(Group::Nobody),
            other_calls: counted(&|added| added.passed),
            events: counted(&|added| added.events),
            quorum_checks: counted(&|added| added.checks.proven + added.checks.failed),
            all,
        }
    }
}
