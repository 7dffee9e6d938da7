//! Bound on TLS handshakes in progress: what clients make this process hold before they have shown who they are.
//!
//! A handshake over the bound waits for a place. One that is late, whose client has stopped or is slow, gives its place to
//! a waiting one; those of a storm of honest clients are in time, and wait for each other. One address may have half of
//! the places, so that its handshakes do not keep those of other addresses waiting.

use std::collections::{BTreeMap, HashMap};
use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use rangecache_base::net::ClientAddress;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Looks for a late handshake within its time limit.
const LOOKS: u32 = 16;
/// Part of its time limit after which a handshake is late.
const LATE_DIVISOR: u32 = 4;

/// Handshakes in progress.
#[derive(Debug)]
pub(super) struct Handshakes {
    places: Arc<Semaphore>,
    max_per_address: u32,
    /// Time limit of a handshake, and of the wait for its place.
    timeout: Duration,
    begun: Mutex<Begun>,
}

#[derive(Debug, Default)]
struct Begun {
    next: u64,
    /// Handshakes that have a place and may lose it, in the order of their begin.
    by_age: BTreeMap<u64, (Instant, CancellationToken)>,
    /// Handshakes of each address, waiting ones included.
    by_address: HashMap<ClientAddress, u32>,
}

impl Handshakes {
    /// Places for `max` handshakes, each of which ends within `timeout`.
    pub(super) fn new(max: u32, timeout: Duration) -> Arc<Handshakes> {
        Arc::new(Handshakes {
            places: Arc::new(Semaphore::new(max as usize)),
            max_per_address: max.div_ceil(2),
            timeout,
            begun: Mutex::default(),
        })
    }

    /// Waits for the place of a handshake with a client at `address`, which is `None` if it has no bound. `None` if the
    /// address has too many, or if there is no place in time.
    pub(super) async fn begin(self: &Arc<Self>, address: Option<ClientAddress>) -> Option<Handshake> {
        let counted = AddressCount::enter(self, address)?;
        let place = match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => place,
            Err(_) => tokio::time::timeout(self.timeout, self.place()).await.ok()??,
        };
        let replaced = CancellationToken::new();
        let mut begun = self.begun.lock();
        let number = begun.next;
        begun.next += 1;
        begun.by_age.insert(number, (Instant::now(), replaced.clone()));
        Some(Handshake {
            number,
            replaced,
            counted,
            _place: place,
        })
    }

    /// Waits for a place, and takes those of late handshakes.
    async fn place(&self) -> Option<OwnedSemaphorePermit> {
        let free = Arc::clone(&self.places).acquire_owned();
        tokio::pin!(free);
        loop {
            self.replace_late();
            // A handshake that is in time now may be late then.
            if let Ok(place) = tokio::time::timeout(self.timeout / LOOKS, free.as_mut()).await {
                return place.ok();
            }
        }
    }

    /// Ends the oldest handshake, if it is late.
    fn replace_late(&self) {
        let late = self.timeout / LATE_DIVISOR;
        let mut begun = self.begun.lock();
        if let Some(oldest) = begun.by_age.first_entry()
            && oldest.get().0.elapsed() >= late
        {
            let (_, replaced) = oldest.remove();
            replaced.cancel();
        }
    }
}

/// Counts a handshake of an address until dropped.
#[derive(Debug)]
struct AddressCount {
    handshakes: Arc<Handshakes>,
    address: Option<ClientAddress>,
}

impl AddressCount {
    /// `None` if the address has too many.
    fn enter(handshakes: &Arc<Handshakes>, address: Option<ClientAddress>) -> Option<AddressCount> {
        if let Some(address) = address {
            let mut begun = handshakes.begun.lock();
            let of_address = begun.by_address.entry(address).or_default();
            if *of_address >= handshakes.max_per_address {
                return None;
            }
            *of_address += 1;
        }
        Some(AddressCount {
            handshakes: Arc::clone(handshakes),
            address,
        })
    }
}

impl Drop for AddressCount {
    fn drop(&mut self) {
        let Some(address) = self.address else {
            return;
        };
        let mut begun = self.handshakes.begun.lock();
        if let Some(of_address) = begun.by_address.get_mut(&address) {
            *of_address -= 1;
            if *of_address == 0 {
                begun.by_address.remove(&address);
            }
        }
    }
}

/// Place of a handshake until dropped.
#[derive(Debug)]
pub(super) struct Handshake {
    number: u64,
    replaced: CancellationToken,
    counted: AddressCount,
    _place: OwnedSemaphorePermit,
}

impl Handshake {
    /// Is cancelled when the handshake is late and another one needs its place.
    pub(super) fn replaced(&self) -> &CancellationToken {
        &self.replaced
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.counted.handshakes.begun.lock().by_age.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(8);

    #[tokio::test(start_paused = true)]
    async fn handshake_waits_for_a_place_and_takes_that_of_a_late_one() {
        let handshakes = Handshakes::new(2, TIMEOUT);
        let first = handshakes.begin(None).await.unwrap();
        let second = handshakes.begin(None).await.unwrap();
        let start = Instant::now();
        let waiting = tokio::spawn({
            let handshakes = Arc::clone(&handshakes);
            async move { handshakes.begin(None).await }
        });
        let replaced = tokio::time::timeout(TIMEOUT, first.replaced().cancelled()).await;
        replaced.expect("the late one gives way");
        assert_eq!(start.elapsed(), TIMEOUT / LATE_DIVISOR, "once it is late");
        drop(first);
        let third = waiting.await.unwrap().expect("the place of the first one");
        assert!(!second.replaced().is_cancelled() && !third.replaced().is_cancelled());
        drop((second, third));
        assert!(handshakes.begun.lock().by_age.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_a_place_ends_with_the_time_limit() {
        let handshakes = Handshakes::new(1, TIMEOUT);
        let held = handshakes.begin(None).await.unwrap();
        let start = Instant::now();
        assert!(handshakes.begin(None).await.is_none());
        assert_eq!(start.elapsed(), TIMEOUT);
        drop(held);
        assert!(handshakes.begin(None).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn address_has_half_of_the_places() {
        let handshakes = Handshakes::new(4, TIMEOUT);
        let address = |text: &str| Some(ClientAddress::from(text.parse::<std::net::IpAddr>().unwrap()));
        let hostile = address("10.0.0.1");
        let held = [handshakes.begin(hostile).await, handshakes.begin(hostile).await];
        assert!(held.iter().all(Option::is_some));
        assert!(handshakes.begin(hostile).await.is_none());
        assert!(handshakes.begin(address("10.0.0.2")).await.is_some());
        drop(held);
        assert!(handshakes.begin(hostile).await.is_some());
        assert!(handshakes.begun.lock().by_address.is_empty());
    }
}
