//! etcd's key-values in memory: a persistent tree with counts and sizes, its history, and the answers to ranges of it.
//!
//! | module | what it is for |
//! |---|---|
//! | [`cache`] | the tree, the history and the query; no I/O, no clock, no async |
//! | [`keyspace`] | keys, intervals, scopes, prefixes |
//!
//! A request is decoded strictly, and answered from a snapshot as etcd would:
//!
//! ```
//! use etcd_store::cache::{Answer, Dialect, Entry, RangeQuery, ResponseHeader, Selected, Tree, select};
//!
//! // KeyValue messages: key, create_revision, mod_revision, version, value.
//! let key_value = |key: u8| [10, 1, key, 16, 2, 24, 2, 32, 1, 42, 1, b'v'];
//! let mut tree = Tree::new();
//! for key in *b"abc" {
//!     tree.insert(Entry::from_key_value(&key_value(key))?);
//! }
//! let before = tree.clone();
//! tree.remove(b"b");
//! assert_eq!((before.len(), tree.len()), (3, 2));
//!
//! // RangeRequest: key `a`, range_end `d`, limit 2.
//! let query = RangeQuery::decode(vec![10, 1, b'a', 18, 1, b'd', 24, 2].into())?;
//! let Selected::Answer(selection) = select(&before, &query, &Dialect::of_version(3, 7)) else {
//!     unreachable!("the order of keys has no ties")
//! };
//! assert_eq!(selection.len(), 2);
//! let answer = Answer::new(ResponseHeader::default(), selection);
//! assert_eq!(answer.len(), answer.small(0)?.len() as u64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod cache;
pub mod keyspace;
