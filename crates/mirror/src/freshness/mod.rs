//! The quorum check: one small linearizable read of etcd that proves, for all reads that wait for it, the revision that
//! they must see at least (KEP-2340).
//!
//! **I2**: a read only uses a check that was sent after the read arrived. It joins the round that has *not been sent
//! yet*; reads that arrive while a check is in flight gather in the next round. A further round starts in addition to
//! a slow one.
//!
//! Reads at past revisions wait for a check, too: their header is etcd's revision, and etcd may have compacted theirs.
//! The same check proves both, by reading *at* the lowest past revision of its round. If etcd has compacted that
//! revision, the reads at it end, and the other reads join the next round.
//!
//! While etcd's auth is on, checks are not shared: each requests the caller's permission as well ([`authorize`], I8).

pub mod authorize;
mod round;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_store::cache::ResponseHeader;
use etcd_wire::grpc::hub::PROBE_WAIT;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use rangecache_base::faults::{self, Fault};
use rangecache_base::telemetry::trace::{Span, SpanContext, SpanExt as _, SpanKind, root_context};
use rangecache_base::telemetry::{Reason, Telemetry};
use rangecache_base::{flags::Live, panics::caught};
use rangecache_upstream::{Connection, Lineage, Upstream, is_compaction, is_future_revision, is_refusal};
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::lineage::{Auth, Before, ClusterState, HistoryId, Position, Transition};
use super::{flags::MirrorConfig, metrics::FreshnessMetrics};
use authorize::{Authorization, CheckCaller, Checked};
use round::{COALESCE_DELAY, Round, Rounds, SLOW_ROUND};

pub use round::{Proof, Unproven};

/// Pause before the next attempt.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(20);
/// Timeout of one authorization of rangecache's own user.
const OWN_TIMEOUT: Duration = Duration::from_secs(3);

type Continues = Box<dyn Fn(Arc<Connection>, HistoryId, Lineage) -> BoxFuture<'static, bool> + Send + Sync>;

/// Callbacks for changes that a check has found.
pub struct Findings {
    /// History was replaced; called with the header of the new one.
    pub replaced: Box<dyn Fn(&ResponseHeader) + Send + Sync>,
    /// In the history of this number, etcd has compacted every revision below this one, or more.
    pub compacted: Box<dyn Fn(HistoryId, i64) + Send + Sync>,
    /// Whether the history behind a connection is the one of this number, by what the mirrors hold: asked at the first check on
    /// the connection, and at the first that proves this history of a hub.
    pub continues: Continues,
}

/// Sends quorum checks: as few as prove all reads.
pub struct Freshness {
    upstream: Arc<Upstream>,
    cluster_state: Arc<ClusterState>,
    telemetry: Arc<Telemetry>,
    metrics: Arc<FreshnessMetrics>,
    findings: Findings,
    /// `--freshness-timeout`.
    live: Live<MirrorConfig>,
    /// Time after which a round is slow, and another may start in addition to it.
    slow_round: Duration,
    tasks: TaskTracker,
    /// Cancels rounds when the process stops.
    stop: CancellationToken,
    /// Lock order: `rounds`, then the `state` of one round. Never the other way, and never two rounds' states at
    /// once: a read joins under both locks, so that a round that was taken out of `rounds` to be sent gains no more
    /// reads (I2).
    rounds: Mutex<Rounds>,
}

impl std::fmt::Debug for Freshness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Freshness").finish_non_exhaustive()
    }
}

impl Freshness {
    /// `--freshness-timeout` of `live` bounds a round with all its attempts. Rounds are tasks of `tasks`, cancelled by `stop`.
    #[must_use]
    pub fn new(
        upstream: Arc<Upstream>,
        cluster_state: Arc<ClusterState>,
        telemetry: Arc<Telemetry>,
        live: Live<MirrorConfig>,
        tasks: TaskTracker,
        stop: CancellationToken,
        findings: Findings,
    ) -> Freshness {
        Freshness {
            upstream,
            cluster_state,
            metrics: telemetry.metrics.group(),
            telemetry,
            findings,
            live,
            slow_round: SLOW_ROUND,
            tasks,
            stop,
            rounds: Mutex::default(),
        }
    }

    /// Bound on a round with all its attempts.
    fn timeout(&self) -> Duration {
        self.live.load().freshness_timeout
    }

    /// Waits for a check that is sent after this call, at most for the timeout. A caller with a shorter deadline
    /// enforces it itself.
    ///
    /// # Errors
    /// The reason why there is no proof.
    pub async fn prove(self: &Arc<Self>) -> Result<Proof, Reason> {
        self.prove_at(0, None).await.map_err(Unproven::without_revision)
    }

    /// Like [`Freshness::prove`], for a read at the past `revision`, unless that is 0 or less: also proves that etcd
    /// has not compacted the revision, or that it has not reached it (the header's revision is lower then). A traced
    /// read gives a `link`, which receives the check's span, shared by all reads of the round.
    ///
    /// # Errors
    /// [`Unproven::Compacted`], or the reason why there is no proof.
    pub async fn prove_at(
        self: &Arc<Self>,
        revision: i64,
        mut link: Option<&mut Option<SpanContext>>,
    ) -> Result<Proof, Unproven> {
        let round = self.join(self.checkable(revision), link.as_deref_mut());
        if let Some(settled) = self.settle(revision, round.wait().await) {
            return settled;
        }
        // Rare: the revision of another read of the round was compacted, or this one was not known yet.
        let again = Box::pin(async {
            loop {
                let round = self.join(self.checkable(revision), link.as_deref_mut());
                if let Some(settled) = self.settle(revision, round.wait().await) {
                    return settled;
                }
            }
        });
        tokio::time::timeout_at(round.required_since() + self.timeout(), again)
            .await
            .unwrap_or(Err(Reason::CheckFailed.into()))
    }

    /// Like [`Freshness::prove`], for a caller that can wait: by the next check that others need, or by one of its own after
    /// [`PROBE_WAIT`]. So the periodic checks of all leaves cost etcd nothing beside the hub's.
    ///
    /// # Errors
    /// The reason why there is no proof.
    pub async fn prove_with_others(self: &Arc<Self>) -> Result<Proof, Reason> {
        let round = {
            let mut rounds = self.rounds.lock();
            let round = Arc::clone(rounds.gathering.get_or_insert_default());
            round.state.lock().add_read(0);
            round
        };
        let result = match tokio::time::timeout(PROBE_WAIT, round.wait()).await {
            Ok(result) => result,
            Err(_) => {
                self.require(&round);
                round.wait().await
            }
        };
        match result {
            // The check was made at the revision of another read.
            Err(Unproven::Compacted(_)) => self.prove().await,
            proven => proven.map_err(Unproven::without_revision),
        }
    }

    /// A check of the periodic probe, for which no read waits. Behind a hub it takes up to [`PROBE_WAIT`], so that the hub needs
    /// none for it.
    ///
    /// # Errors
    /// The reason why there is no proof.
    pub(super) async fn probe(&self) -> Result<Proof, Reason> {
        let deadline = Instant::now() + PROBE_WAIT + self.timeout();
        let checked = self
            .check(&CheckCaller::Probe(PROBE_WAIT), 0, None, deadline)
            .await;
        checked.map_err(Unproven::without_revision)
    }

    /// The revision at which a check for a read at `revision` is made; 0 if that must not be part of the check. A
    /// revision that is known to be compacted, or that etcd may not have reached, would fail the check for all other
    /// reads of its round; a check of the newest state suffices to refuse it.
    fn checkable(&self, revision: i64) -> i64 {
        let is_past = revision >= self.cluster_state.compacted() && revision <= self.cluster_state.known();
        if is_past { revision.max(0) } else { 0 }
    }

    /// Consequence of a check's result for a read at `revision`; `None` if the read needs another check.
    fn settle(&self, revision: i64, result: Result<Proof, Unproven>) -> Option<Result<Proof, Unproven>> {
        match result {
            Ok(proof) if revision <= 0 || proof.header.revision < revision => Some(Ok(proof)),
            Ok(proof) if proof.at > 0 && proof.at <= revision => Some(Ok(proof)),
            Ok(_) => {
                let is_compacted = revision < self.cluster_state.compacted();
                is_compacted.then_some(Err(Unproven::Compacted(revision)))
            }
            Err(Unproven::Compacted(compacted)) => {
                let is_compacted = revision > 0 && revision <= compacted;
                is_compacted.then_some(Err(Unproven::Compacted(revision)))
            }
            Err(Unproven::For(reason)) => Some(Err(reason.into())),
        }
    }

    /// Requests `authorization` from etcd, and its revision. That of a serializable one may be older than what is
    /// known: the caller compares. Proves for the authorization's revision what [`Freshness::prove_at`] proves.
    ///
    /// # Errors
    /// [`Reason::Auth`] if etcd refuses; the read itself, forwarded, gets etcd's own message. Otherwise those of
    /// [`Freshness::prove_at`].
    pub async fn authorize(
        &self,
        authorization: &Authorization<'_>,
        deadline: Instant,
    ) -> Result<Proof, Unproven> {
        let began = Instant::now();
        let deadline = deadline.min(began + self.timeout());
        let (caller, revision) = (CheckCaller::Authenticated(authorization), authorization.revision);
        let result = loop {
            let result = self
                .check(&caller, self.checkable(revision), None, deadline)
                .await;
            if let Some(settled) = self.settle(revision, result) {
                break settled;
            }
        };
        let result_name = match result {
            // A caller without the permission is refused before etcd compares revisions.
            Ok(_) | Err(Unproven::Compacted(_)) => "granted",
            Err(Unproven::For(reason)) => reason.as_str(),
        };
        self.metrics.record_authorization(result_name, began.elapsed());
        result
    }

    /// Requests permission for rangecache's own user to read a range: all keys of a mirror.
    ///
    /// # Errors
    /// Those of [`Freshness::authorize`], as reasons.
    pub async fn authorize_own(&self, key: Bytes, range_end: Bytes) -> Result<Proof, Reason> {
        let authorization = Authorization {
            key,
            range_end,
            caller: None,
            trace: None,
            revision: 0,
            serializable: false,
        };
        let authorized = self.authorize(&authorization, Instant::now() + OWN_TIMEOUT).await;
        authorized.map_err(Unproven::without_revision)
    }

    /// Joins the gathering round with a read that needs the revision `at`, and sends it if it is due.
    fn join(self: &Arc<Self>, at: i64, link: Option<&mut Option<SpanContext>>) -> Arc<Round> {
        // Held until the read is counted: a round is sent only after it was taken out of `rounds` under this lock.
        let mut rounds = self.rounds.lock();
        let round = Arc::clone(rounds.gathering.get_or_insert_default());
        {
            let mut state = round.state.lock();
            state.add_read(at);
            state.require();
            if let Some(link) = link {
                *link = Some(state.span.get_or_insert_with(root_context).clone());
            }
        }
        self.send_if_due(&mut rounds);
        round
    }

    /// Requires the check of `round`, which has been sent or is the gathering one.
    fn require(self: &Arc<Self>, round: &Round) {
        let mut rounds = self.rounds.lock();
        round.state.lock().require();
        self.send_if_due(&mut rounds);
    }

    /// Sends the gathering round if it is due; later reads join the next one. If it is delayed, ensures that it is
    /// reconsidered after [`COALESCE_DELAY`].
    fn send_if_due(self: &Arc<Self>, rounds: &mut Rounds) {
        if !rounds.is_due(self.slow_round) {
            if rounds.is_to_be_delayed() {
                rounds.is_delayed = true;
                let freshness = Arc::clone(self);
                self.tasks.spawn(async move {
                    // Not cancelled when the process stops: it lasts a millisecond.
                    tokio::time::sleep(COALESCE_DELAY).await;
                    let mut rounds = freshness.rounds.lock();
                    rounds.is_delayed = false;
                    freshness.send_if_due(&mut rounds);
                });
            }
            return;
        }
        let Some(round) = rounds.gathering.take() else {
            return;
        };
        rounds.in_flight += 1;
        rounds.last_sent = Some(Instant::now());
        if !rounds.is_watched {
            rounds.is_watched = true;
            let freshness = Arc::clone(self);
            self.tasks.spawn(async move {
                let stop = freshness.stop.clone();
                stop.run_until_cancelled(freshness.watch_slow_rounds()).await
            });
        }
        let freshness = Arc::clone(self);
        self.tasks.spawn(async move {
            let stop = freshness.stop.clone();
            if stop.run_until_cancelled(freshness.run(&round)).await.is_none() {
                // The process stops: its reads must not wait for that.
                freshness.end(&round, Err(Reason::CheckFailed.into())).await;
            }
        });
    }

    /// Sends the gathering round once the last one that was sent is slow: its reads need not wait for that one. Ends when
    /// no round was sent for that long.
    ///
    /// One timer for all rounds: a timer of each round would be the earliest one of the process, and for that it costs a
    /// system call and a further wake-up of the thread.
    async fn watch_slow_rounds(self: &Arc<Self>) {
        let mut watched = None;
        loop {
            let sent = {
                let mut rounds = self.rounds.lock();
                match rounds.last_sent {
                    Some(sent) if watched != Some(sent) => sent,
                    _ => {
                        rounds.is_watched = false;
                        return;
                    }
                }
            };
            watched = Some(sent);
            tokio::time::sleep_until(sent + self.slow_round).await;
            self.send_if_due(&mut self.rounds.lock());
        }
    }

    /// Makes one check for all reads that have joined `round`.
    async fn run(self: &Arc<Self>, round: &Round) {
        let began = Instant::now();
        let tracer = &self.telemetry.tracer;
        // No read joins any more: the round was taken out of `rounds`.
        let (span, at) = {
            let state = round.state.lock();
            (state.span.clone(), state.at)
        };
        let mut span = span.and_then(|context| tracer.linked("quorum check", context));
        // A panic is caught, so that the waiting reads get a result in any case.
        let deadline = round.required_since() + self.timeout();
        let check = caught(self.check(&CheckCaller::Anonymous, at, span.as_deref_mut(), deadline));
        let result = check.await.unwrap_or(Err(Reason::CheckFailed.into()));
        let reads = self.finish(round, result);
        let counted = match result {
            // A compaction is proven, too.
            Ok(_) | Err(Unproven::Compacted(_)) => Ok(()),
            Err(Unproven::For(reason)) => Err(reason),
        };
        self.metrics.record_check(counted, reads, began.elapsed());
        if let Some(mut span) = span {
            span.span_kind = SpanKind::Client;
            span.set("rpc.system.name", "grpc");
            span.set("rpc.method", "etcdserverpb.KV/Range");
            span.set_count("rangecache.reads", reads);
            match result {
                Ok(proof) => span.set("rangecache.revision.proven", proof.header.revision),
                Err(Unproven::Compacted(_)) => span.fail("compacted"),
                Err(Unproven::For(reason)) => span.fail(reason.as_str()),
            }
            tracer.end(*span);
        }
        round.wake(reads).await;
    }

    /// Sets the `result` of `round` unless it has one, and sends the next round if it is due; returns the number of reads to
    /// wake.
    fn finish(self: &Arc<Self>, round: &Round, result: Result<Proof, Unproven>) -> u64 {
        let reads = {
            let mut state = round.state.lock();
            if state.result.is_some() {
                return state.reads;
            }
            state.result = Some(result);
            state.reads
        };
        // After this round's state was unlocked: `rounds` is always locked first.
        let mut rounds = self.rounds.lock();
        rounds.record_done(reads);
        self.send_if_due(&mut rounds);
        reads
    }

    /// Ends `round` with `result`, unless it has ended.
    async fn end(self: &Arc<Self>, round: &Round, result: Result<Proof, Unproven>) {
        let reads = self.finish(round, result);
        round.wake(reads).await;
    }

    /// Makes one check, at the revision `at` unless that is 0: attempts at one member after another, until one responds
    /// or `deadline` has passed.
    async fn check(
        &self,
        caller: &CheckCaller<'_>,
        mut at: i64,
        mut span: Option<&mut Span>,
        deadline: Instant,
    ) -> Result<Proof, Unproven> {
        let propagates = self.telemetry.tracer.propagates();
        let trace = span.as_ref().filter(|_| propagates);
        let trace = trace.map(|span| span.span_context.clone());
        // Number of responses of hubs that have proven nothing: waiting longer for them does not help.
        let mut without_proof = 0;
        loop {
            let connection = self
                .upstream
                .connection(caller.connection_class(), deadline)
                .await
                .map_err(|_| Reason::CheckFailed)?;
            if let Some(span) = &mut span {
                span.set_endpoint(connection.url());
            }
            let attempt = self.attempt(caller, &connection, at, trace.as_ref(), deadline);
            match attempt.await {
                Ok(proof) => return Ok(proof),
                Err(AttemptFailure::Final(unproven)) => return Err(unproven),
                // The revision was known to be reached: only the newest revision shows what has happened.
                Err(AttemptFailure::FutureRevision) => at = 0,
                Err(AttemptFailure::WithoutProof) => {
                    self.upstream.avoid(connection.url());
                    without_proof += 1;
                    if without_proof >= self.upstream.endpoint_count() {
                        return Err(Reason::CheckFailed.into());
                    }
                }
                Err(AttemptFailure::Status(status)) => {
                    self.after_failure(caller, &connection, &status, deadline).await?;
                }
            }
        }
    }

    /// Makes one attempt of a check at the member behind `connection`.
    ///
    /// # Errors
    /// Why it proves nothing.
    async fn attempt(
        &self,
        caller: &CheckCaller<'_>,
        connection: &Arc<Connection>,
        at: i64,
        trace: Option<&SpanContext>,
        deadline: Instant,
    ) -> Result<Proof, AttemptFailure> {
        let is_authenticated = matches!(caller, CheckCaller::Authenticated(_));
        if is_authenticated && !connection.may_authorize() {
            return Err(Reason::BehindHub.into());
        }
        let before = self.cluster_state.before_check();
        let history = before.history_id();
        let proof = |header, lineage| Proof {
            header,
            history,
            at,
            sent: before.began(),
            connection_opened: connection.stands_since(lineage),
        };
        faults::trip(Fault::Check);
        let responding = async {
            let checked = caller.check(connection, history, at, trace).await?;
            let position = required_position(connection, &before, &checked).await?;
            Ok::<_, tonic::Status>((checked, position))
        };
        let attempt_deadline = deadline.min(Instant::now() + caller.attempt_timeout());
        let responded = tokio::time::timeout_at(attempt_deadline, responding).await;
        faults::hold(Fault::Hold).await;
        match responded {
            Ok(Ok((checked, position))) => {
                let raft_index = position.as_ref().and_then(|position| position.raft_index);
                // Another response has shown meanwhile that the endpoint may be a hub.
                let lacks_log = position.is_some() && raft_index.is_none();
                let lineage = checked.lineage.filter(|of| !lacks_log || *of != Lineage::Member);
                let Some(lineage) = lineage else {
                    return Err(if is_authenticated {
                        Reason::BehindHub.into()
                    } else {
                        AttemptFailure::WithoutProof
                    });
                };
                if checked.is_quorum {
                    self.finish_check(caller, &before, checked.header, raft_index)?;
                    if position.is_some() {
                        let continues = self.history_continues(connection, history, lineage);
                        if !matches!(
                            tokio::time::timeout_at(attempt_deadline, continues).await,
                            Ok(true)
                        ) {
                            let message = "the history behind the connection is not known to be the same";
                            return Err(AttemptFailure::Status(tonic::Status::unavailable(message)));
                        }
                    }
                    self.cluster_state.note_checked(connection.opened());
                }
                Ok(proof(checked.header, lineage))
            }
            Ok(Err(status)) if at > 0 && is_compaction(&status) => {
                (self.findings.compacted)(history, at.saturating_add(1));
                Err(AttemptFailure::Final(Unproven::Compacted(at)))
            }
            Ok(Err(status)) if at > 0 && is_future_revision(&status) => Err(AttemptFailure::FutureRevision),
            Ok(Err(status)) => Err(AttemptFailure::Status(status)),
            // The caller's time is up, which is no evidence against the member.
            Err(_) if attempt_deadline == deadline => Err(Reason::CheckFailed.into()),
            Err(_) => {
                let message = "no response to a quorum check in time";
                Err(AttemptFailure::Status(tonic::Status::deadline_exceeded(message)))
            }
        }
    }

    /// Decides what follows an attempt at the member behind `connection` that has failed with `status`. Returns when another one
    /// is to be made.
    ///
    /// # Errors
    /// The reason why none is made.
    async fn after_failure(
        &self,
        caller: &CheckCaller<'_>,
        connection: &Connection,
        status: &tonic::Status,
        deadline: Instant,
    ) -> Result<(), Reason> {
        if is_refusal(status) {
            self.record_refusal(caller, status);
            return Err(Reason::Auth);
        }
        tracing::debug!(endpoint = %connection.url(), code = ?status.code(), message_of_etcd = status.message(),
            "a quorum check failed");
        if !caller.may_try_another_member(status) {
            return Err(Reason::CheckFailed);
        }
        self.upstream.avoid(connection.url());
        if Instant::now() + ATTEMPT_PAUSE >= deadline {
            return Err(Reason::CheckFailed);
        }
        tokio::time::sleep(ATTEMPT_PAUSE).await;
        Ok(())
    }

    /// Whether what the mirrors hold is of the history behind `connection`, on which a check has shown `lineage`. The raft log shows no
    /// rollback whose lost revisions were written again, and a feed may not have noticed yet that its member is gone.
    async fn history_continues(
        &self,
        connection: &Arc<Connection>,
        history: HistoryId,
        lineage: Lineage,
    ) -> bool {
        if connection.is_of_history(history.number(), lineage) {
            return true;
        }
        let compared = (self.findings.continues)(Arc::clone(connection), history, lineage);
        let stop = self.stop.clone();
        // Not cancelled with the check: etcd may need longer than that to count the keys of a large mirror, and the next check
        // on the connection has the result.
        let compared = self
            .tasks
            .spawn(async move { stop.run_until_cancelled(compared).await });
        matches!(compared.await, Ok(Some(true)))
    }

    /// Records that auth is on if an anonymous check was refused, and logs the change.
    fn record_refusal(&self, caller: &CheckCaller<'_>, status: &tonic::Status) {
        if !caller.is_anonymous() || self.cluster_state.auth_is_on() == Auth::On {
            return;
        }
        let credentials = self.upstream.credentials();
        credentials.require_token();
        if credentials.common_name().is_none()
            && let Some(common_name) = self.upstream.connector().common_name()
        {
            tracing::warn!(
                common_name,
                "the certificate in --cert has a CN: if etcd runs with --client-cert-auth, every caller without \
                 credentials of its own acts as that user; give a certificate without a CN"
            );
        }
        if credentials.name_a_user() {
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

    fn finish_check(
        &self,
        caller: &CheckCaller<'_>,
        before: &Before,
        header: ResponseHeader,
        raft_index: Option<u64>,
    ) -> Result<(), Reason> {
        // Only an unauthenticated check can show that auth is off.
        if caller.is_anonymous() && self.cluster_state.auth_seems_off(before) == Auth::On {
            tracing::info!("etcd's auth is off again: reads may be answered from memory");
        }
        match self.cluster_state.after_check(before, header, raft_index) {
            Transition::Continues => return Ok(()),
            Transition::Replaced => (self.findings.replaced)(&header),
            Transition::Outdated => {}
        }
        Err(Reason::HistoryReplaced)
    }
}

/// Why an attempt of a check has proven nothing.
enum AttemptFailure {
    /// The check ends: no other attempt would prove more.
    Final(Unproven),
    /// The response is of a hub that has not proven its history.
    WithoutProof,
    /// The member has not reached the revision of the check.
    FutureRevision,
    /// The member has responded with this status, or not in time, or with what may be another history.
    Status(tonic::Status),
}

impl From<Reason> for AttemptFailure {
    fn from(reason: Reason) -> Self {
        AttemptFailure::Final(reason.into())
    }
}

/// Position of the member that has answered a check, if that has to be compared as well: at the first check on the connection, after which
/// contents are compared, too, and if the header leaves it open. Where raft logs cannot be compared, the first check is the first of its
/// lineage on this connection.
///
/// # Errors
/// The status of the request for a raft index.
async fn required_position(
    connection: &Arc<Connection>,
    before: &Before,
    checked: &Checked,
) -> Result<Option<Position>, tonic::Status> {
    let Some(lineage) = checked.lineage.filter(|_| checked.is_quorum) else {
        return Ok(None);
    };
    let is_known = connection.is_of_history(before.history_id().number(), lineage);
    if is_known && !before.needs_raft_index(&checked.header) {
        return Ok(None);
    }
    Position::of(connection, checked.header).await.map(Some)
}

#[cfg(test)]
mod tests;
