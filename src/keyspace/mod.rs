//! Which keys: scopes, successors and prefixes. A leaf: it knows no other room but `cache`.

pub mod scope;
