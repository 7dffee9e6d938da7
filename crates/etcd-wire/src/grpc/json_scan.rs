//! An incremental scanner of etcd's response headers in the JSON of its gateway, which passes through unchanged.
//!
//! A unary response is one object, a stream has one per line (`{"result":…}`). The header is the first field of each
//! message, so that the beginning of a line is enough.

use super::Scanned;

/// Bytes of a line within which the header must end: twice the longest header of etcd 3.8.
const HEAD_BYTES: usize = 512;

/// Scans the response to one call, piece by piece.
#[derive(Debug, Default)]
pub struct JsonHeaderScanner {
    /// Beginning of the current line, until its header is known.
    head: Vec<u8>,
    /// Whether the rest of the line is skipped.
    is_known: bool,
}

impl JsonHeaderScanner {
    /// Scans the next bytes; must be called before they are sent to the client (I11). `report` gets what each line shows,
    /// at once when it is known.
    pub fn scan(&mut self, mut data: &[u8], mut report: impl FnMut(Scanned)) {
        while !data.is_empty() {
            let end = data.iter().position(|byte| *byte == b'\n');
            let line = &data[..end.unwrap_or(data.len())];
            if !self.is_known {
                let room = HEAD_BYTES - self.head.len();
                self.head.extend_from_slice(&line[..line.len().min(room)]);
                let may_continue = end.is_none() && self.head.len() < HEAD_BYTES;
                let scanned = match message(&mut Tokens(&self.head)) {
                    Err(Stop::Incomplete) if may_continue => break,
                    // An empty line.
                    Err(Stop::Incomplete) if self.head.trim_ascii().is_empty() => None,
                    Err(_) => Some(Scanned::Malformed),
                    Ok(header) => {
                        header.map(|(cluster_id, revision)| Scanned::Header { cluster_id, revision })
                    }
                };
                if let Some(scanned) = scanned {
                    report(scanned);
                }
                (self.is_known, self.head) = (true, Vec::new());
            }
            let Some(end) = end else {
                break;
            };
            self.is_known = false;
            data = &data[end + 1..];
        }
    }
}

/// Why there is no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The text ends before it.
    Incomplete,
    /// The text is not a response of etcd's gateway.
    Malformed,
}

/// `cluster_id` and `revision` of the header at the start of a message; `None` for an error, or where there is no revision.
fn message(tokens: &mut Tokens<'_>) -> Result<Option<(u64, i64)>, Stop> {
    tokens.expect(b'{')?;
    match tokens.first_name()? {
        None | Some(b"error" | b"code" | b"message") => Ok(None),
        Some(b"result") => message(tokens),
        Some(b"header") => header(tokens),
        Some(_) => Err(Stop::Malformed),
    }
}

fn header(tokens: &mut Tokens<'_>) -> Result<Option<(u64, i64)>, Stop> {
    tokens.expect(b'{')?;
    let (mut cluster_id, mut revision) = (0, 0);
    let mut next = tokens.first_name()?;
    while let Some(name) = next {
        let value = tokens.value()?;
        match name {
            b"cluster_id" => cluster_id = number(value)?,
            b"revision" => revision = number(value)?,
            _ => {}
        }
        next = match tokens.next()? {
            b',' => Some(tokens.name()?),
            b'}' => None,
            _ => return Err(Stop::Malformed),
        };
    }
    Ok((revision > 0).then_some((cluster_id, revision)))
}

fn number<N: std::str::FromStr>(value: &[u8]) -> Result<N, Stop> {
    let text = std::str::from_utf8(value).map_err(|_| Stop::Malformed)?;
    text.parse().map_err(|_| Stop::Malformed)
}

/// The text that is left.
struct Tokens<'a>(&'a [u8]);

impl<'a> Tokens<'a> {
    /// The next byte that is not white space.
    fn next(&mut self) -> Result<u8, Stop> {
        let (byte, rest) = self.0.trim_ascii_start().split_first().ok_or(Stop::Incomplete)?;
        self.0 = rest;
        Ok(*byte)
    }

    fn expect(&mut self, expected: u8) -> Result<(), Stop> {
        (self.next()? == expected).then_some(()).ok_or(Stop::Malformed)
    }

    /// The name of an object's first field; `None` at the end of an empty object.
    fn first_name(&mut self) -> Result<Option<&'a [u8]>, Stop> {
        if self.0.trim_ascii_start().first() == Some(&b'}') {
            return Ok(None);
        }
        self.name().map(Some)
    }

    fn name(&mut self) -> Result<&'a [u8], Stop> {
        self.expect(b'"')?;
        let name = self.text()?;
        self.expect(b':')?;
        Ok(name)
    }

    /// A string without its quotes, or another value that is no object and no array.
    fn value(&mut self) -> Result<&'a [u8], Stop> {
        self.0 = self.0.trim_ascii_start();
        match self.0.first().ok_or(Stop::Incomplete)? {
            b'"' => {
                self.0 = &self.0[1..];
                self.text()
            }
            b'{' | b'[' => Err(Stop::Malformed),
            _ => {
                let end = self.0.iter().position(|byte| b",} ".contains(byte));
                let (value, rest) = self.0.split_at(end.ok_or(Stop::Incomplete)?);
                self.0 = rest;
                Ok(value)
            }
        }
    }

    /// The rest of a string, of which the first quote was taken.
    fn text(&mut self) -> Result<&'a [u8], Stop> {
        let end = self.0.iter().position(|byte| *byte == b'"');
        let (text, rest) = self.0.split_at(end.ok_or(Stop::Incomplete)?);
        self.0 = &rest[1..];
        if text.contains(&b'\\') {
            return Err(Stop::Malformed);
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scanned(text: &str) -> Vec<Scanned> {
        let scan = |size: usize| {
            let (mut scanner, mut found) = (JsonHeaderScanner::default(), Vec::new());
            for piece in text.as_bytes().chunks(size) {
                scanner.scan(piece, |scanned| found.push(scanned));
            }
            found
        };
        let whole = scan(usize::MAX);
        for size in [1, 2, 3, 7, 64] {
            assert_eq!(scan(size), whole, "{size}");
        }
        whole
    }

    #[test]
    fn header_of_each_message_is_reported_whatever_the_white_space() {
        let header = |revision| Scanned::Header {
            cluster_id: u64::MAX,
            revision,
        };
        let compact = r#"{"header":{"cluster_id":"18446744073709551615","member_id":"3","revision":"7","raft_term":"2"},"count":"1"}"#;
        assert_eq!(scanned(compact), [header(7)]);
        assert_eq!(scanned(&compact.replace(',', ", ")), [header(7)]);
        assert_eq!(scanned(&compact.replace(':', ": ")), [header(7)]);
        let newer = compact.replace(r#""2"}"#, r#""2","leader_id":"9","share":0.5,"is_new":true}"#);
        assert_eq!(scanned(&newer), [header(7)]);
        let long = compact.replace("count", &"x".repeat(9000));
        assert_eq!(scanned(&long), [header(7)]);
        let stream = [7, 8].map(|revision| {
            let message = compact.replace(r#""7""#, &format!("\"{revision}\""));
            format!("{{\"result\":{message}}}\n")
        });
        assert_eq!(scanned(&stream.concat()), [header(7), header(8)]);
        assert_eq!(scanned(&stream.join("\n")), [header(7), header(8)]);
    }

    #[test]
    fn header_is_reported_before_its_line_ends() {
        let (mut scanner, mut found) = (JsonHeaderScanner::default(), Vec::new());
        scanner.scan(br#"{"header":{"revision":"7"},"kvs":["#, |scanned| {
            found.push(scanned)
        });
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn errors_and_messages_without_a_revision_show_nothing() {
        for text in [
            "",
            "{}",
            "\n\n",
            r#"{"header":{}}"#,
            r#"{"header":{"cluster_id":"1","raft_term":"2"},"members":[]}"#,
            r#"{"code":3, "message":"json: cannot unmarshal number"}"#,
            r#"{"error":"etcdserver: no leader","code":14}"#,
            "{\"error\":{\"grpc_code\":14}}\n",
        ] {
            assert_eq!(scanned(text), [], "{text}");
        }
    }

    #[test]
    fn text_that_cannot_be_read_is_reported() {
        for text in [
            r#"{"kvs":[],"header":{"revision":"7"}}"#,
            r#"{"header":{"inner":{},"revision":"7"}}"#,
            r#"{"header":{"revision":"x"}}"#,
            r#"{"header":{"name":"\"","revision":"7"}}"#,
            r#"["header"]"#,
            "\u{1f}\u{8b}",
            "{\"header\":{\"revision\":\n\"7\"}}",
        ] {
            assert!(scanned(text).contains(&Scanned::Malformed), "{text}");
        }
        let long = format!(
            r#"{{"header":{{"name":"{}","revision":"7"}}}}"#,
            "x".repeat(HEAD_BYTES)
        );
        assert_eq!(scanned(&long), [Scanned::Malformed]);
    }
}
