//! Facts of a certificate or a revocation list.

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

/// Names and validity of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Common name of the subject, unless empty. etcd's auth takes it for a user name.
    pub common_name: Option<String>,
    /// DNS names and IP addresses in the certificate.
    pub names: Vec<String>,
    /// Start of validity in seconds since 1970.
    pub not_before_seconds: i64,
    /// Expiry in seconds since 1970.
    pub not_after_seconds: i64,
}

/// Parses a certificate; the error is the parser's, as text.
pub(super) fn of_certificate(der: &CertificateDer<'_>) -> Result<Facts, String> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
    let common_name = certificate
        .subject()
        .iter_common_name()
        .filter_map(|name| name.as_str().ok())
        .find(|name| !name.is_empty())
        .map(str::to_owned);
    let names = certificate
        .subject_alternative_name()
        .ok()
        .flatten()
        .map(|extension| extension.value.general_names.iter().filter_map(name_of).collect())
        .unwrap_or_default();
    Ok(Facts {
        common_name,
        names,
        not_before_seconds: certificate.validity().not_before.timestamp(),
        not_after_seconds: certificate.validity().not_after.timestamp(),
    })
}

fn name_of(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => <[u8; 4]>::try_from(*bytes)
                .ok()
                .map(|octets| std::net::Ipv4Addr::from(octets).to_string()),
            16 => <[u8; 16]>::try_from(*bytes)
                .ok()
                .map(|octets| std::net::Ipv6Addr::from(octets).to_string()),
            _ => None,
        },
        _ => None,
    }
}

/// When a revocation list expires in seconds since 1970, if it contains that.
pub(super) fn next_update_seconds(der: &[u8]) -> Option<i64> {
    let (_, list) = CertificateRevocationList::from_der(der).ok()?;
    list.next_update().map(|time| time.timestamp())
}
