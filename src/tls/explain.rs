//! A failed handshake in words: what is wrong, which flag it is about, what to do.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

use super::connector::{Shown, named};
use crate::net::Url;

/// The other side speaks TLS, but not gRPC.
pub(super) const NO_HTTP_2: &str = "it speaks TLS but does not agree to HTTP/2: is this etcd's client URL? (a proxy in between must pass ALPN on)";

/// Why the handshake with `url` failed.
pub(super) fn towards_etcd(error: io::Error, url: &Url, files: &Shown) -> io::Error {
    let words = match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::InvalidCertificate(error)) => certificate(error, url, files),
        Some(Error::AlertReceived(alert)) => alert_of_etcd(*alert, files)
            .unwrap_or_else(|| format!("etcd refused the TLS handshake ({alert:?})")),
        Some(Error::InvalidMessage(_)) => {
            "what answers there does not speak TLS: write http:// if this etcd listens without it".to_owned()
        }
        Some(Error::PeerIncompatible(what)) => format!(
            "no TLS version or cipher suite in common ({what:?}): see --tls-min-version, --tls-max-version and --cipher-suites"
        ),
        Some(other) => format!("the TLS handshake failed: {other}"),
        None if is_hung_up(&error) => "the connection was closed during the TLS handshake: \
            write http:// if this etcd listens without TLS, else see etcd's log"
            .to_owned(),
        None => return error,
    };
    io::Error::new(error.kind(), words)
}

/// Why the server said nothing after the handshake with `url`.
pub(super) fn instead_of_a_first_word(error: io::Error, url: &Url, files: &Shown) -> io::Error {
    if error.get_ref().is_some_and(|inner| inner.is::<Error>()) {
        return towards_etcd(error, url, files);
    }
    io::Error::new(error.kind(), after_handshake(&error.to_string(), url, files))
}

fn is_hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        error.kind(),
        UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe
    )
}

fn certificate(error: &CertificateError, url: &Url, files: &Shown) -> String {
    let authorities = named(
        "cacert",
        files.cacert.as_deref(),
        "the system's CAs (--cacert is not given)",
    );
    match error {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            format!("etcd's certificate was not issued by {authorities}: give --cacert the CA that issued it")
        }
        CertificateError::NotValidForNameContext { presented, .. } => format!(
            "etcd's certificate is not for {}, only for {}: write one of these in --endpoints, or make etcd's certificate anew",
            url.server_name()
                .map_or_else(|| url.to_string(), |name| name.to_str().into_owned()),
            presented.join(", ")
        ),
        CertificateError::NotValidForName => {
            "etcd's certificate is for another name: write its name in --endpoints, or make it anew"
                .to_owned()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "etcd's certificate has expired: renew it (and look at this machine's clock)".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "etcd's certificate is not valid yet: look at both machines' clocks".to_owned()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "etcd's certificate is not one for servers: make it anew with the extended key usage serverAuth"
                .to_owned()
        }
        other => format!("etcd's certificate cannot be accepted: {other}"),
    }
}

/// What etcd's alert means for the one who set the flags.
fn alert_of_etcd(alert: AlertDescription, files: &Shown) -> Option<String> {
    let Some(cert) = files.cert.as_deref() else {
        // Without a certificate of ours there is only one thing that etcd can complain about.
        return matches!(
            alert,
            AlertDescription::CertificateRequired | AlertDescription::BadCertificate
        )
        .then(|| {
            "etcd wants a client certificate: give --cert and --key, from a CA in etcd's --trusted-ca-file"
                .to_owned()
        })
        .or_else(|| common(alert));
    };
    let cert = format!("--cert {}", cert.display());
    let words = match alert {
        AlertDescription::CertificateExpired => format!("{cert} has expired for etcd: renew it"),
        AlertDescription::UnknownCA => {
            format!(
                "{cert} was not issued by a CA in etcd's --trusted-ca-file: have it issued by one of these"
            )
        }
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown => format!(
            "etcd does not accept {cert}: it must come from a CA in etcd's --trusted-ca-file and be one for clients (extended key usage clientAuth)"
        ),
        AlertDescription::CertificateRevoked | AlertDescription::AccessDenied => {
            format!("{cert} is revoked for etcd: replace it")
        }
        _ => return common(alert),
    };
    Some(words)
}

fn common(alert: AlertDescription) -> Option<String> {
    match alert {
        AlertDescription::ProtocolVersion | AlertDescription::HandshakeFailure => Some(format!(
            "etcd has no TLS version or cipher suite in common ({alert:?}): see --tls-min-version, --tls-max-version and --cipher-suites"
        )),
        AlertDescription::NoApplicationProtocol => Some(NO_HTTP_2.to_owned()),
        _ => None,
    }
}

/// Why a connection to `url` ended before anything was answered on it. TLS 1.3 has a client believe that it is let in
/// before the server has looked at its certificate; HTTP/2 hands the alert on as text only.
pub(super) fn after_handshake(text: &str, url: &Url, files: &Shown) -> String {
    use AlertDescription as Alert;
    let alerts = [
        Alert::CertificateRequired,
        Alert::BadCertificate,
        Alert::UnsupportedCertificate,
        Alert::CertificateUnknown,
        Alert::CertificateExpired,
        Alert::CertificateRevoked,
        Alert::UnknownCA,
        Alert::AccessDenied,
    ];
    let said = |alert: &Alert| text.contains(&Error::AlertReceived(*alert).to_string());
    if let Some(words) = alerts
        .into_iter()
        .find(said)
        .and_then(|alert| alert_of_etcd(alert, files))
    {
        return words;
    }
    match (url.tls, files.cert.as_deref()) {
        (false, _) => format!(
            "the connection was closed before anything was answered ({text}): write https:// if this etcd listens with TLS"
        ),
        (true, Some(cert)) => format!(
            "etcd closed the connection right after the TLS handshake ({text}): is --cert {} revoked? See etcd's log",
            cert.display()
        ),
        (true, None) => {
            format!("etcd closed the connection right after the TLS handshake ({text}): see etcd's log")
        }
    }
}
