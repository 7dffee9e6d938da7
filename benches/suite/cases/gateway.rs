//! JSON: Ranges of the JSON gateway over HTTP/1, by 64 clients that keep their connections. grpc-proxy has no gateway.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use testkit::pb::prefix_end;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::dataset::Dataset;
use crate::load::Outcome;
use crate::measure::{BLOCK, Block, CpuWatch, FROM_MEMORY, Series};
use crate::report::{Row, Unit};
use crate::targets::{Kind, Setup, Target};

/// Connections, with one call in flight each.
const CONNECTIONS: usize = 64;
/// Calls that a connection makes before the measurement.
const WARM_UP_CALLS: usize = 2;
/// Time limit of a call.
const CALL_DEADLINE: Duration = Duration::from_secs(30);

/// A client's connection, which is kept.
struct Connection {
    send: SendRequest<Full<Bytes>>,
    driver: tokio::task::JoinHandle<()>,
    authority: String,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    async fn open(address: SocketAddr) -> Result<Connection> {
        let stream = TcpStream::connect(address).await;
        let stream = stream.with_context(|| format!("connecting to {address}"))?;
        stream.set_nodelay(true)?;
        let (send, connection) = handshake(TokioIo::new(stream)).await?;
        // A broken connection fails the next call on it, which reports it.
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        let authority = address.to_string();
        Ok(Connection {
            send,
            driver,
            authority,
        })
    }

    /// Posts a Range; returns the length of the response.
    async fn range(&mut self, body: &Bytes) -> Result<u64> {
        let request = Request::post("/v3/kv/range")
            .header("host", &self.authority)
            .header("content-type", "application/json")
            .body(Full::new(body.clone()))?;
        let response = self.send.send_request(request).await?;
        if response.status() != 200 {
            bail!("HTTP status {}", response.status());
        }
        let mut body = response.into_body();
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            bytes += frame?.data_ref().map_or(0, Bytes::len) as u64;
        }
        Ok(bytes)
    }

    /// Calls until `end`, and at least `min_calls` times.
    async fn drive(&mut self, body: &Bytes, expected_bytes: u64, end: Instant, min_calls: usize) -> Outcome {
        let (start, mut outcome, mut calls) = (Instant::now(), Outcome::default(), 0);
        while calls < min_calls || Instant::now() < end {
            let began = Instant::now();
            let called = tokio::time::timeout(CALL_DEADLINE, self.range(body)).await;
            let result = match called {
                Ok(Ok(bytes)) if bytes == expected_bytes => Ok(bytes),
                Ok(Ok(bytes)) => Err(format!(
                    "a response of {bytes} bytes; etcd's has {expected_bytes}"
                )),
                Ok(Err(error)) => Err(format!("{error:#}")),
                Err(_) => Err(format!("no response within {CALL_DEADLINE:?}")),
            };
            let is_error = result.is_err();
            outcome.count(began.elapsed(), result);
            calls += 1;
            // The connection may be broken.
            if is_error {
                break;
            }
        }
        outcome.elapsed = start.elapsed();
        outcome
    }
}

/// Ranges of one key and of 1,000 keys, directly and through rangecache.
pub(crate) async fn run(setup: &Setup, data: &Dataset, rounds: usize) -> Result<Vec<Row>> {
    let key = |key: &[u8]| STANDARD.encode(key);
    let (first, end) = (
        key(data.prefix.as_bytes()),
        key(&prefix_end(data.prefix.as_bytes())),
    );
    let mut rows = Vec::new();
    for (what, body) in [
        (
            "1 key",
            format!("{{\"key\":\"{}\"}}", key(data.key(data.keys / 2).as_bytes())),
        ),
        (
            "1,000 keys",
            format!("{{\"key\":\"{first}\",\"range_end\":\"{end}\",\"limit\":1000}}"),
        ),
    ] {
        let series = measure(setup, &body.into(), rounds).await?;
        let rate = Row::of_series(
            "JSON",
            format!("JSON Range of {what}, {CONNECTIONS} in flight"),
            Unit::PerSecond,
            &series,
            Block::rate,
            &[],
        );
        let p99 = Row::of_series(
            "JSON",
            format!("JSON Range of {what}, p99"),
            Unit::Nanoseconds,
            &series,
            Block::p99_ns,
            &[],
        );
        let cpu = Row::of_series(
            "JSON",
            format!("JSON Range of {what}, CPU of etcd and rangecache"),
            Unit::Nanoseconds,
            &series,
            Block::server_cpu_per_call_ns,
            &[],
        );
        rows.extend([rate.with_series(series), p99, cpu]);
    }
    Ok(rows)
}

/// Drives etcd and rangecache in turns.
async fn measure(setup: &Setup, body: &Bytes, rounds: usize) -> Result<Series> {
    let mut series = Series::new();
    let targets = setup.targets().into_iter();
    let targets: Vec<Target> = targets
        .filter(|target| matches!(target.kind, Kind::Direct | Kind::Rangecache))
        .collect();
    let direct = targets.iter().find(|target| target.kind == Kind::Direct);
    let direct = direct.context("etcd itself is no target")?;
    let expected_bytes = Connection::open(direct.address).await?.range(body).await?;
    for _ in 0..rounds {
        for target in &targets {
            let block = drive(target, body, expected_bytes).await?;
            series.entry(target.kind).or_default().push(block);
        }
    }
    Ok(series)
}

/// Drives one target for its part of a round.
async fn drive(target: &Target, body: &Bytes, expected_bytes: u64) -> Result<Block> {
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut connection = Connection::open(target.address).await?;
        connection
            .drive(body, expected_bytes, Instant::now(), WARM_UP_CALLS)
            .await;
        connections.push(connection);
    }
    let answered_before = target.range_outcomes().await?;
    let cpu = CpuWatch::start(target)?;
    let end = Instant::now() + BLOCK;
    let body = Arc::new(body.clone());
    let mut workers = JoinSet::new();
    for mut connection in connections {
        let body = Arc::clone(&body);
        workers.spawn(async move { connection.drive(&body, expected_bytes, end, 1).await });
    }
    let mut outcome = Outcome::default();
    while let Some(of_one) = workers.join_next().await {
        outcome.merge(of_one?);
    }
    outcome.latencies_ns.sort_unstable();
    let mut block = cpu.finish(&outcome)?;
    if let Some((before, now)) = answered_before.zip(target.range_outcomes().await?) {
        let share = (now.from_memory - before.from_memory) / (now.all - before.all);
        block.extra.insert(FROM_MEMORY, share);
    }
    Ok(block)
}
