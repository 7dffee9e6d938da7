//! Findings, gates and used bounds.

use std::time::Duration;

use super::handles::Handles;
use super::status::model::{Budget, CertificateStatus, EndpointStatus, GateStatus, MirrorStatus};
use crate::config::bounds::{self, Bound, Unit};
use crate::diagnosis::format::{bytes, count, counted};
use crate::diagnosis::reasons::explain_reason;
use crate::diagnosis::{self, Finding, FindingId, Severity};
use rangecache_base::telemetry::{Metrics, Reason};
use rangecache_mirror::UselessNeighbour;
use rangecache_mirror::lineage::Auth;
use rangecache_upstream::gates::{GateState, VersionGate};
use rangecache_upstream::{ClusterOfEndpoint, UserProblem, Version};

/// Days before its expiry from which on a certificate is a finding; the alert on it has as many.
const FEW_DAYS_LEFT: i64 = 14;

/// Facts that findings are made from.
#[derive(Debug)]
pub(super) struct Facts<'a> {
    pub(super) draining: bool,
    /// An operator has switched memory off.
    pub(super) forwards_all: bool,
    pub(super) mirrors: &'a [MirrorStatus],
    pub(super) endpoints: &'a [EndpointStatus],
    /// The endpoints with their clusters, if there are several.
    pub(super) mixed_clusters: &'a [ClusterOfEndpoint],
    pub(super) certificates: &'a [CertificateStatus],
    pub(super) budgets: &'a [Budget],
    pub(super) gates: &'a [(&'static VersionGate, GateState)],
    /// The lowest version among the endpoints.
    pub(super) version: Option<Version>,
    pub(super) auth: Auth,
    pub(super) has_own_user: bool,
    pub(super) user_problem: Option<UserProblem>,
    /// Neighbours that would be of no use to the next start.
    pub(super) useless_neighbours: &'a [UselessNeighbour],
    /// `--cache-max-bytes`, and the memory limit.
    pub(super) cache_and_memory_bytes: (u64, u64),
    pub(super) panics: u64,
    /// Reads refused in the last fifteen minutes.
    pub(super) shed: u64,
    /// Reads that failed without etcd's response in the last fifteen minutes.
    pub(super) failed: u64,
}

/// Findings, the worst first; none if everything is as it should be.
pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if facts.draining {
        findings.push(
            Finding::new(FindingId::Stopping, "rangecache is stopping")
                .with_meaning("No new calls are accepted; calls in flight may complete."),
        );
    }
    if facts.forwards_all {
        findings.push(Finding::new(FindingId::MemorySwitchedOff, "memory is switched off").with_meaning(
            "An operator has sent POST /forward-all: etcd answers every read and serves every watch. The mirrors stay up to date.",
        ));
    }
    findings.extend(diagnosis::different_clusters(facts.mixed_clusters));
    findings.extend(facts.certificates.iter().filter_map(certificate_finding));
    findings.extend(endpoint_findings(facts));
    findings.extend(
        facts
            .gates
            .iter()
            .map(|(gate, state)| diagnosis::gates::finding(gate, *state))
            .filter(|finding| finding.severity >= Severity::Warning),
    );
    findings.extend(auth_finding(facts));
    for mirror in facts.mirrors {
        findings.extend(mismatch_finding(mirror));
        findings.extend(mirror_finding(mirror, facts));
        findings.extend(image_finding(mirror));
    }
    findings.extend(facts.useless_neighbours.iter().map(neighbour_finding));
    let (cache_bytes, memory_bytes) = facts.cache_and_memory_bytes;
    findings.extend(diagnosis::budget_above_memory(cache_bytes, memory_bytes));
    if facts.panics > 0 {
        let title = format!("{} since the start", counted(facts.panics, "panic"));
        findings.push(
            Finding::new(FindingId::Panics, title)
                .with_meaning("Each ended one call or restarted one task, and is a bug."),
        );
    }
    if facts.failed > 0 {
        let title = format!("{} failed in the last 15 minutes", counted(facts.failed, "read"));
        findings.push(Finding::new(FindingId::ReadsFailed, title).with_meaning(
            "Memory could not answer, and etcd could not be reached or did not complete its response in time. Clients may retry.",
        ));
    }
    if facts.shed > 0 {
        let title = format!("{} refused in the last 15 minutes", counted(facts.shed, "read"));
        findings.push(
            Finding::new(FindingId::ReadsRefused, title)
                .with_meaning("Memory could not answer, and a bound was reached. Clients may retry."),
        );
    }
    for budget in facts.budgets.iter().filter(|budget| budget.is_nearly_used_up()) {
        let title = format!("{}: {:.0} % of the bound", budget.name, budget.ratio * 100.0);
        let remedy = format!("Raise --{}, or find the clients that need so much.", budget.flag);
        findings.push(
            Finding::new(FindingId::BoundNearlyReached, title)
                .about(budget.flag)
                .with_meaning(budget.at_limit)
                .with_remedy(remedy),
        );
    }
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

fn endpoint_findings(facts: &Facts<'_>) -> Vec<Finding> {
    if !is_reachable(facts) {
        let errors: Vec<_> = facts
            .endpoints
            .iter()
            .map(|endpoint| endpoint.last_error.as_str())
            .collect();
        let meaning = format!(
            "Calls wait up to --connect-timeout for a connection and then fail with Unavailable. {}",
            errors.join("; ")
        );
        return vec![
            Finding::new(FindingId::EtcdUnreachable, "etcd cannot be reached").with_meaning(meaning),
        ];
    }
    if !has_healthy_member(facts) {
        return vec![Finding::new(FindingId::NoHealthyMember, "no member of etcd is healthy").with_meaning(
            "No member that --endpoints names serves, votes and knows a leader: linearizable reads and writes wait, and fail.",
        )];
    }
    let mut findings: Vec<_> = facts.endpoints.iter().filter_map(endpoint_finding).collect();
    if facts.version.is_none() {
        findings.push(diagnosis::version_unknown());
    }
    findings
}

/// Whether a file of certificates has expired or will soon.
fn certificate_finding(certificate: &CertificateStatus) -> Option<Finding> {
    let CertificateStatus {
        side,
        flag,
        days_left,
    } = certificate;
    let (id, title) = match days_left {
        ..0 => (FindingId::CertificateExpired, format!("--{flag} has expired")),
        0..FEW_DAYS_LEFT => (
            FindingId::CertificateExpiresSoon,
            format!("--{flag} expires {}", in_days(*days_left)),
        ),
        _ => return None,
    };
    let meaning = match (*side, *flag) {
        ("clients", "cert-file") => {
            "Clients that verify rangecache's certificate refuse it once it has expired, and cannot connect."
        }
        ("clients", "client-crl-file") => {
            "Once a revocation list has expired, no client with a certificate can connect."
        }
        ("clients", _) => "Once a CA has expired, no client can connect whose certificate it has issued.",
        (_, "cacert") => {
            "Once a CA has expired, rangecache refuses the certificates of etcd that it has issued."
        }
        _ => "etcd refuses rangecache's certificate once it has expired.",
    };
    let finding = Finding::new(id, title).about(flag).with_meaning(meaning);
    Some(match days_left {
        0 => finding.with_severity(Severity::Bad),
        _ => finding,
    })
}

fn in_days(days: i64) -> String {
    match days {
        0 => "today".to_owned(),
        days => format!("in {}", counted(days.unsigned_abs(), "day")),
    }
}

fn is_reachable(facts: &Facts<'_>) -> bool {
    facts.endpoints.iter().any(|endpoint| endpoint.is_connected)
}

/// Whether any member serves, votes and knows a leader.
fn has_healthy_member(facts: &Facts<'_>) -> bool {
    let mut endpoints = facts.endpoints.iter();
    endpoints.any(|endpoint| endpoint.is_connected && endpoint.is_healthy)
}

fn endpoint_finding(endpoint: &EndpointStatus) -> Option<Finding> {
    if endpoint.is_leaving {
        return None;
    }
    if !endpoint.is_connected {
        let finding = Finding::new(
            FindingId::MemberNotConnected,
            format!("{} is not connected", endpoint.url),
        );
        let meaning = format!("Other endpoints are used. {}", endpoint.last_error);
        Some(finding.about(&endpoint.url).with_meaning(meaning))
    } else if !endpoint.is_healthy {
        let finding = Finding::new(
            FindingId::MemberUnhealthy,
            format!("{} is unhealthy", endpoint.url),
        );
        let finding = finding.about(&endpoint.url);
        Some(finding.with_meaning(
            "The member does not serve, has no leader or does not vote. Other endpoints are preferred.",
        ))
    } else {
        None
    }
}

fn auth_finding(facts: &Facts<'_>) -> Option<Finding> {
    match &facts.user_problem {
        Some(problem) => Some(diagnosis::user_problem(problem)),
        None if facts.auth == Auth::On && !facts.has_own_user => Some(diagnosis::no_own_user()),
        None => None,
    }
}

fn mismatch_finding(mirror: &MirrorStatus) -> Option<Finding> {
    let times = match mirror.mismatches {
        0 => return None,
        1 => "once".to_owned(),
        n => format!("{} times", count(n)),
    };
    let finding = Finding::new(
        FindingId::MirrorDiffered,
        format!("{} has differed from etcd", mirror.name),
    );
    let finding = finding.about(&mirror.name);
    Some(finding.with_meaning(format!(
        "Verification found a difference {times}; the mirror was loaded again."
    )))
}

fn mirror_finding(mirror: &MirrorStatus, facts: &Facts<'_>) -> Option<Finding> {
    let Some(reason) = mirror.reason else {
        return empty_finding(mirror).or_else(|| mirror.memory.finding(&mirror.name));
    };
    // An etcd that cannot be reached or does not serve, or that does not permit the reads of a load, is a finding of its own, and
    // explains these. Reads of the mirror are not forwarded then, they fail.
    let is_explained = !has_healthy_member(facts) || auth_finding(facts).is_some();
    if matches!(reason, Reason::FeedLost | Reason::Loading) && is_explained {
        return None;
    }
    let loaded = format!(
        "{}, {}",
        counted(mirror.load_keys, "key"),
        bytes(mirror.load_bytes)
    );
    let (id, details) = match reason {
        Reason::Loading => (FindingId::MirrorLoading, format!(" Loaded so far: {loaded}.")),
        Reason::OverBudget => {
            let budgets = &mut facts.budgets.iter();
            let limit = budgets.find(|budget| budget.flag == bounds::CACHE_MAX_BYTES.flag);
            let limit = limit.map_or(String::new(), |budget| format!(" of {}", bytes(budget.limit)));
            let details = format!(" The last load stopped at the bound{limit} after {loaded}.");
            (FindingId::MirrorOverBudget, details)
        }
        _ => (FindingId::MirrorOutOfService, String::new()),
    };
    let explanation = explain_reason(reason);
    let title = format!(
        "{} is not answered from memory: {}",
        mirror.name, explanation.title
    );
    Some(
        Finding::new(id, title)
            .about(&mirror.name)
            .with_meaning(format!(
                "{}{details} Its reads are forwarded.",
                explanation.meaning
            ))
            .with_remedy(explanation.remedy),
    )
}

/// A mirror whose image cannot be written.
fn image_finding(mirror: &MirrorStatus) -> Option<Finding> {
    let image = mirror.image.as_ref().filter(|image| image.is_failing)?;
    let id = FindingId::ImageNotWritten;
    let finding = Finding::new(id, format!("the image of {} cannot be written", mirror.name));
    let next = match image.age_seconds {
        None => "The next start reads every key from etcd.",
        Some(_) => "The next start finds an older image, and reads more from etcd.",
    };
    Some(
        finding
            .about(&mirror.name)
            .with_meaning(format!("Serving continues. {next}")),
    )
}

/// A neighbour that the next start would ask in vain.
fn neighbour_finding(neighbour: &UselessNeighbour) -> Finding {
    let UselessNeighbour { url, mirror, reason } = neighbour;
    let title = format!("the neighbour {url} would be asked in vain at the next start ({mirror})");
    let finding = Finding::new(FindingId::NeighbourOfNoUse, title).about(url.to_string());
    finding.with_meaning(format!(
        "When it was asked last: {reason}. Serving continues; without a neighbour or an image a start reads every key from etcd."
    ))
}

/// A mirror that has no key: its prefix may be mistyped.
fn empty_finding(mirror: &MirrorStatus) -> Option<Finding> {
    if mirror.keys > 0 {
        return None;
    }
    let finding = Finding::new(
        FindingId::MirrorEmpty,
        format!("etcd has no key in {}", mirror.name),
    );
    // Of the whole keyspace: an etcd that is new.
    let severity = if mirror.is_everything {
        Severity::Note
    } else {
        Severity::Warning
    };
    let finding = finding.about(&mirror.name).with_severity(severity);
    Some(finding.with_meaning("What clients read is not in this mirror, unless etcd is new."))
}

/// The version gates, auth and verification.
pub(super) fn gates(
    gates: &[(&'static VersionGate, GateState)],
    auth: Auth,
    has_own_user: bool,
    metrics: &Metrics,
) -> Vec<GateStatus> {
    let versions = gates.iter().map(|(gate, state)| {
        let (severity, state) = diagnosis::gates::describe(gate, *state);
        GateStatus {
            name: gate.title,
            severity,
            state,
            meaning: gate.meaning,
        }
    });
    versions
        .chain([auth_gate(auth, has_own_user), verification_gate(metrics)])
        .collect()
}

fn auth_gate(auth: Auth, has_own_user: bool) -> GateStatus {
    let (severity, state) = match (auth, has_own_user) {
        (Auth::Off, _) => (Severity::Good, "off"),
        (Auth::Unknown, _) => (Severity::Note, "not known yet"),
        (Auth::On, true) => (Severity::Good, "on; rangecache has a user of its own"),
        (Auth::On, false) => (Severity::Warning, "on; rangecache has no user of its own"),
    };
    GateStatus {
        name: "etcd's auth",
        severity,
        state: state.to_owned(),
        meaning: "While auth is on, etcd authorises each read for its client before memory answers it.",
    }
}

fn verification_gate(metrics: &Metrics) -> GateStatus {
    let bound = &bounds::VERIFY_INTERVAL;
    let interval = metrics.process.limit(bound.name).unwrap_or(0.0);
    let (severity, state) = if interval > 0.0 {
        let every = humantime::format_duration(Duration::from_secs_f64(interval));
        (Severity::Good, format!("every {every}"))
    } else {
        (Severity::Note, format!("off (--{})", bound.flag))
    };
    GateStatus {
        name: "Verification",
        severity,
        state,
        meaning: "Every mirror is compared with etcd in the background.",
    }
}

/// Bounds that an operator may have to raise, with what is used of them.
pub(super) fn budgets(handles: &Handles, mirrors: &[MirrorStatus]) -> Vec<Budget> {
    let metrics = &handles.metrics;
    let gauge = |value: i64| u64::try_from(value).unwrap_or(0);
    let connections = gauge(metrics.connections.open.get());
    let calls = (handles.tasks.len() as u64).saturating_sub(connections);
    let memory = mirrors
        .iter()
        .map(|mirror| mirror.memory.memory_bytes + mirror.memory.held_bytes)
        .sum();
    let (large, small) = (metrics.proxy.turns.large(), metrics.proxy.turns.small());
    let first = [(
        "Memory of all mirrors".to_owned(),
        &bounds::CACHE_MAX_BYTES,
        memory,
        "At the bound values are packed (--cache-pack), then those of whole prefixes are left out, and reads of them forwarded.",
    )];
    let histories = mirrors.iter().map(|mirror| {
        (
            format!("History of {}", mirror.name),
            &bounds::HISTORY_MAX_BYTES,
            mirror.memory.history_bytes,
            "At the bound the oldest revisions are dropped, and reads of them are forwarded.",
        )
    });
    let others = [
        (
            "Client connections",
            &bounds::MAX_CONNECTIONS,
            connections,
            "At the bound new connections wait.",
        ),
        (
            "Calls in flight",
            &bounds::MAX_CALLS,
            calls,
            "At the bound calls are refused with Unavailable.",
        ),
        (
            "Large reads in flight to etcd",
            &bounds::FORWARD_MAX_LARGE,
            gauge(large.in_flight.get()),
            "At the bound more reads wait.",
        ),
        (
            "Large reads waiting for etcd",
            &bounds::FORWARD_MAX_WAITING,
            gauge(large.waiting.get()),
            "At the bound more reads are refused with Unavailable.",
        ),
        (
            "Small reads in flight to etcd",
            &bounds::FORWARD_MAX_SMALL,
            gauge(small.in_flight.get()),
            "At the bound more reads wait.",
        ),
        (
            "Small reads waiting for etcd",
            &bounds::FORWARD_MAX_WAITING,
            gauge(small.waiting.get()),
            "At the bound more reads are refused with Unavailable.",
        ),
        (
            "Buffered bytes",
            &bounds::BUFFER_MAX_BYTES,
            metrics.buffers.used_bytes(),
            "At the bound calls are refused with ResourceExhausted.",
        ),
        (
            "Memory of watches",
            &bounds::WATCH_MAX_BYTES,
            gauge(metrics.proxy.watches.used_bytes.get()),
            "At the bound new watches are forwarded, and large events wait.",
        ),
    ]
    .map(|(name, bound, used, at_limit)| (name.to_owned(), bound, used, at_limit));
    first
        .into_iter()
        .chain(histories)
        .chain(others)
        .filter_map(|(name, bound, used, at_limit)| budget(&metrics.process, name, bound, used, at_limit))
        .collect()
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "bounds are whole and far below 2^53"
)]
fn budget(
    metrics: &Metrics,
    name: String,
    bound: &'static Bound,
    used: u64,
    at_limit: &'static str,
) -> Option<Budget> {
    let limit = metrics.process.limit(bound.name)?;
    Some(Budget {
        name,
        flag: bound.flag,
        in_bytes: bound.unit == Unit::Bytes,
        used,
        limit: limit as u64,
        ratio: used as f64 / limit.max(1.0),
        at_limit,
        is_meant_to_fill: bound.flag == bounds::HISTORY_MAX_BYTES.flag,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::memory::MirrorMemory;
    use crate::admin::status::model::ImageStatus;
    use rangecache_upstream::{EndpointPeer, gates};

    fn endpoint(is_connected: bool, is_healthy: bool) -> EndpointStatus {
        EndpointStatus {
            url: "http://etcd:2379".to_owned(),
            source: "flag",
            peer: EndpointPeer::default(),
            is_leaving: false,
            version: None,
            role: "follower",
            is_connected,
            is_healthy,
            is_avoided: false,
            connections: 6,
            connections_wanted: 6,
            calls: 0,
            last_error: "connection refused".to_owned(),
            no_range_stream: None,
        }
    }

    fn mirror(reason: Option<Reason>) -> MirrorStatus {
        MirrorStatus {
            name: "/registry/".to_owned(),
            is_everything: false,
            reason,
            revision: None,
            stale_age_ms: None,
            lag_revisions: None,
            oldest_revision: None,
            keys: 5,
            memory: MirrorMemory::default(),
            load_keys: 3,
            load_bytes: 2048,
            adopted: Vec::new(),
            image: None,
            events: 0,
            mismatches: 0,
            timeline: Vec::new(),
        }
    }

    const OPEN: [(&VersionGate, GateState); 1] = [(
        &gates::PROGRESS_NOTIFICATIONS,
        GateState::Open(Version::new(3, 7, 0)),
    )];

    fn facts<'a>(endpoints: &'a [EndpointStatus], mirrors: &'a [MirrorStatus]) -> Facts<'a> {
        Facts {
            mixed_clusters: &[],
            certificates: &[],
            draining: false,
            forwards_all: false,
            mirrors,
            endpoints,
            budgets: &[],
            gates: &OPEN,
            version: Some(Version::new(3, 7, 0)),
            auth: Auth::Off,
            has_own_user: false,
            user_problem: None,
            useless_neighbours: &[],
            cache_and_memory_bytes: (1, 1),
            panics: 0,
            shed: 0,
            failed: 0,
        }
    }

    fn found(facts: &Facts<'_>) -> Vec<(Severity, String)> {
        findings(facts)
            .into_iter()
            .map(|finding| (finding.severity, finding.title))
            .collect()
    }

    #[test]
    fn healthy_state_has_no_findings() {
        assert_eq!(found(&facts(&[endpoint(true, true)], &[mirror(None)])), []);
    }

    #[test]
    fn unreachable_etcd_is_one_finding_without_those_of_its_mirrors() {
        let endpoints = [endpoint(false, false)];
        let mirrors = [mirror(Some(Reason::FeedLost))];
        assert_eq!(
            found(&facts(&endpoints, &mirrors)),
            [(Severity::Bad, "etcd cannot be reached".to_owned())]
        );
    }

    #[test]
    fn etcd_without_a_healthy_member_is_bad_and_one_unhealthy_member_of_two_is_not() {
        let worst = |endpoints: &[EndpointStatus]| found(&facts(endpoints, &[])).first().cloned();
        let all = worst(&[endpoint(true, false)]).unwrap();
        assert_eq!(all, (Severity::Bad, "no member of etcd is healthy".to_owned()));
        let mirrors = [mirror(Some(Reason::FeedLost))];
        assert_eq!(
            found(&facts(&[endpoint(true, false)], &mirrors)),
            [all],
            "reads of the mirror are not forwarded"
        );
        let one = worst(&[endpoint(true, false), endpoint(true, true)]).unwrap();
        assert_eq!(one.0, Severity::Warning);
    }

    #[test]
    fn image_that_cannot_be_written_is_a_warning() {
        let with = |is_failing| MirrorStatus {
            image: Some(ImageStatus {
                bytes: 0,
                age_seconds: None,
                is_failing,
            }),
            ..mirror(None)
        };
        let endpoints = [endpoint(true, true)];
        assert_eq!(
            found(&facts(&endpoints, &[with(true)])),
            [(
                Severity::Warning,
                "the image of /registry/ cannot be written".to_owned()
            )]
        );
        assert_eq!(found(&facts(&endpoints, &[with(false)])), []);
    }

    #[test]
    fn neighbour_of_no_use_is_a_note() {
        let (endpoints, mirrors) = ([endpoint(true, true)], [mirror(None)]);
        let useless = [UselessNeighbour {
            url: "http://10.0.0.2:23790".parse().unwrap(),
            mirror: "/registry/".to_owned(),
            reason: "it does not answer in time".to_owned(),
        }];
        let facts = Facts {
            useless_neighbours: &useless,
            ..facts(&endpoints, &mirrors)
        };
        let findings = findings(&facts);
        let [finding] = findings.as_slice() else {
            panic!("{findings:?}");
        };
        assert_eq!(finding.severity, Severity::Note);
        assert!(finding.title.contains("http://10.0.0.2:23790"), "{finding:?}");
        assert!(
            finding.meaning.contains("it does not answer in time"),
            "{finding:?}"
        );
    }

    #[test]
    fn mirror_without_keys_is_a_warning_only_while_it_is_in_service() {
        let empty = |reason| MirrorStatus {
            keys: 0,
            ..mirror(reason)
        };
        let endpoints = [endpoint(true, true)];
        assert_eq!(
            found(&facts(&endpoints, &[empty(None)])),
            [(Severity::Warning, "etcd has no key in /registry/".to_owned())]
        );
        let loading = found(&facts(&endpoints, &[empty(Some(Reason::Loading))]));
        assert_eq!(loading.len(), 1);
        assert_eq!(loading[0].0, Severity::Note);
    }

    #[test]
    fn cache_that_may_take_more_than_the_memory_limit_is_bad() {
        let endpoints = [endpoint(true, true)];
        for (cache_bytes, expected) in [(1 << 30, 0), ((1 << 30) + 1, 1)] {
            let facts = Facts {
                cache_and_memory_bytes: (cache_bytes, 1 << 30),
                ..facts(&endpoints, &[])
            };
            let found = found(&facts);
            assert_eq!(found.len(), expected, "{found:?}");
            assert!(found.iter().all(|(severity, _)| *severity == Severity::Bad));
        }
    }

    #[test]
    fn certificate_is_a_finding_two_weeks_before_it_expires_and_bad_within_a_day_and_afterwards() {
        let certificate = |flag, days_left| CertificateStatus {
            side: if flag == "cert" { "etcd" } else { "clients" },
            flag,
            days_left,
        };
        let endpoints = [endpoint(true, true)];
        let certificates = [
            certificate("cert-file", -693),
            certificate("trusted-ca-file", 14),
            certificate("cert", 13),
            certificate("client-crl-file", 0),
        ];
        let facts = Facts {
            certificates: &certificates,
            ..facts(&endpoints, &[])
        };
        assert_eq!(
            found(&facts),
            [
                (Severity::Bad, "--cert-file has expired".to_owned()),
                (Severity::Bad, "--client-crl-file expires today".to_owned()),
                (Severity::Warning, "--cert expires in 13 days".to_owned()),
            ]
        );
    }

    #[test]
    fn findings_are_sorted_by_severity() {
        let endpoints = [endpoint(true, true)];
        let mirrors = [mirror(Some(Reason::OverBudget)), mirror(Some(Reason::Loading))];
        let facts = Facts {
            panics: 1,
            ..facts(&endpoints, &mirrors)
        };
        let severities: Vec<_> = found(&facts).iter().map(|(severity, _)| *severity).collect();
        assert_eq!(severities, [Severity::Bad, Severity::Warning, Severity::Note]);
    }

    /// Nothing is loaded without a user, and waiting would not help.
    #[test]
    fn missing_user_explains_why_nothing_is_loaded() {
        let endpoints = [endpoint(true, true)];
        let mirrors = [mirror(Some(Reason::Loading))];
        let facts = Facts {
            auth: Auth::On,
            ..facts(&endpoints, &mirrors)
        };
        let found = found(&facts);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, Severity::Warning);
    }

    #[test]
    fn gate_that_forwards_reads_is_a_finding_while_it_is_closed() {
        let closed = GateState::TooOld(Version::new(3, 5, 0));
        let endpoints = [endpoint(true, true)];
        let facts = Facts {
            gates: &[
                (&gates::PROGRESS_NOTIFICATIONS, closed),
                (&gates::RANGE_STREAM, closed),
            ],
            ..facts(&endpoints, &[])
        };
        let found = found(&facts);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, Severity::Warning);
    }
}
