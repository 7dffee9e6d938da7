//! Endpoints from DNS (`--endpoints-srv`), by the names of etcd's own clients: `_etcd-client-ssl._tcp.DOMAIN` for endpoints
//! with TLS, and `_etcd-client._tcp.DOMAIN` for others, which are used only if there are none with TLS.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use domain::base::iana::{Rcode, Rtype};
use domain::{base::name::Name, rdata::Srv, resolv::StubResolver};
use rangecache_base::net::Url;

use super::{flags::EtcdConfig, pool::Upstream};

/// Interval at which DNS is asked again.
const SRV_INTERVAL: Duration = Duration::from_secs(30);
/// Service of endpoints with TLS, and of those without, with their schemes.
const SERVICES: [(&str, &str); 2] = [("_etcd-client-ssl", "https"), ("_etcd-client", "http")];

/// Why DNS gives no endpoints, with what to do.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SrvError {
    /// The domain is no name.
    #[error("--endpoints-srv {0} is not a domain name")]
    Name(String),
    /// The resolver gave no response, or a failure.
    #[error("--endpoints-srv: no response for {name}: {reason}; check the servers in /etc/resolv.conf")]
    Failed {
        /// The name that was looked up.
        name: String,
        /// Error of the resolver.
        reason: String,
    },
    /// No such records.
    #[error(
        "--endpoints-srv: there is no SRV record for _etcd-client-ssl._tcp.{0} or _etcd-client._tcp.{0}; add them, or name \
         the members in --endpoints"
    )]
    None(String),
    /// Endpoints with TLS in place of others, or the reverse.
    #[error(
        "--endpoints-srv: DNS names endpoints of another scheme than before; restart rangecache to change to TLS or from it"
    )]
    Scheme,
}

impl EtcdConfig {
    /// Asks DNS for the endpoints, if `--endpoints-srv` is given; returns whether it is.
    ///
    /// # Errors
    /// [`SrvError`].
    pub async fn discover(&mut self) -> Result<bool, SrvError> {
        let Some(domain) = &self.endpoints_srv else {
            return Ok(false);
        };
        self.endpoints = endpoints_from_srv(domain).await?;
        Ok(true)
    }

    /// Checks that what DNS names has TLS if, and only if, the process has it towards etcd.
    ///
    /// # Errors
    /// [`SrvError::Scheme`].
    pub fn keeps_tls(&self, has_tls: bool) -> Result<(), SrvError> {
        match &self.endpoints_srv {
            Some(_) => keep_tls(&self.endpoints, has_tls),
            None => Ok(()),
        }
    }
}

/// The endpoints that DNS names for `domain`, in the order of their priorities.
async fn endpoints_from_srv(domain: &str) -> Result<Vec<Url>, SrvError> {
    // A resolver for each lookup: the file that names its servers may have changed.
    endpoints_by(&StubResolver::new(), domain).await
}

async fn endpoints_by(resolver: &StubResolver, domain: &str) -> Result<Vec<Url>, SrvError> {
    for (service, scheme) in SERVICES {
        let urls = lookup(resolver, &format!("{service}._tcp.{domain}"), scheme).await?;
        if !urls.is_empty() {
            return Ok(urls);
        }
    }
    Err(SrvError::None(domain.to_owned()))
}

/// The targets of a name's records as URLs; empty if it has none.
async fn lookup(resolver: &StubResolver, name: &str, scheme: &str) -> Result<Vec<Url>, SrvError> {
    let parsed: Name<Vec<u8>> = name.parse().map_err(|_| SrvError::Name(name.to_owned()))?;
    let failed = |reason: String| SrvError::Failed {
        name: name.to_owned(),
        reason,
    };
    let answer = resolver
        .query((parsed, Rtype::SRV))
        .await
        .map_err(|error| failed(error.to_string()))?;
    match answer.header().rcode() {
        Rcode::NOERROR => {}
        Rcode::NXDOMAIN => return Ok(Vec::new()),
        rcode => return Err(failed(rcode.to_string())),
    }
    let section = answer.answer().map_err(|error| failed(error.to_string()))?;
    let mut targets = BTreeSet::new();
    for record in section.limit_to::<Srv<_>>() {
        let record = record.map_err(|error| failed(error.to_string()))?;
        let srv = record.data();
        let host = srv.target().to_string();
        let host = host.trim_end_matches('.');
        // The root means that the service is not there.
        if !host.is_empty() {
            targets.insert((srv.priority(), format!("{scheme}://{host}:{}", srv.port())));
        }
    }
    targets
        .into_iter()
        .map(|(_, url)| url.parse().map_err(|error| failed(format!("{url}: {error}"))))
        .collect()
}

/// Keeps the endpoints to those that DNS names, if `--endpoints-srv` is given, until the process stops.
pub fn follow_srv(upstream: &Arc<Upstream>, config: &EtcdConfig) {
    let Some(domain) = config.endpoints_srv.clone() else {
        return;
    };
    let (following, used) = (Arc::clone(upstream), config.endpoints.clone());
    upstream.spawn("endpoints from DNS", move || {
        let (upstream, domain, used) = (Arc::clone(&following), domain.clone(), used.clone());
        async move { follow(&upstream, &domain, used).await }
    });
}

async fn follow(upstream: &Upstream, domain: &str, mut used: Vec<Url>) {
    let mut warned = None;
    loop {
        tokio::time::sleep(SRV_INTERVAL).await;
        let found = endpoints_from_srv(domain).await.and_then(|found| {
            keep_tls(&found, upstream.connector().has_tls())?;
            Ok(found)
        });
        match found {
            Ok(found) => {
                if found != used {
                    let endpoints: Vec<_> = found.iter().map(ToString::to_string).collect();
                    tracing::info!(endpoints = endpoints.join(","), "DNS names other endpoints");
                    upstream.set_endpoints(&found);
                    used = found;
                }
                warned = None;
            }
            Err(error) => {
                if warned.as_ref() != Some(&error) {
                    tracing::warn!(%error, "the endpoints stay as they are");
                }
                warned = Some(error);
            }
        }
    }
}

/// Refuses endpoints without TLS if the process has it towards etcd, so that a wrong answer of DNS does not switch it off,
/// and the reverse.
fn keep_tls(found: &[Url], has_tls: bool) -> Result<(), SrvError> {
    if found.iter().any(|url| url.tls) == has_tls {
        Ok(())
    } else {
        Err(SrvError::Scheme)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use clap::Parser as _;
    use domain::base::{Message, Record, Ttl};
    use domain::base::{iana::Class, message_builder::MessageBuilder};
    use domain::resolv::stub::conf::{ResolvConf, ServerConf, Transport};
    use tokio::net::UdpSocket;

    use super::*;

    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        etcd: EtcdConfig,
    }

    /// A record: name, priority, port and target.
    type Row = (&'static str, u16, u16, &'static str);

    /// A resolver before a server that has these records; names that begin with `_broken` fail.
    async fn resolver(rows: &'static [Row]) -> StubResolver {
        let socket = UdpSocket::bind(("127.0.0.1", 0)).await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(async move {
            let mut buffer = [0; 1500];
            loop {
                let (length, peer) = socket.recv_from(&mut buffer).await.unwrap();
                let query = Message::from_octets(&buffer[..length]).unwrap();
                socket.send_to(&response(&query, rows), peer).await.unwrap();
            }
        });
        resolver_of(address)
    }

    fn resolver_of(address: SocketAddr) -> StubResolver {
        let mut conf = ResolvConf::new();
        conf.servers = vec![ServerConf::new(address, Transport::UdpTcp)];
        StubResolver::from_conf(conf)
    }

    fn response(query: &Message<&[u8]>, rows: &[Row]) -> Vec<u8> {
        let name = query.sole_question().unwrap().qname().to_string();
        let found: Vec<_> = rows.iter().filter(|(of, ..)| *of == name).collect();
        let rcode = match found.is_empty() {
            _ if name.contains(".broken") => Rcode::SERVFAIL,
            true => Rcode::NXDOMAIN,
            false => Rcode::NOERROR,
        };
        let builder = MessageBuilder::new_vec();
        let mut answer = builder.start_answer(query, rcode).unwrap();
        for (of, priority, port, target) in found {
            let of: Name<Vec<u8>> = of.parse().unwrap();
            let target: Name<Vec<u8>> = target.parse().unwrap();
            let srv = Srv::new(*priority, 0, *port, target);
            answer
                .push(Record::new(of, Class::IN, Ttl::from_secs(5), srv))
                .unwrap();
        }
        answer.finish()
    }

    fn texts(urls: &[Url]) -> Vec<String> {
        urls.iter().map(ToString::to_string).collect()
    }

    #[tokio::test]
    async fn endpoints_with_tls_are_used_alone_in_the_order_of_their_priorities() {
        let resolver = resolver(&[
            ("_etcd-client-ssl._tcp.etcd.example", 20, 2379, "b.etcd.example."),
            ("_etcd-client-ssl._tcp.etcd.example", 10, 2380, "c.etcd.example."),
            ("_etcd-client-ssl._tcp.etcd.example", 20, 2379, "b.etcd.example."),
            ("_etcd-client._tcp.etcd.example", 1, 2379, "plain.etcd.example."),
            ("_etcd-client._tcp.plain.example", 1, 2379, "plain.example."),
        ])
        .await;
        let found = endpoints_by(&resolver, "etcd.example").await.unwrap();
        assert_eq!(
            texts(&found),
            ["https://c.etcd.example:2380", "https://b.etcd.example:2379"]
        );
        let found = endpoints_by(&resolver, "plain.example").await.unwrap();
        assert_eq!(texts(&found), ["http://plain.example:2379"]);
    }

    #[tokio::test]
    async fn missing_records_and_failures_are_errors_that_name_the_domain() {
        let resolver = resolver(&[("_etcd-client._tcp.gone.example", 0, 0, ".")]).await;
        for domain in ["none.example", "gone.example"] {
            let error = endpoints_by(&resolver, domain).await.unwrap_err();
            assert_eq!(error, SrvError::None(domain.to_owned()));
        }
        let error = endpoints_by(&resolver, "broken.example")
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("_etcd-client-ssl._tcp.broken.example: SERVFAIL"),
            "{error}"
        );
        let error = endpoints_by(&resolver, "two..dots").await.unwrap_err();
        assert!(matches!(error, SrvError::Name(_)), "{error}");
    }

    #[test]
    fn endpoints_with_tls_are_not_replaced_by_others() {
        let parse = |url: &str| vec![url.parse::<Url>().unwrap()];
        let (plain, tls) = (parse("http://a:1"), parse("https://a:1"));
        assert_eq!(keep_tls(&plain, true), Err(SrvError::Scheme));
        assert_eq!(keep_tls(&tls, false), Err(SrvError::Scheme));
        assert_eq!(keep_tls(&tls, true), Ok(()));
        let named = |flag: &str| Flags::try_parse_from(["rangecache", flag]).unwrap().etcd;
        let by_dns = EtcdConfig {
            endpoints: plain,
            ..named("--endpoints-srv=etcd.example")
        };
        assert_eq!(by_dns.keeps_tls(true), Err(SrvError::Scheme));
        assert_eq!(by_dns.keeps_tls(false), Ok(()));
        assert_eq!(
            named("--endpoints=http://a:1").keeps_tls(true),
            Ok(()),
            "an operator's choice"
        );
    }
}
