//! The time that reads take, over time: from memory, and by etcd.

use std::{sync::Arc, time::Duration};

use maud::{Markup, html};
use rangecache_base::telemetry::metrics::LatencyCounts;

use super::charts::{self, Layer};
use super::parts::{key, plot};
use crate::status::model::{Latency, Reads};
use crate::status::samples::{ReadLatency, ReadSample};
use rangecache_report::format::duration;

/// Reads whose time is shown: title, class of their colours, and their counts.
type Answered = (&'static str, &'static str, fn(&ReadLatency) -> &LatencyCounts);

const ANSWERED: [Answered; 2] = [
    ("from memory", "memory", |latency| &latency.memory),
    ("by etcd", "etcd", |latency| &latency.etcd),
];

/// A chart of the median and of the 99th percentile for each.
pub(super) fn latencies(reads: &Reads, samples: &[Arc<ReadSample>]) -> Markup {
    let now = [reads.latency_from_memory, reads.latency_by_etcd];
    html! {
        div.latencies {
            @for ((title, class, counts), now) in ANSWERED.into_iter().zip(now) {
                div {
                    h3 { "Latency of reads " (title) }
                    ul.legend {
                        (key(&format!("{class} p50"), "p50", None, &seconds(now.map(|now| now.p50_seconds))))
                        (key(&format!("{class} p99"), "p99", None, &seconds(now.map(|now| now.p99_seconds))))
                    }
                    (chart(title, class, samples, counts))
                }
            }
        }
    }
}

fn chart(
    title: &str,
    class: &str,
    samples: &[Arc<ReadSample>],
    counts: fn(&ReadLatency) -> &LatencyCounts,
) -> Markup {
    let layer = |class, value: fn(Latency) -> f64| {
        Layer::new(class, samples, |sample| {
            of(std::slice::from_ref(sample), counts).map_or(0.0, value)
        })
    };
    let (p50_class, p99_class) = (format!("{class} p50"), format!("{class} p99"));
    let layers = [
        layer(&p99_class, |latency| latency.p99_seconds),
        layer(&p50_class, |latency| latency.p50_seconds),
    ];
    let label = format!("Median and 99th percentile of the time of reads {title}");
    plot(&charts::overlaid(&layers, &label), |top| seconds(Some(top)))
}

fn of(samples: &[Arc<ReadSample>], counts: fn(&ReadLatency) -> &LatencyCounts) -> Option<Latency> {
    Latency::of(samples, |added| counts(&added.latency))
}

/// Titles of the columns in a table of the figures.
pub(super) const COLUMNS: [&str; 4] = ["p50 from memory", "p99 from memory", "p50 by etcd", "p99 by etcd"];

/// The values of these columns for some samples.
pub(super) fn columns(samples: &[Arc<ReadSample>]) -> impl Iterator<Item = String> {
    let latencies = ANSWERED.into_iter().map(|(.., counts)| of(samples, counts));
    latencies.flat_map(|latency| {
        [
            seconds(latency.map(|latency| latency.p50_seconds)),
            seconds(latency.map(|latency| latency.p99_seconds)),
        ]
    })
}

fn seconds(value: Option<f64>) -> String {
    value
        .filter(|value| *value > 0.0)
        .map_or("–".to_owned(), |value| duration(Duration::from_secs_f64(value)))
}
