//! The cases, grouped by their data: each group fills one etcd and drives it.

pub(crate) mod cold_load;
pub(crate) mod freshness;
pub(crate) mod gateway;
pub(crate) mod growth;
pub(crate) mod lists;
pub(crate) mod memory;
pub(crate) mod not_mirrored;
pub(crate) mod pages;
pub(crate) mod past_revisions;
pub(crate) mod points;
pub(crate) mod puts;
pub(crate) mod streams;
pub(crate) mod tls;
pub(crate) mod watches;
pub(crate) mod watches_idle;
pub(crate) mod watches_storm;

use crate::args::Args;
use crate::dataset::Dataset;
use crate::processes::{Binaries, EtcdOptions};
use crate::report::Report;
use crate::targets::Setup;

/// Settings shared by all cases.
pub(crate) struct Suite {
    /// Command-line arguments.
    pub(crate) args: Args,
    /// Paths of the binaries.
    pub(crate) binaries: Binaries,
    /// Options of etcd.
    pub(crate) options: EtcdOptions,
}

/// Reports progress on standard error: the table is printed only at the end.
pub(crate) fn progress(what: &str) {
    use std::io::Write;
    // A closed pipe needs no report.
    let _ = writeln!(std::io::stderr(), "… {what}");
}

/// Runs the chosen cases. A group that fails becomes a note in the report.
pub(crate) async fn run(suite: &Suite) -> Report {
    let mut report = Report::default();
    let groups: [(&str, anyhow::Result<()>); 6] = [
        ("small objects", small_objects(suite, &mut report).await),
        ("middling objects", middling_objects(suite, &mut report).await),
        ("large objects", large_objects(suite, &mut report).await),
        ("a growing store", growing_store(suite, &mut report).await),
        ("TLS", over_tls(suite, &mut report).await),
        ("watches", watching(suite, &mut report).await),
    ];
    for (group, outcome) in groups {
        if let Err(error) = outcome {
            report.note(format!("the cases on {group} failed: {error:#}"));
        }
    }
    report.sort();
    report
}

/// Starts the targets, and notes a missing one.
async fn start_targets(setup: &mut Setup, report: &mut Report) -> anyhow::Result<()> {
    setup.start_targets().await?;
    if let Some(why) = &setup.without_rangecache {
        report.note(format!("rangecache was not measured: {why}"));
    }
    Ok(())
}

/// 100k objects of 100 B: lists, single keys, puts, freshness.
async fn small_objects(suite: &Suite, report: &mut Report) -> anyhow::Result<()> {
    let (args, rounds) = (&suite.args, suite.args.rounds);
    if !args.wants(&["P1", "P4", "P5", "P6", "P7", "P13", "P14", "PAST", "JSON"]) {
        return Ok(());
    }
    let data = Dataset {
        prefix: "/registry/pods/",
        keys: 100_000,
        value_bytes: 100,
    };
    progress("filling 100k × 100 B");
    let mut setup = Setup::start(&suite.binaries, suite.options).await?;
    setup.watchers_beside = args.watchers_beside;
    data.fill(&setup.connect().await?, 0).await?;
    start_targets(&mut setup, report).await?;
    if args.wants(&["P1", "P7"]) {
        progress("P1 LIST");
        report.add("P1", lists::p1(&setup, &data, rounds).await);
    }
    if args.wants(&["P4"]) {
        progress("P4 four clients, small objects");
        report.add("P4", lists::p4(&setup, &data, rounds, "100k × 100 B", 9.0).await);
    }
    if args.wants(&["P5", "P7"]) {
        progress("P5 GET, 64 in flight");
        report.add("P5", points::p5(&setup, &data, rounds).await);
    }
    if args.wants(&["P6"]) {
        progress("P6 sequential GETs");
        report.add("P6", points::p6(&setup, &data, rounds).await);
    }
    if args.wants(&["P13"]) {
        progress("P13 PUT");
        report.add("P13", puts::p13(&setup, rounds).await);
    }
    if args.wants(&["P14"]) {
        progress("P14 reads during writes");
        report.add("P14", freshness::p14(&setup, rounds).await);
    }
    if args.wants(&["PAST"]) {
        progress("PAST lists of past revisions during writes");
        report.add("PAST", past_revisions::run(&setup, rounds).await);
    }
    if args.wants(&["JSON"]) {
        progress("JSON Ranges of the gateway");
        report.add("JSON", gateway::run(&setup, &data, rounds).await);
    }
    Ok(())
}

/// 20k objects of 1 KB, with TLS on every connection.
async fn over_tls(suite: &Suite, report: &mut Report) -> anyhow::Result<()> {
    let (args, rounds) = (&suite.args, suite.args.rounds);
    if !args.wants(&["P19", "P20"]) {
        return Ok(());
    }
    let data = Dataset {
        prefix: "/registry/pods/",
        keys: 20_000,
        value_bytes: 1_000,
    };
    progress("filling 20k × 1 KB");
    let mut setup = Setup::start_with_tls(&suite.binaries, suite.options).await?;
    data.fill(&setup.connect().await?, 0).await?;
    start_targets(&mut setup, report).await?;
    if args.wants(&["P19"]) {
        progress("P19 TLS handshakes");
        report.add("P19", tls::p19(&setup, &data, rounds).await);
    }
    if args.wants(&["P20"]) {
        progress("P20 over TLS");
        report.add("P20", tls::p20(&setup, &data, rounds).await);
    }
    Ok(())
}

/// Watches of a small store.
async fn watching(suite: &Suite, report: &mut Report) -> anyhow::Result<()> {
    let (args, rounds) = (&suite.args, suite.args.rounds);
    if !args.wants(&["P10", "P21", "P22", "P23", "P24", "P25", "P26", "P27"]) {
        return Ok(());
    }
    let mut setup = Setup::start(&suite.binaries, suite.options).await?;
    start_targets(&mut setup, report).await?;
    if args.wants(&["P10"]) {
        progress("P10 500 watchers, 200 puts/s");
        report.add("P10", watches::p10(&setup, rounds).await);
    }
    if args.wants(&["P21"]) {
        progress("P21 1,000 watchers of one prefix");
        report.add("P21", watches::p21(&setup, rounds).await);
    }
    if args.wants(&["P24"]) {
        progress("P24 one watch");
        report.add("P24", watches::p24(&setup, rounds).await);
    }
    if args.wants(&["P25"]) {
        progress("P25 62 prefixes with three clients each");
        report.add("P25", watches::p25(&setup, rounds).await);
    }
    if args.wants(&["P26"]) {
        progress("P26 progress requests");
        report.add("P26", watches_idle::p26(&setup, rounds).await);
    }
    if args.wants(&["P27"]) {
        progress("P27 watches that are left to etcd");
        report.add("P27", watches::p27(&setup, rounds).await);
    }
    if args.wants(&["P23"]) {
        progress("P23 5,000 watches a thousand events back");
        report.add("P23", watches_storm::p23(&setup, rounds).await);
    }
    if args.wants(&["P22"]) {
        progress("P22 10,000 idle watchers");
        report.add("P22", watches_idle::p22(&mut setup, rounds).await);
    }
    Ok(())
}

/// 20k objects of 1 KB to list, and 150k more to measure a mirror's memory.
async fn middling_objects(suite: &Suite, report: &mut Report) -> anyhow::Result<()> {
    let (args, rounds) = (&suite.args, suite.args.rounds);
    if !args.wants(&["P2", "P12"]) {
        return Ok(());
    }
    let data = Dataset {
        prefix: "/registry/pods/",
        keys: 20_000,
        value_bytes: 1 << 10,
    };
    progress("filling 20k × 1 KB");
    let mut setup = Setup::start(&suite.binaries, suite.options).await?;
    setup.watchers_beside = args.watchers_beside;
    data.fill(&setup.connect().await?, 0).await?;
    if args.wants(&["P2"]) {
        start_targets(&mut setup, report).await?;
        progress("P2 LIST");
        report.add("P2", lists::p2(&setup, &data, rounds).await);
    }
    if args.wants(&["P12"]) {
        let data = Dataset {
            prefix: "/registry/secrets/",
            keys: 150_000,
            ..data
        };
        progress("filling 150k × 1 KB");
        data.fill(&setup.connect().await?, 0).await?;
        setup.restart_etcd().await?;
        progress("P12 memory, 1 KB");
        report.add(
            "P12",
            memory::p12(&setup, &data, rounds, "1 KB objects", 1.4).await,
        );
    }
    Ok(())
}

/// 15k objects of 10 KB: lists and memory; then 150k of them: a cold load.
async fn large_objects(suite: &Suite, report: &mut Report) -> anyhow::Result<()> {
    let (args, rounds) = (&suite.args, suite.args.rounds);
    if !args.wants(&["P3", "P4", "P9", "P11", "P12", "P16", "P18", "STREAMS"]) {
        return Ok(());
    }
    let data = Dataset {
        prefix: "/registry/pods/",
        keys: 15_000,
        value_bytes: 10 << 10,
    };
    progress("filling 15k × 10 KB");
    let mut setup = Setup::start(&suite.binaries, suite.options).await?;
    setup.watchers_beside = args.watchers_beside;
    data.fill(&setup.connect().await?, 0).await?;
    if args.wants(&["P3", "P4", "STREAMS"]) {
        start_targets(&mut setup, report).await?;
    }
    if args.wants(&["P3"]) {
        progress("P3 LIST");
        report.add("P3", lists::p3(&setup, &data, rounds).await);
    }
    if args.wants(&["P4"]) {
        progress("P4 four clients, large objects");
        report.add("P4", lists::p4(&setup, &data, rounds, "15k × 10 KB", 1.4).await);
    }
    if args.wants(&["STREAMS"]) {
        progress("STREAMS RangeStream");
        report.add(
            "STREAMS",
            streams::run(&setup, &data, rounds, "15k × 10 KB").await,
        );
    }
    if args.wants(&["P9"]) {
        progress("P9 eight concurrent LISTs");
        report.add("P9", memory::p9(&mut setup, &data, rounds).await);
    }
    if args.wants(&["P16"]) {
        progress("P16 a gigabyte of LISTs outside the mirror");
        report.add("P16", not_mirrored::p16(&mut setup, &data, rounds).await);
    }
    if args.wants(&["P18"]) {
        progress("P18 a LIST outside the mirror");
        report.add("P18", not_mirrored::p18(&mut setup, &data, rounds).await);
    }
    if args.wants(&["P12"]) {
        setup.restart_etcd().await?;
        progress("P12 memory, 10 KB");
        report.add(
            "P12",
            memory::p12(&setup, &data, rounds, "10 KB objects", 1.15).await,
        );
    }
    if args.wants(&["P11"]) {
        progress("filling up to 150k × 10 KB");
        let data = Dataset {
            keys: 150_000,
            ..data
        };
        data.fill(&setup.connect().await?, 15_000).await?;
        setup.restart_etcd().await?;
        progress("P11 cold load");
        report.add("P11", cold_load::large(&setup, &data, rounds).await);
    }
    Ok(())
}

/// A store that grows from 10k to 1M small objects.
async fn growing_store(suite: &Suite, report: &mut Report) -> anyhow::Result<()> {
    let (args, rounds) = (&suite.args, suite.args.rounds);
    if !args.wants(&["P8", "P11", "P12", "P15", "P17"]) {
        return Ok(());
    }
    let mut setup = Setup::start(&suite.binaries, suite.options).await?;
    setup.watchers_beside = args.watchers_beside;
    let mut growth = growth::Growth::default();
    let mut filled = 0;
    for keys in [10_000, 100_000, 300_000, 1_000_000] {
        let wanted: &[&str] = match keys {
            300_000 => &["P8", "P17"],
            1_000_000 => &["P11", "P12", "P15"],
            _ => &["P15"],
        };
        if !args.wants(wanted) {
            continue;
        }
        progress(&format!("filling up to {}k × 100 B", keys / 1000));
        let data = Dataset {
            prefix: "/registry/pods/",
            keys,
            value_bytes: 100,
        };
        data.fill(&setup.connect().await?, filled).await?;
        filled = keys;
        if keys == 300_000 {
            if args.wants(&["P8"]) {
                start_targets(&mut setup, report).await?;
                progress("P8 pages and counts");
                report.add("P8", pages::p8(&setup, &data, rounds).await);
            }
            if args.wants(&["P17"]) {
                progress("P17 a paged list outside the mirror");
                report.add("P17", not_mirrored::p17(&mut setup, &data, rounds).await);
            }
        } else if args.wants(&["P15"]) {
            start_targets(&mut setup, report).await?;
            progress("P15 growth");
            if let Err(error) = growth.measure(&setup, &data, rounds).await {
                report.note(format!("P15 was not measured with {keys} keys: {error:#}"));
            }
        }
        if keys == 1_000_000 && args.wants(&["P11"]) {
            setup.restart_etcd().await?;
            progress("P11 cold load, 100 B");
            let rows = cold_load::with_others(&setup, &data, rounds, "1M × 100 B").await;
            report.add("P11", rows);
        }
        if keys == 1_000_000 && args.wants(&["P12"]) {
            setup.restart_etcd().await?;
            progress("P12 memory, 100 B");
            report.add(
                "P12",
                memory::p12(&setup, &data, rounds, "100 B objects", 2.0).await,
            );
        }
    }
    report.rows.extend(growth.rows());
    Ok(())
}
