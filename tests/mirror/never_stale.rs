//! Writers at full speed directly on etcd, readers through rangecache: no read returns a state older than what was
//! acknowledged before the read began, or half a transaction.
//!
//! `STALE_SECONDS` sets the duration of each test.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use testkit::effort::part_of;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::http;
use testkit::pb::{RangeRequest, RangeResponse, RequestOp};
use testkit::proxy::Rangecache;
use testkit::register::{Acknowledged, Bank, Register, part};
use testkit::wait::SOON;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::EXCLUSIVE;

const PREFIX: &str = "/data/";
const READERS: u64 = 6;

/// State shared by writers and readers.
struct Scene {
    registers: Vec<Register>,
    bank: Bank,
    stop: AtomicBool,
    /// The newest revision in the header of any response of this rangecache.
    shown: AtomicI64,
}

impl Scene {
    fn new() -> Self {
        let sizes = [1, 1, 1, 8, 20];
        let register = |(n, keys)| Register::new(format!("{PREFIX}register-{n}/"), keys);
        Self {
            registers: sizes.into_iter().enumerate().map(register).collect(),
            bank: Bank::new(format!("{PREFIX}bank/")),
            stop: AtomicBool::new(false),
            shown: AtomicI64::new(0),
        }
    }

    /// Checks the revision in a response's header, and records it.
    fn check_header(&self, answer: &RangeResponse, oldest: i64) -> Result<(), String> {
        let revision = answer.revision();
        self.shown.fetch_max(revision, Ordering::SeqCst);
        if revision >= oldest {
            Ok(())
        } else {
            Err(format!("header at {revision}, below {oldest}: {answer:?}"))
        }
    }

    /// Sends a linearizable read of one register, and checks its response.
    async fn read_register(&self, client: &Client, random: &mut StdRng) -> Result<(), String> {
        let register = &self.registers[random.random_range(0..self.registers.len())];
        let list = RangeRequest::prefix(register.prefix());
        let (kind, keys) = (random.random_range(0..5), register.keys());
        let request = match kind {
            0 => RangeRequest::one(register.key(random.random_range(0..keys))),
            1 => list,
            2 => RangeRequest {
                keys_only: true,
                ..list
            },
            3 => RangeRequest {
                count_only: true,
                ..list
            },
            _ => RangeRequest { limit: 3, ..list },
        };
        let oldest = register.acknowledged();
        let answer = ask(client, &request).await?;
        self.check_header(&answer, oldest.revision())?;
        let count = usize::try_from(answer.count).unwrap();
        match kind {
            0 => register.check(&answer.kvs, 1, oldest, false),
            1 => register.check(&answer.kvs, keys, oldest, false),
            2 => register.check(&answer.kvs, keys, oldest, true),
            3 => register.check_count(count, keys, oldest),
            _ => {
                register.check_count(count, keys, oldest)?;
                if answer.more != (count > 3) {
                    return Err(format!("more {} with count {count}", answer.more));
                }
                register.check(&answer.kvs, keys.min(3), oldest, false)
            }
        }
    }

    /// Reads all keys; a serializable read may be stale, but not older than an earlier response.
    async fn read_all(&self, client: &Client, serializable: bool) -> Result<(), String> {
        let floor_of = |register: &Register| {
            if serializable {
                register.shown()
            } else {
                register.acknowledged()
            }
        };
        let shown = self.shown.load(Ordering::SeqCst);
        let oldest_states: Vec<Acknowledged> = self.registers.iter().map(floor_of).collect();
        let answer = ask(
            client,
            &RangeRequest {
                serializable,
                ..RangeRequest::prefix(PREFIX)
            },
        )
        .await?;
        let oldest = oldest_states
            .iter()
            .map(|oldest| oldest.revision())
            .fold(shown, i64::max);
        self.check_header(&answer, oldest)?;
        for (register, oldest) in self.registers.iter().zip(oldest_states) {
            register.check(part(&answer, register.prefix()), register.keys(), oldest, false)?;
        }
        self.bank.check(part(&answer, self.bank.prefix()))
    }

    /// Reads at a revision seen before; the response must equal etcd's state at it.
    async fn read_pinned(&self, client: &Client, etcd: &Client, random: &mut StdRng) -> Result<(), String> {
        let back = random.random_range(0..200);
        let revision = self.shown.load(Ordering::SeqCst) - back;
        if revision < 2 {
            return Ok(());
        }
        let request = RangeRequest {
            revision,
            ..RangeRequest::prefix(PREFIX)
        };
        let answer = ask(client, &request).await?;
        // Its header has the store's revision, not older than in earlier responses.
        self.check_header(&answer, revision + back)?;
        let expected = ask(etcd, &request).await?;
        if answer.kvs == expected.kvs && answer.count == expected.count {
            return Ok(());
        }
        Err(format!(
            "at revision {revision}: {:?}\n etcd has {:?}",
            answer.kvs, expected.kvs
        ))
    }

    async fn read(&self, client: &Client, etcd: &Client, seed: u64) -> Result<u64, String> {
        let mut random = StdRng::seed_from_u64(seed);
        let mut reads = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let read = match random.random_range(0..20) {
                0..=2 => self.read_all(client, false).await,
                3..=5 => self.read_all(client, true).await,
                6 => self.read_pinned(client, etcd, &mut random).await,
                _ => self.read_register(client, &mut random).await,
            };
            if read.is_err() {
                self.stop.store(true, Ordering::Relaxed);
            }
            read?;
            reads += 1;
        }
        Ok(reads)
    }
}

async fn ask(client: &Client, request: &RangeRequest) -> Result<RangeResponse, String> {
    client
        .range(request)
        .await
        .map_err(|status| format!("{request:?}: {status:?}"))
}

fn seconds() -> Duration {
    let seconds = std::env::var("STALE_SECONDS")
        .map_or_else(|_| part_of(30), |seconds| seconds.parse().expect("a number"));
    Duration::from_secs(seconds)
}

/// Writes as fast as etcd accepts under a prefix that is not read.
async fn write_elsewhere(etcd: &Client, stop: &AtomicBool) -> Result<(), String> {
    for n in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let put = etcd.put(format!("/other/{}", n % 1000), n.to_string()).await;
        put.map_err(|status| format!("etcd refused a write: {status:?}"))?;
    }
    Ok(())
}

/// Runs writers and readers. With a `pause` the registers' writers wait that long between writes while others write
/// outside the prefix at full speed, so that a mirror of the prefix sees the newest revision only by requesting
/// progress.
async fn reads_are_never_stale(etcd: &Etcd, rangecache: &Rangecache, pause: Option<Duration>) {
    let scene = Arc::new(Scene::new());
    scene.bank.open(&etcd.client().await).await;
    // From now on a serializable read, too, has the accounts: it is not older than this one.
    let opened = scene.read_all(&rangecache.client().await, false).await;
    opened.expect("the accounts are read");
    let mut tasks = JoinSet::new();
    for n in 0..scene.registers.len() {
        let (scene, etcd) = (scene.clone(), etcd.client().await);
        tasks.spawn(async move {
            scene.registers[n]
                .write(&etcd, pause, &scene.stop)
                .await
                .map(|()| 0)
        });
    }
    for _ in 0..2 {
        let (scene, etcd) = (scene.clone(), etcd.client().await);
        match pause {
            None => tasks.spawn(async move { scene.bank.write(&etcd, &scene.stop).await.map(|()| 0) }),
            Some(_) => tasks.spawn(async move { write_elsewhere(&etcd, &scene.stop).await.map(|()| 0) }),
        };
        if pause.is_none() {
            break;
        }
    }
    for reader in 0..READERS {
        let (scene, client, etcd) = (scene.clone(), rangecache.client().await, etcd.client().await);
        tasks.spawn(async move { scene.read(&client, &etcd, reader).await });
    }

    let timer = scene.clone();
    tasks.spawn(async move {
        tokio::time::sleep(seconds()).await;
        timer.stop.store(true, Ordering::Relaxed);
        Ok(0)
    });
    let mut reads = 0;
    while let Some(ended) = tasks.join_next().await {
        match ended.expect("no task panics") {
            Ok(done) => reads += done,
            Err(wrong) => panic!("{}", wrong.chars().take(3_000).collect::<String>()),
        }
    }

    let outcomes = rangecache.outcomes().await;
    println!(
        "{reads} reads up to revision {}: {outcomes:?}",
        scene.shown.load(Ordering::SeqCst)
    );
    assert!(reads > 30 * seconds().as_secs(), "too few reads for a result");
    let from_memory = outcomes.memory_answers() * 100 / outcomes.total();
    assert!(from_memory >= 80, "only {from_memory} % came from memory");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_the_whole_keyspace_are_never_stale() {
    let _exclusive = EXCLUSIVE.lock().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    reads_are_never_stale(&etcd, &rangecache, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_a_quiet_prefix_are_never_stale() {
    let _exclusive = EXCLUSIVE.lock().await;
    let etcd = Etcd::start(Version::V3_5).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .start()
        .await;
    reads_are_never_stale(&etcd, &rangecache, Some(Duration::from_millis(50))).await;
}

/// Deletion whose events exceed one response of etcd's watch: no read sees a part of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revision_of_many_events_is_seen_whole() {
    const KEYS: usize = 3_000;
    let _exclusive = EXCLUSIVE.lock().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut readers = JoinSet::new();
    let direct = etcd.client().await;
    // The event of a delete holds its key alone: these keys add up to about 3 MB.
    let key = |n: usize| format!("{PREFIX}{n:05}/{}", "k".repeat(1_000));
    for n in 0..KEYS {
        direct.put(key(n), "").await.expect("etcd writes");
    }
    for _ in 0..4 {
        let (client, stop) = (rangecache.client().await, stop.clone());
        readers.spawn(async move {
            let count = RangeRequest {
                count_only: true,
                ..RangeRequest::prefix(PREFIX)
            };
            let mut deleted = false;
            while !stop.load(Ordering::Relaxed) || !deleted {
                let answer = client.range(&count).await.expect("rangecache answers");
                assert!(
                    answer.count == 0 || answer.count == KEYS as i64,
                    "{} of {KEYS} keys",
                    answer.count
                );
                assert!(!deleted || answer.count == 0, "deleted keys stay deleted");
                deleted = answer.count == 0;
            }
        });
    }
    tokio::task::yield_now().await;
    let gone = direct.delete_prefix(PREFIX).await.expect("etcd deletes");
    let answer = rangecache
        .client()
        .await
        .range(&RangeRequest::prefix(PREFIX))
        .await
        .expect("answers");
    assert!(answer.count == 0 && answer.revision() >= gone, "{answer:?}");
    stop.store(true, Ordering::Relaxed);
    readers.join_all().await;
    let outcomes = rangecache.outcomes().await;
    println!("{outcomes:?}");
    assert_eq!(
        outcomes.memory_answers(),
        outcomes.total(),
        "all from memory: {outcomes:?}"
    );
}

/// Serializable reads return no state older than writes made through the same rangecache, by any kind of call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serializable_reads_see_forwarded_writes() {
    let _exclusive = EXCLUSIVE.lock().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let client = rangecache.client().await;
    let list = RangeRequest {
        serializable: true,
        ..RangeRequest::prefix(PREFIX)
    };
    // The JSON gateway takes base64: the prefix, and "1".
    let json = r#"{"key":"L2RhdGEv","value":"MQ=="}"#;
    for turn in 0..300 {
        let key = format!("{PREFIX}{}", turn % 7);
        let written = match turn % 4 {
            0 => client.put(&key, turn.to_string()).await,
            1 => {
                client
                    .transact(vec![RequestOp::put(&key, turn.to_string())])
                    .await
            }
            2 => client.delete_prefix(PREFIX).await,
            _ => {
                // The JSON gateway returns the revision in JSON, which rangecache does not parse.
                let put = http::post(&format!("{}/v3/kv/put", rangecache.url()), json)
                    .await
                    .expect("answers");
                assert_eq!(put.status, 200, "{put:?}");
                let (_, revision_text) = put.body.split_once(r#""revision":""#).expect("a revision");
                Ok(revision_text
                    .split('"')
                    .next()
                    .and_then(|n| n.parse().ok())
                    .expect("a number"))
            }
        };
        let written: i64 = written.expect("etcd writes");
        let answer = client.range(&list).await.expect("answers");
        assert!(
            answer.revision() >= written,
            "turn {turn}: written at {written}, read at {}",
            answer.revision()
        );
        let expected = etcd.client().await.range(&list).await.expect("etcd answers");
        assert_eq!(answer.kvs, expected.kvs, "turn {turn}");
    }
}

/// A WebSocket of etcd's gateway.
struct WebSocket(TcpStream);

impl WebSocket {
    /// Opens one at `path`, and sends one message of text.
    async fn open(url: &str, path: &str, text: &str) -> Self {
        let authority = url.strip_prefix("http://").expect("plaintext");
        let mut stream = TcpStream::connect(authority).await.expect("connects");
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: {authority}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
            sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.expect("is written");
        let mut response = Vec::new();
        while !response.ends_with(b"\r\n\r\n") {
            response.push(stream.read_u8().await.expect("a head"));
        }
        let response = String::from_utf8(response).expect("text");
        assert!(response.starts_with("HTTP/1.1 101 "), "{response}");
        // A final text frame, masked with zeroes.
        let length = u8::try_from(text.len()).expect("short");
        assert!(length < 126);
        let frame = [&[0x81, 0x80 | length, 0, 0, 0, 0], text.as_bytes()].concat();
        stream.write_all(&frame).await.expect("is written");
        Self(stream)
    }

    /// The first revision in the next message.
    async fn next_revision(&mut self) -> i64 {
        let message = async {
            assert_eq!(self.0.read_u8().await.expect("a frame"), 0x81);
            let length = match self.0.read_u8().await.expect("a length") {
                126 => self.0.read_u16().await.expect("a length"),
                length => length.into(),
            };
            let mut message = vec![0; length.into()];
            self.0.read_exact(&mut message).await.expect("a message");
            String::from_utf8(message).expect("text")
        };
        let message = tokio::time::timeout(SOON, message).await.expect("a message");
        let (_, revision) = message.split_once(r#""revision":""#).expect("a revision");
        let revision = revision.split('"').next().and_then(|text| text.parse().ok());
        revision.expect("a number")
    }
}

/// A client sees a write by a WebSocket of the gateway, whose messages are not parsed. The write is outside the mirror,
/// which gets no event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serializable_reads_see_writes_shown_by_a_websocket() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .with("--probe-interval", "1h")
        .start()
        .await;
    let client = rangecache.client().await;
    let list = RangeRequest {
        serializable: true,
        ..RangeRequest::prefix(PREFIX)
    };
    // The key "/b" in base64.
    let watch = r#"{"create_request":{"key":"L2I="}}"#;
    let mut socket = WebSocket::open(rangecache.url(), "/v3/watch", watch).await;
    socket.next_revision().await;
    for n in 0..3 {
        client.range(&list).await.expect("answers");
        let written = direct.put("/b", n.to_string()).await.expect("etcd writes");
        assert_eq!(socket.next_revision().await, written);
        let answer = client.range(&list).await.expect("answers");
        assert!(
            answer.revision() >= written,
            "written at {written}, read at {}",
            answer.revision()
        );
    }
}
