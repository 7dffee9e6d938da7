//! The rest of a list, as a RangeStream of etcd's from which pages are cut.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt};

use super::reason::StreamFallback;
use crate::cache::Entry;
use crate::etcdserverpb::RangeStreamResponse;
use crate::limits::HeldBytes;
use crate::mirror::pinned::Reading;

/// Time for etcd to send the next chunk; afterwards the page is forwarded.
pub(super) const CHUNK_TIMEOUT: Duration = Duration::from_secs(5);
/// Memory of an entry in addition to its encoded bytes (an estimate).
const ENTRY_OVERHEAD_BYTES: u64 = 64;

/// A RangeStream's messages.
pub(super) type ChunkStream =
    Pin<Box<dyn Stream<Item = Result<RangeStreamResponse, tonic::Status>> + Send + Sync>>;

/// An open stream, and the entries that were received but not asked for yet. etcd is held back by HTTP/2's flow control, so
/// that only the rest of a chunk and a receive window are held.
pub(super) struct PageSource {
    stream: ChunkStream,
    ready: VecDeque<Entry>,
    /// Keys of the whole stream, if the first page counted right.
    keys: u64,
    /// The stream's receive window, and `ready`.
    held: HeldBytes,
    /// Lets the probe watch for the compaction of the stream's revision.
    _reading: Reading,
}

impl fmt::Debug for PageSource {
    // Without the entries: keys and values must not be logged (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageSource").finish_non_exhaustive()
    }
}

impl PageSource {
    /// `stream` has `keys` keys; `held` covers its receive window, and grows with what is received.
    pub(super) fn new(stream: ChunkStream, keys: u64, held: HeldBytes, reading: Reading) -> PageSource {
        PageSource {
            stream,
            ready: VecDeque::new(),
            keys,
            held,
            _reading: reading,
        }
    }

    /// Bytes that count against the budget.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// The next `keys` entries, at least one, and what they count against the budget.
    ///
    /// # Errors
    /// Why the stream cannot give them.
    pub(super) async fn next_page(&mut self, keys: usize) -> Result<(Vec<Entry>, HeldBytes), StreamFallback> {
        while self.ready.len() < keys {
            self.receive_chunk().await?;
        }
        let entries: Vec<Entry> = self.ready.drain(..keys).collect();
        let held = self.held.split(entries.iter().map(cost_bytes).sum());
        Ok((entries, held))
    }

    /// Receives the next chunk.
    async fn receive_chunk(&mut self) -> Result<(), StreamFallback> {
        let chunk = tokio::time::timeout(CHUNK_TIMEOUT, self.stream.next())
            .await
            .map_err(|_| StreamFallback::Late)?
            // The stream ended before the keys that the first page counted.
            .ok_or(StreamFallback::Malformed)?
            .map_err(|_| StreamFallback::Broken)?;
        let Some(response) = chunk.range_response else {
            return Ok(());
        };
        // Only the last chunk has a header. Another count means another history.
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

fn cost_bytes(entry: &Entry) -> u64 {
    entry.encoded_len() as u64 + ENTRY_OVERHEAD_BYTES
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use futures_util::stream;
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;
    use crate::etcdserverpb::{RangeResponse, ResponseHeader};
    use crate::limits::ByteBudget;
    use crate::mirror::pinned::Pinned;

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

    fn source_within(messages: Messages, keys: u64, max_bytes: u64) -> (PageSource, Gauge) {
        let gauge = Gauge::default();
        let held = ByteBudget::first_come(max_bytes, &gauge).hold();
        let reading = Arc::new(Pinned::default()).read_at(7);
        // Nothing follows the messages: etcd is silent.
        let stream = stream::iter(messages).chain(stream::pending());
        (PageSource::new(Box::pin(stream), keys, held, reading), gauge)
    }

    fn source(messages: Messages, keys: u64) -> PageSource {
        source_within(messages, keys, 1 << 20).0
    }

    fn keys(entries: &[Entry]) -> Vec<&[u8]> {
        entries.iter().map(Entry::key).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn pages_are_cut_across_chunks() {
        let messages = vec![chunk(b"abc", None), chunk(b"d", None), chunk(b"ef", Some(6))];
        let (mut source, gauge) = source_within(messages, 6, 1 << 20);
        let (page, first_held) = source.next_page(2).await.unwrap();
        assert_eq!(keys(&page), [b"a", b"b"]);
        let per_entry = first_held.bytes() / 2;
        assert_eq!(
            gauge.get(),
            3 * per_entry.cast_signed(),
            "one chunk was received, not more"
        );
        let (page, _held) = source.next_page(4).await.unwrap();
        assert_eq!(keys(&page), [b"c", b"d", b"e", b"f"]);
        drop(source);
        drop((first_held, _held));
        assert_eq!(gauge.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn another_count_than_expected_is_malformed() {
        let mut source = source(vec![chunk(b"a", None), chunk(b"b", Some(3))], 2);
        assert_eq!(source.next_page(2).await.unwrap_err(), StreamFallback::Malformed);
    }

    #[tokio::test(start_paused = true)]
    async fn silent_stream_is_late() {
        let mut source = source(vec![chunk(b"a", None)], 2);
        let began = tokio::time::Instant::now();
        assert_eq!(source.next_page(2).await.unwrap_err(), StreamFallback::Late);
        assert_eq!(began.elapsed(), CHUNK_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn error_in_mid_stream_is_broken() {
        let mut source = source(
            vec![chunk(b"a", None), Err(tonic::Status::unavailable("lost"))],
            2,
        );
        assert_eq!(source.next_page(2).await.unwrap_err(), StreamFallback::Broken);
    }

    #[tokio::test(start_paused = true)]
    async fn entries_beyond_the_budget_are_refused() {
        let (mut source, gauge) = source_within(vec![chunk(b"abc", Some(3))], 3, 2 * (64 + 6));
        assert_eq!(source.next_page(3).await.unwrap_err(), StreamFallback::Budget);
        drop(source);
        assert_eq!(gauge.get(), 0);
    }
}
