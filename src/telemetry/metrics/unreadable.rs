//! Metrics of responses of etcd whose revision could not be read as they passed through.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::register::{register, start_at_zero};

/// Why the revision that a response shows its client is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// The message is compressed.
    Compressed,
    /// The header is not encoded as any known etcd encodes it.
    Header,
    /// JSON without a header that can be read, or data of a WebSocket.
    Json,
    /// The response is of another cluster, or of another history than the one in which its call began.
    History,
}

impl Unreadable {
    const ALL: [Unreadable; 4] = [
        Unreadable::Compressed,
        Unreadable::Header,
        Unreadable::Json,
        Unreadable::History,
    ];

    fn label(self) -> CauseLabels {
        let cause = match self {
            Unreadable::Compressed => "compressed",
            Unreadable::Header => "header",
            Unreadable::Json => "json",
            Unreadable::History => "history",
        };
        CauseLabels { cause }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CauseLabels {
    cause: &'static str,
}

/// Messages and pieces of responses whose revision could not be read, by cause.
#[derive(Clone, Debug, Default)]
pub struct UnreadableMetrics(Family<CauseLabels, Counter>);

impl UnreadableMetrics {
    pub(super) fn new(registry: &mut Registry) -> UnreadableMetrics {
        let family = register(
            registry,
            "unreadable_responses",
            "Forwarded messages whose revision could not be read, by cause: compressed, header, json, history",
        );
        start_at_zero(&family, Unreadable::ALL.map(Unreadable::label));
        UnreadableMetrics(family)
    }

    /// Counts a message.
    pub fn record(&self, cause: Unreadable) {
        self.0.get_or_create(&cause.label()).inc();
    }
}
