//! P8: pages and counts of a long list.

use anyhow::Result;

use crate::dataset::{Dataset, current_revision};
use crate::load::Shape;
use crate::measure::{BLOCK, Block, interleave};
use crate::report::{Check, Row, Unit};
use crate::targets::Setup;

/// Page size of kube-apiserver's requests.
pub(crate) const PAGE_KEYS: i64 = 500;
/// Load of the page and count cases, here and in P15.
pub(crate) const SHAPE: Shape = Shape {
    connections: 1,
    in_flight: 1,
    duration: BLOCK,
    min_calls: 3,
};

/// P8: the first page, pages from random keys on, pages that continue a list, and the count.
pub(crate) async fn p8(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let revision = current_revision(&*setup.connect().await?).await?;
    let page = [Check::AtMost(1.5e6)];
    let count = [Check::AtMost(0.5e6)];
    let cases: [(&str, Vec<_>, &[Check]); 4] = [
        (
            "first page of 500 of 300k, p50",
            data.first_page(PAGE_KEYS),
            &page,
        ),
        (
            "page of 500 from anywhere, p50",
            data.random_pages(PAGE_KEYS, 0),
            &page,
        ),
        (
            "the same at the list's revision, p50",
            data.random_pages(PAGE_KEYS, revision),
            &page,
        ),
        ("count of 300k, p50", data.count(), &count),
    ];
    let mut rows = Vec::new();
    for (what, ops, checks) in cases {
        let series = interleave(setup, SHAPE, ops, rounds).await?;
        let row = Row::of_series("P8", what, Unit::Nanoseconds, &series, Block::p50_ns, checks);
        rows.push(row.with_series(series));
    }
    Ok(rows)
}
