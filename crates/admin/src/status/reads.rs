//! Reads and other counters over the samples, and the slowest reads.

use std::{sync::Arc, time::Duration};

use rangecache_base::telemetry::calls::Call;
use rangecache_base::telemetry::metrics::{CodeCounts, Source};
use rangecache_base::telemetry::outcome::{Kind, Outcome};
use rangecache_mirror::Mirrors;

use super::model::{CodeStatus, Latency, OutcomeCount, Phase, Reads, SlowCall, Stretch};
use super::samples::{ReadCounts, ReadSample};
use rangecache_report::reasons::OutcomeClass;

/// Time over which rates are computed.
const RATE_WINDOW: Duration = Duration::from_secs(60);

/// Time over which the waits for proofs are judged, as by their alert.
const PROOF_WINDOW: Duration = Duration::from_secs(300);

/// Totals and rates; `counts` are those since the start of the process.
#[allow(clippy::cast_precision_loss, reason = "ratios and rates show magnitudes")]
pub(super) fn summarize(counts: &ReadCounts, samples: &[Arc<ReadSample>]) -> Reads {
    let outcomes = outcomes(samples);
    let latest = latest(samples, RATE_WINDOW);
    let seconds: f64 = latest.iter().map(|sample| sample.seconds).sum();
    let sum = |counter: fn(&ReadCounts) -> u64| {
        latest.iter().map(|sample| counter(&sample.added)).sum::<u64>() as f64
    };
    let rate = |counter| sum(counter) / seconds.max(1.0);
    let checks = sum(|added| added.checks.proven);
    Reads {
        since_start: counts.total(),
        per_second: rate(ReadCounts::total),
        failed_per_second: rate(|added| added.by_source(OutcomeClass::Failed)),
        memory_ratio_last_minute: memory_ratio(latest.iter().copied()),
        other_calls_per_second: rate(|added| added.forwarded),
        events_per_second: rate(|added| added.events),
        quorum_checks_per_second: rate(|added| added.checks.proven + added.checks.failed),
        per_quorum_check: (checks > 0.0).then(|| sum(|added| added.checks.reads) / checks),
        latency_from_memory: Latency::of(&latest, |added| &added.latency.memory),
        latency_by_etcd: Latency::of(&latest, |added| &added.latency.etcd),
        window_seconds: samples.iter().map(|sample| sample.seconds).sum(),
        memory_ratio: memory_ratio(samples),
        outcomes,
    }
}

/// Part of the answered and failed reads that memory answered; `None` without such reads.
#[allow(clippy::cast_precision_loss, reason = "a ratio shows a magnitude")]
fn memory_ratio<'a>(samples: impl IntoIterator<Item = &'a Arc<ReadSample>>) -> Option<f64> {
    let (mut memory, mut all) = (0, 0);
    for sample in samples {
        let by = |source| sample.added.by_source(source);
        let from_memory = by(OutcomeClass::Memory) + by(OutcomeClass::Waited);
        memory += from_memory;
        all += from_memory + by(OutcomeClass::Etcd) + by(OutcomeClass::Failed);
    }
    (all > 0).then(|| memory as f64 / all as f64)
}

/// Reads by outcome, the most frequent first; outcomes without reads are left out.
fn outcomes(samples: &[Arc<ReadSample>]) -> Vec<OutcomeCount> {
    let mut outcomes: Vec<_> = Outcome::all()
        .map(|outcome| OutcomeCount {
            outcome,
            count: samples
                .iter()
                .map(|sample| sample.added.by_outcome(outcome))
                .sum(),
        })
        .filter(|read| read.count > 0)
        .collect();
    outcomes.sort_by_key(|read| std::cmp::Reverse(read.count));
    outcomes
}

/// Seconds that 99 of 100 reads from memory waited at most for their proof; `None` without such reads.
pub(super) fn proof_p99(samples: &[Arc<ReadSample>]) -> Option<f64> {
    let waits = Latency::of(&latest(samples, PROOF_WINDOW), |added| &added.latency.proof);
    waits.map(|waits| waits.p99_seconds)
}

/// gRPC calls by code, the most frequent first.
pub(super) fn codes(samples: &[Arc<ReadSample>]) -> Vec<CodeStatus> {
    let mut sums: Vec<CodeCounts> = Vec::new();
    for added in samples.iter().flat_map(|sample| &sample.added.codes) {
        match sums.iter_mut().find(|sum| sum.code == added.code) {
            Some(sum) => sum.add(added),
            None => sums.push(*added),
        }
    }
    sums.sort_by_key(|sum| std::cmp::Reverse(sum.total()));
    let status = |sum: CodeCounts| CodeStatus {
        grpc_code: sum.code,
        calls: sum.total(),
        memory: sum.of(Source::Memory),
        etcd: sum.of(Source::Etcd),
        failed: sum.of(Source::Failed),
        refused: sum.of(Source::Refused),
        none: sum.of(Source::Nothing),
    };
    sums.into_iter().map(status).collect()
}

/// The newest samples that span `window`.
fn latest(samples: &[Arc<ReadSample>], window: Duration) -> Vec<&Arc<ReadSample>> {
    let mut seconds = 0.0;
    let newest = samples.iter().rev();
    newest
        .take_while(|sample| {
            let is_wanted = seconds < window.as_secs_f64();
            seconds += sample.seconds;
            is_wanted
        })
        .collect()
}

/// States of the mirror at `index` over the samples.
pub(super) fn timeline(samples: &[Arc<ReadSample>], index: usize) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    let reasons = samples
        .iter()
        .filter_map(|sample| sample.added.mirrors.get(index));
    for reason in reasons {
        match stretches.last_mut() {
            Some(last) if last.reason == *reason => last.samples += 1,
            _ => stretches.push(Stretch {
                reason: *reason,
                samples: 1,
            }),
        }
    }
    stretches
}

/// Slowest calls for the status, in the given order, with the phases of their time.
pub(super) fn slowest(calls: &[Arc<Call>], mirrors: &Mirrors) -> Vec<SlowCall> {
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

    use rangecache_base::telemetry::outcome::{Failure, Read};
    use rangecache_base::telemetry::{Reason, calls::Revisions};

    use super::*;

    fn sample(seconds: f64, hits: u64, forwarded: u64, mirror: Option<Reason>) -> Arc<ReadSample> {
        Arc::new(ReadSample {
            seconds,
            added: ReadCounts {
                reads: vec![
                    (Outcome::Hit(Read::Linearizable), hits),
                    (Outcome::Forwarded(Reason::Loading), forwarded),
                ],
                mirrors: vec![mirror],
                ..ReadCounts::default()
            },
        })
    }

    #[test]
    fn rates_are_those_of_the_last_minute_and_ratios_those_of_all_samples() {
        let samples = [sample(60.0, 0, 60, None), sample(60.0, 120, 60, None)];
        let reads = summarize(&samples[1].added, &samples);
        assert!((reads.per_second - 3.0).abs() < 1e-9, "{reads:?}");
        assert_eq!(reads.memory_ratio, Some(0.5));
        assert!((reads.memory_ratio_last_minute.unwrap() - 2.0 / 3.0).abs() < 1e-9);
        assert_eq!(reads.outcomes.len(), 2);
        assert_eq!(reads.per_quorum_check, None);
    }

    #[test]
    fn reads_that_fail_during_an_outage_are_not_among_those_from_memory() {
        let failed = Outcome::Failed(Failure::NoEndpoint);
        let mut outage = ReadSample::clone(&sample(60.0, 0, 0, None));
        outage.added.reads = vec![(failed, 120)];
        let samples = [sample(60.0, 120, 0, None), Arc::new(outage)];
        let reads = summarize(&samples[1].added, &samples);
        assert_eq!(reads.memory_ratio_last_minute, Some(0.0));
        assert_eq!(reads.memory_ratio, Some(0.5));
        assert!((reads.failed_per_second - 2.0).abs() < 1e-9, "{reads:?}");
    }

    #[test]
    fn equal_neighbours_are_one_stretch() {
        let loading = Some(Reason::Loading);
        let samples = [loading, loading, None, loading].map(|mirror| sample(5.0, 0, 0, mirror));
        let stretches: Vec<_> = timeline(&samples, 0)
            .iter()
            .map(|stretch| (stretch.reason, stretch.samples))
            .collect();
        assert_eq!(stretches, [(loading, 2), (None, 1), (loading, 1)]);
        assert!(timeline(&samples, 1).is_empty());
    }

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
