//! What is in the files that the flags name, and what is wrong with it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys, RootCertStore};

use super::facts::{self, Facts};

/// The largest file that is read: revocation lists of a million certificates are smaller.
const MAX_BYTES: u64 = 64 << 20;

/// What is wrong with a file, with the flag that names it and what to do.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error(
        "{} {path}: cannot be read: {source}; check the path and the permissions",
        shown(flag)
    )]
    Unreadable {
        /// The flag that names it.
        flag: &'static str,
        /// Where it is.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is no such file.
    #[error("{} {path}: {what}", shown(flag))]
    Content {
        /// The flag that names it.
        flag: &'static str,
        /// Where it is.
        path: String,
        /// What is wrong, and what to do.
        what: String,
    },
    /// Two files that do not belong together.
    #[error(
        "{} {key} is not the key of the certificate in {} {cert}: give the key that the certificate was made with; \
         the server's own certificate must come first in the file",
        shown(key_flag),
        shown(cert_flag)
    )]
    Mismatch {
        /// The flag that names the certificate.
        cert_flag: &'static str,
        /// Where it is.
        cert: String,
        /// The flag that names the key.
        key_flag: &'static str,
        /// Where it is.
        key: String,
    },
    /// The system has no CAs.
    #[error(
        "--cacert is not given and this system has no CA certificates: give --cacert, the CA that issued etcd's certificate"
    )]
    NoSystemCas,
    /// What rustls does not take.
    #[error("TLS cannot be set up: {0}")]
    Other(String),
}

/// A flag, or a variable of OpenTelemetry's, as it is written.
fn shown(name: &str) -> String {
    let is_variable = name.starts_with(|first: char| first.is_ascii_uppercase());
    format!("{}{name}", if is_variable { "" } else { "--" })
}

/// A file that was read.
pub(super) struct File {
    flag: &'static str,
    path: String,
    bytes: Vec<u8>,
}

/// Files as they were at one moment, each under the flag that names it.
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

    /// Differs when any content does. Only this is kept of the files, so that no key lies about in memory.
    pub(super) fn stamp(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for file in &self.files {
            file.bytes.hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// What the first certificate of the file at `path` says of itself.
///
/// # Errors
/// What is wrong with the file, which `flag` names.
pub fn look_at_file(flag: &'static str, path: &Path) -> Result<Facts, FileError> {
    Ok(File::read(flag, path)?.certificates()?.1)
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
            return Err(file.wrong(format!("it is larger than {} MiB", MAX_BYTES >> 20)));
        }
        Ok(file)
    }

    pub(super) fn wrong(&self, what: impl Into<String>) -> FileError {
        FileError::Content {
            flag: self.flag,
            path: self.path.clone(),
            what: what.into(),
        }
    }

    /// Every certificate, at least one, with what the first says of itself.
    pub(super) fn certificates(&self) -> Result<(Vec<CertificateDer<'static>>, Facts), FileError> {
        let none = || {
            self.wrong(
                "it holds no certificate; give a PEM file with -----BEGIN CERTIFICATE-----, the server's own one first",
            )
        };
        let chain = CertificateDer::pem_slice_iter(&self.bytes)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| self.wrong(format!("it is not PEM as it should be: {error}")))?;
        let first = chain.first().ok_or_else(none)?;
        let facts = facts::of_certificate(first).map_err(|error| {
            self.wrong(format!(
                "its first certificate cannot be understood ({error}); is it X.509?"
            ))
        })?;
        Ok((chain, facts))
    }

    /// The CAs, and when the first of them expires, in seconds since 1970.
    pub(super) fn authorities(&self) -> Result<(RootCertStore, i64), FileError> {
        let (certificates, first) = self.certificates()?;
        let mut store = RootCertStore::empty();
        let mut expiry = first.not_after_seconds;
        for (index, certificate) in certificates.into_iter().enumerate() {
            let refused = |error: String| {
                let nth = index + 1;
                self.wrong(format!(
                    "certificate {nth} in it cannot be a CA ({error}); take it out, or make it anew"
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
            return Err(self.wrong(
                "the key is encrypted, and there is nobody to ask for its password; \
                 decrypt it (openssl pkey -in … -out …) and protect the file by its mode",
            ));
        }
        PrivateKeyDer::from_pem_slice(&self.bytes).map_err(|_| {
            self.wrong("it holds no private key; give a PEM file with -----BEGIN PRIVATE KEY----- (or RSA or EC PRIVATE KEY)")
        })
    }

    /// This file's certificates with the key of another.
    pub(super) fn with_key(
        &self,
        key_file: &File,
        provider: &CryptoProvider,
    ) -> Result<(CertifiedKey, Facts), FileError> {
        let (chain, facts) = self.certificates()?;
        let key = key_file.key()?;
        let certified = CertifiedKey::from_der(chain, key, provider).map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => FileError::Mismatch {
                cert_flag: self.flag,
                cert: self.path.clone(),
                key_flag: key_file.flag,
                key: key_file.path.clone(),
            },
            error @ Error::InvalidCertificate(_) => self.wrong(format!(
                "its first certificate cannot be used ({error}); it must be X.509 version 3"
            )),
            error => key_file.wrong(format!(
                "the key cannot be used ({error}); use RSA of 2048 bits or more, ECDSA or Ed25519"
            )),
        })?;
        Ok((certified, facts))
    }

    /// Revocation lists, at least one, and when the first of them will be replaced, in seconds since 1970.
    pub(super) fn revocation_lists(
        &self,
    ) -> Result<(Vec<CertificateRevocationListDer<'static>>, Option<i64>), FileError> {
        let none =
            || self.wrong("it holds no revocation list; give a CRL as PEM (-----BEGIN X509 CRL-----) or DER");
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

/// With which every CRL in DER begins, and none in PEM.
const DER_SEQUENCE: u8 = 0x30;
