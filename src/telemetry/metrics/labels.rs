//! Label sets that several rooms' metrics share.

use prometheus_client::encoding::EncodeLabelSet;

/// One mirror, by the name that logs use, too.
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

/// How an operation ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct ResultLabels {
    pub(super) result: &'static str,
}
