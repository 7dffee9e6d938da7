//! The tables of docs/reference, which `make reference` writes from the declarations of flags, metrics and findings.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use clap::{Arg, Command};
use rangecache_report::FindingId;

use super::{product, read, root};

/// Marks of the part of a page that is generated; what is outside of them is written by hand.
const BEGIN: &str =
    "<!-- Generated: `make reference` writes what follows from the declarations in the source. -->\n";
const END: &str = "<!-- End of the generated part. -->\n";

#[test]
fn reference_pages_are_generated() {
    let is_update = std::env::var_os("UPDATE_REFERENCE").is_some();
    for (path, table) in [
        ("docs/reference/flags.md", flags()),
        ("docs/reference/metrics.md", metrics()),
        ("docs/reference/findings.md", findings()),
    ] {
        let page = read(path);
        let (before, rest) = page.split_once(BEGIN).unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        let generated = format!("{before}{BEGIN}\n{table}\n{END}{after}");
        if is_update {
            std::fs::write(root().join(path), generated).unwrap();
        } else {
            assert!(
                page == generated,
                "{path} is not what the source declares: `make reference` writes it again"
            );
        }
    }
}

/// Tables of the flags of serving by heading, and of those that each other command has in addition.
fn flags() -> String {
    let serving = rangecache::cli::command();
    let heading = |flag: &Arg| flag.get_help_heading().unwrap().to_owned();
    let mut headings: Vec<String> = serving.get_opts().map(heading).collect();
    headings.dedup();
    let mut tables: Vec<String> = headings
        .iter()
        .map(|name| {
            let flags = serving.get_opts().filter(|flag| heading(flag) == *name);
            format!("### {name}\n\n{}", rows(flags))
        })
        .collect();
    let is_known = |flag: &Arg| {
        serving
            .get_opts()
            .any(|known| known.get_long() == flag.get_long())
    };
    for command in serving.get_subcommands() {
        let own: Vec<&Arg> = command.get_opts().filter(|flag| !is_known(flag)).collect();
        if !own.is_empty() {
            tables.push(format!("{}\n{}", introduction(command), rows(own.into_iter())));
        }
    }
    tables.join("\n")
}

/// Heading and first paragraph of a command's help.
fn introduction(command: &Command) -> String {
    let about = command.get_long_about().unwrap().to_string();
    let about = about.split("\n\n").next().unwrap();
    format!("### rangecache {}\n\n{about}\n", command.get_name())
}

fn rows<'a>(flags: impl Iterator<Item = &'a Arg>) -> String {
    let mut table = "| flag | meaning | default |\n|---|---|---|\n".to_owned();
    for flag in flags {
        let name = flag.get_long().unwrap();
        let text = flag.get_long_help().map(ToString::to_string).unwrap_or_default();
        let (help, _) = text.split_once("\n\nWhen to change it: ").unwrap_or_else(|| {
            panic!("--{name}: its doc comment has no last paragraph \"When to change it: …\"")
        });
        // A default that depends on something is named in the text.
        let (help, default) = match help.split_once(" [default: ") {
            Some((help, default)) => (help, default.trim_end_matches(']').to_owned()),
            None => (help, default_value(flag)),
        };
        let cells = [first_clause(help), &default].map(|cell| cell.replace('|', "\\|"));
        writeln!(table, "| `--{name}` | {} |", cells.join(" | ")).unwrap();
    }
    table
}

/// `text` up to the first stop, semicolon or colon behind more than three words. That something is insecure is not left out.
fn first_clause(text: &str) -> &str {
    let ends = text.match_indices(['.', ';', ':']).map(|(at, _)| at);
    let mut ends = ends.filter(|at| {
        let rest = &text[at + 1..];
        rest.starts_with(' ') && !rest.starts_with(" Insecure") && text[..*at].split(' ').count() > 3
    });
    &text[..ends.next().unwrap_or(text.len())]
}

/// The default in marks of code; switches have none.
fn default_value(flag: &Arg) -> String {
    let takes = flag.get_action().takes_values();
    let default = flag.get_default_values().first().filter(|_| takes);
    default.map_or_else(String::new, |value| format!("`{}`", value.to_string_lossy()))
}

/// A metric as `metric_group!` declares it.
#[derive(Default)]
struct Metric {
    name: String,
    labels: Vec<String>,
    /// Paragraphs of its doc comment.
    doc: Vec<String>,
}

/// Metrics of every group in the source, the groups in the order of their first names.
fn groups() -> Vec<Vec<Metric>> {
    let mut groups = Vec::new();
    for path in product() {
        let text = std::fs::read_to_string(&path).unwrap();
        for group in text.split("\nmetric_group! {").skip(1) {
            groups.push(group_of(&group[..group.find("\n}\n").unwrap()]));
        }
    }
    groups.sort_by(|a: &Vec<Metric>, b| a[0].name.cmp(&b[0].name));
    groups
}

fn group_of(declaration: &str) -> Vec<Metric> {
    let (mut metrics, mut labels_of_all, mut doc) = (Vec::new(), Vec::new(), Vec::<String>::new());
    let mut is_new = true;
    for line in declaration.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            match doc.last_mut() {
                Some(paragraph) if !is_new => paragraph.push_str(text),
                _ if !text.is_empty() => doc.push(text.trim().to_owned()),
                _ => {}
            }
            is_new = text.is_empty();
            continue;
        }
        if let Some((_, label)) = line.split_once(" by ") {
            labels_of_all.push(label.trim_end_matches(';').to_owned());
        }
        if let Some((field, name)) = line.split_once(" = \"rangecache_") {
            let labels = field.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
            let labels = labels.map_or("", |(labels, _)| labels).split(", ");
            let labels = labels.filter(|label| !label.is_empty()).map(str::to_owned);
            metrics.push(Metric {
                name: format!("rangecache_{}", name.split('"').next().unwrap()),
                labels: labels_of_all.iter().cloned().chain(labels).collect(),
                doc: std::mem::take(&mut doc),
            });
        }
        doc.clear();
        is_new = true;
    }
    metrics
}

/// Names of rangecache's own metrics.
pub(super) fn metric_names() -> BTreeSet<String> {
    let names: Vec<String> = groups().into_iter().flatten().map(|metric| metric.name).collect();
    let set: BTreeSet<String> = names.iter().cloned().collect();
    assert!(
        set.len() > 30 && set.len() == names.len(),
        "twice, or not found: {names:?}"
    );
    set
}

/// Table of the metrics. What the help text on `/metrics` says further is left out.
fn metrics() -> String {
    let mut table = "| metric | measures | useful when |\n|---|---|---|\n".to_owned();
    for Metric { name, labels, doc } in groups().into_iter().flatten() {
        let (useful, measures) = doc.split_last().unwrap();
        let useful = useful
            .strip_prefix("Useful when: ")
            .unwrap_or_else(|| panic!("{name}: its doc comment has no last paragraph \"Useful when: …\""));
        let labels = if labels.is_empty() {
            String::new()
        } else {
            format!("{{{}}}", labels.join(","))
        };
        let (help, more) = measures.split_first().unwrap();
        let help = first_clause(help).split(" by `").next().unwrap();
        let more = more
            .iter()
            .filter(|text| !text.starts_with("See "))
            .map(String::as_str);
        let measures: Vec<&str> = std::iter::once(help.trim_end_matches(',')).chain(more).collect();
        let measures = measures.join(". ");
        writeln!(table, "| `{name}{labels}` | {measures} | {useful} |").unwrap();
    }
    table
}

/// Tables of the findings with a remedy, by what reports them, and the ids of the others. A report has their meaning.
fn findings() -> String {
    let by = |id: &FindingId| id.reported_by().iter().map(|by| by.as_str()).collect::<Vec<_>>();
    let mut text = String::new();
    for (heading, reports) in [
        ("Status and doctor", ["status", "doctor"].as_slice()),
        ("Status", &["status"]),
        ("Doctor", &["doctor"]),
    ] {
        write!(
            text,
            "### {heading}\n\n| id | level | what to do | alert |\n|---|---|---|---|\n"
        )
        .unwrap();
        let reported = FindingId::ALL.iter().filter(|id| by(id) == reports);
        for id in reported.filter(|id| !id.remedy().is_empty()) {
            let severities: Vec<_> = id.severities().iter().map(|severity| severity.as_str()).collect();
            let (levels, remedy) = (severities.join(", "), sentence(id.remedy()));
            let runbook = |alert: &&str| format!("[{alert}](../runbooks.md#{})", alert.to_lowercase());
            let alerts: Vec<_> = id.alerts().iter().map(runbook).collect();
            let (id, alerts) = (id.as_str(), alerts.join(", "));
            writeln!(text, "| `{id}` | {levels} | {remedy} | {alerts} |").unwrap();
        }
        text.push('\n');
    }
    let others = FindingId::ALL.iter().filter(|id| id.remedy().is_empty());
    let others: Vec<_> = others.map(|id| format!("`{}`", id.as_str())).collect();
    writeln!(text, "### Without a remedy\n\n{}.", others.join(", ")).unwrap();
    text
}

/// `text` with a capital at its begin and a full stop at its end.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    match letters.next() {
        None => String::new(),
        Some(first) if text.starts_with("etcd") || text.starts_with("rangecache") => {
            format!("{first}{}.", letters.as_str().trim_end_matches('.'))
        }
        Some(first) => format!(
            "{}{}.",
            first.to_uppercase(),
            letters.as_str().trim_end_matches('.')
        ),
    }
}

/// Every declared finding is reported somewhere, and by the rooms that its declaration names.
#[test]
fn every_finding_is_reported_by_the_rooms_that_it_names() {
    let mut shared = String::new();
    let (mut status, mut doctor) = (String::new(), String::new());
    for path in product() {
        let text = std::fs::read_to_string(&path).unwrap();
        // Tests may name any.
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let name = path.strip_prefix(root()).unwrap().to_str().unwrap();
        if name.starts_with("crates/admin/") || name.starts_with("crates/tools/src/running/") {
            status.push_str(text);
        } else if name.starts_with("crates/tools/src/doctor/") {
            doctor.push_str(text);
        } else if name.starts_with("crates/report/") {
            shared.push_str(text);
        }
    }
    let names = |text: &str, id: &FindingId| {
        let name = format!("FindingId::{}", id.name());
        let mut ends = text.match_indices(&name).map(|(at, _)| &text[at + name.len()..]);
        ends.any(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
    };
    for id in FindingId::ALL {
        let by: Vec<_> = id.reported_by().iter().map(|by| by.as_str()).collect();
        if names(&shared, id) {
            continue;
        }
        for (room, text) in [("status", &status), ("doctor", &doctor)] {
            assert_eq!(names(text, id), by.contains(&room), "{id:?} in {room}");
        }
    }
}
