//! Metrics pages of etcd and rangecache, and counts of calls by outcome.

use std::collections::BTreeMap;

use crate::http;
use crate::wait::{SOON, until};

/// Samples by name and labels as in the text format, such as `rangecache_range_total{outcome="hit",reason="x"}`.
#[derive(Clone, Debug)]
pub struct Metrics(pub BTreeMap<String, f64>);

impl Metrics {
    /// Reads and parses a metrics page; asks again while too many requests wait for theirs.
    pub async fn read(url: &str) -> Self {
        let answered = async || {
            let page = http::get(url).await.unwrap();
            (page.status != 503).then_some(page)
        };
        let (page, _) = until(SOON, "a metrics page is answered", answered).await;
        assert_eq!(page.status, 200, "{url}: {}", page.body);
        Self::parse(&page.body)
    }

    /// Parses the text format.
    pub fn parse(text: &str) -> Self {
        let samples = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                Some((name.to_owned(), value.parse().ok()?))
            });
        Self(samples.collect())
    }

    /// Sum of a metric over all its labels.
    pub fn sum(&self, name: &str) -> f64 {
        self.sum_where(name, |_| true)
    }

    /// Sum of a metric over the samples that have `label`, such as `reason="x"`.
    pub fn sum_with_label(&self, name: &str, label: &str) -> f64 {
        self.sum_where(name, |labels| labels.contains(label))
    }

    fn sum_where(&self, name: &str, is_counted: impl Fn(&str) -> bool) -> f64 {
        let counted = self.0.iter().filter(|(sample, _)| {
            let (of, labels) = sample.split_once('{').unwrap_or((sample, ""));
            of == name && is_counted(labels)
        });
        counted.map(|(_, value)| value).sum()
    }

    /// Watchers that `memory` or `etcd` has created, whatever the reason.
    pub fn watches_created(&self, by: &str) -> f64 {
        self.sum_with_label("rangecache_watch_created_total", &format!("outcome=\"{by}\""))
    }

    /// Watch streams that `memory` or `etcd` serves, whatever the reason.
    pub fn watch_streams(&self, source: &str) -> f64 {
        self.sum_with_label("rangecache_watch_streams", &format!("source=\"{source}\""))
    }

    /// Buffered bytes of `kind`.
    pub fn buffered(&self, kind: &str) -> f64 {
        let name = format!("rangecache_buffer_used_bytes{{kind=\"{kind}\"}}");
        self.0.get(&name).copied().unwrap_or_default()
    }

    pub fn outcomes(&self) -> Outcomes {
        self.outcomes_of("rangecache_range_total")
    }

    /// Create requests of watchers, by outcome and reason.
    pub fn created_watches(&self) -> Outcomes {
        self.outcomes_of("rangecache_watch_created_total")
    }

    /// Counts of the counter `name`, by outcome and reason.
    pub(crate) fn outcomes_of(&self, name: &str) -> Outcomes {
        let mut outcomes = Outcomes::default();
        // Series begin at zero.
        for (sample, value) in self.0.iter().filter(|(_, value)| **value > 0.0) {
            let rest = sample.strip_prefix(name);
            if let Some(labels) = rest.and_then(|rest| rest.strip_prefix('{')) {
                let label = |name: &str| {
                    let (_, rest) = labels.split_once(&format!("{name}=\""))?;
                    Some(rest.split('"').next()?.to_owned())
                };
                let ended = (
                    label("outcome").expect("has an outcome"),
                    label("reason").expect("has a reason"),
                );
                outcomes.0.insert(ended, *value as u64);
            }
        }
        outcomes
    }
}

/// Number of calls by outcome and reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcomes(pub BTreeMap<(String, String), u64>);

impl Outcomes {
    /// Calls added since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let added = self
            .0
            .iter()
            .map(|(key, n)| (key.clone(), n - before.0.get(key).unwrap_or(&0)));
        Self(added.filter(|(_, n)| *n > 0).collect())
    }

    /// Adds the calls of `other`.
    pub fn add(&mut self, other: Self) {
        for (ended, n) in other.0 {
            *self.0.entry(ended).or_default() += n;
        }
    }

    /// Number of all calls.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Number of calls with this outcome, whatever the reason.
    pub fn of(&self, outcome: &str) -> u64 {
        self.0
            .iter()
            .filter(|((of, _), _)| of == outcome)
            .map(|(_, n)| n)
            .sum()
    }

    /// Number of calls answered from memory.
    pub fn memory_answers(&self) -> u64 {
        self.of("hit") + self.of("waited")
    }
}
