//! What a certificate or a revocation list says of itself.

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

/// What operators ask of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The subject's common name, empty ones left out. etcd's auth takes it for a user's name.
    pub common_name: Option<String>,
    /// DNS names and addresses that it is for.
    pub names: Vec<String>,
    /// In seconds since 1970.
    pub not_before_seconds: i64,
    /// In seconds since 1970.
    pub not_after_seconds: i64,
}

/// Reads a certificate; the error is a parser's, in words.
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

/// When a revocation list will be replaced by the next, in seconds since 1970, if it says so.
pub(super) fn next_update_seconds(der: &[u8]) -> Option<i64> {
    let (_, list) = CertificateRevocationList::from_der(der).ok()?;
    list.next_update().map(|time| time.timestamp())
}
