//! Methods by which clients' calls are counted, and their classes.

/// Methods with series of their own: etcd's, and gRPC's health service. The frequent ones are found first.
const METHODS: [(&str, &[&str]); 9] = [
    (
        "etcdserverpb.KV",
        &["Range", "RangeStream", "Txn", "Put", "DeleteRange", "Compact"],
    ),
    ("etcdserverpb.Watch", &["Watch"]),
    (
        "etcdserverpb.Lease",
        &[
            "LeaseKeepAlive",
            "LeaseGrant",
            "LeaseRevoke",
            "LeaseTimeToLive",
            "LeaseLeases",
        ],
    ),
    (
        "etcdserverpb.Maintenance",
        &[
            "Status",
            "Alarm",
            "Defragment",
            "Hash",
            "HashKV",
            "Snapshot",
            "MoveLeader",
            "Downgrade",
        ],
    ),
    (
        "etcdserverpb.Cluster",
        &[
            "MemberList",
            "MemberAdd",
            "MemberRemove",
            "MemberUpdate",
            "MemberPromote",
        ],
    ),
    (
        "etcdserverpb.Auth",
        &[
            "Authenticate",
            "AuthEnable",
            "AuthDisable",
            "AuthStatus",
            "UserAdd",
            "UserGet",
            "UserList",
            "UserDelete",
            "UserChangePassword",
            "UserGrantRole",
            "UserRevokeRole",
            "RoleAdd",
            "RoleGet",
            "RoleList",
            "RoleDelete",
            "RoleGrantPermission",
            "RoleRevokePermission",
        ],
    ),
    ("v3lockpb.Lock", &["Lock", "Unlock"]),
    (
        "v3electionpb.Election",
        &["Campaign", "Proclaim", "Leader", "Observe", "Resign"],
    ),
    ("grpc.health.v1.Health", &["Check", "Watch", "List"]),
];

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

    /// Whether a call lasts as long as its client likes, which is no latency.
    pub(super) fn is_endless(self) -> bool {
        matches!(self, Class::Watch | Class::KeepAlive)
    }
}

/// A method as calls are counted by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallMethod {
    /// Position among all methods; unknown ones have the last.
    pub(super) index: usize,
    pub(super) class: Class,
    /// Whether a call ends by itself.
    pub(super) has_latency: bool,
}

impl CallMethod {
    /// The method at `path`; one for all that are not known.
    #[must_use]
    pub fn of_path(path: &str) -> CallMethod {
        let mut index = 0;
        let named = path.strip_prefix('/').and_then(|path| path.split_once('/'));
        if let Some((service, method)) = named {
            for (of, methods) in METHODS {
                if of == service
                    && let Some(at) = methods.iter().position(|name| *name == method)
                {
                    return CallMethod::new(index + at, service, method);
                }
                index += methods.len();
            }
        }
        CallMethod::OTHER
    }

    /// Every method that is not known.
    const OTHER: CallMethod = CallMethod {
        index: METHOD_COUNT - 1,
        class: Class::Other,
        has_latency: false,
    };

    fn new(index: usize, service: &str, method: &str) -> CallMethod {
        let class = match (service, method) {
            ("etcdserverpb.KV", "Range" | "RangeStream") => Class::Read,
            ("etcdserverpb.KV", _) => Class::Write,
            ("etcdserverpb.Watch", _) => Class::Watch,
            ("etcdserverpb.Lease", "LeaseKeepAlive") => Class::KeepAlive,
            _ => Class::Other,
        };
        // A lock or an election lasts until others let go.
        let waits_for_others = matches!(method, "Lock" | "Campaign" | "Observe" | "Watch" | "Snapshot");
        CallMethod {
            index,
            class,
            has_latency: !class.is_endless() && !waits_for_others,
        }
    }

    /// Every method, with the values of its labels.
    pub(super) fn all() -> impl Iterator<Item = (CallMethod, &'static str, &'static str)> {
        let named = METHODS
            .iter()
            .flat_map(|(service, methods)| methods.iter().map(|method| (*service, *method)));
        let named = named.enumerate();
        let named = named
            .map(|(index, (service, method))| (CallMethod::new(index, service, method), service, method));
        named.chain([(CallMethod::OTHER, "other", "other")])
    }
}

/// Number of methods, the unknown ones included.
pub(super) const METHOD_COUNT: usize = {
    let (mut count, mut at) = (1, 0);
    while at < METHODS.len() {
        count += METHODS[at].1.len();
        at += 1;
    }
    count
};

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
