//! A proxy for unit tests, in front of an etcd that a test scripts, or of none.

use std::sync::Arc;

use clap::{CommandFactory as _, FromArgMatches as _};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::{Access, Client, Proxy, ProxyFlags};
use crate::config::{Config, LiveConfig, Setting, settings};
use etcd_store::cache::ResponseHeader;
use rangecache_base::telemetry::Telemetry;
use rangecache_base::telemetry::clients::ClientName;
use rangecache_edge::tls::Connector;
use rangecache_mirror::Mirrors;
use rangecache_mirror::lineage::{Auth, Transition};
use rangecache_upstream::{Credentials, Upstream};

/// A URL at which nothing listens.
const NO_ETCD: &str = "http://127.0.0.1:1";

/// A proxy, and what it was made of.
pub(crate) struct Scene {
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) mirrors: Arc<Mirrors>,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) live: LiveConfig,
    /// Tasks of calls.
    pub(crate) calls: TaskTracker,
    pub(crate) drain: CancellationToken,
    _stop: DropGuard,
}

/// The configuration of these flags, and the settings.
pub(crate) fn configured(flags: &[&str]) -> (Config, Vec<Setting>) {
    let args = std::iter::once(&"rangecache").chain(flags);
    let matches = Config::command().try_get_matches_from(args).unwrap();
    let config = Config::from_arg_matches(&matches).unwrap();
    let settings = settings(&config, &matches, &std::collections::BTreeSet::new());
    (config, settings)
}

impl Scene {
    /// A proxy with these flags and no etcd.
    pub(crate) fn new(flags: &[&str]) -> Scene {
        Scene::before(NO_ETCD, flags)
    }

    /// A proxy with these flags before the etcd at `url`.
    pub(crate) fn before(url: &str, flags: &[&str]) -> Scene {
        let (config, settings) = configured(&[flags, &["--endpoints", url]].concat());
        let live = LiveConfig::new(config.clone(), settings);
        let (stop, drain) = (CancellationToken::new(), CancellationToken::new());
        let (background, calls) = (TaskTracker::new(), TaskTracker::new());
        let (telemetry, connector) = (Arc::<Telemetry>::default(), Connector::plaintext());
        let (urls, credentials) = (&config.etcd.endpoints, Credentials::new(None));
        let upstream = Upstream::start(urls, &connector, true, credentials, &background, &stop);
        let (mirror, etcd) = (&live.mirror, &config.etcd);
        let mirrors = rangecache_mirror::start(mirror, etcd, &upstream, &telemetry, &background, &stop);
        let flags = ProxyFlags {
            forward: &live.forward,
            watch: &config.watch,
            limits: &config.limits,
            listen: &config.listen,
            writes_to: config.etcd.writes_to,
            connect_timeout: config.etcd.connect_timeout,
            buffer_max_bytes: config.buffer_max_bytes(),
        };
        Scene {
            proxy: Proxy::new(flags, &upstream, &mirrors, &telemetry, &calls, &drain),
            upstream,
            mirrors,
            telemetry,
            live,
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
