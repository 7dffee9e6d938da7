//! The one table of RPC methods: what rangecache needs to know about a call from its path alone.

/// Path of KV/Range.
pub const RANGE: &str = "/etcdserverpb.KV/Range";
/// Path of KV/RangeStream.
pub const RANGE_STREAM: &str = "/etcdserverpb.KV/RangeStream";

/// Path of Watch/Watch.
pub const WATCH: &str = "/etcdserverpb.Watch/Watch";
/// Path of Auth/Authenticate.
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";

/// Path of Cluster/MemberList.
pub const MEMBER_LIST: &str = "/etcdserverpb.Cluster/MemberList";
/// The same method of etcd's JSON gateway, behind the version.
const JSON_MEMBER_LIST: &str = "/cluster/member/list";

/// Services with unary methods alone, save the streaming methods that have a variant of their own.
const UNARY_SERVICES: [&str; 5] = [
    "/etcdserverpb.KV/",
    "/etcdserverpb.Lease/",
    "/etcdserverpb.Auth/",
    "/etcdserverpb.Cluster/",
    "/etcdserverpb.Maintenance/",
];

/// gRPC methods that change nothing: those that a read-only listener permits. `Txn` may write, and its paths do not show
/// whether it does. `Authenticate` issues a token, without which a client cannot read while etcd's auth is on.
const READ_ONLY_METHODS: [&str; 11] = [
    RANGE,
    RANGE_STREAM,
    WATCH,
    AUTHENTICATE,
    MEMBER_LIST,
    "/etcdserverpb.Maintenance/Status",
    "/etcdserverpb.Maintenance/Hash",
    "/etcdserverpb.Maintenance/HashKV",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
];
/// The same methods of etcd's JSON gateway, behind the version.
const READ_ONLY_JSON: [&str; 7] = [
    "/kv/range",
    "/watch",
    "/auth/authenticate",
    JSON_MEMBER_LIST,
    "/maintenance/status",
    "/maintenance/hash",
    "/maintenance/hashkv",
];
/// gRPC methods of which one call takes etcd a tenth of a second or longer: a check of a password, a hash of all keys.
const COSTLY_METHODS: [&str; 3] = [
    AUTHENTICATE,
    "/etcdserverpb.Maintenance/Hash",
    "/etcdserverpb.Maintenance/HashKV",
];
/// The same methods of etcd's JSON gateway, behind the version.
const COSTLY_JSON: [&str; 3] = ["/auth/authenticate", "/maintenance/hash", "/maintenance/hashkv"];
/// Every method of etcd's JSON gateway, behind the version.
const JSON_METHODS: [&str; 51] = [
    "/kv/range",
    "/kv/put",
    "/kv/deleterange",
    "/kv/txn",
    "/kv/compaction",
    "/kv/lease/revoke",
    "/kv/lease/timetolive",
    "/kv/lease/leases",
    "/watch",
    "/lease/grant",
    "/lease/revoke",
    "/lease/keepalive",
    "/lease/timetolive",
    "/lease/leases",
    "/cluster/member/add",
    "/cluster/member/remove",
    "/cluster/member/update",
    JSON_MEMBER_LIST,
    "/cluster/member/promote",
    "/maintenance/alarm",
    "/maintenance/status",
    "/maintenance/defragment",
    "/maintenance/hash",
    "/maintenance/hashkv",
    "/maintenance/snapshot",
    "/maintenance/transfer-leadership",
    "/maintenance/downgrade",
    "/auth/enable",
    "/auth/disable",
    "/auth/status",
    "/auth/authenticate",
    "/auth/user/add",
    "/auth/user/get",
    "/auth/user/list",
    "/auth/user/delete",
    "/auth/user/changepw",
    "/auth/user/grant",
    "/auth/user/revoke",
    "/auth/role/add",
    "/auth/role/get",
    "/auth/role/list",
    "/auth/role/delete",
    "/auth/role/grant",
    "/auth/role/revoke",
    "/lock/lock",
    "/lock/unlock",
    "/election/campaign",
    "/election/proclaim",
    "/election/leader",
    "/election/observe",
    "/election/resign",
];
/// Versions of the JSON gateway.
const JSON_VERSIONS: [&str; 3] = ["/v3", "/v3beta", "/v3alpha"];
/// Other paths of etcd that change nothing.
const READ_ONLY_PATHS: [&str; 5] = ["/health", "/livez", "/readyz", "/version", "/metrics"];

/// Whether a request with this path, gRPC or not, changes nothing. False for every path that is not known, and for each
/// that etcd may read differently, such as one with an escape.
#[must_use]
pub fn is_read_only(path: &str) -> bool {
    let is_json = || json_method(path).is_some_and(|method| READ_ONLY_JSON.contains(&method));
    READ_ONLY_METHODS.contains(&path) || READ_ONLY_PATHS.contains(&path) || is_json()
}

/// Whether a call of `path`, gRPC or not, costs etcd so much that one client may make few at once.
#[must_use]
pub fn is_costly(path: &str) -> bool {
    let is_json = || json_method(path).is_some_and(|method| COSTLY_JSON.contains(&method));
    COSTLY_METHODS.contains(&path) || is_json()
}

/// Whether `path` is MemberList of the JSON gateway, in any of its versions.
#[must_use]
pub fn is_json_member_list(path: &str) -> bool {
    json_method(path) == Some(JSON_MEMBER_LIST)
}

/// `path`, if it is one of etcd's own paths for HTTP: those of its JSON gateway, `/health` and others. Any other one is
/// the client's own text.
#[must_use]
pub fn http_route(path: &str) -> Option<&str> {
    let is_json = || json_method(path).is_some_and(|method| JSON_METHODS.contains(&method));
    (READ_ONLY_PATHS.contains(&path) || is_json()).then_some(path)
}

/// Path of a method of the JSON gateway, without the version.
fn json_method(path: &str) -> Option<&str> {
    let methods = JSON_VERSIONS
        .iter()
        .filter_map(|version| path.strip_prefix(version));
    methods.into_iter().find(|method| method.starts_with('/'))
}

/// A method, or a group of methods that are treated alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// KV/Range.
    Range,
    /// KV/RangeStream (KEP-5966).
    RangeStream,
    /// KV/Compact.
    Compact,
    /// Auth/AuthEnable and Auth/AuthDisable.
    SwitchAuth,
    /// Auth/Authenticate.
    Authenticate,
    /// Watch/Watch.
    Watch,
    /// Lease/LeaseKeepAlive.
    LeaseKeepAlive,
    /// Maintenance/Snapshot.
    Snapshot,
    /// Every other method of etcd's KV, Lease, Auth, Cluster and Maintenance services.
    EtcdUnary,
    /// Methods of etcd services that this table does not know: they may be streams.
    EtcdOther,
    /// Election/Observe.
    ElectionObserve,
    /// Every other method of the Lock and Election services: a call may last until its lock is free.
    Concurrency,
    /// grpc.health.v1.Health/Watch.
    HealthWatch,
    /// Every other method of gRPC's health service.
    Health,
    /// A Watch of etcd's JSON gateway.
    JsonWatch,
    /// Another path of etcd's JSON gateway that streams until its client ends it.
    JsonStream,
    /// Every other path of etcd's JSON gateway.
    Json,
    /// Any other path.
    Other,
}

/// State that a successful call changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SideEffect {
    /// Revisions below the one in the request are compacted.
    Compaction,
    /// Auth is switched on or off.
    Auth,
    /// A user gets a token.
    LogIn,
}

impl Method {
    /// The method at `path`, without a query.
    #[must_use]
    pub fn from_path(path: &str) -> Method {
        match path {
            RANGE => Method::Range,
            RANGE_STREAM => Method::RangeStream,
            "/etcdserverpb.KV/Compact" => Method::Compact,
            "/etcdserverpb.Auth/AuthEnable" | "/etcdserverpb.Auth/AuthDisable" => Method::SwitchAuth,
            AUTHENTICATE => Method::Authenticate,
            WATCH => Method::Watch,
            "/etcdserverpb.Lease/LeaseKeepAlive" => Method::LeaseKeepAlive,
            "/etcdserverpb.Maintenance/Snapshot" => Method::Snapshot,
            "/v3electionpb.Election/Observe" => Method::ElectionObserve,
            "/grpc.health.v1.Health/Watch" => Method::HealthWatch,
            _ if UNARY_SERVICES.iter().any(|service| path.starts_with(service)) => Method::EtcdUnary,
            _ if path.starts_with("/etcdserverpb.") => Method::EtcdOther,
            _ if path.starts_with("/v3lockpb.") || path.starts_with("/v3electionpb.") => Method::Concurrency,
            _ if path.starts_with("/grpc.health.v1.") => Method::Health,
            // The JSON gateway, in all its versions (v3, v3beta, v3alpha).
            _ if path.starts_with("/v3") => {
                if path.ends_with("/watch") {
                    Method::JsonWatch
                } else if path.ends_with("/lease/keepalive") || path.ends_with("/election/observe") {
                    Method::JsonStream
                } else {
                    Method::Json
                }
            }
            _ => Method::Other,
        }
    }

    /// Whether a response may be long or open-ended, so that it must not share a connection with short unary calls.
    /// Unknown methods may be streams.
    #[must_use]
    pub fn is_streaming(self) -> bool {
        !matches!(
            self,
            Method::Range | Method::Compact | Method::SwitchAuth | Method::Authenticate | Method::EtcdUnary
        )
    }

    /// Whether a call lasts until its client ends it; such calls are ended by rangecache when the process stops.
    #[must_use]
    pub fn is_endless(self) -> bool {
        matches!(
            self,
            Method::Watch
                | Method::LeaseKeepAlive
                | Method::ElectionObserve
                | Method::HealthWatch
                | Method::JsonWatch
                | Method::JsonStream
        )
    }

    /// How many messages deep etcd's `ResponseHeader` lies in each gRPC response message: field 1 of the message, or of its
    /// field 1. `None` where responses carry no such header.
    #[must_use]
    pub fn header_depth(self) -> Option<u8> {
        match self {
            Method::RangeStream => Some(2),
            Method::Health
            | Method::HealthWatch
            | Method::JsonWatch
            | Method::JsonStream
            | Method::Json
            | Method::Other => None,
            _ => Some(1),
        }
    }

    /// Whether a response that is not gRPC may show a revision, in JSON.
    #[must_use]
    pub fn may_show_revision_as_json(self) -> bool {
        matches!(
            self,
            Method::Json
                | Method::JsonWatch
                | Method::JsonStream
                | Method::Concurrency
                | Method::ElectionObserve
        )
    }

    /// State that the call changes when it succeeds.
    #[must_use]
    pub fn side_effect(self) -> Option<SideEffect> {
        match self {
            Method::Compact => Some(SideEffect::Compaction),
            Method::SwitchAuth => Some(SideEffect::Auth),
            Method::Authenticate => Some(SideEffect::LogIn),
            _ => None,
        }
    }

    /// Name of the call's span: `service/method` for known services. Any other path is the client's own text, which spans do
    /// not repeat.
    #[must_use]
    pub fn span_name(self, path: &str) -> &str {
        match self {
            Method::JsonWatch | Method::JsonStream | Method::Json | Method::Other => "_OTHER",
            _ => path.trim_start_matches('/'),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_calls_are_those_that_only_their_client_ends() {
        for path in [
            "/etcdserverpb.Watch/Watch",
            "/etcdserverpb.Lease/LeaseKeepAlive",
            "/v3electionpb.Election/Observe",
            "/grpc.health.v1.Health/Watch",
            "/v3/watch",
            "/v3beta/lease/keepalive",
            "/v3/election/observe",
        ] {
            assert!(Method::from_path(path).is_endless(), "{path}");
        }
        for path in [
            "/etcdserverpb.KV/Put",
            "/etcdserverpb.KV/RangeStream",
            "/etcdserverpb.Maintenance/Snapshot",
            "/v3lockpb.Lock/Lock",
            "/v3/kv/range",
            "/health",
        ] {
            assert!(!Method::from_path(path).is_endless(), "{path}");
        }
    }

    #[test]
    fn unknown_and_open_ended_methods_are_streaming() {
        for path in [
            "/etcdserverpb.KV/Range",
            "/etcdserverpb.KV/Txn",
            "/etcdserverpb.KV/Compact",
            "/etcdserverpb.Auth/AuthEnable",
            "/etcdserverpb.Lease/LeaseGrant",
            "/etcdserverpb.Maintenance/Status",
        ] {
            assert!(!Method::from_path(path).is_streaming(), "{path}");
        }
        for path in [
            "/etcdserverpb.KV/RangeStream",
            "/etcdserverpb.Watch/Watch",
            "/etcdserverpb.Lease/LeaseKeepAlive",
            "/etcdserverpb.Maintenance/Snapshot",
            "/etcdserverpb.New/Method",
            "/v3lockpb.Lock/Lock",
            "/grpc.health.v1.Health/Check",
            "/anything",
        ] {
            assert!(Method::from_path(path).is_streaming(), "{path}");
        }
    }

    #[test]
    fn header_depth_is_two_for_range_stream_alone() {
        let depth = |path| Method::from_path(path).header_depth();
        assert_eq!(depth(RANGE), Some(1));
        assert_eq!(depth(RANGE_STREAM), Some(2));
        assert_eq!(depth("/v3lockpb.Lock/Lock"), Some(1));
        assert_eq!(depth("/etcdserverpb.New/Method"), Some(1));
        assert_eq!(depth("/grpc.health.v1.Health/Check"), None);
        assert_eq!(depth("/v3/kv/range"), None);
    }

    #[test]
    fn compact_the_auth_switch_and_authenticate_alone_have_side_effects() {
        let effect = |path| Method::from_path(path).side_effect();
        assert_eq!(effect("/etcdserverpb.KV/Compact"), Some(SideEffect::Compaction));
        assert_eq!(effect("/etcdserverpb.Auth/AuthDisable"), Some(SideEffect::Auth));
        assert_eq!(effect("/etcdserverpb.Auth/Authenticate"), Some(SideEffect::LogIn));
        assert_eq!(effect("/etcdserverpb.Auth/AuthStatus"), None);
        assert_eq!(effect("/etcdserverpb.KV/Put"), None);
    }

    #[test]
    fn paths_that_write_or_are_unknown_are_not_read_only() {
        for path in [
            RANGE,
            RANGE_STREAM,
            "/etcdserverpb.Maintenance/HashKV",
            "/v3/kv/range",
            "/v3beta/watch",
            "/health",
        ] {
            assert!(is_read_only(path), "{path}");
        }
        for path in [
            "/etcdserverpb.KV/Put",
            "/etcdserverpb.KV/DeleteRange",
            "/etcdserverpb.KV/Txn",
            "/etcdserverpb.KV/Compact",
            "/etcdserverpb.Lease/LeaseGrant",
            "/etcdserverpb.Lease/LeaseKeepAlive",
            "/etcdserverpb.Auth/UserAdd",
            "/etcdserverpb.Cluster/MemberAdd",
            "/etcdserverpb.Maintenance/Alarm",
            "/etcdserverpb.Maintenance/Snapshot",
            "/etcdserverpb.New/Method",
            "/v3lockpb.Lock/Lock",
            "/v3electionpb.Election/Observe",
            "/v3/kv/put",
            "/v3/kv/range/../put",
            "/v3/kv/range/",
            "/v3/kv/%72ange",
            "/v3x/kv/range",
            "/v2/keys/a",
            "/debug/pprof/",
            "/",
            "*",
        ] {
            assert!(!is_read_only(path), "{path}");
        }
    }

    #[test]
    fn routes_are_etcds_own_paths() {
        for path in [
            "/v3/kv/put",
            "/v3beta/watch",
            "/v3/election/resign",
            "/v3/cluster/member/list",
            "/health",
            "/metrics",
        ] {
            assert_eq!(http_route(path), Some(path));
        }
        for path in [
            "/v3/kv/put/",
            "/v3x/kv/put",
            "/v3/my/secret",
            "/v2/keys/a",
            "/",
            "*",
            RANGE,
        ] {
            assert_eq!(http_route(path), None, "{path}");
        }
        for method in READ_ONLY_JSON {
            assert!(JSON_METHODS.contains(&method), "{method}");
        }
    }

    #[test]
    fn spans_do_not_repeat_unknown_paths() {
        let name = |path| Method::from_path(path).span_name(path);
        assert_eq!(name(RANGE), "etcdserverpb.KV/Range");
        assert_eq!(
            name("/v3electionpb.Election/Observe"),
            "v3electionpb.Election/Observe"
        );
        assert_eq!(name("/my/secret"), "_OTHER");
        assert_eq!(name("/v3/kv/range"), "_OTHER");
    }
}
