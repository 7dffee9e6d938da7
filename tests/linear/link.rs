//! A TCP link that can fail: between rangecache and a member of etcd, or between members.

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

/// Pieces of up to 16 KiB that may wait on a slow link, in one direction of one connection.
const QUEUE: usize = 256;
/// A packet that is lost comes again after about so long.
const RETRANSMISSION: Duration = Duration::from_millis(220);

/// What the link does with what is sent over it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weather {
    /// Passes it on.
    Fine,
    /// Resets every connection, and every new one at once.
    Cut,
    /// As [`Weather::Cut`], but only the connections of the member with this id.
    CutFrom(u64),
    /// Passes nothing on, in either direction; connections stay open, and new ones open too.
    HalfOpen,
    /// Passes it on later, in each direction.
    Slow(Duration),
    /// One piece in twenty is late by a retransmission, and one in a thousand is the last of its connection.
    Lossy,
    /// What etcd sends on connections with a feed comes later; all else passes.
    SlowFeeds(Duration),
}

/// One link. Its connections end when it is dropped.
pub struct Link {
    url: String,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

struct State {
    weather: watch::Sender<Weather>,
    /// Connections on which a feed was opened.
    feeds: AtomicUsize,
}

impl Link {
    /// A link to `url`, such as `http://127.0.0.1:2379`; `seed` decides what a lossy one loses.
    pub async fn to(url: &str, seed: u64) -> Self {
        let target = url.strip_prefix("http://").expect("an http:// URL").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("is bound"));
        let state = Arc::new(State {
            weather: watch::Sender::new(Weather::Fine),
            feeds: AtomicUsize::new(0),
        });
        let accepting = tokio::spawn(accept(listener, target, state.clone(), seed));
        Self {
            url,
            state,
            accepting,
        }
    }

    /// Where to connect instead.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Changes the weather, also for what is under way.
    pub fn set(&self, weather: Weather) {
        self.state.weather.send_replace(weather);
    }

    /// How many feeds were opened over it so far.
    pub fn feeds(&self) -> usize {
        self.state.feeds.load(Ordering::SeqCst)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.set(Weather::Cut);
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, target: String, state: Arc<State>, seed: u64) {
    for number in 0.. {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        let (target, state, random) = (
            target.clone(),
            state.clone(),
            StdRng::seed_from_u64(seed ^ number),
        );
        tokio::spawn(async move {
            // Ends with the connection: a side that cannot be reached, or has hung up, is what links have.
            let _ = carry(client, &target, &state, random).await;
        });
    }
}

/// Carries one connection until either side ends it, or the link does.
async fn carry(
    mut client: TcpStream,
    target: &str,
    state: &Arc<State>,
    mut random: StdRng,
) -> std::io::Result<()> {
    let mut weather = state.weather.subscribe();
    if *weather.borrow() == Weather::Cut {
        return client.set_zero_linger();
    }
    let mut server = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let connection = Arc::new(Seen::default());
    let mut direction = |sniffer: Option<Sniffer>| Direction {
        state: state.clone(),
        connection: connection.clone(),
        sniffer,
        random: StdRng::seed_from_u64(random.random()),
    };
    let (up, down) = (direction(Some(Sniffer::default())), direction(None));
    let ended = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        tokio::select! {
            ended = up.pump(from_client, to_server) => ended,
            ended = down.pump(from_server, to_client) => ended,
            _ = weather.wait_for(|weather| connection.is_cut(*weather)) => Err(ErrorKind::ConnectionReset.into()),
        }
    };
    if ended.is_err() {
        // What was lost on the way is not delivered at the close either.
        client.set_zero_linger()?;
        server.set_zero_linger()?;
    }
    ended
}

/// What has been seen of a connection.
#[derive(Default)]
struct Seen {
    is_feed: AtomicBool,
    /// The member that made it; 0 if none did.
    member: AtomicU64,
}

impl Seen {
    fn is_cut(&self, weather: Weather) -> bool {
        match weather {
            Weather::Cut => true,
            Weather::CutFrom(member) => self.member.load(Ordering::SeqCst) == member,
            _ => false,
        }
    }
}

struct Direction {
    state: Arc<State>,
    connection: Arc<Seen>,
    /// Looks at what the client sends; `None` on the way back.
    sniffer: Option<Sniffer>,
    random: StdRng,
}

impl Direction {
    async fn pump(mut self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> std::io::Result<()> {
        let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(QUEUE);
        let mut weather = self.state.weather.subscribe();
        let write = async move {
            while let Some((due, bytes)) = queued.recv().await {
                sleep_until(due).await;
                // The link outlives its connections, or cuts them.
                let _ = weather.wait_for(|weather| *weather != Weather::HalfOpen).await;
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
                let late = self.lateness(&bytes[..read]).ok_or(ErrorKind::ConnectionReset)?;
                if queue
                    .send((Instant::now() + late, bytes[..read].to_vec()))
                    .await
                    .is_err()
                {
                    return Ok(());
                }
            }
        };
        // After the last byte was read, what is queued is still to be written.
        tokio::try_join!(write, read).map(|_| ())
    }

    /// How much later this piece comes; `None` when it is lost, and its connection with it.
    fn lateness(&mut self, bytes: &[u8]) -> Option<Duration> {
        match self.sniffer.as_mut().and_then(|sniffer| sniffer.take(bytes)) {
            Some(Asks::Feed) => {
                self.connection.is_feed.store(true, Ordering::SeqCst);
                self.state.feeds.fetch_add(1, Ordering::SeqCst);
            }
            Some(Asks::Member(id)) => self.connection.member.store(id, Ordering::SeqCst),
            None => {}
        }
        let weather = *self.state.weather.borrow();
        let is_feed = self.sniffer.is_none() && self.connection.is_feed.load(Ordering::SeqCst);
        match weather {
            weather if self.connection.is_cut(weather) => None,
            Weather::Slow(late) => Some(late),
            Weather::SlowFeeds(late) if is_feed => Some(late),
            Weather::Lossy => match self.random.random_range(0..1000) {
                0 => None,
                1..50 => Some(RETRANSMISSION),
                _ => Some(Duration::ZERO),
            },
            _ => Some(Duration::ZERO),
        }
    }
}

/// Finds out who makes a connection, by the first message on it: nobody but a feed asks for a watch in fragments, and
/// members of etcd name themselves to each other, in HTTP/1.
#[derive(Default)]
struct Sniffer {
    buffer: Vec<u8>,
    /// HTTP/2's preface is past.
    begun: bool,
    done: bool,
}

/// What a first message asks.
enum Asks {
    Feed,
    Member(u64),
}

impl Sniffer {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const MEMBER: &str = "X-Server-From: ";
    /// Past this no member names itself.
    const HEAD_BYTES: usize = 8 << 10;
    const FRAME_HEADER: usize = 9;
    const DATA: u8 = 0;

    /// What these bytes complete, if that can be told.
    fn take(&mut self, bytes: &[u8]) -> Option<Asks> {
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
                return is_fragmented_watch(&frame[Self::FRAME_HEADER..]).then_some(Asks::Feed);
            }
        }
        None
    }

    fn member(&mut self) -> Option<Asks> {
        self.done = self.buffer.len() > Self::HEAD_BYTES;
        let head = String::from_utf8_lossy(&self.buffer);
        let (_, rest) = head.split_once(Self::MEMBER)?;
        let (id, _) = rest.split_once("\r\n")?;
        let id = u64::from_str_radix(id, 16).ok()?;
        self.done = true;
        Some(Asks::Member(id))
    }
}

/// gRPC's prefix, then a WatchRequest whose create_request (1) ends in fragment (8).
fn is_fragmented_watch(message: &[u8]) -> bool {
    message.get(5) == Some(&0x0a) && message.ends_with(&[8 << 3, 1])
}
