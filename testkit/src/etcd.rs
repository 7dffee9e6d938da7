//! Real etcd: one member, or three that form a cluster.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::timeout;

use crate::grpc::Client;
use crate::metrics::Metrics;
use crate::pb::{
    Empty, MemberAddRequest, MemberAddResponse, MemberRemoveRequest, RangeRequest, SnapshotResponse,
};
use crate::process::{Process, tool};
use crate::wait::{SOON, until};

/// Versions of etcd that rangecache supports, each by its newest patch release, and two others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// The last one below the gate of progress notifications. Only `make test-other-etcds` builds it.
    V3_5_12,
    V3_5,
    V3_6,
    V3_7,
    /// Not released yet. Only `make test-other-etcds` builds it.
    V3_8,
}

impl Version {
    /// Path of the server.
    pub fn binary(self) -> PathBuf {
        tool(match self {
            Self::V3_5_12 => "etcd-3.5.12",
            Self::V3_5 => "etcd-3.5",
            Self::V3_6 => "etcd-3.6",
            Self::V3_7 => "etcd-3.7",
            Self::V3_8 => "etcd-3.8",
        })
    }
}

/// Member of an etcd cluster. Keeps its ports and its data over restarts, and is killed on drop.
pub struct Etcd {
    name: String,
    version: Version,
    dir: TempDir,
    data: PathBuf,
    client_port: u16,
    peer_port: u16,
    /// Peer URL that the other members connect to.
    advertised: String,
    initial_cluster: String,
    /// Whether it joins an existing cluster.
    joins: bool,
    token: String,
    more: Vec<String>,
    process: Option<Process>,
}

impl Etcd {
    /// Starts a cluster of one member, and waits until it serves.
    pub async fn start(version: Version) -> Self {
        Self::start_with(version, &[]).await
    }

    /// Like [`Etcd::start`], with additional flags.
    pub async fn start_with(version: Version, more: &[&str]) -> Self {
        let mut etcd = Self::new("alone", version, "rangecache");
        etcd.more = more.iter().map(|flag| (*flag).to_owned()).collect();
        etcd.initial_cluster = etcd.peer();
        etcd.run();
        etcd.ready().await;
        etcd
    }

    fn new(name: &str, version: Version, token: &str) -> Self {
        let dir = TempDir::with_prefix("rangecache-etcd-").unwrap();
        let peer_port = free_port();
        Self {
            name: name.to_owned(),
            version,
            data: dir.path().join("data"),
            dir,
            client_port: free_port(),
            peer_port,
            advertised: format!("http://127.0.0.1:{peer_port}"),
            initial_cluster: String::new(),
            joins: false,
            token: token.to_owned(),
            more: Vec::new(),
            process: None,
        }
    }

    /// Adds a learner to this single-member cluster, waits until it has caught up, and returns it with its id.
    pub async fn add_learner(&self) -> (Self, u64) {
        let mut learner = Self::new("learner", self.version, &self.token);
        learner.joins = true;
        learner.initial_cluster = format!("{},{}", self.peer(), learner.peer());
        let client = self.client().await;
        let request = MemberAddRequest {
            peer_urls: vec![learner.advertised.clone()],
            is_learner: true,
        };
        let added: MemberAddResponse = client
            .unary("/etcdserverpb.Cluster/MemberAdd", &request)
            .await
            .expect("etcd adds a learner");
        learner.run();
        until(SOON, "the learner has caught up", async || {
            let newest = client.range(&RangeRequest::one("any")).await.ok()?.revision();
            let behind = RangeRequest {
                serializable: true,
                ..RangeRequest::one("any")
            };
            let learner = Client::try_connect(&learner.url()).await.ok()?;
            let revision = learner.range(&behind).await.ok()?.revision();
            (revision == newest).then_some(())
        })
        .await;
        (learner, added.member.expect("it is a member").id)
    }

    /// Changes the members by this one. A change that was made before is reported by the message `made_before`.
    async fn change_members(&self, method: &str, request: &impl prost::Message, made_before: &str) {
        let path = format!("/etcdserverpb.Cluster/{method}");
        let client = self.client().await;
        // etcd refuses changes until its members have been connected for five seconds, and does not respond to one that was
        // lost with the leader.
        until(3 * SOON, &format!("etcd responds to {method}"), async || {
            let changing = client.unary::<Empty>(&path, request);
            match timeout(Duration::from_secs(5), changing).await.ok()? {
                Ok(_) => Some(()),
                Err(status) => status.message.contains(made_before).then_some(()),
            }
        })
        .await;
    }

    fn peer(&self) -> String {
        format!("{}={}", self.name, self.advertised)
    }

    /// Client URL.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.client_port)
    }

    /// A new connection to this member.
    pub async fn client(&self) -> Client {
        Client::connect(&self.url()).await
    }

    /// Starts the process on its ports and data, without waiting until it serves.
    pub fn run(&mut self) {
        self.run_with(&[]);
    }

    /// Like [`Etcd::run`], with additional flags for this start only.
    pub fn run_with(&mut self, once: &[&str]) {
        assert!(self.process.is_none(), "already running");
        let (client, peer) = (self.url(), format!("http://127.0.0.1:{}", self.peer_port));
        let mut command = Command::new(self.version.binary());
        command
            .args([
                "--name",
                &self.name,
                "--log-level",
                "warn",
                "--initial-cluster-state",
                if self.joins { "existing" } else { "new" },
            ])
            .arg("--data-dir")
            .arg(&self.data)
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &self.advertised,
            ])
            .args([
                "--initial-cluster",
                &self.initial_cluster,
                "--initial-cluster-token",
                &self.token,
            ])
            // No test cuts the power, and disk latency is not under test.
            .arg("--unsafe-no-fsync")
            .args(&self.more)
            .args(once);
        let log = self.dir.path().join("log");
        self.process = Some(Process::spawn(&format!("etcd {}", self.name), &mut command, &log));
    }

    /// Stops; the next [`Etcd::run`] starts `version` with the same ports and data, if it can read them.
    pub fn switch(&mut self, version: Version) {
        self.stop();
        self.version = version;
    }

    /// Waits until it responds to a linearizable read, and so has a leader.
    pub async fn ready(&self) {
        let what = format!("{} of etcd {:?} serves", self.name, self.version);
        until(SOON, &what, async || {
            let client = Client::try_connect(&self.url()).await.ok()?;
            let read = RangeRequest::one("ready?");
            let answer = timeout(Duration::from_secs(5), client.range(&read)).await.ok()?;
            // With auth on, a read without credentials is refused only after the quorum was reached.
            (answer.is_ok() || answer.is_err_and(|status| status.code == 3)).then_some(())
        })
        .await;
    }

    /// Kills the process; the data stays.
    pub fn stop(&mut self) {
        self.process = None;
    }

    /// Sends `TERM` and waits for the end; the data stays.
    pub async fn terminate(&mut self) {
        self.process.take().expect("runs").terminate(SOON).await;
    }

    /// Kills the process, starts it again and waits until it serves.
    pub async fn restart(&mut self) {
        self.stop();
        self.run();
        self.ready().await;
    }

    /// Ends the process, and returns its output with what each goroutine did.
    pub async fn goroutines(&mut self) -> String {
        self.process.as_mut().expect("runs").goroutines().await
    }

    /// Suspends the process by SIGSTOP; sockets stay open.
    pub fn pause(&self) {
        self.process.as_ref().expect("runs").pause();
    }

    /// Resumes a suspended process.
    pub fn resume(&self) {
        self.process.as_ref().expect("runs").signal("CONT");
    }

    /// Saves a snapshot of the store, like `etcdctl snapshot save`.
    pub async fn save_snapshot(&self) -> PathBuf {
        let mut stream = self
            .client()
            .await
            .server_stream("/etcdserverpb.Maintenance/Snapshot", &Empty {});
        let mut bytes = Vec::new();
        while let Some(piece) = stream.next_as::<SnapshotResponse>(SOON).await {
            bytes.extend_from_slice(&piece.blob);
        }
        assert_eq!(stream.end().map(|end| end.code), Some(0), "{:?}", stream.end());
        let path = self.dir.path().join("snapshot.db");
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Stops and replaces the data by the snapshot's; [`Etcd::run`] starts it again. The cluster keeps its id if
    /// `token` is the original one (`rangecache`), and gets a new id otherwise.
    pub fn restore(&mut self, snapshot: &Path, token: &str, more: &[&str]) {
        self.stop();
        std::fs::remove_dir_all(&self.data).unwrap();
        self.token = token.to_owned();
        let restored = Command::new(tool("etcdutl"))
            .args(["snapshot", "restore"])
            .arg(snapshot)
            .arg("--data-dir")
            .arg(&self.data)
            .args(["--name", &self.name, "--initial-cluster", &self.initial_cluster])
            .args(["--initial-cluster-token", &self.token])
            .args(["--initial-advertise-peer-urls", &self.advertised])
            .args(more)
            .output()
            .unwrap();
        assert!(
            restored.status.success(),
            "{}",
            String::from_utf8_lossy(&restored.stderr)
        );
    }

    /// Copies the data directory as a disk snapshot would, while the process is suspended.
    pub fn copy_data(&self) {
        copy_data([self]);
    }

    /// Stops, and puts the data directory of the last [`Etcd::copy_data`] back; [`Etcd::run`] starts it again.
    pub fn roll_back(&mut self) {
        self.stop();
        std::fs::remove_dir_all(&self.data).unwrap();
        copy_folder(&self.data_copy(), &self.data);
    }

    /// Starts another process on a copy of this member's data, on ports of its own: both are the same cluster by its id, and
    /// their histories differ by what is written from now on alone.
    pub async fn twin(&self) -> Self {
        self.copy_data();
        let mut twin = Self::new(&self.name, self.version, &self.token);
        copy_folder(&self.data_copy(), &twin.data);
        twin.initial_cluster = twin.peer();
        twin.run();
        twin.ready().await;
        twin
    }

    fn data_copy(&self) -> PathBuf {
        self.dir.path().join("data-copy")
    }

    /// Scrapes its metrics.
    pub async fn metrics(&self) -> Metrics {
        Metrics::read(&format!("{}/metrics", self.url())).await
    }

    /// Number of calls of a gRPC `method`, such as `RangeStream`, that it has received.
    pub async fn started_calls(&self, method: &str) -> f64 {
        self.count_of("grpc_server_started_total", method).await
    }

    /// Number of calls of a gRPC `method` that it has answered.
    pub async fn handled_calls(&self, method: &str) -> f64 {
        self.count_of("grpc_server_handled_total", method).await
    }

    async fn count_of(&self, counter: &str, method: &str) -> f64 {
        let of_method = format!("grpc_method=\"{method}\"");
        self.metrics().await.sum_with_label(counter, &of_method)
    }
}

/// Copies the data directories of members as a disk snapshot of all at one moment would: none of them runs meanwhile.
fn copy_data<'a>(members: impl IntoIterator<Item = &'a Etcd> + Clone) {
    members.clone().into_iter().for_each(Etcd::pause);
    for member in members.clone() {
        copy_folder(&member.data, &member.data_copy());
    }
    members.into_iter().for_each(Etcd::resume);
}

/// Copies a folder with all that is in it, in place of what `to` held.
fn copy_folder(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A cluster of three members.
pub struct Cluster {
    pub members: Vec<Etcd>,
}

impl Cluster {
    /// Starts three members of one version, and waits until all serve.
    pub async fn start(version: Version) -> Self {
        Self::start_mixed([version; 3]).await
    }

    /// Starts three members of these versions, and waits until all serve.
    pub async fn start_mixed(versions: [Version; 3]) -> Self {
        Self::start_linked(versions, &[], async |url| url).await
    }

    /// Like [`Cluster::start_mixed`], with additional flags and with links between the members: `link` gets the peer URL that a member listens
    /// on, and returns the URL that the others connect to.
    pub async fn start_linked(
        versions: [Version; 3],
        more: &[&str],
        mut link: impl AsyncFnMut(String) -> String,
    ) -> Self {
        let mut members: Vec<_> = ["a", "b", "c"]
            .into_iter()
            .zip(versions)
            .map(|(name, version)| Etcd::new(name, version, "rangecache"))
            .collect();
        for member in &mut members {
            member.advertised = link(member.advertised.clone()).await;
        }
        let peers: Vec<_> = members.iter().map(Etcd::peer).collect();
        for member in &mut members {
            member.initial_cluster = peers.join(",");
            member.more = more.iter().map(|flag| (*flag).to_owned()).collect();
            member.run();
        }
        for member in &members {
            member.ready().await;
        }
        Self { members }
    }

    /// Copies the data directories of all members as they are at one moment; see [`Etcd::roll_back`].
    pub fn copy_data(&self) {
        copy_data(&self.members);
    }

    /// A member that is not started, to be used by [`Cluster::replace`].
    pub fn spare(&self, name: &str) -> Etcd {
        let mut spare = Etcd::new(name, self.members[0].version, "rangecache");
        spare.joins = true;
        spare
    }

    /// Removes the member `n` from the cluster and stops it, and starts `spare` in its place.
    pub async fn replace(&mut self, n: usize, spare: Etcd) {
        let id = self.members[n].client().await.status().await;
        let id = id.expect("a status").header.expect("a header").member_id;
        let other = (n + 1) % self.members.len();
        self.members[other]
            .change_members("MemberRemove", &MemberRemoveRequest { id }, "member not found")
            .await;
        self.members[n].stop();
        let added = MemberAddRequest {
            peer_urls: vec![spare.advertised.clone()],
            is_learner: false,
        };
        self.members[other]
            .change_members("MemberAdd", &added, "Peer URLs already exists")
            .await;
        self.members[n] = spare;
        let peers: Vec<_> = self.members.iter().map(Etcd::peer).collect();
        self.members[n].initial_cluster = peers.join(",");
        self.members[n].run();
        self.members[n].ready().await;
    }

    /// Index of the leader, if the members agree on one.
    pub async fn leader(&self) -> Option<usize> {
        for (n, member) in self.members.iter().enumerate() {
            let client = Client::try_connect(&member.url()).await.ok()?;
            let status = client.status().await.ok()?;
            if status.header.expect("has a header").member_id == status.leader {
                return Some(n);
            }
        }
        None
    }

    /// Client URLs of the members, in the form of `--endpoints`.
    pub fn endpoints(&self) -> String {
        self.members.iter().map(Etcd::url).collect::<Vec<_>>().join(",")
    }
}

/// A port that is free now and stays free over a restart: below the range from which the system assigns port 0 and
/// the ports of outgoing connections.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Suites that run at the same time start at different offsets.
    let offset = (std::process::id() % 180) as u16 * 100;
    for _ in 0..20_000 {
        let port = 12_000 + offset.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between 12000 and 32000");
}
