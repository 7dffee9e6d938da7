//! Verdict: what would be mirrored, in how much memory, and whether clients would benefit.

use super::model::{KeyGroup, Keyspace, MirrorEstimate, QuorumFacts, Report, SizeSample};
use crate::diagnosis::format::{bytes, counted, duration};
use crate::diagnosis::{self, Finding, FindingId, Severity};
use etcd_store::keyspace::scope::{Scope, scopes};
use rangecache_base::memory;
use rangecache_config::Config;
use rangecache_mirror::CachePack;

/// Bytes that a modification keeps in the history in addition to the entry that it replaced.
const CHANGE_BYTES: u64 = 150;
/// Number of keys below which a list costs etcd little.
const SMALL_KEYS: u64 = 2_000;
/// Bytes below which a list costs etcd little.
const SMALL_BYTES: u64 = 1 << 20;
/// End of the prefix of Kubernetes' events, which are written often and listed seldom.
const EVENTS: &str = "/events/";
/// Memory of a key whose value is left to etcd, with a key of 60 bytes.
const KEY_BYTES: u64 = 130;
/// Number of prefixes that a finding names.
const NAMED: usize = 4;

/// Adds the findings on memory and the verdict.
pub(super) fn conclude(
    config: &Config,
    quorum: &QuorumFacts,
    keyspace: Option<&Keyspace>,
    report: &mut Report,
) {
    if let Some(keyspace) = keyspace {
        summary(keyspace, report);
        report.mirrors = estimates(config, keyspace);
        conclude_memory(config, keyspace, report);
    }
    let Some(keyspace) = keyspace else {
        report.find(
            FindingId::NothingFromMemory,
            "nothing would be answered from memory",
        );
        return;
    };
    coverage(keyspace, report);
    benefit(quorum, keyspace, report);
    if report.severity() == Severity::Bad {
        report.find(
            FindingId::NotReady,
            "not ready: some or all reads that should be answered from memory would be forwarded (correct, but no \
             faster than etcd)",
        );
    } else {
        report.find(
            FindingId::Ready,
            "rangecache would serve this etcd with these flags",
        );
    }
}

fn summary(keyspace: &Keyspace, report: &mut Report) {
    let (about, how) = if keyspace.is_exact {
        ("", "every key read")
    } else {
        ("about ", "estimated from samples; --deep reads every key")
    };
    report.find(
        FindingId::KeyspaceMeasured,
        format!(
            "{} in {about}{} ({how}), {:.1} revisions/s",
            counted(keyspace.keys, "key"),
            bytes(keyspace.encoded_bytes()),
            keyspace.revisions_per_second,
        ),
    );
    let cost = keyspace.cost;
    report.find(
        FindingId::ExaminationCost,
        format!(
            "this examination made {} to one member, {} in all, and read {} of values",
            counted(cost.calls, "call"),
            duration(cost.took),
            bytes(cost.read_bytes)
        ),
    );
}

fn estimates(config: &Config, keyspace: &Keyspace) -> Vec<MirrorEstimate> {
    let mirrors = scopes(&config.mirror.cache_prefix, &config.mirror.no_cache_prefix);
    let all: u64 = keyspace.keys.max(1);
    let estimate = |(index, scope): (usize, &Scope)| {
        let groups = keyspace.groups.iter().filter(|group| group.mirror == Some(index));
        let sizes = groups.map(KeyGroup::estimate);
        let sizes = sizes.fold(SizeSample::default(), SizeSample::join);
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an estimate"
        )]
        let changes = (keyspace.revisions_per_second.max(0.0)
            * config.mirror.history_max_age.as_secs_f64()
            * sizes.keys as f64
            / all as f64) as u64;
        let history = changes.saturating_mul(sizes.memory_bytes / sizes.keys.max(1) + CHANGE_BYTES);
        MirrorEstimate {
            name: scope.name(),
            keys: sizes.keys,
            encoded_bytes: sizes.encoded_bytes,
            memory_bytes: sizes.memory_bytes,
            packed_bytes: sizes.packed_bytes,
            history_bytes: history.min(config.mirror.history_max_bytes),
        }
    };
    mirrors.iter().enumerate().map(estimate).collect()
}

fn conclude_memory(config: &Config, keyspace: &Keyspace, report: &mut Report) {
    if let Some(finding) = diagnosis::budget_above_memory(config.mirror.max_bytes(), memory::limit_bytes()) {
        report.add(finding);
    }
    let sum = |of: &dyn Fn(&MirrorEstimate) -> u64| report.mirrors.iter().map(of).sum::<u64>();
    let (plain, packed) = (
        sum(&|mirror| mirror.memory_bytes),
        sum(&|mirror| mirror.packed_bytes).min(sum(&|mirror| mirror.memory_bytes)),
    );
    let history = sum(&|mirror| mirror.history_bytes);
    let max = config.mirror.max_bytes();
    let source = match config.mirror.cache_max_bytes {
        Some(_) => "--cache-max-bytes",
        None => {
            "three quarters of the memory limit beyond 128 MiB, without a limit a quarter of the machine; --cache-max-bytes sets it"
        }
    };
    // The least that it can be.
    let (least, packing) = match config.mirror.cache_pack {
        CachePack::Never => (plain, "with --cache-pack=auto"),
        CachePack::Always => (packed, "as --cache-pack=always has them"),
        CachePack::Auto if plain + history > max / 4 * 3 => (
            packed,
            "as --cache-pack=auto has those that are not read, or all if it must",
        ),
        CachePack::Auto => (packed, "if memory were scarce"),
    };
    let text = format!(
        "keys and values need {} ({} packed, {packing}), past revisions {} at this rate (at most {} a mirror), of {} ({source})",
        bytes(plain),
        bytes(packed),
        bytes(history),
        bytes(config.mirror.history_max_bytes),
        bytes(max),
    );
    let raise = || {
        format!(
            "raise --cache-max-bytes to {} or more, or {}",
            bytes(least + least / 4 + history),
            what_to_leave_out(keyspace, least, max)
        )
    };
    let keys: u64 = report.mirrors.iter().map(|mirror| mirror.keys).sum();
    let keys_fit = keys.saturating_mul(KEY_BYTES) < max;
    let finding = if least > max && keys_fit && config.mirror.cache_pack != CachePack::Never {
        let text = format!(
            "{text}: too little for all; values of the prefixes that cost most would only be in etcd, and reads of them \
             forwarded"
        );
        Finding::new(FindingId::MemoryForKeysOnly, text).with_remedy(raise())
    } else if least > max {
        let mirrors = if report.mirrors.len() == 1 {
            "the mirror is disabled (over budget)"
        } else {
            "mirrors that do not fit are disabled (over budget)"
        };
        let text = format!("{text}: too little; {mirrors}, and their reads are forwarded");
        Finding::new(FindingId::MemoryTooSmall, text).with_remedy(raise())
    } else if least + history > max / 10 * 9 {
        Finding::new(FindingId::MemoryTight, format!("{text}: little to spare"))
    } else {
        Finding::new(FindingId::MemorySuffices, text)
    };
    report.add(finding);
}

/// Suggests the fewest prefixes without which the rest would fit, of the bytes that are `needed` by all.
fn what_to_leave_out(keyspace: &Keyspace, needed: u64, max: u64) -> String {
    let resources = keyspace.resources();
    let mut mirrored: Vec<&KeyGroup> = resources
        .iter()
        .map(|resource| &resource.total)
        .filter(|group| group.mirror.is_some() && !group.range.prefix.is_empty())
        .collect();
    mirrored.sort_by_key(|group| std::cmp::Reverse(group.estimate().memory_bytes));
    let all: u64 = mirrored.iter().map(|group| group.estimate().memory_bytes).sum();
    let mut left = needed;
    let mut names = Vec::new();
    for group in mirrored.iter().take(NAMED) {
        names.push(group.name());
        // What is packed has about the same shares.
        let share = u128::from(group.estimate().memory_bytes) * u128::from(needed) / u128::from(all.max(1));
        left = left.saturating_sub(u64::try_from(share).unwrap_or(u64::MAX));
        if left <= max / 10 * 9 {
            return format!("leave out large prefixes: --no-cache-prefix {}", names.join(","));
        }
    }
    "mirror only the prefixes that are listed and read most (--cache-prefix)".to_owned()
}

fn coverage(keyspace: &Keyspace, report: &mut Report) {
    let mirrored: u64 = keyspace
        .groups
        .iter()
        .filter(|group| group.mirror.is_some())
        .map(|group| group.range.keys)
        .sum();
    let resources = keyspace.resources();
    let totals = resources.iter().map(|resource| &resource.total);
    let others: Vec<_> = totals.filter(|group| group.mirror.is_none()).collect();
    let left: u64 = others.iter().map(|group| group.range.keys).sum();
    if left == 0 {
        report.find(
            FindingId::KeysMirrored,
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
    let id = if mirrored == 0 {
        FindingId::NothingMirrored
    } else {
        FindingId::KeysMirrored
    };
    report.find(id, text);
}

/// Adds findings on the requests that benefit.
fn benefit(quorum: &QuorumFacts, keyspace: &Keyspace, report: &mut Report) {
    // Clients list resources, in all namespaces: the parts of one are no lists of their own.
    let resources = keyspace.resources();
    let totals = resources.iter().map(|resource| &resource.total);
    let mirrored = totals.filter(|group| group.mirror.is_some());
    let Some(largest) = mirrored
        .clone()
        .max_by_key(|group| group.estimate().encoded_bytes)
    else {
        return;
    };
    let check = quorum
        .round_trip
        .map_or_else(String::new, |took| format!(" of {}", duration(took)));
    let keys: u64 = mirrored.clone().map(|group| group.range.keys).sum();
    let total: u64 = mirrored.clone().map(|group| group.estimate().encoded_bytes).sum();
    if keys < SMALL_KEYS && total < SMALL_BYTES {
        report.find(
            FindingId::LittleToGain,
            format!(
                "listing so little ({}, {}) costs etcd next to nothing: there is little to gain",
                counted(keys, "key"),
                bytes(total)
            ),
        );
    } else {
        report.find(
            FindingId::ListsBenefit,
            format!(
                "LIST, paged and count requests benefit: for each list etcd collects {} under {} ({}), and a count or \
                 a page of all keys takes it {}; \
                 from memory each costs etcd one check{check}",
                counted(largest.range.keys, "key"),
                largest.name(),
                bytes(largest.estimate().encoded_bytes),
                duration(keyspace.count_took),
            ),
        );
    }
    report.find(
        FindingId::SingleReadsBenefit,
        format!(
            "many concurrent reads of single keys benefit, because reads share a check; one read at a time does not: it \
             waits for a check{check} and one more hop"
        ),
    );
    if let Some(events) = mirrored
        .clone()
        .find(|group| group.name().ends_with(EVENTS) && group.estimate().memory_bytes * 10 > total)
    {
        report.find(
            FindingId::EventsAreLarge,
            format!(
                "{0} needs {1} of it: events are written often and listed seldom, so consider --no-cache-prefix {0}",
                events.name(),
                bytes(events.estimate().memory_bytes)
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::super::model::Cost;
    use super::super::resources::resource_of;
    use super::*;
    use crate::diagnosis::Area;
    use etcd_store::keyspace::PrefixGroup;

    /// Group of `keys` keys of 1 KiB each, mirrored or not.
    fn group(prefix: &'static str, keys: u64, mirror: Option<usize>) -> KeyGroup {
        KeyGroup {
            range: PrefixGroup {
                prefix: prefix.into(),
                keys,
                depth: 2,
                ..PrefixGroup::default()
            },
            resource: resource_of(prefix.as_bytes()).to_vec().into(),
            mirror,
            sample: SizeSample {
                keys: 1,
                encoded_bytes: 1024,
                memory_bytes: 1100,
                packed_bytes: 500,
                largest_bytes: 1024,
            },
        }
    }

    fn concluded(flags: &[&str], groups: Vec<KeyGroup>) -> Report {
        let config = Config::try_parse_from(std::iter::once(&"rangecache").chain(flags)).unwrap();
        let keyspace = Keyspace {
            revision: 100,
            keys: groups.iter().map(|group| group.range.keys).sum(),
            groups,
            revisions_per_second: 0.0,
            count_took: Duration::from_millis(1),
            is_exact: false,
            cost: Cost::default(),
        };
        let mut report = Report::default();
        conclude(&config, &QuorumFacts::default(), Some(&keyspace), &mut report);
        report
    }

    fn has(report: &Report, area: Area, severity: Severity, text: &str) -> bool {
        report.findings.iter().any(|finding| {
            finding.id.area() == area
                && finding.severity == severity
                && (finding.text().contains(text) || finding.remedy.contains(text))
        })
    }

    #[test]
    fn budget_beyond_the_memory_is_bad() {
        let groups = || vec![group("/registry/", 10, Some(0))];
        let beyond = "and this machine or container has";
        let report = concluded(&["--cache-max-bytes", "1000TiB"], groups());
        assert!(has(&report, Area::Memory, Severity::Bad, beyond), "{report:?}");
        let report = concluded(&[], groups());
        assert!(!has(&report, Area::Memory, Severity::Bad, beyond), "{report:?}");
    }

    #[test]
    fn mirror_that_does_not_fit_is_bad_and_names_prefixes_to_leave_out() {
        let groups = vec![
            group("/registry/large/", 5_000, Some(0)),
            group("/registry/small/", 100, Some(0)),
        ];
        let leave_out = "--no-cache-prefix /registry/large/";
        for flags in [
            &["--cache-max-bytes", "1MiB", "--cache-pack", "never"][..],
            // Not even the keys fit.
            &["--cache-max-bytes", "500KiB"],
        ] {
            let report = concluded(flags, groups.clone());
            assert!(has(&report, Area::Memory, Severity::Bad, leave_out), "{report:?}");
            assert!(has(&report, Area::Verdict, Severity::Bad, "not ready"));
            assert_eq!(report.exit_code(), 1);
        }
        let report = concluded(&["--cache-max-bytes", "1MiB"], groups);
        assert!(has(&report, Area::Memory, Severity::Warning, leave_out));
        assert!(has(
            &report,
            Area::Memory,
            Severity::Warning,
            "would only be in etcd"
        ));
        assert_eq!(report.exit_code(), 0);
    }

    #[test]
    fn mirror_that_fits_once_it_is_packed_is_not_bad_unless_packing_is_off() {
        let severity = |flags: &[&str]| {
            let report = concluded(flags, vec![group("/registry/pods/", 10_000, Some(0))]);
            let mut found = report.findings.iter();
            let memory = found.find(|finding| finding.id.area() == Area::Memory);
            memory.map(|finding| finding.severity)
        };
        // 11 MB plain, 5 MB packed.
        for (limit, pack, expected) in [
            ("10MB", "auto", Severity::Good),
            ("10MB", "always", Severity::Good),
            ("10MB", "never", Severity::Bad),
            ("20MB", "never", Severity::Good),
            ("5200000", "auto", Severity::Warning),
            ("4MB", "auto", Severity::Warning),
            ("4MB", "always", Severity::Warning),
            ("1MB", "auto", Severity::Bad),
        ] {
            let found = severity(&["--cache-max-bytes", limit, "--cache-pack", pack]);
            assert_eq!(found, Some(expected), "{limit}, {pack}");
        }
    }

    #[test]
    fn large_mirror_that_fits_is_good() {
        let groups = vec![group("/registry/pods/", 5_000, Some(0))];
        let report = concluded(&["--cache-max-bytes", "1GiB"], groups);
        assert!(has(
            &report,
            Area::Verdict,
            Severity::Good,
            "LIST, paged and count requests benefit"
        ));
        assert_eq!((report.severity(), report.exit_code()), (Severity::Good, 0));
        assert_eq!(report.mirrors[0].memory_bytes, 5_000 * 1100);
    }

    /// Namespaces of pods that are smaller than the secrets, but not all together.
    #[test]
    fn list_of_all_namespaces_is_the_largest() {
        let mut groups = vec![group("/registry/secrets/", 3_000, Some(0))];
        for namespace in ["/registry/pods/a/", "/registry/pods/b/", "/registry/events/a/"] {
            groups.push(group(namespace, 2_000, Some(0)));
        }
        let report = concluded(&["--cache-max-bytes", "1GiB"], groups.clone());
        let largest = "4,000 keys under /registry/pods/ ";
        assert!(has(&report, Area::Verdict, Severity::Good, largest), "{report:?}");
        let events = "/registry/events/ needs";
        assert!(has(&report, Area::Memory, Severity::Good, events), "{report:?}");
        let report = concluded(&["--cache-max-bytes", "6MiB", "--cache-pack", "never"], groups);
        let leave_out = "--no-cache-prefix /registry/pods/";
        assert!(has(&report, Area::Memory, Severity::Bad, leave_out), "{report:?}");
    }

    #[test]
    fn small_keyspace_and_keys_outside_of_mirrors_are_warnings() {
        let report = concluded(&[], vec![group("/a/", 10, Some(0))]);
        assert!(has(&report, Area::Verdict, Severity::Warning, "little to gain"));
        let report = concluded(&[], vec![group("/a/", 10, None)]);
        assert!(has(
            &report,
            Area::Verdict,
            Severity::Warning,
            "check --cache-prefix"
        ));
    }

    #[test]
    fn unreadable_keyspace_is_bad() {
        let config = Config::try_parse_from(["rangecache"]).unwrap();
        let mut report = Report::default();
        conclude(&config, &QuorumFacts::default(), None, &mut report);
        assert!(has(
            &report,
            Area::Verdict,
            Severity::Bad,
            "nothing would be answered"
        ));
    }
}
