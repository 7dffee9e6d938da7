//! A proxy for unit tests, in front of an etcd that a test scripts, or of none.

#![cfg_attr(not(test), allow(dead_code, reason = "tests of other crates use a part"))]

use std::sync::Arc;

use clap::Parser;
use etcd_store::cache::ResponseHeader;
use rangecache_base::flags::Live;
use rangecache_base::telemetry::{Telemetry, clients::ClientName};
use rangecache_edge::{limits::LimitsConfig, server::ListenConfig, tls::Connector};
use rangecache_mirror::lineage::{Auth, Transition};
use rangecache_mirror::{MirrorConfig, Mirrors};
use rangecache_upstream::{Credentials, EtcdConfig, Upstream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::{Access, Client, ForwardConfig, Proxy, ProxyFlags, WatchConfig};

/// A URL at which nothing listens.
const NO_ETCD: &str = "http://127.0.0.1:1";

/// A proxy, and what it was made of.
pub struct Scene {
    /// The proxy.
    pub proxy: Arc<Proxy>,
    /// Its members.
    pub upstream: Arc<Upstream>,
    /// Its mirrors.
    pub mirrors: Arc<Mirrors>,
    /// Counters of its calls.
    pub telemetry: Arc<Telemetry>,
    /// Flags of forwarded reads, as reloads leave them.
    pub(crate) forward: Live<ForwardConfig>,
    /// Tasks of calls.
    pub(crate) calls: TaskTracker,
    pub(crate) drain: CancellationToken,
    _stop: DropGuard,
}

/// The flags that a proxy and what it stands on read.
#[derive(Clone, Debug, Parser)]
pub struct Flags {
    #[command(flatten)]
    etcd: EtcdConfig,
    #[command(flatten)]
    listen: ListenConfig,
    #[command(flatten)]
    mirror: MirrorConfig,
    #[command(flatten)]
    pub(crate) forward: ForwardConfig,
    #[command(flatten)]
    watch: WatchConfig,
    #[command(flatten)]
    pub(crate) limits: LimitsConfig,
}

impl Flags {
    /// These flags, and the defaults of the others.
    #[must_use]
    pub fn new(flags: &[&str]) -> Flags {
        Flags::parse_from(std::iter::once(&"rangecache").chain(flags))
    }
}

impl Scene {
    /// A proxy with these flags and no etcd.
    pub fn new(flags: &[&str]) -> Scene {
        Scene::before(NO_ETCD, flags)
    }

    /// A proxy with these flags before the etcd at `url`.
    pub(crate) fn before(url: &str, flags: &[&str]) -> Scene {
        let config = Flags::new(&[flags, &["--endpoints", url]].concat());
        let (forward, mirror) = (Live::new(config.forward), Live::new(config.mirror));
        let (stop, drain) = (CancellationToken::new(), CancellationToken::new());
        let (background, calls) = (TaskTracker::new(), TaskTracker::new());
        let (telemetry, connector) = (Arc::<Telemetry>::default(), Connector::plaintext());
        let (urls, credentials) = (&config.etcd.endpoints, Credentials::new(None));
        let upstream = Upstream::start(urls, &connector, true, credentials, &background, &stop);
        let mirrors =
            rangecache_mirror::start(&mirror, &config.etcd, &upstream, &telemetry, &background, &stop);
        let others = mirror.load().max_bytes() + config.watch.max_bytes();
        let flags = ProxyFlags {
            forward: &forward,
            watch: &config.watch,
            limits: &config.limits,
            listen: &config.listen,
            writes_to: config.etcd.writes_to,
            connect_timeout: config.etcd.connect_timeout,
            buffer_max_bytes: config.limits.buffer_max_bytes(others),
        };
        Scene {
            proxy: Proxy::new(flags, &upstream, &mirrors, &telemetry, &calls, &drain),
            upstream,
            mirrors,
            telemetry,
            forward,
            calls,
            drain,
            _stop: stop.drop_guard(),
        }
    }

    /// A connection of a client.
    pub(crate) fn client(&self) -> Arc<Client> {
        let name = ClientName::of_connection(None, None);
        self.proxy.client(Access::Full, &Arc::default(), &name, None)
    }

    /// Lets a check show that auth is off.
    pub(crate) fn switch_auth_off(&self) {
        let cluster_state = &self.mirrors.cluster_state;
        cluster_state.auth_seems_off(&cluster_state.before_check());
        assert_eq!(cluster_state.auth(), Auth::Off);
    }

    /// Lets a quorum check end with etcd at `revision`; returns what it shows.
    pub(crate) fn check(&self, revision: i64) -> Transition {
        let cluster_state = &self.mirrors.cluster_state;
        let header = ResponseHeader {
            cluster_id: 7,
            member_id: 1,
            revision,
            raft_term: 2,
            ..ResponseHeader::default()
        };
        cluster_state.after_check(&cluster_state.before_check(), header, None)
    }
}
