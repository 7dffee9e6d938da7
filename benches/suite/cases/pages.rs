//! P8: pages and counts of a long list.

use anyhow::Result;

use crate::dataset::{Dataset, current_revision};
use crate::load::Shape;
use crate::measure::{BLOCK, Block, interleave};
use crate::report::{Check, Row, Unit};
use crate::targets::Setup;

/// What kube-apiserver asks for at a time.
pub(crate) const PAGE_KEYS: i64 = 500;
/// How pages and counts are driven here and in the growth.
pub(crate) const SHAPE: Shape = Shape {
    connections: 1,
    in_flight: 1,
    duration: BLOCK,
    min_calls: 3,
};

/// P8: the first page, pages that start anywhere, pages that go on with a list, and the count.
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
