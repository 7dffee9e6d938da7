//! `rangecache diff`: compares the keys of two endpoints at one revision, such as those of etcd and of a rangecache in front
//! of it, or of two clusters.
//!
//! Both endpoints are read in key order, so that one page of each is in memory. Values are compared, and never printed.
//! This room imports `config`, `upstream`, `tls`, `cache` (entries), `keyspace` and `telemetry`; only `main` and `cli` import it.

use std::io::{self, Write as _};
use std::{
    cmp::Ordering, collections::VecDeque, fmt, path::PathBuf, process::ExitCode, sync::Arc, time::Duration,
};

use bytes::Bytes;
use clap::{Args, Parser as _};
use etcd_store::cache::Entry;
use etcd_store::keyspace::{prefix_end, successor};
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse, kv_client::KvClient};
use rangecache_base::{net::Url, telemetry::Metrics};
use rangecache_config::Config;
use rangecache_edge::tls::Connector;
use rangecache_upstream::{Connection, Credentials, Secret, header_request};
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

/// Exit code if the endpoints cannot be compared.
const NOT_COMPARED: u8 = 2;

/// A key that is not the same on both sides.
#[derive(Debug)]
struct KeyDifference {
    key: Vec<u8>,
    kind: DifferenceKind,
}

#[derive(Debug)]
enum DifferenceKind {
    OnlyA,
    OnlyB,
    /// Modification revisions of A and B.
    Differs(i64, i64),
}

impl fmt::Display for KeyDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key.escape_ascii();
        match self.kind {
            DifferenceKind::OnlyA => write!(f, "only in A  {key}"),
            DifferenceKind::OnlyB => write!(f, "only in B  {key}"),
            DifferenceKind::Differs(a, b) if a == b => write!(f, "differs    {key}  (both modified at {a})"),
            DifferenceKind::Differs(a, b) => write!(f, "differs    {key}  (modified at {a} in A, {b} in B)"),
        }
    }
}

/// Result of a comparison.
#[derive(Debug)]
struct DiffSummary {
    revision: i64,
    /// Keys that were compared, those of one side alone included.
    keys: u64,
    differences: u64,
    /// Whether the comparison ended at the limit.
    is_cut: bool,
}

impl DiffSummary {
    /// Whether all keys are the same.
    fn is_equal(&self) -> bool {
        self.differences == 0
    }
}

impl fmt::Display for DiffSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DiffSummary {
            revision,
            keys,
            differences,
            is_cut,
        } = self;
        match (differences, is_cut) {
            (0, _) => write!(f, "equal: {keys} keys at revision {revision}"),
            (_, true) => write!(
                f,
                "different: {differences} of the first {keys} keys at revision {revision}; raise --limit for more"
            ),
            (_, false) => write!(
                f,
                "different: {differences} of {keys} keys at revision {revision}"
            ),
        }
    }
}

/// Compares two endpoints, and prints the keys that differ as they are found.
#[must_use]
pub fn run(options: &DiffConfig) -> ExitCode {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::from(NOT_COMPARED);
    };
    // A reader that closes the pipe early is not an error.
    let compared = runtime.block_on(compare(options, |difference| {
        let _ = writeln!(io::stdout(), "{difference}");
    }));
    match compared {
        Ok(summary) if summary.keys == 0 => {
            let _ = writeln!(
                io::stderr(),
                "rangecache diff: neither endpoint has a key there at revision {}: nothing was compared; check --prefix",
                summary.revision
            );
            ExitCode::from(NOT_COMPARED)
        }
        Ok(summary) => {
            let _ = writeln!(io::stdout(), "{summary}");
            ExitCode::from(u8::from(!summary.is_equal()))
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "rangecache diff: {error}");
            ExitCode::from(NOT_COMPARED)
        }
    }
}

/// Compares the endpoints; passes each difference to `found`, as many as the limit permits.
///
/// # Errors
/// What prevents the comparison, in words.
async fn compare(options: &DiffConfig, mut found: impl FnMut(&KeyDifference)) -> Result<DiffSummary, String> {
    let connections = options.connections();
    // Throwaway registry; these metrics are discarded.
    let connector = connections
        .connector(&Arc::new(Metrics::new()))
        .map_err(|error| error.to_string())?;
    let account = connections.etcd.account().map_err(|error| error.to_string())?;
    let tasks = TaskTracker::new();
    let open = async |name, url| {
        // A token is valid on the cluster that has issued it.
        let credentials = Credentials::new(account.clone());
        Side::open(name, url, options, &connector, &credentials, &tasks).await
    };
    let mut a = open("A", &options.a).await?;
    let mut b = open("B", &options.b).await?;
    let newest = a.newest.min(b.newest);
    let revision = options.revision.unwrap_or(newest);
    if revision > newest {
        let behind = if a.newest < b.newest { &a } else { &b };
        return Err(format!("{behind} is at revision {newest}, below {revision}"));
    }
    a.revision = revision;
    b.revision = revision;
    let mut summary = DiffSummary {
        revision,
        keys: 0,
        differences: 0,
        is_cut: false,
    };
    loop {
        let order = match (a.peek().await?, b.peek().await?) {
            (None, None) => return Ok(summary),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(of_a), Some(of_b)) => of_a.key().cmp(of_b.key()),
        };
        let of_a = if order.is_le() { a.take() } else { None };
        let of_b = if order.is_ge() { b.take() } else { None };
        summary.keys += 1;
        if let Some(difference) = difference(of_a, of_b) {
            found(&difference);
            summary.differences += 1;
            if summary.differences == options.limit {
                summary.is_cut = a.peek().await?.is_some() || b.peek().await?.is_some();
                return Ok(summary);
            }
        }
    }
}

/// The difference between what both sides have of one key.
fn difference(a: Option<Entry>, b: Option<Entry>) -> Option<KeyDifference> {
    let (key, kind) = match (&a, &b) {
        (None, None) => return None,
        (Some(a), None) => (a.key(), DifferenceKind::OnlyA),
        (None, Some(b)) => (b.key(), DifferenceKind::OnlyB),
        (Some(a), Some(b)) if a.encoded().contiguous() == b.encoded().contiguous() => return None,
        (Some(a), Some(b)) => (
            a.key(),
            DifferenceKind::Differs(a.mod_revision(), b.mod_revision()),
        ),
    };
    Some(KeyDifference {
        key: key.to_vec(),
        kind,
    })
}

/// Flags of `rangecache diff`.
#[derive(Args, Debug, Clone)]
pub struct DiffConfig {
    /// First endpoint: http://host:port, https://host:port or unix:///path
    #[arg(value_name = "A")]
    pub a: Url,

    /// Second endpoint
    #[arg(value_name = "B")]
    pub b: Url,

    /// Prefix of the keys to compare [default: every key]
    ///
    /// When to change it: compare only the keys with this prefix
    #[arg(long, value_name = "PREFIX")]
    pub prefix: Option<String>,

    /// Revision at which both are read [default: the lower one of their newest revisions]
    ///
    /// When to change it: read both at this past revision instead of the lower one of their newest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    pub revision: Option<i64>,

    /// Differing keys to print; the comparison ends behind the last of them
    ///
    /// When to change it: more differing keys should be printed
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: u64,

    /// Keys per page: one page of each endpoint is in memory
    ///
    /// When to change it: fewer with very large values: one page of each endpoint is in memory
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u16).range(1..))]
    pub page_keys: u16,

    /// File with the CAs of both endpoints' certificates [default: the system's CAs]
    #[arg(long, value_name = "PATH")]
    pub cacert: Option<PathBuf>,

    /// Client certificate for both endpoints
    #[arg(long, value_name = "PATH", requires = "key")]
    pub cert: Option<PathBuf>,

    /// Private key of --cert
    #[arg(long, value_name = "PATH", requires = "cert")]
    pub key: Option<PathBuf>,

    /// etcd user on both endpoints, where etcd's auth is on; needs read access to what is compared
    #[arg(long, value_name = "NAME[:PASSWORD]")]
    pub user: Option<Secret>,

    /// Password for --user (then --user is only the name). Prefer --password-file
    #[arg(long, value_name = "PASSWORD")]
    pub password: Option<Secret>,

    /// File whose first line is the password for --user
    #[arg(long, value_name = "PATH", conflicts_with = "password")]
    pub password_file: Option<PathBuf>,
}

impl DiffConfig {
    /// Settings of the connections to both endpoints.
    #[must_use]
    pub fn connections(&self) -> Config {
        let mut config = Config::parse_from(["rangecache"]);
        config.etcd.endpoints = vec![self.a.clone(), self.b.clone()];
        config.tls.cacert.clone_from(&self.cacert);
        config.tls.cert.clone_from(&self.cert);
        config.tls.key.clone_from(&self.key);
        config.etcd.user.clone_from(&self.user);
        config.etcd.password.clone_from(&self.password);
        config.etcd.password_file.clone_from(&self.password_file);
        config
    }
}

/// Timeout of each call, and of the attempt to connect.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Endpoint of the comparison.
struct Side {
    name: &'static str,
    url: Url,
    connection: Arc<Connection>,
    /// Newest revision when the endpoint was connected.
    newest: i64,
    /// Revision of every page.
    revision: i64,
    /// First key of the next page; `None` after the last.
    next: Option<Bytes>,
    end: Bytes,
    page_keys: u16,
    page: VecDeque<Entry>,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.url)
    }
}

impl Side {
    /// Connects, and reads the newest revision, linearizably.
    ///
    /// # Errors
    /// What prevents that, in words.
    async fn open(
        name: &'static str,
        url: &Url,
        options: &DiffConfig,
        connector: &Connector,
        credentials: &Arc<Credentials>,
        tasks: &TaskTracker,
    ) -> Result<Side, String> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let (connection, _driver) =
            rangecache_upstream::open_once(connector, url, credentials, tasks, deadline)
                .await
                .map_err(|error| format!("{name}: {error}"))?;
        timeout(
            CALL_TIMEOUT,
            rangecache_upstream::authenticate_once(credentials, &connection),
        )
        .await
        .map_err(|_| format!("{name}: {url} issued no token within {CALL_TIMEOUT:?}"))?
        .map_err(|status| {
            format!(
                "{name}: {url} refuses --user or its password: {}",
                status.message()
            )
        })?;
        let prefix = options.prefix.as_deref().unwrap_or_default().as_bytes();
        let start = if prefix.is_empty() { b"\0" } else { prefix };
        let mut side = Side {
            name,
            url: url.clone(),
            connection,
            newest: 0,
            revision: 0,
            next: Some(Bytes::copy_from_slice(start)),
            // To the last key, if the prefix has no end.
            end: prefix_end(prefix).unwrap_or(Bytes::from_static(b"\0")),
            page_keys: options.page_keys,
            page: VecDeque::new(),
        };
        let response = side.range(header_request(Bytes::copy_from_slice(start))).await?;
        side.newest = response.header.map_or(0, |header| header.revision);
        Ok(side)
    }

    async fn range(&self, request: RangeRequest) -> Result<RangeResponse, String> {
        let (channel, origin) = self.connection.own_channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        match timeout(CALL_TIMEOUT, client.range(request)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(format!("{self}: {} ({:?})", status.message(), status.code())),
            Err(_) => Err(format!("{self}: no response within {CALL_TIMEOUT:?}")),
        }
    }

    /// The next key with what the endpoint has of it; `None` behind the last one.
    ///
    /// # Errors
    /// What prevents the next page, in words.
    async fn peek(&mut self) -> Result<Option<&Entry>, String> {
        if self.page.is_empty()
            && let Some(key) = self.next.take()
        {
            let response = self
                .range(RangeRequest {
                    key,
                    range_end: self.end.clone(),
                    revision: self.revision,
                    limit: i64::from(self.page_keys),
                    ..RangeRequest::default()
                })
                .await?;
            for kv in &response.kvs {
                let entry = Entry::from_key_value(kv).map_err(|error| format!("{self}: {error}"))?;
                self.page.push_back(entry);
            }
            if response.more {
                self.next = self.page.back().map(|last| successor(last.key()));
            }
        }
        Ok(self.page.front())
    }

    /// Takes the key of the last [`Side::peek`].
    fn take(&mut self) -> Option<Entry> {
        self.page.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::testing::KeyValue;

    use super::*;

    fn found(a: Option<&KeyValue>, b: Option<&KeyValue>) -> Option<String> {
        difference(a.map(KeyValue::entry), b.map(KeyValue::entry)).map(|difference| difference.to_string())
    }

    #[test]
    fn key_differs_if_any_field_does_and_its_value_is_never_printed() {
        let one = KeyValue::new("a\n1", 5, "secret");
        let later = KeyValue::new("a\n1", 7, "secret");
        let other = KeyValue::new("a\n1", 5, "changed");
        let leased = KeyValue {
            lease: 3,
            ..one.clone()
        };
        assert_eq!(found(None, None), None);
        assert_eq!(found(Some(&one), Some(&one)), None);
        assert_eq!(found(Some(&one), None).unwrap(), "only in A  a\\n1");
        assert_eq!(found(None, Some(&one)).unwrap(), "only in B  a\\n1");
        assert_eq!(
            found(Some(&one), Some(&later)).unwrap(),
            "differs    a\\n1  (modified at 5 in A, 7 in B)"
        );
        for same_revision in [&other, &leased] {
            let text = found(Some(&one), Some(same_revision)).unwrap();
            assert_eq!(text, "differs    a\\n1  (both modified at 5)");
        }
    }

    #[test]
    fn summary_says_what_was_compared_and_whether_there_is_more() {
        let summary = |differences, is_cut| DiffSummary {
            revision: 9,
            keys: 3,
            differences,
            is_cut,
        };
        assert!(summary(0, false).is_equal() && !summary(1, false).is_equal());
        assert_eq!(summary(0, false).to_string(), "equal: 3 keys at revision 9");
        assert_eq!(
            summary(2, false).to_string(),
            "different: 2 of 3 keys at revision 9"
        );
        assert_eq!(
            summary(2, true).to_string(),
            "different: 2 of the first 3 keys at revision 9; raise --limit for more"
        );
    }
}
