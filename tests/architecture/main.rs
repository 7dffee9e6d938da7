//! Imports follow the tables of docs/architecture.md, and no circle of imports exists between files, nor one of calls between
//! methods of one type that lie in several files.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "so a test fails"
)]

mod file;
mod rules;
mod tree;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use rules::{Table, circles, crates, dependencies, folders, layers, page, rooms, source};
use tree::{Edges, Tree};

/// Crates that are one room: a table of layers has their files.
const ROOMS: [&str; 7] = [
    "crates/admin/",
    "crates/config/",
    "crates/lean-h2/",
    "crates/mirror/",
    "crates/proxy/",
    "crates/report/",
    "crates/upstream/",
];

/// Fails with every offence.
fn check_imports(offences: &[String]) {
    assert!(offences.is_empty(), "\n{}", offences.join("\n"));
}

/// Imports between the files of the crate in `folder`.
fn edges(folder: &str) -> Edges {
    Tree::new(&source(&format!("{folder}src"))).edges()
}

#[test]
fn crates_depend_on_those_that_the_architecture_page_allows() {
    let mut allowed = crates(&page());
    for folder in folders() {
        let name = folder.split('/').nth(1).unwrap_or("rangecache");
        let allowed = allowed.remove(name);
        let allowed =
            allowed.unwrap_or_else(|| panic!("docs/architecture.md has no row for the crate {name}"));
        assert_eq!(dependencies(&folder), allowed, "{name}");
    }
    assert!(allowed.is_empty(), "crates that do not exist: {allowed:?}");
}

#[test]
fn imports_between_rooms_are_those_that_the_architecture_page_allows() {
    let rooms = rooms(&page());
    let mut count = 0;
    for folder in folders() {
        if !ROOMS.contains(&folder.as_str()) {
            let edges = edges(&folder);
            check_imports(&rooms.offences(&edges));
            count += edges.len();
        }
    }
    assert!(count > 200, "only {count} imports were found");
}

#[test]
fn imports_inside_a_room_point_to_the_layers_below() {
    let page = page();
    for room in ["proxy", "mirror"] {
        let (layers, edges) = (layers(&page, room), edges(&format!("crates/{room}/")));
        check_imports(&layers.offences(&edges));
        let found = check_rows(&layers, &edges);
        assert!(found > 10, "{room}: {found}");
    }
}

/// Adds the edges within a circle of files of `folder` to the report.
fn name_edges(report: &mut String, folder: &str, edges: &Edges, circle: &BTreeSet<String>, verb: &str) {
    for ((from, to), line) in edges {
        if circle.contains(from) && circle.contains(to) {
            let _ = writeln!(report, "  {folder}/{from}:{line} {verb} {folder}/{to}");
        }
    }
}

/// Folders of sources: of the product, and of what tests it.
fn sources() -> Vec<String> {
    let product = folders().into_iter().map(|folder| format!("{folder}src"));
    let others = ["testkit/src", "benches/abuse", "benches/suite", "tour/src"].map(str::to_owned);
    product.chain(others).collect()
}

#[test]
fn no_circle_of_imports_exists_between_files() {
    let mut report = String::new();
    for folder in sources() {
        let edges = Tree::new(&source(&folder)).edges();
        for circle in circles(&edges) {
            let _ = writeln!(
                report,
                "{} files import each other in a circle; remove some of these imports (move the shared item to a file of its \
                 own, or pass it as an argument):",
                circle.len()
            );
            name_edges(&mut report, &folder, &edges, &circle, "imports");
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

#[test]
fn no_circle_of_calls_exists_between_the_files_of_a_type() {
    let mut report = String::new();
    for folder in sources() {
        for ((defined_in, name), edges) in Tree::new(&source(&folder)).calls_by_type() {
            for circle in circles(&edges) {
                let _ = writeln!(
                    report,
                    "methods of {name} ({folder}/{defined_in}) in {} files call each other in a circle; divide the type by its \
                     states, or put the methods into one file:",
                    circle.len()
                );
                name_edges(&mut report, &folder, &edges, &circle, "calls a method in");
            }
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

/// Fails if rows of `table` import each other in a circle. Returns the number of imports between them.
fn check_rows(table: &Table, edges: &Edges) -> usize {
    let row = |path: &String| table.row(path).map(|row| row.0.clone());
    let between: Edges = edges
        .iter()
        .filter_map(|((from, to), line)| Some(((row(from)?, row(to)?), *line)))
        .filter(|((from, to), _)| from != to)
        .collect();
    let circles = circles(&between);
    assert!(
        circles.is_empty(),
        "rows import each other in a circle: {circles:?}"
    );
    between.len()
}

#[test]
fn no_circle_of_imports_exists_between_rooms() {
    let rooms = rooms(&page());
    let found: usize = folders()
        .iter()
        .map(|folder| check_rows(&rooms, &edges(folder)))
        .sum();
    assert!(found > 20, "{found}");
}
