//! The data of the page, which `/status` sends as JSON. Gathered from gauges and counters, without a lock that a
//! mirror or a read waits for.

pub(super) mod model;
pub(super) mod reads;
pub(super) mod samples;

use std::time::SystemTime;

use rangecache_base::telemetry::{metrics::unsigned, state_changes::StateChange};
use rangecache_base::{memory, unix_time};
use rangecache_config::FlagOrigin;
use rangecache_mirror::{metrics::ADOPTION_SOURCES, view::Mirror};
use rangecache_upstream::{EndpointView, NoRangeStream};
use tokio::time::Instant;

use super::{checks, handles::Handles, memory::MirrorMemory, process::ProcessStatus, readiness};
use model::{
    AdoptedStatus, EndpointStatus, FlagStatus, ImageStatus, MirrorStatus, Samples, Status, StreamCount,
    Unlisted, WatchStatus,
};
use rangecache_report::format::role;
use samples::OpenWatches;

/// Clients on the page.
const CLIENTS_SHOWN: usize = 20;

/// The current status.
pub(super) fn collect(handles: &Handles) -> Status {
    let now = Instant::now();
    let counts = handles.counts();
    let all = handles.recent.samples(now, &counts);
    let metrics = &handles.telemetry.metrics;
    let endpoints: Vec<_> = handles.upstream.endpoints().iter().map(endpoint).collect();
    let mirrors: Vec<_> = handles
        .mirrors
        .positions()
        .map(|(index, of)| MirrorStatus {
            timeline: reads::timeline(&all, index),
            ..mirror(of, handles)
        })
        .collect();
    let budgets = checks::budgets(handles, &mirrors);
    let mut clients = handles.telemetry.clients.figures();
    clients.truncate(CLIENTS_SHOWN);
    let reads = reads::summarize(&counts, &all);
    let unlisted = Unlisted {
        draining: handles.draining.is_cancelled(),
        answers_from_memory: readiness::answers_from_memory(handles),
        mixed_clusters: handles.upstream.mixed_clusters(),
        version_unknown: handles.upstream.lowest_version().is_none(),
        user: checks::user_finding(handles),
        useless_neighbours: handles.mirrors.useless_neighbours(),
        cache_and_memory_bytes: (handles.live.load().mirror.max_bytes(), memory::limit_bytes()),
        panics: metrics.process.panics.get(),
        proof_p99_seconds: reads::proof_p99(&all),
        symptoms: handles.symptoms.findings(now),
    };
    let mut status = Status {
        version: env!("CARGO_PKG_VERSION"),
        commit: handles.commit,
        at: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        uptime_seconds: now.duration_since(handles.started).as_secs(),
        host: handles.host.clone(),
        pod: handles.pod.clone(),
        client_urls: handles
            .live
            .load()
            .listen
            .all_client_urls()
            .map(ToString::to_string)
            .collect(),
        process: ProcessStatus::now(),
        certificates: checks::certificates(handles),
        flags: flags(handles),
        ready: readiness::is_ready(handles),
        forward_all: handles.mirrors.forwards_all(),
        findings: Vec::new(),
        changes: newest_first(
            handles.telemetry.state_changes.list(),
            handles.upstream.state_changes(),
        ),
        reads,
        slowest: reads::slowest(&handles.telemetry.slowest.list(), &handles.mirrors),
        mirrors,
        calls: reads::codes(&all),
        watches: watches(handles, counts.watches),
        prefixes: handles.prefixes.top(&handles.mirrors, &handles.metrics).to_vec(),
        clients,
        gates: checks::gates(handles),
        endpoints,
        budgets,
        samples: Samples(all),
        unlisted,
    };
    status.findings = checks::findings(&status);
    status
}

/// Every flag, those that were given before the defaults.
fn flags(handles: &Handles) -> Vec<FlagStatus> {
    let settings = handles.live.settings();
    let (given, defaults): (Vec<_>, Vec<_>) = settings
        .iter()
        .partition(|setting| setting.source != FlagOrigin::Default);
    let flags = given.into_iter().chain(defaults);
    flags
        .map(|setting| FlagStatus {
            flag: setting.flag.clone(),
            value: setting.shown().to_owned(),
            source: setting.source.as_str(),
        })
        .collect()
}

/// Changes of mirrors, flags and memory, and those of members, the newest first.
fn newest_first(mut changes: Vec<StateChange>, of_members: Vec<StateChange>) -> Vec<StateChange> {
    changes.extend(of_members);
    changes.sort_by_key(|change| std::cmp::Reverse(change.at));
    changes
}

/// State of a mirror without its past.
fn mirror(mirror: &Mirror, handles: &Handles) -> MirrorStatus {
    let gauges = &mirror.metrics;
    // The highest revision that etcd is known to have.
    let known = handles.mirrors.cluster_state.known();
    let stale = handles.mirrors.stale_view(mirror);
    let revision = mirror.revision();
    let in_service = revision.ok();
    MirrorStatus {
        name: mirror.name.clone(),
        is_everything: mirror.scope.is_everything(),
        reason: revision.err(),
        revision: in_service,
        stale_age_ms: stale.map(|stale| u64::try_from(stale.age.as_millis()).unwrap_or(u64::MAX)),
        lag_revisions: in_service.map(|revision| known.saturating_sub(revision).max(0)),
        oldest_revision: in_service.map(|_| gauges.oldest_revision.get()),
        keys: unsigned(gauges.keys.get()),
        memory: MirrorMemory::of(mirror),
        load_keys: unsigned(gauges.load_keys.get()),
        load_bytes: unsigned(gauges.load_bytes.get()),
        adopted: adopted(mirror),
        image: handles.mirrors.keep_images().then(|| image(mirror)),
        events: gauges.events.get(),
        mismatches: gauges.mismatches.get(),
        timeline: Vec::new(),
    }
}

fn adopted(mirror: &Mirror) -> Vec<AdoptedStatus> {
    let bytes = |source| mirror.metrics.adopted_bytes.of(source).get();
    let sources = ADOPTION_SOURCES.map(|source| AdoptedStatus {
        source,
        bytes: bytes(source),
    });
    sources.into_iter().filter(|adopted| adopted.bytes > 0).collect()
}

fn image(mirror: &Mirror) -> ImageStatus {
    let gauges = &mirror.metrics;
    let age = |written: i64| unsigned(unix_time::now_seconds().saturating_sub(written));
    ImageStatus {
        bytes: unsigned(gauges.image_bytes.get()),
        age_seconds: Some(gauges.image_written.get())
            .filter(|written| *written > 0)
            .map(age),
        is_failing: gauges.image_failed.get() > 0,
    }
}

fn watches(handles: &Handles, open: OpenWatches) -> WatchStatus {
    let metrics = &handles.metrics.proxy.watches;
    let mirrors = handles.mirrors.all();
    let held: Vec<_> = mirrors
        .filter_map(|mirror| Some(handles.mirrors.fan_out(mirror)?.held()))
        .collect();
    let etcd_streams = metrics.etcd_streams().map(|(reason, count)| StreamCount {
        reason,
        count: unsigned(count),
    });
    WatchStatus {
        open,
        memory_streams: unsigned(metrics.memory_streams()),
        etcd_streams: etcd_streams.collect(),
        watchers: held.iter().map(|held| held.watchers).sum(),
        events_sent: metrics.events_sent(),
        behind_revisions: unsigned(held.iter().map(|held| held.behind_revisions).max().unwrap_or(0)),
        memory_bytes: unsigned(metrics.used_bytes.get()),
    }
}

fn endpoint(view: &EndpointView) -> EndpointStatus {
    EndpointStatus {
        url: view.url.to_string(),
        source: view.source.as_str(),
        peer: view.peer.clone(),
        is_leaving: view.is_leaving,
        version: view.version.map(|version| version.to_string()),
        role: role(view.role),
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rangecache_base::telemetry::state_changes::ChangeKind;

    use super::*;

    #[test]
    fn changes_of_both_lists_are_in_one_the_newest_first() {
        let change = |seconds, subject: &str| StateChange {
            at: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
            kind: ChangeKind::MemberLost,
            subject: subject.to_owned(),
            details: String::new(),
        };
        let all = newest_first(vec![change(1, "a"), change(3, "c")], vec![change(2, "b")]);
        let subjects: Vec<_> = all.iter().map(|change| change.subject.as_str()).collect();
        assert_eq!(subjects, ["c", "b", "a"]);
        let newest = serde_json::to_value(&all[0]).unwrap();
        assert_eq!(
            (&newest["at"], &newest["kind"]),
            (&"1970-01-01T00:00:03Z".into(), &"member_lost".into())
        );
    }
}
