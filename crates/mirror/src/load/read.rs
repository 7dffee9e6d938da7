//! Reads of a scope at one revision: as one RangeStream where etcd has it, otherwise page by page.

use std::sync::Arc;

use bytes::Bytes;
use etcd_store::{cache::ResponseHeader, keyspace::successor};
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse, kv_client::KvClient};
use rangecache_base::telemetry::metrics::gauge;
use rangecache_upstream::{Channel, Connection, is_too_large};
use tonic::Code;

use super::begin::{Load, LoadError, PIECE_TIMEOUT};
use crate::metrics::StreamFallbacks;

/// Receiver of what is read.
pub(super) trait Sink {
    /// The last key that has arrived; `None` before the first.
    fn last_key(&self) -> Option<Bytes>;

    /// Limit of the next page.
    fn page_limit(&self) -> i64;

    /// Takes one page or chunk.
    async fn add(&mut self, response: RangeResponse) -> Result<(), LoadError>;
}

/// Reader of one load.
#[derive(Clone, Copy)]
pub(super) struct LoadReader<'a> {
    pub(super) load: &'a Load<'a>,
    /// etcd's header at the revision of the load.
    pub(super) pinned: ResponseHeader,
}

impl<'a> LoadReader<'a> {
    /// Begins a load at the revision of `pinned`.
    pub(super) fn new(load: &'a Load<'a>, pinned: ResponseHeader) -> LoadReader<'a> {
        load.mirror.metrics.load_keys.set(0);
        load.mirror.metrics.load_bytes.set(0);
        LoadReader { load, pinned }
    }

    /// Counts what was read.
    pub(super) fn record(&self, key_values: &[Bytes]) {
        let metrics = &self.load.mirror.metrics;
        metrics.load_keys.inc_by(gauge(key_values.len() as u64));
        let bytes: u64 = key_values.iter().map(|key_value| key_value.len() as u64).sum();
        metrics.load_bytes.inc_by(gauge(bytes));
    }

    /// Reads the scope's keys behind those that `sink` has, without their values if `keys_only`.
    pub(super) async fn read(
        &self,
        connection: &Arc<Connection>,
        keys_only: bool,
        sink: &mut impl Sink,
    ) -> Result<(), LoadError> {
        let load = self.load;
        let mut client = self.client(connection);
        let reason = match load.upstream.lacks_range_stream(connection) {
            Some(reason) => reason,
            None => match self.by_stream(&mut client, keys_only, sink).await {
                // An etcd, or a proxy in front of it, without the method: nothing has arrived yet.
                Err(LoadError::Status(status)) if status.code() == Code::Unimplemented => {
                    connection.refused_range_stream(status.message())
                }
                // Ten keys, the first chunk, may be more than one message may have.
                Err(LoadError::Status(status)) if is_too_large(&status) => {
                    return self.by_pages(&mut client, keys_only, sink).await;
                }
                other => return other,
            },
        };
        load.telemetry
            .metrics
            .group::<StreamFallbacks>()
            .record(reason.as_str());
        self.by_pages(&mut client, keys_only, sink).await
    }

    /// A client that refuses messages that do not fit.
    pub(super) fn client(&self, connection: &Arc<Connection>) -> KvClient<Channel> {
        let (channel, origin) = connection.own_channel();
        KvClient::with_origin(channel, origin).max_decoding_message_size(self.load.set.max_message_bytes())
    }

    /// A request for the remaining keys.
    fn rest(&self, keys_only: bool, sink: &impl Sink) -> RangeRequest {
        let scope = &self.load.mirror.scope;
        RangeRequest {
            key: sink
                .last_key()
                .map_or_else(|| scope.key(), |last| successor(&last)),
            range_end: scope.range_end(),
            revision: self.pinned.revision,
            keys_only,
            ..RangeRequest::default()
        }
    }

    async fn by_stream(
        &self,
        client: &mut KvClient<Channel>,
        keys_only: bool,
        sink: &mut impl Sink,
    ) -> Result<(), LoadError> {
        let call = client.range_stream(self.rest(keys_only, sink));
        let mut stream = tokio::time::timeout(PIECE_TIMEOUT, call)
            .await
            .map_err(|_| LoadError::TimedOut)??
            .into_inner();
        let mut is_whole = false;
        loop {
            let piece = tokio::time::timeout(PIECE_TIMEOUT, stream.message());
            let Some(chunk) = piece.await.map_err(|_| LoadError::TimedOut)?? else {
                break;
            };
            if let Some(response) = chunk.range_response {
                // Only the last chunk has a header.
                is_whole |= response.header.is_some();
                self.record(&response.kvs);
                sink.add(response).await?;
            }
        }
        if is_whole {
            Ok(())
        } else {
            Err(LoadError::NoRevision)
        }
    }

    async fn by_pages(
        &self,
        client: &mut KvClient<Channel>,
        keys_only: bool,
        sink: &mut impl Sink,
    ) -> Result<(), LoadError> {
        let mut largest = i64::MAX;
        loop {
            let limit = sink.page_limit().min(largest);
            let request = RangeRequest {
                limit,
                ..self.rest(keys_only, sink)
            };
            let response = match page(client, request).await {
                Err(LoadError::Status(status)) if is_too_large(&status) && limit > 1 => {
                    largest = limit / 2;
                    continue;
                }
                response => response?,
            };
            largest = largest.saturating_mul(2);
            let is_last = !response.more || response.kvs.is_empty();
            self.record(&response.kvs);
            sink.add(response).await?;
            if is_last {
                return Ok(());
            }
        }
    }
}

/// etcd's response to one page.
pub(super) async fn page(
    client: &mut KvClient<Channel>,
    request: RangeRequest,
) -> Result<RangeResponse, LoadError> {
    let response = tokio::time::timeout(PIECE_TIMEOUT, client.range(request));
    Ok(response.await.map_err(|_| LoadError::TimedOut)??.into_inner())
}
