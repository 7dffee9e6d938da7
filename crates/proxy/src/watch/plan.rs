//! **plan** of a watch: decides how one create request is answered. [`plan`] is a pure function of the request and the
//! known state, with the checks in etcd's order.

use bytes::Bytes;
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::Reason;
use rangecache_mirror::lineage::Auth;
use rangecache_upstream::{Version, gates};

use super::request::Create;
use crate::causes::Causes;

/// State that a plan depends on in addition to the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct CreatePlanInputs {
    /// Another watcher of the stream has the id that the client chose.
    pub(super) is_id_taken: bool,
    pub(super) auth: Auth,
    /// Auth is on and rangecache's own user is authenticated, so mirrors can still be read from etcd.
    pub(super) has_own_user: bool,
    /// etcd sees who makes the call; see [`Client::identifies`](crate::handles::Client::identifies).
    pub(super) is_identified: bool,
    /// The caller sent a token or other credentials.
    pub(super) has_credentials: bool,
    /// Position of the mirror that holds the range, in [`Mirrors::all`](rangecache_mirror::Mirrors::all).
    pub(super) mirror: Option<usize>,
    /// The reason for which that mirror is out of service.
    pub(super) out_of_service: Option<Reason>,
    /// A quorum check has succeeded, so that there is a header.
    pub(super) is_checked: bool,
    /// Lowest version among the endpoints; `None` until an endpoint has reported its version.
    pub(super) version: Option<Version>,
    /// Highest known compaction revision; etcd refuses lower start revisions.
    pub(super) compacted: i64,
    /// Compaction revision above the start that etcd has reported itself; `None` if only `compacted` is known.
    pub(super) reported_compaction: Option<i64>,
}

/// Mirror from which memory can serve a watcher, and whether etcd has to authorize the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServingMirror {
    /// Position of the mirror in [`Mirrors::all`](rangecache_mirror::Mirrors::all).
    pub(super) mirror: usize,
    /// Whether etcd has to authorize the caller first (I8).
    pub(super) authorizes: bool,
}

/// Answer to a create request that begins no watcher in memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotServed {
    /// Refused with this `cancel_reason`, as etcd refuses it; nothing is created.
    Refuse(&'static str),
    /// etcd has refused it with this message, which has its gRPC prefix.
    Refused(Bytes),
    /// Created, and cancelled because etcd has compacted what the watcher needs, up to this revision.
    Compacted(i64),
    /// From etcd, which serves the whole stream.
    Etcd(Reason),
    /// The stream ends with this status.
    End(Status),
}

impl From<Reason> for NotServed {
    fn from(reason: Reason) -> NotServed {
        NotServed::Etcd(reason)
    }
}

/// etcd's `cancel_reason` of a negative start revision.
pub(super) const NEGATIVE_START: &str = "etcdserver: mvcc: required revision has been compacted";
/// etcd's `cancel_reason` of a range that holds no key.
pub(super) const EMPTY_RANGE: &str = "mvcc: watcher range is empty";
/// etcd's `cancel_reason` of an id that another watcher of the stream has.
pub(super) const DUPLICATE_ID: &str = "mvcc: duplicate watch ID provided on the WatchStream";

/// First versions that refuse a negative start revision; before them it is a revision like any other.
const NEGATIVE_START_REFUSED: [Version; 3] = [
    Version::new(3, 5, 24),
    Version::new(3, 6, 6),
    Version::new(3, 7, 0),
];

/// Plans the answer to `create`: the mirror from which its watcher is started. **I1, forward by default**: etcd answers unless
/// every condition for memory is known to hold.
pub(super) fn plan(create: &Create, inputs: &CreatePlanInputs) -> Result<ServingMirror, NotServed> {
    if let Some(version) = inputs.version
        && inputs.is_checked
        && create.start_revision < 0
    {
        return Err(match refuses_negative_start(version) {
            true => NotServed::Refuse(NEGATIVE_START),
            false => NotServed::Etcd(Reason::VersionGate),
        });
    }
    // Only etcd can check credentials (I8), even while auth seems to be off.
    let authorizes = inputs.has_credentials || inputs.auth == Auth::On;
    let is_gate_open = |version| gates::DELETES_AT_COMPACTION.is_open(version);
    let causes = Causes {
        not_mirrored: inputs.mirror.is_none(),
        requires_leader: false,
        lacks_user: inputs.auth == Auth::On && !(inputs.has_own_user && inputs.is_identified),
        version_unknown: inputs.version.is_none(),
        gate_closed: !inputs.version.is_none_or(is_gate_open),
        out_of_service: inputs.out_of_service,
        unchecked: !inputs.is_checked,
        auth_unknown: inputs.auth == Auth::Unknown,
    };
    let is_compacted = create.start_revision != 0 && create.start_revision < inputs.compacted;
    // etcd checks rights first: it decides which refusal a caller gets.
    let is_refused = create.is_empty_range() || inputs.is_id_taken || is_compacted;
    let is_unknown = causes.lacks_user || causes.version_unknown || causes.unchecked || causes.auth_unknown;
    if is_unknown || (authorizes && is_refused) {
        return Err(causes.first().unwrap_or(Reason::Auth).into());
    }
    if create.is_empty_range() {
        return Err(NotServed::Refuse(EMPTY_RANGE));
    }
    if inputs.is_id_taken {
        return Err(NotServed::Refuse(DUPLICATE_ID));
    }
    // Most feeds resume soon: they are waited for.
    let is_resuming = causes.first() == Some(Reason::FeedLost);
    if let Some(reason) = causes.first().filter(|_| !is_resuming) {
        return Err(reason.into());
    }
    match inputs.reported_compaction {
        Some(revision) if is_compacted && !is_resuming => Err(NotServed::Compacted(revision)),
        _ => {
            let mirror = inputs.mirror.ok_or(Reason::NotMirrored)?;
            Ok(ServingMirror { mirror, authorizes })
        }
    }
}

/// Whether etcd of `version` refuses a negative start revision.
fn refuses_negative_start(version: Version) -> bool {
    NEGATIVE_START_REFUSED
        .iter()
        .find(|first| (first.major, first.minor) == (version.major, version.minor))
        .map_or(version > NEGATIVE_START_REFUSED[2], |first| version >= *first)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INPUTS: CreatePlanInputs = CreatePlanInputs {
        is_id_taken: false,
        auth: Auth::Off,
        has_own_user: false,
        is_identified: true,
        has_credentials: false,
        mirror: Some(2),
        out_of_service: None,
        is_checked: true,
        version: Some(Version::new(3, 7, 3)),
        compacted: 40,
        reported_compaction: Some(40),
    };

    fn create() -> Create {
        Create {
            key: "k".into(),
            ..Create::default()
        }
    }

    #[test]
    fn creates_are_planned_by_the_table() {
        type Change = fn(&mut Create, &mut CreatePlanInputs);
        let etcd = |reason| Err(NotServed::Etcd(reason));
        let refuse = |reason| Err(NotServed::Refuse(reason));
        let start = |authorizes| {
            Ok(ServingMirror {
                mirror: 2,
                authorizes,
            })
        };
        let cases: &[(&str, Change, Result<ServingMirror, NotServed>)] = &[
            ("from now", |_, _| (), start(false)),
            ("future", |create, _| create.start_revision = 101, start(false)),
            ("past", |create, _| create.start_revision = 50, start(false)),
            (
                "at the compaction",
                |create, _| create.start_revision = 40,
                start(false),
            ),
            (
                "below it",
                |create, _| create.start_revision = 39,
                Err(NotServed::Compacted(40)),
            ),
            (
                "below a compaction that etcd has not reported itself",
                |create, inputs| (create.start_revision, inputs.reported_compaction) = (39, None),
                start(false),
            ),
            (
                "negative",
                |create, _| create.start_revision = -1,
                refuse(NEGATIVE_START),
            ),
            (
                "negative before etcd refused it",
                |create, inputs| {
                    create.start_revision = -1;
                    inputs.version = Some(Version::new(3, 6, 5));
                },
                etcd(Reason::VersionGate),
            ),
            (
                "negative start is checked before rights",
                |create, inputs| {
                    create.start_revision = -1;
                    inputs.auth = Auth::On;
                },
                refuse(NEGATIVE_START),
            ),
            (
                "version",
                |_, inputs| inputs.version = None,
                etcd(Reason::VersionUnknown),
            ),
            (
                "auth on, without a user of its own",
                |_, inputs| inputs.auth = Auth::On,
                etcd(Reason::Auth),
            ),
            (
                "auth on",
                |_, inputs| (inputs.auth, inputs.has_own_user) = (Auth::On, true),
                start(true),
            ),
            (
                "auth on, taken for another user",
                |_, inputs| {
                    (inputs.auth, inputs.has_own_user, inputs.is_identified) = (Auth::On, true, false)
                },
                etcd(Reason::Auth),
            ),
            (
                "auth unknown",
                |_, inputs| inputs.auth = Auth::Unknown,
                etcd(Reason::Auth),
            ),
            (
                "credentials",
                |_, inputs| inputs.has_credentials = true,
                start(true),
            ),
            (
                "credentials for other keys",
                |_, inputs| (inputs.has_credentials, inputs.mirror) = (true, None),
                etcd(Reason::NotMirrored),
            ),
            (
                "rights are checked before the compaction",
                |create, inputs| (create.start_revision, inputs.has_credentials) = (39, true),
                etcd(Reason::Auth),
            ),
            (
                "empty range",
                |create, inputs| {
                    create.range_end = "a".into();
                    inputs.is_id_taken = true;
                    inputs.mirror = None;
                },
                refuse(EMPTY_RANGE),
            ),
            (
                "rights are checked before the range",
                |create, inputs| {
                    create.range_end = "a".into();
                    inputs.has_credentials = true;
                },
                etcd(Reason::Auth),
            ),
            (
                "id",
                |_, inputs| {
                    inputs.is_id_taken = true;
                    inputs.mirror = None;
                },
                refuse(DUPLICATE_ID),
            ),
            (
                "other keys",
                |_, inputs| inputs.mirror = None,
                etcd(Reason::NotMirrored),
            ),
            (
                "old etcd",
                |_, inputs| inputs.version = Some(Version::new(3, 5, 17)),
                etcd(Reason::VersionGate),
            ),
            (
                "no mirror",
                |_, inputs| inputs.out_of_service = Some(Reason::Loading),
                etcd(Reason::Loading),
            ),
            (
                "no feed",
                |_, inputs| inputs.out_of_service = Some(Reason::FeedLost),
                start(false),
            ),
            (
                "rights are checked before the feed is waited for",
                |create, inputs| {
                    create.range_end = "a".into();
                    inputs.has_credentials = true;
                    inputs.out_of_service = Some(Reason::FeedLost);
                },
                etcd(Reason::FeedLost),
            ),
            (
                "auth on from the start, without a user of its own",
                |_, inputs| {
                    (inputs.auth, inputs.version, inputs.is_checked) = (Auth::On, None, false);
                    inputs.out_of_service = Some(Reason::Loading);
                },
                etcd(Reason::Auth),
            ),
        ];
        for (what, change, expected) in cases {
            let (mut create, mut inputs) = (create(), INPUTS);
            change(&mut create, &mut inputs);
            assert_eq!(plan(&create, &inputs), *expected, "{what}");
        }
    }

    #[test]
    fn negative_start_is_refused_from_the_versions_that_refuse_it() {
        for (version, refuses) in [
            (Version::new(3, 4, 40), false),
            (Version::new(3, 5, 23), false),
            (Version::new(3, 5, 24), true),
            (Version::new(3, 6, 5), false),
            (Version::new(3, 6, 6), true),
            (Version::new(3, 7, 0), true),
            (Version::new(3, 8, 0), true),
            (Version::new(4, 0, 0), true),
        ] {
            assert_eq!(refuses_negative_start(version), refuses, "{version}");
        }
    }
}
