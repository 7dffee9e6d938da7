//! When the files of certificates expire.

use super::model::CertificateStatus;
use crate::admin::handles::Handles;
use rangecache_base::unix_time;

const SECONDS_PER_DAY: i64 = 86_400;

/// Certificates and revocation lists, those that expire first at the beginning.
pub(in crate::admin) fn certificates(handles: &Handles) -> Vec<CertificateStatus> {
    let now = unix_time::now_seconds();
    let files = handles.metrics.tls.not_after();
    let mut certificates: Vec<_> = files
        .into_iter()
        .map(|((side, file), not_after)| CertificateStatus {
            side,
            flag: flag_of(side, file),
            days_left: (not_after - now).div_euclid(SECONDS_PER_DAY),
        })
        .collect();
    certificates.sort_by_key(|certificate| certificate.days_left);
    certificates
}

/// Flag that names a file of certificates.
fn flag_of(side: &'static str, file: &'static str) -> &'static str {
    match (side, file) {
        ("clients", "cert") => "cert-file",
        ("clients", "ca") => "trusted-ca-file",
        ("clients", "crl") => "client-crl-file",
        ("etcd", "ca") => "cacert",
        _ => file,
    }
}
