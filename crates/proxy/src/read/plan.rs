//! **plan**: decides how a Range is answered. [`plan`] is a pure function of the request and the known state, so that
//! tests cover the rules without I/O.

use etcd_store::cache::{Dialect, QueryError, RangeQuery};
use rangecache_base::telemetry::Reason;
use rangecache_mirror::lineage::Auth;
use rangecache_upstream::{Version, gates};

use crate::causes::Causes;

/// State that a plan depends on in addition to the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanInputs<M> {
    /// The mirror that holds the range, with its revision or the reason for which it is out of service. `None` if no
    /// mirror holds the range.
    pub(super) mirror: Option<(M, Result<i64, Reason>)>,
    /// Lowest version among the endpoints; `None` until an endpoint has reported its version.
    pub(super) version: Option<Version>,
    pub(super) auth: Auth,
    /// Lowest revision that a response may have (I11). `None` while a forwarded response could not be read, which may
    /// have shown a higher one.
    pub(super) min_served_revision: Option<i64>,
    /// Auth is on and rangecache's own user is authenticated, so mirrors can still be read from etcd.
    pub(super) has_own_user: bool,
    /// etcd sees who makes the call; see [`Client::identifies`](crate::handles::Client::identifies).
    pub(super) is_identified: bool,
    /// The view is proven to lie within the bounds that the caller set.
    pub(super) is_within_bounds: bool,
    /// The caller sent a token or other credentials.
    pub(super) has_credentials: bool,
    /// The caller set `hasleader`: a member without a leader must refuse the call.
    pub(super) require_leader: bool,
}

/// Source of the response to a Range. `M` stands for the mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan<M> {
    /// Refused with etcd's error.
    Refuse(QueryError),
    /// From etcd.
    Forward(Reason),
    /// From memory, once there is the proof that it needs.
    Answer {
        mirror: M,
        /// Lowest version among the endpoints, whose dialect the response follows.
        version: Version,
        proof: RequiredProof,
    },
}

/// Proof that an answer from memory needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequiredProof {
    /// A quorum check has returned etcd's revision, and the mirror has reached it.
    QuorumCheck,
    /// A quorum check has returned etcd's revision, and has proven that the requested past revision is not compacted.
    /// The mirror must have reached only the past revision.
    PastCheck,
    /// The mirror is at this revision or later. Needs no call to etcd.
    AtOrAbove(i64),
    /// The mirror is at this revision or later, which lies within the bounds that the caller set. Needs no call to etcd.
    WithinBounds(i64),
    /// etcd authorizes the caller to read the range, and the answer is at the revision at which it does (I8).
    Authorization {
        /// Whether one member's local state suffices, provided its revision is at least `min_revision`.
        serializable: bool,
        /// Lowest acceptable revision of the authorization (I11). 0 if the authorization is linearizable: its revision
        /// is at least that of any earlier response.
        min_revision: i64,
    },
}

/// Plans the read. **I1, forward by default**: a read is forwarded unless every condition for an answer from memory is
/// known to hold.
pub(super) fn plan<M: Copy>(query: &RangeQuery, inputs: &PlanInputs<M>) -> Plan<M> {
    let dialect = inputs
        .version
        .map(|version| Dialect::of_version(version.major, version.minor));
    // While the version is unknown the stricter rules of 3.5 apply: an unknown sort target crashes etcd before 3.6.
    if let Err(error) = query.check(&dialect.unwrap_or(Dialect::of_version(3, 5))) {
        return Plan::Refuse(error);
    }
    let out_of_service = inputs.mirror.and_then(|(_, state)| state.err());
    // One that is out of service may reach any.
    let mirror_revision = inputs
        .mirror
        .and_then(|(_, state)| state.ok())
        .unwrap_or(i64::MAX);
    let proof = required_proof(query, inputs, mirror_revision);
    let needs_progress = match proof {
        Some(RequiredProof::QuorumCheck | RequiredProof::Authorization { .. }) => true,
        Some(RequiredProof::PastCheck) => query.revision > mirror_revision,
        Some(RequiredProof::AtOrAbove(_) | RequiredProof::WithinBounds(_)) | None => false,
    };
    let is_gate_open = |version| gates::PROGRESS_NOTIFICATIONS.is_open(version);
    let causes = Causes {
        not_mirrored: inputs.mirror.is_none(),
        // Such a read fails on a member without a leader, which only etcd can know. A linearizable read needs a leader
        // anyway, and so does its proof.
        requires_leader: query.serializable && inputs.require_leader,
        lacks_user: inputs.auth == Auth::On && !(inputs.has_own_user && inputs.is_identified),
        version_unknown: inputs.version.is_none(),
        gate_closed: needs_progress && !inputs.version.is_none_or(is_gate_open),
        out_of_service,
        unchecked: false,
        auth_unknown: proof.is_none(),
    };
    match (inputs.mirror, inputs.version, proof, causes.first()) {
        (Some((mirror, Ok(_))), Some(version), Some(proof), None) => Plan::Answer {
            mirror,
            version,
            proof,
        },
        (.., reason) => Plan::Forward(reason.unwrap_or(Reason::NotMirrored)),
    }
}

/// The proof that an answer from a mirror at `mirror_revision` needs; `None` if it is unknown whether auth is on, and no proof shows
/// that.
fn required_proof<M>(
    query: &RangeQuery,
    inputs: &PlanInputs<M>,
    mirror_revision: i64,
) -> Option<RequiredProof> {
    // Only etcd can check credentials (I8), even while auth seems to be off: it may have been switched on since the
    // last check.
    if inputs.has_credentials || inputs.auth == Auth::On {
        return Some(match inputs.min_served_revision {
            Some(min_revision) if query.serializable => RequiredProof::Authorization {
                serializable: true,
                min_revision,
            },
            _ => RequiredProof::Authorization {
                serializable: false,
                min_revision: 0,
            },
        });
    }
    // A revision above the mirror's may exist in etcd already or lie in its future: that takes a quorum check, even if
    // the read is serializable, and progress of the mirror.
    let is_reached = query.revision <= mirror_revision;
    if query.serializable
        && is_reached
        && let Some(revision) = inputs.min_served_revision
    {
        return (inputs.auth == Auth::Off).then_some(RequiredProof::AtOrAbove(revision));
    }
    // At a past revision only a check shows whether etcd has compacted it, and `hasleader` asks for the cluster of now.
    if inputs.is_within_bounds
        && query.revision <= 0
        && !query.serializable
        && !inputs.require_leader
        && inputs.auth == Auth::Off
        && inputs
            .min_served_revision
            .is_some_and(|minimum| minimum <= mirror_revision)
    {
        return Some(RequiredProof::WithinBounds(mirror_revision));
    }
    Some(if query.revision > 0 && !query.serializable {
        RequiredProof::PastCheck
    } else {
        RequiredProof::QuorumCheck
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: Version = Version::new(3, 7, 3);
    const INPUTS: PlanInputs<()> = PlanInputs {
        mirror: Some(((), Ok(100))),
        version: Some(VERSION),
        auth: Auth::Off,
        min_served_revision: Some(90),
        has_own_user: false,
        is_identified: true,
        is_within_bounds: false,
        has_credentials: false,
        require_leader: false,
    };

    fn get() -> RangeQuery {
        RangeQuery {
            key: "k".into(),
            ..RangeQuery::default()
        }
    }

    /// The plan of an answer that needs this proof.
    const fn by(proof: RequiredProof) -> Plan<()> {
        Plan::Answer {
            mirror: (),
            version: VERSION,
            proof,
        }
    }

    const CHECKED: Plan<()> = by(RequiredProof::QuorumCheck);
    const CHECKED_PAST: Plan<()> = by(RequiredProof::PastCheck);
    const AUTHORIZED: Plan<()> = by(RequiredProof::Authorization {
        serializable: false,
        min_revision: 0,
    });

    fn planned(query: &RangeQuery, change: impl FnOnce(&mut PlanInputs<()>)) -> Plan<()> {
        let mut inputs = INPUTS;
        change(&mut inputs);
        plan(query, &inputs)
    }

    #[test]
    fn linearizable_read_needs_a_quorum_check() {
        assert_eq!(plan(&get(), &INPUTS), CHECKED);
        assert_eq!(
            plan(
                &RangeQuery {
                    revision: -1,
                    ..get()
                },
                &INPUTS
            ),
            CHECKED
        );
    }

    #[test]
    fn read_within_its_bounds_needs_no_quorum_check_unless_more_is_asked() {
        let within = |inputs: &mut PlanInputs<()>| inputs.is_within_bounds = true;
        assert_eq!(planned(&get(), within), by(RequiredProof::WithinBounds(100)));
        assert_eq!(planned(&get(), |_| {}), CHECKED);
        type Change = fn(&mut PlanInputs<()>);
        let changes: [(Change, Plan<()>); 6] = [
            (|inputs| inputs.require_leader = true, CHECKED),
            (|inputs| inputs.auth = Auth::Unknown, CHECKED),
            (|inputs| inputs.min_served_revision = None, CHECKED),
            (|inputs| inputs.min_served_revision = Some(101), CHECKED),
            (|inputs| inputs.has_credentials = true, AUTHORIZED),
            (
                |inputs| inputs.mirror = Some(((), Err(Reason::FeedLost))),
                Plan::Forward(Reason::FeedLost),
            ),
        ];
        for (change, expected) in changes {
            let changed = |inputs: &mut PlanInputs<()>| {
                within(inputs);
                change(inputs);
            };
            assert_eq!(planned(&get(), changed), expected);
        }
        let past = RangeQuery {
            revision: 50,
            ..get()
        };
        assert_eq!(planned(&past, within), CHECKED_PAST);
    }

    #[test]
    fn serializable_read_needs_no_quorum_check() {
        for query in [
            RangeQuery {
                serializable: true,
                ..get()
            },
            RangeQuery {
                revision: 1,
                serializable: true,
                ..get()
            },
        ] {
            assert_eq!(
                plan(&query, &INPUTS),
                by(RequiredProof::AtOrAbove(90)),
                "{query:?}"
            );
            assert_eq!(
                planned(&query, |inputs| inputs.auth = Auth::Unknown),
                Plan::Forward(Reason::Auth)
            );
            assert_eq!(
                planned(&query, |inputs| inputs.min_served_revision = None),
                CHECKED,
                "the minimum served revision is unknown"
            );
        }
    }

    #[test]
    fn past_read_needs_a_quorum_check_at_its_revision() {
        for revision in [1, 100, 101] {
            let query = RangeQuery { revision, ..get() };
            assert_eq!(plan(&query, &INPUTS), CHECKED_PAST, "{revision}");
            for auth in [Auth::Unknown, Auth::Off] {
                let unknown = |inputs: &mut PlanInputs<()>| {
                    (inputs.min_served_revision, inputs.auth) = (None, auth);
                };
                assert_eq!(planned(&query, unknown), CHECKED_PAST, "{revision}");
            }
            let version = Version::new(3, 5, 12);
            let old = planned(&query, |inputs| inputs.version = Some(version));
            let expected = if revision > 100 {
                Plan::Forward(Reason::VersionGate)
            } else {
                // No progress is needed to reach it.
                Plan::Answer {
                    mirror: (),
                    version,
                    proof: RequiredProof::PastCheck,
                }
            };
            assert_eq!(old, expected, "{revision}");
        }
    }

    #[test]
    fn serializable_read_above_the_mirror_needs_a_quorum_check() {
        let query = RangeQuery {
            revision: 101,
            serializable: true,
            ..get()
        };
        assert_eq!(plan(&query, &INPUTS), CHECKED);
    }

    #[test]
    fn read_that_cannot_be_proven_is_forwarded_with_its_reason() {
        type Change = fn(&mut PlanInputs<()>);
        let cases: [(Change, Reason); 8] = [
            (|inputs| inputs.mirror = None, Reason::NotMirrored),
            (
                |inputs| inputs.mirror = Some(((), Err(Reason::Loading))),
                Reason::Loading,
            ),
            (
                |inputs| inputs.mirror = Some(((), Err(Reason::FeedLost))),
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
            // Without a user neither a version nor a key is known.
            (
                |inputs| {
                    (inputs.auth, inputs.version) = (Auth::On, None);
                    inputs.mirror = Some(((), Err(Reason::Loading)));
                },
                Reason::Auth,
            ),
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
    fn read_with_credentials_or_auth_is_authorized_by_etcd_at_any_revision() {
        type Change = fn(&mut PlanInputs<()>);
        let changes: [Change; 3] = [
            |inputs| inputs.has_credentials = true,
            |inputs| (inputs.auth, inputs.has_own_user) = (Auth::On, true),
            |inputs| (inputs.auth, inputs.has_own_user, inputs.has_credentials) = (Auth::On, true, true),
        ];
        for change in changes {
            for revision in [0, 1, 100, 101] {
                let query = RangeQuery { revision, ..get() };
                assert_eq!(planned(&query, change), AUTHORIZED, "{query:?}");
                let query = RangeQuery {
                    serializable: true,
                    ..query
                };
                let from_local_state = by(RequiredProof::Authorization {
                    serializable: true,
                    min_revision: 90,
                });
                assert_eq!(planned(&query, change), from_local_state, "{query:?}");
                let minimum_unknown = |inputs: &mut PlanInputs<()>| {
                    change(inputs);
                    inputs.min_served_revision = None;
                };
                assert_eq!(planned(&query, minimum_unknown), AUTHORIZED, "{query:?}");
            }
            let out_of_service = |inputs: &mut PlanInputs<()>| {
                change(inputs);
                inputs.mirror = Some(((), Err(Reason::FeedLost)));
            };
            assert_eq!(planned(&get(), out_of_service), Plan::Forward(Reason::FeedLost));
        }
        let no_own_user =
            |inputs: &mut PlanInputs<()>| (inputs.auth, inputs.has_credentials) = (Auth::On, true);
        assert_eq!(planned(&get(), no_own_user), Plan::Forward(Reason::Auth));
        let taken_for_another = |inputs: &mut PlanInputs<()>| {
            (inputs.auth, inputs.has_own_user, inputs.is_identified) = (Auth::On, true, false);
        };
        assert_eq!(planned(&get(), taken_for_another), Plan::Forward(Reason::Auth));
        assert_eq!(planned(&get(), |inputs| inputs.is_identified = false), CHECKED);
    }

    #[test]
    fn invalid_read_is_refused_even_without_version_or_mirror() {
        let unknown_target = RangeQuery {
            sort_target: 9,
            ..get()
        };
        let no_key = RangeQuery {
            sort_target: 9,
            ..RangeQuery::default()
        };
        for change in [
            (|_| {}) as fn(&mut PlanInputs<()>),
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
