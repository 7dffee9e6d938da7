//! Verification: a background comparison of each mirror with etcd (the detector of KEP-2340). A mirror that differs
//! is taken out of service at once and reloaded.
//!
//! A mirror is compared piece by piece. Each piece is read from etcd at the mirror's current revision, so that no
//! revision has to stay uncompacted for longer than one small read. A piece is bounded by two keys of the mirror, so
//! that etcd counts only the piece: keys that the mirror lacks make the counts differ. Entries and counts are
//! compared, entries byte for byte. [`pause_after`] limits the load on etcd.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_store::cache::Tree;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse, kv_client::KvClient};
use rangecache_base::telemetry::{Reason, trace::SpanExt as _};
use rangecache_upstream::{Channel, Connection, MAX_MESSAGE_BYTES, ReceiveWindow, jittered, pause_after};
use tokio::time::Instant;
use tonic::Code;

use super::lineage::History;
use super::mirrors::{Mirrors, background};
use super::view::{Epoch, Mirror, View};

/// Largest piece in bytes; a single larger entry is a piece of its own.
const PIECE_BYTES: u64 = 512 << 10;
/// Largest piece in keys.
const PIECE_KEYS: u64 = 1000;
/// Attempts at one piece while etcd does not have the mirror's revision: not yet, or no longer (compacted).
const ATTEMPTS: u32 = 20;
const ATTEMPT_PAUSE: Duration = Duration::from_millis(250);
/// Timeout for connecting, and for one piece.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why a mirror could not be compared with etcd.
#[derive(Debug, thiserror::Error)]
enum Unverified {
    #[error("{0}")]
    NoEndpoint(String),
    #[error("etcd: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    #[error("etcd did not respond in time")]
    TimedOut,
    #[error("the response is of another cluster")]
    AnotherCluster,
}

/// Result for one mirror.
#[derive(Debug)]
enum Verified {
    /// Every entry equals etcd's.
    Same,
    /// The mirror went out of service.
    Out,
    /// The mirror differs from etcd.
    Different(PieceDifference),
}

/// Difference of a piece. Carries neither keys nor values (I10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PieceDifference {
    revision: i64,
    /// Keys of the piece in etcd, and in the mirror.
    etcd_keys: u64,
    mirror_keys: u64,
    /// Rank of the first entry that differs, within the piece.
    first: u64,
}

/// Verifies every mirror, each `interval` (with jitter), until cancelled.
pub(super) async fn run(mirrors: &Mirrors, interval: Duration) {
    let telemetry = &mirrors.telemetry;
    loop {
        tokio::time::sleep(jittered(interval)).await;
        for mirror in mirrors.all() {
            let span = background(telemetry, "verify", mirror);
            let result = match verify(mirrors, mirror).await {
                Ok(Verified::Same) => "same",
                Ok(Verified::Out) => "out_of_service",
                Ok(Verified::Different(difference)) => {
                    mirror.metrics.mismatches.inc();
                    tracing::error!(
                        mirror = mirror.name,
                        revision = difference.revision,
                        keys_in_etcd = difference.etcd_keys,
                        keys_in_mirror = difference.mirror_keys,
                        first_difference = difference.first,
                        "the mirror differs from etcd; it is out of service and is being reloaded. This is a member of \
                         etcd that differs from the others, a history of etcd that was replaced a moment ago, or a bug in \
                         rangecache: unless etcd was restored, please report it"
                    );
                    "different"
                }
                Err(error) => {
                    tracing::info!(mirror = mirror.name, %error,
                        "verification failed; it is retried at the next interval");
                    "failed"
                }
            };
            mirror.metrics.verifications.of(result).inc();
            if let Some(mut span) = span {
                span.set("rangecache.outcome", result);
                if result == "different" {
                    span.fail(result);
                }
                telemetry.tracer.end(*span);
            }
        }
    }
}

/// Compares one mirror with etcd; a mirror that differs is out of service when this returns.
async fn verify(mirrors: &Mirrors, mirror: &Mirror) -> Result<Verified, Unverified> {
    let deadline = Instant::now() + RESPONSE_TIMEOUT;
    let connection = mirrors
        .upstream
        .dedicated(ReceiveWindow::SHARED, None, deadline)
        .await
        .map_err(|error| Unverified::NoEndpoint(error.to_string()))?;
    let mut from = mirror.scope.key();
    loop {
        let (epoch, view, piece, answer) = match read(mirror, &connection, &from).await? {
            Some(read) => read,
            None => return Ok(Verified::Out),
        };
        check_cluster(&mirrors.cluster_state.current(), &answer.response)?;
        mirrors.metrics.verify_bytes.inc_by(answer.bytes);
        if let Err(difference) = piece.compare(&view, &answer.response) {
            // A stale epoch means that the contents were replaced meanwhile: no read is served from them.
            return Ok(match mirror.end_epoch(epoch, Reason::Mismatch) {
                Ok(()) => Verified::Different(difference),
                Err(_) => Verified::Out,
            });
        }
        let Some(next) = piece.next else {
            return Ok(Verified::Same);
        };
        from = next;
        tokio::time::sleep(pause_after(answer.bytes, answer.took)).await;
    }
}

/// Checks that `response` may be of `history`: members of several clusters may be behind one name.
fn check_cluster(history: &History, response: &RangeResponse) -> Result<(), Unverified> {
    let cluster_id = response.header.as_ref().map_or(0, |header| header.cluster_id);
    if history.may_be_of_cluster(cluster_id) {
        Ok(())
    } else {
        Err(Unverified::AnotherCluster)
    }
}

struct PieceRead {
    response: RangeResponse,
    bytes: u64,
    took: Duration,
}

/// Reads the piece that starts at `from` from the mirror, and at the same revision from etcd; `None` if the mirror is
/// out of service.
async fn read(
    mirror: &Mirror,
    connection: &Arc<Connection>,
    from: &Bytes,
) -> Result<Option<(Epoch, View, TreeRange, PieceRead)>, Unverified> {
    let (channel, origin) = connection.own_channel();
    let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let mut attempt = 0;
    loop {
        // In this order: if the view belongs to a later epoch, a difference is rejected as stale instead of ending
        // that epoch.
        let epoch = mirror.epoch();
        let Ok(view) = mirror.view() else {
            return Ok(None);
        };
        let piece = TreeRange::cut(&view.tree, from, mirror.scope.range_end());
        let mut request = tonic::Request::new(piece.request(view.revision));
        connection.set_bypass(request.metadata_mut().as_mut());
        match send_request(&mut client, request).await {
            Ok(answer) => return Ok(Some((epoch, view, piece, answer))),
            // The member lags behind the mirror, or has compacted past it: the mirror's next revision will do.
            Err(Unverified::Status(status)) if status.code() == Code::OutOfRange && attempt < ATTEMPTS => {
                attempt += 1;
                tokio::time::sleep(ATTEMPT_PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

async fn send_request(
    client: &mut KvClient<Channel>,
    request: tonic::Request<RangeRequest>,
) -> Result<PieceRead, Unverified> {
    let began = Instant::now();
    let response = tokio::time::timeout(RESPONSE_TIMEOUT, client.range(request))
        .await
        .map_err(|_| Unverified::TimedOut)??
        .into_inner();
    Ok(PieceRead {
        bytes: response.kvs.iter().map(|kv| kv.len() as u64).sum(),
        took: began.elapsed(),
        response,
    })
}

/// Consecutive entries of a tree, and the key range between their bounds.
#[derive(Debug)]
struct TreeRange {
    from: Bytes,
    end: Bytes,
    rank: u64,
    keys: u64,
    /// First key of the next piece.
    next: Option<Bytes>,
}

impl TreeRange {
    /// The read of the piece at `revision`.
    fn request(&self, revision: i64) -> RangeRequest {
        RangeRequest {
            key: self.from.clone(),
            range_end: self.end.clone(),
            // One more than expected: a mirror that lacks many keys must not make etcd send them all.
            limit: i64::try_from(self.keys + 1).unwrap_or(i64::MAX),
            revision,
            // Data at a revision is the same on all members, so a serializable read suffices.
            serializable: true,
            ..RangeRequest::default()
        }
    }

    /// Cuts the piece that starts at `from` from a scope that ends at `scope_end`: at least one entry, if there is any.
    fn cut(tree: &Tree, from: &Bytes, scope_end: Bytes) -> TreeRange {
        let rank = tree.rank(from);
        let (mut keys, mut bytes) = (0, 0);
        let mut next = None;
        tree.for_each_from(rank, |entry| {
            let with_it = bytes + entry.encoded_len() as u64;
            if keys > 0 && (keys == PIECE_KEYS || with_it > PIECE_BYTES) {
                next = Some(Bytes::copy_from_slice(entry.key()));
                return ControlFlow::Break(());
            }
            (keys, bytes) = (keys + 1, with_it);
            ControlFlow::Continue(())
        });
        TreeRange {
            from: from.clone(),
            end: next.clone().unwrap_or(scope_end),
            rank,
            keys,
            next,
        }
    }

    /// Compares etcd's response with the tree from which the piece was cut.
    fn compare(&self, view: &View, theirs: &RangeResponse) -> Result<(), PieceDifference> {
        // More keys than the piece's show in the count.
        let first = view.tree.matching(self.rank, &theirs.kvs).min(self.keys);
        let etcd_keys = u64::try_from(theirs.count).unwrap_or(0);
        if first == self.keys && etcd_keys == self.keys && theirs.kvs.len() as u64 == self.keys {
            return Ok(());
        }
        Err(PieceDifference {
            revision: view.revision,
            etcd_keys,
            mirror_keys: self.keys,
            first,
        })
    }
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::Entry;
    use etcd_wire::etcdserverpb::ResponseHeader;

    use super::*;
    use crate::lineage::HistoryId;

    /// A KeyValue with a key of less than 128 bytes, changed at `revision`.
    fn key_value(key: &str, value: &str, revision: u8) -> Bytes {
        let mut encoded = vec![0x0a, u8::try_from(key.len()).unwrap()];
        encoded.extend_from_slice(key.as_bytes());
        encoded.extend_from_slice(&[0x10, revision, 0x18, revision, 0x20, 1, 0x2a]);
        encoded.push(u8::try_from(value.len()).unwrap());
        encoded.extend_from_slice(value.as_bytes());
        encoded.into()
    }

    fn tree(keys: &[Bytes]) -> Tree {
        Tree::from_sorted(keys.iter().map(|key| Entry::from_key_value(key).unwrap()))
    }

    fn key_values(keys: u32) -> Vec<Bytes> {
        (0..keys)
            .map(|n| key_value(&format!("/k/{n:05}"), "v", 3))
            .collect()
    }

    #[test]
    fn response_of_another_cluster_shows_no_difference() {
        let history = History::new(HistoryId::FIRST);
        let of_cluster = |cluster_id| RangeResponse {
            header: Some(ResponseHeader {
                cluster_id,
                ..ResponseHeader::default()
            }),
            ..RangeResponse::default()
        };
        assert!(history.note_cluster(7));
        assert!(check_cluster(&history, &of_cluster(7)).is_ok());
        let other = check_cluster(&history, &of_cluster(8));
        assert!(matches!(other, Err(Unverified::AnotherCluster)), "{other:?}");
    }

    /// Response of an etcd that holds `theirs` to a piece's request.
    fn etcd(theirs: &[Bytes], piece: &TreeRange) -> RangeResponse {
        let inside: Vec<_> = theirs
            .iter()
            .filter(|kv| {
                let entry = Entry::from_key_value(kv).unwrap();
                entry.key() >= &piece.from[..] && (piece.end[..] == *b"\0" || entry.key() < &piece.end[..])
            })
            .cloned()
            .collect();
        RangeResponse {
            count: i64::try_from(inside.len()).unwrap(),
            kvs: inside
                .into_iter()
                .take(usize::try_from(piece.keys + 1).unwrap())
                .collect(),
            ..RangeResponse::default()
        }
    }

    /// Compares a mirror of `ours` piece by piece with an etcd that holds `theirs`; returns the number of pieces.
    fn verify_all(ours: &[Bytes], theirs: &[Bytes]) -> Result<usize, PieceDifference> {
        let view = View {
            tree: tree(ours),
            revision: 9,
            history: HistoryId::FIRST,
        };
        let mut from = Bytes::from_static(b"\0");
        for pieces in 1.. {
            let piece = TreeRange::cut(&view.tree, &from, Bytes::from_static(b"\0"));
            piece.compare(&view, &etcd(theirs, &piece))?;
            match piece.next {
                Some(next) => from = next,
                None => return Ok(pieces),
            }
        }
        unreachable!("a mirror has an end")
    }

    #[test]
    fn equal_contents_verify_in_bounded_pieces() {
        assert_eq!(verify_all(&[], &[]), Ok(1));
        for (keys, pieces) in [(1, 1), (1000, 1), (1001, 2), (2500, 3)] {
            let all = key_values(keys);
            assert_eq!(verify_all(&all, &all), Ok(pieces), "{keys}");
        }
    }

    #[test]
    fn pieces_are_bounded_in_bytes() {
        let large: Vec<_> = (0..8)
            .map(|n| {
                let mut kv = key_value(&format!("/k/{n}"), "", 3).to_vec();
                kv.pop();
                // A value of 200,000 bytes.
                kv.extend_from_slice(&[0xc0, 0x9a, 0x0c]);
                kv.extend(std::iter::repeat_n(b'v', 200_000));
                Bytes::from(kv)
            })
            .collect();
        assert_eq!(verify_all(&large, &large), Ok(4));
    }

    #[test]
    fn lost_kept_and_stale_keys_are_detected() {
        let all = key_values(2500);
        for n in [0, 1, 999, 1000, 1001, 2499] {
            let mut lost = all.clone();
            lost.remove(n);
            assert!(verify_all(&lost, &all).is_err(), "the mirror has lost key {n}");
            assert!(verify_all(&all, &lost).is_err(), "the mirror has kept key {n}");
            for other in [
                key_value(&format!("/k/{n:05}"), "w", 3),
                key_value(&format!("/k/{n:05}"), "v", 2),
            ] {
                let mut stale = all.clone();
                stale[n] = other;
                let difference = verify_all(&stale, &all).unwrap_err();
                assert_eq!(difference.first, n as u64 % 1000, "the mirror has an old key {n}");
            }
        }
        assert!(verify_all(&[], &all).is_err(), "the mirror has lost everything");
        assert!(verify_all(&all, &[]).is_err(), "the mirror has kept everything");
    }
}
