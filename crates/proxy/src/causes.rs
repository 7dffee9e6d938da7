//! [`Causes`]: what keeps memory from an answer, as far as it is known without I/O, and which of it is reported.

use rangecache_base::telemetry::Reason;

/// Everything that keeps memory from an answer. Several may hold at once: while auth is on and rangecache has no user, it knows no
/// version and loads no mirror either.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Causes {
    /// The range is not inside one mirror.
    pub(crate) not_mirrored: bool,
    /// A serializable read asks for a member that has a leader.
    pub(crate) requires_leader: bool,
    /// Auth is on, and rangecache has no user of its own, or etcd would not see who the caller is.
    pub(crate) lacks_user: bool,
    /// No endpoint has reported its version.
    pub(crate) version_unknown: bool,
    /// etcd is too old.
    pub(crate) gate_closed: bool,
    /// The mirror is out of service for this reason.
    pub(crate) out_of_service: Option<Reason>,
    /// No quorum check has succeeded yet.
    pub(crate) unchecked: bool,
    /// Whether auth is on is not known.
    pub(crate) auth_unknown: bool,
}

impl Causes {
    /// The reason to report: of what holds, that which would be left if all behind it were remedied, or which explains them.
    pub(crate) fn first(&self) -> Option<Reason> {
        [
            self.not_mirrored.then_some(Reason::NotMirrored),
            self.requires_leader.then_some(Reason::RequireLeader),
            self.lacks_user.then_some(Reason::Auth),
            self.version_unknown.then_some(Reason::VersionUnknown),
            self.gate_closed.then_some(Reason::VersionGate),
            self.out_of_service,
            self.unchecked.then_some(Reason::CheckFailed),
            self.auth_unknown.then_some(Reason::Auth),
        ]
        .into_iter()
        .flatten()
        .next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut Causes);

    /// Each cause with its reason, in the order of docs/consistency.md.
    const ORDER: [(Change, Reason); 8] = [
        (|causes| causes.not_mirrored = true, Reason::NotMirrored),
        (|causes| causes.requires_leader = true, Reason::RequireLeader),
        (|causes| causes.lacks_user = true, Reason::Auth),
        (|causes| causes.version_unknown = true, Reason::VersionUnknown),
        (|causes| causes.gate_closed = true, Reason::VersionGate),
        (
            |causes| causes.out_of_service = Some(Reason::Loading),
            Reason::Loading,
        ),
        (|causes| causes.unchecked = true, Reason::CheckFailed),
        (|causes| causes.auth_unknown = true, Reason::Auth),
    ];

    #[test]
    fn of_two_causes_the_one_that_explains_the_other_or_outlasts_it_is_reported() {
        assert_eq!(Causes::default().first(), None);
        for (position, (first, reason)) in ORDER.iter().enumerate() {
            for (second, _) in &ORDER[position..] {
                let mut causes = Causes::default();
                first(&mut causes);
                second(&mut causes);
                assert_eq!(causes.first(), Some(*reason), "{causes:?}");
            }
        }
    }

    #[test]
    fn order_is_that_of_the_documents() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/consistency.md");
        let text = std::fs::read_to_string(path).unwrap();
        let (_, text) = text.split_once("Of several that hold at once").unwrap();
        let (sentence, _) = text.split_once('.').unwrap();
        let mut documented = sentence.split('`').skip(1).step_by(2);
        for (_, reason) in ORDER {
            if reason != Reason::Loading {
                assert_eq!(documented.next(), Some(reason.as_str()), "{sentence}");
            }
        }
    }
}
