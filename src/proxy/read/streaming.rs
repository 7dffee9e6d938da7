//! KV/RangeStream (KEP-5966): answered from memory like a Range, whatever etcd's version; otherwise from etcd's
//! RangeStream or from unary pages.
//!
//! A client never gets `Unimplemented` for a request that etcd 3.7 would serve: one such response makes kube-apiserver
//! stop streaming for ten minutes.

use super::body::{EntrySource, stream_body};
use super::grpc::GrpcMethod;
use super::serve::Unservable;
use crate::proxy::response::ResponseBody;
use etcd_store::cache::{Chunks, Dialect, RangeQuery, ResponseHeader, Selection, SortOrder, SortTarget};
use etcd_wire::grpc::{Method, Status};
use rangecache_base::telemetry::outcome::Kind;

/// KV/RangeStream.
#[derive(Default)]
pub(in crate::proxy) struct Streaming;

impl GrpcMethod for Streaming {
    const METHOD: Method = Method::RangeStream;
    const KIND: Kind = Kind::Stream;
    // A response in chunks is compared as the same Range is.

    /// Returns the status with which etcd 3.7 refuses `query` before reading any key; `None` if it serves the query. The
    /// texts are those of 3.7, whatever version the endpoints have.
    fn refusal(query: &RangeQuery) -> Option<Status> {
        if let Err(error) = query.check(&Dialect::of_version(3, 7)) {
            return Some(Status::InvalidArgument(error.to_string()));
        }
        let in_key_order = query.sort_order == SortOrder::None as i32
            || (query.sort_order == SortOrder::Ascend as i32 && query.sort_target == SortTarget::Key as i32);
        if !in_key_order {
            Some(Status::StreamUnsupported("custom sort orders"))
        } else if query.has_revision_filter() {
            Some(Status::StreamUnsupported("revision filters"))
        } else {
            None
        }
    }

    fn body(
        header: ResponseHeader,
        selection: Selection,
        entries: EntrySource<'_>,
    ) -> Result<ResponseBody, Unservable> {
        Ok(stream_body(Chunks::new(header, selection), entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_that_etcd_refuses_gets_its_status() {
        let list = RangeQuery {
            key: "k".into(),
            range_end: "l".into(),
            ..RangeQuery::default()
        };
        let status_of = |query: RangeQuery| {
            Streaming::refusal(&query).map(|status| (status.code() as u16, status.to_string()))
        };
        assert_eq!(status_of(list.clone()), None);
        for (sort_order, sort_target) in [(0, 1), (0, 4), (1, 0), (0, 0)] {
            let query = RangeQuery {
                sort_order,
                sort_target,
                ..list.clone()
            };
            assert_eq!(status_of(query), None, "{sort_order} {sort_target}");
        }
        let sorted = "RangeStream does not support custom sort orders".to_owned();
        for (sort_order, sort_target) in [(2, 0), (1, 1), (2, 4)] {
            let query = RangeQuery {
                sort_order,
                sort_target,
                min_mod_revision: 1,
                ..list.clone()
            };
            assert_eq!(status_of(query), Some((12, sorted.clone())));
        }
        let filtered = "RangeStream does not support revision filters".to_owned();
        for query in [
            RangeQuery {
                max_create_revision: -1,
                ..list.clone()
            },
            RangeQuery {
                min_mod_revision: 5,
                ..list.clone()
            },
        ] {
            assert_eq!(status_of(query), Some((12, filtered.clone())));
        }
        assert_eq!(
            status_of(RangeQuery {
                sort_order: 7,
                ..list
            }),
            Some((3, "etcdserver: invalid sort option".to_owned()))
        );
        assert_eq!(
            status_of(RangeQuery::default()),
            Some((3, "etcdserver: key is not provided".to_owned()))
        );
    }
}
