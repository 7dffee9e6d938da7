//! Three members of etcd, two rangecaches in front of them, and a link that can fail between any two processes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::sleep;

use crate::client::{Caller, Shared};
use crate::history::History;
use crate::recorder::Recorder;
use crate::watcher::{Watched, Watcher};
use testkit::etcd::{Cluster, Etcd, Version, free_port};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::Client;
use testkit::metrics::Outcomes;
use testkit::pb::{Event, RangeRequest};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use testkit::watch_rules::revision;

/// Number of clients per rangecache, and of etcd itself.
const CLIENTS: u64 = 4;
/// Number of watch clients per rangecache; etcd itself has one.
const WATCH_CLIENTS: usize = 3;

/// The running system; see the module.
pub struct World {
    pub cluster: Cluster,
    /// Members that are not started; see [`crate::replacement`].
    pub spares: Vec<Etcd>,
    /// Links through which the members reach each of them.
    pub peer_links: Vec<FaultLink>,
    pub sidecars: Vec<Sidecar>,
    pub history: Arc<History>,
    pub recorder: Recorder,
    pub random: StdRng,
    pub shared: Arc<Shared>,
    /// Events of each history, from the first one's start.
    pub events: Vec<Vec<Event>>,
    pub watched: Arc<Watched>,
    /// Linearizable reads from memory, and all reads that memory could have answered, counted between faults.
    pub calm: (u64, u64),
    /// Watches created between faults.
    pub calm_watches: Outcomes,
    /// Times until responses came from memory again, by fault.
    pub recoveries: BTreeMap<String, Vec<Duration>>,
}

/// A rangecache with its links. Keeps its URL over restarts.
pub struct Sidecar {
    pub name: &'static str,
    pub url: String,
    pub links: Vec<FaultLink>,
    pub rangecache: Option<Rangecache>,
    endpoints: Endpoints,
    /// Client URLs of the members at the start.
    members: String,
    /// URL of the first rangecache, if this is another one.
    first: Option<String>,
}

/// Source of the endpoints of a rangecache.
#[derive(Clone, Debug)]
pub enum Endpoints {
    /// Links to the members, for ever.
    Links,
    /// The first rangecache, and links to the members as its fallback.
    First,
    /// This file of `--flags-file`, which names the members.
    File(PathBuf),
    /// The members at the start, and then `--endpoints-auto-sync-interval`.
    Members,
}

impl Sidecar {
    async fn new(
        name: &'static str,
        cluster: &Cluster,
        seed: u64,
        endpoints: Endpoints,
        first: Option<&Sidecar>,
    ) -> Self {
        let mut links = Vec::new();
        for (n, member) in cluster.members.iter().enumerate() {
            links.push(FaultLink::to(&member.url(), seed.wrapping_mul(100).wrapping_add(n as u64)).await);
        }
        if let Endpoints::File(file) = &endpoints {
            write_endpoints(file, &cluster.endpoints());
        }
        let mut sidecar = Self {
            name,
            url: format!("http://127.0.0.1:{}", free_port()),
            links,
            rangecache: None,
            endpoints,
            members: cluster.endpoints(),
            first: first.map(|first| first.url.clone()),
        };
        sidecar.start().await;
        sidecar.running().warm().await;
        sidecar
    }

    /// Starts it, and waits until it listens.
    pub async fn start(&mut self) {
        let links: Vec<_> = self.links.iter().map(FaultLink::url).collect();
        let builder = match &self.endpoints {
            Endpoints::Links => Rangecache::at(&links.join(",")),
            Endpoints::First => Rangecache::at(self.first.as_deref().expect("there is another"))
                .with("--fallback-endpoints", &links.join(",")),
            Endpoints::File(file) => Rangecache::with_flags_file(file),
            Endpoints::Members => Rangecache::at(&self.members).with("--endpoints-auto-sync-interval", "1s"),
        };
        let builder = builder.listening_on(&self.url).with("--watch-cache", "auto");
        self.rangecache = Some(builder.start_cold().await);
    }

    /// Whether its links are all that it has.
    pub fn is_before_members(&self) -> bool {
        matches!(self.endpoints, Endpoints::Links)
    }

    /// The process, which must be running.
    pub fn running(&self) -> &Rangecache {
        self.rangecache.as_ref().expect("runs")
    }

    /// Linearizable reads from memory so far, and all reads that memory could have answered: pinned and serializable
    /// ones are included only if forwarded, because the outcome of forwarded reads does not name their kind.
    async fn reads(&self) -> (u64, u64) {
        let outcomes = self.running().outcomes().await;
        let memory = linearizable_from_memory(&outcomes);
        (memory, memory + outcomes.of("forwarded") + outcomes.of("shed"))
    }

    /// Watches created so far.
    async fn watches(&self) -> Outcomes {
        self.running().metrics().await.created_watches()
    }
}

fn linearizable_from_memory(outcomes: &Outcomes) -> u64 {
    let counts = outcomes.0.iter().filter(|((outcome, reason), _)| {
        ["hit", "waited"].contains(&outcome.as_str()) && reason == "linearizable"
    });
    counts.map(|(_, n)| n).sum()
}

impl World {
    /// Starts all processes except the clients; the members are of this version, with these additional flags.
    pub async fn start(
        history: History,
        version: Version,
        etcd_flags: &[&str],
        endpoints: [Endpoints; 2],
        seed: u64,
    ) -> Self {
        let history = Arc::new(history);
        let mut peer_links = Vec::new();
        let cluster = Cluster::start_linked([version; 3], etcd_flags, async |url| {
            let link = FaultLink::to(&url, seed ^ peer_links.len() as u64).await;
            let url = link.url().to_owned();
            peer_links.push(link);
            url
        })
        .await;
        let revision = newest(&cluster.members[0].client().await).await;
        history.start(revision);
        let members: Vec<_> = cluster.members.iter().map(|member| member.url()).collect();
        let recorder = Recorder::start(&history, &members, 0, revision);
        let [a, b] = endpoints;
        let first = Sidecar::new("a", &cluster, seed, a, None).await;
        let second = Sidecar::new("b", &cluster, seed + 1, b, Some(&first)).await;
        let sidecars = vec![first, second];
        let shared = Arc::new(Shared {
            history: history.clone(),
            newest: revision.into(),
            stop: false.into(),
            writes_suspended: false.into(),
            writing: 0.into(),
            segment: 0.into(),
            failures: Mutex::default(),
        });
        Self {
            cluster,
            spares: Vec::new(),
            peer_links,
            sidecars,
            history,
            recorder,
            random: StdRng::seed_from_u64(seed),
            shared,
            events: vec![Vec::new()],
            watched: Arc::default(),
            calm: (0, 0),
            calm_watches: Outcomes::default(),
            recoveries: BTreeMap::new(),
        }
    }

    /// Client URLs of the members, and of those that take their places.
    pub fn members(&self) -> Vec<String> {
        let all = self.cluster.members.iter().chain(&self.spares);
        all.map(Etcd::url).collect()
    }

    /// The clients, not yet running.
    pub fn callers(&self, seed: u64) -> Vec<Caller> {
        let mut servers: Vec<_> = self
            .sidecars
            .iter()
            .map(|sidecar| (sidecar.name, vec![sidecar.url.clone()]))
            .collect();
        servers.push(("etcd", self.members()));
        let caller =
            |n: u64, (via, urls): &(&str, Vec<String>)| Caller::new(&self.shared, n, via, urls.clone(), seed);
        (0..CLIENTS * servers.len() as u64)
            .map(|n| caller(n, &servers[usize::try_from(n).unwrap() % servers.len()]))
            .collect()
    }

    /// The watch clients, not yet running.
    pub fn watchers(&self, seed: u64) -> Vec<Watcher> {
        let mut servers = Vec::new();
        for sidecar in &self.sidecars {
            servers.extend((0..WATCH_CLIENTS).map(|_| (sidecar.name, vec![sidecar.url.clone()])));
        }
        servers.push(("etcd", self.members()));
        let servers = servers.into_iter().enumerate();
        let watcher = |(n, (via, urls))| Watcher::new(&self.shared, &self.watched, n, via, urls, seed);
        servers.map(watcher).collect()
    }

    /// Stops the recorder, and keeps the events of the history.
    pub async fn stop_recording(&mut self) {
        let events = self.recorder.stop().await;
        self.events.last_mut().expect("a history").extend(events);
    }

    /// Begins another history with the events of the last one up to a revision.
    pub fn continue_events(&mut self, last: i64) {
        let events = self.events.last().expect("a history");
        let common = events.partition_point(|event| revision(event) <= last);
        self.events.push(events[..common].to_vec());
    }

    /// Lets time pass without faults, and counts where reads are answered.
    pub async fn calm(&mut self, duration: Duration) {
        let mut before = Vec::new();
        for sidecar in &self.sidecars {
            before.push((sidecar.reads().await, sidecar.watches().await));
        }
        sleep(duration).await;
        for (sidecar, before) in self.sidecars.iter().zip(before) {
            let (reads, watches) = (sidecar.reads().await, sidecar.watches().await);
            self.calm.0 += reads.0 - before.0.0;
            self.calm.1 += reads.1 - before.0.1;
            self.calm_watches.add(watches.since(&before.1));
        }
    }

    /// Waits until each rangecache answers from memory again.
    pub async fn recover(&mut self, from: &str) {
        let healed = Instant::now();
        let mut longest = Duration::ZERO;
        let mut before = Vec::new();
        for sidecar in &self.sidecars {
            before.push(sidecar.reads().await.0);
        }
        for (sidecar, before) in self.sidecars.iter().zip(before) {
            let what = format!("{} answers from memory after {from}", sidecar.name);
            until(SOON, &what, async || {
                (sidecar.reads().await.0 > before).then_some(())
            })
            .await;
            longest = longest.max(healed.elapsed());
        }
        println!("  responses come from memory {longest:?} after {from}");
        self.recoveries.entry(from.to_owned()).or_default().push(longest);
    }

    /// A random choice of rangecaches: the first, the second or both.
    pub fn some_sidecars(&mut self) -> Vec<usize> {
        [vec![0], vec![1], vec![0, 1]][self.random.random_range(0..3)].clone()
    }

    /// A random choice of members: one, two or all.
    pub fn some_members(&mut self) -> Vec<usize> {
        let (first, how_many) = (self.random.random_range(0..3), self.random.random_range(1..=3));
        (first..first + how_many).map(|n| n % 3).collect()
    }

    /// Sets the condition of the links from some rangecaches to some members.
    pub fn set_links(&self, sidecars: &[usize], members: &[usize], condition: Condition) {
        for sidecar in sidecars {
            for member in members {
                self.sidecars[*sidecar].links[*member].set(condition);
            }
        }
    }

    /// Waits for the random duration of a fault.
    pub async fn last(&mut self, milliseconds: std::ops::Range<u64>) {
        sleep(Duration::from_millis(self.random.random_range(milliseconds))).await;
    }

    /// Waits until every member serves.
    pub async fn members_serve(&self) {
        for member in &self.cluster.members {
            member.ready().await;
        }
    }
}

/// Writes a file of `--flags-file` that names `endpoints`.
pub fn write_endpoints(file: &Path, endpoints: &str) {
    std::fs::write(file, format!("RANGECACHE_ENDPOINTS={endpoints}\n")).expect("the folder is ours");
}

/// Current revision of the store.
pub async fn newest(client: &Client) -> i64 {
    let answer = client.range(&RangeRequest::one("any")).await;
    answer.expect("etcd answers").revision()
}
