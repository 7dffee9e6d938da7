//! Findings from what exported series have shown over time, judged by the same series as their alerts.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use rangecache_report::{Finding, FindingId};

/// Events below which a share says nothing.
const MIN_EVENTS: f64 = 3.0;

/// A finding that is due if the series of one name behave as an alert describes.
struct Symptom {
    id: FindingId,
    title: &'static str,
    /// Name of the series.
    series: &'static str,
    /// Series that count.
    of: Selector,
    /// Label whose values are subjects of their own; without one all series are added up.
    by: &'static str,
    over: Duration,
    is: Condition,
}

/// Series that count, by the value of a label.
enum Selector {
    All,
    Is(&'static str, &'static [&'static str]),
    Not(&'static str, &'static str),
}

enum Condition {
    /// Growth of those that count is more than this.
    Grows(f64),
    /// Growth of those that count is more than this share of the growth of all.
    Share(f64),
    /// Sum of gauges is above this all the time.
    Above(f64),
}

/// Declares [`SYMPTOMS`]: id, series, those that count, label of the subject, condition, time in minutes, title.
macro_rules! symptoms {
    ($($id:path => $series:literal, $of:expr, $by:literal, $is:ident($value:literal) in $minutes:literal min, $title:literal;)+) => {
        const SYMPTOMS: &[Symptom] = &[$(Symptom {
            id: $id,
            title: $title,
            series: $series,
            of: $of,
            by: $by,
            over: Duration::from_secs($minutes * 60),
            is: Condition::$is($value),
        }),+];
    };
}

symptoms! {
    FindingId::QuorumChecksFail => "rangecache_quorum_checks_total", Selector::Not("result", "proven"), "", Share(0.1) in 5 min,
        "etcd does not confirm its revision: quorum checks fail";
    FindingId::Loops => "rangecache_looped_calls_total", Selector::All, "", Grows(0.0) in 15 min,
        "calls of this rangecache come back to it";
    FindingId::CertificateNotReloaded => "rangecache_tls_reloads_total", Selector::Is("result", &["failed"]), "side", Grows(0.0) in 360 min,
        "replaced certificates cannot be used";
    FindingId::HandshakesFail => "rangecache_tls_handshakes_total", Selector::Not("result", "ok"), "", Share(0.5) in 10 min,
        "most TLS handshakes with clients fail";
    FindingId::MirrorReloads => "rangecache_mirror_reloads_total", Selector::Not("reason", "start"), "mirror", Grows(3.0) in 60 min,
        "a mirror is loaded again and again";
    FindingId::MirrorLags => "rangecache_mirror_lag_seconds", Selector::All, "mirror", Above(10.0) in 2 min,
        "a mirror is more than ten seconds behind etcd";
    FindingId::ReloadRefused => "rangecache_flag_reloads_total", Selector::Is("result", &["refused"]), "", Grows(0.0) in 60 min,
        "the flags could not be reloaded";
    FindingId::BuffersRefuse => "rangecache_buffer_refused_total", Selector::Is("kind", &["request", "forwarded", "sending", "shared"]), "kind",
        Grows(0.0) in 15 min, "calls are refused, because the buffers are full";
    FindingId::BuffersWait => "rangecache_buffer_waiting", Selector::All, "kind", Above(0.0) in 5 min,
        "calls wait for room in the buffers";
    FindingId::ResponsesGivenUp => "rangecache_responses_given_up_total", Selector::All, "reason", Grows(0.0) in 15 min,
        "responses were given up";
    FindingId::ClientMisbehaves => "rangecache_client_connections_closed_total", Selector::Is("reason", &["address", "flood", "handshake"]), "reason",
        Grows(0.0) in 15 min, "connections of a client were closed";
    FindingId::WritesRefused => "rangecache_read_only_refused_total", Selector::All, "", Grows(0.0) in 15 min,
        "a client writes where only reads are permitted";
    FindingId::SpansLost => "rangecache_trace_spans_total", Selector::Is("result", &["dropped", "failed"]), "", Grows(0.0) in 15 min,
        "spans do not reach the collector of traces";
}

/// Courses of the series, by symptom and subject.
#[derive(Debug, Default)]
pub(super) struct Symptoms(Mutex<BTreeMap<(usize, String), Course>>);

/// Course of the series of one subject.
#[derive(Debug, Default)]
struct Course {
    /// Sum of those that count, and of all.
    last: (f64, f64),
    /// Additions to both in the time of the symptom, with their times.
    added: VecDeque<(Instant, f64, f64)>,
    above_since: Option<Instant>,
}

impl Symptoms {
    /// Takes the series as they are exported now.
    pub(super) fn note(&self, now: Instant, exposition: &str) {
        let mut sums: BTreeMap<(usize, &str), (f64, f64)> = BTreeMap::new();
        for line in exposition.lines() {
            let (series, value) = line.rsplit_once(' ').unwrap_or_default();
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            for (at, symptom) in SYMPTOMS.iter().enumerate() {
                if symptom.series == name {
                    let value = value.parse().unwrap_or(0.0);
                    let sum = sums.entry((at, label(labels, symptom.by))).or_default();
                    sum.1 += value;
                    if symptom.of.selects(labels) {
                        sum.0 += value;
                    }
                }
            }
        }
        let mut courses = self.0.lock();
        for ((at, subject), sum) in sums {
            let course = courses.entry((at, subject.to_owned())).or_default();
            course.note(now, &SYMPTOMS[at], sum);
        }
    }

    /// The findings that are due at `now`.
    pub(super) fn findings(&self, now: Instant) -> Vec<Finding> {
        let courses = self.0.lock();
        let due = courses
            .iter()
            .filter(|((at, _), course)| course.shows(now, &SYMPTOMS[*at]));
        due.map(|((at, subject), _)| SYMPTOMS[*at].finding(subject))
            .collect()
    }
}

impl Symptom {
    fn finding(&self, subject: &str) -> Finding {
        let title = if subject.is_empty() {
            self.title.to_owned()
        } else {
            format!("{}: {subject}", self.title)
        };
        Finding::explained(self.id, title).about(subject)
    }
}

impl Selector {
    fn selects(&self, labels: &str) -> bool {
        match self {
            Selector::All => true,
            Selector::Is(name, values) => values.contains(&label(labels, name)),
            Selector::Not(name, value) => label(labels, name) != *value,
        }
    }
}

impl Course {
    fn note(&mut self, now: Instant, symptom: &Symptom, sum: (f64, f64)) {
        let (grown, of) = (sum.0 - self.last.0, sum.1 - self.last.1);
        self.last = sum;
        match symptom.is {
            Condition::Above(value) if sum.0 > value => _ = self.above_since.get_or_insert(now),
            Condition::Above(_) => self.above_since = None,
            _ if of > 0.0 => self.added.push_back((now, grown, of)),
            _ => {}
        }
        let is_old = |added: &(Instant, f64, f64)| now.duration_since(added.0) > symptom.over;
        while self.added.front().is_some_and(is_old) {
            self.added.pop_front();
        }
    }

    fn shows(&self, now: Instant, symptom: &Symptom) -> bool {
        let sum = |of: fn(&(Instant, f64, f64)) -> f64| self.added.iter().map(of).sum::<f64>();
        let grown = sum(|added| added.1);
        match symptom.is {
            Condition::Grows(more_than) => grown > more_than,
            Condition::Share(more_than) => grown >= MIN_EVENTS && grown > more_than * sum(|added| added.2),
            Condition::Above(_) => self
                .above_since
                .is_some_and(|since| now.duration_since(since) >= symptom.over),
        }
    }
}

/// Value of the label `name`; empty without it.
fn label<'a>(labels: &'a str, name: &str) -> &'a str {
    let mut values = labels.split("\",").filter_map(|label| label.split_once("=\""));
    let value = values.find(|(known, _)| *known == name).map(|(_, value)| value);
    value.unwrap_or_default().trim_end_matches("\"}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_secs(5);

    /// Ids and subjects of what is found after these expositions, each a step after the one before.
    fn found(expositions: &[&str]) -> Vec<(FindingId, String)> {
        let (symptoms, mut now) = (Symptoms::default(), Instant::now());
        for exposition in expositions {
            now += STEP;
            symptoms.note(now, exposition);
        }
        let found = symptoms.findings(now).into_iter();
        found.map(|finding| (finding.id, finding.subject)).collect()
    }

    #[test]
    fn every_symptom_is_judged_by_a_series_of_its_alert() {
        let rules = include_str!("../../../charts/rangecache/files/alerts.yaml");
        for symptom in SYMPTOMS {
            let of_alert = |alert: &&str| {
                let rule = rules.split("- alert: ").find(|rule| rule.starts_with(*alert));
                rule.is_some_and(|rule| rule.contains(symptom.series))
            };
            assert!(symptom.id.alerts().iter().any(of_alert), "{:?}", symptom.id);
        }
    }

    #[test]
    fn counter_that_grows_is_found_until_its_time_is_over() {
        let refused = |n| {
            format!(
                "rangecache_flag_reloads_total{{result=\"changed\"}} 7\nrangecache_flag_reloads_total{{result=\"refused\"}} {n}"
            )
        };
        let (none, one) = (refused(0), refused(1));
        assert_eq!(found(&[&none, &none]), []);
        let expected = [(FindingId::ReloadRefused, String::new())];
        assert_eq!(found(&[&none, &one, &one]), expected);
        // The first exposition is compared with zero, at which counters begin.
        assert_eq!(found(&[&one]), expected);
        let hour: Vec<&str> = std::iter::once(&*none)
            .chain(std::iter::repeat_n(&*one, 722))
            .collect();
        assert_eq!(found(&hour[..721]), expected);
        assert_eq!(found(&hour), []);
    }

    #[test]
    fn subjects_are_distinguished_by_a_label_whatever_their_names_contain() {
        let loads = |n| {
            format!(
                "rangecache_mirror_reloads_total{{mirror=\"/a,{{}}/\",reason=\"start\"}} 9\n\
                 rangecache_mirror_reloads_total{{mirror=\"/a,{{}}/\",reason=\"compacted\"}} {n}\n\
                 rangecache_mirror_reloads_total{{mirror=\"/b/\",reason=\"compacted\"}} 3"
            )
        };
        assert_eq!(found(&[&loads(0), &loads(3)]), []);
        assert_eq!(
            found(&[&loads(0), &loads(4)]),
            [(FindingId::MirrorReloads, "/a,{}/".to_owned())]
        );
    }

    #[test]
    fn share_needs_some_events_and_gauges_need_time() {
        let handshakes = |refused, ok| {
            format!(
                "rangecache_tls_handshakes_total{{result=\"refused\"}} {refused}\nrangecache_tls_handshakes_total{{result=\"ok\"}} {ok}"
            )
        };
        assert_eq!(found(&[&handshakes(2, 0)]), []);
        assert_eq!(found(&[&handshakes(9, 9)]), []);
        let expected = [(FindingId::HandshakesFail, String::new())];
        assert_eq!(found(&[&handshakes(10, 9)]), expected);
        let waiting = "rangecache_buffer_waiting{kind=\"request\"} 1";
        let expected = [(FindingId::BuffersWait, "request".to_owned())];
        assert_eq!(found(&[waiting; 61]), expected);
        assert_eq!(found(&[waiting; 60]), []);
        let mut once_free = [waiting; 61];
        once_free[30] = "rangecache_buffer_waiting{kind=\"request\"} 0";
        assert_eq!(found(&once_free), []);
    }
}
