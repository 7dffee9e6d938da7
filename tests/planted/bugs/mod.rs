//! The planted bugs, one file for each room of the product: changes of its source that a test must catch.
//!
//! Included by the test beside this folder and by `tests/mutant-switch`.

mod base;
mod edge;
mod etcd_store;
mod etcd_wire;
mod mirror;
mod mirror_fan_out;
mod mirror_feed;
mod mirror_freshness;
mod mirror_image;
mod mirror_lineage;
mod mirror_load;
mod operate;
mod proxy;
mod proxy_read;
mod proxy_watch;
mod upstream;

/// A bug of the product.
pub(crate) struct Bug {
    /// Its number, which no other bug has, and what it does in a few words: `01-skip-the-check`.
    pub(crate) name: &'static str,
    /// Fault of the product with the bug.
    pub(crate) what: &'static str,
    /// Arguments of `cargo test` that name the test which is to catch it.
    pub(crate) test: &'static str,
    /// Pattern (`grep -E`) of what the failing test says.
    pub(crate) shows: &'static str,
    pub(crate) changes: &'static [Change],
}

/// A change of the text of one function or constant, wherever in the product it is.
pub(crate) struct Change {
    /// `Type::function` (also of a trait that the type implements, or `Trait::function` for its default), `function`, or the
    /// name of a constant or type.
    pub(crate) item: &'static str,
    /// Text that all items of that name contain once in all; white space counts nothing.
    pub(crate) find: &'static str,
    pub(crate) replace: &'static str,
}

/// All bugs.
pub(crate) fn all() -> impl Iterator<Item = &'static Bug> {
    const ROOMS: [&[Bug]; 16] = [
        base::BUGS,
        edge::BUGS,
        etcd_store::BUGS,
        etcd_wire::BUGS,
        mirror::BUGS,
        mirror_feed::BUGS,
        mirror_freshness::BUGS,
        mirror_lineage::BUGS,
        mirror_image::BUGS,
        mirror_load::BUGS,
        mirror_fan_out::BUGS,
        operate::BUGS,
        proxy::BUGS,
        proxy_read::BUGS,
        proxy_watch::BUGS,
        upstream::BUGS,
    ];
    ROOMS.into_iter().flatten()
}
