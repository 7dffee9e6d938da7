//! Flags and fields in the texts of manifests. The texts are searched instead of being parsed: those of rangecache are
//! rendered by its chart, and of an apiserver's only one flag matters.

use rangecache_base::net::{Address, Url};

/// Digits behind the name of the release in the name of a pod and of its file.
const DIGITS: usize = 8;

/// A manifest of rangecache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manifest<'a>(pub(super) &'a str);

impl<'a> Manifest<'a> {
    /// `metadata.name`; `None` if the text has none at its usual place.
    pub(super) fn pod(self) -> Option<&'a str> {
        let mut names = self.0.lines().filter_map(|line| line.strip_prefix("  name: "));
        names.next().map(|name| name.trim().trim_matches(['"', '\'']))
    }

    /// Whether its process and the one of `other` can listen on the same ports at the same time: the kernel permits it to
    /// processes of one user that both ask for it.
    pub(super) fn shares_ports_with(self, other: Manifest<'_>) -> bool {
        let asks = |text: &str| text.contains("--socket-reuse-port");
        asks(self.0) && asks(other.0) && self.user() == other.user()
    }

    fn user(self) -> Option<&'a str> {
        let mut users = self
            .0
            .lines()
            .filter_map(|line| line.trim().strip_prefix("runAsUser: "));
        users.next()
    }

    /// URLs of its listeners for clients.
    pub(super) fn client_urls(self) -> Vec<Url> {
        // The name of the other flag, `--read-only-listen-client-urls`, ends with this one's.
        urls(self.0, "listen-client-urls=")
    }
}

/// Whether `name` is a file of rangecache's manifests: `stem`, or `stem-` and eight hexadecimal digits.
pub(super) fn is_own(name: &str, stem: &str, extension: &str) -> bool {
    let Some(own) = name
        .strip_suffix(extension)
        .and_then(|name| name.strip_prefix(stem))
    else {
        return false;
    };
    own.is_empty() || own.strip_prefix('-').is_some_and(is_digits)
}

fn is_digits(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The URLs of `--etcd-servers` in the manifest of an apiserver.
pub(super) fn etcd_servers(manifest: &str) -> Vec<Url> {
    urls(manifest, "--etcd-servers=")
}

/// Whether a client on this host may reach one of `listeners` at `server`.
pub(super) fn reaches(server: &Url, listeners: &[Url]) -> bool {
    let leads = |listener: &Url| server.tls == listener.tls && leads_to(&server.address, &listener.address);
    listeners.iter().any(leads)
}

/// Whether a client that connects to `server` on this host may reach `listener`.
fn leads_to(server: &Address, listener: &Address) -> bool {
    match (server, listener) {
        (
            Address::Tcp { host, port },
            Address::Tcp {
                host: bound,
                port: of,
            },
        ) => port == of && (host == bound || is_every(bound) || is_loopback(host) && is_loopback(bound)),
        _ => server == listener,
    }
}

fn is_every(host: &str) -> bool {
    host == "0.0.0.0" || host == "::"
}

fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .parse()
            .is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

/// The URLs behind each `flag`, which ends with `=`, in a manifest in YAML or JSON.
fn urls(text: &str, flag: &str) -> Vec<Url> {
    let values = text.split(flag).skip(1).map(|rest| {
        let end = rest.find(|c: char| c.is_whitespace() || matches!(c, '"' | '\''));
        &rest[..end.unwrap_or(rest.len())]
    });
    values
        .flat_map(|value| value.split(','))
        .filter_map(|url| url.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "apiVersion: v1
kind: Pod
metadata:
  name: rangecache-0a1b2c3d
  namespace: kube-system
spec:
  securityContext:
    runAsUser: 0
  containers:
    - name: rangecache
      args:
        - --listen-client-urls=https://127.0.0.1:23790
        - \"--read-only-listen-client-urls=https://127.0.0.1:23792,unix:///run/rc.sock\"
        - --socket-reuse-port
";

    fn parsed(urls: &[&str]) -> Vec<Url> {
        urls.iter().map(|url| url.parse().unwrap()).collect()
    }

    #[test]
    fn name_and_listeners_are_read() {
        let manifest = Manifest(POD);
        assert_eq!(manifest.pod(), Some("rangecache-0a1b2c3d"));
        assert_eq!(Manifest("kind: Pod\nmetadata:\n").pod(), None);
        let urls = parsed(&[
            "https://127.0.0.1:23790",
            "https://127.0.0.1:23792",
            "unix:///run/rc.sock",
        ]);
        assert_eq!(manifest.client_urls(), urls);
    }

    #[test]
    fn ports_are_shared_by_processes_of_one_user_that_both_ask_for_it() {
        let alone = POD.replace("--socket-reuse-port", "");
        let of_another = POD.replace("runAsUser: 0", "runAsUser: 65532");
        assert!(Manifest(POD).shares_ports_with(Manifest(POD)));
        for other in [&alone, &of_another] {
            assert!(!Manifest(POD).shares_ports_with(Manifest(other)));
            assert!(!Manifest(other).shares_ports_with(Manifest(POD)));
        }
    }

    #[test]
    fn files_of_another_release_are_not_own() {
        let is_own = |name| is_own(name, "rangecache", ".yaml");
        for name in ["rangecache.yaml", "rangecache-0a1b2c3d.yaml"] {
            assert!(is_own(name), "{name}");
        }
        for name in [
            "rangecache-events.yaml",
            "rangecache-events-0a1b2c3d.yaml",
            "rangecache-0a1b2c3d",
            "rangecache-0a1b2c3d4.yaml",
            "kube-apiserver.yaml",
            ".rangecache.yaml",
        ] {
            assert!(!is_own(name), "{name}");
        }
    }

    #[test]
    fn apiserver_that_uses_a_listener_is_found() {
        let uses =
            |text: &str, listeners: &[Url]| etcd_servers(text).iter().any(|url| reaches(url, listeners));
        let with =
            |servers: &str| format!("    - kube-apiserver\n    - --etcd-servers={servers}\n    - --v=1\n");
        let (loopback, every) = (["https://127.0.0.1:23790"], ["https://0.0.0.0:23790"]);
        for (servers, listeners) in [
            ("https://127.0.0.1:23790", &loopback),
            ("https://localhost:23790", &loopback),
            ("https://10.0.0.1:2379,https://[::1]:23790", &loopback),
            ("https://10.0.0.1:23790", &every),
        ] {
            assert!(uses(&with(servers), &parsed(listeners)), "{servers}");
        }
        for (servers, listeners) in [
            ("https://127.0.0.1:2379", &loopback),
            ("https://10.0.0.1:23790", &loopback),
            ("https://127.0.0.1:237901", &loopback),
            ("http://127.0.0.1:23790", &loopback),
            ("https://127.0.0.1:2379", &every),
        ] {
            assert!(!uses(&with(servers), &parsed(listeners)), "{servers}");
        }
        let json = r#"{"command":["kube-apiserver","--etcd-servers=https://127.0.0.1:23790","--v=1"]}"#;
        assert!(uses(json, &parsed(&loopback)));
    }
}
