//! Roles of members in their cluster.

use etcd_wire::etcdserverpb::StatusResponse;

/// Role of a member in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// No status was received yet.
    Unknown,
    /// Leader.
    Leader,
    /// Voting member that knows its leader.
    Follower,
    /// Non-voting member.
    Learner,
    /// Voting member that knows no leader.
    Leaderless,
}

impl Role {
    /// Role that a member reports in its Maintenance.Status response.
    #[must_use]
    pub fn from_status(status: &StatusResponse) -> Role {
        let member_id = status.header.as_ref().map_or(0, |header| header.member_id);
        match status.leader {
            _ if status.is_learner => Role::Learner,
            0 => Role::Leaderless,
            leader if leader == member_id => Role::Leader,
            _ => Role::Follower,
        }
    }

    /// Whether the member can answer linearizable reads: it votes and knows a leader. etcd before 3.4 reports
    /// neither, and a balancer may hide them; no version reports a leader of 0 while it has one.
    #[must_use]
    pub fn can_prove(self) -> bool {
        !matches!(self, Role::Learner | Role::Leaderless)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etcd_wire::etcdserverpb::ResponseHeader;

    #[test]
    fn learners_and_members_without_a_leader_cannot_prove() {
        let follower = StatusResponse {
            leader: 7,
            ..StatusResponse::default()
        };
        let leader = StatusResponse {
            header: Some(ResponseHeader {
                member_id: 7,
                ..ResponseHeader::default()
            }),
            ..follower.clone()
        };
        let leaderless = StatusResponse {
            leader: 0,
            ..follower.clone()
        };
        let learner = StatusResponse {
            is_learner: true,
            ..follower.clone()
        };
        for (status, role, can_prove) in [
            (follower, Role::Follower, true),
            (leader, Role::Leader, true),
            (leaderless, Role::Leaderless, false),
            (learner, Role::Learner, false),
        ] {
            let found = Role::from_status(&status);
            assert_eq!((found, found.can_prove()), (role, can_prove));
        }
    }
}
