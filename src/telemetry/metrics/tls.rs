//! Metrics of TLS: handshakes with clients, and the files of both sides.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::labels::ResultLabels;
use super::register::{register, register_unit, start_at_zero};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FileLabels {
    side: &'static str,
    file: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReloadLabels {
    side: &'static str,
    result: &'static str,
}

/// Handshakes with clients, and certificate files. `side` is `clients` or `etcd`.
#[derive(Debug)]
pub struct TlsMetrics {
    /// Clients' handshakes in progress or waiting for their turn.
    pub handshaking: Gauge,
    handshakes: Family<ResultLabels, Counter>,
    not_after_seconds: Family<FileLabels, Gauge>,
    reloads: Family<ReloadLabels, Counter>,
    /// Expiry of each file by side and flag, in seconds since 1970.
    files: Mutex<BTreeMap<(&'static str, &'static str), i64>>,
}

impl TlsMetrics {
    pub(super) fn new(registry: &mut Registry) -> TlsMetrics {
        let reloads = register(
            registry,
            "tls_reloads",
            "Replaced certificate files by whether they could be used",
        );
        let sides = ["clients", "etcd"].into_iter();
        let results = sides.flat_map(|side| ["ok", "failed"].map(|result| ReloadLabels { side, result }));
        start_at_zero(&reloads, results);
        let handshakes = register(registry, "tls_handshakes", "Clients' TLS handshakes by result");
        let results = ["ok", "refused", "timed_out"];
        start_at_zero(&handshakes, results.map(|result| ResultLabels { result }));
        TlsMetrics {
            handshaking: register(
                registry,
                "tls_handshaking",
                "Clients' TLS handshakes in progress or waiting for their turn",
            ),
            handshakes,
            not_after_seconds: register_unit(
                registry,
                "tls_not_after_timestamp",
                Unit::Seconds,
                "When the first certificate of a file expires or its revocation list is due, in seconds since 1970",
            ),
            reloads,
            files: Mutex::default(),
        }
    }

    /// Counts a client's handshake.
    pub fn record_handshake(&self, result: &'static str) {
        self.handshakes.get_or_create(&ResultLabels { result }).inc();
    }

    /// Counts a reload of the files of `side`.
    pub fn record_reload(&self, side: &'static str, result: &'static str) {
        self.reloads.get_or_create(&ReloadLabels { side, result }).inc();
    }

    /// Sets the expiry of a file, in seconds since 1970.
    pub fn set_not_after(&self, side: &'static str, file: &'static str, seconds: i64) {
        self.not_after_seconds
            .get_or_create(&FileLabels { side, file })
            .set(seconds);
        self.files.lock().insert((side, file), seconds);
    }

    /// Expiry of each file by side and flag, in seconds since 1970.
    #[must_use]
    pub fn not_after(&self) -> Vec<((&'static str, &'static str), i64)> {
        let files = self.files.lock();
        files.iter().map(|(file, seconds)| (*file, *seconds)).collect()
    }
}
