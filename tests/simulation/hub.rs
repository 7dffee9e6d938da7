//! Rangecaches between the one that clients use and the members, and the connections to them.

use std::ops::Range;
use std::sync::Arc;

use rangecache_base::simulated;
use tokio::io::copy_bidirectional;
use tokio::sync::watch;

use crate::chance::Chance;
use crate::proxy::{self, Place, Rangecache, Settings};

/// Hubs of a simulation, at most.
const MAX_HUBS: usize = 2;

/// A hub.
pub struct Hub {
    pub rangecache: Rangecache,
    pub network: Network,
}

impl Hub {
    /// Starts some hubs. If they are `balanced`, each of their addresses leads to all of them, a connection to any.
    pub async fn start_some(chance: &Chance, settings: &Settings, balanced: bool) -> Vec<Hub> {
        let mut hubs = Vec::new();
        let number_of_hubs = if balanced {
            MAX_HUBS
        } else {
            1 + chance.below(MAX_HUBS)
        };
        for number in 0..number_of_hubs {
            let neighbours = 0..if chance.one_in(2) { number } else { 0 };
            let place = Place::hub(number).with_neighbours(neighbours);
            let all = 0..MAX_HUBS;
            let to = if balanced { all } else { number..number + 1 };
            hubs.push(Hub::start_at(place, number, to, settings.as_hub(chance)).await);
        }
        hubs
    }

    /// Starts the hub with this number.
    pub async fn start(number: usize, settings: Settings) -> Hub {
        Self::start_at(Place::hub(number), number, number..number + 1, settings).await
    }

    async fn start_at(place: Place, number: usize, to: Range<usize>, settings: Settings) -> Hub {
        let to = to.map(|number| Place::hub(number).authority).collect();
        Hub {
            network: Network::start(Place::authority_of_hub(number), to),
            rangecache: Rangecache::start_at(place, settings).await,
        }
    }
}

/// The rangecaches of a simulation.
pub struct Tiers {
    /// The one that clients use.
    pub front: Rangecache,
    /// The rangecaches behind it, if its endpoints are not members.
    pub hubs: Vec<Hub>,
}

impl Tiers {
    /// A random rangecache.
    pub fn any(&self, chance: &Chance) -> &Rangecache {
        if self.hubs.is_empty() || chance.one_in(2) {
            return &self.front;
        }
        &self.any_hub(chance).rangecache
    }

    /// A random hub, of which there must be one.
    pub fn any_hub(&self, chance: &Chance) -> &Hub {
        &self.hubs[chance.below(self.hubs.len())]
    }

    /// Stops all of them. Returns whether all of their tasks have ended.
    pub async fn stop(self) -> bool {
        let mut has_ended = self.front.stop().await;
        for hub in self.hubs {
            has_ended &= hub.rangecache.stop().await;
        }
        has_ended
    }
}

/// The network between a rangecache and its hub.
pub struct Network {
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Whether no connection is accepted, and those that were open are cut.
    is_down: watch::Sender<bool>,
    /// Whether nothing arrives on the connections, in neither direction.
    is_silent: watch::Sender<bool>,
}

impl Network {
    /// Relays connections that are made to `from` to the hubs at `to`, as a balancer does.
    fn start(from: String, to: Vec<String>) -> Network {
        let state = Arc::<State>::default();
        let relaying = Arc::clone(&state);
        tokio::spawn(async move {
            let mut connections = simulated::listen(&from).expect("a simulated network");
            let mut hash = 0_u64;
            while let Some(mut near) = connections.recv().await {
                let state = Arc::clone(&relaying);
                // Not in turn: connections that are opened together would always lead to the same one.
                hash = hash.wrapping_add(0x9E37_79B9_7F4A_7C15);
                let choice = usize::try_from(hash >> 33).expect("is small") % to.len();
                let Ok(mut far) = proxy::connect(&to[choice]) else {
                    continue;
                };
                if *state.is_down.borrow() {
                    continue;
                }
                tokio::spawn(async move {
                    let mut copying = std::pin::pin!(copy_bidirectional(&mut near, &mut far));
                    let (mut down, mut silent) = (state.is_down.subscribe(), state.is_silent.subscribe());
                    loop {
                        let is_silent = *silent.borrow_and_update();
                        tokio::select! {
                            biased;
                            _ = down.wait_for(|down| *down) => return,
                            _ = silent.changed() => {}
                            _ = &mut copying, if !is_silent => return,
                        }
                    }
                });
            }
        });
        Network { state }
    }

    /// Cuts every connection, and accepts none while it is `down`.
    pub fn set_down(&self, down: bool) {
        self.state.is_down.send_replace(down);
    }

    /// Begins or ends to hold back what either side sends. It arrives afterwards, as TCP sends it again.
    pub fn set_silent(&self, silent: bool) {
        self.state.is_silent.send_replace(silent);
    }
}
