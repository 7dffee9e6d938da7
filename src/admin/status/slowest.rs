//! The slowest calls of the last minutes, with the phases of their time.

use std::sync::Arc;
use std::time::Duration;

use super::model::{Phase, SlowCall};
use crate::diagnosis::reasons::OutcomeClass;
use rangecache_base::telemetry::calls::Call;
use rangecache_base::telemetry::outcome::Kind;
use rangecache_mirror::Mirrors;

/// Calls for the status, in the given order: the slowest first.
pub(super) fn list(calls: &[Arc<Call>], mirrors: &Mirrors) -> Vec<SlowCall> {
    calls.iter().map(|call| slow_call(call, mirrors)).collect()
}

fn slow_call(call: &Call, mirrors: &Mirrors) -> SlowCall {
    let mirror = call.mirror.and_then(|position| mirrors.at(position));
    SlowCall {
        method: match call.kind {
            Kind::Unary => "Range",
            Kind::Stream => "RangeStream",
        },
        mirror: mirror.map(|mirror| mirror.name.clone()),
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

fn phases(call: &Call) -> Vec<Phase> {
    let source = OutcomeClass::from_outcome(call.outcome);
    // A proof does not mean that memory answered: the revision may be older than its history.
    let has_response = !matches!(source, OutcomeClass::Failed | OutcomeClass::Unanswered);
    let proven = call.proven.filter(|_| has_response);
    let until_proven = proven.map(|proven| (if call.waited { "wait" } else { "proof" }, proven));
    let until_head = match source {
        OutcomeClass::Memory | OutcomeClass::Waited => "answer",
        OutcomeClass::Etcd => "etcd",
        OutcomeClass::Failed => "failed",
        OutcomeClass::Unanswered => "unanswered",
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
    use rangecache_base::telemetry::calls::Revisions;
    use rangecache_base::telemetry::outcome::Read;
    use rangecache_base::telemetry::{Outcome, Reason};

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
    fn time_of_a_call_is_divided_into_phases() {
        let hit = Outcome::Hit(Read::Linearizable);
        assert_eq!(
            named(hit, Some(3), false, 9),
            [("proof", 3.0), ("answer", 2.0), ("sending", 4.0)]
        );
        assert_eq!(named(hit, Some(5), true, 5), [("wait", 5.0)]);
        assert_eq!(
            named(hit, None, false, 5),
            [("answer", 5.0)],
            "serializable: no proof is needed"
        );
        let forwarded = Outcome::Forwarded(Reason::NotFresh);
        assert_eq!(named(forwarded, None, true, 6), [("etcd", 5.0), ("sending", 1.0)]);
        assert_eq!(
            named(forwarded, Some(1), false, 5),
            [("proof", 1.0), ("etcd", 4.0)]
        );
        assert_eq!(
            named(Outcome::Cancelled(Reason::NotFresh), Some(1), false, 5),
            [("unanswered", 5.0)]
        );
    }
}
