//! Identity of this process. Each request to etcd carries it, so that a rangecache in front of itself is found at its
//! first call, and so do its traces. A leaf.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use http::{HeaderMap, HeaderValue};

pub use etcd_wire::grpc::hub::INSTANCE as HEADER;

/// 128 random bits, in hexadecimal.
static ID: LazyLock<HeaderValue> = LazyLock::new(|| {
    // The keys of each state are random.
    let random = || RandomState::new().hash_one(std::process::id());
    let id = format!("{:016x}{:016x}", random(), random());
    HeaderValue::from_str(&id).unwrap_or_else(|_| HeaderValue::from_static("rangecache"))
});

/// The identity as text.
#[must_use]
pub fn id() -> &'static str {
    ID.to_str().unwrap_or_default()
}

/// Adds this process to those that a request to etcd has passed.
pub fn sign(headers: &mut HeaderMap) {
    headers.append(HEADER, ID.clone());
}

/// Whether a client's request has passed this process before.
#[must_use]
pub fn has_passed(headers: &HeaderMap) -> bool {
    headers.get_all(HEADER).iter().any(|id| id == *ID)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_requests_are_recognized_among_those_of_others() {
        let mut headers = HeaderMap::new();
        headers.append(HEADER, HeaderValue::from_static("another"));
        assert!(!has_passed(&headers));
        sign(&mut headers);
        assert!(has_passed(&headers));
        assert_eq!(headers.get_all(HEADER).iter().count(), 2);
        assert_eq!(ID.len(), 32);
    }
}
