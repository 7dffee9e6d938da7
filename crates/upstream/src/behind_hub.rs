//! The etcd behind another rangecache, as that tells it in the response to a health check.

use http::HeaderName;
use tonic::metadata::MetadataMap;

use etcd_wire::grpc::hub::{CLUSTER, ENDPOINTS};

/// The etcd behind a rangecache.
#[derive(Debug)]
pub(super) struct BehindHub {
    /// The URLs of its endpoints, separated by commas.
    pub(super) endpoints: String,
    /// Id of the cluster.
    pub(super) cluster_id: u64,
}

impl BehindHub {
    /// Reads the metadata of a response; `None` if it does not come from a rangecache.
    pub(super) fn of(metadata: &MetadataMap) -> Option<BehindHub> {
        let text = |name: &HeaderName| metadata.get(name.as_str())?.to_str().ok();
        Some(BehindHub {
            endpoints: text(&ENDPOINTS)?.to_owned(),
            cluster_id: u64::from_str_radix(text(&CLUSTER)?, 16).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::*;

    fn told(fields: &[(HeaderName, &'static str)]) -> Option<(String, u64)> {
        let fields = fields.iter().cloned();
        let headers: HeaderMap = fields
            .map(|(name, value)| (name, HeaderValue::from_static(value)))
            .collect();
        let behind = BehindHub::of(&MetadataMap::from_headers(headers))?;
        Some((behind.endpoints, behind.cluster_id))
    }

    #[test]
    fn endpoints_and_cluster_are_told_together() {
        let urls = (ENDPOINTS, "http://a:1, http://b:1");
        assert_eq!(
            told(&[urls.clone(), (CLUSTER, "c1")]),
            Some((urls.1.to_owned(), 0xc1))
        );
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[(CLUSTER, "c1")]), None);
        assert_eq!(told(&[urls, (CLUSTER, "x")]), None);
    }
}
