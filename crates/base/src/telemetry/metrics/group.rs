//! [`metric_group!`]: the metrics of a room, each declared once, with its name and help text.
//!
//! ```ignore
//! metric_group! {
//!     /// Pages that clients have opened.
//!     pub struct PageMetrics {
//!         /// Open pages
//!         ///
//!         /// Useful when: clients list in pages
//!         pub open: Gauge = "rangecache_pages";
//!         /// Closed pages by `reason`: `read`, `forgotten`
//!         ///
//!         /// A page is forgotten after a minute
//!         ///
//!         /// Useful when: `forgotten` grows
//!         closed[reason]: Counter = "rangecache_pages_closed_total", from_zero = ["read", "forgotten"];
//!         newest: Mutex<Option<Page>>;
//!     }
//! }
//! ```
//!
//! The first paragraph of the doc comment is the help text. `make reference` writes to `docs/reference/metrics.md` its first
//! clause, more about the metric if need be, and the last paragraph, which says when it is useful. The name is the one on
//! `/metrics`, with the suffixes of its unit and type. A field in brackets has labels, and is a [`By`]; the series in
//! `from_zero` exist from the start, because Prometheus' `increase()` does not see the first event of a series that begins with
//! it. A field without a name is no metric, and has its default value.
//!
//! `pub struct AllPages by site; pub struct PageMetrics { … }` declares metrics that have a label `site` in addition:
//! `AllPages::of` returns the metrics of one site.

use std::any::{Any, TypeId};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, atomic::AtomicU64};
use std::{borrow::Cow, collections::HashMap, fmt, ops::Deref};

use prometheus_client::encoding::{EncodeLabel as _, EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry, Unit};

use super::latency::{Latency, TracedLatency};
use crate::telemetry::exposition::Exemplars;

pub use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

/// Gauge of a number that is not whole.
pub type FloatGauge = Gauge<f64, AtomicU64>;
/// Counter of seconds.
pub type FloatCounter = Counter<f64, AtomicU64>;

/// Metrics that are registered together, once in a process: see [`metric_group!`].
pub trait MetricGroup: Send + Sync + 'static {
    /// Creates the metrics and registers them.
    fn register(registrar: &mut Registrar) -> Self;
}

/// Groups that exist, by type.
#[derive(Debug, Default)]
pub(super) struct Groups(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl Groups {
    /// The group of this type, which is registered unless it exists.
    pub(super) fn get<T: MetricGroup>(&mut self, registrar: &mut Registrar) -> Arc<T> {
        let known = self.0.get(&TypeId::of::<T>());
        if let Some(group) = known.and_then(|group| Arc::clone(group).downcast().ok()) {
            return group;
        }
        let group = Arc::new(T::register(registrar));
        let shared: Arc<dyn Any + Send + Sync> = Arc::clone(&group) as _;
        self.0.insert(TypeId::of::<T>(), shared);
        group
    }
}

/// Registry of the process, and the exemplars of its latencies.
#[derive(Debug, Default)]
pub struct Registrar {
    pub(super) registry: Registry,
    pub(super) exemplars: Vec<Arc<Exemplars>>,
}

impl Registrar {
    /// Registers a metric under the name that it has on `/metrics`, with the first paragraph of its doc comment as help text. The
    /// registry appends the suffixes of unit and type itself.
    fn register(&mut self, name: &str, doc: &str, metric: impl Metric) {
        let help = help_text(doc);
        let name = name.strip_suffix("_total").unwrap_or(name);
        let units = [("_seconds", Unit::Seconds), ("_bytes", Unit::Bytes)];
        let with_unit = units
            .into_iter()
            .find_map(|(suffix, unit)| Some((name.strip_suffix(suffix)?, unit)));
        match with_unit {
            Some((name, unit)) => self.registry.register_with_unit(name, help, unit, metric),
            None => self.registry.register(name, help, metric),
        }
    }
}

/// The first paragraph of a doc comment, without its marks of code.
fn help_text(doc: &str) -> String {
    let lines = doc.lines().map(str::trim).take_while(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ").replace('`', "")
}

/// Metric without labels that [`metric_group!`] can declare.
pub trait Declared: Sized {
    /// Creates the metric and registers it.
    fn declare(registrar: &mut Registrar, name: &'static str, doc: &str) -> Self;
}

macro_rules! declared {
    ($($metric:ty),+) => {$(
        impl Declared for $metric {
            fn declare(registrar: &mut Registrar, name: &'static str, doc: &str) -> Self {
                let metric = <$metric>::default();
                registrar.register(name, doc, metric.clone());
                metric
            }
        }
    )+};
}

declared!(Counter, FloatCounter, Gauge, FloatGauge, Latency);

impl Declared for TracedLatency {
    fn declare(registrar: &mut Registrar, name: &'static str, doc: &str) -> TracedLatency {
        let (latency, exemplars) = (
            Latency::declare(registrar, name, doc),
            Arc::new(Exemplars::new(name)),
        );
        registrar.exemplars.push(Arc::clone(&exemplars));
        TracedLatency { latency, exemplars }
    }
}

/// Values of `N` labels, and their names, which are the same for all values of a metric.
#[derive(Clone, Debug)]
struct Labels<const N: usize> {
    names: &'static [&'static str; N],
    values: [Cow<'static, str>; N],
}

impl<const N: usize> PartialEq for Labels<N> {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values
    }
}

impl<const N: usize> Eq for Labels<N> {}

impl<const N: usize> Hash for Labels<N> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.values.iter().for_each(|value| value.hash(state));
    }
}

impl<const N: usize> EncodeLabelSet for Labels<N> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        for (name, value) in self.names.iter().zip(&self.values) {
            (*name, value.as_ref()).encode(encoder.encode_label())?;
        }
        Ok(())
    }
}

/// Value of one label, or a tuple of the values of `N` labels.
pub trait LabelValues<const N: usize> {
    /// Values in the order of the labels.
    fn into_values(self) -> [Cow<'static, str>; N];
}

impl<A: Into<Cow<'static, str>>> LabelValues<1> for A {
    fn into_values(self) -> [Cow<'static, str>; 1] {
        [self.into()]
    }
}

impl<A: Into<Cow<'static, str>>, B: Into<Cow<'static, str>>> LabelValues<2> for (A, B) {
    fn into_values(self) -> [Cow<'static, str>; 2] {
        [self.0.into(), self.1.into()]
    }
}

impl<A, B, C> LabelValues<3> for (A, B, C)
where
    A: Into<Cow<'static, str>>,
    B: Into<Cow<'static, str>>,
    C: Into<Cow<'static, str>>,
{
    fn into_values(self) -> [Cow<'static, str>; 3] {
        [self.0.into(), self.1.into(), self.2.into()]
    }
}

impl LabelValues<4> for [&'static str; 4] {
    fn into_values(self) -> [Cow<'static, str>; 4] {
        self.map(Cow::Borrowed)
    }
}

/// Metrics of one kind by the values of `N` labels. Cloning counts references.
#[derive(Clone, Debug)]
pub struct By<const N: usize, M> {
    names: &'static [&'static str; N],
    family: Family<Labels<N>, M>,
}

impl<const N: usize, M: Clone + Default> By<N, M> {
    /// The metric with these values of its labels, created unless it exists. It must not be kept: it locks the others.
    pub fn of(&self, values: impl LabelValues<N>) -> impl Deref<Target = M> {
        self.family.get_or_create(&self.labels(values))
    }

    /// The metric with these values of its labels, to be kept where the search for it would cost too much.
    pub fn handle(&self, values: impl LabelValues<N>) -> M {
        self.family.get_or_create_owned(&self.labels(values))
    }

    /// The metric with these values of its labels, if it exists.
    pub fn get(&self, values: impl LabelValues<N>) -> Option<impl Deref<Target = M>> {
        self.family.get(&self.labels(values))
    }

    /// Removes all series.
    pub fn clear(&self) {
        self.family.clear();
    }

    fn labels(&self, values: impl LabelValues<N>) -> Labels<N> {
        Labels {
            names: self.names,
            values: values.into_values(),
        }
    }
}

impl<const N: usize, M: Metric + TypedMetric + Clone + Default> By<N, M> {
    /// Registers the metrics, without series so far.
    pub fn declare(
        registrar: &mut Registrar,
        name: &str,
        names: &'static [&'static str; N],
        help: &str,
    ) -> By<N, M> {
        let family = Family::default();
        registrar.register(name, help, family.clone());
        By { names, family }
    }

    /// Creates the series with these values.
    pub fn from_zero<V: LabelValues<N>>(self, all: impl IntoIterator<Item = V>) -> By<N, M> {
        all.into_iter().for_each(|values| drop(self.of(values)));
        self
    }

    /// Removes the series with these values of its labels if it is a gauge. A counter stays: it has counted what it has.
    pub fn forget(&self, values: impl LabelValues<N>) {
        if matches!(M::TYPE, MetricType::Gauge) {
            self.family.remove(&self.labels(values));
        }
    }
}

/// Metrics of one kind by the value of a second label, all with the same value of the first.
#[derive(Clone, Debug)]
pub struct Within<M> {
    by: By<2, M>,
    outer: Cow<'static, str>,
}

impl<M: Clone + Default> Within<M> {
    /// Creates those with a value in `from_zero`.
    pub fn new(
        by: &By<2, M>,
        outer: impl Into<Cow<'static, str>>,
        from_zero: impl IntoIterator<Item = &'static str>,
    ) -> Within<M> {
        let within = Within {
            by: by.clone(),
            outer: outer.into(),
        };
        from_zero.into_iter().for_each(|value| drop(within.of(value)));
        within
    }

    /// The metric with this value of the second label, created unless it exists.
    pub fn of(&self, value: &'static str) -> impl Deref<Target = M> {
        self.by.of((self.outer.clone(), value))
    }
}

/// Counts one more on a gauge, until dropped.
#[derive(Debug)]
pub struct Counted(Gauge);

impl Counted {
    /// Counts on `gauge`.
    #[must_use]
    pub fn on(gauge: &Gauge) -> Counted {
        gauge.inc();
        Counted(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Value of a gauge; the largest of it for more.
#[must_use]
pub fn gauge(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

/// Value of a gauge that is never negative.
#[must_use]
pub fn unsigned(value: i64) -> u64 {
    value.try_into().unwrap_or(0)
}

/// Declares a group of metrics; see the description of this file.
#[macro_export]
macro_rules! metric_group {
    (
        $(#[$about:meta])*
        $vis:vis struct $all:ident by $outer:ident;
        $(#[$about_one:meta])*
        $vis_one:vis struct $one:ident {
            $(
                $(#[doc = $help:literal])+
                $field_vis:vis $field:ident $([$label:ident])?: $metric:ty = $name:literal $(, from_zero = $zero:expr)?;
            )+
        }
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        $vis struct $all {
            $($field: $crate::telemetry::metrics::metric_group!(@by $metric, $outer $(, $label)?),)+
        }

        $(#[$about_one])*
        #[derive(Clone, Debug)]
        $vis_one struct $one {
            $(
                $(#[doc = $help])+
                $field_vis $field: $crate::telemetry::metrics::metric_group!(@within $metric $(, $label)?),
            )+
        }

        impl $crate::telemetry::metrics::MetricGroup for $all {
            fn register(registrar: &mut $crate::telemetry::metrics::Registrar) -> Self {
                $all {
                    $($field: $crate::telemetry::metrics::metric_group!(
                        @new registrar, concat!($($help, "\n"),+), $metric, [$outer $(, $label)?], $name
                    ),)+
                }
            }
        }

        $crate::telemetry::metrics::metric_group!(@default $all);

        impl $all {
            /// The metrics with this value of the label that all have.
            #[must_use]
            $vis fn of(&self, $outer: &str) -> $one {
                $one {
                    $($field: $crate::telemetry::metrics::metric_group!(
                        @one self.$field, $outer $(, $label)? $(, $zero)?
                    ),)+
                }
            }

            /// Exports the gauges with this value of the label no longer.
            #[allow(dead_code, reason = "not every group is forgotten")]
            $vis fn forget(&self, $outer: &str) {
                $($crate::telemetry::metrics::metric_group!(@forget self.$field, $outer $(, $label)?);)+
            }

            /// Exports no values.
            #[allow(dead_code, reason = "not every group is replaced as a whole")]
            $vis fn clear(&self) {
                $(self.$field.clear();)+
            }
        }
    };
    (
        $(#[$about:meta])*
        $vis:vis struct $group:ident {
            $(
                $(#[doc = $help:literal])+
                $field_vis:vis $field:ident $([$($label:ident),+])?: $metric:ty
                    $(= $name:literal $(, from_zero = $zero:expr)?)?;
            )+
        }
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        $vis struct $group {
            $(
                $(#[doc = $help])+
                $field_vis $field: $crate::telemetry::metrics::metric_group!(@by $metric $($(, $label)+)?),
            )+
        }

        impl $crate::telemetry::metrics::MetricGroup for $group {
            fn register(registrar: &mut $crate::telemetry::metrics::Registrar) -> Self {
                $group {
                    $($field: $crate::telemetry::metrics::metric_group!(
                        @new registrar, concat!($($help, "\n"),+), $metric, [$($($label),+)?] $(, $name $(, $zero)?)?
                    ),)+
                }
            }
        }

        $crate::telemetry::metrics::metric_group!(@default $group);
    };

    (@default $group:ident) => {
        impl Default for $group {
            /// Metrics that nothing exports.
            fn default() -> Self {
                $crate::telemetry::metrics::MetricGroup::register(&mut Default::default())
            }
        }
    };

    (@by $metric:ty) => { $metric };
    (@by $metric:ty $(, $label:ident)+) => {
        $crate::telemetry::metrics::By<{ [$(stringify!($label)),+].len() }, $metric>
    };

    (@within $metric:ty) => { $metric };
    (@within $metric:ty, $label:ident) => { $crate::telemetry::metrics::Within<$metric> };

    (@new $registrar:ident, $help:expr, $metric:ty, []) => { <$metric>::default() };
    (@new $registrar:ident, $help:expr, $metric:ty, [], $name:literal) => {
        <$metric as $crate::telemetry::metrics::Declared>::declare($registrar, $name, $help)
    };
    (@new $registrar:ident, $help:expr, $metric:ty, [$($label:ident),+], $name:literal $(, $zero:expr)?) => {
        $crate::telemetry::metrics::By::declare(
            $registrar, $name, &[$(stringify!($label)),+], $help,
        )$(.from_zero($zero))?
    };

    (@one $self:ident.$field:ident, $outer:ident) => { $self.$field.handle($outer.to_owned()) };
    (@one $self:ident.$field:ident, $outer:ident, $label:ident) => {
        $crate::telemetry::metrics::metric_group!(@one $self.$field, $outer, $label, [])
    };
    (@one $self:ident.$field:ident, $outer:ident, $label:ident, $zero:expr) => {
        $crate::telemetry::metrics::Within::new(&$self.$field, $outer.to_owned(), $zero)
    };

    (@forget $self:ident.$field:ident, $outer:ident) => { $self.$field.forget($outer.to_owned()) };
    (@forget $self:ident.$field:ident, $outer:ident, $label:ident) => {};
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{Metrics, exposition::Format};

    metric_group! {
        /// Metrics of pages.
        struct PageMetrics {
            /// Open pages, in
            /// `pages`
            ///
            /// A page is open until it is closed
            open: Gauge = "pages";
            /// Closed pages by `reason`
            closed[reason]: Counter = "pages_closed_total", from_zero = ["read", "forgotten"];
            /// Bytes of pages
            sent: Counter = "pages_sent_bytes_total";
            /// Age of the oldest page
            age: FloatGauge = "pages_age_seconds";
            /// Not exported.
            unnamed: Counter;
        }
    }

    metric_group! {
        /// Metrics of all sites.
        struct AllSites by site;
        /// Metrics of one site.
        struct SiteMetrics {
            /// Readers of a site
            readers: Gauge = "site_readers";
            /// Visits of a site
            visits: Counter = "site_visits_total";
            /// Errors of a site by `kind`
            errors[kind]: Counter = "site_errors_total", from_zero = ["lost"];
        }
    }

    /// Samples on `/metrics` whose lines begin with `prefix`, in their order.
    fn samples(metrics: &Metrics, prefix: &str) -> Vec<String> {
        let text = metrics.encode(Format::Text);
        let mut lines: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with(prefix))
            .map(str::to_owned)
            .collect();
        lines.sort();
        lines
    }

    #[test]
    fn metrics_are_exported_under_their_declared_names_with_the_first_paragraph_as_help() {
        let metrics = Metrics::new();
        let pages = metrics.group::<PageMetrics>();
        pages.open.set(1);
        pages.closed.of("read").inc_by(2);
        pages.sent.inc_by(3);
        pages.age.set(0.5);
        pages.unnamed.inc();
        assert_eq!(
            samples(&metrics, "pages"),
            [
                "pages 1",
                "pages_age_seconds 0.5",
                "pages_closed_total{reason=\"forgotten\"} 0",
                "pages_closed_total{reason=\"read\"} 2",
                "pages_sent_bytes_total 3",
            ]
        );
        assert_eq!(
            samples(&metrics, "# HELP pages "),
            ["# HELP pages Open pages, in pages."]
        );
    }

    #[test]
    fn group_is_registered_once_however_often_it_is_used() {
        let metrics = Metrics::new();
        metrics.group::<PageMetrics>().open.inc();
        metrics.group::<PageMetrics>().open.inc();
        assert_eq!(samples(&metrics, "pages "), ["pages 2"]);
    }

    #[test]
    fn series_with_the_same_values_are_one_whether_the_values_are_borrowed_or_owned() {
        let metrics = Metrics::new();
        let closed = metrics.group::<PageMetrics>().closed.clone();
        let kept = closed.handle(String::from("lost"));
        closed.of("lost").inc();
        kept.inc();
        assert_eq!(closed.get("lost").map(|lost| lost.get()), Some(2));
        assert!(
            closed.get("other").is_none(),
            "a series that is only looked for is not created"
        );
    }

    #[test]
    fn forgotten_site_keeps_its_counters_but_not_its_gauges() {
        let metrics = Metrics::new();
        let sites = metrics.group::<AllSites>();
        let [near, far] = ["near", "far"].map(|site| sites.of(site));
        near.readers.set(1);
        far.readers.set(2);
        near.visits.inc();
        near.errors.of("lost").inc();
        sites.forget("near");
        assert_eq!(
            samples(&metrics, "site_"),
            [
                "site_errors_total{site=\"far\",kind=\"lost\"} 0",
                "site_errors_total{site=\"near\",kind=\"lost\"} 1",
                "site_readers{site=\"far\"} 2",
                "site_visits_total{site=\"far\"} 0",
                "site_visits_total{site=\"near\"} 1",
            ]
        );
        sites.clear();
        assert_eq!(samples(&metrics, "site_"), [""; 0]);
    }

    #[test]
    fn gauge_counts_each_holder_until_it_is_dropped() {
        let open = Gauge::default();
        let (first, second) = (Counted::on(&open), Counted::on(&open));
        assert_eq!(open.get(), 2);
        drop(first);
        assert_eq!(open.get(), 1);
        drop(second);
        assert_eq!(open.get(), 0);
    }
}
