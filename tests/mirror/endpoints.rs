//! Changes of etcd's endpoints: learners, partitioned members, rolling upgrades, host names with new addresses,
//! members that hang, and etcd's limit on pings.

use std::time::Duration;

use serde_json::Value;
use testkit::etcd::{Cluster, Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::Client;
use testkit::kv::{PUT, RANGE};
use testkit::pb::{
    Empty, MemberPromoteRequest, PutRequest, RangeRequest, WatchCreateRequest, WatchResponse, prefix_end,
};
use testkit::proxy::Rangecache;
use testkit::recovery::{self, Reads, put_when_possible};
use testkit::wait::{SOON, until};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::EXCLUSIVE;

const PREFIX: &str = "/endpoints/";
/// Bound on a call to a member that serves.
const PROMPT: Duration = Duration::from_secs(5);

fn list() -> RangeRequest {
    RangeRequest::prefix(PREFIX)
}

/// Responses are etcd's, and come from memory again.
async fn recovers(direct: &Client, rangecache: &Rangecache, after: &str) {
    let through = rangecache.client().await;
    recovery::recovers(after, PREFIX, direct, rangecache, &through, Reads::MayFail).await;
}

/// An endpoint in `/status`.
async fn described(rangecache: &Rangecache, url: &str) -> Value {
    let status: Value = serde_json::from_str(&rangecache.admin("/status").await.body).expect("is JSON");
    let endpoints = status["endpoints"].as_array().expect("a list");
    let found = endpoints.iter().find(|endpoint| endpoint["url"] == url);
    found
        .unwrap_or_else(|| panic!("{url} is missing in {endpoints:?}"))
        .clone()
}

/// Waits until `/status` shows the endpoint connected, and healthy or not.
async fn wait_for_health(rangecache: &Rangecache, url: &str, is_healthy: bool) {
    until(
        SOON,
        &format!("{url} connected, healthy: {is_healthy}"),
        async || {
            let endpoint = described(rangecache, url).await;
            (endpoint["is_healthy"] == is_healthy && endpoint["is_connected"] == true).then_some(())
        },
    )
    .await;
}

/// Number of Range calls that a member has received.
async fn ranges(etcd: &Etcd) -> f64 {
    etcd.started_calls("Range").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn learner_proves_nothing_until_it_votes() {
    let _exclusive = EXCLUSIVE.lock().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    put_when_possible(&direct, &format!("{PREFIX}first"), "v").await;
    let (learner, id) = etcd.add_learner().await;

    // The learner is the first endpoint.
    let endpoints = format!("{},{}", learner.url(), etcd.url());
    let rangecache = Rangecache::at(&endpoints).start().await;
    let through = rangecache.client().await;
    wait_for_health(&rangecache, &learner.url(), false).await;
    wait_for_health(&rangecache, &etcd.url(), true).await;
    recovers(&direct, &rangecache, "a start with a learner").await;
    let refused = ranges(&learner).await;
    let before = rangecache.outcomes().await;
    for n in 0..100 {
        put_when_possible(&direct, &format!("{PREFIX}direct/{n}"), "v").await;
        let got = through.range(&list()).await.expect("it answers");
        assert_eq!(got.kvs, direct.range(&list()).await.expect("etcd answers").kvs);
        through
            .put(format!("{PREFIX}through/{n}"), "v")
            .await
            .expect("etcd writes");
    }
    let outcomes = rangecache.outcomes_since(&before, 100).await;
    assert_eq!(outcomes.memory_answers(), 100, "{outcomes:?}");
    let asked = ranges(&learner).await - refused;
    assert_eq!(asked, 0.0, "the learner got quorum checks");

    // Alone, its refusals are forwarded to callers, and memory answers no linearizable read.
    let alone = Rangecache::before(&learner).start_cold().await;
    let (through, at_learner) = (alone.client().await, learner.client().await);
    wait_for_health(&alone, &learner.url(), false).await;
    let serializable = RangeRequest {
        serializable: true,
        ..list()
    };
    for request in [&list(), &serializable, &RangeRequest::one("any")] {
        let (expected, got) = (
            at_learner.range_raw(request).await,
            through.range_raw(request).await,
        );
        assert_eq!(got, expected, "{request:?}");
    }
    let request = prost::Message::encode_to_vec(&PutRequest {
        key: b"k".to_vec(),
        ..PutRequest::default()
    });
    assert_eq!(
        through.raw(PUT, &request).await,
        at_learner.raw(PUT, &request).await
    );
    let refusal = through.range(&list()).await.expect_err("a learner refuses");
    assert!(refusal.message.contains("learner"), "{refusal:?}");

    // Once it votes, it serves quorum checks.
    let promote = MemberPromoteRequest { id };
    until(SOON, "etcd promotes the learner", async || {
        let promoted = direct.unary::<Empty>("/etcdserverpb.Cluster/MemberPromote", &promote);
        promoted.await.ok()
    })
    .await;
    wait_for_health(&rangecache, &learner.url(), true).await;
    let checks = ranges(&learner).await;
    until(SOON, "the new member gets quorum checks, too", async || {
        recovers(&direct, &rangecache, "the promotion").await;
        (ranges(&learner).await > checks).then_some(())
    })
    .await;
    recovers(&direct, &alone, "a restart with the former learner alone").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitioned_member_proves_nothing_while_clients_are_served() {
    let _exclusive = EXCLUSIVE.lock().await;
    let mut links = Vec::new();
    let cluster = Cluster::start_linked([Version::V3_7; 3], &[], async |url| {
        let link = FaultLink::to(&url, 7).await;
        let url = link.url().to_owned();
        links.push(link);
        url
    })
    .await;
    put_when_possible(&cluster.members[0].client().await, &format!("{PREFIX}first"), "v").await;
    let rangecache = Rangecache::at(&cluster.endpoints()).start().await;
    let through = rangecache.client().await;
    // First the leader, then a follower.
    for turn in 0..2 {
        let (leader, _) = until(SOON, "a member leads", async || cluster.leader().await).await;
        let n = (leader + turn) % 3;
        let (member, live) = (&cluster.members[n], cluster.members[(n + 1) % 3].client().await);
        let what = format!("member {n} is partitioned while {leader} leads");
        let status = member.client().await.status().await.expect("a status");
        let id = status.header.expect("has a header").member_id;
        for (other, link) in links.iter().enumerate() {
            link.set(if other == n {
                Condition::Cut
            } else {
                Condition::CutFrom(id)
            });
        }
        // At once, whichever member leads by now.
        recovers(&live, &rangecache, &what).await;
        wait_for_health(&rangecache, &member.url(), false).await;
        let (before, puts_before) = (rangecache.outcomes().await, member.started_calls("Put").await);
        for key in 0..100 {
            let key = format!("{PREFIX}{turn}/{key}");
            // Without processor time, the two others may lose their leader for a while, as etcd's own clients see, too.
            let (revision, _) = until(SOON, "a put is made", async || {
                let put = timeout(PROMPT, through.put(&key, "v")).await;
                put.ok()?.ok()
            })
            .await;
            let (got, _) = until(SOON, "a list is answered", async || {
                let got = timeout(PROMPT, through.range(&list())).await;
                got.ok()?.ok()
            })
            .await;
            assert!(
                got.revision() >= revision,
                "{what}: {} after {revision}",
                got.revision()
            );
            let proof = got.header.expect("has a header").member_id;
            assert_ne!(proof, id, "{what}: it served a quorum check");
        }
        let outcomes = rangecache.outcomes_since(&before, 100).await;
        assert!(outcomes.memory_answers() > 90, "{what}: {outcomes:?}");
        let puts = member.started_calls("Put").await - puts_before;
        assert!(puts < 10.0, "{what}: {puts} of 100 puts were sent to it");
        links.iter().for_each(|link| link.set(Condition::Normal));
        wait_for_health(&rangecache, &member.url(), true).await;
        recovers(&live, &rangecache, "the end of the partition").await;
    }
}

/// Members are upgraded one by one under load: the lowest version decides until its last member is upgraded.
async fn rolling_upgrade_is_noticed(from: Version, to: Version) {
    let _exclusive = EXCLUSIVE.lock().await;
    let mut cluster = Cluster::start(from).await;
    let leased = format!("{PREFIX}leased");
    let direct = cluster.members[0].client().await;
    direct.grant_lease(7, 600).await.expect("etcd grants");
    direct.put_with_lease(&leased, "v", 7).await.expect("etcd writes");
    let rangecache = Rangecache::at(&cluster.endpoints()).start().await;
    let through = rangecache.client().await;
    let around = through.with_metadata("rangecache-bypass", "true");
    let keys_only = RangeRequest {
        keys_only: true,
        ..RangeRequest::one(&leased)
    };
    // This request crashes etcd 3.5.
    let unknown_target = RangeRequest {
        sort_order: 1,
        sort_target: 99,
        ..list()
    };
    // Memory answers by the lowest version; the metrics show whether etcd's RangeStream is used.
    let seen = async || {
        let before = rangecache.outcomes().await;
        let answer = through.range(&keys_only).await.ok()?;
        let outcomes = rangecache.outcomes_since(&before, 1).await;
        let before = rangecache.stream_outcomes().await;
        around.range_stream(&list()).await.ok()?;
        let streams = rangecache.stream_outcomes_since(&before, 1).await;
        (outcomes.memory_answers() == 1).then(|| (answer.kvs[0].lease, streams.of("forwarded") == 1))
    };
    let expect = async |what: &str, expected: (i64, bool)| {
        until(SOON, &format!("{what}: {expected:?}"), async || {
            (seen().await? == expected).then_some(())
        })
        .await;
    };
    let streams = |upgraded: bool| upgraded && to == Version::V3_7;
    expect("before", (7, false)).await;
    for n in 0..3 {
        cluster.members[n].terminate().await;
        cluster.members[n].switch(to);
        cluster.members[n].run();
        cluster.members[n].ready().await;
        let direct = cluster.members[(n + 1) % 3].client().await;
        recovers(&direct, &rangecache, &format!("{} members upgraded", n + 1)).await;
        let version = cluster.members[n]
            .client()
            .await
            .status()
            .await
            .expect("a status")
            .version;
        until(SOON, &format!("the new version {version} is known"), async || {
            let endpoint = described(&rangecache, &cluster.members[n].url()).await;
            (endpoint["version"] == version).then_some(())
        })
        .await;
        let refused = through.range(&unknown_target).await.expect_err("a refusal");
        assert_eq!(refused.code, 3, "{refused:?}");
        // `keys_only` has the new meaning only after the last upgrade.
        let lease = if n == 2 && to == Version::V3_7 { 0 } else { 7 };
        expect(&format!("{} members upgraded", n + 1), (lease, streams(true))).await;
    }
    for member in &cluster.members {
        member.ready().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_upgrade_from_3_6_to_3_7_is_noticed() {
    rolling_upgrade_is_noticed(Version::V3_6, Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_upgrade_from_3_5_to_3_6_is_noticed() {
    rolling_upgrade_is_noticed(Version::V3_5, Version::V3_6).await;
}

/// A port that leads to etcd, bound to one address of a host name. Dropping it closes it.
struct Door(tokio::task::AbortHandle);

impl Door {
    async fn open(address: &str, port: u16, target: &str) -> Self {
        let target = target.strip_prefix("http://").unwrap().to_owned();
        let listener = tokio::net::TcpListener::bind((address, port))
            .await
            .expect("the address is free");
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let target = target.clone();
                connections.spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(target).await {
                        // Either side may close the connection.
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        Self(accepting.abort_handle())
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An address that accepts no connection and refuses none: its queue is full.
async fn silent(address: &str, port: u16) -> (socket2::Socket, Vec<TcpStream>) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    let address: std::net::SocketAddr = format!("{address}:{port}").parse().unwrap();
    socket.bind(&address.into()).expect("the address is free");
    socket.listen(0).unwrap();
    let mut queued = Vec::new();
    while let Ok(connected) = timeout(Duration::from_millis(500), TcpStream::connect(address)).await {
        queued.push(connected.expect("the connection is queued"));
    }
    (socket, queued)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn host_names_are_resolved_again_and_each_address_is_tried() {
    let may = std::process::Command::new("unshare")
        .args(["--map-root-user", "--mount", "true"])
        .status();
    if !may.is_ok_and(|status| status.success()) {
        println!(
            "SKIPPED: this machine allows no mount namespaces, which the test needs to change addresses"
        );
        return;
    }
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    put_when_possible(&direct, &format!("{PREFIX}first"), "v").await;
    let port = testkit::etcd::free_port();
    let folder = tempfile::tempdir().unwrap();
    let hosts = folder.path().join("hosts");
    // Written in place: the file is bind-mounted.
    let resolve = |addresses: &[&str]| {
        let lines: Vec<_> = addresses
            .iter()
            .map(|address| format!("{address} etcd.example\n"))
            .collect();
        std::fs::write(&hosts, lines.concat()).unwrap();
    };
    // The resolver prefers addresses that have more leading bits in common with 127.0.0.1.
    resolve(&["127.0.0.8"]);
    let first = Door::open("127.0.0.8", port, &etcd.url()).await;
    let rangecache = Rangecache::at(&format!("http://etcd.example:{port}"))
        .with_hosts(&hosts)
        .start()
        .await;
    recovers(&direct, &rangecache, "a start at the first address").await;

    resolve(&["127.0.0.9"]);
    let second = Door::open("127.0.0.9", port, &etcd.url()).await;
    drop(first);
    recovers(&direct, &rangecache, "a move to the second address").await;

    // The first of two addresses refuses connections.
    resolve(&["127.0.0.2", "127.0.0.8"]);
    let third = Door::open("127.0.0.8", port, &etcd.url()).await;
    drop(second);
    recovers(&direct, &rangecache, "a refusal at the first of two addresses").await;

    // The first of two addresses is silent, like that of a machine that is down.
    let _silent = silent("127.0.0.3", port).await;
    let fourth = Door::open("127.0.0.9", port, &etcd.url()).await;
    resolve(&["127.0.0.3", "127.0.0.9"]);
    drop(third);
    recovers(&direct, &rangecache, "silence at the first of two addresses").await;
    drop(fourth);
}

/// A write that has reached a member that pauses is not lost, and not repeated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_to_a_member_that_pauses_is_executed_once() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let through = rangecache.client().await;
    through.put("warm", "v").await.expect("etcd writes");
    etcd.pause();
    let noticing = async {
        until(SOON, "the pause is noticed", async || {
            rangecache
                .log()
                .contains("this member does not serve")
                .then_some(())
        })
        .await;
        etcd.resume();
    };
    let (written, ()) = tokio::join!(through.put("hung", "v"), noticing);
    written.expect("etcd has written it");
    let read = etcd.client().await.range(&RangeRequest::one("hung")).await;
    let versions: Vec<_> = read
        .expect("etcd answers")
        .kvs
        .iter()
        .map(|kv| kv.version)
        .collect();
    assert_eq!(versions, [1]);
}

/// etcd closes a connection at the third ping that comes less than five seconds after the one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pings_to_etcd_stay_within_its_limit() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let mut watch = through
        .watch(WatchCreateRequest {
            key: PREFIX.into(),
            ..WatchCreateRequest::default()
        })
        .await;
    // Longer than three pings at too short intervals take.
    let silence = timeout(Duration::from_secs(18), watch.next_as::<WatchResponse>(SOON)).await;
    assert!(silence.is_err(), "the watch ended: {:?}", watch.end());
    direct.put(PREFIX, "v").await.expect("etcd writes");
    let event: Option<WatchResponse> = watch.next_as(SOON).await;
    assert_eq!(event.expect("the same watch continues").events.len(), 1);
    let log = rangecache.log();
    assert!(!log.contains("lost"), "a connection was lost:\n{log}");
}

/// Whether a connection with a call in flight survives that many pings in a row.
async fn survives_pings(url: &str, pings: usize) -> bool {
    let address = url.strip_prefix("http://").unwrap();
    let tcp = TcpStream::connect(address).await.unwrap();
    let (mut sender, mut connection) = h2::client::handshake(tcp).await.unwrap();
    let mut ping = connection.ping_pong().unwrap();
    let driver = tokio::spawn(connection);
    let request = http::Request::post(format!("{url}{RANGE}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap();
    sender = sender.ready().await.unwrap();
    // A call whose message never comes.
    let _call = sender.send_request(request, false).unwrap();
    for _ in 0..pings {
        let pong = timeout(SOON, ping.ping(h2::Ping::opaque()))
            .await
            .expect("a pong or a closed connection");
        if pong.is_err() {
            return false;
        }
    }
    !driver.is_finished()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_pings_of_a_client_are_answered() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    assert!(
        !survives_pings(&etcd.url(), 10).await,
        "etcd must close the connection"
    );
    assert!(survives_pings(rangecache.url(), 1_000).await);
    rangecache
        .client()
        .await
        .put("k", "v")
        .await
        .expect("other clients are served");
}

/// A reload names another way to etcd: the feed moves there, the mirror is not loaded again, and an open watch gets every
/// event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_moves_to_the_endpoint_that_a_reload_names() {
    let _exclusive = EXCLUSIVE.lock().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    put_when_possible(&direct, &format!("{PREFIX}first"), "v").await;
    let (former, named) = (
        FaultLink::to(&etcd.url(), 1).await,
        FaultLink::to(&etcd.url(), 2).await,
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("flags");
    let name = |link: &FaultLink| {
        std::fs::write(&file, format!("RANGECACHE_ENDPOINTS={}\n", link.url())).unwrap();
    };
    name(&former);
    let rangecache = Rangecache::with_flags_file(&file).start().await;
    let create = WatchCreateRequest {
        key: PREFIX.into(),
        range_end: prefix_end(PREFIX.as_bytes()),
        ..WatchCreateRequest::default()
    };
    let mut watch = rangecache.client().await.watch(create).await;
    assert_eq!((former.feeds(), named.feeds()), (1, 0));
    name(&named);
    rangecache.signal("HUP");
    until(SOON, "the feed has moved", async || {
        (named.feeds() == 1).then_some(())
    })
    .await;
    // Nothing needs it any more.
    former.set(Condition::Cut);
    recovers(&direct, &rangecache, "a reload of --endpoints").await;
    let metrics = rangecache.metrics().await;
    assert_eq!(
        metrics.sum("rangecache_mirror_reloads_total"),
        1.0,
        "the load at start"
    );
    let of_former = format!("rangecache_endpoint_healthy{{endpoint=\"{}\"}}", former.url());
    assert!(
        !metrics.0.contains_key(&of_former),
        "an endpoint that is used no more"
    );
    let events = watch
        .next_as::<WatchResponse>(SOON)
        .await
        .expect("an event")
        .events;
    assert!(!events.is_empty());
}
