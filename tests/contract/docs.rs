//! Compares the documents with the program: everything is documented, and nothing is documented that no longer exists.

mod reference;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rangecache_base::telemetry::outcome::{Outcome, Read};
use rangecache_report::{FindingId, ReportedBy, Severity};
use testkit::etcd::{Etcd, Version};
use testkit::proxy::Rangecache;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files under `dir` that end with `suffix`.
fn files(dir: &str, suffix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![root().join(dir)];
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else if path.to_str().unwrap().ends_with(suffix) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Folders of the product's source: of the package at the top, and of the crates below it.
fn source_folders() -> Vec<String> {
    let crates = std::fs::read_dir(root().join("crates")).unwrap();
    let names = crates.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let folders = names.map(|name| format!("crates/{name}/src"));
    std::iter::once("src".to_owned()).chain(folders).collect()
}

/// Source files of the product.
fn product() -> Vec<PathBuf> {
    let folders = source_folders();
    folders.iter().flat_map(|folder| files(folder, ".rs")).collect()
}

/// Whether the product has the file `path`, as docs/architecture.md names it: without the folder `src` of its crate.
fn is_source(path: &str) -> bool {
    let of_crate = path
        .split_once('/')
        .map(|(name, file)| format!("crates/{name}/src/{file}"));
    let paths = source_folders()
        .into_iter()
        .map(|folder| format!("{folder}/{path}"));
    paths.chain(of_crate).any(|path| root().join(path).exists())
}

/// Every page of documentation.
fn pages() -> Vec<PathBuf> {
    let mut pages = files("docs", ".md");
    pages.extend(files("charts", ".md"));
    pages.extend(["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|page| root().join(page)));
    pages
}

/// The part of `page` under the heading `## name`, up to the next of that level.
fn section<'a>(page: &'a str, name: &str) -> &'a str {
    let start = page
        .find(&format!("\n## {name}\n"))
        .unwrap_or_else(|| panic!("there is no section {name:?}"));
    let rest = &page[start + 1..];
    &rest[..rest[1..].find("\n## ").map_or(rest.len(), |end| end + 1)]
}

/// The cells of every row of every table in `text`, headings and rules left out.
fn rows(text: &str) -> Vec<Vec<String>> {
    let lines: Vec<&str> = text.lines().collect();
    let is_rule = |line: &str| line.starts_with("|---");
    let mut rows = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let is_heading = lines.get(at + 1).is_some_and(|next| is_rule(next));
        if line.starts_with('|') && !is_rule(line) && !is_heading {
            let cells = line.trim().trim_matches('|').split(" |");
            rows.push(cells.map(|cell| cell.trim().to_owned()).collect());
        }
    }
    rows
}

/// Texts between backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Texts between backticks in the first cell of every row.
fn first_cells(text: &str) -> BTreeSet<String> {
    let cells = rows(text).into_iter().map(|mut row| row.swap_remove(0));
    cells
        .flat_map(|cell| quoted(&cell).into_iter().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// Names of all flags.
fn flags() -> BTreeSet<String> {
    let command = rangecache::cli::command();
    let commands = std::iter::once(&command).chain(command.get_subcommands());
    let names = commands.flat_map(|command| command.get_opts().filter_map(clap::Arg::get_long));
    names.map(|name| format!("--{name}")).collect()
}

/// Every flag that a page names is a flag of rangecache or of a listed tool.
#[test]
fn pages_name_only_existing_flags() {
    let ours = flags();
    // Flags of etcd, etcdctl, kube-apiserver, kubectl, helm, cargo and the project's own tools.
    let theirs: BTreeSet<&str> =
        "--auto-compaction-retention --force-new-cluster --max-request-bytes --quota-backend-bytes --etcd-servers --etcd-servers-overrides --etcd-cafile --etcd-certfile --etcd-keyfile --etcd- --watch-cache --watch-cache-sizes --enable-distributed-tracing --tracing-config-file --version \
        --help --list --only --skip --auth --reuse-port --discovery-srv"
            .split_whitespace()
            .collect();
    let pages = ["README.md", "CONTRIBUTING.md"].map(|page| root().join(page));
    for page in files("docs", ".md").into_iter().chain(pages) {
        let text = std::fs::read_to_string(&page).unwrap();
        for flag in quoted(&text).iter().filter(|text| text.starts_with("--")) {
            let end = flag.find(|c: char| !c.is_ascii_alphanumeric() && c != '-');
            let name = &flag[..end.unwrap_or(flag.len())];
            assert!(
                ours.contains(name) || theirs.contains(name),
                "{}: {name} is no flag of rangecache; add it to this test if it is a tool's",
                page.display()
            );
        }
    }
}

fn without_suffix(name: &str) -> &str {
    ["_total", "_bucket", "_count", "_sum"]
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix))
        .unwrap_or(name)
}

/// Name of the metric in `row` of docs/reference/metrics.md, without its labels.
fn metric_name(row: &[String]) -> &str {
    quoted(&row[0])[0].split('{').next().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_metric_is_documented_under_its_name() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    rangecache.client().await.get("a").await.unwrap();
    let served = rangecache.metrics().await;
    // The series of a histogram are documented as one metric.
    let served: BTreeSet<&str> = served
        .0
        .keys()
        .map(|sample| sample.split('{').next().unwrap())
        .filter(|name| name.starts_with("rangecache_") || name.starts_with("process_"))
        .map(|name| {
            let is_histogram = ["_bucket", "_count", "_sum"]
                .iter()
                .any(|end| name.ends_with(end));
            if is_histogram { without_suffix(name) } else { name }
        })
        .collect();
    let page = read("docs/reference/metrics.md");
    let rows = rows(&page);
    let explained: BTreeSet<&str> = rows.iter().map(|row| metric_name(row)).collect();
    for name in served {
        assert!(
            explained.contains(name),
            "{name} is served, and not in docs/reference/metrics.md"
        );
    }
}

/// Prometheus' `increase()` does not see the first event of a series that begins with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_counter_of_a_fresh_process_has_a_series() {
    // Their labels are names of clients and parts of keys, which a fresh process does not know, or methods and codes, of which
    // most are never seen; no alert looks for the first one.
    const NAMED_LATER: [&str; 10] = [
        "rangecache_calls_total",
        "rangecache_client_answers_total",
        "rangecache_client_bytes_total",
        "rangecache_client_calls_total",
        "rangecache_client_lists_total",
        "rangecache_prefix_reads_total",
        "rangecache_prefix_watches_total",
        "rangecache_prefix_proven_reads_total",
        "rangecache_prefix_read_wait_seconds_total",
        "rangecache_prefix_writes_total",
    ];
    let etcd = Etcd::start(Version::V3_7).await;
    let dir = tempfile::tempdir().unwrap();
    let rangecache = Rangecache::before(&etcd)
        .with("--access-log", dir.path().join("log").to_str().unwrap())
        .with_environment("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        .start()
        .await;
    let served = rangecache.metrics().await;
    let page = read("docs/reference/metrics.md");
    let rows = rows(&page);
    let counters = rows.iter().map(|row| metric_name(row));
    let counters: BTreeSet<&str> = counters.filter(|name| name.ends_with("_total")).collect();
    assert!(counters.len() > 40, "{counters:?}");
    for counter in &counters {
        let mut names = served.0.keys().map(|sample| sample.split('{').next().unwrap());
        assert_eq!(
            names.any(|name| name == *counter),
            !NAMED_LATER.contains(counter),
            "{counter}: has it a series at the start?"
        );
    }
}

#[test]
fn pages_name_only_existing_metrics() {
    let source = reference::metric_names();
    // A page may name a counter without its suffix, or one series of a histogram.
    let bare: BTreeSet<&str> = source.iter().map(|name| without_suffix(name)).collect();
    let tests = sources();
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for (at, _) in text.match_indices("rangecache_") {
            // Part of another name.
            if text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let end = text[at..].find(|c: char| !c.is_ascii_lowercase() && c != '_');
            let name = &text[at..at + end.unwrap_or(text.len() - at)];
            // `rangecache_` alone, or a family of names.
            let is_family = name.ends_with('_') || text[at + name.len()..].starts_with('*');
            assert!(
                is_family || bare.contains(without_suffix(name)) || tests.contains(&format!("fn {name}(")),
                "{}: there is no {name}",
                page.display()
            );
        }
    }
}

/// The message of every `warn!` and `error!` in the source: the last string among its arguments, on one line, with its file.
fn messages() -> Vec<(String, String)> {
    let mut messages = Vec::new();
    for path in product() {
        let text = std::fs::read_to_string(&path).unwrap();
        for (at, name) in text.match_indices("warn!(").chain(text.match_indices("error!(")) {
            if text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let message = last_text(&text[at + name.len()..]);
            let place = path.strip_prefix(root()).unwrap().display().to_string();
            messages.push((place, message));
        }
    }
    assert!(messages.len() > 20, "{messages:?}");
    messages
}

/// The last string literal before the parenthesis that ends `arguments`.
fn last_text(arguments: &str) -> String {
    let (mut depth, mut last, mut rest) = (1, String::new(), arguments.chars());
    while let Some(c) = rest.next() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            '"' => {
                last.clear();
                while let Some(c) = rest.next().filter(|c| *c != '"') {
                    last.push(c);
                    if c == '\\' {
                        last.extend(rest.next());
                    }
                }
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    // A backslash at the end of a line continues it.
    let words = last.replace("\\\n", " ");
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn every_warning_and_error_is_documented() {
    let page = read("docs/reference/logs.md");
    let rows = rows(&page);
    let lines: Vec<&str> = rows.iter().flat_map(|row| quoted(&row[0])).collect();
    let messages = messages();
    for (place, message) in &messages {
        assert!(
            lines.iter().any(|line| message.contains(line)),
            "{place} logs {message:?}, which is not in docs/reference/logs.md"
        );
    }
    for line in lines {
        assert!(line.len() > 5, "{line:?} is too short to identify a message");
        assert!(
            messages.iter().any(|(_, message)| message.contains(line)),
            "no code logs {line:?}"
        );
    }
}

/// Every value of the labels `outcome` and `reason` that a read can have is explained, and no other value is.
#[test]
fn every_outcome_and_reason_is_explained() {
    let page = read("docs/consistency.md");
    let section = section(&page, "Outcomes and reasons");
    let (tables, _) = section.split_once("\n### ").unwrap();
    let explained = first_cells(tables);
    let outcomes = Outcome::all().map(|outcome| outcome.labels());
    let (outcomes, reasons): (BTreeSet<&str>, BTreeSet<&str>) = outcomes.unzip();
    let of_memory: BTreeSet<&str> = Read::ALL.iter().map(|read| read.as_str()).collect();
    for reason in &of_memory {
        assert!(
            section.contains(&format!("`{reason}`")),
            "{reason} is not explained"
        );
    }
    let expected: BTreeSet<String> = outcomes
        .iter()
        .chain(reasons.difference(&of_memory))
        .map(|label| (*label).to_owned())
        .collect();
    assert_eq!(
        explained, expected,
        "docs/consistency.md, and telemetry/outcome.rs"
    );
}

/// Every value of the label `reason` of `rangecache_range_stream_fallback_total` is explained.
#[test]
fn every_stream_fallback_reason_is_explained() {
    let page = read("docs/consistency.md");
    let (_, table) = page.split_once("\n### RangeStream fallback\n").unwrap();
    let (table, _) = table.split_once("\n### ").unwrap();
    let explained = first_cells(table);
    // The labels of the two enums: arms that map a variant to a string.
    let labels: BTreeSet<String> = [
        "crates/proxy/src/fallback/reason.rs",
        "crates/upstream/src/capabilities.rs",
    ]
    .iter()
    .flat_map(|path| {
        let text = read(path);
        let arms = text.lines().filter_map(|line| line.trim().split_once(" => \""));
        arms.filter_map(|(_, label)| Some(label.strip_suffix("\",")?.to_owned()))
            .collect::<Vec<_>>()
    })
    .collect();
    assert!(labels.len() > 10, "{labels:?}");
    assert_eq!(explained, labels, "docs/consistency.md, and the source");
}

/// Log lines that the table of faults quotes are logged by the program.
#[test]
fn faults_quote_existing_log_lines() {
    let page = read("docs/operations.md");
    let source: String = product()
        .iter()
        .map(|path| std::fs::read_to_string(path).unwrap())
        .collect();
    let source = source.replace("\\\n", " ");
    let source = source.split_whitespace().collect::<Vec<_>>().join(" ");
    let rows = rows(section(&page, "Faults and their symptoms"));
    assert!(rows.len() > 15, "only {} faults were found", rows.len());
    for row in rows.iter().filter(|row| row.len() == 4) {
        for line in quoted(&row[2]).iter().filter(|text| text.contains(' ')) {
            assert!(source.contains(line), "{}: no code logs {line:?}", row[0]);
        }
    }
}

/// Names of all alerts.
fn alerts() -> BTreeSet<String> {
    let rules = read("charts/rangecache/files/alerts.yaml");
    let names = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    names.map(str::to_owned).collect()
}

/// The page and `rangecache status` say what an alert says, and what they ask to be done has an alert.
#[test]
fn every_alert_has_a_finding_and_every_finding_that_asks_for_action_has_an_alert() {
    let of_process = |id: &&FindingId| id.reported_by().contains(&ReportedBy::Status);
    let mut found = BTreeSet::new();
    for id in FindingId::ALL.iter().filter(of_process) {
        let asks_for_action = id
            .severities()
            .iter()
            .any(|severity| *severity >= Severity::Warning);
        assert!(!asks_for_action || !id.alerts().is_empty(), "{id:?} has no alert");
        found.extend(id.alerts().iter().map(|alert| (*alert).to_owned()));
    }
    assert_eq!(found, alerts(), "left: alerts of findings; right: the chart's");
}

#[test]
fn every_alert_has_a_runbook() {
    let page = read("docs/runbooks.md");
    let explained: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .filter(|heading| heading.starts_with("Rangecache"))
        .collect();
    let alerts = alerts();
    let alerts: BTreeSet<&str> = alerts.iter().map(String::as_str).collect();
    assert!(alerts.len() > 10, "{alerts:?}");
    assert_eq!(explained, alerts);
}

/// The fragment of a link to `heading`.
fn anchor(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// Numbers are given once and in the order of dates, so that a link to a decision stays right.
#[test]
fn every_decision_has_a_number_of_its_own_a_date_and_a_status() {
    let page = read("docs/decisions.md");
    let mut decisions = BTreeMap::new();
    let lines: Vec<&str> = page.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let Some(heading) = line.strip_prefix("### ") else {
            continue;
        };
        let number = heading
            .split_once(". ")
            .and_then(|(number, _)| number.parse::<usize>().ok());
        let number = number.unwrap_or_else(|| panic!("{heading:?} begins with no number"));
        let status = lines.get(at + 2).copied().unwrap_or_default();
        let (date, status) = status.split_once(", ").unwrap_or_default();
        let is_date = date.len() == 10 && date.split('-').all(|part| part.parse::<u16>().is_ok());
        assert!(is_date, "decision {number} has no date below its heading");
        let replaced_by = status
            .strip_prefix("replaced by ")
            .and_then(|by| by.trim_end_matches('.').parse::<usize>().ok());
        assert!(
            status == "in force." || replaced_by.is_some_and(|by| by > number),
            "decision {number} is neither in force nor replaced by a later one: {status:?}"
        );
        assert_eq!(
            decisions.insert(number, date),
            None,
            "two decisions have the number {number}"
        );
    }
    assert_eq!(
        decisions.len(),
        decisions.keys().max().copied().unwrap_or(0),
        "a number is missing"
    );
    assert!(decisions.values().is_sorted(), "{decisions:?}");
}

#[test]
fn relative_links_resolve() {
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => page.clone(),
                path => page.parent().unwrap().join(path),
            };
            assert!(
                target.exists(),
                "{}: the target of {link} does not exist",
                page.display()
            );
            if !fragment.is_empty() {
                let text = std::fs::read_to_string(&target).unwrap();
                let mut headings = text.lines().filter(|line| line.starts_with('#'));
                assert!(
                    headings.any(|heading| anchor(heading) == fragment),
                    "{}: {link}: there is no such heading",
                    page.display()
                );
            }
        }
    }
}

/// Source and tests in one text.
fn sources() -> String {
    let paths = product().into_iter().chain(files("tests", ".rs"));
    paths.map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

/// Whether `name` names a test: a file or folder of `tests/`, a function (`*` and `…` stand for what follows), or a module of
/// unit tests.
fn is_test(name: &str, sources: &str) -> bool {
    if name.starts_with("tests/") {
        let path = name.split(':').next().unwrap();
        return root().join(path).exists() || root().join(format!("{path}.rs")).exists();
    }
    if let Some(module) = name.strip_suffix("::tests") {
        let path = format!("/{}", module.replace("::", "/"));
        return product().iter().any(|file| {
            let name = match file.file_stem() {
                Some(stem) if stem == "mod" || stem == "lib" => file.parent().unwrap().to_owned(),
                _ => file.with_extension(""),
            };
            let mut texts = vec![std::fs::read_to_string(file).unwrap()];
            texts.extend(std::fs::read_to_string(name.join("tests.rs")));
            let has_tests = |text: &String| text.contains("test]\n") || text.contains("[tokio::test(");
            let name = name.to_str().unwrap().replace("/src/", "/");
            name.ends_with(&path) && texts.iter().any(has_tests)
        });
    }
    match name.strip_suffix('*').or_else(|| name.strip_suffix('…')) {
        Some(begins) => sources.contains(&format!("fn {begins}")),
        None => sources.contains(&format!("fn {name}(")),
    }
}

#[test]
fn every_rule_names_tests_that_exist() {
    let page = read("docs/reference/tests.md");
    let sources = sources();
    for row in rows(&page) {
        let [rule, tests] = row.as_slice() else {
            panic!("two cells: {row:?}");
        };
        let named = quoted(tests);
        assert!(!named.is_empty(), "no test: {rule}");
        for name in named {
            assert!(is_test(name, &sources), "{rule}: there is no test {name}");
        }
    }
}

/// Every threat has a defence, every invariant a place in the source, and docs/reference/tests.md has tests of each and of no other.
#[test]
fn every_invariant_and_every_threat_has_tests() {
    let tests = read("docs/reference/tests.md");
    let is_number =
        |name: &str| name.starts_with(['I', 'S', 'W']) && name[1..].starts_with(|c: char| c.is_ascii_digit());
    for (path, heading) in [
        ("docs/architecture.md", "Invariants"),
        ("docs/security.md", "Threats"),
    ] {
        let mut stated = rows(&read(path));
        stated.retain(|row| is_number(&row[0]));
        for row in &stated {
            let [number, rule, kept] = row.as_slice() else {
                panic!("three cells: {row:?}");
            };
            assert!(!kept.is_empty(), "{number}: no defence, or no place: {rule}");
            for path in quoted(kept).iter().filter(|name| name.ends_with(".rs")) {
                assert!(is_source(path), "{number}: {path} does not exist");
            }
        }
        let numbers = |rows: &[Vec<String>]| rows.iter().map(|row| row[0].clone()).collect::<Vec<_>>();
        let tested = rows(section(&tests, heading));
        assert!(tested.len() > 20, "only {} rules were found", tested.len());
        assert_eq!(
            numbers(&stated),
            numbers(&tested),
            "{path}, and docs/reference/tests.md"
        );
    }
}

/// The map shows every room and crate, and every file that the page names exists.
#[test]
fn the_map_shows_the_rooms() {
    let page = read("docs/architecture.md");
    let map = section(&page, "Rooms");
    let folders = source_folders();
    for folder in &folders {
        assert!(
            map.contains(folder.trim_end_matches("/src")),
            "{folder} is not on the map"
        );
        // A crate that is one room lists its files in its lib.rs.
        if [
            "admin", "config", "lean-h2", "mirror", "proxy", "report", "upstream",
        ]
        .iter()
        .any(|room| folder == &format!("crates/{room}/src"))
        {
            continue;
        }
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            // lib.rs has a table of its own.
            assert!(
                name == "lib.rs" || map.contains(&name),
                "{folder}/{name} is not on the map"
            );
        }
    }
    for path in quoted(&page)
        .iter()
        .filter(|name| name.ends_with(".rs") && name.contains('/'))
    {
        let found = is_source(path)
            || ["", "tests"]
                .iter()
                .any(|dir| root().join(dir).join(path).exists());
        assert!(found, "docs/architecture.md names {path}, which does not exist");
    }
}

#[test]
fn pages_name_only_existing_make_targets() {
    let makefile = read("Makefile");
    let targets: BTreeSet<&str> = makefile
        .lines()
        .filter_map(|line| line.strip_prefix(".PHONY: "))
        .flat_map(str::split_whitespace)
        .collect();
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        let commands = quoted(&text)
            .into_iter()
            .chain(text.lines())
            .filter_map(|code| code.strip_prefix("make "));
        for target in commands.filter_map(|rest| rest.split_whitespace().next()) {
            let is_target =
                targets.contains(target) || target.chars().any(|c| !(c.is_ascii_lowercase() || c == '-'));
            let is_prose =
                !text.contains(&format!("`make {target}")) && !text.contains(&format!("\nmake {target}\n"));
            assert!(
                is_target || is_prose,
                "{}: there is no target {target}",
                page.display()
            );
        }
    }
}

/// A suite that compatibility.md names is run by a workflow, by `.ci/run` or by `.ci/nightly`.
#[test]
fn every_suite_of_the_compatibility_page_runs_by_itself() {
    let mut runs = read(".ci/run") + &read(".ci/nightly");
    for workflow in files(".github/workflows", ".yml") {
        runs += &read(workflow);
    }
    let runs: BTreeSet<&str> = runs
        .split("make ")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).next())
        .collect();
    let page = read("docs/compatibility.md");
    let suites = quoted(&page)
        .into_iter()
        .filter_map(|code| code.strip_prefix("make "));
    for suite in suites.filter_map(|rest| rest.split_whitespace().next()) {
        assert!(runs.contains(suite), "no workflow runs make {suite}");
    }
}

/// `.ci/phrases` finds a refused phrase in one line, over a line break and in a name, and passes what has none.
#[test]
fn refused_phrases_are_found_with_their_line() {
    let dir = tempfile::tempdir().unwrap();
    let check = |text: &str| {
        let file = dir.path().join("sample.rs");
        std::fs::write(&file, text).unwrap();
        let output = std::process::Command::new(root().join(".ci/phrases"))
            .arg(&file)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code(), text)
    };
    assert_eq!(
        check("/// Sends the request again.\nfn undertow() {}\n"),
        (Some(0), String::new())
    );
    for (text, line) in [
        (concat!("a\n// loads a", "new.\n"), 2),
        (concat!("/// calls that are under\n", "/// way\n"), 2),
        (concat!("fn is_held_", "against_etcd() {}\n"), 1),
    ] {
        let (code, found) = check(text);
        assert_eq!(code, Some(1), "{text}");
        assert!(found.contains(&format!("sample.rs:{line}: ")), "{text}: {found}");
    }
    let refused = read("docs/refused-phrases.txt");
    let phrases = refused.lines().filter(|line| !line.starts_with('#'));
    for phrase in phrases {
        let (_, replacement) = phrase.split_once(" => ").unwrap();
        assert!(!replacement.is_empty(), "{phrase}: what instead?");
    }
}

/// The image is built from the folders that the workspace names, not only from those that it had when the list was written.
#[test]
fn image_is_built_from_the_whole_workspace() {
    let (ignored, manifest) = (read(".dockerignore"), read("Cargo.toml"));
    let sent: BTreeSet<&str> = ignored
        .lines()
        .filter_map(|line| line.strip_prefix('!'))
        .collect();
    let members = manifest.lines().find(|line| line.starts_with("members = "));
    let members = members
        .expect("members of the workspace")
        .split('"')
        .skip(1)
        .step_by(2);
    let needed = members.map(|member| member.trim_end_matches("/*"));
    for needed in needed.chain([".cargo", "Cargo.lock", "Cargo.toml", "build.rs", "proto", "src"]) {
        assert!(sent.contains(needed), ".dockerignore leaves out {needed}");
    }
}
