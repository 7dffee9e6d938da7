//! Large Ranges on their way to etcd: few at once, identical ones together, and as RangeStreams where that can be.
//!
//! This is the last rung of the degradation ladder: what cannot be answered from memory must not stampede etcd. A large
//! Range waits for its turn; while one is under way, identical ones gather and are answered by **one** further call that
//! starts after they arrived (I2). Who would wait beyond the bounds is refused with a retryable status.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Response, response};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::task::TaskTracker;

use super::body::ResponseBody;
use super::budget;
use super::convert::{self, Converted, Converter};
use super::forward::{Along, Answered, Body, Forward, Outcome};
use super::owner::Owner;
use super::series::AllSeries;
use super::stalled::Answers;
use crate::cache::RangeQuery;
use crate::config::Config;
use crate::grpc::{HeaderScanner, Method, RangeResponseScanner, Status};
use crate::telemetry::{Metrics, Reason};
use crate::upstream::ConnectionClass;

/// See the module.
#[derive(Debug)]
pub(super) struct Large {
    turns: Arc<Semaphore>,
    waiting: AtomicU32,
    max_waiting: u32,
    shared_bytes: AtomicU64,
    max_shared_bytes: u64,
    /// By the request's bytes: there is an entry while a call is under way; it holds those who wait for the next.
    flights: Mutex<HashMap<Bytes, Option<Arc<Flight>>>>,
    converter: Converter,
    series: Arc<AllSeries>,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
}

/// A large Range on its way.
#[derive(Debug)]
pub(super) struct LargeRange<'a> {
    pub(super) parts: Parts,
    /// The message with its prefix, as it came.
    pub(super) request: Bytes,
    pub(super) query: &'a RangeQuery,
    /// Who may share its answer, or go on with it.
    pub(super) owner: Option<Owner>,
    /// Who watches over answers that nobody reads.
    pub(super) answers: &'a Answers,
}

/// How a large Range was answered.
pub(super) struct Passed {
    pub(super) outcome: Outcome,
    /// By a RangeStream, not as it came.
    pub(super) streamed: bool,
}

/// A turn, and the place in line for identical reads; both end with the answer.
#[derive(Debug)]
pub(super) struct Permit {
    _turn: OwnedSemaphorePermit,
    _lead: Option<Lead>,
    metrics: Arc<Metrics>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.metrics.forwarding.large.dec();
    }
}

/// The right to be the one call under way for a request. When it ends, the next flight leaves.
#[derive(Debug)]
pub(super) struct Lead {
    large: Arc<Large>,
    forward: Arc<Forward>,
    request: Bytes,
}

impl Drop for Lead {
    fn drop(&mut self) {
        let next = {
            let mut flights = self.large.flights.lock();
            match flights.get_mut(&self.request).and_then(Option::take) {
                Some(flight) => flight,
                None => {
                    flights.remove(&self.request);
                    return;
                }
            }
        };
        let (large, forward, request) = (
            Arc::clone(&self.large),
            Arc::clone(&self.forward),
            self.request.clone(),
        );
        self.large.tasks.spawn(async move {
            let lead = Lead {
                large: Arc::clone(&large),
                forward,
                request,
            };
            large.fly(&next, lead).await;
        });
    }
}

/// One call for several readers.
#[derive(Debug)]
struct Flight {
    parts: Parts,
    query: RangeQuery,
    result: watch::Sender<Option<Landed>>,
}

type Landed = Result<Arc<SharedAnswer>, Refused>;

/// Why no answer was shared.
#[derive(Clone, Debug)]
pub(super) struct Refused {
    pub(super) reason: Reason,
    pub(super) status: Status,
}

/// A whole answer of etcd that several readers share.
#[derive(Debug)]
pub(super) struct SharedAnswer {
    head: response::Parts,
    pub(super) pieces: Vec<Bytes>,
    pub(super) trailers: Option<HeaderMap>,
    streamed: bool,
    _held: HeldBy,
}

/// What an answer's bytes count against.
#[derive(Debug)]
enum HeldBy {
    Shared { _held: Held },
    Stream { _held: budget::Held },
}

/// Bytes that count against the bound until dropped.
#[derive(Debug)]
struct Held {
    large: Arc<Large>,
    bytes: u64,
}

impl Held {
    fn grow(&mut self, by: usize) -> bool {
        self.bytes += by as u64;
        let total = self.large.shared_bytes.fetch_add(by as u64, Ordering::Relaxed) + by as u64;
        self.large
            .metrics
            .forwarding
            .shared_bytes
            .inc_by(i64::try_from(by).unwrap_or(i64::MAX));
        total <= self.large.max_shared_bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.large.shared_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.large
            .metrics
            .forwarding
            .shared_bytes
            .dec_by(i64::try_from(self.bytes).unwrap_or(i64::MAX));
    }
}

/// Counts as waiting until dropped.
struct Waiting<'a>(&'a Large);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
        self.0.metrics.forwarding.waiting.dec();
    }
}

impl Large {
    pub(super) fn new(
        config: &Config,
        converter: Converter,
        series: &Arc<AllSeries>,
        metrics: &Arc<Metrics>,
        tasks: &TaskTracker,
    ) -> Arc<Large> {
        Arc::new(Large {
            turns: Arc::new(Semaphore::new(config.forward.max_large as usize)),
            waiting: AtomicU32::new(0),
            max_waiting: config.forward.max_waiting,
            shared_bytes: AtomicU64::new(0),
            max_shared_bytes: config.forward.shared_max_bytes,
            flights: Mutex::default(),
            converter,
            series: Arc::clone(series),
            metrics: Arc::clone(metrics),
            tasks: tasks.clone(),
        })
    }

    /// Passes a large Range on.
    ///
    /// # Errors
    /// [`Refused`] past a bound.
    pub(super) async fn pass(
        self: &Arc<Self>,
        forward: &Arc<Forward>,
        range: LargeRange<'_>,
    ) -> Result<Passed, Refused> {
        let lead = if range.owner == Some(Owner::Anybody) {
            match self.lead_or_join(forward, &range) {
                Ok(lead) => Some(lead),
                Err(flight) => return self.ride(flight).await,
            }
        } else {
            None
        };
        let permit = self.turn(lead).await?;
        let LargeRange {
            parts,
            request,
            query,
            owner,
            answers,
        } = range;
        if let Some(converted) = self.convert(forward, &parts, query, owner.as_ref()).await {
            // All of it is here: etcd has nothing more to do for it.
            drop(permit);
            return Ok(Passed {
                outcome: Ok(converted.response(answers)),
                streamed: true,
            });
        }
        let along = Along {
            _permit: Some(permit),
            watch: self.series.watch(query, owner, RangeResponseScanner::unary()),
        };
        let outcome = forward
            .pass_with(
                parts,
                Body::Read(request),
                Method::Range,
                ConnectionClass::Stream,
                along,
            )
            .await;
        Ok(Passed {
            outcome,
            streamed: false,
        })
    }

    /// Answers a large Range by a RangeStream, if that can be.
    async fn convert(
        &self,
        forward: &Forward,
        parts: &Parts,
        query: &RangeQuery,
        owner: Option<&Owner>,
    ) -> Option<Converted> {
        if !convert::suits(query) {
            return None;
        }
        let history = self.series.history();
        let converted = self.converter.convert(forward, parts, query).await.ok()?;
        if let (Some(found), Some(owner)) = (&converted.found, owner) {
            self.series.note(query, owner.clone(), found, history);
        }
        Some(converted)
    }

    /// The right to call, or the flight that leaves after the call under way.
    fn lead_or_join(
        self: &Arc<Self>,
        forward: &Arc<Forward>,
        range: &LargeRange<'_>,
    ) -> Result<Lead, watch::Receiver<Option<Landed>>> {
        let request = &range.request;
        let mut flights = self.flights.lock();
        match flights.get_mut(request) {
            None => {
                flights.insert(request.clone(), None);
                Ok(Lead {
                    large: Arc::clone(self),
                    forward: Arc::clone(forward),
                    request: request.clone(),
                })
            }
            Some(next) => {
                let flight = next.get_or_insert_with(|| {
                    let mut parts = range.parts.clone();
                    // Each reader keeps its own deadline; the shared call has none.
                    parts.headers.remove("grpc-timeout");
                    Arc::new(Flight {
                        parts,
                        query: range.query.clone(),
                        result: watch::Sender::new(None),
                    })
                });
                Err(flight.result.subscribe())
            }
        }
    }

    /// Counts the caller as waiting, if there is room.
    fn wait(&self) -> Result<Waiting<'_>, Refused> {
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed);
        self.metrics.forwarding.waiting.inc();
        let guard = Waiting(self);
        if waiting >= self.max_waiting {
            drop(guard);
            return Err(Refused {
                reason: Reason::TooManyWaiting,
                status: Status::TooManyWaiting,
            });
        }
        Ok(guard)
    }

    /// Waits for a turn; it ends with the permit.
    ///
    /// # Errors
    /// [`Refused`] past the bound on those who wait.
    pub(super) async fn turn(self: &Arc<Self>, lead: Option<Lead>) -> Result<Permit, Refused> {
        let turn = match Arc::clone(&self.turns).try_acquire_owned() {
            Ok(turn) => turn,
            Err(_) => {
                let _waiting = self.wait()?;
                Arc::clone(&self.turns)
                    .acquire_owned()
                    .await
                    .map_err(|_| Refused {
                        reason: Reason::Gone,
                        status: Status::Stopping,
                    })?
            }
        };
        self.metrics.forwarding.large.inc();
        Ok(Permit {
            _turn: turn,
            _lead: lead,
            metrics: Arc::clone(&self.metrics),
        })
    }

    /// Waits for a flight to land, and takes a share of its answer.
    async fn ride(&self, mut flight: watch::Receiver<Option<Landed>>) -> Result<Passed, Refused> {
        let _waiting = self.wait()?;
        let lost = || Refused {
            reason: Reason::Gone,
            status: Status::SharedCallCancelled,
        };
        let landed = flight
            .wait_for(Option::is_some)
            .await
            .map_err(|_| lost())?
            .clone();
        let answer = landed.ok_or_else(lost)??;
        self.metrics.forwarding.joined.inc();
        let mut response = Response::new(ResponseBody::shared(Arc::clone(&answer)));
        *response.status_mut() = answer.head.status;
        response.headers_mut().clone_from(&answer.head.headers);
        Ok(Passed {
            outcome: Ok(response),
            streamed: answer.streamed,
        })
    }

    /// Makes the one call for all who wait in `flight`.
    async fn fly(self: &Arc<Self>, flight: &Flight, lead: Lead) {
        if flight.result.receiver_count() == 0 {
            return;
        }
        let (forward, request) = (Arc::clone(&lead.forward), lead.request.clone());
        // Held until all of the answer is here: the next flight must not leave earlier.
        let landed = match self.turn(Some(lead)).await {
            Ok(_permit) => {
                tokio::select! {
                    landed = self.collect(&forward, flight, request) => landed,
                    // Everybody has gone away.
                    () = flight.result.closed() => return,
                }
            }
            Err(refused) => Err(refused),
        };
        flight.result.send_replace(Some(landed));
    }

    async fn collect(self: &Arc<Self>, forward: &Arc<Forward>, flight: &Flight, request: Bytes) -> Landed {
        let parts = flight.parts.clone();
        if let Some(converted) = self
            .convert(forward, &parts, &flight.query, Some(&Owner::Anybody))
            .await
        {
            return Ok(Arc::new(SharedAnswer {
                head: converted.head,
                pieces: converted.pieces,
                trailers: converted.trailers,
                streamed: true,
                _held: HeldBy::Stream {
                    _held: converted.held,
                },
            }));
        }
        let lost = |status: Status| Refused {
            reason: Reason::Gone,
            status,
        };
        let Answered {
            response,
            in_flight: _in_flight,
        } = forward
            .send(parts, Body::Read(request), ConnectionClass::Stream)
            .await
            .map_err(|not| lost(not.status()))?;
        let (head, mut body) = response.into_parts();
        let mut held = Held {
            large: Arc::clone(self),
            bytes: 0,
        };
        let (mut pieces, mut trailers) = (Vec::new(), None);
        let mut scanner = HeaderScanner::new(Method::Range);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| lost(Status::ConnectionLost(error.to_string())))?;
            match frame.into_data() {
                Ok(data) => {
                    if !held.grow(data.len()) {
                        return Err(Refused {
                            reason: Reason::SharedBytes,
                            status: Status::SharedBytes,
                        });
                    }
                    if let Some(scanner) = &mut scanner {
                        super::body::record(scanner, &data, &forward.cluster_state);
                    }
                    pieces.push(data);
                }
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        Ok(Arc::new(SharedAnswer {
            head,
            pieces,
            trailers,
            streamed: false,
            _held: HeldBy::Shared { _held: held },
        }))
    }
}
