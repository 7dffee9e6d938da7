//! Frames: a file is a row of them, each sealed by a checksum, or encrypted with a key (`--image-key-file`). What is wrong with one
//! makes the image useless.
//!
//! ```text
//! | length of the payload, 4 bytes | kind, 1 byte | payload | seal, 4 bytes (checksum) or 16 (encrypted) |
//! ```
//!
//! A seal also covers the number of its frame, so that frames cannot change places. The
//! [`Header`](super::file::Header) that begins a file is never encrypted, and every other frame is sealed for that very
//! header.

use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::{fmt, path::Path};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};
use bytes::Bytes;
use etcd_store::cache::MalformedKeyValue;

/// Frame that begins a file.
pub(super) const HEADER: u8 = 1;
/// Keys and values.
pub(super) const ENTRIES: u8 = 2;
/// End of a file, with the newest events.
pub(super) const END: u8 = 3;

const PREFIX_BYTES: usize = 5;
const CHECKSUM_BYTES: usize = 4;

/// Seals of the frames of one file.
struct Seals {
    /// `None` for checksums.
    key: Option<LessSafeKey>,
    /// CRC-32 of the header: a frame of another file has another checksum.
    header: u32,
    /// Number of the next frame.
    next: u64,
}

impl Seals {
    /// Seals of the file with the encoded `header`, which no other file has.
    fn new(header: &[u8], key: Option<&ImageKey>) -> Seals {
        let derived = key.and_then(|key| UnboundKey::new(&AES_256_GCM, &key.derive(header)).ok());
        debug_assert_eq!(derived.is_some(), key.is_some());
        Seals {
            key: derived.map(LessSafeKey::new),
            header: crc32fast::hash(header),
            next: 0,
        }
    }

    /// Appends the next frame, with `payload`, to `out`.
    ///
    /// # Errors
    /// The payload is too large.
    fn write(&mut self, kind: u8, payload: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let too_large = || io::Error::other("a frame is too large");
        let length = u32::try_from(payload.len()).map_err(|_| too_large())?;
        out.extend_from_slice(&length.to_le_bytes());
        out.push(kind);
        let start = out.len();
        out.extend_from_slice(payload);
        let number = self.take_number();
        match &self.key {
            Some(key) => {
                let tag = key.seal_in_place_separate_tag(nonce(number), Aad::from([kind]), &mut out[start..]);
                out.extend_from_slice(tag.map_err(|_| too_large())?.as_ref());
            }
            None => out.extend_from_slice(&self.checksum(number, kind, payload).to_le_bytes()),
        }
        Ok(())
    }

    /// Reads the next frame, whose prefix was read: its kind and the length of its payload.
    fn read(&mut self, from: &mut impl Read, (kind, length): (u8, usize)) -> Result<Bytes, Useless> {
        let mut frame = vec![0; length + self.seal_bytes()];
        from.read_exact(&mut frame)?;
        let number = self.take_number();
        let Some(key) = &self.key else {
            let seal = frame.split_off(length);
            let is_same = seal == self.checksum(number, kind, &frame).to_le_bytes();
            return if is_same {
                Ok(frame.into())
            } else {
                Err(Useless::Checksum)
            };
        };
        let opened = key.open_in_place(nonce(number), Aad::from([kind]), &mut frame);
        opened.map_err(|_| Useless::Seal)?;
        frame.truncate(length);
        Ok(frame.into())
    }

    fn seal_bytes(&self) -> usize {
        self.key.as_ref().map_or(CHECKSUM_BYTES, |_| MAX_TAG_LEN)
    }

    fn take_number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn checksum(&self, number: u64, kind: u8, payload: &[u8]) -> u32 {
        let mut checksum = crc32fast::Hasher::new_with_initial(self.header);
        checksum.update(&number.to_le_bytes());
        checksum.update(&[kind]);
        checksum.update(payload);
        checksum.finalize()
    }
}

/// Writer of a file's frames.
pub(super) struct FrameWriter {
    file: File,
    seals: Seals,
    bytes: u64,
}

impl FrameWriter {
    /// Begins an empty file with the encoded `header`.
    pub(super) fn begin(file: File, header: &[u8], key: Option<&ImageKey>) -> io::Result<FrameWriter> {
        let mut writer = FrameWriter {
            file,
            seals: Seals::new(&[], None),
            bytes: 0,
        };
        writer.write(HEADER, header)?;
        writer.seals = Seals::new(header, key);
        Ok(writer)
    }

    /// Appends a frame.
    pub(super) fn write(&mut self, kind: u8, payload: &[u8]) -> io::Result<()> {
        let mut frame = Vec::new();
        self.seals.write(kind, payload, &mut frame)?;
        self.file.write_all(&frame)?;
        self.bytes += frame.len() as u64;
        Ok(())
    }

    /// The file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Bytes of the file.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Reader of a file's frames.
pub(super) struct Frames<R> {
    from: R,
    /// Bytes of the file that were not read yet.
    left: u64,
    seals: Seals,
}

impl<R: Read> Frames<R> {
    /// Begins to read the `length` bytes of a file; also returns its encoded header.
    pub(super) fn begin(from: R, length: u64, key: Option<&ImageKey>) -> Result<(Frames<R>, Bytes), Useless> {
        let mut frames = Frames {
            from,
            left: length,
            seals: Seals::new(&[], None),
        };
        let Some((HEADER, header)) = frames.next()? else {
            return Err(Useless::Order);
        };
        frames.seals = Seals::new(&header, key);
        Ok((frames, header))
    }

    /// Kind and payload of the next frame; `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<(u8, Bytes)>, Useless> {
        if self.left == 0 {
            return Ok(None);
        }
        let mut take = |bytes: usize| {
            let left = self.left.checked_sub(bytes as u64);
            self.left = left.ok_or(Useless::CutOff)?;
            Ok::<_, Useless>(())
        };
        take(PREFIX_BYTES)?;
        let mut prefix = [0; PREFIX_BYTES];
        self.from.read_exact(&mut prefix)?;
        let [a, b, c, d, kind] = prefix;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        // Before memory is taken for it.
        take(length + self.seals.seal_bytes())?;
        let payload = self.seals.read(&mut self.from, (kind, length))?;
        Ok(Some((kind, payload)))
    }
}

/// A file of the encoded `header` with these frames, sealed by checksums.
#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) fn sealed(header: &[u8], frames: impl Iterator<Item = (u8, Vec<u8>)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Frames of less than four gigabytes.
    let _ = Seals::new(&[], None).write(HEADER, header, &mut bytes);
    let mut seals = Seals::new(header, None);
    for (kind, payload) in frames {
        let _ = seals.write(kind, &payload, &mut bytes);
    }
    bytes
}

/// A number is used once with a key: each file has its own.
fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Why an image is of no use: it is discarded, and its mirror is loaded.
#[derive(Debug, thiserror::Error)]
pub(super) enum Useless {
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("it is cut off")]
    CutOff,
    #[error("a checksum is wrong")]
    Checksum,
    #[error("it is not of --image-key-file, or is damaged")]
    Seal,
    #[error("it is encrypted, and there is no --image-key-file")]
    NoKey,
    #[error("it is not encrypted, and --image-key-file is given")]
    NotEncrypted,
    #[error("it has no header")]
    NoHeader,
    #[error("it was written by another version")]
    Format,
    #[error("it is of another mirror")]
    Scope,
    /// Whole frames that make no image.
    #[error("its contents are not those of an image")]
    Order,
    #[error("its keys take more memory than --cache-max-bytes allows without packing and leaving out values")]
    TooLarge,
    #[error("reading it failed")]
    Panicked,
}

impl From<MalformedKeyValue> for Useless {
    fn from(_: MalformedKeyValue) -> Self {
        Useless::Order
    }
}

const KEY_BYTES: usize = 32;

/// Key from which those of all images are derived.
pub(super) struct ImageKey([u8; KEY_BYTES]);

impl fmt::Debug for ImageKey {
    // Omits the key (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ImageKey")
    }
}

impl ImageKey {
    /// The key of a file: 64 hexadecimal digits on its first line.
    ///
    /// # Errors
    /// The system's, and `InvalidData` for a file with something else.
    pub(super) fn read(path: &Path) -> io::Result<ImageKey> {
        let refused = || {
            let text = "hexadecimal digits on its first line, as from: openssl rand -hex";
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it must have {} {text} {KEY_BYTES}", 2 * KEY_BYTES),
            )
        };
        let text = fs::read_to_string(path)?;
        let digits = text.lines().next().unwrap_or_default().trim().as_bytes();
        let digit = |digit: u8| {
            char::from(digit)
                .to_digit(16)
                .and_then(|digit| u8::try_from(digit).ok())
        };
        let mut key = [0; KEY_BYTES];
        if digits.len() != 2 * KEY_BYTES {
            return Err(refused());
        }
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            let high = digit(pair[0]).ok_or_else(refused)?;
            let low = digit(pair[1]).ok_or_else(refused)?;
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

    fn read(text: &str) -> io::Result<ImageKey> {
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
            let refused = read(text).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{text}");
        }
        let missing = ImageKey::read(Path::new("/nowhere")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
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
