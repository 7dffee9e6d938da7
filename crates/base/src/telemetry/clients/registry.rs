//! All clients, in a bounded number.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::{DashMap, Entry};
use tokio::time::Instant;

use super::name::ClientName;
use super::stats::{ClientFigures, ClientStats};
use super::users::Users;
use crate::telemetry::metrics::CallMetrics;

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::telemetry::outcome::{Outcome, Read};

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
}
