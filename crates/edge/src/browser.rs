//! Requests that a web page caused. A browser on a host that reaches rangecache sends requests for any page that it
//! shows: with the page's `Origin`, or, if the page's own name resolves to rangecache's address (DNS rebinding,
//! CVE-2018-5702), with that name as `Host`. Both are refused. A leaf.
//!
//! Browsers do not use HTTP/2 without TLS, and a certificate is for no other name than the server's own.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue, Request, Version, header, uri::Authority};
use rangecache_base::net::{Address, Transport, Url};

/// Response headers of etcd that permit web pages to read a response.
const CORS_HEADERS: [HeaderName; 6] = [
    header::ACCESS_CONTROL_ALLOW_ORIGIN,
    header::ACCESS_CONTROL_ALLOW_METHODS,
    header::ACCESS_CONTROL_ALLOW_HEADERS,
    header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
    header::ACCESS_CONTROL_EXPOSE_HEADERS,
    header::ACCESS_CONTROL_MAX_AGE,
];

/// Host names under which rangecache may be called, and origins of the web pages that may send requests.
#[derive(Clone, Debug, Default)]
pub struct BrowserRules {
    /// Lower-case host names, without ports; `*` permits every name.
    hosts: Vec<String>,
    /// Origins such as `https://example.com`; `*` permits every page.
    origins: Vec<String>,
}

/// Why a request is refused with 403. The text is what the client gets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BrowserRefusal {
    /// A web page caused it.
    #[error(
        "rangecache: requests of web pages are refused, and this one has the Origin {0:?}. To permit that page, add its \
         origin to --cors.\n"
    )]
    Origin(String),
    /// A web page may have caused it.
    #[error(
        "rangecache: the Host {0:?} is neither an IP address, nor localhost, nor a host of the listening URLs. It may be \
         the name of a web page that was made to resolve to this address (DNS rebinding, CVE-2018-5702). If it is a name \
         of this server, add it to --host-whitelist, or use https://.\n"
    )]
    Host(String),
}

impl BrowserRules {
    /// Permits the names in `listening` and in `hosts`, and pages from `origins`.
    #[must_use]
    pub fn new<'a>(
        listening: impl Iterator<Item = &'a Url>,
        hosts: &[String],
        origins: &[String],
    ) -> BrowserRules {
        let own = listening.filter_map(|url| match &url.address {
            Address::Tcp { host, .. } => Some(host),
            Address::Unix(_) => None,
        });
        let hosts = own.chain(hosts).map(|host| host.to_ascii_lowercase());
        BrowserRules {
            hosts: hosts.collect(),
            origins: origins.to_vec(),
        }
    }

    /// Returns rules with these host names and no origin: no web page may send requests.
    #[must_use]
    pub fn without_origins(&self) -> BrowserRules {
        BrowserRules {
            hosts: self.hosts.clone(),
            origins: Vec::new(),
        }
    }

    /// Checks a request that came by `transport`.
    ///
    /// # Errors
    /// Why a web page may have caused it.
    pub fn check<B>(&self, request: &Request<B>, transport: Transport) -> Result<(), BrowserRefusal> {
        if !is_of_a_browser(request, transport) {
            return Ok(());
        }
        for origin in request.headers().get_all(header::ORIGIN) {
            if self.permitted(origin).is_none() {
                return Err(BrowserRefusal::Origin(shown(origin)));
            }
        }
        if transport.tls || transport.unix {
            return Ok(());
        }
        for host in request.headers().get_all(header::HOST) {
            if !self.is_own(host) {
                return Err(BrowserRefusal::Host(shown(host)));
            }
        }
        Ok(())
    }

    /// The origin if its pages may send requests.
    #[must_use]
    pub fn permitted<'a>(&self, origin: &'a HeaderValue) -> Option<&'a HeaderValue> {
        let is_listed = |listed: &String| listed == "*" || listed.as_bytes() == origin.as_bytes();
        self.origins.iter().any(is_listed).then_some(origin)
    }

    /// Whether this is a name or an address of rangecache.
    fn is_own(&self, host: &HeaderValue) -> bool {
        if self.hosts.iter().any(|listed| listed == "*") {
            return true;
        }
        let Ok(authority) = Authority::try_from(host.as_bytes()) else {
            // HTTP/1.1 asks for an empty value if there is no name.
            return host.is_empty();
        };
        let host = authority.host().to_ascii_lowercase();
        let host = host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .trim_end_matches('.');
        let is_address = host.parse::<IpAddr>().is_ok();
        is_address || host == "localhost" || self.hosts.iter().any(|listed| listed == host)
    }
}

/// Whether a browser can send such a request.
#[must_use]
pub fn is_of_a_browser<B>(request: &Request<B>, transport: Transport) -> bool {
    request.version() != Version::HTTP_2 || transport.tls
}

/// Replaces etcd's permission for web pages to read the response, by one for `origin`, if there is one.
pub fn set_cors(headers: &mut HeaderMap, origin: Option<HeaderValue>) {
    for name in &CORS_HEADERS {
        headers.remove(name);
    }
    let Some(origin) = origin else {
        return;
    };
    // As etcd writes them.
    let methods = HeaderValue::from_static("POST, GET, OPTIONS, PUT, DELETE");
    let accepted = HeaderValue::from_static("accept, content-type, authorization");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, accepted);
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

fn shown(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes())
        .chars()
        .take(100)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAINTEXT: Transport = Transport {
        tls: false,
        unix: false,
        local: false,
    };
    const TLS: Transport = Transport {
        tls: true,
        unix: false,
        local: false,
    };
    const UNIX: Transport = Transport {
        tls: false,
        unix: true,
        local: true,
    };

    fn check(
        rules: &BrowserRules,
        version: Version,
        transport: Transport,
        headers: &[(&str, &str)],
    ) -> Result<(), BrowserRefusal> {
        let mut request = Request::post("/v3/kv/range").version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        rules.check(&request.body(()).unwrap(), transport)
    }

    fn rules(hosts: &[&str], origins: &[&str]) -> BrowserRules {
        let owned = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let listening: Url = "http://Sidecar.example:2379".parse().unwrap();
        BrowserRules::new([&listening].into_iter(), &owned(hosts), &owned(origins))
    }

    #[test]
    fn host_is_an_address_localhost_or_a_listed_name() {
        let some = rules(&["etcd.internal"], &[]);
        for (host, is_accepted) in [
            ("127.0.0.1:23790", true),
            ("10.1.2.3", true),
            ("[::1]:23790", true),
            ("localhost:23790", true),
            ("LOCALHOST", true),
            ("localhost.", true),
            ("sidecar.example:2379", true),
            ("etcd.internal", true),
            ("ETCD.internal:80", true),
            ("", true),
            ("evil.example:23790", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("2130706433", false),
            ("not a host", false),
        ] {
            let checked = check(&some, Version::HTTP_11, PLAINTEXT, &[("host", host)]);
            assert_eq!(checked.is_ok(), is_accepted, "{host}: {checked:?}");
        }
        let any = rules(&["*"], &[]);
        assert_eq!(
            check(&any, Version::HTTP_11, PLAINTEXT, &[("host", "evil.example")]),
            Ok(())
        );
    }

    #[test]
    fn origin_is_refused_unless_it_is_listed() {
        let headers = [("host", "127.0.0.1"), ("origin", "https://page.example")];
        for (origins, is_accepted) in [
            (&[][..], false),
            (&["https://other.example"], false),
            (&["https://page.example"], true),
            (&["*"], true),
        ] {
            let rules = rules(&[], origins);
            for transport in [PLAINTEXT, TLS, UNIX] {
                let checked = check(&rules, Version::HTTP_11, transport, &headers);
                assert_eq!(checked.is_ok(), is_accepted, "{origins:?} {transport:?}");
            }
            assert!(check(&rules.without_origins(), Version::HTTP_11, PLAINTEXT, &headers).is_err());
            assert_eq!(check(&rules, Version::HTTP_2, TLS, &headers).is_ok(), is_accepted);
        }
        let null = [("origin", "null")];
        assert!(
            check(
                &rules(&[], &["https://page.example"]),
                Version::HTTP_11,
                TLS,
                &null
            )
            .is_err()
        );
    }

    #[test]
    fn requests_that_no_browser_sends_are_not_checked() {
        let rules = rules(&[], &[]);
        let name = [("host", "etcd.default.svc")];
        assert_eq!(check(&rules, Version::HTTP_2, PLAINTEXT, &name), Ok(()));
        assert_eq!(check(&rules, Version::HTTP_11, UNIX, &name), Ok(()));
        assert_eq!(check(&rules, Version::HTTP_11, TLS, &name), Ok(()));
        assert_eq!(check(&rules, Version::HTTP_10, PLAINTEXT, &[]), Ok(()));
        assert!(check(&rules, Version::HTTP_11, PLAINTEXT, &name).is_err());
    }

    #[test]
    fn cors_headers_of_etcd_are_replaced() {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("POST"),
        );
        let mut permitted = headers.clone();
        set_cors(&mut headers, None);
        assert!(headers.is_empty());
        set_cors(
            &mut permitted,
            Some(HeaderValue::from_static("https://page.example")),
        );
        assert_eq!(
            permitted[header::ACCESS_CONTROL_ALLOW_ORIGIN],
            "https://page.example"
        );
        assert_eq!(permitted[header::VARY], "origin");
    }
}
