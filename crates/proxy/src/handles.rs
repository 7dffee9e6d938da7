//! [`Proxy`]: handles to the other rooms, and the state that requests share.

use std::{net::IpAddr, sync::Arc, time::Duration};

use rangecache_base::telemetry::{Reason, Telemetry};
use rangecache_base::{flags::Live, panics::restarting, telemetry::clients::ClientName};
use rangecache_edge::browser::BrowserRules;
use rangecache_edge::limits::{
    Admission, BufferMetrics, ByteKind, BytesLedger, ClientAccount, Deadline, Gate, HeldBytes, Intake,
    LimitsConfig, OpenConnections, ShareMetrics, SlotPolicy, Slots,
};
use rangecache_mirror::{Mirrors, lineage::Auth};
use rangecache_upstream::Upstream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::flags::{ForwardConfig, ProxyFlags, WhenBehind};
use super::forward::{Forward, Http1Pool};
use super::{
    caller::Caller, fallback::Fallback, idle::ResponseRegistry, members::AdvertisedMember,
    metrics::ProxyTelemetry, watch_memory,
};

/// Interval at which expired entries are dropped from the list of slowest calls.
const SLOW_CALLS_INTERVAL: Duration = Duration::from_secs(5);
/// Watch streams that may be handed over at once, in each direction: etcd reads the history of their watchers, and
/// memory looks them up.
const WATCH_HANDOVERS: usize = 64;
/// Longest wait of a stream for its handover to etcd.
const MAX_HANDOVER_WAIT: Duration = Duration::from_secs(60);

/// Calls of one client that are costly for etcd, and that it handles at once: a client that checks passwords or hashes the store
/// without pause would otherwise take all of its CPUs. Others do not notice how many of them wait.
const MAX_COSTLY: usize = 2;
/// Costly calls of one client that may wait, and their longest wait.
const MAX_WAITING_COSTLY: u32 = 256;
const MAX_COSTLY_WAIT: Duration = Duration::from_secs(10);

/// Reads of many entries that may wait for a slot in memory.
const MAX_WAITING_SCANS: u32 = 1_024;

/// Longest wait of a small read, or of a scan, without a deadline for its slot.
const MAX_SLOT_WAIT: Duration = Duration::from_secs(30);

/// State that all requests share: handles to the other rooms, and limits. [`handle`](super::handle) serves a request
/// with it.
#[derive(Debug)]
pub struct Proxy {
    pub(super) mirrors: Arc<Mirrors>,
    pub(super) telemetry: Arc<ProxyTelemetry>,
    pub(super) forward: Arc<Forward>,
    pub(super) fallback: Arc<Fallback>,
    /// Flags of reads that are forwarded.
    flags: Live<ForwardConfig>,
    /// Slots of reads for which memory looks at many entries.
    pub(super) scans: Arc<Slots>,
    pub(super) responses: Arc<ResponseRegistry>,
    pub(super) admission: Admission,
    pub(super) browser: BrowserRules,
    /// The answer to MemberList (`--advertise-client-urls`); `None` if etcd answers.
    pub(super) advertised: Option<AdvertisedMember>,
    /// Bytes that are held for clients (`--buffer-max-bytes`, `--watch-max-bytes`).
    pub(super) ledger: Arc<BytesLedger>,
    /// Slots of calls that are costly for etcd.
    pub(super) costly: Arc<Slots>,
    /// Time limit for a request message (`--request-timeout`).
    pub(super) request_timeout: Duration,
    /// Interval of progress notifications; `None` if every watch is forwarded.
    pub(super) watch_progress_interval: Option<Duration>,
    /// Slots of watch streams that continue at etcd, until etcd has created their watchers.
    pub(super) watch_handovers: Arc<Slots>,
    /// Slots of watch streams that return to memory.
    pub(super) watch_returns: Arc<Slots>,
}

/// Permissions of a listener's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Whatever etcd permits.
    Full,
    /// Read (`--read-only-listen-client-urls`).
    ReadOnly,
}

/// Connection of a client.
#[derive(Debug)]
pub struct Client {
    pub(super) proxy: Arc<Proxy>,
    /// Permissions that the connection's listener grants.
    pub(super) access: Access,
    /// Address of the client; `None` for a unix socket.
    pub(super) peer: Option<IpAddr>,
    /// Bytes that the connection's calls hold.
    pub(super) account: Arc<ClientAccount>,
    /// Caller of the connection's calls, in the registry of clients.
    pub(super) caller: Caller,
    /// The connection's certificate has the common name with which etcd sees calls without a token
    /// (`--caller-is=certificate`).
    has_own_name: bool,
}

/// Protocol by which a call reaches etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallProtocol {
    /// gRPC.
    Grpc,
    /// etcd's JSON gateway.
    Json,
}

impl Client {
    /// Whether etcd can decide about the rights of this call's client: by the call's token, by the absence of one if
    /// rangecache's certificate has no common name, or, with `--caller-is=certificate`, by the common name that the client
    /// has in common with rangecache. etcd sees rangecache's certificate and would take another client without a token for
    /// that user. Its gateway has no user without a token.
    pub(super) fn identifies(&self, has_credentials: bool, by: CallProtocol) -> bool {
        has_credentials
            || (self.has_own_name && by == CallProtocol::Grpc)
            || !self.proxy.forward.upstream.connector().names_a_user()
    }
}

impl Client {
    /// Counts the bytes that were received since the last call began.
    pub(super) fn record_received(&self) {
        let received = self.account.take_received();
        self.caller.of_connection().record_received(received);
    }

    /// Returns a holder, of 0 bytes, for the bytes of responses that the connection has accepted and not sent.
    #[must_use]
    pub fn unsent(&self) -> HeldBytes {
        self.account.hold(ByteKind::Sending)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.record_received();
    }
}

impl Proxy {
    /// Whether a read that memory cannot answer for `reason` is refused. KEP-2340's rule: as many reads as a mirror
    /// answers could be more than etcd can. With etcd's auth on, a hub has to answer all of them from its memory, and can.
    pub(super) fn refuses_reads(&self, reason: Reason) -> bool {
        let others_can =
            || self.mirrors.cluster_state.auth() == Auth::On && self.forward.upstream.has_memory();
        reason.is_behind() && self.flags.load().when_behind == WhenBehind::Fail && !others_can()
    }

    /// Access to the slots of scans for a call of the connection with this `account`.
    pub(super) fn scan_gate<'a>(&'a self, account: &'a Arc<ClientAccount>, deadline: Deadline) -> Gate<'a> {
        Gate {
            slots: &self.scans,
            account,
            deadline,
        }
    }

    /// Takes over the bounds that a reload has changed.
    pub fn reload(&self, limits: &LimitsConfig) {
        let forward = self.flags.load();
        self.admission.set_max_calls(limits.max_calls as usize);
        let small = &self.forward.small;
        small.set(forward.max_small as usize, forward.max_waiting);
        self.fallback
            .set_slots(forward.max_large as usize, forward.max_waiting);
    }

    /// Creates a proxy that forwards to `upstream` and answers reads from `mirrors`. Tasks of calls are spawned on
    /// `tasks`, whose owner joins them; cancelling `drain` ends endless calls.
    #[must_use]
    pub fn new(
        flags: ProxyFlags<'_>,
        upstream: &Arc<Upstream>,
        mirrors: &Arc<Mirrors>,
        telemetry: &Arc<Telemetry>,
        tasks: &TaskTracker,
        drain: &CancellationToken,
    ) -> Arc<Proxy> {
        let ProxyFlags { watch, limits, .. } = flags;
        let forwarding = flags.forward.load();
        let open_connections = telemetry.metrics.group::<OpenConnections>();
        let buffers = telemetry.metrics.group::<BufferMetrics>();
        let costly = telemetry.metrics.group::<ShareMetrics>().costly();
        let telemetry = &Arc::new(ProxyTelemetry::new(telemetry));
        let metrics = &telemetry.metrics;
        let (buffer_max_bytes, watches) = (flags.buffer_max_bytes, metrics.watches.budgets());
        let ledger = BytesLedger::new(buffer_max_bytes, watch.max_bytes(), &buffers, watches);
        let forward = Arc::new(Forward {
            upstream: Arc::clone(upstream),
            cluster_state: Arc::clone(&mirrors.cluster_state),
            telemetry: Arc::clone(telemetry),
            writes_to: flags.writes_to,
            connect_timeout: flags.connect_timeout,
            request_timeout: limits.request_timeout,
            max_wait: forwarding.stream_max_wait,
            small: Slots::new(
                SlotPolicy::Any,
                forwarding.max_small as usize,
                forwarding.max_waiting,
                Some(MAX_SLOT_WAIT),
                metrics.slots.small(),
            ),
            http1_connections: Slots::uncounted(limits.max_connections() as usize, None),
            http1_pool: Arc::new(Http1Pool::new(limits.max_connections() as usize)),
            tasks: tasks.clone(),
            drain: drain.clone(),
        });
        let responses = Arc::new(ResponseRegistry::default());
        Arc::new(Proxy {
            mirrors: Arc::clone(mirrors),
            telemetry: Arc::clone(telemetry),
            fallback: Fallback::new(&forwarding, &forward, mirrors, &ledger, metrics, tasks),
            forward,
            flags: flags.forward.clone(),
            scans: Slots::new(
                SlotPolicy::Any,
                limits.worker_threads(),
                MAX_WAITING_SCANS,
                Some(MAX_SLOT_WAIT),
                metrics.slots.scans(),
            ),
            responses,
            admission: Admission::new(limits.max_calls as usize, tasks, &open_connections.open),
            browser: flags.listen.browser_rules(),
            advertised: AdvertisedMember::new(&flags.listen.advertise_client_urls),
            ledger,
            costly: Slots::new(
                SlotPolicy::OfEachClient,
                MAX_COSTLY,
                MAX_WAITING_COSTLY,
                Some(MAX_COSTLY_WAIT),
                costly,
            ),
            request_timeout: limits.request_timeout,
            watch_handovers: Slots::uncounted(WATCH_HANDOVERS, Some(MAX_HANDOVER_WAIT)),
            watch_returns: Slots::uncounted(WATCH_HANDOVERS, None),
            watch_progress_interval: watch.is_from_memory().then_some(watch.progress_notify_interval),
        })
    }

    /// Returns the state of a new connection of the client with this `name` at `peer`, whose requests are read by `intake`, on a
    /// listener with this `access`.
    #[must_use]
    pub fn client(
        self: &Arc<Self>,
        access: Access,
        intake: &Arc<Intake>,
        name: &ClientName,
        peer: Option<IpAddr>,
    ) -> Arc<Client> {
        let caller = Caller::new(&self.telemetry.clients, name);
        let client = caller.of_connection().number();
        Arc::new(Client {
            has_own_name: self.forward.upstream.credentials().is_own_name(name),
            proxy: Arc::clone(self),
            access,
            peer,
            account: self.ledger.account(client, Arc::clone(intake)),
            caller,
        })
    }

    /// Aborts responses whose clients have stopped reading or keep too much old data, drops expired page series and
    /// expired slow calls, and closes unused HTTP/1 connections, until `stop` is cancelled. The loops restart separately
    /// after a panic.
    pub async fn sweep(self: Arc<Self>, stop: CancellationToken) {
        let aborted = &self.telemetry.metrics.responses;
        let loops = async {
            tokio::join!(
                restarting("idle responses", || self.responses.run(aborted)),
                restarting("old views", || self.responses.relieve(&self.mirrors, aborted)),
                restarting("watch memory", || {
                    watch_memory::account(&self.mirrors, &self.ledger, &self.telemetry.metrics.watches)
                }),
                restarting("unread watches", || self
                    .responses
                    .relieve_watches(|| self.ledger.is_waited_for(ByteKind::Watch), aborted)),
                restarting("page series", || self.fallback.run()),
                restarting("kept HTTP/1 connections", || self
                    .forward
                    .http1_pool
                    .run(&self.forward.drain)),
                restarting("slow calls", async || {
                    let mut ticks = tokio::time::interval(SLOW_CALLS_INTERVAL);
                    loop {
                        ticks.tick().await;
                        self.telemetry.slowest.sweep();
                    }
                })
            )
        };
        stop.run_until_cancelled(loops).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Flags, Scene};

    #[tokio::test]
    async fn reads_are_refused_only_if_the_mirror_is_behind_and_the_operator_wants_it() {
        let forwards = Scene::new(&[]);
        let fails = Scene::new(&["--when-behind=fail"]);
        for reason in [Reason::Loading, Reason::FeedLost, Reason::NotFresh] {
            assert!(!forwards.proxy.refuses_reads(reason));
            assert!(fails.proxy.refuses_reads(reason));
        }
        for reason in [Reason::NotMirrored, Reason::Auth, Reason::Bypass] {
            assert!(
                !fails.proxy.refuses_reads(reason),
                "no mirror would answer it later"
            );
        }
    }

    #[tokio::test]
    async fn reload_bounds_the_calls_and_reads_that_follow() {
        let scene = Scene::new(&[]);
        let (proxy, account) = (&scene.proxy, &scene.client().account);
        for _ in 0..2 {
            scene.calls.spawn(std::future::pending::<()>());
        }
        assert!(!proxy.admission.is_full());
        let flags = [
            "--max-calls=1",
            "--forward-max-small=1",
            "--forward-max-waiting=0",
        ];
        let new = Flags::new(&flags);
        scene.forward.store(new.forward);
        proxy.reload(&new.limits);
        assert!(proxy.admission.is_full());
        let small = &proxy.forward.small;
        let only = small.acquire(account, Deadline::NONE).await.unwrap();
        assert!(
            small.acquire(account, Deadline::NONE).await.is_err(),
            "none may wait"
        );
        drop(only);
        assert!(small.acquire(account, Deadline::NONE).await.is_ok());
    }

    #[tokio::test]
    async fn bytes_of_a_connection_are_counted_for_its_client_when_it_ends() {
        let scene = Scene::new(&[]);
        let intake = Arc::<Intake>::default();
        let name = ClientName::of_connection(None, None);
        let client = scene.proxy.client(Access::Full, &intake, &name, None);
        let of_connection = Arc::clone(client.caller.of_connection());
        intake.record_received(70);
        client.record_received();
        intake.record_received(7);
        assert_eq!(of_connection.figures().received_bytes, 70);
        drop(client);
        assert_eq!(of_connection.figures().received_bytes, 77);
    }
}
