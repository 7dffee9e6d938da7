//! Flags of `rangecache diff`.

use std::path::PathBuf;

use clap::{Args, Parser as _};

use rangecache_base::net::Url;
use rangecache_config::Config;
use rangecache_upstream::Secret;

/// Flags of `rangecache diff`.
#[derive(Args, Debug, Clone)]
pub struct DiffConfig {
    /// First endpoint: http://host:port, https://host:port or unix:///path
    #[arg(value_name = "A")]
    pub a: Url,

    /// Second endpoint
    #[arg(value_name = "B")]
    pub b: Url,

    /// Prefix of the keys to compare [default: every key]
    ///
    /// When to change it: compare only the keys with this prefix
    #[arg(long, value_name = "PREFIX")]
    pub prefix: Option<String>,

    /// Revision at which both are read [default: the lower one of their newest revisions]
    ///
    /// When to change it: read both at this past revision instead of the lower one of their newest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    pub revision: Option<i64>,

    /// Differing keys to print; the comparison ends behind the last of them
    ///
    /// When to change it: more differing keys should be printed
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: u64,

    /// Keys per page: one page of each endpoint is in memory
    ///
    /// When to change it: fewer with very large values: one page of each endpoint is in memory
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u16).range(1..))]
    pub page_keys: u16,

    /// File with the CAs of both endpoints' certificates [default: the system's CAs]
    #[arg(long, value_name = "PATH")]
    pub cacert: Option<PathBuf>,

    /// Client certificate for both endpoints
    #[arg(long, value_name = "PATH", requires = "key")]
    pub cert: Option<PathBuf>,

    /// Private key of --cert
    #[arg(long, value_name = "PATH", requires = "cert")]
    pub key: Option<PathBuf>,

    /// etcd user on both endpoints, where etcd's auth is on; needs read access to what is compared
    #[arg(long, value_name = "NAME[:PASSWORD]")]
    pub user: Option<Secret>,

    /// Password for --user (then --user is only the name). Prefer --password-file
    #[arg(long, value_name = "PASSWORD")]
    pub password: Option<Secret>,

    /// File whose first line is the password for --user
    #[arg(long, value_name = "PATH", conflicts_with = "password")]
    pub password_file: Option<PathBuf>,
}

impl DiffConfig {
    /// Settings of the connections to both endpoints.
    #[must_use]
    pub fn connections(&self) -> Config {
        let mut config = Config::parse_from(["rangecache"]);
        config.etcd.endpoints = vec![self.a.clone(), self.b.clone()];
        config.tls.cacert.clone_from(&self.cacert);
        config.tls.cert.clone_from(&self.cert);
        config.tls.key.clone_from(&self.key);
        config.etcd.user.clone_from(&self.user);
        config.etcd.password.clone_from(&self.password);
        config.etcd.password_file.clone_from(&self.password_file);
        config
    }
}
