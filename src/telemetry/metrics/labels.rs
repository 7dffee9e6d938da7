//! Label sets that several rooms' metrics share.

use prometheus_client::encoding::EncodeLabelSet;

/// Label with the name of a mirror, as in the log.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct MirrorLabels {
    pub(super) mirror: String,
}

impl MirrorLabels {
    pub(super) fn new(mirror: &str) -> MirrorLabels {
        MirrorLabels {
            mirror: mirror.to_owned(),
        }
    }
}

/// Label with the result of an operation.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct ResultLabels {
    pub(super) result: &'static str,
}
