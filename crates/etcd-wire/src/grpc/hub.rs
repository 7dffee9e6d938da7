//! Metadata by which a rangecache tells the rangecaches behind it (its leaves) in responses that it is one, and in which
//! history it has proven a response; and where it leads to. A leaf cannot ask for the raft log behind it: each of its calls may reach another member.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

/// Response metadata for leaves: `<instance>` of the rangecache that responds, or `<instance>.<number>.<age>` if it has proven that
/// the response is of that history of its etcd, by a quorum check of its own that was sent after the request had arrived. The age is
/// that of the connection on which it has checked, in milliseconds.
pub const HISTORY: HeaderName = HeaderName::from_static("rangecache-history");

/// Response metadata of a leaf's health check that a hub has answered by itself: the URLs of its own endpoints, separated by commas.
pub const ENDPOINTS: HeaderName = HeaderName::from_static("rangecache-endpoints");
/// Response metadata beside [`ENDPOINTS`]: the id of the cluster behind the hub, in hexadecimal. A leaf's connections stay open when
/// etcd is restored as another cluster.
pub const CLUSTER: HeaderName = HeaderName::from_static("rangecache-cluster");

/// Longest time for which a hub lets the periodic check of a leaf wait for one that it makes for others. Its own probe makes one in
/// each `--probe-interval`, which is as long by default.
pub const PROBE_WAIT: Duration = Duration::from_secs(1);

/// A history of etcd as a hub numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HubHistory {
    /// The hub's process.
    pub instance: u128,
    /// Number of the history in that process.
    pub number: u64,
}

/// Proof of a hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HubProof {
    /// The history that it has found.
    pub history: HubHistory,
    /// For how long the connection has been open on which it has checked. No number shows a hub without contents that etcd was rolled
    /// back before, and its lost revisions written again.
    pub age: Duration,
}

/// Statement of a response about the rangecache that it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A rangecache, which has not proven in which history.
    Hub,
    /// A rangecache, which has proven in which history the response is.
    Proven(HubProof),
}

impl Origin {
    /// Origin that `headers` name; `None` if they name none, as etcd's do.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Origin> {
        let value = headers.get(HISTORY)?.to_str().ok()?;
        let proof = || {
            let mut parts = value.split('.');
            let history = HubHistory {
                instance: u128::from_str_radix(parts.next()?, 16).ok()?,
                number: parts.next()?.parse().ok()?,
            };
            let age = Duration::from_millis(parts.next()?.parse().ok()?);
            parts.next().is_none().then_some(HubProof { history, age })
        };
        Some(proof().map_or(Origin::Hub, Origin::Proven))
    }
}

/// Sets [`HISTORY`] in the headers of a response of the process `instance`, which has proven that it is of a history with this number,
/// on a connection of this age, if these are given.
pub fn set_history(headers: &mut HeaderMap, instance: &str, proof: Option<(u64, Duration)>) {
    let text = match proof {
        Some((number, age)) => format!("{instance}.{number}.{}", age.as_millis()),
        None => instance.to_owned(),
    };
    if let Ok(value) = HeaderValue::try_from(text) {
        headers.insert(HISTORY, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(value: &str) -> Option<Origin> {
        Origin::of(&HeaderMap::from_iter([(
            HISTORY,
            HeaderValue::from_str(value).unwrap(),
        )]))
    }

    #[test]
    fn origin_is_a_proven_history_a_hub_or_etcd() {
        assert_eq!(Origin::of(&HeaderMap::new()), None);
        let instance = "000102030405060708090a0b0c0d0e0f";
        let history = HubHistory {
            instance: 0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f,
            number: 7,
        };
        let age = Duration::from_millis(1_500);
        let proven = Origin::Proven(HubProof { history, age });
        let mut headers = HeaderMap::new();
        for (proof, expected) in [(Some((7, age)), proven), (None, Origin::Hub)] {
            set_history(&mut headers, instance, proof);
            assert_eq!(Origin::of(&headers), Some(expected));
        }
        for nothing_proven in [
            "", "x.7.1", "0a.", "0a.7", "0a.-1.1", "0a.7.8.9", ".7.1", "0a.7.x",
        ] {
            assert_eq!(origin(nothing_proven), Some(Origin::Hub), "{nothing_proven:?}");
        }
    }
}
