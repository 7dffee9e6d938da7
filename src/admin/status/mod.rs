//! The data of the page, which `/status` sends as JSON. Gathered from gauges and counters, without a lock that a
//! mirror or a read waits for.

pub(super) mod certificates;
pub(super) mod changes;
pub(super) mod clients;
pub(super) mod model;
pub(super) mod reads;
pub(super) mod samples;
mod slowest;

use std::time::SystemTime;

use tokio::time::Instant;

use super::handles::Handles;
use super::memory::MirrorMemory;
use super::process::ProcessStatus;
use super::{checks, readiness};
use crate::config::FlagOrigin;
use certificates::certificates;
use clients::ClientStatus;
use model::{
    AdoptedStatus, EndpointStatus, FlagStatus, ImageStatus, MirrorStatus, Status, StreamCount, WatchStatus,
};
use rangecache_base::memory;
use rangecache_base::telemetry::outcome::Outcome;
use rangecache_base::unix_time;
use rangecache_mirror::metrics::ADOPTION_SOURCES;
use rangecache_mirror::view::Mirror;
use rangecache_upstream::{EndpointView, NoRangeStream, Role};
use samples::OpenWatches;

/// The current status.
pub(super) fn collect(handles: &Handles) -> Status {
    let now = Instant::now();
    let counts = handles.counts();
    let all = handles.recent.samples(now, &counts);
    let metrics = &handles.telemetry.metrics;
    let cluster_state = &handles.mirrors.cluster_state;
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
    let reads = reads::summarize(&counts, &all);
    let credentials = handles.upstream.credentials();
    let gates = handles.upstream.gates();
    let ended = |is: fn(Outcome) -> bool| {
        let ended = reads.outcomes.iter().filter(|read| is(read.outcome));
        ended.map(|read| read.count).sum()
    };
    let mixed_clusters = handles.upstream.mixed_clusters();
    let certificates = certificates(handles);
    let useless_neighbours = handles.mirrors.useless_neighbours();
    let findings = checks::findings(&checks::Facts {
        draining: handles.draining.is_cancelled(),
        forwards_all: handles.mirrors.forwards_all(),
        mirrors: &mirrors,
        endpoints: &endpoints,
        mixed_clusters: &mixed_clusters,
        certificates: &certificates,
        budgets: &budgets,
        gates: &gates,
        version: handles.upstream.lowest_version(),
        auth: cluster_state.auth(),
        has_own_user: credentials.name_a_user(),
        user_problem: credentials.problem(),
        useless_neighbours: &useless_neighbours,
        cache_and_memory_bytes: (handles.live.load().mirror.max_bytes(), memory::limit_bytes()),
        panics: metrics.process.panics.get(),
        shed: ended(|outcome| matches!(outcome, Outcome::Shed(_))),
        failed: ended(|outcome| matches!(outcome, Outcome::Failed(_))),
    });
    Status {
        version: env!("CARGO_PKG_VERSION"),
        commit: env!("BUILD_COMMIT"),
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
        certificates,
        flags: flags(handles),
        ready: readiness::is_ready(handles),
        forward_all: handles.mirrors.forwards_all(),
        findings,
        changes: changes::changes(handles),
        reads,
        slowest: slowest::list(&handles.telemetry.slowest.list(), &handles.mirrors),
        mirrors,
        calls: reads::codes(&all),
        watches: watches(handles, counts.watches),
        prefixes: handles.prefixes.top(&handles.mirrors, &handles.metrics).to_vec(),
        clients: {
            let mut shown = clients(handles);
            shown.truncate(clients::SHOWN);
            shown
        },
        gates: checks::gates(&gates, cluster_state.auth(), credentials.name_a_user(), metrics),
        endpoints,
        budgets,
        samples: reads::columns(all),
    }
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

/// All clients, the most costly first.
pub(super) fn clients(handles: &Handles) -> Vec<ClientStatus> {
    let figures = handles.telemetry.clients.figures();
    figures.iter().map(clients::client).collect()
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

/// Value of a gauge that is never negative.
fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
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
