//! **plan** of a watch: decides how one create request is answered. [`plan`] is a pure function of the request and the
//! known state, with the checks in etcd's order.

use super::request::Create;
use crate::proxy::causes::Causes;
use rangecache_base::telemetry::Reason;
use rangecache_mirror::lineage::Auth;
use rangecache_upstream::{Version, gates};

/// State that a plan depends on in addition to the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct CreatePlanInputs {
    /// Another watcher of the stream has the id that the client chose.
    pub(super) is_id_taken: bool,
    pub(super) auth: Auth,
    /// Auth is on and rangecache's own user is authenticated, so mirrors can still be read from etcd.
    pub(super) has_own_user: bool,
    /// etcd sees who makes the call; see [`Client::identifies`](crate::proxy::handles::Client::identifies).
    pub(super) is_identified: bool,
    /// The caller sent a token or other credentials.
    pub(super) has_credentials: bool,
    /// Revision of the mirror that holds the range, or the reason for which that mirror is out of service. `None` if no
    /// mirror holds the range.
    pub(super) mirror_revision: Option<Result<i64, Reason>>,
    /// A quorum check has succeeded, so that there is a header.
    pub(super) is_checked: bool,
    /// Lowest version among the endpoints; `None` until an endpoint has reported its version.
    pub(super) version: Option<Version>,
    /// Highest known compaction revision; etcd refuses lower start revisions.
    pub(super) compacted: i64,
}

impl CreatePlanInputs {
    /// Whether etcd has to authorize the caller before memory serves the watcher.
    pub(super) fn authorizes(&self) -> bool {
        self.has_credentials || self.auth == Auth::On
    }
}

/// Plan of the answer to a create request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CreatePlan {
    /// Refused as etcd refuses it; nothing is created.
    Refuse(Refusal),
    /// From memory, with the events after a revision that a quorum check proves.
    FromNow,
    /// From memory, with the events from this revision on.
    From(i64),
    /// From memory, if etcd authorizes the caller to read the range (I8).
    Authorize,
    /// Created, and cancelled because etcd has compacted what the watcher needs, up to this revision.
    Compacted(i64),
    /// From memory, if the feed of the mirror resumes soon.
    Resume,
    /// From etcd.
    Etcd(Reason),
}

/// Why etcd does not create a watcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The start revision is negative.
    NegativeStart,
    /// The range holds no key.
    EmptyRange,
    /// The client chose the id of another watcher of the stream.
    DuplicateId,
}

impl Refusal {
    /// etcd's `cancel_reason`.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Refusal::NegativeStart => "etcdserver: mvcc: required revision has been compacted",
            Refusal::EmptyRange => "mvcc: watcher range is empty",
            Refusal::DuplicateId => "mvcc: duplicate watch ID provided on the WatchStream",
        }
    }
}

/// First versions that refuse a negative start revision; before them it is a revision like any other.
const NEGATIVE_START_REFUSED: [Version; 3] = [
    Version::new(3, 5, 24),
    Version::new(3, 6, 6),
    Version::new(3, 7, 0),
];

/// Plans the answer to `create`. **I1, forward by default**: etcd answers unless every condition for memory is known to
/// hold.
pub(super) fn plan(create: &Create, inputs: &CreatePlanInputs) -> CreatePlan {
    if let Some(version) = inputs.version
        && inputs.is_checked
        && create.start_revision < 0
    {
        return if refuses_negative_start(version) {
            CreatePlan::Refuse(Refusal::NegativeStart)
        } else {
            CreatePlan::Etcd(Reason::VersionGate)
        };
    }
    // Only etcd can check credentials (I8), even while auth seems to be off.
    let authorizes = inputs.authorizes();
    let is_gate_open = |version| gates::DELETES_AT_COMPACTION.is_open(version);
    let causes = Causes {
        not_mirrored: inputs.mirror_revision.is_none(),
        requires_leader: false,
        lacks_user: inputs.auth == Auth::On && !(inputs.has_own_user && inputs.is_identified),
        version_unknown: inputs.version.is_none(),
        gate_closed: !inputs.version.is_none_or(is_gate_open),
        out_of_service: inputs.mirror_revision.and_then(Result::err),
        unchecked: !inputs.is_checked,
        auth_unknown: inputs.auth == Auth::Unknown,
    };
    // etcd checks rights first: it decides which refusal a caller gets.
    let is_refused = create.is_empty_range() || inputs.is_id_taken || is_compacted(create, inputs);
    let is_unknown = causes.lacks_user || causes.version_unknown || causes.unchecked || causes.auth_unknown;
    if is_unknown || (authorizes && is_refused) {
        return CreatePlan::Etcd(causes.first().unwrap_or(Reason::Auth));
    }
    if create.is_empty_range() {
        return CreatePlan::Refuse(Refusal::EmptyRange);
    }
    if inputs.is_id_taken {
        return CreatePlan::Refuse(Refusal::DuplicateId);
    }
    match causes.first() {
        Some(Reason::FeedLost) => return CreatePlan::Resume,
        Some(reason) => return CreatePlan::Etcd(reason),
        None => {}
    }
    if authorizes {
        CreatePlan::Authorize
    } else if create.start_revision == 0 {
        CreatePlan::FromNow
    } else if is_compacted(create, inputs) {
        CreatePlan::Compacted(inputs.compacted)
    } else {
        CreatePlan::From(create.start_revision)
    }
}

/// Whether etcd has compacted events that the watcher starts with.
fn is_compacted(create: &Create, inputs: &CreatePlanInputs) -> bool {
    create.start_revision != 0 && create.start_revision < inputs.compacted
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
        mirror_revision: Some(Ok(100)),
        is_checked: true,
        version: Some(Version::new(3, 7, 3)),
        compacted: 40,
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
        let etcd = CreatePlan::Etcd;
        let refuse = CreatePlan::Refuse;
        let cases: &[(&str, Change, CreatePlan)] = &[
            ("from now", |_, _| (), CreatePlan::FromNow),
            (
                "future",
                |create, _| create.start_revision = 101,
                CreatePlan::From(101),
            ),
            (
                "past",
                |create, _| create.start_revision = 50,
                CreatePlan::From(50),
            ),
            (
                "at the compaction",
                |create, _| create.start_revision = 40,
                CreatePlan::From(40),
            ),
            (
                "below it",
                |create, _| create.start_revision = 39,
                CreatePlan::Compacted(40),
            ),
            (
                "negative",
                |create, _| create.start_revision = -1,
                refuse(Refusal::NegativeStart),
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
                refuse(Refusal::NegativeStart),
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
                CreatePlan::Authorize,
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
                CreatePlan::Authorize,
            ),
            (
                "credentials for other keys",
                |_, inputs| (inputs.has_credentials, inputs.mirror_revision) = (true, None),
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
                    inputs.mirror_revision = None;
                },
                refuse(Refusal::EmptyRange),
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
                    inputs.mirror_revision = None;
                },
                refuse(Refusal::DuplicateId),
            ),
            (
                "other keys",
                |_, inputs| inputs.mirror_revision = None,
                etcd(Reason::NotMirrored),
            ),
            (
                "old etcd",
                |_, inputs| inputs.version = Some(Version::new(3, 5, 17)),
                etcd(Reason::VersionGate),
            ),
            (
                "no mirror",
                |_, inputs| inputs.mirror_revision = Some(Err(Reason::Loading)),
                etcd(Reason::Loading),
            ),
            (
                "no feed",
                |_, inputs| inputs.mirror_revision = Some(Err(Reason::FeedLost)),
                CreatePlan::Resume,
            ),
            (
                "rights are checked before the feed is waited for",
                |create, inputs| {
                    create.range_end = "a".into();
                    inputs.has_credentials = true;
                    inputs.mirror_revision = Some(Err(Reason::FeedLost));
                },
                etcd(Reason::FeedLost),
            ),
            (
                "auth on from the start, without a user of its own",
                |_, inputs| {
                    (inputs.auth, inputs.version, inputs.is_checked) = (Auth::On, None, false);
                    inputs.mirror_revision = Some(Err(Reason::Loading));
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
