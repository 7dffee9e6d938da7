//! Types of the status, serialized as JSON. Fields may be added in later versions.

use std::sync::Arc;

use rangecache_base::telemetry::{
    Reason, clients::ClientFigures, metrics::LatencyCounts, outcome::Outcome, state_changes::StateChange,
};
use rangecache_mirror::UselessNeighbour;
use rangecache_upstream::{ClusterOfEndpoint, EndpointPeer};
use serde::{Serialize, Serializer, ser::SerializeStruct as _};

use super::samples::{INTERVAL, OpenWatches, ReadCounts, ReadLatency, ReadSample};
use crate::{memory::MirrorMemory, prefixes::PrefixStatus, process::ProcessStatus};
use rangecache_report::reasons::OutcomeClass;
use rangecache_report::{Finding, Severity};

/// Facts about the running process: all that findings are made from, and that the page shows.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Status {
    /// Version of rangecache.
    pub(crate) version: &'static str,
    /// Commit of the build.
    pub(crate) commit: &'static str,
    /// Time of the status: UTC, RFC 3339.
    pub(crate) at: String,
    pub(crate) uptime_seconds: u64,
    /// Name of the host; in a pod, the pod's.
    pub(crate) host: String,
    /// Name of the pod, from `K8S_POD_NAME`.
    pub(crate) pod: Option<String>,
    /// URLs for clients.
    pub(crate) client_urls: Vec<String>,
    pub(crate) process: ProcessStatus,
    /// Certificates and revocation lists.
    pub(crate) certificates: Vec<CertificateStatus>,
    /// Every flag; secrets are masked.
    pub(crate) flags: Vec<FlagStatus>,
    /// Result of `/readyz`.
    pub(crate) ready: bool,
    /// An operator has switched memory off (`POST /forward-all`).
    pub(crate) forward_all: bool,
    /// Findings, the worst first.
    pub(crate) findings: Vec<Finding>,
    /// Changes of mirrors, members, flags and memory, the newest first.
    pub(crate) changes: Vec<StateChange>,
    pub(crate) reads: Reads,
    /// Slowest calls of the last minutes, the slowest first.
    pub(crate) slowest: Vec<SlowCall>,
    pub(crate) mirrors: Vec<MirrorStatus>,
    /// gRPC calls of the time that `reads.window_seconds` covers, by code.
    pub(crate) calls: Vec<CodeStatus>,
    pub(crate) watches: WatchStatus,
    /// Prefixes that cost most, the most costly first.
    pub(crate) prefixes: Vec<PrefixStatus>,
    /// Clients that cost most now, the most costly first.
    pub(crate) clients: Vec<ClientFigures>,
    pub(crate) endpoints: Vec<EndpointStatus>,
    pub(crate) gates: Vec<GateStatus>,
    pub(crate) budgets: Vec<Budget>,
    pub(crate) samples: Samples,
    #[serde(skip)]
    pub(crate) unlisted: Unlisted,
}

/// Facts that findings alone report.
#[derive(Debug, Default)]
pub(crate) struct Unlisted {
    pub(crate) draining: bool,
    /// Memory could answer some reads.
    pub(crate) answers_from_memory: bool,
    /// The endpoints with their clusters, if there are several.
    pub(crate) mixed_clusters: Vec<ClusterOfEndpoint>,
    /// No member has reported its version.
    pub(crate) version_unknown: bool,
    /// Problem of rangecache's own user, or that it has none and needs one.
    pub(crate) user: Option<Finding>,
    /// Neighbours that would be of no use to the next start.
    pub(crate) useless_neighbours: Vec<UselessNeighbour>,
    /// `--cache-max-bytes`, and the memory limit.
    pub(crate) cache_and_memory_bytes: (u64, u64),
    pub(crate) panics: u64,
    /// Seconds that 99 of 100 reads from memory waited at most for their proof, in the last five minutes.
    pub(crate) proof_p99_seconds: Option<f64>,
    /// Findings from what exported series have shown over time.
    pub(crate) symptoms: Vec<Finding>,
}

/// File with certificates.
#[derive(Debug, Serialize)]
pub(crate) struct CertificateStatus {
    /// Whom it concerns: `clients` or `etcd`.
    pub(crate) side: &'static str,
    /// Flag that names the file, without its dashes.
    pub(crate) flag: &'static str,
    /// Days until the first certificate of the file expires; negative if it has.
    pub(crate) days_left: i64,
}

/// Effective value of a flag.
#[derive(Debug, Serialize)]
pub(crate) struct FlagStatus {
    /// Flag, without its dashes.
    pub(crate) flag: String,
    /// Empty if it has none.
    pub(crate) value: String,
    /// Source of the value: command line, environment, flags file or default.
    pub(crate) source: &'static str,
}

/// Ranges and RangeStreams. Rates are those of the last minute.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Reads {
    pub(crate) since_start: u64,
    pub(crate) per_second: f64,
    /// Reads that failed without etcd's response.
    pub(crate) failed_per_second: f64,
    /// Part of the answered and failed reads of the last minute that memory answered; `null` without reads.
    pub(crate) memory_ratio_last_minute: Option<f64>,
    /// Calls other than reads.
    pub(crate) other_calls_per_second: f64,
    /// Events that mirrors applied.
    pub(crate) events_per_second: f64,
    pub(crate) quorum_checks_per_second: f64,
    /// Reads per successful quorum check in the last minute; `null` without checks.
    pub(crate) per_quorum_check: Option<f64>,
    /// Time that gRPC reads took until their last byte; `null` without reads.
    pub(crate) latency_from_memory: Option<Latency>,
    pub(crate) latency_by_etcd: Option<Latency>,
    /// Seconds that the following figures cover: fifteen minutes, or less after a start.
    pub(crate) window_seconds: f64,
    /// Part of the answered and failed reads that memory answered; `null` without reads.
    pub(crate) memory_ratio: Option<f64>,
    /// Reads by outcome, the most frequent first.
    pub(crate) outcomes: Vec<OutcomeCount>,
}

/// Seconds that half of the reads, and 99 of 100, took at most; estimated from the buckets of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Latency {
    pub(crate) p50_seconds: f64,
    pub(crate) p99_seconds: f64,
}

impl Latency {
    /// Upper bounds on the median and the 99th percentile of what `counts` names in these samples; `None` without reads.
    pub(crate) fn of<S: AsRef<ReadSample>>(
        samples: &[S],
        counts: impl Fn(&ReadCounts) -> &LatencyCounts,
    ) -> Option<Latency> {
        let mut all = LatencyCounts::default();
        for sample in samples {
            all.add(counts(&sample.as_ref().added));
        }
        Some(Latency {
            p50_seconds: all.quantile(0.5)?,
            p99_seconds: all.quantile(0.99)?,
        })
    }
}

/// gRPC calls that ended with one code, by what answered them.
#[derive(Debug, Serialize)]
pub(crate) struct CodeStatus {
    /// Code under the name that etcd's metrics use.
    pub(crate) grpc_code: &'static str,
    pub(crate) calls: u64,
    pub(crate) memory: u64,
    pub(crate) etcd: u64,
    /// Without etcd's response.
    pub(crate) failed: u64,
    /// Refused by rangecache itself.
    pub(crate) refused: u64,
    /// Ended by their clients.
    pub(crate) none: u64,
}

/// Number of reads with one outcome.
#[derive(Debug, Serialize)]
pub(crate) struct OutcomeCount {
    #[serde(flatten, serialize_with = "outcome_labels")]
    pub(crate) outcome: Outcome,
    pub(crate) count: u64,
}

/// State of a mirror.
#[derive(Debug, Default, Serialize)]
pub(crate) struct MirrorStatus {
    /// Name made of the operator's prefixes.
    pub(crate) name: String,
    /// Whether it mirrors the whole keyspace.
    #[serde(skip)]
    pub(crate) is_everything: bool,
    /// Why the mirror is out of service; `null` while it is in service.
    #[serde(rename = "out_of_service")]
    pub(crate) reason: Option<Reason>,
    /// Revision up to which every event is applied; `null` while out of service.
    pub(crate) revision: Option<i64>,
    /// Age of the last view in milliseconds, while it is served because no member of etcd answers (`--serve-stale`).
    pub(crate) stale_age_ms: Option<u64>,
    /// Revisions that etcd is known to be ahead.
    pub(crate) lag_revisions: Option<i64>,
    /// Oldest past revision that can be read.
    pub(crate) oldest_revision: Option<i64>,
    pub(crate) keys: u64,
    #[serde(flatten)]
    pub(crate) memory: MirrorMemory,
    /// Keys of the current or last load.
    pub(crate) load_keys: u64,
    /// Bytes of the current or last load.
    pub(crate) load_bytes: u64,
    /// Bytes that loads did not have to read from etcd, by what had them.
    pub(crate) adopted: Vec<AdoptedStatus>,
    /// The image on the disk; `None` without `--image-dir`.
    pub(crate) image: Option<ImageStatus>,
    pub(crate) events: u64,
    /// Differences that verification found.
    pub(crate) mismatches: u64,
    /// State over the samples, the oldest first.
    pub(crate) timeline: Vec<Stretch>,
}

/// Keys and values that loads did not have to read from etcd.
#[derive(Debug, Serialize)]
pub(crate) struct AdoptedStatus {
    /// `memory`, `neighbour` or `image`.
    pub(crate) source: &'static str,
    /// Bytes of keys and values.
    pub(crate) bytes: u64,
}

/// The image of a mirror on the disk.
#[derive(Debug, Serialize)]
pub(crate) struct ImageStatus {
    /// Its size; 0 before the first.
    pub(crate) bytes: u64,
    /// Time since it had what the mirror had; `None` before the first.
    pub(crate) age_seconds: Option<u64>,
    /// Whether it cannot be written.
    pub(crate) is_failing: bool,
}

/// Watches through rangecache.
#[derive(Debug, Default, Serialize)]
pub(crate) struct WatchStatus {
    /// Open streams by what serves them.
    pub(crate) open: OpenWatches,
    /// Open streams that memory serves.
    pub(crate) memory_streams: u64,
    /// Open streams that etcd serves, by reason.
    pub(crate) etcd_streams: Vec<StreamCount>,
    /// Open watchers that memory serves.
    pub(crate) watchers: u64,
    /// Events sent from memory since the start.
    pub(crate) events_sent: u64,
    /// Revisions that the slowest watcher is behind its mirror.
    pub(crate) behind_revisions: u64,
    pub(crate) memory_bytes: u64,
}

/// Number of open watch streams that etcd serves for one reason.
#[derive(Debug, Serialize)]
pub(crate) struct StreamCount {
    pub(crate) reason: Reason,
    pub(crate) count: u64,
}

/// Consecutive samples with the same state of a mirror.
#[derive(Debug, Serialize)]
pub(crate) struct Stretch {
    #[serde(rename = "out_of_service")]
    pub(crate) reason: Option<Reason>,
    pub(crate) samples: usize,
}

/// State of an endpoint of etcd.
#[derive(Debug, Default, Serialize)]
pub(crate) struct EndpointStatus {
    pub(crate) url: String,
    /// `flag`, `members` or `fallback`.
    pub(crate) source: &'static str,
    #[serde(flatten)]
    pub(crate) peer: EndpointPeer,
    /// The endpoint is left as soon as another one serves.
    pub(crate) is_leaving: bool,
    pub(crate) version: Option<String>,
    /// `leader`, `follower`, `learner`, `no_leader` or `unknown`.
    pub(crate) role: &'static str,
    pub(crate) is_connected: bool,
    /// The member serves, votes and knows a leader.
    pub(crate) is_healthy: bool,
    /// Calls failed on the endpoint a moment ago.
    pub(crate) is_avoided: bool,
    pub(crate) connections: usize,
    pub(crate) connections_wanted: usize,
    /// Calls in flight.
    pub(crate) calls: usize,
    /// Error of the last lost or refused connection; empty if there was none.
    pub(crate) last_error: String,
    /// Why RangeStream is not used on the endpoint.
    pub(crate) no_range_stream: Option<&'static str>,
}

/// A condition for memory to answer all that it could, and its state.
#[derive(Debug, Serialize)]
pub(crate) struct GateStatus {
    pub(crate) name: &'static str,
    pub(crate) severity: Severity,
    pub(crate) state: String,
    pub(crate) meaning: &'static str,
    /// Finding about it, if anything is to be done.
    #[serde(skip)]
    pub(crate) finding: Option<Finding>,
}

/// A bound that a flag sets, and what is used of it.
#[derive(Debug, Serialize)]
pub(crate) struct Budget {
    pub(crate) name: String,
    /// Flag, without its dashes.
    pub(crate) flag: &'static str,
    pub(crate) in_bytes: bool,
    pub(crate) used: u64,
    pub(crate) limit: u64,
    pub(crate) ratio: f64,
    /// Consequence of reaching the bound, without its begin.
    #[serde(skip)]
    pub(crate) at_limit: &'static str,
    /// Ratio from which on an operator should act; none for a bound that is meant to be reached.
    #[serde(skip)]
    pub(crate) alarm_ratio: Option<f64>,
}

impl Budget {
    /// Whether an operator should act before the bound is reached.
    pub(crate) fn is_nearly_used_up(&self) -> bool {
        self.alarm_ratio.is_some_and(|alarm| self.ratio >= alarm)
    }
}

/// Entry of the list of slowest calls. Times are in seconds since its arrival; 0 means none for revisions and counts.
#[derive(Debug, Serialize)]
pub(crate) struct SlowCall {
    pub(crate) method: &'static str,
    /// Mirror that holds the range; `null` if none holds all of it.
    pub(crate) mirror: Option<String>,
    #[serde(flatten, serialize_with = "outcome_labels")]
    pub(crate) outcome: Outcome,
    /// UTC, RFC 3339.
    pub(crate) ended_at: String,
    pub(crate) total_seconds: f64,
    /// Consecutive phases; those without a duration are left out.
    pub(crate) phases: Vec<Phase>,
    /// Requested revision; 0 for the newest.
    pub(crate) revision_asked: i64,
    /// Revision that a quorum check proved; 0 if none was needed.
    pub(crate) revision_proven: i64,
    /// Revision of the response from memory; 0 for a response of etcd.
    pub(crate) revision_served: i64,
    /// Keys in the response; 0 for a response of etcd, which is not counted.
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
}

/// A part of a call's time.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Phase {
    /// `proof`, `wait`, `answer`, `etcd`, `failed`, `unanswered` or `sending`.
    pub(crate) name: &'static str,
    pub(crate) seconds: f64,
}

impl Phase {
    /// Name in words.
    pub(crate) fn title(&self) -> &'static str {
        match self.name {
            "proof" => "proving that memory is fresh",
            "wait" => "proving, and waiting for the mirror",
            "answer" => "answering from memory",
            "etcd" => "waiting for etcd",
            "failed" => "waiting for etcd, without a response",
            "unanswered" => "until it was refused or cancelled",
            _ => "sending the response",
        }
    }
}

/// The last fifteen minutes, serialized as columns, the oldest value first. The last value is that of the current interval; each
/// of the others spans `interval_seconds`, or more if the machine slept.
#[derive(Debug, Default)]
pub(crate) struct Samples(pub(crate) Vec<Arc<ReadSample>>);

impl Serialize for Samples {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let count = |of: &dyn Fn(&ReadCounts) -> u64| -> Vec<u64> {
            self.0.iter().map(|sample| of(&sample.added)).collect()
        };
        let latencies = |of: fn(&ReadLatency) -> &LatencyCounts| -> Vec<Option<Latency>> {
            let of_sample = |sample| Latency::of(std::slice::from_ref(sample), |added| of(&added.latency));
            self.0.iter().map(of_sample).collect()
        };
        let watches: Vec<_> = self.0.iter().map(|sample| sample.added.watches).collect();
        let mut columns = serializer.serialize_struct("Samples", 12)?;
        columns.serialize_field("interval_seconds", &INTERVAL.as_secs())?;
        for (name, source) in [
            ("reads_from_memory", OutcomeClass::Memory),
            ("reads_after_a_wait", OutcomeClass::Waited),
            ("reads_by_etcd", OutcomeClass::Etcd),
            ("reads_failed", OutcomeClass::Failed),
            ("reads_refused_or_cancelled", OutcomeClass::Unanswered),
        ] {
            columns.serialize_field(name, &count(&|added| added.by_source(source)))?;
        }
        columns.serialize_field("other_calls", &count(&|added| added.forwarded))?;
        columns.serialize_field("events", &count(&|added| added.events))?;
        columns.serialize_field(
            "quorum_checks",
            &count(&|added| added.checks.proven + added.checks.failed),
        )?;
        // Estimates; `null` for an interval without such reads.
        columns.serialize_field("latency_from_memory", &latencies(|latency| &latency.memory))?;
        columns.serialize_field("latency_by_etcd", &latencies(|latency| &latency.etcd))?;
        // Open watch streams at the end of each interval.
        columns.serialize_field("open_watches", &watches)?;
        columns.end()
    }
}

/// `outcome` and `reason`, with the same values as in the metrics.
fn outcome_labels<S: Serializer>(outcome: &Outcome, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct OutcomeLabels {
        outcome: &'static str,
        reason: &'static str,
    }
    let (outcome, reason) = outcome.labels();
    OutcomeLabels { outcome, reason }.serialize(serializer)
}
