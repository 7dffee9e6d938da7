//! The calls of a replay, at the recorded pace or faster.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Code;

use super::flags::{ReplayConfig, Speed};
use super::line::RecordedRead;
use super::recording::Recording;
use super::report::{Pace, ReplayReport};
use etcd_wire::etcdserverpb::kv_client::KvClient;
use rangecache_base::telemetry::Metrics;
use rangecache_upstream::{ConnectionClass, Credentials, RangeStream, Upstream};

/// Delay from which a call counts as late.
const LATE: Duration = Duration::from_millis(100);
/// Interval of the lines about the progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Results that wait to be counted.
const QUEUE_RESULTS: usize = 1024;
/// Time for connections to be closed at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Result of one call: index of its read, latency, and the bytes of its values or its status.
struct Played {
    index: usize,
    took: Duration,
    result: Result<u64, Code>,
}

/// Plays `recording` against the endpoints of `config`. `tell` gets a line about the progress every few seconds.
///
/// # Errors
/// In words: an endpoint cannot be reached, or files or users cannot be used.
pub(super) async fn play(
    config: &ReplayConfig,
    recording: Recording,
    mut tell: impl FnMut(&str),
) -> Result<ReplayReport, String> {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let upstream = connect(config, &tasks, &stop).await?;
    let recording = Arc::new(recording);
    let mut report = ReplayReport::new(&recording);
    let (results, mut queue) = mpsc::channel(QUEUE_RESULTS);
    let began = Instant::now();
    let pacing = pace(config, &recording, &upstream, results, &tasks);
    let counting = async {
        let mut ticks = tokio::time::interval_at(began + PROGRESS_INTERVAL, PROGRESS_INTERVAL);
        loop {
            tokio::select! {
                played = queue.recv() => match played {
                    Some(played) => report.count(&recording.reads[played.index], played.took, played.result),
                    None => break,
                },
                _ = ticks.tick() => tell(&report.progress(recording.reads.len())),
            }
        }
    };
    let (pace, ()) = tokio::join!(pacing, counting);
    report.finish(began.elapsed(), pace);
    stop.cancel();
    tasks.close();
    let _ = timeout(CLOSE_TIMEOUT, tasks.wait()).await;
    Ok(report)
}

/// Connects to the endpoints.
async fn connect(
    config: &ReplayConfig,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Result<Arc<Upstream>, String> {
    let mut config = config.config.clone();
    config.etcd.discover().await.map_err(|error| error.to_string())?;
    let etcd = &config.etcd;
    let connector = config.connector(&Arc::new(Metrics::new()));
    let connector = connector.map_err(|error| error.to_string())?;
    let may_stream = etcd.range_stream == RangeStream::Auto;
    let credentials = Credentials::open(etcd, &connector).map_err(|error| error.to_string())?;
    let upstream = Upstream::start(&etcd.endpoints, &connector, may_stream, credentials, tasks, stop);
    let deadline = Instant::now() + etcd.connect_timeout;
    upstream
        .connection(ConnectionClass::Unary, deadline)
        .await
        .map_err(|error| error.to_string())?;
    if upstream.credentials().is_configured() {
        let until_known = async {
            while !upstream.credentials().have_token() && upstream.credentials().problem().is_none() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout_at(deadline, until_known).await;
    }
    Ok(upstream)
}

/// Starts each call when it is due, whether the earlier ones have ended or not, as long as there is room.
async fn pace(
    config: &ReplayConfig,
    recording: &Arc<Recording>,
    upstream: &Arc<Upstream>,
    results: mpsc::Sender<Played>,
    tasks: &TaskTracker,
) -> Pace {
    let room = Arc::new(Semaphore::new(config.concurrency as usize));
    let began = Instant::now();
    let mut pace = Pace::default();
    let first = recording.reads.first().map(|read| read.arrived_at);
    for (index, read) in recording.reads.iter().enumerate() {
        let since = first.and_then(|first| read.arrived_at.duration_since(first).ok());
        let due = match config.speed {
            Speed::Times(times) => began + since.unwrap_or_default().div_f64(times),
            Speed::Max => began,
        };
        sleep_until(due).await;
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else {
            break;
        };
        if config.speed != Speed::Max {
            pace.record(due.elapsed(), LATE);
        }
        let (recording, upstream, results) = (Arc::clone(recording), Arc::clone(upstream), results.clone());
        let limit = config.call_timeout;
        tasks.spawn(async move {
            let began = Instant::now();
            let call = call(&upstream, &recording.reads[index], began + limit);
            let result = timeout(limit, call).await.unwrap_or(Err(Code::DeadlineExceeded));
            let took = began.elapsed();
            drop(permit);
            let _ = results.send(Played { index, took, result }).await;
        });
    }
    pace
}

/// Makes one call; returns the bytes of its keys and values.
async fn call(upstream: &Upstream, read: &RecordedRead, deadline: Instant) -> Result<u64, Code> {
    let class = if read.is_stream {
        ConnectionClass::Stream
    } else {
        ConnectionClass::Unary
    };
    let connection = upstream.connection(class, deadline).await;
    let connection = connection.map_err(|_| Code::Unavailable)?;
    let (channel, origin) = connection.own_channel();
    let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
    let length = |kvs: &[Bytes]| kvs.iter().map(|kv| kv.len() as u64).sum::<u64>();
    if !read.is_stream {
        let response = client.range(read.request.clone()).await;
        return response
            .map(|response| length(&response.into_inner().kvs))
            .map_err(|status| status.code());
    }
    let response = client.range_stream(read.request.clone()).await;
    let mut chunks = response.map_err(|status| status.code())?.into_inner();
    let mut bytes = 0;
    while let Some(chunk) = chunks.message().await.map_err(|status| status.code())? {
        bytes += chunk.range_response.map_or(0, |response| length(&response.kvs));
    }
    Ok(bytes)
}
