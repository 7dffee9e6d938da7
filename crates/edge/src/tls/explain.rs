//! Error messages for failed handshakes: what is wrong, which flag it is about, what to do.

use std::io;
use std::path::{Path, PathBuf};

use rangecache_base::net::Url;
use rustls::{AlertDescription, CertificateError, Error};

/// The server did not select HTTP/2.
pub(super) const NO_HTTP_2: &str = "the server completed the TLS handshake without HTTP/2: is this etcd's client URL? \
    (a proxy in between must forward ALPN)";

/// Paths of the files towards etcd, for error messages.
#[derive(Clone, Debug, Default)]
pub(super) struct TlsFilePaths {
    pub(super) cacert: Option<PathBuf>,
    pub(super) cert: Option<PathBuf>,
}

/// A flag with its path, or `otherwise` if it is not given.
fn flag_with_path(flag: &str, path: Option<&Path>, otherwise: &str) -> String {
    path.map_or_else(
        || otherwise.to_owned(),
        |path| format!("--{flag} {}", path.display()),
    )
}

/// Why the handshake with `url` failed.
pub(super) fn towards_etcd(error: io::Error, url: &Url, files: &TlsFilePaths) -> io::Error {
    let text = match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::InvalidCertificate(error)) => certificate(error, url, files),
        Some(Error::AlertReceived(alert)) => alert_of_etcd(*alert, files)
            .unwrap_or_else(|| format!("etcd refused the TLS handshake ({alert:?})")),
        Some(Error::InvalidMessage(_)) => {
            "the server does not use TLS: write http:// if this etcd listens without TLS".to_owned()
        }
        Some(Error::PeerIncompatible(what)) => format!(
            "no TLS version or cipher suite in common ({what:?}): see --tls-min-version, --tls-max-version and \
             --cipher-suites"
        ),
        Some(other) => format!("the TLS handshake failed: {other}"),
        None if is_hung_up(&error) => "the connection was closed during the TLS handshake: \
            write http:// if this etcd listens without TLS, otherwise see etcd's log"
            .to_owned(),
        None => return error,
    };
    io::Error::new(error.kind(), text)
}

/// Why the server sent nothing after the handshake with `url`.
pub(super) fn no_first_bytes(error: io::Error, url: &Url, files: &TlsFilePaths) -> io::Error {
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

fn certificate(error: &CertificateError, url: &Url, files: &TlsFilePaths) -> String {
    let authorities = flag_with_path(
        "cacert",
        files.cacert.as_deref(),
        "the system's CAs (--cacert is not given)",
    );
    match error {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            format!("etcd's certificate was not issued by {authorities}: give --cacert the CA that issued it")
        }
        CertificateError::NotValidForNameContext { presented, .. } => format!(
            "etcd's certificate is not for {}, only for {}: write one of these in --endpoints, or replace etcd's \
             certificate",
            url.server_name()
                .map_or_else(|| url.to_string(), |name| name.to_str().into_owned()),
            presented.join(", ")
        ),
        CertificateError::NotValidForName => {
            "etcd's certificate is for another name: write its name in --endpoints, or replace the certificate"
                .to_owned()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "etcd's certificate has expired: renew it (and check this machine's clock)".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "etcd's certificate is not valid yet: check both machines' clocks".to_owned()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "etcd's certificate is not one for servers: replace it by one with the extended key usage serverAuth"
                .to_owned()
        }
        other => format!("etcd's certificate cannot be accepted: {other}"),
    }
}

/// Explains an alert of etcd, with the flag that it concerns.
fn alert_of_etcd(alert: AlertDescription, files: &TlsFilePaths) -> Option<String> {
    let Some(cert) = files.cert.as_deref() else {
        // If no certificate was presented, these alerts can only mean that one is required.
        return matches!(
            alert,
            AlertDescription::CertificateRequired | AlertDescription::BadCertificate
        )
        .then(|| {
            "etcd requires a client certificate: give --cert and --key, issued by a CA in etcd's --trusted-ca-file"
                .to_owned()
        })
        .or_else(|| common(alert));
    };
    let cert = format!("--cert {}", cert.display());
    let text = match alert {
        AlertDescription::CertificateExpired => format!("etcd refuses {cert} as expired: renew it"),
        AlertDescription::UnknownCA => {
            format!("{cert} was not issued by a CA in etcd's --trusted-ca-file: use one that was")
        }
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown => format!(
            "etcd does not accept {cert}: it must be issued by a CA in etcd's --trusted-ca-file and be one for clients \
             (extended key usage clientAuth)"
        ),
        AlertDescription::CertificateRevoked | AlertDescription::AccessDenied => {
            format!("etcd refuses {cert} as revoked: replace it")
        }
        _ => return common(alert),
    };
    Some(text)
}

fn common(alert: AlertDescription) -> Option<String> {
    match alert {
        AlertDescription::ProtocolVersion | AlertDescription::HandshakeFailure => Some(format!(
            "no TLS version or cipher suite in common with etcd ({alert:?}): see --tls-min-version, --tls-max-version \
             and --cipher-suites"
        )),
        AlertDescription::NoApplicationProtocol => Some(NO_HTTP_2.to_owned()),
        _ => None,
    }
}

/// Why a connection to `url` was closed before the first response. In TLS 1.3 the client's handshake completes before
/// the server has verified the client's certificate; HTTP/2 reports the alert that follows as text only.
pub(super) fn after_handshake(text: &str, url: &Url, files: &TlsFilePaths) -> String {
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
    let is_in_text = |alert: &Alert| text.contains(&Error::AlertReceived(*alert).to_string());
    if let Some(explanation) = alerts
        .into_iter()
        .find(is_in_text)
        .and_then(|alert| alert_of_etcd(alert, files))
    {
        return explanation;
    }
    match (url.tls, files.cert.as_deref()) {
        (false, _) => format!(
            "the connection was closed before the first response ({text}): write https:// if this etcd listens with \
             TLS"
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

#[cfg(test)]
mod tests {
    use rustls::pki_types::ServerName;

    use super::*;

    fn url(text: &str) -> Url {
        text.parse().unwrap()
    }

    /// The files of a rangecache with a client certificate.
    fn with_cert() -> TlsFilePaths {
        TlsFilePaths {
            cacert: Some("/tls/ca.crt".into()),
            cert: Some("/tls/own.crt".into()),
        }
    }

    fn explained(error: Error, files: &TlsFilePaths) -> String {
        let error = io::Error::new(io::ErrorKind::InvalidData, error);
        let explained = towards_etcd(error, &url("https://etcd.test:2379"), files);
        assert_eq!(explained.kind(), io::ErrorKind::InvalidData);
        explained.to_string()
    }

    #[test]
    fn unknown_issuer_names_the_cas_that_were_used() {
        let unknown = || Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let given = explained(unknown(), &with_cert());
        assert!(given.contains("not issued by --cacert /tls/ca.crt"), "{given}");
        let of_system = explained(unknown(), &TlsFilePaths::default());
        assert!(of_system.contains("--cacert is not given"), "{of_system}");
    }

    #[test]
    fn certificate_for_another_name_is_explained_with_both_names() {
        let error = CertificateError::NotValidForNameContext {
            expected: ServerName::try_from("etcd.test").unwrap(),
            presented: vec!["a.test".to_owned(), "b.test".to_owned()],
        };
        let text = explained(Error::InvalidCertificate(error), &with_cert());
        assert!(
            text.contains("not for etcd.test, only for a.test, b.test"),
            "{text}"
        );
    }

    #[test]
    fn bad_certificate_means_a_missing_one_only_if_none_is_given() {
        let bad = || Error::AlertReceived(AlertDescription::BadCertificate);
        let missing = explained(bad(), &TlsFilePaths::default());
        assert!(missing.contains("give --cert and --key"), "{missing}");
        let refused = explained(bad(), &with_cert());
        assert!(
            refused.contains("does not accept --cert /tls/own.crt"),
            "{refused}"
        );
    }

    #[test]
    fn alerts_about_the_connection_name_no_certificate() {
        for files in [TlsFilePaths::default(), with_cert()] {
            let version = explained(Error::AlertReceived(AlertDescription::ProtocolVersion), &files);
            assert!(version.contains("--tls-min-version"), "{version}");
            let other = explained(Error::AlertReceived(AlertDescription::InternalError), &files);
            assert!(other.contains("InternalError"), "{other}");
            for text in [version, other] {
                assert!(!text.contains("--cert"), "{text}");
            }
        }
    }

    #[test]
    fn error_of_the_socket_is_explained_only_if_the_connection_was_closed() {
        let explained = |kind| {
            let error = io::Error::new(kind, "as the system says");
            towards_etcd(error, &url("https://a:1"), &with_cert()).to_string()
        };
        let closed = explained(io::ErrorKind::ConnectionReset);
        assert!(closed.contains("write http://"), "{closed}");
        assert_eq!(explained(io::ErrorKind::HostUnreachable), "as the system says");
    }

    /// In TLS 1.3 the alert arrives after the handshake, as the text of an HTTP/2 error.
    #[test]
    fn alert_after_the_handshake_is_found_in_the_text_of_the_error() {
        let explained = |alert: Option<AlertDescription>, files: &TlsFilePaths| {
            let text = alert.map_or_else(
                || "broken pipe".to_owned(),
                |alert| format!("connection error: {}", Error::AlertReceived(alert)),
            );
            after_handshake(&text, &url("https://a:1"), files)
        };
        let expired = explained(Some(AlertDescription::CertificateExpired), &with_cert());
        assert_eq!(expired, "etcd refuses --cert /tls/own.crt as expired: renew it");
        let unknown = explained(None, &with_cert());
        assert!(
            unknown.contains("broken pipe") && unknown.contains("/tls/own.crt revoked?"),
            "{unknown}"
        );
        let without = explained(None, &TlsFilePaths::default());
        assert!(!without.contains("--cert"), "{without}");
    }
}
