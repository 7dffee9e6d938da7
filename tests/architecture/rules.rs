//! Imports that the tables of docs/architecture.md allow, and circles.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::tree::Edges;

/// The rules of one table: rooms and what each may import.
pub(crate) struct Table {
    /// Files or folders (with `/`) of each row, relative to `src`, and the rows that it may import.
    rows: Vec<(String, Vec<String>, BTreeSet<String>)>,
    /// Rows that every other may import.
    shared: BTreeSet<String>,
}

impl Table {
    /// The row that `path` belongs to: the one with the longest matching file or folder.
    pub(crate) fn row(&self, path: &str) -> Option<&(String, Vec<String>, BTreeSet<String>)> {
        let matching =
            |place: &String| path == place || place.ends_with('/') && path.starts_with(place.as_str());
        self.rows
            .iter()
            .filter_map(|row| {
                let longest = row
                    .1
                    .iter()
                    .filter(|place| matching(place))
                    .map(String::len)
                    .max()?;
                Some((longest, row))
            })
            .max_by_key(|(length, _)| *length)
            .map(|(_, row)| row)
    }

    /// Offences of `edges`: files without a row, and imports that no row allows.
    pub(crate) fn offences(&self, edges: &Edges) -> Vec<String> {
        let mut found = Vec::new();
        for ((from, to), line) in edges {
            let text = match (self.row(from), self.row(to)) {
                (None, _) => format!("src/{from} is in no row of docs/architecture.md: add it to the table"),
                (_, None) => format!("src/{to} is in no row of docs/architecture.md: add it to the table"),
                (Some(a), Some(b)) if a.0 == b.0 || a.2.contains(&b.0) || self.shared.contains(&b.0) => {
                    continue;
                }
                (Some(a), Some(b)) => format!(
                    "src/{from}:{line} imports src/{to}, but {} may not import {}: move the item down, pass it as an \
                     argument, or change the table in docs/architecture.md",
                    a.0, b.0
                ),
            };
            found.push(text);
        }
        // A file without a row is named once.
        let mut seen = BTreeSet::new();
        found.retain(|text| seen.insert(text.clone()));
        found
    }
}

/// Sets of files that import each other in a circle (strongly connected components of more than one file).
pub(crate) fn circles(edges: &Edges) -> Vec<BTreeSet<String>> {
    let mut next: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in edges.keys() {
        next.entry(from).or_default().insert(to);
    }
    let reach = |start: &str| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![start.to_owned()]);
        while let Some(file) = left.pop() {
            for to in next.get(file.as_str()).into_iter().flatten() {
                if seen.insert((*to).to_owned()) {
                    left.push((*to).to_owned());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<String>> = next.keys().map(|file| (*file, reach(file))).collect();
    let mut found: BTreeSet<BTreeSet<String>> = BTreeSet::new();
    for (file, to) in &reached {
        if to.contains(*file) {
            let circle = to.iter().filter(|other| {
                reached
                    .get(other.as_str())
                    .is_some_and(|back| back.contains(*file))
            });
            found.insert(circle.cloned().collect());
        }
    }
    found.into_iter().collect()
}

/// The first table of `page` below the heading `## name`: rows of cells.
fn table(page: &str, name: &str) -> Vec<Vec<String>> {
    let start = page
        .find(&format!("\n## {name}\n"))
        .unwrap_or_else(|| panic!("docs/architecture.md has no section {name:?}"));
    page[start + 1..]
        .lines()
        .skip(1)
        .take_while(|line| !line.starts_with("## "))
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| {
            let cells = line.trim().trim_matches('|').split(" |");
            cells.map(|cell| cell.trim().to_owned()).collect()
        })
        .collect()
}

fn quoted(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The table of rooms: a room is a folder or a file in the `src` of a crate; "every room" in its first line names what all may import.
pub(crate) fn rooms(page: &str) -> Table {
    let mut rows = Vec::new();
    let mut shared = BTreeSet::new();
    for row in table(page, "Who may import whom") {
        let may = quoted(&row[1]).into_iter().collect::<BTreeSet<String>>();
        for room in quoted(&row[0]) {
            let places = vec![format!("{room}.rs"), format!("{room}/")];
            rows.push((room.clone(), places, may.clone()));
            if row[2].contains("every room may import it") {
                shared.insert(room);
            }
        }
    }
    Table { rows, shared }
}

/// The table of the layers in the folder of `room`: name, files and folders, layers below it.
pub(crate) fn layers(page: &str, room: &str) -> Table {
    let rows = table(page, &format!("Layers inside {room}"));
    let rows = rows.into_iter().map(|row| {
        let may = quoted(&row[2]).into_iter().collect();
        (quoted(&row[0])[0].clone(), quoted(&row[1]), may)
    });
    Table {
        rows: rows.collect(),
        shared: BTreeSet::new(),
    }
}

/// The table of crates: each with those of the workspace's own crates that it may depend on.
pub(crate) fn crates(page: &str) -> BTreeMap<String, BTreeSet<String>> {
    let rows = table(page, "Crates").into_iter();
    rows.map(|row| (quoted(&row[0])[0].clone(), quoted(&row[1]).into_iter().collect()))
        .collect()
}

/// Folders of the crates, relative to the repository: the package at the top is the empty one.
pub(crate) fn folders() -> Vec<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
    let mut folders = vec![String::new()];
    for entry in std::fs::read_dir(crates).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        folders.push(format!("crates/{name}/"));
    }
    folders
}

/// The workspace's own crates that the package in `folder` depends on, except for tests.
pub(crate) fn dependencies(folder: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(folder)
        .join("Cargo.toml");
    let manifest = std::fs::read_to_string(path).unwrap();
    let (_, section) = manifest.split_once("\n[dependencies]\n").unwrap();
    let section = section.split("\n[").next().unwrap();
    let names = section.lines().filter_map(|line| line.split(['.', ' ']).next());
    let own = names.filter(|name| {
        ["etcd-", "lean-", "rangecache-"]
            .iter()
            .any(|own| name.starts_with(own))
    });
    own.map(|name| name.trim_start_matches("rangecache-").to_owned())
        .collect()
}

/// Texts of the Rust files in `folder` of the repository, by path in it.
pub(crate) fn source(folder: &str) -> BTreeMap<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let (mut texts, mut left) = (BTreeMap::new(), vec![root.clone()]);
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                texts.insert(name, std::fs::read_to_string(path).unwrap());
            }
        }
    }
    texts
}

pub(crate) fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md");
    std::fs::read_to_string(path).unwrap()
}
