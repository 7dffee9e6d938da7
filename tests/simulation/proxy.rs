//! rangecache as a part of this process: what `serve` assembles, without signals and the listener for metrics. A simulation
//! starts it again, and changes its prefixes while it runs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use parking_lot::Mutex;
use rangecache::serve::{Assembly, ProcessFiles};
use rangecache_base::simulated;
use rangecache_base::telemetry::exposition::Format;
use rangecache_config::Config;
use rangecache_edge::server::Listener;
use rangecache_mirror::Mirrors;
use rangecache_proxy::Access;
use rangecache_upstream::Upstream;
use tokio::io::DuplexStream;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::auth::User;
use crate::chance::Chance;
use crate::closed_on_exit::ClosedOnExit;
use crate::cluster::MEMBERS;
use crate::images::Images;
use crate::members::From;

/// Address of the rangecache.
pub const AUTHORITY: &str = "rangecache:2379";
/// Bound on the time until every task has ended after the process has exited and its connections are closed.
const ENDED_TIMEOUT: Duration = Duration::from_secs(60);

thread_local! {
    /// By the address of each rangecache of this thread: cancelled when its process exits.
    static EXITED: RefCell<BTreeMap<String, CancellationToken>> = RefCell::default();
}

/// Connects to the rangecache at this address; its connections end with its process.
pub fn connect(authority: &str) -> io::Result<ClosedOnExit<DuplexStream>> {
    let stream = simulated::connect(authority).expect("a simulated network")?;
    let exited = EXITED.with_borrow(|exited| exited.get(authority).cloned());
    Ok(ClosedOnExit::new(stream, exited.unwrap_or_default()))
}

/// Place of a rangecache: its address, and what is behind it.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its address.
    pub authority: String,
    /// `--endpoints`.
    endpoints: Vec<String>,
    /// `--fallback-endpoints`.
    fallbacks: Vec<String>,
    /// `--warm-from`.
    neighbours: Vec<String>,
}

impl Place {
    /// In front of all members, where clients are.
    pub fn before_members() -> Place {
        Place {
            authority: AUTHORITY.to_owned(),
            endpoints: Self::members(),
            fallbacks: Vec::new(),
            neighbours: Vec::new(),
        }
    }

    /// A hub in front of all members.
    pub fn hub(number: usize) -> Place {
        Place {
            authority: format!("hub-process-{number}:2379"),
            ..Self::before_members()
        }
    }

    /// The place of clients, in front of hubs with these numbers, with or without the members as fallbacks.
    pub fn before_hubs(hubs: std::ops::Range<usize>, has_fallbacks: bool) -> Place {
        Place {
            authority: AUTHORITY.to_owned(),
            endpoints: hubs.map(Self::authority_of_hub).collect(),
            fallbacks: if has_fallbacks {
                Self::members()
            } else {
                Vec::new()
            },
            neighbours: Vec::new(),
        }
    }

    /// The place, with these hubs as neighbours.
    pub fn with_neighbours(self, hubs: std::ops::Range<usize>) -> Place {
        Place {
            neighbours: hubs.map(Self::authority_of_hub).collect(),
            ..self
        }
    }

    /// Address of a hub for other rangecaches.
    pub fn authority_of_hub(number: usize) -> String {
        format!("hub-{number}:2379")
    }

    fn members() -> Vec<String> {
        (0..MEMBERS)
            .map(|member| From::Rangecache.authority(member))
            .collect()
    }
}

/// Settings of the rangecache that a seed chooses.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Flags without prefixes.
    pub flags: Vec<&'static str>,
    /// `--cache-prefix`.
    pub prefixes: Vec<&'static str>,
    /// `--serve-stale`.
    pub serve_stale: Duration,
    /// `--watch-max-bytes`. If that is little, clients write long values.
    pub watch_max_bytes: u64,
    /// Whether etcd has users, and auth may be on.
    pub has_auth: bool,
    /// Whether memory is as scarce as if it had no room for values, from time to time.
    pub leaves_values_out: bool,
    /// Whether images of the mirrors are kept over restarts (`--image-dir`).
    pub has_images: bool,
}

impl Settings {
    /// Random settings: each is in some simulations as users have it, and in others such that rare cases come often.
    pub fn random(chance: &Chance) -> Self {
        let mut flags = vec!["--watch-cache=auto"];
        let prefixes = if chance.one_in(3) {
            vec!["/sim/a/", "/sim/b/"]
        } else {
            Vec::new()
        };
        if chance.one_in(4) {
            // Watches come too late for the log, and past revisions go to etcd.
            flags.push("--history-max-bytes=1");
        }
        if chance.one_in(4) {
            flags.push("--verify-interval=2s");
        }
        if chance.one_in(8) {
            flags.push("--when-behind=fail");
        }
        let is_watch_memory_small = chance.one_in(4);
        if is_watch_memory_small {
            flags.push("--watch-max-bytes=24KiB");
            // Values are long enough to be packed.
            flags.push("--cache-pack=always");
        }
        let watch_max_bytes = if is_watch_memory_small { 24 << 10 } else { 64 << 20 };
        let serves_stale = chance.one_in(3);
        if serves_stale {
            flags.push("--serve-stale=3s");
        }
        let has_auth = chance.one_in(4);
        if has_auth {
            flags.push("--user=mirror:sesame");
        }
        Self {
            flags,
            prefixes,
            serve_stale: Duration::from_secs(if serves_stale { 3 } else { 0 }),
            watch_max_bytes,
            has_auth,
            leaves_values_out: chance.one_in(4),
            has_images: chance.one_in(3),
        }
    }

    /// Whether watches have little memory.
    pub fn is_watch_memory_small(&self) -> bool {
        self.watch_max_bytes < 1 << 20
    }

    /// A random user of a client, or none.
    pub fn user(&self, chance: &Chance) -> Option<User> {
        let users = [Some(User::All), Some(User::All), Some(User::Half), None];
        users[chance.below(4)].filter(|_| self.has_auth)
    }

    /// Settings with these flags alone.
    pub fn with_flags(flags: &[&'static str]) -> Self {
        Self {
            flags: flags.to_vec(),
            prefixes: Vec::new(),
            serve_stale: Duration::ZERO,
            watch_max_bytes: 64 << 20,
            has_auth: false,
            leaves_values_out: false,
            has_images: false,
        }
    }

    /// Random settings of a hub of a rangecache with these.
    pub fn as_hub(&self, chance: &Chance) -> Self {
        loop {
            let hub = Self::random(chance);
            if hub.has_auth == self.has_auth {
                return hub;
            }
        }
    }

    /// Settings without those of which a rangecache behind a hub is not judged: age tells of members, which the network hides.
    pub fn behind_hub(mut self) -> Self {
        self.flags.retain(|flag| !flag.starts_with("--serve-stale"));
        self.serve_stale = Duration::ZERO;
        self
    }

    /// The configuration at `place`, with `prefixes` and these images.
    fn config(&self, place: &Place, prefixes: &[&str], images: Option<&Images>) -> Config {
        let listen = format!("--listen-client-urls=http://{}", place.authority);
        let urls = |authorities: &[String]| {
            let urls = authorities.iter().map(|authority| format!("http://{authority}"));
            urls.collect::<Vec<_>>().join(",")
        };
        let endpoints = format!("--endpoints={}", urls(&place.endpoints));
        let fallbacks = format!("--fallback-endpoints={}", urls(&place.fallbacks));
        let neighbours = format!("--warm-from={}", urls(&place.neighbours));
        let images = images.map(|images| format!("--image-dir={}", images.path().display()));
        let mut own = vec!["rangecache", &listen, &endpoints, "--allow-plaintext-listener"];
        own.extend(images.as_deref());
        if !place.fallbacks.is_empty() {
            own.push(&fallbacks);
        }
        if !place.neighbours.is_empty() {
            own.push(&neighbours);
        }
        let prefixes: Vec<_> = prefixes
            .iter()
            .map(|prefix| format!("--cache-prefix={prefix}"))
            .collect();
        let prefixes = prefixes.iter().map(String::as_str);
        let flags = own.into_iter().chain(self.flags.iter().copied()).chain(prefixes);
        let config = Config::try_parse_from(flags).expect("valid flags");
        config.validate().expect("valid flags");
        config
    }
}

/// A rangecache that runs.
pub struct Rangecache {
    place: Place,
    settings: Settings,
    images: Option<Mutex<Images>>,
    process: Mutex<Option<Process>>,
}

impl Rangecache {
    /// Starts it where clients are, in front of all members.
    pub async fn start(settings: Settings) -> Self {
        Self::start_at(Place::before_members(), settings).await
    }

    /// Starts it at `place`.
    pub async fn start_at(place: Place, settings: Settings) -> Self {
        let images = settings.has_images.then(Images::new);
        let process = Process::start(settings.config(&place, &settings.prefixes, images.as_ref())).await;
        Self {
            place,
            settings,
            images: images.map(Mutex::new),
            process: Mutex::new(Some(process)),
        }
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Stops it, waits up to `drain_timeout` for calls in flight, and starts it again. Returns whether every task had ended.
    pub async fn restart(&self, drain_timeout: Duration) -> bool {
        let process = self.process.lock().take();
        let has_ended = match process {
            Some(process) => process.stop(drain_timeout).await,
            None => true,
        };
        if let Some(images) = &self.images {
            images.lock().restart();
        }
        let process = Process::start(self.config(&self.settings.prefixes)).await;
        *self.process.lock() = Some(process);
        has_ended
    }

    fn config(&self, prefixes: &[&str]) -> Config {
        let images = self.images.as_ref().map(|images| images.lock());
        self.settings.config(&self.place, prefixes, images.as_deref())
    }

    /// Reloads it with other prefixes than those of its start.
    pub async fn reload(&self, prefixes: &[&str]) {
        let config = self.config(prefixes);
        let running = self.process.lock().as_ref().map(|process| {
            let Assembly { live, mirrors, .. } = &process.assembly;
            (live.clone(), Arc::clone(mirrors))
        });
        if let Some((live, mirrors)) = running {
            live.reload(&config, Vec::new());
            let mirror = &config.mirror;
            mirrors
                .set_scopes(&mirror.cache_prefix, &mirror.no_cache_prefix)
                .await;
        }
    }

    /// Reloads it with the prefixes of its start.
    pub async fn reload_as_started(&self) {
        self.reload(&self.settings.prefixes).await;
    }

    /// Its mirrors, and its connections to etcd.
    pub fn parts(&self) -> (Arc<Mirrors>, Arc<Upstream>) {
        let process = self.process.lock();
        let Assembly {
            mirrors, upstream, ..
        } = &process.as_ref().expect("it runs").assembly;
        (Arc::clone(mirrors), Arc::clone(upstream))
    }

    /// Its metrics page.
    pub fn metrics(&self) -> testkit::metrics::Metrics {
        let process = self.process.lock();
        let text = process
            .as_ref()
            .map(|process| process.assembly.telemetry.metrics.encode(Format::Text));
        testkit::metrics::Metrics::parse(&text.unwrap_or_default())
    }

    /// Number of reads that its memory has answered.
    pub fn memory_answers(&self) -> u64 {
        self.metrics().outcomes().memory_answers()
    }

    /// Stops it. Returns whether all of its tasks have ended.
    pub async fn stop(self) -> bool {
        match self.process.into_inner() {
            Some(process) => process.stop(Duration::ZERO).await,
            None => true,
        }
    }
}

/// A running process.
struct Process {
    assembly: Assembly,
    exited: CancellationToken,
}

impl Process {
    async fn start(config: Config) -> Self {
        let exited = CancellationToken::new();
        let authority = config.listen.client_urls[0].authority().to_owned();
        EXITED.with_borrow_mut(|of| of.insert(authority, exited.clone()));
        let files = ProcessFiles::open(&config).expect("no files");
        let assembly = Assembly::start(&config, Vec::new(), files, &Handle::current()).expect("no files");
        let listen = &config.listen;
        let listener = Listener::bind(&listen.client_urls[0], None, listen.unix_socket_mode, false)
            .await
            .expect("the address is free");
        assembly.serve(listener, Access::Full);
        Self { assembly, exited }
    }

    /// Stops in the stages of every rangecache, waits up to `drain_timeout` for calls, and exits. Returns whether every task
    /// has ended.
    async fn stop(self, drain_timeout: Duration) -> bool {
        let stages = &self.assembly.stages;
        stages.end(drain_timeout).await;
        self.exited.cancel();
        let ended = timeout(ENDED_TIMEOUT, async {
            stages.calls.wait().await;
            stages.background.wait().await;
        });
        ended.await.is_ok()
    }
}
