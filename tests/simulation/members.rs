//! The members as processes: their addresses, once for clients that call etcd directly and once for rangecache, so that
//! links can fail apart from members.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::cluster::{Cluster, MEMBERS, Member};
use crate::server;

/// Side from which a member is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Rangecache,
    Clients,
}

impl From {
    pub const BOTH: [From; 2] = [From::Rangecache, From::Clients];

    /// Address of a member.
    pub fn authority(self, member: usize) -> String {
        match self {
            From::Rangecache => format!("member-{member}:2379"),
            From::Clients => format!("direct-{member}:2379"),
        }
    }
}

/// The listeners of all members.
pub struct Members {
    cluster: Arc<Cluster>,
    /// Listeners that run, by member.
    listening: Mutex<Vec<(usize, From, CancellationToken)>>,
}

impl Members {
    /// Starts every member.
    pub fn start(cluster: &Arc<Cluster>) -> Self {
        let members = Self {
            cluster: Arc::clone(cluster),
            listening: Mutex::default(),
        };
        for member in 0..MEMBERS {
            tokio::spawn(Arc::clone(cluster).apply(member));
            for from in From::BOTH {
                members.listen(member, from);
            }
        }
        tokio::spawn(Arc::clone(cluster).elect());
        tokio::spawn(Arc::clone(cluster).expire_leases());
        members
    }

    fn listen(&self, member: usize, from: From) {
        let stop = CancellationToken::new();
        self.listening.lock().push((member, from, stop.clone()));
        tokio::spawn(server::serve(Arc::clone(&self.cluster), member, from, stop));
    }

    /// Cuts the links of `from` to `member`, and accepts no new ones.
    pub fn cut_off(&self, member: usize, from: From) {
        self.listening.lock().retain(|(of, by, stop)| {
            let ends = (*of, *by) == (member, from);
            if ends {
                stop.cancel();
            }
            !ends
        });
        self.cluster.cut(member, from, 1);
    }

    /// Accepts links of `from` to `member` again.
    pub fn reconnect(&self, member: usize, from: From) {
        let is_listening = self
            .listening
            .lock()
            .iter()
            .any(|(of, by, _)| (*of, *by) == (member, from));
        if !is_listening {
            self.listen(member, from);
        }
    }

    /// Kills the process of a member.
    pub fn kill(&self, member: usize) {
        self.cluster.change(|state| state.members[member].is_up = false);
        for from in From::BOTH {
            self.cut_off(member, from);
        }
    }

    /// Starts a new member in the place of one that was killed: a learner without data.
    pub fn replace(&self, member: usize) {
        self.cluster.change(|state| {
            let newest = state.members.iter().map(|of| of.id).max();
            state.members[member] = Member {
                is_learner: true,
                ..Member::new(newest.map_or(1, |newest| newest + 1))
            };
        });
        for from in From::BOTH {
            self.reconnect(member, from);
        }
    }

    /// Starts the process of a member again. It may have to apply its newest entries again.
    pub fn restart(&self, member: usize) {
        let again = self.cluster.chance.below(20);
        self.cluster.change(|state| {
            let of = &mut state.members[member];
            of.is_up = true;
            of.applied = of.applied.saturating_sub(again).max(1);
        });
        for from in From::BOTH {
            self.reconnect(member, from);
        }
    }
}
