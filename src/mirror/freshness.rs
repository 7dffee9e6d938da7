//! The quorum check: one small linearizable read of etcd that proves, to all reads that wait for it, which revision
//! they must see at least (KEP-2340).
//!
//! **I2, a check joins nobody late**: a read joins the round that has *not been sent yet*. While one is under way, those
//! that arrive gather in the next. A further round starts beside one that is slow.
//!
//! Where etcd's auth is on, checks are not shared: [`authorize`] has those that also ask for a right (I8).

pub mod authorize;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Code;
use tonic::metadata::{MetadataMap, MetadataValue};

use super::cluster_state::{Auth, Before, ClusterState, Verdict};
use crate::cache::ResponseHeader;
use crate::faults::{self, Fault};
use crate::panics::caught;
use crate::telemetry::trace::{Span, SpanContext, SpanKind};
use crate::telemetry::{Reason, Telemetry};
use crate::upstream::{Connection, ConnectionClass, Upstream, anonymous_check, is_refusal};
use authorize::Authorization;

/// Readers that are woken at once when a round ends.
const WAKE_BATCH: u64 = 8;
/// Rounds that may be under way at once.
const MAX_ROUNDS: usize = 4;
/// From so many reads on, the next round is held back until most of them have come again.
const COALESCE_MIN_READS: u64 = 8;
/// How long a round is held back at most.
const COALESCE_DELAY: Duration = Duration::from_millis(1);
/// A round that takes longer than this is slow: another may start beside it.
const SLOW_ROUND: Duration = Duration::from_millis(50);
/// One attempt of a round; a member that takes longer may be cut off from the others, so another is asked.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);
/// What a successful check proves: no write acknowledged before the check began is later than `header.revision`.
#[derive(Clone, Copy, Debug)]
pub struct Proof {
    /// etcd's header, as answers from memory carry it (but for the revision, which is that of the memory).
    pub header: ResponseHeader,
}

/// Called when a check shows that history was replaced, with the new history's revision.
pub type OnReplaced = Box<dyn Fn(&ResponseHeader) + Send + Sync>;

/// Makes quorum checks, as few as prove all reads.
pub struct Freshness {
    upstream: Arc<Upstream>,
    cluster_state: Arc<ClusterState>,
    telemetry: Arc<Telemetry>,
    on_replaced: OnReplaced,
    timeout: Duration,
    tasks: TaskTracker,
    /// Ends rounds: at a stop nobody waits for them any more.
    stop: CancellationToken,
    rounds: Mutex<Rounds>,
}

impl std::fmt::Debug for Freshness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Freshness").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Rounds {
    /// The round that has not been sent: who arrives joins it.
    gathering: Option<Arc<Round>>,
    under_way: usize,
    last_sent: Option<Instant>,
    last_done: Option<Instant>,
    /// How many reads there were at the end of the last two rounds: served by it, or gathered meanwhile.
    crowds: [u64; 2],
    /// A task will look again at [`COALESCE_DELAY`]'s end.
    holding: bool,
}

impl Rounds {
    /// Whether the gathered round should be sent now.
    ///
    /// With nothing under way a read waits for one round trip. Under load, the callers that the last round answered are
    /// about to ask again: waiting until most of them have is little time, and spares etcd most of its checks.
    fn is_ripe(&self) -> bool {
        let Some(round) = &self.gathering else {
            return false;
        };
        if self.under_way > 0 {
            let slow = self.last_sent.is_some_and(|sent| sent.elapsed() >= SLOW_ROUND);
            return slow && self.under_way < MAX_ROUNDS;
        }
        let expected = self.crowds[0].max(self.crowds[1]);
        expected < COALESCE_MIN_READS
            || round.state.lock().reads * 8 >= expected * 7
            || self.last_done.is_none_or(|done| done.elapsed() >= COALESCE_DELAY)
    }
}

/// One check and the reads that it serves.
struct Round {
    /// When the first read joined: no read waits longer than the timeout from here on, whatever is under way.
    created: Instant,
    state: Mutex<RoundState>,
    done: Notify,
}

impl Default for Round {
    fn default() -> Self {
        Round {
            created: Instant::now(),
            state: Mutex::default(),
            done: Notify::new(),
        }
    }
}

impl Round {
    /// Wakes all readers: many of them in groups, so that the first answers are on their way, and their callers at work,
    /// while the others are made.
    async fn wake(&self, reads: u64) {
        for _ in 1..reads.div_ceil(WAKE_BATCH) {
            for _ in 0..WAKE_BATCH {
                self.done.notify_one();
            }
            tokio::task::yield_now().await;
        }
        // The last group, and whoever was about to wait.
        self.done.notify_waiters();
    }
}

#[derive(Default)]
struct RoundState {
    reads: u64,
    /// The check's span, once a read that is traced has joined.
    span: Option<SpanContext>,
    result: Option<Result<Proof, Reason>>,
}

impl Freshness {
    /// `timeout` bounds a round with all its attempts.
    #[must_use]
    pub fn new(
        upstream: Arc<Upstream>,
        cluster_state: Arc<ClusterState>,
        telemetry: Arc<Telemetry>,
        timeout: Duration,
        tasks: TaskTracker,
        stop: CancellationToken,
        on_replaced: OnReplaced,
    ) -> Freshness {
        Freshness {
            upstream,
            cluster_state,
            telemetry,
            on_replaced,
            timeout,
            tasks,
            stop,
            rounds: Mutex::default(),
        }
    }

    /// Waits for a check that starts after this call, for no longer than the timeout.
    ///
    /// # Errors
    /// Why there is no proof. The caller's own deadline is the caller's to keep.
    pub async fn prove(self: &Arc<Self>) -> Result<Proof, Reason> {
        self.prove_for(None).await
    }

    /// The same for a read that is traced if there is a `link`: there the check's span is put, which all its reads share.
    ///
    /// # Errors
    /// As [`Freshness::prove`].
    pub async fn prove_for(
        self: &Arc<Self>,
        link: Option<&mut Option<SpanContext>>,
    ) -> Result<Proof, Reason> {
        let round = self.join(link);
        self.wait(&round).await
    }

    async fn wait(&self, round: &Round) -> Result<Proof, Reason> {
        loop {
            // Registered before the look, so that the end of the round is not missed.
            let done = round.done.notified();
            if let Some(result) = round.state.lock().result {
                return result;
            }
            done.await;
        }
    }

    /// Joins the round that gathers, and sends it if it is ripe.
    fn join(self: &Arc<Self>, link: Option<&mut Option<SpanContext>>) -> Arc<Round> {
        let mut rounds = self.rounds.lock();
        let round = Arc::clone(rounds.gathering.get_or_insert_default());
        {
            let mut state = round.state.lock();
            state.reads += 1;
            if let Some(link) = link {
                *link = Some(*state.span.get_or_insert_with(SpanContext::root));
            }
        }
        self.send_if_ripe(&mut rounds);
        round
    }

    /// Sends the gathered round if it is ripe; from then on nobody joins it. If it is held back, sees to it that it is
    /// looked at again.
    fn send_if_ripe(self: &Arc<Self>, rounds: &mut Rounds) {
        if !rounds.is_ripe() {
            if rounds.gathering.is_some() && rounds.under_way == 0 && !rounds.holding {
                rounds.holding = true;
                let freshness = Arc::clone(self);
                self.tasks.spawn(async move {
                    // A stop is waited out: it is a millisecond.
                    tokio::time::sleep(COALESCE_DELAY).await;
                    let mut rounds = freshness.rounds.lock();
                    rounds.holding = false;
                    freshness.send_if_ripe(&mut rounds);
                });
            }
            return;
        }
        let Some(round) = rounds.gathering.take() else {
            return;
        };
        rounds.under_way += 1;
        rounds.last_sent = Some(Instant::now());
        let freshness = Arc::clone(self);
        self.tasks.spawn(async move {
            let stop = freshness.stop.clone();
            stop.run_until_cancelled(freshness.run(&round)).await
        });
    }

    /// Makes one check for all who have joined `round`.
    async fn run(self: &Arc<Self>, round: &Round) {
        let began = Instant::now();
        let tracer = &self.telemetry.tracer;
        let span = round.state.lock().span;
        let mut span = span.and_then(|context| tracer.linked("quorum check", context));
        let result = {
            // Whatever happens to it, those who wait for the round are told its end.
            let check = caught(self.check(&Asker::Nobody, span.as_deref_mut(), round.created + self.timeout));
            let check = async { check.await.unwrap_or(Err(Reason::CheckFailed)) };
            tokio::pin!(check);
            match tokio::time::timeout(SLOW_ROUND, check.as_mut()).await {
                Ok(result) => result,
                Err(_) => {
                    // Those who have gathered meanwhile need not wait for this one.
                    self.send_if_ripe(&mut self.rounds.lock());
                    check.await
                }
            }
        };
        let reads = {
            let mut state = round.state.lock();
            state.result = Some(result);
            state.reads
        };
        {
            let mut rounds = self.rounds.lock();
            rounds.under_way -= 1;
            rounds.last_done = Some(Instant::now());
            let gathered = rounds
                .gathering
                .as_ref()
                .map_or(0, |round| round.state.lock().reads);
            rounds.crowds = [rounds.crowds[1], reads + gathered];
            self.send_if_ripe(&mut rounds);
        }
        self.telemetry
            .metrics
            .freshness
            .record_check(result.map(|_| ()), reads, began.elapsed());
        if let Some(mut span) = span {
            span.kind = SpanKind::Client;
            span.set("rangecache.reads", reads);
            match result {
                Ok(proof) => span.set("rangecache.revision.proven", proof.header.revision),
                Err(reason) => span.error = Some(reason.as_str().into()),
            }
            tracer.end(*span);
        }
        round.wake(reads).await;
    }

    /// One round: attempts at one member after the other, until one is answered or time is up.
    async fn check(
        &self,
        asker: &Asker<'_>,
        mut span: Option<&mut Span>,
        deadline: Instant,
    ) -> Result<Proof, Reason> {
        let trace = span.as_ref().map(|span| span.context);
        loop {
            let connection = self
                .upstream
                .connection(ConnectionClass::Check, deadline)
                .await
                .map_err(|_| Reason::CheckFailed)?;
            if let Some(span) = &mut span {
                span.set_endpoint(connection.url());
            }
            let before = self.cluster_state.before_check();
            faults::trip(Fault::Check);
            let attempt = async {
                let (header, is_quorum) = asker.ask(&connection, trace).await?;
                let vetted = if is_quorum {
                    self.check_history(&connection, before, header.revision).await?
                } else {
                    Verdict::Continues
                };
                Ok::<_, tonic::Status>((header, is_quorum, vetted))
            };
            let attempt_deadline = deadline.min(Instant::now() + ATTEMPT_TIMEOUT);
            let answered = tokio::time::timeout_at(attempt_deadline, attempt).await;
            faults::hold(Fault::Hold).await;
            let status = match answered {
                Ok(Ok((header, true, vetted))) => return self.finish_check(asker, before, header, vetted),
                Ok(Ok((header, false, _))) => return Ok(Proof { header }),
                Ok(Err(status)) => status,
                // The asker had no more time: that says nothing of the member.
                Err(_) if attempt_deadline == deadline => return Err(Reason::CheckFailed),
                Err(_) => tonic::Status::deadline_exceeded("no answer to a quorum check in time"),
            };
            if is_refusal(&status) {
                self.refused(asker, &status);
                return Err(Reason::Auth);
            }
            tracing::debug!(endpoint = %connection.url(), code = ?status.code(), message_of_etcd = status.message(),
                "a quorum check failed");
            if !asker.may_ask_another(&status) {
                return Err(Reason::CheckFailed);
            }
            self.upstream.avoid(connection.url());
            if Instant::now() + Duration::from_millis(20) >= deadline {
                return Err(Reason::CheckFailed);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn refused(&self, asker: &Asker<'_>, status: &tonic::Status) {
        if !matches!(asker, Asker::Nobody) || self.cluster_state.auth_is_on() == Auth::On {
            return;
        }
        self.upstream.credentials().require_token();
        if let Some(common_name) = self.upstream.connector().common_name() {
            tracing::warn!(
                common_name,
                "the certificate in --cert has a CN: if etcd runs with --client-cert-auth, every caller without \
                 credentials of its own acts as that user; give a certificate without a CN"
            );
        }
        if self.upstream.credentials().is_configured() {
            tracing::info!(
                message_of_etcd = status.message(),
                "etcd's auth is on: etcd authorises every read that memory answers"
            );
        } else {
            tracing::warn!(
                message_of_etcd = status.message(),
                "etcd's auth is on: every read is forwarded, with its caller's own credentials. \
                 Set --user to a user that may read what is mirrored, to answer from memory again"
            );
        }
    }

    /// The first check on a connection asks more: is the history behind it the one that is known? (I4)
    async fn check_history(
        &self,
        connection: &Arc<Connection>,
        before: Before,
        revision: i64,
    ) -> Result<Verdict, tonic::Status> {
        if connection.history_is_checked() {
            return Ok(Verdict::Continues);
        }
        let raft_index = connection.member_status().await?.raft_index;
        connection.set_history_checked();
        Ok(self.cluster_state.after_status(before, revision, raft_index))
    }

    fn finish_check(
        &self,
        asker: &Asker<'_>,
        before: Before,
        header: ResponseHeader,
        vetted: Verdict,
    ) -> Result<Proof, Reason> {
        // Only who has no credentials can tell by an answer that none are needed.
        if matches!(asker, Asker::Nobody) && self.cluster_state.auth_seems_off(before) == Auth::On {
            tracing::info!("etcd's auth is off again: reads may be answered from memory");
        }
        match (self.cluster_state.after_check(before, header), vetted) {
            (Verdict::Continues, Verdict::Continues) => Ok(Proof { header }),
            _ => {
                (self.on_replaced)(&header);
                Err(Reason::HistoryReplaced)
            }
        }
    }
}

/// Who asks: whose credentials a check carries, and for which right it asks.
enum Asker<'a> {
    /// Nobody, for no right: what the reads of all callers without credentials share while auth is off.
    Nobody,
    /// Somebody, for the right to read a range.
    Somebody(&'a Authorization<'a>),
}

impl Asker<'_> {
    /// Asks the member behind `connection`; also returns whether it was made sure that no other is ahead of it.
    async fn ask(
        &self,
        connection: &Arc<Connection>,
        trace: Option<SpanContext>,
    ) -> Result<(ResponseHeader, bool), tonic::Status> {
        let (header, is_quorum) = match self {
            Asker::Nobody => {
                let mut metadata = MetadataMap::new();
                name_trace(&mut metadata, trace);
                (anonymous_check(connection, metadata).await?, true)
            }
            Asker::Somebody(authorization) => authorization.ask(connection).await?,
        };
        let header = header.ok_or_else(|| tonic::Status::internal("no header"))?;
        Ok((header.into(), is_quorum))
    }

    /// Whether `status` is the member's trouble, which another member may not have. What somebody sends along may be
    /// the cause of anything else, and must not make members look bad to others.
    fn may_ask_another(&self, status: &tonic::Status) -> bool {
        matches!(self, Asker::Nobody)
            || matches!(
                status.code(),
                Code::Unavailable | Code::DeadlineExceeded | Code::Unknown
            )
    }
}

/// Names the span that a call is made for.
fn name_trace(metadata: &mut MetadataMap, trace: Option<SpanContext>) {
    if let Some(trace) = trace
        && let Ok(traceparent) = MetadataValue::try_from(trace.traceparent().as_bytes())
    {
        metadata.insert("traceparent", traceparent);
    }
}

impl From<crate::etcdserverpb::ResponseHeader> for ResponseHeader {
    fn from(header: crate::etcdserverpb::ResponseHeader) -> ResponseHeader {
        ResponseHeader {
            cluster_id: header.cluster_id,
            member_id: header.member_id,
            revision: header.revision,
            raft_term: header.raft_term,
        }
    }
}

#[cfg(test)]
mod tests;
