//! Plants a bug in the source: finds the items that it names, and replaces their text.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::bugs::{Bug, Change};

/// Folders of the product's source.
const SOURCES: [&str; 2] = ["src", "crates"];

/// The product's source files.
pub(crate) struct Source(Vec<SourceFile>);

struct SourceFile {
    /// Path in the tree.
    path: PathBuf,
    text: String,
    items: Vec<Item>,
}

/// A function, constant or type that lies in no function.
struct Item {
    name: String,
    /// Bytes of the file, with visibility and attributes.
    range: Range<usize>,
}

impl Source {
    /// Reads the source of a tree.
    ///
    /// # Errors
    /// If a file cannot be read, or is not Rust.
    pub(crate) fn read(tree: &Path) -> Result<Source, String> {
        let mut files = Vec::new();
        for folder in SOURCES {
            add_files(tree, Path::new(folder), &mut files)?;
        }
        Ok(Source(files))
    }

    /// The files that `bug` changes as they are with it, by their paths in the tree.
    ///
    /// # Errors
    /// If what a change looks for is not there exactly once.
    pub(crate) fn plant(&self, bug: &Bug) -> Result<BTreeMap<PathBuf, String>, String> {
        let mut edits = BTreeMap::<usize, Vec<(Range<usize>, &str)>>::new();
        for change in bug.changes {
            let (file, range) = self
                .find(change)
                .map_err(|reason| format!("{}: {reason}", bug.name))?;
            edits.entry(file).or_default().push((range, change.replace));
        }
        let changed = edits.into_iter().map(|(file, mut edits)| {
            let file = &self.0[file];
            let mut text = file.text.clone();
            // From the last one, so that the ranges of the others stay right.
            edits.sort_by_key(|(range, _)| range.start);
            for (range, replacement) in edits.into_iter().rev() {
                text.replace_range(range, replacement.trim());
            }
            (file.path.clone(), text)
        });
        Ok(changed.collect())
    }

    /// Index of the file, and the range in it, of what a change looks for.
    fn find(&self, change: &Change) -> Result<(usize, Range<usize>), String> {
        let (mut items, mut found) = (0, Vec::new());
        for (index, file) in self.0.iter().enumerate() {
            for item in file.items.iter().filter(|item| item.name == change.item) {
                items += 1;
                let matches = matches(&file.text[item.range.clone()], change.find);
                let of_file =
                    |range: Range<usize>| item.range.start + range.start..item.range.start + range.end;
                found.extend(matches.into_iter().map(|range| (index, of_file(range))));
            }
        }
        match &found[..] {
            [one] => Ok(one.clone()),
            _ => Err(format!(
                "{items} items are named {}, and {} times they contain:\n{}",
                change.item,
                found.len(),
                change.find
            )),
        }
    }
}

fn add_files(tree: &Path, folder: &Path, files: &mut Vec<SourceFile>) -> Result<(), String> {
    let entries =
        std::fs::read_dir(tree.join(folder)).map_err(|error| format!("{}: {error}", folder.display()))?;
    for entry in entries {
        let entry = entry.map_err(|error| error.to_string())?;
        let path = folder.join(entry.file_name());
        if entry.path().is_dir() {
            add_files(tree, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
            let text = std::fs::read_to_string(entry.path()).map_err(|error| failed(&error))?;
            let parsed = syn::parse_file(&text).map_err(|error| failed(&error))?;
            let mut items = Items::default();
            items.visit_file(&parsed);
            let items = items.found;
            files.push(SourceFile { path, text, items });
        }
    }
    Ok(())
}

/// Places of `part` in `text`, whose white space counts nothing.
fn matches(text: &str, part: &str) -> Vec<Range<usize>> {
    let dense = |text: &str| -> Vec<(usize, char)> {
        let characters = text.char_indices();
        characters
            .filter(|(_, character)| !character.is_whitespace())
            .collect()
    };
    let (text, part) = (dense(text), dense(part));
    let is_here = |window: &&[(usize, char)]| window.iter().map(|(_, c)| c).eq(part.iter().map(|(_, c)| c));
    let range = |window: &[(usize, char)]| match window {
        [(start, _), .., (last, character)] => *start..last + character.len_utf8(),
        [(start, character)] => *start..start + character.len_utf8(),
        [] => 0..0,
    };
    text.windows(part.len().max(1))
        .filter(is_here)
        .map(range)
        .collect()
}

#[derive(Default)]
struct Items {
    /// The type or trait whose items are visited.
    of: Option<String>,
    found: Vec<Item>,
}

impl Items {
    fn add(&mut self, name: &syn::Ident, item: &impl Spanned) {
        let name = match &self.of {
            Some(of) => format!("{of}::{name}"),
            None => name.to_string(),
        };
        let range = item.span().byte_range();
        self.found.push(Item { name, range });
    }
}

impl<'ast> Visit<'ast> for Items {
    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        self.of = type_name(&block.self_ty);
        visit::visit_item_impl(self, block);
        self.of = None;
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.of = Some(item.ident.to_string());
        visit::visit_item_trait(self, item);
        self.of = None;
    }

    // What lies within these belongs to them, so that they are not visited.
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(&item.sig.ident, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.sig.ident, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.add(&item.sig.ident, item);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.add(&item.ident, item);
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.add(&item.ident, item);
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.add(&item.ident, item);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.ident, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.ident, item);
    }
}

/// Last name of a type's path, also behind a reference.
fn type_name(of: &syn::Type) -> Option<String> {
    match of {
        syn::Type::Path(path) => Some(path.path.segments.last()?.ident.to_string()),
        syn::Type::Reference(reference) => type_name(&reference.elem),
        _ => None,
    }
}
