//! Findings, gates and used bounds.

use std::time::Duration;

use rangecache_base::telemetry::{Metrics, Outcome, Reason, metrics::unsigned};
use rangecache_base::unix_time;
use rangecache_config::bounds::{self, Bound, Unit};
use rangecache_mirror::{UselessNeighbour, lineage::Auth};

use super::handles::Handles;
use super::status::model::{
    Budget, CertificateStatus, EndpointStatus, GateStatus, MirrorStatus, Reads, Status,
};
use rangecache_report::format::{bytes, count, counted};
use rangecache_report::reasons::explain_reason;
use rangecache_report::{Finding, FindingId, Severity};

/// Days before its expiry from which on a certificate is a finding; the alert on it has as many.
const FEW_DAYS_LEFT: i64 = 14;
const SECONDS_PER_DAY: i64 = 86_400;
/// Wait of one read in a hundred for its proof that is a finding; KEP-2340's bound, and the alert's.
const SLOW_PROOF_SECONDS: f64 = 0.2;
/// Time after which shares of reads are findings: the loads of a start have none.
const LONG_SECONDS: f64 = 14.0 * 60.0;

/// Findings, the worst first; none if everything is as it should be.
pub(super) fn findings(facts: &Status) -> Vec<Finding> {
    let mut findings = Vec::new();
    let more = &facts.unlisted;
    if more.draining {
        findings.push(
            Finding::new(FindingId::Stopping, "rangecache is stopping")
                .with_meaning("No new calls are accepted; calls in flight may complete."),
        );
    }
    if facts.ready && !more.answers_from_memory {
        findings.push(Finding::explained(
            FindingId::AnswersNothing,
            "nothing is answered from memory",
        ));
    }
    if facts.forward_all {
        findings.push(Finding::new(FindingId::MemorySwitchedOff, "memory is switched off").with_meaning(
            "An operator has sent POST /forward-all: etcd answers every read and serves every watch. The mirrors stay up to date.",
        ));
    }
    findings.extend(rangecache_report::different_clusters(&more.mixed_clusters));
    findings.extend(facts.certificates.iter().filter_map(certificate_finding));
    findings.extend(endpoint_findings(facts));
    findings.extend(facts.gates.iter().filter_map(|gate| gate.finding.clone()));
    findings.extend(more.user.clone());
    findings.extend(
        facts
            .mirrors
            .iter()
            .flat_map(|mirror| mirror_findings(mirror, facts)),
    );
    findings.extend(more.useless_neighbours.iter().map(neighbour_finding));
    let (cache_bytes, memory_bytes) = more.cache_and_memory_bytes;
    findings.extend(rangecache_report::budget_above_memory(cache_bytes, memory_bytes));
    if more.panics > 0 {
        let title = format!("{} since the start", counted(more.panics, "panic"));
        findings.push(
            Finding::new(FindingId::Panics, title)
                .with_meaning("Each ended one call or restarted one task, and is a bug."),
        );
    }
    findings.extend(read_findings(&facts.reads));
    for budget in facts.budgets.iter().filter(|budget| budget.is_nearly_used_up()) {
        let title = format!("{}: {:.0} % of the bound", budget.name, budget.ratio * 100.0);
        let remedy = format!("Raise --{}, or find the clients that need so much.", budget.flag);
        findings.push(
            Finding::new(FindingId::BoundNearlyReached, title)
                .about(budget.flag)
                .with_meaning(format!("At the bound {}.", budget.at_limit))
                .with_remedy(remedy),
        );
    }
    if facts.mirrors.iter().any(|mirror| mirror.stale_age_ms.is_some()) {
        findings.push(Finding::explained(
            FindingId::ServesStale,
            "reads are answered without etcd",
        ));
    }
    if more
        .proof_p99_seconds
        .is_some_and(|seconds| seconds > SLOW_PROOF_SECONDS)
    {
        let title = "one read in a hundred waits longer than 200 ms for its proof";
        findings.push(Finding::explained(FindingId::ProofsSlow, title));
    }
    // That no member is healthy explains why checks fail.
    let is_due = |finding: &&Finding| finding.id != FindingId::QuorumChecksFail || has_healthy_member(facts);
    findings.extend(more.symptoms.iter().filter(is_due).cloned());
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

/// Findings on the reads of the last 15 minutes.
fn read_findings(reads: &Reads) -> impl Iterator<Item = Finding> {
    let ended = |is: fn(Outcome) -> bool| {
        let ended = reads.outcomes.iter().filter(|read| is(read.outcome));
        ended.map(|read| read.count).sum::<u64>()
    };
    let find = |id, is: fn(Outcome) -> bool, what: &str, meaning: &str| {
        let title = || format!("{} {what} in the last 15 minutes", counted(ended(is), "read"));
        (ended(is) > 0).then(|| Finding::new(id, title()).with_meaning(meaning))
    };
    let all = ended(|_| true);
    let is_long = reads.window_seconds >= LONG_SECONDS;
    let share = |id, is: fn(Outcome) -> bool, (share, per_second): (f64, f64), title: &str| {
        #[allow(clippy::cast_precision_loss, reason = "a share of counts")]
        let (part, all) = (ended(is) as f64, all as f64);
        let is_due = is_long && part > share * all && part > per_second * reads.window_seconds;
        is_due.then(|| Finding::explained(id, title))
    };
    [
        find(
            FindingId::ReadsFailed,
            |outcome| matches!(outcome, Outcome::Failed(_)),
            "failed",
            "Memory could not answer, and etcd could not be reached or did not complete its response in time. Clients may retry.",
        ),
        find(
            FindingId::ReadsRefused,
            |outcome| matches!(outcome, Outcome::Shed(_)),
            "refused",
            "Memory could not answer, and a bound was reached. Clients may retry.",
        ),
        share(
            FindingId::MostForwarded,
            |outcome| matches!(outcome, Outcome::Forwarded(_) | Outcome::Streamed(_)),
            (0.5, 1.0),
            "most reads go to etcd",
        ),
        share(
            FindingId::HistoryShort,
            |outcome| outcome.labels().1 == Reason::HistoryGone.as_str(),
            (0.05, 0.1),
            "reads ask for revisions that memory no longer has",
        ),
    ]
    .into_iter()
    .flatten()
}

fn endpoint_findings(facts: &Status) -> Vec<Finding> {
    let endpoints = facts.endpoints.iter();
    if !endpoints.clone().any(|endpoint| endpoint.is_connected) {
        let is_hub = endpoints.clone().any(|endpoint| endpoint.peer.is_rangecache());
        let errors: Vec<_> = endpoints.map(|endpoint| endpoint.last_error.as_str()).collect();
        let meaning = format!(
            "Calls wait up to --connect-timeout for a connection and then fail with Unavailable. {}",
            errors.join("; ")
        );
        let finding = if is_hub {
            Finding::new(FindingId::EtcdUnreachable, "no hub can be reached").with_remedy(
                "Check that the rangecaches of --endpoints run; --fallback-endpoints names etcd for the time in which none of them serves.",
            )
        } else {
            Finding::new(FindingId::EtcdUnreachable, "etcd cannot be reached")
        };
        return vec![finding.with_meaning(meaning)];
    }
    if !has_healthy_member(facts) {
        return vec![Finding::new(FindingId::NoHealthyMember, "no member of etcd is healthy").with_meaning(
            "No member that --endpoints names serves, votes and knows a leader: linearizable reads and writes wait, and fail.",
        )];
    }
    let mut findings: Vec<_> = endpoints.filter_map(endpoint_finding).collect();
    if facts.unlisted.version_unknown {
        findings.push(rangecache_report::version_unknown());
    }
    findings
}

/// Certificates and revocation lists, those that expire first at the beginning.
pub(super) fn certificates(handles: &Handles) -> Vec<CertificateStatus> {
    let now = unix_time::now_seconds();
    let files = handles.metrics.tls.not_after();
    let mut certificates: Vec<_> = files
        .into_iter()
        .map(|((side, file), not_after)| CertificateStatus {
            side,
            flag: flag_of(side, file),
            days_left: (not_after - now).div_euclid(SECONDS_PER_DAY),
        })
        .collect();
    certificates.sort_by_key(|certificate| certificate.days_left);
    certificates
}

/// Flag that names a file of certificates.
fn flag_of(side: &'static str, file: &'static str) -> &'static str {
    match (side, file) {
        ("clients", "cert") => "cert-file",
        ("clients", "ca") => "trusted-ca-file",
        ("clients", "crl") => "client-crl-file",
        ("etcd", "ca") => "cacert",
        _ => file,
    }
}

/// Whether a file of certificates has expired or will soon.
pub(super) fn certificate_finding(certificate: &CertificateStatus) -> Option<Finding> {
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

/// Whether any member serves, votes and knows a leader.
fn has_healthy_member(facts: &Status) -> bool {
    let mut endpoints = facts.endpoints.iter();
    endpoints.any(|endpoint| endpoint.is_connected && endpoint.is_healthy)
}

fn endpoint_finding(endpoint: &EndpointStatus) -> Option<Finding> {
    let url = &endpoint.url;
    let (id, state, meaning) = match (endpoint.is_connected, endpoint.is_healthy) {
        _ if endpoint.is_leaving => return None,
        (true, true) => return None,
        (true, false) => (
            FindingId::MemberUnhealthy,
            "unhealthy",
            "The member does not serve, has no leader or does not vote. Other endpoints are preferred."
                .to_owned(),
        ),
        (false, _) => {
            let meaning = format!("Other endpoints are used. {}", endpoint.last_error);
            (FindingId::MemberNotConnected, "not connected", meaning)
        }
    };
    let finding = Finding::new(id, format!("{url} is {state}"));
    Some(finding.about(url).with_meaning(meaning))
}

/// Problem of rangecache's own user, or that it has none and needs one.
pub(super) fn user_finding(handles: &Handles) -> Option<Finding> {
    let credentials = handles.upstream.credentials();
    let is_needed = handles.mirrors.cluster_state.auth() == Auth::On && !credentials.name_a_user();
    let problem = credentials.problem();
    let problem = problem.map(|problem| rangecache_report::user_problem(&problem));
    problem.or_else(|| is_needed.then(rangecache_report::no_own_user))
}

fn mirror_findings(mirror: &MirrorStatus, facts: &Status) -> Vec<Finding> {
    let name = &mirror.name;
    let find = |id, title: String, meaning: String| Finding::new(id, title).about(name).with_meaning(meaning);
    let mut findings = Vec::new();
    if mirror.mismatches > 0 {
        let times = match mirror.mismatches {
            1 => "once".to_owned(),
            n => format!("{} times", count(n)),
        };
        let meaning = format!("Verification found a difference {times}; the mirror was loaded again.");
        findings.push(find(
            FindingId::MirrorDiffered,
            format!("{name} has differed from etcd"),
            meaning,
        ));
    }
    // An etcd that cannot be reached or does not serve, or that does not permit the reads of a load, is a finding of its own, and
    // explains these. Reads of the mirror are not forwarded then, they fail.
    let is_explained = !has_healthy_member(facts) || facts.unlisted.user.is_some();
    match mirror.reason {
        Some(Reason::FeedLost | Reason::Loading) if is_explained => {}
        Some(reason) => findings.push(out_of_service(mirror, reason, facts)),
        None if mirror.keys == 0 => {
            let meaning = "What clients read is not in this mirror, unless etcd is new.".to_owned();
            let finding = find(
                FindingId::MirrorEmpty,
                format!("etcd has no key in {name}"),
                meaning,
            );
            // Of the whole keyspace: an etcd that is new.
            let severity = if mirror.is_everything {
                Severity::Note
            } else {
                Severity::Warning
            };
            findings.push(finding.with_severity(severity));
        }
        None => findings.extend(mirror.memory.finding(name)),
    }
    if let Some(image) = mirror.image.as_ref().filter(|image| image.is_failing) {
        let next = match image.age_seconds {
            None => "The next start reads every key from etcd.",
            Some(_) => "The next start finds an older image, and reads more from etcd.",
        };
        let title = format!("the image of {name} cannot be written");
        findings.push(find(
            FindingId::ImageNotWritten,
            title,
            format!("Serving continues. {next}"),
        ));
    }
    findings
}

/// Finding about a mirror that is out of service for `reason`.
fn out_of_service(mirror: &MirrorStatus, reason: Reason, facts: &Status) -> Finding {
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
    let meaning = format!("{}{details} Its reads are forwarded.", explanation.meaning);
    Finding::new(id, title)
        .about(&mirror.name)
        .with_meaning(meaning)
        .with_remedy(explanation.remedy)
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

/// The version gates, auth and verification.
pub(super) fn gates(handles: &Handles) -> Vec<GateStatus> {
    let versions = handles.upstream.gates().into_iter().map(|(gate, state)| {
        let (state, finding) = rangecache_report::judge_gate(gate, state);
        GateStatus {
            name: gate.title,
            severity: finding.severity,
            state,
            meaning: gate.meaning,
            finding: Some(finding).filter(|finding| finding.severity >= Severity::Warning),
        }
    });
    let auth = handles.mirrors.cluster_state.auth();
    let has_own_user = handles.upstream.credentials().name_a_user();
    versions
        .chain([
            auth_gate(auth, has_own_user),
            verification_gate(&handles.metrics.process),
        ])
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
        finding: None,
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
        finding: None,
    }
}

/// Bounds that an operator may have to raise, with what is used of them.
pub(super) fn budgets(handles: &Handles, mirrors: &[MirrorStatus]) -> Vec<Budget> {
    let metrics = &handles.metrics;
    let connections = unsigned(metrics.connections.open.get());
    let calls = (handles.tasks.len() as u64).saturating_sub(connections);
    let memory = mirrors
        .iter()
        .map(|mirror| mirror.memory.memory_bytes + mirror.memory.held_bytes)
        .sum();
    let (large, small) = (metrics.proxy.slots.large(), metrics.proxy.slots.small());
    let histories = mirrors.iter().map(|mirror| {
        let name = format!("History of {}", mirror.name);
        (
            name,
            &bounds::HISTORY_MAX_BYTES,
            mirror.memory.history_bytes,
            "the oldest revisions are dropped, and reads of them are forwarded",
        )
    });
    /// Names of what is used, bounds, what is used of them, and what happens at the bound.
    macro_rules! used {
        ($($name:literal, $bound:ident, $used:expr, $at_limit:literal;)+) => {
            [$(($name.to_owned(), &bounds::$bound, $used, $at_limit)),+]
        };
    }
    let first = used! {
        "Memory of all mirrors", CACHE_MAX_BYTES, memory,
            "values are packed (--cache-pack), then those of whole prefixes are left out, and reads of them forwarded";
    };
    let others = used! {
        "Client connections", MAX_CONNECTIONS, connections, "new connections wait";
        "Calls in flight", MAX_CALLS, calls, "calls are refused with Unavailable";
        "Large reads in flight to etcd", FORWARD_MAX_LARGE, unsigned(large.in_flight.get()), "more reads wait";
        "Large reads waiting for etcd", FORWARD_MAX_WAITING, unsigned(large.waiting.get()), "more reads are refused with Unavailable";
        "Small reads in flight to etcd", FORWARD_MAX_SMALL, unsigned(small.in_flight.get()), "more reads wait";
        "Small reads waiting for etcd", FORWARD_MAX_WAITING, unsigned(small.waiting.get()), "more reads are refused with Unavailable";
        "Buffered bytes", BUFFER_MAX_BYTES, metrics.buffers.used_bytes(), "calls are refused with ResourceExhausted";
        "Memory of watches", WATCH_MAX_BYTES, unsigned(metrics.proxy.watches.used_bytes.get()),
            "new watches are forwarded, and large events wait";
    };
    let all = first.into_iter().chain(histories).chain(others);
    all.filter_map(|(name, bound, used, at_limit)| budget(&metrics.process, name, bound, used, at_limit))
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
        alarm_ratio: match bound.flag {
            flag if flag == bounds::HISTORY_MAX_BYTES.flag => None,
            // As its alert: what waits is refused at the bound.
            flag if flag == bounds::FORWARD_MAX_WAITING.flag => Some(0.5),
            _ => Some(0.9),
        },
    })
}

#[cfg(test)]
mod tests {
    use rangecache_base::telemetry::outcome::Read;

    use super::*;
    use crate::status::model::{ImageStatus, OutcomeCount};

    fn endpoint(is_connected: bool, is_healthy: bool) -> EndpointStatus {
        EndpointStatus {
            url: "http://etcd:2379".to_owned(),
            is_connected,
            is_healthy,
            last_error: "connection refused".to_owned(),
            ..EndpointStatus::default()
        }
    }

    fn mirror(reason: Option<Reason>) -> MirrorStatus {
        MirrorStatus {
            name: "/registry/".to_owned(),
            reason,
            keys: 5,
            load_keys: 3,
            load_bytes: 2048,
            ..MirrorStatus::default()
        }
    }

    fn facts(endpoints: impl Into<Vec<EndpointStatus>>, mirrors: impl Into<Vec<MirrorStatus>>) -> Status {
        Status {
            endpoints: endpoints.into(),
            mirrors: mirrors.into(),
            ..Status::default()
        }
    }

    /// Facts of a process whose only endpoint is healthy, and whose mirrors are these.
    fn healthy(mirrors: impl Into<Vec<MirrorStatus>>) -> Status {
        facts([endpoint(true, true)], mirrors)
    }

    fn found(facts: &Status) -> Vec<(Severity, String)> {
        findings(facts)
            .into_iter()
            .map(|finding| (finding.severity, finding.title))
            .collect()
    }

    #[test]
    fn healthy_state_has_no_findings() {
        assert_eq!(found(&healthy([mirror(None)])), []);
    }

    #[test]
    fn unreachable_etcd_is_one_finding_without_those_of_its_mirrors() {
        let mirrors = [mirror(Some(Reason::FeedLost))];
        assert_eq!(
            found(&facts([endpoint(false, false)], mirrors)),
            [(Severity::Bad, "etcd cannot be reached".to_owned())]
        );
    }

    #[test]
    fn etcd_without_a_healthy_member_is_bad_and_one_unhealthy_member_of_two_is_not() {
        let worst = |endpoints: Vec<EndpointStatus>| found(&facts(endpoints, [])).first().cloned();
        let all = worst(vec![endpoint(true, false)]).unwrap();
        assert_eq!(all, (Severity::Bad, "no member of etcd is healthy".to_owned()));
        let mirrors = [mirror(Some(Reason::FeedLost))];
        assert_eq!(
            found(&facts([endpoint(true, false)], mirrors)),
            [all],
            "reads of the mirror are not forwarded"
        );
        let one = worst(vec![endpoint(true, false), endpoint(true, true)]).unwrap();
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
        assert_eq!(
            found(&healthy([with(true)])),
            [(
                Severity::Warning,
                "the image of /registry/ cannot be written".to_owned()
            )]
        );
        assert_eq!(found(&healthy([with(false)])), []);
    }

    #[test]
    fn neighbour_of_no_use_is_a_note() {
        let useless = UselessNeighbour {
            url: "http://10.0.0.2:23790".parse().unwrap(),
            mirror: "/registry/".to_owned(),
            reason: "it does not answer in time".to_owned(),
        };
        let mut facts = healthy([mirror(None)]);
        facts.unlisted.useless_neighbours = vec![useless];
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
        assert_eq!(
            found(&healthy([empty(None)])),
            [(Severity::Warning, "etcd has no key in /registry/".to_owned())]
        );
        let loading = found(&healthy([empty(Some(Reason::Loading))]));
        assert_eq!(loading.len(), 1);
        assert_eq!(loading[0].0, Severity::Note);
    }

    #[test]
    fn cache_that_may_take_more_than_the_memory_limit_is_bad() {
        for (cache_bytes, expected) in [(1 << 30, 0), ((1 << 30) + 1, 1)] {
            let mut facts = healthy([]);
            facts.unlisted.cache_and_memory_bytes = (cache_bytes, 1 << 30);
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
        let certificates = vec![
            certificate("cert-file", -693),
            certificate("trusted-ca-file", 14),
            certificate("cert", 13),
            certificate("client-crl-file", 0),
        ];
        let facts = Status {
            certificates,
            ..healthy([])
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
        let mut facts = healthy([Reason::OverBudget, Reason::Loading].map(|reason| mirror(Some(reason))));
        facts.unlisted.panics = 1;
        let severities: Vec<_> = found(&facts).iter().map(|(severity, _)| *severity).collect();
        assert_eq!(severities, [Severity::Bad, Severity::Warning, Severity::Note]);
    }

    /// Nothing is loaded without a user, and waiting would not help.
    #[test]
    fn missing_user_explains_why_nothing_is_loaded() {
        let mut facts = healthy([mirror(Some(Reason::Loading))]);
        facts.unlisted.user = Some(rangecache_report::no_own_user());
        let found = found(&facts);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, Severity::Warning);
    }

    /// The loads of a start, and a few reads, are no reason to look.
    #[test]
    fn shares_of_reads_are_findings_once_they_have_lasted() {
        let found = |window_seconds, outcome, part, all| {
            let count = |outcome, count| OutcomeCount { outcome, count };
            let hits = count(Outcome::Hit(Read::Linearizable), all - part);
            let mut facts = healthy([]);
            facts.reads.window_seconds = window_seconds;
            facts.reads.outcomes = vec![hits, count(outcome, part)];
            let found = findings(&facts).into_iter();
            found.map(|finding| finding.id).collect::<Vec<_>>()
        };
        let forwarded = Outcome::Forwarded(Reason::NotMirrored);
        assert_eq!(found(900.0, forwarded, 1_001, 2_000), [FindingId::MostForwarded]);
        assert_eq!(found(900.0, forwarded, 1_000, 2_000), []);
        assert_eq!(found(900.0, forwarded, 899, 899), []);
        assert_eq!(found(60.0, forwarded, 1_001, 2_000), []);
        let older = Outcome::Forwarded(Reason::HistoryGone);
        assert_eq!(found(900.0, older, 101, 2_000), [FindingId::HistoryShort]);
        assert_eq!(found(900.0, older, 100, 2_000), []);
    }

    #[test]
    fn symptoms_are_found_unless_something_explains_them() {
        let symptoms = [FindingId::QuorumChecksFail, FindingId::SpansLost];
        let with = |mut facts: Status| {
            facts.unlisted.symptoms = symptoms.map(|id| Finding::explained(id, "title")).to_vec();
            facts.unlisted.proof_p99_seconds = Some(0.3);
            let found = findings(&facts).into_iter();
            found.map(|finding| finding.id).collect::<Vec<_>>()
        };
        let [failing, lost] = symptoms;
        assert_eq!(with(healthy([])), [failing, FindingId::ProofsSlow, lost]);
        let none = facts([endpoint(true, false)], []);
        assert_eq!(
            with(none),
            [FindingId::NoHealthyMember, FindingId::ProofsSlow, lost]
        );
    }

    #[test]
    fn view_that_is_served_without_etcd_is_a_warning() {
        let stale = MirrorStatus {
            stale_age_ms: Some(9),
            ..mirror(None)
        };
        let expected = (Severity::Warning, "reads are answered without etcd".to_owned());
        assert_eq!(found(&healthy([stale])), [expected]);
    }
}
