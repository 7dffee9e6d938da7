//! Identity of this process. Each request to etcd carries it, so that a rangecache in front of itself is found at its
//! first call, and so do its traces. A leaf.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use http::{HeaderMap, HeaderValue};

pub use etcd_wire::grpc::metadata::INSTANCE as HEADER;

/// 128 random bits, in hexadecimal.
static ID: LazyLock<HeaderValue> = LazyLock::new(random_id);

fn random_id() -> HeaderValue {
    // The keys of each state are random.
    let random = || RandomState::new().hash_one(std::process::id());
    let id = format!("{:016x}{:016x}", random(), random());
    HeaderValue::from_str(&id).unwrap_or_else(|_| HeaderValue::from_static("rangecache"))
}

/// Identity of a rangecache.
#[derive(Clone, Debug)]
pub struct Instance(HeaderValue);

impl Instance {
    /// The identity of this process; in a simulated network each is another one, because many rangecaches share the process.
    #[must_use]
    pub fn of_process() -> Instance {
        Instance::simulated().unwrap_or_else(|| Instance(ID.clone()))
    }

    /// Another identity, which shows nothing of the one by which requests that come back are found: a client that knows that could send
    /// requests that seem to come back.
    #[must_use]
    pub fn unrelated() -> Instance {
        Instance::simulated().unwrap_or_else(|| Instance(random_id()))
    }

    fn simulated() -> Option<Instance> {
        #[cfg(debug_assertions)]
        return crate::simulated::next_instance().map(|number| Instance(HeaderValue::from(number)));
        #[cfg(not(debug_assertions))]
        None
    }

    /// The identity as text.
    #[must_use]
    pub fn id(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }

    /// Adds the identity to those that a request to etcd has passed.
    pub fn sign(&self, headers: &mut HeaderMap) {
        // A request may be signed for one connection, and sent on another.
        if !self.has_passed(headers) {
            headers.append(HEADER, self.0.clone());
        }
    }

    /// Whether a client's request has passed this rangecache before.
    #[must_use]
    pub fn has_passed(&self, headers: &HeaderMap) -> bool {
        headers.get_all(HEADER).iter().any(|id| id == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_requests_are_recognized_among_those_of_others() {
        let mut headers = HeaderMap::new();
        headers.append(HEADER, HeaderValue::from_static("another"));
        let own = Instance::of_process();
        assert!(!own.has_passed(&headers));
        for _ in 0..2 {
            own.sign(&mut headers);
            assert!(own.has_passed(&headers));
            assert_eq!(headers.get_all(HEADER).iter().count(), 2);
        }
        assert_eq!(own.id().len(), 32);
        assert_ne!(Instance::unrelated().id(), own.id());
    }
}
