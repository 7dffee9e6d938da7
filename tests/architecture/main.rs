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

use rules::{Table, circles, layers, page, rooms, source};
use tree::{Edges, Tree};

/// Fails with every offence.
fn check_imports(offences: &[String]) {
    assert!(offences.is_empty(), "\n{}", offences.join("\n"));
}

#[test]
fn imports_between_rooms_are_those_that_the_architecture_page_allows() {
    let edges = Tree::new(&source("src")).edges();
    assert!(edges.len() > 200, "only {} imports were found", edges.len());
    check_imports(&rooms(&page()).offences(&edges, ""));
}

#[test]
fn imports_inside_a_room_point_to_the_layers_below() {
    let (edges, page) = (Tree::new(&source("src")).edges(), page());
    for room in ["proxy", "mirror"] {
        let layers = layers(&page, room);
        check_imports(&layers.offences(&edges, &format!("{room}/")));
        check_rows(&layers, &edges);
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

/// Fails if files of `folder` import each other in a circle.
fn check_circles(folder: &str) {
    let edges = Tree::new(&source(folder)).edges();
    let mut report = String::new();
    for circle in circles(&edges) {
        let _ = writeln!(
            report,
            "{} files import each other in a circle; remove some of these imports (move the shared item to a file of its own, \
             or pass it as an argument):",
            circle.len()
        );
        name_edges(&mut report, folder, &edges, &circle, "imports");
    }
    assert!(report.is_empty(), "\n{report}");
}

#[test]
fn no_circle_of_imports_exists_between_files() {
    check_circles("src");
    check_circles("testkit/src");
    check_circles("benches/abuse");
    check_circles("benches/suite");
    check_circles("tour/src");
}

#[test]
fn no_circle_of_calls_exists_between_the_files_of_a_type() {
    let mut report = String::new();
    for ((defined_in, name), edges) in Tree::new(&source("src")).calls_by_type() {
        for circle in circles(&edges) {
            let _ = writeln!(
                report,
                "methods of {name} (src/{defined_in}) in {} files call each other in a circle; divide the type by its states, or \
                 put the methods into one file:",
                circle.len()
            );
            name_edges(&mut report, "src", &edges, &circle, "calls a method in");
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
    let found = check_rows(&rooms(&page()), &Tree::new(&source("src")).edges());
    assert!(found > 30, "{found}");
}
