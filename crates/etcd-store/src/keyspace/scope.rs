//! Scopes: the contiguous key ranges that mirrors hold.

use bytes::Bytes;

use super::{Interval, prefix_end};

/// Keys from `start`, inclusive, to `end`, exclusive; without `end`, every key from `start` on. Scopes with the same keys are
/// equal, whatever their names.
#[derive(Clone, Debug)]
pub struct Scope {
    start: Bytes,
    end: Option<Bytes>,
    of: ScopePrefixes,
}

/// Prefixes, as the operator wrote them, that a scope comes from: its name.
#[derive(Clone, Debug, Default)]
struct ScopePrefixes {
    /// The prefix that is mirrored.
    prefix: Bytes,
    /// The prefix left out of it after which the scope begins.
    after: Option<Bytes>,
    /// The prefix left out of it before which the scope ends.
    before: Option<Bytes>,
}

impl PartialEq for Scope {
    fn eq(&self, other: &Scope) -> bool {
        (&self.start, &self.end) == (&other.start, &other.end)
    }
}

impl Eq for Scope {}

/// Disjoint scopes, in key order, that cover `prefixes` (every key if the list is empty) without `excluded`.
#[must_use]
pub fn scopes(prefixes: &[String], excluded: &[String]) -> Vec<Scope> {
    let whole = [String::new()];
    let prefixes = if prefixes.is_empty() { &whole } else { prefixes };
    let mut wanted: Vec<Scope> = prefixes
        .iter()
        .map(|prefix| Scope::prefix(prefix.as_bytes()))
        .collect();
    wanted.sort_by(|a, b| a.start.cmp(&b.start));
    let mut scopes: Vec<Scope> = Vec::new();
    for scope in wanted {
        match scopes.last_mut() {
            // The prefix lies inside the last one: prefixes do not overlap in any other way.
            Some(last) if last.end.as_ref().is_none_or(|end| scope.start < *end) => {}
            _ => scopes.push(scope),
        }
    }
    for prefix in excluded {
        let out = Scope::prefix(prefix.as_bytes());
        scopes = scopes.iter().flat_map(|scope| scope.without(&out)).collect();
    }
    scopes
}

/// Ranges of the keyspace that `scopes` do not cover, in key order.
#[must_use]
pub fn gaps(scopes: &[Scope]) -> Vec<Scope> {
    let mut gaps = vec![Scope::prefix(b"")];
    for scope in scopes {
        gaps = gaps.iter().flat_map(|gap| gap.without(scope)).collect();
    }
    gaps
}

impl Scope {
    /// Scope of every key that starts with `prefix`.
    #[must_use]
    pub fn prefix(prefix: &[u8]) -> Scope {
        let start = Bytes::copy_from_slice(prefix);
        let of = ScopePrefixes {
            prefix: start.clone(),
            ..ScopePrefixes::default()
        };
        Scope {
            start,
            end: prefix_end(prefix),
            of,
        }
    }

    /// The parts of `self` outside `out`: none, one or two.
    fn without(&self, out: &Scope) -> Vec<Scope> {
        let mut pieces = Vec::new();
        if self.start < out.start {
            let mut before = self.clone();
            if self.end.as_ref().is_none_or(|end| out.start < *end) {
                before.end = Some(out.start.clone());
                before.of.before = Some(out.of.prefix.clone());
            }
            pieces.push(before);
        }
        if let Some(out_end) = &out.end
            && self.end.as_ref().is_none_or(|end| out_end < end)
        {
            let mut after = self.clone();
            if self.start < *out_end {
                after.start = out_end.clone();
                after.of.after = Some(out.of.prefix.clone());
            }
            pieces.push(after);
        }
        pieces
    }

    /// Whether the scope contains every key that `interval` can name.
    #[must_use]
    pub fn contains(&self, interval: &Interval<'_>) -> bool {
        let holds = |key: &[u8]| self.start <= key && self.end.as_ref().is_none_or(|end| key < *end);
        match interval {
            Interval::Single(key) => holds(key),
            Interval::Range(key, end) => {
                holds(key) && (end <= key || self.end.as_ref().is_none_or(|scope_end| *end <= *scope_end))
            }
            Interval::From(key) => holds(key) && self.end.is_none(),
        }
    }

    /// Whether the scope is the whole keyspace, so that every revision of etcd has an event in it.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.start.is_empty() && self.end.is_none()
    }

    /// `key` of a request for the whole scope. etcd has no empty key, so the keyspace starts at `\0`.
    #[must_use]
    pub fn key(&self) -> Bytes {
        if self.start.is_empty() {
            Bytes::from_static(b"\0")
        } else {
            self.start.clone()
        }
    }

    /// `range_end` of a request for the whole scope.
    #[must_use]
    pub fn range_end(&self) -> Bytes {
        self.end.clone().unwrap_or(Bytes::from_static(b"\0"))
    }

    /// Name in metrics and logs: the operator's own prefixes, such as `/registry/ before events/`.
    #[must_use]
    pub fn name(&self) -> String {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let ScopePrefixes {
            prefix,
            after,
            before,
        } = &self.of;
        let mut name = if prefix.is_empty() {
            "everything".to_owned()
        } else {
            text(prefix)
        };
        for (word, bound) in [(" after ", after), (" before ", before)] {
            if let Some(bound) = bound {
                name.push_str(word);
                name.push_str(&text(bound.strip_prefix(&prefix[..]).unwrap_or(bound)));
            }
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(prefixes: &[&str], excluded: &[&str]) -> Vec<String> {
        let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        scopes(&owned(prefixes), &owned(excluded))
            .iter()
            .map(Scope::name)
            .collect()
    }

    #[test]
    fn scopes_are_disjoint_and_in_order() {
        assert_eq!(names(&[], &[]), ["everything"]);
        assert_eq!(names(&["/b/", "/a/", "/a/x/"], &[]), ["/a/", "/b/"]);
        assert_eq!(
            names(&[], &["/events/"]),
            ["everything before /events/", "everything after /events/"]
        );
        assert_eq!(names(&["/r/"], &["/r/e/"]), ["/r/ before e/", "/r/ after e/"]);
        assert_eq!(
            names(&["/r/"], &["/r/e/", "/r/a/"]),
            ["/r/ before a/", "/r/ after a/ before e/", "/r/ after e/"]
        );
        assert_eq!(names(&["/a/", "/b/"], &["/a/"]), ["/b/"]);
        assert_eq!(names(&["/a/"], &["/c/"]), ["/a/"]);
    }

    #[test]
    fn gaps_are_the_ranges_outside_the_scopes() {
        let of = |prefixes: &[&str]| {
            let owned: Vec<_> = prefixes.iter().map(|text| (*text).to_owned()).collect();
            let names = gaps(&scopes(&owned, &[]));
            names.iter().map(Scope::name).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), [""; 0]);
        assert_eq!(
            of(&["/a/", "/b/"]),
            [
                "everything before /a/",
                "everything after /a/ before /b/",
                "everything after /b/"
            ]
        );
    }

    #[test]
    fn scope_contains_intervals_whose_keys_all_lie_in_it() {
        let scope = Scope::prefix(b"/a/");
        assert!(scope.contains(&Interval::Single(b"/a/1")));
        assert!(!scope.contains(&Interval::Single(b"/a0")));
        assert!(scope.contains(&Interval::Range(b"/a/", b"/a0")));
        assert!(!scope.contains(&Interval::Range(b"/a/", b"/a00")));
        assert!(
            scope.contains(&Interval::Range(b"/a/5", b"/a/1")),
            "an empty interval names no key outside"
        );
        assert!(!scope.contains(&Interval::From(b"/a/")));
        let everything = Scope::prefix(b"");
        assert!(everything.contains(&Interval::From(b"\0")));
        assert!(everything.contains(&Interval::Range(b"a", b"z")));
        assert_eq!(
            (everything.key().as_ref(), everything.range_end().as_ref()),
            (&b"\0"[..], &b"\0"[..])
        );
    }
}
