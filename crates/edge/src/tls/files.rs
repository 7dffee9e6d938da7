//! Files that the flags name: certificates, keys, CAs and revocation lists, with errors that name the flag.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{io::Read, os::unix::fs::PermissionsExt as _};

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::{
    Error, InconsistentKeys, RootCertStore, crypto::CryptoProvider, pki_types::pem::PemObject,
    sign::CertifiedKey,
};

use super::facts::{self, CertificateFacts};

/// Largest file that is read, in bytes: revocation lists of a million certificates are smaller.
const MAX_BYTES: u64 = 64 << 20;
/// Bits of a mode with which users other than the owner and its group may read or write.
const OTHERS: u32 = 0o006;

/// An invalid file, with the flag that names it and what to do.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error(
        "{} {path}: cannot be read: {source}; check the path and the permissions",
        as_written(flag)
    )]
    Unreadable {
        /// The flag that names it.
        flag: &'static str,
        /// Path of the file.
        path: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The contents are invalid.
    #[error("{} {path}: {what}", as_written(flag))]
    Content {
        /// The flag that names it.
        flag: &'static str,
        /// Path of the file.
        path: String,
        /// The error, and what to do.
        what: String,
    },
    /// A certificate and the key of another one.
    #[error(
        "{} {key} is not the key of the certificate in {} {cert}: give the certificate's own key; the server's \
         certificate must come first in the file",
        as_written(key_flag),
        as_written(cert_flag)
    )]
    Mismatch {
        /// The flag that names the certificate.
        cert_flag: &'static str,
        /// Path of the file.
        cert: String,
        /// The flag that names the key.
        key_flag: &'static str,
        /// Path of the file.
        key: String,
    },
    /// The system has no CAs.
    #[error(
        "--cacert is not given and this system has no CA certificates: give --cacert, the CA that issued etcd's \
         certificate"
    )]
    NoSystemCas,
    /// An error of the TLS library.
    #[error("TLS cannot be configured: {0}")]
    Other(String),
}

/// A flag as it is written on the command line, or a variable of OpenTelemetry.
fn as_written(name: &str) -> String {
    let is_variable = name.starts_with(|first: char| first.is_ascii_uppercase());
    format!("{}{name}", if is_variable { "" } else { "--" })
}

/// Contents of a file.
pub(super) struct File {
    flag: &'static str,
    path: String,
    bytes: Vec<u8>,
}

/// Contents of several files, each under the flag that names it.
pub(super) struct Files {
    files: Vec<File>,
}

impl Files {
    /// Reads all of `paths`.
    pub(super) fn read(paths: &[(&'static str, PathBuf)]) -> Result<Files, FileError> {
        let read = |(flag, path): &(&'static str, PathBuf)| File::read(flag, path);
        Ok(Files {
            files: paths.iter().map(read).collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn get(&self, flag: &str) -> Option<&File> {
        self.files.iter().find(|file| file.flag == flag)
    }

    /// Hash of all contents. Only the hash is kept between reloads, so that no key stays in memory.
    pub(super) fn stamp(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for file in &self.files {
            file.bytes.hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// The facts of the first certificate in the file at `path`, which `flag` names.
///
/// # Errors
/// Why the file is invalid.
pub fn look_at_file(flag: &'static str, path: &Path) -> Result<CertificateFacts, FileError> {
    Ok(File::read(flag, path)?.certificates()?.1)
}

/// Warns if every user of the host may read or replace the secret in the file at `path`, which `flag` names.
pub fn warn_of_secret_open_to_others(flag: &'static str, path: &Path) {
    let mode = std::fs::metadata(path).map_or(0, |file| file.permissions().mode());
    if mode & OTHERS != 0 {
        tracing::warn!(
            flag = as_written(flag),
            path = %path.display(),
            mode = format!("{:04o}", mode & 0o7777),
            "every user of this host may read or write this file, which holds a secret; run chmod o-rw on it"
        );
    }
}

impl File {
    fn read(flag: &'static str, path: &Path) -> Result<File, FileError> {
        let unreadable = |source| FileError::Unreadable {
            flag,
            path: path.display().to_string(),
            source,
        };
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(unreadable)?;
        let file = File {
            flag,
            path: path.display().to_string(),
            bytes,
        };
        if file.bytes.len() as u64 > MAX_BYTES {
            return Err(file.invalid(format!("the file is larger than {} MiB", MAX_BYTES >> 20)));
        }
        Ok(file)
    }

    pub(super) fn invalid(&self, what: impl Into<String>) -> FileError {
        FileError::Content {
            flag: self.flag,
            path: self.path.clone(),
            what: what.into(),
        }
    }

    /// All certificates, at least one, with the facts of the first.
    pub(super) fn certificates(&self) -> Result<(Vec<CertificateDer<'static>>, CertificateFacts), FileError> {
        let none = || {
            self.invalid(
                "the file holds no certificate; give a PEM file with -----BEGIN CERTIFICATE-----, the server's own one \
                 first",
            )
        };
        let chain = CertificateDer::pem_slice_iter(&self.bytes)
            .collect::<Result<Vec<_>, _>>()
            // The error would print the bytes of a line as numbers.
            .map_err(|_| {
                self.invalid("the file is not valid PEM; compare its lines -----BEGIN and -----END")
            })?;
        let first = chain.first().ok_or_else(none)?;
        let facts = facts::of_certificate(first).map_err(|error| {
            self.invalid(format!(
                "its first certificate cannot be parsed ({error}); is it X.509?"
            ))
        })?;
        Ok((chain, facts))
    }

    /// The CAs, and when the first of them expires in seconds since 1970.
    pub(super) fn authorities(&self) -> Result<(RootCertStore, i64), FileError> {
        let (certificates, first) = self.certificates()?;
        let mut store = RootCertStore::empty();
        let mut expiry = first.not_after_seconds;
        for (index, certificate) in certificates.into_iter().enumerate() {
            let refused = |error: String| {
                let nth = index + 1;
                self.invalid(format!(
                    "certificate {nth} in it cannot be a CA ({error}); remove or replace it"
                ))
            };
            let facts = facts::of_certificate(&certificate).map_err(refused)?;
            expiry = expiry.min(facts.not_after_seconds);
            store
                .add(certificate)
                .map_err(|error| refused(error.to_string()))?;
        }
        Ok((store, expiry))
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, FileError> {
        let encrypted = b"ENCRYPTED";
        if self
            .bytes
            .windows(encrypted.len())
            .any(|window| window == encrypted)
        {
            return Err(self.invalid(
                "the key is encrypted, and its password cannot be asked for; decrypt it (openssl pkey -in … -out …) \
                 and protect the file by its mode",
            ));
        }
        PrivateKeyDer::from_pem_slice(&self.bytes).map_err(|_| {
            self.invalid(
                "the file holds no private key; give a PEM file with -----BEGIN PRIVATE KEY----- \
                 (or RSA or EC PRIVATE KEY)",
            )
        })
    }

    /// The certificates of this file with the key of `key_file`.
    pub(super) fn with_key(
        &self,
        key_file: &File,
        provider: &CryptoProvider,
    ) -> Result<(CertifiedKey, CertificateFacts), FileError> {
        let (chain, facts) = self.certificates()?;
        let key = key_file.key()?;
        warn_of_secret_open_to_others(key_file.flag, Path::new(&key_file.path));
        let certified = CertifiedKey::from_der(chain, key, provider).map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => FileError::Mismatch {
                cert_flag: self.flag,
                cert: self.path.clone(),
                key_flag: key_file.flag,
                key: key_file.path.clone(),
            },
            error @ Error::InvalidCertificate(_) => self.invalid(format!(
                "its first certificate cannot be used ({error}); it must be X.509 version 3"
            )),
            error => key_file.invalid(format!(
                "the key cannot be used ({error}); use RSA of 2048 bits or more, ECDSA or Ed25519"
            )),
        })?;
        Ok((certified, facts))
    }

    /// Revocation lists, at least one, and when the first of them expires in seconds since 1970.
    pub(super) fn revocation_lists(
        &self,
    ) -> Result<(Vec<CertificateRevocationListDer<'static>>, Option<i64>), FileError> {
        let none = || {
            self.invalid(
                "the file holds no revocation list; give a CRL as PEM (-----BEGIN X509 CRL-----) or DER",
            )
        };
        let lists = if self.bytes.first() == Some(&DER_SEQUENCE) {
            vec![CertificateRevocationListDer::from(self.bytes.clone())]
        } else {
            CertificateRevocationListDer::pem_slice_iter(&self.bytes)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|_| none())?
        };
        if lists.is_empty() {
            return Err(none());
        }
        let next_update = lists
            .iter()
            .filter_map(|list| facts::next_update_seconds(list))
            .min();
        Ok((lists, next_update))
    }
}

/// First byte of every CRL in DER, and of none in PEM.
const DER_SEQUENCE: u8 = 0x30;

/// The CAs that this system trusts.
pub(super) fn system_authorities() -> Result<RootCertStore, FileError> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    // A bundle may contain a certificate that rustls refuses; the others are used.
    store.add_parsable_certificates(found.certs);
    if store.is_empty() {
        return Err(FileError::NoSystemCas);
    }
    Ok(store)
}

#[cfg(test)]
mod tests {
    use testkit::tls::{Ca, Leaf, replace};

    use super::*;

    /// When an expired certificate of the tests has expired: 2020-01-01.
    const EXPIRED_SECONDS: i64 = 1_577_836_800;

    fn read(path: &Path) -> File {
        File::read("cacert", path).unwrap()
    }

    #[test]
    fn variable_is_named_without_the_dashes_of_a_flag() {
        let missing = |name| look_at_file(name, Path::new("/missing")).unwrap_err().to_string();
        assert!(missing("cacert").starts_with("--cacert /missing: cannot be read"));
        let variable = missing("OTEL_EXPORTER_OTLP_CERTIFICATE");
        assert!(
            variable.starts_with("OTEL_EXPORTER_OTLP_CERTIFICATE /missing: cannot be read"),
            "{variable}"
        );
    }

    #[test]
    fn file_over_the_size_limit_is_refused() {
        let ca = Ca::new();
        let path = ca.path("large");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(MAX_BYTES).unwrap();
        assert!(File::read("client-crl-file", &path).is_ok());
        file.set_len(MAX_BYTES + 1).unwrap();
        let error = File::read("client-crl-file", &path).err().unwrap().to_string();
        assert!(error.ends_with("the file is larger than 64 MiB"), "{error}");
    }

    #[test]
    fn authorities_expire_with_the_first_of_them_wherever_it_is() {
        let ca = Ca::new();
        let expired = Leaf {
            expired: true,
            ..Leaf::default()
        };
        let expired = std::fs::read_to_string(ca.issue("expired", &expired).cert).unwrap();
        let own = std::fs::read_to_string(ca.cert()).unwrap();
        let both = ca.path("both.crt");
        for text in [own.clone() + &expired, expired + &own] {
            replace(&both, &text);
            let (store, expiry) = read(&both).authorities().unwrap();
            assert_eq!((store.len(), expiry), (2, EXPIRED_SECONDS));
        }
    }

    #[test]
    fn authority_that_cannot_be_parsed_is_named_by_its_position() {
        let ca = Ca::new();
        let own = std::fs::read_to_string(ca.cert()).unwrap();
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let path = ca.path("broken.crt");
        replace(&path, &(own + broken));
        let error = read(&path).authorities().unwrap_err().to_string();
        assert!(error.contains("certificate 2 in it cannot be a CA"), "{error}");
        replace(&path, broken);
        let error = read(&path).authorities().unwrap_err().to_string();
        assert!(
            error.contains("its first certificate cannot be parsed"),
            "{error}"
        );
    }

    #[test]
    fn revocation_list_is_read_from_pem_and_from_der() {
        let ca = Ca::new();
        let pem = read(&ca.revoke(&[1, 2])).revocation_lists().unwrap();
        let der = read(&ca.path("revoked.der")).revocation_lists().unwrap();
        assert_eq!(pem, der);
        assert_eq!(pem.1, Some(4_102_444_800), "2100-01-01");
    }

    #[test]
    fn stamp_changes_with_the_contents_of_any_file() {
        let ca = Ca::new();
        let [first, second] = ["first", "second"].map(|name| ca.path(name));
        let paths = [("cert", first.clone()), ("key", second.clone())];
        let stamp_with = |texts: [&str; 2]| {
            replace(&first, texts[0]);
            replace(&second, texts[1]);
            Files::read(&paths).unwrap().stamp()
        };
        let before = stamp_with(["a", "b"]);
        assert_ne!(stamp_with(["a", "c"]), before);
        assert_ne!(stamp_with(["c", "b"]), before);
        assert_ne!(stamp_with(["b", "a"]), before);
        assert_ne!(stamp_with(["ab", ""]), before, "a part moved to the other file");
        assert_eq!(stamp_with(["a", "b"]), before);
    }
}
