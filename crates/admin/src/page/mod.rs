//! The page: the status as HTML. The script only requests the page again and updates what has changed; without it the
//! page shows the same.
//!
//! | file | subject |
//! |---|---|
//! | `reads` | reads: rates and sources, why not from memory, the slowest |
//! | `latency` | time that reads take |
//! | `changes` | what has changed last |
//! | `state` | mirrors, watches, endpoints, bounds and gates |
//! | `tables` | gRPC calls by code, prefixes that cost most, clients and what they cost |
//! | `about` | the process, its certificates and its flags |
//! | `charts` | charts as SVG |
//! | `parts` | parts that several sections share |
//!
//! Mirrors are named by the operator's prefixes, and the status has no key and no value, only prefixes of at most two
//! parts (I10). Names and user agents of clients are their own. Every text is escaped, by `maud`.

mod about;
mod changes;
mod charts;
mod latency;
mod parts;
mod reads;
mod state;
mod tables;

use std::time::Duration;

use maud::{Markup, html};

use super::status::model::Status;
use parts::{Flags, Section, links, remedy, time};
use rangecache_report::format::{counted, long};
use rangecache_report::{Finding, FindingId, Severity};

/// Style, at `/page.css`.
pub(super) const CSS: &str = include_str!("page.css");
/// Script, at `/page.js`.
pub(super) const JS: &str = include_str!("page.js");
/// Permits only this page's own files, and no frame around it.
pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const SHELL: &str = include_str!("page.html");
/// Position of the status in the shell.
const PLACEHOLDER: &str = "<!-- status -->";
/// Title in the shell.
const TITLE: &str = "<title>rangecache</title>";

/// The whole page.
pub(super) fn render(status: &Status) -> String {
    let sections: Vec<Section> = [
        findings(&status.findings),
        changes::changes(&status.changes, &status.at),
        Some(reads::reads(status)),
        reads::reasons(status),
        reads::slowest(&status.slowest),
        Some(state::mirrors(status)),
        Some(state::watches(status)),
        tables::calls(status),
        tables::prefixes(&status.prefixes),
        tables::clients(&status.clients),
        Some(state::endpoints(&status.endpoints)),
        Some(state::budgets(&status.budgets)),
        Some(state::gates(&status.gates)),
        Some(about::process(status)),
        about::certificates(&status.certificates),
        Some(about::flags(&status.flags)),
    ]
    .into_iter()
    .flatten()
    .collect();
    let main = html! {
        (heading(status))
        (links(&sections))
        @for section in &sections { (section) }
    };
    let instance = status.pod.as_ref().unwrap_or(&status.host);
    let (_, verdict) = verdict(status);
    let title = html! { title { (verdict) " · " (instance) " · rangecache" } };
    SHELL
        .replacen(TITLE, &title.into_string(), 1)
        .replacen(PLACEHOLDER, &main.into_string(), 1)
}

/// Severity of the worst finding, and the verdict that follows from it.
fn verdict(status: &Status) -> (Severity, String) {
    let worst = status.findings.first();
    let severity = worst.map_or(Severity::Good, |finding| finding.severity);
    let as_bad = |finding: &&Finding| finding.severity == severity;
    let number = status.findings.iter().filter(as_bad).count() as u64;
    let verdict = match severity {
        Severity::Good => "Healthy".to_owned(),
        Severity::Note => format!("Healthy ({})", counted(number, "note")),
        Severity::Warning => format!("Degraded ({})", counted(number, "warning")),
        Severity::Bad => format!("Unhealthy ({})", counted(number, "problem")),
    };
    (severity, verdict)
}

fn heading(status: &Status) -> Markup {
    let (severity, verdict) = verdict(status);
    let mirrors = status.mirrors.iter();
    let in_service = mirrors.filter(|mirror| mirror.reason.is_none()).count();
    let nothing = status
        .findings
        .iter()
        .any(|finding| finding.id == FindingId::AnswersNothing);
    let mirrors = match (in_service, status.mirrors.len()) {
        (1, 1) => "The mirror is in service.".to_owned(),
        (0, 1) => "The mirror is out of service.".to_owned(),
        (n, all) if n == all => format!("All {all} mirrors are in service."),
        (0, all) => format!("All {all} mirrors are out of service."),
        (n, all) => format!("{n} of {all} mirrors are in service."),
    };
    html! {
        section #headline class={ "headline " (severity.as_str()) } {
            p role="status" { strong { (verdict) "." } @if nothing { " Nothing is answered from memory." } " " (mirrors) }
            p.quiet {
                "rangecache " (status.version) " (commit " code { (status.commit) } ") on " b { (status.host) } " for "
                @for (index, url) in status.client_urls.iter().enumerate() {
                    @if index > 0 { ", " }
                    code { (url) }
                }
                " · up " (long(Duration::from_secs(status.uptime_seconds)))
                " · as of " (time(&status.at, "at"))
            }
        }
    }
}

fn findings(findings: &[Finding]) -> Option<Section> {
    let list = html! {
        ul.findings {
            @for finding in findings {
                li class={ "finding " (finding.severity.as_str()) } {
                    span.sign aria-hidden="true" { (sign(finding.severity)) }
                    div {
                        h3 { (finding.title) }
                        p { (Flags(&finding.meaning)) }
                        (remedy(&finding.remedy))
                    }
                }
            }
        }
    };
    (!findings.is_empty()).then(|| Section::new("findings", "What to know", list))
}

/// Sign of a severity, so that colour is not the only distinction.
fn sign(severity: Severity) -> &'static str {
    match severity {
        Severity::Good => "✓",
        Severity::Note => "i",
        Severity::Warning => "!",
        Severity::Bad => "✕",
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use rangecache_base::telemetry::clients::{ClientFigures, ClientName, ClientRates};
    use rangecache_base::telemetry::state_changes::{ChangeKind, StateChange};
    use rangecache_base::telemetry::{Outcome, Reason};

    use super::*;
    use crate::status::model::{
        Budget, CertificateStatus, CodeStatus, EndpointStatus, FlagStatus, GateStatus, Latency, MirrorStatus,
        OutcomeCount, Phase, Reads, SlowCall, StreamCount, WatchStatus,
    };
    use crate::{memory::MirrorMemory, status::samples::OpenWatches};

    const HOSTILE: &str = "/<img src=x onerror=alert(1)>\"&/";

    fn status() -> Status {
        let forwarded = Outcome::Forwarded(Reason::NotMirrored);
        Status {
            version: "1.2.3",
            commit: "0123abcd",
            at: "2026-01-01T12:34:56Z".to_owned(),
            uptime_seconds: 61,
            host: "node-1".to_owned(),
            client_urls: vec!["http://127.0.0.1:23790".to_owned()],
            certificates: vec![CertificateStatus {
                side: "clients",
                flag: "cert-file",
                days_left: 12,
            }],
            flags: vec![FlagStatus {
                flag: "max-calls".to_owned(),
                value: "7".to_owned(),
                source: "command line",
            }],
            ready: true,
            forward_all: false,
            findings: vec![Finding::new(FindingId::MirrorEmpty, "title").with_meaning("Raise --a-b.")],
            changes: vec![StateChange {
                at: SystemTime::UNIX_EPOCH,
                kind: ChangeKind::MirrorInService,
                subject: HOSTILE.to_owned(),
                details: "revision 7".to_owned(),
            }],
            reads: Reads {
                since_start: 5,
                per_second: 0.5,
                failed_per_second: 0.25,
                memory_ratio_last_minute: Some(0.6),
                latency_from_memory: Some(Latency {
                    p50_seconds: 0.000_12,
                    p99_seconds: 0.003,
                }),
                window_seconds: 60.0,
                memory_ratio: Some(0.9),
                outcomes: vec![OutcomeCount {
                    outcome: forwarded,
                    count: 2,
                }],
                ..Reads::default()
            },
            slowest: vec![SlowCall {
                method: "Range",
                mirror: None,
                outcome: forwarded,
                ended_at: "2026-01-01T12:34:50Z".to_owned(),
                total_seconds: 0.002,
                phases: vec![Phase {
                    name: "etcd",
                    seconds: 0.002,
                }],
                revision_asked: 0,
                revision_proven: 0,
                revision_served: 0,
                keys: 0,
                bytes: 2048,
            }],
            mirrors: vec![MirrorStatus {
                name: HOSTILE.to_owned(),
                revision: Some(7),
                stale_age_ms: Some(250),
                lag_revisions: Some(1),
                oldest_revision: Some(2),
                keys: 1_234,
                memory: MirrorMemory {
                    memory_bytes: 2048,
                    ..MirrorMemory::default()
                },
                events: 3,
                ..MirrorStatus::default()
            }],
            calls: vec![CodeStatus {
                grpc_code: "Unavailable",
                calls: 9_001,
                memory: 0,
                etcd: 8_000,
                failed: 1_000,
                refused: 1,
                none: 0,
            }],
            watches: WatchStatus {
                open: OpenWatches { memory: 4, etcd: 3 },
                memory_streams: 4,
                etcd_streams: vec![StreamCount {
                    reason: Reason::NotMirrored,
                    count: 3,
                }],
                watchers: 5,
                behind_revisions: 6,
                ..WatchStatus::default()
            },
            clients: vec![ClientFigures {
                name: ClientName::of_connection(Some(HOSTILE), None),
                connections: 1,
                in_flight: 0,
                watches: 0,
                rates: ClientRates {
                    calls: 2.0,
                    from_etcd: 0.0,
                    bytes: 4096.0,
                },
                calls: 5,
                lists: 0,
                from_memory: 5,
                from_etcd: 0,
                refused: 0,
                received_bytes: 0,
                sent_bytes: 1 << 20,
                agent: HOSTILE.into(),
                last_seen: None,
            }],
            endpoints: vec![EndpointStatus {
                url: "http://etcd:2379".to_owned(),
                source: "flag",
                role: "no_leader",
                is_connected: true,
                connections: 4,
                connections_wanted: 6,
                calls: 1,
                ..EndpointStatus::default()
            }],
            gates: vec![GateStatus {
                name: "RangeStream",
                severity: Severity::Note,
                state: "off".to_owned(),
                meaning: "Meaning.",
                finding: None,
            }],
            budgets: vec![Budget {
                name: "Memory".to_owned(),
                flag: "cache-max-bytes",
                in_bytes: true,
                used: 1024,
                limit: 2048,
                ratio: 0.5,
                at_limit: "",
                alarm_ratio: Some(0.9),
            }],
            ..Status::default()
        }
    }

    #[test]
    fn page_shows_every_section_and_escapes_names() {
        let page = render(&status());
        for text in [
            "<title>Degraded (1 warning) · node-1 · rangecache</title>",
            "<strong>Degraded (1 warning).</strong>",
            "<a href=\"#changes\">What changed last</a>",
            "in service at revision 7",
            "<dd id=\"reads-failed\">0.25</dd>",
            "up 1 min 1 s",
            "<code class=\"flag\">--a-b</code>",
            "<dd id=\"reads-total\">5</dd>",
            "<dd id=\"reads-memory\">60 %</dd>",
            "forwarded{not_mirrored}",
            "outside of the mirrors",
            "<dt>role</dt><dd>knows no leader</dd>",
            "<code>/&lt;img src=x onerror=alert(1)&gt;&quot;&amp;/</code>",
            "1 KiB of 2 KiB",
            "id=\"gates-title\"",
            "certificate <code>/&lt;img",
            "<td>4 KiB</td>",
            "(commit <code>0123abcd</code>)",
            "p50 <b>120 µs</b>",
            "p99 <b>3 ms</b>",
            "p99 <b>–</b>",
            "<code>Unavailable</code></th><td>9,001</td><td>0</td><td>8,000</td><td>1,000</td><td>1</td>",
            "from memory <b id=\"watches-memory\">4</b>",
            "by etcd <b id=\"watches-etcd\">3</b>",
        ] {
            assert!(page.contains(text), "{text} is not in\n{page}");
        }
        assert!(!page.contains("<img"), "{page}");
    }
    #[test]
    fn every_section_has_a_link_and_those_without_content_are_left_out() {
        let whole = render(&status());
        let idle = render(&Status {
            findings: Vec::new(),
            changes: Vec::new(),
            slowest: Vec::new(),
            calls: Vec::new(),
            clients: Vec::new(),
            certificates: Vec::new(),
            reads: Reads {
                outcomes: Vec::new(),
                ..status().reads
            },
            ..status()
        });
        for page in [&whole, &idle] {
            let sections = page.matches("<section id=\"").count();
            // The heading is the first one.
            assert_eq!(page.matches("<a href=\"#").count() + 1, sections, "{page}");
        }
        for id in [
            "findings",
            "changes",
            "reasons",
            "slowest",
            "calls",
            "clients",
            "certificates",
        ] {
            let section = format!("<section id=\"{id}\"");
            assert!(whole.contains(&section), "{id} is missing");
            assert!(!idle.contains(&section), "{id} is empty");
        }
        assert!(
            idle.contains("<title>Healthy · node-1 · rangecache</title>"),
            "{idle}"
        );
    }
}
