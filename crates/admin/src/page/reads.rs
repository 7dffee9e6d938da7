//! Sections of the page about reads: rates and sources, why not from memory, and the slowest.

use std::{sync::Arc, time::Duration};

use maud::{Markup, html};
use rangecache_base::telemetry::Outcome;

use super::charts::{self, Layer};
use super::latency;
use super::parts::{Flags, Section, key, percent, plot, remedy, table, time};
use crate::status::model::{OutcomeCount, SlowCall, Status};
use crate::status::samples::{ReadCounts, ReadSample};
use rangecache_report::format::{bytes, count, counted, duration, long, rate};
use rangecache_report::reasons::{Explanation, OutcomeClass, describe_outcome, explain};

/// Function that reads a counter of a sample.
type Counter = fn(&ReadCounts) -> u64;

/// Slowest calls that are shown without opening the rest.
const SLOWEST_SHOWN: usize = 6;
/// Samples per minute.
const SAMPLES_PER_MINUTE: usize = 12;

pub(super) fn reads(status: &Status) -> Section {
    let reads = &status.reads;
    let all = &status.samples.0;
    let ratio = reads.memory_ratio_last_minute.map_or("–".to_owned(), percent);
    let window = window(status);
    let per_check = reads.per_quorum_check.map_or("–".to_owned(), rate);
    let layers = OutcomeClass::ALL.map(|source| {
        let rate = |sample: &Arc<ReadSample>| sample.rate(sample.added.by_source(source));
        Layer::new(source.as_str(), all, rate)
    });
    let small_charts: [(&str, &str, f64, Counter); 3] = [
        (
            "Events from etcd",
            "applied by mirrors",
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
            "forwarded to etcd unchanged",
            reads.other_calls_per_second,
            |added| added.forwarded,
        ),
    ];
    let content = html! {
        dl.figures {
            (figure("reads-rate", "reads per second", &rate(reads.per_second)))
            (figure("reads-memory", "of them from memory", &ratio))
            @if reads.failed_per_second > 0.0 {
                (figure("reads-failed", "failed reads per second", &rate(reads.failed_per_second)))
            }
            (figure("reads-check", "reads per quorum check", &per_check))
            (figure("reads-total", "reads since the start", &count(reads.since_start)))
        }
        p.quiet { "Rates, shares and latencies are those of the last minute; charts and counts those of the last " (window) "." }
        (chart(&layers, "Reads per second, by source"))
        ul.legend {
            @for source in OutcomeClass::ALL {
                @let reads = count(all.iter().map(|sample| sample.added.by_source(source)).sum());
                (key(source.as_str(), source.title(), None, &reads))
            }
        }
        (latency::latencies(reads, all))
        div.small-charts {
            @for (title, meaning, per_second, counter) in small_charts {
                div {
                    h3 { (title) " " b { (rate(per_second)) } span.unit { "/s" } }
                    p.quiet { (meaning) }
                    (small_chart(title, all, counter))
                }
            }
        }
        (by_minute(all))
        (from_memory(status))
    };
    Section::new("reads", "Reads", content)
}

fn figure(id: &str, title: &str, value: &str) -> Markup {
    html! { div { dt { (title) } dd id=(id) { (value) } } }
}

fn small_chart(title: &str, samples: &[Arc<ReadSample>], counter: Counter) -> Markup {
    let layer = Layer::new("plain", samples, |sample| sample.rate(counter(&sample.added)));
    chart(&[layer], &format!("{title} per second"))
}

fn chart(layers: &[Layer<'_>], label: &str) -> Markup {
    plot(&charts::stacked(layers, label), rate)
}

/// Values of the charts as a table, for readers who cannot see charts.
fn by_minute(samples: &[Arc<ReadSample>]) -> Markup {
    let sum = |samples: &[Arc<ReadSample>], counter: &dyn Fn(&ReadCounts) -> u64| {
        count(samples.iter().map(|sample| counter(&sample.added)).sum())
    };
    let titles = ["minutes ago"]
        .into_iter()
        .chain(OutcomeClass::ALL.map(OutcomeClass::title))
        .chain(latency::COLUMNS)
        .chain(["events", "other calls", "open watches"]);
    let rows = html! {
        @for (minute, samples) in samples.rchunks(SAMPLES_PER_MINUTE).enumerate() {
            tr {
                th scope="row" { (minute) }
                @for source in OutcomeClass::ALL {
                    td { (sum(samples, &|added| added.by_source(source))) }
                }
                @for value in latency::columns(samples) { td { (value) } }
                td { (sum(samples, &|added| added.events)) }
                td { (sum(samples, &|added| added.forwarded)) }
                td { (open_watches(samples)) }
            }
        }
    };
    html! {
        details {
            summary { "Figures by minute" }
            (table("Figures by minute", titles, &rows))
        }
    }
}

/// Watch streams that were open at the end.
fn open_watches(samples: &[Arc<ReadSample>]) -> String {
    let last = samples.last().map(|sample| sample.added.watches);
    count(last.map_or(0, |open| open.memory + open.etcd))
}

/// Time that counts of reads and calls cover, in words.
pub(super) fn window(status: &Status) -> String {
    long(Duration::from_secs_f64(
        status.reads.window_seconds.round().max(1.0),
    ))
}

/// Reads that memory answered, or those that it did not.
fn outcomes(status: &Status, is_from_memory: bool) -> Vec<&OutcomeCount> {
    let is_wanted = |read: &&OutcomeCount| {
        let source = OutcomeClass::from_outcome(read.outcome);
        matches!(source, OutcomeClass::Memory | OutcomeClass::Waited) == is_from_memory
    };
    status.reads.outcomes.iter().filter(is_wanted).collect()
}

/// Reads that memory answered, by reason; nothing without such reads.
fn from_memory(status: &Status) -> Markup {
    let memory = outcomes(status, true);
    html! {
        @if !memory.is_empty() {
            details { summary { "Reads that memory answered" } (by_reason(&memory)) }
        }
    }
}

/// Reasons of reads that memory did not answer; nothing if it answered all.
pub(super) fn reasons(status: &Status) -> Option<Section> {
    let others = outcomes(status, false);
    let content = html! {
        p.quiet { "Reads of the last " (window(status)) " that memory did not answer." }
        (by_reason(&others))
    };
    (!others.is_empty()).then(|| Section::new("reasons", "Why not from memory", content))
}

/// List of the reasons with all outcomes of each, the most frequent reason first.
fn by_reason(all: &[&OutcomeCount]) -> Markup {
    let mut reasons: Vec<(Explanation, u64, Vec<&OutcomeCount>)> = Vec::new();
    for read in all {
        let explanation = explain(read.outcome);
        match reasons.iter_mut().find(|(known, ..)| *known == explanation) {
            Some((_, sum, reads)) => {
                *sum += read.count;
                reads.push(read);
            }
            None => reasons.push((explanation, read.count, vec![read])),
        }
    }
    reasons.sort_by_key(|(_, sum, _)| std::cmp::Reverse(*sum));
    html! {
        ul.reasons {
            @for (explanation, sum, reads) in reasons {
                li {
                    h3 { b.n { (count(sum)) } " " (explanation.title) }
                    @for read in reads {
                        p.quiet { (count(read.count)) " " (describe_outcome(read.outcome)) " · " (code(read.outcome)) }
                    }
                    p { (Flags(explanation.meaning)) }
                    (remedy(explanation.remedy))
                }
            }
        }
    }
}

/// Outcome and reason as in metrics and logs.
fn code(outcome: Outcome) -> Markup {
    let (outcome, reason) = outcome.labels();
    html! { code { (outcome) "{" (reason) "}" } }
}

pub(super) fn slowest(slowest: &[SlowCall]) -> Option<Section> {
    let longest_seconds = slowest.first().map_or(0.0, |call| call.total_seconds);
    let (shown, more) = slowest.split_at(slowest.len().min(SLOWEST_SHOWN));
    let list = |calls: &[SlowCall]| {
        html! {
            ol.slowest { @for call in calls { (slow_call(call, longest_seconds)) } }
        }
    };
    let content = html! {
        p.quiet { "Of the last five minutes, from a read's arrival to the last byte of its response." }
        (list(shown))
        @if !more.is_empty() {
            details { summary { (more.len()) " more" } (list(more)) }
        }
    };
    (!slowest.is_empty()).then(|| Section::new("slowest", "Slowest reads", content))
}

/// List item of a call; its bar is proportional to the slowest call's.
fn slow_call(call: &SlowCall, longest_seconds: f64) -> Markup {
    let phases: Vec<_> = call
        .phases
        .iter()
        .map(|phase| (phase.name, phase.seconds / longest_seconds))
        .collect();
    html! {
        li {
            h3 {
                b.n { (duration(Duration::from_secs_f64(call.total_seconds))) } " " (call.method) " "
                @match &call.mirror {
                    Some(name) => { "in " code { (name) } }
                    None => { "outside of the mirrors" }
                }
            }
            p.quiet {
                (describe_outcome(call.outcome)) " · " (code(call.outcome)) " · " (time(&call.ended_at, ""))
                @if call.keys > 0 { " · " (counted(call.keys, "key")) }
                @if call.bytes > 0 { " · " (bytes(call.bytes)) }
                @if call.revision_asked > 0 { " · at revision " (call.revision_asked) }
            }
            (charts::parts(&phases))
            ul.phases {
                @for phase in &call.phases {
                    (key(phase.name, phase.title(), None, &duration(Duration::from_secs_f64(phase.seconds))))
                }
            }
        }
    }
}
