//! Imports follow the tables of docs/architecture.md, and no circle of imports exists between files, nor one of calls between
//! methods of one type that lie in several files.
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

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, Meta, UseTree};

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
    /// What `impl` blocks contain.
    impls: Vec<Impl>,
}

/// One `impl` block.
#[derive(Debug, Default)]
struct Impl {
    module: ModulePath,
    /// Path of the type.
    of: Vec<String>,
    /// Methods that it defines, unless it implements a trait.
    methods: BTreeSet<String>,
    /// Methods of the same type that it calls, each with the line.
    calls: Vec<(String, usize)>,
}

fn parse(text: &str, module: &[String]) -> File {
    let mut reader = Reader {
        file: File::default(),
        module: module.to_vec(),
        within: None,
    };
    reader.visit_file(&syn::parse_file(text).expect("a source file is Rust"));
    reader.file
}

/// Fills a [`File`] from its syntax tree.
struct Reader {
    file: File,
    /// The module that is being read: the file's own, or an inline one in it.
    module: ModulePath,
    /// The `impl` block that is being read.
    within: Option<Impl>,
}

/// Whether only tests compile what has `attributes`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else {
            return false;
        };
        let condition = list.tokens.to_string().replace(' ', "");
        list.path.is_ident("cfg")
            && (condition == "test" || condition.starts_with("all(test") || condition == "any(test,fuzzing)")
    })
}

/// Attributes of `item`, and the name that it defines.
fn header(item: &Item) -> (&[Attribute], Option<&syn::Ident>) {
    match item {
        Item::Const(item) => (&item.attrs, Some(&item.ident)),
        Item::Enum(item) => (&item.attrs, Some(&item.ident)),
        Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
        Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
        Item::Static(item) => (&item.attrs, Some(&item.ident)),
        Item::Struct(item) => (&item.attrs, Some(&item.ident)),
        Item::Trait(item) => (&item.attrs, Some(&item.ident)),
        Item::Type(item) => (&item.attrs, Some(&item.ident)),
        Item::Impl(item) => (&item.attrs, None),
        Item::Mod(item) => (&item.attrs, None),
        Item::Use(item) => (&item.attrs, None),
        _ => (&[], None),
    }
}

impl Reader {
    /// Reads the names that a use tree binds.
    fn read_use(&mut self, tree: &UseTree, prefix: &[String], line: usize) {
        let with = |name: &syn::Ident| [prefix, &[name.to_string()]].concat();
        let (name, path) = match tree {
            UseTree::Path(tree) => return self.read_use(&tree.tree, &with(&tree.ident), line),
            UseTree::Group(group) => {
                group
                    .items
                    .iter()
                    .for_each(|tree| self.read_use(tree, prefix, line));
                return;
            }
            // `a::{self}` is `a`.
            UseTree::Name(name) if name.ident == "self" => (prefix.last().unwrap().clone(), prefix.to_vec()),
            UseTree::Name(name) => (name.ident.to_string(), with(&name.ident)),
            UseTree::Rename(name) if name.ident == "self" => (name.rename.to_string(), prefix.to_vec()),
            UseTree::Rename(name) => (name.rename.to_string(), with(&name.ident)),
            UseTree::Glob(_) => ("*".to_owned(), prefix.to_vec()),
        };
        self.file.uses.push((name, self.module.clone(), path, line));
    }

    /// Reads the paths in `tokens`, which are not parsed: the arguments of a macro or of an attribute. With `in_literals`,
    /// also those in string literals (`#[serde(with = "super::seconds")]`).
    fn read_tokens(&mut self, tokens: TokenStream, in_literals: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is_punct = |at: usize, c: char| matches!(tokens.get(at), Some(TokenTree::Punct(found)) if found.as_char() == c);
        let is_separator = |at: usize| is_punct(at, ':') && is_punct(at + 1, ':');
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Group(group) => self.read_tokens(group.stream(), in_literals),
                TokenTree::Literal(literal) if in_literals => {
                    if let Ok(path) = syn::parse_str::<syn::LitStr>(&literal.to_string())
                        && let Ok(path) = path.parse::<syn::Path>()
                    {
                        let segments = path.segments.iter().map(|segment| segment.ident.to_string());
                        self.add_path(segments.collect(), literal.span().start().line);
                    }
                }
                TokenTree::Ident(first) => {
                    let line = first.span().start().line;
                    let mut segments = vec![first.to_string()];
                    while is_separator(at)
                        && let Some(TokenTree::Ident(next)) = tokens.get(at + 2)
                    {
                        segments.push(next.to_string());
                        at += 3;
                    }
                    self.add_path(segments, line);
                }
                _ => {}
            }
        }
    }

    /// Reads an `impl` block, whose methods may call those of the type in other files.
    fn read_impl(&mut self, block: &syn::ItemImpl) {
        if let syn::Type::Path(of) = &*block.self_ty {
            let segments = of.path.segments.iter().map(|segment| segment.ident.to_string());
            let methods = block.items.iter().filter_map(|item| match item {
                ImplItem::Fn(method) if !is_for_tests(&method.attrs) => Some(method.sig.ident.to_string()),
                _ => None,
            });
            self.within = Some(Impl {
                module: self.module.clone(),
                of: segments.collect(),
                methods: methods.filter(|_| block.trait_.is_none()).collect(),
                calls: Vec::new(),
            });
        }
        visit::visit_item_impl(self, block);
        self.file.impls.extend(self.within.take());
    }

    fn add_call(&mut self, method: String, line: usize) {
        if let Some(within) = &mut self.within {
            within.calls.push((method, line));
        }
    }

    fn add_path(&mut self, segments: Vec<String>, line: usize) {
        if segments.len() > 1 {
            self.file.paths.push((self.module.clone(), segments, line));
        }
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = header(item);
        match item {
            Item::Mod(module) if is_for_tests(attributes) => {
                if module.content.is_none() {
                    self.file.test_modules.insert(module.ident.to_string());
                }
            }
            _ if is_for_tests(attributes) => {}
            Item::Mod(module) if module.content.is_some() => {
                self.module.push(module.ident.to_string());
                visit::visit_item(self, item);
                self.module.pop();
            }
            Item::Use(used) => self.read_use(&used.tree, &[], used.span().start().line),
            Item::Impl(block) => self.read_impl(block),
            _ => {
                self.file.defined.extend(name.map(ToString::to_string));
                visit::visit_item(self, item);
            }
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !is_for_tests(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let is_own = matches!(&*call.receiver, syn::Expr::Path(receiver) if receiver.path.is_ident("self"));
        if is_own {
            self.add_call(call.method.to_string(), call.method.span().start().line);
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter().map(|segment| segment.ident.to_string());
        let (segments, line) = (segments.collect::<Vec<_>>(), path.span().start().line);
        if let [first, method] = &segments[..]
            && first == "Self"
        {
            self.add_call(method.clone(), line);
        }
        self.add_path(segments, line);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.visit_path(&called.path);
        self.read_tokens(called.tokens.clone(), false);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.read_tokens(list.tokens.clone(), true);
        }
    }
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
            let child = [current.as_slice(), std::slice::from_ref(name)].concat();
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
                    "*" => [target.as_slice(), std::slice::from_ref(name)].concat(),
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

    /// The type that `segments`, written in `module`, name: the file that defines it, and its name.
    fn type_of(&self, module: &[String], segments: &[String]) -> Option<(String, String)> {
        let name = segments.last()?.clone();
        let (path, file) = self.file(module)?;
        if segments.len() == 1 && file.defined.contains(&name) {
            return Some((path.clone(), name));
        }
        let bound = file.uses.iter().find(|(bound, ..)| *bound == segments[0]);
        let (at, full) = match bound {
            Some((_, at, full, _)) => (at.as_slice(), [full.as_slice(), &segments[1..]].concat()),
            None => (module, segments.to_vec()),
        };
        match self.resolve(at, &full, 0)? {
            Target::Item(path) => Some((path, full.last()?.clone())),
            Target::Module(_) => None,
        }
    }

    /// Calls of methods between the files of each type whose methods lie in several files.
    fn calls_by_type(&self) -> BTreeMap<(String, String), Edges> {
        let mut impls: BTreeMap<(String, String), Vec<(&String, &Impl)>> = BTreeMap::new();
        for (path, file) in self.files.values() {
            for block in &file.impls {
                if let Some(of) = self.type_of(&block.module, &block.of) {
                    impls.entry(of).or_default().push((path, block));
                }
            }
        }
        let calls = impls.into_iter().map(|(of, blocks)| {
            let methods = blocks
                .iter()
                .flat_map(|(path, block)| block.methods.iter().map(|method| (method, *path)));
            let methods: BTreeMap<&String, &String> = methods.collect();
            let mut edges = Edges::new();
            for (path, block) in &blocks {
                for (method, line) in &block.calls {
                    if let Some(to) = methods.get(method).filter(|to| *to != path) {
                        edges.entry(((*path).clone(), (*to).clone())).or_insert(*line);
                    }
                }
            }
            (of, edges)
        });
        calls.filter(|(_, edges)| !edges.is_empty()).collect()
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
    fn offences(&self, edges: &Edges, within: &str) -> Vec<String> {
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
            found.push(text);
        }
        // A file without a row is named once.
        let mut seen = BTreeSet::new();
        found.retain(|text| seen.insert(text.clone()));
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

/// Texts of the Rust files in `folder` of the repository, by path in it.
fn source(folder: &str) -> BTreeMap<String, String> {
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

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md");
    std::fs::read_to_string(path).unwrap()
}

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
fn imports_inside_proxy_point_from_route_down_to_response() {
    let edges = Tree::new(&source("src")).edges();
    check_imports(&layers(&page()).offences(&edges, "proxy/"));
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

#[test]
fn no_circle_of_imports_exists_between_rooms() {
    let rooms = rooms(&page());
    let rows = |path: &String| rooms.row(path).map(|row| row.0.clone());
    let between_rooms: Edges = Tree::new(&source("src"))
        .edges()
        .into_iter()
        .filter_map(|((from, to), line)| Some(((rows(&from)?, rows(&to)?), line)))
        .filter(|((from, to), _)| from != to)
        .collect();
    assert!(between_rooms.len() > 30, "{between_rooms:?}");
    let circles = circles(&between_rooms);
    assert!(
        circles.is_empty(),
        "rooms import each other in a circle: {circles:?}"
    );
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
    fn methods_of_one_type_in_several_files_are_followed() {
        let texts = [
            (
                "a.rs",
                "mod one; mod two; pub struct A; impl A { fn start(&self) { self.next(); Self::last() } fn close(&self) {} }",
            ),
            (
                "a/one.rs",
                "use super::A; impl A { fn next(&self) { self.field.close(); } }",
            ),
            (
                "a/two.rs",
                "impl super::A { fn last() {} }\nimpl Drop for super::A { fn drop(&mut self) {\nself.close() } }",
            ),
            ("b.rs", "struct A; impl A { fn next(&self) { self.close() } }"),
        ];
        let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned()));
        let calls = Tree::new(&BTreeMap::from(texts)).calls_by_type();
        let found: Vec<_> = calls
            .iter()
            .flat_map(|((file, name), edges)| {
                let calls = edges.iter();
                calls.map(move |((from, to), line)| format!("{file} {name}: {from}:{line} {to}"))
            })
            .collect();
        let expected = [
            "a.rs A: a.rs:1 a/one.rs",
            "a.rs A: a.rs:1 a/two.rs",
            "a.rs A: a/two.rs:3 a.rs",
        ];
        assert_eq!(found, expected);
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
                "#[cfg(test)]\nuse crate::b::One;\n#[cfg(test)]\nmod tests;\n#[cfg(any(test, fuzzing))]\nmod inline { use crate::b::One; }\n\
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
        assert!(found[0].starts_with("src/low/b.rs:3 imports src/high/a.rs, but low may not import high"));
        assert!(found[1].contains("src/new.rs is in no row"));
    }
}
