//! Name of a client.

use std::{fmt, net::IpAddr, sync::Arc};

use serde::{Serialize, Serializer};

use crate::net::ClientAddress;

/// Longest name that is kept, in bytes; the rest of a longer one is cut off.
const MAX_NAME_BYTES: usize = 128;

/// Origin of a client's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientKind {
    /// Common name of the client's certificate, which was verified.
    Certificate,
    /// User of etcd whose token the call has.
    User,
    /// IP address of the connection; of IPv6 its network of 64 bits.
    Address,
    /// Unix socket.
    Unix,
    /// Clients beyond the bound on their number.
    Others,
}

impl ClientKind {
    /// Value of the label `kind`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ClientKind::Certificate => "certificate",
            ClientKind::User => "user",
            ClientKind::Address => "address",
            ClientKind::Unix => "unix",
            ClientKind::Others => "others",
        }
    }
}

/// Name of a connection's client: common name of its certificate, otherwise user of etcd, otherwise IP address.
/// Cloning it copies no text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ClientName {
    kind: ClientKind,
    #[serde(serialize_with = "shared_text")]
    name: Arc<str>,
}

pub(super) fn shared_text<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

impl ClientName {
    /// Name of the client of a connection with this certificate and from this address; both are `None` for a unix
    /// socket.
    #[must_use]
    pub fn of_connection(common_name: Option<&str>, address: Option<IpAddr>) -> ClientName {
        match (common_name, address) {
            (Some(name), _) => ClientName::new(ClientKind::Certificate, name),
            (None, Some(address)) => {
                ClientName::new(ClientKind::Address, &ClientAddress::from(address).to_string())
            }
            (None, None) => ClientName::new(ClientKind::Unix, "unix"),
        }
    }

    /// Whether clients can be compared with `common_name`: of a longer one, the end may have been cut off.
    #[must_use]
    pub fn may_be_certificate(common_name: &str) -> bool {
        // A name is cut to no fewer bytes than this, as a character has up to four.
        !common_name.is_empty() && common_name.len() <= MAX_NAME_BYTES - 4
    }

    /// Whether the client has proven by its certificate that `common_name` is its name.
    #[must_use]
    pub fn is_certificate(&self, common_name: &str) -> bool {
        self.kind == ClientKind::Certificate
            && ClientName::may_be_certificate(common_name)
            && *self.name == *common_name
    }

    /// Name of a user of etcd.
    #[must_use]
    pub fn of_user(user: &str) -> ClientName {
        ClientName::new(ClientKind::User, user)
    }

    /// Name of all clients beyond the bound.
    #[must_use]
    pub fn others() -> ClientName {
        ClientName::new(ClientKind::Others, "others")
    }

    fn new(kind: ClientKind, name: &str) -> ClientName {
        ClientName {
            kind,
            name: cut(name, MAX_NAME_BYTES).into(),
        }
    }

    /// Origin of the name.
    #[must_use]
    pub fn kind(&self) -> ClientKind {
        self.kind
    }

    /// The name without its kind.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.name)
    }
}

/// The beginning of `text`, at most `max_bytes` long.
pub(super) fn cut(text: &str, max_bytes: usize) -> &str {
    let mut end = text.len().min(max_bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_that_of_the_certificate_otherwise_the_address_without_a_port() {
        let address = Some("::ffff:10.0.0.1".parse().unwrap());
        let shown = |name: &ClientName| name.to_string();
        let certificate = ClientName::of_connection(Some("kube-apiserver"), address);
        assert_eq!(shown(&certificate), "certificate kube-apiserver");
        assert_eq!(
            shown(&ClientName::of_connection(None, address)),
            "address 10.0.0.1"
        );
        assert_eq!(shown(&ClientName::of_connection(None, None)), "unix unix");
        for (address, expected) in [
            ("2001:db8::1", "address 2001:db8::/64"),
            ("2001:db8::ffff:1", "address 2001:db8::/64"),
            ("2001:db8:0:1::1", "address 2001:db8:0:1::/64"),
            ("::1", "address ::1"),
        ] {
            let address = address.parse().unwrap();
            assert_eq!(shown(&ClientName::of_connection(None, Some(address))), expected);
        }
    }

    #[test]
    fn certificate_has_a_name_only_if_all_of_it_is_equal() {
        let certificate = |name: &str| ClientName::of_connection(Some(name), None);
        assert!(certificate("kube").is_certificate("kube"));
        for name in ["kubelet", "kub", "Kube", "kube ", " kube"] {
            assert!(!certificate(name).is_certificate("kube"), "{name:?}");
        }
        assert!(!ClientName::of_user("kube").is_certificate("kube"));
        let address = ClientName::of_connection(None, Some("10.0.0.1".parse().unwrap()));
        assert!(!address.is_certificate("10.0.0.1"));
        let (longest, longer) = ("a".repeat(124), "a".repeat(129));
        assert!(certificate(&longest).is_certificate(&longest));
        assert!(
            !certificate(&longer).is_certificate(&longer[..128]),
            "its end was cut off"
        );
        assert!(!ClientName::may_be_certificate(&longer[..125]) && !ClientName::may_be_certificate(""));
    }

    #[test]
    fn long_name_is_cut_at_a_character() {
        let name = ClientName::of_user(&"ä".repeat(100));
        assert_eq!(name.as_str(), "ä".repeat(64));
    }
}
