//! Source file: the paths that it names, and the methods of its `impl` blocks.
//!
//! Every `use` counts, and every inline path that starts with `crate`, `super`, `self`, a child module or an imported module;
//! code under `#[cfg(test)]` is left out.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, Meta, UseTree};

pub(crate) type ModulePath = Vec<String>;

#[derive(Debug, Default)]
pub(crate) struct File {
    /// Paths that name something of this crate: the module that they stand in, the segments, the line.
    pub(crate) paths: Vec<(ModulePath, Vec<String>, usize)>,
    /// Names that `use` binds: the bound name, the module, the segments, the line; `*` for a glob.
    pub(crate) uses: Vec<(String, ModulePath, Vec<String>, usize)>,
    /// Names of items that the file defines.
    pub(crate) defined: BTreeSet<String>,
    /// Modules that only tests compile.
    pub(crate) test_modules: BTreeSet<String>,
    /// Contents of the `impl` blocks.
    pub(crate) impls: Vec<Impl>,
}

/// Contents of an `impl` block.
#[derive(Debug, Default)]
pub(crate) struct Impl {
    pub(crate) module: ModulePath,
    /// Path of the type.
    pub(crate) of: Vec<String>,
    /// Methods that it defines, unless it implements a trait.
    pub(crate) methods: BTreeSet<String>,
    /// Methods of the same type that it calls, each with the line.
    pub(crate) calls: Vec<(String, usize)>,
}

pub(crate) fn parse(text: &str, module: &[String]) -> File {
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
            && (condition == "test"
                || condition.starts_with("all(test")
                || condition.starts_with("any(test,"))
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

    /// Reads the names of structs that a macro declares, as `metric_group!` does.
    fn read_structs(&mut self, tokens: TokenStream) {
        let idents = tokens.into_iter().filter_map(|token| match token {
            TokenTree::Ident(ident) => Some(ident.to_string()),
            _ => None,
        });
        let idents: Vec<_> = idents.collect();
        let declared = idents.windows(2).filter(|pair| pair[0] == "struct");
        self.file.defined.extend(declared.map(|pair| pair[1].clone()));
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
            Item::Macro(called) if called.ident.is_none() => {
                self.read_structs(called.mac.tokens.clone());
                visit::visit_item(self, item);
            }
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
