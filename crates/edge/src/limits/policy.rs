//! The rules by which holders get bytes. [`Part::permits`] alone decides.
//!
//! - **By connection and client.** Three quarters of the part are for all connections: the calls of one connection may hold half
//!   as much as is free of them. The last quarter is for connections that hold little: up to [`SMALL_BYTES`], and up to a
//!   sixteenth of what is free. While several clients are connected, the calls of one client, on all of its connections, may
//!   hold as much as is free, and an eighth of the part in any case: the more others hold, the less it gets.
//! - **In turn.** The size of a response is unknown until it is complete: if every holder could take bytes at any time, several
//!   large responses could fill the part together, and none of them could be completed. All holders share the first quarter.
//!   Above it, only the first one in the line grows, up to seven eighths; the others wait, and HTTP/2 flow control stops etcd
//!   from sending. A holder leaves the line when its response is complete. If the first one needs the bytes of those that wait
//!   for it, it is refused at once. The last eighth is for the first bytes of each holder, so that small responses do not wait
//!   for large ones.
//! - **By client.** Alone a client has at most seven eighths, and next to others an eighth of a part of which a half is used.

use std::collections::{HashMap, hash_map::Entry};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::line::Line;

/// Bytes up to which a connection may use the last quarter.
const SMALL_BYTES: u64 = 256 << 10;
/// A connection may use the last quarter up to its free bytes divided by this.
const SMALL_DIVISOR: u64 = 16;
/// Of the part, a client gets its own by this divisor however much others hold.
const CLIENT_DIVISOR: u64 = 8;
/// Holders that grow in turn share the part divided by this.
const SHARED_DIVISOR: u64 = 4;
/// A holder that grows in turn is small up to the part divided by this, and may then use the last eighth, which has room for 64 of them.
const SMALL_HOLDER_DIVISOR: u64 = 512;

/// Kind of held bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteKind {
    /// Header list and message of a request.
    Request,
    /// Bytes of a response that etcd has sent, or may send before its flow control stops it.
    Forwarded,
    /// Bytes of a response that wait for the client to read.
    Sending,
    /// RangeStreams that become unary responses, and pages that become RangeStreams.
    Converted,
    /// Responses that several reads share.
    Shared,
    /// Open page series with their entries.
    Series,
    /// Watches from memory: streams, watchers, and events on their way.
    Watch,
    /// The streams and watchers among them, which count in both.
    WatchStream,
}

/// Rule by which a holder may have more bytes of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    ByConnection,
    InTurn,
    ByClient,
    FirstCome,
}

/// Part of the ledger.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) policy: Policy,
    pub(super) max_bytes: u64,
    /// Bytes of all holders.
    pub(super) used: AtomicU64,
    /// Bytes by client, and the line. Only [`Policy::ByClient`] and [`Policy::InTurn`] look at them.
    pub(super) state: Mutex<PartState>,
    /// Notified when bytes are released and when a holder leaves the line; not with [`Policy::ByConnection`].
    pub(super) changed: Notify,
}

#[derive(Debug, Default)]
pub(super) struct PartState {
    /// Bytes of the clients that hold some.
    pub(super) by_client: HashMap<u64, u64>,
    /// Holders that are still growing. The first one stays it until it leaves: others enter behind it.
    pub(super) growing: Line<()>,
    /// Bytes of the holders in the line that wait.
    pub(super) waiting: u64,
}

/// Bytes that are asked for, and the bytes of all others.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ask {
    pub(super) more: u64,
    /// Bytes of all holders, without `more`.
    pub(super) used: u64,
    /// Bytes of the holder, of its connection and of its client, with `more`.
    pub(super) of_holder: u64,
    pub(super) of_connection: u64,
    pub(super) of_client: u64,
    /// Whether no other client is connected, or holds bytes of the part.
    pub(super) is_alone: bool,
    /// Whether the holder is the first in the line.
    pub(super) is_first: bool,
}

impl Part {
    pub(super) fn new(policy: Policy, max_bytes: u64) -> Part {
        Part {
            policy,
            max_bytes,
            used: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// Whether a holder may have what it asks for.
    pub(super) fn permits(&self, ask: &Ask) -> bool {
        let (max, sum) = (self.max_bytes, ask.used.saturating_add(ask.more));
        match self.policy {
            Policy::FirstCome => sum <= max,
            Policy::ByClient if ask.is_alone => sum <= max && ask.of_client <= max / 8 * 7,
            Policy::ByClient => sum <= max && (sum <= max / 2 || ask.of_client <= max / CLIENT_DIVISOR),
            Policy::InTurn if ask.of_holder <= max / SMALL_HOLDER_DIVISOR => sum <= max,
            Policy::InTurn if ask.is_first => sum <= max / 8 * 7,
            Policy::InTurn => sum <= max / SHARED_DIVISOR,
            Policy::ByConnection => {
                let for_all = max - max / 4;
                let is_fair = |bound: u64| {
                    let fair = bound.saturating_sub(ask.used);
                    ask.is_alone || ask.of_client <= fair.max(max / CLIENT_DIVISOR)
                };
                (ask.used.saturating_add(ask.of_connection.saturating_mul(2)) <= for_all && is_fair(for_all))
                    || (ask.of_connection <= SMALL_BYTES
                        && ask.used.saturating_add(ask.of_connection * SMALL_DIVISOR) <= max
                        && is_fair(max))
            }
        }
    }

    /// Whether the policy needs [`Part::state`].
    pub(super) fn is_locked(&self) -> bool {
        matches!(self.policy, Policy::ByClient | Policy::InTurn)
    }

    /// Adds what `ask` is for, if the holder may have it.
    pub(super) fn take(&self, ask: &Ask) -> bool {
        let taken = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
                self.permits(&Ask { used, ..*ask }).then_some(used + ask.more)
            });
        taken.is_ok()
    }
}

impl PartState {
    /// Adds bytes of a client.
    pub(super) fn add(&mut self, client: u64, bytes: u64) {
        *self.by_client.entry(client).or_default() += bytes;
    }

    /// Releases bytes of a client.
    pub(super) fn release(&mut self, client: u64, bytes: u64) {
        if let Entry::Occupied(mut of_client) = self.by_client.entry(client) {
            *of_client.get_mut() -= bytes;
            if *of_client.get() == 0 {
                of_client.remove();
            }
        }
    }
}
