//! Verdict: what would be mirrored, in how much memory, and whether clients would benefit.

use super::model::{Keyspace, MirrorEstimate, PrefixFacts, QuorumFacts, Report, SizeSample};
use etcd_store::keyspace::scope::{Scope, scopes};
use rangecache_base::memory;
use rangecache_config::Config;
use rangecache_mirror::CachePack;
use rangecache_report::format::{bytes, counted, duration};
use rangecache_report::{Finding, FindingId, Severity};

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
    let Some(keyspace) = keyspace else {
        let text = "nothing would be answered from memory";
        return report.find(FindingId::NothingFromMemory, text);
    };
    summary(keyspace, report);
    report.mirrors = estimates(config, keyspace);
    if let Some(finding) =
        rangecache_report::budget_above_memory(config.mirror.max_bytes(), memory::limit_bytes())
    {
        report.add(finding);
    }
    report.add(memory_finding(config, keyspace, &report.mirrors));
    coverage(keyspace, report);
    benefit(quorum, keyspace, report);
    let (id, text) = if report.result == Severity::Bad {
        let text = "not ready: some or all reads that should be answered from memory would be forwarded (correct, but no faster \
                    than etcd)";
        (FindingId::NotReady, text)
    } else {
        (
            FindingId::Ready,
            "rangecache would serve this etcd with these flags",
        )
    };
    report.find(id, text);
}

fn summary(keyspace: &Keyspace, report: &mut Report) {
    let (about, how) = if keyspace.is_exact {
        ("", "every key read")
    } else {
        ("about ", "estimated from samples; --deep reads every key")
    };
    let (keys, size) = (counted(keyspace.keys, "key"), bytes(keyspace.bytes));
    let rate = keyspace.revisions_per_second;
    let text = format!("{keys} in {about}{size} ({how}), {rate:.1} revisions/s");
    report.find(FindingId::KeyspaceMeasured, text);
    let cost = keyspace.cost;
    let text = format!(
        "this examination made {} to one member, {} in all, and read {} of values",
        counted(cost.calls, "call"),
        duration(cost.took),
        bytes(cost.read_bytes)
    );
    report.find(FindingId::ExaminationCost, text);
}

fn estimates(config: &Config, keyspace: &Keyspace) -> Vec<MirrorEstimate> {
    let mirrors = scopes(&config.mirror.cache_prefix, &config.mirror.no_cache_prefix);
    let all: u64 = keyspace.keys.max(1);
    let estimate = |(index, scope): (usize, &Scope)| {
        let prefixes = keyspace.prefixes.iter().filter(|of| of.mirror == Some(index));
        let sizes = sum(prefixes);
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
            sizes,
            history_bytes: history.min(config.mirror.history_max_bytes),
        }
    };
    mirrors.iter().enumerate().map(estimate).collect()
}

fn sum<'a>(of: impl Iterator<Item = &'a PrefixFacts>) -> SizeSample {
    of.map(|of| of.sizes)
        .fold(SizeSample::default(), SizeSample::join)
}

fn memory_finding(config: &Config, keyspace: &Keyspace, mirrors: &[MirrorEstimate]) -> Finding {
    let sizes = mirrors.iter().map(|mirror| mirror.sizes);
    let sizes = sizes.fold(SizeSample::default(), SizeSample::join);
    let history: u64 = mirrors.iter().map(|mirror| mirror.history_bytes).sum();
    let (plain, packed) = (sizes.memory_bytes, sizes.packed_bytes.min(sizes.memory_bytes));
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
    let (id, consequence) = if least > max {
        if sizes.keys.saturating_mul(KEY_BYTES) < max && config.mirror.cache_pack != CachePack::Never {
            let values = ": too little for all; values of the prefixes that cost most would only be in etcd, and reads of them forwarded";
            (FindingId::MemoryForKeysOnly, values)
        } else if mirrors.len() == 1 {
            let mirror = ": too little; the mirror is disabled (over budget), and their reads are forwarded";
            (FindingId::MemoryTooSmall, mirror)
        } else {
            let mirrors = ": too little; mirrors that do not fit are disabled (over budget), and their reads are forwarded";
            (FindingId::MemoryTooSmall, mirrors)
        }
    } else if least + history > max / 10 * 9 {
        (FindingId::MemoryTight, ": little to spare")
    } else {
        (FindingId::MemorySuffices, "")
    };
    let finding = Finding::new(id, text + consequence);
    if least > max {
        let enough = bytes(least + least / 4 + history);
        let others = what_to_leave_out(keyspace, least, max);
        return finding.with_remedy(format!(
            "raise --cache-max-bytes to {enough} or more, or {others}"
        ));
    }
    finding
}

/// Suggests the fewest prefixes without which the rest would fit, of the bytes that are `needed` by all.
fn what_to_leave_out(keyspace: &Keyspace, needed: u64, max: u64) -> String {
    let resources = keyspace.resources.iter();
    let mut mirrored: Vec<_> = resources
        .filter(|of| of.mirror.is_some() && !of.resource.is_empty())
        .collect();
    mirrored.sort_by_key(|of| std::cmp::Reverse(of.sizes.memory_bytes));
    let all = sum(mirrored.iter().copied()).memory_bytes;
    let mut left = needed;
    let mut names = Vec::new();
    for of in mirrored.iter().take(NAMED) {
        names.push(of.prefix.as_str());
        // What is packed has about the same shares.
        let share = u128::from(of.sizes.memory_bytes) * u128::from(needed) / u128::from(all.max(1));
        left = left.saturating_sub(u64::try_from(share).unwrap_or(u64::MAX));
        if left <= max / 10 * 9 {
            return format!("leave out large prefixes: --no-cache-prefix {}", names.join(","));
        }
    }
    "mirror only the prefixes that are listed and read most (--cache-prefix)".to_owned()
}

fn coverage(keyspace: &Keyspace, report: &mut Report) {
    for out in &keyspace.useless_exclusions {
        let text = format!("--no-cache-prefix {out} leaves nothing out: there is no key under it");
        report.add(Finding::new(FindingId::ExclusionUseless, text).about(out));
    }
    let (mirrored, others): (Vec<_>, Vec<_>) = keyspace.resources.iter().partition(|of| of.mirror.is_some());
    let mirrored = sum(mirrored.into_iter()).keys;
    if sum(others.iter().copied()).keys == 0 {
        let text = format!("to be mirrored: all {}", counted(mirrored, "key"));
        return report.find(FindingId::KeysMirrored, text);
    }
    let names: Vec<_> = others.iter().take(NAMED).map(|of| of.prefix.as_str()).collect();
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
    let mirrored = keyspace.resources.iter().filter(|of| of.mirror.is_some());
    let Some(largest) = mirrored.clone().max_by_key(|of| of.sizes.encoded_bytes) else {
        return;
    };
    let check = quorum
        .round_trip
        .map_or_else(String::new, |took| format!(" of {}", duration(took)));
    let all = sum(mirrored.clone());
    if all.keys < SMALL_KEYS && all.encoded_bytes < SMALL_BYTES {
        let (keys, size) = (counted(all.keys, "key"), bytes(all.encoded_bytes));
        let text =
            format!("listing so little ({keys}, {size}) costs etcd next to nothing: there is little to gain");
        report.find(FindingId::LittleToGain, text);
    } else {
        let text = format!(
            "LIST, paged and count requests benefit: for each list etcd collects {} under {} ({}), and a count or a page of all \
             keys takes it {}; from memory each costs etcd one check{check}",
            counted(largest.sizes.keys, "key"),
            largest.prefix,
            bytes(largest.sizes.encoded_bytes),
            duration(keyspace.count_took),
        );
        report.find(FindingId::ListsBenefit, text);
    }
    let text = format!(
        "many concurrent reads of single keys benefit, because reads share a check; one read at a time does not: it waits for a \
         check{check} and one more hop"
    );
    report.find(FindingId::SingleReadsBenefit, text);
    let is_large =
        |of: &&PrefixFacts| of.prefix.ends_with(EVENTS) && of.sizes.memory_bytes * 10 > all.encoded_bytes;
    if let Some(events) = mirrored.clone().find(is_large) {
        let (prefix, size) = (&events.prefix, bytes(events.sizes.memory_bytes));
        let text = format!(
            "{prefix} needs {size} of it: events are written often and listed seldom, so consider --no-cache-prefix {prefix}"
        );
        report.find(FindingId::EventsAreLarge, text);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::super::model::{Cost, resource_of};
    use super::*;
    use rangecache_report::Area;

    /// Group of `keys` keys of 1 KiB each, mirrored or not.
    fn group(prefix: &'static str, keys: u64, mirror: Option<usize>) -> PrefixFacts {
        let sample = SizeSample {
            keys: 1,
            encoded_bytes: 1024,
            memory_bytes: 1100,
            packed_bytes: 500,
            largest_bytes: 1024,
        };
        PrefixFacts {
            prefix: prefix.to_owned(),
            sizes: sample.scaled(keys),
            mirror,
            resource: resource_of(prefix.as_bytes()).to_vec().into(),
        }
    }

    fn concluded(flags: &[&str], prefixes: Vec<PrefixFacts>) -> Report {
        let config = Config::try_parse_from(std::iter::once(&"rangecache").chain(flags)).unwrap();
        let all = sum(prefixes.iter());
        let keyspace = Keyspace {
            revision: 100,
            keys: all.keys,
            bytes: all.encoded_bytes,
            is_exact: false,
            revisions_per_second: 0.0,
            count_took: Duration::from_millis(1),
            useless_exclusions: Vec::new(),
            resources: PrefixFacts::totals(&prefixes),
            prefixes,
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
        assert_eq!((report.result, report.exit_code()), (Severity::Good, 0));
        assert_eq!(report.mirrors[0].sizes.memory_bytes, 5_000 * 1100);
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
