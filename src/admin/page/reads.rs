//! The page's parts about reads: how many and from where, why not from memory, and the slowest.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use super::{percent, put, remedy, time};
use crate::admin::advice::{self, Advice, Group};
use crate::admin::charts::{self, Layer};
use crate::admin::recent::{Counts, Sample};
use crate::admin::slowest::Slow;
use crate::admin::status::{Ended, Status};
use crate::admin::words::{Escaped, Marked, bytes, count, counted, duration, long, rate};
use crate::telemetry::Outcome;

/// Something that is counted.
type What = fn(&Counts) -> u64;

/// Of the slowest calls, before somebody asks for more.
const SLOWEST_SHOWN: usize = 6;

pub(super) fn reads(out: &mut String, status: &Status) {
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
    let more: [(&str, &str, f64, What); 3] = [
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
fn by_minute(out: &mut String, samples: &[Arc<Sample>]) {
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
pub(super) fn reasons(out: &mut String, status: &Status) {
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

pub(super) fn slowest(out: &mut String, slowest: &[Slow]) {
    out.push_str(r#"<section id="slowest" aria-labelledby="slowest-title"><h2 id="slowest-title">Slowest reads</h2><p class="quiet">Of the last five minutes, from a read's arrival to the last byte of its answer.</p>"#);
    let Some(longest) = slowest.first() else {
        out.push_str("<p>There were none.</p></section>");
        return;
    };
    let (first, more) = slowest.split_at(slowest.len().min(SLOWEST_SHOWN));
    let list = |out: &mut String, calls: &[Slow]| {
        out.push_str(r#"<ol class="slowest">"#);
        calls
            .iter()
            .for_each(|slow| of_slow(out, slow, longest.total_seconds));
        out.push_str("</ol>");
    };
    list(out, first);
    if !more.is_empty() {
        put!(out, "<details><summary>{} more</summary>", more.len());
        list(out, more);
        out.push_str("</details>");
    }
    out.push_str("</section>");
}

/// One call, its bar as long as the slowest call's in proportion.
fn of_slow(out: &mut String, slow: &Slow, longest_seconds: f64) {
    let of = match &slow.mirror {
        Some(name) => format!("in <code>{}</code>", Escaped(name)),
        None => "outside of the mirrors".to_owned(),
    };
    put!(
        out,
        r#"<li><h3><b class="n">{}</b> {} {of}</h3><p class="quiet">{} · {} · {}"#,
        duration(Duration::from_secs_f64(slow.total_seconds)),
        slow.method,
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
    let parts: Vec<_> = slow
        .phases
        .iter()
        .map(|phase| (phase.name, phase.seconds / longest_seconds))
        .collect();
    out.push_str(&charts::parts(&parts));
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
