//! Flags of TLS on both sides, under etcd's names where etcd has them.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use rangecache_base::flags::{Switch as _, parse_duration};
use rangecache_base::net::Url;
use rustls::{CipherSuite, SupportedCipherSuite, crypto::aws_lc_rs::ALL_CIPHER_SUITES};

/// TLS on both sides: towards etcd and towards clients.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "TLS")]
pub struct TlsConfig {
    /// CAs that must have issued etcd's certificate, PEM [default: the system's CAs]
    ///
    /// When to change it: etcd's certificate is signed by a CA of your own
    #[arg(long, value_name = "FILE")]
    pub cacert: Option<PathBuf>,

    /// Client certificate for etcd, PEM, with any intermediates; preferably without a CN, which etcd's auth takes for a
    /// user name
    ///
    /// When to change it: etcd requires client certificates; use one without a CN, see docs/security.md
    #[arg(long, value_name = "FILE")]
    pub cert: Option<PathBuf>,

    /// Key of --cert, PEM, not encrypted
    ///
    /// When to change it: with `--cert`
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// Do not verify etcd's certificate. Insecure: for tests only
    ///
    /// When to change it: in tests only
    #[arg(long, switch())]
    pub insecure_skip_tls_verify: bool,

    /// Certificate of the https:// and unixs:// listeners, PEM, with any intermediates
    ///
    /// When to change it: for `https://` and `unixs://`
    #[arg(long, value_name = "FILE")]
    pub cert_file: Option<PathBuf>,

    /// Key of --cert-file, PEM, not encrypted
    ///
    /// When to change it: with `--cert-file`
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,

    /// CAs that must have issued clients' certificates, PEM; as in etcd, clients then need a certificate
    ///
    /// When to change it: clients must present a certificate signed by this CA
    #[arg(long, value_name = "FILE")]
    pub trusted_ca_file: Option<PathBuf>,

    /// Refuse clients without a certificate from --trusted-ca-file
    ///
    /// When to change it: as in etcd; `--trusted-ca-file` alone has the same effect
    #[arg(long, switch())]
    pub client_cert_auth: bool,

    /// Revocation list of clients' certificates (CRL), PEM or DER, signed by the CA that issued the certificates
    ///
    /// When to change it: client certificates are revoked
    #[arg(long, value_name = "FILE")]
    pub client_crl_file: Option<PathBuf>,

    /// Host names, comma-separated; clients whose certificate is for none of them are refused
    ///
    /// When to change it: restrict client certificates to these host names
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub client_cert_allowed_hostname: Vec<String>,

    /// Generate a self-signed certificate for the listeners at each start; clients cannot verify it
    ///
    /// When to change it: encryption without certificate files, and without proof of the server's identity
    #[arg(long, switch())]
    pub auto_tls: bool,

    /// Oldest TLS version, on both sides
    ///
    /// When to change it: your policy requires it
    #[arg(long, value_name = "VERSION", value_enum, default_value_t = TlsVersion::V1_2)]
    pub tls_min_version: TlsVersion,

    /// Newest TLS version, on both sides
    ///
    /// When to change it: your policy requires it
    #[arg(long, value_name = "VERSION", value_enum, default_value_t = TlsVersion::V1_3)]
    pub tls_max_version: TlsVersion,

    /// Cipher suites of TLS 1.2, on both sides, comma-separated, under etcd's names; all suites of TLS 1.3 stay enabled
    /// unless some are named [default: all safe ones]
    ///
    /// When to change it: your policy requires it
    #[arg(long, value_name = "SUITE,…", value_delimiter = ',', value_parser = parse_suite)]
    pub cipher_suites: Vec<CipherSuite>,

    /// Interval at which certificates, keys, CAs and the CRL are checked for changes
    ///
    /// When to change it: replaced certificates must be used sooner
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub tls_reload_interval: Duration,

    /// Time limit for a client's handshake, the wait for its turn included
    ///
    /// When to change it: clients have high latency
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub tls_handshake_timeout: Duration,

    /// Clients' handshakes whose keys and signatures are computed at once; more wait for their turn, and a client that
    /// has sent nothing has none [default: half of --worker-threads, at least 1; requests keep the others]
    ///
    /// When to change it: more of the threads may compute handshakes while clients reconnect, at the cost of the
    /// requests of others
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tls_max_handshakes: Option<u32>,
}

/// A TLS version, as etcd's flags write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum TlsVersion {
    /// TLS 1.2
    #[value(name = "TLS1.2")]
    V1_2,
    /// TLS 1.3
    #[value(name = "TLS1.3")]
    V1_3,
}

/// A contradiction among the flags of TLS and the listeners, with what to write instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TlsFlagError {
    /// A certificate without its key, or a key without its certificate.
    #[error(
        "--{given} is given without --{missing}: a certificate and its key belong together; give both or neither"
    )]
    Alone {
        /// The flag that is there.
        given: &'static str,
        /// The flag that is not.
        missing: &'static str,
    },
    /// A flag about clients' certificates, without the CAs that issue them.
    #[error(
        "--{0} needs --trusted-ca-file: name the CAs that issue clients' certificates, or leave --{0} out"
    )]
    NoTrustedCa(&'static str),
    /// An https:// listener without a certificate.
    #[error(
        "{0} needs a certificate: give --cert-file and --key-file, or --auto-tls for one that clients cannot verify"
    )]
    NoCertificate(Url),
    /// Both kinds of certificate.
    #[error("--auto-tls and --cert-file contradict each other: leave one of them out")]
    TwoCertificates,
    /// TLS is set up, but no URL asks for it.
    #[error(
        "--{flag} is given, but no URL of {urls} is https:// or unixs://: nothing would be encrypted; write https:// \
         there, or leave --{flag} out"
    )]
    Unused {
        /// The flag.
        flag: &'static str,
        /// The flag or flags that hold the URLs.
        urls: &'static str,
    },
    /// A plaintext listener that other machines can reach.
    #[error(
        "--listen-client-urls {0} accepts clients of other machines without TLS: write https:// with --cert-file and \
         --key-file, listen on 127.0.0.1 or unix://, or, where the network itself is trusted, add \
         --allow-plaintext-listener"
    )]
    PlaintextListener(Url),
    /// Minimum and maximum exclude every version.
    #[error("--tls-min-version is above --tls-max-version: no version is left")]
    NoVersion,
    /// No cipher suite fits the versions.
    #[error("--cipher-suites leaves none for {0}: name one of {1}")]
    NoSuite(&'static str, String),
    /// A host name that cannot be in a certificate.
    #[error("--{flag} {name:?} cannot be in a certificate: write a DNS name or an IP address")]
    BadName {
        /// The flag.
        flag: &'static str,
        /// The host name.
        name: String,
    },
    /// A duration of zero.
    #[error("--{0} must be longer than zero: write for example 10s")]
    ZeroDuration(&'static str),
}

impl TlsConfig {
    /// Checks the flags against each other and against the URLs: of etcd, and of the listeners for clients and for operators.
    /// Files are not read.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn validate(
        &self,
        endpoints: &[Url],
        clients: &[&Url],
        operators: &[Url],
        allows_plaintext: bool,
    ) -> Result<(), TlsFlagError> {
        for (given, value, missing, other) in [
            ("cert", &self.cert, "key", &self.key),
            ("key", &self.key, "cert", &self.cert),
            ("cert-file", &self.cert_file, "key-file", &self.key_file),
            ("key-file", &self.key_file, "cert-file", &self.cert_file),
        ] {
            if value.is_some() && other.is_none() {
                return Err(TlsFlagError::Alone { given, missing });
            }
        }
        if self.auto_tls && self.cert_file.is_some() {
            return Err(TlsFlagError::TwoCertificates);
        }
        let allows_names = !self.client_cert_allowed_hostname.is_empty();
        for (flag, given) in [
            ("client-cert-auth", self.client_cert_auth),
            ("client-crl-file", self.client_crl_file.is_some()),
            ("client-cert-allowed-hostname", allows_names),
        ] {
            if given && self.trusted_ca_file.is_none() {
                return Err(TlsFlagError::NoTrustedCa(flag));
            }
        }
        self.validate_urls(endpoints, clients, operators)?;
        if let Some(url) = clients.iter().find(|url| url.is_plaintext_beyond_loopback())
            && !allows_plaintext
        {
            return Err(TlsFlagError::PlaintextListener((*url).clone()));
        }
        self.validate_versions()?;
        for name in &self.client_cert_allowed_hostname {
            if rustls::pki_types::ServerName::try_from(name.as_str()).is_err() {
                let (flag, name) = ("client-cert-allowed-hostname", name.clone());
                return Err(TlsFlagError::BadName { flag, name });
            }
        }
        for (flag, value) in [
            ("tls-reload-interval", self.tls_reload_interval),
            ("tls-handshake-timeout", self.tls_handshake_timeout),
        ] {
            if value.is_zero() {
                return Err(TlsFlagError::ZeroDuration(flag));
            }
        }
        Ok(())
    }

    fn validate_urls(
        &self,
        endpoints: &[Url],
        clients: &[&Url],
        operators: &[Url],
    ) -> Result<(), TlsFlagError> {
        let upstream = [
            ("cacert", self.cacert.is_some()),
            ("cert", self.cert.is_some()),
            ("insecure-skip-tls-verify", self.insecure_skip_tls_verify),
        ];
        let listener = [
            ("cert-file", self.cert_file.is_some()),
            ("auto-tls", self.auto_tls),
            ("trusted-ca-file", self.trusted_ca_file.is_some()),
        ];
        // There are none before DNS was asked for them.
        let any_upstream = endpoints.is_empty() || endpoints.iter().any(|url| url.tls);
        let mut listeners = clients.iter().copied().chain(operators);
        let first_listener = listeners.find(|url| url.tls);
        for (flags, used, urls) in [
            (upstream, any_upstream, "--endpoints"),
            (
                listener,
                first_listener.is_some(),
                "--listen-client-urls and --listen-metrics-urls",
            ),
        ] {
            if !used && let Some((flag, _)) = flags.into_iter().find(|(_, given)| *given) {
                return Err(TlsFlagError::Unused { flag, urls });
            }
        }
        if let Some(url) = first_listener
            && self.cert_file.is_none()
            && !self.auto_tls
        {
            return Err(TlsFlagError::NoCertificate(url.clone()));
        }
        for url in endpoints.iter().filter(|url| url.tls) {
            if url.server_name().is_none() {
                let (flag, name) = ("endpoints", url.to_string());
                return Err(TlsFlagError::BadName { flag, name });
            }
        }
        Ok(())
    }

    fn validate_versions(&self) -> Result<(), TlsFlagError> {
        if self.tls_min_version > self.tls_max_version {
            return Err(TlsFlagError::NoVersion);
        }
        if !self.cipher_suites.is_empty() && self.suites().is_empty() {
            let version = match self.tls_max_version {
                TlsVersion::V1_2 => "TLS 1.2",
                TlsVersion::V1_3 => "TLS 1.3",
            };
            return Err(TlsFlagError::NoSuite(version, suite_names()));
        }
        Ok(())
    }

    /// Enabled cipher suites of the enabled versions, by preference.
    #[must_use]
    pub fn suites(&self) -> Vec<SupportedCipherSuite> {
        let named = |suite: &SupportedCipherSuite| self.cipher_suites.contains(&suite.suite());
        let names_1_3 = ALL_CIPHER_SUITES
            .iter()
            .any(|suite| suite.tls13().is_some() && named(suite));
        ALL_CIPHER_SUITES
            .iter()
            .filter(|suite| match suite.tls13() {
                // As in etcd, the list is about TLS 1.2. But if it names suites of 1.3, only these are enabled.
                Some(_) => self.tls_max_version >= TlsVersion::V1_3 && (!names_1_3 || named(suite)),
                None => {
                    self.tls_min_version <= TlsVersion::V1_2
                        && (self.cipher_suites.is_empty() || named(suite))
                }
            })
            .copied()
            .collect()
    }
}

/// A suite's name as Go, and so etcd, writes it.
fn suite_name(suite: CipherSuite) -> String {
    format!("{suite:?}").replacen("TLS13_", "TLS_", 1)
}

fn suite_names() -> String {
    let names: Vec<_> = ALL_CIPHER_SUITES
        .iter()
        .map(|suite| suite_name(suite.suite()))
        .collect();
    names.join(", ")
}

fn parse_suite(text: &str) -> Result<CipherSuite, String> {
    ALL_CIPHER_SUITES
        .iter()
        .map(SupportedCipherSuite::suite)
        .find(|suite| suite_name(*suite) == text.trim())
        .ok_or_else(|| format!("unsupported cipher suite; supported: {}", suite_names()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        tls: TlsConfig,
    }

    fn parse(flags: &str) -> Result<Flags, clap::Error> {
        Flags::try_parse_from(std::iter::once("rangecache").chain(flags.split_whitespace()))
    }

    #[test]
    fn suites_have_etcds_names() {
        let suites = |flags: &str| -> Vec<_> {
            let flags = parse(flags).unwrap();
            flags
                .tls
                .suites()
                .iter()
                .map(|suite| suite_name(suite.suite()))
                .collect()
        };
        assert_eq!(suites("").len(), ALL_CIPHER_SUITES.len());
        let one = "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384";
        assert_eq!(
            suites(&format!("--cipher-suites {one} --tls-max-version TLS1.2")),
            [one]
        );
        assert_eq!(
            suites(&format!("--cipher-suites {one}")).len(),
            4,
            "1.3 keeps its three"
        );
        let both = format!("--cipher-suites {one},TLS_AES_128_GCM_SHA256");
        assert_eq!(suites(&both).len(), 2);
        assert!(parse("--cipher-suites TLS_RSA_WITH_RC4_128_SHA").is_err());
    }
}
