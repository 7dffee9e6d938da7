//! All files of a folder, and who imports or calls whom. Re-exports are resolved to the file that defines the item; a `use` of
//! a whole module counts where one of its items is named, not at the `use`.

use std::collections::{BTreeMap, BTreeSet};

use crate::file::{File, Impl, ModulePath, parse};

/// Imports: importing file and imported file, with the line.
pub(crate) type Edges = BTreeMap<(String, String), usize>;

pub(crate) struct Tree {
    /// Files by module path; `main` stands under its own name, as a crate of its own.
    files: BTreeMap<ModulePath, (String, File)>,
}

/// Module or item to which a path leads.
enum Target {
    Module(ModulePath),
    /// An item, and the file that defines it.
    Item(String),
}

impl Tree {
    /// A tree of source texts by path, relative to `src`.
    pub(crate) fn new(texts: &BTreeMap<String, String>) -> Tree {
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

    /// Target of `segments`, written in `module`; `None` if it is not of this crate.
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
    pub(crate) fn calls_by_type(&self) -> BTreeMap<(String, String), Edges> {
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
    pub(crate) fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (path, file) in self.files.values() {
            let mut add = |target: String, line: usize| {
                if target != *path {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{circles, rooms};

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
        let found = rooms(page).offences(&edges);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("src/low/b.rs:3 imports src/high/a.rs, but low may not import high"));
        assert!(found[1].contains("src/new.rs is in no row"));
    }
}
