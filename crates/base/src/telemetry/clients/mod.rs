//! Clients: who they are, and what they cost.
//!
//! | file | contents |
//! |---|---|
//! | `mod` | [`ClientRegistry`]: all clients, in a bounded number; names of etcd's users by their tokens; metrics of those that cost most |
//! | `name` | [`ClientName`]: who the client of a connection is |
//! | `stats` | [`ClientStats`]: counters of one client |

mod name;
mod stats;

use std::sync::atomic::{AtomicU64, Ordering};
use std::{collections::hash_map::RandomState, hash::BuildHasher, ops::Deref, sync::Arc, time::Duration};

use dashmap::{DashMap, Entry};
use moka::sync::Cache;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::metrics::{CallMetrics, Counter, Gauge, gauge, metric_group};

pub use name::{ClientKind, ClientName};
pub use stats::{ClientCall, ClientFigures, ClientRates, ClientStats};

/// All clients with an open connection, and those that were seen last. The one that is idle longest leaves when there
/// are too many; its sums count as those of "others" from then on.
#[derive(Debug)]
pub struct ClientRegistry {
    max_clients: usize,
    calls: Arc<CallMetrics>,
    clients: DashMap<ClientName, Arc<ClientStats>>,
    next_number: AtomicU64,
    others: Arc<ClientStats>,
    users: Users,
}

/// A client with an open connection; it stays in the registry until this is dropped.
#[derive(Debug)]
pub struct ClientHandle(Arc<ClientStats>);

impl Deref for ClientHandle {
    type Target = Arc<ClientStats>;

    fn deref(&self) -> &Arc<ClientStats> {
        &self.0
    }
}

impl ClientHandle {
    /// Counts a connection of the client. The caller excludes that the client leaves the registry at this moment.
    fn new(client: &Arc<ClientStats>) -> ClientHandle {
        client.connections.fetch_add(1, Ordering::Relaxed);
        ClientHandle(Arc::clone(client))
    }
}

impl Drop for ClientHandle {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for ClientRegistry {
    fn default() -> ClientRegistry {
        ClientRegistry::with_max(usize::MAX, Arc::default())
    }
}

impl ClientRegistry {
    /// Keeps at most `max_clients`, without "others". Their calls are counted in `calls`.
    #[must_use]
    pub fn with_max(max_clients: usize, calls: Arc<CallMetrics>) -> ClientRegistry {
        ClientRegistry {
            max_clients,
            clients: DashMap::new(),
            next_number: AtomicU64::new(1),
            others: ClientStats::new(0, ClientName::others(), Arc::clone(&calls)),
            calls,
            users: Users::new(),
        }
    }

    /// The client of this name, for a new connection; "others" if there are too many with open connections.
    #[must_use]
    pub fn connect(&self, name: &ClientName) -> ClientHandle {
        // Under the lock of the map's shard: the client cannot leave before its connection is counted.
        if let Some(client) = self.clients.get(name) {
            return ClientHandle::new(&client);
        }
        if self.clients.len() >= self.max_clients && !self.drop_idle() {
            return ClientHandle::new(&self.others);
        }
        match self.clients.entry(name.clone()) {
            Entry::Occupied(client) => ClientHandle::new(client.get()),
            Entry::Vacant(place) => {
                let number = self.next_number.fetch_add(1, Ordering::Relaxed);
                let client = ClientStats::new(number, name.clone(), Arc::clone(&self.calls));
                ClientHandle::new(&place.insert(client))
            }
        }
    }

    /// Removes the client without a connection that is idle longest; false if every client has one.
    fn drop_idle(&self) -> bool {
        let is_idle = |client: &ClientStats| client.connections.load(Ordering::Relaxed) == 0;
        let idle = self.clients.iter().filter(|client| is_idle(client));
        let longest = idle.min_by_key(|client| client.last_seen_seconds());
        let Some(name) = longest.map(|client| client.key().clone()) else {
            return false;
        };
        if let Some((_, client)) = self.clients.remove_if(&name, |_, client| is_idle(client)) {
            self.others.add_sums_of(&client);
        }
        true
    }

    /// Records that etcd has issued `token` to `user`. The token is not kept.
    pub fn record_token(&self, token: &[u8], user: &str) {
        self.users.record(token, user);
    }

    /// Hash that stands for a token.
    #[must_use]
    pub fn hash_token(&self, token: &[u8]) -> u64 {
        self.users.hash(token)
    }

    /// Name of the user whose token has this hash; `None` if etcd did not issue it through this process.
    #[must_use]
    pub fn user_of(&self, token_hash: u64) -> Option<ClientName> {
        self.users.get(token_hash)
    }

    /// Determines the rates of all clients since the last sample.
    pub fn sample(&self, now: Instant) {
        for client in &self.clients {
            client.sample(now);
        }
        self.others.sample(now);
    }

    /// Figures of all clients, the most costly first; "others" is one of them if it had a call.
    #[must_use]
    pub fn figures(&self) -> Vec<ClientFigures> {
        let mut all: Vec<_> = self.clients.iter().map(|client| client.figures()).collect();
        all.extend(Some(self.others.figures()).filter(|others| others.calls > 0));
        all.sort_by(|one, other| {
            let (a, b) = (one.rates.cost(), other.rates.cost());
            b.total_cmp(&a)
                .then_with(|| other.calls.cmp(&one.calls))
                .then_with(|| one.name.cmp(&other.name))
        });
        all
    }
}

/// Tokens that are kept; beyond it those that were not used for long are dropped.
const MAX_TOKENS: u64 = 16_384;
/// Time without a call after which a token is dropped. etcd's simple tokens expire after five minutes without a call.
const KEPT_FOR: Duration = Duration::from_secs(3600);

/// Users by the hash of their token. Tokens themselves are not kept; the hash has a random key.
#[derive(Debug)]
struct Users {
    hasher: RandomState,
    names: Cache<u64, ClientName>,
}

impl Users {
    fn new() -> Users {
        Users {
            hasher: RandomState::new(),
            names: Cache::builder()
                .max_capacity(MAX_TOKENS)
                .time_to_idle(KEPT_FOR)
                .build(),
        }
    }

    /// Hash under which a token is kept.
    fn hash(&self, token: &[u8]) -> u64 {
        self.hasher.hash_one(token)
    }

    /// Records that etcd has issued `token` to `user`.
    fn record(&self, token: &[u8], user: &str) {
        self.names.insert(self.hash(token), ClientName::of_user(user));
    }

    /// User of the token with this hash; `None` if it was not issued through this process.
    fn get(&self, hash: u64) -> Option<ClientName> {
        self.names.get(&hash)
    }
}

metric_group! {
    /// Metrics of the clients that cost most at the last scrape.
    pub struct ClientMetrics {
        /// Calls of the clients that cost most, since the start, by `client` and `kind` of its name:
        /// `certificate` (common name), `user` (of etcd), `address`, `unix`, `others` (beyond 1,024 clients)
        ///
        /// Only these clients have series (`--client-metrics-top`); those of a client begin and end with its
        /// place among them
        ///
        /// Useful when: to see who causes load; `/clients` has all
        calls[client, kind]: Counter = "rangecache_client_calls_total";
        /// Calls of these clients by `from`: `memory`, `etcd`, `refused`. Watches from memory are not counted
        ///
        /// Useful when: a client's reads reach etcd
        answers[client, kind, from]: Counter = "rangecache_client_answers_total";
        /// Reads of ranges without a limit, and RangeStreams, of these clients
        ///
        /// Useful when: a client lists too often
        lists[client, kind]: Counter = "rangecache_client_lists_total";
        /// Bytes of these clients by `direction`: `received` on connections, `sent` in responses
        ///
        /// Useful when: bandwidth is short
        bytes[client, kind, direction]: Counter = "rangecache_client_bytes_total";
        /// Calls of these clients in flight, watches included
        ///
        /// Useful when: one of them has most of `--max-calls`
        in_flight[client, kind]: Gauge = "rangecache_client_calls_in_flight";
        /// Open Watch streams of these clients
        ///
        /// Useful when: a client leaks watches
        watches[client, kind]: Gauge = "rangecache_client_watches";
        /// Excludes other scrapes while series are replaced.
        exporting: Mutex<()>;
    }
}

impl ClientMetrics {
    /// Replaces the exported clients by these.
    pub fn export(&self, clients: &[ClientFigures]) {
        let _exporting = self.exporting.lock();
        self.calls.clear();
        self.answers.clear();
        self.lists.clear();
        self.bytes.clear();
        self.in_flight.clear();
        self.watches.clear();
        for figures in clients {
            let client = || (figures.name.as_str().to_owned(), figures.name.kind().as_str());
            let client_and = |label| (client().0, client().1, label);
            self.calls.of(client()).inc_by(figures.calls);
            self.lists.of(client()).inc_by(figures.lists);
            self.in_flight.of(client()).set(gauge(figures.in_flight));
            self.watches.of(client()).set(gauge(figures.watches));
            for (from, count) in [
                ("memory", figures.from_memory),
                ("etcd", figures.from_etcd),
                ("refused", figures.refused),
            ] {
                self.answers.of(client_and(from)).inc_by(count);
            }
            for (direction, count) in [("received", figures.received_bytes), ("sent", figures.sent_bytes)] {
                self.bytes.of(client_and(direction)).inc_by(count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::telemetry::outcome::{Outcome, Read};
    use crate::telemetry::{Metrics, exposition::Format};

    fn names(registry: &ClientRegistry) -> Vec<String> {
        let figures = registry.figures();
        let mut names: Vec<_> = figures.iter().map(|client| client.name.to_string()).collect();
        names.sort();
        names
    }

    #[test]
    fn connections_of_one_name_are_one_client_until_it_is_idle_and_others_need_its_place() {
        let registry = ClientRegistry::with_max(2, Arc::default());
        let name = |user: &str| ClientName::of_user(user);
        let (first, again) = (registry.connect(&name("a")), registry.connect(&name("a")));
        assert_eq!(first.number(), again.number());
        drop(first.begin_call());
        let second = registry.connect(&name("b"));
        drop(registry.connect(&name("c")).begin_call());
        assert_eq!(names(&registry), ["others others", "user a", "user b"]);
        drop((first, again));
        let third = registry.connect(&name("c"));
        assert_eq!(names(&registry), ["others others", "user b", "user c"]);
        assert_ne!(third.number(), second.number());
        let others = registry
            .figures()
            .into_iter()
            .find(|c| c.name == ClientName::others());
        assert_eq!(others.unwrap().calls, 2, "one of c, one of a");
    }

    #[tokio::test(start_paused = true)]
    async fn clients_are_sorted_by_what_they_cost_now() {
        let registry = ClientRegistry::default();
        let [cheap, costly] = ["cheap", "costly"].map(|user| registry.connect(&ClientName::of_user(user)));
        for _ in 0..100 {
            drop(cheap.begin_call());
        }
        registry.sample(Instant::now());
        let hit = Outcome::Hit(Read::Linearizable);
        cheap.begin_call().record_read(hit, true);
        costly.begin_call().record_sent(1 << 20);
        tokio::time::advance(Duration::from_secs(2)).await;
        registry.sample(Instant::now());
        let figures = registry.figures();
        assert_eq!(figures[0].name.as_str(), "costly");
        assert!(
            (figures[0].rates.bytes - f64::from(1 << 19)).abs() < 1.0,
            "{figures:?}"
        );
        assert_eq!(
            (figures[1].calls, figures[1].from_memory, figures[1].lists),
            (101, 1, 1)
        );
    }

    #[test]
    fn user_is_known_by_a_token_that_etcd_has_issued() {
        let registry = ClientRegistry::default();
        registry.record_token(b"secret", "root");
        let user = |token: &[u8]| registry.user_of(registry.hash_token(token));
        assert_eq!(user(b"secret"), Some(ClientName::of_user("root")));
        assert_eq!(user(b"guess"), None);
        assert!(!format!("{registry:?}").contains("secret"));
    }

    #[test]
    fn watch_is_open_until_its_call_ends() {
        let registry = ClientRegistry::default();
        let client = registry.connect(&ClientName::of_connection(None, None));
        let mut call = client.begin_call();
        call.set_watch();
        call.set_watch();
        let open = || (client.figures().in_flight, client.figures().watches);
        assert_eq!(open(), (1, 1));
        drop(call);
        assert_eq!(open(), (0, 0));
    }

    #[test]
    fn clients_of_the_last_export_alone_have_series() {
        let (metrics, clients) = (Metrics::new(), ClientRegistry::default());
        let name = ClientName::of_user("alice");
        let client = clients.connect(&name);
        let call = client.begin_call();
        call.record_sent(5);
        call.record_from_etcd();
        for _ in 0..2 {
            metrics.clients.export(&clients.figures());
        }
        let text = metrics.encode(Format::Text);
        for line in [
            "rangecache_client_calls_total{client=\"alice\",kind=\"user\"} 1",
            "rangecache_client_answers_total{client=\"alice\",kind=\"user\",from=\"etcd\"} 1",
            "rangecache_client_bytes_total{client=\"alice\",kind=\"user\",direction=\"sent\"} 5",
            "rangecache_client_calls_in_flight{client=\"alice\",kind=\"user\"} 1",
        ] {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
        metrics.clients.export(&[]);
        assert!(!metrics.encode(Format::Text).contains("alice"));
    }
}
