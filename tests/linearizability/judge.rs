//! Judges the streams of the watch clients by the events of the histories.

use std::fmt::Write as _;
use std::path::Path;

use testkit::watch_rules::{Rules, Truth, violations};

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
    let (memory, all) = world.calm_watches;
    println!(
        "{} watch streams with {events} events; between faults memory served {memory} of {all} watches",
        transcripts.len()
    );
    let printed = found[..found.len().min(PRINTED)].join("\n");
    assert!(found.is_empty(), "{} defects of watches:\n{printed}", found.len());
    assert!(memory * 2 > all, "memory served only {memory} of {all} watches");
}

fn text(transcript: &Transcript) -> String {
    let mut text = format!("{}, histories {:?}\n", transcript.name, transcript.segments);
    for (number, step) in transcript.steps.iter().enumerate() {
        let shown: String = format!("{step:?}").chars().take(SHOWN).collect();
        let _ = writeln!(text, "{number:5} {shown}");
    }
    text
}
