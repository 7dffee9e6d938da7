//! The misbehaving client: a process of its own at the lowest priority, so that its own need for CPU time does not count.
//! It runs until it is killed, and prints its counts once a second as a line of JSON.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::task::JoinSet;

use crate::admin::{self, Admin};
use crate::args::{Attack, Behaviour};
use crate::counts::Counts;
use crate::held_calls::{self, Held, Unread};
use crate::lists;
use crate::raw_http2::{self, Raw};
use crate::sockets;

/// Connections of the behaviours that are about their number.
const MANY_CONNECTIONS: usize = 4_000;
/// Connections whose receive windows are filled.
const STUCK_CONNECTIONS: usize = 300;
/// Connections of unfinished HTTP/1 requests, WebSockets and bursts, and to the admin port.
const HTTP1_CONNECTIONS: usize = 1_000;
/// Connections of scans.
const SCANNING_CONNECTIONS: usize = 16;
/// Pause between two writes of 100 KB: about 5 MB a second.
const OVERWRITE_PAUSE: Duration = Duration::from_millis(20);

/// Misbehaves until killed.
pub(crate) async fn run(attack: &Attack) -> Result<()> {
    let counts = Arc::new(Counts::default());
    let mut tasks = JoinSet::new();
    for behaviour in &attack.behaviours {
        start(*behaviour, attack, &counts, &mut tasks);
    }
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tick.tick().await;
        println!("{}", serde_json::to_string(&counts.read())?);
    }
}

fn start(behaviour: Behaviour, attack: &Attack, counts: &Arc<Counts>, tasks: &mut JoinSet<()>) {
    let client = || attack.client.clone();
    let count = || Arc::clone(counts);
    match behaviour {
        // 3 values of 4,032 bytes, as HPACK counts them; 4 are too long with the other fields.
        Behaviour::HeaderBlocks => raw(attack, Raw::HeaderBlocks { references: 3 }, counts, tasks),
        Behaviour::HugeHeaderBlocks => raw(attack, Raw::HeaderBlocks { references: 255 }, counts, tasks),
        Behaviour::WatchHeaders => raw(attack, Raw::WatchHeaders { references: 240 }, counts, tasks),
        Behaviour::ResetFlood => raw(attack, Raw::Resets, counts, tasks),
        Behaviour::PingFlood => raw(attack, Raw::Pings, counts, tasks),
        Behaviour::SettingsFlood => raw(attack, Raw::Settings, counts, tasks),
        Behaviour::UnfinishedRanges => held(attack, Held::RANGES, counts, tasks),
        Behaviour::UnfinishedPuts => held(attack, Held::PUTS, counts, tasks),
        Behaviour::UnreadValues => held(attack, Held::unread(Unread::Value), counts, tasks),
        Behaviour::UnreadLists => held(attack, Held::unread(Unread::List), counts, tasks),
        Behaviour::UnreadStreams => held(attack, Held::unread(Unread::Stream), counts, tasks),
        Behaviour::UnreadScans => held(attack, Held::unread(Unread::Scan), counts, tasks),
        Behaviour::Scans => {
            for _ in 0..SCANNING_CONNECTIONS {
                tasks.spawn(lists::scan(client(), count()));
            }
        }
        Behaviour::AbandonedPages => held(attack, Held::AbandonedPages, counts, tasks),
        Behaviour::SlowSnapshots => {
            tasks.spawn(held_calls::overwrite(client(), OVERWRITE_PAUSE));
            held(attack, Held::SLOW_LISTS, counts, tasks);
        }
        Behaviour::UnreadWatches => {
            // Slower: each write is an event on every watch.
            tasks.spawn(held_calls::overwrite(client(), 50 * OVERWRITE_PAUSE));
            held(attack, Held::unread(Unread::Watch), counts, tasks);
        }
        Behaviour::StuckWindows => {
            for _ in 0..STUCK_CONNECTIONS {
                tasks.spawn(held_calls::run(client(), Held::STUCK_WATCHES, count()));
            }
        }
        Behaviour::SilentConnections => {
            for _ in 0..MANY_CONNECTIONS {
                tasks.spawn(sockets::silent(client(), count()));
            }
        }
        Behaviour::MuteHandshakes => {
            for _ in 0..MANY_CONNECTIONS {
                tasks.spawn(sockets::silent(attack.tls.clone(), count()));
            }
        }
        Behaviour::HalfHellos => {
            for _ in 0..MANY_CONNECTIONS {
                tasks.spawn(sockets::half_hello(attack.tls.clone(), count()));
            }
        }
        Behaviour::HalfHeads => {
            for _ in 0..MANY_CONNECTIONS {
                tasks.spawn(sockets::half_head(client(), count()));
            }
        }
        Behaviour::UnfinishedHttp1 => {
            for _ in 0..HTTP1_CONNECTIONS {
                tasks.spawn(sockets::unfinished_http1(client(), count()));
            }
        }
        Behaviour::WebSockets => {
            for _ in 0..HTTP1_CONNECTIONS {
                tasks.spawn(sockets::web_socket(client(), count()));
            }
        }
        Behaviour::Http1Bursts => {
            for _ in 0..HTTP1_CONNECTIONS {
                tasks.spawn(sockets::http1_bursts(client(), count()));
            }
        }
        Behaviour::ListEverything => {
            for _ in 0..attack.connections {
                tasks.spawn(lists::run(client(), count()));
            }
        }
        Behaviour::AdminPort => {
            for _ in 0..HTTP1_CONNECTIONS {
                tasks.spawn(sockets::unfinished_admin(attack.admin.clone(), count()));
            }
            for _ in 0..attack.connections {
                tasks.spawn(sockets::scrape(attack.admin.clone(), count()));
            }
        }
        Behaviour::AbandonedAdmin => admin(attack, Admin::Abandons, counts, tasks),
        Behaviour::UnreadAdmin => admin(attack, Admin::ReadsNothing, counts, tasks),
    }
}

fn admin(attack: &Attack, admin: Admin, counts: &Arc<Counts>, tasks: &mut JoinSet<()>) {
    for _ in 0..attack.connections {
        tasks.spawn(admin::run(attack.admin.clone(), admin, Arc::clone(counts)));
    }
}

fn raw(attack: &Attack, raw: Raw, counts: &Arc<Counts>, tasks: &mut JoinSet<()>) {
    for _ in 0..attack.connections {
        tasks.spawn(raw_http2::run(attack.client.clone(), raw, Arc::clone(counts)));
    }
}

fn held(attack: &Attack, held: Held, counts: &Arc<Counts>, tasks: &mut JoinSet<()>) {
    for _ in 0..attack.connections {
        tasks.spawn(held_calls::run(attack.client.clone(), held, Arc::clone(counts)));
    }
}
