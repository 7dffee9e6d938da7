//! Flags of the connection to etcd, and rangecache's own user there.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum, builder::ArgPredicate};
use rangecache_base::{flags::parse_duration, net::Url};
use rangecache_edge::tls::TlsConfig;

/// Endpoints of etcd, credentials, and use of its features.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "etcd")]
pub struct EtcdConfig {
    /// Client URLs of etcd's members, comma-separated: http://host:port, https://host:port, unix:///path or
    /// unixs:///path
    ///
    /// When to change it: always: name every member
    #[arg(
        long,
        value_name = "URL,…",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:2379",
        default_value_if("endpoints_srv", ArgPredicate::IsPresent, None)
    )]
    pub endpoints: Vec<Url>,

    /// Endpoints that are used while none of --endpoints serves, comma-separated: etcd itself, where --endpoints are other
    /// rangecaches. Feeds return from them once one of --endpoints has served for 10 seconds
    ///
    /// When to change it: `--endpoints` are hubs: name etcd's members here, so that an outage of the hubs is none
    #[arg(long, value_name = "URL,…", value_delimiter = ',')]
    pub fallback_endpoints: Vec<Url>,

    /// Domain whose SRV records name the endpoints, in place of --endpoints: _etcd-client-ssl._tcp.DOMAIN for those with
    /// TLS, else _etcd-client._tcp.DOMAIN. They are looked up again every 30 seconds
    ///
    /// When to change it: DNS knows the members, as it does for etcd's `--discovery-srv`
    #[arg(long, value_name = "DOMAIN", conflicts_with = "endpoints")]
    pub endpoints_srv: Option<String>,

    /// Interval at which the endpoints are compared with the cluster's members: members to which no endpoint leads are
    /// connected to at the URLs that they advertise, and endpoints of members that were removed are left. 0s: never
    ///
    /// When to change it: members are replaced by others at new addresses, and the URLs that they advertise can be
    /// reached from here: `1m`
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "0s")]
    pub endpoints_auto_sync_interval: Duration,

    /// Members to which Put, DeleteRange and Txn are sent. Followers forward them to the leader: with leader, that hop and
    /// its bytes between the members are saved, unless the leader is much busier than another member
    ///
    /// When to change it: `leader` if the bytes between the members, or the time of writes, matter, and the leader has
    /// capacity
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = WritesTo::Any)]
    pub writes_to: WritesTo,

    /// etcd user for rangecache's own calls, where etcd's auth is on; needs read access to what is mirrored
    ///
    /// When to change it: etcd's auth is on: a user that may read the mirrored keys
    #[arg(long, value_name = "NAME[:PASSWORD]", hide_env_values = true)]
    pub user: Option<Secret>,

    /// Password for --user (then --user is only the name). Prefer the environment or --password-file
    ///
    /// When to change it: with `--user`; the command line is visible to other users, so prefer
    /// `RANGECACHE_PASSWORD` or a file
    #[arg(long, value_name = "PASSWORD", hide_env_values = true)]
    pub password: Option<Secret>,

    /// File whose first line is the password for --user; it is read again whenever rangecache logs in
    ///
    /// When to change it: with `--user`: password from a file's first line
    #[arg(long, value_name = "PATH", conflicts_with = "password")]
    pub password_file: Option<PathBuf>,

    /// Way in which etcd identifies the users of calls: by tokens alone, or also by the common names of certificates. With
    /// certificate, memory answers callers whose certificate has the common name of --cert; calls of others without a token
    /// are forwarded while etcd's auth is on
    ///
    /// When to change it: `certificate` if etcd's users are the common names of certificates, and clients present
    /// the same name as `--cert`: docs/security.md#callers-known-by-their-certificate
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = CallerIs::Token)]
    pub caller_is: CallerIs,

    /// Time limit for a call that waits for a connection to etcd; the call fails with Unavailable after it
    ///
    /// When to change it: shorter if clients should fail sooner while no member is reachable
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "5s")]
    pub connect_timeout: Duration,

    /// Interval of the probe of etcd's revision, compaction and auth while no read asks for them
    ///
    /// When to change it: longer with a hundred rangecaches on one etcd: each sends three small requests per
    /// interval
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "1s")]
    pub probe_interval: Duration,

    /// Use of etcd's RangeStream; off: reads of etcd are pages and whole responses
    ///
    /// When to change it: `off` if a proxy between rangecache and etcd breaks streaming
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = RangeStream::Auto)]
    pub range_stream: RangeStream,

    /// Reaction to an etcd whose progress notifications cannot be trusted (before 3.4.31, 3.5.13, 3.6.0)
    ///
    /// When to change it: `refuse` to exit instead of forwarding all linearizable reads
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = OldEtcd::Forward)]
    pub old_etcd: OldEtcd,
}

/// Means by which etcd identifies the users of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CallerIs {
    /// By the token of each call
    Token,
    /// By the token of a call, otherwise by the common name of its client's certificate
    Certificate,
}

/// Flags with which callers cannot be known by their certificates, with what to write instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CallerIsError {
    /// No common name to compare callers with.
    #[error(
        "--caller-is=certificate needs --cert and --key: callers are compared with that certificate's common name"
    )]
    NoCertificate,
    /// An endpoint to which no certificate is presented.
    #[error(
        "--caller-is=certificate: {0} gets no certificate of rangecache; write https:// or unixs:// there"
    )]
    PlaintextEndpoint(Url),
    /// Clients present no certificate.
    #[error(
        "--caller-is=certificate needs --trusted-ca-file, and an https:// or unixs:// URL in --listen-client-urls or \
         --read-only-listen-client-urls: otherwise no caller presents a certificate"
    )]
    NoCallers,
    /// Two users for rangecache's own calls.
    #[error(
        "--caller-is=certificate and --user exclude each other: rangecache's own calls are those of the user in --cert"
    )]
    User,
}

/// Members to which writes are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WritesTo {
    /// To any healthy member
    Any,
    /// To the leader, unless it is much busier than another member
    Leader,
}

/// Reaction to an etcd below the version gate.
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

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself, to be sent to etcd.
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

/// A user of etcd with its password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// The user's name.
    pub name: String,
    /// The user's password, as it was at start.
    pub password: Secret,
    /// The file that holds the password; it may be replaced.
    pub password_file: Option<PathBuf>,
}

impl Account {
    /// The password that [`Account::password_file`] holds now. Blocks for the time of a read.
    ///
    /// # Errors
    /// If the file cannot be read, or is empty.
    pub fn read_password(file: &Path) -> Result<Secret, AccountError> {
        let refused = |why: String| AccountError::Unusable(file.display().to_string(), why);
        let text = std::fs::read_to_string(file).map_err(|error| refused(error.to_string()))?;
        match text.lines().next() {
            None | Some("") => Err(refused("its first line, the password, is empty".to_owned())),
            Some(password) => Ok(Secret(password.to_owned())),
        }
    }
}

/// Flags that do not give a user and a password, with what to write instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum AccountError {
    /// A password without a user.
    #[error("a password is given without a user: add --user name")]
    NoUser,
    /// A user without a password.
    #[error("--user has no password: write --user name:password, or add --password or --password-file")]
    NoPassword,
    /// An empty user or password.
    #[error("--user needs a name and a password, neither of them empty")]
    Empty,
    /// The file of `--password-file` cannot be read, or has no password.
    #[error("--password-file {0}: {1}")]
    Unusable(String, String),
}

impl EtcdConfig {
    /// `--endpoints` and `--fallback-endpoints`.
    #[must_use]
    pub fn all_endpoints(&self) -> Vec<Url> {
        self.endpoints
            .iter()
            .chain(&self.fallback_endpoints)
            .cloned()
            .collect()
    }

    /// Whether certificates name the callers of calls without a token.
    #[must_use]
    pub fn certificates_name_callers(&self) -> bool {
        match self.caller_is {
            CallerIs::Token => false,
            CallerIs::Certificate => true,
        }
    }

    /// Checks that both rangecache and callers present certificates if these are to identify callers. `clients` are the URLs
    /// at which clients are served.
    ///
    /// # Errors
    /// The first flag that prevents it.
    pub fn validate_callers(&self, tls: &TlsConfig, clients: &[&Url]) -> Result<(), CallerIsError> {
        match self.caller_is {
            CallerIs::Token => Ok(()),
            CallerIs::Certificate => {
                if tls.cert.is_none() {
                    return Err(CallerIsError::NoCertificate);
                }
                if let Some(url) = self.all_endpoints().into_iter().find(|url| !url.tls) {
                    return Err(CallerIsError::PlaintextEndpoint(url));
                }
                if tls.trusted_ca_file.is_none() || !clients.iter().any(|url| url.tls) {
                    return Err(CallerIsError::NoCallers);
                }
                if self.user.is_some() {
                    return Err(CallerIsError::User);
                }
                Ok(())
            }
        }
    }

    /// rangecache's own user, if `--user` is given. Reads `--password-file`.
    ///
    /// # Errors
    /// If one of name and password is missing, or the file cannot be read.
    pub fn account(&self) -> Result<Option<Account>, AccountError> {
        let Some((name, password)) = self.name_and_password()? else {
            return Ok(None);
        };
        let file = self
            .password_file
            .as_deref()
            .map(Account::read_password)
            .transpose()?;
        Ok(Some(Account {
            name: name.to_owned(),
            password: password.or(file).ok_or(AccountError::NoPassword)?,
            password_file: self.password_file.clone(),
        }))
    }

    /// Checks the flags of [`EtcdConfig::account`] without a look at the file.
    ///
    /// # Errors
    /// If one of name and password is missing.
    pub fn check_account(&self) -> Result<(), AccountError> {
        self.name_and_password().map(drop)
    }

    /// Name and password that the flags give; no password if `--password-file` alone has it.
    fn name_and_password(&self) -> Result<Option<(&str, Option<Secret>)>, AccountError> {
        let Some(user) = &self.user else {
            if self.password.is_some() || self.password_file.is_some() {
                return Err(AccountError::NoUser);
            }
            return Ok(None);
        };
        let is_separate = self.password.is_some() || self.password_file.is_some();
        // As in etcdctl: where the password is given separately, a colon belongs to the name.
        let (name, password) = match user.expose().split_once(':') {
            _ if is_separate => (user.expose(), self.password.clone()),
            Some((name, password)) => (name, Some(Secret(password.to_owned()))),
            None => return Err(AccountError::NoPassword),
        };
        if name.is_empty()
            || password
                .as_ref()
                .is_some_and(|password| password.expose().is_empty())
        {
            return Err(AccountError::Empty);
        }
        Ok(Some((name, password)))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn account(flags: &[&str]) -> Result<Option<Account>, AccountError> {
        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            etcd: EtcdConfig,
        }
        let flags = std::iter::once(&"rangecache").chain(flags);
        Flags::try_parse_from(flags).unwrap().etcd.account()
    }

    fn name_and_password(flags: &[&str]) -> (String, String) {
        let account = account(flags).unwrap().unwrap();
        (account.name, account.password.expose().to_owned())
    }

    #[test]
    fn colon_divides_name_and_password_unless_the_password_is_given_separately() {
        let divided = name_and_password(&["--user", "root:one:two"]);
        assert_eq!(divided, ("root".to_owned(), "one:two".to_owned()));
        let separate = name_and_password(&["--user", "ro:ot", "--password", "secret"]);
        assert_eq!(separate, ("ro:ot".to_owned(), "secret".to_owned()));
    }

    #[test]
    fn user_without_a_password_and_the_reverse_are_refused() {
        assert_eq!(account(&[]), Ok(None));
        assert_eq!(account(&["--user", "root"]), Err(AccountError::NoPassword));
        assert_eq!(account(&["--password", "secret"]), Err(AccountError::NoUser));
        assert_eq!(account(&["--password-file", "/none"]), Err(AccountError::NoUser));
        assert_eq!(account(&["--user", ":secret"]), Err(AccountError::Empty));
        assert_eq!(account(&["--user", "root:"]), Err(AccountError::Empty));
    }

    #[test]
    fn first_line_of_the_password_file_is_the_password() {
        let path = std::env::temp_dir().join(format!("rangecache-password-{}", std::process::id()));
        let flags = ["--user", "root", "--password-file", path.to_str().unwrap()];
        std::fs::write(&path, "secret\nnot the password\n").unwrap();
        let first = name_and_password(&flags);
        std::fs::write(&path, "\n").unwrap();
        let empty = account(&flags);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(first, ("root".to_owned(), "secret".to_owned()));
        assert!(matches!(empty, Err(AccountError::Unusable(..))));
        assert!(matches!(account(&flags), Err(AccountError::Unusable(..))));
    }

    #[test]
    fn secrets_are_not_printed() {
        let account = account(&["--user", "root:hidden"]).unwrap();
        assert!(!format!("{account:?}").contains("hidden"));
    }
}
