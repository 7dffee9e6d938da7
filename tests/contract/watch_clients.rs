//! Real clients whose watches memory serves: etcd's Go client and etcdctl, and one that resumes by headers alone.

use std::fmt::Write as _;
use std::process::Stdio;

use serde_json::json;
use testkit::etcd::{Etcd, Version, free_port};
use testkit::grpc::{Client, Stream};
use testkit::kv::WATCH;
use testkit::pb::{RequestOp, WatchCreateRequest, WatchRequest, WatchResponse, prefix_end};
use testkit::process::tool;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use testkit::watch_rules::{DELETE, Truth, names, revision};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};
use tokio::time::timeout;

/// Watches of the Go client.
const WATCHES: usize = 50;
/// Namespace of some of them.
const NAMESPACE: &str = "f/1";

/// Asserts that memory has created all watches of a [`Follower`].
async fn serves_every_watch(rangecache: &Rangecache) {
    let memory = rangecache.metrics().await.watches_created("memory");
    assert!(memory >= WATCHES as f64, "memory serves {memory} watches");
}

async fn rangecache(etcd: &Etcd, url: &str) -> Rangecache {
    let builder = Rangecache::before(etcd).with("--watch-cache", "auto");
    builder.listening_on(url).start().await
}

/// A write of some keys, in one revision.
async fn write(client: &Client, turn: usize) -> i64 {
    let key = |n: usize| format!("f/{:02}", (turn * 7 + n * 3) % 20);
    let operations = (0..1 + turn % 3).map(|n| match (turn + n) % 4 {
        0 => RequestOp::delete(key(n)),
        _ => RequestOp::put(key(n), format!("{turn}")),
    });
    let revision = client.transact(operations.collect()).await;
    revision.expect("etcd writes")
}

/// Every event of the store so far, by a watch of etcd itself.
struct Recorded {
    stream: Stream,
    truth: Truth,
}

impl Recorded {
    async fn start(etcd: &Etcd) -> Self {
        let everything = WatchCreateRequest {
            key: b"\0".to_vec(),
            range_end: b"\0".to_vec(),
            prev_kv: true,
            ..WatchCreateRequest::default()
        };
        Self {
            stream: etcd.client().await.watch(everything).await,
            truth: Truth::default(),
        }
    }

    async fn reach(&mut self, revision: i64) {
        while self.truth.revision() < revision {
            let response: Option<WatchResponse> = self.stream.next_as(SOON).await;
            self.truth.extend(&response.expect("the watch is open"));
        }
    }
}

/// The Go client with many watches of all kinds, and what it prints.
struct Follower {
    _process: Child,
    lines: Lines<BufReader<ChildStdout>>,
    watches: Vec<WatchCreateRequest>,
    /// Lines by watch.
    printed: Vec<Vec<String>>,
    /// etcd has resumed its watches, until memory could: etcd's answer to a progress request may overtake the first events of a
    /// watch that was created behind the request, also without rangecache.
    was_resumed: bool,
}

impl Follower {
    /// Starts it, and waits until each watch was created.
    async fn start(url: &str, start: i64) -> Self {
        let watches: Vec<_> = (0..WATCHES).map(|number| watch(number, start)).collect();
        let mut command = tokio::process::Command::new(tool("goclient"));
        command.args(["--endpoints", url, "--follow"]).kill_on_drop(true);
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut specs = String::new();
        for (number, watch) in watches.iter().enumerate() {
            let within = if is_in_namespace(number) { NAMESPACE } else { "" };
            let key = String::from_utf8_lossy(&watch.key).into_owned();
            let end = String::from_utf8_lossy(&watch.range_end).into_owned();
            let spec = json!({
                "namespace": within, "key": key[within.len()..],
                // A namespaced client ends the range of a prefix by itself.
                "end": if within.is_empty() { &end } else { "\0" },
                "revision": start, "prev_kv": watch.prev_kv, "fragment": watch.fragment,
                "notify": watch.progress_notify, "filters": watch.filters, "leader": number.is_multiple_of(7),
            });
            let _ = writeln!(specs, "{spec}");
        }
        let mut stdin = process.stdin.take().expect("is piped");
        stdin.write_all(specs.as_bytes()).await.expect("is read");
        let mut follower = Self {
            lines: BufReader::new(process.stdout.take().expect("is piped")).lines(),
            _process: process,
            printed: vec![Vec::new(); watches.len()],
            watches,
            was_resumed: false,
        };
        follower.read(&vec![1; WATCHES], "every watch was created").await;
        follower
    }

    /// Reads until each watch has printed that many lines.
    async fn read(&mut self, wanted: &[usize], what: &str) {
        let complete = |printed: &[Vec<String>]| {
            let mut pairs = printed.iter().zip(wanted);
            pairs.all(|(lines, wanted)| lines.len() >= *wanted)
        };
        let deadline = tokio::time::Instant::now() + SOON;
        while !complete(&self.printed) {
            let line = tokio::time::timeout_at(deadline, self.lines.next_line()).await;
            let line = line.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}: {:#?}", self.printed));
            let line = line.expect("is read").expect("goclient runs");
            let (number, said) = line.split_once(' ').expect("a number first");
            if self.was_resumed && said.contains("before event") {
                continue;
            }
            self.printed[number.parse::<usize>().expect("a number")].push(said.to_owned());
        }
    }

    /// Expected output of each watch up to the newest event.
    fn expected(&self, truth: &Truth) -> Vec<Vec<String>> {
        let of_watch = |(number, watch): (usize, &WatchCreateRequest)| {
            let events = truth.matching(watch, watch.start_revision - 1).map(|event| {
                let kv = event.kv.as_ref().expect("a kv");
                let key = String::from_utf8_lossy(&kv.key);
                let kind = if event.r#type == DELETE { "DELETE" } else { "PUT" };
                let within = if is_in_namespace(number) {
                    NAMESPACE.len()
                } else {
                    0
                };
                let before = event.prev_kv.as_ref().filter(|_| watch.prev_kv);
                let before = before.map_or(String::new(), |kv| format!(" after {}", kv.mod_revision));
                format!("{} {kind} {}{before}", revision(event), &key[within..])
            });
            std::iter::once("created".to_owned()).chain(events).collect()
        };
        self.watches.iter().enumerate().map(of_watch).collect()
    }

    /// Reads all events up to the newest, and compares them.
    async fn has_all(&mut self, truth: &Truth) {
        let expected = self.expected(truth);
        let wanted: Vec<_> = expected.iter().map(Vec::len).collect();
        self.read(&wanted, "every event arrives").await;
        for (number, (printed, expected)) in self.printed.iter().zip(&expected).enumerate() {
            assert_eq!(printed, expected, "watch {number}: {:?}", self.watches[number]);
        }
    }
}

fn is_in_namespace(number: usize) -> bool {
    number % 10 == 9
}

fn watch(number: usize, start_revision: i64) -> WatchCreateRequest {
    let one = format!("f/{:02}", number % 20);
    let (key, range_end) = match number % 5 {
        _ if is_in_namespace(number) => (NAMESPACE.to_owned(), prefix_end(NAMESPACE.as_bytes())),
        0 => ("f/".to_owned(), prefix_end(b"f/")),
        1 => (one, b"f/15".to_vec()),
        2 => (one, b"\0".to_vec()),
        _ => (one, Vec::new()),
    };
    let watch = WatchCreateRequest {
        range_end,
        start_revision,
        prev_kv: number.is_multiple_of(2),
        fragment: number.is_multiple_of(3),
        progress_notify: number.is_multiple_of(4),
        filters: match number % 6 {
            1 => vec![0],
            2 => vec![1],
            _ => Vec::new(),
        },
        key: key.into_bytes(),
        ..WatchCreateRequest::default()
    };
    // A range that ends before its start would be refused.
    let is_empty = !watch.range_end.is_empty() && !names(&watch, &watch.key);
    WatchCreateRequest {
        range_end: if is_empty {
            Vec::new()
        } else {
            watch.range_end.clone()
        },
        ..watch
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn go_client_gets_every_event_once_while_rangecaches_are_replaced() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let mut recorded = Recorded::start(&etcd).await;
    let url = format!("http://127.0.0.1:{}", free_port());
    let mut running = rangecache(&etcd, &url).await;
    let start = write(&direct, 1).await;
    let mut follower = Follower::start(&url, start).await;
    serves_every_watch(&running).await;
    for turn in 2..300 {
        let last = write(&direct, turn).await;
        if turn % 60 == 0 {
            recorded.reach(last).await;
            follower.has_all(&recorded.truth).await;
        }
        match turn {
            // SIGKILL, then an orderly end, each in the middle of writes.
            100 => {
                drop(running);
                follower.was_resumed = true;
                write(&direct, 1_000).await;
                running = rangecache(&etcd, &url).await;
            }
            200 => {
                assert!(running.terminate().await.success());
                write(&direct, 2_000).await;
                running = rangecache(&etcd, &url).await;
            }
            _ => {}
        }
    }
    let last = write(&direct, 300).await;
    recorded.reach(last).await;
    follower.has_all(&recorded.truth).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_under_open_watches_ends_them_as_compacted() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let mut recorded = Recorded::start(&etcd).await;
    let url = format!("http://127.0.0.1:{}", free_port());
    let running = rangecache(&etcd, &url).await;
    let start = write(&direct, 1).await;
    let mut follower = Follower::start(&url, start).await;
    let snapshot = etcd.save_snapshot().await;
    let mut last = 0;
    for turn in 2..20 {
        last = write(&direct, turn).await;
    }
    recorded.reach(last).await;
    follower.has_all(&recorded.truth).await;
    serves_every_watch(&running).await;
    etcd.restore(&snapshot, "rangecache", &[]);
    etcd.run();
    etcd.ready().await;
    // Each watch prints its events, its error, and that its channel was closed.
    let wanted: Vec<_> = follower
        .expected(&recorded.truth)
        .iter()
        .map(|lines| lines.len() + 2)
        .collect();
    follower.read(&wanted, "every watch ends").await;
    for lines in &follower.printed {
        let [.., error, closed] = &lines[..] else {
            panic!("{lines:?}")
        };
        assert!(
            error.contains("ended: etcdserver: mvcc: required revision has been compacted"),
            "{error}"
        );
        assert_eq!(closed, "closed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_resumes_by_headers_alone_gets_the_whole_history() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let rangecache = Rangecache::before(&etcd)
        .with("--watch-cache", "auto")
        .start()
        .await;
    let through = rangecache.client().await.with_metadata("hasleader", "true");
    let mut written = Vec::new();
    for turn in 0..3_000 {
        written.push(
            direct
                .put(format!("c/{}", turn % 50), "value")
                .await
                .expect("etcd puts"),
        );
    }
    until(SOON, "the mirror has every event", async || {
        let answer = through.range(&testkit::pb::RangeRequest::one("c/0")).await;
        (answer.expect("answers").revision() >= written[written.len() - 1]).then_some(())
    })
    .await;
    let mut received = Vec::new();
    let mut next = written[0];
    let mut streams = 0;
    while received.len() < written.len() {
        let mut stream = through.open(WATCH);
        streams += 1;
        stream.send(&WatchRequest {
            create_request: Some(WatchCreateRequest {
                key: b"c/".to_vec(),
                range_end: prefix_end(b"c/"),
                start_revision: next,
                ..WatchCreateRequest::default()
            }),
            ..WatchRequest::default()
        });
        // One response with events, and then the next stream.
        loop {
            let response: Option<WatchResponse> = stream.next_as(SOON).await;
            let response = response.unwrap_or_else(|| panic!("{:?}", stream.end()));
            if !response.events.is_empty() {
                received.extend(response.events.iter().map(revision));
                next = response.header.expect("a header").revision + 1;
                break;
            }
        }
    }
    assert_eq!(received, written);
    assert!(streams > 1 && rangecache.metrics().await.watches_created("memory") >= f64::from(streams));
}

/// Output of `etcdctl watch` until it has printed `lines` lines.
async fn etcdctl(url: &str, arguments: &[&str], input: &str, lines: usize) -> Vec<String> {
    let mut command = tokio::process::Command::new(tool("etcdctl"));
    command.args(["--endpoints", url, "watch"]).args(arguments);
    let mut process = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("it starts");
    let mut stdin = process.stdin.take().expect("is piped");
    stdin.write_all(input.as_bytes()).await.expect("is read");
    let mut printed = Vec::new();
    let mut output = BufReader::new(process.stdout.take().expect("is piped")).lines();
    while printed.len() < lines {
        let line = timeout(SOON, output.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("{arguments:?}: only {printed:#?}"));
        printed.push(line.expect("is read").expect("etcdctl runs"));
    }
    printed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_watch_prints_the_same_as_at_etcd() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let rangecache = Rangecache::before(&etcd)
        .with("--watch-cache", "auto")
        .start()
        .await;
    for turn in 1..5 {
        direct.put("a/one", format!("{turn}")).await.expect("etcd puts");
        direct.put("a/two", format!("{turn}")).await.expect("etcd puts");
    }
    direct.delete("a/one").await.expect("etcd deletes");
    let cases: [(&[&str], &str, usize); 6] = [
        (&["a/one", "--rev=2"], "", 12),
        (&["a/", "--prefix", "--rev=2"], "", 24),
        (&["a/", "--prefix", "--rev=2", "--prev-kv"], "", 30),
        (&["a/one", "b", "--rev=3", "--prev-kv", "-w", "json"], "", 1),
        (&["--interactive"], "watch a/one --rev=2\n", 12),
        (&["-i"], "watch a/ --prefix --rev=6 --prev-kv\n", 12),
    ];
    for (arguments, input, lines) in cases {
        let at_etcd = etcdctl(&etcd.url(), arguments, input, lines).await;
        let through = etcdctl(rangecache.url(), arguments, input, lines).await;
        assert_eq!(at_etcd, through, "{arguments:?}");
    }
    assert!(rangecache.metrics().await.watches_created("memory") >= cases.len() as f64);
}
