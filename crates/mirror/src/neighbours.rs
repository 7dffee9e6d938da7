//! Neighbours (`--warm-from`) that would be of no use to the next start.

use std::fmt::Display;

use parking_lot::Mutex;
use rangecache_base::net::Url;

/// A neighbour that does not have the keys of a mirror for a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UselessNeighbour {
    /// The neighbour.
    pub url: Url,
    /// Name of the mirror.
    pub mirror: String,
    /// Why.
    pub reason: String,
}

/// The last answers of neighbours.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    useless: Mutex<Vec<UselessNeighbour>>,
}

impl Neighbours {
    /// Records that the neighbour `url` has the keys of `mirror`, or why it is of no use, and logs what has changed.
    pub(super) fn record(&self, url: &Url, mirror: &str, error: Option<&impl Display>) {
        let mut useless = self.useless.lock();
        let known = useless
            .iter()
            .position(|known| known.url == *url && known.mirror == mirror);
        let before = known.map(|position| useless.swap_remove(position));
        match error {
            None if before.is_some() => {
                tracing::info!(mirror, neighbour = %url, "a neighbour is of use again");
            }
            None => {}
            Some(error) => {
                let reason = error.to_string();
                if before.is_none_or(|before| before.reason != reason) {
                    tracing::info!(mirror, neighbour = %url, error = reason, "a neighbour is of no use");
                }
                useless.push(UselessNeighbour {
                    url: url.clone(),
                    mirror: mirror.to_owned(),
                    reason,
                });
            }
        }
    }

    /// Neighbours that were of no use at the last question.
    pub(super) fn useless(&self) -> Vec<UselessNeighbour> {
        self.useless.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_answer_for_each_mirror_counts() {
        let neighbours = Neighbours::default();
        let url: Url = "http://127.0.0.1:1".parse().unwrap();
        let record = |mirror, reason: Option<&str>| {
            neighbours.record(&url, mirror, reason.as_ref());
        };
        record("/a/", Some("first"));
        record("/a/", Some("second"));
        record("/b/", Some("third"));
        record("/c/", None);
        let reasons = || -> Vec<_> {
            neighbours
                .useless()
                .into_iter()
                .map(|known| known.reason)
                .collect()
        };
        assert_eq!(reasons(), ["second", "third"]);
        record("/a/", None);
        assert_eq!(reasons(), ["third"]);
    }
}
