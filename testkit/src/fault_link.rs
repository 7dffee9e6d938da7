//! A TCP link that fails on command: between rangecache and a member of etcd, or between members.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// Chunks of up to 16 KiB buffered on a slow link, per direction of each connection.
const QUEUE: usize = 256;
/// Delay of a lost packet until its retransmission.
const RETRANSMISSION: Duration = Duration::from_millis(220);

/// Treatment of the bytes sent over the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Condition {
    /// Forwards all bytes at once.
    Normal,
    /// Resets every open connection, and every new one at once.
    Cut,
    /// Like [`Condition::Cut`], but only for the connections of the member with this id.
    CutFrom(u64),
    /// Forwards nothing in either direction; open connections stay open, and new ones are accepted.
    HalfOpen,
    /// Accepts new connections, but connects them to the target only once the condition changes; open ones are normal.
    NewConnectionsWait,
    /// Delays all bytes, in each direction.
    Slow(Duration),
    /// Delays one chunk in twenty by a retransmission, and resets the connection at one in a thousand.
    Lossy,
    /// Delays bytes from etcd on connections with a feed; all others are normal.
    SlowFeeds(Duration),
}

/// A TCP link to one target. Its connections are reset when it is dropped.
pub struct FaultLink {
    url: String,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

struct State {
    condition: watch::Sender<Condition>,
    /// Connections that were accepted.
    connections: AtomicUsize,
    /// Connections on which a feed was opened.
    feeds: AtomicUsize,
    /// Bytes from the target on these connections.
    feed_bytes: AtomicU64,
    /// A connection that carries more bytes from the target is reset, as long as `cuts_left` is above 0.
    cut_after_bytes: u64,
    cuts_left: AtomicU64,
    cuts: AtomicU64,
}

impl FaultLink {
    /// A link to `url`, such as `http://127.0.0.1:2379`; `seed` determines the losses of [`Condition::Lossy`].
    pub async fn to(url: &str, seed: u64) -> Self {
        Self::start(url, seed, u64::MAX, 0).await
    }

    /// A link to `url` that resets up to `cuts` connections, each once it has carried `cut_after_bytes` bytes from the
    /// target. After each cut the condition is [`Condition::NewConnectionsWait`] until [`FaultLink::set`].
    pub async fn cutting_after(url: &str, cut_after_bytes: u64, cuts: u64) -> Self {
        Self::start(url, 0, cut_after_bytes, cuts).await
    }

    async fn start(url: &str, seed: u64, cut_after_bytes: u64, cuts: u64) -> Self {
        let target = url.strip_prefix("http://").expect("an http:// URL").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("is bound"));
        let state = Arc::new(State {
            condition: watch::Sender::new(Condition::Normal),
            connections: AtomicUsize::new(0),
            feeds: AtomicUsize::new(0),
            feed_bytes: AtomicU64::new(0),
            cut_after_bytes,
            cuts_left: AtomicU64::new(cuts),
            cuts: AtomicU64::new(0),
        });
        let accepting = tokio::spawn(accept(listener, target, state.clone(), seed));
        Self {
            url,
            state,
            accepting,
        }
    }

    /// URL to connect to in place of the target's.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Number of connections accepted so far.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Changes the condition, for open connections and bytes in flight too.
    pub fn set(&self, condition: Condition) {
        self.state.condition.send_replace(condition);
    }

    /// Number of connections reset because of their bytes so far.
    pub fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }

    /// Number of feeds opened over the link so far.
    pub fn feeds(&self) -> usize {
        self.state.feeds.load(Ordering::SeqCst)
    }

    /// Number of bytes that the target has sent on connections whose first message opened a feed.
    pub fn feed_bytes(&self) -> u64 {
        self.state.feed_bytes.load(Ordering::SeqCst)
    }
}

impl Drop for FaultLink {
    fn drop(&mut self) {
        self.set(Condition::Cut);
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, target: String, state: Arc<State>, seed: u64) {
    for number in 0.. {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        state.connections.fetch_add(1, Ordering::SeqCst);
        let (target, state, random) = (
            target.clone(),
            state.clone(),
            StdRng::seed_from_u64(seed ^ number),
        );
        tokio::spawn(async move {
            // Either side may be unreachable or close the connection: both are normal for a link.
            let _ = carry(client, &target, &state, random).await;
        });
    }
}

/// Forwards one connection until either side or the link closes it.
async fn carry(
    mut client: TcpStream,
    target: &str,
    state: &Arc<State>,
    mut random: StdRng,
) -> std::io::Result<()> {
    let mut condition = state.condition.subscribe();
    // The link outlives its connections, or cuts them: the channel is open.
    let _ = condition
        .wait_for(|condition| *condition != Condition::NewConnectionsWait)
        .await;
    if *condition.borrow() == Condition::Cut {
        return client.set_zero_linger();
    }
    let mut server = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let connection = Arc::new(Origin::default());
    let mut direction = |sniffer: Option<Sniffer>| Direction {
        state: state.clone(),
        connection: connection.clone(),
        sniffer,
        carried_bytes: 0,
        random: StdRng::seed_from_u64(random.random()),
    };
    let (up, down) = (direction(Some(Sniffer::default())), direction(None));
    let ended = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        tokio::select! {
            ended = up.pump(from_client, to_server) => ended,
            ended = down.pump(from_server, to_client) => ended,
            _ = condition.wait_for(|condition| connection.is_cut(*condition)) => Err(ErrorKind::ConnectionReset.into()),
        }
    };
    if ended.is_err() {
        // A reset, not a close: a close would still deliver the bytes in flight.
        client.set_zero_linger()?;
        server.set_zero_linger()?;
    }
    ended
}

/// Properties of a connection, as its first message shows them.
#[derive(Default)]
struct Origin {
    is_feed: AtomicBool,
    /// Id of the member that opened the connection; 0 if none did.
    member: AtomicU64,
}

impl Origin {
    fn is_cut(&self, condition: Condition) -> bool {
        match condition {
            Condition::Cut => true,
            Condition::CutFrom(member) => self.member.load(Ordering::SeqCst) == member,
            _ => false,
        }
    }
}

struct Direction {
    state: Arc<State>,
    connection: Arc<Origin>,
    /// Reads the bytes from the client; `None` in the other direction.
    sniffer: Option<Sniffer>,
    carried_bytes: u64,
    random: StdRng,
}

impl Direction {
    async fn pump(mut self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> std::io::Result<()> {
        let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(QUEUE);
        let mut condition = self.state.condition.subscribe();
        let write = async move {
            while let Some((due, bytes)) = queued.recv().await {
                sleep_until(due).await;
                // The link outlives its connections, or cuts them: the channel is open.
                let _ = condition
                    .wait_for(|condition| *condition != Condition::HalfOpen)
                    .await;
                to.write_all(&bytes).await?;
            }
            Ok(())
        };
        let read = async move {
            let mut bytes = vec![0; 16 << 10];
            loop {
                let read = from.read(&mut bytes).await?;
                if read == 0 {
                    return Ok(());
                }
                let delay = self.delay(&bytes[..read]).ok_or(ErrorKind::ConnectionReset)?;
                if queue
                    .send((Instant::now() + delay, bytes[..read].to_vec()))
                    .await
                    .is_err()
                {
                    return Ok(());
                }
            }
        };
        // Both run to their end: after the last byte was read, the queue still has to be written.
        tokio::try_join!(write, read).map(|_| ())
    }

    /// Delay of these bytes; `None` when the connection is to be reset in their place.
    fn delay(&mut self, bytes: &[u8]) -> Option<Duration> {
        match self.sniffer.as_mut().and_then(|sniffer| sniffer.scan(bytes)) {
            Some(FirstMessage::Feed) => {
                self.connection.is_feed.store(true, Ordering::SeqCst);
                self.state.feeds.fetch_add(1, Ordering::SeqCst);
            }
            Some(FirstMessage::Member(id)) => self.connection.member.store(id, Ordering::SeqCst),
            None => {}
        }
        let is_downstream = self.sniffer.is_none();
        if is_downstream && self.reaches_cut(bytes.len()) {
            return None;
        }
        let condition = *self.state.condition.borrow();
        let is_feed = is_downstream && self.connection.is_feed.load(Ordering::SeqCst);
        if is_feed {
            self.state
                .feed_bytes
                .fetch_add(bytes.len() as u64, Ordering::SeqCst);
        }
        match condition {
            condition if self.connection.is_cut(condition) => None,
            Condition::Slow(delay) => Some(delay),
            Condition::SlowFeeds(delay) if is_feed => Some(delay),
            Condition::Lossy => match self.random.random_range(0..1000) {
                0 => None,
                1..50 => Some(RETRANSMISSION),
                _ => Some(Duration::ZERO),
            },
            _ => Some(Duration::ZERO),
        }
    }

    /// Counts bytes from the target; true when they make this connection one to cut.
    fn reaches_cut(&mut self, bytes: usize) -> bool {
        self.carried_bytes += bytes as u64;
        let take_one = |left: u64| left.checked_sub(1);
        let cuts = self.carried_bytes > self.state.cut_after_bytes
            && self
                .state
                .cuts_left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take_one)
                .is_ok();
        if cuts {
            // Before the count: a test that has seen the count may set another condition.
            self.state.condition.send_replace(Condition::NewConnectionsWait);
            self.state.cuts.fetch_add(1, Ordering::SeqCst);
        }
        cuts
    }
}

/// Finds the origin of a connection by its first message: only a feed requests a watch with fragments, and members of
/// etcd send each other their ids in an HTTP/1 header.
#[derive(Default)]
struct Sniffer {
    buffer: Vec<u8>,
    /// HTTP/2's preface has been read.
    begun: bool,
    done: bool,
}

enum FirstMessage {
    Feed,
    Member(u64),
}

impl Sniffer {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const MEMBER: &str = "X-Server-From: ";
    /// Bound on an HTTP/1 head; no member's id is searched for after it.
    const HEAD_BYTES: usize = 8 << 10;
    const FRAME_HEADER: usize = 9;
    const DATA: u8 = 0;

    /// The first message, if these bytes complete it and show its origin.
    fn scan(&mut self, bytes: &[u8]) -> Option<FirstMessage> {
        if self.done {
            return None;
        }
        self.buffer.extend_from_slice(bytes);
        if !self.begun && self.buffer.len() >= Self::PREFACE.len() {
            if !self.buffer.starts_with(Self::PREFACE) {
                return self.member();
            }
            self.buffer.drain(..Self::PREFACE.len());
            self.begun = true;
        }
        while self.begun && self.buffer.len() >= Self::FRAME_HEADER {
            let [a, b, c, kind, ..] = self.buffer[..] else {
                break;
            };
            let end = Self::FRAME_HEADER + u32::from_be_bytes([0, a, b, c]) as usize;
            if self.buffer.len() < end {
                break;
            }
            let frame: Vec<_> = self.buffer.drain(..end).collect();
            if kind == Self::DATA && end > Self::FRAME_HEADER {
                self.done = true;
                return is_fragmented_watch(&frame[Self::FRAME_HEADER..]).then_some(FirstMessage::Feed);
            }
        }
        None
    }

    fn member(&mut self) -> Option<FirstMessage> {
        self.done = self.buffer.len() > Self::HEAD_BYTES;
        let head = String::from_utf8_lossy(&self.buffer);
        let (_, rest) = head.split_once(Self::MEMBER)?;
        let (id, _) = rest.split_once("\r\n")?;
        let id = u64::from_str_radix(id, 16).ok()?;
        self.done = true;
        Some(FirstMessage::Member(id))
    }
}

/// gRPC's prefix, then a WatchRequest whose create_request (1) ends in fragment (8).
fn is_fragmented_watch(message: &[u8]) -> bool {
    message.get(5) == Some(&0x0a) && message.ends_with(&[8 << 3, 1])
}
