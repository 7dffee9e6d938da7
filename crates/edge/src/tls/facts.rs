//! Facts of a certificate or a revocation list.

use rangecache_base::net::Stream;
use rustls::pki_types::CertificateDer;
use tokio_util::either::Either;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};
use x509_parser::{asn1_rs::Tag, extensions::GeneralName, x509::AttributeTypeAndValue};

/// Names and validity of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
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
pub(super) fn of_certificate(der: &CertificateDer<'_>) -> Result<CertificateFacts, String> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
    // Of several, etcd takes the last, also if that is empty.
    let names = certificate.subject().iter_common_name().map(text_of);
    let common_name = names.last().filter(|name| !name.is_empty());
    let names = certificate
        .subject_alternative_name()
        .ok()
        .flatten()
        .map(|extension| extension.value.general_names.iter().filter_map(name_of).collect())
        .unwrap_or_default();
    Ok(CertificateFacts {
        common_name,
        names,
        not_before_seconds: certificate.validity().not_before.timestamp(),
        not_after_seconds: certificate.validity().not_after.timestamp(),
    })
}

/// Common name in the certificate with which the client of a connection has proven who it is; `None` without TLS, and if
/// clients need no certificate.
#[must_use]
pub fn client_common_name(stream: &Stream) -> Option<String> {
    let Either::Right(tls) = stream else {
        return None;
    };
    let (_, connection) = tls.get_ref();
    let certificate = connection.peer_certificates()?.first()?;
    of_certificate(certificate).ok()?.common_name
}

/// Text of a name, whatever its encoding: etcd takes a name in an old encoding for a user, too.
fn text_of(name: &AttributeTypeAndValue<'_>) -> String {
    if let Ok(text) = name.as_str() {
        return text.to_owned();
    }
    let value = name.attr_value();
    match value.tag() {
        Tag::BmpString => {
            let units = value
                .data
                .chunks_exact(2)
                .map(|unit| u16::from_be_bytes([unit[0], unit[1]]));
            String::from_utf16_lossy(&units.collect::<Vec<_>>())
        }
        // ISO 8859-1, as Go reads it.
        Tag::T61String => value.data.iter().copied().map(char::from).collect(),
        _ => String::from_utf8_lossy(value.data).into_owned(),
    }
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

/// Issuer of a revocation list, as DER.
pub(super) fn issuer_of_list(der: &[u8]) -> Option<Vec<u8>> {
    let (_, list) = CertificateRevocationList::from_der(der).ok()?;
    Some(list.issuer().as_raw().to_vec())
}

/// When a revocation list expires in seconds since 1970, if it contains that.
pub(super) fn next_update_seconds(der: &[u8]) -> Option<i64> {
    let (_, list) = CertificateRevocationList::from_der(der).ok()?;
    list.next_update().map(|time| time.timestamp())
}
