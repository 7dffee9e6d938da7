//! **plan**: how a Range will be answered. A pure function of the request and of what is known, so that it is a table
//! that tests can read.

use crate::cache::{Dialect, QueryError, RangeQuery};
use crate::mirror::cluster_state::Auth;
use crate::telemetry::Reason;
use crate::upstream::{Version, gates};

/// What the plan depends on beside the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanInputs {
    /// The mirror that holds the range: its revision, or why it is out of service; `None` if none holds it.
    pub(super) mirror: Option<Result<i64, Reason>>,
    /// The lowest version among the endpoints, once one was reported.
    pub(super) version: Option<Version>,
    pub(super) auth: Auth,
    /// The revision below which nothing may be answered (I11), if it is known.
    pub(super) floor: Option<i64>,
    /// rangecache's own user can read what is mirrored although auth is on.
    pub(super) own_identity: bool,
    /// The caller sent a token or other credentials.
    pub(super) credentials: bool,
    /// The caller asked for a member that has a leader.
    pub(super) require_leader: bool,
}

/// How a Range will be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// With an error in etcd's words.
    Refuse(QueryError),
    /// From memory at a revision that a quorum check proves; then as the request says.
    Prove,
    /// From memory at this revision or later.
    AtOrAbove(i64),
    /// From memory at the revision at which etcd authorises this caller for this range (I8).
    Authorize {
        /// etcd's member may use what it knows itself, if its revision is at least `floor`.
        serializable: bool,
        /// I11; 0 where the authorisation proves enough by itself.
        floor: i64,
    },
    /// By etcd.
    Forward(Reason),
}

/// Decides. **I1, forward by default**: whatever is not known to be answerable goes to etcd.
pub(super) fn plan(query: &RangeQuery, inputs: &PlanInputs) -> Plan {
    let dialect = inputs
        .version
        .map(|version| Dialect::of_version(version.major, version.minor));
    // Where the version is not known yet, the stricter rules: an unknown sort target crashes etcd 3.5.
    if let Err(error) = query.check(&dialect.unwrap_or(Dialect::of_version(3, 5))) {
        return Plan::Refuse(error);
    }
    let Some(lowest) = inputs.version else {
        return Plan::Forward(Reason::VersionUnknown);
    };
    if inputs.auth == Auth::On && !inputs.own_identity {
        return Plan::Forward(Reason::Auth);
    }
    let revision = match inputs.mirror {
        None => return Plan::Forward(Reason::NotMirrored),
        Some(Err(reason)) => return Plan::Forward(reason),
        Some(Ok(revision)) => revision,
    };
    if query.serializable && inputs.require_leader {
        return Plan::Forward(Reason::RequireLeader);
    }
    // Credentials are etcd's to judge also while auth seems to be off.
    if inputs.credentials || inputs.auth == Auth::On {
        return match inputs.floor {
            _ if !gates::PROGRESS_NOTIFICATIONS.is_open(lowest) => Plan::Forward(Reason::VersionGate),
            Some(floor) if query.serializable => Plan::Authorize {
                serializable: true,
                floor,
            },
            _ => Plan::Authorize {
                serializable: false,
                floor: 0,
            },
        };
    }
    // A revision that is not here yet: is it etcd's future, or only ours?
    let pinned = query.revision > 0 && query.revision <= revision;
    let without_check = pinned || (query.serializable && query.revision <= 0);
    if without_check && let Some(floor) = inputs.floor {
        return match inputs.auth {
            Auth::Off => Plan::AtOrAbove(floor),
            Auth::Unknown | Auth::On => Plan::Forward(Reason::Auth),
        };
    }
    if gates::PROGRESS_NOTIFICATIONS.is_open(lowest) {
        Plan::Prove
    } else {
        Plan::Forward(Reason::VersionGate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INPUTS: PlanInputs = PlanInputs {
        mirror: Some(Ok(100)),
        version: Some(Version::new(3, 7, 3)),
        auth: Auth::Off,
        floor: Some(90),
        own_identity: false,
        credentials: false,
        require_leader: false,
    };

    fn get() -> RangeQuery {
        RangeQuery {
            key: "k".into(),
            ..RangeQuery::default()
        }
    }

    fn planned(query: &RangeQuery, change: impl FnOnce(&mut PlanInputs)) -> Plan {
        let mut inputs = INPUTS;
        change(&mut inputs);
        plan(query, &inputs)
    }

    #[test]
    fn linearizable_reads_are_proven() {
        assert_eq!(plan(&get(), &INPUTS), Plan::Prove);
        assert_eq!(
            plan(
                &RangeQuery {
                    revision: -1,
                    ..get()
                },
                &INPUTS
            ),
            Plan::Prove
        );
    }

    #[test]
    fn reads_that_name_their_revision_or_their_laxity_need_no_check() {
        for query in [
            RangeQuery {
                serializable: true,
                ..get()
            },
            RangeQuery {
                revision: 100,
                ..get()
            },
            RangeQuery {
                revision: 1,
                serializable: true,
                ..get()
            },
        ] {
            assert_eq!(plan(&query, &INPUTS), Plan::AtOrAbove(90), "{query:?}");
            assert_eq!(
                planned(&query, |inputs| inputs.auth = Auth::Unknown),
                Plan::Forward(Reason::Auth)
            );
            assert_eq!(
                planned(&query, |inputs| inputs.floor = None),
                Plan::Prove,
                "the floor is hidden"
            );
        }
    }

    #[test]
    fn a_revision_that_is_not_here_yet_is_proven() {
        for serializable in [false, true] {
            assert_eq!(
                plan(
                    &RangeQuery {
                        revision: 101,
                        serializable,
                        ..get()
                    },
                    &INPUTS
                ),
                Plan::Prove
            );
        }
    }

    #[test]
    fn what_cannot_be_proven_is_forwarded() {
        type Change = fn(&mut PlanInputs);
        let cases: [(Change, Reason); 7] = [
            (|inputs| inputs.mirror = None, Reason::NotMirrored),
            (
                |inputs| inputs.mirror = Some(Err(Reason::Loading)),
                Reason::Loading,
            ),
            (
                |inputs| inputs.mirror = Some(Err(Reason::FeedLost)),
                Reason::FeedLost,
            ),
            (|inputs| inputs.version = None, Reason::VersionUnknown),
            (
                |inputs| inputs.version = Some(Version::new(3, 5, 12)),
                Reason::VersionGate,
            ),
            (
                |inputs| inputs.version = Some(Version::new(3, 4, 23)),
                Reason::VersionGate,
            ),
            (|inputs| inputs.auth = Auth::On, Reason::Auth),
        ];
        for (change, reason) in cases {
            assert_eq!(planned(&get(), change), Plan::Forward(reason));
        }
        let serializable = RangeQuery {
            serializable: true,
            ..get()
        };
        assert_eq!(
            planned(&serializable, |inputs| inputs.require_leader = true),
            Plan::Forward(Reason::RequireLeader)
        );
    }

    #[test]
    fn who_has_credentials_or_meets_auth_is_authorised_by_etcd_whatever_it_reads() {
        let linearizable = Plan::Authorize {
            serializable: false,
            floor: 0,
        };
        type Change = fn(&mut PlanInputs);
        let changes: [Change; 3] = [
            |inputs| inputs.credentials = true,
            |inputs| (inputs.auth, inputs.own_identity) = (Auth::On, true),
            |inputs| (inputs.auth, inputs.own_identity, inputs.credentials) = (Auth::On, true, true),
        ];
        for change in changes {
            for revision in [0, 1, 100, 101] {
                let query = RangeQuery { revision, ..get() };
                assert_eq!(planned(&query, change), linearizable, "{query:?}");
                let query = RangeQuery {
                    serializable: true,
                    ..query
                };
                let own_word = Plan::Authorize {
                    serializable: true,
                    floor: 90,
                };
                assert_eq!(planned(&query, change), own_word, "{query:?}");
                let hidden = |inputs: &mut PlanInputs| {
                    change(inputs);
                    inputs.floor = None;
                };
                assert_eq!(planned(&query, hidden), linearizable, "the floor is hidden");
            }
            let out = |inputs: &mut PlanInputs| {
                change(inputs);
                inputs.mirror = Some(Err(Reason::FeedLost));
            };
            assert_eq!(planned(&get(), out), Plan::Forward(Reason::FeedLost));
        }
        let stranger = |inputs: &mut PlanInputs| (inputs.auth, inputs.credentials) = (Auth::On, true);
        assert_eq!(planned(&get(), stranger), Plan::Forward(Reason::Auth));
    }

    #[test]
    fn what_etcd_refuses_is_refused_even_when_nothing_is_known() {
        let unknown_target = RangeQuery {
            sort_target: 9,
            ..get()
        };
        let no_key = RangeQuery {
            sort_target: 9,
            ..RangeQuery::default()
        };
        for change in [
            (|_| {}) as fn(&mut PlanInputs),
            |inputs| inputs.version = None,
            |inputs| inputs.mirror = None,
        ] {
            assert_eq!(
                planned(&unknown_target, change),
                Plan::Refuse(QueryError::InvalidSortOption)
            );
            assert_eq!(planned(&no_key, change), Plan::Refuse(QueryError::EmptyKey));
        }
    }
}
