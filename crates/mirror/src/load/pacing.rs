//! Pacing of the loads of this process: measures etcd's latency during loads, and delays what they read.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tower_service::Service;

use super::pace::LoadPace;
use etcd_store::keyspace::scope::Scope;
use rangecache_upstream::{
    BoxError, Channel, Connection, ConnectionClass, Upstream, UpstreamBody, current_header, jittered,
};

/// Timeout of a read that measures etcd's latency.
const LATENCY_TIMEOUT: Duration = Duration::from_secs(1);

/// Pace of loads, shared by the loads of this process.
#[derive(Debug)]
pub(crate) struct LoadPacing {
    origin: Instant,
    /// `None` while nothing is loaded.
    pace: Mutex<Option<LoadPace>>,
    /// The turn to measure: loads of several mirrors measure as often as one.
    turn: Semaphore,
}

/// A load in progress, until dropped.
#[derive(Debug)]
pub(super) struct PacedLoad(Arc<LoadPacing>);

impl LoadPacing {
    /// Pacing without a load.
    pub(crate) fn new() -> LoadPacing {
        LoadPacing {
            origin: Instant::now(),
            pace: Mutex::default(),
            turn: Semaphore::new(1),
        }
    }

    /// Begins a load.
    pub(super) fn begin(self: &Arc<Self>) -> PacedLoad {
        let now = self.now();
        self.pace.lock().get_or_insert_with(|| LoadPace::new(now)).begin();
        PacedLoad(Arc::clone(self))
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}

impl Drop for PacedLoad {
    fn drop(&mut self) {
        let mut pace = self.0.pace.lock();
        if pace.as_mut().is_some_and(LoadPace::end) {
            *pace = None;
        }
    }
}

impl PacedLoad {
    fn with<T>(&self, act: impl FnOnce(&mut LoadPace, Duration) -> T) -> Option<T> {
        let now = self.0.now();
        self.0.pace.lock().as_mut().map(|pace| act(pace, now))
    }

    /// Cost bytes per second that the loads of this process may read now.
    pub(super) fn rate(&self) -> f64 {
        self.with(|pace, _| pace.rate()).unwrap_or_default()
    }

    /// Charges `cost` bytes in addition to those of [`PacedBody`].
    pub(super) fn charge(&self, cost: u64) {
        self.with(|pace, now| pace.charge(now, cost));
    }

    /// When the load may read on; `None` if that is now.
    fn due(&self) -> Option<Instant> {
        let due = self.with(|pace, now| pace.wait(now)).flatten()?;
        Some(self.0.origin + due)
    }

    /// Waits until everything that was charged is paid for.
    pub(super) async fn pay(&self) {
        while let Some(due) = self.due() {
            tokio::time::sleep_until(due).await;
        }
    }

    /// Measures the latency of the member behind `connection` while the load is paced, by small linearizable reads within
    /// `scope` on a connection that other calls use, until the guard is dropped. In a task of its own: what the load does
    /// between two reads is none of etcd's latency.
    pub(super) fn measure(
        self: &Arc<Self>,
        tasks: &TaskTracker,
        upstream: &Arc<Upstream>,
        connection: &Arc<Connection>,
        scope: &Scope,
    ) -> DropGuard {
        let (load, upstream) = (Arc::clone(self), Arc::clone(upstream));
        let (connection, scope) = (Arc::clone(connection), scope.clone());
        let ended = CancellationToken::new();
        let measuring = async move { load.keep_measuring(&upstream, &connection, &scope).await };
        tasks.spawn(ended.clone().run_until_cancelled_owned(measuring));
        ended.drop_guard()
    }

    async fn keep_measuring(
        &self,
        upstream: &Upstream,
        connection: &Connection,
        scope: &Scope,
    ) -> Infallible {
        loop {
            // Held during the pause: loads measure in turns.
            let _turn = self.0.turn.acquire().await;
            let interval = self.with(|pace, _| pace.interval()).unwrap_or(LATENCY_TIMEOUT);
            tokio::time::sleep(jittered(interval)).await;
            // Most loads are over before they are paced.
            if self.with(|pace, _| pace.is_paced()) != Some(true) {
                continue;
            }
            // The first read wakes the processors, which takes longer than the read: what an idle machine needs for that must
            // not count as load.
            let read = async {
                let deadline = Instant::now() + LATENCY_TIMEOUT;
                let checks = upstream.connection_to(ConnectionClass::Check, connection.url(), deadline);
                let shared = checks.await.ok()?;
                current_header(&shared, scope.key()).await.ok()?;
                let began = Instant::now();
                current_header(&shared, scope.key()).await.ok()??;
                Some(began.elapsed())
            };
            let latency = tokio::time::timeout(LATENCY_TIMEOUT, read).await;
            self.with(|pace, now| match latency {
                Ok(Some(latency)) => pace.record_latency(now, latency),
                _ => pace.record_failure(now),
            });
        }
    }

    /// `channel` whose responses are read at the rate of loads.
    pub(super) fn channel(self: &Arc<Self>, channel: Channel) -> PacedChannel {
        PacedChannel {
            channel,
            load: Arc::clone(self),
        }
    }
}

/// A channel whose responses are read at the rate of loads. etcd sends no more than the connection's receive window
/// ahead of that.
#[derive(Clone, Debug)]
pub(super) struct PacedChannel {
    channel: Channel,
    load: Arc<PacedLoad>,
}

impl Service<Request<tonic::body::Body>> for PacedChannel {
    type Response = Response<PacedBody>;
    type Error = <Channel as Service<Request<tonic::body::Body>>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let (response, load) = (self.channel.call(request), Arc::clone(&self.load));
        Box::pin(async move {
            let response = response.await?;
            Ok(response.map(|body| PacedBody {
                body,
                load,
                waiting: None,
            }))
        })
    }
}

/// A response that is read at the rate of loads.
#[derive(Debug)]
pub(super) struct PacedBody {
    body: UpstreamBody,
    load: Arc<PacedLoad>,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Body for PacedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Some(waiting) = &mut this.waiting {
            ready!(waiting.as_mut().poll(context));
            this.waiting = None;
        }
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            this.load.charge(data.len() as u64);
            this.waiting = this.load.due().map(|due| Box::pin(tokio::time::sleep_until(due)));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cost bytes that each load reads at once.
    const FREE: u64 = 4_000_000;

    #[tokio::test(start_paused = true)]
    async fn first_bytes_of_a_load_are_free_and_the_next_ones_are_paid_for() {
        let load = Arc::new(LoadPacing::new()).begin();
        load.charge(FREE);
        assert_eq!(load.due(), None);
        let began = Instant::now();
        load.charge(FREE);
        assert!(load.due().is_some());
        load.pay().await;
        assert_eq!(load.due(), None);
        #[allow(clippy::cast_precision_loss, reason = "fewer than 2^53 bytes")]
        let share = began.elapsed().as_secs_f64() * load.rate() / FREE as f64;
        assert!((0.99..1.01).contains(&share), "{share}");
    }

    #[tokio::test(start_paused = true)]
    async fn loads_at_the_same_time_share_one_rate() {
        let pacing = Arc::new(LoadPacing::new());
        let (one, other) = (pacing.begin(), pacing.begin());
        one.charge(2 * FREE);
        assert_eq!(other.due(), None, "each load has bytes that are free");
        one.charge(FREE);
        assert!(other.due().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_the_last_load_ends_the_pace_and_that_of_another_does_not() {
        let pacing = Arc::new(LoadPacing::new());
        let (one, other) = (pacing.begin(), pacing.begin());
        one.charge(4 * FREE);
        drop(one);
        assert!(other.due().is_some());
        drop(other);
        let next = pacing.begin();
        next.charge(FREE);
        assert_eq!(next.due(), None);
    }
}
