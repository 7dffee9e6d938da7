//! Imports follow the tables of docs/architecture.md, and no circle of imports exists between files.
//!
//! Reads the source text: every `use`, and every inline path that starts with `crate`, `super`, `self`, a child module or an
//! imported module. Re-exports are resolved to the file that defines the item; code under `#[cfg(test)]` is left out. A
//! `use` of a whole module counts where one of its items is named, not at the `use`.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "so a test fails"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

/// Imports that the tables do not allow yet: (importing file, imported file). Empty once the tree is in order.
const IMPORT_EXCEPTIONS: &[(&str, &str)] = &[];
/// Files that are in a circle as yet. Empty once the tree is in order.
const CIRCLE_EXCEPTIONS: &[&str] = &[];

// --- tokens -----------------------------------------------------------------------------------------------------------

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    /// `::` is one token; every other punctuation is one character.
    PathSeparator,
    Punct(char),
}

/// The tokens of `text` with their line numbers. Comments and literals are dropped, except string literals that are a path
/// (`#[serde(with = "super::seconds")]`).
fn tokens(text: &str) -> Vec<(Token, usize)> {
    let chars: Vec<char> = text.chars().collect();
    let (mut found, mut at, mut line) = (Vec::new(), 0, 1);
    let peek = |at: usize| chars.get(at).copied().unwrap_or('\0');
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    while at < chars.len() {
        let c = chars[at];
        if c == '\n' {
            line += 1;
            at += 1;
        } else if c == '/' && peek(at + 1) == '/' {
            while at < chars.len() && chars[at] != '\n' {
                at += 1;
            }
        } else if c == '/' && peek(at + 1) == '*' {
            let mut depth = 0;
            while at < chars.len() {
                match (chars[at], peek(at + 1)) {
                    ('/', '*') => (depth, at) = (depth + 1, at + 1),
                    ('*', '/') => (depth, at) = (depth - 1, at + 1),
                    ('\n', _) => line += 1,
                    _ => {}
                }
                at += 1;
                if depth == 0 {
                    break;
                }
            }
        } else if let Some(hashes) = raw_string_hashes(&chars[at..]) {
            let close: String = std::iter::once('"')
                .chain(std::iter::repeat_n('#', hashes))
                .collect();
            let open = at + chars[at..].iter().position(|c| *c == '"').unwrap();
            let rest: String = chars[open + 1..].iter().collect();
            let body = &rest[..rest.find(&close).unwrap()];
            line += body.matches('\n').count();
            at = open + 1 + body.chars().count() + close.len();
        } else if c == '"' {
            let start = at + 1;
            at = start;
            while at < chars.len() && chars[at] != '"' {
                if chars[at] == '\\' {
                    at += 1;
                }
                if peek(at) == '\n' {
                    line += 1;
                }
                at += 1;
            }
            let body: String = chars[start..at.min(chars.len())].iter().collect();
            let is_path = ["crate::", "super::", "self::"]
                .iter()
                .any(|start| body.starts_with(start));
            if is_path && body.chars().all(|c| is_word(c) || c == ':') {
                found.extend(tokens(&body).into_iter().map(|(token, _)| (token, line)));
                // So that it cannot run into what follows.
                found.push((Token::Punct('"'), line));
            }
            at += 1;
        } else if c == '\'' {
            // A lifetime has no closing quote behind one character.
            if peek(at + 1) == '\\' {
                at += 3;
                while at < chars.len() && chars[at] != '\'' {
                    at += 1;
                }
                at += 1;
            } else if peek(at + 2) == '\'' {
                at += 3;
            } else {
                at += 1;
                while is_word(peek(at)) {
                    at += 1;
                }
            }
        } else if is_word(c) {
            let start = at;
            while is_word(peek(at)) {
                at += 1;
            }
            found.push((Token::Word(chars[start..at].iter().collect()), line));
        } else if c == ':' && peek(at + 1) == ':' {
            found.push((Token::PathSeparator, line));
            at += 2;
        } else {
            if !c.is_whitespace() {
                found.push((Token::Punct(c), line));
            }
            at += 1;
        }
    }
    found
}

/// The number of `#` of the raw string literal that `chars` starts with, if it starts with one.
fn raw_string_hashes(chars: &[char]) -> Option<usize> {
    let prefix = chars.iter().take_while(|c| matches!(c, 'b' | 'c' | 'r')).count();
    let is_raw = prefix > 0 && prefix <= 2 && chars[prefix - 1] == 'r';
    let hashes = chars[prefix..].iter().take_while(|c| **c == '#').count();
    (is_raw && chars.get(prefix + hashes) == Some(&'"')).then_some(hashes)
}

/// `tokens` without the items that are compiled for tests only, and the names of the modules declared among those.
fn without_tests(tokens: Vec<(Token, usize)>) -> (Vec<(Token, usize)>, BTreeSet<String>) {
    let text = |at: usize| match tokens.get(at) {
        Some((Token::Word(word), _)) => word.clone(),
        Some((Token::PathSeparator, _)) => "::".to_owned(),
        Some((Token::Punct(c), _)) => c.to_string(),
        None => String::new(),
    };
    let matches = |at: usize, wanted: &[&str]| (0..wanted.len()).all(|i| text(at + i) == wanted[i]);
    let (mut kept, mut test_modules, mut at) = (Vec::new(), BTreeSet::new(), 0);
    while at < tokens.len() {
        if !matches(at, &["#", "[", "cfg", "(", "test", ")", "]"])
            && !matches(at, &["#", "[", "cfg", "(", "all", "(", "test"])
        {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        at = after_group(&tokens, at + 1);
        while text(at) == "#" {
            at = after_group(&tokens, at + 1);
        }
        // To the end of the item: a semicolon, or a block, outside parentheses.
        if text(at) == "pub" {
            at += 1;
            if text(at) == "(" {
                at = after_group(&tokens, at);
            }
        }
        let ends_with_semicolon = matches!(text(at).as_str(), "use" | "let" | "const" | "static" | "type");
        loop {
            match text(at).as_str() {
                "mod" if text(at + 2) == ";" => {
                    test_modules.insert(text(at + 1));
                    at += 1;
                }
                ";" => {
                    at += 1;
                    break;
                }
                "{" => {
                    at = after_group(&tokens, at);
                    if !ends_with_semicolon {
                        break;
                    }
                }
                "(" | "[" => at = after_group(&tokens, at),
                // The end of the block around a last expression.
                "}" | "" => break,
                _ => at += 1,
            }
        }
    }
    (kept, test_modules)
}

/// The position behind the bracket that closes the one at `at`.
fn after_group(tokens: &[(Token, usize)], mut at: usize) -> usize {
    let mut depth = 0;
    while let Some((token, _)) = tokens.get(at) {
        at += 1;
        match token {
            Token::Punct('(' | '[' | '{') => depth += 1,
            Token::Punct(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    at
}

// --- one file ---------------------------------------------------------------------------------------------------------

type ModulePath = Vec<String>;

#[derive(Debug, Default)]
struct File {
    /// Paths that name something of this crate: the module that they stand in, the segments, the line.
    paths: Vec<(ModulePath, Vec<String>, usize)>,
    /// Names that `use` binds: the bound name, the module, the segments, the line; `*` for a glob.
    uses: Vec<(String, ModulePath, Vec<String>, usize)>,
    /// Names of items that the file defines.
    defined: BTreeSet<String>,
    /// Modules that only tests compile.
    test_modules: BTreeSet<String>,
}

fn parse(text: &str, module: &[String]) -> File {
    let (tokens, test_modules) = without_tests(tokens(text));
    let mut file = File {
        test_modules,
        ..File::default()
    };
    let word = |at: usize| match tokens.get(at) {
        Some((Token::Word(word), _)) => Some(word.as_str()),
        _ => None,
    };
    let is = |at: usize, c: char| matches!(tokens.get(at), Some((Token::Punct(found), _)) if *found == c);
    let is_separator = |at: usize| matches!(tokens.get(at), Some((Token::PathSeparator, _)));
    let mut module = module.to_vec();
    // Depths of braces at which inline modules end.
    let (mut inline, mut depth, mut at) = (Vec::new(), 0, 0);
    while at < tokens.len() {
        let line = tokens[at].1;
        match (&tokens[at].0, word(at + 1)) {
            (Token::Punct('{'), _) => depth += 1,
            (Token::Punct('}'), _) => {
                depth -= 1;
                if inline.last() == Some(&depth) {
                    inline.pop();
                    module.pop();
                }
            }
            (Token::Word(keyword), Some(name)) if keyword == "mod" && is(at + 2, '{') => {
                inline.push(depth);
                module.push(name.to_owned());
                depth += 1;
                at += 2;
            }
            (Token::Word(keyword), _) if keyword == "use" && !is(at + 1, '<') => {
                let mut found = Vec::new();
                at = use_tree(&tokens, at + 1, &mut Vec::new(), &mut found);
                for (name, segments) in found {
                    file.uses.push((name, module.clone(), segments, line));
                }
                continue;
            }
            (Token::Word(keyword), Some(name))
                if matches!(
                    keyword.as_str(),
                    "struct" | "enum" | "union" | "trait" | "fn" | "type" | "const" | "static"
                ) =>
            {
                file.defined.insert(name.to_owned());
            }
            (Token::Word(keyword), _) if keyword == "macro_rules" && is(at + 1, '!') => {
                file.defined.extend(word(at + 2).map(str::to_owned));
            }
            (Token::Word(first), _)
                if is_separator(at + 1) && (at == 0 || !is_separator(at - 1) && !is(at - 1, '.')) =>
            {
                let mut segments = vec![first.clone()];
                let mut end = at + 1;
                while let (true, Some(next)) = (is_separator(end), word(end + 1)) {
                    segments.push(next.to_owned());
                    end += 2;
                }
                file.paths.push((module.clone(), segments, line));
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    file
}

/// Reads a use tree from `at` on; returns the position behind it.
fn use_tree(
    tokens: &[(Token, usize)],
    mut at: usize,
    prefix: &mut Vec<String>,
    found: &mut Vec<(String, Vec<String>)>,
) -> usize {
    let length = prefix.len();
    let mut name = None;
    while let Some((token, _)) = tokens.get(at) {
        match token {
            Token::Word(word) if word == "as" => {
                at += 1;
                if let Some((Token::Word(alias), _)) = tokens.get(at) {
                    name = Some(alias.clone());
                }
            }
            // `a::{self}` is `a`.
            Token::Word(word) if word == "self" && !prefix.is_empty() => name = prefix.last().cloned(),
            Token::Word(word) => {
                prefix.push(word.clone());
                name = Some(word.clone());
            }
            Token::PathSeparator => {}
            Token::Punct('*') => name = Some("*".to_owned()),
            Token::Punct('{') => {
                at += 1;
                while !matches!(tokens.get(at), Some((Token::Punct('}'), _)) | None) {
                    at = use_tree(tokens, at, prefix, found);
                    if matches!(tokens.get(at), Some((Token::Punct(','), _))) {
                        at += 1;
                    }
                }
                name = None;
            }
            _ => break,
        }
        at += 1;
    }
    if let Some(name) = name {
        found.push((name, prefix.clone()));
    }
    prefix.truncate(length);
    at
}

// --- the tree ---------------------------------------------------------------------------------------------------------

/// One import: who imports, in which line, what file.
type Edges = BTreeMap<(String, String), usize>;

struct Tree {
    /// Files by module path; `main` stands under its own name, as a crate of its own.
    files: BTreeMap<ModulePath, (String, File)>,
}

/// What a path leads to.
enum Target {
    Module(ModulePath),
    /// An item, and the file that defines it.
    Item(String),
}

impl Tree {
    /// A tree of source texts by path, relative to `src`.
    fn new(texts: &BTreeMap<String, String>) -> Tree {
        let mut files = BTreeMap::new();
        for (path, text) in texts {
            let stem = path.trim_end_matches(".rs").trim_end_matches("/mod");
            let module: ModulePath = match stem {
                "lib" | "mod" => Vec::new(),
                stem => stem.split('/').map(str::to_owned).collect(),
            };
            let file = parse(text, &module);
            files.insert(module, (path.clone(), file));
        }
        let tests: Vec<ModulePath> = files
            .iter()
            .flat_map(|(module, (_, file))| {
                let child = |name: &String| [module.clone(), vec![name.clone()]].concat();
                file.test_modules.iter().map(child).collect::<Vec<_>>()
            })
            .collect();
        files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        Tree { files }
    }

    /// The nearest file around `module`, which may be an inline one.
    fn file(&self, module: &[String]) -> Option<&(String, File)> {
        (0..=module.len())
            .rev()
            .find_map(|length| self.files.get(&module[..length]))
    }

    /// What `segments`, written in `module`, lead to; `None` for what is not of this crate.
    fn resolve(&self, module: &[String], segments: &[String], depth: usize) -> Option<Target> {
        if depth > 20 {
            return None;
        }
        let (first, mut rest) = segments.split_first()?;
        let mut current = match first.as_str() {
            "crate" | "rangecache" => Vec::new(),
            "self" => module.to_vec(),
            "super" => {
                let mut current = module.to_vec();
                current.pop();
                while let Some(("super", next)) = rest.split_first().map(|(a, b)| (a.as_str(), b)) {
                    current.pop();
                    rest = next;
                }
                current
            }
            name => {
                let child = [module, &[name.to_owned()]].concat();
                if self.files.contains_key(&child) {
                    child
                } else {
                    // A module that a `use` of this file binds.
                    let (_, file) = self.file(module)?;
                    let bound = file.uses.iter().find(|(bound, _, path, _)| {
                        bound == name && path.first().is_some_and(|first| first != name)
                    })?;
                    match self.resolve(&bound.1, &bound.2, depth + 1)? {
                        Target::Module(found) => found,
                        Target::Item(_) => return None,
                    }
                }
            }
        };
        while let Some((name, next)) = rest.split_first() {
            let child = [current.as_slice(), &[name.clone()]].concat();
            if self.files.contains_key(&child) {
                current = child;
                rest = next;
                continue;
            }
            let (path, file) = self.files.get(&current)?;
            if file.defined.contains(name) {
                return Some(Target::Item(path.clone()));
            }
            // A re-export, or an import of the parent's that its children use.
            for (bound, at, target, _) in &file.uses {
                let target = match bound.as_str() {
                    bound if bound == name => target.clone(),
                    "*" => [target.as_slice(), &[name.clone()]].concat(),
                    _ => continue,
                };
                match self.resolve(at, &target, depth + 1) {
                    Some(Target::Item(path)) if bound != "*" || self.defines(&path, name) => {
                        return Some(Target::Item(path));
                    }
                    Some(Target::Module(found)) if bound != "*" => {
                        let path = [vec!["crate".to_owned()], found, next.to_vec()].concat();
                        return self.resolve(&[], &path, depth + 1);
                    }
                    _ => {}
                }
            }
            return Some(Target::Item(path.clone()));
        }
        Some(Target::Module(current))
    }

    fn defines(&self, path: &str, name: &str) -> bool {
        self.files
            .values()
            .any(|(found, file)| found == path && file.defined.contains(name))
    }

    /// Every import of one file by another, with the first line that makes it.
    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (path, file) in self.files.values() {
            let mut add = |target: String, line: usize| {
                if target != *path && target != "lib.rs" {
                    let first = edges.entry((path.clone(), target)).or_insert(line);
                    *first = line.min(*first);
                }
            };
            for (name, module, segments, line) in &file.uses {
                match self.resolve(module, segments, 0) {
                    Some(Target::Item(target)) => add(target, *line),
                    Some(Target::Module(found)) if name == "*" => {
                        if let Some((target, _)) = self.file(&found) {
                            add(target.clone(), *line);
                        }
                    }
                    _ => {}
                }
            }
            for (module, segments, line) in &file.paths {
                if let Some(Target::Item(target)) = self.resolve(module, segments, 0) {
                    add(target, *line);
                }
            }
        }
        edges
    }
}

// --- the rules --------------------------------------------------------------------------------------------------------

/// The rules of one table: rooms and what each may import.
struct Table {
    /// Files or folders (with `/`) of each row, relative to `src`, and the rows that it may import.
    rows: Vec<(String, Vec<String>, BTreeSet<String>)>,
    /// Rows that every other may import.
    shared: BTreeSet<String>,
}

impl Table {
    /// The row that `path` belongs to: the one with the longest matching file or folder.
    fn row(&self, path: &str) -> Option<&(String, Vec<String>, BTreeSet<String>)> {
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

    /// What is wrong with `edges`: files without a row, and imports that no row allows. Files outside `within` are skipped.
    fn offences(&self, edges: &Edges, within: &str) -> Vec<((String, String), String)> {
        let mut found = Vec::new();
        for ((from, to), line) in edges {
            if !from.starts_with(within) || !to.starts_with(within) {
                continue;
            }
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
            found.push(((from.clone(), to.clone()), text));
        }
        // A file without a row is named once.
        let mut seen = BTreeSet::new();
        found.retain(|(_, text)| seen.insert(text.clone()));
        found
    }
}

/// Sets of files that import each other in a circle (strongly connected components of more than one file).
fn circles(edges: &Edges) -> Vec<BTreeSet<String>> {
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

// --- the document -----------------------------------------------------------------------------------------------------

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

/// The table of rooms: a room is a folder or a file of `src`; "every room" in its first line names what all may import.
fn rooms(page: &str) -> Table {
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

/// The table of the layers in `proxy/`: name, files and folders, layers below it.
fn layers(page: &str) -> Table {
    let rows = table(page, "Layers inside proxy").into_iter().map(|row| {
        let may = quoted(&row[2]).into_iter().collect();
        (quoted(&row[0])[0].clone(), quoted(&row[1]), may)
    });
    Table {
        rows: rows.collect(),
        shared: BTreeSet::new(),
    }
}

fn source() -> BTreeMap<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
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

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md");
    std::fs::read_to_string(path).unwrap()
}

/// Fails with every offence that is no exception, and with every exception that is none any longer.
fn check_imports(offences: &[((String, String), String)], within: &str) {
    let mut report = String::new();
    let is_exception =
        |(from, to): &(String, String)| IMPORT_EXCEPTIONS.contains(&(from.as_str(), to.as_str()));
    for (edge, text) in offences {
        if !is_exception(edge) {
            let _ = writeln!(report, "{text}");
        }
    }
    for (from, to) in IMPORT_EXCEPTIONS {
        let is_needed = offences.iter().any(|((a, b), _)| a == from && b == to);
        if !is_needed && from.starts_with(within) && to.starts_with(within) == !within.is_empty() {
            let _ = writeln!(
                report,
                "remove the exception {from} -> {to}: it is no longer needed"
            );
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

#[test]
fn imports_between_rooms_are_those_that_the_architecture_page_allows() {
    let edges = Tree::new(&source()).edges();
    assert!(edges.len() > 200, "only {} imports were found", edges.len());
    check_imports(&rooms(&page()).offences(&edges, ""), "");
}

#[test]
fn imports_inside_proxy_point_from_route_down_to_response() {
    let edges = Tree::new(&source()).edges();
    check_imports(&layers(&page()).offences(&edges, "proxy/"), "proxy/");
}

#[test]
fn no_circle_of_imports_exists_between_files() {
    let edges = Tree::new(&source()).edges();
    let circles = circles(&edges);
    let mut report = String::new();
    for circle in &circles {
        if circle
            .iter()
            .all(|file| CIRCLE_EXCEPTIONS.contains(&file.as_str()))
        {
            continue;
        }
        let _ = writeln!(
            report,
            "{} files import each other in a circle; remove some of these imports (move the shared item to a file of its own, \
             or pass it as an argument):",
            circle.len()
        );
        for ((from, to), line) in &edges {
            if circle.contains(from) && circle.contains(to) {
                let _ = writeln!(report, "  src/{from}:{line} imports src/{to}");
            }
        }
    }
    for file in CIRCLE_EXCEPTIONS {
        if !circles.iter().any(|circle| circle.contains(*file)) {
            let _ = writeln!(report, "remove the exception {file}: it is in no circle any more");
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

// --- tests of the reader ----------------------------------------------------------------------------------------------

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(texts: &[(&str, &str)]) -> Vec<String> {
        let texts = texts
            .iter()
            .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
            .collect();
        let edges = Tree::new(&texts).edges();
        edges
            .iter()
            .map(|((from, to), line)| format!("{from}:{line} {to}"))
            .collect()
    }

    #[test]
    fn a_circle_is_found_and_a_chain_is_none() {
        let edge = |from: &str, to: &str| ((from.to_owned(), to.to_owned()), 1);
        let chain = Edges::from([edge("a", "b"), edge("b", "c"), edge("a", "c")]);
        assert!(circles(&chain).is_empty());
        let mut circle = chain.clone();
        circle.extend([edge("c", "a"), edge("d", "a")]);
        let expected = BTreeSet::from(["a", "b", "c"].map(str::to_owned));
        assert_eq!(circles(&circle), [expected]);
    }

    #[test]
    fn grouped_uses_are_read_one_by_one() {
        let found = edges(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            (
                "a.rs",
                "\nuse crate::{b::One, c::{self, deep::{Two, Three as Four}}};",
            ),
            ("b.rs", "pub struct One;"),
            ("c/mod.rs", "mod deep;"),
            ("c/deep.rs", "pub struct Two; pub struct Three;"),
        ]);
        assert_eq!(found, ["a.rs:2 b.rs", "a.rs:2 c/deep.rs"]);
    }

    #[test]
    fn re_exports_lead_to_the_file_that_defines_the_item() {
        let found = edges(&[
            ("a.rs", "use crate::room::{Named, Globbed, Renamed};"),
            (
                "room/mod.rs",
                "mod one; mod two; pub use one::Named; pub use two::*; pub use one::Old as Renamed;",
            ),
            ("room/one.rs", "pub struct Named; pub struct Old;"),
            ("room/two.rs", "pub struct Globbed;"),
        ]);
        let expected = [
            "a.rs:1 room/one.rs",
            "a.rs:1 room/two.rs",
            "room/mod.rs:1 room/one.rs",
            "room/mod.rs:1 room/two.rs",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn items_of_a_mod_file_count_against_it() {
        let found = edges(&[
            ("room/mod.rs", "mod child; pub struct Shared;"),
            ("room/child.rs", "use super::Shared;"),
        ]);
        assert_eq!(found, ["room/child.rs:1 room/mod.rs"]);
    }

    #[test]
    fn inline_paths_and_imported_modules_count_where_an_item_is_named() {
        let found = edges(&[
            (
                "a.rs",
                "use crate::b;\nuse crate::unused;\nfn f() {\n  b::g();\n  super::c::h()\n}",
            ),
            ("b.rs", "pub fn g() {}"),
            ("c.rs", "pub fn h() {}"),
            ("unused.rs", ""),
        ]);
        assert_eq!(found, ["a.rs:4 b.rs", "a.rs:5 c.rs"]);
    }

    #[test]
    fn code_for_tests_is_ignored() {
        let found = edges(&[
            (
                "a.rs",
                "#[cfg(test)]\nuse crate::b::One;\n#[cfg(test)]\nmod tests;\n#[cfg(test)]\nmod inline { use crate::b::One; }\n\
                 #[cfg(test)]\nfn f() { crate::b::g() }\nuse crate::c::Two;",
            ),
            ("a/tests.rs", "use crate::b::One;"),
            ("b.rs", "pub struct One;"),
            ("c.rs", "pub struct Two;"),
        ]);
        assert_eq!(found, ["a.rs:9 c.rs"]);
    }

    #[test]
    fn comments_and_literals_are_ignored_and_paths_in_attributes_are_read() {
        let found = edges(&[
            (
                "a.rs",
                "// crate::b::One\n/* crate::b::One /* */ */ const A: &str = \"use crate::b::One;\";\n\
                 const B: &str = r#\"crate::b::One \" \"#; const C: char = '\"';\nfn f<'a>() {}\n\
                 #[serde(serialize_with = \"crate::c::write\")]\nstruct D;",
            ),
            ("b.rs", "pub struct One;"),
            ("c.rs", "pub fn write() {}"),
        ]);
        assert_eq!(found, ["a.rs:5 c.rs"]);
    }

    #[test]
    fn an_import_that_the_table_does_not_allow_is_named_with_its_line() {
        let page = "\n## Who may import whom\n\n| room | may import | for |\n|---|---|---|\n| `high` | `low` | |\n| `low` | | |\n\
                    | `base` | | every room may import it |\n\n## Next\n";
        let edge = |from: &str, to: &str, line| ((from.to_owned(), to.to_owned()), line);
        let edges = Edges::from([
            edge("high/a.rs", "low/b.rs", 1),
            edge("low/b.rs", "base.rs", 2),
            edge("low/b.rs", "high/a.rs", 3),
            edge("low/b.rs", "new.rs", 4),
        ]);
        let found = rooms(page).offences(&edges, "");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0]
                .1
                .starts_with("src/low/b.rs:3 imports src/high/a.rs, but low may not import high")
        );
        assert!(found[1].1.contains("src/new.rs is in no row"));
    }
}
