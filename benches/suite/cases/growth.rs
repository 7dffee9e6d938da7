//! P15: cost of reads while the store grows by a factor of a hundred.

use anyhow::Result;

use super::pages::{PAGE_KEYS, SHAPE};
use crate::dataset::Dataset;
use crate::measure::{Block, Series, interleave};
use crate::report::{Check, Row, Unit};
use crate::targets::{Kind, Setup};

/// The measured reads.
const READS: [&str; 3] = ["GET", "page of 500", "count"];

/// Figures at each size, collected while the store grows.
#[derive(Default)]
pub(crate) struct Growth {
    rows: Vec<(usize, usize, Row)>,
}

impl Growth {
    /// Measures the three reads at the current size of the store.
    pub(crate) async fn measure(&mut self, setup: &Setup, data: &Dataset, rounds: usize) -> Result<()> {
        for (read, name) in READS.iter().enumerate() {
            let ops = match read {
                0 => data.gets(),
                1 => data.first_page(PAGE_KEYS),
                _ => data.count(),
            };
            let series: Series = interleave(setup, SHAPE, ops, rounds).await?;
            let what = format!("{name} among {} keys, p50", thousands(data.keys));
            let row = Row::of_series("P15", what, Unit::Nanoseconds, &series, Block::p50_ns, &[]);
            self.rows.push((read, data.keys, row.with_series(series)));
        }
        Ok(())
    }

    /// Rows for each size, and the growth from the first to the last.
    pub(crate) fn rows(self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (read, name) in READS.iter().enumerate() {
            let sizes: Vec<&(usize, usize, Row)> = self.rows.iter().filter(|row| row.0 == read).collect();
            let (Some(first), Some(last)) = (sizes.first(), sizes.last()) else {
                continue;
            };
            let factor = |kind| Some(last.2.median(kind)? / first.2.median(kind)?);
            let figures = Kind::ALL
                .into_iter()
                .filter_map(|kind| Some((kind, vec![factor(kind)?])));
            let what = format!(
                "{name}: growth from {} to {} keys",
                thousands(first.1),
                thousands(last.1)
            );
            rows.extend(sizes.iter().map(|size| size.2.clone()));
            rows.push(Row::of_figures(
                "P15",
                what,
                Unit::Factor,
                figures,
                &[Check::AtMost(1.5)],
            ));
        }
        rows
    }
}

/// A number of keys in short form.
fn thousands(keys: usize) -> String {
    if keys < 1_000_000 {
        format!("{}k", keys / 1000)
    } else {
        format!("{}M", keys / 1_000_000)
    }
}
