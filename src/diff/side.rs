//! Endpoint of the comparison, read page by page.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use super::flags::DiffConfig;
use etcd_store::cache::Entry;
use etcd_store::keyspace::{prefix_end, successor};
use etcd_wire::etcdserverpb::kv_client::KvClient;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse};
use rangecache_base::net::Url;
use rangecache_edge::tls::Connector;
use rangecache_upstream::{Connection, Credentials, header_request};

/// Timeout of each call, and of the attempt to connect.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Endpoint of the comparison.
pub(super) struct Side {
    name: &'static str,
    url: Url,
    connection: Arc<Connection>,
    /// Newest revision when the endpoint was connected.
    pub(super) newest: i64,
    /// Revision of every page.
    pub(super) revision: i64,
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
    pub(super) async fn open(
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
    pub(super) async fn peek(&mut self) -> Result<Option<&Entry>, String> {
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
    pub(super) fn take(&mut self) -> Option<Entry> {
        self.page.pop_front()
    }
}
