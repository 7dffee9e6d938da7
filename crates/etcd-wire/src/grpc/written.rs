//! Revision of etcd that the response to a write shows.

use bytes::Bytes;
use prost::Message as _;

use super::Method;
use super::frame::PrefixReader;
use crate::etcdserverpb::{DeleteRangeResponse, PutResponse, ResponseHeader, TxnResponse};

/// Longest response that is decoded, in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Cluster that has written.
    pub cluster_id: u64,
    /// Its revision after the write.
    pub revision: i64,
    /// Whether the write has changed anything, so that this revision is its own.
    pub has_changed: bool,
}

/// Result that the response to a call of `method` shows, if `data` is the whole of it, uncompressed and short. `None` also
/// for a transaction that has changed nothing, and for methods that write no keys.
#[must_use]
pub fn written(method: Method, data: &Bytes) -> Option<Written> {
    if data.len() > MAX_RESPONSE_BYTES {
        return None;
    }
    let (taken, prefix) = PrefixReader::default().read(data);
    let prefix = prefix.filter(|prefix| !prefix.is_compressed)?;
    let message = data.slice(taken..);
    if message.len() != prefix.length_bytes as usize {
        return None;
    }
    let (header, has_changed) = match method {
        Method::Put => (PutResponse::decode(message).ok()?.header, true),
        Method::DeleteRange => {
            let response = DeleteRangeResponse::decode(message).ok()?;
            (response.header, response.deleted > 0)
        }
        Method::Txn => {
            let response = TxnResponse::decode(message).ok()?;
            // One that only reads may be answered by one member alone.
            if !has_changed(&response) {
                return None;
            }
            (response.header, true)
        }
        _ => return None,
    };
    let ResponseHeader {
        cluster_id, revision, ..
    } = header?;
    Some(Written {
        cluster_id,
        revision,
        has_changed,
    })
}

fn has_changed(transaction: &TxnResponse) -> bool {
    transaction.responses.iter().any(|response| {
        response.response_put.is_some()
            || response
                .response_delete_range
                .as_ref()
                .is_some_and(|response| response.deleted > 0)
            || response.response_txn.as_ref().is_some_and(has_changed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcdserverpb::ResponseOp;
    use crate::grpc::frame::framed;

    fn header() -> Option<ResponseHeader> {
        Some(ResponseHeader {
            cluster_id: 7,
            revision: 9,
            ..ResponseHeader::default()
        })
    }

    fn transaction(responses: Vec<ResponseOp>) -> Bytes {
        framed(&TxnResponse {
            header: header(),
            responses,
        })
    }

    fn delete(deleted: i64) -> Option<DeleteRangeResponse> {
        Some(DeleteRangeResponse {
            header: header(),
            deleted,
        })
    }

    #[test]
    fn changes_are_recognized() {
        let at = |has_changed| {
            Some(Written {
                cluster_id: 7,
                revision: 9,
                has_changed,
            })
        };
        let put = framed(&PutResponse { header: header() });
        assert_eq!(written(Method::Put, &put), at(true));
        assert_eq!(
            written(Method::DeleteRange, &framed(&delete(0).unwrap())),
            at(false)
        );
        assert_eq!(
            written(Method::DeleteRange, &framed(&delete(2).unwrap())),
            at(true)
        );
        let read = ResponseOp::default();
        let deleted = |deleted| ResponseOp {
            response_delete_range: delete(deleted),
            ..ResponseOp::default()
        };
        let nested = |deletes| ResponseOp {
            response_txn: Some(TxnResponse {
                header: None,
                responses: vec![deleted(deletes)],
            }),
            ..ResponseOp::default()
        };
        for (responses, expected) in [
            (vec![read.clone(), deleted(0), nested(0)], None),
            (vec![read.clone(), deleted(1)], at(true)),
            (vec![nested(1)], at(true)),
        ] {
            assert_eq!(written(Method::Txn, &transaction(responses)), expected);
        }
    }

    #[test]
    fn parts_and_compressed_responses_show_nothing() {
        let put = framed(&PutResponse { header: header() });
        assert_eq!(written(Method::Put, &put.slice(..put.len() - 1)), None);
        assert_eq!(written(Method::Put, &put.slice(..3)), None);
        let mut compressed = put.to_vec();
        compressed[0] = 1;
        assert_eq!(written(Method::Put, &compressed.into()), None);
    }
}
