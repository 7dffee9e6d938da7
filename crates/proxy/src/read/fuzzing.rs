//! Fuzz targets of reads: a Range's message and its plan, and the JSON of the gateway.

#![allow(clippy::panic, reason = "compiled for tests and fuzz targets only")]

use arbitrary::{Arbitrary, Unstructured};
use bytes::Bytes;
use etcd_store::cache::{Dialect, RangeQuery, SortTarget, names_unknown_sort_target, testing::query_of};
use etcd_wire::etcdserverpb::RangeRequest;
use prost::Message as _;
use rangecache_base::telemetry::Reason;
use rangecache_mirror::lineage::Auth;
use rangecache_upstream::{Version, gates};

use super::plan::{Plan, PlanInputs, RequiredProof, plan};

pub use super::json::fuzzing::range_json;

#[derive(Arbitrary, Debug)]
struct Known {
    mirror_revision: Option<Option<u8>>,
    version: Option<(u8, u8)>,
    auth: u8,
    min_served_revision: Option<u8>,
    flags: [bool; 5],
}

impl Known {
    fn inputs(&self) -> PlanInputs<()> {
        let [
            has_own_user,
            is_identified,
            is_within_bounds,
            has_credentials,
            require_leader,
        ] = self.flags;
        let mirror_revision = self.mirror_revision.map(|revision| revision.map(i64::from));
        let version = |(minor, patch): (u8, u8)| Version::new(3, 4 + u32::from(minor % 5), patch.into());
        PlanInputs {
            mirror: mirror_revision.map(|revision| ((), revision.ok_or(Reason::Loading))),
            version: self.version.map(version),
            auth: [Auth::Unknown, Auth::Off, Auth::On][usize::from(self.auth % 3)],
            min_served_revision: self.min_served_revision.map(i64::from),
            has_own_user,
            is_identified,
            is_within_bounds,
            has_credentials,
            require_leader,
        }
    }
}

/// A Range's message and the known state: the message is read as protobuf reads it, or not at all; what would crash an
/// etcd is found in every message; nothing is answered from memory without its proof.
pub fn range_plan(data: &[u8]) {
    let mut data = Unstructured::new(data);
    let Ok(known) = Known::arbitrary(&mut data) else {
        return;
    };
    let message = Bytes::copy_from_slice(data.take_rest());
    let read = RangeRequest::decode(message.clone());
    if let Ok(read) = &read
        && !read.key.is_empty()
        && SortTarget::from_number(read.sort_target).is_none()
    {
        assert!(
            names_unknown_sort_target(&message),
            "it crashes etcd 3.5: {read:?}"
        );
    }
    let query = match (RangeQuery::decode(message.clone()), read) {
        (Ok(query), read) => {
            assert_eq!(read.map(|read| query_of(&read)).as_ref(), Ok(&query));
            query
        }
        (Err(_), Ok(read)) => {
            // Declined for its form alone, so that the usual form of the same request is not.
            let usual = read.encode_to_vec();
            assert_ne!(usual, message);
            let query = RangeQuery::decode(usual.into());
            assert_eq!(query, Ok(query_of(&read)));
            query_of(&read)
        }
        (Err(_), Err(_)) => return,
    };
    check_plan(&query, &known.inputs());
}

/// Checks what each plan requires, read from its meaning and not from the order in which `plan` decides.
fn check_plan(query: &RangeQuery, inputs: &PlanInputs<()>) {
    let planned = plan(query, inputs);
    let dialect = match inputs.version {
        Some(version) => Dialect::of_version(version.major, version.minor),
        None => Dialect::of_version(3, 5),
    };
    assert_eq!(
        matches!(planned, Plan::Refuse(_)),
        query.check(&dialect).is_err(),
        "refused as etcd refuses it"
    );
    let Plan::Answer { version, proof, .. } = planned else {
        return;
    };
    assert_eq!(Some(version), inputs.version);
    let Some(((), Ok(mirror))) = inputs.mirror else {
        panic!("{proof:?} without a mirror");
    };
    let is_reached = query.revision <= mirror;
    let needs_own_rights = inputs.has_credentials || inputs.auth == Auth::On;
    if needs_own_rights {
        assert!(matches!(proof, RequiredProof::Authorization { .. }), "{proof:?}");
    }
    if inputs.auth == Auth::On {
        assert!(inputs.has_own_user && inputs.is_identified);
    }
    if query.serializable {
        assert!(!inputs.require_leader, "only a member knows its leader");
    }
    let progress_is_trusted = gates::PROGRESS_NOTIFICATIONS.is_open(version);
    match proof {
        RequiredProof::QuorumCheck => {
            assert!(progress_is_trusted && (query.revision <= 0 || query.serializable));
        }
        RequiredProof::PastCheck => {
            assert!(query.revision > 0 && !query.serializable);
            assert!(progress_is_trusted || is_reached);
        }
        RequiredProof::AtOrAbove(revision) => {
            assert!(query.serializable && is_reached && inputs.auth == Auth::Off);
            assert_eq!(Some(revision), inputs.min_served_revision);
        }
        RequiredProof::WithinBounds(revision) => {
            assert!(inputs.is_within_bounds && inputs.auth == Auth::Off);
            assert!(!query.serializable && query.revision <= 0 && !inputs.require_leader);
            assert!(revision <= mirror && inputs.min_served_revision.is_some_and(|least| revision >= least));
        }
        RequiredProof::Authorization {
            serializable,
            min_revision,
        } => {
            assert!(progress_is_trusted && needs_own_rights);
            if serializable {
                assert!(query.serializable && Some(min_revision) == inputs.min_served_revision);
            }
        }
    }
}
