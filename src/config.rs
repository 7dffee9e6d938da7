//! Flags and environment, checked before a port is bound.

mod tls;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

pub use tls::{TlsFlagError, TlsFlags, TlsVersion};

use crate::memory;
use crate::net::Url;

/// What the command line and the environment may say. Every flag can also be given as `RANGECACHE_<FLAG>`.
#[derive(Parser, Debug, Clone)]
#[command(
    name = "rangecache",
    version,
    about = "A transparent caching gRPC proxy in front of etcd: linearizable reads from memory, never stale",
    long_about = "rangecache listens as an etcd endpoint. Point any etcd v3 client at it and change nothing else.\n\n\
        Reads that it can prove fresh are answered from memory; everything else reaches etcd unchanged. It stores \
        nothing: stop it, and all that is lost is warmth.",
    after_help = "Examples:\n  \
        rangecache --endpoints http://127.0.0.1:2379\n      \
        mirror the whole keyspace, serve clients on http://127.0.0.1:23790\n  \
        rangecache --endpoints http://a:2379,http://b:2379 --cache-prefix /registry/ --no-cache-prefix /registry/events/\n      \
        mirror /registry/ but not the events, from a cluster of two known members\n  \
        etcdctl --endpoints 127.0.0.1:23790 get --prefix /registry/\n      \
        use it\n  \
        rangecache --endpoints https://etcd:2379 --cacert ca.crt --cert client.crt --key client.key \\\n    \
            --listen-client-urls https://0.0.0.0:23790 --cert-file server.crt --key-file server.key --trusted-ca-file ca.crt\n      \
        mutual TLS on both sides\n\nEvery flag can be set in the environment: --cache-prefix as RANGECACHE_CACHE_PREFIX (lists comma-separated)."
)]
pub struct Config {
    /// etcd's client URLs, comma-separated: http://host:port, https://host:port, unix:///path or unixs:///path
    #[arg(
        long,
        env = "RANGECACHE_ENDPOINTS",
        value_name = "URL,…",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:2379"
    )]
    pub endpoints: Vec<Url>,

    /// User that rangecache itself is to etcd, name[:password], where etcd's auth is on; it must be allowed to read what is mirrored
    #[arg(
        long,
        env = "RANGECACHE_USER",
        value_name = "NAME[:PASSWORD]",
        hide_env_values = true
    )]
    pub user: Option<Secret>,

    /// Password of --user, of which all is then the name; better in the environment or in a file
    #[arg(
        long,
        env = "RANGECACHE_PASSWORD",
        value_name = "PASSWORD",
        hide_env_values = true
    )]
    pub password: Option<Secret>,

    /// File whose first line is the password of --user
    #[arg(
        long,
        env = "RANGECACHE_PASSWORD_FILE",
        value_name = "PATH",
        conflicts_with = "password"
    )]
    pub password_file: Option<PathBuf>,

    /// Where clients connect, comma-separated, with the same schemes; port 0 takes a free one, and the log says which
    #[arg(
        long,
        env = "RANGECACHE_LISTEN_CLIENT_URLS",
        value_name = "URL,…",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:23790"
    )]
    pub listen_client_urls: Vec<Url>,

    /// Where /livez, /readyz, /metrics and the status are served, comma-separated; https:// has the listeners' certificate
    #[arg(
        long,
        env = "RANGECACHE_LISTEN_METRICS_URLS",
        value_name = "URL,…",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:23791"
    )]
    pub listen_metrics_urls: Vec<Url>,

    /// Prefix of the keys to mirror; repeat for more than one [default: the whole keyspace]
    #[arg(
        long,
        env = "RANGECACHE_CACHE_PREFIX",
        value_name = "PREFIX",
        value_delimiter = ','
    )]
    pub cache_prefix: Vec<String>,

    /// Prefix of keys to leave out of the mirrors; repeat for more than one
    #[arg(
        long,
        env = "RANGECACHE_NO_CACHE_PREFIX",
        value_name = "PREFIX",
        value_delimiter = ','
    )]
    pub no_cache_prefix: Vec<String>,

    /// Memory for all mirrors and their history; past it a mirror steps aside and its reads are forwarded [default: three quarters of the memory limit]
    #[arg(long, env = "RANGECACHE_CACHE_MAX_BYTES", value_name = "BYTES", value_parser = parse_bytes)]
    pub cache_max_bytes: Option<u64>,

    /// How far back past revisions are answered from memory
    #[arg(long, env = "RANGECACHE_HISTORY_MAX_AGE", value_name = "DURATION", value_parser = parse_duration, default_value = "10m")]
    pub history_max_age: Duration,

    /// Memory for past revisions, per mirror; the oldest go first
    #[arg(long, env = "RANGECACHE_HISTORY_MAX_BYTES", value_name = "BYTES", value_parser = parse_bytes, default_value = "256MiB")]
    pub history_max_bytes: u64,

    /// How long a read waits for the proof that memory is fresh before it is forwarded (never past the caller's own timeout)
    #[arg(long, env = "RANGECACHE_FRESHNESS_TIMEOUT", value_name = "DURATION", value_parser = parse_duration, default_value = "3s")]
    pub freshness_timeout: Duration,

    /// How long a call waits for a connection to etcd that is being made again
    #[arg(long, env = "RANGECACHE_CONNECT_TIMEOUT", value_name = "DURATION", value_parser = parse_duration, default_value = "5s")]
    pub connect_timeout: Duration,

    /// How often etcd is asked for its revision, its compaction and whether auth is on when no read asks
    #[arg(long, env = "RANGECACHE_PROBE_INTERVAL", value_name = "DURATION", value_parser = parse_duration, default_value = "1s")]
    pub probe_interval: Duration,

    /// How often every mirror is held against etcd, in the background; 0s turns it off
    #[arg(long, env = "RANGECACHE_VERIFY_INTERVAL", value_name = "DURATION", value_parser = parse_duration, default_value = "10m")]
    pub verify_interval: Duration,

    /// Large Ranges that may be under way to etcd at once; further ones wait their turn
    #[arg(long, env = "RANGECACHE_FORWARD_MAX_LARGE", value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub forward_max_large: u32,

    /// Large Ranges that may wait their turn; further ones are refused with a retryable Unavailable
    #[arg(
        long,
        env = "RANGECACHE_FORWARD_MAX_WAITING",
        value_name = "N",
        default_value_t = 4096
    )]
    pub forward_max_waiting: u32,

    /// Memory for answers from etcd that several identical reads share; past it they are refused with ResourceExhausted
    #[arg(long, env = "RANGECACHE_FORWARD_SHARED_MAX_BYTES", value_name = "BYTES", value_parser = parse_bytes, default_value = "512MiB")]
    pub forward_shared_max_bytes: u64,

    /// Memory for RangeStreams from etcd that become unary answers and pages; what has no room is forwarded as it came
    #[arg(long, env = "RANGECACHE_STREAM_MAX_BYTES", value_name = "BYTES", value_parser = parse_bytes, default_value = "256MiB")]
    pub stream_max_bytes: u64,

    /// How long a RangeStream from etcd pauses for room before its call is forwarded as it came
    #[arg(long, env = "RANGECACHE_STREAM_MAX_WAIT", value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub stream_max_wait: Duration,

    /// How long the next page of a list is expected, with a RangeStream from etcd kept open for it
    #[arg(long, env = "RANGECACHE_SERIES_TTL", value_name = "DURATION", value_parser = parse_duration, default_value = "75s")]
    pub series_ttl: Duration,

    /// Client connections served at once; further ones wait to be accepted
    #[arg(long, env = "RANGECACHE_MAX_CONNECTIONS", value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,

    /// Calls that one connection may have under way; its client waits with further ones
    #[arg(long, env = "RANGECACHE_MAX_CONCURRENT_STREAMS", value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrent_streams: u32,

    /// Calls under way over all connections, watches included; further ones are refused with a retryable Unavailable
    #[arg(long, env = "RANGECACHE_MAX_CALLS", value_name = "N", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_calls: u32,

    /// Let other processes listen on the same ports (SO_REUSEPORT), and take the place of a unix socket, so that the next rangecache takes over before this one stops
    #[arg(long, env = "RANGECACHE_SOCKET_REUSE_PORT", visible_alias = "reuse-port")]
    pub socket_reuse_port: bool,

    /// Threads that serve [default: half the cores, for etcd and the clients need the others; at least 1]
    #[arg(long, env = "RANGECACHE_WORKER_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub worker_threads: Option<u32>,

    /// What to do where etcd is too old for its progress notifications to be trusted (before 3.4.31, 3.5.13, 3.6.0)
    #[arg(long, env = "RANGECACHE_OLD_ETCD", value_name = "WHAT", value_enum, default_value_t = OldEtcd::Forward)]
    pub old_etcd: OldEtcd,

    /// Whether etcd's RangeStream is used where etcd has it; off: reads of etcd are pages and whole answers
    #[arg(long, env = "RANGECACHE_RANGE_STREAM", value_name = "WHEN", value_enum, default_value_t = RangeStream::Auto)]
    pub range_stream: RangeStream,

    /// How long a stop waits for calls under way
    #[arg(long, env = "RANGECACHE_SHUTDOWN_TIMEOUT", value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub shutdown_timeout: Duration,

    /// Form of the log on standard error [default: text on a terminal, else json]
    #[arg(long, env = "RANGECACHE_LOG_FORMAT", value_name = "FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,

    /// error, warn, info, debug or trace, also per module: info,rangecache::mirror=debug
    #[arg(
        long,
        env = "RANGECACHE_LOG_LEVEL",
        value_name = "LEVEL",
        default_value = "info"
    )]
    pub log_level: String,

    /// TLS and access
    #[command(flatten)]
    pub tls: TlsFlags,
}

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself, for whoever has to send it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Secret {
        Secret(text)
    }
}

impl std::str::FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Secret, Self::Err> {
        Ok(Secret(text.to_owned()))
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

/// A user of etcd's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its name.
    pub name: String,
    /// Its password.
    pub password: Secret,
}

/// What to do with an etcd below the version gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OldEtcd {
    /// Forward linearizable reads, with a warning
    Forward,
    /// Refuse to start
    Refuse,
}

/// Whether etcd's RangeStream is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RangeStream {
    /// On every endpoint that has it
    Auto,
    /// Never; clients that ask for one are still served
    Off,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One line for people
    Text,
    /// One JSON object a line
    Json,
}

/// A flag that contradicts another, or that cannot work.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// A mirror of nothing.
    #[error(
        "--{flag} is given an empty prefix: leave --{flag} out to mean the whole keyspace, or write a prefix such as /registry/"
    )]
    EmptyPrefix {
        /// The flag.
        flag: &'static str,
    },
    /// Everything that is mirrored is also left out.
    #[error(
        "--no-cache-prefix leaves out all that --cache-prefix asks for ({0:?}): nothing would be cached; leave one of them away"
    )]
    NothingToCache(String),
    /// rangecache in front of itself.
    #[error(
        "{0} is both in --endpoints and in --listen-client-urls: rangecache would call itself; point --endpoints at etcd"
    )]
    Loop(Url),
    /// A wait of no length.
    #[error("--{flag} must be longer than zero: write for example {example}")]
    ZeroDuration {
        /// The flag.
        flag: &'static str,
        /// A value that works.
        example: &'static str,
    },
    /// A password of nobody, a user without one, or a file that has none.
    #[error("{0}")]
    Account(String),
    /// A log level that tracing does not know.
    #[error(
        "--log-level {0:?} is not understood: write error, warn, info, debug or trace, or for example info,rangecache::mirror=debug"
    )]
    LogLevel(String),
    /// See [`TlsFlagError`].
    #[error(transparent)]
    Tls(#[from] TlsFlagError),
}

impl Config {
    /// Checks what single flags cannot know of each other.
    ///
    /// # Errors
    /// The first contradiction, worded as what to write instead.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (flag, prefixes) in [
            ("cache-prefix", &self.cache_prefix),
            ("no-cache-prefix", &self.no_cache_prefix),
        ] {
            if prefixes.iter().any(String::is_empty) {
                return Err(ConfigError::EmptyPrefix { flag });
            }
        }
        let left_out = |prefix: &String| {
            self.no_cache_prefix
                .iter()
                .any(|out| prefix.starts_with(out.as_str()))
        };
        if let Some(first) = self.cache_prefix.first()
            && self.cache_prefix.iter().all(left_out)
        {
            return Err(ConfigError::NothingToCache(first.clone()));
        }
        self.account()?;
        for url in &self.endpoints {
            if self
                .listen_client_urls
                .iter()
                .any(|listening| listening.address == url.address)
            {
                return Err(ConfigError::Loop(url.clone()));
            }
        }
        for (flag, value, example) in [
            ("freshness-timeout", self.freshness_timeout, "3s"),
            ("connect-timeout", self.connect_timeout, "5s"),
            ("probe-interval", self.probe_interval, "1s"),
            ("series-ttl", self.series_ttl, "75s"),
        ] {
            if value.is_zero() {
                return Err(ConfigError::ZeroDuration { flag, example });
            }
        }
        // Tracing takes a word that is no level for the name of a module.
        let is_level = |part: &str| {
            let level = part.rsplit('=').next().unwrap_or_default().trim();
            ["off", "error", "warn", "info", "debug", "trace"].contains(&level.to_ascii_lowercase().as_str())
        };
        if !self.log_level.split(',').all(is_level)
            || self.log_level.parse::<tracing_subscriber::EnvFilter>().is_err()
        {
            return Err(ConfigError::LogLevel(self.log_level.clone()));
        }
        self.tls.validate(
            &self.endpoints,
            &self.listen_client_urls,
            &self.listen_metrics_urls,
        )?;
        Ok(())
    }

    /// Who rangecache itself is to etcd: nobody unless `--user` says so. Reads `--password-file`.
    ///
    /// # Errors
    /// If one of name and password is missing, or the file cannot be read.
    pub fn account(&self) -> Result<Option<Account>, ConfigError> {
        let refused = |text: String| Err(ConfigError::Account(text));
        let Some(user) = &self.user else {
            if self.password.is_some() || self.password_file.is_some() {
                return refused("there is a password but no user: add --user name".to_owned());
            }
            return Ok(None);
        };
        let file = match &self.password_file {
            None => None,
            Some(path) => match std::fs::read_to_string(path) {
                Ok(text) => Some(Secret(text.lines().next().unwrap_or_default().to_owned())),
                Err(error) => return refused(format!("--password-file {}: {error}", path.display())),
            },
        };
        // As etcdctl has it: with a password of its own, a colon belongs to the name.
        let (name, password) = match (self.password.clone().or(file), user.expose().split_once(':')) {
            (Some(password), _) => (user.expose(), password),
            (None, Some((name, password))) => (name, Secret(password.to_owned())),
            (None, None) => {
                return refused(
                    "--user has no password: write --user name:password, or add --password or --password-file"
                        .to_owned(),
                );
            }
        };
        if name.is_empty() || password.expose().is_empty() {
            return refused("--user needs a name and a password, neither of them empty".to_owned());
        }
        Ok(Some(Account {
            name: name.to_owned(),
            password,
        }))
    }

    /// How many threads serve: the flag, else half the cores.
    #[must_use]
    pub fn worker_threads(&self) -> usize {
        let half = || std::thread::available_parallelism().map_or(1, |cores| cores.get() / 2);
        self.worker_threads
            .map_or_else(half, |threads| threads as usize)
            .max(1)
    }

    /// The bound on all mirrors, in bytes: the flag, else three quarters of the memory limit.
    #[must_use]
    pub fn cache_max_bytes(&self) -> u64 {
        self.cache_max_bytes
            .unwrap_or_else(|| memory::limit_bytes() / 4 * 3)
    }
}

/// Reads `500ms`, `3s` or `5m`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write a number and a unit, for example 500ms, 3s or 10m"))
}

/// Reads `1073741824`, `512MiB`, `512Mi` or `2G`.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim_end_matches('B').trim_end_matches('i') {
        "" => 0,
        "K" | "k" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => {
            return Err(
                "write a number of bytes with an optional unit, for example 512MiB or 2Gi".to_owned(),
            );
        }
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "write a number of bytes, for example 512MiB or 2Gi".to_owned())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "that is more bytes than can be counted".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &[&str]) -> Config {
        Config::try_parse_from(std::iter::once(&"rangecache").chain(flags)).unwrap()
    }

    #[test]
    fn the_defaults_are_valid() {
        let config = parse(&[]);
        assert_eq!(config.validate(), Ok(()));
        assert!(config.cache_max_bytes() > 0);
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
            (vec!["--freshness-timeout", "0s"], "longer than zero"),
            (vec!["--user", "mirror"], "has no password"),
            (vec!["--user", ":x"], "neither of them empty"),
            (vec!["--password", "x"], "add --user"),
            (
                vec!["--user", "mirror", "--password-file", "/does/not/exist"],
                "--password-file /does",
            ),
            (vec!["--log-level", "rangecache=loud"], "error, warn, info"),
            (vec!["--log-level", "loud"], "error, warn, info"),
        ] {
            let error = parse(&flags).validate().unwrap_err().to_string();
            assert!(error.contains(says), "{flags:?}: {error}");
        }
    }

    #[test]
    fn a_user_is_given_as_to_etcdctl_and_never_printed() {
        for (flags, name, password) in [
            (&["--user", "mirror:a:b"][..], "mirror", "a:b"),
            (&["--user", "mirror:a", "--password", "b"], "mirror:a", "b"),
        ] {
            let config = parse(flags);
            let account = config.account().unwrap().unwrap();
            assert_eq!(
                (account.name.as_str(), account.password.expose()),
                (name, password)
            );
            assert!(!format!("{config:?}").contains("mirror"));
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "from a file\n").unwrap();
        let path = file.path().to_str().unwrap();
        let account = parse(&["--user", "mirror", "--password-file", path]).account();
        assert_eq!(account.unwrap().unwrap().password.expose(), "from a file");
        assert_eq!(parse(&[]).account(), Ok(None));
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("1024", 1024),
            ("1Ki", 1024),
            ("1k", 1024),
            ("3MiB", 3 << 20),
            ("2G", 2 << 30),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "MiB",
            "5 apples",
            "-1",
            "99999999999999999999",
            "17179869184G",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
