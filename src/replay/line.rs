//! Line of an access log: a read, or the reason for which it is skipped.

use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;

use etcd_wire::etcdserverpb::RangeRequest;
use etcd_wire::grpc::{Method, is_json_of};

/// A read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RecordedRead {
    pub(super) arrived_at: SystemTime,
    pub(super) is_stream: bool,
    pub(super) prefix: String,
    pub(super) request: RangeRequest,
}

/// Why a line is passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Passed {
    /// A call that is no read, such as a write.
    NoRead,
    /// A stream of watches.
    Watch,
    /// A read without its key.
    WithoutKey,
    /// A read whose key was too long to be logged.
    KeyTooLong,
    /// A read whose request was not understood when it was recorded.
    NotUnderstood,
}

impl Passed {
    /// Name in the report.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Passed::NoRead => "writes and other calls that are no reads",
            Passed::Watch => "watches",
            Passed::WithoutKey => "reads without their key (--access-log-keys was off)",
            Passed::KeyTooLong => "reads of a key that was too long to be logged",
            Passed::NotUnderstood => "reads whose request was not understood",
        }
    }
}

/// Fields of a line as far as they matter here.
#[derive(Deserialize)]
struct LineFields {
    time: String,
    method: String,
    prefix: Option<String>,
    key: Option<String>,
    key_base64: Option<String>,
    range_end: Option<String>,
    range_end_base64: Option<String>,
    #[serde(default)]
    key_too_long: bool,
    #[serde(default)]
    limit: i64,
    #[serde(default)]
    revision: i64,
    #[serde(default)]
    sort_order: i32,
    #[serde(default)]
    sort_target: i32,
    #[serde(default)]
    serializable: bool,
    #[serde(default)]
    keys_only: bool,
    #[serde(default)]
    count_only: bool,
    #[serde(default)]
    min_mod_revision: i64,
    #[serde(default)]
    max_mod_revision: i64,
    #[serde(default)]
    min_create_revision: i64,
    #[serde(default)]
    max_create_revision: i64,
}

/// Reads one line.
///
/// # Errors
/// What is wrong with it.
pub(super) fn parse(line: &str) -> Result<Result<RecordedRead, Passed>, String> {
    let mut fields: LineFields = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let arrived_at = humantime::parse_rfc3339(&fields.time)
        .map_err(|error| format!("the time {:?}: {error}", fields.time))?;
    let is_stream = match method_of(&fields.method) {
        Method::Range => false,
        Method::RangeStream => true,
        Method::Watch | Method::JsonWatch => return Ok(Err(Passed::Watch)),
        _ => return Ok(Err(Passed::NoRead)),
    };
    if fields.key_too_long {
        return Ok(Err(Passed::KeyTooLong));
    }
    let Some(prefix) = fields.prefix.take() else {
        return Ok(Err(Passed::NotUnderstood));
    };
    let Some(key) = key_of(fields.key.take(), fields.key_base64.take())? else {
        return Ok(Err(Passed::WithoutKey));
    };
    let range_end = key_of(fields.range_end.take(), fields.range_end_base64.take())?;
    Ok(Ok(RecordedRead {
        arrived_at,
        is_stream,
        prefix,
        request: RangeRequest {
            key,
            range_end: range_end.unwrap_or_default(),
            limit: fields.limit,
            revision: fields.revision,
            sort_order: fields.sort_order,
            sort_target: fields.sort_target,
            serializable: fields.serializable,
            keys_only: fields.keys_only,
            count_only: fields.count_only,
            min_mod_revision: fields.min_mod_revision,
            max_mod_revision: fields.max_mod_revision,
            min_create_revision: fields.min_create_revision,
            max_create_revision: fields.max_create_revision,
        },
    }))
}

/// Method of a call that is logged as `service/name`, or as a path of the JSON gateway. A Range in JSON is played as a
/// Range.
fn method_of(logged: &str) -> Method {
    match logged.strip_prefix('/') {
        None => Method::from_path(&format!("/{logged}")),
        Some(_) if is_json_of(logged, Method::Range) => Method::Range,
        Some(_) if logged.ends_with("/watch") => Method::JsonWatch,
        Some(_) => Method::Other,
    }
}

/// A key that is written as text or in base64.
fn key_of(text: Option<String>, base64: Option<String>) -> Result<Option<Bytes>, String> {
    match (text, base64) {
        (Some(text), _) => Ok(Some(text.into())),
        (None, Some(base64)) => match STANDARD.decode(&base64) {
            Ok(key) => Ok(Some(key.into())),
            Err(error) => Err(format!("a key in base64: {error}")),
        },
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(fields: &str) -> Passed {
        let line = format!("{{\"time\":\"2026-01-01T00:00:00.000001Z\",{fields}}}");
        parse(&line).unwrap().unwrap_err()
    }

    #[test]
    fn line_of_a_read_is_its_request() {
        let line = "{\"time\":\"2026-01-01T00:00:00.000001Z\",\"method\":\"etcdserverpb.KV/RangeStream\",\
                    \"prefix\":\"/a/\",\"key\":\"/a/\\u0000\",\"range_end_base64\":\"/w==\",\"limit\":3,\"keys_only\":true,\
                    \"a_later_field\":1}";
        let read = parse(line).unwrap().unwrap();
        assert!(read.is_stream && read.request.keys_only && read.request.limit == 3);
        assert_eq!(
            (&read.request.key[..], &read.request.range_end[..]),
            (&b"/a/\0"[..], &[0xff][..])
        );
    }

    #[test]
    fn lines_of_other_calls_are_passed_over() {
        let range = "\"method\":\"etcdserverpb.KV/Range\"";
        for (fields, expected) in [
            (
                "\"method\":\"etcdserverpb.KV/Put\",\"key\":\"k\"".to_owned(),
                Passed::NoRead,
            ),
            ("\"method\":\"/v3/kv/txn\"".to_owned(), Passed::NoRead),
            (
                "\"method\":\"etcdserverpb.Watch/Watch\"".to_owned(),
                Passed::Watch,
            ),
            (format!("{range},\"prefix\":\"\""), Passed::WithoutKey),
            (
                format!("{range},\"prefix\":\"\",\"key_too_long\":true"),
                Passed::KeyTooLong,
            ),
            (range.to_owned(), Passed::NotUnderstood),
        ] {
            assert_eq!(passed(&fields), expected, "{fields}");
        }
    }

    #[test]
    fn broken_lines_are_refused() {
        for line in [
            "",
            "{",
            "[]",
            "{\"time\":\"now\",\"method\":\"x\"}",
            "{\"method\":\"x\"}",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
