//! TLS of both sides, of the flags of several rooms.

use std::sync::Arc;

use super::flags::Config;
use crate::net::Url;
use crate::telemetry::Metrics;
use crate::tls::{Acceptor, Connector, FileError};
use crate::upstream::CallerIs;

impl Config {
    /// TLS towards etcd.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn connector(&self, metrics: &Arc<Metrics>) -> Result<Arc<Connector>, FileError> {
        let names_callers = self.etcd.caller_is == CallerIs::Certificate;
        Connector::open(&self.tls, &self.etcd.endpoints, names_callers, metrics)
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
