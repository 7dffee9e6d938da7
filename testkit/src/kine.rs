//! Kine, a server with etcd's interface on a SQL database: here SQLite in a file. It has no cluster id, no auth and no
//! leases of etcd's kind, and reads and writes in the forms that kube-apiserver sends.

use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::timeout;

use crate::etcd::free_port;
use crate::grpc::Client;
use crate::pb::RangeRequest;
use crate::process::{Process, tool};
use crate::wait::{SOON, until};

/// A running Kine, killed on drop.
pub struct Kine {
    url: String,
    _process: Process,
    _dir: TempDir,
}

impl Kine {
    /// Starts it, and waits until it serves.
    pub async fn start() -> Self {
        let dir = TempDir::with_prefix("rangecache-kine-").unwrap();
        let port = free_port();
        let database = dir.path().join("state.db");
        let mut command = Command::new(tool("kine"));
        command
            .args(["--listen-address", &format!("127.0.0.1:{port}")])
            .args(["--metrics-bind-address", "0"])
            .args(["--endpoint", &format!("sqlite://{}", database.display())]);
        let process = Process::spawn("kine", &mut command, &dir.path().join("log"));
        let kine = Self {
            url: format!("http://127.0.0.1:{port}"),
            _process: process,
            _dir: dir,
        };
        until(SOON, "kine serves", async || {
            let client = Client::try_connect(&kine.url).await.ok()?;
            let read = RangeRequest::one("ready?");
            let answer = timeout(Duration::from_secs(5), client.range(&read)).await.ok()?;
            answer.is_ok().then_some(())
        })
        .await;
        kine
    }

    /// URL for clients.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A new connection to it.
    pub async fn client(&self) -> Client {
        Client::connect(&self.url).await
    }
}
