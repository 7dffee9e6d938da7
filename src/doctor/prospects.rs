//! What comes of it: what would be cached, in how much memory, and whether clients would gain.

use super::keyspace::{Group, Keyspace};
use super::members::Quorum;
use super::report::{Area, Level, Report};
use super::text::{bytes, counted};
use crate::config::Config;
use crate::keyspace::scope::scopes;

/// What a change leaves behind in the history beside the entry that it replaced.
const CHANGE_BYTES: u64 = 150;
/// Below this, lists are cheap for etcd too.
const SMALL_KEYS: u64 = 2_000;
/// See [`SMALL_KEYS`].
const SMALL_BYTES: u64 = 1 << 20;
/// Kubernetes' events are written often, and nobody lists them often.
const EVENTS: &str = "/events/";
/// How many prefixes are named.
const NAMED: usize = 4;

/// What a mirror would need.
#[derive(Debug)]
pub(super) struct Need {
    pub(super) name: String,
    pub(super) keys: u64,
    pub(super) encoded_bytes: u64,
    /// Keys, values and nodes.
    pub(super) memory_bytes: u64,
    /// Past revisions, at the rate at which etcd changes now.
    pub(super) history_bytes: u64,
}

/// Judges memory, and says what comes of everything.
pub(super) fn judge(config: &Config, quorum: &Quorum, keyspace: Option<&Keyspace>, report: &mut Report) {
    if let Some(keyspace) = keyspace {
        summary(keyspace, report);
        report.needs = needs(config, keyspace);
        memory(config, keyspace, report);
    }
    let Some(keyspace) = keyspace else {
        report.bad(
            Area::Verdict,
            "nothing would be answered from memory",
            "mend what is bad above",
        );
        return;
    };
    coverage(keyspace, report);
    gain(quorum, keyspace, report);
    if report.level() == Level::Bad {
        report.bad(
            Area::Verdict,
            "not as it is: some or all reads that should come from memory would be forwarded (correct, but no faster than etcd)",
            "mend what is bad above",
        );
    } else {
        report.good(Area::Verdict, "rangecache would serve this etcd with these flags");
    }
}

fn summary(keyspace: &Keyspace, report: &mut Report) {
    let encoded: u64 = keyspace.groups.iter().map(Group::encoded_bytes).sum();
    let (about, how) = if keyspace.exact {
        ("", "every key weighed")
    } else {
        ("about ", "by samples; --deep weighs every key")
    };
    report.good(
        Area::Keyspace,
        format!(
            "{} in {about}{} ({how}), {:.1} revisions/s",
            counted(keyspace.keys, "key"),
            bytes(encoded),
            keyspace.revisions_per_second,
        ),
    );
    let cost = keyspace.cost;
    report.good(
        Area::Keyspace,
        format!(
            "finding this out took {} to one member, {:.1?} in all, {} of values read",
            counted(cost.calls, "call"),
            cost.took,
            bytes(cost.read_bytes)
        ),
    );
}

fn needs(config: &Config, keyspace: &Keyspace) -> Vec<Need> {
    let mirrors = scopes(&config.mirror.cache_prefix, &config.mirror.no_cache_prefix);
    let all: u64 = keyspace.keys.max(1);
    let of = |(index, scope): (usize, &crate::keyspace::scope::Scope)| {
        let mine = || keyspace.groups.iter().filter(|group| group.mirror == Some(index));
        let keys: u64 = mine().map(|group| group.keys).sum();
        let memory_bytes: u64 = mine().map(|group| group.weight.memory_of(group.keys)).sum();
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an estimate"
        )]
        let changes = (keyspace.revisions_per_second.max(0.0)
            * config.mirror.history_max_age.as_secs_f64()
            * keys as f64
            / all as f64) as u64;
        let history = changes.saturating_mul(memory_bytes / keys.max(1) + CHANGE_BYTES);
        Need {
            name: scope.name(),
            keys,
            encoded_bytes: mine().map(Group::encoded_bytes).sum(),
            memory_bytes,
            history_bytes: history.min(config.mirror.history_max_bytes),
        }
    };
    mirrors.iter().enumerate().map(of).collect()
}

fn memory(config: &Config, keyspace: &Keyspace, report: &mut Report) {
    let (keys, history) = report.needs.iter().fold((0, 0), |(keys, history), need| {
        (keys + need.memory_bytes, history + need.history_bytes)
    });
    let max = config.mirror.max_bytes();
    let whose = match config.mirror.cache_max_bytes {
        Some(_) => "--cache-max-bytes",
        None => "three quarters of the memory limit here; --cache-max-bytes sets it",
    };
    let text = format!(
        "keys and values need {}, past revisions {} at this rate (at most {} a mirror), of {} ({whose})",
        bytes(keys),
        bytes(history),
        bytes(config.mirror.history_max_bytes),
        bytes(max),
    );
    if keys > max {
        let mirrors = if report.needs.len() == 1 {
            "the mirror steps aside"
        } else {
            "not all mirrors fit, and what does not steps aside"
        };
        report.bad(
            Area::Memory,
            format!("{text}: too little, {mirrors} and its reads are forwarded"),
            format!(
                "give it {} or more, or {}",
                bytes(keys + keys / 4 + history),
                what_to_leave_out(keyspace, keys, max)
            ),
        );
    } else if keys + history > max / 10 * 9 {
        report.warn(
            Area::Memory,
            format!("{text}: there is little to spare"),
            "raise --cache-max-bytes and the memory limit before it grows, keep less history (--history-max-bytes), or mirror less",
        );
    } else {
        report.good(Area::Memory, text);
    }
}

/// The fewest prefixes without which the rest would fit.
fn what_to_leave_out(keyspace: &Keyspace, needed: u64, max: u64) -> String {
    let mut mirrored: Vec<&Group> = keyspace
        .groups
        .iter()
        .filter(|group| group.mirror.is_some() && !group.prefix.is_empty())
        .collect();
    mirrored.sort_by_key(|group| std::cmp::Reverse(group.memory_bytes()));
    let mut left = needed;
    let mut names = Vec::new();
    for group in mirrored.iter().take(NAMED) {
        names.push(group.name());
        left -= group.memory_bytes().min(left);
        if left <= max / 10 * 9 {
            return format!("leave out what is large: --no-cache-prefix {}", names.join(","));
        }
    }
    "mirror only what is listed and read most (--cache-prefix)".to_owned()
}

fn coverage(keyspace: &Keyspace, report: &mut Report) {
    let mirrored: u64 = keyspace
        .groups
        .iter()
        .filter(|group| group.mirror.is_some())
        .map(|group| group.keys)
        .sum();
    let others: Vec<_> = keyspace
        .groups
        .iter()
        .filter(|group| group.mirror.is_none())
        .collect();
    let left: u64 = others.iter().map(|group| group.keys).sum();
    if left == 0 {
        report.good(
            Area::Verdict,
            format!("to be mirrored: all {}", counted(mirrored, "key")),
        );
        return;
    }
    let names: Vec<_> = others.iter().take(NAMED).map(|group| group.name()).collect();
    let more = if others.len() > NAMED { ", …" } else { "" };
    let text = format!(
        "to be mirrored: {mirrored} of {}; not under --cache-prefix, or left out: {}{more}",
        counted(keyspace.keys, "key"),
        names.join(", "),
    );
    if mirrored == 0 {
        report.warn(Area::Verdict, text, "is --cache-prefix right?");
    } else {
        report.good(Area::Verdict, text);
    }
}

/// Who gains, and who does not.
fn gain(quorum: &Quorum, keyspace: &Keyspace, report: &mut Report) {
    let mirrored = keyspace.groups.iter().filter(|group| group.mirror.is_some());
    let Some(largest) = mirrored.clone().max_by_key(|group| group.encoded_bytes()) else {
        return;
    };
    let check = quorum
        .took
        .map_or_else(String::new, |took| format!(" of {took:.1?}"));
    let keys: u64 = mirrored.clone().map(|group| group.keys).sum();
    let total: u64 = mirrored.clone().map(Group::encoded_bytes).sum();
    if keys < SMALL_KEYS && total < SMALL_BYTES {
        report.warn(
            Area::Verdict,
            format!(
                "so little ({}, {}) costs etcd next to nothing to list: there is little to gain",
                counted(keys, "key"),
                bytes(total)
            ),
            "worth it only if very many clients read at once",
        );
    } else {
        report.good(
            Area::Verdict,
            format!(
                "who lists, pages and counts gains: {} under {} are {} that etcd gathers anew for each list, and for a count or a page of all keys it walks for {:.1?}; \
                 from memory each costs etcd one check{check}",
                counted(largest.keys, "key"),
                largest.name(),
                bytes(largest.encoded_bytes()),
                keyspace.count_took,
            ),
        );
    }
    report.good(
        Area::Verdict,
        format!("who reads many single keys at once gains, for reads share their check; one read at a time does not: it waits for a check{check} and one more hop"),
    );
    if let Some(events) = mirrored
        .clone()
        .find(|group| group.name().ends_with(EVENTS) && group.memory_bytes() * 10 > total)
    {
        report.good(
            Area::Memory,
            format!(
                "{0} takes {1} of it: events are written often and listed seldom, so that --no-cache-prefix {0} may be worth it",
                events.name(),
                bytes(events.memory_bytes())
            ),
        );
    }
}

impl Group {
    /// What all of it weighs, encoded.
    pub(super) fn encoded_bytes(&self) -> u64 {
        self.weight.encoded_of(self.keys)
    }

    /// What all of it takes in the cache.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.weight.memory_of(self.keys)
    }
}
