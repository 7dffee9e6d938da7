//! Results of the cases: rows of figures, with goals to compare them with.

use std::collections::{BTreeMap, BTreeSet};

use crate::measure::{Block, Series};
use crate::targets::Kind;

/// Kind of a figure: its format, and which direction is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Latency or CPU time in nanoseconds; less is better.
    Nanoseconds,
    /// Memory; less is better.
    Bytes,
    /// Calls per second; more is better.
    PerSecond,
    /// Throughput; more is better.
    BytesPerSecond,
    /// A factor; less is better.
    Factor,
    /// A number of defects; less is better.
    Count,
}

impl Unit {
    /// Whether a larger figure is better.
    pub(crate) fn more_is_better(self) -> bool {
        matches!(self, Unit::PerSecond | Unit::BytesPerSecond)
    }

    /// Formats the figure with its unit.
    pub(crate) fn write(self, value: f64) -> String {
        match self {
            Unit::Nanoseconds if value.abs() < 1e6 => format!("{} µs", digits(value / 1e3)),
            Unit::Nanoseconds if value.abs() < 1e10 => format!("{} ms", digits(value / 1e6)),
            Unit::Nanoseconds => format!("{} s", digits(value / 1e9)),
            Unit::Bytes if value.abs() < 1e6 => format!("{} kB", digits(value / 1e3)),
            Unit::Bytes if value.abs() < 1e9 => format!("{} MB", digits(value / 1e6)),
            Unit::Bytes => format!("{} GB", digits(value / 1e9)),
            Unit::PerSecond => format!("{}k/s", digits(value / 1e3)),
            Unit::BytesPerSecond => format!("{} GB/s", digits(value / 1e9)),
            Unit::Factor => format!("{}×", digits(value)),
            Unit::Count => format!("{value:.0}"),
        }
    }
}

/// Formats with three significant digits.
fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Condition of a goal.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Check {
    /// At least this factor better than etcd itself.
    TimesDirect(f64),
    /// At least this factor better than grpc-proxy.
    TimesProxy(f64),
    /// At most this, in the row's unit.
    AtMost(f64),
    /// At most this much more than etcd itself, in the row's unit.
    AtMostAboveDirect(f64),
}

/// Median, minimum and maximum over the rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stat {
    /// The median.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) min: f64,
    /// The largest.
    pub(crate) max: f64,
}

impl Stat {
    /// Spread of one figure per round; `None` without figures.
    pub(crate) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Stat> {
        let mut figures: Vec<f64> = figures.into_iter().filter(|figure| figure.is_finite()).collect();
        figures.sort_by(f64::total_cmp);
        let middle = figures.len() / 2;
        let median = match figures.len() % 2 {
            0 => (figures.get(middle.checked_sub(1)?)? + figures.get(middle)?) / 2.0,
            _ => *figures.get(middle)?,
        };
        Some(Stat {
            median,
            min: *figures.first()?,
            max: *figures.last()?,
        })
    }
}

/// Row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// Number of the goal.
    pub(crate) goal: &'static str,
    /// Name of the measurement.
    pub(crate) what: String,
    /// Kind of the figures.
    pub(crate) unit: Unit,
    /// Figures per target.
    pub(crate) figures: BTreeMap<Kind, Stat>,
    /// Figures per target with watchers open beside the load, if the suite opens any.
    pub(crate) beside: BTreeMap<Kind, Stat>,
    /// Targets with failed calls.
    pub(crate) failed: BTreeSet<Kind>,
    /// Conditions of the goal; empty without a goal.
    pub(crate) checks: Vec<Check>,
    /// The rounds behind the row, if it is the first row made of them: CPU and errors are shown once.
    pub(crate) series: Option<Series>,
}

impl Row {
    /// A row with one figure per block.
    pub(crate) fn of_series(
        goal: &'static str,
        what: impl Into<String>,
        unit: Unit,
        series: &Series,
        figure: impl Fn(&Block) -> f64,
        checks: &[Check],
    ) -> Row {
        let figures = series
            .iter()
            .filter_map(|(kind, blocks)| Some((*kind, Stat::of(blocks.iter().map(&figure))?)))
            .collect();
        let beside = series
            .iter()
            .filter_map(|(kind, blocks)| {
                let beside = blocks.iter().filter_map(|block| block.beside.as_deref());
                Some((*kind, Stat::of(beside.map(&figure))?))
            })
            .collect();
        let failed = series
            .iter()
            .filter(|(_, blocks)| blocks.iter().any(Block::has_failed))
            .map(|(kind, _)| *kind)
            .collect();
        Row {
            goal,
            what: what.into(),
            unit,
            figures,
            beside,
            failed,
            checks: checks.to_vec(),
            series: None,
        }
    }

    /// A row of figures measured in another way.
    pub(crate) fn of_figures(
        goal: &'static str,
        what: impl Into<String>,
        unit: Unit,
        figures: impl IntoIterator<Item = (Kind, Vec<f64>)>,
        checks: &[Check],
    ) -> Row {
        let figures = figures
            .into_iter()
            .filter_map(|(kind, figures)| Some((kind, Stat::of(figures)?)))
            .collect();
        Row {
            goal,
            what: what.into(),
            unit,
            figures,
            beside: BTreeMap::new(),
            failed: BTreeSet::new(),
            checks: checks.to_vec(),
            series: None,
        }
    }

    /// Shows the rounds' CPU and errors with this row.
    pub(crate) fn with_series(mut self, series: Series) -> Row {
        self.series = Some(series);
        self
    }

    /// A target's median.
    pub(crate) fn median(&self, kind: Kind) -> Option<f64> {
        self.figures.get(&kind).map(|stat| stat.median)
    }

    /// A target's median with watchers open beside the load, and its ratio to that without.
    pub(crate) fn beside(&self, kind: Kind) -> Option<(f64, f64)> {
        let beside = self.beside.get(&kind)?.median;
        Some((beside, beside / self.median(kind)?))
    }

    /// Factor by which rangecache is better than `base`.
    pub(crate) fn times(&self, base: Kind) -> Option<f64> {
        let (ours, theirs) = (self.median(Kind::Rangecache)?, self.median(base)?);
        let times = if self.unit.more_is_better() {
            ours / theirs
        } else {
            theirs / ours
        };
        times.is_finite().then_some(times)
    }

    /// Whether every condition holds; `None` if a figure is missing or there is no goal.
    pub(crate) fn reached(&self) -> Option<bool> {
        if self.checks.is_empty() {
            return None;
        }
        // Figures of failed calls do not count.
        if self.failed.contains(&Kind::Rangecache) {
            return Some(false);
        }
        let ours = self.median(Kind::Rangecache)?;
        let mut all = true;
        for check in &self.checks {
            all &= match *check {
                Check::TimesDirect(times) => self.times(Kind::Direct)? >= times,
                Check::TimesProxy(times) => self.times(Kind::GrpcProxy)? >= times,
                Check::AtMost(bound) => ours <= bound,
                Check::AtMostAboveDirect(margin) => ours <= self.median(Kind::Direct)? + margin,
            };
        }
        Some(all)
    }

    /// The goal as text.
    pub(crate) fn goal_text(&self) -> String {
        let words = self.checks.iter().map(|check| match *check {
            Check::TimesDirect(times) => format!("{}× etcd", digits(times)),
            Check::TimesProxy(times) => format!("{}× proxy", digits(times)),
            Check::AtMost(bound) => format!("≤ {}", self.unit.write(bound)),
            Check::AtMostAboveDirect(margin) => format!("≤ etcd + {}", self.unit.write(margin)),
        });
        words.collect::<Vec<_>>().join(", ")
    }
}

/// All results.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Rows of the table.
    pub(crate) rows: Vec<Row>,
    /// Notes for the reader: failed cases, missing targets.
    pub(crate) notes: Vec<String>,
}

impl Report {
    /// Adds the result of a case, or its error as a note.
    pub(crate) fn add(&mut self, case: &str, found: anyhow::Result<Vec<Row>>) {
        match found {
            Ok(rows) => self.rows.extend(rows),
            Err(error) => self.note(format!("{case} was not measured: {error:#}")),
        }
    }

    /// Sorts the rows by goal; rows of one goal keep their order.
    pub(crate) fn sort(&mut self) {
        self.rows.sort_by_key(|row| {
            row.goal
                .trim_start_matches('P')
                .parse::<u32>()
                .unwrap_or(u32::MAX)
        });
    }

    /// Adds a note, once.
    pub(crate) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}
