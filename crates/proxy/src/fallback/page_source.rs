//! RangeStream of the remaining keys of a list, which is split into pages.

use std::{collections::VecDeque, fmt, pin::Pin, time::Duration};

use etcd_store::cache::Entry;
use etcd_wire::etcdserverpb::RangeStreamResponse;
use futures_util::{Stream, StreamExt};
use rangecache_edge::limits::HeldBytes;
use rangecache_mirror::view::Reading;
use tokio::time::Instant;

use super::reason::StreamFallback;

/// Timeout for the next chunk from etcd. The page is then forwarded.
pub(super) const CHUNK_TIMEOUT: Duration = Duration::from_secs(5);
/// Estimated memory of an entry in addition to its encoded bytes.
const ENTRY_OVERHEAD_BYTES: u64 = 64;

/// Messages of a RangeStream.
pub(super) type ChunkStream =
    Pin<Box<dyn Stream<Item = Result<RangeStreamResponse, tonic::Status>> + Send + Sync>>;

/// Open RangeStream, with the entries that were received but not requested yet.
///
/// Chunks are received only when a page needs them; HTTP/2 flow control then stops etcd from sending. Memory is
/// bounded by one chunk and one receive window.
pub(super) struct PageSource {
    stream: ChunkStream,
    /// Received entries of the next page.
    ready: VecDeque<Entry>,
    /// Number of keys that the stream must have, according to the count of the list's first page.
    keys: u64,
    /// Budget for the stream's receive window and `ready`.
    held: HeldBytes,
    /// Registers the stream's revision, so that the probe checks whether it is compacted.
    _reading: Reading,
    /// When the stream's connection was opened, and when the stream was.
    pub(super) opened: (Instant, Instant),
}

impl fmt::Debug for PageSource {
    // Omits the entries: keys and values must not be logged (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageSource").finish_non_exhaustive()
    }
}

impl PageSource {
    /// Creates a source from a `stream` of `keys` keys. `held` covers its receive window, and grows with received
    /// entries.
    pub(super) fn new(
        stream: ChunkStream,
        keys: u64,
        held: HeldBytes,
        reading: Reading,
        opened: (Instant, Instant),
    ) -> PageSource {
        PageSource {
            stream,
            ready: VecDeque::new(),
            keys,
            held,
            _reading: reading,
            opened,
        }
    }

    /// Bytes of the budget that the source uses.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Returns the next `keys` entries with their share of the budget. `keys` must be at least 1.
    ///
    /// # Errors
    /// [`StreamFallback`] if the stream cannot provide them. The source must then be dropped.
    pub(super) async fn next_page(&mut self, keys: usize) -> Result<(Vec<Entry>, HeldBytes), StreamFallback> {
        while self.ready.len() < keys {
            self.receive_chunk().await?;
        }
        let entries: Vec<Entry> = self.ready.drain(..keys).collect();
        let held = self.held.split(entries.iter().map(cost_bytes).sum());
        Ok((entries, held))
    }

    /// Receives one chunk and appends its entries to `ready`.
    async fn receive_chunk(&mut self) -> Result<(), StreamFallback> {
        let chunk = tokio::time::timeout(CHUNK_TIMEOUT, self.stream.next())
            .await
            .map_err(|_| StreamFallback::Late)?
            // The stream ended before the number of keys that the first page counted.
            .ok_or(StreamFallback::Malformed)?
            .map_err(|_| StreamFallback::Broken)?;
        let Some(response) = chunk.range_response else {
            return Ok(());
        };
        // Only the last chunk has a header and a count. A different count means that history was replaced.
        if response.header.is_some() && u64::try_from(response.count) != Ok(self.keys) {
            return Err(StreamFallback::Malformed);
        }
        for key_value in &response.kvs {
            let entry = Entry::from_key_value(key_value).map_err(|_| StreamFallback::Malformed)?;
            self.held
                .try_grow(cost_bytes(&entry))
                .map_err(|_| StreamFallback::Budget)?;
            self.ready.push_back(entry);
        }
        Ok(())
    }
}

/// Bytes of `entry` that count against the budget.
fn cost_bytes(entry: &Entry) -> u64 {
    entry.encoded_len() as u64 + ENTRY_OVERHEAD_BYTES
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use etcd_wire::etcdserverpb::{RangeResponse, ResponseHeader};
    use futures_util::stream;
    use rangecache_edge::limits::{ByteKind, ClientAccount};
    use rangecache_mirror::view::Pinned;

    use super::*;
    use crate::call::testing::account;

    type Messages = Vec<Result<RangeStreamResponse, tonic::Status>>;

    fn key_value(key: u8) -> Bytes {
        vec![0x0a, 1, key, 0x2a, 1, b'v'].into()
    }

    fn chunk(keys: &[u8], count: Option<i64>) -> Result<RangeStreamResponse, tonic::Status> {
        let response = RangeResponse {
            header: count.map(|_| ResponseHeader::default()),
            kvs: keys.iter().copied().map(key_value).collect(),
            count: count.unwrap_or_default(),
            more: false,
        };
        Ok(RangeStreamResponse {
            range_response: Some(response),
        })
    }

    /// A source with seven eighths of `max_bytes`, as every client has, and the account in which it counts.
    fn source_within(messages: Messages, keys: u64, max_bytes: u64) -> (PageSource, Arc<ClientAccount>) {
        let account = account(8 * max_bytes);
        let held = account.hold(ByteKind::Series);
        let reading = Arc::new(Pinned::default()).read_at(7);
        // etcd sends the messages, and then stalls.
        let stream = stream::iter(messages).chain(stream::pending());
        (
            PageSource::new(
                Box::pin(stream),
                keys,
                held,
                reading,
                (Instant::now(), Instant::now()),
            ),
            account,
        )
    }

    fn used(account: &ClientAccount) -> u64 {
        account.ledger().used_bytes(ByteKind::Series)
    }

    fn source(messages: Messages, keys: u64) -> PageSource {
        source_within(messages, keys, 1 << 20).0
    }

    fn keys(entries: &[Entry]) -> Vec<&[u8]> {
        entries.iter().map(Entry::key).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn page_spans_several_chunks() {
        let messages = vec![chunk(b"abc", None), chunk(b"d", None), chunk(b"ef", Some(6))];
        let (mut source, account) = source_within(messages, 6, 1 << 20);
        let (page, first_held) = source.next_page(2).await.unwrap();
        assert_eq!(keys(&page), [b"a", b"b"]);
        let per_entry = first_held.bytes() / 2;
        assert_eq!(used(&account), 3 * per_entry, "only one chunk was received");
        let (page, _held) = source.next_page(4).await.unwrap();
        assert_eq!(keys(&page), [b"c", b"d", b"e", b"f"]);
        drop(source);
        drop((first_held, _held));
        assert_eq!(used(&account), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn unexpected_count_is_malformed() {
        let mut source = source(vec![chunk(b"a", None), chunk(b"b", Some(3))], 2);
        assert_eq!(source.next_page(2).await.unwrap_err(), StreamFallback::Malformed);
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_stream_is_late() {
        let mut source = source(vec![chunk(b"a", None)], 2);
        let began = tokio::time::Instant::now();
        assert_eq!(source.next_page(2).await.unwrap_err(), StreamFallback::Late);
        assert_eq!(began.elapsed(), CHUNK_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn status_in_mid_stream_is_broken() {
        let mut source = source(
            vec![chunk(b"a", None), Err(tonic::Status::unavailable("lost"))],
            2,
        );
        assert_eq!(source.next_page(2).await.unwrap_err(), StreamFallback::Broken);
    }

    #[tokio::test(start_paused = true)]
    async fn entries_beyond_the_budget_are_refused() {
        let (mut source, account) = source_within(vec![chunk(b"abc", Some(3))], 3, 160);
        assert_eq!(source.next_page(3).await.unwrap_err(), StreamFallback::Budget);
        drop(source);
        assert_eq!(used(&account), 0);
    }
}
