//! Judges the streams of the watch clients by the events of the histories, and the calls that failed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use testkit::grpc::{DEADLINE_EXCEEDED, Status, UNAVAILABLE, UNIMPLEMENTED, UNKNOWN};
use testkit::kv::RANGE_STREAM;
use testkit::metrics::Outcomes;
use testkit::watch_rules::{Rules, Truth, violations};

use crate::client::Failure;
use crate::watcher::Transcript;
use crate::world::World;

/// Defects that are printed.
const PRINTED: usize = 20;
/// Characters of a step in a printed transcript.
const SHOWN: usize = 600;

/// Judges each stream by one history, and prints what all of them did. Transcripts of defects are written to `folder`.
pub fn judge_watches(world: &World, folder: &Path) {
    let truths: Vec<_> = world.events.iter().cloned().map(Truth::replayed).collect();
    let rules = Rules {
        history_is_one: truths.len() == 1,
        ..Rules::ETCD
    };
    let transcripts = world.watched.transcripts.lock();
    let mut found = world.watched.silent.lock().clone();
    for (number, transcript) in transcripts.iter().enumerate() {
        // Near its start and end a stream may belong to the history before or after.
        let (first, last) = transcript.segments;
        let possible = &truths[first.saturating_sub(1)..truths.len().min(last + 2)];
        let judged = possible
            .iter()
            .map(|truth| violations(&transcript.steps, truth, rules));
        let found_here = judged.min_by_key(Vec::len).expect("a history");
        if let Some(what) = found_here.first() {
            let file = folder.join(format!("watch-{number}.txt"));
            std::fs::write(&file, text(transcript)).expect("is written");
            found.push(format!("{}: {what}; see {}", transcript.name, file.display()));
        }
    }
    let events: usize = transcripts.iter().map(Transcript::events).sum();
    println!("{} watch streams with {events} events", transcripts.len());
    let printed = found[..found.len().min(PRINTED)].join("\n");
    assert!(found.is_empty(), "{} defects of watches:\n{printed}", found.len());
    memory_serves_most(&world.calm_watches, truths.len() > 1);
}

/// Prints who served the watches `created` between faults, and checks that memory served more than half of those that it can
/// have. It has no past of a history that replaced another (`is_replaced`): watches that continue there are etcd's.
fn memory_serves_most(created: &Outcomes, is_replaced: bool) {
    let memory = created.of("memory");
    let without_past = ("etcd".to_owned(), "history_gone".to_owned());
    let (past, most) = match created.0.get(&without_past) {
        Some(past) if is_replaced => (*past, created.total() - past),
        _ => (0, created.total()),
    };
    println!(
        "between faults memory served {memory} of {most} watches, and can have none of {past}: {created:?}"
    );
    assert!(
        memory * 2 > most,
        "memory served only {memory} of {most} watches: {created:?}"
    );
}

fn text(transcript: &Transcript) -> String {
    let mut text = format!("{}, histories {:?}\n", transcript.name, transcript.segments);
    for (number, step) in transcript.steps.iter().enumerate() {
        let shown: String = format!("{step:?}").chars().take(SHOWN).collect();
        let _ = writeln!(text, "{number:5} {shown}");
    }
    text
}

/// Prints how often calls failed, by server and method, and checks that calls through rangecache fail only as etcd's own
/// calls do while a member stops. On a busy machine the members may be without a leader for longer than calls wait: then etcd's own
/// clients see that, too.
pub fn judge_failures(failures: &[Failure]) {
    let mut table = BTreeMap::<_, usize>::new();
    for Failure { via, method, status } in failures {
        *table.entry((via, method, format!("{status:?}"))).or_default() += 1;
    }
    for ((via, method, status), count) in table {
        println!("{count:>5} failed calls of {method} through {via}: {status}");
    }
    let (of_etcd, through): (Vec<_>, Vec<_>) = failures.iter().partition(|failure| failure.via == "etcd");
    let is_late = |failure: &Failure| {
        failure
            .status
            .as_ref()
            .is_some_and(|status| status.code == DEADLINE_EXCEEDED)
    };
    let is_etcd_late = of_etcd.iter().any(|failure| is_late(failure));
    let wrong: Vec<_> = through
        .into_iter()
        .filter(|failure| {
            let may_fail =
                is_of_a_stopping_member(failure.status.as_ref()) || is_etcd_late && is_late(failure);
            !may_fail
        })
        .collect();
    assert!(wrong.is_empty(), "no etcd fails a call like this: {wrong:?}");
}

/// Errors of raft for a proposal while its member stops or hands its leadership over. etcd maps them to no code of its own,
/// so that clients see them as `Unknown`.
const OF_RAFT: [&str; 2] = ["raft: stopped", "raft proposal dropped"];

/// Whether etcd ends a call like this when a member stops or the leader changes: `Unavailable`, an error of raft, or a reset
/// with `CANCEL`. rangecache reports a connection that was lost with the call as `Unavailable`, like etcd's own client.
fn is_of_a_stopping_member(status: Option<&Status>) -> bool {
    status.is_some_and(|status| {
        status.code == UNAVAILABLE
            || status.code == UNKNOWN && OF_RAFT.contains(&status.message.as_str())
            || status.message.contains("reset Some(8)")
    })
}

/// Watches that memory served, that began before its past, and that etcd served for another reason.
#[cfg(test)]
fn created(memory: u64, past: u64, other: u64) -> Outcomes {
    let counts = [
        ("memory", "now", memory),
        ("etcd", "history_gone", past),
        ("etcd", "loading", other),
    ];
    let counts = counts.map(|(outcome, reason, n)| ((outcome.to_owned(), reason.to_owned()), n));
    Outcomes(counts.into())
}

#[test]
fn watches_before_a_replaced_history_are_not_memorys_to_serve() {
    memory_serves_most(&created(14, 15, 0), true);
}

#[test]
#[should_panic(expected = "memory served only 14 of 29 watches")]
fn watches_before_the_past_of_one_history_are_memorys_to_serve() {
    memory_serves_most(&created(14, 15, 0), false);
}

#[test]
#[should_panic(expected = "memory served only 14 of 29 watches")]
fn watches_at_etcd_for_another_reason_are_memorys_to_serve() {
    memory_serves_most(&created(14, 0, 15), true);
}

/// A failed call through a rangecache.
#[cfg(test)]
fn failure(method: &str, code: i32, message: &str) -> Failure {
    Failure {
        via: "a".to_owned(),
        method: method.to_owned(),
        status: Some(Status {
            code,
            message: message.to_owned(),
        }),
    }
}

#[test]
fn error_of_raft_in_a_stopping_member_is_etcds_own() {
    judge_failures(&OF_RAFT.map(|message| failure("/etcdserverpb.KV/Put", UNKNOWN, message)));
}

#[test]
#[should_panic(expected = "no etcd fails a call like this")]
fn unimplemented_method_through_rangecache_is_wrong() {
    let message = "unknown method RangeStream for service etcdserverpb.KV";
    judge_failures(&[failure(RANGE_STREAM, UNIMPLEMENTED, message)]);
}
