//! The key of encrypted images (`--image-key-file`).

use std::path::Path;
use std::{fmt, fs, io};

use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};

const KEY_BYTES: usize = 32;

/// Key from which those of all images are derived.
pub(crate) struct ImageKey([u8; KEY_BYTES]);

impl fmt::Debug for ImageKey {
    // Omits the key (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ImageKey")
    }
}

/// A key file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    /// The file cannot be read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The file has something else.
    #[error("it must have {} hexadecimal digits on its first line, as from: openssl rand -hex {KEY_BYTES}", 2 * KEY_BYTES)]
    NotAKey,
}

impl ImageKey {
    /// The key of a file: 64 hexadecimal digits on its first line.
    ///
    /// # Errors
    /// [`KeyError`]
    pub(crate) fn read(path: &Path) -> Result<ImageKey, KeyError> {
        let text = fs::read_to_string(path)?;
        let digits = text.lines().next().unwrap_or_default().trim().as_bytes();
        let digit = |digit: u8| {
            char::from(digit)
                .to_digit(16)
                .and_then(|digit| u8::try_from(digit).ok())
        };
        let mut key = [0; KEY_BYTES];
        if digits.len() != 2 * KEY_BYTES {
            return Err(KeyError::NotAKey);
        }
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            let high = digit(pair[0]).ok_or(KeyError::NotAKey)?;
            let low = digit(pair[1]).ok_or(KeyError::NotAKey)?;
            *byte = high << 4 | low;
        }
        Ok(ImageKey(key))
    }

    /// The key of the image that begins with the encoded `header`, which has random bytes of its own.
    pub(super) fn derive(&self, header: &[u8]) -> [u8; KEY_BYTES] {
        let mut derived = [0; KEY_BYTES];
        let random = Salt::new(HKDF_SHA256, header).extract(&self.0);
        let info = [&b"rangecache image"[..]];
        // HKDF gives up to 255 times as many bytes.
        let filled = random
            .expand(&info, HKDF_SHA256)
            .and_then(|expanded| expanded.fill(&mut derived));
        debug_assert!(filled.is_ok());
        derived
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ImageKey, KeyError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        ImageKey::read(file.path())
    }

    #[test]
    fn key_is_64_hexadecimal_digits() {
        let digits = "0123456789abcdefABCDEF0123456789".repeat(2);
        let key = read(&format!("{digits}\nsecond line\n")).unwrap();
        assert_eq!(key.0[..4], [0x01, 0x23, 0x45, 0x67]);
        for text in ["", &digits[1..], &format!("{digits}0"), &digits.replace('a', "g")] {
            assert!(matches!(read(text), Err(KeyError::NotAKey)), "{text}");
        }
        assert!(matches!(
            ImageKey::read(Path::new("/nowhere")),
            Err(KeyError::Io(_))
        ));
    }

    #[test]
    fn each_header_has_a_key_of_its_own() {
        let key = ImageKey([7; KEY_BYTES]);
        assert_eq!(key.derive(b"one"), key.derive(b"one"));
        assert_ne!(key.derive(b"one"), key.derive(b"another"));
        assert_ne!(key.derive(b"one"), ImageKey([8; KEY_BYTES]).derive(b"one"));
        assert_ne!(key.derive(b"one"), [0; KEY_BYTES]);
    }
}
