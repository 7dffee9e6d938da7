//! Heads and trailers in HPACK (RFC 7541) without a dynamic table: this client announces that it has none, and uses none itself.

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{StatusCode, Uri};

use super::error::LeanError;
use super::huffman;

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
    huffman::decode(&string, &mut text).ok_or(WRONG)?;
    Ok(text)
}
