//! The way of a request. Every part of the code and the docs uses these names, in this order:
//!
//! ```text
//! accept → route → plan → prove → answer            (from the cache)
//!                     ├──→ stream                   (a RangeStream of etcd's, answered as unary)
//!                     └──→ forward                  (opaque bytes)
//! ```
//!
//! | phase | file |
//! |---|---|
//! | accept | [`server`](crate::server), and [`handle`] for each request |
//! | route | `route`: by path only |
//! | plan | `plan`: pure; is it to be answered, and what has to be proven |
//! | prove | `range`, with `mirror::freshness`; `authorize` where rights are to be proven, too |
//! | answer | `range`, `range_stream`, `body`: bytes produced as the client reads (I5) |
//! | stream | `convert` (a large Range), `series` (pages), with `budget` (what is held) |
//! | forward | `forward`, `large` (what must not stampede etcd), `pager` (a RangeStream where etcd has none), `http1`, `learn` (calls that change what memory may answer) |
//!
//! `drain` ends at a stop what never ends by itself, `stalled` what nobody reads, `record` is what is told of a Range at its end, `trace` the spans of a call that is traced This room uses `mirror`, `cache` and `upstream`; only `main` uses it.

mod authorize;
mod body;
mod budget;
mod convert;
mod drain;
mod forward;
mod http1;
mod large;
mod learn;
mod owner;
mod pager;
mod plan;
mod range;
mod range_stream;
mod record;
mod route;
mod series;
mod stalled;
mod trace;

pub use body::ResponseBody;
pub use route::handle;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::mirror::Mirrors;
use crate::panics::restarting;
use crate::telemetry::Telemetry;
use crate::upstream::Upstream;
use budget::Budget;
use convert::Converter;
use forward::Forward;
use large::Large;
use series::AllSeries;
use stalled::Answers;

/// What every request needs.
#[derive(Debug)]
pub struct Proxy {
    mirrors: Arc<Mirrors>,
    telemetry: Arc<Telemetry>,
    forward: Arc<Forward>,
    large: Arc<Large>,
    series: Arc<AllSeries>,
    freshness_timeout: Duration,
    tasks: TaskTracker,
    answers: Answers,
    max_calls: usize,
    /// A stop has begun: calls that never end by themselves are ended.
    drain: CancellationToken,
}

impl Proxy {
    /// Ready to serve; [`handle`] takes the requests.
    #[must_use]
    pub fn new(
        config: &Config,
        upstream: &Arc<Upstream>,
        mirrors: &Arc<Mirrors>,
        telemetry: &Arc<Telemetry>,
        tasks: &TaskTracker,
        drain: &CancellationToken,
    ) -> Arc<Proxy> {
        let metrics = &telemetry.metrics;
        let budget = Budget::new(config.forward.stream_max_bytes, metrics);
        let series = AllSeries::new(
            config.forward.series_ttl,
            config.forward.stream_max_bytes,
            &budget,
            upstream,
            mirrors,
            metrics,
        );
        let converter = Converter::new(&budget, config.forward.stream_max_wait, metrics);
        Arc::new(Proxy {
            mirrors: Arc::clone(mirrors),
            telemetry: Arc::clone(telemetry),
            forward: Arc::new(Forward {
                upstream: Arc::clone(upstream),
                cluster_state: Arc::clone(&mirrors.cluster_state),
                connect_timeout: config.etcd.connect_timeout,
                drain: drain.clone(),
            }),
            large: Large::new(config, converter, &series, metrics, tasks),
            series,
            freshness_timeout: config.mirror.freshness_timeout,
            tasks: tasks.clone(),
            answers: Answers::default(),
            max_calls: config.limits.max_calls as usize,
            drain: drain.clone(),
        })
    }

    /// Gives up answers that nobody reads, ends page series that nobody goes on with, and forgets slow calls of long ago, until
    /// `stop`.
    pub async fn sweep(self: Arc<Self>, stop: CancellationToken) {
        let sweeping = async {
            tokio::join!(
                restarting("sweep", || self.answers.run()),
                restarting("series", || self.series.sweep()),
                restarting("slow calls", async || {
                    let mut ticks = tokio::time::interval(Duration::from_secs(5));
                    loop {
                        ticks.tick().await;
                        self.telemetry.slowest.sweep();
                    }
                })
            )
        };
        stop.run_until_cancelled(sweeping).await;
    }

    /// Whether as many calls are under way as may be. A call counts until the last byte of its answer has gone: hyper drives
    /// each in a task of its own, so that this is two loads.
    fn is_full(&self) -> bool {
        let connections = usize::try_from(self.telemetry.metrics.connections.open.get()).unwrap_or(0);
        self.tasks.len().saturating_sub(connections) > self.max_calls
    }
}
