//! What a rangecache tells the rangecaches behind it (its leaves) in the metadata of responses: that it is one, and in which
//! history it has proven a response. A leaf cannot ask for the raft log behind it: each of its calls may reach another member.

use http::{HeaderMap, HeaderName, HeaderValue};

/// Request metadata with the identities of the rangecaches that a request has passed, one value each.
pub const INSTANCE: HeaderName = HeaderName::from_static("rangecache-instance");
/// Response metadata for leaves: `<instance>` of the rangecache that responds, or `<instance>.<number>` if it has proven that
/// the response is of that history of its etcd, by a quorum check of its own that was sent after the request had arrived.
pub const HISTORY: HeaderName = HeaderName::from_static("rangecache-history");

/// A history of etcd as a hub numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HubHistory {
    /// The hub's process.
    pub instance: u128,
    /// Number of the history in that process.
    pub number: u64,
}

/// What a response says about the rangecache that it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A rangecache, which has not proven in which history.
    Hub,
    /// A rangecache, which has proven that the response is of this history.
    Proven(HubHistory),
}

impl Origin {
    /// What `headers` say; `None` if they say nothing, as etcd's do.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Origin> {
        let value = headers.get(HISTORY)?.to_str().ok()?;
        let proven = value.split_once('.').and_then(|(instance, number)| {
            Some(HubHistory {
                instance: u128::from_str_radix(instance, 16).ok()?,
                number: number.parse().ok()?,
            })
        });
        Some(proven.map_or(Origin::Hub, Origin::Proven))
    }
}

/// Value of [`HISTORY`] in responses of the process `instance`, which has proven that they are of the history `number`, if that
/// is given.
#[must_use]
pub fn history_value(instance: &str, number: Option<u64>) -> Option<HeaderValue> {
    let text = match number {
        Some(number) => format!("{instance}.{number}"),
        None => instance.to_owned(),
    };
    HeaderValue::from_str(&text).ok()
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
        let proven = Origin::Proven(HubHistory {
            instance: 0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f,
            number: 7,
        });
        let value = history_value(instance, Some(7)).unwrap();
        assert_eq!(origin(value.to_str().unwrap()), Some(proven));
        assert_eq!(
            origin(history_value(instance, None).unwrap().to_str().unwrap()),
            Some(Origin::Hub)
        );
        for nothing_proven in ["", "x.7", "0a.", "0a.-1", "0a.7.8", ".7"] {
            assert_eq!(origin(nothing_proven), Some(Origin::Hub), "{nothing_proven:?}");
        }
    }
}
