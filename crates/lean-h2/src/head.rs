//! Heads and trailers in HPACK (RFC 7541) without a dynamic table: this client announces that it has none, and uses none itself.
//!
//! The Huffman code of HPACK (appendix B) is known for text that etcd sends: ASCII without control characters. It is canonical: codes
//! of the same length are consecutive numbers in the order of their symbols, and the first of a length follows from the number of
//! shorter ones.

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{StatusCode, Uri};

use super::frame::LeanError;

/// Names and values of the static table, from index 1 on (RFC 7541, appendix A).
const STATIC_TABLE: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];
/// Indexes of what each request has.
const METHOD_POST: u8 = 3;
const SCHEME_HTTP: u8 = 6;
const SCHEME_HTTPS: u8 = 7;
const PATH: u8 = 4;
const AUTHORITY: u8 = 1;
/// Sets the size of the dynamic table to 0.
const NO_DYNAMIC_TABLE: u8 = 0x20;

/// Bound on a block of headers that was received and decoded, as hyper's limit for other connections: an index of one byte stands for
/// a whole field.
const MAX_HEAD_BYTES: usize = 1 << 20;
/// Bytes that a field counts for this besides its name and value (RFC 9113, section 6.5.2).
const FIELD_BYTES: usize = 32;

const WRONG: LeanError = LeanError::Unexpected("headers that cannot be read");

/// A block of headers that was received.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    /// `None` in trailers.
    pub(crate) status: Option<StatusCode>,
    pub(crate) headers: HeaderMap,
}

/// Encodes the head of a POST to `uri`, which has all of its parts.
pub(super) fn encode(uri: &Uri, headers: &HeaderMap) -> BytesMut {
    let mut block = BytesMut::with_capacity(256);
    let scheme = if uri.scheme_str() == Some("https") {
        SCHEME_HTTPS
    } else {
        SCHEME_HTTP
    };
    // RFC 7541, section 4.2: the first block after the server has lowered the size of its table must begin with a new size. It may
    // always, and so no block depends on when the server's settings arrive.
    block.put_slice(&[NO_DYNAMIC_TABLE, 0x80 | METHOD_POST, 0x80 | scheme]);
    // Literals without indexing: of a name in the table, or of a name of its own.
    block.put_u8(PATH);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    put_string(&mut block, path.as_bytes());
    block.put_u8(AUTHORITY);
    put_string(
        &mut block,
        uri.authority()
            .map_or("", |authority| authority.as_str())
            .as_bytes(),
    );
    for (name, value) in headers {
        block.put_u8(0);
        put_string(&mut block, name.as_str().as_bytes());
        put_string(&mut block, value.as_bytes());
    }
    block
}

/// Adds a string that is not Huffman-coded.
fn put_string(block: &mut BytesMut, string: &[u8]) {
    let low_bits = |length: usize, mask: u8| length.to_le_bytes()[0] & mask;
    if string.len() < 0x7f {
        block.put_u8(low_bits(string.len(), 0x7f));
    } else {
        block.put_u8(0x7f);
        let mut length = string.len() - 0x7f;
        while length >= 0x80 {
            block.put_u8(0x80 | low_bits(length, 0x7f));
            length >>= 7;
        }
        block.put_u8(low_bits(length, 0x7f));
    }
    block.put_slice(string);
}

/// Decodes a block of headers.
///
/// # Errors
/// [`LeanError::Unexpected`] for a block that is not well-formed, that refers to a dynamic table, or that is too long.
pub(super) fn decode(mut block: Bytes) -> Result<Head, LeanError> {
    let mut head = Head::default();
    let mut head_bytes = 0;
    let mut add = |name: &[u8], value: &[u8]| {
        head_bytes += name.len() + value.len() + FIELD_BYTES;
        if head_bytes > MAX_HEAD_BYTES {
            return Err(WRONG);
        }
        head.add(name, value)
    };
    while let Some(first) = block.first().copied() {
        if first & 0x80 != 0 {
            let (name, value) = entry(integer(&mut block, 7)?)?;
            add(name.as_bytes(), value.as_bytes())?;
        } else if first & 0xe0 == 0x20 {
            // The size of the dynamic table, which this client has set to 0.
            if integer(&mut block, 5)? != 0 {
                return Err(WRONG);
            }
        } else {
            // With, without, or never to be indexed: the same without a dynamic table.
            let bits = if first & 0x40 != 0 { 6 } else { 4 };
            let name = match integer(&mut block, bits)? {
                0 => string(&mut block)?,
                index => entry(index)?.0.as_bytes().to_vec(),
            };
            let value = string(&mut block)?;
            add(&name, &value)?;
        }
    }
    Ok(head)
}

impl Head {
    fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), LeanError> {
        if name == b":status" {
            let status = StatusCode::from_bytes(value).map_err(|_| WRONG)?;
            return self.status.replace(status).map_or(Ok(()), |_| Err(WRONG));
        }
        // Lower case, and not one that begins with a colon.
        let name = HeaderName::from_lowercase(name).map_err(|_| WRONG)?;
        let value = HeaderValue::from_bytes(value).map_err(|_| WRONG)?;
        // A map has a bound of its own on the number of names.
        self.headers.try_append(name, value).map_err(|_| WRONG)?;
        Ok(())
    }
}

fn entry(index: usize) -> Result<(&'static str, &'static str), LeanError> {
    let entry = index.checked_sub(1).and_then(|index| STATIC_TABLE.get(index));
    entry.copied().ok_or(WRONG)
}

/// Takes an integer off `block` that begins in the last `bits` of its first byte.
fn integer(block: &mut Bytes, bits: u32) -> Result<usize, LeanError> {
    let most = (1 << bits) - 1;
    let mut value = usize::from(byte(block)?) & most;
    if value < most {
        return Ok(value);
    }
    // No more than a frame can have.
    for shift in [0, 7, 14] {
        let next = byte(block)?;
        value += usize::from(next & 0x7f) << shift;
        if next & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(WRONG)
}

fn byte(block: &mut Bytes) -> Result<u8, LeanError> {
    let first = *block.first().ok_or(WRONG)?;
    let _ = block.split_to(1);
    Ok(first)
}

fn string(block: &mut Bytes) -> Result<Vec<u8>, LeanError> {
    let is_coded = block.first().ok_or(WRONG)? & 0x80 != 0;
    let length = integer(block, 7)?;
    if block.len() < length {
        return Err(WRONG);
    }
    let string = block.split_to(length);
    if !is_coded {
        return Ok(string.to_vec());
    }
    let mut text = Vec::with_capacity(length * 8 / 5);
    decode_huffman(&string, &mut text).ok_or(WRONG)?;
    Ok(text)
}

/// Number of codes of 5, 6, … 19 bits.
const CODES: [u32; 15] = [10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3];
/// Length of the shortest code in bits.
const SHORTEST: u32 = 5;
/// Symbols in the order of their codes. Each symbol that is not here has a longer code.
const SYMBOLS: [u8; 98] = *b"012aceiost %-./3456789=A_bdfghlmnpru:BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz&*,;XZ!\"()?'+|#>\0$@[]~^}<`{\\\xc3\xd0";

/// Decodes `coded` into `text`; `None` if it is not coded text, or has a symbol that etcd does not send.
fn decode_huffman(coded: &[u8], text: &mut Vec<u8>) -> Option<()> {
    // Code that has begun; the first code of its length, and the position of that one's symbol.
    let (mut code, mut bits, mut first, mut position) = (0_u32, 0_u32, 0_u32, 0_u32);
    for byte in coded {
        for bit in (0..8).rev() {
            code = code << 1 | u32::from(byte >> bit & 1);
            bits += 1;
            first <<= 1;
            let Some(length) = bits.checked_sub(SHORTEST) else {
                continue;
            };
            let codes = *CODES.get(length as usize)?;
            if code - first < codes {
                let symbol = *SYMBOLS.get((position + code - first) as usize)?;
                text.push(Some(symbol).filter(|symbol| symbol.is_ascii() && !symbol.is_ascii_control())?);
                (code, bits, first, position) = (0, 0, 0, 0);
            } else {
                first += codes;
                position += codes;
            }
        }
    }
    // Padding: fewer than eight bits of the longest code, which are ones.
    (bits < 8 && code == (1 << bits) - 1).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(coded: &[u8]) -> Option<String> {
        let mut text = Vec::new();
        decode_huffman(coded, &mut text)?;
        Some(String::from_utf8(text).unwrap())
    }

    /// Examples of RFC 7541, appendix C.
    #[test]
    fn examples_of_the_rfc_are_decoded() {
        let coded = [
            0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff,
        ];
        assert_eq!(decoded(&coded).unwrap(), "www.example.com");
        assert_eq!(
            decoded(&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf]).unwrap(),
            "no-cache"
        );
        assert_eq!(decoded(&[0x64, 0x02]).unwrap(), "302");
        assert_eq!(decoded(&[]).unwrap(), "");
    }

    #[test]
    fn what_is_no_text_is_refused() {
        // Eight bits of padding, padding of zeros, the end of a string, NUL.
        for coded in [&[0xff_u8][..], &[0x00, 0x00], &[0xff; 4], &[0xff, 0xc7]] {
            assert_eq!(decoded(coded), None, "{coded:?}");
        }
    }
}
