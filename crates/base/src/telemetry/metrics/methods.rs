//! Methods by which clients' calls are counted, and their classes.

use etcd_wire::grpc::{Method, method::RPCS};

/// Kind of a call, by what it costs and how long it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Read,
    Write,
    Watch,
    KeepAlive,
    Other,
}

impl Class {
    fn of(method: Method) -> Class {
        match method {
            Method::Range | Method::RangeStream => Class::Read,
            Method::Put | Method::DeleteRange | Method::Txn | Method::Compact => Class::Write,
            Method::Watch => Class::Watch,
            Method::LeaseKeepAlive => Class::KeepAlive,
            _ => Class::Other,
        }
    }

    pub(super) const ALL: [Class; 5] = [
        Class::Read,
        Class::Write,
        Class::Watch,
        Class::KeepAlive,
        Class::Other,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            Class::Read => "read",
            Class::Write => "write",
            Class::Watch => "watch",
            Class::KeepAlive => "lease_keep_alive",
            Class::Other => "other",
        }
    }
}

/// Kind of a call that ends by itself, by how long it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LatencyClass {
    /// A Range of one key.
    Get,
    /// A Range of several keys.
    List,
    /// A RangeStream.
    Stream,
    Write,
    Other,
}

impl LatencyClass {
    pub(super) const ALL: [LatencyClass; 5] = [
        LatencyClass::Get,
        LatencyClass::List,
        LatencyClass::Stream,
        LatencyClass::Write,
        LatencyClass::Other,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            LatencyClass::Get => "get",
            LatencyClass::List => "list",
            LatencyClass::Stream => "stream",
            LatencyClass::Write => "write",
            LatencyClass::Other => "other",
        }
    }

    fn of(method: Method) -> LatencyClass {
        match method {
            Method::Range => LatencyClass::Get,
            Method::RangeStream => LatencyClass::Stream,
            _ if Class::of(method) == Class::Write => LatencyClass::Write,
            _ => LatencyClass::Other,
        }
    }
}

/// A method as calls are counted by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallMethod {
    /// Position among all methods; unknown ones have the last.
    pub(super) index: usize,
    pub(super) class: Class,
    /// `None` if a call lasts as long as its client likes, which is no latency.
    pub(super) latency: Option<LatencyClass>,
}

impl CallMethod {
    /// The method at `path`; one for all that are not known.
    #[must_use]
    pub fn of_path(path: &str) -> CallMethod {
        let index = RPCS.iter().position(|rpc| rpc.path == path);
        index.map_or(CallMethod::OTHER, CallMethod::new)
    }

    /// Every method that is not known.
    const OTHER: CallMethod = CallMethod {
        index: METHOD_COUNT - 1,
        class: Class::Other,
        latency: None,
    };

    fn new(index: usize) -> CallMethod {
        let rpc = &RPCS[index];
        let class = Class::of(rpc.method);
        // A snapshot lasts as long as its client reads.
        let lasts = rpc.is_waiting || rpc.method.is_endless() || rpc.method == Method::Snapshot;
        CallMethod {
            index,
            class,
            latency: (!lasts).then(|| LatencyClass::of(rpc.method)),
        }
    }

    /// Every method, with the values of its labels.
    pub(super) fn all() -> impl Iterator<Item = (CallMethod, &'static str, &'static str)> {
        let named = RPCS.iter().enumerate().map(|(index, rpc)| {
            let (service, name) = rpc.names();
            (CallMethod::new(index), service, name)
        });
        named.chain([(CallMethod::OTHER, "other", "other")])
    }
}

/// Number of methods, the unknown ones included.
pub(super) const METHOD_COUNT: usize = RPCS.len() + 1;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn method_is_found_by_its_path() {
        let mut indices = BTreeSet::new();
        for (method, service, name) in CallMethod::all() {
            assert!(indices.insert(method.index), "{name}");
            if name != "other" {
                assert_eq!(
                    CallMethod::of_path(&format!("/{service}/{name}")),
                    method,
                    "{name}"
                );
            }
        }
        assert_eq!(indices.len(), METHOD_COUNT);
        for path in [
            "",
            "/",
            "/health",
            "/etcdserverpb.KV/Unheard",
            "/v3/kv/range",
            "/etcdserverpb.Watch/Range",
        ] {
            assert_eq!(CallMethod::of_path(path), CallMethod::OTHER, "{path}");
        }
    }
}
