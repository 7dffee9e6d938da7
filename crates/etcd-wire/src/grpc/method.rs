//! The one table of RPC methods: what rangecache needs to know about a call from its path alone.

/// Path of KV/Range.
pub const RANGE: &str = "/etcdserverpb.KV/Range";
/// Path of KV/RangeStream.
pub const RANGE_STREAM: &str = "/etcdserverpb.KV/RangeStream";
/// Path of Watch/Watch.
pub const WATCH: &str = "/etcdserverpb.Watch/Watch";
/// Path of Cluster/MemberList.
pub const MEMBER_LIST: &str = "/etcdserverpb.Cluster/MemberList";
/// Path of Health/Check of gRPC's health service.
pub const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";

/// Versions of the JSON gateway. Every etcd that rangecache supports has the first two.
const JSON_VERSIONS: [&str; 3] = ["/v3", "/v3beta", "/v3alpha"];
/// Other paths of etcd that change nothing.
const READ_ONLY_PATHS: [&str; 5] = ["/health", "/livez", "/readyz", "/version", "/metrics"];
/// Services whose methods are unary unless they have a row in [`RPCS`] that says otherwise.
const UNARY_SERVICES: [&str; 5] = [
    "/etcdserverpb.KV/",
    "/etcdserverpb.Lease/",
    "/etcdserverpb.Auth/",
    "/etcdserverpb.Cluster/",
    "/etcdserverpb.Maintenance/",
];

/// A method of etcd or of gRPC's health service.
#[derive(Debug)]
pub struct Rpc {
    /// Path of the gRPC method: `/service/name`.
    pub path: &'static str,
    /// Class by which its calls are treated.
    pub method: Method,
    /// Paths in etcd's JSON gateway, behind the version.
    json: &'static [&'static str],
    /// Whether it changes nothing, and a read-only listener permits it. `Txn` may write, which its paths do not show.
    /// `Authenticate` issues a token, without which a client cannot read while etcd's auth is on.
    is_read_only: bool,
    /// A call takes etcd a tenth of a second or longer: a check of a password, a hash of all keys.
    is_costly: bool,
    /// A call waits for other clients to release what it asks for.
    pub is_waiting: bool,
}

const fn rpc(path: &'static str, method: Method, json: &'static [&'static str]) -> Rpc {
    Rpc {
        path,
        method,
        json,
        is_read_only: false,
        is_costly: false,
        is_waiting: false,
    }
}

/// Every method with a name of its own in metrics. The frequent ones are found first.
#[rustfmt::skip]
pub static RPCS: [Rpc; 52] = [
    rpc(RANGE, Method::Range, &["/kv/range"]).read_only(),
    rpc(RANGE_STREAM, Method::RangeStream, &[]).read_only(),
    rpc("/etcdserverpb.KV/Txn", Method::Txn, &["/kv/txn"]),
    rpc("/etcdserverpb.KV/Put", Method::Put, &["/kv/put"]),
    rpc("/etcdserverpb.KV/DeleteRange", Method::DeleteRange, &["/kv/deleterange"]),
    rpc("/etcdserverpb.KV/Compact", Method::Compact, &["/kv/compaction"]),
    rpc(WATCH, Method::Watch, &["/watch"]).read_only(),
    rpc("/etcdserverpb.Lease/LeaseKeepAlive", Method::LeaseKeepAlive, &["/lease/keepalive"]),
    rpc("/etcdserverpb.Lease/LeaseGrant", Method::EtcdUnary, &["/lease/grant"]),
    rpc("/etcdserverpb.Lease/LeaseRevoke", Method::EtcdUnary, &["/lease/revoke", "/kv/lease/revoke"]),
    rpc("/etcdserverpb.Lease/LeaseTimeToLive", Method::EtcdUnary, &["/lease/timetolive", "/kv/lease/timetolive"]),
    rpc("/etcdserverpb.Lease/LeaseLeases", Method::EtcdUnary, &["/lease/leases", "/kv/lease/leases"]),
    rpc("/etcdserverpb.Maintenance/Status", Method::EtcdUnary, &["/maintenance/status"]).read_only(),
    rpc("/etcdserverpb.Maintenance/Alarm", Method::EtcdUnary, &["/maintenance/alarm"]),
    rpc("/etcdserverpb.Maintenance/Defragment", Method::EtcdUnary, &["/maintenance/defragment"]),
    rpc("/etcdserverpb.Maintenance/Hash", Method::EtcdUnary, &["/maintenance/hash"]).read_only().costly(),
    rpc("/etcdserverpb.Maintenance/HashKV", Method::EtcdUnary, &["/maintenance/hashkv"]).read_only().costly(),
    rpc("/etcdserverpb.Maintenance/Snapshot", Method::Snapshot, &["/maintenance/snapshot"]),
    rpc("/etcdserverpb.Maintenance/MoveLeader", Method::EtcdUnary, &["/maintenance/transfer-leadership"]),
    rpc("/etcdserverpb.Maintenance/Downgrade", Method::EtcdUnary, &["/maintenance/downgrade"]),
    rpc(MEMBER_LIST, Method::EtcdUnary, &["/cluster/member/list"]).read_only(),
    rpc("/etcdserverpb.Cluster/MemberAdd", Method::EtcdUnary, &["/cluster/member/add"]),
    rpc("/etcdserverpb.Cluster/MemberRemove", Method::EtcdUnary, &["/cluster/member/remove"]),
    rpc("/etcdserverpb.Cluster/MemberUpdate", Method::EtcdUnary, &["/cluster/member/update"]),
    rpc("/etcdserverpb.Cluster/MemberPromote", Method::EtcdUnary, &["/cluster/member/promote"]),
    rpc("/etcdserverpb.Auth/Authenticate", Method::Authenticate, &["/auth/authenticate"]).read_only().costly(),
    rpc("/etcdserverpb.Auth/AuthEnable", Method::SwitchAuth, &["/auth/enable"]),
    rpc("/etcdserverpb.Auth/AuthDisable", Method::SwitchAuth, &["/auth/disable"]),
    rpc("/etcdserverpb.Auth/AuthStatus", Method::EtcdUnary, &["/auth/status"]),
    rpc("/etcdserverpb.Auth/UserAdd", Method::EtcdUnary, &["/auth/user/add"]),
    rpc("/etcdserverpb.Auth/UserGet", Method::EtcdUnary, &["/auth/user/get"]),
    rpc("/etcdserverpb.Auth/UserList", Method::EtcdUnary, &["/auth/user/list"]),
    rpc("/etcdserverpb.Auth/UserDelete", Method::EtcdUnary, &["/auth/user/delete"]),
    rpc("/etcdserverpb.Auth/UserChangePassword", Method::EtcdUnary, &["/auth/user/changepw"]),
    rpc("/etcdserverpb.Auth/UserGrantRole", Method::EtcdUnary, &["/auth/user/grant"]),
    rpc("/etcdserverpb.Auth/UserRevokeRole", Method::EtcdUnary, &["/auth/user/revoke"]),
    rpc("/etcdserverpb.Auth/RoleAdd", Method::EtcdUnary, &["/auth/role/add"]),
    rpc("/etcdserverpb.Auth/RoleGet", Method::EtcdUnary, &["/auth/role/get"]),
    rpc("/etcdserverpb.Auth/RoleList", Method::EtcdUnary, &["/auth/role/list"]),
    rpc("/etcdserverpb.Auth/RoleDelete", Method::EtcdUnary, &["/auth/role/delete"]),
    rpc("/etcdserverpb.Auth/RoleGrantPermission", Method::EtcdUnary, &["/auth/role/grant"]),
    rpc("/etcdserverpb.Auth/RoleRevokePermission", Method::EtcdUnary, &["/auth/role/revoke"]),
    rpc("/v3lockpb.Lock/Lock", Method::Concurrency, &["/lock/lock"]).waiting(),
    rpc("/v3lockpb.Lock/Unlock", Method::Concurrency, &["/lock/unlock"]),
    rpc("/v3electionpb.Election/Campaign", Method::Concurrency, &["/election/campaign"]).waiting(),
    rpc("/v3electionpb.Election/Proclaim", Method::Concurrency, &["/election/proclaim"]),
    rpc("/v3electionpb.Election/Leader", Method::Concurrency, &["/election/leader"]),
    rpc("/v3electionpb.Election/Observe", Method::ElectionObserve, &["/election/observe"]),
    rpc("/v3electionpb.Election/Resign", Method::Concurrency, &["/election/resign"]),
    rpc(HEALTH_CHECK, Method::Health, &[]).read_only(),
    rpc("/grpc.health.v1.Health/Watch", Method::HealthWatch, &[]).read_only(),
    rpc("/grpc.health.v1.Health/List", Method::Health, &[]).read_only(),
];

impl Rpc {
    const fn read_only(mut self) -> Rpc {
        self.is_read_only = true;
        self
    }

    const fn costly(mut self) -> Rpc {
        self.is_costly = true;
        self
    }

    const fn waiting(mut self) -> Rpc {
        self.is_waiting = true;
        self
    }

    /// Service and name, as they are in the path.
    #[must_use]
    pub fn names(&self) -> (&'static str, &'static str) {
        self.path[1..].split_once('/').unwrap_or((self.path, ""))
    }

    fn at(path: &str) -> Option<&'static Rpc> {
        RPCS.iter().find(|rpc| rpc.path == path)
    }

    /// The method behind a path of the JSON gateway, in one of these versions.
    fn at_json(path: &str, versions: &[&str]) -> Option<&'static Rpc> {
        let mut paths = versions.iter().filter_map(|version| path.strip_prefix(version));
        let path = paths.find(|path| path.starts_with('/'))?;
        RPCS.iter().find(|rpc| rpc.json.contains(&path))
    }

    /// The method that a request with this path calls, by gRPC or in JSON.
    fn called(path: &str) -> Option<&'static Rpc> {
        Rpc::at(path).or_else(|| Rpc::at_json(path, &JSON_VERSIONS))
    }
}

/// Whether a request with this path, gRPC or not, changes nothing. False for every path that is not known, and for each
/// that etcd may read differently, such as one with an escape.
#[must_use]
pub fn is_read_only(path: &str) -> bool {
    Rpc::called(path).is_some_and(|rpc| rpc.is_read_only) || READ_ONLY_PATHS.contains(&path)
}

/// Whether a call of `path`, gRPC or not, costs etcd so much that one client may make few at once.
#[must_use]
pub fn is_costly(path: &str) -> bool {
    Rpc::called(path).is_some_and(|rpc| rpc.is_costly)
}

/// Whether `path` is MemberList of the JSON gateway, in any of its versions.
#[must_use]
pub fn is_json_member_list(path: &str) -> bool {
    Rpc::at_json(path, &JSON_VERSIONS).is_some_and(|rpc| rpc.path == MEMBER_LIST)
}

/// Whether `path` is `method` in the JSON gateway of every etcd that rangecache supports.
#[must_use]
pub fn is_json_of(path: &str, method: Method) -> bool {
    Rpc::at_json(path, &JSON_VERSIONS[..2]).is_some_and(|rpc| rpc.method == method)
}

/// `path`, if it is one of etcd's own paths for HTTP: those of its JSON gateway, `/health` and others. Any other one is
/// the client's own text.
#[must_use]
pub fn http_route(path: &str) -> Option<&str> {
    (READ_ONLY_PATHS.contains(&path) || Rpc::at_json(path, &JSON_VERSIONS).is_some()).then_some(path)
}

/// A method, or a group of methods that are treated alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// KV/Range.
    Range,
    /// KV/RangeStream (KEP-5966).
    RangeStream,
    /// KV/Put.
    Put,
    /// KV/DeleteRange.
    DeleteRange,
    /// KV/Txn.
    Txn,
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
        if let Some(rpc) = Rpc::at(path) {
            return rpc.method;
        }
        match path {
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
            Method::Range
                | Method::Put
                | Method::DeleteRange
                | Method::Txn
                | Method::Compact
                | Method::SwitchAuth
                | Method::Authenticate
                | Method::EtcdUnary
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

    /// Nesting depth of etcd's `ResponseHeader` in each gRPC response message: 1 for field 1 of the message, 2 for field 1
    /// of its field 1. `None` where responses carry no such header.
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

    /// Whether a call may change keys.
    #[must_use]
    pub fn may_write_keys(self) -> bool {
        matches!(self, Method::Put | Method::DeleteRange | Method::Txn)
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
