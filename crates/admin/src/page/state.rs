//! Sections of the page about mirrors, watches, endpoints, bounds and gates.

use std::time::Duration;

use maud::{Markup, html};
use rangecache_base::telemetry::Reason;
use rangecache_upstream::EndpointSource;

use super::charts::{self, Layer};
use super::parts::{Section, key, percent, plot};
use crate::status::model::{
    Budget, EndpointStatus, GateStatus, ImageStatus, MirrorStatus, Status, WatchStatus,
};
use crate::status::samples::OpenWatches;
use rangecache_report::format::{bytes, count, counted, duration, rate};
use rangecache_report::reasons::explain_reason;

pub(super) fn mirrors(status: &Status) -> Section {
    let cards = html! {
        ul.cards { @for mirror in &status.mirrors { (card_of_mirror(mirror)) } }
    };
    Section::new("mirrors", "Mirrors", cards)
}

fn card_of_mirror(mirror: &MirrorStatus) -> Markup {
    let state = match mirror.reason {
        None => "in service".to_owned(),
        Some(reason) => format!("out of service: {}", explain_reason(reason).title),
    };
    let stretches: Vec<_> = mirror
        .timeline
        .iter()
        .map(|stretch| (stretch_class(stretch.reason), stretch.samples))
        .collect();
    let number = |value: Option<i64>| value.map_or("–".to_owned(), |value| count(value.unsigned_abs()));
    let lag = match mirror.lag_revisions {
        None => "–".to_owned(),
        Some(lag) => counted(lag.unsigned_abs(), "revision"),
    };
    html! {
        li.card {
            (card_head(&mirror.name, stretch_class(mirror.reason), &state))
            (charts::strip(&stretches, &timeline_in_words(mirror)))
            dl {
                (pair("revision", &number(mirror.revision)))
                @if let Some(age) = mirror.stale_age_ms {
                    (pair("serving a last view of age", &format!("{age} ms")))
                }
                (pair("behind etcd by", &lag))
                (pair("keys", &count(mirror.keys)))
                (pair("memory", &bytes(mirror.memory.memory_bytes)))
                @for (title, value) in mirror.memory.parts() {
                    (part(title, &value))
                }
                (pair("memory kept for slow readers", &bytes(mirror.memory.held_bytes)))
                @if let Some(size) = mirror.memory.only_in_etcd() {
                    (pair("values only in etcd", &size))
                }
                (pair("readable from revision", &number(mirror.oldest_revision)))
                (pair("events applied", &count(mirror.events)))
                @for adopted in &mirror.adopted {
                    (pair(not_read_again(adopted.source), &bytes(adopted.bytes)))
                }
                @if let Some(image) = &mirror.image {
                    (pair("image on the disk", &image_in_words(image)))
                }
                @if mirror.reason.is_some() {
                    (pair("last load", &format!("{}, {}", counted(mirror.load_keys, "key"), bytes(mirror.load_bytes))))
                }
            }
        }
    }
}

/// Title of the bytes that loads did not have to read.
fn not_read_again(source: &str) -> &'static str {
    match source {
        "memory" => "not read again after a compaction",
        "neighbour" => "read from a neighbour",
        _ => "read from the image",
    }
}

fn image_in_words(image: &ImageStatus) -> String {
    let state = match image.age_seconds {
        None => "none yet".to_owned(),
        Some(age) => format!(
            "{}, {} old",
            bytes(image.bytes),
            duration(Duration::from_secs(age))
        ),
    };
    if image.is_failing {
        format!("{state}; it cannot be written")
    } else {
        state
    }
}

fn card_head(name: &str, class: &str, state: &str) -> Markup {
    html! {
        h3 { code { (name) } }
        p { span class={ "state " (class) } { (state) } }
    }
}

pub(super) fn pair(title: &str, value: &str) -> Markup {
    html! { div { dt { (title) } dd { (value) } } }
}

/// Pair for a part of the figure before it.
fn part(title: &str, value: &str) -> Markup {
    html! { div.part { dt { (title) } dd { (value) } } }
}

fn stretch_class(reason: Option<Reason>) -> &'static str {
    match reason {
        None => "good",
        Some(Reason::Loading) => "note",
        Some(_) => "warning",
    }
}

fn timeline_in_words(mirror: &MirrorStatus) -> String {
    let samples = |in_service_only: bool| -> usize {
        let stretches = mirror.timeline.iter();
        stretches
            .filter(|stretch| !in_service_only || stretch.reason.is_none())
            .map(|stretch| stretch.samples)
            .sum()
    };
    #[allow(clippy::cast_precision_loss, reason = "there are some two hundred")]
    let ratio = samples(true) as f64 / samples(false).max(1) as f64;
    format!(
        "in service {} of the time shown, 15 minutes at most",
        percent(ratio)
    )
}

/// Open watch streams over time by what serves them, and how memory serves its own.
pub(super) fn watches(status: &Status) -> Section {
    let watches = &status.watches;
    let layer = |class, of: fn(OpenWatches) -> u64| {
        Layer::new(class, &status.samples.0, |sample| {
            as_height(of(sample.added.watches))
        })
    };
    let layers = [
        layer("memory", |open| open.memory),
        layer("etcd", |open| open.etcd),
    ];
    let content = html! {
        p.quiet { "Open watch streams, by what serves them." }
        ul.legend {
            (key("memory", "from memory", Some("watches-memory"), &count(watches.open.memory)))
            (key("etcd", "by etcd", Some("watches-etcd"), &count(watches.open.etcd)))
        }
        (plot(&charts::stacked(&layers, "Open watch streams, by what serves them"), rate))
        (figures_of_watches(watches))
    };
    Section::new("watches", "Watches", content)
}

/// Figures of the streams that memory serves, and the reasons why etcd serves the others; nothing if memory has served
/// none, as with `--watch-cache=off`.
fn figures_of_watches(watches: &WatchStatus) -> Markup {
    html! {
        dl.pairs {
            @if watches.memory_streams > 0 || watches.events_sent > 0 {
                (pair("watchers served from memory", &count(watches.watchers)))
                (pair("events sent from memory", &count(watches.events_sent)))
                (pair("slowest watcher behind by", &counted(watches.behind_revisions, "revision")))
                (pair("memory", &bytes(watches.memory_bytes)))
            }
            @for stream in &watches.etcd_streams {
                (pair(&format!("by etcd: {}", explain_reason(stream.reason).title), &count(stream.count)))
            }
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a height")]
fn as_height(open: u64) -> f64 {
    open as f64
}

pub(super) fn endpoints(endpoints: &[EndpointStatus]) -> Section {
    let cards = html! {
        ul.cards { @for endpoint in endpoints { (card_of_endpoint(endpoint)) } }
    };
    Section::new("endpoints", "Members of etcd", cards)
}

fn card_of_endpoint(endpoint: &EndpointStatus) -> Markup {
    let (class, state) = if !endpoint.is_connected {
        ("bad", "not connected")
    } else if !endpoint.is_healthy {
        ("warning", "unhealthy")
    } else if endpoint.is_leaving {
        ("note", "used until another one serves")
    } else if endpoint.is_avoided {
        ("warning", "calls failed recently")
    } else {
        ("good", "healthy")
    };
    let role = match endpoint.role {
        _ if endpoint.peer.is_rangecache() => "another rangecache",
        "no_leader" => "knows no leader",
        "unknown" => "not known",
        role => role,
    };
    let connections = format!("{} of {}", endpoint.connections, endpoint.connections_wanted);
    html! {
        li.card {
            (card_head(&endpoint.url, class, state))
            @if !endpoint.is_connected { p { (endpoint.last_error) } }
            dl {
                @if endpoint.source == EndpointSource::Members.as_str() { (pair("found by", "--endpoints-auto-sync-interval")) }
                @if endpoint.source == EndpointSource::Fallback.as_str() { (pair("used", "while no other endpoint serves")) }
                (pair("version", endpoint.version.as_deref().unwrap_or("not known")))
                (pair("role", role))
                @if let Some(endpoints) = endpoint.peer.leads_to() { (pair("in front of", endpoints)) }
                (pair("connections", &connections))
                (pair("calls in flight", &count(endpoint.calls as u64)))
                (pair("RangeStream", range_stream_in_words(endpoint)))
            }
        }
    }
}

/// Whether the endpoint has RangeStream, which only its version says.
fn range_stream_in_words(endpoint: &EndpointStatus) -> &'static str {
    match (endpoint.no_range_stream, &endpoint.version) {
        (Some(_), _) => "no",
        (None, Some(_)) => "yes",
        (None, None) => "not known",
    }
}

pub(super) fn budgets(budgets: &[Budget]) -> Section {
    let list = html! {
        dl.budgets { @for budget in budgets { (row_of_budget(budget)) } }
    };
    Section::new("budgets", "Limits", list)
}

fn row_of_budget(budget: &Budget) -> Markup {
    let format = if budget.in_bytes { bytes } else { count };
    let class = if budget.is_nearly_used_up() {
        "warning"
    } else {
        "plain"
    };
    html! {
        div {
            dt { (budget.name) " " code { "--" (budget.flag) } }
            dd {
                (charts::bar(budget.ratio, class))
                span { (format(budget.used)) " of " (format(budget.limit)) }
            }
        }
    }
}

pub(super) fn gates(gates: &[GateStatus]) -> Section {
    let list = html! {
        dl.gates {
            @for gate in gates {
                div {
                    dt { (gate.name) }
                    dd {
                        span class={ "state " (gate.severity.as_str()) } { (gate.state) }
                        p.quiet { (gate.meaning) }
                    }
                }
            }
        }
    };
    Section::new("gates", "Capabilities of etcd", list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MirrorMemory;
    use crate::status::model::{AdoptedStatus, Stretch};

    fn memory() -> MirrorMemory {
        MirrorMemory {
            memory_bytes: 10 << 20,
            history_bytes: 1 << 20,
            packed_bytes: 2 << 20,
            packed_encoded_bytes: 6 << 20,
            not_held_bytes: 5 << 20,
            index_bytes: 3 << 20,
            held_bytes: 0,
        }
    }

    fn mirror() -> MirrorStatus {
        MirrorStatus {
            name: "everything".to_owned(),
            is_everything: true,
            revision: Some(7),
            lag_revisions: Some(1),
            oldest_revision: Some(2),
            keys: 10,
            memory: memory(),
            load_keys: 9,
            load_bytes: 1 << 20,
            events: 3,
            ..MirrorStatus::default()
        }
    }

    fn card(mirror: &MirrorStatus) -> String {
        card_of_mirror(mirror).into_string()
    }

    #[test]
    fn source_of_a_start_and_the_image_are_shown() {
        let with = |image| {
            card(&MirrorStatus {
                adopted: vec![AdoptedStatus {
                    source: "image",
                    bytes: 3 << 20,
                }],
                image: Some(image),
                ..mirror()
            })
        };
        let image = |age_seconds, is_failing| ImageStatus {
            bytes: 2 << 20,
            age_seconds,
            is_failing,
        };
        let html = with(image(Some(61), false));
        assert!(
            html.contains(&pair("read from the image", "3 MiB").into_string()),
            "{html}"
        );
        let expected = format!("2 MiB, {} old", duration(Duration::from_secs(61)));
        assert!(
            html.contains(&pair("image on the disk", &expected).into_string()),
            "{html}"
        );
        assert!(with(image(None, true)).contains("none yet; it cannot be written"));
        assert!(!card(&mirror()).contains("image on the disk"));
    }

    #[test]
    fn memory_of_a_mirror_is_divided_into_what_takes_it() {
        let html = card(&mirror());
        for (title, value) in [
            ("plain values", "4 MiB"),
            ("packed values", "2 MiB for 6 MiB"),
            ("index", "3 MiB"),
            ("past revisions", "1 MiB"),
        ] {
            let part = part(title, value).into_string();
            assert!(html.contains(&part), "{title}: {html}");
        }
        assert!(
            html.contains(&pair("values only in etcd", "5 MiB").into_string()),
            "{html}"
        );
        let plain = MirrorStatus {
            memory: MirrorMemory {
                packed_bytes: 0,
                packed_encoded_bytes: 0,
                not_held_bytes: 0,
                ..memory()
            },
            ..mirror()
        };
        assert!(card(&plain).contains(&part("packed values", "none").into_string()));
        assert!(!card(&plain).contains("only in etcd"));
        // Figures of different moments.
        let odd = MirrorMemory {
            memory_bytes: 1,
            ..memory()
        };
        assert_eq!(odd.plain_bytes(), 0);
    }

    #[test]
    fn range_stream_of_a_member_that_was_never_reached_is_not_known() {
        let endpoint = |version: Option<&str>, no_range_stream| EndpointStatus {
            url: "http://etcd:2379".to_owned(),
            source: "flag",
            version: version.map(str::to_owned),
            role: "unknown",
            connections_wanted: 8,
            last_error: "refused".to_owned(),
            no_range_stream,
            ..EndpointStatus::default()
        };
        for (endpoint, text) in [
            (endpoint(None, None), "not known"),
            (endpoint(Some("3.7.3"), None), "yes"),
            (endpoint(Some("3.6.1"), Some("too_old")), "no"),
        ] {
            let html = card_of_endpoint(&endpoint).into_string();
            let pair = pair("RangeStream", text).into_string();
            assert!(html.contains(&pair), "{html}");
        }
    }

    #[test]
    fn last_load_is_shown_while_the_mirror_is_out_of_service() {
        assert!(!card(&mirror()).contains("last load"));
        let out = MirrorStatus {
            reason: Some(Reason::FeedLost),
            revision: None,
            lag_revisions: None,
            ..mirror()
        };
        let html = card(&out);
        assert!(html.contains("out of service: "));
        assert!(html.contains(&pair("last load", "9 keys, 1 MiB").into_string()));
        assert!(html.contains(&pair("behind etcd by", "–").into_string()));
    }

    #[test]
    fn time_in_service_is_a_share_of_the_samples() {
        let stretch = |reason, samples| Stretch { reason, samples };
        let timeline = vec![
            stretch(Some(Reason::Loading), 1),
            stretch(None, 2),
            stretch(Some(Reason::FeedLost), 1),
        ];
        let half = MirrorStatus { timeline, ..mirror() };
        assert!(
            timeline_in_words(&half).starts_with("in service 50"),
            "{}",
            timeline_in_words(&half)
        );
    }
}
