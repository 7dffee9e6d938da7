//! The page: [`Status`] as HTML. The script only asks for it again and puts what has changed into place, so that it shows the
//! same without.
//!
//! No name comes from a client: mirrors are called by the operator's prefixes, and no key and no value is ever here (I10).
//! All texts are escaped all the same.

use std::fmt::Write;
use std::time::Duration;

use super::advice::{self, Advice, Group};
use super::charts::{self, Layer};
use super::findings::{Finding, Severity};
use super::recent::{Counts, Sample};
use super::slowest::Slow;
use super::status::{Ended, Endpoint, Mirror, Status};
use super::words::{Escaped, Marked, bytes, count, counted, duration, long, rate};
use crate::telemetry::{Outcome, Why};

/// Styles, at `/page.css`.
pub(super) const CSS: &str = include_str!("page/page.css");
/// The script, at `/page.js`.
pub(super) const JS: &str = include_str!("page/page.js");
/// What may be loaded, and from where: this page's own files. Nothing may frame it.
pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const SHELL: &str = include_str!("page/page.html");
/// Of the slowest calls; `/status` has all.
const SLOWEST_SHOWN: usize = 10;
const PLACE: &str = "<!-- status -->";

/// Writing into a `String` cannot fail.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => {{ let _ = write!($out, $($arg)*); }};
}

/// The whole page.
pub(super) fn render(status: &Status) -> String {
    let mut main = String::with_capacity(32 << 10);
    heading(&mut main, status);
    findings(&mut main, &status.findings);
    reads(&mut main, status);
    reasons(&mut main, status);
    slowest(&mut main, &status.slowest);
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
        .filter(|mirror| mirror.why.is_none())
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
        percent if percent < 100.0 && percent >= 99.95 => "99.9 %".to_owned(),
        percent if percent > 0.0 && percent < 0.05 => "< 0.1 %".to_owned(),
        percent => format!("{} %", format!("{percent:.1}").trim_end_matches(".0")),
    }
}

fn reads(out: &mut String, status: &Status) {
    let reads = &status.reads;
    out.push_str(r#"<section id="reads" aria-labelledby="reads-title"><h2 id="reads-title">Reads</h2><dl class="figures">"#);
    figure(out, "reads-rate", "reads a second", &rate(reads.per_second));
    figure(
        out,
        "reads-memory",
        "of them from memory",
        &reads.memory_ratio.map_or("–".to_owned(), percent),
    );
    figure(
        out,
        "reads-total",
        "reads since the start",
        &count(reads.since_start),
    );
    figure(
        out,
        "reads-check",
        "reads a quorum check",
        &reads.per_quorum_check.map_or("–".to_owned(), rate),
    );
    out.push_str("</dl>");
    let all = &status.samples.all;
    let layers = Group::ALL.map(|group| Layer {
        class: group.name(),
        values: all
            .iter()
            .map(|sample| sample.rate(sample.added.of_group(group)))
            .collect(),
    });
    chart(out, &layers, "Reads a second, by who answered them");
    out.push_str(r#"<ul class="legend">"#);
    for group in Group::ALL {
        let counted: u64 = all.iter().map(|sample| sample.added.of_group(group)).sum();
        put!(
            out,
            r#"<li><span class="key {}" aria-hidden="true"></span>{} <b>{}</b></li>"#,
            group.name(),
            group.title(),
            count(counted)
        );
    }
    out.push_str("</ul>");
    out.push_str(r#"<div class="small-charts">"#);
    let more: [(&str, &str, f64, fn(&Counts) -> u64); 3] = [
        (
            "Events from etcd",
            "that mirrors applied",
            reads.events_per_second,
            |added| added.events,
        ),
        (
            "Quorum checks",
            "that proved reads, or failed to",
            reads.quorum_checks_per_second,
            |added| added.checks.proven + added.checks.failed,
        ),
        (
            "Other calls",
            "passed on to etcd as they came",
            reads.other_calls_per_second,
            |added| added.passed,
        ),
    ];
    for (title, meaning, now, what) in more {
        put!(
            out,
            r#"<div><h3>{title} <b>{}</b><span class="unit">/s</span></h3><p class="quiet">{meaning}</p>"#,
            rate(now)
        );
        let values = all
            .iter()
            .map(|sample| sample.rate(what(&sample.added)))
            .collect();
        chart(
            out,
            &[Layer {
                class: "plain",
                values,
            }],
            &format!("{title} a second"),
        );
        out.push_str("</div>");
    }
    out.push_str("</div>");
    by_minute(out, all);
    out.push_str("</section>");
}

fn figure(out: &mut String, id: &str, title: &str, value: &str) {
    put!(out, r#"<div><dt>{title}</dt><dd id="{id}">{value}</dd></div>"#);
}

fn chart(out: &mut String, layers: &[Layer<'_>], label: &str) {
    let chart = charts::stacked(layers, &format!("{label}, over the last 15 minutes"));
    put!(
        out,
        r#"<figure class="plot"><span class="top" aria-hidden="true">{}</span>{}<figcaption aria-hidden="true"><span>15 min ago</span><span>now</span></figcaption></figure>"#,
        rate(chart.top),
        chart.svg
    );
}

/// The same as the charts, for who cannot see them.
fn by_minute(out: &mut String, samples: &[std::sync::Arc<Sample>]) {
    out.push_str(
        r#"<details><summary>Figures by minute</summary><div class="scroll" tabindex="0" role="region" aria-label="Figures by minute"><table><thead><tr><th scope="col">minutes ago</th>"#,
    );
    for group in Group::ALL {
        put!(out, r#"<th scope="col">{}</th>"#, group.title());
    }
    out.push_str(r#"<th scope="col">events</th><th scope="col">other calls</th></tr></thead><tbody>"#);
    for (minute, samples) in samples.rchunks(12).enumerate() {
        let sum = |what: &dyn Fn(&Counts) -> u64| -> String {
            count(samples.iter().map(|sample| what(&sample.added)).sum())
        };
        put!(out, r#"<tr><th scope="row">{minute}</th>"#);
        for group in Group::ALL {
            put!(out, "<td>{}</td>", sum(&|added| added.of_group(group)));
        }
        put!(
            out,
            "<td>{}</td><td>{}</td></tr>",
            sum(&|added| added.events),
            sum(&|added| added.passed)
        );
    }
    out.push_str("</tbody></table></div></details>");
}

/// Why reads were not answered from memory; and below, how the others were.
fn reasons(out: &mut String, status: &Status) {
    let (memory, others): (Vec<_>, Vec<_>) = status
        .reads
        .outcomes
        .iter()
        .partition(|ended| matches!(Group::of(ended.outcome), Group::Memory | Group::Waited));
    let window = long(Duration::from_secs_f64(
        status.reads.window_seconds.round().max(1.0),
    ));
    put!(
        out,
        r#"<section id="reasons" aria-labelledby="reasons-title"><h2 id="reasons-title">Why not from memory</h2><p class="quiet">Reads of the last {window} that memory did not answer.</p>"#
    );
    match (others.is_empty(), memory.is_empty()) {
        (true, true) => out.push_str("<p>There were no reads.</p>"),
        (true, false) => out.push_str("<p>None: memory answered every one.</p>"),
        _ => by_reason(out, &others),
    }
    if !memory.is_empty() {
        out.push_str("<details><summary>What memory answered</summary>");
        by_reason(out, &memory);
        out.push_str("</details>");
    }
    out.push_str("</section>");
}

/// One item for each reason, with all the ways in which reads ended for it; the most frequent first.
fn by_reason(out: &mut String, all: &[&Ended]) {
    let mut reasons: Vec<(Advice, u64, Vec<&Ended>)> = Vec::new();
    for ended in all {
        let advice = advice::of(ended.outcome);
        match reasons.iter_mut().find(|(known, ..)| *known == advice) {
            Some((_, sum, endings)) => {
                *sum += ended.count;
                endings.push(ended);
            }
            None => reasons.push((advice, ended.count, vec![ended])),
        }
    }
    reasons.sort_by_key(|(_, sum, _)| std::cmp::Reverse(*sum));
    out.push_str(r#"<ul class="reasons">"#);
    for (advice, sum, endings) in reasons {
        put!(
            out,
            r#"<li><h3><b class="n">{}</b> {}</h3>"#,
            count(sum),
            advice.title
        );
        for ended in endings {
            put!(
                out,
                r#"<p class="quiet">{} {} · {}</p>"#,
                count(ended.count),
                advice::ending(ended.outcome),
                code(ended.outcome)
            );
        }
        put!(out, "<p>{}</p>", Marked(advice.meaning));
        remedy(out, advice.remedy);
        out.push_str("</li>");
    }
    out.push_str("</ul>");
}

/// As metrics and logs have it.
fn code(outcome: Outcome) -> String {
    let (outcome, reason) = outcome.labels();
    format!(r#"<code>{outcome}{{{reason}}}</code>"#)
}

fn slowest(out: &mut String, slowest: &[Slow]) {
    out.push_str(r#"<section id="slowest" aria-labelledby="slowest-title"><h2 id="slowest-title">Slowest reads</h2><p class="quiet">Of the last five minutes, from a read's arrival to the last byte of its answer.</p>"#);
    let Some(longest) = slowest.first() else {
        out.push_str("<p>There were none.</p></section>");
        return;
    };
    out.push_str(r#"<ol class="slowest">"#);
    for slow in slowest.iter().take(SLOWEST_SHOWN) {
        let of = match &slow.mirror {
            Some(name) => format!("in <code>{}</code>", Escaped(name)),
            None => "outside of the mirrors".to_owned(),
        };
        put!(
            out,
            r#"<li><h3><b class="n">{}</b> {} {of}</h3>"#,
            duration(Duration::from_secs_f64(slow.total_seconds)),
            slow.method,
        );
        put!(
            out,
            r#"<p class="quiet">{} · {} · {}"#,
            advice::ending(slow.outcome),
            code(slow.outcome),
            time(&slow.ended_at, "")
        );
        if slow.keys > 0 {
            put!(out, " · {}", counted(slow.keys, "key"));
        }
        if slow.bytes > 0 {
            put!(out, " · {}", bytes(slow.bytes));
        }
        if slow.revision_asked > 0 {
            put!(out, " · at revision {}", slow.revision_asked);
        }
        out.push_str("</p>");
        let phases: Vec<_> = slow
            .phases
            .iter()
            .map(|phase| (phase.name, phase.seconds / longest.total_seconds))
            .collect();
        out.push_str(&charts::parts(&phases));
        out.push_str(r#"<ul class="phases">"#);
        for phase in &slow.phases {
            put!(
                out,
                r#"<li><span class="key {}" aria-hidden="true"></span>{} <b>{}</b></li>"#,
                phase.name,
                phase.title(),
                duration(Duration::from_secs_f64(phase.seconds))
            );
        }
        out.push_str("</ul></li>");
    }
    out.push_str("</ol></section>");
}

fn mirrors(out: &mut String, status: &Status) {
    out.push_str(r#"<section id="mirrors" aria-labelledby="mirrors-title"><h2 id="mirrors-title">Mirrors</h2><ul class="cards">"#);
    for mirror in &status.mirrors {
        of_mirror(out, mirror);
    }
    out.push_str("</ul></section>");
}

fn of_mirror(out: &mut String, mirror: &Mirror) {
    let (class, state) = match mirror.why {
        None => ("good", "in service".to_owned()),
        Some(why) => (
            stretch_class(Some(why)),
            format!("out of service: {}", advice::of_why(why).title),
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
        .map(|stretch| (stretch_class(stretch.why), stretch.samples))
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
    if mirror.why.is_some() {
        let loaded = format!(
            "{}, {}",
            counted(mirror.load_keys, "key"),
            bytes(mirror.load_bytes)
        );
        pair(out, "last load", &loaded);
    }
    out.push_str("</dl></li>");
}

fn stretch_class(why: Option<Why>) -> &'static str {
    match why {
        None => "good",
        Some(Why::Loading) => "note",
        Some(_) => "warning",
    }
}

/// The strip in words.
fn past(mirror: &Mirror) -> String {
    let all: usize = mirror.timeline.iter().map(|stretch| stretch.samples).sum();
    let inside: usize = mirror
        .timeline
        .iter()
        .filter(|stretch| stretch.why.is_none())
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
            Endpoint { is_well: false, .. } => ("warning", "unwell"),
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
