//! TLS of both sides, of the flags of several rooms.

use std::sync::Arc;

use super::flags::Config;
use rangecache_base::net::Url;
use rangecache_base::telemetry::Metrics;
use rangecache_edge::tls::{Acceptor, Connector, FileError};

impl Config {
    /// TLS towards etcd.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn connector(&self, metrics: &Arc<Metrics>) -> Result<Arc<Connector>, FileError> {
        let names_callers = self.etcd.certificates_name_callers();
        Connector::open(&self.tls, &self.etcd.all_endpoints(), names_callers, metrics)
    }

    /// TLS towards clients; `None` if no listener has it.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn acceptor(&self, metrics: &Arc<Metrics>) -> Result<Option<Arc<Acceptor>>, FileError> {
        let urls: Vec<&Url> = self.listen.urls().collect();
        Acceptor::open(&self.tls, &urls, self.max_handshakes(), metrics)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn parse(flags: &str) -> Result<Config, clap::Error> {
        Config::try_parse_from(std::iter::once("rangecache").chain(flags.split_whitespace()))
    }

    #[test]
    fn contradictions_are_refused_with_a_remedy() {
        let https = "--listen-client-urls https://127.0.0.1:1";
        for (flags, says) in [
            ("--cert a", "give both"),
            ("--key a", "--cert"),
            ("--cert-file a", "--key-file"),
            (
                "--listen-client-urls https://127.0.0.1:1",
                "--cert-file and --key-file",
            ),
            ("--listen-client-urls unixs:///a", "needs a certificate"),
            ("--listen-metrics-urls https://127.0.0.1:1", "needs a certificate"),
            ("--cacert a", "write https://"),
            ("--insecure-skip-tls-verify", "write https://"),
            ("--auto-tls", "write https://"),
            ("--cert-file a --key-file b", "write https://"),
            (
                "--listen-client-urls http://0.0.0.0:1",
                "--allow-plaintext-listener",
            ),
            ("--listen-client-urls http://etcd:1", "--allow-plaintext-listener"),
            ("--listen-client-urls http://[::]:1", "--allow-plaintext-listener"),
        ] {
            let error = parse(flags).unwrap().validate().unwrap_err().to_string();
            assert!(error.contains(says), "{flags}: {error}");
        }
        for (flags, says) in [
            ("--auto-tls --cert-file a --key-file b", "leave one"),
            ("--auto-tls --client-cert-auth", "--trusted-ca-file"),
            ("--auto-tls --client-crl-file a", "--trusted-ca-file"),
            ("--auto-tls --client-cert-allowed-hostname a", "--trusted-ca-file"),
            (
                "--auto-tls --tls-min-version TLS1.3 --tls-max-version TLS1.2",
                "no version is left",
            ),
            (
                "--auto-tls --tls-max-version TLS1.2 --cipher-suites TLS_AES_128_GCM_SHA256",
                "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
            ),
            ("--auto-tls --tls-reload-interval 0s", "longer than zero"),
        ] {
            let error = parse(&format!("{https} {flags}"))
                .unwrap()
                .validate()
                .unwrap_err()
                .to_string();
            assert!(error.contains(says), "{flags}: {error}");
        }
    }

    #[test]
    fn consistent_flags_are_valid() {
        for flags in [
            "--listen-client-urls http://localhost:1,http://127.0.0.9:1,http://[::1]:1,unix:///a",
            "--listen-client-urls http://0.0.0.0:1 --allow-plaintext-listener",
            "--listen-client-urls http://0.0.0.0:1 --allow-plaintext-listener=true",
            "--listen-metrics-urls http://0.0.0.0:1",
            "--listen-client-urls https://0.0.0.0:1 --auto-tls",
            "--listen-client-urls https://0.0.0.0:1 --cert-file a --key-file b --trusted-ca-file c --client-cert-auth=true",
            "--endpoints https://etcd:1,unixs:///b --cacert a --cert b --key c",
            "--endpoints https://etcd:1",
        ] {
            parse(flags).unwrap().validate().unwrap();
        }
    }
}
