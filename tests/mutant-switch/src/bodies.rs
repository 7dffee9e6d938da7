//! Positions of the bodies of functions in a source file.

use std::ops::Range;

use anyhow::{Context, Result};
use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{Block, ImplItemFn, ItemFn, ReturnType, Signature, TraitItemFn, TypeImplTrait};

/// The body of a function that lies in no other function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Body {
    /// Bytes of the file, the braces included.
    pub(crate) range: Range<usize>,
    /// Why it cannot become a `match` at run time, if it cannot.
    pub(crate) not_switchable: Option<&'static str>,
}

/// Bodies of the functions and methods of a source file, in their order.
pub(crate) fn find(source: &str) -> Result<Vec<Body>> {
    let file = syn::parse_file(source).context("a source file is Rust")?;
    let mut found = Found(Vec::new());
    found.visit_file(&file);
    found.0.sort_by_key(|body| body.range.start);
    Ok(found.0)
}

struct Found(Vec<Body>);

impl Found {
    // Functions within a body belong to it, so that bodies are not visited.
    fn add(&mut self, signature: &Signature, block: &Block) {
        let not_switchable = if signature.constness.is_some() {
            Some("a const fn")
        } else if signature.asyncness.is_none() && returns_an_opaque_type(&signature.output) {
            Some("its type is opaque")
        } else {
            None
        };
        self.0.push(Body {
            range: block.span().byte_range(),
            not_switchable,
        });
    }
}

impl Visit<'_> for Found {
    fn visit_item_fn(&mut self, function: &ItemFn) {
        self.add(&function.sig, &function.block);
    }

    fn visit_impl_item_fn(&mut self, function: &ImplItemFn) {
        self.add(&function.sig, &function.block);
    }

    fn visit_trait_item_fn(&mut self, function: &TraitItemFn) {
        if let Some(block) = &function.default {
            self.add(&function.sig, block);
        }
    }
}

/// Whether a return type has an `impl Trait` in it: each body has one of its own.
fn returns_an_opaque_type(output: &ReturnType) -> bool {
    struct Opaque(bool);
    impl Visit<'_> for Opaque {
        fn visit_type_impl_trait(&mut self, _: &TypeImplTrait) {
            self.0 = true;
        }
    }
    let mut opaque = Opaque(false);
    opaque.visit_return_type(output);
    opaque.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_those_of_functions_that_lie_in_no_other() {
        let source = "fn a() { fn inner() { 1 } }\nimpl S { async fn b() -> u8 { 2 } }\n\
                      trait T { fn c() { 3 } fn without(); }\nmod m { fn d() { 4 } }";
        let found = find(source).unwrap();
        let texts: Vec<&str> = found.iter().map(|body| &source[body.range.clone()]).collect();
        assert_eq!(texts, ["{ fn inner() { 1 } }", "{ 2 }", "{ 3 }", "{ 4 }"]);
        assert!(found.iter().all(|body| body.not_switchable.is_none()));
    }

    #[test]
    fn const_functions_and_opaque_types_are_not_switched() {
        let reason = |source: &str| find(source).unwrap().first().unwrap().not_switchable;
        assert_eq!(reason("const fn a() -> u8 { 1 }"), Some("a const fn"));
        let opaque = Some("its type is opaque");
        assert_eq!(reason("fn a() -> impl Fn() { || () }"), opaque);
        assert_eq!(reason("fn a() -> Option<impl Fn()> { None::<fn()> }"), opaque);
        assert_eq!(reason("fn a(each: impl Fn()) { each() }"), None);
        assert_eq!(
            reason("async fn a() -> u8 { 1 }"),
            None,
            "awaited within the one body"
        );
        assert!(find("fn a( {").is_err());
    }
}
