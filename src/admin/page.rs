//! The page: [`Status`] as HTML. The script only asks for it again and puts what has changed into place, so that it shows the
//! same without.
//!
//! No name comes from a client: mirrors are called by the operator's prefixes, and no key and no value is ever here (I10).
//! All texts are escaped all the same.

mod reads;

use std::fmt::Write;
use std::time::Duration;

use super::advice;
use super::charts;
use super::findings::{Finding, Severity};
use super::status::{Endpoint, Mirror, Status};
use super::words::{Escaped, Marked, bytes, count, counted, long};
use crate::telemetry::Reason;

/// Styles, at `/page.css`.
pub(super) const CSS: &str = include_str!("page/page.css");
/// The script, at `/page.js`.
pub(super) const JS: &str = include_str!("page/page.js");
/// What may be loaded, and from where: this page's own files. Nothing may frame it.
pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const SHELL: &str = include_str!("page/page.html");
const PLACE: &str = "<!-- status -->";

/// Writing into a `String` cannot fail.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => {{ let _ = write!($out, $($arg)*); }};
}
use put;

/// The whole page.
pub(super) fn render(status: &Status) -> String {
    let mut main = String::with_capacity(32 << 10);
    heading(&mut main, status);
    findings(&mut main, &status.findings);
    reads::reads(&mut main, status);
    reads::reasons(&mut main, status);
    reads::slowest(&mut main, &status.slowest);
    mirrors(&mut main, status);
    endpoints(&mut main, &status.endpoints);
    budgets(&mut main, status);
    gates(&mut main, status);
    SHELL.replacen(PLACE, &main, 1)
}

fn heading(out: &mut String, status: &Status) {
    let severity = status
        .findings
        .first()
        .map_or(Severity::Good, |finding| finding.severity);
    let in_service = status
        .mirrors
        .iter()
        .filter(|mirror| mirror.reason.is_none())
        .count();
    let mirrors = match (in_service, status.mirrors.len()) {
        (1, 1) => "The mirror is in service.".to_owned(),
        (0, 1) => "The mirror is out of service.".to_owned(),
        (n, all) if n == all => format!("All {all} mirrors are in service."),
        (0, all) => format!("All {all} mirrors are out of service."),
        (n, all) => format!("{n} of {all} mirrors are in service."),
    };
    put!(
        out,
        r#"<section id="headline" class="headline {}"><p role="status"><strong>{}</strong> {mirrors}</p>"#,
        name(severity),
        headline(severity),
    );
    put!(
        out,
        r#"<p class="quiet">rangecache {} · up {} · as of {}</p></section>"#,
        status.version,
        long(Duration::from_secs(status.uptime_seconds)),
        time(&status.at, "at"),
    );
}

/// A time of day; `at` is RFC 3339, whole seconds, UTC.
fn time(at: &str, class: &str) -> String {
    let clock = at
        .split_once('T')
        .map_or(at, |(_, clock)| clock.trim_end_matches('Z'));
    format!(r#"<time class="{class}" datetime="{at}">{clock} UTC</time>"#)
}

fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::Good => "good",
        Severity::Note => "note",
        Severity::Warning => "warning",
        Severity::Bad => "bad",
    }
}

fn headline(severity: Severity) -> &'static str {
    match severity {
        Severity::Good => "All is well.",
        Severity::Note => "All is well, with a note.",
        Severity::Warning => "Slower than it could be.",
        Severity::Bad => "Something is wrong.",
    }
}

/// So that colours are not all that tells.
fn sign(severity: Severity) -> &'static str {
    match severity {
        Severity::Good => "✓",
        Severity::Note => "i",
        Severity::Warning => "!",
        Severity::Bad => "✕",
    }
}

fn findings(out: &mut String, findings: &[Finding]) {
    if findings.is_empty() {
        return;
    }
    out.push_str(r#"<section id="findings" aria-labelledby="findings-title"><h2 id="findings-title">What to know</h2><ul class="findings">"#);
    for finding in findings {
        put!(
            out,
            r#"<li class="finding {}"><span class="sign" aria-hidden="true">{}</span><div><h3>{}</h3><p>{}</p>"#,
            name(finding.severity),
            sign(finding.severity),
            Escaped(&finding.title),
            Marked(&finding.meaning),
        );
        remedy(out, &finding.remedy);
        out.push_str("</div></li>");
    }
    out.push_str("</ul></section>");
}

fn remedy(out: &mut String, remedy: &str) {
    if !remedy.is_empty() {
        put!(out, r#"<p class="remedy"><b>To do:</b> {}</p>"#, Marked(remedy));
    }
}

fn percent(ratio: f64) -> String {
    match ratio * 100.0 {
        // Not all, if one is missing.
        percent if (99.95..100.0).contains(&percent) => "99.9 %".to_owned(),
        percent if percent > 0.0 && percent < 0.05 => "< 0.1 %".to_owned(),
        percent => format!("{} %", format!("{percent:.1}").trim_end_matches(".0")),
    }
}

fn mirrors(out: &mut String, status: &Status) {
    out.push_str(r#"<section id="mirrors" aria-labelledby="mirrors-title"><h2 id="mirrors-title">Mirrors</h2><ul class="cards">"#);
    for mirror in &status.mirrors {
        of_mirror(out, mirror);
    }
    out.push_str("</ul></section>");
}

fn of_mirror(out: &mut String, mirror: &Mirror) {
    let (class, state) = match mirror.reason {
        None => ("good", "in service".to_owned()),
        Some(reason) => (
            stretch_class(Some(reason)),
            format!("out of service: {}", advice::of_reason(reason).title),
        ),
    };
    put!(
        out,
        r#"<li class="card"><h3><code>{}</code></h3><p><span class="state {class}">{state}</span></p>"#,
        Escaped(&mirror.name)
    );
    let stretches: Vec<_> = mirror
        .timeline
        .iter()
        .map(|stretch| (stretch_class(stretch.reason), stretch.samples))
        .collect();
    out.push_str(&charts::strip(&stretches, &past(mirror)));
    out.push_str("<dl>");
    let number = |value: Option<i64>| value.map_or("–".to_owned(), |value| count(value.unsigned_abs()));
    let lag = match mirror.lag_revisions {
        None => "–".to_owned(),
        Some(lag) => counted(lag.unsigned_abs(), "revision"),
    };
    pair(out, "revision", &number(mirror.revision));
    pair(out, "behind etcd by", &lag);
    pair(out, "keys", &count(mirror.keys));
    pair(out, "memory", &bytes(mirror.memory_bytes));
    pair(out, "of it past revisions", &bytes(mirror.history_bytes));
    pair(out, "readable from revision", &number(mirror.oldest_revision));
    pair(out, "events applied", &count(mirror.events));
    if mirror.reason.is_some() {
        let loaded = format!(
            "{}, {}",
            counted(mirror.load_keys, "key"),
            bytes(mirror.load_bytes)
        );
        pair(out, "last load", &loaded);
    }
    out.push_str("</dl></li>");
}

fn stretch_class(reason: Option<Reason>) -> &'static str {
    match reason {
        None => "good",
        Some(Reason::Loading) => "note",
        Some(_) => "warning",
    }
}

/// The strip in words.
fn past(mirror: &Mirror) -> String {
    let all: usize = mirror.timeline.iter().map(|stretch| stretch.samples).sum();
    let inside: usize = mirror
        .timeline
        .iter()
        .filter(|stretch| stretch.reason.is_none())
        .map(|stretch| stretch.samples)
        .sum();
    #[allow(clippy::cast_precision_loss, reason = "there are some two hundred")]
    let ratio = inside as f64 / all.max(1) as f64;
    format!(
        "in service {} of the time shown, 15 minutes at most",
        percent(ratio)
    )
}

fn pair(out: &mut String, title: &str, value: &str) {
    put!(out, "<div><dt>{title}</dt><dd>{value}</dd></div>");
}

fn endpoints(out: &mut String, endpoints: &[Endpoint]) {
    out.push_str(r#"<section id="endpoints" aria-labelledby="endpoints-title"><h2 id="endpoints-title">etcd</h2><ul class="cards">"#);
    for endpoint in endpoints {
        let (class, state) = match endpoint {
            Endpoint {
                is_connected: false, ..
            } => ("bad", "not connected"),
            Endpoint {
                is_healthy: false, ..
            } => ("warning", "unwell"),
            Endpoint { is_avoided: true, .. } => ("warning", "calls failed lately"),
            _ => ("good", "well"),
        };
        put!(
            out,
            r#"<li class="card"><h3><code>{}</code></h3><p><span class="state {class}">{state}</span></p>"#,
            Escaped(&endpoint.url)
        );
        if !endpoint.is_connected {
            put!(out, "<p>{}</p>", Escaped(&endpoint.last_error));
        }
        out.push_str("<dl>");
        let version = endpoint.version.as_deref().unwrap_or("not known");
        pair(out, "version", &Escaped(version).to_string());
        let role = match endpoint.role {
            "no_leader" => "knows no leader",
            "unknown" => "not known",
            role => role,
        };
        pair(out, "role", role);
        let connections = format!("{} of {}", endpoint.connections, endpoint.connections_wanted);
        pair(out, "connections", &connections);
        pair(out, "calls under way", &count(endpoint.calls as u64));
        pair(
            out,
            "RangeStream",
            endpoint.no_range_stream.map_or("yes", |_| "no"),
        );
        out.push_str("</dl></li>");
    }
    out.push_str("</ul></section>");
}

fn gates(out: &mut String, status: &Status) {
    out.push_str(r#"<section id="gates" aria-labelledby="gates-title"><h2 id="gates-title">Gates</h2><dl class="gates">"#);
    for gate in &status.gates {
        put!(
            out,
            r#"<div><dt>{}</dt><dd><span class="state {}">{}</span><p class="quiet">{}</p></dd></div>"#,
            gate.name,
            name(gate.severity),
            Escaped(&gate.state),
            gate.meaning
        );
    }
    out.push_str("</dl></section>");
}

fn budgets(out: &mut String, status: &Status) {
    out.push_str(r#"<section id="budgets" aria-labelledby="budgets-title"><h2 id="budgets-title">Bounds</h2><dl class="budgets">"#);
    for budget in &status.budgets {
        let show = if budget.in_bytes { bytes } else { count };
        let class = if budget.is_nearly_used_up() {
            "warning"
        } else {
            "plain"
        };
        put!(
            out,
            r#"<div><dt>{} <code>--{}</code></dt><dd>{}<span>{} of {}</span></dd></div>"#,
            Escaped(&budget.name),
            budget.flag,
            charts::bar(budget.ratio, class),
            show(budget.used),
            show(budget.limit)
        );
    }
    out.push_str("</dl></section>");
}
