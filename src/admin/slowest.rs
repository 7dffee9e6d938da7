//! The slowest calls of the last minutes, and where their time went.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::advice::Group;
use crate::telemetry::Outcome;
use crate::telemetry::calls::Call;
use crate::telemetry::outcome::Kind;

/// One of them. Times are in seconds since its arrival.
#[derive(Debug, Serialize)]
pub(super) struct Slow {
    pub(super) method: &'static str,
    /// That holds the range; none where none holds all of it.
    pub(super) mirror: Option<String>,
    #[serde(flatten, serialize_with = "super::status::labels")]
    pub(super) outcome: Outcome,
    /// UTC, RFC 3339.
    pub(super) ended_at: String,
    pub(super) total_seconds: f64,
    /// One after the other; what took no time is left out.
    pub(super) phases: Vec<Phase>,
    /// 0: the newest.
    pub(super) revision_asked: i64,
    /// 0: none had to be.
    pub(super) revision_proven: i64,
    /// 0: not from memory.
    pub(super) revision_served: i64,
    /// 0 where etcd answered: nobody has counted them.
    pub(super) keys: u64,
    pub(super) bytes: u64,
}

/// A part of a call's time.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Phase {
    /// `proof`, `wait`, `answer`, `etcd`, `nobody` or `sending`.
    pub(super) name: &'static str,
    pub(super) seconds: f64,
}

impl Phase {
    /// In words.
    pub(super) fn title(&self) -> &'static str {
        match self.name {
            "proof" => "proving that memory is fresh",
            "wait" => "proving, and waiting for the mirror",
            "answer" => "answering from memory",
            "etcd" => "waiting for etcd",
            "nobody" => "until it was given up",
            _ => "sending the answer",
        }
    }
}

impl Slow {
    /// The slowest first.
    pub(super) fn list(calls: &[Arc<Call>]) -> Vec<Slow> {
        calls.iter().map(|call| Slow::of(call)).collect()
    }

    fn of(call: &Call) -> Slow {
        Slow {
            method: match call.kind {
                Kind::Unary => "Range",
                Kind::Stream => "RangeStream",
            },
            mirror: call.mirror.clone(),
            outcome: call.outcome,
            ended_at: humantime::format_rfc3339_seconds(call.ended_at).to_string(),
            total_seconds: call.ended.as_secs_f64(),
            phases: phases(call),
            revision_asked: call.revisions.asked,
            revision_proven: call.revisions.proven,
            revision_served: call.revisions.served,
            keys: call.keys,
            bytes: call.bytes,
        }
    }
}

fn phases(call: &Call) -> Vec<Phase> {
    let group = Group::of(call.outcome);
    // Memory that was fresh may still not have had the answer: what is older than its history, for one.
    let proven = call.proven.filter(|_| group != Group::Nobody);
    let until_proven = proven.map(|proven| (if call.waited { "wait" } else { "proof" }, proven));
    let until_head = match group {
        Group::Memory | Group::Waited => "answer",
        Group::Etcd => "etcd",
        Group::Nobody => "nobody",
    };
    let mut from = Duration::ZERO;
    until_proven
        .into_iter()
        .chain([(until_head, call.first_byte), ("sending", call.ended)])
        .map(|(name, until)| {
            let seconds = until.saturating_sub(from).as_secs_f64();
            from = from.max(until);
            Phase { name, seconds }
        })
        .filter(|phase| phase.seconds > 0.0)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::telemetry::Reason;
    use crate::telemetry::calls::Revisions;
    use crate::telemetry::outcome::Read;

    fn named(outcome: Outcome, proven: Option<u64>, waited: bool, ended: u64) -> Vec<(&'static str, f64)> {
        let call = Call {
            kind: Kind::Unary,
            outcome,
            ended_at: SystemTime::UNIX_EPOCH,
            proven: proven.map(Duration::from_secs),
            waited,
            first_byte: Duration::from_secs(5),
            ended: Duration::from_secs(ended),
            mirror: None,
            revisions: Revisions::default(),
            keys: 0,
            bytes: 0,
        };
        phases(&call)
            .iter()
            .map(|phase| (phase.name, phase.seconds))
            .collect()
    }

    #[test]
    fn a_calls_time_is_told_apart() {
        let hit = Outcome::Hit(Read::Linearizable);
        assert_eq!(
            named(hit, Some(3), false, 9),
            [("proof", 3.0), ("answer", 2.0), ("sending", 4.0)]
        );
        assert_eq!(named(hit, Some(5), true, 5), [("wait", 5.0)]);
        assert_eq!(
            named(hit, None, false, 5),
            [("answer", 5.0)],
            "serializable: there was nothing to prove"
        );
        let forwarded = Outcome::Forwarded(Reason::NotFresh);
        assert_eq!(named(forwarded, None, true, 6), [("etcd", 5.0), ("sending", 1.0)]);
        assert_eq!(
            named(forwarded, Some(1), false, 5),
            [("proof", 1.0), ("etcd", 4.0)]
        );
        assert_eq!(
            named(Outcome::Cancelled(Reason::Deadline), Some(1), false, 5),
            [("nobody", 5.0)]
        );
    }
}
