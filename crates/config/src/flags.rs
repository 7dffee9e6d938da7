//! [`Config`]: all flags of serving, the checks across them, and TLS of both sides, of the flags of several rooms.

use std::{path::PathBuf, sync::Arc};

use clap::{Args, Parser};
use rangecache_base::telemetry::{AccessLogConfig, LogConfig, Metrics, TraceConfig};
use rangecache_base::{flags::Switch as _, net::Url};
use rangecache_edge::limits::{ClientsConfig, LimitsConfig};
use rangecache_edge::server::ListenConfig;
use rangecache_edge::tls::{Acceptor, Connector, FileError, TlsConfig, TlsFlagError};
use rangecache_mirror::{ImageError, MirrorConfig, check_images};
use rangecache_proxy::{ForwardConfig, WatchConfig};
use rangecache_upstream::{AccountError, CallerIsError, EtcdConfig};

/// Flags of serving. Each can also be given as the environment variable `RANGECACHE_<FLAG>`.
#[derive(Parser, Debug, Clone)]
#[command(
    name = "rangecache",
    about = "A transparent caching gRPC proxy in front of etcd: linearizable reads from memory, never stale",
    long_about = "rangecache listens as an etcd endpoint. Point any etcd v3 client at it and change nothing else.\n\n\
        Reads that can be proven fresh are answered from memory; everything else is forwarded to etcd \
        unchanged. Nothing is stored: a restart loses the cache and nothing else.",
    after_help = "Examples:\n  \
        rangecache --endpoints http://127.0.0.1:2379\n      \
        mirror the whole keyspace, serve clients on http://127.0.0.1:23790\n  \
        rangecache --endpoints http://a:2379,http://b:2379 \\\n    \
            --cache-prefix /registry/ --no-cache-prefix /registry/events/\n      \
        mirror /registry/ but not the events, from a cluster of two known members\n  \
        etcdctl --endpoints 127.0.0.1:23790 get --prefix /registry/\n      \
        read through rangecache\n  \
        rangecache --endpoints https://etcd:2379 --cacert ca.crt \\\n    \
            --cert client.crt --key client.key \\\n    \
            --listen-client-urls https://0.0.0.0:23790 --cert-file server.crt \\\n    \
            --key-file server.key --trusted-ca-file ca.crt\n      \
        mutual TLS on both sides\n\n\
        Every flag can be set in the environment: --cache-prefix as RANGECACHE_CACHE_PREFIX (lists comma-separated)."
)]
pub struct Config {
    /// etcd.
    #[command(flatten)]
    pub etcd: EtcdConfig,
    /// Listening sockets.
    #[command(flatten)]
    pub listen: ListenConfig,
    /// Mirrors.
    #[command(flatten)]
    pub mirror: MirrorConfig,
    /// Reads that are forwarded.
    #[command(flatten)]
    pub forward: ForwardConfig,
    /// Watches.
    #[command(flatten)]
    pub watch: WatchConfig,
    /// Connections, calls and threads.
    #[command(flatten)]
    pub limits: LimitsConfig,
    /// Clients.
    #[command(flatten)]
    pub clients: ClientsConfig,
    /// TLS on both sides.
    #[command(flatten)]
    pub tls: TlsConfig,
    /// The log.
    #[command(flatten)]
    pub log: LogConfig,
    /// The access log.
    #[command(flatten)]
    pub access_log: AccessLogConfig,
    /// Traces.
    #[command(flatten)]
    pub trace: TraceConfig,
    /// The process.
    #[command(flatten)]
    pub process: ProcessConfig,
    /// The file with further flags.
    #[command(flatten)]
    pub file: FileConfig,
}

/// A flag that contradicts another, or that cannot work, with what to write instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// An empty prefix.
    #[error(
        "--{flag} is given an empty prefix: leave --{flag} out to mean the whole keyspace, or write a prefix such as \
         /registry/"
    )]
    EmptyPrefix {
        /// The flag.
        flag: &'static str,
    },
    /// Every mirrored prefix is also left out.
    #[error(
        "--no-cache-prefix leaves out all that --cache-prefix asks for ({0:?}): nothing would be cached; remove one of \
         them"
    )]
    NothingToCache(String),
    /// An exclusion that excludes nothing.
    #[error(
        "--no-cache-prefix {0:?} lies outside of every --cache-prefix, so that it has no effect: correct it, or remove it"
    )]
    UselessExclusion(String),
    /// A key of images, and no images.
    #[error("--image-key-file has no effect without --image-dir: add --image-dir, or remove it")]
    KeyWithoutImages,
    /// No memory for mirrors.
    #[error("--cache-max-bytes 0 leaves no memory for any key: write for example 1GiB, or leave it out")]
    NoMemory,
    /// An endpoint that is given twice.
    #[error("{0} is twice in --endpoints and --fallback-endpoints: name each member once")]
    DuplicateEndpoint(Url),
    /// rangecache in front of itself.
    #[error(
        "{0} is both in --endpoints and in --listen-client-urls or --read-only-listen-client-urls: rangecache would call \
         itself; point --endpoints at etcd"
    )]
    Loop(Url),
    /// A duration of zero where none is possible.
    #[error("--{flag} must be longer than zero: write for example {example}")]
    ZeroDuration {
        /// The flag.
        flag: &'static str,
        /// A value that works.
        example: &'static str,
    },
    /// See [`AccountError`].
    #[error(transparent)]
    Account(#[from] AccountError),
    /// A token that would be sent in plain text.
    #[error(
        "--{flag} {url} would get the token of --user in plain text, which other endpoints get by TLS: write https:// there"
    )]
    PlaintextToken {
        /// The flag.
        flag: &'static str,
        /// The URL.
        url: Url,
    },
    /// See [`CallerIsError`].
    #[error(transparent)]
    CallerIs(#[from] CallerIsError),
    /// A log level that `tracing` does not know.
    #[error(
        "--log-level {0:?} is not a level: write error, warn, info, debug or trace, or for example \
         info,rangecache::mirror=debug"
    )]
    LogLevel(String),
    /// See [`TlsFlagError`].
    #[error(transparent)]
    Tls(#[from] TlsFlagError),
}

/// A file that a flag names and that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FileFlagError {
    /// See [`AccountError`].
    #[error(transparent)]
    Account(#[from] AccountError),
    /// See [`ImageError`].
    #[error(transparent)]
    Image(#[from] ImageError),
}

impl Config {
    /// Bound on buffered bytes: the flag, otherwise a part of what mirrors and watches leave of the memory limit.
    #[must_use]
    pub fn buffer_max_bytes(&self) -> u64 {
        let others = self.mirror.max_bytes().saturating_add(self.watch.max_bytes());
        self.limits.buffer_max_bytes(others)
    }

    /// Handshakes computed at once: the flag, otherwise half of the threads that serve calls.
    #[must_use]
    pub fn max_handshakes(&self) -> usize {
        let half = (self.limits.worker_threads() / 2).max(1);
        self.tls.tls_max_handshakes.map_or(half, |max| max as usize)
    }

    /// Checks the file of `--password-file` and the images, which nothing but `rangecache serve` opens itself.
    ///
    /// # Errors
    /// The file that cannot be used, with its flag.
    pub fn check_files(&self) -> Result<(), FileFlagError> {
        self.etcd.account()?;
        Ok(check_images(&self.mirror)?)
    }

    /// Checks what the parser of a single flag cannot, without a look at the files that flags name.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mirror = &self.mirror;
        for (flag, prefixes) in [
            ("cache-prefix", &mirror.cache_prefix),
            ("no-cache-prefix", &mirror.no_cache_prefix),
        ] {
            if prefixes.iter().any(String::is_empty) {
                return Err(ConfigError::EmptyPrefix { flag });
            }
        }
        let is_excluded = |prefix: &String| {
            mirror
                .no_cache_prefix
                .iter()
                .any(|out| prefix.starts_with(out.as_str()))
        };
        if let Some(first) = mirror.cache_prefix.first()
            && mirror.cache_prefix.iter().all(is_excluded)
        {
            return Err(ConfigError::NothingToCache(first.clone()));
        }
        let is_outside = |out: &&String| {
            let overlaps =
                |prefix: &String| prefix.starts_with(out.as_str()) || out.starts_with(prefix.as_str());
            !mirror.cache_prefix.is_empty() && !mirror.cache_prefix.iter().any(overlaps)
        };
        if let Some(outside) = mirror.no_cache_prefix.iter().find(is_outside) {
            return Err(ConfigError::UselessExclusion(outside.clone()));
        }
        if mirror.cache_max_bytes == Some(0) {
            return Err(ConfigError::NoMemory);
        }
        if mirror.image_key_file.is_some() && mirror.image_dir.is_none() {
            return Err(ConfigError::KeyWithoutImages);
        }
        self.etcd.check_account()?;
        let endpoints = self.etcd.all_endpoints();
        for (index, url) in endpoints.iter().enumerate() {
            if endpoints[..index].contains(url) {
                return Err(ConfigError::DuplicateEndpoint(url.clone()));
            }
            let is_listener = |listener: &Url| listener.address == url.address;
            if self.listen.all_client_urls().any(is_listener) {
                return Err(ConfigError::Loop(url.clone()));
            }
        }
        // As for members that advertise URLs without TLS.
        if self.etcd.user.is_some() && endpoints.iter().any(|url| url.tls) {
            for (flag, urls) in [
                ("endpoints", &self.etcd.endpoints),
                ("fallback-endpoints", &self.etcd.fallback_endpoints),
                ("warm-from", &mirror.warm_from),
            ] {
                if let Some(url) = urls.iter().find(|url| url.is_plaintext_beyond_loopback()) {
                    let url = url.clone();
                    return Err(ConfigError::PlaintextToken { flag, url });
                }
            }
        }
        for (flag, value, example) in [
            ("freshness-timeout", mirror.freshness_timeout, "3s"),
            ("connect-timeout", self.etcd.connect_timeout, "5s"),
            ("probe-interval", self.etcd.probe_interval, "1s"),
            ("series-ttl", self.forward.series_ttl, "75s"),
            (
                "watch-progress-notify-interval",
                self.watch.progress_notify_interval,
                "5s",
            ),
        ] {
            if value.is_zero() {
                return Err(ConfigError::ZeroDuration { flag, example });
            }
        }
        if !self.log.is_valid() {
            return Err(ConfigError::LogLevel(self.log.level.clone()));
        }
        let clients: Vec<&Url> = self.listen.all_client_urls().collect();
        self.tls.validate(
            &endpoints,
            &clients,
            &self.listen.metrics_urls,
            self.listen.allow_plaintext,
        )?;
        self.etcd.validate_callers(&self.tls, &clients)?;
        Ok(())
    }
}

/// The file with further flags.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "File")]
pub struct FileConfig {
    /// File of settings as `rangecache config` prints them, one RANGECACHE_FLAG=value per line; the command line and the environment win over it. Read again on SIGHUP
    /// and POST /reload [default: none]
    ///
    /// When to change it: flags should change without a restart
    /// (docs/reference/flags.md#changes-without-a-restart), or come from a ConfigMap
    #[arg(long = "flags-file", value_name = "FILE")]
    pub flags_file: Option<PathBuf>,
}

/// The process.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Process")]
pub struct ProcessConfig {
    /// Permit core dumps, and tools of the same user that read the process's memory (gdb, strace, perf). Linux alone
    /// forbids them otherwise: memory holds values of etcd, keys and passwords
    ///
    /// When to change it: a crash is to be analysed, or the process profiled or traced by its own user: core dumps,
    /// gdb, strace and perf then see memory, with all that is mirrored
    #[arg(long, switch())]
    pub core_dumps: bool,
}

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

    fn parse(flags: &[&str]) -> Config {
        Config::try_parse_from(std::iter::once(&"rangecache").chain(flags)).unwrap()
    }

    #[test]
    fn defaults_are_valid() {
        let config = parse(&[]);
        assert_eq!(config.validate(), Ok(()));
        assert!(config.mirror.max_bytes() > 0);
    }

    #[test]
    fn contradictions_are_refused_with_a_remedy() {
        for (flags, says) in [
            (vec!["--cache-prefix", ""], "leave --cache-prefix out"),
            (
                vec!["--cache-prefix", "/a/", "--no-cache-prefix", "/a"],
                "nothing would be cached",
            ),
            (
                vec![
                    "--endpoints",
                    "http://127.0.0.1:1",
                    "--listen-client-urls",
                    "http://127.0.0.1:1",
                ],
                "call itself",
            ),
            (
                vec!["--cache-prefix", "/a/", "--no-cache-prefix", "/a/x/,/b/"],
                "\"/b/\" lies outside of every --cache-prefix",
            ),
            (vec!["--cache-max-bytes", "0"], "no memory for any key"),
            (
                vec!["--endpoints", "http://a:1,http://b:1,http://a:1"],
                "http://a:1 is twice",
            ),
            (vec!["--freshness-timeout", "0s"], "longer than zero"),
            (vec!["--user", "mirror"], "has no password"),
            (vec!["--user", ":x"], "neither of them empty"),
            (vec!["--password", "x"], "add --user"),
            (vec!["--image-key-file", "key"], "add --image-dir"),
            (vec!["--log-level", "rangecache=loud"], "error, warn, info"),
            (vec!["--log-level", "loud"], "error, warn, info"),
        ] {
            let error = parse(&flags).validate().unwrap_err().to_string();
            assert!(error.contains(says), "{flags:?}: {error}");
        }
    }

    #[test]
    fn token_is_not_sent_in_plain_text_beside_tls() {
        let validated = |flags: &str| {
            let flags: Vec<_> = flags.split_whitespace().collect();
            parse(&flags).validate().map_err(|error| error.to_string())
        };
        let user = "--user mirror:secret --endpoints https://etcd:1";
        for (flag, url) in [
            ("warm-from", "http://10.0.0.2:23790"),
            ("warm-from", "https://a:1,http://b:1"),
            ("fallback-endpoints", "http://etcd-2:1"),
        ] {
            let error = validated(&format!("{user} --{flag} {url}")).unwrap_err();
            assert!(error.contains(&format!("--{flag} http://")), "{error}");
            // Without a token, and where nothing has TLS.
            assert_eq!(
                validated(&format!("--endpoints https://etcd:1 --{flag} {url}")),
                Ok(())
            );
        }
        let error = validated("--user mirror:secret --endpoints https://etcd:1,http://etcd-2:1").unwrap_err();
        assert!(error.contains("--endpoints http://etcd-2:1"), "{error}");
        for allowed in [
            "--user a:b --endpoints http://etcd:1 --warm-from http://b:1",
            "--user a:b --endpoints https://etcd:1 --warm-from https://b:1,http://127.0.0.1:2,http://localhost:3,unix:///s",
        ] {
            assert_eq!(validated(allowed), Ok(()), "{allowed}");
        }
    }

    #[test]
    fn files_are_no_part_of_the_flags() {
        let folder = ["--image-dir", "/dev/null"];
        let password = ["--user", "mirror", "--password-file", "/does/not/exist"];
        for (flags, says) in [
            (&folder[..], "--image-dir /dev/null"),
            (&password, "--password-file /does"),
        ] {
            let config = parse(flags);
            assert_eq!(config.validate(), Ok(()));
            let error = config.check_files().unwrap_err().to_string();
            assert!(error.contains(says), "{flags:?}: {error}");
        }
    }

    #[test]
    fn callers_are_known_by_certificate_only_if_both_sides_present_one() {
        let etcd = "--caller-is certificate --endpoints https://etcd:1";
        let own = "--cert c --key k";
        let listener = "--listen-client-urls https://0.0.0.0:1 --cert-file c --key-file k";
        let validated = |flags: &[&str]| {
            let flags: Vec<_> = flags.iter().flat_map(|flags| flags.split_whitespace()).collect();
            parse(&flags).validate().map_err(|error| error.to_string())
        };
        let ca = "--trusted-ca-file ca";
        assert_eq!(validated(&[etcd, own, listener, ca]), Ok(()));
        let with_a_socket = "--listen-client-urls unixs:///a,unix:///b --cert-file c --key-file k";
        assert_eq!(validated(&[etcd, own, with_a_socket, ca]), Ok(()));
        let plaintext = "--listen-client-urls http://127.0.0.1:1";
        let mixed = "--caller-is certificate --endpoints https://etcd:1,http://etcd:2";
        let metrics = "--listen-metrics-urls https://0.0.0.0:2 --cert-file c --key-file k";
        for (flags, says) in [
            (&[etcd, listener, ca][..], "needs --cert and --key"),
            (&[etcd, own, listener], "needs --trusted-ca-file"),
            (&[etcd, own, plaintext], "no caller presents a certificate"),
            (
                &[etcd, own, plaintext, metrics, ca],
                "no caller presents a certificate",
            ),
            (&[mixed, own, listener, ca], "http://etcd:2"),
            (
                &[etcd, own, listener, ca, "--user a:b"],
                "--user exclude each other",
            ),
        ] {
            let error = validated(flags).unwrap_err();
            assert!(error.contains(says), "{flags:?}: {error}");
        }
    }

    #[test]
    fn user_is_written_as_for_etcdctl_and_never_printed() {
        for (flags, name, password) in [
            (&["--user", "mirror:a:b"][..], "mirror", "a:b"),
            (&["--user", "mirror:a", "--password", "b"], "mirror:a", "b"),
        ] {
            let config = parse(flags);
            let account = config.etcd.account().unwrap().unwrap();
            assert_eq!(
                (account.name.as_str(), account.password.expose()),
                (name, password)
            );
            assert!(!format!("{config:?}").contains("mirror:a"));
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "from a file\n").unwrap();
        let path = file.path().to_str().unwrap();
        let account = parse(&["--user", "mirror", "--password-file", path])
            .etcd
            .account();
        assert_eq!(account.unwrap().unwrap().password.expose(), "from a file");
        assert_eq!(parse(&[]).etcd.account(), Ok(None));
    }

    fn try_parse(flags: &str) -> Result<Config, clap::Error> {
        Config::try_parse_from(std::iter::once("rangecache").chain(flags.split_whitespace()))
    }

    #[test]
    fn contradictions_of_tls_are_refused_with_a_remedy() {
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
            let error = try_parse(flags).unwrap().validate().unwrap_err().to_string();
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
            let error = try_parse(&format!("{https} {flags}"))
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
            try_parse(flags).unwrap().validate().unwrap();
        }
    }
}
